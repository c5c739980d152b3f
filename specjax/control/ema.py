"""Tiers of draft steps by a moving average of the accepted drafts.

The rules, keys and defaults are those of SGLang's `adaptive_spec_params`. A tier of s steps is the
chain `s_1_{s+1}`; tier 0 is `off`.
"""

from __future__ import annotations

import dataclasses
import math

from specjax.config.checks import require
from specjax.config.strategy import Strategy
from specjax.control.base import Controller, Observation


@dataclasses.dataclass(frozen=True)
class EmaConfig:
    """Settings with the keys of SGLang's `--speculative-adaptive-config`.

    Attributes:
      candidate_steps: number of draft steps of each tier; 0 is plain decoding.
      ema_alpha: weight of the newest round in the average.
      warmup_batches: number of rounds before the first decision.
      update_interval: number of rounds between decisions.
      down_hysteresis: number of drafts that is added to the threshold of a smaller tier.
      up_hysteresis: number of drafts that is added to the threshold of a larger tier.
    """

    candidate_steps: tuple[int, ...] = (1, 3, 7)
    ema_alpha: float = 0.2
    warmup_batches: int = 10
    update_interval: int = 5
    down_hysteresis: float = -0.25
    up_hysteresis: float = 0.0

    def __post_init__(self):
        steps = self.candidate_steps
        if not steps or any(isinstance(s, bool) or int(s) != s or s < 0 for s in steps):
            raise ValueError(
                f"candidate_steps must be whole numbers >= 0, such as [1, 3, 7]; got {steps!r}"
            )
        object.__setattr__(self, "candidate_steps", tuple(sorted({int(s) for s in steps})))
        require(self, "ema_alpha", 0 < self.ema_alpha <= 1, "above 0 and at most 1")
        require(self, "warmup_batches", self.warmup_batches >= 0, "at least 0")
        require(self, "update_interval", self.update_interval >= 1, "at least 1")
        for name in ("down_hysteresis", "up_hysteresis"):
            require(self, name, math.isfinite(getattr(self, name)), "a finite number")


class EmaTiers(Controller):
    """Takes a larger tier while nearly all drafts are accepted, and a smaller one when few are.

    A chunk's rounds are replayed in order, and the tier changes at most once per chunk: at the
    last decision that falls into it. A chunk of another tier than the current one is not counted:
    it was enqueued before the tier changed.

    Args:
      config: settings of the tiers and their thresholds.
      initial: number of draft steps at the start; the nearest tier is taken, of two the larger.
    """

    kind = "ema"
    saved = (*Controller.saved, "steps", "ema", "count")

    def __init__(self, config: EmaConfig | None = None, initial: int = 3):
        self.config = config or EmaConfig()
        self.tiers = self.config.candidate_steps
        super().__init__([Strategy.chain(s) for s in self.tiers])
        self.steps = min(self.tiers, key=lambda s: (abs(s - initial), -s))
        self.ema = float(self.steps - 1)
        self.count = 0

    def choose(self, batch_size: int) -> str:
        return self.preferred()

    def preferred(self) -> str:
        """Returns the current tier."""
        return Strategy.chain(self.steps).name

    def learn(self, seen: Observation) -> None:
        if seen.strategy != self.preferred():
            return
        target = None
        for row in seen.accepted:
            running = row[row >= 0]
            if running.size == 0:  # an empty round uses up no warm-up
                continue
            if self.steps > 0:
                alpha = self.config.ema_alpha
                self.ema = (1 - alpha) * self.ema + alpha * float(running.mean())
            self.count += 1
            late = self.count - self.config.warmup_batches
            if late > 0 and late % self.config.update_interval == 0:
                target = self._decide()
        if target is not None and target != self.steps:
            if self.steps == 0 and self.ema < 0:
                self.ema = float(target - 1)  # began without speculation: nothing averaged yet
            self.steps = target

    def _decide(self) -> int:
        """Returns the draft steps of the tier that the average calls for."""
        at = start = self.tiers.index(self.steps)
        if self.steps == 0:  # plain decoding shows no acceptance: probe the smallest tier
            return self.tiers[min(1, len(self.tiers) - 1)]
        while at > 0:
            below = self.tiers[at - 1]
            # Tier 0 shares the threshold of tier 1: below - 0.5 would be out of reach.
            if self.ema > max(below, 1) - 0.5 + self.config.down_hysteresis:
                break
            at -= 1
        if at == start:
            while at < len(self.tiers) - 1:
                if self.ema <= self.tiers[at] - 0.5 + self.config.up_hysteresis:
                    break
                at += 1
        return self.tiers[at]

    def log_fields(self) -> dict[str, float | str]:
        return {
            **super().log_fields(),
            "speculative_num_steps": float(self.steps),
            "ema_accept_len": self.ema,
        }
