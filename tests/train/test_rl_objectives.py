"""Options of `algo` in runs of the trainer: each changes what the policy learns, and is logged."""

import jax
import numpy as np
import pytest
import tiny_run

from specjax.command_line import parse_config
from train.schema import RLConfig
from train.trainer import Trainer


@pytest.fixture(scope="module", autouse=True)
def programs():
    with tiny_run.shared_programs():
        yield


@pytest.fixture(scope="module")
def train(thin_policy, tmp_path_factory):
    """A function that returns (trainer, metrics of each of two steps)."""
    out = tmp_path_factory.mktemp("objectives")

    def run(**changes):
        argv = tiny_run.arguments(thin_policy, out, draft__mode="none", **changes)
        trainer = Trainer(parse_config(RLConfig, argv)[0])
        return trainer, [trainer.step() for _ in range(2)]

    return run


@pytest.fixture(scope="module")
def base(train):
    return train()


def same(a: Trainer, b: Trainer) -> bool:
    pairs = zip(jax.tree.leaves(a.params), jax.tree.leaves(b.params), strict=True)
    return all(np.array_equal(x, y) for x, y in pairs)


def test_the_reference_of_kl_in_rewards_is_updated(train, base):
    kept, steps = train(algo__kl_coef=0.1)
    assert steps[0]["train/reward_kl_penalty"] == 0  # the reference is the policy of the start
    assert steps[1]["train/reward_kl_penalty"] != 0 and "train/kl" not in steps[1]
    assert not same(kept, base[0])
    moved, steps = train(algo__kl_coef=0.1, algo__ref_update_steps=1)
    assert steps[1]["train/reward_kl_penalty"] == 0 and same(moved, base[0])
    assert "train/reward_kl_penalty" not in base[1][1]


def test_truncated_samples_are_left_out_of_the_update(train, base):
    off, (first, _) = base
    masked, (step, _) = train(algo__mask_truncated="true")
    assert step["rollout/tokens_sha"] == first["rollout/tokens_sha"]
    assert 0 < first["rollout/truncated_ratio"] < 1 and step["train/truncated_masked"] > 0
    longest = 20 * step["train/truncated_masked"]
    assert step["train/tokens"] == first["train/tokens"] - longest
    assert not same(masked, off)


def test_long_responses_lose_reward_and_dynamic_sampling_does_not_see_it(train, base):
    shaped, (step, _) = train(algo__preset="dapo")
    assert 0 < step["rollout/overlong_penalty"] < 1
    assert step["rollout/reward"] == base[1][0]["rollout/reward"]
    assert not same(shaped, base[0])
    assert any(
        note.startswith("algo.preset=dapo sets algo.objective=grpo") for note in shaped.notes
    )


def test_an_entropy_bonus_raises_entropy(train, base):
    _, (first, second) = train(algo__entropy_coeff=0.5)
    assert first["train/entropy"] == base[1][0]["train/entropy"]
    assert first["train/entropy_loss"] == pytest.approx(-0.5 * first["train/entropy"], rel=1e-4)
    total = first["train/policy_loss"] + first["train/entropy_loss"]
    assert first["train/loss"] == pytest.approx(total, rel=1e-4, abs=1e-7)
    assert second["train/entropy"] > base[1][1]["train/entropy"]


def test_another_objective_trains_the_policy_otherwise(train, base):
    trainer, steps = train(algo__preset="reinforce_pp", rollout__prompts=8, rollout__n=1)
    assert not same(trainer, base[0])
    numbers = [x for step in steps for x in step.values() if isinstance(x, float)]
    assert len(numbers) > 40 and np.isfinite(numbers).all()
    assert steps[0]["rollout/zero_std"] == 0, "no group of one sample has equal rewards"


def test_groups_outside_of_the_bounds_are_replaced(train, base):
    _, (step, _) = train(algo__filter_groups__min=0.6)
    for name in ("rollout/groups_drawn", "rollout/groups_dropped"):
        assert step[name] > base[1][0][name]
