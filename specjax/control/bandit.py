"""Epsilon-greedy choice per batch-size group, after FastRL's `eagle_mab` ("BEG").

Every group of batch sizes has a bandit of its own. An arm's score is the median of its last
rewards; a reward is the throughput of a chunk, or its accept length.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from specjax.config.checks import choice, require
from specjax.config.strategy import Strategy
from specjax.control.base import Controller, Observation
from specjax.settings import option

REWARDS = ("throughput", "accept_length")


@dataclasses.dataclass(frozen=True)
class BanditConfig:
    """Settings of the bandit.

    Attributes:
      thresholds: the smallest batch size of each group; [1, 2, 5, 21] means 1, 2-4, 5-20 and 21
        or more.
      epsilon: share of choices that are made at random.
      window: number of rewards that are kept per arm.
      reward: what a chunk counts as: `throughput` (accept length x batch size / seconds per
        round) or `accept_length`. The latter never prefers plain decoding, with its length of 1.
      seed: seed of the random choices.
    """

    thresholds: tuple[int, ...] = (1, 2, 5, 21)
    epsilon: float = 0.1
    window: int = 1000
    reward: str = option("throughput", choices=REWARDS)
    seed: int = 0

    def __post_init__(self):
        object.__setattr__(self, "thresholds", tuple(self.thresholds))
        edges = self.thresholds
        rises = all(a < b for a, b in zip((0, *edges), edges, strict=False))
        require(self, "thresholds", bool(edges) and rises, "increasing batch sizes from 1 on")
        require(self, "epsilon", 0 <= self.epsilon <= 1, "between 0 and 1")
        require(self, "window", self.window >= 1, "at least 1 reward")
        choice("reward", self.reward, REWARDS)


class Bandit(Controller):
    """Bucketed epsilon-greedy.

    Untried arms score +infinity, so each is tried before any is preferred; of several, the one
    that was chosen least often comes first, for the reward of a choice arrives a chunk later.
    """

    kind = "bandit"
    saved = (*Controller.saved, "_rewards", "_chosen", "_group")

    def __init__(self, strategies: Sequence[str | Strategy], config: BanditConfig | None = None):
        super().__init__(strategies)
        self.config = config or BanditConfig()
        groups = range(len(self.config.thresholds))
        self._rewards: list[dict[str, list[float]]] = [{a: [] for a in self.arms} for _ in groups]
        self._chosen = [dict.fromkeys(self.arms, 0) for _ in groups]
        self._random = np.random.Generator(np.random.PCG64(self.config.seed))
        self._group = 0

    def group(self, batch_size: int) -> int:
        """Index of the batch size's group; sizes below the first threshold belong to the first."""
        return max(0, bisect.bisect_right(self.config.thresholds, batch_size) - 1)

    def scores(self, group: int) -> dict[str, float]:
        """Score per arm; +infinity where it was never tried."""
        rewards = self._rewards[group].items()
        return {arm: float(np.median(values)) if values else math.inf for arm, values in rewards}

    def choose(self, batch_size: int) -> str:
        self._group = group = self.group(batch_size)
        scores, chosen = self.scores(group), self._chosen[group]
        if self._random.random() < self.config.epsilon:
            name = self.arms[int(self._random.integers(len(self.arms)))]
        else:
            # Only untried arms tie in practice; a tie of measured ones may go either way.
            name = max(self.arms, key=lambda arm: (scores[arm], -chosen[arm]))
        chosen[name] += 1
        return name

    def preferred(self) -> str:
        scores = self.scores(0)
        return max(self.arms, key=scores.__getitem__)

    def learn(self, seen: Observation) -> None:
        reward, seconds = seen.accept_length, seen.seconds_per_round
        if self.config.reward == "throughput":
            if seconds is None:
                return
            reward = reward * seen.batch_size / seconds
        rewards = self._rewards[self.group(seen.batch_size)][seen.strategy]
        rewards.append(reward)
        del rewards[: -self.config.window]

    def log_fields(self) -> dict[str, float | str]:
        scores = self.scores(self._group)
        return {
            **super().log_fields(),
            "bandit_group": float(self._group),
            **{f"arm_score/{arm}": s for arm, s in scores.items() if math.isfinite(s)},
        }

    def identity(self) -> dict[str, Any]:
        return {**super().identity(), "thresholds": list(self.config.thresholds)}

    def state(self) -> dict[str, Any]:
        return {**super().state(), "random": self._random.bit_generator.state}

    def load_state(self, state: dict[str, Any]) -> None:
        super().load_state(state)
        self._random.bit_generator.state = state["random"]
