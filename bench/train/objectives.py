"""`python -m bench.train objectives --config configs/sums.yaml`: objectives compared over seeds.

Runs `train.rl` once for each preset and seed, from one policy, with the settings of the
configuration, and compares the held-out rewards at the end. Runs that are in `out` already are
continued, or read if they have ended.

Writes `objectives.json` and `objectives.png` to `results`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # no display is needed
import matplotlib.pyplot as plt  # noqa: E402
import numpy as np  # noqa: E402

from bench import plots  # noqa: E402
from bench.command import own_settings, user_errors  # noqa: E402
from bench.record import RESULTS, figure, report, write_result  # noqa: E402
from bench.train.run import begin_or_continue, curve  # noqa: E402
from specjax.command_line import ConfigError, load_config  # noqa: E402
from specjax.schema import option  # noqa: E402
from train import describe  # noqa: E402
from train.algo import AlgoSection, algo  # noqa: E402
from train.log import METRICS_FILE, read_metrics  # noqa: E402
from train.presets import PRESETS  # noqa: E402
from train.run_files import read_config  # noqa: E402
from train.schema import RLConfig  # noqa: E402

HELD_OUT = "eval/reward"
# Keys of `algo` that all runs have.
COMMON = ("updates_per_rollout", "dynamic_sampling")


@dataclass
class ObjectivesConfig(RLConfig):
    """`python -m bench.train objectives`: all settings of `train.rl`, and what is compared."""

    out: str = option("runs/objectives", "directory of the runs")
    results: str = option(str(RESULTS), "directory of the result's files")
    objectives: list[str] = option(
        ["grpo", "dr_grpo", "gspo", "cispo"],
        f"presets that are compared with the first one, of {', '.join(PRESETS)}",
    )
    seeds: list[int] = option([0, 1, 2], "seeds of the samples of each run")

    def __post_init__(self) -> None:
        unknown = [name for name in self.objectives if name not in PRESETS]
        if unknown or len(set(self.objectives)) != len(self.objectives) or not self.objectives:
            raise ConfigError(
                f"objectives: expected different ones of {', '.join(PRESETS)}, got "
                f"{self.objectives}"
            )
        if not self.seeds or len(set(self.seeds)) != len(self.seeds):
            raise ConfigError(f"seeds: expected different numbers, got {self.seeds}")
        if self.seed != RLConfig.seed:
            raise ConfigError(f"seeds names the seeds of the runs; leave out seed={self.seed}")
        if self.algo != self._algo(None):
            raise ConfigError(
                f"the runs have the options of their presets; of algo only {' and '.join(COMMON)} "
                "can be set"
            )

    def of(self, objective: str, seed: int) -> RLConfig:
        """Returns the settings of one run."""
        changes = {
            "seed": seed,
            "algo": self._algo(objective),
            "out": str(Path(self.out) / f"{objective}_{seed}"),
        }
        return own_settings(RLConfig, self, **changes)

    def _algo(self, preset: str | None) -> AlgoSection:
        """A preset, with what is the same for all objectives."""
        return algo(preset=preset, **{name: getattr(self.algo, name) for name in COMMON})


def records_of(cfg: RLConfig) -> list[dict]:
    """Runs `train.rl`, or what is left of it, and returns its metrics.

    Raises:
      ConfigError: the run has ended, and had other settings.
    """
    out = Path(cfg.out)
    records = read_metrics(out) if (out / METRICS_FILE).exists() else []
    if not records or records[-1]["step"] < cfg.steps:
        return read_metrics(begin_or_continue(cfg))
    if differing := describe.changed(read_config(out), describe.settings_of(cfg)):
        listed = ", ".join(f"{name} ({a} there, {b} now)" for name, (a, b) in differing.items())
        raise ConfigError(
            f"{out} holds a run with other settings: {listed}; set out to another directory"
        )
    return records


Curves = Mapping[str, Sequence[Sequence[Sequence[float]]]]  # objective -> seed -> [step, reward]


def figures_of(curves: Curves) -> dict[str, dict]:
    """Computes held-out rewards at the end, and differences from the first objective's."""
    found, reference = {}, None
    for name, runs in curves.items():
        last = np.array([points[-1][1] for points in runs])
        unit = f"held-out reward, mean of {len(runs)} runs"
        found[f"held_out_reward/{name}"] = figure(
            float(last.mean()), unit, [float(last.min()), float(last.max())]
        )
        found[f"before_training/{name}"] = figure(
            float(np.mean([points[0][1] for points in runs])), unit
        )
        found[f"curves/{name}"] = figure(list(runs), "[step, held-out reward] of each run")
        if reference is None:
            reference = last.mean()
        else:
            found[f"difference/{name}"] = figure(float(last.mean() - reference), "held-out reward")
    return found


def draw(curves: Curves, path: Path) -> None:
    """Draws the mean of the runs of each objective, and the runs themselves faintly."""
    picture, axis = plt.subplots(figsize=(8, 5), layout="constrained")
    for number, (name, runs) in enumerate(curves.items()):
        color = f"C{number}"
        for points in runs:
            axis.plot(*zip(*points, strict=True), color=color, alpha=0.25, linewidth=1)
        steps = [step for step, _ in runs[0]]
        mean = np.mean([[value for _, value in points] for points in runs], axis=0)
        axis.plot(steps, mean, color=color, linewidth=2, marker="o", label=name)
    axis.set_xlabel("step")
    axis.set_ylabel("held-out reward")
    axis.legend()
    plots.tidy(axis, f"Objectives from one policy, {len(next(iter(curves.values())))} seeds each")
    plots.save(picture, path)


def run(cfg: ObjectivesConfig) -> dict[str, dict]:
    """Does all runs, writes the result and returns the figures."""
    curves = {
        name: [curve(records_of(cfg.of(name, seed)), HELD_OUT) for seed in cfg.seeds]
        for name in cfg.objectives
    }
    figures = figures_of(curves)
    settings = dataclasses.asdict(cfg)
    for name in ("results", "out", "seed"):
        settings.pop(name)
    settings["algo"] = {name: settings["algo"][name] for name in COMMON}
    path = write_result("objectives", settings, figures, Path(cfg.results) / "objectives.json")
    draw(curves, path.with_suffix(".png"))
    print(report({name: entry for name, entry in figures.items() if "curves/" not in name}))
    print(f"result: {path}\nplot: {path.with_suffix('.png')}")
    return figures


def main(argv: Sequence[str] | None = None) -> None:
    doc = "Objectives compared over seeds."
    cfg = load_config(ObjectivesConfig, argv, "bench.train objectives", doc)
    with user_errors("train objectives"):
        run(cfg)
