"""`python -m bench.train run --config FILE result=NAME ...`: one RL run, and its curves.

Runs `train.rl`, whose settings it takes, and records what the run learned and how fast it was. A
run that is in `out` already is continued from its newest checkpoint.

Writes `NAME.json`, `NAME.jsonl` (the metrics of every step) and `NAME.png` to `results`.
"""

from __future__ import annotations

import dataclasses
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.command import own_settings, user_errors
from bench.record import RESULTS, figure, report, write_result
from specjax.command_line import load_config
from specjax.schema import REQUIRED, option
from train import plot, rl
from train.cli import CHECKPOINTS
from train.log import METRICS_FILE, read_metrics
from train.schema import RLConfig

# Name of a figure -> metric of a run, and its unit.
FIGURES = {
    "reward": ("rollout/reward", "mean of a step's answers"),
    "held_out_reward": ("eval/reward", "mean of held-out answers"),
    "accept_length": ("rollout/spec_accept_length", "tokens per round"),
    "rollout_rate": ("rollout/tokens_per_sec", "tokens/s"),
    "entropy": ("train/entropy", "nats per token"),
    "draft_loss": ("train/mtp_loss", "nats per token"),
}


@dataclass
class RunBenchConfig(RLConfig):
    """`python -m bench.train run`: all settings of `train.rl`, and where the result goes."""

    result: str = option(REQUIRED, "name of the result's files")
    results: str = option(str(RESULTS / "runs"), "directory of the result's files")


def curve(records: Sequence[Mapping], metric: str) -> list[list[float]]:
    """Returns [step, value] of every record that has the metric as a finite number."""
    return [
        [record["step"], record[metric]] for record in records if record.get(metric) is not None
    ]


def figures_of(records: Sequence[Mapping], seconds: float) -> dict[str, dict]:
    """Computes the figures of a run from its metrics.

    Args:
      records: metrics of the run in order.
      seconds: duration of the run, or of its last part if it was continued.
    """
    found = {"steps": figure(max(record["step"] for record in records), "of training")}
    for name, (metric, unit) in FIGURES.items():
        points = curve(records, metric)
        if points:
            found[f"first/{name}"] = figure(points[0][1], unit)
            found[f"last/{name}"] = figure(points[-1][1], unit)
            found[f"curve/{name}"] = figure(points, f"[step, {unit}]")
    not_finite = sorted({name for record in records for name in record.get("nonfinite", ())})
    found["not_finite"] = figure(not_finite, "names of metrics that were not finite")
    found["seconds"] = figure(seconds, "of the run, or of its part after it was continued")
    return found


def run(cfg: RunBenchConfig) -> dict[str, dict]:
    """Runs `train.rl`, writes the result and returns the figures."""
    started = time.perf_counter()
    out = begin_or_continue(own_settings(RLConfig, cfg))
    figures = figures_of(read_metrics(out), time.perf_counter() - started)
    write(cfg, figures, out / METRICS_FILE, out / plot.PICTURE)
    return figures


def begin_or_continue(cfg: RLConfig) -> Path:
    """Runs `train.rl`, from the newest checkpoint if there is one, and returns its directory."""
    started = any((Path(cfg.out) / CHECKPOINTS).glob("[0-9]*"))
    return rl.run(cfg, resume=started).parent


def write(cfg: Any, figures: Mapping[str, Mapping], *files: Path) -> None:
    """Writes a result and the files of its run beside it, under its name, and prints the figures.

    Args:
      cfg: settings, among them `model`, `result`, `results` and `out`.
      figures: figures of the result; those with "curve/" in their names are not printed.
      files: files that are copied; they keep their suffixes.
    """
    settings = dataclasses.asdict(cfg) | {"model": Path(cfg.model).name}
    for name in ("result", "results", "out"):
        settings.pop(name)
    path = Path(cfg.results) / f"{cfg.result}.json"
    write_result(cfg.result, settings, figures, path)
    for file in files:
        shutil.copyfile(file, path.with_suffix(file.suffix))
    print(report({name: entry for name, entry in figures.items() if "curve/" not in name}))
    print(f"result: {path}")


def main(argv: Sequence[str] | None = None) -> None:
    cfg = load_config(RunBenchConfig, argv, "bench.train run", "One RL run, and its curves.")
    with user_errors("train run"):
        run(cfg)
