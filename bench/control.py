"""Do controllers choose well? At each batch size, and when the draft head changes in mid-run.

`python -m bench.control sweep --model assets/sums` measures tokens per second of every compiled
strategy, `off` among them, and of every controller, at each size of the batch; then, with a head
that was drawn at random, goodput control against an engine that cannot speculate. The oracle is
the strategy that is best at that batch size. Measurements are short and many, for a machine that
others use changes its speed for seconds at a time, and what is compared has to lie close together.

`python -m bench.control swap --model assets/sums` swaps the head for a random one in mid-run and
back, and writes down what each controller chose, how many rounds it took until it was within 5% of
the best strategy again, and how many seconds it lost.

`python -m bench.control plot FILE` draws a result file of either again.

All arms of a command run on one engine and differ in what is chosen alone. Samples end where the
policy ends them, and others take their slots: the number that run stays near the batch size.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from bench import control_plot, control_swap, control_sweep
from bench.command import add_prompt_arguments, add_timing_arguments, bench_parser, user_errors
from bench.control_run import add_run_arguments
from specjax.command_line import ArgumentParser
from specjax.control.base import canonical

BATCHES = (1, 2, 4, 8, 16, 32, 64)
REPEATS = 28


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Arguments of one of the three commands, as `args.run` takes them."""
    top = ArgumentParser(
        prog="python -m bench.control",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = top.add_subparsers(required=True, metavar="sweep|swap|plot")
    sweep = _command(commands, "sweep", control_sweep.sweep, "control_<model>")
    add_timing_arguments(sweep, BATCHES)
    sweep.set_defaults(repeats=REPEATS)
    sweep.add_argument("--no_useless_head", action="store_true", help="leave the random head out")
    swap = _command(commands, "swap", control_swap.swap, "control_swap_<model>")
    add = swap.add_argument
    add("--batch", type=int, default=2, help="samples that run at once")
    add("--rounds", type=int, default=400, help="of each phase: good head, bad head, good head")
    add("--runs", type=int, default=7, help="of each controller")
    add("--repeats", type=int, default=REPEATS, help="measurements of each strategy with each head")
    add("--static", default="4_1_5", help="strategy of the static controller")
    add("--controllers", nargs="+", default=list(control_swap.CONTROLLERS),
        choices=control_swap.CONTROLLERS)  # fmt: skip
    add("--variants", nargs="+", default=list(control_swap.VARIANTS),
        choices=control_swap.VARIANTS, help="is the controller told of new weights?")  # fmt: skip
    plot = commands.add_parser("plot")
    plot.add_argument("file", help="result file of `sweep` or `swap`")
    plot.set_defaults(run=lambda args: args.file)
    args = top.parse_args(argv)
    _check(top, args)
    return args


def _command(commands, name: str, run, out: str) -> argparse.ArgumentParser:
    parent = bench_parser(f"control {name}", run.__doc__, out)
    parser = commands.add_parser(
        name, parents=[parent], conflict_handler="resolve", description=run.__doc__
    )
    parser.set_defaults(run=run)
    add_prompt_arguments(parser)
    add_run_arguments(parser)
    add = parser.add_argument
    add("--seconds", type=float, default=0.5, help="of a measurement, if it is plain decoding's")
    add("--tokens_per_slot", type=int, default=48, help="of a measurement, at least")
    return parser


def _check(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Refuses what would show only after minutes."""
    if "static" in args:
        args.static = canonical(args.static)
        if args.static not in (canonical("off"), *args.strategies):
            parser.error(f"--static {args.static} is none of --strategies {args.strategies}")
    sizes = getattr(args, "batches", [getattr(args, "batch", 1)])
    if min(sizes) < 1:
        parser.error(f"batch sizes must be at least 1, got {min(sizes)}")
    for name in ("rounds", "runs", "repeats", "tokens_per_slot", "samples_per_prompt"):
        if getattr(args, name, 1) < 1:
            parser.error(f"--{name} must be at least 1, got {getattr(args, name)}")


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    with user_errors("control"):
        path = args.run(args)
        print(path)
        print(control_plot.draw(path))


if __name__ == "__main__":
    main()
