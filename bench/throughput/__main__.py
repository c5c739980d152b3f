"""`python -m bench.throughput WHAT`: tokens per second of generation, and what they depend on.

    decode      speculative over plain decoding through `LLM`
    invariant   what `SpecConfig(invariant=True)` costs, and which differences it removes
    kernels     specjax's own kernels for CPUs against XLA's
    identity    are coupled tokens those of plain decoding? counted over 100,000 tokens
    peers       the same policy by transformers and by a plain jitted sampler
    workloads   four workloads of prompts and options; bandwidth and kernels of their rounds
    host        how long the device waits for the host

`WHAT --help` describes one. Each writes a result file below bench/results, which docs/results.md
is made from.
"""

from __future__ import annotations

from collections.abc import Sequence

from bench.command import run_subcommand

FUNCTIONS = {
    "decode": "bench.throughput.decode:decode",
    "invariant": "bench.throughput.decode:invariant",
    "kernels": "bench.throughput.decode:kernels",
    "identity": "bench.throughput.identity:main",
    "peers": "bench.throughput.peers:main",
    "workloads": "bench.throughput.workloads:main",
    "host": "bench.throughput.host:main",
}


def main(argv: Sequence[str] | None = None) -> int | None:
    return run_subcommand("throughput", __doc__, FUNCTIONS, argv)


if __name__ == "__main__":
    raise SystemExit(main())
