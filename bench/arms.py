"""`python -m bench.arms --config configs/arms.yaml`: four RL runs from one start, side by side.

    none            rollouts by plain decoding
    frozen          speculative, with the checkpoint's draft head, which is never trained
    online          speculative, from the same head, trained beside the policy
    online_random   speculative, from a randomly initialised head, trained beside the policy

All arms live in one process and take turns step by step, in an order that rotates, so that the
machine's noise hits all alike. After every step tokens, rewards and policy parameters are compared
bit by bit: speculation and draft training may change times and nothing else. Where a token differs
it is judged whether floating point explains it, and no equality is claimed after it.

Writes `arms.jsonl` (one record per step and arm), `arms.json` (figures) and `arms.png`. At the end
the recorded acceptance is replayed through every cost table in `costs`: see `bench.predict`.
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench import arms_figures, arms_plot, predict
from bench.command import own_settings, user_errors
from bench.equality import Equality, Fingerprint, snapshot
from bench.record import write_result
from specjax.command_line import ConfigError, load_config
from specjax.schema import option
from train.draft import DraftConfig
from train.rollout_schema import RolloutSection
from train.schema import EvalSection, RLConfig
from train.trainer import Trainer

# Arm: (draft.mode, rollout.head).
ARMS = {
    "none": ("none", "checkpoint"),
    "frozen": ("frozen", "checkpoint"),
    "online": ("online", "checkpoint"),
    "online_random": ("online", "random"),
}


@dataclass
class RandomArmSection:
    """Draft training of `online_random`, which starts from nothing; null: as in `draft`."""

    lr: float | None = option(None, "peak learning rate of the head")
    epochs: int | None = option(None, "passes over the step's micro-batches")
    unroll_steps: int | None = option(None, "recursive steps trained per token")
    max_microbatches: int | None = option(None, "micro-batches of each step used; 0 is all")


@dataclass
class ArmsConfig(RLConfig):
    """`python -m bench.arms`: everything `train.rl` knows, and how the arms are compared."""

    out: str = option("bench/results", "directory of arms.json, arms.jsonl and arms.png")
    steps: int = option(16, "RL steps of every arm")
    arms: list[str] = option(list(ARMS), f"arms to run, of {', '.join(ARMS)}; none is needed")
    random: RandomArmSection = option(RandomArmSection, "draft training of online_random")
    untimed_steps: int = option(1, "first steps left out of timings: they compile")
    costs: str | None = option("bench/costs", "directory of cost tables; null: no predictions")
    # Few slots: where speculation pays on a CPU, and what the tail of a long rollout looks like.
    rollout: RolloutSection = option(RolloutSection(max_batch=4), "rollouts")
    eval: EvalSection = option(EvalSection(problems=0), "held-out evaluation; the bench needs none")

    def __post_init__(self) -> None:
        unknown = [arm for arm in self.arms if arm not in ARMS]
        if unknown or len(set(self.arms)) != len(self.arms) or "none" not in self.arms:
            raise ConfigError(
                f"arms must be different ones of {', '.join(ARMS)}, 'none' among them, got "
                f"{self.arms}"
            )
        if not 0 <= self.untimed_steps < self.steps:
            raise ConfigError(
                f"expected 0 <= untimed_steps < steps, got {self.untimed_steps} and {self.steps}"
            )
        if self.rollout.acceptance != "coupled":
            raise ConfigError(
                "the arms can be equal in rollout.acceptance=coupled only; 'block' is equal in "
                "distribution, not token by token"
            )
        if self.algo.tis:
            raise ConfigError(
                "algo.tis weighs the loss with the rollout's log-probabilities, whose last bits "
                "depend on the decoding program: set algo.tis=false to compare arms bit by bit"
            )

    def of_arm(self, arm: str) -> RLConfig:
        """The settings of one arm's run."""
        mode, head = ARMS[arm]
        cfg = own_settings(RLConfig, self)
        cfg.draft = dataclasses.replace(cfg.draft, mode=mode)
        cfg.rollout = dataclasses.replace(cfg.rollout, head=head)
        if arm == "online_random":
            cfg.draft = self._random_draft(cfg.draft)
        return cfg

    def _random_draft(self, draft: DraftConfig) -> DraftConfig:
        changes = {
            name: value
            for name in ("epochs", "unroll_steps", "max_microbatches")
            if (value := getattr(self.random, name)) is not None
        }
        draft = dataclasses.replace(draft, **changes)
        if self.random.lr is not None:
            draft.optim = dataclasses.replace(draft.optim, lr=self.random.lr)
        return draft


class Comparison:
    """The trainers of all arms, and what their steps came to.

    Attributes:
      records: one per step and arm, in the order in which they ran.
    """

    def __init__(self, cfg: ArmsConfig):
        self.cfg = cfg
        self.trainers = {arm: Trainer(cfg.of_arm(arm)) for arm in cfg.arms}
        first = self.trainers[cfg.arms[0]]
        for trainer in self.trainers.values():
            trainer.policy = first.policy  # one compiled policy update serves every arm
        self.equality = Equality("none", [arm for arm in cfg.arms if arm != "none"])
        self.records: list[dict] = []

    def warm_up(self) -> None:
        for trainer in self.trainers.values():
            trainer.warm_up()

    def step(self, step: int) -> tuple[list[dict], list[str]]:
        """One step of every arm; returns its records and what is to be said about equality."""
        before = snapshot(self.trainers["none"].params)
        turn = (step - 1) % len(self.cfg.arms)
        prints, records = {}, []
        for place, arm in enumerate([*self.cfg.arms[turn:], *self.cfg.arms[:turn]]):
            trainer = self.trainers[arm]
            metrics = trainer.step()
            prints[arm] = Fingerprint.of(trainer)
            records.append(record(step, arm, place, trainer, metrics, prints[arm]))
        messages = self.equality.look(step, self.trainers, prints, before)
        for entry in records:
            arm = entry["arm"]
            entry["identical"] = None if arm == "none" else arm not in self.equality.ended
        self.records += records
        return records, messages


def record(
    step: int, arm: str, place: int, trainer: Trainer, metrics: Mapping, fingerprint: Fingerprint
) -> dict:
    """One line of arms.jsonl: metrics under `train.rl`'s names, digests, lengths, histograms."""
    samples = [s for group in trainer.last_rollout.groups for s in group]
    tree = trainer.engine.runner.tree
    return {
        "step": step,
        "arm": arm,
        "place": place,
        **{name: _finite(value) for name, value in metrics.items()},
        "digests": dataclasses.asdict(fingerprint),
        "rows": tree.rows if tree else 1,
        "draft_steps": tree.steps if tree else 0,
        "samples": {
            "lengths": [len(s.token_ids) for s in samples],
            "histograms": [list(s.stats.histogram) for s in samples] if tree else None,
        },
    }


def _finite(value):
    """JSON has no NaN."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def run(cfg: ArmsConfig) -> Equality:
    """Runs all arms, writes the three files, and returns how equal the arms were."""
    out = Path(cfg.out)
    out.mkdir(parents=True, exist_ok=True)
    started = time.perf_counter()
    comparison = Comparison(cfg)
    comparison.warm_up()
    print(f"{len(cfg.arms)} arms, set-up {time.perf_counter() - started:.0f} s", flush=True)
    with (out / "arms.jsonl").open("w", encoding="utf-8") as stream:
        for step in range(1, cfg.steps + 1):
            records, messages = comparison.step(step)
            for entry in records:
                stream.write(json.dumps(entry) + "\n")
            stream.flush()
            print(line(step, records, comparison.equality), flush=True)
            for message in messages:
                print(f"WARNING: {message}", flush=True)
    predictions = predictions_of(cfg, comparison.records)
    figures = arms_figures.figures(
        comparison.records, cfg.arms, cfg.untimed_steps, comparison.equality
    )
    figures["slots"] = arms_figures.figure(cfg.rollout.max_batch, "samples that run at once")
    figures |= predict.figures_of(predictions)
    path = write_result("arms", settings_of(cfg), figures, out / "arms.json")
    arms_plot.draw(out)
    arms_figures.print_table(figures, cfg.arms)
    print(comparison.equality.verdict())
    print(f"total {time.perf_counter() - started:.0f} s\nresult: {path}\nplot: {out / 'arms.png'}")
    return comparison.equality


def line(step: int, records: Sequence[Mapping], equality: Equality) -> str:
    """One line per step: speed and accept length of every arm."""
    parts = []
    for entry in sorted(records, key=lambda r: list(ARMS).index(r["arm"])):
        text = f"{entry['arm']} {entry['rollout/tokens_per_sec']:.0f} tok/s"
        if "rollout/spec_accept_length" in entry:
            text += f" ({entry['rollout/spec_accept_length']:.2f})"
        parts.append(text)
    return f"step {step:>3}  {'  '.join(parts)}  identical {equality.bit_identical}/{step}"


def predictions_of(cfg: ArmsConfig, records: Sequence[dict]) -> list[predict.Prediction]:
    """Replays the recorded acceptance through the cost tables; none for trees."""
    tables = sorted(Path(cfg.costs).glob("*.json")) if cfg.costs else []
    arms: dict[str, list[dict]] = {}
    for entry in records:
        if entry["draft_steps"]:
            arms.setdefault(entry["arm"], []).append(entry)
    try:
        return predict.predict_all(arms, tables)
    except ValueError as error:
        print(f"no predictions: {error}", flush=True)
        return []


def settings_of(cfg: ArmsConfig) -> dict:
    """The configuration, and what differs between the arms in words."""
    settings = dataclasses.asdict(cfg)
    settings["differences"] = {
        arm: {"draft": dataclasses.asdict(one.draft), "rollout.head": one.rollout.head}
        for arm in cfg.arms
        if (one := cfg.of_arm(arm))
    }
    settings["regime"] = (
        f"{cfg.rollout.max_batch} slots run at once: the long tail of a rollout, and where "
        "speculation pays on this kind of machine"
    )
    return settings


def main(argv: Sequence[str] | None = None) -> None:
    cfg = load_config(ArmsConfig, argv, "bench.arms", "Four RL runs from one start, compared.")
    with user_errors("arms"):
        equality = run(cfg)
    if equality.unexplained:
        sys.exit(
            f"bench.arms: {', '.join(equality.unexplained)}: not the same run as "
            f"{equality.reference}'s, and floating point does not explain it: a bug"
        )


if __name__ == "__main__":
    main()
