"""`python -m bench.tpu table FILE ...`: Markdown tables of result files of `bench.tpu rounds`.

With two files the first is what was before and the second what is after: every program has a row of
each. With `--into docs/tpu.md` the table replaces the one between the marks of this
name there.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench import markdown
from bench.command import user_errors
from bench.markdown import size_text
from bench.tpu.rounds import scaled
from specjax.command_line import ArgumentParser
from train.plan.cycles import PARTS, REST
from train.plan.report import unknown_text

TOOL = "bench.tpu"
ROOM = (
    "outside rounds", "temporaries", "HBM", "copied", "copied outside rounds", "collectives",
    "kernels", "no estimate of",
)  # fmt: skip


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
            size_text(value.get(key))
            for key in ("temporaries", "bytes", "copied/round", "copied/entry")
        ),
        f"{calls:.0f}, {size_text(value['received'])}",
        f"{value['kernels']:.0f}",
        unknown_text({key[8:]: n for key, n in value.items() if key.startswith("unknown/")}),
    )
    return cells | dict(zip(ROOM, rest, strict=True))


def _millions(count: float) -> str:
    return f"{count / 1e6:.2f}"


def table(results: Sequence[Mapping[str, Any]]) -> str:
    """Returns a table with one row per program that all result files have.

    Raises:
      ValueError: there are more than two files, or they have no program in common.
    """
    layers = [result["settings"]["layers"] for result in results]

    def total(index: int, _, value: Mapping) -> float:
        return sum(scaled(value, layers[index]).values())

    def cells(index: int, _, value: Mapping) -> dict[str, str]:
        return cells_of(value, layers[index])

    return markdown.compared(results, _title, "cycles", total, cells)


def _title(name: str) -> str:
    strategy, colon, bucket = name.rpartition(":")
    return f"`{strategy}` x {bucket}" if colon else name.replace("_", " ")


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
        markdown.write(table(markdown.read(args.files)), args.into, args.name, TOOL)
