"""`python -m bench.results_page`: writes docs/results.md and README's table from the result files.

No figure is typed by hand: results_page.yaml names the keys of figures, and the pages show what
the files in bench/results say. A test compares the pages with what this module makes.
"""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import yaml

from bench.command import user_errors
from specjax.command_line import ArgumentParser

ROOT = Path(__file__).resolve().parent.parent
RESULTS, PAGE, README = "bench/results", "docs/results.md", "README.md"
BEGIN, END = "<!-- results: made by python -m bench.results_page -->", "<!-- end of results -->"


def contents() -> dict:
    """Reads what the pages show."""
    return yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))


# How a value is written: a factor, a format, and what follows. Beside these "of" writes the unit
# after the value, "n of" two counts, and "text" the value as it is.
FORMS = {
    "x": (1, ".2f", "x"),
    "%": (100, ".0f", "%"),
    "%.1": (100, ".1f", "%"),
    "percent": (1, ".1f", "%"),
    "n": (1, ",.0f", ""),
    "s": (1, ".2f", " s"),
    "s in ms": (1000, ".0f", " ms"),
    "ms": (1, ".1f", " ms"),
    "plain": (1, ".2f", ""),
    "rounds": (1, ".0f", " rounds"),
    "tok/s": (1, ",.0f", " tok/s"),
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
    entries = [result["figures"].get(key.replace("{name}", name)) for key in row.keys]
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


def source(labels: Sequence[str], file: str, result: Mapping) -> str:
    """Says where columns come from: command, JSON, machine, version of jax, date."""
    machine = result["machine"]
    where = machine["device"]
    if machine["platform"] == "cpu":
        where = f"{machine['processor']}, {machine['cores']} cores"
    return (
        f"- {', '.join(labels)}: `{result['command']}` ([JSON](../{RESULTS}/{file}); {where}; jax "
        f"{result['versions']['jax']}; {result['date'][:10]})"
    )


def table(section: Mapping) -> str:
    """Writes one section of the page.

    Raises:
      ValueError: no file has a row's figure.
    """
    title, columns = section["title"], {}  # label -> file, its content, name
    for label, words in section["files"].items():
        file, _, name = words.partition(" ")
        columns[label] = file, load(file), name
    lines = [f"## {title}", "", textwrap.fill(section["note"], 100), ""]
    lines += [f"| | {' | '.join(columns)} |", "|---" * (1 + len(columns)) + "|"]
    for row in (row for text in section["rows"] for row in rows(text)):
        cells = [cell(result, row, name) for _, result, name in columns.values()]
        if not any(cells):
            raise ValueError(f"{title}: no file has the figure {' or '.join(row.keys)}")
        lines.append(f"| {row.what} | {' | '.join(cells)} |")
    lines.append("")
    labels: dict[str, list[str]] = {}
    for label, (file, _, _) in columns.items():
        labels.setdefault(file, []).append(label)
    lines += [source(named, file, load(file)) for file, named in labels.items()]
    if section.get("picture"):
        pictures = [f"../{RESULTS}/{Path(file).with_suffix('.png')}" for file in labels]
        lines += ["", f"![{title}]({pictures[0]})"]
        others = zip(list(labels.values())[1:], pictures[1:], strict=True)
        lines += [f"([{', '.join(named)}]({picture}))" for named, picture in others]
    return "\n".join(lines)


HEAD = """# What was measured

This page is made from the files in `bench/results/` by `python -m bench.results_page`
(`make results`). Brackets hold 95% intervals, or for rates the slowest and the fastest turn. What
is compared took turns in one run. The embedded policy (`assets/sums`) has 12 layers of width 192
and adds numbers; the GSM8K policy was trained with specjax, and its weights are not in the
repository. `4_1_5` is a chain of 4 drafted tokens.

Commands, and the keys of some figures, were renamed on 27 November 2026, in older files too; the
values are those that were measured. Each file names the commit that it measured; programs have
changed since.
"""


def page() -> str:
    """Returns the text of docs/results.md."""
    return HEAD + "\n" + "\n\n".join(map(table, contents()["sections"])) + "\n"


def readme_table() -> str:
    """Returns README's table."""
    lines = ["| what | measured | command |", "|---|---|---|"]
    for text in contents()["readme"]:
        what, file, *figure = text.split(" | ")
        result, [row] = load(file), rows(" | ".join([what, *figure]))
        lines.append(f"| {what} | {cell(result, row)} | `{short(result['command'])}` |")
    return "\n".join(lines)


def short(command: str) -> str:
    """Returns a command up to its first option, and its config."""
    words = command.split()
    first = next((i for i, word in enumerate(words) if word.startswith("--")), len(words))
    kept = words[:first]
    if "--config" in words:
        kept += ["--config", words[words.index("--config") + 1]]
    return " ".join(kept)


def with_table(readme: str) -> str:
    """Replaces what lies between the two marks of README; without marks it is unchanged."""
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    return f"{before}{BEGIN}\n{readme_table()}\n{END}{after}" if begin and end else readme


def main(argv: Sequence[str] | None = None) -> None:
    ArgumentParser(prog="python -m bench.results_page", description=__doc__).parse_args(argv)
    with user_errors("results_page"):
        readme = ROOT / README
        made = {ROOT / PAGE: page(), readme: with_table(readme.read_text(encoding="utf-8"))}
        for path, text in made.items():
            path.write_text(text, encoding="utf-8")
            print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
