"""The picture of `bench.arms`: `python -m bench.arms_plot DIR` draws it from the files there."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402
import numpy as np  # noqa: E402
from matplotlib.axes import Axes  # noqa: E402
from matplotlib.ticker import MaxNLocator  # noqa: E402

from bench.arms_figures import ACCEPT, LONGEST, PAIRS, RATE, Records, series  # noqa: E402
from specjax.command_line import ArgumentParser

COLORS = {
    "none": "#7a7a7a",
    "frozen": "#d9730d",
    "online": "#1f5fa8",
    "online_random": "#2a8c4a",
}
LABELS = {
    "none": "no speculation",
    "frozen": "frozen head",
    "online": "online head",
    "online_random": "online, from random",
}
# slime's report (MiMo-7B on H200): rollout tok/s of the arms relative to each other.
SLIME = {("online", "none"): 1.37, ("online", "frozen"): 1.14}
FOOTNOTE = (
    "Four GRPO runs from the same policy and seeds, taking turns step by step in one process. "
    "Speculative decoding: a small head drafts tokens, the policy verifies them in one pass and "
    "keeps what it would have sampled anyway.\nAccept length: tokens per verification. Only the "
    "draft head differs between the arms, so only speed may differ. Speeds leave out the first "
    "step(s), which compile."
)


def draw(directory: str | Path, figures: Mapping[str, Mapping] | None = None) -> Path:
    """Draws `arms.jsonl` and `arms.json` of a directory as `arms.png`.

    Args:
      figures: those of arms.json; None reads them.

    Raises:
      FileNotFoundError: `bench.arms` has not run there.
    """
    directory = Path(directory)
    text = (directory / "arms.jsonl").read_text(encoding="utf-8")
    records = [json.loads(line) for line in text.splitlines()]
    if figures is None:
        figures = json.loads((directory / "arms.json").read_text(encoding="utf-8"))["figures"]
    arms = [arm for arm in COLORS if any(r["arm"] == arm for r in records)]
    figure = plt.figure(figsize=(20, 14))
    grid = figure.add_gridspec(
        2, 4, left=0.05, right=0.97, top=0.885, bottom=0.385, hspace=0.4, wspace=0.26
    )
    last = figure.add_gridspec(1, 2, left=0.1, right=0.97, top=0.29, bottom=0.085, wspace=0.22)
    draw_curves(
        [figure.add_subplot(grid[row, column]) for row in range(2) for column in range(4)],
        records,
        figures,
        arms,
    )
    ratios(figure.add_subplot(last[0]), figures)
    predictions(figure.add_subplot(last[1]), figures)
    headline(figure, records, figures, arms)
    out = directory / "arms.png"
    figure.savefig(out, dpi=90)
    plt.close(figure)
    return out


def draw_curves(axes: Sequence[Axes], records: Records, figures, arms: Sequence[str]) -> None:
    """The eight small panels, row by row."""
    untimed, nats = figures["untimed_steps"]["value"], "nats per token"
    title = "Accept length: tokens per verification"
    lines(axes[0], records, arms, ACCEPT, title, "tokens (1 = no gain)", bottom=1.0)
    depths(axes[1], records, arms)
    one_line(axes[2], records, "train/entropy", "Policy entropy: how hard to guess", nats)
    one_line(axes[3], records, "rollout/reward", "Reward: what is learned", "mean per answer", 1.0)
    rate = "tokens per second"
    lines(axes[4], records, arms, RATE, "Rollout speed: all samples", rate, skip=untimed)
    title = "Rollout speed: the longest sample"
    lines(axes[5], records, arms, LONGEST, title, rate, skip=untimed)
    stacked_seconds(axes[6], figures, arms)
    title = "Draft head: training loss"
    lines(axes[7], records, arms, "train/mtp_loss", title, f"cross entropy, {nats}")


def lines(axis: Axes, records, arms, metric, title, unit, bottom=0.0, skip=0) -> None:
    """One curve per arm that has the metric, its last value written at its end."""
    ends = []
    for arm in arms:
        values = series(records, arm, metric, skip)
        if not values:
            continue
        steps = np.arange(len(values)) + 1 + skip
        axis.plot(steps, values, color=COLORS[arm], label=LABELS[arm], marker="o", markersize=3)
        ends.append((values[-1], steps[-1], COLORS[arm]))
    finish(axis, title, unit, bottom)
    axis.set_xlabel("RL step", fontsize=9)
    note_ends(axis, ends)
    if ends:
        legend_above(axis)
    else:
        empty(axis, "not recorded")


def one_line(axis: Axes, records, metric, title, unit, top=None) -> None:
    """A metric that the arms have in common is drawn once, and said to be."""
    per_arm = {arm: series(records, arm, metric) for arm in COLORS}
    distinct = {arm: values for arm, values in per_arm.items() if values}
    same = len({tuple(v) for v in distinct.values()}) == 1
    if same:
        values = next(iter(distinct.values()))
        axis.plot(np.arange(len(values)) + 1, values, color="black", marker="o", markersize=3)
        axis.text(
            0.03,
            0.06,
            "identical in all arms",
            transform=axis.transAxes,
            fontsize=11,
            weight="bold",
            color="black",
        )
    else:
        for arm, values in distinct.items():
            axis.plot(np.arange(len(values)) + 1, values, color=COLORS[arm], label=LABELS[arm])
        axis.text(
            0.03,
            0.06,
            "NOT identical in all arms",
            transform=axis.transAxes,
            fontsize=11,
            weight="bold",
            color="#b00020",
        )
    finish(axis, title, unit, 0.0, top)
    axis.set_xlabel("RL step", fontsize=9)
    if not same and distinct:
        legend_above(axis)


def depths(axis: Axes, records, arms) -> None:
    """Acceptance by draft depth: first step hollow, last step solid."""
    for arm in arms:
        mine = sorted((r for r in records if r["arm"] == arm), key=lambda r: r["step"])
        names = [k for k in mine[0] if k.startswith("rollout/accept_rate_depth_")]
        if not names:
            continue
        names.sort(key=lambda name: int(name.rsplit("_", 1)[1]))
        x = np.arange(1, len(names) + 1)
        first, last = ([r[name] for name in names] for r in (mine[0], mine[-1]))
        axis.plot(x, first, color=COLORS[arm], linestyle=":", marker="o", markerfacecolor="white")
        axis.plot(x, last, color=COLORS[arm], marker="o", label=LABELS[arm])
    finish(axis, "Draft tokens accepted, by depth", "share of rounds", 0.0, 1.0)
    axis.set_xlabel("place in the draft (dotted: first step, solid: last step)", fontsize=9)
    if axis.lines:
        legend_above(axis)
    else:
        empty(axis, "no speculative arm")


def stacked_seconds(axis: Axes, figures, arms) -> None:
    """Median seconds per step of every arm, by phase."""
    heights = {
        name: np.array(
            [figures.get(f"seconds_{name}/{arm}", {}).get("value") or 0.0 for arm in arms]
        )
        for name in ("rollout", "train", "draft")
    }
    totals = sum(heights.values())
    bottom = np.zeros(len(arms))
    colors = [COLORS[arm] for arm in arms]
    for name, label, alpha in (
        ("rollout", "rollout", 1.0),
        ("train", "policy\nupdate", 0.55),
        ("draft", "draft\ntraining", 0.25),
    ):
        axis.bar(range(len(arms)), heights[name], 0.7, bottom, color=colors, alpha=alpha)
        for x, height in enumerate(heights[name]):
            if height > 0.11 * totals.max():
                axis.annotate(
                    f"{label}\n{height:.2f} s",
                    (x, bottom[x] + height / 2),
                    ha="center",
                    va="center",
                    fontsize=8,
                    color="white" if alpha == 1.0 else "black",
                )
        bottom += heights[name]
    for x, total in enumerate(totals):
        draft = heights["draft"][x]
        text = f"{total:.2f} s" + (f"\n(draft {draft:.2f} s)" if draft else "")
        axis.annotate(
            text,
            (x, total),
            xytext=(0, 2),
            textcoords="offset points",
            ha="center",
            va="bottom",
            fontsize=9,
            weight="bold",
        )
    axis.set_xticks(range(len(arms)), [LABELS[a].replace(", ", ",\n") for a in arms], fontsize=8)
    finish(axis, "Time of one RL step, by phase", "seconds (median)", 0.0, 1.2 * totals.max())


def ratios(axis: Axes, figures) -> None:
    """Speed-ups with intervals, beside what slime reports for the same two questions."""
    pairs = [pair for pair in PAIRS if f"ratio/{pair[0]}/{pair[1]}" in figures]
    for y, (one, other) in enumerate(pairs):
        entry = figures[f"ratio/{one}/{other}"]
        low, high = entry["interval"]
        error = [[max(entry["value"] - low, 0)], [max(high - entry["value"], 0)]]
        axis.barh(y, entry["value"], color=COLORS[one], height=0.55, alpha=0.85)
        axis.errorbar(entry["value"], y, xerr=error, color="black", capsize=4, linewidth=1.2)
        axis.annotate(
            f"{entry['value']:.2f}x",
            (0.03, y),
            va="center",
            fontsize=13,
            weight="bold",
            color="white",
        )
        if (one, other) in SLIME:
            mark = SLIME[one, other]
            axis.plot([mark, mark], [y - 0.42, y + 0.42], color="#b00020", linewidth=2.5)
            axis.annotate(
                f"slime: {mark:.2f}x",
                (mark, y - 0.43),
                ha="center",
                va="bottom",
                color="#b00020",
                fontsize=9,
            )
    axis.axvline(1.0, color="black", linewidth=0.8)
    names = [f"{LABELS[one]}\n/ {LABELS[other]}" for one, other in pairs]
    axis.set_yticks(range(len(pairs)), names, fontsize=9)
    axis.set_ylim(len(pairs) - 0.4, -0.75)
    finish_horizontal(axis, "Rollout speed-up, measured here", "ratio of median tokens per second")
    if not pairs:
        empty(axis, "nothing to compare")


def predictions(axis: Axes, figures) -> None:
    """Replayed through tables of step costs: other chips, and how this one was modelled."""
    found: dict[str, dict[str, float]] = {}
    for name, entry in figures.items():
        if name.startswith("predicted_ratio/"):
            _, table, arm = name.split("/")
            label = f"{table.replace('_', ' ')}\n({entry['unit'].rpartition(' ')[2]} costs)"
            found.setdefault(label, {})[arm] = entry["value"]
    arms = [arm for arm in COLORS if any(arm in row for row in found.values())]
    height = 0.8 / max(len(arms), 1)
    for y, row in enumerate(found.values()):
        for i, arm in enumerate(arms):
            if arm not in row:
                continue
            at = y - 0.4 + height * (i + 0.5)
            axis.barh(
                at,
                row[arm],
                color=COLORS[arm],
                height=0.9 * height,
                alpha=0.85,
                label=LABELS[arm] if y == 0 else None,
            )
            axis.annotate(
                f"{row[arm]:.2f}x",
                (row[arm], at),
                xytext=(4, 0),
                va="center",
                textcoords="offset points",
                fontsize=9,
            )
    axis.axvline(1.0, color="black", linewidth=0.8)
    axis.set_yticks(range(len(found)), list(found), fontsize=9)
    axis.invert_yaxis()
    finish_horizontal(
        axis,
        "Predicted on other chips: this run's acceptance replayed through their step costs",
        "speculative / plain, whole rollout at once (a prediction, not a measurement)",
    )
    if found:
        legend_above(axis)
    else:
        empty(axis, "no cost tables")


def headline(figure, records, figures, arms: Sequence[str]) -> None:
    """What came out, and whether the arms were the same run."""
    steps = max(r["step"] for r in records)
    title = f"{len(arms)} RL runs from one start, {steps} steps each"
    if "slots" in figures:
        title += f", {figures['slots']['value']} samples at once"
    pair = figures.get("ratio/online/none")
    if pair:
        title += f": rollouts at {pair['value']:.2f}x the speed of plain decoding"
    figure.suptitle(title, x=0.012, y=0.985, ha="left", fontsize=17, weight="bold")
    whole = figures["steps_bit_identical"]["value"] == steps
    verdict = figures["equality"]["value"]
    if whole:
        verdict += " (every token, reward and policy parameter)"
    for arm in arms:
        if f"first_difference/{arm}" in figures:
            why = figures[f"first_difference/{arm}"]["value"]
            verdict += f"\n{arm}, {why if len(why) < 170 else why[:170] + '..'}"
    figure.text(
        0.012,
        0.955,
        verdict,
        va="top",
        fontsize=13 if whole else 10,
        weight="bold",
        color="#2a8c4a" if whole else "#b00020",
    )
    figure.text(0.012, 0.012, FOOTNOTE, fontsize=11, color="#555555")


def note_ends(axis: Axes, ends: Sequence[tuple[float, float, str]]) -> None:
    """The last value of every curve, right of it; moved up where two would cover each other."""
    low, high = axis.get_ylim()
    lowest = low
    for y, x, color in sorted(ends):
        place = max(y, lowest)
        lowest = place + 0.055 * (high - low)
        text = f"{y:.0f}" if abs(y) >= 100 else f"{y:.2f}"
        axis.annotate(
            text,
            (x, place),
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
            fontsize=9,
            color=color,
            annotation_clip=False,
        )


def finish(axis: Axes, title: str, unit: str, bottom: float, top: float | None = None) -> None:
    axis.set_title(title, loc="left", fontsize=12, weight="bold", pad=24)
    axis.set_ylabel(unit, fontsize=9)
    axis.grid(alpha=0.25)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
    high = top if top is not None else axis.get_ylim()[1] * 1.05
    axis.set_ylim(bottom, max(high, bottom + 1e-6))
    if isinstance(axis.xaxis.get_major_locator(), MaxNLocator):
        axis.xaxis.get_major_locator().set_params(integer=True)


def finish_horizontal(axis: Axes, title: str, unit: str) -> None:
    axis.set_title(title, loc="left", fontsize=12, weight="bold", pad=24)
    axis.set_xlabel(unit, fontsize=9)
    axis.set_xlim(left=0)
    axis.grid(alpha=0.25, axis="x")
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)


def legend_above(axis: Axes) -> None:
    """Between title and axes, where no curve can run."""
    axis.legend(
        fontsize=8,
        frameon=False,
        loc="lower left",
        bbox_to_anchor=(-0.01, 0.995),
        ncols=4,
        columnspacing=0.9,
        handlelength=1.3,
        borderaxespad=0,
    )


def empty(axis: Axes, text: str) -> None:
    axis.text(0.5, 0.5, text, transform=axis.transAxes, ha="center", color="#7a7a7a")


def main(argv: Sequence[str] | None = None) -> None:
    parser = ArgumentParser(prog="python -m bench.arms_plot", description=__doc__)
    parser.add_argument("directory", nargs="?", default="bench/results")
    print(draw(parser.parse_args(argv).directory))


if __name__ == "__main__":
    main()
