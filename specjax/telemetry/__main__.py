"""Prints why drafts were rejected: `python -m specjax.telemetry RUN.jsonl`.

`llm.telemetry.write_jsonl` writes the file.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from specjax.telemetry.collector import CAUSES, ENTROPY_EDGES, Summary, read_jsonl


def tables_of(summary: Summary) -> list[Table]:
    """Returns tables of acceptance per depth, of causes of rejections, and of single figures."""
    depths = Table("depth", "attempts", "accepted", "share", title="Acceptance per depth")
    for depth, share in enumerate(summary.acceptance_per_depth, 1):
        attempts, accepts = summary.attempts[depth], summary.accepts[depth]
        depths.add_row(str(depth), f"{attempts:,}", f"{accepts:,}", f"{share:.1%}")
    causes = Table("cause", "share", "meaning", title="Why drafts were rejected")
    for name, meaning in CAUSES.items():
        causes.add_row(name, f"{summary.share(name):.1%}", meaning)
    figures = Table("figure", "value", title="Rejections")
    figures.add_row("rounds", f"{summary.rounds:,}")
    figures.add_row("rejections", f"{summary.rejections:,}")
    figures.add_row("mean position", f"{summary.mean_position:.1f}")
    figures.add_row("mean offset from the prompt", f"{summary.mean_offset:.1f}")
    below = 0
    for place, low in enumerate(ENTROPY_EDGES):
        below += summary.entropies[place]
        if below and below >= summary.rejections / 2:
            figures.add_row("median target entropy", f"{low:g} nats or slightly more")
            break
    tables = [depths, causes, figures]
    for table in tables:
        table.title_justify = "left"
        for column in table.columns[1:]:
            column.justify = "left" if column.header == "meaning" else "right"
    return tables


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(prog="python -m specjax.telemetry", description=__doc__)
    parser.add_argument("run", help="JSON lines as Collector.write_jsonl writes them")
    run, console = Path(parser.parse_args(argv).run), Console(highlight=False)
    try:
        summary = read_jsonl(run).summary()
        if not summary.rounds:
            raise ValueError(f"{run}: no speculative round was recorded; was a draft configured?")
        for table in tables_of(summary):
            console.print(table)
        if summary.dropped:
            console.print(
                f"[bold red]{summary.dropped:,} of {summary.rejections:,} records were dropped[/] "
                "(the figures above include them): write and clear the collector more often."
            )
    except (OSError, ValueError) as error:
        sys.exit(f"specjax.telemetry: {error}")


if __name__ == "__main__":
    main()
