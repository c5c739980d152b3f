"""`train.rl` on the device for half a minute: finite losses, rewards and seconds per step.

It runs in a process of its own, with the embedded policy and configs/sums.yaml. The time starts
when its first step, which compiles, has been logged; then the process is ended.
"""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from bench.gpu.job import Job
from bench.record import figure, median_interval
from bench.round.batch import random_weights
from specjax.checkpoint import huggingface as hf
from specjax.drafts.mtp import init_head_params
from specjax.models.transformer import init_params
from specjax.shipped import find_shipped
from train.log import METRICS_FILE, read_metrics

NOT_AHEAD = "it is train.rl, in a process of its own"
SECONDS = 30.0
SETTINGS = {
    "steps": 100_000,
    "eval.problems": 0,
    "checkpoint.every": 0,
    "checkpoint.export": False,
    "dtype.compute": "float32",  # on every device, though the policy is stored in bfloat16
}
SMALL = {
    "steps": 3,
    "data.max_terms": 3,
    "rollout.prompts": 2,
    "rollout.n": 2,
    "rollout.max_tokens": 8,
    "rollout.max_prompt_tokens": 24,
    "rollout.max_batch": 2,
    "rollout.strategy": "1_1_2",
    "packing.row_length": 32,
    "packing.rows": 2,
    "draft.unroll_steps": 1,
    "algo.dynamic_sampling": False,
}
FINITE = ("rollout/reward", "train/loss", "train/grad_norm", "train/mtp_loss")
NAMES = {
    "rollout/tokens_per_sec": "tok/s",
    "rollout/spec_accept_length": "tokens per round",
    "time/rollout": "s",
    "time/train": "s",
    "time/draft": "s",
}


def measure(job: Job) -> None:
    """Measures `rl/..`: steps and their seconds, rates, and rewards."""
    with tempfile.TemporaryDirectory() as scratch:
        out, settings = Path(scratch) / "run", dict(SETTINGS)
        if job.small:
            settings |= SMALL | {"model": small_policy(Path(scratch) / "policy")}
        changes = [f"{key}={_yaml(value)}" for key, value in settings.items()]
        command = [sys.executable, "-m", "train.rl", "--config", "configs/sums.yaml", f"out={out}"]
        # The new process needs the device's memory.
        env = {k: v for k, v in os.environ.items() if k != "XLA_PYTHON_CLIENT_PREALLOCATE"}
        records = watched([*command, *changes], env, out, job)
    job.add(rl_figures(records))


def _yaml(value) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def small_policy(path: Path) -> Path:
    """The embedded policy's shape with one layer and random weights."""
    embedded = find_shipped("assets/sums")
    cfg = hf.read_config(embedded).running(param_dtype="float32")
    policy = random_weights(functools.partial(init_params, cfg), 0)
    head = random_weights(functools.partial(init_head_params, cfg), 1)
    hf.save_checkpoint(path, cfg, policy, head, tokenizer_dir=embedded)
    return path


def watched(command: Sequence[str], env: Mapping, out: Path, job: Job) -> list[dict]:
    """Runs the command until it ends, or for `SECONDS` after its first step; returns its records.

    Raises:
      RuntimeError: the command failed, or logged too few steps in time.
    """
    began = None
    # In this process's group, so that both end together.
    process = subprocess.Popen(command, env=env)
    try:
        while process.poll() is None:
            if began is None and len(logged(out)) > 0:
                began = time.monotonic()
            over = began is not None and time.monotonic() - began > SECONDS
            if over or job.left < 0:
                break
            time.sleep(0.1)
        code = process.poll()
    finally:
        end(process)
    if code not in (None, 0):
        raise RuntimeError(f"train.rl ended with exit status {code}; its output is above")
    records = logged(out)
    if len(records) < 2:
        raise RuntimeError(
            f"train.rl logged {len(records)} steps in {job.seconds:.0f} s, expected two or "
            "more; did compilation take that long?"
        )
    return records


def logged(out: Path) -> list[dict]:
    """Returns the records of training steps so far."""
    if not (out / METRICS_FILE).exists():
        return []
    return [record for record in read_metrics(out) if record["step"] > 0]


def end(process: subprocess.Popen) -> None:
    """Ends a process; its children end with the part's process group."""
    for how, patience in ((signal.SIGTERM, 10), (signal.SIGKILL, None)):
        if process.poll() is None:
            process.send_signal(how)
            try:
                process.wait(patience)
            except subprocess.TimeoutExpired:
                continue


def rl_figures(records: Sequence[dict]) -> dict[str, dict]:
    """Returns the figures of the steps after the first, which compiles.

    Raises:
      FloatingPointError: a loss, reward or gradient is not finite.
    """
    for record in records:
        odd = [name for name in FINITE if name in record.get("nonfinite", ())]
        if odd:
            raise FloatingPointError(f"step {record['step']}: {', '.join(odd)} not finite")
    times = [record["wall_time"] for record in records]
    steps = [b - a for a, b in zip(times[:-1], times[1:], strict=True)]
    value, *ends = median_interval(steps)
    result = {
        "rl/steps": figure(len(steps), f"steps in {sum(steps):.1f} s, after the first"),
        "rl/step_seconds": figure(value, "s per step, median", ends),
        "rl/reward": figure(records[-1]["rollout/reward"], "of the last step's samples"),
    }
    for name, unit in NAMES.items():
        values = [record[name] for record in records[1:] if record.get(name) is not None]
        if values:
            value, *ends = median_interval(values)
            result[f"rl/{name}"] = figure(value, f"{unit}, median of steps", ends)
    return result
