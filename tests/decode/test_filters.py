"""Thresholds found by halving are the exact ones."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import transform_reference as reference

from specjax.decode import sampling

SHAPE = (3, 4, 50)


@jax.jit
def top_k(scores, k):
    return sampling.drop_below(scores, sampling.top_k_threshold(scores, k))


@jax.jit
def top_p(scores, p):
    return sampling.drop_below(scores, sampling.top_p_threshold(scores, p))


@jax.jit
def min_p(scores, p):
    return sampling.drop_below(scores, sampling.min_p_threshold(scores, p))


BY_HALVING = jax.jit(sampling.by_halving)
OTHERS = [
    jax.jit(form)
    for form in (
        sampling.digits_side_by_side,
        functools.partial(sampling.digits_side_by_side, unroll=True),
        sampling.digits_by_one_reduction,
    )
]


def compare(ours, scores, rule, values):
    for b, value in enumerate(values):
        for r in range(scores.shape[1]):
            expected = np.array(rule(scores[b, r].tolist(), float(value)), np.float32)
            np.testing.assert_array_equal(ours[b, r], expected)


def random_scores(generator, shape=SHAPE):
    """Normal, with ties, impossible tokens, or numbers of every magnitude."""
    scores = generator.normal(0, 4, shape)
    kind = generator.integers(4)
    if kind == 1:
        scores = np.round(scores)
    if kind == 2:
        scores[generator.random(shape) < 0.9] = -np.inf
        scores[..., 7] = 1.0
    if kind == 3:
        scores = np.sign(scores) * 10.0 ** generator.integers(-44, 38, shape)
    return scores.astype(np.float32)


@pytest.mark.parametrize("seed", range(12))
def test_top_k_keeps_the_k_largest_and_ties_with_the_last(seed):
    generator = np.random.default_rng(seed)
    scores = random_scores(generator)
    k = generator.choice([-1, 0, 1, 2, 10, 49, 50, 51, 10_000], SHAPE[0]).astype(np.int32)
    compare(top_k(scores, k), scores, lambda x, k: reference.keep_top_k(x, int(k)), k)


@pytest.mark.parametrize("seed", range(12))
def test_top_p_keeps_the_fewest_tokens_that_reach_p_and_ties_with_the_last(seed):
    generator = np.random.default_rng(seed)
    scores = random_scores(generator)
    p = generator.choice([1e-9, 1.0, *generator.random(4)], SHAPE[0]).astype(np.float32)
    compare(top_p(scores, p), scores, reference.keep_top_p, p)


@pytest.mark.parametrize(("name", "value"), [("top_k", 0), ("top_p", 1.0), ("min_p", 0.0)])
def test_neutral_values_keep_every_bit(name, value):
    scores = np.array([[[0.0, -0.0, 80.0, -1e30, -np.inf, np.nan, 1e-44]]], np.float32)
    ours = np.asarray(
        {"top_k": top_k, "top_p": top_p, "min_p": min_p}[name](scores, np.array([value]))
    )
    np.testing.assert_array_equal(ours.view(np.uint32), scores.view(np.uint32))


@pytest.mark.parametrize("nan", [np.nan, -np.nan])
def test_nan_is_never_dropped(nan):
    scores = np.array([[[3.0, nan, 1.0, 2.0]]], np.float32)
    for ours in (
        top_k(scores, np.array([2])),
        top_p(scores, np.array([0.5], np.float32)),
        min_p(scores, np.array([0.5], np.float32)),
    ):
        assert np.isnan(ours[0, 0, 1])
        assert int(jnp.argmax(ours[0, 0])) == 1


@pytest.mark.parametrize("shape", [SHAPE, (4, 50)])
@pytest.mark.parametrize("seed", range(8))
def test_the_digits_of_a_threshold_are_the_same_in_either_form(seed, shape):
    """Sums in a row, as of a split vocabulary, side by side, as on TPUs, by one reduction, as on
    GPUs, or by halving."""
    generator = np.random.default_rng(seed)
    scores = random_scores(generator, shape)
    weights = generator.integers(0, 9, shape).astype(np.float32)  # sums are exact
    need = generator.integers(0, 300, shape[:-1]).astype(np.float32)
    lowest = sampling._order(jnp.full(need.shape, -jnp.inf))
    too_far = sampling._order(jnp.asarray(scores.max(-1))) + 1
    arguments = scores, weights, need, lowest, too_far
    halved = BY_HALVING(*arguments)
    for form in OTHERS:
        np.testing.assert_array_equal(form(*arguments), halved)
    threshold = sampling.largest_threshold(scores, weights, need)
    np.testing.assert_array_equal(threshold, sampling._number(halved))


@pytest.mark.parametrize("spread", [0.01, 3.0])
def test_thresholds_are_exact_at_a_vocabulary_of_151936(spread):
    vocab = 151_936
    scores = np.random.default_rng(0).normal(0, spread, (1, 2, vocab)).astype(np.float32)
    order = np.sort(scores.astype(np.float64), axis=-1)[..., ::-1]
    mass = np.exp(order - order[..., :1])
    cumulative = np.cumsum(mass, axis=-1) / mass.sum(axis=-1, keepdims=True)
    for k in (1, 50, 100_000):
        ours = np.asarray(sampling.top_k_threshold(scores, np.array([k])))
        np.testing.assert_array_equal(ours, order[..., k - 1])
    for p in (0.1, 0.9, 0.999):
        ours = np.asarray(sampling.top_p_threshold(scores, np.array([p], np.float32)))
        for r in range(2):
            kept = int((order[0, r] >= ours[0, r]).sum())
            assert cumulative[0, r, kept - 1] >= p - 1e-6
            assert cumulative[0, r, kept - 2] < p + 1e-6
