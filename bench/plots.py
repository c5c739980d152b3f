"""Pictures of measurements: rollouts as time lines, and curves of RL runs."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # no display is needed
import matplotlib.pyplot as plt  # noqa: E402
from matplotlib.axes import Axes  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402
from matplotlib.patches import Patch  # noqa: E402


def tidy(axis: Axes, title: str = "") -> None:
    """Sets a title on the left, a faint grid, and no frame above and on the right."""
    axis.set_title(title, loc="left", fontsize=11, weight="bold")
    axis.grid(alpha=0.25)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)


def save(figure: Figure, path: str | Path) -> Path:
    """Writes a picture, frees its memory, and returns its path."""
    figure.savefig(path, dpi=90)
    plt.close(figure)
    return Path(path)


def draw_spans(
    rollouts: Mapping[str, Sequence], strategies: Sequence[str], title: str, path: Path
) -> Path:
    """Draws running slots against time, coloured by strategy; one panel per rollout.

    Args:
      rollouts: a panel's title -> spans with `until`, `running` and `strategy`.
    """
    shades = plt.get_cmap("viridis")
    colors = {name: shades(i / max(len(strategies) - 1, 1)) for i, name in enumerate(strategies)}
    figure, axes = plt.subplots(
        len(rollouts), figsize=(10, 3 * len(rollouts)), sharex=True, sharey=True, squeeze=False,
        layout="constrained",
    )  # fmt: skip
    for axis, (about, spans) in zip(axes[:, 0], rollouts.items(), strict=True):
        begins = [0.0, *(span.until for span in spans)]
        axis.bar(
            begins[:-1], [span.running for span in spans], align="edge", linewidth=0,
            width=[b - a for a, b in itertools.pairwise(begins)],
            color=[colors[span.strategy] for span in spans],
        )  # fmt: skip
        tidy(axis, about)
        axis.set_ylabel("running slots")
        axis.set_yscale("symlog", base=2, linthresh=1)
        axis.yaxis.set_major_formatter("{x:.0f}")
    handles = [Patch(color=color, label=name) for name, color in colors.items()]
    axes[0, 0].legend(handles=handles, title="strategy", loc="upper right")
    axes[-1, 0].set_xlabel("seconds since the rollout began")
    figure.suptitle(title)
    return save(figure, path)


def draw_runs(records: Sequence[Mapping], panels: Mapping[str, str], path: Path) -> Path:
    """Draws metrics of RL runs by step: thin lines of each seed, a thick one of their mean.

    Args:
      records: records with `arm`, `seed`, `step` and metrics.
      panels: metric -> what its panel shows; metrics that no record has are left out.
    """
    shown = {m: text for m, text in panels.items() if any(m in record for record in records)}
    arms = list(dict.fromkeys(record["arm"] for record in records))
    figure, axes = plt.subplots(
        1, len(shown), figsize=(5 * len(shown), 4.5), squeeze=False, layout="constrained"
    )
    for axis, (metric, text) in zip(axes[0], shown.items(), strict=True):
        for number, arm in enumerate(arms):
            by_step: dict[int, list[float]] = {}
            for record in records:
                if record["arm"] == arm and record.get(metric) is not None:
                    by_step.setdefault(record["step"], []).append(record[metric])
            for values in itertools.zip_longest(*by_step.values()):
                axis.plot(list(by_step), values, color=f"C{number}", alpha=0.3, linewidth=0.8)
            means = [sum(values) / len(values) for values in by_step.values()]
            axis.plot(list(by_step), means, color=f"C{number}", linewidth=2, label=arm)
        tidy(axis, text)
        axis.set_xlabel("step")
    axes[0, 0].legend(fontsize=9)
    return save(figure, path)
