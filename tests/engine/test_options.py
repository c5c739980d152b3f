"""Every sampling option through `LLM`: it does what a loop by hand does, in one mixed batch.

The loop runs one full forward pass per token and applies the transforms in plain Python.
"""

import dataclasses
import functools

import numpy as np
import oracle
import pytest
from pieces import Pieces
from shared import BATCH, CFG, EOS, MAX_LEN, NOTHING, PROMPTS, VOCAB, shared_llm, weights

from specjax import LLM, SamplingParams, SpecConfig
from specjax.decode.options import BAD_WORD_LENGTH, BAD_WORDS

BASE = {"seed": 0, "max_tokens": 24, "ignore_eos": True}
FILTERS = {"top_k": {"top_k": 2}, "top_p": {"top_p": 0.5}, "min_p": {"min_p": 0.3}}


@functools.cache
def by_hand(prompt, params):
    return oracle.decode(CFG, weights()[0], list(prompt), params).tokens


@functools.cache
def options_at(temperature: float) -> dict[str, dict]:
    """Settings of each option that change what is generated at this temperature."""
    plain = SamplingParams(**BASE, temperature=temperature)
    tokens = [by_hand(tuple(p), plain) for p in PROMPTS]
    counts = np.bincount(np.concatenate(tokens), minlength=VOCAB)
    best = [int(t) for t in np.argsort(-counts)]
    settings = {
        "repetition": {"repetition_penalty": 1.7},
        "presence": {"presence_penalty": 2.0},
        "frequency": {"frequency_penalty": 1.0},
        "bias": {"logit_bias": {best[0]: -4.0, best[1]: 1.5, 50: 3.0}},
        "allowed": {"allowed_token_ids": range(0, VOCAB, 2)},
        "bad_words": {"bad_words": [(best[0],), tokens[0][:2], tokens[0][2:5]]},
        "min_tokens": {"stop_token_ids": best[:2], "min_tokens": 12},
    }
    return settings | FILTERS if temperature > 0 else settings


def requests(temperature: float):
    """(option, prompt, params, params without the option) for each option, on two prompts."""
    for i, (name, settings) in enumerate(options_at(temperature).items()):
        stops = {k: v for k, v in settings.items() if k == "stop_token_ids"}
        for k in range(2):
            base = {**BASE, "temperature": temperature, "seed": 2 * i + (temperature > 0)}
            yield (
                name,
                PROMPTS[(i + k) % len(PROMPTS)],
                SamplingParams(**base, **settings),
                SamplingParams(**base, **stops),
            )


@pytest.mark.parametrize("engine", ["speculative", "plain"])
def test_every_option_in_one_batch_gives_the_tokens_of_a_loop_by_hand(engine):
    cases = [*requests(0.0), *requests(0.7)]
    order = np.random.default_rng(0).permutation(len(cases))
    cases = [cases[i] for i in order]
    llm = shared_llm(engine)
    outs = llm.generate([c[1] for c in cases], [c[2] for c in cases])
    changed = dict.fromkeys({(c[0], c[2].temperature) for c in cases}, False)
    for (name, prompt, params, without), out in zip(cases, outs, strict=True):
        expected = by_hand(tuple(prompt), params)
        assert out.samples[0].token_ids == expected, (name, params)
        changed[name, params.temperature] |= expected != by_hand(tuple(prompt), without)
    assert all(changed.values()), f"some did nothing, which proves nothing: {changed}"
    if engine == "speculative":
        assert llm.totals.accept_length > 1.1


def test_penalties_count_the_tokens_of_a_prompt_and_its_samples_apart():
    """Repetition looks at the prompt too; presence and frequency only at what was generated."""
    prompt = PROMPTS[0]
    once = by_hand(tuple(prompt), SamplingParams(**BASE, temperature=0.0))
    longer = tuple([*prompt, *once[:10]])
    settings = [{"repetition_penalty": 1.7}, {"presence_penalty": 2.0}, {"frequency_penalty": 1.5}]
    params = [
        SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, **s) for s in settings
    ]
    outs = shared_llm("speculative").generate([list(longer)] * 3, params)
    for sampling, out in zip(params, outs, strict=True):
        assert out.samples[0].token_ids == by_hand(longer, sampling)
    neutral = by_hand(longer, SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True))
    assert outs[0].samples[0].token_ids[0] != neutral[0], "the prompt's tokens went unpunished"
    assert outs[1].samples[0].token_ids[0] == outs[2].samples[0].token_ids[0] == neutral[0]


def test_a_request_that_opts_out_drafts_nothing_and_gives_the_same_tokens():
    llm = shared_llm("speculative")
    params = [SamplingParams(**BASE, temperature=t, speculative=s) for t in (0, 1) for s in (0, 1)]
    plain, spec, hot_plain, hot_spec = (
        llm.generate([PROMPTS[0]], each)[0].samples[0] for each in params
    )
    assert plain.token_ids == spec.token_ids and hot_plain.token_ids == hot_spec.token_ids
    for sample in (plain, hot_plain):
        assert (sample.stats.drafted, sample.stats.accepted, sample.stats.rounds) == (0, 0, 24)
    assert spec.stats.accepted > 0 and spec.stats.drafted > 0


def test_a_seed_that_is_drawn_for_a_call_repeats_it_and_equal_prompts_are_numbered_on():
    llm = shared_llm("speculative")

    def tokens(prompts, params):
        outs = llm.generate(prompts, params)
        return {out.seed for out in outs}, [s.token_ids for out in outs for s in out.samples]

    first, other = PROMPTS[:2]
    drawn = SamplingParams(max_tokens=12)
    [seed], three = tokens([first, other, first, first], drawn)
    assert len(set(map(tuple, three))) == 4 and tokens([first], drawn)[0] != {seed}
    same = dataclasses.replace(drawn, seed=seed)
    assert tokens([first, other, first, first], same) == ({seed}, three)
    _, of_one = tokens([first], dataclasses.replace(same, n=3))
    assert of_one == [three[0], three[2], three[3]]
    # The numbers go on whatever else is asked for, and another seed begins anew.
    mixed = [
        same,
        dataclasses.replace(same, n=2, top_k=VOCAB - 1),
        dataclasses.replace(same, seed=0),
    ]
    _, counted = tokens([first] * 3, mixed)
    assert counted[:3] == of_one and counted[3:] == tokens([first], mixed[2])[1]
    assert llm.compare_with_plain([first] * 3, drawn) == []


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"seed": 1.5}, "seed must be an integer, or None, got 1.5"),
        *(({"seed": seed}, "seed must be an integer") for seed in (1 << 64, -(1 << 63) - 1, True)),
        ({"n": True}, "n must be an integer, got True"),
        ({"n": 0}, "n must be at least 1, got 0"),
        ({"max_tokens": 0}, "max_tokens must be at least 1, got 0"),
        ({"top_k": 2.5}, "top_k must be an integer, got 2.5"),
        ({"temperature": -0.1}, "temperature must be .* got -0.1"),
        ({"temperature": float("nan")}, "temperature must be .* got nan"),
        ({"logprobs": 21}, "logprobs must be between 0 and 20, got 21"),
        ({"bad_words": [5]}, "bad_words must hold token ids, got 5"),
        ({"allowed_token_ids": []}, "allowed_token_ids must be at least one token id"),
    ],
)
def test_what_cannot_be_meant_is_refused_by_name(settings, said):
    with pytest.raises(ValueError, match=said):
        SamplingParams(**settings)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"logit_bias": {VOCAB: 1.0}}, ["logit_bias", "token id 64", "0 <= id < 64"]),
        ({"allowed_token_ids": [3, -1]}, ["allowed_token_ids", "token id -1"]),
        ({"bad_words": [(3, 70)]}, ["bad_words", "token id 70"]),
        ({"stop_token_ids": [99]}, ["stop_token_ids", "token id 99"]),
        ({"bad_words": [(1,)] * 2 + [(i, j) for i in range(9) for j in range(9)]},
         ["82 token sequences", f"at most {BAD_WORDS}"]),
        ({"bad_words": [range(9)]}, ["9 tokens", f"at most {BAD_WORD_LENGTH}"]),
        ({"bad_words": ["x"]}, ["bad_words", "no tokenizer"]),
        ({"stop": "x"}, ["stop", "no tokenizer"]),
        ({"allowed_token_ids": [4, 5], "bad_words": [(4,), (5,)]}, ["no token is left"]),
        ({"allowed_token_ids": [EOS], "min_tokens": 1}, ["no token is left", "min_tokens"]),
    ],
    ids=["bias", "allow", "bad word", "stop", "words", "long", "word", "string", "all", "early"],
)  # fmt: skip
def test_what_does_not_fit_is_refused_before_anything_runs(monkeypatch, settings, said):
    llm = shared_llm("speculative")
    monkeypatch.setattr(llm, "_run", lambda *_: pytest.fail("work was begun"))
    with pytest.raises(ValueError) as error:
        llm.generate([[1], [2]], [NOTHING, SamplingParams(max_tokens=5, **settings)])
    for words in ("prompt 1", *said):
        assert words in str(error.value)


def test_acceptance_greedy_takes_greedy_requests_only_and_says_what_else_there_is():
    spec = SpecConfig("2_1_3", acceptance="greedy")
    llm = LLM((CFG, *weights()), spec, max_batch=BATCH, max_len=MAX_LEN)
    with pytest.raises(ValueError, match="prompt 1 has temperature 0.3.*'coupled'.*temperature=0"):
        llm.generate([[1], [2]], [SamplingParams(temperature=t, max_tokens=2) for t in (0, 0.3)])


def test_bad_words_as_strings_never_occur_in_the_text():
    llm = shared_llm("speculative")
    hot = {"seed": 0, "temperature": 2.0, "max_tokens": 48, "n": 8, "ignore_eos": True}
    some = ["a", "b", "c", "d", "ab", " a", " b", " "]
    ids = [i for text in some for i in Pieces().encode(text, add_special_tokens=False)]
    llm.tokenizer = Pieces()
    try:
        free, banned = llm.generate(
            [[1]] * 2,
            [
                SamplingParams(**hot, allowed_token_ids=ids),
                SamplingParams(**hot, allowed_token_ids=ids, bad_words=["a", "dc"]),
            ],
        )
    finally:
        llm.tokenizer = None
    words = Pieces().encode("a", add_special_tokens=False) + Pieces().encode(" a", False)
    tokens = [t for s in banned.samples for t in s.token_ids]
    assert any("dc" in s.text for s in free.samples)
    assert not any("dc" in s.text for s in banned.samples)
    assert set(words) <= {t for s in free.samples for t in s.token_ids}
    assert not set(words) & set(tokens)
