"""Writes docs/results.md and tables of other pages from the files in `bench/results/`: `make
results`.

What they show is in `results_page.yaml`. A row that no file has is an error.
"""

from __future__ import annotations

import argparse
import json
import re
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import yaml

ROOT = Path(__file__).resolve().parent.parent
RESULTS, PAGE, README = "bench/results", "docs/results.md", "README.md"


def contents() -> dict:
    """Reads what the pages show."""
    return yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))


# How a value is written: a factor, a format, and what follows. Beside these "of" writes the unit
# after the value, "n of" two counts, and "text" the value as it is.
FORMS = {
    "x": (1, ".2f", "x"),
    "%": (100, ".0f", "%"),
    "0.1%": (100, ".1f", "%"),
    "n": (1, ",.0f", ""),
    "ms": (1, ".1f", " ms"),
    "plain": (1, ".2f", ""),
    "fine": (1, ".4f", ""),
    "milli": (1e3, ".2f", ""),
    "tok/s": (1, ",.0f", " tok/s"),
    "M": (1e-6, ".2f", "M"),
    "MB": (1e-6, ",.0f", " MB"),
}


class Row(NamedTuple):
    """One line of a table: what it is, the keys of its figure, and how the value is written."""

    what: str
    keys: list[str]
    form: str


def rows(text: str) -> list[Row]:
    """Reads a row, and makes one for each number in its `{1 8}`."""
    what, keys, *form = text.split(" | ")
    numbers = re.search(r"\{([\d ]+)\}", what)
    if numbers is None:
        return [Row(what, keys.split(" -> "), form[0] if form else "x")]
    each = [(what.replace(numbers[0], n), keys.replace("{}", n)) for n in numbers[1].split()]
    return [row for name, key in each for row in rows(" | ".join([name, key, *form]))]


def load(file: str) -> dict:
    return json.loads((ROOT / RESULTS / file).read_text(encoding="utf-8"))


def cell(result: Mapping, row: Row, name: str = "") -> str:
    """Writes a figure with its interval; empty where the file does not have it."""
    last = name.rpartition("/")[2]
    keys = [key.replace("{name}", name).replace("{last}", last) for key in row.keys]
    entries = [result["figures"].get(key) for key in keys]
    if None in entries:
        return ""
    first = entries[0]
    if row.form == "of":
        return f"{first['value']} {first['unit']}"
    if row.form == "n of":
        return " of ".join(f"{entry['value']:,}" for entry in entries)
    if row.form == "text":
        return f"`{first['value']}`"
    factor, spec, after = FORMS[row.form]

    def number(value: float | None) -> str:
        return "none" if value is None else format(factor * value, spec)

    values = " -> ".join(number(entry["value"]) + after for entry in entries)
    if len(entries) > 1 or first["interval"] is None:
        return values
    return f"{values} [{', '.join(map(number, first['interval']))}]"


def table(part: Mapping) -> str:
    """Writes the table of one part of the contents.

    Raises:
      ValueError: no file has a row's figure.
    """
    columns = {}  # label -> content of its file, name
    for label, words in part["files"].items():
        file, _, name = words.partition(" ")
        columns[label] = load(file), name
    lines = [f"| | {' | '.join(columns)} |", "|---" * (1 + len(columns)) + "|"]
    for row in (row for text in part["rows"] for row in rows(text)):
        cells = [cell(result, row, name) for result, name in columns.values()]
        if not any(cells):
            raise ValueError(f"no file has the figure {' or '.join(row.keys)}")
        lines.append(f"| {row.what} | {' | '.join(cells)} |")
    return "\n".join(lines)


def sources(part: Mapping) -> list[str]:
    """Says where columns come from: command, JSON, device, commit, version of jax, date."""
    labels: dict[str, list[str]] = {}
    for label, words in part["files"].items():
        labels.setdefault(words.partition(" ")[0], []).append(label)
    found = []
    for file, named in labels.items():
        result = load(file)
        machine, versions = result["machine"], result["versions"]
        where = f"{machine['device']}"
        if machine["platform"] == "cpu":
            where = f"{machine['processor']}, {machine['cores']} cores"
        command = result["command"].partition(" --")[0]
        commit = f"commit {versions['specjax']}, " if "specjax" in versions else ""
        found.append(
            f"- {', '.join(named)}: `{command}` ([JSON](../{RESULTS}/{file}); {where}; "
            f"{commit}jax {versions['jax']}; {result['date'][:10]})"
        )
    return found


def section(part: Mapping) -> str:
    """Writes one section of the page."""
    title, note = part["title"], textwrap.fill(part["note"], 100, break_on_hyphens=False)
    lines = [f"## {title}", "", note, "", table(part), "", *sources(part)]
    if part.get("picture"):
        file = next(iter(part["files"].values())).partition(" ")[0]
        lines += ["", f"![{title}](../{RESULTS}/{Path(file).with_suffix('.png')})"]
    return "\n".join(lines)


HEAD = """# What was measured

This page is made from the files in `bench/results/` by `python -m bench.results_page`
(`make results`). Brackets hold 95% intervals, or for rates the slowest and the fastest turn. What
is compared took turns in one run. The embedded policy (`assets/sums`) has 12 layers of width 192
and adds numbers; the GSM8K policy was trained with specjax, and its weights are not in the
repository. `4_1_5` is a chain of 4 drafted tokens.

The values are those of the commit that is named, or of the date where none is; programs have
changed since. A command is cut at its first option; the JSON has all of it, with the names of its
time.
"""


def page() -> str:
    """Returns the text of docs/results.md."""
    return HEAD + "\n" + "\n\n".join(map(section, contents()["sections"])) + "\n"


def readme_table() -> str:
    """Returns README's table; commands are cut at their first option."""
    lines = ["| what | measured | command |", "|---|---|---|"]
    for text in contents()["readme"]:
        what, file, *figure = text.split(" | ")
        result, [row] = load(file), rows(" | ".join([what, *figure]))
        command = result["command"].partition(" --")[0]
        lines.append(f"| {what} | {cell(result, row)} | `{command}` |")
    return "\n".join(lines)


def put(text: str, name: str, content: str) -> str:
    """Returns a page with other content between the marks of a table.

    Raises:
      ValueError: the page has no such marks.
    """
    begin, end = f"<!-- table {name} of bench.results_page -->", f"<!-- end of table {name} -->"
    before, found, rest = text.partition(begin)
    _, closed, after = rest.partition(end)
    if not (found and closed):
        raise ValueError(f"expected {begin} and {end}, in this order, in the page")
    return f"{before}{begin}\n{content}\n{end}{after}"


def made() -> dict[Path, str]:
    """Returns the texts of all pages, as they should be."""
    found, readme = {ROOT / PAGE: page()}, ROOT / README
    found[readme] = put(readme.read_text(encoding="utf-8"), "results", readme_table())
    for part in contents()["tables"]:
        path = ROOT / part["page"]
        text = found.get(path) or path.read_text(encoding="utf-8")
        found[path] = put(text, part["name"], table(part))
    return found


def main(argv: Sequence[str] | None = None) -> None:
    argparse.ArgumentParser(prog="python -m bench.results_page", description=__doc__).parse_args(
        argv
    )
    for path, text in made().items():
        path.write_text(text, encoding="utf-8")
        print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
