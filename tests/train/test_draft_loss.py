"""Targets and losses of the draft head, on packed rows."""

import jax
import numpy as np
import pytest

from train.heads.training import draft_targets, roll_left
from train.loss.packing import Sample, pack

VOCAB = 7


def random_packed(seed):
    """(packed row, its samples alone in rows of their own)."""
    rng = np.random.default_rng(seed)
    samples = [
        Sample(i, rng.integers(1, VOCAB, 1 + i % 3).tolist(), rng.integers(1, VOCAB, n).tolist())
        for i, n in enumerate((5, 1, 3, 2))
    ]
    return pack(samples, 24, 1)[0], [pack([s], 24, 1)[0] for s in samples]


def test_mask_is_the_product_of_the_two_rolled_masks():
    tokens = np.array([[1, 2, 3, 4, 5]])
    targets = draft_targets(tokens, np.array([[1.0, 0, 1, 1, 0]]), np.ones((1, 5), int), step=0)
    assert targets.inputs.tolist() == [[2, 3, 4, 5, 0]]
    assert targets.labels.tolist() == [[3, 4, 5, 0, 0]]
    assert targets.mask.tolist() == [[0, 1, 0, 0, 0]]


def test_recursive_steps_shift_further_and_need_every_token_between():
    tokens = np.arange(1, 9)[None]
    mask = np.array([[0.0, 1, 1, 1, 1, 0, 1, 1]])
    segments = np.ones((1, 8), int)
    one, two = (draft_targets(tokens, mask, segments, step) for step in (1, 2))
    assert one.inputs.tolist() == [[3, 4, 5, 6, 7, 8, 0, 0]]
    assert one.labels.tolist() == [[4, 5, 6, 7, 8, 0, 0, 0]]
    assert one.mask.tolist() == [[1, 1, 0, 0, 0, 0, 0, 0]]
    assert two.labels.tolist() == [[5, 6, 7, 8, 0, 0, 0, 0]]
    assert two.mask.tolist() == [[1, 0, 0, 0, 0, 0, 0, 0]]


def test_rolls_stop_at_segment_boundaries():
    x = np.array([[1, 2, 3, 4, 5, 6, 7]])
    segments = np.array([[1, 1, 1, 2, 2, 0, 0]])
    assert roll_left(x, segments, 1).tolist() == [[2, 3, 0, 5, 0, 0, 0]]
    assert roll_left(x, segments, 2).tolist() == [[3, 0, 0, 0, 0, 0, 0]]
    assert roll_left(x, segments, 99).tolist() == [[0] * 7]
    assert roll_left(x, segments, 0).tolist() == [[1, 2, 3, 4, 5, 0, 0]]


@pytest.mark.parametrize("step", range(4))
def test_packed_targets_equal_those_of_samples_alone(step):
    packed, alone = random_packed(step)
    fields = ("tokens", "loss_mask", "segment_ids")
    together = draft_targets(*(packed[f] for f in fields), step)
    for segment, single in enumerate(alone, start=1):
        inside, own = packed["segment_ids"] == segment, single["segment_ids"] == 1
        apart = draft_targets(*(single[f] for f in fields), step)
        for a, b in zip(together, apart, strict=True):
            np.testing.assert_array_equal(np.asarray(a)[inside], np.asarray(b)[own])


def test_target_logits_are_those_that_decide_the_label():
    packed, _ = random_packed(5)
    tokens, segments = packed["tokens"], packed["segment_ids"]
    # A policy that is certain of the next token: its logits at t point at tokens[t + 1].
    following = np.asarray(roll_left(tokens, segments, 1))
    policy = 50.0 * jax.nn.one_hot(following, VOCAB)
    for step in range(3):
        targets = draft_targets(tokens, packed["loss_mask"], segments, step)
        aligned = roll_left(policy, segments, step + 1)
        inside = np.asarray(targets.mask) > 0
        assert inside.any()
        assert (np.argmax(aligned, -1)[inside] == np.asarray(targets.labels)[inside]).all()
