"""Trains a head for a real model, and a real model by RL: minutes of `train.sft` and `train.rl`.

The model and the rows are given by `python -m bench.gpu --model DIR --rows FILE`, because the
repository has no weights: a Hugging Face directory such as SmolLM2-135M-Instruct's, and a file of
rows that `data.path` takes. Without them the part is left out.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from bench.gpu.job import MODEL, ROWS, Absent, Job
from bench.gpu.parts.rl import end, logged, rl_figures
from bench.record import figure

NOT_AHEAD = "it trains a model of the user's, in processes of its own"
NOT_GIVEN = "not given"
GRACE = 30.0  # seconds of a part that are not given to what it runs
ARMS = {
    "off": {"rollout.strategy": "off"},
    "static": {"rollout.strategy": "4_1_5"},
    "goodput": {"rollout.control.controller": "goodput"},
}


def given() -> tuple[str, str]:
    """Returns the directory of the model and the file of rows.

    Raises:
      Absent: they were not given, or are not there.
    """
    found = []
    for name, flag in ((MODEL, "--model DIR"), (ROWS, "--rows FILE")):
        path = os.environ.get(name)
        if not path:
            raise Absent(
                NOT_GIVEN, f"the repository has no weights; give python -m bench.gpu {flag}"
            )
        if not Path(path).exists():
            raise Absent(NOT_GIVEN, f"{flag}: there is no {path}")
        found.append(path)
    return found[0], found[1]


def command_of(module: str, out: Path, settings: Mapping[str, object]) -> list[str]:
    return [sys.executable, "-m", module, f"out={out}", *(f"{k}={v}" for k, v in settings.items())]


def run_for(command: Sequence[str], seconds: float) -> None:
    """Runs a command, and ends it after so many seconds.

    Raises:
      RuntimeError: it failed.
    """
    env = {k: v for k, v in os.environ.items() if k != "XLA_PYTHON_CLIENT_PREALLOCATE"}
    process, over = subprocess.Popen(command, env=env), time.monotonic() + seconds
    try:
        while process.poll() is None and time.monotonic() < over:
            time.sleep(0.2)
        code = process.poll()
    finally:
        end(process)
    if code not in (None, 0):
        raise RuntimeError(f"{' '.join(command[2:4])} ended with exit status {code}; see above")


def measure(job: Job, what: str) -> None:
    """Measures training of a real model.

    Args:
      what: `head`: the head's losses after minutes of training on the rows' answers, the policy
        unchanged; `rl`: rates, times and rewards of `train.rl`, by arm.
    """
    model, rows = given()
    job.tell(model=model, rows=rows)
    with tempfile.TemporaryDirectory() as scratch:
        if what == "head":
            job.add(_head(Path(scratch) / "head", model, rows, job.left - GRACE))
            return
        each = (job.left - GRACE) / len(ARMS)
        for arm, settings in ARMS.items():
            out = Path(scratch) / arm
            run_for(
                command_of("train.rl", out, {"model": model, "data.path": rows} | settings), each
            )
            job.add({f"{name}/{arm}": entry for name, entry in rl_figures(logged(out)).items()})


def _head(out: Path, model: str, rows: str, seconds: float) -> dict[str, dict]:
    """Trains a head for a while, and returns its metrics at the beginning and at the end."""
    settings = {"init": model, "data.path": rows, "steps": 0, "draft_steps": 100_000}
    run_for(command_of("train.sft", out, settings), seconds)
    records = [r for r in logged(out) if r.get("train/mtp_loss") is not None]
    if not records:
        raise RuntimeError("train.sft logged no step of the head in its time")
    result = {"steps": figure(records[-1]["step"], "steps of the head")}
    for name, value in records[-1].items():
        if name.startswith("train/mtp_"):
            result[name] = figure(value, f"after the last step; {records[0].get(name)} at first")
    return result
