"""Tokens of a response that the policy did not sample: carried from the record to the gradient."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.command_line import parse_config
from train.algo import algo
from train.draft_loss import draft_targets
from train.groups import Group, Response
from train.loss import count_denominators, policy_loss
from train.packing import Sample, pack
from train.rollout import Rollout, to_samples
from train.schema import RLConfig
from train.trainer import Trainer

# Two turns of the policy with two tokens of a tool between them.
TURNS = [1, 1, 0, 0, 1]


def group(masks=(TURNS, None)) -> Group:
    """Two samples of five tokens, complete, of step 1."""
    responses = []
    for first, mask in zip((10, 20), masks, strict=True):
        tokens = list(range(first, first + 5))
        response = Response(tokens, [-1.0] * 5, finish="stop", loss_mask=mask)
        response.close(1, None)
        responses.append(response)
    return Group(0, 1, 1, None, [5, 6], responses, [0.0, 1.0])


def batch_of(rollout: Rollout):
    advantages = algo().build().advantages(rollout.rewards)
    return pack(to_samples(rollout, advantages), 16, 1)[0]


def test_the_mask_goes_from_the_record_into_the_batch():
    rollout = Rollout.of([group((None, None)), group()]).select([1])
    batch = batch_of(rollout)
    expected = [0, 0, *TURNS, 0, 0, 1, 1, 1, 1, 1, 0, 0]
    assert batch["loss_mask"].tolist() == [expected]
    assert (batch["advantages"] != 0).tolist() == [[x == 1 for x in expected]]
    assert batch["tokens"].tolist() == [[5, 6, *range(10, 15), 5, 6, *range(20, 25), 0, 0]]
    assert count_denominators([batch]) == (8, 2)


def test_a_record_without_masks_is_packed_as_ever():
    plain = batch_of(Rollout.of([group((None, None))]))
    for masks in (([1] * 5, [1] * 5), (None, [1] * 5)):
        batch = batch_of(Rollout.of([group(masks)]))
        assert all(np.array_equal(plain[name], batch[name]) for name in plain)


@pytest.mark.parametrize("objective", ["grpo", "gspo"])
def test_what_the_policy_did_not_sample_has_no_gradient_and_no_weight(objective):
    batch = batch_of(Rollout.of([group()]))
    logprobs = jnp.asarray(np.where(batch["loss_mask"] > 0, -1.0, -50.0), jnp.float32)
    batch["old_logprobs"] = np.where(batch["loss_mask"] > 0, -1.1, 7.0).astype(np.float32)
    counts, cfg = count_denominators([batch]), algo(objective, loss_aggregation="sequence")
    cfg.clip_ratio = cfg.clip_ratio_high = 0.5
    gradient = jax.grad(lambda x: policy_loss(x, batch, cfg, counts)[0])(logprobs)[0]
    masked = np.asarray(batch["loss_mask"][0]) == 0
    assert not np.asarray(gradient)[masked].any() and np.asarray(gradient)[~masked].all()
    weights = cfg.build().weights(batch["loss_mask"], batch["segment_ids"], counts)[0]
    assert weights[2:7].tolist() == pytest.approx([1 / 6, 1 / 6, 0, 0, 1 / 6])


def test_the_head_learns_nothing_across_what_the_policy_did_not_sample():
    batch = batch_of(Rollout.of([group()]))
    names = ("tokens", "loss_mask", "segment_ids")
    mask = draft_targets(*(batch[name] for name in names), 0).mask[0]
    # Of the first sample only 10, 11: a state, the token behind it, and the one to be drafted.
    assert np.flatnonzero(mask[:7]).tolist() == [1]


def test_a_carried_record_keeps_its_mask_and_is_cut_with_it():
    again = group()
    again.responses[0].close(2, None)
    saved = json.loads(json.dumps(again.to_json()))
    restored = Group.from_json(saved, None, again.prompt)
    assert [r.loss_mask for r in restored.responses] == [TURNS, None]
    for response in saved["responses"]:
        del response["loss_mask"]  # as an older version wrote it
    old = Group.from_json(saved, None, again.prompt)
    assert [r.loss_mask for r in old.responses] == [None, None]
    cut = Response(list(range(5)), [-1.0] * 5, loss_mask=[*TURNS])
    assert cut.close(1, 3) == 2
    assert (cut.tokens, cut.loss_mask) == ([0, 1, 2], TURNS[:3])


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        ([1, 0], "expected 3 loss_mask, one per response token, got 2"),
        ([1, 0.5, 1], r"expected a loss_mask of 0 and 1, got \[1, 0.5, 1\]"),
    ],
)
def test_a_mask_that_does_not_fit_is_refused(mask, message):
    with pytest.raises(ValueError, match=f"sample 4: {message}"):
        pack([Sample(4, [1], [2, 3, 4], loss_mask=mask)], 16, 1)


def test_processed_logprobs_are_those_of_one_response_and_refuse_several_turns():
    trainer = Trainer.__new__(Trainer)
    argv = ["rollout.top_p=0.9", "algo.logprobs=processed"]
    trainer.cfg = parse_config(RLConfig, argv)[0]
    with pytest.raises(ValueError, match="processed scores a sample as one response"):
        trainer._update_policy(Rollout.of([group()]), {}, 1)
