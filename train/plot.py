"""Draws the metrics of one run as one PNG: `python -m train.plot RUN_DIR [--out PNG]`.

Every panel says in words what it shows, so that the picture stands alone. A panel whose metrics the
run does not have is left out.
"""

from __future__ import annotations

if __name__ == "__main__":  # Ctrl-C from here on
    from specjax import interrupts

    interrupts.begin("train.plot")

import argparse
import math
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402
from matplotlib.axes import Axes  # noqa: E402

from train.log import read_metrics  # noqa: E402

PICTURE = "metrics.png"  # in the directory of the run

Records = Sequence[dict[str, Any]]
Series = tuple[list[int], list[float]]

_BLUE, _ORANGE, _GREEN, _GRAY = "#1f5fa8", "#d9730d", "#2a8c4a", "#7a7a7a"
_FOOTNOTE = (
    "One RL step: generate answers by speculative decoding (rollout), update the policy, update "
    "the draft head. Pale lines: each step; bold lines: running mean over a tenth of the run."
)


@dataclass(frozen=True)
class Line:
    """One curve of a panel."""

    metric: str
    label: str
    color: str


@dataclass(frozen=True)
class Panel:
    """One set of axes: curves with one unit."""

    title: str
    unit: str
    lines: tuple[Line, ...]
    kind: str = "lines"  # "lines", "reward", "depths", "stack"; "nonzero": lines that are not 0
    bottom: float | None = None
    top: float | None = None


PANELS = (
    Panel(
        "Reward: is the policy learning?",
        "mean reward per answer",
        (Line("rollout/reward", "training rollouts", _BLUE),),
        kind="reward",
        bottom=0.0,
    ),
    Panel(
        "Accept length: tokens per verification",
        "tokens emitted per round (1 = no gain)",
        (Line("rollout/drafted_accept_length", "rounds that draft", _BLUE),),
        bottom=1.0,
    ),
    Panel(
        "Acceptance per draft depth",
        "share of drafted tokens accepted",
        (Line("rollout/spec_accept_rate", "all depths together", _GRAY),),
        kind="depths",
        bottom=0.0,
        top=1.0,
    ),
    Panel(
        "Rollout speed: whole batch",
        "generated tokens per second",
        (Line("rollout/tokens_per_sec", "whole batch", _BLUE),),
        bottom=0.0,
    ),
    Panel(
        "Rollout speed: the longest sample",
        "generated tokens per second",
        (Line("rollout/longest_sample_tokens_per_sec", "longest sample", _BLUE),),
        bottom=0.0,
    ),
    Panel(
        "Draft head: training loss",
        "draft.loss per token",
        (Line("train/mtp_loss", "draft head", _BLUE),),
    ),
    Panel(
        "Policy entropy: lower is surer",
        "nats per token",
        (Line("train/entropy", "policy", _BLUE),),
        bottom=0.0,
    ),
    Panel(
        "Time per step, by phase",
        "seconds (stacked)",
        (
            Line("time/rollout", "rollout", _BLUE),
            Line("time/train", "policy update", _ORANGE),
            Line("time/draft", "draft head update", _GREEN),
        ),
        kind="stack",
        bottom=0.0,
    ),
    Panel(
        "Response length",
        "tokens per answer",
        (
            Line("rollout/response_length_mean", "mean", _BLUE),
            Line("rollout/response_length_max", "longest", _ORANGE),
        ),
        bottom=0.0,
    ),
    Panel(
        "Size of the policy update: clipping",
        "share of tokens clipped",
        (Line("train/clip_fraction", "clipped", _BLUE),),
        kind="nonzero",  # with one update of a rollout nothing can be clipped
        bottom=0.0,
    ),
    Panel(
        "Size of the policy update: KL",
        "nats per token",
        (Line("train/kl", "KL divergence", _BLUE),),
    ),
)


def draw(run: str | Path, out: str | Path | None = None) -> Path:
    """Draws `metrics.jsonl` of a run.

    Args:
        run: the run directory.
        out: the PNG to write; default `RUN/metrics.png`.

    Returns:
        The path of the PNG.

    Raises:
        FileNotFoundError: no metrics there.
        ValueError: no metric in them that any panel shows.
    """
    run = Path(run)
    records = read_metrics(run)
    panels = [panel for panel in PANELS if _has_data(panel, records)]
    if not panels:
        raise ValueError(f"{run}: nothing to draw in {len(records)} records")
    columns = min(4 if len(panels) > 6 else 3, len(panels))
    rows = math.ceil(len(panels) / columns)
    figure, axes = plt.subplots(
        rows, columns, figsize=(5.2 * columns, 3.5 * rows + 0.7), squeeze=False
    )
    flat = list(axes.flat)
    for axis, panel in zip(flat, panels, strict=False):
        _draw_panel(axis, panel, records)
    for axis in flat[len(panels) :]:
        axis.remove()
    figure.suptitle(_headline(run, records), fontsize=13, x=0.01, ha="left", weight="bold")
    figure.text(0.01, 0.005, _FOOTNOTE, fontsize=9, color=_GRAY)
    figure.tight_layout(rect=(0, 0.02, 1, 0.985), h_pad=2.0, w_pad=2.0)
    out = Path(out) if out is not None else run / PICTURE
    figure.savefig(out, dpi=110)
    plt.close(figure)
    return out


def _series(records: Records, metric: str) -> Series:
    pairs = [(r["step"], r[metric]) for r in records if isinstance(r.get(metric), (int, float))]
    return [step for step, _ in pairs], [float(value) for _, value in pairs]


def _depth_metrics(records: Records) -> list[tuple[int, str]]:
    """(depth, metric) for every `rollout/accept_rate_depth_{i}` in the records."""
    names = {name for record in records for name in record}
    found = [(re.fullmatch(r"rollout/accept_rate_depth_(\d+)", name), name) for name in names]
    return sorted((int(match.group(1)), name) for match, name in found if match)


def _has_data(panel: Panel, records: Records) -> bool:
    metrics = [line.metric for line in panel.lines]
    if panel.kind == "reward":
        metrics.append("eval/reward")
    if panel.kind == "depths":
        metrics += [name for _, name in _depth_metrics(records)]
    values = [value for metric in metrics for value in _series(records, metric)[1]]
    return any(values) if panel.kind == "nonzero" else bool(values)


def _draw_panel(axis: Axes, panel: Panel, records: Records) -> None:
    if panel.kind == "stack":
        _stack(axis, panel, records)
    else:
        for line in panel.lines:
            _curve(axis, _series(records, line.metric), line.label, line.color)
    if panel.kind == "depths":
        depths = _depth_metrics(records)
        for index, (depth, name) in enumerate(depths):
            color = plt.get_cmap("viridis")(0.85 * index / max(1, len(depths) - 1))
            _curve(axis, _series(records, name), f"depth {depth}", color)
    if panel.kind == "reward":
        _held_out(axis, _series(records, "eval/reward"))
    axis.set_title(panel.title, loc="left", fontsize=11, weight="bold")
    axis.set_xlabel("RL step", fontsize=9)
    axis.set_ylabel(panel.unit, fontsize=9)
    axis.tick_params(labelsize=8)
    axis.grid(alpha=0.25)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
    axis.xaxis.get_major_locator().set_params(integer=True)
    low, high = axis.get_ylim()
    if panel.bottom is not None:
        low = panel.bottom
    high = panel.top if panel.top is not None else max(high, low + 1e-6)
    curves = len(axis.get_legend_handles_labels()[0])
    if panel.top is None:  # room for the legend above the curves
        high += (0.22 if curves > 1 else 0.08) * (high - low)
    axis.set_ylim(low, high)
    if curves > 1:
        where = "best" if panel.kind == "depths" else "upper left"
        axis.legend(fontsize=8, frameon=False, loc=where, ncols=min(curves, 3), columnspacing=1.0)


def _curve(axis: Axes, series: Series, label: str, color: Any) -> None:
    """Draws values as a pale line, and their running mean if there are at least 12."""
    steps, values = series
    if not steps:
        return
    if len(steps) < 12:
        axis.plot(steps, values, color=color, label=label, marker="o", markersize=3)
        return
    axis.plot(steps, values, color=color, alpha=0.25, linewidth=1)
    half = max(1, len(values) // 20)
    windows = [values[max(0, i - half) : i + half + 1] for i in range(len(values))]
    means = [sum(window) / len(window) for window in windows]
    axis.plot(steps, means, color=color, label=label, linewidth=2)


def _stack(axis: Axes, panel: Panel, records: Records) -> None:
    lines = [line for line in panel.lines if _series(records, line.metric)[0]]
    kept = [r for r in records if any(isinstance(r.get(x.metric), (int, float)) for x in lines)]
    steps = [record["step"] for record in kept]
    bottom = [0.0] * len(kept)
    for line in lines:
        heights = [float(record.get(line.metric) or 0.0) for record in kept]
        axis.bar(steps, heights, bottom=bottom, width=0.9, color=line.color, label=line.label)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]


def _held_out(axis: Axes, series: Series) -> None:
    """Draws held-out reward at the evaluated steps, with its first and last value as text."""
    steps, values = series
    if not steps:
        return
    axis.plot(
        steps,
        values,
        color=_ORANGE,
        linestyle=":",
        marker="D",
        markersize=6,
        label="held-out problems",
        zorder=5,
    )
    bottom, top = axis.get_ylim()
    for index in sorted({0, len(steps) - 1}):
        low = values[index] < bottom + 0.1 * (top - bottom)  # text below would cover the axis
        axis.annotate(
            f"{values[index]:.2f}",
            (steps[index], values[index]),
            textcoords="offset points",
            xytext=(0, 8 if low else -16),
            ha="center",
            fontsize=10,
            weight="bold",
            color=_ORANGE,
        )


def _headline(run: Path, records: Records) -> str:
    steps = max((record["step"] for record in records), default=0)
    text = f"{run.resolve().name}: {steps} RL steps"
    held_out = _series(records, "eval/reward")[1]
    if len(held_out) > 1:
        text += f", held-out reward {held_out[0]:.2f} -> {held_out[-1]:.2f}"
    accept = _series(records, "rollout/drafted_accept_length")[1]
    if accept:
        text += f", accept length {accept[0]:.2f} -> {accept[-1]:.2f} tokens per round"
    return text


def main(argv: Sequence[str] | None = None) -> None:
    """Command line entry point."""
    parser = argparse.ArgumentParser(prog="python -m train.plot", description=__doc__)
    parser.add_argument("run_dir", help="directory with metrics.jsonl")
    parser.add_argument("--out", metavar="PNG", help="default: RUN_DIR/metrics.png")
    arguments = parser.parse_args(argv)
    try:
        print(draw(arguments.run_dir, arguments.out))
    except (FileNotFoundError, ValueError) as error:
        sys.exit(f"train.plot: {error}")


if __name__ == "__main__":
    interrupts.run(main)
