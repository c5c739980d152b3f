"""The sampling transforms: what an independent float64 reference says, at every node of a tree."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import transform_reference as reference
from transform_cases import (
    ROWS,
    SLOTS,
    STOPS,
    TRANSFORMS,
    VOCAB,
    Slot,
    expected_scores,
    random_logits,
    random_slot,
    random_tree,
    rows_of,
    scores_of,
)

from specjax.config import SamplingParams
from specjax.decode import sampling
from specjax.decode.options import Features
from specjax.decode.sampling import Rows

# --- against the reference ------------------------------------------------------------------------


def agree(ours, expected):
    np.testing.assert_array_equal(np.isneginf(ours), np.isneginf(expected))
    np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("seed", range(24))
def test_mixed_options_agree_with_the_reference_at_every_node_of_a_tree(seed):
    generator = np.random.default_rng(seed)
    slots = [random_slot(generator) for _ in range(SLOTS)]
    paths = [random_tree(generator) for _ in range(SLOTS)]
    logits = random_logits(generator, (SLOTS, ROWS, VOCAB))
    ours = scores_of(logits, slots, rows=rows_of(paths, depth=4))
    agree(ours, expected_scores(logits, slots, paths))


@pytest.mark.parametrize("seed", range(8))
def test_chains_with_a_static_depth_agree_with_the_reference(seed):
    generator = np.random.default_rng(seed)
    slots = [random_slot(generator) for _ in range(SLOTS)]
    drafts = generator.integers(0, 6, (SLOTS, ROWS - 1)).tolist()
    paths = [[draft[:depth] for depth in range(ROWS)] for draft in drafts]
    logits = random_logits(generator, (SLOTS, ROWS, VOCAB))
    rows = rows_of(paths)
    ours = scores_of(logits, slots, rows=Rows(rows.depth[0], rows.path))
    agree(ours, expected_scores(logits, slots, paths))


def test_random_cases_exercise_every_option():
    """Guards the two tests above: each option, left out, changes some expected score."""
    generator = np.random.default_rng(0)
    neutral_params, decisive = SamplingParams(), set()
    for _ in range(60):
        slot, logits = random_slot(generator), random_logits(generator, (VOCAB,))
        full = reference.transform(logits, *slot[:3], [], STOPS)
        for name in (f.name for f in dataclasses.fields(SamplingParams)):
            default = getattr(neutral_params, name)
            other = dataclasses.replace(slot.params, **{name: default})
            if (reference.transform(logits, other, *slot[1:3], [], STOPS) != full).any():
                decisive.add(name)
    assert decisive == {
        *("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty"),
        *("frequency_penalty", "logit_bias", "allowed_token_ids", "bad_words", "min_tokens"),
    }


# --- penalties along branches ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        (dict(repetition_penalty=2.0), [(2.0, 2.0), (2.0, 2.0), (2.0, 2.0)]),
        (dict(presence_penalty=2.0), [(4.0, 4.0), (4.0, 2.0), (4.0, 2.0)]),
        (dict(frequency_penalty=1.0), [(4.0, 4.0), (4.0, 3.0), (4.0, 2.0)]),
    ],
)
def test_repeats_on_the_path_count_once_or_each_time_and_the_prompt_only_for_repetition(
    params, expected
):
    logits = np.full((1, 3, VOCAB), 4.0, np.float32)
    # Token 6 stands in the prompt alone, token 7 in the prompt and, from row 1 on, on the path.
    slots = [Slot(SamplingParams(**params), [6, 7], [1])]
    scores = scores_of(logits, slots, [[[], [7], [7, 7]]])[0]
    assert [(float(s[6]), float(s[7])) for s in scores] == expected


# --- masks along branches -------------------------------------------------------------------------


def impossible(scores):
    return set(np.flatnonzero(np.isneginf(scores)).tolist())


def test_bad_words_are_banned_on_the_branch_that_began_them():
    logits = np.zeros((1, 5, VOCAB), np.float32)
    params = SamplingParams(bad_words=((11,), (2, 5, 7, 9), (5, 7, 12), (6, 7, 9)))
    scores = scores_of(logits, [Slot(params, [1], [2])], [[[], [5], [6], [5, 7], [6, 7]]])[0]
    assert [impossible(row) for row in scores] == [{11}, {11}, {11}, {9, 11, 12}, {9, 11}]


def test_bad_words_that_leave_nothing_are_lifted_for_that_row_and_allowed_ids_stay():
    logits = np.zeros((1, 2, VOCAB), np.float32)
    params = SamplingParams(allowed_token_ids=(7, 8), bad_words=((5, 7), (8,)), logit_bias={8: 2.0})
    scores = scores_of(logits, [Slot(params, [1])], [[[], [5]]])[0]
    assert impossible(scores[0]) == set(range(VOCAB)) - {7}
    assert impossible(scores[1]) == set(range(VOCAB)) - {7, 8} and scores[1, 8] == 2.0


def test_a_minimum_length_gives_way_to_allowed_ids_and_stands_before_bad_words():
    logits = np.zeros((1, 1, VOCAB), np.float32)
    only_stops = SamplingParams(min_tokens=9, allowed_token_ids=STOPS)
    scores = scores_of(logits, [Slot(only_stops, [1], (), STOPS)])[0, 0]
    assert impossible(scores) == set(range(VOCAB)) - set(STOPS)
    both = SamplingParams(min_tokens=9, allowed_token_ids=(*STOPS, 7), bad_words=((7,),))
    scores = scores_of(logits, [Slot(both, [1], (), STOPS)])[0, 0]
    assert impossible(scores) == set(range(VOCAB)) - {7}


# --- greedy beside sampled, and samples -----------------------------------------------------------


def test_greedy_rows_ignore_filters_and_noise_but_not_penalties():
    logits = np.random.default_rng(0).normal(0, 3, (4, 1, VOCAB)).astype(np.float32)
    common = dict(top_k=2, top_p=0.5, min_p=0.3, logit_bias={0: 1.0})
    temperature = np.array([0.0, 0.7, 0.0, 1.3], np.float32)
    slots = [Slot(SamplingParams(temperature=float(t), **common), [1]) for t in temperature]
    scores = scores_of(logits, slots)
    noise = np.random.default_rng(1).gumbel(0, 10, scores.shape).astype(np.float32)
    perturbed = np.asarray(sampling.perturb(jnp.asarray(scores), temperature, noise))
    biased = logits + np.eye(VOCAB, dtype=np.float32)[0]
    for b in range(4):
        if temperature[b] == 0:
            np.testing.assert_array_equal(scores[b], biased[b])
            np.testing.assert_array_equal(perturbed[b], scores[b])
        else:
            assert 1 <= np.isfinite(scores[b]).sum() <= 2
            np.testing.assert_array_equal(perturbed[b], scores[b] + noise[b])


@pytest.mark.parametrize("features", [Features(), TRANSFORMS], ids=["plain", "all"])
@pytest.mark.parametrize("vocab", [8193])
def test_no_token_without_mass_is_picked(vocab, features):
    generator = np.random.default_rng(vocab)
    logits = generator.normal(0, 2, (2, 1, vocab)).astype(np.float32)
    used = int(vocab * 0.9)
    logits[..., used:] = -np.inf  # rows of a padded vocabulary
    logits[..., generator.integers(0, used, used // 2)] = -np.inf
    params = SamplingParams(top_k=vocab // 3, top_p=0.999, min_p=1e-6, repetition_penalty=1.1)
    slots = [Slot(params, [1, used, vocab - 1], [2, 2]), Slot(params, [1])]
    scores = jnp.asarray(scores_of(logits, slots, features=features))
    one = jnp.ones(2)
    for seed in range(8):
        noise = jax.random.gumbel(jax.random.key(seed), scores.shape, mode="high")
        noise = noise.at[..., used:].add(1e6)  # the best noise stands where no mass is
        picked = np.asarray(jnp.argmax(sampling.perturb(scores, one, noise), axis=-1))
        assert (picked < used).all()
        assert np.isfinite(np.take_along_axis(logits, picked[..., None], -1)).all()
        assert np.isfinite(np.take_along_axis(np.asarray(scores), picked[..., None], -1)).all()


def test_nan_in_target_logits_is_picked_alike_by_every_program():
    logits = np.zeros((1, 2, VOCAB), np.float32)
    logits[..., 9], logits[..., 5] = np.nan, 3.0
    slots = [Slot(SamplingParams(top_k=2, top_p=0.5, min_p=0.2, frequency_penalty=1.0), [1])]
    for features in (Features(), TRANSFORMS):
        scores = scores_of(logits, slots, [[[], [5]]], features)
        assert np.argmax(scores, axis=-1).tolist() == [[9, 9]]


def test_sanitised_drafts_hold_no_nan_and_keep_their_order():
    logits = jnp.array([[jnp.nan, 1.0, jnp.inf, -jnp.inf, 2.0], [jnp.nan] * 5, [-jnp.inf] * 5])
    clean = np.asarray(sampling.sanitise(logits))
    assert not np.isnan(clean).any() and clean[0].max() == 0 and np.argmax(clean[0]) == 2
    assert impossible(clean[0]) == {3}
    assert (clean[1] == 0).all()
    assert impossible(clean[2]) == set(range(5))


def test_the_normaliser_tells_rows_that_are_no_distribution():
    """Of large numbers, too."""
    rng = np.random.default_rng(0)
    logits = (rng.normal(0, 4, (4, 6, VOCAB)) * 10.0 ** rng.integers(-2, 5, (4, 6, 1))).astype("f4")
    logits[rng.random(logits.shape) < 0.2] = -np.inf
    logits[0, 0], logits[1, 1] = -np.inf, np.float32(3e38)
    logits[2, 2, 3], logits[3, 3, 4], logits[3, 4, 5] = np.nan, np.inf, -np.nan
    valid = jax.jit(sampling.normaliser)(logits, np.array([0.0, 0.5, 1.0, 3.0], np.float32)).valid
    invalid = [(0, 0), (2, 2), (3, 3), (3, 4)]
    assert not any(valid[row] for row in invalid) and valid.sum() == 4 * 6 - len(invalid)
