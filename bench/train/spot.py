"""`python -m bench.train spot --config configs/spot.yaml`: draft training in the gaps of rollouts.

Two RL runs from one start take turns, step by step, in one process, both on several replicas:

    gaps     replicas that have finished train the draft head while the others still decode
    after    the same updates on the same data, all of them after the rollout

Tokens, policy and head must be the same bits in both. What is compared is time: of a rollout, which
training should not delay, and of rollout and draft training together. `tail_delay` is by how much
longer the rollout takes with training in its gaps, relative to its tail, which begins when the
first replica has finished.

On a CPU the devices are simulated, each with one thread (bench/train/__main__.py), so that a
replica which trains takes no time from one that decodes; there must be a core for each of them.

Writes `<name>.json` (figures), `<name>.jsonl` (the events of both arms, see `train.log`) and
`<name>.png` (a rollout as a time line, and the seconds of a step).
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np

from bench import plots
from bench.command import own_settings, user_errors
from bench.record import figure, median_interval, paired_ratio_interval, report, write_result
from specjax.command_line import ConfigError, load_config
from specjax.schema import option
from train.heads import DraftConfig, SpotConfig
from train.rollout_schema import RolloutSection
from train.schema import EvalSection, RLConfig
from train.trainer import Trainer

ARMS = ("after", "gaps")
# All samples run at once, so that both arms give the same samples to each replica.
ROLLOUT = RolloutSection(prompts=4, n=4, max_batch=8, replicas=2)


@dataclass
class SpotBenchConfig(RLConfig):
    """`python -m bench.train spot`: all settings of `train.rl`, and what is left out of timings."""

    out: str = option("bench/results", "directory of the results")
    name: str = option("spot", "of the results, without a suffix")
    steps: int = option(12, "RL steps of both arms")
    untimed_steps: int = option(2, "first steps left out: at the first one there is no data yet")
    rollout: RolloutSection = option(ROLLOUT, "rollouts")
    draft: DraftConfig = option(DraftConfig(spot=SpotConfig(enabled=True)), "the draft head")
    eval: EvalSection = option(EvalSection(problems=0), "held-out evaluation; the bench needs none")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.untimed_steps < self.steps:
            raise ConfigError(
                f"expected 1 <= untimed_steps < steps, got {self.untimed_steps} and {self.steps}"
            )
        if not self.draft.spot.enabled or not self.draft.spot.gaps:
            raise ConfigError(
                "draft.spot.enabled and draft.spot.gaps must be true: the bench itself makes the "
                "arm without gaps"
            )

    def of_arm(self, arm: str, out: Path) -> RLConfig:
        """Returns the settings of one arm's run, which writes to a directory in `out`."""
        cfg = own_settings(RLConfig, self)
        cfg.draft.spot.gaps = arm == "gaps"
        cfg.out = str(out / arm)
        return cfg


@dataclass(frozen=True)
class Step:
    """One step of one arm.

    Attributes:
      rollout: seconds of the rollout.
      draft: seconds of draft training after it.
      tail: seconds of the rollout after the first replica finished.
      idle: seconds without samples, summed over replicas.
      trained: seconds of training in gaps, summed over replicas.
      updates, in_gaps: numbers of updates of the head, and of those in gaps.
      tokens: digest of the tokens.
      events: events of `train.log`.
    """

    rollout: float
    draft: float
    tail: float
    idle: float
    trained: float
    updates: int
    in_gaps: int
    tokens: str
    events: list[dict]

    @classmethod
    def of(cls, metrics: Mapping, events: Sequence[Mapping]) -> Step:
        end = next(e["end"] for e in events if e["event"] == "rollout")
        seconds = {
            event: sum(e["end"] - e["start"] for e in events if e["event"] == event)
            for event in ("idle", "draft_gap")
        }
        return cls(
            rollout=metrics["time/rollout"],
            draft=metrics["time/draft"],
            tail=end - min(_drained(events, end), default=end),
            idle=seconds["idle"],
            trained=seconds["draft_gap"],
            updates=int(metrics["draft/updates"]),
            in_gaps=int(metrics["draft/updates_in_gaps"]),
            tokens=metrics["rollout/tokens_sha"],
            events=list(events),
        )

    @property
    def both(self) -> float:
        return self.rollout + self.draft


def _drained(events: Sequence[Mapping], end: float) -> list[float]:
    """Returns when replicas became idle for the rest of the rollout, without the last of all."""
    found = [e["start"] for e in events if e["event"] == "idle" and e["end"] >= end - 1e-3]
    return sorted(found)[:-1] if len(found) == _replicas(events) else found


def _replicas(events: Sequence[Mapping]) -> int:
    return len({e["replica"] for e in events} - {None})


class Comparison:
    """Runs the trainers of both arms step by step, and keeps their steps."""

    def __init__(self, cfg: SpotBenchConfig, out: Path):
        self.trainers = {arm: Trainer(cfg.of_arm(arm, out)) for arm in ARMS}
        first, other = self.trainers.values()
        other.policy, other.draft = first.policy, first.draft  # one set of executables for both
        other.spot.places = first.spot.places
        self.steps: dict[str, list[Step]] = {arm: [] for arm in ARMS}
        self.identical = 0

    def warm_up(self) -> None:
        for trainer in self.trainers.values():
            trainer.warm_up()

    def step(self, number: int) -> None:
        """Runs a step of both arms; which one comes first alternates."""
        for arm in ARMS if number % 2 else reversed(ARMS):
            trainer = self.trainers[arm]
            metrics = trainer.step()
            self.steps[arm].append(Step.of(metrics, trainer.trace.events))
        last = [self.steps[arm][-1].tokens for arm in ARMS]
        first, other = (trainer.trees() for trainer in self.trainers.values())
        same = last[0] == last[1] and all(_same(first[name], other[name]) for name in first)
        self.identical += same

    def timed(self, untimed: int) -> dict[str, list[Step]]:
        return {arm: steps[untimed:] for arm, steps in self.steps.items()}


def _same(a, b) -> bool:
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(np.array_equal(np.asarray(x), np.asarray(y)) for x, y in pairs)


def figures_of(steps: Mapping[str, Sequence[Step]]) -> dict[str, dict]:
    """Compares the timed steps of both arms.

    Raises:
      ValueError: no rollout had a gap, or the head was never trained.
    """
    after, gaps = steps["after"], steps["gaps"]
    if not any(s.tail > 0 for s in after) or not any(s.updates for s in gaps):
        raise ValueError(
            "no rollout left a replica idle, or no step trained the head: raise steps, or use "
            "fewer prompts per replica, so that rollouts have a tail"
        )
    tail = statistics.median(s.tail for s in after)
    paired = list(zip(after, gaps, strict=True))
    gained, *gained_at = median_interval([a.both - g.both for a, g in paired])
    delay, *delay_at = median_interval([(g.rollout - a.rollout) / tail for a, g in paired])
    both, *both_at = _ratio(steps, lambda s: s.both)
    rollout, *rollout_at = _ratio(steps, lambda s: s.rollout)
    updates = sum(s.updates for s in gaps)
    result = {
        "seconds_gained": figure(gained, "s per step, after - gaps, median of pairs", gained_at),
        "step_ratio": figure(both, "gaps / after, rollout and draft training", both_at),
        "rollout_ratio": figure(rollout, "gaps / after, rollout", rollout_at),
        "tail_delay": figure(delay, "(gaps - after) / tail, median of pairs", delay_at),
        "updates_per_step": figure(updates / len(gaps), "updates of the head", None),
        "updates_in_gaps": figure(
            sum(s.in_gaps for s in gaps) / updates, "share of all updates", None
        ),
        "idle_share": figure(
            sum(s.idle for s in after) / sum(s.rollout * _replicas(s.events) for s in after),
            "share of the replicas' time without training in gaps",
            None,
        ),
        "idle_used": figure(
            sum(s.trained for s in gaps) / max(sum(s.idle for s in gaps), 1e-9),
            "share of idle time spent on training",
            None,
        ),
    }
    for arm, mine in steps.items():
        for name in ("rollout", "draft", "tail"):
            values = [getattr(s, name) for s in mine]
            ends = [min(values), max(values)]
            result[f"{name}_seconds/{arm}"] = figure(statistics.median(values), "s", ends)
    return result


def _ratio(steps: Mapping[str, Sequence[Step]], of: Callable[[Step], float]):
    return paired_ratio_interval(
        [of(step) for step in steps["gaps"]], [of(step) for step in steps["after"]]
    )


def run(cfg: SpotBenchConfig) -> dict[str, dict]:
    """Runs both arms, writes the three files and returns the figures."""
    out = Path(cfg.out)
    out.mkdir(parents=True, exist_ok=True)
    started = time.perf_counter()
    with (
        tempfile.TemporaryDirectory() as scratch,
        (out / f"{cfg.name}.jsonl").open("w", encoding="utf-8") as stream,
    ):
        comparison = Comparison(cfg, Path(scratch))
        comparison.warm_up()
        print(f"set-up {time.perf_counter() - started:.0f} s", flush=True)
        for number in range(1, cfg.steps + 1):
            comparison.step(number)
            for arm in ARMS:
                for event in comparison.steps[arm][-1].events:
                    stream.write(json.dumps({"arm": arm, **event}) + "\n")
            print(line(number, comparison), flush=True)
    figures = figures_of(comparison.timed(cfg.untimed_steps))
    figures["steps_identical"] = figure(
        comparison.identical, f"of {cfg.steps}: tokens, policy, head, optimizers, buffer", None
    )
    path = write_result("spot", dataclasses.asdict(cfg), figures, out / f"{cfg.name}.json")
    picture = plots.draw(path)
    print(report(figures), f"result: {path}", f"plot: {picture}", sep="\n")
    return figures


def line(number: int, comparison: Comparison) -> str:
    """Formats the seconds of both arms in a step."""
    parts = [f"step {number:>3}"]
    for arm in ARMS:
        step = comparison.steps[arm][-1]
        parts.append(f"{arm}: rollout {step.rollout:.2f} s, draft {step.draft:.2f} s")
    last = comparison.steps["gaps"][-1]
    parts.append(f"{last.in_gaps} of {last.updates} updates in gaps")
    return "  ".join([*parts, f"identical {comparison.identical}/{number}"])


def main(argv: Sequence[str] | None = None) -> None:
    cfg = load_config(SpotBenchConfig, argv, "bench.train spot", "Draft training in gaps.")
    with user_errors("train spot"):
        figures = run(cfg)
    if figures["steps_identical"]["value"] != cfg.steps:
        sys.exit("bench.train spot: the arms are not the same run: a bug, trust none of the times")
