"""OpenAI's own client against a server on loopback."""

import asyncio
import functools
import http.client
import json
import re
import tomllib
from pathlib import Path

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families
from serving import BATCH, KEY, MAX_LEN, QUEUE, Server

from specjax import SamplingParams

ROOT = Path(__file__).resolve().parents[2]
PROMPT = "17+25+8="
LONG = {"ignore_eos": True, "return_token_ids": True, "return_spec_details": True}


def samples_of(plain, prompt, **params):
    [output] = plain.generate([prompt], SamplingParams(**params))
    return output.samples


def pieces_of(stream):
    """(text, tokens, finish reasons) of each choice of a stream."""
    found = {}
    for event in stream:
        for choice in event.choices:
            text, tokens, ends = found.setdefault(choice.index, ([], [], []))
            is_chat = hasattr(choice, "delta")
            text.append((choice.delta.content if is_chat else choice.text) or "")
            tokens += getattr(choice, "token_ids", None) or []
            ends += [choice.finish_reason] if choice.finish_reason else []
    return [("".join(t), ids, ends) for _, (t, ids, ends) in sorted(found.items())]


def test_completions_are_the_samples_of_the_batch_api(server: Server, plain):
    expected = samples_of(plain, PROMPT, max_tokens=20, seed=7, n=3, temperature=0.8, top_p=0.9)
    answer = server.client().completions.create(
        model="tiny", prompt=PROMPT, max_tokens=20, seed=7, n=3, temperature=0.8, top_p=0.9,
        extra_body={"return_token_ids": True},
    )  # fmt: skip
    assert [c.token_ids for c in answer.choices] == [s.token_ids for s in expected]
    assert [c.text for c in answer.choices] == [s.text for s in expected]
    assert [c.finish_reason for c in answer.choices] == [s.finish_reason for s in expected]
    ids = plain.tokenizer.encode(PROMPT)
    written = sum(len(s.token_ids) for s in expected)
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(ids), written)
    assert usage.total_tokens == len(ids) + written
    assert answer.object == "text_completion" and answer.id.startswith("cmpl-")
    assert len({c.text for c in answer.choices}) > 1


def test_several_prompts_and_token_ids_are_taken(server: Server, plain):
    client, ids = server.client(), plain.tokenizer.encode(PROMPT)
    options = {"model": "tiny", "max_tokens": 12, "seed": 3, "n": 2}
    several = client.completions.create(prompt=[PROMPT, "93+4="], **options)
    alone = [client.completions.create(prompt=p, **options) for p in (ids, "93+4=")]
    texts = [choice.text for answer in alone for choice in answer.choices]
    assert [choice.text for choice in several.choices] == texts
    assert [choice.index for choice in several.choices] == [0, 1, 2, 3]
    lists = client.completions.create(prompt=[ids], **options)
    assert [c.text for c in lists.choices] == texts[:2]


def test_a_chat_is_the_completion_of_what_the_template_makes(server: Server):
    client = server.client()
    asked = {"model": "tiny", "seed": 5, "max_tokens": 15}
    chat = client.chat.completions.create(
        messages=[
            {"role": "system", "content": "add"},
            {"role": "user", "content": [{"type": "text", "text": PROMPT}]},
        ],
        **asked,
    )
    text = client.completions.create(prompt=f"system: add\nuser: {PROMPT}\n", **asked)
    [choice] = chat.choices
    assert choice.message.role == "assistant" and choice.message.content == text.choices[0].text
    assert chat.usage.total_tokens == text.usage.total_tokens and chat.object == "chat.completion"
    whole = client.chat.completions.create(
        messages=[{"role": "user", "content": "1+1="}], model="tiny", seed=1,
        extra_body={"ignore_eos": True},
    )  # fmt: skip
    assert whole.usage.total_tokens == MAX_LEN, "without max_tokens it takes what fits"


def test_a_stream_is_the_answer_in_pieces(server: Server):
    client = server.client()
    asked = {"model": "tiny", "prompt": PROMPT, "max_tokens": 40, "seed": 2, "n": 2}
    whole = client.completions.create(**asked, extra_body=LONG)
    events = list(
        client.completions.create(
            **asked, stream=True, stream_options={"include_usage": True}, extra_body=LONG
        )
    )
    assert events[-1].usage == whole.usage and not events[-1].choices
    assert all(event.usage is None for event in events[:-1])
    assert len(events) > 6, "tokens come as they are committed"
    for (text, tokens, ends), choice in zip(pieces_of(events), whole.choices, strict=True):
        assert (text, tokens, ends) == (choice.text, choice.token_ids, [choice.finish_reason])
    said = [e.choices[0] for e in events[:-1] if e.choices[0].index == 0]
    came = [origin for choice in said for origin in choice.spec_details["origins"]]
    assert came == whole.choices[0].spec_details["origins"] and len(came) == 40
    last = {k: v for k, v in said[-1].spec_details.items() if k != "origins"}
    assert last["rounds"] == came.count("bonus")


def test_a_chat_streams(server: Server):
    client = server.client()
    asked = {"model": "tiny", "messages": [{"role": "user", "content": "9+9="}], "seed": 4}
    whole = client.chat.completions.create(**asked, max_completion_tokens=20)
    events = list(client.chat.completions.create(**asked, max_completion_tokens=20, stream=True))
    assert events[0].choices[0].delta.role == "assistant"
    [(text, _, ends)] = pieces_of(events)
    assert (text, ends) == (whole.choices[0].message.content, [whole.choices[0].finish_reason])
    assert {event.object for event in events} == {"chat.completion.chunk"}


def test_a_seed_gives_the_same_tokens_alone_in_a_crowd_streamed_or_not_speculative_or_not(
    server: Server, plain
):
    """Each answer is plain decoding's, whatever else is served at the same time."""
    prompts = [f"{a}+{b}=" for a, b in ((3, 4), (17, 25), (93, 61), (8, 8), (55, 6))]

    async def crowd():
        client = server.client(openai.AsyncOpenAI)

        async def ask(i):
            options = {"temperature": (1.0, 0.0, 0.7)[i % 3], "seed": i % 7, "max_tokens": 5 + i}
            how = i % 4 in (1, 2)
            more = {**LONG, "speculative": how, "top_k": 50 * (i // 2 % 2)}
            asked = {"model": "tiny", "prompt": prompts[i % 5], **options, "extra_body": more}
            if i % 3:
                answer = await client.completions.create(**asked)
                return answer.choices[0].token_ids
            stream = await client.completions.create(**asked, stream=True)
            return [t async for e in stream for t in getattr(e.choices[0], "token_ids", None) or []]

        return await asyncio.gather(*map(ask, range(24)))

    got = asyncio.run(crowd())
    for i, tokens in enumerate(got):
        [sample] = samples_of(
            plain, prompts[i % 5], temperature=(1.0, 0.0, 0.7)[i % 3], seed=i % 7,
            max_tokens=5 + i, ignore_eos=True, top_k=50 * (i // 2 % 2),
        )  # fmt: skip
        assert tokens == sample.token_ids, i


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_the_text_before_it_and_never_leaks(server: Server, plain, stream):
    [whole] = samples_of(plain, PROMPT, max_tokens=40, seed=11, ignore_eos=True)
    middle = len(whole.text) // 2
    stop = whole.text[middle : middle + 3]
    [expected] = samples_of(plain, PROMPT, max_tokens=40, seed=11, ignore_eos=True, stop=stop)
    asked = {"model": "tiny", "prompt": PROMPT, "max_tokens": 40, "seed": 11, "stop": [stop, "§§"]}
    answer = server.client().completions.create(**asked, stream=stream, extra_body=LONG)
    if stream:
        [(text, tokens, [reason])] = pieces_of(answer)
    else:
        [choice] = answer.choices
        text, tokens, reason = choice.text, choice.token_ids, choice.finish_reason
    assert (text, tokens, reason) == (expected.text, expected.token_ids, "stop")
    assert stop not in text and whole.text.startswith(text)


def test_logprobs_of_completions_are_the_batch_apis(server: Server, plain):
    asked = {"model": "tiny", "prompt": PROMPT, "max_tokens": 8, "seed": 1, "logprobs": 2}
    [sample] = samples_of(
        plain, PROMPT, max_tokens=8, seed=1, logprobs=2, ignore_eos=True
    )  # fmt: skip
    choice = server.client().completions.create(**asked, extra_body=LONG).choices[0]
    assert choice.token_ids == sample.token_ids
    got = choice.logprobs
    assert got.token_logprobs == pytest.approx(sample.logprobs, abs=1e-4)
    assert [max(t.values()) for t in got.top_logprobs] == pytest.approx(
        [max(t.values()) for t in sample.top_logprobs], abs=1e-4
    )
    assert all(token in top for token, top in zip(got.tokens, got.top_logprobs, strict=True))
    places = got.text_offset
    assert len(places) == 8 and places == sorted(places) and places[-1] <= len(choice.text)
    whole = [(t, at) for t, at in zip(got.tokens, places, strict=True) if t[0] not in "<b"]
    assert whole and all(choice.text[at:].startswith(token) for token, at in whole)
    streamed = server.client().completions.create(**asked, stream=True, extra_body=LONG)
    parts = [e.choices[0].logprobs for e in streamed if e.choices[0].logprobs]
    assert [v for part in parts for v in part.token_logprobs] == got.token_logprobs
    assert [o for part in parts for o in part.text_offset] == got.text_offset


def test_logprobs_of_chats_have_bytes(server: Server):
    answer = server.client().chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "1+2="}], max_tokens=30, seed=6,
        logprobs=True, top_logprobs=3, extra_body={"ignore_eos": True},
    )  # fmt: skip
    content = answer.choices[0].logprobs.content
    assert len(content) == 30 and all(len(entry.top_logprobs) == 3 for entry in content)
    written = b"".join(bytes(e.bytes) for e in content if not e.token.startswith("<|"))
    assert written.decode(errors="replace") == answer.choices[0].message.content
    for entry in content:
        values = [top.logprob for top in entry.top_logprobs]
        assert values == sorted(values, reverse=True) and entry.logprob <= values[0] + 1e-6


OPTIONS = {
    "logit_bias": ({"5": 100}, {"logit_bias": {5: 100.0}}),
    "stop_token_ids": (None, None),  # one that is generated
    "min_tokens": (9, None),
    "bad_words": (None, None),  # likewise
    "presence_penalty": (1.9, None),
    "allowed_token_ids": ([20, 21, 22, 23], None),
    "repetition_penalty": (1.9, None),
    "frequency_penalty": (1.5, None),
    "min_p": (0.3, None),
    "top_k": (3, None),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_every_sampling_option_reaches_the_engine(server: Server, plain, name):
    value, theirs = OPTIONS[name]
    base = {"max_tokens": 30, "seed": 8, "ignore_eos": True}
    tokens = samples_of(plain, PROMPT, **base)[0].token_ids
    if name == "stop_token_ids":
        value = tokens[3:4]
    elif name == "min_tokens":
        base["stop_token_ids"] = tokens[3:4]
    elif name == "bad_words":
        texts = {token: plain.tokenizer.decode([token]) for token in tokens}
        encode = functools.partial(plain.tokenizer.encode, add_special_tokens=False)
        value = [next(text for token, text in texts.items() if encode(text) == [token])]
    [sample] = samples_of(plain, PROMPT, **base, **(theirs or {name: value}))
    answer = server.client().completions.create(
        model="tiny", prompt=PROMPT, extra_body={**base, name: value, "return_token_ids": True}
    )
    assert answer.choices[0].token_ids == sample.token_ids
    without = samples_of(plain, PROMPT, **base)[0].token_ids
    assert sample.token_ids != without, f"{name} {value} changes nothing: choose another"


REFUSED = {
    "a temperature below 0": ({"temperature": -1}, "temperature"),
    "an unknown option": ({"temprature": 1}, "temprature"),
    "text where a number belongs": ({"n": "2"}, "n"),
    "too many samples": ({"n": 9}, "n"),
    "no prompt": ({"prompt": []}, "prompt"),
    "an empty prompt": ({"prompt": ""}, None),
    "a token that is not there": ({"prompt": [5, 999]}, None),
    "best_of": ({"best_of": 3}, "best_of"),
    "a suffix": ({"suffix": "."}, "suffix"),
    "min_tokens above max_tokens": ({"min_tokens": 99}, "min_tokens"),
    "an empty stop": ({"stop": [""]}, "stop"),
    "a strategy": ({"speculative": "5_1_6"}, "speculative"),
    "half a character": ({"prompt": "\ud800"}, None),
    "too many prompts": ({"prompt": [[5]] * 65}, "prompt"),
    "too many stop tokens": ({"stop_token_ids": list(range(40))}, None),
    "a bias on nothing": ({"logit_bias": {"9999": 1}}, None),
    "a bias beyond all numbers": ({"logit_bias": {"5": 1e300}}, None),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_served_is_a_400_that_says_why(server: Server, what):
    body, param = REFUSED[what]
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 4, **body}
    answer = server.post("/v1/completions", content=json.dumps(body))
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error" and error["message"]
    if param:
        assert error["param"] == param


def test_errors_are_those_that_openais_client_knows(server: Server):
    client = server.client()
    with pytest.raises(openai.NotFoundError, match="model 'gpt-9' does not exist"):
        client.completions.create(model="gpt-9", prompt=PROMPT)
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="tiny", prompt=PROMPT, max_tokens=MAX_LEN)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(
        openai.AuthenticationError, match="header Authorization: Bearer KEY, got a wrong API"
    ):
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="no", max_retries=0).models.list()
    assert 3 * 8 < BATCH + QUEUE < 5 * 8
    with pytest.raises(openai.BadRequestError, match="prompts times n is 40, .* takes 28"):
        client.completions.create(model="tiny", prompt=[PROMPT] * 5, n=8, max_tokens=2)
    with server.slowly():
        many = {"model": "tiny", "prompt": [PROMPT] * 3, "n": 8, "max_tokens": 60}
        stream = client.completions.create(**many, stream=True, extra_body=LONG)
        with pytest.raises(openai.RateLimitError):
            client.completions.create(**many)
        stream.close()
    big = server.post("/v1/completions", key=KEY, content=b" " * 20_001)
    assert big.status_code == 413 and big.json()["error"]["type"] == "invalid_request_error"

    def unannounced():
        for _ in range(30):
            yield b" " * 1000

    assert server.post("/v1/completions", key=KEY, content=unannounced()).status_code == 413
    for text in (b"{", b"\xff\xfe"):
        error = server.post("/v1/completions", key=KEY, content=text).json()["error"]
        assert "expected a JSON object" in error["message"] and error["param"] is None
    assert server.get("/nowhere").json()["error"]["type"] == "not_found_error"
    assert server.get("/v1/completions").status_code == 405


def test_a_client_that_goes_away_frees_its_pages(server: Server):
    client = server.client()
    before = server.settles(lambda m: m["kv_cache_pages_used"] == 0)
    slow = {"prompt": "1+2=", "max_tokens": 90, "n": 8, "model": "tiny"}
    with server.slowly():
        stream = client.completions.create(**slow, stream=True, extra_body=LONG)
        next(iter(stream))
        stream.close()
        server.settles(lambda m: m["num_requests_running"] + m["num_requests_waiting"] == 0)
        connection = http.client.HTTPConnection(server.url.removeprefix("http://"))
        headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
        body = json.dumps({**slow, "ignore_eos": True})
        connection.request("POST", "/v1/completions", body, headers)
        server.settles(lambda m: m["num_requests_running"] + m["num_requests_waiting"] == 8)
        connection.close()
        after = server.settles(
            lambda m: (
                m["kv_cache_pages_used"] == m["num_requests_running"] == 0
                and m["request_aborted_total"] == before["request_aborted_total"] + 16
            )
        )
    tokens = "generation_tokens_total"
    assert after[tokens] - before[tokens] < 8 * 90, "it stopped long before the end"
    assert after["num_requests_waiting"] == 0
    thread = server.app.state.thread
    assert thread.outstanding == 0 and not (thread._owners or thread._sent), "nothing is left of it"
    assert client.completions.create(model="tiny", prompt=PROMPT, max_tokens=3).usage


def test_the_dashboard_shows_every_metric_and_no_other(server: Server):
    dashboard = json.loads((ROOT / "configs/grafana.json").read_text())
    expressions = [t["expr"] for panel in dashboard["panels"] for t in panel.get("targets", ())]
    named = set(re.findall(r"specjax:\w+", " ".join(expressions)))
    endings = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}
    families = list(text_string_to_metric_families(server.get("/metrics").text))
    exported = {f.name: {f.name + end for end in endings[f.type]} for f in families}
    assert named <= set().union(*exported.values()), "panels of what is not exported"
    missing = [name for name, spellings in exported.items() if not named & spellings]
    assert not missing, "exported, and on no panel"
    data = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["data-files"]
    assert "configs/*.json" in data["share/specjax/configs"]


def test_spec_details_and_metrics_count_the_same(server: Server):
    before = server.metrics()
    answer = server.client().completions.create(
        model="tiny", prompt=PROMPT, max_tokens=30, n=4, seed=9, extra_body=LONG
    )
    plainly = server.client().completions.create(
        model="tiny", prompt=PROMPT, max_tokens=30, extra_body={**LONG, "speculative": False}
    )
    after = server.metrics()

    def moved(name):
        return after.get(name, 0) - before.get(name, 0)

    details = [choice.spec_details for choice in answer.choices]
    for d in details:
        assert d["rounds"] == sum(d["acceptance_histogram"]) and d["plain_rounds"] == 0
        assert d["rounds"] + d["accepted"] == 30 == len(d["origins"])
        assert d["accept_length"] == pytest.approx(30 / d["rounds"])
        assert d["draft_acceptance_rate"] == pytest.approx(d["accepted"] / d["drafted"])
        assert (d["drafted"], d["origins"].count("draft")) == (2 * d["rounds"], d["accepted"])
    total = {name: sum(d[name] for d in details) for name in ("rounds", "drafted", "accepted")}
    assert moved("spec_decode_num_drafts_total") == total["rounds"]
    assert moved("spec_decode_num_draft_tokens_total") == total["drafted"]
    assert moved("spec_decode_num_accepted_tokens_total") == total["accepted"]
    by_pos = [
        moved(f'spec_decode_num_accepted_tokens_per_pos_total{{position="{i}"}}') for i in (0, 1)
    ]
    histograms = [d["acceptance_histogram"] for d in details]
    assert by_pos == [sum(sum(h[i + 1 :]) for h in histograms) for i in (0, 1)]
    assert moved("generation_tokens_total") == 150
    assert moved('request_success_total{finished_reason="length"}') == 5
    assert moved("time_to_first_token_seconds_count") == 5
    assert moved("inter_token_latency_seconds_count") <= 145
    [d] = [choice.spec_details for choice in plainly.choices]
    assert (d["plain_rounds"], d["drafted"], set(d["origins"])) == (30, 0, {"plain"})
    causes = {n: v for n, v in after.items() if n.startswith("spec_decode_num_rejections_total")}
    assert len(causes) == 4 and 0 < sum(map(moved, causes)) <= total["rounds"]


def test_what_is_served_can_be_asked(server: Server):
    client = server.client()
    client.completions.create(model="tiny", prompt=PROMPT, max_tokens=80, n=4, extra_body=LONG)
    [model] = client.models.list().data
    assert client.models.retrieve("tiny").id == model.id == "tiny"
    health = httpx.get(f"{server.url}/health").json()
    assert (health["status"], health["alarms"]) == ("ok", [])
    assert health["programs"]["ready"] and not health["programs"]["to_compile"]
    info = server.get("/server_info").json()
    [state] = info["internal_states"]
    assert info["strategies"] == ["2_1_3"] and info["weights"]["version"] == 1
    assert state["speculative_num_steps"] == 2 and 1 < state["avg_spec_accept_length"] <= 3
    assert state["strategy"] == "2_1_3" and not state["asleep"]
    assert state["num_running_reqs"] == state["num_waiting_reqs"] == info["num_queued_reqs"] == 0
    assert KEY not in json.dumps(info)
    found = server.metrics()
    assert found['active_strategy{bucket="4",strategy="2_1_3"}'] == 1
    assert found['chunks_total{bucket="4",strategy="2_1_3"}'] > 0
    assert found["compilations_total"] > 0 and found["kv_cache_pages"] > 0
    assert found['http_requests_total{path="/v1/models",status="200"}'] >= 1
