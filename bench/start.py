"""`python -m bench.start`: how long does an engine compile before its first token?

Every program of a controller's strategies is compiled, by two ways in turns, each in a process of
its own, without a cache of compiled programs:

    alone      one program after the other, each when it is traced
    together   as many at once as there are cores, while further ones are traced

The ratio of their wall times is of this machine, with its cores and whoever else uses them: the
result has the load at its end, and means little where that is more than the cores. Seconds of
processors do not depend on it: those of the compiler, and those of tracing and of running each
program once.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from bench.common import (
    bench_parser,
    figure,
    paired_ratio_interval,
    turns,
    user_errors,
    write_result,
)
from specjax import LLM, SpecConfig
from specjax.control import OFF, ControlConfig

WAYS = ("alone", "together")


def start(args: argparse.Namespace) -> dict[str, Any]:
    """Compiles in this process; returns seconds (of the wall, and of processors)."""
    jax.config.update("jax_enable_compilation_cache", False)
    spec = SpecConfig(next(name for name in args.strategies if name != OFF))
    control = ControlConfig(controller="bandit", strategies=tuple(args.strategies))
    llm = LLM(args.model, spec, max_batch=args.batch, max_len=args.max_len, control=control)
    executables, compiling = llm.engine.runner.executables, 0.0

    def build(key, lower, donate):
        nonlocal compiling
        lowered, before = lower(), time.process_time()
        compiled = lowered.compile()
        compiling += time.process_time() - before
        return compiled

    if args.once == "alone":  # else threads would count each other's seconds
        executables.build, executables.threads = build, 1
    began = time.process_time()
    took = llm.warm_up(on_program=lambda done, total: None)
    return {
        "cpu": time.process_time() - began,
        "compiling": compiling,
        "wall": took.seconds,
        "programs": took.programs,
        "threads": executables.threads,
    }


def figures(runs: Mapping[str, Sequence[Mapping[str, float]]]) -> dict[str, dict[str, Any]]:
    """Of runs that took turns."""
    ratio, *interval = paired_ratio_interval(
        *([run["wall"] for run in runs[way]] for way in ("together", "alone"))
    )

    def least(way: str, name: str) -> float:
        """Whatever else the machine does adds to a time."""
        return min(run[name] for run in runs[way])

    cpu, compiling = least("alone", "cpu"), least("alone", "compiling")
    result = {
        "programs": figure(runs["alone"][0]["programs"], "programs"),
        "together_to_alone": figure(ratio, "ratio of wall times", interval),
        "cpu_alone": figure(cpu, "seconds of processors"),
        "cpu_together": figure(least("together", "cpu"), "seconds of processors"),
        "cpu_compiling": figure(compiling, "seconds of processors"),
        "cpu_tracing_and_running": figure(cpu - compiling, "seconds of processors"),
    }
    for way in WAYS:
        result[f"wall_{way}"] = figure(least(way, "wall"), "seconds")
    return result


def run(args: argparse.Namespace) -> Path:
    """Starts processes in turns, and writes the result file."""
    runs: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    for _, way in turns(WAYS, args.repeats):
        command = [sys.executable, "-m", "bench.start", "--once", way, "--model", args.model]
        command += ["--batch", str(args.batch), "--max_len", str(args.max_len)]
        command += ["--strategies", *args.strategies]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        runs[way].append(json.loads(done.stdout.splitlines()[-1]))
        seconds = {name: round(value, 1) for name, value in runs[way][-1].items()}
        print(way, seconds, f"load {os.getloadavg()[0]:.1f}", flush=True)
    settings = {name: value for name, value in vars(args).items() if name != "once"}
    path = write_result(f"start_{Path(args.model).name}", settings, figures(runs), args.out)
    print(path)
    return path


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = bench_parser("start", __doc__, "start_<model>")
    add = parser.add_argument
    add("--model", default="assets/sums", help="Hugging Face directory of the policy and its head")
    add("--strategies", nargs="+", default=[OFF, "1_1_2", "2_1_3", "4_1_5", "8_4_32"])
    add("--batch", type=int, default=8, help="slots; each strategy has a program per power of two")
    add("--max_len", type=int, default=256, help="prompt and response tokens at most")
    add("--repeats", type=int, default=3, help="pairs of starts")
    add("--once", choices=WAYS, help="start once in this process, and print what it took")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    with user_errors("start"):
        args = parse(argv)
        if args.once:
            print(json.dumps(start(args)))
        else:
            run(args)


if __name__ == "__main__":
    main()
