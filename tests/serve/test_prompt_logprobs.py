"""What the policy makes of a prompt: echo, prompt_logprobs, max_tokens 0."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import openai
import pytest
from flax import nnx
from serving import BATCH, MAX_LEN, Server

from specjax import SamplingParams
from specjax.engine.prompt_scores import PromptScorer
from specjax.models.transformer import graphdef

PROMPTS = ([5, 9, 33, 7, 120, 64, 9], [40, 41], [7], list(range(3, MAX_LEN - 2)))


@pytest.fixture(scope="module")
def expected(plain):
    """Log-probabilities [S V] of what follows each position, by a full forward."""
    model = nnx.merge(
        graphdef(plain.cfg, plain.cfg.run.decode_layout), plain.engine.runner.weights.policy
    )

    @functools.cache
    def of(ids):
        tokens = jnp.asarray([ids])
        hidden = model.prefill(tokens, jnp.asarray([len(ids)])).x
        return np.asarray(jax.nn.log_softmax(model.logits(hidden)[0]))

    return of


def ask(server, **body):
    options = {"model": "tiny", "max_tokens": 1, "temperature": 0, **body}
    vllms = options.keys() & {"prompt_logprobs", "return_token_ids", "min_tokens"}
    extra = {name: options.pop(name) for name in vllms}
    return server.client().completions.create(**options, extra_body=extra)


@pytest.mark.slow
def test_an_echo_says_how_likely_every_token_of_the_prompt_was(server: Server, plain, expected):
    answer = ask(server, prompt=list(PROMPTS), echo=True, logprobs=1, return_token_ids=True)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    for prompt, choice in zip(PROMPTS, answer.choices, strict=True):
        told, right = choice.logprobs, expected(tuple(prompt))
        assert len(told.token_logprobs) == len(prompt) + 1 == len(told.tokens)
        assert told.token_logprobs[0] is None and told.top_logprobs[0] is None
        for i, (value, top) in enumerate(
            zip(told.token_logprobs[1:-1], told.top_logprobs[1:-1], strict=True)
        ):
            assert value == pytest.approx(right[i, prompt[i + 1]], abs=1e-4)
            assert max(top.values()) == pytest.approx(right[i].max(), abs=1e-4)
            greedy = right[i].argmax() == prompt[i + 1]
            assert (value == max(top.values())) == greedy and len(top) == (1 if greedy else 2)
        assert told.token_logprobs[-1] == pytest.approx(right[-1].max(), abs=1e-4)
        assert choice.token_ids == [right[-1].argmax()]
        for token, offset in zip(told.tokens, told.text_offset, strict=True):
            assert token.startswith("bytes:") or choice.text.startswith(token, offset)
        assert choice.text.startswith(plain.tokenizer.decode(prompt))
    assert answer.usage.completion_tokens == 4


@pytest.mark.parametrize("top", [0, 3, 20])
def test_prompt_logprobs_are_vllms(server: Server, plain, expected, top):
    prompt = PROMPTS[0]
    [choice] = ask(server, prompt=prompt, prompt_logprobs=top, max_tokens=3).choices
    told, right = choice.prompt_logprobs, expected(tuple(prompt))
    assert told[0] is None and len(told) == len(prompt)
    for i, entry in enumerate(told[1:]):
        token = prompt[i + 1]
        order = np.argsort(-right[i], kind="stable")
        rank = 1 + int((right[i] > right[i, token]).sum())
        assert set(entry) == {str(t) for t in (*order[:top].tolist(), token)}
        assert entry[str(token)]["rank"] == rank
        for place, other in enumerate(order[:top].tolist(), 1):
            assert entry[str(other)]["logprob"] == pytest.approx(right[i, other], abs=1e-4)
            assert entry[str(other)]["rank"] == place
            assert isinstance(entry[str(other)]["decoded_token"], str)
    assert choice.logprobs is None, "the answer's own were not asked for"
    assert choice.text == ask(server, prompt=prompt, max_tokens=3).choices[0].text


def test_a_stream_begins_with_its_echo(server: Server):
    asked = {"prompt": "17+25+8=", "echo": True, "logprobs": 2, "max_tokens": 5, "n": 2}
    whole = ask(server, **asked)
    events = list(ask(server, **asked, stream=True))
    for choice in whole.choices:
        parts = [e.choices[0] for e in events if e.choices[0].index == choice.index]
        assert parts[0].text == "17+25+8="
        assert "".join(part.text for part in parts) == choice.text
        told = [part.logprobs for part in parts if part.logprobs]
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            joined = [value for part in told for value in getattr(part, name)]
            assert joined == getattr(choice.logprobs, name), name


@pytest.mark.parametrize("stream", [False, True])
def test_nothing_is_generated_where_no_token_is_asked_for(server: Server, stream):
    asked = {"prompt": ["17+25+8=", "1+1="], "max_tokens": 0, "n": 2, "stream": stream}
    before = server.metrics()["generation_tokens_total"]
    found = ask(server, **asked)
    choices = [e.choices[0] for e in found] if stream else found.choices
    assert [(c.index, c.text, c.finish_reason) for c in choices] == [
        (i, "", "length") for i in range(4)
    ]
    assert server.metrics()["generation_tokens_total"] == before
    echoed = ask(server, prompt="1+1=", max_tokens=0, echo=True, logprobs=0)
    [choice] = echoed.choices
    assert choice.text == "1+1=" and len(choice.logprobs.tokens) == echoed.usage.prompt_tokens
    assert echoed.usage.completion_tokens == 0
    chat = server.client().chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "1+1="}], max_completion_tokens=0
    )
    assert chat.choices[0].message.content == "" and chat.choices[0].finish_reason == "length"
    full = ask(server, prompt=[5] * MAX_LEN, max_tokens=0, echo=True, logprobs=1)
    assert len(full.choices[0].logprobs.tokens) == MAX_LEN, "there is room for a prompt alone"


REFUSED = {
    "more likely tokens than there are": ({"prompt_logprobs": 21}, "prompt_logprobs"),
    "all tokens": ({"prompt_logprobs": -1}, "prompt_logprobs"),
    "logprobs of a prompt in a stream": ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    "no token, and some": ({"max_tokens": 0, "min_tokens": 1}, "min_tokens"),
    "fewer tokens than none": ({"max_tokens": -1}, "max_tokens"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_not_told_of_a_prompt_is_refused(server: Server, what):
    body, param = REFUSED[what]
    with pytest.raises(openai.BadRequestError) as caught:
        ask(server, prompt="1+1=", **body)
    assert caught.value.param == param


def test_scoring_neither_disturbs_what_runs_nor_compiles_twice(server: Server, plain):
    PromptScorer(server.llm.engine, server.llm.max_len).warm_up()
    ask(server, prompt="17+25+8=", max_tokens=40, seed=7, echo=True, logprobs=1)
    built = server.metrics()["compilations_total"]
    with server.slowly(0.05):
        stream = server.client().completions.create(
            model="tiny", prompt="17+25+8=", max_tokens=40, seed=7, stream=True,
            extra_body={"ignore_eos": True, "return_token_ids": True},
        )  # fmt: skip
        tokens = list(next(iter(stream)).choices[0].token_ids)
        for count in range(1, 2 * BATCH):
            ask(server, prompt=[5] * (8 * count), echo=True, logprobs=1)
        tokens += [t for e in stream for t in getattr(e.choices[0], "token_ids", None) or []]
    [output] = plain.generate(["17+25+8="], SamplingParams(max_tokens=40, seed=7, ignore_eos=True))
    assert tokens == output.samples[0].token_ids
    assert server.metrics()["compilations_total"] == built


SCORED = {
    "echo": {"prompt": [5, 6, 7], "echo": True, "logprobs": 1},
    "echo of more likely tokens alone": {"prompt": [5, 6, 7], "echo": True, "logprobs": 5},
    "prompt_logprobs": {"prompt": [5, 6, 7], "prompt_logprobs": 2},
    "nothing generated": {"prompt": [5, 6, 7], "echo": True, "logprobs": 0, "max_tokens": 0},
    "a stream": {"prompt": [5, 6, 7], "echo": True, "logprobs": 2, "stream": True},
}
LM_HEADS = {"NaN": float("nan"), "+inf": float("inf"), "-inf": float("-inf")}


@pytest.mark.parametrize("value", LM_HEADS)
def test_logits_that_are_no_distribution_are_an_error_and_not_a_score(
    server: Server, monkeypatch, value
):
    runner = server.llm.engine.runner
    spoil = functools.partial(lambda x, v: x.at[:, 9].set(v), v=LM_HEADS[value])
    column = jax.tree.map(spoil, runner.weights.policy["lm_head"])  # NaN: inf minus inf
    monkeypatch.setattr(runner.weights, "policy", {**runner.weights.policy, "lm_head": column})
    for what, body in SCORED.items():
        answer = server.post("/v1/completions", json={"model": "tiny", "max_tokens": 1, **body})
        assert answer.status_code == 500, what
        error = answer.json()["error"]
        assert error["code"] == "invalid_logits" and "hold NaN or +inf" in error["message"], what
