"""Bodies that schemathesis makes of the app's own OpenAPI document, fitting and not.

The server has two replicas, and a controller that changes strategies; afterwards it still gives the
tokens of plain decoding.
"""

import asyncio
import copy
import json
from collections import Counter

import openai
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from serving import ADMIN, Server, config, served

from serve.settings import ServeConfig, load_llm
from specjax import LLM, ControlConfig, SamplingParams
from specjax.engine.prompt_scores import PromptScorer

FITS, DOES_NOT = GenerationMode.POSITIVE, GenerationMode.NEGATIVE
SHARES = {
    ("/v1/completions", FITS): 0.35,
    ("/v1/chat/completions", FITS): 0.25,
    ("/v1/completions", DOES_NOT): 0.1,
    ("/v1/chat/completions", DOES_NOT): 0.1,
    ("/tokenize", FITS): 0.05,
    ("/detokenize", FITS): 0.05,
    ("/update_weights", FITS): 0.05,
    ("/update_weights", DOES_NOT): 0.03,
    ("/update_weights_from_disk", FITS): 0.02,
}
PROMPTS = ("17+25+8=", "93+4=", "1+2=")


@pytest.fixture(scope="module")
def spread(thin_policy):
    few = {"max_batch": 1, "replicas": 2}  # the fewest programs to compile
    control = ControlConfig("bandit", ["off", "1_1_2"])
    speculation = {"control": control, "strategy": "1_1_2"}
    cfg = config(thin_policy, engine=few, speculation=speculation, tool_call_parser="hermes")
    cfg.limits.max_tokens, cfg.limits.n, cfg.limits.prompts = 24, 2, 2
    llm = load_llm(cfg)
    llm.warm_up([SamplingParams(logprobs=1, presence_penalty=0.1)])
    PromptScorer(llm.engine, llm.max_len).warm_up()
    with served(cfg, llm) as running:
        running.cfg = cfg
        yield running


def check(case, answer) -> None:
    """Raises AssertionError for what no client of OpenAI's would understand."""
    said = f"{case.as_curl_command()}\n{answer.status_code} {answer.text[:500]}"
    assert answer.status_code < 500, said
    if answer.status_code >= 400:
        error = answer.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}, said
        assert isinstance(error["message"], str) and error["message"] and error["type"], said
    elif "event-stream" in answer.headers["content-type"][0]:
        events = answer.text.strip().split("\n\n")
        assert events[-1] == "data: [DONE]", said
        assert all("choices" in json.loads(e.removeprefix("data: ")) for e in events[:-1]), said
    else:
        assert isinstance(answer.json(), dict), said


def narrow(fields: dict, cfg: ServeConfig, llm: LLM) -> None:
    """Puts the limits and strategies of this server into the fields of a body."""
    most = llm.max_len - 1  # a prompt has one token at least
    tokens = min(most, cfg.limits.max_tokens or most)
    bounds = dict.fromkeys(("max_tokens", "max_completion_tokens", "min_tokens"), tokens)
    for name, value in {**bounds, "n": cfg.limits.n, "best_of": cfg.limits.n}.items():
        for kind in kinds(fields.get(name, {}), "integer"):
            kind["maximum"] = value
    for field in fields.values():
        for kind in kinds(field, "integer"):
            if kind.get("title") == "Token":
                kind.pop("exclusiveMaximum")
                kind["maximum"] = llm.cfg.vocab_size - 1
    room = llm.max_stop_tokens - len(llm.cfg.eos_token_ids)
    for kind in kinds(fields["stop_token_ids"], "array"):
        kind["maxItems"] = max(room, 0)
    for kind in fields.get("prompt", {}).get("anyOf", ()):
        if kind.get("items", {}).get("type") in ("string", "array"):  # not the ids of one prompt
            kind["maxItems"] = cfg.limits.prompts
    for kind in kinds(fields["model"], "string"):
        kind["enum"] = [cfg.name]


def kinds(schema: dict, kind: str) -> list[dict]:
    """The subschemas of one JSON type that a value, or a part of it, may have."""
    found = [schema] if schema.get("type") == kind else []
    inside = [*schema.get("anyOf", ()), *filter(None, [schema.get("items")])]
    return found + [each for part in inside for each in kinds(part, kind)]


def fuzz(server: Server, path: str, mode: GenerationMode, count: int) -> Counter:
    """Status codes of `count` cases."""
    document = copy.deepcopy(server.app.openapi())
    for body in ("CompletionRequest", "ChatRequest"):
        narrow(document["components"]["schemas"][body]["properties"], server.cfg, server.llm)
    operation = schemathesis.openapi.from_dict(document)[path]["POST"]
    headers, seen = {"Authorization": f"Bearer {ADMIN}"}, Counter()

    @settings(
        max_examples=count,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
        derandomize=True,
        deadline=None,
        database=None,
    )
    @given(operation.as_strategy(generation_mode=mode))
    def one(case):
        answer = case.call(base_url=server.url, headers=headers, timeout=60)
        seen[answer.status_code] += 1
        check(case, answer)

    one()
    return seen


@pytest.mark.slow
@pytest.mark.parametrize("cases", [40, 2000])
def test_no_body_makes_a_server_error_or_finds_anything_left_to_compile(spread: Server, cases):
    built = spread.metrics()["compilations_total"]
    seen = {key: fuzz(spread, *key, round(cases * share)) for key, share in SHARES.items()}
    assert sum(sum(codes.values()) for codes in seen.values()) >= cases
    for path in ("/v1/completions", "/v1/chat/completions"):
        fits, does_not = seen[path, FITS], seen[path, DOES_NOT]
        assert fits[200] >= 0.3 * fits.total(), f"the document describes no valid body: {fits}"
        assert does_not[200] <= 0.3 * does_not.total(), f"it allows more than it says: {does_not}"
    after = spread.settles(lambda m: m["num_requests_running"] == m["kv_cache_pages_used"] == 0)
    assert after["compilations_total"] == built > 0, "the widest programs serve every body"
    assert spread.get("/health").json()["status"] == "ok"


@pytest.mark.slow
def test_replicas_under_a_controller_give_the_tokens_of_plain_decoding(spread: Server, plain):
    client = spread.client(openai.AsyncOpenAI)

    async def ask(i):
        named = {"speculative": i % 4 > 0}
        answer = await client.completions.create(
            model="tiny", prompt=PROMPTS[i % 3], seed=i, n=2, max_tokens=24,
            extra_body={"ignore_eos": True, "return_token_ids": True, **named},
        )  # fmt: skip
        return [choice.token_ids for choice in answer.choices]

    async def crowd():
        return await asyncio.gather(*map(ask, range(12)))

    params = [SamplingParams(seed=i, n=2, max_tokens=24, ignore_eos=True) for i in range(12)]
    expected = plain.generate([PROMPTS[i % 3] for i in range(12)], params)
    assert asyncio.run(crowd()) == [[s.token_ids for s in out.samples] for out in expected]
    engines = spread.llm.engine.engines
    assert len(engines) == 2 and all(
        engine.controller.state()["_accept_length"] for engine in engines
    )
    chunks = {n for n, v in spread.metrics().items() if n.startswith("chunks_total") and v}
    assert {name.split('strategy="')[1].split('"')[0] for name in chunks} == {"off", "1_1_2"}
