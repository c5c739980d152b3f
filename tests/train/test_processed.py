"""Log-probabilities after all sampling transforms, against a float64 reference of one token."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decode import transform_reference as reference
from tiers import slow_but

from specjax.config import SamplingParams
from train.loss.logprobs import Scoring, Transforms, score_logits
from train.loss.packing import Sample, pack

ROWS, LENGTH, VOCAB, STOPS = 2, 32, 13, (3, 4)
FILTERS = {"top_k": 6, "top_p": 0.8, "min_p": 0.05}
PENALTIES = {"repetition_penalty": 1.4, "presence_penalty": 0.3, "frequency_penalty": 0.2}
CASES = {
    "filters": {"temperature": 0.7, **FILTERS},
    "masks": {"logit_bias": {2: 1.5, 7: -3.0}, "min_tokens": 3, "top_k": 4},
    "everything": {**FILTERS, **PENALTIES, "logit_bias": {5: 2.0}, "min_tokens": 2},
    "greedy": {"temperature": 0.0, **PENALTIES},
}


def packed(seed):
    """Several samples to a row, whose tokens repeat, and raw logits."""
    rng = np.random.default_rng(seed)
    samples = []
    for i in range(7):
        prompt = rng.integers(0, VOCAB, rng.integers(1, 5)).tolist()  # stop tokens among them
        response = rng.integers(5, VOCAB, rng.integers(3, 8)).tolist()
        samples.append(Sample(i, prompt, response))
    batch = pack(samples, LENGTH, ROWS, 1)[0]
    assert (batch["segment_ids"].max(axis=1) >= 3).all()
    return samples, batch, rng.normal(0, 2, (ROWS, LENGTH, VOCAB)).astype(np.float32)


def expected(logits, params, prompt, output, token, kept=None):
    """Log-probability of a token and the entropy there, and what the filters keep beside it."""
    neutral = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
    scores = reference.transform(logits, params | neutral, prompt, output, [], STOPS)
    if kept is None:
        kept = np.isfinite(reference.transform(logits, params, prompt, output, [], STOPS))
        kept[token] = True
    p = np.where(kept, np.exp(scores - scores.max()), 0.0)
    p /= p.sum()
    return np.log(p[token]), -(p[p > 0] * np.log(p[p > 0])).sum(), kept


def places(samples, batch):
    """(row, index, sample, how many tokens of its response come before) of generated tokens."""
    for row, at in zip(*np.nonzero(batch["loss_mask"]), strict=True):
        sample = samples[batch["sample_ids"][row, at]]
        yield row, at, sample, batch["positions"][row, at] - len(sample.prompt_ids)


def transforms_of(case):
    return Transforms.of(SamplingParams(**case, max_tokens=9), STOPS, VOCAB)


@pytest.mark.parametrize("case", slow_but(CASES, "filters"))
def test_they_equal_a_reference_and_so_do_their_gradients(case):
    case = CASES[case]
    samples, batch, logits = packed(3)
    transforms, outside = transforms_of(case), 0

    def total(logits, weights):
        logprobs, entropy = score_logits(Scoring(transforms=transforms), logits, batch)
        return jnp.sum(logprobs * weights), (logprobs, entropy)

    weights = np.random.default_rng(4).normal(size=(ROWS, LENGTH)).astype(np.float32)
    gradient, (logprobs, entropy) = jax.jit(jax.grad(total, has_aux=True))(logits, weights)
    wanted = np.zeros(logits.shape)
    for row, at, sample, count in places(samples, batch):
        here, token = logits[row, at - 1].astype(np.float64), sample.response_ids[count]
        history = sample.prompt_ids, sample.response_ids[:count]
        logprob, spread, kept = expected(here, case, *history, token)
        outside += reference.transform(here, case, *history, [], STOPS)[token] == -np.inf
        assert logprobs[row, at] == pytest.approx(logprob, abs=1e-5)
        assert entropy[row, at] == pytest.approx(spread, abs=1e-5)
        for v in range(VOCAB):
            step = 1e-6 * np.eye(VOCAB)[v]
            ends = [expected(here + s, case, *history, token, kept)[0] for s in (step, -step)]
            wanted[row, at - 1, v] = weights[row, at] * (ends[0] - ends[1]) / 2e-6
    np.testing.assert_allclose(gradient, wanted, atol=2e-4)
    elsewhere = batch["loss_mask"] == 0
    assert (np.asarray(logprobs)[elsewhere] == 0).all() and (entropy[elsewhere] == 0).all()
    assert (outside > 0) == bool(set(case) & set(FILTERS)), "tokens that the filters drop are there"


@pytest.mark.slow
def test_a_token_outside_of_what_filters_keep_has_a_logprob_and_a_gradient_that_raises_it():
    samples, batch, _ = packed(3)
    row, at, sample, count = next(places(samples, batch))
    token = sample.response_ids[count]
    logits = np.tile(np.linspace(0.0, 9.0, VOCAB, dtype=np.float32), (ROWS, LENGTH, 1))
    logits[row, at - 1, token] = -50.0
    transforms = transforms_of({"top_k": 3})

    def logprob(logits):
        return score_logits(Scoring(transforms=transforms), logits, batch)[0][row, at]

    value, gradient = jax.value_and_grad(logprob)(logits)
    best = np.sort(logits[row, at - 1])[-3:]
    assert value == pytest.approx(-50.0 - np.log(np.exp(best).sum()), rel=1e-5)
    gradient = np.asarray(gradient)[row, at - 1]
    assert np.isfinite(gradient).all() and gradient[token] == pytest.approx(1.0)
    assert (gradient != 0).sum() == 4, "of what the filters drop nothing else has a gradient"
