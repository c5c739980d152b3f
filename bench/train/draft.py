"""`python -m bench.train draft result=NAME model=MODEL data.path=FILE ...`: a head before RL.

Trains a draft head by `train.draft`, whose settings it takes, and records the curve: accept length
on held-out prompts against the tokens that the head was trained on, beside that of n-grams on the
same prompts. A run that is in `out` already is continued.

Writes `NAME.json` and `NAME.png` to `results`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.command import own_settings, user_errors
from bench.record import RESULTS, figure
from bench.train.run import write
from specjax.command_line import load_config
from specjax.schema import REQUIRED, option
from train import draft, draft_curve
from train.draft_schema import DraftRunConfig
from train.log import read_metrics


@dataclass
class DraftBenchConfig(DraftRunConfig):
    """`python -m bench.train draft`: all settings of `train.draft`, and where the result goes."""

    result: str = option(REQUIRED, "name of the result's files")
    results: str = option(str(RESULTS / "draft"), "directory of the result's files")


def figures_of(curve: dict[str, Any], records: Sequence[dict], seconds: float) -> dict[str, dict]:
    """Computes the figures of a run from its curve and its metrics.

    Args:
      curve: content of `curve.json`.
      records: metrics of the run in order.
      seconds: duration of the run, or of its last part if it was continued.
    """
    first, last = curve["points"][0], curve["points"][-1]
    prompts = f"{curve['prompts']} held-out prompts"
    found = {}
    for temperature, length in last["accept_length"].items():
        where = f"temperature_{temperature}"
        unit = f"tokens per round, {prompts}"
        found[f"accept_length/{where}"] = figure(length, unit)
        found[f"ngram/{where}"] = figure(curve["ngram"][temperature], unit)
        found[f"before_training/{where}"] = figure(first["accept_length"][temperature], unit)
        points = [[point["tokens"], point["accept_length"][temperature]] for point in
                  curve["points"]]  # fmt: skip
        found[f"curve/{where}"] = figure(points, "[tokens trained on, tokens per round]")
    trained = [record for record in records if "train/mtp_loss" in record]
    found["tokens"] = figure(last["tokens"], "trained on, each pass counted")
    found["updates"] = figure(last["step"], "of the head")
    found["training_rate"] = figure(trained[-1]["train/tokens_per_sec"], "tokens/s of updates")
    found["seconds"] = figure(seconds, "of the run, or of its part after it was continued")
    return found


def run(cfg: DraftBenchConfig) -> dict[str, dict]:
    """Trains the head, writes the result and returns the figures."""
    started, out = time.perf_counter(), Path(cfg.out)
    own = own_settings(DraftRunConfig, cfg)
    draft.train(own, resume=(out / draft.SAMPLES).exists())
    curve = json.loads((out / draft_curve.FILE).read_text())
    figures = figures_of(curve, read_metrics(out), time.perf_counter() - started)
    write(cfg, figures, out / draft_curve.PICTURE)
    return figures


def main(argv: Sequence[str] | None = None) -> None:
    cfg = load_config(DraftBenchConfig, argv, "bench.train draft", "A draft head before RL.")
    with user_errors("train draft"):
        run(cfg)
