"""`python -m bench.draft WHAT`: draft heads and how they are trained.

    losses   accept length against training tokens for every loss, and acceptance against the
             policy's entropy

`WHAT --help` lists the settings. Each writes a result file below bench/results.
"""

from __future__ import annotations

from collections.abc import Sequence

from bench.command import run_subcommand

FUNCTIONS = {"losses": "bench.draft.losses:main"}


def main(argv: Sequence[str] | None = None) -> None:
    run_subcommand("draft", __doc__, FUNCTIONS, argv)


if __name__ == "__main__":
    main()
