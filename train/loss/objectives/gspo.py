"""Group sequence policy optimisation: one ratio for all tokens of a sample, clipped as a whole.

    s        = exp(mean_t(logprob_t - old_logprob_t))             over the sample's loss tokens
    policy_t = -min(s_t * A, clip(s_t, 1 - clip_ratio, 1 + clip_ratio_high) * A)

s_t has the value of s, and the gradient s * d logprob_t / d theta: GSPO-token of arXiv 2507.18071
(section 4.3; verl's `policy_loss.loss_mode=gspo`, TRL's experimental `sequence_token`). Where all
tokens of a sample have the same advantage and weight, its gradient is that of s (section 4.1). It
can be weighed token by token, as `algo.tis` does.

The clip range is that of the paper: s is a mean over tokens, and moves far less than their ratios.
`loss_aggregation=token` is an option that the paper does not have.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from specjax.interfaces import Logprobs
from specjax.settings import option
from train.loss.shared import (
    LOSS_AGGREGATIONS,
    Clipped,
    bounded_exp,
    sample_sums,
)


@dataclass(frozen=True)
class GSPO(Clipped):
    """GSPO, averaged over the tokens of each sample and then over samples.

    Attributes:
      clip_ratio: distance below 1 at which a sample's ratio is clipped.
      clip_ratio_high: distance above 1 at which a sample's ratio is clipped.
    """

    loss_aggregation: str = option("sequence", choices=LOSS_AGGREGATIONS)
    clip_ratio: float = option(3e-4, needs="off_policy")
    clip_ratio_high: float = option(4e-4, needs="off_policy")

    def per_token(
        self,
        logprobs: Logprobs,
        advantages: Float[Array, "R S"],
        segments: Int[Array, "R S"],
        loss_mask: Float[Array, "R S"],
    ) -> tuple[Float[Array, "R S"], dict[str, Float[Array, "R S"]]]:
        """Computes policy_t, and the values to log, see `specjax.interfaces.Objective`."""
        new = logprobs.new
        lengths = jnp.maximum(sample_sums(loss_mask, segments), 1.0)
        fixed = jax.lax.stop_gradient(new)
        log_ratio = sample_sums(fixed - logprobs.old, segments) / lengths  # 0 outside of the loss
        return self.surrogate(bounded_exp(log_ratio + (new - fixed)), advantages)
