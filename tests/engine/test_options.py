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
from specjax.decode.options import BAD_WORD_LENGTH, BAD_WORDS, BIAS_WIDTH
from specjax.engine.options import Limits, check_job, features_of, option_rows
from specjax.engine.request import bad_word_ids, make_jobs

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


NAMES = ("repetition", "presence", "frequency", "bias", "allowed", "bad_words", "min_tokens")


@pytest.mark.slow
@pytest.mark.parametrize("name", [*NAMES, *FILTERS])
def test_an_option_alone_gives_the_tokens_of_a_loop_by_hand(name):
    llm = LLM((CFG, *weights()), SpecConfig("4x2x1"), max_batch=BATCH, max_len=MAX_LEN)
    cases = [c for t in (0.0, 0.7) for c in requests(t) if c[0] == name]
    outs = llm.generate([c[1] for c in cases], [c[2] for c in cases])
    for (_, prompt, params, _), out in zip(cases, outs, strict=True):
        assert out.samples[0].token_ids == by_hand(tuple(prompt), params)


def test_all_options_together_give_the_tokens_of_a_loop_by_hand():
    params = [
        SamplingParams(
            temperature=temperature,
            max_tokens=20,
            min_tokens=8,
            stop_token_ids=(3, 11),
            seed=seed,
            top_k=20,
            top_p=0.9,
            min_p=0.02,
            repetition_penalty=1.2,
            presence_penalty=0.3,
            frequency_penalty=0.4,
            logit_bias={5: 1.0, 9: -2.0},
            allowed_token_ids=range(1, VOCAB),
            bad_words=[(12,), (13, 14)],
        )
        for seed, temperature in enumerate((0.0, 0.6, 1.0, 1.4))
    ]
    outs = shared_llm("speculative").generate(PROMPTS, params)
    for prompt, sampling, out in zip(PROMPTS, params, outs, strict=True):
        assert out.samples[0].token_ids == by_hand(tuple(prompt), sampling)


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


def test_masks_hold_at_every_position_of_sampled_text():
    """What is forbidden never comes, however hot the sampling."""
    hot = {"seed": 0, "temperature": 3.0, "max_tokens": 40, "n": 4, "ignore_eos": True}
    allowed = (1, 2, 3, 5, 8, 13, 21, 34, 55)
    words = [(1,), (2, 3), (5, 5), (8, 13, 21)]
    params = [
        SamplingParams(**hot, allowed_token_ids=allowed),
        SamplingParams(**hot, allowed_token_ids=allowed, bad_words=words),
    ]
    free, checked = shared_llm("speculative").generate([[3, 2]] * 2, params)
    texts = [[3, 2, *s.token_ids] for s in checked.samples]
    assert {t for s in free.samples for t in s.token_ids} == set(allowed)

    def occurs(word, tokens):
        return any(tuple(tokens[i : i + len(word)]) == word for i in range(len(tokens)))

    assert all(any(occurs(w, s.token_ids) for s in free.samples) for w in words[:3])
    assert not any(occurs(w, text[1:]) for w in words for text in texts)
    assert all(set(text[2:]) <= set(allowed) for text in texts)


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


def test_max_tokens_of_none_goes_on_to_the_end_of_the_room():
    llm = shared_llm("speculative")
    endless = SamplingParams(seed=0, max_tokens=None, ignore_eos=True)
    [out] = llm.generate([PROMPTS[0]], endless)
    assert len(PROMPTS[0]) + len(out.samples[0].token_ids) == llm.max_len
    with pytest.raises(ValueError, match="leaves no room below max_len"):
        llm.generate([[1] * llm.max_len], endless)


def test_more_stop_tokens_than_usual_are_taken_where_there_is_room_for_them():
    llm = LLM((CFG, *weights()), None, max_batch=1, max_len=16, max_stop_tokens=VOCAB)
    params = SamplingParams(max_tokens=9, stop_token_ids=range(VOCAB))
    [sample] = llm.generate([1, 2], params)[0].samples
    assert len(sample.token_ids) == 1 and sample.finish_reason == "stop"


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"seed": 1.5}, "seed must be an integer, or None to draw one, got 1.5"),
        ({"n": 2.0}, "n must be an integer, got 2.0"),
        ({"n": True}, "n must be an integer, got True"),
        ({"top_k": 2.5}, "top_k must be an integer, got 2.5"),
        ({"max_tokens": "9"}, "max_tokens must be an integer, or None for as many as fit"),
        ({"temperature": None}, "temperature must be a number, got None"),
        ({"stop_token_ids": 5}, "stop_token_ids must hold token ids, got 5"),
        ({"bad_words": [5]}, "bad_words must hold token ids, got 5"),
        ({"allowed_token_ids": []}, "allowed_token_ids must be at least one token id"),
        ({"allowed_token_ids": "ab"}, "allowed_token_ids must hold token ids, got 'ab'"),
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
        ({"bad_words": ["x"]}, ["'x'", "no tokenizer", "token ids"]),
        ({"stop": "x"}, ["'x'", "no tokenizer", "stop_token_ids"]),
        ({"allowed_token_ids": [4, 5], "bad_words": [(4,), (5,)]}, ["no token is left"]),
        ({"allowed_token_ids": [EOS], "min_tokens": 1}, ["no token is left", "min_tokens = 1"]),
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


def test_a_temperature_too_small_for_float32_is_greedy():
    assert SamplingParams(temperature=1e-7).temperature == 0
    assert SamplingParams(temperature=1e-5).temperature == 1e-5


def test_as_many_biases_as_fit_are_taken_and_one_more_is_refused():
    limits = Limits(CFG.replace(vocab_size=512), 2048, 8, None)

    def check(count):
        bias = dict.fromkeys(range(count), 1.0)
        check_job("prompt 0", make_jobs([1], SamplingParams(logit_bias=bias), ())[0], limits)

    check(BIAS_WIDTH)
    with pytest.raises(ValueError, match=f"301 tokens; at most {BIAS_WIDTH}"):
        check(BIAS_WIDTH + 1)


def test_acceptance_greedy_takes_greedy_requests_only_and_says_what_else_there_is():
    spec = SpecConfig("2_1_3", acceptance="greedy")
    llm = LLM((CFG, *weights()), spec, max_batch=BATCH, max_len=MAX_LEN)
    with pytest.raises(ValueError, match="prompt 1 has temperature 0.3.*'coupled'.*temperature=0"):
        llm.generate([[1], [2]], [SamplingParams(temperature=t, max_tokens=2) for t in (0, 0.3)])


# --- host side ------------------------------------------------------------------------------------


def job_of(**settings):
    return make_jobs([1, 2, 3], SamplingParams(**settings), (EOS,), Pieces())[0]


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({}, {"sampled"}),
        ({"temperature": 0.0}, set()),
        ({"temperature": 0.0, "top_k": 3, "top_p": 0.5, "min_p": 0.1}, set()),
        ({"top_k": 3}, {"sampled", "top_k"}),
        ({"top_k": VOCAB}, {"sampled"}),
        ({"top_k": -1, "top_p": 1.0, "min_p": 0.0}, {"sampled"}),
        ({"top_p": 0.99}, {"sampled", "top_p"}),
        ({"min_p": 0.1}, {"sampled", "min_p"}),
        ({"repetition_penalty": 0.9}, {"sampled", "penalties"}),
        ({"presence_penalty": -1.0}, {"sampled", "penalties"}),
        ({"frequency_penalty": 0.1, "temperature": 0}, {"penalties"}),
        ({"logit_bias": {3: 0.0}}, {"sampled"}),
        ({"logit_bias": {3: 0.5}}, {"sampled", "bias"}),
        ({"allowed_token_ids": (3,)}, {"sampled", "allowed"}),
        ({"bad_words": [(3,)]}, {"sampled", "bad_words"}),
        ({"min_tokens": 3}, {"sampled", "min_tokens"}),
        ({"min_tokens": 3, "ignore_eos": True}, {"sampled"}),
        ({"transformed_logprobs": True}, {"sampled", "transformed_logprobs"}),
        ({"logprobs": 1}, {"sampled", "top_logprobs"}),
        ({"stop": "x"}, {"sampled"}),
    ],
    ids=lambda value: str(sorted(value)) if isinstance(value, set) else str(value),
)
def test_a_request_asks_for_the_features_of_its_options_and_no_others(settings, names):
    assert set(features_of(job_of(**settings), VOCAB).names) == names


def test_a_row_of_options_holds_what_was_asked_for_and_a_greedy_one_no_filters():
    filters = {"top_k": 5, "top_p": 0.25, "min_p": 0.5}
    sampled = job_of(
        temperature=0.5,
        **filters,
        logit_bias={9: -1.0, 4: 2.0},
        bad_words=[(6,), (7, 8)],
        allowed_token_ids=[0, 33, 63],
        min_tokens=4,
        speculative=False,
    )
    rows = option_rows([sampled, job_of(temperature=0.0, **filters)], VOCAB, 3)
    assert rows.temperature.tolist() == [0.5, 0.0]
    assert [x.tolist() for x in (rows.top_k, rows.top_p, rows.min_p)] == [
        [5, 0], [0.25, 1.0], [0.5, 0.0]
    ]  # fmt: skip
    assert rows.bias_ids[0, :3].tolist() == [9, 4, -1]
    assert rows.bias_values[0, :3].tolist() == [-1.0, 2.0, 0.0]
    assert rows.bad_words[0, :3, -2:].tolist() == [[-1, 6], [7, 8], [-1, -1]]
    assert rows.allowed.tolist() == [[1, 1 << 1 | 1 << 31], [0xFFFFFFFF] * 2]
    assert rows.stop_ids.tolist() == [[EOS, -1, -1]] * 2
    assert rows.min_len.tolist() == [7, 0] and rows.prompt_len.tolist() == [3, 3]
    assert rows.speculate.tolist() == [False, True]


def test_a_bad_word_that_is_a_string_is_banned_with_and_without_a_space_before_it():
    tokenizer = Pieces()
    decoded = [tokenizer.decode(ids) for ids in bad_word_ids(["abx", "  stop", (3, 4)], tokenizer)]
    assert decoded == ["abx", " abx", "stop", " stop", tokenizer.decode((3, 4))]
    assert bad_word_ids([(3, 4), (3, 4)], None) == ((3, 4),)


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
