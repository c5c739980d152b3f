"""Result files, one for each part and card, and merging of files from several machines.

    <out>/gpu/<part>.<card>.json            figures of a part that has ended, or why there are none
    <out>/gpu/<part>.<card>.running.json    figures of a part that runs, or was interrupted

Both have the format of `bench.record.write_result`; `settings` has part, card and attempts, and the
figure `outcome` says how the part ended, and why. A running part writes each figure at once, so
that none is lost if its process dies.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.record import figure, now, write_json

Record = dict[str, Any]
RUNNING = "running"
# Outcomes of parts that measured all their figures, or those that time and memory allowed.
MEASURED = ("done", "done in part")
# Outcomes of parts that this machine cannot run; they do not count as failures.
EXCUSED = ("not on this device", "not installed", "not given")
ATTEMPTS = 2  # runs of a part that is interrupted; afterwards it is skipped
PACKED = "packed results of bench.gpu"


def directory(out: str | Path) -> Path:
    return Path(out) / "gpu"


def path_of(out: str | Path, part: str, card: str, running: bool = False) -> Path:
    suffix = ".running.json" if running else ".json"
    return directory(out) / f"{part.replace('/', '.')}.{card}{suffix}"


def read(path: Path) -> Record | None:
    """Reads a record; None: there is none."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None


def every(out: str | Path) -> Iterator[tuple[Path, Record]]:
    """Yields all records below a directory in order of their names, those of running parts too."""
    for path in sorted(directory(out).glob("*.json")):
        if not path.name.startswith("."):
            yield path, read(path)


def outcome(record: Mapping) -> str:
    return record["figures"]["outcome"]["value"]


def reason(record: Mapping) -> str:
    return record["figures"]["outcome"]["unit"]


def ok(record: Mapping) -> bool:
    """Returns whether a part did not fail."""
    return outcome(record) in (*MEASURED, *EXCUSED)


def wants_time(record: Mapping) -> bool:
    """Returns whether another run of a part would measure more, because its time was short."""
    short = outcome(record) in ("done in part", "no time")
    return short and record["settings"].get("left_over", 0) > 0


def weight(record: Mapping) -> int:
    """Returns the rank of a record among those of one part and card; of equals the newer is kept.

    A record of wrong results ranks as a complete one, however its run ended, so that it replaces an
    older record of right results.
    """
    if record["settings"].get("wrong") or outcome(record) == "done":
        return 3
    if outcome(record) == "done in part":
        return 2
    names = record["figures"].keys() - {"outcome", "spent"}
    return int(any(record["figures"][name]["value"] is not None for name in names))


def finish(out: str | Path, record: Record) -> None:
    """Writes the record of a part that has ended, and deletes its `.running.json`.

    An older record that has a higher `weight` is kept.
    """
    part, card = record["settings"]["part"], record["settings"]["card"]
    path = path_of(out, part, card)
    before = read(path)
    if before is None or weight(record) >= weight(before):
        write_json(record, path)
    else:
        print(f"{part}: {outcome(record)}; the older record is kept", flush=True)
    path_of(out, part, card, running=True).unlink(missing_ok=True)


def ended(record: Mapping, word: str, why: str) -> Record:
    """Returns the record of a run that was killed, with the figures so far."""
    entry = figure(word, "; ".join(filter(None, [reason(record), why])))
    return {**record, "date": now(), "figures": {**record["figures"], "outcome": entry}}


# --- packing and merging --------------------------------------------------------------------------


def pack(out: str | Path, path: Path) -> int:
    """Writes all records into one file; returns their number."""
    found = {record_path.name: record for record_path, record in every(out)}
    write_json({"name": PACKED, "date": now(), "records": found}, path)
    return len(found)


def merge(out: str | Path, paths: Sequence[Path]) -> list[str]:
    """Adds the records of packed files, where they rank higher than the existing ones.

    Records rank by `weight`, then by date, so merging again, or in another order, changes nothing.

    Returns:
      a line for each record, which says what was done.

    Raises:
      ValueError: a file was not written by `pack`.
    """
    lines = []
    for path in paths:
        try:
            packed = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{path} is no JSON: {error}; expected a file of --pack") from None
        if not isinstance(packed, dict) or packed.get("name") != PACKED:
            raise ValueError(f"expected a file that --pack wrote, got {path}")
        for name, record in packed["records"].items():
            lines.append(f"{name}: {_take(directory(out) / Path(name).name, record)}")
    return lines


def _take(path: Path, new: Record) -> str:
    old = read(path)
    if outcome(new) == RUNNING:
        final = read(path.with_name(path.name.replace(".running.json", ".json")))
        if final is not None and final["date"] >= new["date"]:
            return "kept the record of a later run"
    if old == new:
        return "identical record exists"
    if old is not None and _rank(old) >= _rank(new):
        return f"kept {outcome(old)} of {old['date']}, not {outcome(new)} of {new['date']}"
    write_json(new, path)
    running = path.with_name(path.name.removesuffix(".json") + ".running.json")
    if (cut_off := read(running)) is not None and cut_off["date"] <= new["date"]:
        running.unlink()
    if old is None:
        return f"new, {outcome(new)}"
    return f"{outcome(new)} of {new['date']} in place of {outcome(old)} of {old['date']}"


def _rank(record: Mapping) -> tuple:
    """Returns the rank of a record; at equal dates its content decides, in any order of merging."""
    return weight(record), record["date"], json.dumps(record, sort_keys=True)
