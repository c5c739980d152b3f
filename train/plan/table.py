"""`python -m train.plan.table FILE ..`: plans that `train.plan --json` wrote, as Markdown tables.

Three of them: a row per plan; what the compiler said of chunks, a row per plan and size of a batch,
a column per strategy; and what it said of everything else, a row per program, a column per plan.
With `--into docs/pods.md` they take the place of those between its two marks, so that no figure
there was typed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from specjax.command_line import ArgumentParser

COLUMNS = (
    "plan", "by", "programs", "chips", "weights", "optimizers", "cache", "while it rolls out",
    "while it trains", "worst moment", "HBM", "fits", "slots that fit", "round", "tok/s at 1",
    "tok/s at 2", "tok/s at 3", "network share of a round", "micro-batch",
    "resharding brings",
)  # fmt: skip
MARKS = "<!-- tables of train.plan.table -->", "<!-- end of tables -->"
_ALIKE = (
    "config", "versions", "topology", "compiler", "resident_bytes", "hbm_bytes", "replicas",
    "context", "settings",
)  # fmt: skip


def differing(one: dict, other: dict) -> list[str]:
    """What keeps two files from being of one plan."""
    return [key for key in _ALIKE if one.get(key) != other.get(key)]


def row(name: str, plan: dict) -> list[str]:
    """The figures of one plan; of its chunks those of the largest batch and longest strategy."""
    chunks = [p for p in plan["programs"] if "round_seconds" in p]
    micro = next((p for p in plan["programs"] if p["name"] == "policy, a micro-batch"), None)
    cells = [
        name,
        _by(plan),
        f"{len(plan['programs'])} of {len(plan['programs']) + plan['left_out']}",
        f"{plan['chips']} x {plan['topology'].partition(':')[0]}",
        *(_gb(_held(plan, kinds)) for kinds in (_WEIGHTS, _OPTIMIZERS, ("cache",))),
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
        share = f"{chunk['network_seconds'] / chunk['round_seconds']:.0%}"
        cells.append(share if plan["compiler"] else "unknown")
    else:
        cells += [""] * 5
    cells.append(f"{micro['roofline_seconds']:.2f} s" if micro and not micro["failed"] else "")
    moves = next((p for p in plan["programs"] if p["name"] == "resharding, policy"), None)
    known = moves and moves["excess"] is not None
    cells.append(f"{_gb(moves['brought_bytes'])} of {_gb(moves['kept_bytes'])}" if known else "")
    return cells


def chunk_table(plans: Mapping[str, dict]) -> list[list[str]]:
    """Temporaries, and the roofline of a round, of each chunk that was compiled."""
    cells: dict[tuple[str, str], dict[str, str]] = {}
    for name, plan in plans.items():
        for program in plan["programs"]:
            if chunk := _CHUNK.fullmatch(program["name"]):
                seconds = program.get("round_seconds")
                cells.setdefault((name, chunk[2]), {})[chunk[1]] = _cell(program, seconds)
    columns = list(dict.fromkeys(strategy for row in cells.values() for strategy in row))
    rows = [[*key, *(row.get(strategy, "") for strategy in columns)] for key, row in cells.items()]
    return [["plan", "slots", *columns], *rows]


def program_table(plans: Mapping[str, dict]) -> list[list[str]]:
    """Temporaries, and the roofline, of each program that was compiled, but for chunks."""
    cells: dict[str, dict[str, str]] = {}
    for name, plan in plans.items():
        for program in plan["programs"]:
            if not _CHUNK.fullmatch(program["name"]):
                cell = _cell(program, program["roofline_seconds"])
                cells.setdefault(program["name"], {})[name] = cell
    rows = [[program, *(row.get(name, "") for name in plans)] for program, row in cells.items()]
    return [["program", *plans], *rows]


def _cell(program: dict, seconds: float | None) -> str:
    size = _short(program["temporary_bytes"])
    if program["failed"]:
        return f"{size}, REFUSED" if program["temporary_bytes"] else "REFUSED"
    return f"{size}, {1e3 * seconds:.3g} ms"


_CHUNK = re.compile(r"chunk (\S+) x (\d+)")
_WEIGHTS = ("policy parameters", "reference policy", "draft", "parameters to roll out")
_OPTIMIZERS = ("policy optimizer", "draft optimizer")


def _held(plan: dict, kinds: Sequence[str]) -> float:
    return sum(plan["resident_bytes"].get(kind, 0.0) for kind in kinds)


def _by(plan: dict) -> str:
    return f"{plan['compiler']} compiler" if plan["compiler"] else "counting"


def _gb(size: float) -> str:
    return f"{size / 1e9:.2f} GB"


def _short(size: float) -> str:
    return f"{size / 1e9:.2f} GB" if size >= 1e8 else f"{size / 1e6:.3g} MB"


def tables(plans: Mapping[str, dict]) -> str:
    """All three, a blank line between two of them.

    Args:
      plans: by name. Of those that nobody compiled there is only the row of the first table.
    """
    compiled = {name: plan for name, plan in plans.items() if plan["compiler"]}
    first = [list(COLUMNS), *(row(name, plan) for name, plan in plans.items())]
    others = [chunk_table(compiled), program_table(compiled)] if compiled else []
    return "\n\n".join(_markdown(table) for table in (first, *others))


def _markdown(table: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(cells) + " |" for cells in table]
    return "\n".join([lines[0], "|" + "---|" * len(table[0]), *lines[1:]])


def main(argv: Sequence[str] | None = None) -> None:
    parser = ArgumentParser(prog="python -m train.plan.table", description=__doc__)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("--into", type=Path, metavar="FILE", help="Markdown with two marks")
    flags = parser.parse_args(argv)
    plans = {f.stem: json.loads(f.read_text(encoding="utf-8")) for f in flags.files}
    if flags.into is None:
        print(tables(plans))
        return
    before, mark, rest = flags.into.read_text(encoding="utf-8").partition(MARKS[0])
    _, end, after = rest.partition(MARKS[1])
    if not (mark and end):
        parser.error(f"--into: expected {' and '.join(MARKS)} in {flags.into}, in this order")
    text = f"{before}{mark}\n{tables(plans)}\n{end}{after}"
    flags.into.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
