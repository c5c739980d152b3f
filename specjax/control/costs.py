"""Seconds per round by strategy and batch bucket: calibrated at start, refreshed while running."""

from __future__ import annotations

import bisect
import functools
import math
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from specjax.control.base import canonical

DEFAULT_BUCKETS = tuple(2**i for i in range(11))

# A residual (in log space, per chunk) is shared: at first the calibration of the one entry is
# doubted, but once it was seen to hold, what makes one strategy slower (longer contexts, a busy
# machine) is thought to make all slower.
_RATE = 0.45
_COMMON_DOUBT = 0.3  # of the common factor, in units of the doubt of an entry never observed
_FULL_ROUNDS = 8  # shorter chunks weigh less: their time is partly dispatch
_LIMIT = 3.0  # residuals beyond so many typical ones are cut
_TYPICAL = 0.05  # smallest typical residual
_FIRST_TYPICAL = 0.15
_STALE_ROUNDS = 2000.0
_CONFIRMED = 4  # chunks after which a calibrated entry is believed


class CostTable:
    """Seconds per round.

    A missing entry is guessed: from the strategy's other buckets, else from the other strategies by
    how many rows and draft steps they have.

    Args:
      buckets: increasing compiled batch sizes; a batch costs what the smallest bucket that holds
        it costs.
      seconds: per strategy a list with one entry per bucket; None (or NaN) where not calibrated.

    Raises:
      ValueError: the lists do not fit, or a cost is not above zero.
    """

    def __init__(
        self,
        buckets: Sequence[int] = DEFAULT_BUCKETS,
        seconds: Mapping[str, Sequence[float | None]] | None = None,
    ):
        self.buckets = tuple(int(b) for b in buckets)
        if not self.buckets or any(
            a >= b for a, b in zip((0, *self.buckets), self.buckets, strict=False)
        ):
            raise ValueError(f"buckets must be increasing batch sizes, got {list(buckets)}")
        self._log: dict[str, list[float | None]] = {}
        self._count: dict[str, list[int]] = {}
        self._seen_at: dict[str, list[int]] = {}
        self._typical = _FIRST_TYPICAL
        self._common = 0.0
        self._rounds = 0
        for name, row in (seconds or {}).items():
            if len(row) != len(self.buckets):
                raise ValueError(
                    f"strategy {name!r} has {len(row)} costs for {len(self.buckets)} buckets; give "
                    "one per bucket, None where not calibrated"
                )
            self._row(canonical(name))[:] = [_log_seconds(name, s) for s in row]

    @classmethod
    def from_samples(cls, samples: Mapping[tuple[str, int], Sequence[float]]) -> CostTable:
        """From measured seconds per round, by (strategy, bucket); the least of each counts.

        Whatever else the machine does adds to a time, and never takes from it.
        """
        buckets = sorted({bucket for _, bucket in samples})
        rows: dict[str, list[float | None]] = {}
        for (name, bucket), values in samples.items():
            row = rows.setdefault(canonical(name), [None] * len(buckets))
            row[buckets.index(bucket)] = float(min(values))
        return cls(buckets, rows)

    def to_dict(self) -> dict[str, Any]:
        """`buckets` and `seconds`, as the constructor takes them, with what was learned so far."""
        seconds = {
            name: [None if x is None else math.exp(x + self._common) for x in row]
            for name, row in self._log.items()
        }
        return {"buckets": list(self.buckets), "seconds": seconds}

    def index(self, batch_size: int) -> int:
        """Index of the smallest bucket that holds the batch; of the largest if none does."""
        return min(bisect.bisect_left(self.buckets, batch_size), len(self.buckets) - 1)

    def known(self, name: str, batch_size: int) -> bool:
        """Whether the cost was calibrated or observed, not guessed."""
        return name in self._log and self._log[name][self.index(batch_size)] is not None

    def slack(self, name: str, batch_size: int) -> float:
        """By what share the true cost may well be below the table's: it grows with age."""
        if not self.known(name, batch_size):
            return 0.35
        at = self.index(batch_size)
        if self._count[name][at] < _CONFIRMED:
            return 0.25
        age = self._rounds - self._seen_at[name][at]
        return 0.1 * (1 - 2 ** (-age / _STALE_ROUNDS))

    def seconds(self, name: str, batch_size: int) -> float:
        """Seconds per round; finite and above zero."""
        return math.exp(self._guess(name, self.index(batch_size)) + self._common)

    def observe(self, name: str, batch_size: int, seconds: float | None, rounds: int) -> None:
        """Takes in `seconds` per round, averaged over a chunk of `rounds`."""
        self._rounds += rounds
        if not rounds or seconds is None or not math.isfinite(seconds) or seconds <= 0:
            return
        at = self.index(batch_size)
        row, count = self._row(name), self._count[name]
        self._seen_at[name][at] = self._rounds
        count[at] += 1
        measured = math.log(seconds) - self._common
        if row[at] is None:
            row[at] = measured
            return
        residual = measured - row[at]
        limit = _LIMIT * self._typical
        cut = min(max(residual, -limit), limit)
        # A lasting change raises the limit until it is followed; a single outlier hardly does.
        self._typical = max(_TYPICAL, 0.9 * self._typical + 0.1 * min(abs(residual), 2 * limit))
        step = _RATE * min(1.0, rounds / _FULL_ROUNDS) * cut
        doubt = 1 / count[at]
        own = doubt / (doubt + _COMMON_DOUBT)
        row[at] += own * step
        self._common += (1 - own) * step

    def _row(self, name: str) -> list[float | None]:
        if name not in self._log:
            width = len(self.buckets)
            self._log[name] = [None] * width
            self._count[name] = [0] * width
            self._seen_at[name] = [0] * width
        return self._log[name]

    def _guess(self, name: str, at: int) -> float:
        """Log seconds, without the common factor."""
        row = self._log.get(name, ())
        if row and row[at] is not None:
            return row[at]
        known = [i for i, x in enumerate(row) if x is not None]
        if known:
            xs = [math.log(self.buckets[i]) for i in known]
            return float(np.interp(math.log(self.buckets[at]), xs, [row[i] for i in known]))
        for at_other in sorted(range(len(self.buckets)), key=lambda i: abs(i - at)):
            others = [
                x - math.log(_shape(other))
                for other, costs in self._log.items()
                if (x := costs[at_other]) is not None
            ]
            if others:
                return statistics.median(others) + math.log(_shape(name))
        return math.log(0.01 * _shape(name))

    def state(self) -> dict[str, Any]:
        return {
            "buckets": list(self.buckets),
            "log": {name: list(row) for name, row in self._log.items()},
            "count": {name: list(row) for name, row in self._count.items()},
            "seen_at": {name: list(row) for name, row in self._seen_at.items()},
            "typical": self._typical,
            "common": self._common,
            "rounds": self._rounds,
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> CostTable:
        table = cls(state["buckets"])
        table._log = {name: list(row) for name, row in state["log"].items()}
        table._count = {name: list(row) for name, row in state["count"].items()}
        table._seen_at = {name: list(row) for name, row in state["seen_at"].items()}
        table._typical, table._common = state["typical"], state["common"]
        table._rounds = state["rounds"]
        return table


def parts_to_seconds(parts: Mapping[str, Any], strategies: Iterable[str]) -> CostTable:
    """A table from costs of the parts of a round, the layout of the files in bench/costs.

    A chain or tree of s steps and T rows costs s draft steps and one verification of T rows;
    verifications of rows in between are interpolated.

    Args:
      parts: `batches`, and per batch `plain` and `draft` seconds, and `verify` by rows.
    """
    rows = sorted(map(int, parts["verify"]))
    verify = np.array([parts["verify"][str(r)] for r in rows])
    seconds: dict[str, list[float]] = {}
    for name in map(canonical, strategies):
        size = _size(name)
        if size is None:
            seconds[name] = list(parts["plain"])
            continue
        if size[1] > rows[-1]:
            raise ValueError(
                f"{name!r} verifies {size[1]} rows, the costs end at {rows[-1]}; measure more rows"
            )
        at_rows = [float(np.interp(size[1], rows, column)) for column in verify.T]
        seconds[name] = [size[0] * d + v for d, v in zip(parts["draft"], at_rows, strict=True)]
    return CostTable(parts["batches"], seconds)


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
