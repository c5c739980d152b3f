"""`--status`: every part and every target, on every card that is known or has a record."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench.gpu import records
from bench.gpu.cards import CARDS
from bench.gpu.table import PARTS, Part
from bench.gpu.targets import MET, MISSED, UNKNOWN, Verdict, verdicts

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


def show(out: str | Path, table: Sequence[Part] = PARTS, console: Console | None = None) -> None:
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
