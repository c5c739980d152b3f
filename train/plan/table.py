"""`python -m train.plan.table FILE ..`: a Markdown table of files of `train.plan --json`.

With `--into docs/pods.md` the table replaces the one between the two marks there.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

COLUMNS = (
    "plan", "by", "programs", "chips", "rolling out", "training", "worst moment", "HBM", "fits",
    "slots that fit",
)  # fmt: skip
MARKS = "<!-- table of train.plan.table -->", "<!-- end of table -->"


def row(name: str, plan: Mapping) -> list[str]:
    """Returns the figures of one plan."""
    count = len(plan["programs"])
    return [
        name,
        f"{plan['compiler']} compiler" if plan["compiler"] else "counting",
        f"{count} of {count + plan['left_out']}",
        f"{plan['chips']} x {plan['topology'].partition(':')[0]}",
        *(_gb(plan["held_bytes"][part]) for part in ("roll out", "train")),
        f"{_gb(plan['most_bytes'])} ({plan['worst']})",
        _gb(plan["hbm_bytes"]),
        "yes" if plan["fits"] else "NO",
        f"{plan['replicas']} x {plan['largest_batch']}",
    ]


def _gb(size: float) -> str:
    return f"{size / 1e9:.2f} GB"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m train.plan.table", description=__doc__)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("--into", type=Path, metavar="FILE", help="Markdown with two marks")
    flags = parser.parse_args(argv)
    rows = [row(f.stem, json.loads(f.read_text(encoding="utf-8"))) for f in flags.files]
    table = ["| " + " | ".join(cells) + " |" for cells in (COLUMNS, *rows)]
    table.insert(1, "|" + "---|" * len(COLUMNS))
    if flags.into is None:
        print("\n".join(table))
        return
    before, mark, rest = flags.into.read_text(encoding="utf-8").partition(MARKS[0])
    _, end, after = rest.partition(MARKS[1])
    if not (mark and end):
        parser.error(f"--into: expected {' and '.join(MARKS)} in {flags.into}, in this order")
    text = "\n".join([mark, *table, end])
    flags.into.write_text(f"{before}{text}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
