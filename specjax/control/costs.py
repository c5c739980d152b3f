"""Seconds per round by strategy, batch size and context: calibrated at start, then averaged."""

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
    """Seconds per round of each strategy, compiled batch size and context.

    The *context* of a batch is the number of tokens in the caches of all its slots together. A
    kernel that reads the pages of each slot reads them in proportion to this sum, and not to the
    longest one. So a round takes

        seconds at the short context x (1 + growth x (context - slots x short))

    where `growth` is fitted to measurements at two contexts. Tokens that a round emits make later
    rounds dearer by `growth`, and that is no change of the machine.

    What does change while a machine runs (other processes use it, its clock rate changes) changes
    all strategies by much the same factor. Therefore a chunk of the strategy that was measured last
    moves the costs of all at its batch size, at all contexts. Only what the chunk took beyond its
    cost at its own context moves them, so that a growing context is not counted twice. The first
    chunk that is measured after another strategy's compares the two, and moves the cost of its own
    strategy alone: at the short or the long context, whichever is nearer to its own, which is how
    `growth` is kept up to date.

    A chunk takes `beside` seconds however few rounds it has, and the rest of its seconds in
    proportion to its rounds. A cost that was neither calibrated nor observed is guessed from the
    strategy's costs at other batch sizes, else from its numbers of rows and draft steps. A growth
    that was not calibrated is guessed from the strategy's seconds per token of context at other
    batch sizes, else from those of other strategies, which read the same caches.

    Args:
      buckets: increasing compiled batch sizes; a batch costs what the smallest bucket that holds
        it costs.
      seconds: seconds per round, by strategy a list with one entry per bucket; None or NaN where
        not calibrated.
      beside: seconds of a chunk that do not depend on its rounds, by bucket; None for 0.
      contexts: tokens per slot at which `seconds` and `long` were measured, the fewer first; None:
        costs do not depend on the context.
      long: seconds per round at the larger one, as `seconds`; None or NaN where not calibrated. A
        time below that at the short context counts as equal to it.

    Raises:
      ValueError: a list has the wrong length, or a number is out of range.
    """

    def __init__(
        self,
        buckets: Sequence[int] = DEFAULT_BUCKETS,
        seconds: Mapping[str, Sequence[float | None]] | None = None,
        beside: Sequence[float] | None = None,
        contexts: tuple[int, int] | None = None,
        long: Mapping[str, Sequence[float | None]] | None = None,
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
        if contexts is not None:
            contexts = tuple(int(c) for c in contexts)
            if len(contexts) != 2 or not 0 < contexts[0] < contexts[1]:
                raise ValueError(
                    "contexts must be two numbers of tokens per slot, the fewer first, got "
                    f"{list(contexts)}"
                )
        elif long:
            raise ValueError(
                f"long has costs of {', '.join(map(repr, long))} at a longer context, and contexts "
                "does not say at which; give contexts=(short, long) in tokens per slot"
            )
        self.contexts = contexts
        self._beside = beside
        # By bucket and strategy: log seconds at the short context, their relative growth per token
        # of context, numbers of chunks and of comparisons, and whether the last chunk was an
        # outlier.
        self._logs: list[dict[str, float]] = [{} for _ in beside]
        self._growth: list[dict[str, float]] = [{} for _ in beside]
        self._chunks: list[dict[str, int]] = [{} for _ in beside]
        self._compared: list[dict[str, int]] = [{} for _ in beside]
        self._outliers: list[dict[str, bool]] = [{} for _ in beside]
        self._last: list[str | None] = [None] * len(beside)  # the strategy measured last
        for name, row in (seconds or {}).items():
            for at, each in self._row(name, row):
                self._logs[at][name] = math.log(each)
        for name, row in (long or {}).items():
            for at, each in self._row(name, row):
                if name not in self._logs[at]:
                    raise ValueError(
                        f"strategy {name!r} has a cost at {self.contexts[1]} tokens per slot for "
                        f"{self.buckets[at]} slots and none at {self.contexts[0]}; give both"
                    )
                ratio = each / math.exp(self._logs[at][name])
                self._growth[at][name] = max(ratio - 1, 0.0) / self._span(at)

    def _row(self, name: str, row: Sequence[float | None]) -> list[tuple[int, float]]:
        """The index of each calibrated bucket, and its seconds."""
        if len(row) != len(self.buckets):
            raise ValueError(
                f"strategy {name!r} has {len(row)} costs for {len(self.buckets)} buckets; give "
                "one per bucket, None where not calibrated"
            )
        found = [(at, each) for at, each in enumerate(row) if each is not None]
        found = [(at, each) for at, each in found if not math.isnan(each)]
        for _, each in found:
            if not 0 < each < math.inf:
                raise ValueError(f"a round of {name!r} must cost more than 0 s, got {each}")
        return found

    @classmethod
    def from_samples(
        cls,
        samples: Mapping[tuple[str, int], Sequence[float]],
        beside: Mapping[int, float] | None = None,
        contexts: tuple[int, int] | None = None,
        long: Mapping[tuple[str, int], Sequence[float]] | None = None,
    ) -> CostTable:
        """Builds a table from repeated measurements, of which the least counts.

        Anything else that the machine does adds to a time, and never takes from it.

        Args:
          samples: measured seconds per round by (strategy, bucket), without those of `beside`.
          beside: seconds of a chunk that do not depend on its rounds, by bucket.
          contexts: tokens per slot of `samples` and of `long`, as in the class.
          long: as `samples`, at the larger context; where it was measured.
        """
        buckets = sorted({bucket for _, bucket in samples})

        def rows(of: Mapping[tuple[str, int], Sequence[float]]) -> dict[str, list[float | None]]:
            found: dict[str, list[float | None]] = {}
            for (name, bucket), values in of.items():
                row = found.setdefault(name, [None] * len(buckets))
                row[buckets.index(bucket)] = float(min(values))
            return found

        beside = None if beside is None else [beside[b] for b in buckets]
        return cls(buckets, rows(samples), beside, contexts, rows(long or {}))

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

    def seconds(
        self,
        name: str,
        batch_size: int,
        rounds: float = math.inf,
        context: float | None = None,
    ) -> float:
        """Returns seconds per round of a chunk, with its share of `beside`.

        Args:
          name: the strategy.
          batch_size: number of running slots.
          rounds: number of rounds of the chunk.
          context: number of tokens in the caches of all slots together; None: that of a full bucket
            at the short context.
        """
        at = self.index(batch_size)
        log = self._log(name, at)
        rise = math.log(self._rise(self._growth_of(name, at, log), at, context))
        return math.exp(log + rise) + self._beside[at] / max(rounds, 1.0)

    def beside(self, batch_size: int) -> float:
        """Returns the seconds of a chunk that do not depend on its rounds."""
        return self._beside[self.index(batch_size)]

    def observe(
        self,
        name: str,
        batch_size: int,
        seconds: float | None,
        rounds: int,
        context: float | None = None,
    ) -> None:
        """Takes in the seconds per round of a chunk; None where they are not known.

        A single outlier moves nothing, because anything else on the machine may have held the
        chunk up. If the next chunk of the strategy is one too, it counts.

        Args:
          name: the strategy.
          batch_size: number of slots that ran when the chunk began.
          seconds: seconds per round of the chunk.
          rounds: number of rounds of the chunk.
          context: number of tokens in the caches of the running slots together, on average over the
            rounds; None: as in `seconds`.
        """
        if not rounds or seconds is None or not math.isfinite(seconds) or seconds <= 0:
            return
        at = self.index(batch_size)
        logs, last, compared = self._logs[at], self._last[at], self._compared[at]
        self._last[at] = name
        found = math.log(of_rounds(seconds, self._beside[at] / rounds))
        self._chunks[at][name] = self._chunks[at].get(name, 0) + 1
        growth = self._growth_of(name, at, self._log(name, at))
        found -= math.log(self._rise(growth, at, context))  # as if at the short context
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
            gain = max(1 / (1 + compared[name]), _COMPARE)
            self._correct(name, at, gain * error, growth, context)

    def _correct(
        self, name: str, at: int, change: float, growth: float, context: float | None
    ) -> None:
        """Changes the log seconds of a strategy at a context by `change`.

        The costs at the short and the long context, between which costs are a straight line, are
        changed in proportion to their shares of the cost at `context`.
        """
        logs = self._logs[at]
        if self.contexts is None or context is None:
            logs[name] += change
            return
        ratio = 1 + growth * self._span(at)  # the cost at the long context, at the short one 1
        place = (context - self.buckets[at] * self.contexts[0]) / self._span(at)
        rise = self._rise(growth, at, context)
        shares = (1 - place) / rise, place * ratio / rise
        short, far = (max(share, 0.0) for share in shares)
        change /= short * shares[0] + far * shares[1]
        logs[name] += change * short
        ratio *= math.exp(change * (far - short))
        self._growth[at][name] = max(ratio - 1, 0.0) / self._span(at)

    def _span(self, at: int) -> int:
        """The tokens by which a full bucket's long context exceeds the short one."""
        return self.buckets[at] * (self.contexts[1] - self.contexts[0])

    def _rise(self, growth: float, at: int, context: float | None) -> float:
        """The cost at a context, relative to that at the short one."""
        if self.contexts is None or context is None:
            return 1.0
        beyond = context - self.buckets[at] * self.contexts[0]
        return max(1 + growth * beyond, _LEAST_SHARE)

    def _growth_of(self, name: str, at: int, log: float) -> float:
        """Returns the relative growth per token of context, known or guessed.

        Args:
          log: log seconds of the strategy at the short context.
        """
        if name in self._growth[at]:
            return self._growth[at][name]
        known = [i for i, growth in enumerate(self._growth) if name in growth]
        if known:
            xs = [math.log(self.buckets[i]) for i in known]
            slopes = [self._slope(name, i) for i in known]
            return float(np.interp(math.log(self.buckets[at]), xs, slopes)) / math.exp(log)
        for other in sorted(range(len(self.buckets)), key=lambda i: abs(i - at)):
            if names := self._growth[other]:
                slope = statistics.median(self._slope(n, other) for n in names)
                return slope / math.exp(log)
        return 0.0

    def _slope(self, name: str, at: int) -> float:
        """Seconds per token of context, of a strategy whose growth is known."""
        return self._growth[at][name] * math.exp(self._logs[at][name])

    def _log(self, name: str, at: int) -> float:
        """Returns the log seconds at the short context, known or guessed."""
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
            "contexts": None if self.contexts is None else list(self.contexts),
            "last": list(self._last),
            **{key: [dict(row) for row in getattr(self, "_" + key)] for key in _ROWS},
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> CostTable:
        table = cls(state["buckets"], beside=state["beside"], contexts=state["contexts"])
        table._last = list(state["last"])
        for key in _ROWS:
            setattr(table, "_" + key, [dict(row) for row in state[key]])
        return table


_ROWS = ("logs", "growth", "chunks", "compared", "outliers")


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
