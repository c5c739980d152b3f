"""Parts of several objectives: group advantages, weights, clipped ratios, sample sums."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from specjax.config.checks import choice
from specjax.interfaces import Denominators, Logprobs
from specjax.settings import option
from train.loss.algo import AlgoSection

LOSS_AGGREGATIONS = ("token", "sequence", "constant")
STD_EPS = 1e-6  # is added to the standard deviation of rewards

# exp() of a larger difference would overflow float32 and turn one stray token into a NaN update.
MAX_LOG_RATIO = 20.0


@dataclass(frozen=True)
class Aggregated(AlgoSection):
    """The mean over tokens that the loss is.

    Attributes:
      loss_aggregation: `token` (mean over all tokens of the update; verl's token-mean, TRL's dapo),
        `sequence` (mean over the tokens of each sample, then over samples; seq-mean-token-mean,
        TRL's grpo) or `constant` (sum over the tokens of each sample, divided by
        loss_scale_factor, then mean over samples; seq-mean-token-sum-norm, TRL's dr_grpo).
      loss_scale_factor: number of tokens that the sum of a sample is divided by with
        loss_aggregation=constant; null is rollout.max_tokens.
    """

    loss_aggregation: str = option("token", choices=LOSS_AGGREGATIONS)
    loss_scale_factor: int | None = option(None, needs="loss_aggregation=constant")

    def __post_init__(self) -> None:
        super().__post_init__()
        choice("loss_aggregation", self.loss_aggregation, LOSS_AGGREGATIONS)
        if self.loss_scale_factor is not None and self.loss_scale_factor < 1:
            raise ValueError(
                f"loss_scale_factor: expected at least 1, got {self.loss_scale_factor}"
            )

    def weights(
        self,
        loss_mask: Float[Array, "R S"],
        segments: Int[Array, "R S"],
        counts: Denominators,
    ) -> Float[Array, "R S"]:
        """Computes the weights of tokens by `loss_weights`."""
        return loss_weights(
            loss_mask, segments, self.loss_aggregation, counts, self.loss_scale_factor
        )


@dataclass(frozen=True)
class GroupRelative(Aggregated):
    """Advantages relative to the group.

    Attributes:
      normalize_std: divide advantages by a standard deviation of rewards.
      std_correction: squared deviations are divided by the number of rewards less this: 0, or 1 as
        torch.std does, and so TRL and verl.
    """

    normalize_std: bool = True
    std_correction: int = option(0, needs="normalize_std")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.std_correction not in (0, 1):
            raise ValueError(f"std_correction must be 0 or 1, got {self.std_correction}")

    def advantages(self, rewards: Float[np.ndarray, "P G"]) -> Float[np.ndarray, "P G"]:
        """Computes advantages by `group_advantages`."""
        return group_advantages(rewards, self.normalize_std, self.std_correction)


@dataclass(frozen=True)
class Clip(Aggregated):
    """PPO's clipped surrogate (arXiv 1707.06347) of a ratio, with a bound below and one above 1.

    Attributes:
      clip_ratio: distance below 1 at which the ratio is clipped.
      clip_ratio_high: distance above 1 at which the ratio is clipped; DAPO's clip-higher makes it
        larger than `clip_ratio`.
      clip_ratio_c: dual clip (arXiv 1912.09729), upper bound of the ratio where the advantage is
        negative, usually 3; null is no bound (TRL's delta).
    """

    clip_ratio: float = option(0.2, needs="off_policy")
    clip_ratio_high: float = option(0.28, needs="off_policy")
    clip_ratio_c: float | None = option(None, needs="off_policy")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.clip_ratio < 1 or self.clip_ratio_high < 0:
            raise ValueError(
                "clip_ratio: expected 0 <= clip_ratio < 1 and clip_ratio_high >= 0, "
                f"got {self.clip_ratio} and {self.clip_ratio_high}"
            )
        if self.clip_ratio_c is not None and self.clip_ratio_c <= 1:
            raise ValueError(
                f"clip_ratio_c: expected more than 1, or null, got {self.clip_ratio_c}"
            )

    def per_token(
        self,
        logprobs: Logprobs,
        advantages: Float[Array, "R S"],
        segments: Int[Array, "R S"],
        loss_mask: Float[Array, "R S"],
    ) -> tuple[Float[Array, "R S"], dict[str, Float[Array, "R S"]]]:
        """Computes the surrogate of the ratio of each token, see `specjax.interfaces.Objective`."""
        return self.surrogate(bounded_exp(logprobs.new - logprobs.old), advantages)

    def surrogate(
        self, ratio: Float[Array, "R S"], advantages: Float[Array, "R S"]
    ) -> tuple[Float[Array, "R S"], dict[str, Float[Array, "R S"]]]:
        """Computes the loss of every token, and the values to log per token."""
        clipped = jnp.clip(ratio, 1.0 - self.clip_ratio, 1.0 + self.clip_ratio_high)
        policy = -jnp.minimum(ratio * advantages, clipped * advantages)
        cut = clipped * advantages < ratio * advantages
        logged = {"ratio": ratio, "clip_fraction": cut}
        if self.clip_ratio_c is not None:
            bound = -self.clip_ratio_c * advantages
            over = (advantages < 0) & (policy > bound)
            policy = jnp.where(over, bound, policy)
            logged["dual_clip_fraction"] = over
        return policy, logged


@dataclass(frozen=True)
class Clipped(Clip, GroupRelative):
    """The clipped surrogate with advantages relative to the group."""


def zero_variance_groups(rewards: Float[np.ndarray, "P G"]) -> np.ndarray:
    """Marks groups whose samples all have the same reward, and so no gradient.

    Args:
      rewards: one row per prompt.

    Returns:
      bool [P], for dynamic sampling and the `zero_std` metric.
    """
    rewards = _as_groups(rewards)
    return rewards.max(axis=1) == rewards.min(axis=1)


def group_advantages(
    rewards: Float[np.ndarray, "P G"],
    normalize_std: bool = True,
    correction: int = 0,
) -> Float[np.ndarray, "P G"]:
    """Rewards relative to their group: (r - mean) / (std + 1e-6), or r - mean.

    Groups without variance get exactly zero, for any rounding of their mean.

    Args:
      rewards: one row per prompt, G >= 2 samples each.
      normalize_std: whether to divide by the standard deviation.
      correction: squared deviations are divided by the number of rewards less this.

    Returns:
      float32 advantages in the same order.

    Raises:
      ValueError: not a [P G] array, G < 2, or a reward that is not finite.
    """
    rewards = comparable(rewards)
    advantages = rewards - rewards.mean(axis=1, keepdims=True)
    advantages[zero_variance_groups(rewards)] = 0.0
    if normalize_std:
        advantages /= rewards.std(axis=1, ddof=correction, keepdims=True) + STD_EPS
    return advantages.astype(np.float32)


def comparable(rewards: Float[np.ndarray, "P G"], least: int = 2) -> Float[np.ndarray, "P G"]:
    """Checks rewards of groups, and returns them in float64.

    Args:
      rewards: one row per prompt.
      least: number of samples per prompt that advantages need.

    Raises:
      ValueError: not a [P G] array, too few samples, or a reward that is not finite.
    """
    rewards = _as_groups(rewards)
    if rewards.shape[1] < least:
        raise ValueError(
            f"advantages need at least {least} samples per prompt, got {rewards.shape[1]}, and "
            "each would be zero; raise rollout.n"
        )
    if not np.isfinite(rewards).all():
        raise ValueError(
            f"rewards must be finite, got {rewards[~np.isfinite(rewards)][0]}; check the reward"
        )
    return rewards


def _as_groups(rewards) -> np.ndarray:
    rewards = np.asarray(rewards, np.float64)
    if rewards.ndim != 2 or rewards.shape[1] == 0:
        raise ValueError(f"expected rewards [prompts, samples], got shape {rewards.shape}")
    return rewards


def sample_sums(values: Float[Array, "R S"], segments: Int[Array, "R S"]) -> Float[Array, "R S"]:
    """Sums over all tokens of a sample, and puts the sum at each of them.

    A sample must lie in one row whole, as packing leaves it; the order of its tokens within the row
    does not matter, so that they may be split over devices.
    """
    num_segments = segments.shape[1] + 1

    def of_own_segment(row, ids):
        return jax.ops.segment_sum(row, ids, num_segments=num_segments)[ids]

    return jax.vmap(of_own_segment)(values, segments)


def loss_weights(
    loss_mask: Float[Array, "R S"],
    segments: Int[Array, "R S"],
    aggregation: str,
    counts: Denominators,
    scale: int | None = None,
) -> Float[Array, "R S"]:
    """Weight of every token in the loss.

    With `token` and `sequence` weights sum to 1 over all micro-batches of the update.

    Args:
      aggregation: one of LOSS_AGGREGATIONS.
      scale: number of tokens that sums of samples are divided by; only `constant` reads it.

    Raises:
      ValueError: `constant` without `scale`.
    """
    if aggregation == "token":
        return loss_mask / counts.tokens
    if aggregation == "constant":
        if scale is None:
            raise ValueError(
                "loss_aggregation=constant divides by loss_scale_factor, which is null; set it "
                "(train.rl sets it to rollout.max_tokens)"
            )
        return loss_mask / (scale * counts.samples)
    lengths = sample_sums(loss_mask, segments)
    return loss_mask / (jnp.maximum(lengths, 1.0) * counts.samples)


def bounded_exp(log_ratio: Array) -> Array:
    """exp() of a clipped argument, finite for all numbers."""
    return jnp.exp(jnp.clip(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO))
