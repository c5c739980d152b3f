"""Group relative policy optimisation: the clipped ratio of each token, times its advantage.

    ratio_t  = exp(logprob_t - old_logprob_t)
    policy_t = -min(ratio_t * A, clip(ratio_t, 1 - clip_ratio, 1 + clip_ratio_high) * A)

Differences from the paper (DeepSeekMath, arXiv 2402.03300): the upper clip bound is a parameter of
its own and token-level aggregation is the default (both DAPO, arXiv 2503.14476); dropping the
standard deviation is Dr. GRPO's (arXiv 2503.20783).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from specjax.interfaces import Logprobs
from specjax.schema import Needs
from train.objectives.shared import CLIP_RULE, GroupRelative, bounded_exp, check_clip


@dataclass(frozen=True)
class GRPO(GroupRelative):
    """GRPO, with DAPO's clip-higher and aggregation over tokens.

    Attributes:
      clip_ratio: how far below 1 the ratio may go before its gradient is cut.
      clip_ratio_high: how far above 1; larger than `clip_ratio` is DAPO's clip-higher.
    """

    rules: ClassVar[tuple[Needs, ...]] = (*GroupRelative.rules, CLIP_RULE)

    clip_ratio: float = 0.2
    clip_ratio_high: float = 0.28

    def __post_init__(self) -> None:
        super().__post_init__()
        check_clip(self.clip_ratio, self.clip_ratio_high)

    def per_token(
        self,
        logprobs: Logprobs,
        advantages: Float[Array, "R S"],
        segments: Int[Array, "R S"],
        loss_mask: Float[Array, "R S"],
    ) -> tuple[Float[Array, "R S"], dict[str, Float[Array, "R S"]]]:
        """Computes policy_t, and what is logged of it, see `specjax.interfaces.Objective`."""
        ratio = bounded_exp(logprobs.new - logprobs.old)
        clipped = jnp.clip(ratio, 1.0 - self.clip_ratio, 1.0 + self.clip_ratio_high)
        policy = -jnp.minimum(ratio * advantages, clipped * advantages)
        cut = clipped * advantages < ratio * advantages
        return policy, {"ratio": ratio, "clip_fraction": cut}
