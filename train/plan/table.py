"""`python -m train.plan.table FILE ..`: a Markdown table of files of `train.plan --json`.

It has a row per file, or with `--programs` a row per program. With `--into docs/pods.md` the table
replaces the one between the two marks there.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from train.plan.copies import ENTRY, ROUND
from train.plan.report import cycles_text, millions

COLUMNS = (
    "plan", "by", "programs", "chips", "rolling out", "training", "worst moment", "HBM", "fits",
    "slots that fit", "round", "cycles of this round, by the compiler's model", "copies in it",
    "copies outside rounds", "tok/s at accept length 1", "2", "3", "micro-batch",
    "resharding brings",
)  # fmt: skip
PROGRAM_COLUMNS = (
    "plan", "program", "cycles, by the compiler's model", "outside rounds", "temporaries",
    "HBM traffic", "collectives", "they bring", "copies", "copies outside rounds",
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
        chunk = max(chunks, key=_size)
        speeds = chunk["tokens_per_second"]
        cells.append(f"{1e3 * chunk['round_seconds']:.1f} ms ({chunk['name']})")
        copied = [_copied(chunk, place) if plan["compiler"] else "" for place in (ROUND, ENTRY)]
        cells += [_cycles(chunk), *copied]
        cells += [f"{speeds[a]:,.0f}" if a in speeds else "" for a in ("1", "2", "3")]
    else:
        cells += [""] * 7
    cells.append(f"{micro['roofline_seconds']:.2f} s" if micro and not micro["failed"] else "")
    moves = programs.get("resharding, policy")
    known = moves and moves["excess"] is not None
    cells.append(f"{_gb(moves['brought_bytes'])} of {_gb(moves['kept_bytes'])}" if known else "")
    return cells


def _size(chunk: Mapping) -> tuple:
    """Returns what sorts chunks by their batch, and then by their strategy's number of steps."""
    return int(chunk["name"].rpartition(" ")[2]), len(chunk["tokens_per_second"])


def _gb(size: float) -> str:
    return f"{size / 1e9:.2f} GB"


def _cycles(program: Mapping) -> str:
    """Returns a program's cycles by part; none if the plan has none, as older files do."""
    cycles = program.get("cycles")
    if not cycles:
        return ""
    once = program["cycles_counted_once"]
    return f"{millions(sum(cycles.values()))}: {cycles_text(cycles, once)}"


def _copied(program: Mapping, place: str) -> str:
    if "copies" not in program:
        return ""
    found = [copy for copy in program["copies"] if copy["place"] == place]
    return _gb(sum(copy["count"] * copy["bytes"] for copy in found)) if found else "none"


def program_row(name: str, program: Mapping) -> list[str]:
    """Returns the figures of one program; of a chunk, those of a round."""
    if program["failed"]:
        return [name, program["name"], f"refused: {program['failed']}"] + [""] * 7
    chunk = "round_seconds" in program
    calls, received = program.get("collectives", {}), program["received_bytes"]
    return [
        name,
        program["name"],
        _cycles(program),
        millions(program["cycles_outside"]) if chunk and "cycles_outside" in program else "",
        _gb(program["temporary_bytes"]),
        _gb(program["bytes"]),
        ", ".join(f"{count:.0f} {kind}" for kind, count in calls.items()),
        _gb(sum(received.values())),
        _copied(program, ROUND if chunk else ENTRY),
        _copied(program, ENTRY) if chunk else "",
    ]


def table(plans: Mapping[str, Mapping], programs: str | None = None) -> str:
    """Returns a table with one row per plan.

    Args:
      programs: a regular expression; if given, the rows are programs whose names match instead.
    """
    if programs is None:
        columns, found = COLUMNS, [row(name, plan) for name, plan in plans.items()]
    else:
        columns = PROGRAM_COLUMNS
        found = [
            program_row(name, program)
            for name, plan in plans.items()
            for program in plan["programs"]
            if re.search(programs, program["name"])
        ]
    lines = ["| " + " | ".join(cells) + " |" for cells in (columns, *found)]
    return "\n".join([lines[0], "|" + "---|" * len(columns), *lines[1:]])


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m train.plan.table", description=__doc__)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("--into", type=Path, metavar="FILE", help="Markdown with two marks")
    parser.add_argument(
        "--programs",
        metavar="REGEX",
        help="a row per program whose name matches, in place of one per file",
    )
    flags = parser.parse_args(argv)
    plans = {f.stem: json.loads(f.read_text(encoding="utf-8")) for f in flags.files}
    made = table(plans, flags.programs)
    if flags.into is None:
        print(made)
        return
    before, mark, rest = flags.into.read_text(encoding="utf-8").partition(MARKS[0])
    _, end, after = rest.partition(MARKS[1])
    if not (mark and end):
        parser.error(f"--into: expected {' and '.join(MARKS)} in {flags.into}, in this order")
    flags.into.write_text(f"{before}{mark}\n{made}\n{end}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
