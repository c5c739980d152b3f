"""Seconds per round by strategy and batch bucket: calibrated at start, refreshed while running.

Every bucket has a `Belief` of its own, because small ones run in the tail, where contexts are long.
What was never measured is guessed from what was.
"""

from __future__ import annotations

import bisect
import functools
import math
import re
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from specjax.control.base import canonical
from specjax.control.belief import Belief, Noise

DEFAULT_BUCKETS = tuple(2**i for i in range(11))

_OPTIMISM = 1.0  # standard errors by which a true cost may well be less
_GUESSED_SLACK = 0.35
_MOST_SLACK = 0.9
_LEAST_SHARE = 0.1  # of the seconds of a chunk that its rounds take


class CostTable:
    """Seconds per round.

    A missing entry is guessed: from the strategy's other buckets, else from the other strategies by
    how many rows and draft steps they have.

    Args:
      buckets: increasing compiled batch sizes; a batch costs what the smallest bucket that holds
        it costs.
      seconds: per strategy a list with one entry per bucket; None (or NaN) where not calibrated.
      beside: seconds of a chunk beside its rounds, by bucket; None: nothing.

    Raises:
      ValueError: the lists do not fit, a cost is not above zero, or `beside` is below it.
    """

    def __init__(
        self,
        buckets: Sequence[int] = DEFAULT_BUCKETS,
        seconds: Mapping[str, Sequence[float | None]] | None = None,
        beside: Sequence[float] | None = None,
    ):
        self.buckets = tuple(int(b) for b in buckets)
        if not self.buckets or any(
            a >= b for a, b in zip((0, *self.buckets), self.buckets, strict=False)
        ):
            raise ValueError(f"buckets must be increasing batch sizes, got {list(buckets)}")
        beside = [0.0] * len(self.buckets) if beside is None else [float(b) for b in beside]
        if len(beside) != len(self.buckets) or not all(0 <= b < 1e9 for b in beside):
            raise ValueError(
                f"beside must have seconds of at least 0 for each of {len(self.buckets)} buckets, "
                f"got {beside}"
            )
        self._noise = Noise()
        self._rounds = 0
        self._beliefs = [Belief(each) for each in beside]
        self._seen_at: list[dict[str, int]] = [{} for _ in beside]  # `rounds`, by strategy
        for name, row in (seconds or {}).items():
            if len(row) != len(self.buckets):
                raise ValueError(
                    f"strategy {name!r} has {len(row)} costs for {len(self.buckets)} buckets; give "
                    "one per bucket, None where not calibrated"
                )
            for belief, each in zip(self._beliefs, row, strict=True):
                if (log := _log_seconds(name, each)) is not None:
                    belief.calibrated(canonical(name), log)

    @classmethod
    def from_samples(
        cls,
        samples: Mapping[tuple[str, int], Sequence[float]],
        beside: Mapping[int, float] | None = None,
    ) -> CostTable:
        """From measured seconds per round, by (strategy, bucket); the least of each counts.

        Whatever else the machine does adds to a time, and never takes from it.

        Args:
          samples: without what lies beside the rounds.
          beside: seconds of a chunk beside its rounds, by bucket; as far off as it is, all samples
            of a bucket are.
        """
        buckets = sorted({bucket for _, bucket in samples})
        rows: dict[str, list[float | None]] = {}
        for (name, bucket), values in samples.items():
            row = rows.setdefault(canonical(name), [None] * len(buckets))
            row[buckets.index(bucket)] = float(min(values))
        return cls(buckets, rows, None if beside is None else [beside[b] for b in buckets])

    def index(self, batch_size: int) -> int:
        """Index of the smallest bucket that holds the batch; of the largest if none does."""
        return min(bisect.bisect_left(self.buckets, batch_size), len(self.buckets) - 1)

    def known(self, name: str, batch_size: int) -> bool:
        """Whether the cost was calibrated or observed, not guessed."""
        return name in self._belief(batch_size).names

    def age(self, name: str, batch_size: int) -> int:
        """Rounds of all strategies since this one was seen in the batch's bucket."""
        return self._rounds - self._seen_at[self.index(batch_size)].get(name, 0)

    @property
    def rounds(self) -> int:
        """Of all strategies, so far."""
        return self._rounds

    def chunks(self, name: str, batch_size: int) -> int:
        """That were seen of a strategy in the batch's bucket."""
        return self._belief(batch_size).chunks.get(name, 0)

    def slack(self, name: str, batch_size: int, than: str | None = None) -> float:
        """By what share the true cost, beside that of another, may well be below the table's.

        Args:
          than: the other; where its cost is unknown, or None, the one that ran last, or if none did
            the first.
        """
        belief = self._belief(batch_size)
        if name not in belief.names:
            return _GUESSED_SLACK
        than = next(n for n in (than, belief.last, belief.names[0]) if n in belief.names)
        below = _OPTIMISM * belief.error(name, than) + belief.below(name, than)
        return min(1 - math.exp(-below), _MOST_SLACK)

    def seconds(self, name: str, batch_size: int, rounds: float = math.inf) -> float:
        """Seconds per round of a chunk of so many, one at least; finite and above zero."""
        beside = self.beside(batch_size) / max(rounds, 1.0)
        return math.exp(self._guess(name, self.index(batch_size))) + beside

    def beside(self, batch_size: int) -> float:
        """Seconds of a chunk that its rounds do not take."""
        return self._belief(batch_size).beside

    def observe(self, name: str, batch_size: int, seconds: float | None, rounds: int) -> None:
        """Takes in `seconds` per round, averaged over a chunk of `rounds`."""
        self._rounds += rounds
        if not rounds or seconds is None or not math.isfinite(seconds) or seconds <= 0:
            return
        at = self.index(batch_size)
        belief = self._beliefs[at]
        if name not in belief.names:
            belief.guessed(name, math.log(of_rounds(seconds, belief.beside / rounds)))
        belief.observe(name, float(seconds), rounds, self._noise)
        self._seen_at[at][name] = self._rounds

    def _belief(self, batch_size: int) -> Belief:
        return self._beliefs[self.index(batch_size)]

    def _guess(self, name: str, at: int) -> float:
        """Log seconds, known or not."""
        if name in self._beliefs[at].names:
            return self._beliefs[at].log(name)
        known = [i for i, belief in enumerate(self._beliefs) if name in belief.names]
        if known:
            xs = [math.log(self.buckets[i]) for i in known]
            logs = [self._beliefs[i].log(name) for i in known]
            return float(np.interp(math.log(self.buckets[at]), xs, logs))
        for other in sorted(range(len(self.buckets)), key=lambda i: abs(i - at)):
            if (belief := self._beliefs[other]).names:
                logs = [belief.log(n) - math.log(_shape(n)) for n in belief.names]
                return statistics.median(logs) + math.log(_shape(name))
        return math.log(0.01 * _shape(name))

    def state(self) -> dict[str, Any]:
        return {
            "buckets": list(self.buckets),
            "beliefs": [belief.state() for belief in self._beliefs],
            "noise": [self._noise.size, self._noise.chunks],
            "rounds": self._rounds,
            "seen_at": [dict(each) for each in self._seen_at],
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> CostTable:
        """Of an older version, which has other keys, only the buckets are taken."""
        table = cls(state["buckets"])
        if "beliefs" in state:
            table._beliefs = [Belief.from_state(each) for each in state["beliefs"]]
            table._noise, table._rounds = Noise(*state["noise"]), state["rounds"]
            table._seen_at = [dict(each) for each in state["seen_at"]]
        return table


def of_rounds(seconds: float, beside: float) -> float:
    """Of the seconds of a chunk those that its rounds took: some did, whatever lies beside them."""
    return max(seconds - beside, _LEAST_SHARE * seconds)


def _log_seconds(name: str, seconds: float | None) -> float | None:
    if seconds is None or math.isnan(seconds):
        return None
    if not 0 < seconds < math.inf:
        raise ValueError(f"a round of {name!r} must cost more than 0 seconds, got {seconds}")
    return math.log(seconds)


def _size(name: str) -> tuple[int, int] | None:
    """(steps, rows) as far as the name tells; None for `off`."""
    if canonical(name) == "off":
        return None
    if match := re.fullmatch(r"(\d+)_\d+_(\d+)", name):
        return int(match[1]), int(match[2])
    if re.fullmatch(r"\d+(x\d+)*", name):
        counts = np.cumprod([int(c) for c in name.split("x")])
        return len(counts), 1 + int(counts.sum())
    return 4, 13  # other static trees: a typical one


@functools.cache
def _shape(name: str) -> float:
    """Cost relative to plain decoding where nothing is known: about a memory-bound chip's."""
    size = _size(name)
    return 1.0 if size is None else 1.0 + 0.08 * size[0] + 0.01 * size[1]
