"""Do counts follow given probabilities? Pearson's chi-square, with care for small cells."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from scipy import stats  # jax itself depends on scipy

SMALLEST_EXPECTED = 5.0


class Fit(NamedTuple):
    """How well counts agree with probabilities.

    Attributes:
      statistic: Pearson's sum of (count - expected)^2 / expected over the cells.
      cells: how many cells were compared, after small ones were taken together.
      p_value: probability of a statistic at least as large if the probabilities are right. It is 0
        when something was counted that has probability 0.
      samples: the sum of the counts.
    """

    statistic: float
    cells: int
    p_value: float
    samples: int


def goodness_of_fit(
    counts: np.ndarray, probabilities: np.ndarray, smallest: float = SMALLEST_EXPECTED
) -> Fit:
    """Chi-square goodness of fit of all counts together.

    Cells that expect fewer than `smallest` are taken together (the rarest first, until the sum
    expects enough), for the statistic follows its distribution only then.

    Args:
      counts: [C] how often each outcome occurred. probabilities: [C], summing to 1.

    Raises:
      ValueError: the shapes differ, the probabilities do not sum to 1, or one of them is negative.
    """
    counts, probabilities = np.asarray(counts, np.int64), np.asarray(probabilities, np.float64)
    if counts.shape != probabilities.shape or counts.ndim != 1:
        raise ValueError(
            f"expected counts and probabilities of one shape [C], got {counts.shape} and "
            f"{probabilities.shape}"
        )
    if abs(probabilities.sum() - 1) > 1e-6 or (probabilities < 0).any():
        raise ValueError(
            f"expected probabilities >= 0 that sum to 1, got a sum of {probabilities.sum()} and a "
            f"smallest of {probabilities.min()}"
        )
    samples = int(counts.sum())
    if counts[probabilities == 0].any():
        return Fit(float("inf"), int((probabilities > 0).sum()), 0.0, samples)
    expected, counts = _pooled(probabilities * samples, counts, smallest)
    statistic = float(((counts - expected) ** 2 / expected).sum())
    freedom = len(expected) - 1
    # One cell leaves nothing to disagree about.
    p_value = float(stats.chi2.sf(statistic, freedom)) if freedom else 1.0
    return Fit(statistic, len(expected), p_value, samples)


def _pooled(expected: np.ndarray, counts: np.ndarray, smallest: float):
    """Drops empty cells and takes small ones together, rarest first."""
    order = np.argsort(expected)
    order = order[expected[order] > 0]
    expected, counts = expected[order], counts[order]
    small = int((expected < smallest).sum())
    while 0 < small < len(expected) and expected[:small].sum() < smallest:
        small += 1
    if small:
        expected = np.r_[expected[:small].sum(), expected[small:]]
        counts = np.r_[counts[:small].sum(), counts[small:]]
    return expected, counts
