"""Times generation in a named commit and in this checkout, in alternation, on one machine.

    python tests/golden/compare_speed.py BASE [--pairs 9] [--arms off,4_1_5] [--out FILE]

Each tree has a process of its own, which compiles once. Then the two take turns, and only one of
them works at a time. A figure is the ratio of throughputs of neighbours, this checkout over the
base: its median, and the 10th and 90th percentile of the pairs. Nothing is asserted.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
BATCH, SAMPLES = 8, 32


def serve(arm: str) -> None:
    """Generates the same samples once for every line of standard input, and prints the seconds."""
    sys.path[0] = os.getcwd()  # the tree that is timed, and not the folder of this file
    from specjax import LLM, SamplingParams, SpecConfig

    spec = None if arm == "off" else SpecConfig(arm)
    llm = LLM("assets/sums", spec=spec, max_batch=BATCH, max_len=96)
    params = SamplingParams(n=SAMPLES // 4, max_tokens=64, seed=5, ignore_eos=True)
    prompts = ["17+25+8=", "3+4=", "90+11+7+2=", "5+5+5="]
    llm.generate(prompts, params)
    print("ready", flush=True)
    for _ in sys.stdin:
        start = time.perf_counter()
        requests = llm.generate(prompts, params)
        seconds = time.perf_counter() - start
        tokens = sum(len(sample.token_ids) for r in requests for sample in r.samples)
        print(json.dumps([seconds, tokens]), flush=True)


class Served:
    """A process that generates in a tree when it is asked to."""

    def __init__(self, tree: Path, arm: str):
        environment = {**os.environ, "PYTHONPATH": str(tree), "JAX_PLATFORMS": "cpu"}
        command = [sys.executable, str(Path(__file__).resolve()), "--serve", arm]
        self._process = subprocess.Popen(
            command, cwd=tree, env=environment, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        if self._process.stdout.readline().strip() != "ready":
            raise SystemExit(f"generation with {arm} failed in {tree}; its messages are above")

    def tokens_per_second(self) -> float:
        self._process.stdin.write("go\n")
        self._process.stdin.flush()
        seconds, tokens = json.loads(self._process.stdout.readline())
        return tokens / seconds

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait()


def compare(base: Path, arm: str, pairs: int) -> dict[str, float]:
    """Throughputs of both trees in turn, and their ratio pair by pair."""
    served = [Served(base, arm), Served(ROOT, arm)]
    rows = []
    for i in range(pairs):
        order = (0, 1) if i % 2 else (1, 0)
        found = {which: served[which].tokens_per_second() for which in order}
        rows.append((found[0], found[1]))
    for one in served:
        one.close()
    was, now = np.array(rows).T
    low, middle, high = np.percentile(now / was, [10, 50, 90])
    return {
        "base_tokens_per_s": float(np.median(was)), "here_tokens_per_s": float(np.median(now)),
        "ratio": float(middle), "ratio_p10": float(low), "ratio_p90": float(high),
    }  # fmt: skip


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("base", nargs="?", help="commit to compare with")
    parser.add_argument("--pairs", type=int, default=9, help="turns (default: %(default)s)")
    parser.add_argument("--arms", default="off,4_1_5", help="strategies (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="where the figures are written as JSON")
    parser.add_argument("--serve", metavar="STRATEGY", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.serve:
        serve(args.serve)
        return
    if not args.base:
        parser.error("expected a commit to compare with")
    git = ["git", "-C", str(ROOT), "worktree"]
    with tempfile.TemporaryDirectory() as scratch:
        tree = Path(scratch) / "base"
        subprocess.run([*git, "add", "-q", "--detach", tree, args.base], check=True)
        try:
            found = {arm: compare(tree, arm, args.pairs) for arm in args.arms.split(",")}
        finally:
            subprocess.run([*git, "remove", "--force", tree], check=True)
    text = json.dumps(found, indent=1)
    if args.out:
        args.out.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
