"""`python -m train.plan_table FILE ..`: plans that `train.plan --json` wrote, as rows of Markdown.

With `--programs` a row for each program. Compilers take minutes for a program, so a plan may lie in
several files that `--only` made: NAME.json, NAME.micro.json and so on are one plan, NAME. The
tables of docs/pods.md are made by it, so that no figure in them was typed.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

COLUMNS = (
    "plan", "by", "chips", "weights", "optimizers", "cache", "while it rolls out",
    "while it trains", "worst moment", "HBM", "fits", "slots that fit", "round", "tok/s at 1",
    "tok/s at 2", "tok/s at 3", "network share of a round", "micro-batch",
    "resharding brings",
)  # fmt: skip
_ALIKE = ("config", "topology", "compiler", "resident_bytes", "hbm_bytes", "replicas", "context")


def merged(plans: Sequence[dict]) -> dict:
    """Plans of one run, of which each has other programs, as one; the first to have one counts.

    Raises:
      ValueError: they are not plans of one run.
    """
    first, programs = plans[0], {}
    for plan in plans:
        differing = [key for key in _ALIKE if plan[key] != first[key]]
        if differing:
            raise ValueError(
                f"expected plans of one run, got two values of {', '.join(differing)}; make both "
                "with the same settings, by the same version"
            )
        for program in plan["programs"]:
            programs.setdefault(program["name"], program)
    worst = max(programs.values(), key=lambda program: program["peak_bytes"])
    most = max(worst["peak_bytes"], *first["held_bytes"].values())
    return first | {
        "programs": list(programs.values()),
        "worst": worst["name"],
        "most_bytes": most,
        "fits": most <= first["hbm_bytes"],
        "largest_batch": min(plan["largest_batch"] for plan in plans),
        "largest_cache": min(plan["largest_cache"] for plan in plans),
    }


def row(name: str, plan: dict) -> list[str]:
    """The figures of one plan; of its chunks those of the largest batch and longest strategy."""
    chunks = [p for p in plan["programs"] if "round_seconds" in p]
    micro = next((p for p in plan["programs"] if p["name"] == "policy, a micro-batch"), None)
    cells = [
        name,
        _by(plan),
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


PROGRAM_COLUMNS = (
    "plan", "program", "by", "given", "temporaries", "peak", "TFLOP", "HBM traffic", "received",
    "roofline", "bound by",
)  # fmt: skip


def program_rows(name: str, plan: dict) -> list[list[str]]:
    """The figures of each program of a plan, per device."""
    rows = []
    for program in plan["programs"]:
        given = sum(size for kind, size in program["given_bytes"].items() if kind != "results")
        cells = [
            name,
            program["name"],
            _by(plan),
            _short(given),
            _short(program["temporary_bytes"]),
            _gb(program["peak_bytes"]),
            f"{program['flops'] / 1e12:.3g}",
            _short(program["bytes"]),
            _short(sum(program["received_bytes"].values())) if plan["compiler"] else "unknown",
            f"{1e3 * program['roofline_seconds']:.3g} ms",
            program["bound"],
        ]
        rows.append([*cells[:3], "REFUSED", *cells[4:]] if program["failed"] else cells)
    return rows


_WEIGHTS = ("policy parameters", "reference policy", "draft", "parameters to roll out")
_OPTIMIZERS = ("policy optimizer", "draft optimizer")


def _held(plan: dict, kinds: Sequence[str]) -> float:
    return sum(plan["resident_bytes"].get(kind, 0.0) for kind in kinds)


def _by(plan: dict) -> str:
    return f"{plan['compiler']} compiler" if plan["compiler"] else "counting"


def _gb(size: float) -> str:
    return f"{size / 1e9:.2f} GB"


def _short(size: float) -> str:
    return f"{size / 1e9:.3g} GB"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m train.plan_table", description=__doc__)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("--programs", action="store_true", help="a row for each program")
    flags = parser.parse_args(argv)
    columns = PROGRAM_COLUMNS if flags.programs else COLUMNS
    print("| " + " | ".join(columns) + " |")
    print("|" + "---|" * len(columns))
    parts: dict[str, list[dict]] = {}
    for file in flags.files:
        plan = json.loads(file.read_text(encoding="utf-8"))
        parts.setdefault(file.name.partition(".")[0], []).append(plan)
    for name, plans in parts.items():
        plan = merged(plans)
        for cells in program_rows(name, plan) if flags.programs else [row(name, plan)]:
            print("| " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
