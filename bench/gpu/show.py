"""What was measured: the two tables of `--status`, and a picture per card (`--plot`)."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench.gpu import records
from bench.gpu.program import CARDS
from bench.gpu.table import MET, MISSED, PARTS, TARGETS, UNKNOWN, Part, Verdict, verdicts
from bench.round.parts import ROUND

WIDTH = 150


def by_card(out: str | Path) -> dict[str, dict[str, records.Record]]:
    """Card -> part -> record; the cards that targets are for are there without any."""
    found: dict[str, dict] = {card: {} for card in CARDS}
    for path, record in records.every(out):
        settings = record["settings"]
        of_card = found.setdefault(settings["card"], {})
        if not path.name.endswith(".running.json") or settings["part"] not in of_card:
            of_card[settings["part"]] = record
    return found


def tables(out: str | Path, table: Sequence[Part] = PARTS, console: Console | None = None) -> None:
    """Prints both tables."""
    console = console or Console(width=WIDTH)
    found = by_card(out)
    judged = {card: verdicts(card, of_card) for card, of_card in found.items()}
    console.print(_parts(found, judged, table))
    console.print(_targets(judged))


def _parts(found: Mapping, judged: Mapping, table: Sequence[Part]) -> Table:
    shown = Table(title="parts", title_justify="left")
    for column in ("part", "decides", "limit", "card", "outcome", "date", "targets"):
        shown.add_column(column, overflow="fold")
    for part in table:
        cards = [card for card, of_card in found.items() if part.name in of_card]
        for card in cards or ["-"]:
            record = found.get(card, {}).get(part.name)
            about = (UNKNOWN, "-") if record is None else _about(record)
            counted = _counted(part, judged[card] if cards else judged["h100"], bool(cards))
            shown.add_row(part.name, part.decides, f"{part.seconds:.0f} s", card, *about, counted)
    gone = [
        (name, card, record)
        for card, of_card in found.items()
        for name, record in of_card.items()
        if name not in {part.name for part in table}
    ]
    for name, card, record in gone:
        shown.add_row(name, "(no longer a part)", "-", card, *_about(record), "-")
    return shown


def _about(record: records.Record) -> tuple[str, str]:
    word, why = records.outcome(record), records.reason(record)
    if word == records.RUNNING:
        word, why = "cut off", f"attempt {record['settings']['attempt']}"
    left_out = [name for name, entry in record["figures"].items() if entry["value"] is None]
    more = [why] if why else []
    more += [f"{len(left_out)} figures left out"] if left_out else []
    return word + (f" ({'; '.join(more)})" if more else ""), record["date"]


def _counted(part: Part, found: Sequence[Verdict], measured: bool) -> str:
    mine = [v for v in found if fnmatch.fnmatchcase(part.name, v.target.part)]
    if not mine:
        return "none"
    if not measured:
        return f"{len(mine)} {UNKNOWN}"
    words = [v.word for v in mine]
    return ", ".join(f"{words.count(w)} {w}" for w in (MET, MISSED, UNKNOWN) if w in words)


def _targets(judged: Mapping[str, Sequence[Verdict]]) -> Table:
    shown = Table(title="targets", title_justify="left")
    for column in ("target", "part", "bound", "card", "measured", "verdict"):
        shown.add_column(column, overflow="fold")
    for card in CARDS:
        for v in judged[card]:
            sign = "at most" if v.target.most else "at least"
            bound = f"{sign} {v.target.bounds[card]:g} {v.target.unit}"
            value = "-" if v.value is None else f"{v.value:.4g}"
            # Where there is no value, the word says it.
            missing = (
                f" ({v.missing} figures {UNKNOWN})" if v.missing and v.value is not None else ""
            )
            shown.add_row(v.target.name, v.target.part, bound, card, value, v.word + missing)
    return shown


# --- the picture ----------------------------------------------------------------------------------

_SHARE = re.compile(r"share/(?P<kernel>[^/]+)/(?P<cell>\d+/\w+/\d+)")
_BOUNDS = {bound for t in TARGETS if t.part.startswith("attention/") for bound in t.bounds.values()}


def draw(out: str | Path) -> list[Path]:
    """Draws `<out>/gpu/<card>.png` for each card that has something to draw; returns them."""
    from bench import plots  # chooses matplotlib's backend

    plt = plots.plt

    found = []
    for card, of_card in by_card(out).items():
        shares = shares_of(of_card)
        parts = of_card.get("round_parts", {"figures": {}})["figures"]
        times = {name: parts.get(f"ms/{name}", {}).get("value") for name in ROUND}
        times = {name: value for name, value in times.items() if value is not None}
        panels = [(_attention, shares, 8)] if shares else []
        panels += [(_round, times, 4)] if times else []
        if not panels:
            continue
        widths = [width for *_, width in panels]
        drawing, axes = plt.subplots(
            1, len(panels), figsize=(sum(widths), 4.5), width_ratios=widths, squeeze=False
        )
        for axis, (panel, values, _) in zip(axes[0], panels, strict=True):
            panel(axis, values)
            plots.tidy(axis, grid="y" if panel is _attention else "x")
        drawing.suptitle(card)
        drawing.tight_layout()
        found.append(plots.save(drawing, records.directory(out) / f"{card}.png"))
    return found


def shares_of(of_card: Mapping[str, records.Record]) -> dict[tuple[str, str], dict[str, float]]:
    """(kernel, batch) -> cell -> share of the copy."""
    found: dict = {}
    for part, record in of_card.items():
        for name, entry in record["figures"].items():
            match = _SHARE.fullmatch(name) if part.startswith("attention/") else None
            if match and match["kernel"] != "best" and entry["value"] is not None:
                of_line = found.setdefault((match["kernel"], part.partition("/")[2]), {})
                of_line[match["cell"]] = entry["value"]
    return found


def _attention(axis, shares: Mapping[tuple[str, str], Mapping[str, float]]) -> None:
    """A line per kernel and batch: kernels by style, batches by colour."""
    kernels = sorted({kernel for kernel, _ in shares})
    batches = sorted({batch for _, batch in shares})
    for (kernel, batch), by_cell in sorted(shares.items()):
        axis.plot(
            list(by_cell),
            list(by_cell.values()),
            ("-", "--", ":")[kernels.index(kernel) % 3],
            color=f"C{batches.index(batch)}",
            marker=".",
            label=f"{kernel}, batch {batch}",
        )
    for bound in _BOUNDS:
        axis.axhline(bound, color="grey", linewidth=0.8)
    axis.set_ylim(0)
    axis.tick_params(axis="x", labelrotation=60, labelsize=7)
    axis.set_title("attention, share of a copy's bytes/s: rows / prefix / table", fontsize=10)
    axis.legend(fontsize=7, frameon=False, ncols=2)


def _round(axis, times: Mapping[str, float]) -> None:
    """Milliseconds of every part."""
    axis.barh(list(times), list(times.values()), color="#4c78a8")
    axis.invert_yaxis()
    axis.set_title("milliseconds of one round", fontsize=10)
