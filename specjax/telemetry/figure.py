"""Plots the figures of a run as one PNG."""

from __future__ import annotations

import math
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402
from matplotlib.axes import Axes  # noqa: E402

from specjax.telemetry.collector import Summary  # noqa: E402

_BLUE, _ORANGE, _GREEN, _GRAY = "#1f5fa8", "#d9730d", "#2a8c4a", "#7a7a7a"
_CAUSE_COLORS = {"mask": _ORANGE, "filter": _GREEN, "penalty": "#8a4fa3", "disagreement": _BLUE}
_CAUSE_LABELS = {
    "mask": "masked (allowed ids, bad words, minimum length)",
    "filter": "filtered (top-k, top-p, min-p)",
    "penalty": "a penalty changed the target's choice",
    "disagreement": "draft and target simply differ",
}
_FOOTNOTE = (
    "A rejection is a round that stopped at a tree row with drafts below it. "
    "Its cause is the first that applies, from masked to simply differ."
)
_MOST_BARS = 32


def draw(summary: Summary, out: str | Path, name: str = "run") -> Path:
    """Plots acceptance per depth, and causes, entropies and positions of the rejections.

    Args:
      out: the PNG to write.
      name: name of the run, for the title.

    Raises:
      ValueError: no speculative round was recorded, or `out` has no suffix of an image format.
    """
    if not summary.rounds:
        raise ValueError(f"{name}: nothing to draw, no speculative round was recorded")
    figure, axes = plt.subplots(2, 2, figsize=(11.5, 8.2))
    _depths(axes[0, 0], summary)
    _causes(axes[0, 1], summary)
    _entropies(axes[1, 0], summary)
    _offsets(axes[1, 1], summary)
    for axis in axes.flat:
        axis.tick_params(labelsize=9)
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)
    headline = (
        f"{name}: {summary.rejections:,} rejections in {summary.rounds:,} rounds "
        f"({summary.rejections / summary.rounds:.0%})"
    )
    figure.suptitle(headline, fontsize=13, x=0.01, ha="left", weight="bold")
    figure.text(0.01, 0.008, _FOOTNOTE, fontsize=9, color=_GRAY)
    figure.tight_layout(rect=(0, 0.025, 1, 0.985), h_pad=2.0, w_pad=2.5)
    figure.savefig(out, dpi=110)
    plt.close(figure)
    return Path(out)


def _title(axis: Axes, title: str, x: str, y: str, grid: str = "y") -> None:
    axis.set_title(title, loc="left", fontsize=11, weight="bold")
    axis.set_xlabel(x, fontsize=9)
    axis.set_ylabel(y, fontsize=9)
    axis.grid(alpha=0.25, axis=grid)


def _depths(axis: Axes, summary: Summary) -> None:
    _title(
        axis,
        "Acceptance per draft depth",
        "depth in the tree (below: rounds that drafted it)",
        "share of these in which a draft was accepted",
    )
    rates, attempts = summary.acceptance_per_depth, summary.attempts
    depths = range(1, len(rates) + 1)
    bars = axis.bar(depths, rates, color=_BLUE, width=0.7)
    axis.bar_label(bars, [f"{rate:.0%}" for rate in rates], fontsize=9, padding=2)
    labels = [f"{d}\n{_short(n)}" for d, n in zip(depths, attempts, strict=True)]
    axis.set_xticks(list(depths), labels)
    axis.set_ylim(0, 1.08)
    axis.set_xlim(0.4, max(len(rates), 3) + 0.6)


def _causes(axis: Axes, summary: Summary) -> None:
    _title(axis, "Why drafts were rejected", "share of rejections", "", grid="x")
    names = list(summary.causes)[::-1]
    shares = [0.0 if math.isnan(summary.causes[n]) else summary.causes[n] for n in names]
    bars = axis.barh(
        range(len(names)), shares, color=[_CAUSE_COLORS[name] for name in names], height=0.45
    )
    axis.bar_label(bars, [f"{share:.1%}" for share in shares], fontsize=9, padding=3)
    for row, name in enumerate(names):
        axis.text(0.005, row + 0.28, _CAUSE_LABELS[name], fontsize=9, va="bottom")
    axis.set_yticks([])
    axis.set_ylim(-0.45, len(names) - 0.35)
    axis.set_xlim(0, 1.12)
    axis.set_xticks([0, 0.25, 0.5, 0.75, 1.0], ["0%", "25%", "50%", "75%", "100%"])


def _entropies(axis: Axes, summary: Summary) -> None:
    _title(
        axis,
        "Entropy of the target at rejections",
        "entropy of the temperature-scaled target, nats (0 = certain)",
        "rejections",
    )
    bins = list(summary.entropy_histogram)
    while len(bins) > 8 and not bins[-1][2]:
        bins.pop()
    width = bins[0][1] - bins[0][0]
    lows, counts = [low for low, _, _ in bins], [count for _, _, count in bins]
    axis.bar(lows, counts, width=0.92 * width, align="edge", color=_BLUE)
    if math.isinf(bins[-1][1]):  # the open bin
        right = (lows[-1] + width, counts[-1])
        axis.annotate("and more", right, fontsize=8, ha="right", va="bottom")
    axis.set_xlim(0, lows[-1] + width)
    axis.set_ylim(0, 1.1 * max(*counts, 1))
    axis.yaxis.get_major_locator().set_params(integer=True)


def _offsets(axis: Axes, summary: Summary) -> None:
    _title(
        axis,
        "Where in the answer drafts were rejected",
        "tokens generated before the rejected one",
        "rejections",
    )
    last = max((offset for offset, _ in summary.offset_histogram), default=0)
    width = max(1, -(-(last + 1) // _MOST_BARS))
    counts = [0] * (last // width + 1)
    for offset, number in summary.offset_histogram:
        counts[offset // width] += number
    lows = [i * width for i in range(len(counts))]
    axis.bar(lows, counts, 0.92 * width, align="edge", color=_BLUE)
    if summary.rejections:
        mean = summary.mean_offset
        axis.axvline(mean + 0.5, color=_ORANGE, linestyle=":", linewidth=2)
        axis.annotate(
            f"mean {mean:.1f}",
            (mean + 0.5, 1.0),
            xycoords=("data", "axes fraction"),
            textcoords="offset points",
            xytext=(4, -10),
            fontsize=9,
            color=_ORANGE,
        )
    axis.set_xlim(0, len(counts) * width)
    axis.set_ylim(0, 1.12 * max(*counts, 1))
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.yaxis.get_major_locator().set_params(integer=True)


def _short(number: int) -> str:
    return f"{number / 1000:.1f}k" if number >= 10_000 else f"{number:,}"
