"""Which tokens top-k, top-p and min-p keep, and which they might keep if rounding went otherwise.

Two programs whose logits differ in their last bits may disagree on a token at the edge of a filter,
and then sample quite different tokens. `support` finds the edge's width in float64, by interval
arithmetic: every score may be off by `slack` either way.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from specjax.config import SamplingParams

# Masses of a large vocabulary, summed in float32 in one order or another, differ by about this.
MASS_ROUNDING = 1e-5


class Support(NamedTuple):
    """Tokens kept for some scores within the slack, and for all of them: bool [V] each."""

    possible: np.ndarray
    certain: np.ndarray


def support(scores: np.ndarray, params: SamplingParams, slack: float) -> Support:
    """What the filters of `params` keep of temperature-scaled scores [V]; masked ones are -inf.

    With a slack of 0 both sets are the filters' own, but for `MASS_ROUNDING`.
    """
    possible = np.isfinite(scores)
    both = Support(possible, possible)
    if params.temperature <= 0 or not possible.any():
        return both
    if params.top_k > 0:
        both = _top_k(scores, params.top_k, slack, both)
    if params.top_p < 1:
        both = _top_p(scores, params.top_p, slack, both)
    if params.min_p > 0:
        edge = scores.max() + np.log(params.min_p)
        both = Support(
            both.possible & (scores >= edge - 2 * slack),
            both.certain & (scores >= edge + 2 * slack),
        )
    # However narrow the filters, the most likely token passes them.
    best = scores.max()
    alone = (scores >= best - 2 * slack).sum() == 1
    return Support(both.possible | (scores == best), both.certain | ((scores == best) & alone))


def _top_k(scores: np.ndarray, k: int, slack: float, before: Support) -> Support:
    """A token stays if fewer than k are above it: surely, or possibly, above it."""
    ascending = np.sort(scores)

    def above(threshold):
        return len(scores) - np.searchsorted(ascending, threshold, side="right")

    surely_above = above(scores + 2 * slack)
    itself = 1 if slack > 0 else 0  # within the slack of itself
    possibly_above = above(scores - 2 * slack) - itself
    return Support(before.possible & (surely_above < k), before.certain & (possibly_above < k))


def _top_p(scores: np.ndarray, top_p: float, slack: float, before: Support) -> Support:
    """A token stays if the mass above it is less than top_p."""
    weight = np.exp(scores - scores.max())
    order = np.argsort(scores)
    ascending = scores[order]

    def mass_above(threshold, kept):
        mass = np.where(kept, weight, 0.0)
        suffix = np.append(np.cumsum(mass[order][::-1])[::-1], 0.0)
        return suffix[np.searchsorted(ascending, threshold, side="right")] / mass.sum()

    widen = np.exp(2 * slack)
    least = mass_above(scores + 2 * slack, before.possible) / widen - MASS_ROUNDING
    most = mass_above(scores - 2 * slack, before.certain)
    if slack > 0:  # a token is within the slack of itself, and is not above itself
        own = np.where(before.certain, weight, 0.0)
        most = most - own / own.sum()
    return Support(
        before.possible & (least < top_p),
        before.certain & (most * widen + MASS_ROUNDING < top_p),
    )
