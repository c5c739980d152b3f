"""Over HTTP: stop strings that are special tokens, seeds, and a policy that gives no numbers."""

import asyncio
import dataclasses
import json

import jax
import numpy as np
import pytest
from serving import KEY, Server
from tokenizers.processors import TemplateProcessing

from specjax import SamplingParams

PROMPT, EOS, PAD = "17+25+8=", "<|eos|>", "<|pad|>"
ENDS = {"completions": {"prompt": PROMPT}, "chat/completions": {
    "messages": [{"role": "user", "content": PROMPT}]
}}  # fmt: skip


def ask(server: Server, end="completions", **body):
    asked = {"model": "tiny", **ENDS[end], "max_tokens": 30, "seed": 4, **body}
    return server.post(f"/v1/{end}", key=KEY, content=json.dumps(asked))


def events(answer) -> list:
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


# --- stop strings that are special tokens ---------------------------------------------------------


@pytest.fixture(scope="module")
def some(plain):
    """A few tokens, special ones among them, that the samples below are made of."""
    tokenizer = plain.tokenizer
    letters = [tokenizer.encode(c, add_special_tokens=False)[0] for c in "17+"]
    return [*letters, tokenizer.eos_token_id, tokenizer.pad_token_id]


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_may_be_a_special_token(server: Server, plain, some, include):
    params = SamplingParams(max_tokens=30, seed=4, allowed_token_ids=some, ignore_eos=True)
    [whole] = plain.generate(PROMPT, params)[0].samples
    for stop in (EOS, PAD):
        end = plain.tokenizer.convert_tokens_to_ids(stop)
        tokens = whole.token_ids[: whole.token_ids.index(end) + 1]
        text = plain.tokenizer.decode(tokens, skip_special_tokens=True) + stop * include
        own = dataclasses.replace(params, stop=stop, include_stop_str_in_output=include)
        [sample] = plain.generate(PROMPT, own)[0].samples
        assert (sample.token_ids, sample.text, sample.finish_reason) == (tokens, text, "stop")
        body = {
            "allowed_token_ids": some, "ignore_eos": True, "stop": [stop], "return_token_ids": True,
            "include_stop_str_in_output": include,
        }  # fmt: skip
        choice = ask(server, **body).json()["choices"][0]
        assert (choice["token_ids"], choice["text"]) == (tokens, text)
        streamed = [e["choices"][0] for e in events(ask(server, **body, stream=True))[:-1]]
        assert "".join(piece["text"] for piece in streamed) == text
        assert streamed[-1]["finish_reason"] == choice["finish_reason"] == "stop"


# --- seeds ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [1 << 64, -(1 << 63) - 1, 10**30, -(10**25), 1.5, True, "7", [3]])
def test_a_seed_that_has_no_64_bits_is_refused(server: Server, seed):
    answer = ask(server, seed=seed)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "seed"
    if isinstance(seed, int) and seed is not True:
        assert f"{-(1 << 63)} to {(1 << 64) - 1}" in answer.json()["error"]["message"]


@pytest.mark.parametrize("seed", [0, (1 << 63) - 1, (1 << 64) - 1, -1, -(1 << 63)])
def test_a_seed_of_64_bits_gives_the_tokens_that_it_gives_everywhere(server: Server, plain, seed):
    choice = ask(server, seed=seed, max_tokens=6, return_token_ids=True).json()["choices"][0]
    [sample] = plain.generate(PROMPT, SamplingParams(max_tokens=6, seed=seed))[0].samples
    assert choice["token_ids"] == sample.token_ids


# --- a policy that gives no numbers ---------------------------------------------------------------


@pytest.fixture
def broken(server: Server):
    """The server, whose policy went to NaN without a word."""
    thread = server.app.state.thread
    sound = thread.llm.params

    def set_params(params):
        update = thread.call(lambda: thread.llm.update_weights(params))
        asyncio.run_coroutine_threadsafe(update, thread._loop).result(120)

    set_params({**sound, "norm": jax.tree.map(lambda x: x * np.float32(np.nan), sound["norm"])})
    yield server
    set_params(sound)
    assert ask(server).json()["choices"][0]["text"]


@pytest.mark.parametrize("end", ENDS)
def test_nan_is_a_500_that_says_so(broken: Server, end):
    more = {"logprobs": 2} if end == "completions" else {"logprobs": True, "top_logprobs": 2}
    for body in ({}, {"n": 2}, {"temperature": 0}, {"stop": ["x"]}, more):
        answer = ask(broken, end, **body)
        assert answer.status_code == 500
        error = json.loads(answer.text, parse_constant=pytest.fail)["error"]
        assert error["type"] == "server_error" and "NaN" in error["message"]
        assert error["code"] == "invalid_logits"
    assert broken.get("/health").json()["status"] == "ok", "the engine runs on"


# --- the beginning-of-sequence token --------------------------------------------------------------


@pytest.fixture
def adds_bos(server: Server):
    """The server, whose tokenizer puts the pad token in front of every text."""
    tokenizer = server.llm.tokenizer
    backend, before, template = (
        tokenizer.backend_tokenizer,
        tokenizer.backend_tokenizer.post_processor,
        tokenizer.chat_template,
    )
    token = (PAD, tokenizer.pad_token_id)
    backend.post_processor = TemplateProcessing(single=f"{PAD} $A", special_tokens=[token])
    tokenizer.bos_token = PAD
    yield server
    backend.post_processor, tokenizer.chat_template = before, template
    tokenizer.bos_token = None


def test_bos_stands_in_front_once(adds_bos: Server):
    bos, tokenizer = adds_bos.llm.tokenizer.pad_token_id, adds_bos.llm.tokenizer
    bare = tokenizer.encode(PROMPT, add_special_tokens=False)

    def prompt(end="completions", **body):
        answer = ask(adds_bos, end, max_tokens=1, return_token_ids=True, **body).json()
        ids = answer["choices"][0]["prompt_token_ids"]
        assert answer["usage"]["prompt_tokens"] == len(ids)
        return ids

    assert prompt() == prompt(prompt=PAD + PROMPT) == [bos, *bare]
    assert prompt(prompt=bare) == bare, "token ids are taken as they are"
    for template, once in (("{{ bos_token }}", [bos]), ("", [])):
        tokenizer.chat_template = template + "{{ messages[0].content }}"
        assert prompt("chat/completions") == [*once, *bare]
    tokenizer.chat_template = "{{ 'no' if thinks is false else 'yes' }}"
    ids = [prompt("chat/completions", chat_template_kwargs={"thinks": t}) for t in (False, True)]
    assert [tokenizer.decode(each) for each in ids] == ["no", "yes"]
