"""`python -m bench.rollout WHAT`: rollouts of many samples, and what drafts are accepted in them.

    longtail     a rollout whose longest samples decide its time: the controller, static
                 strategies and plain decoding
    acceptance   accept length of every acceptance rule, tree and draft source

`WHAT --help` describes one.
"""

from __future__ import annotations

from collections.abc import Sequence

from bench.command import run_subcommand

FUNCTIONS = {
    "longtail": "bench.rollout.longtail:main",
    "acceptance": "bench.rollout.acceptance:main",
}


def main(argv: Sequence[str] | None = None) -> None:
    run_subcommand("rollout", __doc__, FUNCTIONS, argv)


if __name__ == "__main__":
    main()
