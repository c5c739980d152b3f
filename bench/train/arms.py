"""`python -m bench.train arms --config configs/arms.yaml`: four RL runs from one start.

    none            rollouts by plain decoding
    frozen          speculative, with the checkpoint's draft head, which is never trained
    online          speculative, from the same head, trained beside the policy
    online_random   speculative, from a randomly initialised head, trained beside the policy

All arms live in one process and take turns step by step, in an order that rotates, so that the
machine's noise hits all alike. After every step tokens, rewards and policy parameters are compared
bit by bit: speculation and draft training may change times and nothing else. Where a token differs
it is judged whether floating point explains it, and no equality is claimed after it.

Writes `arms.jsonl` (one record per step and arm), `arms.json` (figures) and `arms.png`. The
recorded acceptance is also replayed through every cost table in `costs` (`bench.control predict`).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np

from bench import plots
from bench.command import own_settings, user_errors
from bench.control import predict
from bench.plots import Records, series
from bench.record import figure, paired_ratio_interval, report, write_result
from specjax.command_line import ConfigError, load_config
from specjax.engine.compare import Difference, first_difference
from specjax.engine.request import make_jobs
from specjax.schema import option
from train.collect import group_params, tokens_digest
from train.groups import Group
from train.heads import DraftConfig
from train.rollout_schema import RolloutSection
from train.schema import EvalSection, RLConfig
from train.trainer import Trainer

# A step whose tokens differ in more samples than this has a few of them judged, not all.
JUDGED_AT_MOST = 8
RATE = "rollout/tokens_per_sec"
LONGEST = "rollout/longest_sample_tokens_per_sec"
ACCEPT = "rollout/spec_accept_length"

# Arms compared: the faster one expected first.
PAIRS = (
    ("online", "none"),
    ("online", "frozen"),
    ("frozen", "none"),
    ("online_random", "none"),
)
# Arm: (draft.mode, rollout.draft).
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
    """`python -m bench.train arms`: all settings of `train.rl`, and how the arms are compared."""

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
        """Returns the settings of one arm's run."""
        mode, draft = ARMS[arm]
        cfg = own_settings(RLConfig, self)
        cfg.draft = dataclasses.replace(cfg.draft, mode=mode)
        cfg.rollout = dataclasses.replace(cfg.rollout, draft=draft)
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


# --- are the arms the same run? --------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Fingerprint:
    """Digests of one step of one arm: equal for bit-identical steps.

    Attributes:
      tokens: digest of every sampled token id.
      rewards: digest of the rewards' bytes.
      parameters: SHA-256 over the bytes of all policy parameters after the update.
    """

    tokens: str
    rewards: str
    parameters: str

    @classmethod
    def of(cls, trainer: Trainer) -> Fingerprint:
        """Takes the digests of the step that the trainer has just done."""
        rewards = np.array([group.rewards for group in trainer.last_rollout])
        return cls(
            tokens_digest(trainer.last_rollout),
            hashlib.sha256(rewards.tobytes()).hexdigest(),
            parameters_digest(trainer.params),
        )

    def differing(self, other: Fingerprint) -> list[str]:
        """Returns the names of the digests that differ."""
        return [
            field.name
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != getattr(other, field.name)
        ]


def parameters_digest(params) -> str:
    """Returns the SHA-256 of names, shapes, dtypes and bytes of a parameter tree."""
    digest = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        array = np.ascontiguousarray(jax.device_get(leaf))
        digest.update(f"{jax.tree_util.keystr(path)} {array.shape} {array.dtype}".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()


def snapshot(params):
    """Copies parameters to the host (a numpy view of a CPU array would prevent donation)."""
    return jax.tree.map(lambda a: np.array(jax.device_get(a), copy=True), params)


class Equality:
    """Compares every arm with the reference, step by step, until the arm differs.

    Attributes:
      reference: the arm that the others are compared with.
      steps: number of compared steps.
      identical: per arm, number of steps that are bit-identical to the reference's.
      ended: reason, for each arm that differed; no equality is claimed for it from that step on.
      unexplained: arms whose difference floating point does not explain.
    """

    def __init__(self, reference: str, others: Sequence[str]):
        self.reference, self.steps = reference, 0
        self.identical = dict.fromkeys(others, 0)
        self.ended: dict[str, str] = {}
        self.unexplained: list[str] = []

    def compare(
        self,
        step: int,
        trainers: Mapping[str, Trainer],
        prints: Mapping[str, Fingerprint],
        params_before,
    ) -> list[str]:
        """Compares one step.

        Args:
          step: number of the step.
          trainers, prints: trainers and fingerprints of all arms, by name.
          params_before: `snapshot` of the reference before the step, the policy that sampled it.

        Returns:
          one message per arm that differs for the first time.
        """
        self.steps += 1
        messages = []
        for arm in self.identical:
            if arm in self.ended:
                continue
            differing = prints[self.reference].differing(prints[arm])
            if not differing:
                self.identical[arm] += 1
                continue
            reason = f"{', '.join(differing)} differ from {self.reference}'s"
            explained = False
            if "tokens" in differing:
                found = list(explain(trainers[self.reference], trainers[arm], step, params_before))
                explained = bool(found) and all(d.explained for d in found)
                reason += "; all explained" if explained else "; NOT explained"
                reason += f" by floating point: {'; '.join(map(str, found)) or 'other problems'}"
            else:
                reason += " though the tokens are equal: something besides the policy update moved"
            if not explained:
                self.unexplained.append(arm)
            self.ended[arm] = f"step {step}: {reason}"
            messages.append(f"{arm}: {self.ended[arm]}; no equality is claimed from here on")
        return messages

    @property
    def bit_identical(self) -> int:
        """Steps at which every arm was bit-identical to the reference."""
        return min(self.identical.values(), default=self.steps)

    def verdict(self) -> str:
        """Says in one line how many steps were identical, and why the others were not."""
        line = f"steps bit-identical: {self.bit_identical} of {self.steps}"
        return "; ".join([line, *(f"{arm}, {why}" for arm, why in self.ended.items())])


def explain(reference: Trainer, other: Trainer, step: int, params_before) -> Iterator[Difference]:
    """Judges the samples of a step that differ between two trainers, `JUDGED_AT_MOST` of them.

    The other trainer's runner takes the parameters that sampled the step, and its own afterwards.
    """
    cfg, runner = other.cfg, other.engine.runner
    pairs = list(differing_samples(reference.last_rollout, other.last_rollout))
    if not pairs:
        return
    runner.set_params(params_before, other.head)
    for group, index in pairs[:JUDGED_AT_MOST]:
        sampled = other.last_rollout[group]
        sampling = group_params(cfg, step, sampled.position)
        eos_ids, tokenizer = other.model.eos_token_ids, other.tokenizer
        job = make_jobs(sampled.prompt, sampling, eos_ids, tokenizer, group)[index]
        yield first_difference(
            runner,
            job,
            reference.last_rollout[group].responses[index].token_ids,
            sampled.responses[index].token_ids,
        )
    other.sync_weights()


def differing_samples(a: Sequence[Group], b: Sequence[Group]) -> Iterator[tuple[int, int]]:
    """Yields (group, sample) of the samples of the same problems whose tokens differ."""
    for group, (x, y) in enumerate(zip(a, b, strict=False)):
        if x.position != y.position:
            return  # dynamic sampling went on to other problems after an earlier difference
        for index, (s, t) in enumerate(zip(x.responses, y.responses, strict=True)):
            if s.token_ids != t.token_ids:
                yield group, index


class Comparison:
    """Runs the trainers of all arms step by step.

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
        """Runs one step of every arm; returns its records and messages about equality."""
        before = snapshot(self.trainers["none"].params)
        turn = (step - 1) % len(self.cfg.arms)
        prints, records = {}, []
        for place, arm in enumerate([*self.cfg.arms[turn:], *self.cfg.arms[:turn]]):
            trainer = self.trainers[arm]
            metrics = trainer.step()
            prints[arm] = Fingerprint.of(trainer)
            records.append(record(step, arm, place, trainer, metrics, prints[arm]))
        messages = self.equality.compare(step, self.trainers, prints, before)
        for entry in records:
            arm = entry["arm"]
            entry["identical"] = None if arm == "none" else arm not in self.equality.ended
        self.records += records
        return records, messages


def record(
    step: int, arm: str, place: int, trainer: Trainer, metrics: Mapping, fingerprint: Fingerprint
) -> dict:
    """Makes one line of arms.jsonl: `train.rl`'s metrics, digests, lengths and histograms."""
    samples = [s for group in trainer.last_rollout for s in group.responses]
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
    """Replaces numbers that JSON cannot express by None."""
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
    figures = figures_of(comparison.records, cfg.arms, cfg.untimed_steps, comparison.equality)
    figures["slots"] = figure(cfg.rollout.max_batch, "samples that run at once")
    figures |= predict.figures_of(predictions)
    path = write_result("arms", settings_of(cfg), figures, out / "arms.json")
    plots.draw(path)
    print(report(figures))
    print(comparison.equality.verdict())
    print(f"total {time.perf_counter() - started:.0f} s\nresult: {path}\nplot: {out / 'arms.png'}")
    return comparison.equality


def line(step: int, records: Sequence[Mapping], equality: Equality) -> str:
    """Formats speed and accept length of every arm in a step."""
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


# --- figures -----------------------------------------------------------------------------------


def spread(values: Sequence[float], unit: str) -> dict:
    """Returns the median, with the quartiles as interval."""
    if not values:
        return figure(None, unit)
    quartiles = [float(np.quantile(values, q)) for q in (0.25, 0.75)]
    return figure(float(np.median(values)), unit, quartiles)


def figures_of(records: Records, arms: Sequence[str], untimed: int, equality: Equality) -> dict:
    """Computes all figures but the predictions.

    Args:
      untimed: first steps that are left out of timings.
    """
    result = equality_figures(equality)
    result["untimed_steps"] = figure(untimed, "first steps left out of timings")
    for arm in arms:
        result |= arm_figures(records, arm, untimed)
    for one, other in PAIRS:
        if one not in arms or other not in arms:
            continue
        for name, metric in (("ratio", RATE), ("longest_ratio", LONGEST)):
            mine, theirs = (series(records, arm, metric, untimed) for arm in (one, other))
            value, *interval = paired_ratio_interval(mine, theirs)
            result[f"{name}/{one}/{other}"] = figure(value, "median over steps", interval)
    return result


def equality_figures(equality: Equality) -> dict:
    verdict = f"steps bit-identical: {equality.bit_identical} of {equality.steps}"
    result = {"steps_bit_identical": figure(equality.bit_identical, f"of {equality.steps} steps")}
    result["equality"] = figure(verdict, "verdict")
    for arm, steps in equality.identical.items():
        result[f"steps_bit_identical/{arm}"] = figure(steps, f"of {equality.steps} steps")
        if arm in equality.ended:
            result[f"first_difference/{arm}"] = figure(equality.ended[arm], "verdict")
    return result


def arm_figures(records: Records, arm: str, untimed: int) -> dict:
    """Returns speed, seconds, acceptance, entropy and reward of one arm."""
    result = {
        f"tokens_per_sec/{arm}": spread(series(records, arm, RATE, untimed), "tok/s"),
        f"longest_tokens_per_sec/{arm}": spread(series(records, arm, LONGEST, untimed), "tok/s"),
    }
    for part in ("rollout", "train", "draft"):
        values = series(records, arm, f"time/{part}", untimed)
        if values:
            result[f"seconds_{part}/{arm}"] = spread(values, "s per step")
    for name, metric, unit in (
        ("accept_length", ACCEPT, "tokens per round"),
        ("mtp_loss", "train/mtp_loss", "nats per token"),
        ("entropy", "train/entropy", "nats per token"),
        ("reward", "rollout/reward", "mean per answer"),
    ):
        values = series(records, arm, metric)
        if values:
            result[f"{name}_first/{arm}"] = figure(values[0], unit)
            result[f"{name}_last/{arm}"] = figure(values[-1], unit)
    shares = draft_shares(records, arm, untimed)
    if shares:
        result[f"draft_training_share/{arm}"] = spread(shares, "% of the policy update")
    return result


def draft_shares(records: Records, arm: str, untimed: int) -> list[float]:
    """Returns the seconds of draft training in percent of those of the policy update, by step."""
    return [
        100 * r["time/draft"] / r["time/train"]
        for r in records
        if r["arm"] == arm and r["step"] > untimed and r.get("time/draft") and r["time/train"]
    ]


# --- command line ------------------------------------------------------------------------------


def settings_of(cfg: ArmsConfig) -> dict:
    """Returns the configuration, and what differs between the arms."""
    settings = dataclasses.asdict(cfg)
    settings["differences"] = {
        arm: {"draft": dataclasses.asdict(one.draft), "rollout.draft": one.rollout.draft}
        for arm in cfg.arms
        if (one := cfg.of_arm(arm))
    }
    settings["regime"] = (
        f"{cfg.rollout.max_batch} slots run at once: the long tail of a rollout, and where "
        "speculation pays on this kind of machine"
    )
    return settings


def main(argv: Sequence[str] | None = None) -> None:
    cfg = load_config(ArmsConfig, argv, "bench.train arms", "Four RL runs from one start.")
    with user_errors("train arms"):
        equality = run(cfg)
    if equality.unexplained:
        sys.exit(
            f"bench.train arms: {', '.join(equality.unexplained)}: not the same run as "
            f"{equality.reference}'s, and floating point does not explain it: a bug"
        )
