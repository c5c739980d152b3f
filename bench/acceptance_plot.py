"""The picture of `bench.acceptance`: `python -m bench.acceptance_plot FILE` draws FILE again."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402
from matplotlib.axes import Axes  # noqa: E402
from matplotlib.lines import Line2D  # noqa: E402

from specjax.command_line import ArgumentParser

COLORS = {"coupled": "#1f5fa8", "block": "#d9730d", "recursive": "#2a8c4a"}
POLICIES = {"sums": "embedded policy", "gsm8k": "GSM8K policy"}
SOURCES = {"head": "draft head", "ngram": "n-grams + siblings", "itself": "the policy itself"}
OPTIONS = {
    "T_0.7_top_p_0.9": "T 0.7, top-p 0.9",
    "T_1_repetition_1.1_frequency_0.5": "T 1, penalties 1.1, 0.5",
}
HOLLOW = {"markerfacecoloralt": "white"}  # the empty half of a half-filled mark
FOOTNOTE = (
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
    """One figure of the result file, its name taken apart; `aligned` None where both are not."""

    policy: str
    setting: str
    row: Row
    nodes: int
    aligned: bool | None
    value: float
    low: float
    high: float


def points(figures: Mapping[str, Mapping]) -> list[Point]:
    """Every accept length of a result file."""
    found = []
    for key, entry in figures.items():
        kind, _, rest = key.partition("/")
        if kind != "accept_length":
            continue
        policy, setting, source, mode, tree, nodes, *side = rest.split("/")
        aligned = side[0] == "aligned" if side else None
        low, high = entry["interval"]
        count = int(nodes.removeprefix("nodes_"))
        row = Row(source, mode, tree)
        found.append(Point(policy, setting, row, count, aligned, entry["value"], low, high))
    return found


def draw(path: str | Path) -> Path:
    """Draws the result file `path` as a PNG of the same name beside it."""
    path = Path(path)
    found = points(json.loads(path.read_text(encoding="utf-8"))["figures"])
    main = [p for p in found if p.aligned is None]
    pairs = [p for p in found if p.aligned is not None]
    names = list(dict.fromkeys(p.policy for p in main))
    settings = list(dict.fromkeys(p.setting for p in main))
    rows = {name: ordered_rows([p for p in main if p.policy == name]) for name in names}
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
            panel(axis, mine, rows[name], title, labels=column == 0)
        if pairs:
            alignment(line[-1], [p for p in pairs if p.policy == name])
    figure.suptitle(
        "Accept length of acceptance rules, trees and draft sources at equal drafted nodes",
        fontsize=16, weight="bold", x=0.01, ha="left",
    )  # fmt: skip
    figure.legend(
        handles=legend_marks(main), fontsize=10, frameon=False, loc="upper right", ncols=6
    )
    figure.supxlabel(FOOTNOTE, fontsize=9, color="#555555", x=0.01, ha="left")
    out = path.with_suffix(".png")
    figure.savefig(out, dpi=90)
    plt.close(figure)
    return out


def ordered_rows(found: Sequence[Point]) -> list[Row]:
    """Rows by source, then as measured; trees of all sizes share a row if named alike."""
    return sorted(dict.fromkeys(p.row for p in found), key=lambda row: _place(row, found))


def _place(row: Row, found: Sequence[Point]) -> tuple:
    sources = list(dict.fromkeys(p.row.source for p in found))
    kinds = ("chain", "spine", "bushy", "dynamic")
    kind = next(i for i, kind in enumerate(kinds) if row.tree.startswith(kind))
    return sources.index(row.source), kind, list(COLORS).index(row.mode), row.tree


def panel(axis: Axes, found, rows: Sequence[Row], title: str, labels: bool) -> None:
    """One policy at one temperature: a line per row, a mark per number of drafted nodes."""
    places, headings, y = {}, [], 0.0
    for row in rows:
        if not places or row.source != headings[-1][1]:
            y += 0.9 if places else 0.0
            headings.append((y - 0.75, row.source))
        places[row] = y
        y += 1.0
    looks = looks_of(found)
    for p in found:
        at, color = places[p.row], COLORS[p.row.mode]
        axis.plot([p.low, p.high], [at, at], color=color, linewidth=1.2, alpha=0.6)
        fill, style = looks[p.nodes]
        axis.plot(p.value, at, "o", color=color, markersize=6.5, fillstyle=fill, **HOLLOW)
        if p.row == Row("head", "coupled", "chain"):
            axis.axvline(p.value, color=color, linewidth=0.8, alpha=0.5, linestyle=style)
    for at, source in headings:
        text = SOURCES.get(source, source.replace("_", " "))
        axis.text(1.02, at, text, fontsize=8, weight="bold", color="#444444", va="center")
    for size in sorted({p.nodes for p in found}):
        best = max((p for p in found if p.nodes == size and p.row.source != "itself"), key=_value)
        axis.annotate(
            f"{best.value:.2f}", (best.value, places[best.row]), xytext=(0, 4), fontsize=8,
            textcoords="offset points", ha="center", weight="bold", color=COLORS[best.row.mode],
        )  # fmt: skip
    finish(axis, title, [row.label for row in rows] if labels else [], list(places.values()))
    axis.set_xlim(1.0, 1.06 * max(p.high for p in found))


def looks_of(found: Sequence[Point]) -> dict[int, tuple[str, str]]:
    """How full a mark is and how a line is drawn, by the number of drafted nodes."""
    looks = (("full", "-"), ("left", "--"), ("none", ":"))
    return dict(zip(sorted({p.nodes for p in found}, reverse=True), looks, strict=False))


def _value(point: Point) -> float:
    return point.value


def alignment(axis: Axes, found: Sequence[Point]) -> None:
    """Aligned drafting against drafting from logits that are only tempered."""
    labels, y = [], 0
    for setting in dict.fromkeys(p.setting for p in found):
        for row in dict.fromkeys(p.row for p in found):
            mine = {p.aligned: p for p in found if (p.row, p.setting) == (row, setting)}
            color = COLORS[row.mode]
            axis.plot([mine[False].value, mine[True].value], [y, y], color=color, linewidth=3,
                      alpha=0.3)  # fmt: skip
            for aligned, p in mine.items():
                fill = color if aligned else "white"
                axis.plot(p.value, y, "s", color=color, markerfacecolor=fill, markersize=7)
            gain = mine[True].value / mine[False].value
            axis.annotate(
                f"{gain:.2f}x", (max(p.value for p in mine.values()), y), xytext=(8, 0),
                textcoords="offset points", va="center", fontsize=8, color=color,
            )  # fmt: skip
            labels.append((y, f"{OPTIONS.get(setting, setting)}\n{row.label}"))
            y += 1
    finish(axis, "Aligned drafting (solid) or not (hollow)", [t for _, t in labels], range(y))
    axis.set_xlim(1.0, 1 + 1.15 * (max(p.value for p in found) - 1))


def finish(axis: Axes, title: str, labels: Sequence[str], places: Sequence[float]) -> None:
    axis.set_title(title, loc="left", fontsize=11, weight="bold")
    axis.set_yticks(places if labels else [], labels, fontsize=8)
    axis.set_ylim(max(places) + 0.8, -1.4)
    axis.set_xlabel("tokens per verification", fontsize=8)
    axis.grid(alpha=0.25, axis="x")
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)


def legend_marks(found: Sequence[Point]) -> list[Line2D]:
    """Colours are rules, filling is the number of drafted nodes."""
    marks = [(mode, color, "full") for mode, color in COLORS.items()]
    looks = sorted(looks_of(found).items())
    marks += [(f"{nodes} nodes", "black", fill) for nodes, (fill, _) in looks]
    return [
        Line2D([], [], color=color, marker="o", fillstyle=fill, linestyle="", label=label, **HOLLOW)
        for label, color, fill in marks
    ]


def main(argv: Sequence[str] | None = None) -> None:
    parser = ArgumentParser(prog="python -m bench.acceptance_plot", description=__doc__)
    parser.add_argument("file", nargs="?", default="bench/results/acceptance.json")
    print(draw(parser.parse_args(argv).file))


if __name__ == "__main__":
    main()
