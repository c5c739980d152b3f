"""`python -m bench.gpu --minutes 14`: measures on a Hopper GPU what is not measured yet.

The parts (`--status` lists them, the most important first) take at most three minutes each, one of
them eight, compilation included. Each runs in a process of its own, which is killed when its time
is over, and writes one result file per card, bench/results/gpu/<part>.<card>.json. A part that
failed, hung or ran out of memory is recorded with the reason and skipped from then on (--again runs
it once more); one whose time was too short runs again, after those that have not run. If a call is
interrupted, the next one keeps what was measured and runs the interrupted part once more.

    python -m bench.gpu --status               what is measured, on which card, against which target
    python -m bench.gpu --dry                  compile every program for GPUs, on a machine without
                                               one (`make gpu-check` has the environment for it)
    python -m bench.gpu --small                run every part on a CPU: sizes are tiny, numbers mean
                                               nothing, and go to runs/gpu-small
    python -m bench.gpu --minutes 14           measure, on a GPU machine
    python -m bench.gpu --again own_model --model DIR --rows FILE
                                               train a head for a real model, and the model by RL
    python -m bench.gpu --pack FILE            put all results into one file, to bring them back
    python -m bench.gpu --merge FILE           add the records of such files, see docs/gpu.md
    python -m bench.gpu --plot                 a picture per card, bench/results/gpu/<card>.png

Compiled programs and what was tuned for them are kept in .cache/gpu/<card>. The exit status is 1 if
a part failed in this call (with --dry: if a program does not compile, or does not fit a card; 75 if
there were not minutes enough for all of them).
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.command import bench_parser, user_errors
from bench.gpu import dry, queue, records, show
from bench.gpu.job import MODEL, ROWS
from bench.gpu.program import CARDS
from bench.gpu.table import PARTS, named
from bench.record import RESULTS

SMALL_OUT = "runs/gpu-small"
MINUTES, SMALL_MINUTES = 14.0, 60.0


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = bench_parser("gpu", __doc__, "gpu/<part>.<card>")
    add = parser.add_argument
    add("--minutes", type=float, help=f"for the call; default: {MINUTES:g}, with --dry no limit")
    add("--parts", nargs="+", metavar="PART", default=[], help="not all of them")
    add("--again", nargs="+", metavar="PART", default=[], help="these although they were run")
    what = "of a Hugging Face model, for the parts own_model/..; so is --rows, a file for data.path"
    add("--model", metavar="DIR", help=what)
    add("--rows", metavar="FILE", help="rows with prompts and answers, see --model")
    add("--small", action="store_true", help="tiny sizes, on a CPU")
    add("--cards", nargs="+", default=list(CARDS), choices=CARDS, help="that --dry compiles for")
    does = parser.add_mutually_exclusive_group()
    act = does.add_argument
    act("--status", action="store_true", help="print what is measured, and measure nothing")
    act("--dry", action="store_true", help="compile ahead of time, and measure nothing")
    act("--pack", metavar="FILE", type=Path, help="write all results into one file")
    act(
        "--merge", metavar="FILE", type=Path, nargs="+", help="add the records of what --pack wrote"
    )
    act("--plot", action="store_true", help="draw what is measured of attention and of a round")
    args = parser.parse_args(argv)
    if args.out is None:
        args.out = SMALL_OUT if args.small else str(RESULTS)
    if args.minutes is None and not args.dry:
        args.minutes = SMALL_MINUTES if args.small else MINUTES
    return args


def run(args: argparse.Namespace) -> int:
    """Does what was asked for, and returns the exit status."""
    for name, value in ((MODEL, args.model), (ROWS, args.rows)):
        if value is not None:
            os.environ[name] = str(Path(value).absolute())  # the parts are other processes
    again = [part.name for part in named(args.again)]
    parts = named([*args.parts, *again]) if args.parts or again else list(PARTS)
    if args.status:
        show.tables(args.out)
    elif args.pack:
        print(f"{records.pack(args.out, args.pack)} records in {args.pack}")
    elif args.merge:
        print(*records.merge(args.out, args.merge), sep="\n")
    elif args.plot:
        print(*show.draw(args.out) or ["nothing to draw"], sep="\n")
    elif args.dry:
        return dry.run(parts, args.cards, args.small, args.minutes)
    else:
        call = queue.Call(args.out, args.minutes, parts, again, args.small, args.seed)
        found = queue.run(call)
        show.tables(args.out)
        return found
    return 0


def main(argv: Sequence[str] | None = None) -> None:
    with user_errors("gpu"):
        sys.exit(run(parse(argv)))


if __name__ == "__main__":
    main()
