"""Group relative policy optimisation: the clipped ratio of each token, times its advantage.

    ratio_t  = exp(logprob_t - old_logprob_t)
    policy_t = -min(ratio_t * A, clip(ratio_t, 1 - clip_ratio, 1 + clip_ratio_high) * A)

Differences from the paper (DeepSeekMath, arXiv 2402.03300): the upper clip bound is a parameter of
its own and token-level aggregation is the default (both DAPO, arXiv 2503.14476); dropping the
standard deviation, and dividing by a constant, is Dr. GRPO's (arXiv 2503.20783). `train.presets`
has the settings of these papers.
"""

from __future__ import annotations

from dataclasses import dataclass

from train.loss.shared import Clipped


@dataclass(frozen=True)
class GRPO(Clipped):
    """GRPO, with DAPO's clip-higher and aggregation over tokens."""
