"""Seconds per round by strategy and batch size: calibrated at start, then a moving average."""

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
_COMPARE = 0.15  # least weight of a first chunk after another strategy's
_OUTLIER = 0.35  # error of the log seconds above which a slow chunk is an outlier
_SLACK, _LEAST_SLACK = 0.3, 0.05  # share by which a cost may be too high: at first, at least
_LEAST_SHARE = 0.1  # smallest share of a chunk's seconds that its rounds are taken to need


class CostTable:
    """Seconds per round of each strategy and compiled batch size.

    What changes while a machine runs (contexts grow, other processes use it) changes all strategies
    by much the same factor. Therefore a chunk of the strategy that was measured last moves the
    costs of all at its batch size. The first chunk that is measured after another strategy's
    compares the two, and moves the cost of its own strategy alone.

    A chunk takes `beside` seconds however few rounds it has, and the rest of its seconds in
    proportion to its rounds. A cost that was neither calibrated nor observed is guessed from the
    strategy's costs at other batch sizes, else from its numbers of rows and draft steps.

    Args:
      buckets: increasing compiled batch sizes; a batch costs what the smallest bucket that holds
        it costs.
      seconds: seconds per round, by strategy a list with one entry per bucket; None or NaN where
        not calibrated.
      beside: seconds of a chunk that do not depend on its rounds, by bucket; None for 0.

    Raises:
      ValueError: a list has the wrong length, or a number is out of range.
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
        # By bucket and strategy: log seconds, numbers of chunks and of comparisons, and whether the
        # last chunk was an outlier.
        self._logs: list[dict[str, float]] = [{} for _ in beside]
        self._chunks: list[dict[str, int]] = [{} for _ in beside]
        self._compared: list[dict[str, int]] = [{} for _ in beside]
        self._outliers: list[dict[str, bool]] = [{} for _ in beside]
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
        """Builds a table from repeated measurements, of which the least counts.

        Anything else that the machine does adds to a time, and never takes from it.

        Args:
          samples: measured seconds per round by (strategy, bucket), without those of `beside`.
          beside: seconds of a chunk that do not depend on its rounds, by bucket.
        """
        buckets = sorted({bucket for _, bucket in samples})
        rows: dict[str, list[float | None]] = {}
        for (name, bucket), values in samples.items():
            row = rows.setdefault(name, [None] * len(buckets))
            row[buckets.index(bucket)] = float(min(values))
        return cls(buckets, rows, None if beside is None else [beside[b] for b in buckets])

    def index(self, batch_size: int) -> int:
        """Returns the index of the smallest bucket that holds the batch, else of the largest."""
        return min(bisect.bisect_left(self.buckets, batch_size), len(self.buckets) - 1)

    def known(self, name: str, batch_size: int) -> bool:
        """Whether the cost was calibrated or observed, not guessed."""
        return name in self._logs[self.index(batch_size)]

    def chunks(self, name: str, batch_size: int) -> int:
        """Returns how many chunks of a strategy were measured in the batch's bucket."""
        return self._chunks[self.index(batch_size)].get(name, 0)

    def slack(self, name: str, batch_size: int) -> float:
        """Returns by what share the true cost, relative to others, may be below the table's."""
        compared = self._compared[self.index(batch_size)].get(name, 0)
        return max(_SLACK / math.sqrt(1 + compared), _LEAST_SLACK)

    def seconds(self, name: str, batch_size: int, rounds: float = math.inf) -> float:
        """Returns seconds per round of a chunk of so many rounds, with its share of `beside`."""
        at = self.index(batch_size)
        return math.exp(self._log(name, at)) + self._beside[at] / max(rounds, 1.0)

    def beside(self, batch_size: int) -> float:
        """Returns the seconds of a chunk that do not depend on its rounds."""
        return self._beside[self.index(batch_size)]

    def observe(self, name: str, batch_size: int, seconds: float | None, rounds: int) -> None:
        """Takes in the seconds per round of a chunk of `rounds`; None where they are not known.

        A single outlier moves nothing, because anything else on the machine may have held the
        chunk up. If the next chunk of the strategy is one too, it counts.
        """
        if not rounds or seconds is None or not math.isfinite(seconds) or seconds <= 0:
            return
        at = self.index(batch_size)
        logs, last, compared = self._logs[at], self._last[at], self._compared[at]
        self._last[at] = name
        found = math.log(of_rounds(seconds, self._beside[at] / rounds))
        self._chunks[at][name] = self._chunks[at].get(name, 0) + 1
        error = found - logs.setdefault(name, found)
        is_second = self._outliers[at].get(name, False)
        self._outliers[at][name] = error > _OUTLIER
        if error > _OUTLIER and not is_second:
            return
        error = min(error, _OUTLIER)
        if last in (None, name):
            for other in logs:
                logs[other] += _FOLLOW * error
        else:
            compared[name] = compared.get(name, 0) + 1
            logs[name] += max(1 / (1 + compared[name]), _COMPARE) * error

    def _log(self, name: str, at: int) -> float:
        """Returns the log seconds, known or guessed."""
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
    """Returns the seconds that the rounds took; at least a small share."""
    return max(seconds - beside, _LEAST_SHARE * seconds)


@functools.cache
def _shape(name: str) -> float:
    """Returns a guess of the cost relative to plain decoding's, as on a memory-bound chip."""
    if name == Strategy.OFF.name:
        return 1.0
    steps, rows = 4, 13  # static trees given by their paths: a typical one
    if match := re.fullmatch(r"(\d+)_\d+_(\d+)", name):
        steps, rows = int(match[1]), int(match[2])
    elif re.fullmatch(r"\d+(x\d+)*", name):
        counts = np.cumprod([int(c) for c in name.split("x")])
        steps, rows = len(counts), 1 + int(counts.sum())
    return 1.0 + 0.08 * steps + 0.01 * rows
