"""`python -m bench.tpu table FILE ...`: Markdown tables of result files of `bench.tpu rounds`.

With two files the first is what was before and the second what is after: every program has a row of
each. With `--into docs/tpu.md` the table replaces the one between the marks of this
name there.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.command import user_errors
from bench.tpu.rounds import scaled
from specjax.command_line import ArgumentParser
from train.plan.cycles import PARTS, REST
from train.plan.report import unknown_text

MARKS = "<!-- table {} of bench.tpu -->", "<!-- end of table {} -->"
VERSIONS = "before", "after"
ROOM = (
    "outside rounds", "temporaries", "HBM", "copied", "copied outside rounds", "collectives",
    "kernels", "no estimate of",
)  # fmt: skip


def programs_of(result: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Returns the values of a result file: of each program by name, each figure's by name."""
    found: dict[str, dict[str, Any]] = {}
    for key, entry in result["figures"].items():
        name, _, figure = key.partition("/")
        found.setdefault(name, {})[figure] = entry["value"]
    return found


def cells_of(value: Mapping[str, Any], layers: int) -> dict[str, str]:
    """Returns what a table shows of one program.

    Args:
      value: values of its figures by name.
      layers: number of layers that were compiled.
    """
    cycles = scaled(value, layers)
    once = value["counted_once"]
    cells = {"cycles": _millions(sum(cycles.values())) + "+" * bool(once)}
    cells |= {part: _millions(cycles[part]) + "+" * (part in once) for part in (*PARTS, REST)}
    calls = sum(count for key, count in value.items() if key.startswith("calls/"))
    rest = (
        _millions(value["cycles_outside"]),
        *(
            _bytes(value.get(key))
            for key in ("temporaries", "bytes", "copied/round", "copied/entry")
        ),
        f"{calls:.0f}, {_bytes(value['received'])}",
        f"{value['kernels']:.0f}",
        unknown_text({key[8:]: n for key, n in value.items() if key.startswith("unknown/")}),
    )
    return cells | dict(zip(ROOM, rest, strict=True))


def _bytes(count: float | None) -> str:
    if count is None:
        return ""
    return f"{count / 1e6:.0f} MB" if count < 1e10 else f"{count / 1e9:.0f} GB"


def _millions(count: float) -> str:
    return f"{count / 1e6:.2f}"


def table(results: Sequence[Mapping[str, Any]]) -> str:
    """Returns a table with one row per program that all result files have.

    Raises:
      ValueError: there are more than two files, or they have no program in common.
    """
    if not 1 <= len(results) <= 2:
        raise ValueError(f"expected one or two files to compare, got {len(results)}")
    values = [programs_of(result) for result in results]
    layers = [result["settings"]["layers"] for result in results]
    names = [name for name in values[0] if all(name in found for found in values)]
    if not names:
        raise ValueError("expected files with a program in common, got none")
    rows: list[list[str]] = []
    for name in names:
        totals = []
        for found, count, version in zip(values, layers, VERSIONS, strict=False):
            cells = cells_of(found[name], count)
            row = {"program": _title(name)}
            if len(values) == 2:
                totals.append(sum(scaled(found[name], count).values()))
                row["version"] = version
                cells["cycles"] += f" ({totals[1] / totals[0]:.2f}x)" if totals[1:] else ""
            row |= cells
            rows = rows or [list(row), ["---"] * len(row)]
            rows.append(list(row.values()))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _title(name: str) -> str:
    strategy, colon, bucket = name.rpartition(":")
    return f"`{strategy}` x {bucket}" if colon else name.replace("_", " ")


def put(text: str, name: str, content: str) -> str:
    """Returns a page with other content between the marks of a name.

    Raises:
      ValueError: the page has no such marks.
    """
    begin, end = (mark.format(name) for mark in MARKS)
    before, found, rest = text.partition(begin)
    _, closed, after = rest.partition(end)
    if not (found and closed):
        raise ValueError(f"expected {begin} and {end}, in this order, in the page")
    return f"{before}{begin}\n{content}\n{end}{after}"


def main(argv: Sequence[str] | None = None) -> None:
    parser = ArgumentParser(
        prog="python -m bench.tpu table",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="before, and after")
    parser.add_argument("--into", type=Path, metavar="FILE", help="Markdown with the marks of NAME")
    parser.add_argument("--name", default="rounds", help="of the marks around the table")
    args = parser.parse_args(argv)
    with user_errors("tpu table"):
        made = table([json.loads(file.read_text(encoding="utf-8")) for file in args.files])
        if args.into is None:
            print(made)
            return
        page = args.into.read_text(encoding="utf-8")
        args.into.write_text(put(page, args.name, made), encoding="utf-8")
