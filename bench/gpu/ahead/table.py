"""`python -m bench.gpu.ahead table FILE ...`: Markdown tables of result files of `rounds`.

With two files the first is what was before and the second what is after: every program has a row of
each. With `--into docs/gpu.md` the table replaces the one between the marks of this name there.
`--name updates` makes the table of a file of `updates`, for docs/training.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench import markdown
from bench.command import user_errors
from bench.gpu.ahead import updates
from bench.gpu.ahead.rounds import EVERY, name_of
from bench.markdown import size_text
from specjax.command_line import ArgumentParser

TOOL = "bench.gpu.ahead"


def kernels_of(value: Mapping[str, Any]) -> float:
    """Returns the number of kernels of a round."""
    return sum(value[f"kernels/{part}"] for part in EVERY)


def cells_of(value: Mapping[str, Any]) -> dict[str, str]:
    """Returns what a table shows of one program, from the values of its figures by name."""
    cells = {"kernels": f"{kernels_of(value):.0f}"}
    cells |= {part: f"{value[f'kernels/{part}']:.0f}" for part in EVERY}
    copied = sum(value[f"copied/{place}"] for place in ("round", "entry"))
    return cells | {
        "decisions": str(value["decisions"]),
        "command buffers": str(value["buffers"]),
        "launches outside": str(value["outside"]),
        "memory": size_text(sum(value[f"bytes/{part}"] for part in EVERY)),
        "gathered pages": size_text(value["gathered"]),
        "copied": size_text(copied),
        "temporaries": size_text(value["temporaries"]),
        "Pallas": f"{value['own_kernels']:.0f}",
        "libraries": f"{value['library']:.0f}",
        "layers traced": f"{value['traced']:.0f}",
    }


def table(results: Sequence[Mapping[str, Any]]) -> str:
    """Returns a table with one row per program that all result files have.

    Raises:
      ValueError: there are more than two files, or they have no program in common.
    """
    return markdown.compared(
        results,
        _title,
        "kernels",
        lambda index, name, value: kernels_of(value),
        lambda index, name, value: cells_of(value),
    )


def updates_table(results: Sequence[Mapping[str, Any]]) -> str:
    """Returns a table with one row per program of a result file of `updates`.

    Raises:
      ValueError: there are several files.
    """
    if len(results) != 1:
        raise ValueError(f"expected one file of updates, got {len(results)}")
    [result] = results
    rows = [("program", "`remat_policy`", "temporaries", "matrix products", "forward kernels")]
    rows.append(("---",) * len(rows[0]))
    for text, value in markdown.programs_of(result).items():
        name = updates.name_of(text)
        policy = name.options.get("remat")
        rows.append(
            (
                f"{name.shape}, {name.rows} x {name.length:,}",
                "`remat=false`" if policy is None else f"`{policy}`",
                f"{value['temporaries'] / 1e9:.2f} GB",
                f"{value['operations'] / 1e12:.2f} T",
                f"{value['kernels']['flash_gpu_forward'] / result['settings']['layers']:g}",
            )
        )
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _title(text: str) -> str:
    name = name_of(text)
    options = "".join(f", {option.replace('_', '-')}" for option in name.options)
    return f"{name.shape} `{name.strategy}` x {name.batch}{options}"


TABLES = {"rounds": table, "updates": updates_table}


def main(argv: Sequence[str] | None = None) -> None:
    parser = ArgumentParser(
        prog="python -m bench.gpu.ahead table",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="before, and after")
    parser.add_argument("--into", type=Path, metavar="FILE", help="Markdown with the marks of NAME")
    more = "kind of the files, and name of the marks around the table"
    parser.add_argument("--name", default="rounds", choices=TABLES, help=more)
    args = parser.parse_args(argv)
    with user_errors("gpu.ahead table"):
        made = TABLES[args.name](markdown.read(args.files))
        markdown.write(made, args.into, args.name, TOOL)
