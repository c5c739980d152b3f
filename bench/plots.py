"""Pictures of result files: `python -m bench.plots FILE` draws FILE again, as a PNG beside it."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import matplotlib

matplotlib.use("Agg")  # no display is needed
import matplotlib.pyplot as plt  # noqa: E402
import numpy as np  # noqa: E402
from matplotlib.axes import Axes  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402
from matplotlib.lines import Line2D  # noqa: E402
from matplotlib.patches import Patch  # noqa: E402
from matplotlib.ticker import MaxNLocator  # noqa: E402

from bench.command import user_errors  # noqa: E402
from bench.rollout.chains import SUFFIX, Trace  # noqa: E402
from specjax.command_line import ArgumentParser  # noqa: E402

Figures = Mapping[str, Mapping]
Records = Sequence[Mapping]


def tidy(axis: Axes, title: str = "", grid: str = "both") -> None:
    """Sets a bold title on the left, a faint grid, and no frame above and on the right.

    Args:
      grid: `x`, `y` or `both`: which lines.
    """
    if title:
        axis.set_title(title, loc="left", fontsize=11, weight="bold")
    axis.grid(alpha=0.25, axis=grid)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)


def save(figure: Figure, path: str | Path) -> Path:
    """Writes a picture, frees its memory, and returns its path."""
    figure.savefig(path, dpi=90)
    plt.close(figure)
    return Path(path)


def json_lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def draw(path: str | Path) -> Path:
    """Draws a result file, from it and from the files beside it.

    Raises:
      ValueError: no picture is drawn of such results.
    """
    path = Path(path)
    result = json.loads(path.read_text(encoding="utf-8"))
    kind = result["name"].partition("_")[0]
    if kind not in PICTURES:
        raise ValueError(
            f"{path} is a result of {result['name']!r}; pictures are drawn of {', '.join(PICTURES)}"
        )
    return save(PICTURES[kind](path, result), path.with_suffix(".png"))


# --- a long-tailed rollout -----------------------------------------------------------------------

LONGTAIL_TITLES = {"plain": "plain decoding", "goodput": "goodput control"}


def draw_longtail(path: Path, result: Mapping) -> Figure:
    """Draws running slots against time, coloured by strategy; one panel per arm."""
    trace, figures = Trace.read(path.with_suffix(SUFFIX)), result["figures"]
    names = list(trace.settings["strategies"])
    shades = plt.get_cmap("viridis")
    colors = {name: shades(i / max(len(names) - 1, 1)) for i, name in enumerate(names)}
    figure, axes = plt.subplots(
        len(trace.spans), 1, figsize=(10, 3 * len(trace.spans)), sharex=True, sharey=True,
        squeeze=False, layout="constrained",
    )  # fmt: skip
    for axis, (arm, spans) in zip(axes[:, 0], trace.spans.items(), strict=True):
        begin = 0.0
        for span in spans:
            axis.bar(
                begin, span.running, width=span.until - begin, align="edge",
                color=colors.get(span.strategy, "grey"), linewidth=0,
            )  # fmt: skip
            begin = span.until
        seconds = figures[f"seconds/{arm}"]["value"]
        tidy(axis, f"{LONGTAIL_TITLES.get(arm, arm)}: median {seconds:.2f} s")
        axis.set_ylabel("running slots")
        axis.set_yscale("symlog", base=2, linthresh=1)
        axis.yaxis.set_major_formatter("{x:.0f}")
    used = {span.strategy for spans in trace.spans.values() for span in spans}
    handles = [Patch(color=colors[n], label=n) for n in names if n in used]
    axes[0, 0].legend(handles=handles, title="strategy", loc="upper right")
    axes[-1, 0].set_xlabel("seconds since the rollout began (last measured rollout)")
    settings = trace.settings
    figure.suptitle(
        f"{Path(settings['model']).name}: {len(trace.lengths)} samples, {settings['slots']} slots, "
        f"longest {max(trace.lengths)} tokens"
    )
    return figure


# --- acceptance ----------------------------------------------------------------------------------

MODES = {"coupled": "#1f5fa8", "block": "#d9730d", "recursive": "#2a8c4a"}
POLICIES = {"sums": "embedded policy", "gsm8k": "GSM8K policy"}
SOURCES = {"head": "draft head", "ngram": "n-grams + siblings", "itself": "the policy itself"}
OPTIONS = {
    "T_0.7_top_p_0.9": "T 0.7, top-p 0.9",
    "T_1_repetition_1.1_frequency_0.5": "T 1, penalties 1.1, 0.5",
}
HOLLOW = {"markerfacecoloralt": "white"}  # the empty half of a half-filled mark
ACCEPTANCE_FOOTNOTE = (
    "Accept length: tokens per verification, 1 + accepted drafts / rounds; bars: 95% over prompts. "
    "Numbers: the best with as many drafted tokens. Vertical lines: the coupled chain of the "
    "draft head.\nbushy, spine: static trees, wide at the root or with one long branch. dynamic "
    "(coupled): 2 or 4 children per step, re-ranked with temperature tau. All rules are lossless; "
    "the coupled rule alone also gives the tokens of plain decoding."
)


class Row(NamedTuple):
    """One line of a panel."""

    source: str
    mode: str
    tree: str

    @property
    def label(self) -> str:
        kind, _, tau = self.tree.replace("_", " ").partition(" tau ")
        return f"{kind}, tau {tau}" if tau else f"{kind}, {self.mode}"


class Point(NamedTuple):
    """One accept length of the result file; `aligned` is None outside of the aligned pairs."""

    policy: str
    setting: str
    row: Row
    nodes: int
    aligned: bool | None
    value: float
    low: float
    high: float


def acceptance_points(figures: Figures) -> list[Point]:
    """Reads every accept length of a result file."""
    found = []
    for key, entry in figures.items():
        kind, _, rest = key.partition("/")
        if kind != "accept_length":
            continue
        policy, setting, source, mode, tree, nodes, *side = rest.split("/")
        aligned = side[0] == "aligned" if side else None
        row, count = Row(source, mode, tree), int(nodes.removeprefix("nodes_"))
        low, high = entry["interval"]
        found.append(Point(policy, setting, row, count, aligned, entry["value"], low, high))
    return found


def draw_acceptance(path: Path, result: Mapping) -> Figure:
    """Draws accept lengths: a panel per policy and temperature, and one of aligned drafting."""
    found = acceptance_points(result["figures"])
    main = [p for p in found if p.aligned is None]
    pairs = [p for p in found if p.aligned is not None]
    names = list(dict.fromkeys(p.policy for p in main))
    settings = list(dict.fromkeys(p.setting for p in main))
    rows = {name: _ordered_rows([p for p in main if p.policy == name]) for name in names}
    heights = [len(rows[name]) + 2 for name in names]
    columns = len(settings) + bool(pairs)
    figure, axes = plt.subplots(
        len(names),
        columns,
        figsize=(4.7 * columns, 0.27 * sum(heights) + 2.6),
        gridspec_kw={"height_ratios": heights},
        squeeze=False,
        layout="constrained",
    )
    for line, name in zip(axes, names, strict=True):
        for column, (axis, setting) in enumerate(zip(line, settings, strict=False)):
            mine = [p for p in main if (p.policy, p.setting) == (name, setting)]
            title = f"{POLICIES.get(name, name)}, {setting.replace('_', ' ')}"
            _accept_lengths(axis, mine, rows[name], title, labels=column == 0)
        if pairs:
            _alignment(line[-1], [p for p in pairs if p.policy == name])
    figure.suptitle(
        "Accept length of acceptance rules, trees and draft sources at equal drafted nodes",
        fontsize=16, weight="bold", x=0.01, ha="left",
    )  # fmt: skip
    marks = [(mode, color, "full") for mode, color in MODES.items()]
    marks += [(f"{n} nodes", "black", fill) for n, (fill, _) in sorted(_looks(main).items())]
    handles = [
        Line2D([], [], color=color, marker="o", fillstyle=fill, linestyle="", label=label, **HOLLOW)
        for label, color, fill in marks
    ]
    figure.legend(handles=handles, fontsize=10, frameon=False, loc="upper right", ncols=6)
    figure.supxlabel(ACCEPTANCE_FOOTNOTE, fontsize=9, color="#555555", x=0.01, ha="left")
    return figure


def _ordered_rows(found: Sequence[Point]) -> list[Row]:
    """Returns rows by source, then as measured; trees of all sizes share a row if named alike."""
    sources = list(dict.fromkeys(p.row.source for p in found))
    kinds = ("chain", "spine", "bushy", "dynamic")

    def place(row: Row) -> tuple:
        kind = next(i for i, kind in enumerate(kinds) if row.tree.startswith(kind))
        return sources.index(row.source), kind, list(MODES).index(row.mode), row.tree

    return sorted(dict.fromkeys(p.row for p in found), key=place)


def _accept_lengths(axis: Axes, found, rows: Sequence[Row], title: str, labels: bool) -> None:
    """Draws one policy at one temperature: a line per row, a mark per number of drafted nodes."""
    places, headings, y = {}, [], 0.0
    for row in rows:
        if not places or row.source != headings[-1][1]:
            y += 0.9 if places else 0.0
            headings.append((y - 0.75, row.source))
        places[row] = y
        y += 1.0
    looks = _looks(found)
    for p in found:
        at, color = places[p.row], MODES[p.row.mode]
        axis.plot([p.low, p.high], [at, at], color=color, linewidth=1.2, alpha=0.6)
        fill, style = looks[p.nodes]
        axis.plot(p.value, at, "o", color=color, markersize=6.5, fillstyle=fill, **HOLLOW)
        if p.row == Row("head", "coupled", "chain"):
            axis.axvline(p.value, color=color, linewidth=0.8, alpha=0.5, linestyle=style)
    for at, source in headings:
        text = SOURCES.get(source, source.replace("_", " "))
        axis.text(1.02, at, text, fontsize=8, weight="bold", color="#444444", va="center")
    for size in sorted({p.nodes for p in found}):
        candidates = [p for p in found if p.nodes == size and p.row.source != "itself"]
        best = max(candidates, key=lambda p: p.value)
        axis.annotate(
            f"{best.value:.2f}", (best.value, places[best.row]), xytext=(0, 4), fontsize=8,
            textcoords="offset points", ha="center", weight="bold", color=MODES[best.row.mode],
        )  # fmt: skip
    _rows_of_labels(axis, title, [r.label for r in rows] if labels else [], list(places.values()))
    axis.set_xlim(1.0, 1.06 * max(p.high for p in found))


def _looks(found: Sequence[Point]) -> dict[int, tuple[str, str]]:
    """Returns how full a mark is and how a line is drawn, by the number of drafted nodes."""
    looks = (("full", "-"), ("left", "--"), ("none", ":"))
    return dict(zip(sorted({p.nodes for p in found}, reverse=True), looks, strict=False))


def _alignment(axis: Axes, found: Sequence[Point]) -> None:
    """Draws aligned drafting beside drafting from logits that are only tempered."""
    labels, y = [], 0
    for setting in dict.fromkeys(p.setting for p in found):
        for row in dict.fromkeys(p.row for p in found):
            mine = {p.aligned: p for p in found if (p.row, p.setting) == (row, setting)}
            color = MODES[row.mode]
            ends = [mine[False].value, mine[True].value]
            axis.plot(ends, [y, y], color=color, linewidth=3, alpha=0.3)
            for aligned, p in mine.items():
                fill = color if aligned else "white"
                axis.plot(p.value, y, "s", color=color, markerfacecolor=fill, markersize=7)
            axis.annotate(
                f"{mine[True].value / mine[False].value:.2f}x", (max(ends), y), xytext=(8, 0),
                textcoords="offset points", va="center", fontsize=8, color=color,
            )  # fmt: skip
            labels.append(f"{OPTIONS.get(setting, setting)}\n{row.label}")
            y += 1
    _rows_of_labels(axis, "Aligned drafting (solid) or not (hollow)", labels, range(y))
    axis.set_xlim(1.0, 1 + 1.15 * (max(p.value for p in found) - 1))


def _rows_of_labels(axis: Axes, title: str, labels: Sequence[str], places: Sequence) -> None:
    tidy(axis, title, grid="x")
    axis.set_yticks(places if labels else [], labels, fontsize=8)
    axis.set_ylim(max(places) + 0.8, -1.4)
    axis.set_xlabel("tokens per verification", fontsize=8)


# --- four arms of RL -----------------------------------------------------------------------------

ARMS = {
    "none": ("no speculation", "#7a7a7a"),
    "frozen": ("frozen head", "#d9730d"),
    "online": ("online head", "#1f5fa8"),
    "online_random": ("online, from random", "#2a8c4a"),
}
PHASES = (("rollout", 1.0), ("train", 0.55), ("draft", 0.25))
# slime's report (MiMo-7B on H200): rollout tok/s of the arms relative to each other.
SLIME = {"online/none": 1.37, "online/frozen": 1.14}
ARMS_FOOTNOTE = (
    "GRPO runs from the same policy and seeds, taking turns step by step in one process. "
    "Speculative decoding: a small head drafts tokens, the policy verifies them in one forward and "
    "keeps what it would have sampled anyway.\nAccept length: tokens per verification. Only the "
    "draft head differs between the arms, so only speed may differ. Speeds leave out the first "
    "step(s), which compile."
)


def series(records: Records, arm: str, metric: str, after: int = 0) -> list[float]:
    """Returns a metric of one arm, by step, for the steps after `after` that have it."""
    mine = sorted((r for r in records if r["arm"] == arm), key=lambda r: r["step"])
    return [r[metric] for r in mine if r["step"] > after and r.get(metric) is not None]


def draw_arms(path: Path, result: Mapping) -> Figure:
    """Draws curves over the steps, seconds of a step, ratios of speed, and predictions."""
    records, figures = json_lines(path.with_suffix(".jsonl")), result["figures"]
    arms = [arm for arm in ARMS if any(r["arm"] == arm for r in records)]
    untimed, rate = figures["untimed_steps"]["value"], "tokens per second"
    figure, grid = plt.subplots(2, 4, figsize=(20, 10))
    _curves(grid[0, 0], records, arms, "rollout/spec_accept_length", "Accept length",
            "tokens per verification", bottom=1.0)  # fmt: skip
    _curves(grid[0, 1], records, arms, "rollout/reward", "Reward: what is learned",
            "mean per answer")  # fmt: skip
    _curves(grid[0, 2], records, arms, "rollout/tokens_per_sec", "Rollout speed: all samples",
            rate, untimed)  # fmt: skip
    _curves(grid[0, 3], records, arms, "rollout/longest_sample_tokens_per_sec",
            "Rollout speed: the longest sample", rate, untimed)  # fmt: skip
    _curves(grid[1, 0], records, arms, "train/mtp_loss", "Draft head: training loss",
            "draft.loss per token")  # fmt: skip
    _seconds_by_phase(grid[1, 1], figures, arms)
    _ratios(grid[1, 2], figures)
    _predictions(grid[1, 3], figures)
    steps = max(r["step"] for r in records)
    title = f"{len(arms)} RL runs from one start, {steps} steps each"
    if "slots" in figures:
        title += f", {figures['slots']['value']} samples at once"
    if pair := figures.get("ratio/online/none"):
        title += f": rollouts at {pair['value']:.2f}x the speed of plain decoding"
    figure.suptitle(title, x=0.012, y=0.985, ha="left", fontsize=17, weight="bold")
    whole = figures["steps_bit_identical"]["value"] == steps
    verdict = figures["equality"]["value"]
    verdict += " (every token, reward and policy parameter)" if whole else ""
    for arm in arms:
        if why := figures.get(f"first_difference/{arm}"):
            verdict += f"\n{arm}, {why['value'][:170]}"
    color = "#2a8c4a" if whole else "#b00020"
    figure.text(0.012, 0.945, verdict, va="top", fontsize=12, weight="bold", color=color)
    figure.text(0.012, 0.012, ARMS_FOOTNOTE, fontsize=11, color="#555555")
    figure.tight_layout(rect=(0, 0.06, 1, 0.92), h_pad=3)
    return figure


def _curves(axis: Axes, records, arms, metric, title, unit, skip=0, bottom=0.0) -> None:
    """Draws one curve per arm that has the metric; equal ones as one black curve."""
    curves = {arm: series(records, arm, metric, skip) for arm in arms}
    curves = {arm: values for arm, values in curves.items() if values}
    ends: list[tuple] = []
    same = len(curves) > 1 and len({tuple(values) for values in curves.values()}) == 1
    for arm, values in curves.items():
        label, color = ("identical in all arms", "black") if same else ARMS[arm]
        steps = np.arange(len(values)) + 1 + skip
        axis.plot(steps, values, color=color, label=label, marker="o", markersize=3)
        text = f"{values[-1]:.0f}" if values[-1] >= 100 else f"{values[-1]:.2f}"
        ends.append((values[-1], steps[-1], text, color))
        if same:
            break
    tidy(axis, title)
    axis.set_ylabel(unit, fontsize=9)
    axis.set_xlabel("RL step", fontsize=9)
    axis.set_ylim(bottom, max(axis.get_ylim()[1] * 1.05, bottom + 1e-6))
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    lowest, height = bottom, axis.get_ylim()[1] - bottom
    for y, x, text, color in sorted(ends):  # the last values, moved up where they would overlap
        place = max(y, lowest)
        lowest = place + 0.055 * height
        axis.annotate(text, (x, place), xytext=(6, 0), textcoords="offset points", va="center",
                      fontsize=9, color=color, annotation_clip=False)  # fmt: skip
    if curves:
        axis.legend(fontsize=8, frameon=False, loc="best")


def _seconds_by_phase(axis: Axes, figures: Figures, arms: Sequence[str]) -> None:
    """Draws the median seconds per step of every arm, stacked by phase."""
    bottom = np.zeros(len(arms))
    for phase, alpha in PHASES:
        height = [figures.get(f"seconds_{phase}/{a}", {}).get("value") or 0.0 for a in arms]
        axis.bar(range(len(arms)), height, 0.7, bottom, color=[ARMS[a][1] for a in arms],
                 alpha=alpha)  # fmt: skip
        for x, seconds in enumerate(height):
            if seconds > 0.05 * bottom.max():
                axis.annotate(f"{phase}\n{seconds:.2f} s", (x, bottom[x] + seconds / 2), fontsize=8,
                              ha="center", va="center")  # fmt: skip
        bottom += height
    axis.set_xticks(range(len(arms)), [ARMS[a][0].replace(", ", ",\n") for a in arms], fontsize=8)
    axis.set_ylabel("seconds (median)", fontsize=9)
    tidy(axis, "Time of one RL step, by phase", grid="y")


def _ratios(axis: Axes, figures: Figures) -> None:
    """Draws speed-ups with intervals, and what slime reports for the same comparisons."""
    pairs = [name.removeprefix("ratio/") for name in figures if name.startswith("ratio/")]
    for y, pair in enumerate(pairs):
        entry, color = figures[f"ratio/{pair}"], ARMS[pair.partition("/")[0]][1]
        axis.barh(y, entry["value"], color=color, height=0.55, alpha=0.85)
        axis.plot(entry["interval"], [y, y], color="black", linewidth=1.2, marker="|")
        axis.annotate(f"{entry['value']:.2f}x", (0.03, y), va="center", fontsize=12, weight="bold",
                      color="white")  # fmt: skip
        if mark := SLIME.get(pair):
            axis.plot([mark, mark], [y - 0.42, y + 0.42], color="#b00020", linewidth=2.5)
            axis.annotate(f"slime: {mark:.2f}x", (mark, y - 0.43), ha="center", va="bottom",
                          color="#b00020", fontsize=9)  # fmt: skip
    axis.axvline(1.0, color="black", linewidth=0.8)
    names = ["\n/ ".join(ARMS[arm][0] for arm in pair.split("/")) for pair in pairs]
    axis.set_yticks(range(len(pairs)), names, fontsize=9)
    axis.set_ylim(len(pairs) - 0.4, -0.75)
    axis.set_xlabel("ratio of tokens per second", fontsize=9)
    tidy(axis, "Rollout speed-up, measured", grid="x")


def _predictions(axis: Axes, figures: Figures) -> None:
    """Draws the acceptance of these runs replayed through tables of step costs."""
    found: dict[str, dict[str, float]] = {}
    for name, entry in figures.items():
        if name.startswith("predicted_ratio/"):
            _, table, arm = name.split("/")
            label = f"{table.replace('_', ' ')}\n({entry['unit'].rpartition(' ')[2]} costs)"
            found.setdefault(label, {})[arm] = entry["value"]
    arms = [arm for arm in ARMS if any(arm in row for row in found.values())]
    height = 0.8 / max(len(arms), 1)
    for y, row in enumerate(found.values()):
        for i, arm in enumerate(arm for arm in arms if arm in row):
            at = y - 0.4 + height * (i + 0.5)
            axis.barh(at, row[arm], color=ARMS[arm][1], height=0.9 * height, alpha=0.85)
            axis.annotate(f"{row[arm]:.2f}x", (row[arm], at), xytext=(4, 0), va="center",
                          textcoords="offset points", fontsize=9)  # fmt: skip
    axis.axvline(1.0, color="black", linewidth=0.8)
    axis.set_yticks(range(len(found)), list(found), fontsize=9)
    axis.invert_yaxis()
    axis.set_xlabel("speculative / plain, whole rollout at once", fontsize=9)
    tidy(axis, "Predicted by step costs", grid="x")


# --- draft training in the gaps of rollouts ------------------------------------------------------

SPOT = {
    "busy": ("samples run", "#4c78a8"),
    "idle": ("nothing to do", "#e8e8e8"),
    "draft_gap": ("trains the head, in a gap", "#f58518"),
    "draft_after": ("trains the head, after the rollout", "#b279a2"),
}
SPOT_TITLES = {
    "after": "all updates after the rollout",
    "gaps": "updates in the gaps of the rollout",
}


def draw_spot(path: Path, result: Mapping) -> Figure:
    """Draws a rollout of both arms as a time line, and the seconds of a step."""
    untimed, figures = result["settings"]["untimed_steps"], result["figures"]
    events = [e for e in json_lines(path.with_suffix(".jsonl")) if e["step"] > untimed]
    step = _typical_step(events)
    figure, grid = plt.subplot_mosaic(
        [["after", "after", "bars"], ["gaps", "gaps", "bars"]], figsize=(12, 5)
    )
    end = max(e["end"] for e in events if e["step"] == step)
    for arm, title in SPOT_TITLES.items():
        _time_line(grid[arm], [e for e in events if e["arm"] == arm and e["step"] == step])
        grid[arm].set_xlim(0, end * 1.02)
        grid[arm].set_title(f"{title} (step {step})", fontsize=10, loc="left")
    grid["gaps"].set_xlabel("seconds since the rollout began")
    for place, arm in enumerate(SPOT_TITLES):
        rollout, draft = (figures[f"{of}_seconds/{arm}"]["value"] for of in ("rollout", "draft"))
        grid["bars"].bar(place, rollout, color=SPOT["busy"][1])
        grid["bars"].bar(place, draft, bottom=rollout, color=SPOT["draft_after"][1])
        total = rollout + draft
        grid["bars"].text(place, total, f"{total:.2f} s", ha="center", va="bottom")
    grid["bars"].set_xticks(range(len(SPOT_TITLES)), list(SPOT_TITLES))
    grid["bars"].set_title("median seconds of a step\n(without the policy update)", fontsize=10)
    grid["bars"].spines[["top", "right"]].set_visible(False)
    handles = [Patch(color=color, label=label) for label, color in SPOT.values()]
    figure.legend(handles=handles, loc="lower center", ncols=4, frameon=False)
    delay, gained = figures["tail_delay"], figures["seconds_gained"]
    low, high = delay["interval"]
    figure.suptitle(
        f"{gained['value']:.2f} s gained per step; the rollout ends later by "
        f"{delay['value']:+.1%} of its tail [{low:+.1%}, {high:+.1%}]"
    )
    figure.tight_layout(rect=(0, 0.06, 1, 1))
    return figure


def _typical_step(events: Sequence[Mapping]) -> int:
    """Returns the step whose training in gaps is the median of all steps."""
    spent = dict.fromkeys((e["step"] for e in events), 0.0)
    for event in events:
        if event["arm"] == "gaps" and event["event"] == "draft_gap":
            spent[event["step"]] += event["end"] - event["start"]
    middle = statistics.median_high(spent.values())
    return next(step for step, value in spent.items() if value == middle)


def _time_line(axis: Axes, events: Sequence[Mapping]) -> None:
    """Draws one bar per replica, and a line where the rollout ends."""
    replicas = sorted({e["replica"] for e in events} - {None})
    for name, (_, color) in SPOT.items():  # in this order: training is drawn over idle time
        for event in (e for e in events if e["event"] == name):
            axis.barh(
                replicas.index(event["replica"]),
                event["end"] - event["start"],
                left=event["start"],
                height=0.7 if name in ("busy", "idle") else 0.45,
                color=color,
                edgecolor="white" if name.startswith("draft") else "none",
                linewidth=0.6,
            )
    axis.axvline(next(e["end"] for e in events if e["event"] == "rollout"), color="black")
    axis.set_yticks(range(len(replicas)), [f"replica {r}" for r in replicas])
    axis.set_ylim(len(replicas) - 0.5, -0.5)
    axis.spines[["top", "right"]].set_visible(False)


PICTURES = {
    "longtail": draw_longtail,
    "acceptance": draw_acceptance,
    "arms": draw_arms,
    "spot": draw_spot,
}


def main(argv: Sequence[str] | None = None) -> None:
    parser = ArgumentParser(prog="python -m bench.plots", description=__doc__)
    parser.add_argument("file", help="a result file")
    with user_errors("plots"):
        print(draw(parser.parse_args(argv).file))


if __name__ == "__main__":
    main()
