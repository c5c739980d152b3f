"""`python -m bench.gpu`: everything about one Hopper GPU, in one command of at most 20 minutes.

    correctness    every attention kernel of the device against the float32 reference
    bandwidth      tree attention's bytes per second, as a share of a copy's that takes turns with
                   it: T 1, 8, 16, 32, 64 rows x prefix 1k, 8k, 32k x batch 1, 8, 64
    round          one round of an 8B model, taken apart; its kernels; 16 rows against one
    protocol       the workloads of `bench.protocol` at full size, on the same model
    transformers   plain decoding beside transformers, compiled and with a static cache
    train.rl       half a minute of `train.rl` with configs/sums.yaml

The model has the shapes of Qwen3-8B and random weights, drawn on the device. The kernel that is
no default has parts of its own (`.../experimental`).

Every part is a process with a share of --minutes; what it does not use goes to the parts after it.
A part that fails, crashes or hangs is recorded with what it had measured, the others go on, and the
exit status is 1. What there was no time for is `left out` in the result, its part `done in part`;
it can be had with `--parts` or more --minutes. Compiled programs are kept in .cache/jax, so a
second run gets further. Targets that are missed are reported as missed.

--small tries it all out on a CPU, in about a minute: sizes are tiny, and its numbers mean nothing.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import jax
from rich.console import Console
from rich.table import Table

from bench import gpu_kernels, gpu_plot, gpu_rl, gpu_round, gpu_targets, gpu_torch
from bench.common import bench_parser, figure, user_errors, write_result
from bench.gpu_job import Job, record_path

# Of each part, in order: its share of the time.
SHARES = {
    "correctness": 2.0,
    "correctness/experimental": 1.5,
    "bandwidth": 2.5,
    "bandwidth/experimental": 2.5,
    "round": 2.5,
    "protocol": 4.0,
    "transformers": 2.5,
    "train.rl": 2.5,
}
LAST = 15.0  # seconds that are kept for the result
# What a CPU can share a process for: starting one takes longer than the part.
TOGETHER = ("correctness", "correctness/experimental", "bandwidth", "bandwidth/experimental")
TOGETHER += ("round", "protocol", "transformers")


def groups(parts: Sequence[str], small: bool) -> list[list[str]]:
    """Parts by process, in order; `train.rl` is one of its own anyhow."""
    if not small:
        return [[part] for part in parts]
    first = [part for part in parts if part in TOGETHER]
    return [group for group in (first, [p for p in parts if p not in TOGETHER]) if group]


def environment(small: bool) -> dict[str, str]:
    """Of the parts' processes."""
    env = dict(os.environ)
    env.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(".cache/jax").absolute()))
    if small:
        return env | {"JAX_PLATFORMS": "cpu"}
    if env.get("JAX_PLATFORMS"):  # the oracle is computed on the host
        env["JAX_PLATFORMS"] = ",".join(dict.fromkeys([*env["JAX_PLATFORMS"].split(","), "cpu"]))
    env.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92")
    return env


def child(parts: Mapping[str, float], directory: Path, args: argparse.Namespace, env) -> None:
    """Runs parts in a process of their own, which is killed when their time is over."""
    task = {"parts": parts, "directory": str(directory), "small": args.small, "seed": args.seed}
    task["attention"] = args.attention
    if "transformers" in parts:  # torch wants memory as well
        env = env | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    command = [sys.executable, "-m", "bench.gpu_child", json.dumps(task)]
    process = subprocess.Popen(command, env=env, start_new_session=True)
    reason = None
    try:
        code = process.wait(sum(parts.values()))
        reason = f"its process ended with exit status {code}" if code else None
    except subprocess.TimeoutExpired:
        reason = f"it was ended after its {sum(parts.values()):.0f} s"
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    for name in parts:
        close(directory, name, reason or "it left no record")


def close(directory: Path, name: str, reason: str) -> None:
    """Makes the record of a part that did not come to its end that of a failed one."""
    path = record_path(directory, name)
    record = {"seconds": 0.0, "figures": {}, "failures": [], "outcome": "running"}
    if path.exists():
        record = json.loads(path.read_text(encoding="utf-8"))
    if record["outcome"] == "running":
        record |= {"outcome": "failed", "failures": [*record["failures"], reason]}
        path.write_text(json.dumps(record), encoding="utf-8")
        print(f"FAILED {name}: {reason}", flush=True)


def run_parts(directory: Path, args: argparse.Namespace, env: dict[str, str]) -> dict[str, dict]:
    """The records of all parts, whose processes have `env`."""
    end = time.monotonic() + 60 * args.minutes - LAST
    waiting = groups(args.parts, args.small)
    while waiting:
        group = waiting.pop(0)
        shares = sum(SHARES[part] for part in group)
        later = sum(SHARES[part] for parts in waiting for part in parts)
        whole = max(end - time.monotonic(), 1.0) * shares / (shares + later)
        seconds = {part: whole * SHARES[part] / shares for part in group}
        print(f"--- {', '.join(group)}: at most {whole:.0f} s", flush=True)
        if group == ["train.rl"]:
            job = Job("train.rl", directory, whole, args.small, args.seed)
            job.run(functools.partial(gpu_rl.half_a_minute, env=env))
        else:
            child(seconds, directory, args, env)
    paths = {part: record_path(directory, part) for part in args.parts}
    return {part: json.loads(path.read_text(encoding="utf-8")) for part, path in paths.items()}


def figures_of(records: Mapping[str, Mapping], long: int) -> dict[str, dict]:
    """All figures, what became of each part, and of each target."""
    result = {}
    for part, record in records.items():
        said = "; ".join(record["failures"]) or "of the part"
        result[f"part/{part}"] = figure(record["outcome"], said)
        result[f"part_seconds/{part}"] = figure(record["seconds"], "s")
    for record in records.values():
        result |= record["figures"]
    return result | gpu_targets.verdicts(result, long)


def print_summary(figures: Mapping[str, Mapping]) -> None:
    """Parts and targets as tables."""
    console = Console(width=120)
    for kind, title in (("part", "parts"), ("target", "targets")):
        table = Table(title=title, title_justify="left")
        for column in (kind, "outcome", "about it"):
            table.add_column(column, overflow="fold")
        for name, entry in figures.items():
            if name.startswith(f"{kind}/"):
                about = entry["unit"]
                if kind == "part" and entry["value"].startswith("done"):
                    about = f"{figures[name.replace('part', 'part_seconds', 1)]['value']:.0f} s"
                table.add_row(name.removeprefix(f"{kind}/"), entry["value"], about)
        console.print(table)


def settings_of(args: argparse.Namespace) -> dict:
    """What was asked for, and the sizes of every part."""
    small = args.small
    sizes = {
        "bandwidth": gpu_kernels.SMALL if small else gpu_kernels.Sizes(),
        "round": gpu_round.SMALL if small else gpu_round.Sizes(),
        "transformers": gpu_torch.SMALL if small else gpu_torch.FULL,
    }
    cases = gpu_kernels.SMALL_CASES if small else gpu_kernels.CASES
    shown = {name: value._asdict() for name, value in sizes.items()}
    shown["correctness"] = {name: case._asdict() for name, case in cases.items()}
    return vars(args) | {"sizes": shown}


def run(args: argparse.Namespace) -> int:
    """Measures, writes the result file and the picture, and returns the exit status.

    Raises:
      ValueError: there is no GPU.
    """
    env = environment(args.small)
    if args.small:
        jax.config.update("jax_platforms", "cpu")
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # here; the parts want the memory
    backend = jax.default_backend()
    if backend not in ("gpu", "cuda") and not args.small:
        raise ValueError(
            f"expected a GPU, got platform {backend!r}; install jax[cuda12] on a machine that has "
            "one, or try the command out on a CPU with --small"
        )
    # Whoever ends this process ends its parts: these are in sessions of their own.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with tempfile.TemporaryDirectory() as scratch:
        records = run_parts(Path(scratch), args, env)
    long = max(gpu_kernels.SMALL.prefixes) if args.small else gpu_targets.LONG
    figures = figures_of(records, long)
    print_summary(figures)
    path = write_result("gpu", settings_of(args), figures, args.out)
    picture = gpu_plot.draw(path)
    print(path, picture or "(nothing to draw)", sep="\n")
    return int(any(record["outcome"] == "failed" for record in records.values()))


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = bench_parser("gpu", __doc__, "gpu (gpu_small with --small)")
    add = parser.add_argument
    add("--small", action="store_true", help="tiny sizes on a CPU, to try the command out")
    add("--minutes", type=float, default=20.0, help="for everything; parts have shares of it")
    add("--parts", nargs="+", default=list(SHARES), choices=SHARES, metavar="PART", help="not all")
    add("--attention", default="auto", help="kernel of round, protocol and transformers")
    args = parser.parse_args(argv)
    if 60 * args.minutes < 2 * LAST:
        parser.error(f"--minutes must be at least {2 * LAST / 60}, got {args.minutes}")
    args.parts = [part for part in SHARES if part in args.parts]  # in order, once
    if args.out is None and args.small:
        args.out = "bench/results/gpu_small.json"
    return args


def main(argv: Sequence[str] | None = None) -> None:
    with user_errors("gpu"):
        sys.exit(run(parse(argv)))


if __name__ == "__main__":
    main()
