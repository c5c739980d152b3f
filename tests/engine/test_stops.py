"""Stop strings are found however tokens, rounds and chunks cut them; nothing past them remains."""

import contextlib
import dataclasses
import functools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pieces import PIECES, Pieces
from shared import PROMPTS, shared_llm

from specjax import SamplingParams
from specjax.engine.text import StopStrings, TextStream

LONG = SamplingParams(seed=0, max_tokens=40, ignore_eos=True)


def by_definition(decode, tokens, strings, include=False, min_tokens=0):
    """(tokens, text) up to the first stop string; everything is decoded anew for each token."""
    before = ""
    for count in range(1, len(tokens) + 1):
        text = decode(tokens[:count]).rstrip("\ufffd")
        ends = []
        for string in strings:
            starts = range(len(text) - len(string) + 1)
            ends += [
                (at, at + len(string) if include else at)
                for at in starts
                if text[at:].startswith(string) and at + len(string) > len(before)
            ]
        if ends and count > min_tokens:
            return count, text[: min(ends)[1]]
        before = text
    return None


# --- the text of growing tokens -------------------------------------------------------------------


SPECIAL = 300  # a token without any text


def some_bytes(ids):
    return bytes(token for token in ids if token < 256).decode(errors="replace")


def runs(tokens):
    return st.integers(0, 30).map(lambda count: list(tokens) * count)


# Tokens that make characters, halves of them, and what never becomes one, in runs of any length.
pieces_of_bytes = st.one_of(
    st.text(alphabet="aé日🙂 ", max_size=5).map(lambda text: list(text.encode())),
    st.lists(st.integers(128, 255), max_size=3),
    st.integers(1, 3).map(lambda count: list("🙂".encode()[:count])),
    *map(runs, ([SPECIAL], [0x80], [0xE2], [0xE2, 0x82], [ord("a"), 0xE2], [0xF0, SPECIAL])),
)


@settings(max_examples=200)
@given(st.lists(pieces_of_bytes, max_size=8).map(lambda parts: sum(parts, [])), st.integers(1, 9))
def test_the_stream_is_the_text_of_all_tokens_up_to_its_last_whole_character(tokens, size):
    stream = TextStream(some_bytes)
    for end in range(size, len(tokens) + size, size):
        stream.extend(tokens[end - size : end])
        decoded = some_bytes(tokens[:end])
        assert stream.text == decoded.rstrip("\ufffd")
        assert stream.text + stream.rest == decoded


def random_tokens(seed, length=60):
    """Text over few letters, so that short strings come up again and again."""
    some = [i for i, p in enumerate(PIECES) if set(p) <= set("abcd ") or not i]
    return np.random.default_rng(seed).choice(some, length).tolist()


@pytest.mark.parametrize("include", [False, True])
def test_the_end_is_that_of_the_definition_whatever_pieces_the_tokens_come_in(include):
    rng, found = np.random.default_rng(1), 0
    for case in range(300):
        tokens = random_tokens(case)
        strings = ["".join(rng.choice(list("abcd "), rng.integers(1, 6))) for _ in range(2)]
        min_tokens = int(rng.choice([0, 0, 5, 20]))
        expected = by_definition(Pieces().decode, tokens, strings, include, min_tokens)
        for size in (1, 3, 60):
            search = StopStrings(strings, Pieces().decode, include, min_tokens)
            parts = [tokens[i : i + size] for i in range(0, 60, size)]
            cut = next((c for c in map(search.feed, parts) if c is not None), None)
            assert (cut and tuple(cut)) == expected, (tokens, strings)
        found += expected is not None
    assert 100 < found < 300


# --- through LLM ----------------------------------------------------------------------------------


@contextlib.contextmanager
def with_text(llm, chunk_rounds=None):
    """The engine with a tokenizer, and with chunks of at most so many rounds."""
    llm.tokenizer, llm.engine.controller.rounds_hint = Pieces(), chunk_rounds
    try:
        yield llm
    finally:
        llm.tokenizer = llm.engine.controller.rounds_hint = None


@functools.cache
def unstopped(engine, temperature=1.0):
    with with_text(shared_llm(engine)) as llm:
        params = dataclasses.replace(LONG, temperature=temperature, transformed_logprobs=True)
        return [out.samples[0] for out in llm.generate(PROMPTS, params)]


def requests():
    """Pieces of the text that would come, spanning tokens or not, at its beginning and its end."""
    rng = np.random.default_rng(0)
    for index, sample in enumerate(unstopped("plain")):
        for length in (1, 2, 3, 5, 9):
            at = int(rng.integers(0, len(sample.text) - length))
            strings = (sample.text[at : at + length], "never there")
            include, least = bool(rng.integers(2)), int(rng.choice([0, 0, 0, 9]))
            params = dataclasses.replace(
                LONG,
                stop=strings,
                include_stop_str_in_output=include,
                min_tokens=least,
                transformed_logprobs=True,
                logprobs=1,
            )
            yield index, params


@pytest.mark.parametrize(
    ("engine", "rounds"), [("speculative", None), ("speculative", 1), ("plain", None)]
)
def test_a_sample_ends_where_its_stop_string_does(engine, rounds):
    cases = list(requests())
    with with_text(shared_llm(engine), rounds) as llm:
        outs = [llm.generate([PROMPTS[i]], params)[0] for i, params in cases]
    ended = 0
    for (index, params), out in zip(cases, outs, strict=True):
        whole, got = unstopped("plain")[index], out.samples[0]
        expected = by_definition(
            lambda ids: Pieces().decode(ids, True),
            whole.token_ids,
            params.stop,
            params.include_stop_str_in_output,
            params.min_tokens,
        )
        if expected is None:
            assert (got.token_ids, got.text) == (whole.token_ids, whole.text)
            assert got.finish_reason == "length"
            continue
        ended += 1
        count, text = expected
        assert (got.token_ids, got.text) == (whole.token_ids[:count], text)
        assert got.finish_reason == "stop"
        np.testing.assert_allclose(got.logprobs, whole.logprobs[:count], atol=1e-4)
        np.testing.assert_allclose(
            got.transformed_logprobs, whole.transformed_logprobs[:count], atol=1e-4
        )
        assert len(got.top_logprobs) == count
        stats = got.stats
        assert sum(n * rounds for n, rounds in enumerate(stats.histogram)) == count
        assert sum(stats.histogram) == stats.rounds == count - stats.accepted
    assert ended > 10


class Halves:
    """Letters, and the two halves of a character of two bytes."""

    table = bytes(range(ord("a"), ord("a") + 24)) + b"\xc3" * 20 + b"\xa9" * 20

    def decode(self, ids, **_):
        return bytes(self.table[i] for i in ids).decode(errors="replace")


@pytest.mark.parametrize("engine", ["speculative", "plain"])
def test_the_pieces_of_a_stream_are_the_samples_of_generate(engine, monkeypatch):
    llm = shared_llm(engine)
    monkeypatch.setattr(llm, "tokenizer", Halves())
    monkeypatch.setattr(llm.engine.controller, "rounds_hint", 1)
    params = dataclasses.replace(LONG, n=2)
    [whole] = llm.generate(PROMPTS[:1], params)
    texts = [sample.text for sample in whole.samples]
    assert all("é" in text and "\ufffd" in text for text in texts)
    end = next(texts[0][at:][:2] for at in range(5, 20) if texts[0][at:][:2] not in texts[1])
    params = dataclasses.replace(params, stop=end)
    for _ in llm.stream(PROMPTS[0], params):
        break  # which aborts the samples
    [expected] = llm.generate(PROMPTS[:1], params)
    assert expected.samples[0].finish_reason == "stop" != expected.samples[1].finish_reason
    counted = llm.totals.tokens
    pieces = list(llm.stream(PROMPTS[0], params))
    assert llm.totals.tokens == counted and len(pieces) > 10
    for index, sample in enumerate(expected.samples):
        own = [piece for piece in pieces if piece.sample == index]
        assert "".join(piece.text for piece in own) == sample.text
        assert [token for piece in own for token in piece.token_ids] == sample.token_ids
        assert [piece.output is None for piece in own] == [True] * (len(own) - 1) + [False]
        assert own[-1].output.text == sample.text
    with pytest.raises(ValueError, match="prompt_logprobs"):
        llm.stream(PROMPTS[0], dataclasses.replace(params, prompt_logprobs=1))
