"""`bench.serve` through its command line, on a policy with which nothing is worth measuring."""

import copy
import dataclasses
import json

import pytest

from bench.serve import __main__ as serve
from bench.serve import verdict
from bench.serve.traffic import Request, traffic

# Two slots, and few lengths of a prompt and what follows: few programs to compile.
SETTINGS = (
    "engine.max_batch=2 engine.max_len=64 engine.prefill_chunk=16 engine.warm_up=none "
    "engine.chunk_tokens=4 speculation.strategy=2_1_3"
).split()
LOAD = (
    "load --requests 40 --clients 8 --prompts 6 --longest 16 --repeats 2 --turn_requests 12 "
    "--disconnects 0.2 --malformed 0.2 --memory_bound 10"
).split()
THROUGHPUT = "throughput --requests 6 --clients 3 --prompts 6 --longest 16 --repeats 2".split()


def run(argv, policy, out, more=()):
    serve.main([*argv, "--model", str(policy), "--out", str(out), "--settings", *SETTINGS, *more])
    figures = json.loads(out.read_text())["figures"]
    return {name: figure["value"] for name, figure in figures.items()}


@pytest.fixture(scope="module")
def loaded(thin_policy, tmp_path_factory):
    """Values of a tiny load test, and what it judged."""
    kept = []
    with pytest.MonkeyPatch.context() as patch:
        honest = serve.judge
        patch.setattr(serve, "judge", lambda *given: kept.append(given) or honest(*given))
        out = tmp_path_factory.mktemp("serve") / "load.json"
        choices = ["controller=bandit", "strategies=[off, 2_1_3]"]
        values = run(LOAD, thin_policy, out, [f"speculation.control.{c}" for c in choices])
    assert str(thin_policy) not in json.dumps(json.loads(out.read_text())["settings"]["server"])
    return values, kept[0]


@pytest.mark.slow  # a whole bench, of half a minute
def test_a_load_test_loses_nothing_and_finds_every_answer_right(loaded):
    values, _ = loaded
    for name in ("requests_lost", "requests_wrong", "malformed_accepted", "pairs_unlike"):
        assert values[name] == 0, name
    parts = ("requests_completed", "requests_left", "malformed")
    assert sum(values[name] for name in parts) == values["requests"] == 40
    assert min(values[name] for name in (*parts, "pairs_streamed_and_not")) > 0
    assert values["pages_used/before"] == values["pages_used/after"] == 0
    for arm in ("load", "on", "off"):
        assert values[f"tokens_per_second/{arm}"] > 0
        for what in ("first_token_seconds", "inter_token_seconds"):
            assert 0 < values[f"{what}/{arm}/p50"] <= values[f"{what}/{arm}/p99"]
    assert values["tokens_per_second_ratio/on/off"] > 0 and values["memory_bytes/end"] > 1e7


def first(requests, wanted):
    return next(i for i, request in enumerate(requests) if wanted(request))


@pytest.mark.slow  # a whole bench, of half a minute
def test_what_is_lost_or_wrong_is_found(loaded):
    plain, requests, answers = loaded[1]
    stays = [isinstance(request, Request) and not request.disconnects for request in requests]
    whole = first(range(40), lambda i: stays[i] and answers[i].texts[0] and not requests[i].stream)
    broken = first(requests, lambda request: not isinstance(request, Request))

    def judged(index, change):
        changed = copy.deepcopy(answers)
        change(changed[index])
        return verdict.judge(plain, requests, changed)

    def other_token(answer):
        answer.tokens[0][0] = (answer.tokens[0][0] + 1) % 200

    def no_end(answer):
        answer.reasons[0] = None

    def other_text(answer):
        answer.texts[0] += "."

    def no_error(answer):
        answer.status = 200

    def received(tokens, text):
        def change(answer):
            answer.tokens, answer.texts = [tokens], [text]

        return change

    assert judged(whole, lambda answer: None).wrong == 0
    assert judged(whole, other_token).wrong == 1
    assert judged(whole, other_text).wrong == 1
    assert judged(whole, no_end).lost == 1
    assert judged(broken, no_error).accepted == 1
    leaves = first(requests, lambda a: isinstance(a, Request) and a.disconnects and not a.chat)
    asked = requests[leaves].params
    [output] = plain.generate([requests[leaves].prompt], [dataclasses.replace(asked, n=1)])
    tokens, text = output.samples[0].token_ids, output.samples[0].text
    alone = list(requests)
    alone[leaves] = dataclasses.replace(
        requests[leaves], options={**requests[leaves].options, "n": 1}
    )

    def judged_beginning(change):
        changed = copy.deepcopy(answers)
        change(changed[leaves])
        return verdict.judge(plain, alone, changed)

    assert judged_beginning(received(tokens[:2], text[:1])).wrong == 0
    assert judged_beginning(received([(tokens[0] + 1) % 200], "")).wrong == 1
    assert judged_beginning(received(tokens[:2], text[:1] + "\x00")).wrong == 1
    assert judged_beginning(received(tokens[:2], "")).left == sum(
        isinstance(request, Request) and request.disconnects for request in requests
    )
    pair = first(range(40), lambda i: i % 4 == 3 and stays[i] and stays[i - 1])
    assert judged(pair, other_text).unlike == 1


@pytest.mark.slow  # a whole bench, of half a minute
def test_a_load_test_that_goes_wrong_fails(loaded):
    figures = {name: {"value": value} for name, value in loaded[0].items()}
    assert serve.failures(figures, 10) == []
    for name, value in {"requests_lost": 1, "pages_used/after": 3, "memory_growth": 11}.items():
        assert len(serve.failures({**figures, name: {"value": value}}, 10)) == 1


@pytest.mark.slow  # a server and two engines of its own
def test_throughput_compares_equal_tokens_and_says_whether_enough_is_left(
    thin_policy, tmp_path, capsys
):
    out = tmp_path / "throughput.json"
    values = run(THROUGHPUT, thin_policy, out, ["speculation.telemetry=false"])
    share = values["tokens_per_second_ratio/http/batch"]
    assert values["tokens_per_second_ratio/target"] == serve.TARGET == 0.95
    word = "met" if share >= 0.95 else "missed"
    assert f"target 0.95x {word}: {share:.3f}x" in capsys.readouterr().out
    assert values["requests_different"] == 0 and values["tokens"] > 6
    http, batch = (values[f"tokens_per_second/{arm}"] for arm in ("http", "batch"))
    assert 0 < values["tokens_per_second_ratio/http/batch"] < 10 * http / batch


def test_traffic_is_of_all_kinds_and_the_same_for_a_seed():
    made = traffic(2000, ["1+1="], ["off", "2_1_3"], 3, 64, 0.1, 0.05)
    assert made == traffic(2000, ["1+1="], ["off", "2_1_3"], 3, 64, 0.1, 0.05)
    requests = [request for request in made if isinstance(request, Request)]
    assert 70 <= 2000 - len(requests) <= 130
    assert 160 <= sum(request.disconnects for request in requests) <= 240
    assert {request.speculative for request in requests} == {None, True, False, "off", "2_1_3"}
    options = {name for request in requests for name in request.options}
    assert {"n", "stop", "logprobs", "presence_penalty", "top_p", "min_tokens"} <= options
    assert {(request.chat, request.stream) for request in requests} == {
        (a, b) for a in (0, 1) for b in (0, 1)
    }
