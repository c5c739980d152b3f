"""Compares what a named commit computes with what this checkout computes, on one machine.

    python tests/golden/compare_commits.py BASE [--parts generate,rl] [--keep DIR]

The base is checked out into a temporary git worktree. The same recording program, this file with
`--record`, then runs in each tree in turn, on the public interface alone: `LLM` and
`python -m train.rl`. It records

  generate  token ids and log-probabilities of plain decoding and of fixed static strategies
            (chains, dynamic and static trees, n-grams, two further acceptance modes), with and
            without sampling transforms, and of a small Llama, Qwen2 and MiMo with its head
  rl        rewards, digests of tokens, log-probabilities and losses of three steps of the embedded
            run, and the same of its third step resumed from the second

Token ids, digests and rewards must be equal. Log-probabilities and losses may differ by `TOLERANCE`
in float32. The exit status is 1 where they do not, and every difference is listed.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = "tests/golden"
TOLERANCE = 1e-5
PARTS = ("generate", "rl")
# Metrics of a step that depend on settings and seeds alone, by how they are compared.
EQUAL = ("rollout/tokens_sha", "rollout/reward", "rollout/tokens", "rollout/response_length_mean")
CLOSE = (
    "rollout/logprob_mean", "train/loss", "train/policy_loss", "train/entropy", "train/grad_norm",
    "train/mtp_loss", "train/mtp_update_norm", "train/train_rollout_logprob_abs_diff",
)  # fmt: skip
EMBEDDED = (
    "off", "1_1_2", "4_1_5", "6_4_16", "4x2x1",
    ("4_1_5", {"acceptance": "block"}), ("2x2x1", {"acceptance": "recursive"}),
    ("4_1_5", {"source": "ngram"}),
)  # fmt: skip
FAMILIES = {"llama": "ngram", "qwen2": "ngram", "mimo": "head"}


# --- recording, which runs in the tree that it records --------------------------------------------


def record(out: Path, parts: list[str]) -> None:
    """Writes `{name: {"equal": .., "close": ..}}` of the tree in the working directory."""
    found: dict[str, Any] = {}
    if "generate" in parts:
        found |= _generated()
    if "rl" in parts:
        found |= _trained(out.parent / f"{out.stem}-runs")
    out.write_text(json.dumps(found))


def _generated() -> dict[str, Any]:
    from specjax import LLM, SamplingParams, SpecConfig

    requests = {
        "temperature": SamplingParams(n=2, max_tokens=24, seed=5),
        "greedy": SamplingParams(temperature=0.0, max_tokens=24),
        "transforms": SamplingParams(
            n=2, max_tokens=24, seed=6, top_p=0.9, top_k=20, presence_penalty=0.3,
            repetition_penalty=1.1, transformed_logprobs=True,
        ),
    }  # fmt: skip
    found = {}

    def run(name: str, llm: LLM, prompts: list, greedy: bool = True) -> None:
        for kind, params in requests.items():
            if kind == "greedy" and not greedy:
                continue
            samples = [s for r in llm.generate(prompts, params) for s in r.samples]
            found[f"generate/{name}/{kind}"] = {
                "equal": [[*map(int, s.token_ids)] for s in samples],
                "close": [[*map(float, s.logprobs)] for s in samples],
            }

    for asked in EMBEDDED:
        strategy, more = asked if isinstance(asked, tuple) else (asked, {})
        spec = None if strategy == "off" else SpecConfig(strategy, **more)
        llm = LLM("assets/sums", spec=spec, max_batch=4, max_len=64)
        name = "-".join(["sums", strategy, *more.values()])
        run(name, llm, ["17+25+8=", "3+4=", "90+11+7+2="], more.get("acceptance") is None)
    for family, source in FAMILIES.items():
        spec = SpecConfig("3_1_4", source=source)
        llm = LLM(f"{GOLDEN}/{family}", spec=spec, max_batch=2, max_len=48)
        run(f"{family}-{source}", llm, [[1, 9, 12, 40], [1, 7, 7]])
    return found


def _trained(runs: Path) -> dict[str, Any]:
    settings = [
        "--config", "configs/sums.yaml", f"out={runs}", "steps=3", "eval.problems=0",
        "rollout.prompts=4", "rollout.n=4", "checkpoint.every=1", "checkpoint.keep_last=3",
        "checkpoint.export=false",
    ]  # fmt: skip
    found = {}
    for name, more in (("rl", []), ("rl-resumed", ["--resume", "--resume_step", "2"])):
        subprocess.run([sys.executable, "-m", "train.rl", *settings, *more], check=True)
        lines = (runs / "metrics.jsonl").read_text().splitlines()
        steps = [step for step in map(json.loads, lines) if step.get("rollout/tokens_sha")]
        found[name] = {
            "equal": [{key: step.get(key) for key in EQUAL} for step in steps],
            "close": [{key: step.get(key) for key in CLOSE} for step in steps],
        }
    return found


# --- comparison -----------------------------------------------------------------------------------


def differences(base: dict[str, Any], here: dict[str, Any]) -> Iterator[str]:
    """Says where two recordings differ, a line each."""
    for name in sorted(base.keys() | here.keys()):
        if name not in base or name not in here:
            yield f"{name}: recorded {'here' if name in here else 'in the base'} only"
            continue
        was, now = base[name], here[name]
        if was["equal"] != now["equal"]:
            both = f"  base {was['equal']}\n  here {now['equal']}"
            yield f"{name}: expected equal values, got\n{both}"
        worst = _distance(was["close"], now["close"])
        if not worst <= TOLERANCE:
            yield f"{name}: expected a difference of at most {TOLERANCE}, got {worst:.3g}"


def _distance(a: Any, b: Any) -> float:
    """The largest difference of two numbers at the same place.

    It is infinite where the shapes differ, and where a number is NaN or only one is infinite.
    """
    if isinstance(a, dict) and isinstance(b, dict) and a.keys() == b.keys():
        return max((_distance(a[key], b[key]) for key in a), default=0.0)
    if isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        return max((_distance(x, y) for x, y in zip(a, b, strict=True)), default=0.0)
    if a == b:
        return 0.0
    numbers = isinstance(a, (int, float)) and isinstance(b, (int, float))
    # `max` passes over NaN: a difference that is none must not get there.
    return abs(a - b) if numbers and math.isfinite(a) and math.isfinite(b) else math.inf


def run_in(tree: Path, out: Path, parts: list[str]) -> dict[str, Any]:
    """Records a tree in a process of its own."""
    environment = {**os.environ, "PYTHONPATH": str(tree), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, str(Path(__file__).resolve()), "--record", str(out)]
    subprocess.run([*command, "--parts", ",".join(parts)], cwd=tree, env=environment, check=True)
    return json.loads(out.read_text())


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("base", nargs="?", help="commit to compare with")
    parser.add_argument("--parts", default=",".join(PARTS), help="which (default: %(default)s)")
    parser.add_argument("--record", type=Path, metavar="FILE", help="only record this directory")
    parser.add_argument(
        "--keep",
        type=Path,
        metavar="DIR",
        help="where recordings stay; one of the base is used again",
    )
    args = parser.parse_args(argv)
    parts = args.parts.split(",")
    if unknown := set(parts) - set(PARTS):
        parser.error(f"expected parts of {', '.join(PARTS)}, got {', '.join(sorted(unknown))}")
    if args.record:
        sys.path[0] = os.getcwd()  # the tree that is recorded, and not the folder of this file
        record(args.record, parts)
        return 0
    if not args.base:
        parser.error("expected a commit to compare with")
    git = ["git", "-C", str(ROOT)]
    told = subprocess.run([*git, "rev-parse", args.base], capture_output=True, text=True)
    if told.returncode:
        parser.error(f"expected a commit of {ROOT}, got {args.base!r}")
    commit = told.stdout.strip()
    with tempfile.TemporaryDirectory() as scratch:
        folder = (args.keep or Path(scratch)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        kept = folder / f"{commit[:12]}-{'-'.join(parts)}.json"
        if kept.exists():
            base = json.loads(kept.read_text())
        else:
            tree = Path(scratch) / "base"
            subprocess.run([*git, "worktree", "add", "-q", "--detach", tree, commit], check=True)
            try:
                base = run_in(tree, kept, parts)
            finally:
                subprocess.run([*git, "worktree", "remove", "--force", tree], check=True)
        here = run_in(ROOT, folder / "here.json", parts)
    found = list(differences(base, here))
    print("\n".join(found) or f"{len(here)} recordings agree with {args.base}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
