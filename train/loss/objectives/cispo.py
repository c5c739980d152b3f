"""CISPO: REINFORCE whose tokens are weighed by a clipped ratio, which has no gradient.

    ratio_t  = exp(logprob_t - old_logprob_t)
    policy_t = -sg(clip(ratio_t, 1 - clip_ratio, 1 + clip_ratio_high)) * A * logprob_t

(MiniMax-M1, arXiv 2506.13585, where sg stops the gradient.) Every token keeps its gradient, also
those whose ratio is clipped. The defaults are no lower bound, and an upper bound of 5 (ScaleRL,
arXiv 2510.13786). The bound is 1 + clip_ratio_high, as in the paper and in verl; in TRL it is
`epsilon_high` itself, so that TRL's `epsilon_high=5` is `clip_ratio_high=4`.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from specjax.interfaces import Logprobs
from specjax.settings import option
from train.loss.shared import GroupRelative, bounded_exp


@dataclass(frozen=True)
class CISPO(GroupRelative):
    """CISPO, averaged over all tokens of the update.

    Attributes:
      clip_ratio: distance below 1 at which the weight is clipped; 1 is no lower bound.
      clip_ratio_high: distance above 1 at which the weight is clipped.
    """

    clip_ratio: float = option(1.0, needs="off_policy")
    clip_ratio_high: float = option(4.0, needs="off_policy")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.clip_ratio <= 1 or self.clip_ratio_high < 0:
            raise ValueError(
                "clip_ratio: expected 0 <= clip_ratio <= 1 and clip_ratio_high >= 0, "
                f"got {self.clip_ratio} and {self.clip_ratio_high}"
            )

    def per_token(
        self,
        logprobs: Logprobs,
        advantages: Float[Array, "R S"],
        segments: Int[Array, "R S"],
        loss_mask: Float[Array, "R S"],
    ) -> tuple[Float[Array, "R S"], dict[str, Float[Array, "R S"]]]:
        """Computes policy_t, and the values to log, see `specjax.interfaces.Objective`."""
        ratio = jax.lax.stop_gradient(bounded_exp(logprobs.new - logprobs.old))
        weight = jnp.clip(ratio, 1.0 - self.clip_ratio, 1.0 + self.clip_ratio_high)
        logged = {"ratio": ratio, "clip_fraction": weight != ratio}
        return -weight * advantages * logprobs.new, logged
