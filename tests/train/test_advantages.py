"""Rewards are shaped by length and KL, and truncated samples are left out of training."""

import numpy as np
import pytest

from train.loss.algo import algo
from train.loss.packing import pack
from train.rollout.advantages import overlong_penalties, training_samples
from train.rollout.groups import Group, Response

REWARDS = ([1.0, 0.0, 0.5], [0.0, 2.0, 2.0])
LENGTHS = ([2, 5, 10], [7, 8, 9])
MOST = 10


def groups(masked=False):
    found = []
    for p, (rewards, lengths) in enumerate(zip(REWARDS, LENGTHS, strict=True)):
        responses = [
            Response([5] * n, [0.0] * n, finish_reason="length" if n == MOST else "stop")
            for n in lengths
        ]
        if masked:
            responses[1].loss_mask = [1, 0, *[1] * (lengths[1] - 2)]
        found.append(Group(p, p + 1, 1, None, [1, 2], responses, list(rewards)))
    return found


def no_kl(samples):
    raise AssertionError("KL is not asked for")


def slope(samples):
    """A KL of 0.1, 0.2, .. at the tokens of each response."""
    assert not any(np.any(s.advantage) for s in samples)
    return [0.1 * np.arange(1, len(s.response_ids) + 1) for s in samples]


def made(cfg, kl_of=no_kl, masked=False):
    return training_samples(cfg, groups(masked), MOST, None, kl_of)


def centred(rewards):
    rewards = np.array(rewards)
    return (rewards - rewards.mean(1, keepdims=True)).ravel()


def test_the_soft_penalty_is_that_of_dapo():
    """Equation 13 of arXiv 2503.14476 with L_max = 20,480 and L_cache = 4,096."""
    lengths = np.array([[1, 16_384, 16_385], [18_432, 20_480, 20_481]])
    found = overlong_penalties(lengths, 20_480, 4_096, 1.0)
    np.testing.assert_allclose(found, [[0, 0, 1 / 4096], [0.5, 1, 1]])
    np.testing.assert_allclose(overlong_penalties(lengths, 20_480, 4_096, 0.5), found / 2)


@pytest.mark.parametrize("buffer", [4, 0.4])
def test_long_responses_lose_reward_over_the_buffer(buffer):
    cfg = algo("grpo", normalize_std=False, overlong_buffer_len=buffer, overlong_penalty_factor=2.0)
    samples, metrics = made(cfg)
    penalties = np.array([[0, 0, 2.0], [0.5, 1.0, 1.5]])
    wanted = centred(np.array(REWARDS) - penalties)
    np.testing.assert_allclose([s.advantage for s in samples], wanted, atol=1e-6)
    assert metrics == {"rollout/overlong_penalty": pytest.approx(penalties.mean())}
    assert cfg.settled(MOST) == cfg
    with pytest.raises(ValueError, match="at most rollout.max_tokens=10, or a share below 1"):
        algo("grpo", overlong_buffer_len=11).settled(MOST)


def test_the_kl_of_all_loss_tokens_is_subtracted_from_the_reward_of_a_sample():
    cfg = algo("grpo", normalize_std=False, kl_coef=0.5)
    samples, metrics = made(cfg, slope, masked=True)
    kl = np.array([[0.1 * n * (n + 1) / 2 for n in row] for row in LENGTHS])
    kl[:, 1] -= 0.2  # the second token is not the policy's
    wanted = centred(np.array(REWARDS) - 0.5 * kl)
    np.testing.assert_allclose([s.advantage for s in samples], wanted, atol=1e-5)
    tokens = np.sum(LENGTHS) - 2
    assert metrics == {"train/reward_kl_penalty": pytest.approx(kl.sum() / tokens)}


def test_reinforce_pp_subtracts_the_kl_of_a_token_and_of_those_after_it():
    cfg = algo("reinforce_pp", kl_coef=0.5)
    samples, _ = made(cfg, slope, masked=True)
    returns, masks = [], []
    for group in groups(masked=True):
        for reward, response in zip(group.rewards, group.responses, strict=True):
            mask = np.array(response.loss_mask or [1] * len(response.token_ids))
            kl = 0.1 * np.arange(1, len(mask) + 1) * mask
            returns.append([reward - 0.5 * kl[t:].sum() for t in range(len(mask))])
            masks.append(mask)
    inside = np.concatenate([np.array(r)[m > 0] for r, m in zip(returns, masks, strict=True)])
    for sample, own, mask in zip(samples, returns, masks, strict=True):
        wanted = (np.array(own) - inside.mean()) / inside.std() * mask
        np.testing.assert_allclose(sample.advantage, wanted, atol=1e-5)
    # And each token of a packed row has its own.
    [batch] = pack(samples, 64, 1)
    own = (batch["sample_ids"] == 1) & (batch["positions"] >= 2)
    np.testing.assert_allclose(batch["advantages"][own], samples[1].advantage)
    assert not batch["advantages"][batch["loss_mask"] == 0].any()


@pytest.mark.parametrize("objective", ["grpo", "reinforce_pp"])
def test_truncated_samples_are_left_out_and_count_for_the_others_of_their_group(objective):
    kept, _ = made(algo(objective))
    samples, metrics = made(algo(objective, mask_truncated=True))
    assert [s.sample_id for s in samples] == [0, 1, 3, 4, 5]
    assert metrics == {"train/truncated_masked": 1.0}
    if objective == "grpo":
        assert [s.advantage for s in samples] == [s.advantage for s in kept if s.sample_id != 2]
    else:  # its tokens are no longer in the mean of the step
        rest = np.concatenate([s.advantage for s in samples])
        assert rest.mean() == pytest.approx(0, abs=1e-6) and rest.std() == pytest.approx(
            1, rel=1e-4
        )
