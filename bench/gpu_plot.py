"""The picture of `bench.gpu`: bandwidth of tree attention, and where the time of a round goes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402
from matplotlib.axes import Axes  # noqa: E402

from bench.gpu_round import ROUND  # noqa: E402
from bench.gpu_targets import SHARE  # noqa: E402

STYLES = ("-", "--", ":")


def draw(path: Path) -> Path | None:
    """Draws `<result>.png` beside a result file; None where it holds nothing to draw."""
    figures = json.loads(path.read_text(encoding="utf-8"))["figures"]
    found = {n: e["value"] for n, e in figures.items() if n.startswith("bandwidth_share/")}
    found = {name: value for name, value in found.items() if value is not None}
    parts = {name: figures.get(f"ms/{name}", {}).get("value") for name in ROUND}
    if not found or None in parts.values():
        return None
    drawing, (left, right) = plt.subplots(1, 2, figsize=(12, 4.5), width_ratios=(2, 1))
    bandwidth(left, found)
    one_round(right, parts)
    drawing.tight_layout()
    out = path.with_suffix(".png")
    drawing.savefig(out, dpi=90)
    plt.close(drawing)
    return out


def cells(found: Mapping[str, float]) -> dict[tuple[str, int, int], dict[int, float]]:
    """(kernel, batch, T) -> prefix -> share."""
    result: dict = {}
    for name, value in found.items():
        _, kernel, rows, prefix, batch = name.split("/")
        rows, prefix, batch = (int(part.rpartition("_")[2]) for part in (rows, prefix, batch))
        result.setdefault((kernel, batch, rows), {})[prefix] = value
    return result


def bandwidth(axis: Axes, found: Mapping[str, float]) -> None:
    """A line per kernel, batch and number of rows: kernels by style, rows by colour."""
    lines = cells(found)
    kernels = sorted({kernel for kernel, *_ in lines})
    rows = sorted({t for *_, t in lines})
    for (kernel, batch, t), shares in lines.items():
        axis.plot(
            sorted(shares),
            [shares[prefix] for prefix in sorted(shares)],
            STYLES[kernels.index(kernel) % len(STYLES)],
            color=plt.cm.viridis(rows.index(t) / max(len(rows), 2)),
            marker=f"${batch}$",
            label=f"{kernel}, T {t}" if batch == max(b for _, b, _ in lines) else None,
        )
    axis.axhline(SHARE, color="grey", linewidth=0.8)
    axis.set_xscale("log", base=2)
    axis.set_ylim(0)
    axis.set_xlabel("positions of the prefix (markers: batch)")
    axis.set_title("tree attention, share of a copy's bytes/s", fontsize=10, loc="left")
    axis.legend(fontsize=7, frameon=False, ncols=2)
    axis.spines[["top", "right"]].set_visible(False)


def one_round(axis: Axes, parts: Mapping[str, float]) -> None:
    """Milliseconds of every part."""
    axis.barh(list(parts), list(parts.values()), color="#4c78a8")
    axis.invert_yaxis()
    axis.set_title("milliseconds of one round", fontsize=10, loc="left")
    axis.spines[["top", "right"]].set_visible(False)
