"""The draft loss never moves a policy parameter."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_run

from specjax.checkpoint import huggingface as hf
from specjax.command_line import parse_config
from train.heads.training import DraftConfig, DraftTrainer, frozen_policy_parts, head_loss
from train.loss.optim import OptimConfig
from train.loss.packing import Sample, pack
from train.loss.policy import PolicyTrainer
from train.loss.terms import sft_loss
from train.schema import RLConfig


@pytest.fixture(scope="module")
def setting(thin_policy):
    """(model, policy, head, batches, states) of a packed batch."""
    model, params, head = hf.load_checkpoint(thin_policy, "float32")
    rng = np.random.default_rng(0)
    samples = [
        Sample(i, rng.integers(0, 272, 3), rng.integers(0, 272, int(rng.integers(4, 20))))
        for i in range(8)
    ]
    cfg = parse_config(RLConfig, tiny_run.arguments(thin_policy, "unused"))[0]
    policy = PolicyTrainer(model, sft_loss, cfg.optim.build(()))
    batches = [policy.place(b) for b in pack(samples, 32, 2)]
    return model, params, head, batches, [policy.states(params, b) for b in batches], cfg


@pytest.mark.parametrize("loss", ["ce", "kl"])
def test_the_gradient_of_the_head_loss_is_exactly_zero_for_policy_and_states(setting, loss):
    model, params, head, batches, states, cfg = setting
    cfg.draft.loss, cfg.draft.unroll_steps = loss, 2

    def value(head, policy, states):
        return head_loss(model, cfg.draft, 1.0, head, policy, batches[0], states)[0]

    gradient = jax.jit(jax.grad(value, argnums=(0, 1, 2)))
    gradients = gradient(head, frozen_policy_parts(params), states[0])
    assert all(np.any(np.asarray(g)) for g in jax.tree.leaves(gradients[0]))
    assert not any(np.any(np.asarray(g)) for g in jax.tree.leaves(gradients[1:]))


def test_through_the_whole_policy_the_head_loss_has_no_gradient(setting):
    model, params, head, batches, _, cfg = setting
    trainer = PolicyTrainer(model, sft_loss, cfg.optim.build(()))

    def value(params):
        _, states, _ = trainer._forward(params, batches[0])
        policy = frozen_policy_parts(params)
        return head_loss(model, cfg.draft, 1.0, head, policy, batches[0], states)[0]

    assert not any(np.any(np.asarray(g)) for g in jax.tree.leaves(jax.jit(jax.grad(value))(params)))


def test_an_update_of_the_head_leaves_the_policys_arrays_untouched(setting):
    model, params, head, batches, states, cfg = setting
    before = [np.array(a) for a in jax.tree.leaves(params)]
    head = jax.tree.map(lambda a: a.copy(), head)  # donated
    trainer = DraftTrainer(model, cfg.draft)
    old = [np.array(a) for a in jax.tree.leaves(head)]
    head, _, sums = trainer.update(head, trainer.init_opt_state(head), params, batches, states)
    assert sums["draft_update_norm"] > 0
    assert any(not np.array_equal(a, b) for a, b in zip(old, jax.tree.leaves(head), strict=True))
    after = jax.tree.leaves(params)
    assert all(np.array_equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("factor", [0.2, 5.0])
def test_the_loss_scaling_factor_scales_every_update_of_the_head(factor):
    """Through warm-up, clip, Adam's moments, decay of the rate and of weights."""
    optim = OptimConfig(
        lr=1e-2, warmup_steps=2, decay_steps=4, weight_decay=0.1, clip_norm=0.01, b2=0.9
    )
    head = {"proj": jnp.linspace(-1.0, 1.0, 6).reshape(2, 3)}
    draws = np.random.default_rng(0).normal(size=(6, 2, 3)).astype(np.float32)
    steps = {}
    for scale in (1.0, factor):
        optimizer = DraftConfig(mtp_loss_scaling_factor=scale, optim=optim).optimizer(("proj",))
        state, steps[scale] = optimizer.init(head), []
        for gradient in draws:
            updates, state = optimizer.update({"proj": gradient}, state, head)
            steps[scale].append(np.asarray(updates["proj"]))
    np.testing.assert_allclose(steps[factor], factor * np.array(steps[1.0]), rtol=1e-5)
    assert np.abs(steps[1.0]).min() > 0


def test_micro_batches_without_draft_tokens_do_not_move_the_head(setting):
    model, params, head, batches, states, cfg = setting
    head = jax.tree.map(lambda a: a.copy(), head)
    trainer = DraftTrainer(model, cfg.draft)
    empty = [{**batches[0], "loss_mask": np.zeros_like(batches[0]["loss_mask"])}]
    old = [np.array(a) for a in jax.tree.leaves(head)]
    head, opt, sums = trainer.update(head, trainer.init_opt_state(head), params, empty, states[:1])
    assert sums["draft_update_norm"] == 0 and not any(
        np.any(np.asarray(a)) for a in jax.tree.leaves(opt)
    )
    assert all(np.array_equal(a, b) for a, b in zip(old, jax.tree.leaves(head), strict=True))
