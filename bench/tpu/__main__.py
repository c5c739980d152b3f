"""`python -m bench.tpu WHAT`: the cost of a round, as the TPU compiler estimates it.

    rounds    compile chunks of Qwen3-8B's widths; cycles by part, temporaries, copies, collectives
    read      the same of texts that `rounds --text` has kept
    table     Markdown tables of result files, one beside another

`WHAT --help` describes one. `rounds` needs the TPU compiler, libtpu, which `make tpu-check` puts
into .venv-plan: run it as `.venv-plan/bin/python -m bench.tpu rounds off:8`.
"""

from __future__ import annotations

from collections.abc import Sequence

from bench.command import run_subcommand

FUNCTIONS = {
    "rounds": "bench.tpu.rounds:main",
    "read": "bench.tpu.rounds:read",
    "table": "bench.tpu.table:main",
}


def main(argv: Sequence[str] | None = None) -> int | None:
    return run_subcommand("tpu", __doc__, FUNCTIONS, argv)


if __name__ == "__main__":
    raise SystemExit(main())
