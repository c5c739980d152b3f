"""`python -m train.plan_table FILE ..`: plans that `train.plan --json` wrote, as rows of Markdown.

The tables of docs/pods.md are made by it, so that no figure in them was typed.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

COLUMNS = (
    "plan", "by", "chips", "all the time", "worst moment", "HBM", "fits", "slots that fit", "round",
    "tok/s at 1", "tok/s at 2", "tok/s at 3", "network share of a round", "micro-batch",
)  # fmt: skip


def row(name: str, plan: dict) -> list[str]:
    """The figures of one plan; of its chunks those of the largest batch and longest strategy."""
    chunks = [p for p in plan["programs"] if "round_seconds" in p]
    micro = next((p for p in plan["programs"] if p["name"] == "policy, a micro-batch"), None)
    cells = [
        name,
        f"{plan['compiler']} compiler" if plan["compiler"] else "counting",
        f"{plan['chips']} x {plan['topology'].partition(':')[0]}",
        _gb(sum(plan["resident_bytes"].values())),
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
    return cells


def _gb(size: float) -> str:
    return f"{size / 1e9:.2f} GB"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m train.plan_table", description=__doc__)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    files = parser.parse_args(argv).files
    print("| " + " | ".join(COLUMNS) + " |")
    print("|" + "---|" * len(COLUMNS))
    for file in files:
        plan = json.loads(file.read_text(encoding="utf-8"))
        print("| " + " | ".join(row(file.stem, plan)) + " |")


if __name__ == "__main__":
    main()
