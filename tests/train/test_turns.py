"""Tokens of a response that the policy did not sample: carried from the record to the gradient."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from train.heads.training import draft_targets
from train.loss.algo import algo
from train.loss.packing import pack
from train.loss.terms import count_denominators, policy_loss
from train.registry import OBJECTIVES
from train.rollout.advantages import to_samples
from train.rollout.groups import Group, Response

# Two turns of the policy with two tokens of a tool between them.
TURNS = [1, 1, 0, 0, 1]


def group(masks=(TURNS, None)) -> Group:
    """Two samples of five tokens, complete, of step 1."""
    responses = []
    for first, mask in zip((10, 20), masks, strict=True):
        tokens = list(range(first, first + 5))
        response = Response(tokens, [-1.0] * 5, finish_reason="stop", loss_mask=mask)
        response.end_step(1, None)
        responses.append(response)
    return Group(0, 1, 1, None, [5, 6], responses, [0.0, 1.0])


def batch_of(groups: list[Group]):
    advantages = algo().advantages(np.array([g.rewards for g in groups]))
    return pack(to_samples(groups, advantages), 16, 1)[0]


def test_the_mask_goes_from_the_record_into_the_batch():
    rollout = [group()]
    batch = batch_of(rollout)
    expected = [0, 0, *TURNS, 0, 0, 1, 1, 1, 1, 1, 0, 0]
    assert batch["loss_mask"].tolist() == [expected]
    assert (batch["advantages"] != 0).tolist() == [[x == 1 for x in expected]]
    assert batch["tokens"].tolist() == [[5, 6, *range(10, 15), 5, 6, *range(20, 25), 0, 0]]
    assert count_denominators([batch]) == (8, 2)


@pytest.mark.parametrize("garbage", [(-50.0, 7.0), (-np.inf, -np.inf), (-np.inf, 0.0), (np.nan, 0)])
@pytest.mark.parametrize("objective", OBJECTIVES.rows)
def test_what_the_policy_did_not_sample_has_no_gradient_and_no_weight(objective, garbage):
    """Whatever the log-probabilities are there: new, and all others."""
    batch, (new, others) = batch_of([group()]), garbage
    inside = batch["loss_mask"] > 0
    logprobs = jnp.asarray(np.where(inside, -1.0, new), jnp.float32)
    for name in ("old_logprobs", "behaviour_logprobs"):
        batch[name] = np.where(inside, -1.1, others).astype(np.float32)
    settings = {"loss_aggregation": "sequence", "kl_loss_coef": 0.1, "tis": True}
    settings |= {"clip_ratio": 0.5, "clip_ratio_high": 0.5}
    counts, cfg = count_denominators([batch]), algo(objective, **settings)

    def loss(x):
        return policy_loss(x, batch, cfg, counts, jnp.asarray(batch["old_logprobs"]))

    gradient, sums = jax.grad(loss, has_aux=True)(logprobs)
    assert all(np.isfinite(value) for value in sums.values())
    gradient, masked = np.asarray(gradient[0]), ~inside[0]
    assert not gradient[masked].any() and gradient[~masked].all() and np.isfinite(gradient).all()
    weights = cfg.weights(batch["loss_mask"], batch["segment_ids"], counts)[0]
    assert weights[2:7].tolist() == pytest.approx([1 / 6, 1 / 6, 0, 0, 1 / 6])


def test_the_head_learns_nothing_across_what_the_policy_did_not_sample():
    batch = batch_of([group()])
    names = ("tokens", "loss_mask", "segment_ids")
    mask = draft_targets(*(batch[name] for name in names), 0).mask[0]
    # Of the first sample only 10, 11: a state, the token behind it, and the one to be drafted.
    assert np.flatnonzero(mask[:7]).tolist() == [1]


def test_a_carried_record_keeps_its_mask_and_is_cut_with_it():
    again = group()
    again.responses[0].end_step(2, None)
    saved = json.loads(json.dumps(again.to_json()))
    restored = Group.from_json(saved, None, again.prompt)
    assert [r.loss_mask for r in restored.responses] == [TURNS, None]
    cut = Response(list(range(5)), [-1.0] * 5, loss_mask=[*TURNS])
    assert cut.end_step(1, 3) == 2
    assert (cut.token_ids, cut.loss_mask) == ([0, 1, 2], TURNS[:3])


def test_what_is_carried_does_not_depend_on_how_far_a_sample_went_on():
    """An observation that ends at the step's budget: appended just now, or already gone beyond."""
    carried = []
    for further in (0, 3):
        response = Response([1, 2, 3, 4], [-1.0] * 4, turns=[[0, 4, 0.5, [{"role": "tool"}]]])
        response.observe([8, 9])
        for values in (response.token_ids, response.logprobs, response.loss_mask):
            values += [1] * further
        response.end_step(1, 6)
        response.num_carried = len(response.token_ids)
        response.end_step(2, 0)  # a step that finds enough groups complete
        carried.append(response)
    assert carried[0] == carried[1] and carried[0].token_ids == [1, 2, 3, 4]
    assert carried[0].turns and carried[0].weight_versions == [(0, 1)]
