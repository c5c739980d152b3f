"""`python -m bench.control WHAT`: do controllers choose well, and what would they gain elsewhere?

    sweep     tokens per second of every strategy and every controller at each size of the batch,
              and goodput control with a useless head
    swap      the head is swapped for a random one in mid-run and back: rounds until a controller
              is within 5% of the best strategy again, and seconds lost
    plot      draws a result file of `sweep` or `swap` again
    costs     tables of step costs: measured on this machine, or a roofline model of other chips
    predict   recorded acceptance with the costs of such a table
    replay    a recorded long-tailed rollout, with the real controller, with the costs of one

`WHAT --help` describes one.
"""

from __future__ import annotations

from collections.abc import Sequence

from bench.command import run_subcommand

FUNCTIONS = {
    "sweep": "bench.control.sweep:main",
    "swap": "bench.control.swap:main",
    "plot": "bench.control.pictures:main",
    "costs": "bench.control.costs:main",
    "predict": "bench.control.predict:main",
    "replay": "bench.control.replay:main",
}


def main(argv: Sequence[str] | None = None) -> None:
    run_subcommand("control", __doc__, FUNCTIONS, argv)


if __name__ == "__main__":
    main()
