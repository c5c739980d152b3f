"""`python -m bench.gpu.ahead WHAT`: what rounds launch and read on a GPU that need not be there.

    rounds    compile chunks; kernels and bytes by part, CUDA graphs, copies, temporaries, seconds
    read      the same of texts that `rounds --text` has kept
    updates   compile the policy's update; temporaries, largest arrays, kernels, operations
    table     Markdown tables of result files, one beside another

`WHAT --help` describes one. `rounds` and `updates` need XLA's compiler for GPUs, from jax's CUDA
plugin, and no GPU. `make gpu-check ARGS=--python` makes an environment that has it, and prints its
Python:

    JAX_PLATFORMS=cpu JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 PYTHON -m bench.gpu.ahead rounds 8B:off:8
"""

from __future__ import annotations

from collections.abc import Sequence

from bench.command import run_subcommand

FUNCTIONS = {
    "rounds": "bench.gpu.ahead.rounds:main",
    "read": "bench.gpu.ahead.rounds:read",
    "updates": "bench.gpu.ahead.updates:main",
    "table": "bench.gpu.ahead.table:main",
}


def main(argv: Sequence[str] | None = None) -> int | None:
    return run_subcommand("gpu.ahead", __doc__, FUNCTIONS, argv)


if __name__ == "__main__":
    raise SystemExit(main())
