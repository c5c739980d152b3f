"""Seconds per round by strategy, batch size and context: calibrated at start, then averaged."""

from __future__ import annotations

import bisect
import copy
import dataclasses
import functools
import math
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


@dataclasses.dataclass
class _Cost:
    """The cost of a strategy at a batch size.

    Attributes:
      log: log seconds of a round at the short context.
      chunks: number of chunks that were measured.
      compared: number of those that came first after another strategy's.
      is_outlier: whether the latest chunk was an outlier.
    """

    log: float
    chunks: int = 0
    compared: int = 0
    is_outlier: bool = False


class CostTable:
    """Seconds per round of each strategy, compiled batch size and context.

    The *context* of a batch is the number of tokens in the caches of all its slots together. A
    kernel that reads the pages of each slot reads them in proportion to this sum, and not to the
    longest one; all strategies read the same caches. So a round takes

        seconds at the short context + slope x (context - slots x short)

    What changes while a machine runs (other processes use it, its clock rate changes) changes all
    strategies by much the same factor. Therefore a chunk of the strategy that was measured last
    moves the costs of all at its batch size. Only what the chunk took beyond its cost at its own
    context moves them, so that a growing context is not counted twice. The first chunk that is
    measured after another strategy's compares the two, and moves the cost of its own strategy
    alone.

    A chunk takes `beside` seconds however few rounds it has, and the rest of its seconds in
    proportion to its rounds. A cost that was neither calibrated nor observed is guessed from the
    strategy's costs at other batch sizes, else from its numbers of rows and draft steps.

    Args:
      buckets: increasing compiled batch sizes; a batch costs what the smallest bucket that holds
        it costs.
      seconds: seconds per round, by strategy a list with one entry per bucket; None where not
        calibrated.
      beside: seconds of a chunk that do not depend on its rounds, by bucket; None for 0.
      slope: seconds of a round per token of context.
      short: tokens per slot at which `seconds` were measured.
    """

    def __init__(
        self,
        buckets: Sequence[int] = DEFAULT_BUCKETS,
        seconds: Mapping[str, Sequence[float | None]] | None = None,
        beside: Sequence[float] | None = None,
        slope: float = 0.0,
        short: int = 0,
    ):
        self.buckets = tuple(buckets)
        self._beside = list(beside or [0.0] * len(self.buckets))
        self._slope, self._short = slope, short
        self._costs: list[dict[str, _Cost]] = [{} for _ in self.buckets]
        self._last: list[str | None] = [None] * len(self.buckets)  # the strategy measured last
        for name, row in (seconds or {}).items():
            for costs, value in zip(self._costs, row, strict=True):
                if value is not None:
                    costs[name] = _Cost(math.log(value))

    def index(self, batch_size: int) -> int:
        """Returns the index of the smallest bucket that holds the batch, else of the largest."""
        return min(bisect.bisect_left(self.buckets, batch_size), len(self.buckets) - 1)

    def known(self, name: str, batch_size: int) -> bool:
        """Whether the cost was calibrated or observed, not guessed."""
        return name in self._costs[self.index(batch_size)]

    def chunks(self, name: str, batch_size: int) -> int:
        """Returns how many chunks of a strategy were measured in the batch's bucket."""
        cost = self._costs[self.index(batch_size)].get(name)
        return cost.chunks if cost else 0

    def slack(self, name: str, batch_size: int) -> float:
        """Returns by what share the true cost, relative to others, may be below the table's."""
        cost = self._costs[self.index(batch_size)].get(name)
        return max(_SLACK / math.sqrt(1 + (cost.compared if cost else 0)), _LEAST_SLACK)

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
        bucket = self.index(batch_size)
        per_round = self._seconds_at(self._log(name, bucket), bucket, context)
        return per_round + self._beside[bucket] / max(rounds, 1.0)

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
        bucket = self.index(batch_size)
        costs, last, self._last[bucket] = self._costs[bucket], self._last[bucket], name
        measured = of_rounds(seconds, self._beside[bucket] / rounds)
        if name not in costs:
            short = max(measured - self._beyond(bucket, context), _LEAST_SHARE * measured)
            costs[name] = _Cost(math.log(short))
        cost = costs[name]
        cost.chunks += 1
        error = math.log(measured / self._seconds_at(cost.log, bucket, context))
        is_second, cost.is_outlier = cost.is_outlier, error > _OUTLIER
        if cost.is_outlier and not is_second:
            return
        error = min(error, _OUTLIER)
        if last in (None, name):
            for other in costs.values():
                other.log += _FOLLOW * error
        else:
            cost.compared += 1
            cost.log += max(1 / (1 + cost.compared), _COMPARE) * error

    def _beyond(self, bucket: int, context: float | None) -> float:
        """The seconds of a round for the tokens of context beyond the short one."""
        if context is None:
            return 0.0
        return self._slope * (context - self.buckets[bucket] * self._short)

    def _seconds_at(self, log: float, bucket: int, context: float | None) -> float:
        """The seconds of a round at a context."""
        short = math.exp(log)
        return max(short + self._beyond(bucket, context), _LEAST_SHARE * short)

    def _log(self, name: str, bucket: int) -> float:
        """Returns the log seconds at the short context, known or guessed."""
        if name in self._costs[bucket]:
            return self._costs[bucket][name].log
        known = [i for i, costs in enumerate(self._costs) if name in costs]
        if known:
            xs = [math.log(self.buckets[i]) for i in known]
            logs = [self._costs[i][name].log for i in known]
            return float(np.interp(math.log(self.buckets[bucket]), xs, logs))
        for other in sorted(range(len(self.buckets)), key=lambda i: abs(i - bucket)):
            if costs := self._costs[other]:
                per_shape = [cost.log - math.log(_shape(n)) for n, cost in costs.items()]
                return statistics.median(per_shape) + math.log(_shape(name))
        return math.log(0.01 * _shape(name))

    def state(self) -> dict[str, Any]:
        """Returns, for JSON, all that `from_state` needs."""
        costs = [{name: vars(cost) for name, cost in one.items()} for one in self._costs]
        return copy.deepcopy({**vars(self), "_costs": costs})

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> CostTable:
        """Makes the table that returned this state."""
        table = cls(state["buckets"])
        costs = [{name: _Cost(**cost) for name, cost in one.items()} for one in state["_costs"]]
        values = {**copy.deepcopy(dict(state)), "buckets": table.buckets, "_costs": costs}
        vars(table).update(values)
        return table


def of_rounds(seconds: float, beside: float) -> float:
    """Returns the seconds that the rounds took; at least a small share."""
    return max(seconds - beside, _LEAST_SHARE * seconds)


@functools.cache
def _shape(name: str) -> float:
    """Returns a guess of the cost relative to plain decoding's, as on a memory-bound chip."""
    strategy = Strategy.parse(name)
    return 1.0 + 0.08 * strategy.steps + 0.01 * (strategy.rows - 1)
