"""What is believed of the costs of one batch bucket, after every chunk: a normal distribution.

The state is the logs of the seconds per round of every strategy, and of the seconds of a chunk
beside its rounds. A chunk of strategy i with n rounds that took y seconds is an observation

    log y = log(n exp(x_i) + exp(b)) + noise

and the belief follows it as an extended Kalman filter does (Kalman, "A New Approach to Linear
Filtering and Prediction Problems", 1960). What strategies have in common is in the covariances:

*   A calibration was off by much the same factor for all, and what changes while the machine runs
    (who else does, how long the contexts are) mostly changes all. So what one strategy shows moves
    the others, and how well a cost is known beside another is the variance of their difference.
*   One that runs alone cannot tell its own change from everybody's. Its `drift` since another was
    seen is taken for everybody's, but may be its own. Before the next one is looked at, all that
    did not run are doubted by it together: the first of them acquits, or convicts, the others too.

A chunk with a hiccup of the machine is believed less, as under a Student's t distribution. Where a
few in a row are off as far in the same direction, something has changed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

_CALIBRATED = 0.2  # standard error of a calibrated cost beside others of its bucket, in logs,
_CALIBRATED_ALL = 0.7  # and of all of a bucket together
_GUESSED = 2.0  # the same of one that was not calibrated
_COMMON_STEP = 0.05  # by which all strategies change from chunk to chunk,
_OWN_STEP = 0.004  # and each beside the others
_BESIDE = 0.3  # standard error of what lies beside the rounds, in logs
_USUAL_DRIFT = 0.4  # in logs: one of this size is as likely everybody's as its own
_OWN_DRIFT = 0.8  # standard error of the others where a drift was not theirs, in units of it
_FIRST_NOISE = 0.15  # standard error of a chunk, in logs, before anything was seen,
_NOISE_CHUNKS = 4  # which counts as if it had been seen in so many
_LEAST_NOISE = 0.03
_NOISE_RATE = 0.05
_FREEDOM = 4.0  # degrees of freedom of Student's t
_OUTLIER = 3.0  # standard errors that a single chunk cannot tell from a hiccup,
_DEARER, _CHEAPER = 3, 2  # but so many in a row can
_FULL_ROUNDS = 8  # shorter chunks weigh less: their time is partly dispatch,
_FULL_SECONDS = 0.05  # of which there is little where a few rounds take long


class Noise:
    """The standard error of a full chunk's log seconds, as they came, in all buckets alike."""

    def __init__(self, size: float = _FIRST_NOISE, chunks: float = _NOISE_CHUNKS):
        self.size, self.chunks = size, chunks

    def saw(self, surprise: float, known: float, own: float) -> None:
        """Of a surprise, `known` is the variance that the belief expected and `own` that of noise.

        It tells of noise as much as it consists of it: a step of expectation maximisation.
        """
        share = own / (known + own)
        self.chunks += share
        rate = max(1 / self.chunks, _NOISE_RATE) * share
        square = min(surprise**2 / (known + own), _OUTLIER**2)
        self.size = max(self.size * math.sqrt(1 + rate * (square - 1)), _LEAST_NOISE)


class _Outliers(NamedTuple):
    """In a row: the smallest surprise, how many, and whether their strategy ran before each."""

    least: float
    count: int
    in_a_run: bool


class Belief:
    """Of one bucket.

    Args:
      beside: seconds of a chunk beside its rounds; 0: nothing, and it stays so.

    Attributes:
      names: of n strategies. mean [1 + n], covariance [1 + n, 1 + n]: of the logs of `beside` and
        of their seconds.
      last: the strategy that ran last. drift: by how much it changed since another one was seen.
      outliers: in a row, up to the last chunk, by strategy. chunks: seen so far, by strategy.
    """

    def __init__(self, beside: float = 0.0):
        self.names: list[str] = []
        self.mean = np.array([math.log(beside) if beside else -math.inf])
        self.covariance = np.array([[_BESIDE**2]])
        self.last: str | None = None
        self.drift = 0.0
        self.outliers: dict[str, _Outliers] = {}
        self.chunks: dict[str, int] = {}

    def calibrated(self, name: str, log: float) -> None:
        """A strategy's log seconds as they were measured before anything ran."""
        self._add(name, log, _CALIBRATED, _CALIBRATED_ALL)

    def guessed(self, name: str, log: float) -> None:
        """Those of one that was not: its first chunk tells nearly all."""
        self._add(name, log, _GUESSED, 0.0)

    def _add(self, name: str, log: float, error: float, common: float) -> None:
        """Its own standard error, and what all strategies share of it."""
        n = len(self.mean)
        grown = np.zeros((n + 1, n + 1))
        grown[:n, :n] = self.covariance
        grown[n, 1:n] = grown[1:n, n] = common**2
        grown[n, n] = error**2 + common**2
        self.names.append(name)
        self.mean, self.covariance = np.append(self.mean, log), grown

    def log(self, name: str) -> float:
        """Log seconds per round."""
        return float(self.mean[self._at(name)])

    @property
    def beside(self) -> float:
        """Seconds of a chunk beside its rounds."""
        return math.exp(self.mean[0])

    def error(self, name: str, other: str) -> float:
        """Standard error of the log ratio of a strategy's seconds and another's."""
        if other == name:
            return 0.0
        i, j, cov = self._at(name), self._at(other), self.covariance
        return math.sqrt(max(cov[i, i] + cov[j, j] - 2 * cov[i, j], 0.0))

    def below(self, name: str, other: str) -> float:
        """By how much the log ratio may well be less, beside its standard error."""
        found = 0.0
        if other == self.last != name:
            found += max(self.own_drift, 0.0)
        if name in self.outliers:  # which a second one would confirm
            found += max(-self.outliers[name].least, 0.0)
        return found

    def observe(self, name: str, seconds: float, rounds: int, noise: Noise) -> None:
        """Takes in `seconds` per round of a chunk of `rounds`."""
        goes_on = name == self.last
        if not goes_on:
            self._doubt()
            self.last = name
        self._step()
        i = self._at(name)
        expected = math.exp(self.mean[i]) + self.beside / rounds
        slope = np.zeros(len(self.mean))
        slope[0] = self.beside / rounds / expected
        slope[i] = 1 - slope[0]
        surprise = math.log(seconds / expected)
        weight = min(1.0, max(rounds / _FULL_ROUNDS, rounds * seconds / _FULL_SECONDS))
        own = noise.size**2 / weight
        known = float(slope @ self.covariance @ slope)
        noise.saw(surprise, known, own)
        if change := self._change(name, surprise, math.sqrt(known + own), goes_on):
            by = change.least / slope[i]
            self._loosen(by if change.in_a_run or n == name else 0.0 for n in self.names)
        shared = self.covariance @ slope
        known = float(slope @ shared)
        own *= max((_FREEDOM + surprise**2 / (known + own)) / (_FREEDOM + 1), 1.0)
        gain, before = shared / (known + own), self.mean[i]
        most = _OUTLIER * math.sqrt(known + own)
        self.mean = self.mean + gain * min(max(surprise, -most), most)
        self.covariance = self.covariance - np.outer(gain, shared)
        self.chunks[name] = self.chunks.get(name, 0) + 1
        if goes_on:
            self.drift += float(self.mean[i] - before)

    def _step(self) -> None:
        """What may have changed since the last chunk; of what lies beside the rounds that is the
        host's doing, and not the strategies'."""
        self.covariance = self.covariance + _OWN_STEP**2 * np.eye(len(self.mean))
        self._loosen(_COMMON_STEP for _ in self.names)

    def _loosen(self, by: Iterable[float]) -> None:
        """Strategies may all have changed together, each by so many logs as standard error."""
        whose = np.array([0.0, *by])
        self.covariance = self.covariance + np.outer(whose, whose)

    @property
    def own_drift(self) -> float:
        """How much of the drift may well be that of `last` alone: little of what is usual."""
        return self.drift**3 / (self.drift**2 + _USUAL_DRIFT**2)

    def _doubt(self) -> None:
        """Of what ran alone so far the drift may have been its own."""
        doubt = _OWN_DRIFT * self.own_drift
        self._loosen(doubt if name != self.last else 0.0 for name in self.names)
        self.drift = 0.0

    def _change(self, name: str, surprise: float, error: float, goes_on: bool) -> _Outliers | None:
        """Of several outliers of a strategy in a row the smallest one has come to stay: for all, if
        they came while that strategy ran, and else for itself, as others had just been what they
        were. Hiccups only make chunks dearer, so that takes one more of them; and the first chunk
        that is cheaper than calibrated is enough. None: nothing came to stay."""
        row = self.outliers.pop(name, _Outliers(surprise, 0, True))
        if abs(surprise) <= _OUTLIER * error:
            return None
        if row.least * surprise < 0:
            row = _Outliers(surprise, 0, True)
        row = _Outliers(min(row.least, surprise, key=abs), row.count + 1, row.in_a_run and goes_on)
        cheaper = _CHEAPER if name in self.chunks else 1
        if row.count >= (_DEARER if surprise > 0 else cheaper):
            return row
        self.outliers[name] = row
        return None

    def _at(self, name: str) -> int:
        return 1 + self.names.index(name)

    def state(self) -> dict[str, Any]:
        mean = [x if math.isfinite(x) else None for x in self.mean.tolist()]
        arrays = {"mean": mean, "covariance": self.covariance.tolist()}
        copies = {key: dict(getattr(self, key)) for key in ("outliers", "chunks")}
        return {**vars(self), **copies, "names": list(self.names), **arrays}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Belief:
        belief = cls()
        vars(belief).update(state, names=list(state["names"]), chunks=dict(state["chunks"]))
        belief.outliers = {name: _Outliers(*each) for name, each in state["outliers"].items()}
        belief.mean = np.array([-math.inf if x is None else x for x in state["mean"]])
        belief.covariance = np.array(state["covariance"])
        return belief
