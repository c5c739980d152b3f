"""Weights, sleep and wake, and what goes wrong, while requests run."""

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import jax
import jax.numpy as jnp
import numpy as np
import openai
import pytest
from serving import BATCH, KEY, Server, config, served

from bench.programs import change_dense
from serve.admin import weights_info
from specjax import LLM, EngineConfig
from specjax.checkpoint import huggingface as hf
from specjax.checkpoint.convert import convert
from specjax.checkpoint.store import Checkpointer
from specjax.drafts.mtp import init_head_params

PROMPT = "17+25+8="
ASK = {"model": "tiny", "prompt": PROMPT, "seed": 3, "max_tokens": 60}
MORE = {"ignore_eos": True, "return_token_ids": True, "return_spec_details": True}


@pytest.fixture(scope="module")
def weights(thin_policy):
    """(config, policy, head) of the files."""
    return hf.load_checkpoint(thin_policy, "float32")


@pytest.fixture
def restored(server: Server, weights):
    """A server that has its own weights again afterwards."""
    yield server
    server.post("/wake")
    answer = server.post("/update_weights", json={"path": server.llm_path})
    assert answer.status_code == 200, answer.text


@pytest.fixture(autouse=True)
def path_is_known(server, thin_policy):
    server.llm_path = str(thin_policy)


def ask(server: Server, **changes):
    answer = server.client().completions.create(**{**ASK, **changes}, extra_body=MORE)
    return answer.choices[0]


def changed(policy):
    """The same shapes, other tokens, and another checksum, which does not see the order."""
    return jax.tree.map(lambda x: 1.25 * x[..., ::-1], policy)


@pytest.fixture(scope="module")
def others(tmp_path_factory, weights):
    """The changed policy and another head: as safetensors, as a training run, the head alone."""
    cfg, policy, _ = weights
    policy, head = changed(policy), init_head_params(cfg, 7)
    where = tmp_path_factory.mktemp("others")
    hf.save_checkpoint(where / "hf", cfg, policy, head)
    with Checkpointer(where / "run") as checkpoints:
        checkpoints.save(4, {"policy": policy, "draft": head}, {}, block=True)
    hf.save_head(where / "head.safetensors", cfg, head)
    return where


@contextlib.contextmanager
def ended(server: Server):
    """What the engine's steps bring, as (job, sample) by seed."""
    found, step = {}, server.llm.engine.step

    def kept(wait=True):
        events = step(wait)
        jobs = [event.sequence.job for event in events]
        found.update({j.params.seed: (j, e.sample) for j, e in zip(jobs, events, strict=True)})
        return events

    server.llm.engine.step = kept
    try:
        yield found
    finally:
        server.llm.engine.step = step


@pytest.fixture(scope="module")
def replay(weights):
    """Decodes one sample plainly, by the weights that a server's sample had, changed where it was.

    A chunk is a token, so that they can be changed after any.
    """
    how = EngineConfig(chunk_tokens=1, stretch=1, prefill_chunk=16, page_size=16)
    engine = LLM((weights[0], weights[1], None), None, max_batch=1, max_len=96, engine=how).engine

    def tokens(job, versions, by_version, running):
        engine.set_params(by_version[versions[0][1]])
        sequence = engine.add(job)
        for at, version in versions[1:]:
            for _ in range(at):
                engine.step()
            engine.set_params(by_version[version], running=running)
            assert len(sequence.tokens) == at
        while engine.has_work:
            for event in engine.step():
                sample = event.sample
        return sample.token_ids

    tokens.engine = engine
    return tokens


@pytest.mark.slow
@pytest.mark.parametrize("running", ["recompute", "finish", "keep"])
def test_weights_change_under_load_and_no_token_is_lost_or_wrong(
    restored: Server, others, weights, replay, running
):
    """Each sample is plain decoding's, under the weights that `running` promises, where it says."""
    old, new = weights[1], changed(weights[1])
    answers, errors, swapped = {}, [], threading.Event()
    before, version = ask(restored), restored.llm.engine.version

    def client(number):
        try:
            for turn in range(100):
                last = swapped.is_set()
                seed = 1000 * number + turn
                answers[seed] = ask(restored, seed=seed, max_tokens=40).token_ids
                if last:
                    return
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=client, args=(i,)) for i in range(BATCH + 1)]
    with ended(restored) as found, restored.slowly(0.05):
        for thread in threads:
            thread.start()
        restored.settles(lambda m: len(answers) > 1 and m["num_requests_running"] > 0)
        asked = {"path": str(others / "hf"), "running": running}
        said = restored.post("/update_weights", json=asked)
        swapped.set()
        for thread in threads:
            thread.join()
    assert said.status_code == 200 and not errors, (said.text, errors)
    assert said.json()["version"] == version + 1
    assert {seed: sample.token_ids for seed, (_, sample) in found.items()} == answers
    by_version, by_history = {version: old, version + 1: new}, {}
    for job, sample in found.values():
        by_history.setdefault(len(sample.weight_versions), []).append((job, sample))
    assert set(by_history) == ({1} if running == "finish" else {1, 2})
    whole = sorted(by_history[1], key=lambda pair: pair[1].weight_versions[0][1])
    assert {pair[1].weight_versions[0][1] for pair in whole} == {version, version + 1}
    for job, sample in [*whole[:2], *whole[-2:], *by_history.get(2, ())]:
        expected = replay(job, sample.weight_versions, by_version, running)
        assert sample.token_ids == expected, sample.weight_versions
    assert ask(restored).token_ids != before.token_ids
    sums = replay.engine.runner.weights.checksums
    assert said.json()["checksums"]["policy"] == f"{sums['policy']:08x}"


def test_a_training_run_and_a_head_alone_are_taken(restored: Server, others):
    own = restored.get("/server_info").json()["weights"]["checksums"]
    before = ask(restored)
    head = restored.post(
        "/update_weights", json={"path": str(others / "head.safetensors"), "what": "head"}
    )
    assert head.status_code == 200, head.text
    sums = head.json()["checksums"]
    assert sums["policy"] == own["policy"] and sums["head"] != own["head"]
    after = ask(restored)
    assert after.token_ids == before.token_ids, "a head changes no token"
    both = restored.post("/update_weights", json={"path": str(others / "run"), "step": 4})
    assert both.status_code == 200, both.text
    assert both.json()["checksums"]["head"] == sums["head"]
    assert both.json()["checksums"]["policy"] != own["policy"]
    again = restored.post("/update_weights", json={"path": str(others / "hf")}).json()
    assert again["checksums"] == both.json()["checksums"], "the same weights in another layout"


def test_a_head_alone_touches_no_sample_that_runs_and_no_policy_is_read(
    restored: Server, others, monkeypatch
):
    before, answers, read, preempted = ask(restored), [], [], []
    restore, engine = Checkpointer.restore, restored.llm.engine
    monkeypatch.setattr(
        Checkpointer,
        "restore",
        lambda self, step, wanted: read.append(set(wanted)) or restore(self, step, wanted),
    )
    preempt = engine.preempt
    monkeypatch.setattr(engine, "preempt", lambda *one: preempted.append(one) or preempt(*one))
    policy = restored.llm.engine.runner.weights.policy
    thread = threading.Thread(target=lambda: answers.append(ask(restored)))
    with ended(restored) as found:
        with restored.slowly():
            thread.start()
            restored.settles(lambda m: m["num_requests_running"] > 0)
            asked = {"path": str(others / "run"), "what": "head"}
            said = restored.post("/update_weights", json=asked)
            assert not answers
        thread.join()
    assert said.status_code == 200 and said.json()["head_updated"], said.text
    [(_, sample)] = found.values()
    version = said.json()["version"]
    assert sample.weight_versions == ((0, version),), "those of the policy are what they were"
    assert answers[0].token_ids == before.token_ids and not preempted
    assert read == [{"draft"}] and restored.llm.engine.runner.weights.policy is policy


def test_nan_in_the_head_slows_and_alarms_and_changes_no_token(
    restored: Server, tmp_path, weights, caplog
):
    cfg, _, head = weights
    before = ask(restored)
    hf.save_head(tmp_path / "nan.safetensors", cfg, jax.tree.map(lambda x: x * jnp.nan, head))
    asked = {"path": str(tmp_path / "nan.safetensors"), "what": "head"}
    answer = restored.post("/update_weights", json=asked).json()
    assert answer["finite"] == {"policy": True, "head": False}
    assert "the draft's weights are not finite" in caplog.text
    restored.settles(lambda m: m["weight_alarms"] == 1)
    health = restored.get("/health")
    assert health.status_code == 200
    assert health.json()["alarms"] == ["the draft's weights are not finite"]
    after = ask(restored)
    assert after.token_ids == before.token_ids and after.spec_details["drafted"] > 0


BAD = {
    "nothing there": ({"path": "/nowhere"}, "no such file"),
    "no policy in it": ({"path": "head.safetensors"}, "expected a checkpoint directory"),
    "a step that is not there": ({"path": "run", "step": 9}, "9"),
    "a damaged file": ({"path": "broken"}, "damaged"),
    "another model": ({"path": "larger"}, "rope.theta"),
    "a run of another model": ({"path": "run of larger"}, "rope.theta"),
    "a policy of NaN": ({"path": "nan"}, "not finite"),
}


def test_weights_that_do_not_fit_are_refused_and_the_old_ones_stay(server, others, weights):
    cfg, policy, head = weights
    hf.save_checkpoint(others / "larger", change_dense(cfg, rope_theta=5.0), policy, head)
    convert(others / "larger", others / "run of larger", "orbax", "both")
    hf.save_checkpoint(others / "nan", cfg, jax.tree.map(lambda x: x * np.nan, policy), head)
    hf.save_checkpoint(others / "broken", cfg, policy, head)
    (others / "broken" / "model.safetensors").write_bytes(b"nothing")
    before = weights_info(server.llm)
    for what, (body, message) in BAD.items():
        body = {**body, "path": str(others / body["path"])}
        answer = server.post("/update_weights", json=body)
        assert answer.status_code == 400 and message in answer.text, (what, answer.text)
        assert answer.json()["error"]["param"] == "path"
    assert weights_info(server.llm) == before


def test_only_the_admin_key_may_change_anything(server: Server):
    for path in ("/update_weights", "/sleep", "/wake"):
        assert server.post(path, key=KEY, json={"path": "x"}).status_code == 401
        assert httpx.post(server.url + path).status_code == 401


def test_sleep_frees_the_device_and_wake_keeps_the_head(restored: Server):
    before, info = ask(restored), restored.get("/server_info").json()["weights"]
    late = []
    thread = threading.Thread(target=lambda: late.append(ask(restored, max_tokens=50)))
    with restored.slowly(0.1):
        thread.start()
        restored.settles(lambda m: m["num_requests_running"] > 0)
        assert restored.post("/sleep").json() == {"status": "asleep"}
        thread.join()
    assert len(late[0].token_ids) == 50, "what runs finishes first"
    runner, llm = restored.llm.engine.runner, restored.llm
    held = (runner.weights.policy, runner.weights.head, runner.state, llm.params, llm.head)
    assert not jax.tree.leaves(held)
    assert restored.get("/health").json()["status"] == "asleep"
    with pytest.raises(openai.InternalServerError, match="asleep"):
        ask(restored)
    assert restored.post("/update_weights", json={"path": "x"}).status_code == 409
    built = restored.metrics()["compilations_total"]
    woken = restored.post("/wake").json()
    assert woken["checksums"] == info["checksums"] and woken["status"] == "ok"
    after = ask(restored)
    assert after.token_ids == before.token_ids
    assert after.spec_details == before.spec_details, "the head drafts what it drafted"
    assert restored.metrics()["compilations_total"] == built


def test_without_an_admin_key_all_are_refused(thin_policy, weights):
    """And an engine that dies is told of: by every answer, and by /health."""
    cfg = config(thin_policy, admin_key=None, speculation={"strategy": "off"})
    how = EngineConfig(chunk_tokens=8, stretch=1, prefill_chunk=16, page_size=16)
    llm = LLM((*weights[:2], None), None, max_batch=2, max_len=64, engine=how)

    step, served_last = llm.engine.step, []

    def breaks(wait=True):
        if served_last:
            raise RuntimeError("the device is gone")
        served_last.extend(step(wait))
        return list(served_last)

    def ask_for(tokens: int):
        return client.completions.create(
            model="tiny", prompt=[5, 6], max_tokens=tokens, extra_body={"ignore_eos": True}
        )

    with served(cfg, llm) as server, ThreadPoolExecutor(2) as threads:
        assert server.post("/sleep").status_code == 403
        client = server.client()
        llm.engine.step = breaks
        asked = [threads.submit(ask_for, tokens) for tokens in (60, 1)]
        ended = [future for future in asked if future.exception() is None]
        assert len(ended) == len(served_last) > 0, "what had ended before is whole"
        for _ in range(2):
            with pytest.raises(openai.InternalServerError, match="the device is gone"):
                client.completions.create(model="tiny", prompt=[5, 6], max_tokens=4)
        health = server.get("/health")
        assert health.status_code == 503 and "the device is gone" in health.json()["error"]
        assert server.app.state.thread.outstanding == 0
