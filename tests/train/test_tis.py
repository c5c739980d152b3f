"""Truncated importance sampling where strategies and replicas are chosen by time or load."""

import dataclasses
import math

import jax
import numpy as np
import pytest
import tiny_run
from scripted import Flips

from specjax.checkpoint.store import Checkpointer
from specjax.command_line import ConfigError, parse_config
from specjax.engine import engine
from train import rl
from train.run.start import restore, save
from train.schema import RLConfig

pytestmark = pytest.mark.usefixtures("shared_programs")

ARMS = ("off", "1_1_2", "2_1_3")
# By XLA, whose bits depend on what stands beside: specjax's kernels for CPUs would hide it.
WEIGHED = {"algo.tis": "true", "rollout.products": "xla", "attention": "reference"}
CHANGES = {
    **WEIGHED,
    "rollout.control.controller": "bandit",
    "rollout.control.strategies": f"[{','.join(ARMS)}]",
    "rollout.replicas": 2,
    "rollout.max_batch": 2,
    "rollout.chunk_tokens": 6,
    "rollout.stretch": 1,
    "rollout.over_sample": 1.5,
    "rollout.partial": "true",
    "draft.mode": "frozen",  # one program less
}
STEPS = 3


@pytest.fixture(scope="module")
def wide_policy(tmp_path_factory):
    """So wide that the order of sums depends on how many rows a matrix is multiplied with."""
    wide = {"hidden_size": 96, "intermediate_size": 128, "head_dim": 32, "num_layers": 1}
    return tiny_run.write_policy(tmp_path_factory.mktemp("wide") / "policy", **wide)


def config(policy, out, **changes) -> RLConfig:
    return parse_config(RLConfig, tiny_run.arguments(policy, out, **changes))[0]


def choosing(monkeypatch, *scripts, arms=ARMS) -> None:
    """The controllers of the replicas that are built next, in order."""
    rest = [Flips(arms, names) for names in scripts]
    monkeypatch.setattr(engine.controllers, "make_controller", lambda *_: rest.pop(0))


def behaviour(trainer) -> list:
    """Tokens and log-probabilities of the rollout, as the engines gave them."""
    return [[(s.token_ids, s.logprobs) for s in group.responses] for group in trainer.last_rollout]


LEARNED = (
    "rollout/tokens_sha", "rollout/carried_sha", "train/loss", "train/tis", "train/grad_norm",
    "train/train_rollout_logprob_abs_diff",
)  # fmt: skip


def steps_of(trainer, count) -> list:
    """What some steps sampled and learned; exact mode, if it is on, finds no difference."""
    found = []
    for _ in range(count):
        metrics = trainer.step()
        if trainer.exact is not None:
            assert metrics["rollout/exact_compared"] > 0 == metrics["rollout/exact_differences"]
        found.append((behaviour(trainer), {name: metrics.get(name) for name in LEARNED}))
    return found


def assert_same_weights(ours, theirs) -> None:
    trees = [(t.params, t.opt_state, t.head) for t in (ours, theirs)]
    for a, b in zip(*map(jax.tree.leaves, trees), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@pytest.mark.skipif(jax.device_count() < 2, reason="needs 2 devices")
@pytest.mark.slow
def test_in_invariant_mode_runs_repeat_exactly_whoever_chooses_what(
    wide_policy, tmp_path, monkeypatch
):
    """Over runs and resumes, with groups that are carried and steps that end early; and whether
    the same engines decode everything again plainly."""
    invariant = {**CHANGES, "rollout.invariant": "true"}
    cfg = config(wide_policy, tmp_path, **invariant)
    exact = config(wide_policy, tmp_path, **invariant, rollout__exact_mode="true")
    chosen = [(exact, ARMS, ARMS[::-1]), (cfg, ("2_1_3", "off", "2_1_3"), ("off",))]
    found = []
    for settings, *scripts in chosen:
        choosing(monkeypatch, *scripts)
        trainer = rl.Trainer(settings)
        trainer.warm_up()
        assert len(trainer.engines) == 2
        steps = steps_of(trainer, 1)
        if not found:
            with Checkpointer(tmp_path / "checkpoints") as checkpoints:
                save(trainer, checkpoints, block=True)
        found.append((trainer, steps + steps_of(trainer, STEPS - 1)))
    (first, steps), (second, same) = found
    assert steps == same
    assert_same_weights(first, second)
    assert len({metrics["rollout/tokens_sha"] for _, metrics in steps}) == STEPS
    assert all(metrics["train/train_rollout_logprob_abs_diff"] > 0 for _, metrics in steps)

    choosing(monkeypatch, ("1_1_2",), ("2_1_3", "off"))
    resumed = rl.Trainer(cfg)
    with Checkpointer(tmp_path / "checkpoints") as checkpoints:
        restore(resumed, checkpoints, 1)
    assert steps_of(resumed, STEPS - 1) == steps[1:]
    assert_same_weights(resumed, first)

    roll = dataclasses.replace(resumed.cfg.rollout, max_batch=1)
    resumed.cfg.rollout = roll  # other programs, and so other bits
    with (
        Checkpointer(tmp_path / "checkpoints") as checkpoints,
        pytest.raises(ConfigError, match="made with other settings of rollout"),
    ):
        restore(resumed, checkpoints, 1)


@pytest.mark.slow
def test_the_weight_is_that_of_the_log_probabilities_that_came_with_the_tokens(
    wide_policy, tmp_path, monkeypatch
):
    """Were they the trainer's own, or computed anew, the weight would be 1."""
    listed = engine.listed

    def shifted(result):
        lists = listed(result)
        moved = [[x + math.log(4) for x in row] for row in lists.report.logprobs]
        return lists._replace(report=lists.report._replace(logprobs=moved))

    plain, weighed = (rl.Trainer(config(wide_policy, tmp_path, **WEIGHED)) for _ in range(2))
    as_it_is = plain.step()
    monkeypatch.setattr(engine, "listed", shifted)
    moved = weighed.step()
    assert as_it_is["rollout/tokens_sha"] == moved["rollout/tokens_sha"]
    assert as_it_is["train/tis"] == pytest.approx(1, abs=1e-4)
    assert moved["train/tis"] == pytest.approx(0.25, rel=1e-4)
    assert moved["train/grad_norm"] == pytest.approx(as_it_is["train/grad_norm"] / 4, rel=1e-3)
