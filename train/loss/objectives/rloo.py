"""REINFORCE leave-one-out: the baseline of a sample is the mean reward of the others in its group.

    A_i      = r_i - mean(r_j, j != i)
    ratio_t  = exp(logprob_t - old_logprob_t)
    policy_t = -min(ratio_t * A, clip(ratio_t, 1 - clip_ratio, 1 + clip_ratio_high) * A)

(arXiv 2402.14740; the clipped ratio of each token is verl's, for updates after the first one. On
the policy's own samples its gradient is REINFORCE's.)
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from specjax.settings import option
from train.loss.shared import Clip, comparable, zero_variance_groups


@dataclass(frozen=True)
class RLOO(Clip):
    """RLOO, averaged over all tokens of the update.

    Attributes:
      clip_ratio_high: distance above 1 at which the ratio is clipped.
    """

    clip_ratio_high: float = option(0.2, needs="off_policy")

    def advantages(self, rewards: Float[np.ndarray, "P G"]) -> Float[np.ndarray, "P G"]:
        """Computes rewards minus the mean of the other samples of the group.

        Raises:
          ValueError: see `comparable`.
        """
        rewards = comparable(rewards)
        count = rewards.shape[1]
        advantages = (rewards - rewards.mean(axis=1, keepdims=True)) * count / (count - 1)
        advantages[zero_variance_groups(rewards)] = 0.0
        return advantages.astype(np.float32)
