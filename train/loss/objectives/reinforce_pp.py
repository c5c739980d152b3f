"""REINFORCE++: one advantage per token, normalised over all tokens of the step.

    return_t = r - kl_coef * sum(kl_u, u >= t)
    A_t      = (return_t - mean) / (std + 1e-6)                   over all loss tokens of the step
    ratio_t  = exp(logprob_t - old_logprob_t)
    policy_t = -min(ratio_t * A_t, clip(ratio_t, 1 - clip_ratio, 1 + clip_ratio_high) * A_t)

(arXiv 2501.03262. Mean and standard deviation over tokens are those of verl and OpenRLHF, so that
long samples count more.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from jaxtyping import Float

from specjax.settings import option
from train.loss.shared import STD_EPS, Clip, comparable


@dataclass(frozen=True)
class ReinforcePP(Clip):
    """REINFORCE++, averaged over all tokens of the update.

    Attributes:
      clip_ratio_high: distance above 1 at which the ratio is clipped.
    """

    clip_ratio_high: float = option(0.2, needs="off_policy")
    least_samples: ClassVar[int] = 1  # of a prompt: no sample is compared with others of its group

    def advantages(self, rewards: Float[np.ndarray, "P G"]) -> Float[np.ndarray, "P G"]:
        """Computes advantages of samples of one token each, see `token_advantages`."""
        one = [np.ones(1)] * np.size(rewards)
        advantages = self.token_advantages(rewards, one, [np.zeros(1)] * len(one))
        return np.concatenate(advantages).reshape(np.shape(rewards))

    def token_advantages(
        self,
        rewards: Float[np.ndarray, "P G"],
        masks: Sequence[Float[np.ndarray, " tokens"]],
        penalties: Sequence[Float[np.ndarray, " tokens"]],
    ) -> list[Float[np.ndarray, " tokens"]]:
        """Computes the advantage of each token, see `train.rollout.advantages`.

        Args:
          rewards: one row per prompt.
          masks: 1 on loss tokens of the response of each of the P * G samples, 0 elsewhere.
          penalties: number to subtract from the reward at each token, 0 outside of the loss.

        Raises:
          ValueError: see `comparable`.
        """
        rewards = comparable(rewards, least=self.least_samples)
        returns = [
            reward - np.cumsum(penalty[::-1])[::-1]
            for reward, penalty in zip(rewards.ravel(), penalties, strict=True)
        ]
        inside = np.concatenate([r[m > 0] for r, m in zip(returns, masks, strict=True)])
        if not len(inside) or inside.min() == inside.max():
            return [np.zeros(len(mask), np.float32) for mask in masks]
        # The standard deviation of all tokens; verl's divides by one token less.
        mean, scale = inside.mean(), inside.std() + STD_EPS
        return [
            ((r - mean) / scale * (m > 0)).astype(np.float32)
            for r, m in zip(returns, masks, strict=True)
        ]
