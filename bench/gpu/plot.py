"""`--plot`: a picture of one card: attention's share of a copy's bandwidth, and a round's parts."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402
from matplotlib.axes import Axes  # noqa: E402

from bench.gpu import records  # noqa: E402
from bench.gpu.status import by_card  # noqa: E402
from bench.gpu.targets import TARGETS  # noqa: E402
from bench.round.parts import ROUND  # noqa: E402

SHARE = re.compile(r"share/(?P<kernel>[^/]+)/(?P<cell>\d+/\w+/\d+)")
BOUNDS = {bound for t in TARGETS if t.part.startswith("attention/") for bound in t.bounds.values()}


def draw(out: str | Path) -> list[Path]:
    """Draws `<out>/gpu/<card>.png` for each card that has something to draw; returns them."""
    found = []
    for card, of_card in by_card(out).items():
        shares = shares_of(of_card)
        parts = of_card.get("round_parts", {"figures": {}})["figures"]
        times = {name: parts.get(f"ms/{name}", {}).get("value") for name in ROUND}
        times = {name: value for name, value in times.items() if value is not None}
        if not shares and not times:
            continue
        both = (_attention, shares, 8), (_round, times, 4)
        drawn = [(panel, of, width) for panel, of, width in both if of]
        widths = [width for *_, width in drawn]
        drawing, axes = plt.subplots(
            1, len(drawn), figsize=(sum(widths), 4.5), width_ratios=widths, squeeze=False
        )
        for axis, (panel, of, _) in zip(axes[0], drawn, strict=True):
            panel(axis, of)
        drawing.suptitle(card)
        drawing.tight_layout()
        path = records.directory(out) / f"{card}.png"
        drawing.savefig(path, dpi=90)
        plt.close(drawing)
        found.append(path)
    return found


def shares_of(of_card: Mapping[str, records.Record]) -> dict[tuple[str, str], dict[str, float]]:
    """(kernel, batch) -> cell -> share of the copy."""
    found: dict = {}
    for part, record in of_card.items():
        for name, entry in record["figures"].items():
            match = SHARE.fullmatch(name) if part.startswith("attention/") else None
            if match and match["kernel"] != "best" and entry["value"] is not None:
                of_line = found.setdefault((match["kernel"], part.partition("/")[2]), {})
                of_line[match["cell"]] = entry["value"]
    return found


def _attention(axis: Axes, shares: Mapping[tuple[str, str], Mapping[str, float]]) -> None:
    """A line per kernel and batch: kernels by style, batches by colour."""
    kernels = sorted({kernel for kernel, _ in shares})
    batches = sorted({batch for _, batch in shares})
    for (kernel, batch), by_cell in sorted(shares.items()):
        axis.plot(
            list(by_cell),
            list(by_cell.values()),
            ("-", "--", ":")[kernels.index(kernel) % 3],
            color=plt.cm.viridis(batches.index(batch) / max(len(batches), 2)),
            marker=".",
            label=f"{kernel}, batch {batch}",
        )
    for bound in BOUNDS:
        axis.axhline(bound, color="grey", linewidth=0.8)
    axis.set_ylim(0)
    axis.tick_params(axis="x", labelrotation=60, labelsize=7)
    axis.set_title("attention, share of a copy's bytes/s: rows / prefix / table", fontsize=10)
    if shares:
        axis.legend(fontsize=7, frameon=False, ncols=2)
    axis.spines[["top", "right"]].set_visible(False)


def _round(axis: Axes, times: Mapping[str, float]) -> None:
    """Milliseconds of every part."""
    axis.barh(list(times), list(times.values()), color="#4c78a8")
    axis.invert_yaxis()
    axis.set_title("milliseconds of one round", fontsize=10)
    axis.spines[["top", "right"]].set_visible(False)
