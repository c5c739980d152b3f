"""Options of `algo` in runs of the trainer: each changes what the policy learns, and is logged."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny_run
from reference_loss import Scored, differences, loss_of
from tiers import slow_but

from specjax.command_line import parse_config
from train.loss.algo import algo
from train.schema import RLConfig
from train.trainer import Trainer

pytestmark = pytest.mark.usefixtures("shared_programs")


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


@pytest.mark.slow
def test_the_reference_of_kl_in_rewards_is_the_policy_of_the_start(train, base):
    kept, steps = train(algo__kl_coef=0.1)
    assert steps[0]["train/reward_kl_penalty"] == 0  # the reference is the policy of the start
    assert steps[1]["train/reward_kl_penalty"] != 0 and "train/kl" not in steps[1]
    assert not same(kept, base[0])
    assert "train/reward_kl_penalty" not in base[1][1]


# A case has to be compiled, so options of all objectives are each with one of them.
UPDATED = {
    "gspo": {"objective": "gspo", "tis": True, "clip_ratio": 0.01, "clip_ratio_high": 0.01},
    "cispo": {"objective": "cispo", "clip_ratio_high": 0.02, "mask_truncated": True},
    "dr_grpo": {"preset": "dr_grpo", "mask_truncated": True},
}


@dataclasses.dataclass
class Update:
    """What an update of the policy was given, and what it gave back.

    Attributes:
      samples: the samples that it was trained on, by their ids.
      sums: metric sums.
      norm: function that returns the norm of the gradient in the parameters for that in the tokens
        of each sample.
    """

    samples: dict[int, Scored]
    sums: dict
    norm: Callable[[list[np.ndarray]], float]


@pytest.fixture
def watch(thin_policy, tmp_path, pull):
    """A function that runs a step of two updates; returns its trainer, the updates and metrics.

    Dynamic sampling replaces some groups. The engine's log-probabilities are moved, so that
    truncated importance sampling has weights.
    """

    def run(case):
        settings = {f"algo__{name}": value for name, value in UPDATED[case].items()}
        argv = tiny_run.arguments(
            thin_policy, tmp_path, draft__mode="none", reward="tiny_run:rare",
            algo__updates_per_rollout=2, **settings,
        )  # fmt: skip
        trainer, found = Trainer(parse_config(RLConfig, argv)[0]), []
        policy, place, update = trainer.policy, trainer.policy.place, trainer.policy.update

        def moved(batch):
            noise = np.random.default_rng(0).normal(0, 0.4, batch["loss_mask"].shape)
            behaviour = batch["behaviour_logprobs"] + noise * batch["loss_mask"]
            return place({**batch, "behaviour_logprobs": behaviour.astype(np.float32)})

        def watched(params, opt_state, batches, counts, keep):
            here = [policy.logprobs(params, batch) for batch in batches]
            given = jax.tree.map(np.array, (batches, here))
            norm = functools.partial(pull, policy, jax.tree.map(jnp.copy, params), batches)
            *after, sums = update(params, opt_state, batches, counts, keep)
            samples, at = samples_of(*given)
            found.append(Update(samples, {**sums}, functools.partial(norm, at)))
            return *after, sums

        policy.place, policy.update = moved, watched
        try:
            metrics = trainer.step()
        finally:
            del policy.place, policy.update
        return trainer, found, metrics

    return run


@pytest.fixture(scope="module")
def pull():
    """A function that returns the norm of the parameters' gradient for that of the tokens."""

    programs, names = [], ("tokens", "positions", "segment_ids")

    def run(policy, params, batches, at, gradients):
        def scored(params, batch, weights):
            return jnp.sum(policy._token_logprobs(params, batch)[0] * weights)

        if not programs:  # all policies score alike, and share it
            programs.append(jax.jit(jax.grad(scored)))
        total = None
        for index, batch in enumerate(batches):
            weights = np.zeros(batch["tokens"].shape, np.float32)
            for (where, own), gradient in zip(at, gradients, strict=True):
                if where == index:
                    weights[own] = gradient
            new = programs[0](params, {name: batch[name] for name in names}, weights)
            total = new if total is None else jax.tree.map(jnp.add, total, new)
        return float(optax.tree.norm(total))

    return run


def samples_of(batches, new):
    """The samples of micro-batches, by their ids, and where each of them lies."""
    samples, at = {}, []
    for index, (batch, logprobs) in enumerate(zip(batches, new, strict=True)):
        for i in np.unique(batch["sample_ids"][batch["loss_mask"] > 0]).tolist():
            own = (batch["sample_ids"] == i) & (batch["loss_mask"] > 0)
            names = ("old_logprobs", "behaviour_logprobs", "loss_mask", "advantages")
            old, behaviour, mask, advantage = (batch[name][own].astype(float) for name in names)
            zeros = np.zeros_like(old)
            rest = zeros, zeros, mask, advantage
            samples[i] = Scored(logprobs[own].astype(float), old, behaviour, *rest)
            at.append((index, own))
    return samples, at


@pytest.mark.parametrize("case", slow_but(UPDATED, "gspo", "dr_grpo"))
def test_updates_have_the_loss_and_gradient_of_the_numpy_reference(watch, case):
    trainer, updates, metrics = watch(case)
    cfg, masked = trainer.cfg.algo, int(metrics.get("train/truncated_masked", 0))
    size = trainer.cfg.rollout.prompts * trainer.cfg.rollout.n // 2
    assert (metrics["rollout/groups_dropped"] > 0) == cfg.dynamic_sampling
    assert len(updates) == 2 and (masked > 0) == cfg.mask_truncated
    assert masked == 2 * size - sum(len(update.samples) for update in updates)
    for i, update in enumerate(updates):
        assert all(i * size <= sample < (i + 1) * size for sample in update.samples)
        samples = [*update.samples.values()]
        left_out, fixed = size - len(samples), [s.new for s in samples]
        loss = loss_of(samples, cfg, fixed, left_out)
        assert float(update.sums["loss"]) == pytest.approx(loss, rel=1e-4, abs=1e-6)
        norm = update.norm(differences(samples, cfg, left_out))
        assert float(update.sums["grad_norm"]) == pytest.approx(norm, rel=1e-3)
    # The second update is far enough from the old policy that all others have another gradient.
    assert update.sums["clip_fraction"] > 0
    for other in UPDATED.keys() - {case}:
        settings = {name: x for name, x in UPDATED[other].items() if name != "mask_truncated"}
        another = algo(**settings).settled(trainer.cfg.rollout.max_tokens)
        other_norm = update.norm(differences(samples, another, left_out))
        assert other_norm != pytest.approx(norm, rel=5e-3), other
