"""`python -m bench.train schedule --config configs/schedule.yaml`: rollouts that end early.

Two schedules of RL from one start, with the same seeds, step by step in turns:

    plain       a step waits for all samples of its prompts
    partial     more groups are started than a step needs, it ends when enough are sure to be the
                first in tokens, and the others go on in the next step (`rollout.over_sample`,
                `rollout.partial`)

The second prefers short responses and trains on tokens of older policies. Whether that costs reward
is measured on held-out problems, at the end of each of `seeds` runs. Every seed has problems and
samples of its own. A difference of less than its interval is none: the reward of 512 problems is
known to about 0.02.

`rollout_ratio` compares the seconds of a rollout, `length_bias` says by how many tokens the chosen
groups are longer than all that ran, `stale_token_share` how many of their tokens are of older
weights.

Writes `schedule.json` (figures) and `schedule.jsonl` (one record per seed, step and arm).
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bench.command import own_settings, user_errors
from bench.record import figure, paired_ratio_interval, report, write_result
from specjax.command_line import ConfigError, load_config
from specjax.schema import option
from train.rollout_schema import RolloutSection
from train.schema import RLConfig
from train.trainer import Trainer

ARMS = ("plain", "partial")
WITHIN = 0.03  # held-out reward that counts as no loss


@dataclass
class ScheduleConfig(RLConfig):
    """`python -m bench.train schedule`: all settings of `train.rl`, and how often it is run."""

    out: str = option("bench/results", "directory of schedule.json and schedule.jsonl")
    seeds: int = option(3, "runs of each arm; they begin at `seed` and `data.seed`")
    rollout: RolloutSection = option(
        RolloutSection(over_sample=1.5, partial=True), "rollouts, of the arm `partial`"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.seeds < 1:
            raise ConfigError(f"seeds must be at least 1, got {self.seeds}")
        if not self.rollout.partial:
            raise ConfigError(
                "rollout.partial must be true and rollout.over_sample above 1: the bench itself "
                "makes the arm without them"
            )
        if not self.eval.problems:
            raise ConfigError("eval.problems must be at least 1: held-out reward is compared")

    def of_arm(self, arm: str, number: int, out: Path) -> RLConfig:
        """Returns the settings of one run, which writes to a directory of its own in `out`."""
        cfg = own_settings(RLConfig, self)
        cfg.seed, cfg.data.seed = self.seed + number, self.data.seed + number
        if arm == "plain":
            cfg.rollout = dataclasses.replace(cfg.rollout, over_sample=1.0, partial=False)
        cfg.out = str(out / f"{arm}-{number}")
        return cfg


def run_pair(cfg: ScheduleConfig, number: int, out: Path) -> list[dict]:
    """Runs both arms with one seed; returns a record of each step, step 0 being the start."""
    trainers = {arm: Trainer(cfg.of_arm(arm, number, out)) for arm in ARMS}
    first, other = trainers.values()
    other.policy, other.draft = first.policy, first.draft  # one set of executables for both
    records = []
    for arm, trainer in trainers.items():
        trainer.warm_up()
        records.append({"seed": number, "step": 0, "arm": arm, **trainer.evaluate()})
    for step in range(1, cfg.steps + 1):
        for arm in ARMS if step % 2 else reversed(ARMS):
            metrics = trainers[arm].step()
            if step == cfg.steps:
                metrics |= trainers[arm].evaluate()
            records.append({"seed": number, "step": step, "arm": arm, **metrics})
    return records


def figures_of(records: Sequence[Mapping], steps: int) -> dict[str, dict]:
    """Computes the figures of all runs.

    Args:
      records: records of `run_pair`, for all seeds.
      steps: number of steps in a run.
    """

    def of(arm: str, name: str, step: int | None = None) -> list[float]:
        return [
            r[name] for r in records if r["arm"] == arm and name in r and step in (None, r["step"])
        ]

    ends = {arm: of(arm, "eval/reward", steps) for arm in ARMS}
    differences = [b - a for a, b in zip(*ends.values(), strict=True)]
    mean = statistics.mean(differences)
    interval = None
    if len(differences) > 1:
        half = 2 * statistics.stdev(differences) / len(differences) ** 0.5
        interval = [mean - half, mean + half]
    started = statistics.mean(of("plain", "eval/reward", 0))
    ratio, *around = paired_ratio_interval(*(of(a, "time/rollout") for a in reversed(ARMS)))
    result = {
        "heldout_reward_difference": figure(
            mean,
            f"partial - plain, mean of {len(differences)} seeds; two standard errors",
            interval,
        ),
        "heldout_reward/start": figure(started, "before the first step, mean of seeds"),
        "rollout_ratio": figure(
            ratio, "s of a rollout, partial / plain, median over steps", around
        ),
    }
    for arm, values in ends.items():
        text = f"after {steps} steps, mean of seeds; the smallest and the largest"
        result[f"heldout_reward/{arm}"] = figure(
            statistics.mean(values), text, [min(values), max(values)]
        )
        lengths = of(arm, "eval/response_length_mean", steps)
        result[f"heldout_length/{arm}"] = figure(statistics.mean(lengths), "tokens, mean")
    for name, unit in (
        ("rollout/length_bias", "tokens that chosen groups are longer than all, mean of steps"),
        ("rollout/stale_token_share", "of the trained tokens are of older weights, mean of steps"),
    ):
        found = of("partial", name)
        if found:
            result[name.partition("/")[2]] = figure(float(np.mean(found)), unit)
    return result


def run(cfg: ScheduleConfig) -> dict[str, dict]:
    """Runs all seeds, writes both files and returns the figures."""
    out = Path(cfg.out)
    out.mkdir(parents=True, exist_ok=True)
    records: list[dict] = []
    with (
        tempfile.TemporaryDirectory() as scratch,
        (out / "schedule.jsonl").open("w", encoding="utf-8") as stream,
    ):
        for number in range(cfg.seeds):
            found = run_pair(cfg, number, Path(scratch))
            for record in found:
                stream.write(json.dumps(record) + "\n")
            stream.flush()
            records += found
            ends = {r["arm"]: r["eval/reward"] for r in found if r["step"] == cfg.steps}
            print(
                f"seed {number}: {'  '.join(f'{a} {v:.3f}' for a, v in ends.items())}", flush=True
            )
    figures = figures_of(records, cfg.steps)
    path = write_result("schedule", dataclasses.asdict(cfg), figures, out / "schedule.json")
    print(report(figures))
    print(f"result: {path}")
    return figures


def main(argv: Sequence[str] | None = None) -> None:
    cfg = load_config(ScheduleConfig, argv, "bench.train schedule", "Rollouts that end early.")
    with user_errors("train schedule"):
        figures = run(cfg)
    lost = -figures["heldout_reward_difference"]["value"]
    if lost > WITHIN:
        sys.exit(f"bench.train schedule: partial rollouts lose {lost:.3f} of held-out reward")
