"""Logprobs of both distributions, of chosen and best tokens, against float64 from full forwards."""

import dataclasses
import functools

import numpy as np
import oracle
import pytest
from shared import CFG, PROMPTS, shared_llm, weights

from specjax import SamplingParams

CASES = {
    "nothing asked for": {},
    "greedy": {"temperature": 0.0},
    "cool": {"temperature": 0.6},
    "top_p": {"temperature": 0.8, "top_p": 0.7},
    "greedy penalties": {"temperature": 0.0, "repetition_penalty": 1.5, "frequency_penalty": 0.7},
    "everything": {
        "temperature": 0.9,
        "top_k": 9,
        "top_p": 0.95,
        "min_p": 0.01,
        "presence_penalty": 0.5,
        "logit_bias": {4: 2.0},
        "allowed_token_ids": range(50),
        "bad_words": [(11,)],
        "stop_token_ids": (2, 5),
        "min_tokens": 9,
    },
}


@functools.cache
def outputs(engine, best=5):
    """For each case: params, the sample decoded by hand, and the engine's, all in one batch."""
    params = [
        SamplingParams(
            seed=i, max_tokens=20, ignore_eos=True, transformed_logprobs=True, logprobs=best, **case
        )
        for i, case in enumerate(CASES.values())
    ]
    prompts = [PROMPTS[i % len(PROMPTS)] for i in range(len(params))]
    outs = shared_llm(engine).generate(prompts, params)
    hand = [
        oracle.decode(CFG, weights()[0], p, sampling)
        for p, sampling in zip(prompts, params, strict=True)
    ]
    samples = [out.samples[0] for out in outs]
    return dict(zip(CASES, zip(params, hand, samples, strict=True), strict=True))


def expected_rows(params, hand):
    """Log-distributions [tokens][V], temperature-scaled and transformed."""
    scaled = [oracle.log_softmax(x / (params.temperature or 1.0)) for x in hand.logits]
    return scaled, [oracle.log_softmax(x) for x in hand.scores]


@pytest.mark.parametrize("engine", ["speculative", "plain"])
@pytest.mark.parametrize("case", CASES)
def test_chosen_and_best_logprobs_are_those_of_the_distribution_they_are_named_after(engine, case):
    params, hand, sample = outputs(engine)[case]
    assert sample.token_ids == hand.tokens
    scaled, transformed = expected_rows(params, hand)
    for token, row, logprob in zip(
        sample.token_ids, transformed, sample.transformed_logprobs, strict=True
    ):
        assert logprob == pytest.approx(row[token], abs=2e-4)
    best = zip(sample.token_ids, scaled, sample.logprobs, sample.top_logprobs, strict=True)
    for token, row, logprob, top in best:
        assert logprob == pytest.approx(row[token], abs=2e-4)
        ordered = [int(t) for t in np.argsort(-row, kind="stable")[:5]]
        assert list(top) == (ordered if token in ordered else [*ordered, token])
        for t, value in top.items():
            assert value == pytest.approx(row[t], abs=2e-4)
        assert top[token] == logprob


def test_the_two_distributions_differ_exactly_where_transforms_act():
    found = outputs("speculative")
    for case in ("nothing asked for", "greedy", "cool"):
        sample = found[case][2]
        np.testing.assert_allclose(sample.transformed_logprobs, sample.logprobs, atol=1e-5)
    for case in ("top_p", "greedy penalties", "everything"):
        sample = found[case][2]
        assert np.abs(np.subtract(sample.transformed_logprobs, sample.logprobs)).max() > 0.05


@pytest.mark.parametrize("engine", ["speculative", "plain"])
def test_a_request_gets_what_it_asked_for_whatever_its_neighbours_ask_for(engine):
    asked = [(False, None), (True, 0), (False, 3), (True, 1), (False, 20)]
    params = [
        SamplingParams(seed=0, max_tokens=7, ignore_eos=True, transformed_logprobs=t, logprobs=n)
        for t, n in asked
    ]
    outs = shared_llm(engine).generate([PROMPTS[0]] * len(asked), params)
    for (transformed, best), out in zip(asked, outs, strict=True):
        sample = out.samples[0]
        assert (sample.transformed_logprobs is not None) == transformed
        assert (sample.top_logprobs is not None) == (best is not None)
        for top in sample.top_logprobs or []:
            assert len(top) in (best, best + 1)
    [alone] = shared_llm(engine).generate(PROMPTS[:1], dataclasses.replace(params[0], n=len(asked)))
    assert [out.samples[0].token_ids for out in outs] == [s.token_ids for s in alone.samples]


@pytest.mark.parametrize("engine", ["speculative", "plain"])
def test_logprobs_of_a_long_sample_are_in_place_over_many_chunks_and_slots(engine):
    """More samples than slots, several chunks each: no entry is lost, repeated or a neighbour's."""
    llm = shared_llm(engine)
    params = [
        SamplingParams(
            max_tokens=30 - 3 * i,
            ignore_eos=True,
            transformed_logprobs=True,
            logprobs=1,
            seed=i,
        )
        for i in range(7)
    ]
    prompts = [PROMPTS[i % 4] for i in range(7)]
    whole = llm.generate(prompts, params)
    llm.engine.controller.rounds_hint = 2
    try:
        pieces = llm.generate(prompts, params)
    finally:
        llm.engine.controller.rounds_hint = None
    for a, b, sampling in zip(whole, pieces, params, strict=True):
        a, b = a.samples[0], b.samples[0]
        assert len(a.transformed_logprobs) == len(a.top_logprobs) == sampling.max_tokens
        assert a == b
        assert all(t in top for t, top in zip(a.token_ids, a.top_logprobs, strict=True))
