"""/server_info before the first request and after some, whatever chooses the strategy."""

import threading
import time

import pytest
from serving import KEY, config, served
from starlette.testclient import TestClient

from serve import __main__ as program
from serve.api import create_app
from specjax import LLM, ControlConfig, EngineConfig, SpecConfig
from specjax.control import EmaConfig
from specjax.engine.programs import Executables

STRATEGIES = ("off", "1_1_2", "2_1_3")
HEADERS = {"Authorization": f"Bearer {KEY}"}


def ask(client, path, **body) -> dict:
    answer = client.request("POST" if body else "GET", path, json=body or None, headers=HEADERS)
    assert answer.status_code == 200, answer.text
    return answer.json()


def llm_of(policy, spec="2_1_3", replicas=1, **control) -> LLM:
    return LLM(
        policy,
        SpecConfig(spec),
        max_batch=1,
        max_len=64,
        control=ControlConfig(**control) if control else None,
        replicas=replicas,
        engine=EngineConfig(prefill_chunk=16, stretch=1),
    )


@pytest.mark.parametrize(
    ("how", "strategy", "steps"),
    [
        ({"spec": "off"}, "off", 0),
        ({}, "2_1_3", 2),
        ({"spec": "2x2"}, "2x2", 2),
        ({"controller": "static", "strategies": ("1_1_2",)}, "1_1_2", 1),
        ({"controller": "static", "initial": "2_1_3", "bs_threshold": 2}, "2_1_3", 2),
        ({"controller": "static", "initial": "2_1_3", "bs_threshold": 0}, "off", 0),
        ({"controller": "ema"}, "3_1_4", 3),
        ({"controller": "ema", "initial": "6_1_7"}, "7_1_8", 7),
        ({"controller": "ema", "initial": "off", "bs_threshold": 4}, "1_1_2", 1),
        ({"controller": "bandit", "strategies": STRATEGIES[::-1]}, "2_1_3", 2),
        ({"controller": "goodput", "strategies": STRATEGIES}, "2_1_3", 2),  # by its guesses
    ],
    ids=str,
)
def test_it_names_the_tier_before_the_first_request(thin_policy, how, strategy, steps):
    llm = llm_of(thin_policy, **how)
    with TestClient(create_app(config(thin_policy), llm)) as client:
        [state] = ask(client, "/server_info")["internal_states"]
    assert llm.engine.runner.compilations == 0, "no request has come"
    assert state == {
        "speculative_num_steps": steps,
        "avg_spec_accept_length": None,
        "strategy": strategy,
        "num_running_reqs": 0,
        "num_waiting_reqs": 0,
        "asleep": False,
    }


@pytest.mark.slow
def test_there_is_an_entry_for_each_replica_with_figures_of_its_own(thin_policy):
    """The tier of one goes down, for it ran what a random head drafts; the other had no request."""
    tiers = EmaConfig(candidate_steps=(1, 2))
    llm = llm_of(thin_policy, replicas=2, controller="ema", initial="2_1_3", ema=tiers)
    with TestClient(create_app(config(thin_policy), llm)) as client:
        states = ask(client, "/server_info")["internal_states"]
        assert [s["speculative_num_steps"] for s in states] == [2, 2]
        ask(
            client, "/v1/completions", model="tiny", prompt=[5, 6, 7], max_tokens=40,
            ignore_eos=True, temperature=1.0, seed=0,
        )  # fmt: skip
        info = ask(client, "/server_info")
    states = info["internal_states"]
    ran = [state for state in states if state["avg_spec_accept_length"] is not None]
    assert len(ran) == 1 and 1 <= ran[0]["avg_spec_accept_length"] < 2
    assert ran[0]["speculative_num_steps"] == 1 and ran[0]["strategy"] == "1_1_2"
    [other] = [state for state in states if state is not ran[0]]
    assert (other["speculative_num_steps"], other["strategy"]) == (2, "2_1_3")
    assert info["num_queued_reqs"] == 0


def test_requests_are_answered_while_programs_are_compiled(thin_policy, monkeypatch):
    release, build, begun = threading.Event(), Executables._build, []

    def held(store, key, *rest):
        begun.append(key)
        if len(begun) > 3:  # one program of each kind
            release.wait(60)
        return build(store, key, *rest)

    monkeypatch.setattr(Executables, "_build", held)
    engine, speculation = {"max_batch": 4, "warm_up": "sampled"}, {"strategy": "off"}
    settings = config(thin_policy, engine=engine, speculation=speculation)
    with served(settings, program._load(settings)) as server:

        def ask():
            body = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 20, "seed": 3}
            answer = server.post("/v1/completions", json=body | {"ignore_eos": True})
            assert answer.status_code == 200, answer.text
            return answer.json()["choices"], server.metrics()["stand_in_rounds_total"]

        def left():
            return server.get("/health").json()["programs"]["to_compile"]

        first, rounds = ask()
        assert left() and rounds
        release.set()
        until = time.monotonic() + 120
        while left() and time.monotonic() < until:
            time.sleep(0.05)
        assert ask() == (first, rounds)
