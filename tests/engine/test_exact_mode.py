"""`exact_mode` compares with plain decoding, and tells rounding from a bug under every filter."""

import functools
import logging

import numpy as np
import oracle
import pytest
from shared import BATCH, CFG, MAX_LEN, PROMPTS, VOCAB, weights
from tiny import tiny_model

from specjax import LLM, SamplingParams, SpecConfig
from specjax.decode import round as decode_round
from specjax.engine.compare import first_difference
from specjax.engine.request import make_jobs

OPTIONS = [
    SamplingParams(max_tokens=20, temperature=0.0, repetition_penalty=1.3),
    SamplingParams(seed=0, max_tokens=20, temperature=0.7, top_p=0.8, n=2),
    SamplingParams(seed=0, max_tokens=20, temperature=1.0, top_k=5, frequency_penalty=0.5),
    SamplingParams(max_tokens=20, temperature=1.0, min_p=0.1, bad_words=[(3,)], seed=4),
]


def exact_llm(**spec):
    spec = SpecConfig("2_1_3", exact_mode=True, **spec)
    return LLM((CFG, *weights()), spec, max_batch=BATCH, max_len=MAX_LEN)


@pytest.fixture(scope="module")
def llm():
    return exact_llm()


@pytest.fixture
def warnings(caplog):
    """What was logged at level WARNING, as text, but for a compiler that is missing."""
    caplog.set_level(logging.WARNING)

    def found():
        ours = (r for r in caplog.records if r.name.startswith("specjax"))
        return [r.getMessage() for r in ours if r.name != "specjax.weights.matrix"]

    return found


# --- the mode -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_outputs_are_the_speculative_ones_and_nothing_differs(llm, warnings):
    outs = llm.generate(PROMPTS, OPTIONS)
    assert llm.differences == [] and warnings() == []
    assert sum(s.stats.accepted for out in outs for s in out.samples) > 20
    assert llm.totals.rounds == sum(s.stats.rounds for out in outs for s in out.samples)


@pytest.mark.slow
def test_the_plain_engine_is_kept_between_calls_and_follows_the_weights(llm):
    llm.generate(PROMPTS, OPTIONS)
    plain, built = llm._plain, llm._plain.runner.compilations
    _, params, _ = tiny_model(CFG, seed=9)
    llm.update_weights(params)
    try:
        llm.generate(PROMPTS, OPTIONS)
        # An old policy in the plain arm would differ at once.
        assert llm.differences == []
    finally:
        llm.update_weights(*weights())
    assert llm._plain is plain and plain.runner.compilations == built
    assert llm.compare_with_plain(PROMPTS, OPTIONS) == [] and llm._plain is plain


@pytest.mark.slow
def test_every_sample_that_differs_is_warned_of_once_with_position_and_tokens(
    monkeypatch, warnings
):
    """The bonus token's neighbour is emitted instead: a decoder that is plainly broken."""
    accept = decode_round.accept

    def broken(*args):
        found = accept(*args)
        return found._replace(tokens=(found.tokens + (found.count == 3)[:, None]) % VOCAB)

    monkeypatch.setattr(decode_round, "accept", broken)
    llm = exact_llm()
    params = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
    outs = llm.generate(PROMPTS, params)
    monkeypatch.undo()
    differing = 0
    for request, (prompt, out) in enumerate(zip(PROMPTS, outs, strict=True)):
        right = oracle.decode(CFG, weights()[0], prompt, params).tokens
        got = out.samples[0].token_ids
        if got == right:
            continue
        at = next(i for i in range(20) if got[i] != right[i])
        [difference] = [d for d in llm.differences if d.request == request]
        assert not difference.explained
        assert difference.position == len(prompt) + at
        assert (difference.plain_token, difference.spec_token) == (right[at], got[at])
        message = warnings()[differing]
        for part in (
            f"position {len(prompt) + at}",
            f"plain {right[at]}",
            f"speculative {got[at]}",
        ):
            assert part in message
        assert "NOT explained" in message
        differing += 1
    assert len(warnings()) == len(llm.differences) == differing > 1


# --- what explains a difference -------------------------------------------------------------------


@functools.cache
def duel():
    """A position at which the token that noise favours is not the most likely one.

    Returns:
      prompt, seed, the token that noise favours, the scores, and which token would come if it and
      all less likely ones were cut.
    """
    prompt = PROMPTS[1]
    scores = oracle.logits_at(CFG, weights()[0], prompt)
    for seed in range(100):
        job = make_jobs(prompt, SamplingParams(seed=seed), ())[0]
        noisy = scores + np.asarray(oracle._noise(job.words, np.int32(len(prompt))), np.float64)
        winner = int(noisy.argmax())
        above = scores > scores[winner]
        if 2 <= above.sum() <= 6:
            return prompt, seed, winner, scores, int(np.where(above, noisy, -np.inf).argmax())
    raise AssertionError("no seed was found")


def judged(llm, **settings):
    prompt, seed, winner, _, runner_up = duel()
    job = make_jobs(prompt, SamplingParams(seed=seed, **settings), ())[0]
    return first_difference(llm.engine.runner, job, [runner_up], [winner])


@pytest.mark.parametrize("where", ["at", "below", "above"])
@pytest.mark.parametrize("name", ["min_p", "top_p"])
def test_a_token_at_the_edge_of_a_filter_explains_a_difference_and_one_beyond_it_does_not(
    llm, name, where
):
    _, _, winner, scores, _ = duel()
    p = np.exp(oracle.log_softmax(scores))
    if name == "min_p":
        edge, step = p[winner] / p.max(), 0.02
    else:
        edge, step = p[p > p[winner]].sum(), 0.001
    value = edge * {"at": 1, "below": 1 - step, "above": 1 + step}[where]
    found = judged(llm, **{name: float(value)})
    assert found.explained == (where == "at")


def test_a_token_that_top_k_or_a_mask_cuts_explains_nothing(llm):
    _, _, winner, scores, _ = duel()
    rank = int((scores > scores[winner]).sum())
    assert not judged(llm, top_k=rank).explained
    assert not judged(llm, top_k=rank + 1).explained
    masked = judged(llm, bad_words=[(winner,)])
    assert not masked.explained


def test_a_bias_that_makes_two_tokens_tie_explains_a_difference(llm):
    prompt, seed, winner, scores, runner_up = duel()
    job = make_jobs(prompt, SamplingParams(seed=seed), ())[0]
    noisy = scores + np.asarray(oracle._noise(job.words, np.int32(len(prompt))), np.float64)
    gap = float(noisy[winner] - noisy[runner_up])
    assert not judged(llm).explained
    assert judged(llm, logit_bias={winner: -gap}).explained
    assert not judged(llm, logit_bias={winner: -gap - 0.1}).explained
