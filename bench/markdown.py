"""Markdown tables of result files, and pages that contain them between marks."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

VERSIONS = "before", "after"


def programs_of(result: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Returns the values of a result file: of each program by name, each figure's by name."""
    found: dict[str, dict[str, Any]] = {}
    for key, entry in result["figures"].items():
        name, _, figure = key.partition("/")
        found.setdefault(name, {})[figure] = entry["value"]
    return found


def compared(
    results: Sequence[Mapping[str, Any]],
    title: Callable[[str], str],
    first: str,
    total: Callable[[int, str, Mapping], float],
    cells: Callable[[int, str, Mapping], dict[str, str]],
) -> str:
    """Returns a table with one row per program that all result files have.

    Args:
      results: one file, or what was before and what is after.
      title: returns what a table calls a program, from its name.
      first: column of the figure that is compared: rows of `after` also say its ratio.
      total: returns this figure, from a file's index, a program's name and its values.
      cells: returns the cells by column, from the same.

    Raises:
      ValueError: there are more than two files, or they have no program in common.
    """
    if not 1 <= len(results) <= 2:
        raise ValueError(f"expected one or two files to compare, got {len(results)}")
    values = [programs_of(result) for result in results]
    names = [name for name in values[0] if all(name in found for found in values)]
    if not names:
        raise ValueError("expected files with a program in common, got none")
    rows: list[list[str]] = []
    for name in names:
        totals = []
        for index, (found, version) in enumerate(zip(values, VERSIONS, strict=False)):
            row, of_row = {"program": title(name)}, cells(index, name, found[name])
            if len(values) == 2:
                totals.append(total(index, name, found[name]))
                row["version"] = version
                of_row[first] += f" ({totals[1] / totals[0]:.2f}x)" if totals[1:] else ""
            row |= of_row
            rows = rows or [list(row), ["---"] * len(row)]
            rows.append(list(row.values()))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def marks(name: str, tool: str) -> tuple[str, str]:
    """Returns the lines around a table of a page."""
    return f"<!-- table {name} of {tool} -->", f"<!-- end of table {name} -->"


def put(text: str, name: str, content: str, tool: str) -> str:
    """Returns a page with other content between the marks of a name.

    Args:
      tool: module that makes the table.

    Raises:
      ValueError: the page has no such marks.
    """
    begin, end = marks(name, tool)
    before, found, rest = text.partition(begin)
    _, closed, after = rest.partition(end)
    if not (found and closed):
        raise ValueError(f"expected {begin} and {end}, in this order, in the page")
    return f"{before}{begin}\n{content}\n{end}{after}"


def write(made: str, into: Path | None, name: str, tool: str) -> None:
    """Prints a table, or puts it into a page."""
    if into is None:
        print(made)
        return
    into.write_text(put(into.read_text(encoding="utf-8"), name, made, tool), encoding="utf-8")


def read(files: Sequence[Path]) -> list[dict[str, Any]]:
    """Reads result files."""
    return [json.loads(file.read_text(encoding="utf-8")) for file in files]


def size_text(count: float | None) -> str:
    """Formats a number of bytes; None: there is none."""
    if count is None:
        return ""
    return f"{count / 1e6:.0f} MB" if count < 1e10 else f"{count / 1e9:.0f} GB"
