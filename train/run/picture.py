"""Draws the metrics of a run as one PNG, which `train.rl` and `train.draft` write at their end.

Every panel says in words what it shows, so that the picture stands alone. A panel whose metrics the
run does not have is left out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402
from matplotlib.axes import Axes  # noqa: E402

from train.run.files import read_metrics  # noqa: E402

PICTURE = "metrics.png"  # in the directory of the run

Records = Sequence[dict[str, Any]]
Series = tuple[list[int], list[float]]


class Panel(NamedTuple):
    """One set of axes: curves with one unit, {metric: label}."""

    title: str
    unit: str
    curves: dict[str, str]
    bottom: float | None = 0.0


PANELS = (
    Panel(
        "Reward: is the policy learning?",
        "mean reward per answer",
        {"rollout/reward": "training rollouts", "eval/reward": "held-out problems"},
    ),
    Panel(
        "Accept length: tokens per verification",
        "tokens emitted per round (1 = no gain)",
        {"rollout/drafted_accept_length": "rounds that draft"},
        bottom=1.0,
    ),
    Panel(
        "Held-out accept length of a head",
        "tokens emitted per round (1 = no gain)",
        {
            "eval/accept_length": "head",
            "eval/accept_length_greedy": "head, temperature 0",
            "eval/ngram": "n-grams",
        },
        bottom=1.0,
    ),
    Panel(
        "Acceptance per draft depth",
        "share of drafted tokens accepted",
        {"rollout/spec_accept_rate": "all depths"}
        | {f"rollout/accept_rate_depth_{i}": f"depth {i}" for i in range(1, 17)},
    ),
    Panel(
        "Rollout speed: whole batch",
        "generated tokens per second",
        {"rollout/tokens_per_sec": "whole batch"},
    ),
    Panel(
        "Rollout speed: the longest sample",
        "generated tokens per second",
        {"rollout/longest_sample_tokens_per_sec": "longest sample"},
    ),
    Panel("Draft head: training loss", "draft.loss per token", {"train/mtp_loss": "head"}, None),
    Panel("Policy entropy: lower is surer", "nats per token", {"train/entropy": "policy"}),
    Panel(
        "Time per step, by phase",
        "seconds",
        {
            "time/rollout": "rollout",
            "time/train": "policy update",
            "time/draft": "draft head update",
        },
    ),
    Panel(
        "Response length",
        "tokens per answer",
        {"rollout/response_length_mean": "mean", "rollout/response_length_max": "longest"},
    ),
    Panel("Size of the policy update: KL", "nats per token", {"train/kl": "KL divergence"}, None),
)


def draw(run: Path, file: Path | None = None) -> Path:
    """Draws `metrics.jsonl` of a run to a file, by default `metrics.png` beside it.

    Raises:
        ValueError: no panel shows any of its metrics.
    """
    records = read_metrics(run)
    panels = [p for p in PANELS if any(_series(records, name)[0] for name in p.curves)]
    if not panels:
        raise ValueError(f"{run}: nothing to draw in {len(records)} records")
    columns = min(4 if len(panels) > 6 else 3, len(panels))
    rows = math.ceil(len(panels) / columns)
    size = (5.2 * columns, 3.5 * rows + 0.7)
    figure, grid = plt.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained")
    for axis, panel in zip(grid.flat, panels, strict=False):
        _draw_panel(axis, panel, records)
    for axis in grid.flat[len(panels) :]:
        axis.remove()
    title = f"{run.resolve().name}: {max(record['step'] for record in records)} steps"
    figure.suptitle(title, fontsize=13, x=0.01, ha="left", weight="bold")
    figure.supxlabel("pale: each step; bold: running mean over a tenth of the run", fontsize=9)
    file = run / PICTURE if file is None else file
    figure.savefig(file, dpi=110)
    plt.close(figure)
    return file


def _series(records: Records, metric: str) -> Series:
    pairs = [(r["step"], r[metric]) for r in records if isinstance(r.get(metric), (int, float))]
    return [step for step, _ in pairs], [float(value) for _, value in pairs]


def _draw_panel(axis: Axes, panel: Panel, records: Records) -> None:
    for number, (metric, label) in enumerate(panel.curves.items()):
        steps, values = _series(records, metric)
        color = f"C{number % 10}"
        if len(steps) < 12:
            if steps:
                axis.plot(steps, values, color=color, label=label, marker="o", markersize=3)
        else:
            axis.plot(steps, values, color=color, alpha=0.25, linewidth=1)
            half = max(1, len(values) // 20)
            windows = [values[max(0, i - half) : i + half + 1] for i in range(len(values))]
            means = [sum(window) / len(window) for window in windows]
            axis.plot(steps, means, color=color, label=label, linewidth=2)
    axis.set_title(panel.title, loc="left", fontsize=11, weight="bold")
    axis.set_xlabel("step", fontsize=9)
    axis.set_ylabel(panel.unit, fontsize=9)
    axis.grid(alpha=0.25)
    axis.xaxis.get_major_locator().set_params(integer=True)
    if panel.bottom is not None:
        axis.set_ylim(bottom=panel.bottom)
    if len(axis.get_legend_handles_labels()[0]) > 1:
        axis.legend(fontsize=8, frameon=False)
