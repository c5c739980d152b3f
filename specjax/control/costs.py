"""Seconds per round by strategy and batch bucket: calibrated at start, refreshed while running.

Of every entry (strategy, bucket) the table keeps the log of its seconds `x` as they were when it
last ran. What an entry that does not run costs meanwhile has to be inferred from those that run:

    log seconds = x + (c - m)

`c` is a factor common to the bucket that follows what runs (a busy machine, longer contexts), and
`m` is what it was when the entry last ran; the entry's drift is d = c - m. Every bucket has its own
because small ones run in the tail, where contexts are long. A part of each residual is followed, in
log space and per chunk:

*   of a strategy that keeps running, by its x wholly, and by c but for the share of doubt in the
    entry, which falls as chunks confirm it: what makes one strategy slower is presumed to make all
    slower;
*   of one that runs after another in the same bucket, not by c, which what ran before has just
    shown, and by x only as doubtful as it is, or as notable the residual: tries are full of noise.

One strategy alone cannot tell its own change from everybody's, so the presumption may be wrong by
all of d: the true cost of an entry that does not run lies between exp(x) and exp(x + d), and
`slack` says so. When such an entry runs at last and its residual takes back a share s of its drift
(e = -s d, with d large beside the noise), that share of the drift since m was not common: c and the
marks of all that ran since are scaled towards m by 1 - s. Whatever ran last costs what it was seen
to cost as before, and all others are put right at once. (Where much of a chunk is not its rounds,
see below, s is the share of what the drift makes of the whole chunk.)

Residuals are cut at a few typical ones: chunks with a hiccup of the machine are common. Where one
asks to go further down than that, `slack` grows by the excess, and a second one is believed.

Calibration, a few rounds on a machine that has just started, is off by a factor that is much the
same for all strategies of a bucket. So what did not run yet is taken to be off by as much as the
median of those that ran; else what ran first would be better known than the others, or just
cheaper, and stay. Of its first chunk most is believed if it was cheaper than that, and no more than
of any other if it was dearer: what else the machine did can only have added to the calibration. As
that and a drift look alike in it, the first chunk takes nothing back from what the others drifted.

A chunk also takes what lies beside its rounds, whatever strategy it has: to be enqueued, to take in
tables, to hand out results. Of a chunk of a few quick rounds that is the most, and strategies are
known by chunks of very different length, so it is kept apart, by bucket, as `beside`. A residual is
followed by both in proportion to their shares of the chunk (normalised least mean squares, in log
space), so that short chunks teach the one and long ones the other. Being scaled, what is taken to
be nothing stays so.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import math
import re
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from specjax.control.base import canonical

DEFAULT_BUCKETS = tuple(2**i for i in range(11))

_RATE = 0.45  # of a residual that is followed per chunk
_FIRST_RATE = 0.7  # the same where the first chunk is cheaper than calibrated,
_FIRST_LIMIT = math.log(3.0)  # by so much at most: more is an error of timing
_NOTABLE = 3.0  # typical residuals: what one chunk says more of than its noise
_COMMON_DOUBT = 0.3  # of the common factor, in units of the doubt of an entry in its first chunk
_MOST_OWN = 0.5  # share of a notable residual that is followed where another strategy ran before
_FULL_ROUNDS = 8  # shorter chunks weigh less: their time is partly dispatch,
_FULL_SECONDS = 0.05  # of which there is little where a few rounds take long
_LIMIT = 3.0  # residuals beyond so many typical ones are cut
_TYPICAL = 0.05  # smallest typical residual
_FIRST_TYPICAL = 0.15
_STALE_ROUNDS = 2000.0
_STALE_SLACK = 0.1
_CONFIRMED = 4  # chunks after which a calibrated entry is believed
_UNCONFIRMED_SLACK = 0.25
_CALIBRATED_SLACK = 0.35  # before the first chunk
_GUESSED_SLACK = 0.35
_MOST_SLACK = 0.9
_LEAST_SHARE = 0.1  # of the seconds of a chunk that its rounds take


@dataclasses.dataclass
class _Entry:
    """What is known of one strategy in one bucket.

    Attributes:
      log: of the seconds per round when it last ran. mark: the common factor then.
      count: of chunks that confirm it. seen_at: rounds of all entries when it last ran.
      excess: what the last chunk, as a whole, asked for beyond the limit, if it was that much
        cheaper.
      calibrated: log of the seconds per round, if it was; `log` counts from the first chunk on.
    """

    log: float
    mark: float = 0.0
    count: float = 0.0
    seen_at: int = 0
    excess: float = 0.0
    calibrated: float | None = None

    def __post_init__(self):
        if not self.count and self.calibrated is None:
            self.calibrated = self.log


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
        self._entries: dict[str, list[_Entry | None]] = {}
        self._typical = _FIRST_TYPICAL
        self._rounds = 0
        self._common = [0.0] * len(self.buckets)
        self._beside = [0.0] * len(self.buckets) if beside is None else [float(b) for b in beside]
        if len(self._beside) != len(self.buckets) or not all(0 <= b < 1e9 for b in self._beside):
            raise ValueError(
                f"beside must have seconds of at least 0 for each of {len(self.buckets)} buckets, "
                f"got {beside}"
            )
        self._last: list[str | None] = [None] * len(self.buckets)  # strategies that ran last
        for name, row in (seconds or {}).items():
            if len(row) != len(self.buckets):
                raise ValueError(
                    f"strategy {name!r} has {len(row)} costs for {len(self.buckets)} buckets; give "
                    "one per bucket, None where not calibrated"
                )
            logs = [_log_seconds(name, s) for s in row]
            self._entries[canonical(name)] = [None if x is None else _Entry(x) for x in logs]

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
        return self._entry(name, self.index(batch_size)) is not None

    def age(self, name: str, batch_size: int) -> int:
        """Rounds of all strategies since this one was seen in the batch's bucket."""
        entry = self._entry(name, self.index(batch_size))
        return self._rounds - (entry.seen_at if entry else 0)

    @property
    def rounds(self) -> int:
        """Of all strategies, so far."""
        return self._rounds

    def chunks(self, name: str, batch_size: int) -> float:
        """That confirm the cost; those before a lasting change count for little."""
        entry = self._entry(name, self.index(batch_size))
        return entry.count if entry else 0.0

    def slack(self, name: str, batch_size: int) -> float:
        """By what share the true cost may well be below the table's: drift and age add to it."""
        at = self.index(batch_size)
        entry = self._entry(name, at)
        if entry is None:
            return _GUESSED_SLACK
        slack = _UNCONFIRMED_SLACK if entry.count else _CALIBRATED_SLACK
        if entry.count >= _CONFIRMED:
            age = self._rounds - entry.seen_at
            slack = _STALE_SLACK * (1 - 2 ** (-age / _STALE_ROUNDS))
        grown = self._common[at] - entry.mark if entry.count else self._shift(at)
        below = min(0.0, -grown) + entry.excess
        return min(1 - (1 - slack) * math.exp(below), _MOST_SLACK)

    def seconds(self, name: str, batch_size: int, rounds: float = math.inf) -> float:
        """Seconds per round of a chunk of so many, one at least; finite and above zero."""
        beside = self.beside(batch_size) / max(rounds, 1.0)
        return math.exp(self._guess(name, self.index(batch_size))) + beside

    def beside(self, batch_size: int) -> float:
        """Seconds of a chunk that its rounds do not take."""
        return self._beside[self.index(batch_size)]

    def observe(self, name: str, batch_size: int, seconds: float | None, rounds: int) -> None:
        """Takes in `seconds` per round, averaged over a chunk of `rounds`; see the module."""
        self._rounds += rounds
        if not rounds or seconds is None or not math.isfinite(seconds) or seconds <= 0:
            return
        at = self.index(batch_size)
        row = self._entries.setdefault(name, [None] * len(self.buckets))
        after_another = self._last[at] not in (name, None)
        self._last[at] = name
        entry, beside = row[at], self._beside[at] / rounds
        if entry is None:
            log = math.log(of_rounds(seconds, beside))
            row[at] = _Entry(log, self._common[at], 1.0, self._rounds)
            return
        weight = min(1.0, max(rounds / _FULL_ROUNDS, rounds * seconds / _FULL_SECONDS))
        is_first = not entry.count
        if is_first:
            entry.log, entry.mark = self._current(entry, at), self._common[at]
        drift = self._common[at] - entry.mark
        doubt = _trust(weight * (drift / self._typical) ** 2)
        not_shared = self._not_shared(seconds, beside, entry.log, drift, weight)
        expected = math.exp(entry.log + (1 - not_shared) * drift) + beside
        share = 1 - beside / expected  # of the chunk, that its rounds take
        surprise = math.log(seconds / expected)
        notable = _trust((surprise / self._typical / _NOTABLE) ** 2)
        if is_first and surprise < 0:
            rate, cut = _RATE + notable * (_FIRST_RATE - _RATE), max(surprise, -_FIRST_LIMIT)
        else:
            rate, cut = _RATE, self._cut(surprise)
        if much_cheaper := cut > surprise:
            cut = min(cut, max(surprise, entry.excess))
        step = rate * weight * cut / (share**2 + (1 - share) ** 2)
        step, beside_step = share * step, (1 - share) * step
        self._beside[at] *= math.exp(beside_step)
        self._keep_drift(at, entry, 1 - not_shared)
        entry.count = 1 + (1 - doubt) * entry.count
        own = 1 if is_first else 1 / (1 + _COMMON_DOUBT * entry.count)
        if after_another:
            step *= max(own, notable * _MOST_OWN)
        else:
            self._common[at] += (1 - own) * step
        followed = share * step + (1 - share) * beside_step
        entry.excess = surprise - followed if much_cheaper else 0.0
        entry.log += (1 - not_shared) * drift + step
        entry.mark, entry.seen_at = self._common[at], self._rounds

    def _not_shared(
        self, seconds: float, beside: float, log: float, drift: float, weight: float
    ) -> float:
        """Share of an entry's drift that a chunk takes back, as far as it tells that from noise."""
        presumed, before = math.exp(log + drift) + beside, math.exp(log) + beside
        shows = math.log(presumed / before)  # of the drift, in a chunk of this length
        if not shows:
            return 0.0
        taken_back = min(max(math.log(presumed / seconds) / shows, 0.0), 1.0)
        return taken_back * _trust(weight * (shows / self._typical / _NOTABLE) ** 2)

    def _cut(self, residual: float) -> float:
        """A residual no larger than a few typical ones.

        A lasting change raises the limit until it is followed; a single outlier hardly does.
        """
        limit = _LIMIT * self._typical
        surprise = min(abs(residual), 2 * limit)
        self._typical = max(_TYPICAL, 0.9 * self._typical + 0.1 * surprise)
        return min(max(residual, -limit), limit)

    def _keep_drift(self, at: int, since: _Entry, share: float) -> None:
        """Of a bucket's drift since an entry was seen only a share was common."""
        for row in self._entries.values():
            if (entry := row[at]) and entry.seen_at > since.seen_at:
                entry.mark = since.mark + share * (entry.mark - since.mark)
        self._common[at] = since.mark + share * (self._common[at] - since.mark)

    def _entry(self, name: str, at: int) -> _Entry | None:
        row = self._entries.get(name)
        return row[at] if row else None

    def _logs(self, name: str) -> list[float | None]:
        """Log seconds by bucket; None where they are not known."""
        row = self._entries.get(name, ())
        return [None if e is None else self._current(e, at) for at, e in enumerate(row)]

    def _current(self, entry: _Entry, at: int) -> float:
        """Log seconds of an entry now, whether it runs or not."""
        if entry.count:
            return entry.log + self._common[at] - entry.mark
        return entry.calibrated + self._shift(at)

    def _shift(self, at: int) -> float:
        """By how much the strategies of a bucket that ran were calibrated too low, in logs."""
        seen = [
            e.log + self._common[at] - e.mark - e.calibrated
            for row in self._entries.values()
            if (e := row[at]) and e.count and e.calibrated is not None
        ]
        return statistics.median(seen) if seen else 0.0

    def _guess(self, name: str, at: int) -> float:
        """Log seconds, known or not."""
        if entry := self._entry(name, at):
            return self._current(entry, at)
        row = self._logs(name)
        known = [i for i, x in enumerate(row) if x is not None]
        if known:
            xs = [math.log(self.buckets[i]) for i in known]
            return float(np.interp(math.log(self.buckets[at]), xs, [row[i] for i in known]))
        for at_other in sorted(range(len(self.buckets)), key=lambda i: abs(i - at)):
            others = [
                x - math.log(_shape(other))
                for other in self._entries
                if (x := self._logs(other)[at_other]) is not None
            ]
            if others:
                return statistics.median(others) + math.log(_shape(name))
        return math.log(0.01 * _shape(name))

    def state(self) -> dict[str, Any]:
        return {
            "buckets": list(self.buckets),
            "entries": {
                name: [None if e is None else dataclasses.asdict(e) for e in row]
                for name, row in self._entries.items()
            },
            "typical": self._typical,
            "common": list(self._common),
            "beside": list(self._beside),
            "rounds": self._rounds,
            "last": list(self._last),
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> CostTable:
        table = cls(state["buckets"], beside=state.get("beside"))  # an older state has none
        table._entries = {
            name: [None if e is None else _Entry(**e) for e in row]
            for name, row in state["entries"].items()
        }
        table._typical, table._rounds = state["typical"], state["rounds"]
        table._common, table._last = list(state["common"]), list(state["last"])
        return table


def of_rounds(seconds: float, beside: float) -> float:
    """Of the seconds of a chunk those that its rounds took: some did, whatever lies beside them."""
    return max(seconds - beside, _LEAST_SHARE * seconds)


def _trust(size: float) -> float:
    """In what is large, given the ratio of its square to that of noise."""
    return size**2 / (1 + size**2)


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
