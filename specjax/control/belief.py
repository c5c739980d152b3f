"""What is believed of the costs of one batch bucket, after every chunk: a normal distribution.

The state are the logs of the seconds per round of every strategy, and of the seconds of a chunk
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
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

_CALIBRATED = 0.2  # standard error of a calibrated cost beside others of its bucket, in logs,
_CALIBRATED_ALL = 0.7  # and of all of a bucket together
_COMMON_STEP = 0.05  # by which all change from chunk to chunk,
_OWN_STEP = 0.004  # and each of them beside the others
_BESIDE = 0.3  # standard error of what lies beside the rounds, in logs
_USUAL_DRIFT = 0.4  # in logs, that all have in common
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
    """How far chunks are off, in logs, as seen: a standard error, of all buckets."""

    def __init__(self, size: float = _FIRST_NOISE, chunks: int = _NOISE_CHUNKS):
        self.size, self.chunks = size, chunks

    def saw(self, surprise: float, expected: float) -> None:
        """A chunk was off so far, where its own noise and what was not known made `expected`."""
        own = min(abs(surprise) / expected, _OUTLIER) * self.size
        self.chunks += 1
        rate = max(1 / self.chunks, _NOISE_RATE)
        self.size = max(math.sqrt((1 - rate) * self.size**2 + rate * own**2), _LEAST_NOISE)


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
      names: of n strategies. mean [1 + n], covariance [1 + n 1 + n]: of the logs of `beside` and
        of their seconds.
      last: the strategy that ran last. drift: by how much it changed since another one was seen.
      outliers: in a row, up to the last chunk, by strategy. ran: those that had a chunk.
    """

    def __init__(self, beside: float = 0.0):
        self.names: list[str] = []
        self.mean = np.array([math.log(beside) if beside else -math.inf])
        self.covariance = np.array([[_BESIDE**2]])
        self.last: str | None = None
        self.drift = 0.0
        self.outliers: dict[str, _Outliers] = {}
        self.ran: list[str] = []

    def add(self, name: str, log: float, error: float, common: float = 0.0) -> None:
        """A strategy's log seconds, its own standard error, and what all of them share of it."""
        n = len(self.mean)
        grown = np.zeros((n + 1, n + 1))
        grown[:n, :n] = self.covariance
        grown[n, 1:n] = grown[1:n, n] = common**2
        grown[n, n] = error**2 + common**2
        self.names.append(name)
        self.mean, self.covariance = np.append(self.mean, log), grown

    def calibrated(self, name: str, log: float) -> None:
        """As `add`: it was measured before anything ran."""
        self.add(name, log, _CALIBRATED, _CALIBRATED_ALL)

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

    def observe(self, name: str, seconds: float, rounds: int, noise: Noise) -> None:
        """Takes in `seconds` per round of a chunk of `rounds`."""
        goes_on = name == self.last
        if not goes_on:
            self._doubt()
            self.last = name
        self.covariance = self.covariance + _COMMON_STEP**2 + _OWN_STEP**2 * np.eye(len(self.mean))
        i = self._at(name)
        expected = math.exp(self.mean[i]) + self.beside / rounds
        slope = np.zeros(len(self.mean))
        slope[0] = self.beside / rounds / expected
        slope[i] = 1 - slope[0]
        surprise = math.log(seconds / expected)
        weight = min(1.0, max(rounds / _FULL_ROUNDS, rounds * seconds / _FULL_SECONDS))
        own = noise.size**2 / weight
        error = math.sqrt(slope @ self.covariance @ slope + own)
        self._look_for_change(name, surprise, error, goes_on)
        if name not in self.ran:
            self.ran.append(name)
        shared = self.covariance @ slope
        known = float(slope @ shared)
        noise.saw(surprise, math.sqrt(known + own))
        own *= max((_FREEDOM + surprise**2 / (known + own)) / (_FREEDOM + 1), 1.0)
        gain, before = shared / (known + own), self.mean[i]
        most = _OUTLIER * math.sqrt(known + own)
        self.mean = self.mean + gain * min(max(surprise, -most), most)
        self.covariance = self.covariance - np.outer(gain, shared)
        if goes_on:
            self.drift += float(self.mean[i] - before)

    @property
    def own_drift(self) -> float:
        """How much of the drift may well be that of `last` alone: little of what is usual."""
        return self.drift**3 / (self.drift**2 + _USUAL_DRIFT**2)

    def _doubt(self) -> None:
        """Of what ran alone so far the drift may have been its own."""
        others = np.array([0.0] + [float(name != self.last) for name in self.names])
        doubt = (_OWN_DRIFT * self.own_drift) ** 2
        self.covariance = self.covariance + doubt * np.outer(others, others)
        self.drift = 0.0

    def _look_for_change(self, name: str, surprise: float, error: float, goes_on: bool) -> None:
        """Of several outliers of a strategy in a row the smallest one has come to stay: for all, if
        they came while that strategy ran, and else for itself, as others had just been what they
        were. Hiccups only make chunks dearer, so that takes one more of them; and the first chunk
        that is cheaper than calibrated is enough."""
        row = self.outliers.pop(name, _Outliers(surprise, 0, True))
        if abs(surprise) <= _OUTLIER * error:
            return
        if row.least * surprise < 0:
            row = _Outliers(surprise, 0, True)
        least = min(row.least, surprise, key=abs)
        row = _Outliers(least, row.count + 1, row.in_a_run and goes_on)
        cheaper = _CHEAPER if name in self.ran else 1
        if row.count < (_DEARER if surprise > 0 else cheaper):
            self.outliers[name] = row
            return
        whose = np.full(len(self.mean), least if row.in_a_run else 0.0)
        whose[self._at(name)] = least
        self.covariance = self.covariance + np.outer(whose, whose)

    def _at(self, name: str) -> int:
        return 1 + self.names.index(name)

    def state(self) -> dict[str, Any]:
        mean = [x if math.isfinite(x) else None for x in self.mean.tolist()]
        arrays = {"mean": mean, "covariance": self.covariance.tolist()}
        kept = {"names": list(self.names), "outliers": dict(self.outliers), "ran": list(self.ran)}
        return {**vars(self), **kept, **arrays}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Belief:
        belief = cls()
        vars(belief).update(state, names=list(state["names"]), ran=list(state["ran"]))
        belief.outliers = {name: _Outliers(*each) for name, each in state["outliers"].items()}
        belief.mean = np.array([-math.inf if x is None else x for x in state["mean"]])
        belief.covariance = np.array(state["covariance"])
        return belief
