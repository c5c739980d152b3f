"""`python -m train.plan.table FILE ..`: a Markdown table of files of `train.plan --json`.

With `--into docs/pods.md` the table replaces the one between the two marks there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from specjax.command_line import ArgumentParser

COLUMNS = (
    "plan", "by", "programs", "chips", "rolling out", "training", "worst moment", "HBM", "fits",
    "slots that fit", "round", "tok/s at accept length 1", "2", "3", "micro-batch",
    "resharding brings",
)  # fmt: skip
MARKS = "<!-- table of train.plan.table -->", "<!-- end of table -->"


def row(name: str, plan: Mapping) -> list[str]:
    """Returns the figures of one plan, for the chunk of the largest batch and longest strategy."""
    programs = {p["name"]: p for p in plan["programs"]}
    chunks = [p for p in plan["programs"] if "round_seconds" in p]
    micro = programs.get("policy, a micro-batch")
    cells = [
        name,
        f"{plan['compiler']} compiler" if plan["compiler"] else "counting",
        f"{len(programs)} of {len(programs) + plan['left_out']}",
        f"{plan['chips']} x {plan['topology'].partition(':')[0]}",
        *(_gb(plan["held_bytes"][part]) for part in ("roll out", "train")),
        f"{_gb(plan['most_bytes'])} ({plan['worst']})",
        _gb(plan["hbm_bytes"]),
        "yes" if plan["fits"] else "NO",
        f"{plan['replicas']} x {plan['largest_batch']}",
    ]
    if chunks:
        chunk = chunks[-1]
        speeds = chunk["tokens_per_second"]
        cells.append(f"{1e3 * chunk['round_seconds']:.1f} ms ({chunk['name']})")
        cells += [f"{speeds[a]:,.0f}" if a in speeds else "" for a in ("1", "2", "3")]
    else:
        cells += [""] * 4
    cells.append(f"{micro['roofline_seconds']:.2f} s" if micro and not micro["failed"] else "")
    moves = programs.get("resharding, policy")
    known = moves and moves["excess"] is not None
    cells.append(f"{_gb(moves['brought_bytes'])} of {_gb(moves['kept_bytes'])}" if known else "")
    return cells


def _gb(size: float) -> str:
    return f"{size / 1e9:.2f} GB"


def table(plans: Mapping[str, Mapping]) -> str:
    """Returns a table with one row per plan."""
    rows = [list(COLUMNS), *(row(name, plan) for name, plan in plans.items())]
    lines = ["| " + " | ".join(cells) + " |" for cells in rows]
    return "\n".join([lines[0], "|" + "---|" * len(COLUMNS), *lines[1:]])


def main(argv: Sequence[str] | None = None) -> None:
    parser = ArgumentParser(prog="python -m train.plan.table", description=__doc__)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("--into", type=Path, metavar="FILE", help="Markdown with two marks")
    flags = parser.parse_args(argv)
    plans = {f.stem: json.loads(f.read_text(encoding="utf-8")) for f in flags.files}
    if flags.into is None:
        print(table(plans))
        return
    before, mark, rest = flags.into.read_text(encoding="utf-8").partition(MARKS[0])
    _, end, after = rest.partition(MARKS[1])
    if not (mark and end):
        parser.error(f"--into: expected {' and '.join(MARKS)} in {flags.into}, in this order")
    flags.into.write_text(f"{before}{mark}\n{table(plans)}\n{end}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
