"""Seconds per round by strategy and batch bucket: calibrated at start, followed while running."""

from __future__ import annotations

import bisect
import functools
import math
import re
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from specjax.config.strategy import Strategy

DEFAULT_BUCKETS = tuple(2**i for i in range(11))

_FOLLOW = 0.2  # weight of a chunk in the moving average
_COMPARE = 0.15  # the same, at least, of a chunk that is compared with another strategy's
_OUTLIER = 0.35  # in logs: a chunk that takes longer by more counts only if the next one does
_GUESSED_SLACK = 0.35  # by what share a guessed cost may be too high,
_SLACK, _LEAST_SLACK = 0.3, 0.05  # and one that was calibrated, or compared often
_LEAST_SHARE = 0.1  # of the seconds of a chunk that its rounds take


class CostTable:
    """Seconds per round.

    What changes while a machine runs (contexts grow, others use it) changes all strategies by much
    the same factor. So a chunk of the strategy that ran before moves the whole bucket, and the
    first chunk that is measured after another strategy's moves the cost of its own strategy alone:
    it says how dear that is beside the other. A cost that was neither calibrated nor observed is
    guessed: from the strategy's other buckets, else from the numbers of rows and draft steps.

    Args:
      buckets: increasing compiled batch sizes; a batch costs what the smallest bucket that holds
        it costs.
      seconds: per strategy a list with one entry per bucket; None (or NaN) where not calibrated.
      beside: seconds of a chunk beside its rounds, by bucket; None: no such seconds.

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
        self._beside = beside
        # By bucket and strategy: log seconds, numbers of chunks and of comparisons, and by how much
        # the last chunk took longer than expected, if it was an outlier, else 0.
        self._logs: list[dict[str, float]] = [{} for _ in beside]
        self._chunks: list[dict[str, int]] = [{} for _ in beside]
        self._compared: list[dict[str, int]] = [{} for _ in beside]
        self._outliers: list[dict[str, float]] = [{} for _ in beside]
        self._last: list[str | None] = [None] * len(beside)  # the strategy measured last
        for name, row in (seconds or {}).items():
            if len(row) != len(self.buckets):
                raise ValueError(
                    f"strategy {name!r} has {len(row)} costs for {len(self.buckets)} buckets; give "
                    "one per bucket, None where not calibrated"
                )
            for at, each in enumerate(row):
                if each is None or math.isnan(each):
                    continue
                if not 0 < each < math.inf:
                    raise ValueError(f"a round of {name!r} must cost more than 0 s, got {each}")
                self._logs[at][name] = math.log(each)

    @classmethod
    def from_samples(
        cls,
        samples: Mapping[tuple[str, int], Sequence[float]],
        beside: Mapping[int, float] | None = None,
    ) -> CostTable:
        """From measured seconds per round, by (strategy, bucket); the least of each counts.

        Whatever else the machine does adds to a time, and never takes from it.

        Args:
          samples: without the seconds beside the rounds.
          beside: seconds of a chunk beside its rounds, by bucket.
        """
        buckets = sorted({bucket for _, bucket in samples})
        rows: dict[str, list[float | None]] = {}
        for (name, bucket), values in samples.items():
            row = rows.setdefault(name, [None] * len(buckets))
            row[buckets.index(bucket)] = float(min(values))
        return cls(buckets, rows, None if beside is None else [beside[b] for b in buckets])

    def index(self, batch_size: int) -> int:
        """Index of the smallest bucket that holds the batch; of the largest if none does."""
        return min(bisect.bisect_left(self.buckets, batch_size), len(self.buckets) - 1)

    def known(self, name: str, batch_size: int) -> bool:
        """Whether the cost was calibrated or observed, not guessed."""
        return name in self._logs[self.index(batch_size)]

    def chunks(self, name: str, batch_size: int) -> int:
        """Chunks of a strategy that were measured in the batch's bucket."""
        return self._chunks[self.index(batch_size)].get(name, 0)

    def slack(self, name: str, batch_size: int) -> float:
        """By what share the true cost, beside other strategies', may be below the table's."""
        if not self.known(name, batch_size):
            return _GUESSED_SLACK
        compared = self._compared[self.index(batch_size)].get(name, 0)
        return max(_SLACK / math.sqrt(1 + compared), _LEAST_SLACK)

    def seconds(self, name: str, batch_size: int, rounds: float = math.inf) -> float:
        """Seconds per round of a chunk of so many (at least one); finite and above zero."""
        at = self.index(batch_size)
        return math.exp(self._log(name, at)) + self._beside[at] / max(rounds, 1.0)

    def beside(self, batch_size: int) -> float:
        """Seconds of a chunk beside its rounds."""
        return self._beside[self.index(batch_size)]

    def observe(self, name: str, batch_size: int, seconds: float | None, rounds: int) -> None:
        """Takes in `seconds` per round, averaged over a chunk of `rounds`; None: not known."""
        if not rounds or seconds is None or not math.isfinite(seconds) or seconds <= 0:
            return
        at = self.index(batch_size)
        logs, last = self._logs[at], self._last[at]
        found = math.log(of_rounds(seconds, self._beside[at] / rounds))
        self._chunks[at][name] = self._chunks[at].get(name, 0) + 1
        self._last[at] = name
        if name not in logs:
            logs[name] = found
            return
        error, before = found - logs[name], self._outliers[at].get(name, 0.0)
        self._outliers[at][name] = error if error > _OUTLIER else 0.0
        if error > _OUTLIER:
            if not before:
                return
            error = _OUTLIER
        if last in (None, name):
            for other in logs:
                logs[other] += _FOLLOW * error
        else:
            compared = self._compared[at]
            compared[name] = compared.get(name, 0) + 1
            logs[name] += max(1 / (1 + compared[name]), _COMPARE) * error

    def _log(self, name: str, at: int) -> float:
        """Log seconds, known or guessed."""
        if name in self._logs[at]:
            return self._logs[at][name]
        known = [i for i, logs in enumerate(self._logs) if name in logs]
        if known:
            xs = [math.log(self.buckets[i]) for i in known]
            logs = [self._logs[i][name] for i in known]
            return float(np.interp(math.log(self.buckets[at]), xs, logs))
        for other in sorted(range(len(self.buckets)), key=lambda i: abs(i - at)):
            if logs := self._logs[other]:
                per_shape = [value - math.log(_shape(n)) for n, value in logs.items()]
                return statistics.median(per_shape) + math.log(_shape(name))
        return math.log(0.01 * _shape(name))

    def state(self) -> dict[str, Any]:
        return {
            "buckets": list(self.buckets),
            "beside": list(self._beside),
            "last": list(self._last),
            **{key: [dict(row) for row in getattr(self, "_" + key)] for key in _ROWS},
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> CostTable:
        table = cls(state["buckets"], beside=state["beside"])
        table._last = list(state["last"])
        for key in _ROWS:
            setattr(table, "_" + key, [dict(row) for row in state[key]])
        return table


_ROWS = ("logs", "chunks", "compared", "outliers")


def of_rounds(seconds: float, beside: float) -> float:
    """The seconds of a chunk that its rounds took; a small share at least."""
    return max(seconds - beside, _LEAST_SHARE * seconds)


@functools.cache
def _shape(name: str) -> float:
    """Cost relative to plain decoding where nothing is known: about a memory-bound chip's."""
    if name == Strategy.OFF.name:
        return 1.0
    steps, rows = 4, 13  # static trees given by their paths: a typical one
    if match := re.fullmatch(r"(\d+)_\d+_(\d+)", name):
        steps, rows = int(match[1]), int(match[2])
    elif re.fullmatch(r"\d+(x\d+)*", name):
        counts = np.cumprod([int(c) for c in name.split("x")])
        steps, rows = len(counts), 1 + int(counts.sum())
    return 1.0 + 0.08 * steps + 0.01 * rows
