"""Logits in blocks have the values and gradients of all logits at once, also split over devices."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiers import slow_but

from specjax.config import SamplingParams
from specjax.models.families.dense import dense_config
from specjax.models.transformer import init_params
from specjax.parallel import sharding
from specjax.parallel.context import context_of
from specjax.parallel.sharding import MeshConfig, make_mesh
from train.heads.training import DraftConfig, frozen_policy_parts, head_loss, head_of
from train.loss.algo import algo
from train.loss.logits import Head
from train.loss.logprobs import Scoring, Transforms, score_states
from train.loss.optim import OptimConfig
from train.loss.packing import Sample, pack
from train.loss.policy import PolicyTrainer
from train.loss.terms import count_denominators, rl_loss, sft_loss
from train.registry import OBJECTIVES

ROWS, LENGTH, VOCAB, WIDTH = 4, 32, 40, 16
UNEVEN = np.float32(1.2539)  # a weight that bfloat16 does not have: it has 1.25 and 1.2578
needs_devices = pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 devices")
MESH = {"fsdp": 2, "cp": 2, "tp": 2}
LAYOUTS = [pytest.param({}, id="one device"), pytest.param(MESH, id="a mesh", marks=needs_devices)]
AXES = {"embed": ("vocab", "embed"), "lm_head": ("embed", "vocab")}


def config(tied):
    return dense_config(
        VOCAB, WIDTH, 24, num_layers=1, num_heads=2, num_kv_heads=2, head_dim=8,
        tie_embeddings=tied, mtp_num_layers=1,
    )  # fmt: skip


@functools.cache
def packed():
    """Rows of several samples, with all that a loss reads."""
    rng = np.random.default_rng(0)
    samples = [
        Sample(
            i,
            rng.integers(0, VOCAB, 3).tolist(),
            rng.integers(0, VOCAB, n := int(rng.integers(4, 12))).tolist(),
            behaviour_logprobs=(-rng.random(n) * 3).tolist(),
            advantage=float(rng.normal()),
        )
        for i in range(9)
    ]
    [batch] = pack(samples, LENGTH, ROWS, 1)
    for name in ("old_logprobs", "ref_logprobs"):
        noise = rng.normal(0, 0.3, (ROWS, LENGTH)).astype("f4")
        batch[name] = (batch["behaviour_logprobs"] + noise) * batch["loss_mask"]
    assert batch["segment_ids"].max() > 1
    return batch


@functools.cache
def arrays():
    rng = np.random.default_rng(1)
    normed = rng.normal(size=(ROWS, LENGTH, WIDTH)).astype("f4")
    return normed, rng.normal(size=(WIDTH, VOCAB)).astype("f4")


def placed(axes):
    """(mesh, context, function that moves rows to the mesh) of mesh axes."""
    layout = MeshConfig(**axes)
    mesh = make_mesh(layout)
    context = context_of(layout, mesh)

    def rows(tree):
        if mesh is None:
            return jax.device_put(tree)
        if context is not None:
            tree = jax.tree.map(context.permute, tree)
        return jax.device_put(tree, sharding.rows_sharding(mesh))

    return mesh, context, rows


def weights(mesh, tree):
    return (
        tree if mesh is None else jax.device_put(tree, sharding.param_shardings(mesh, tree, AXES))
    )


def restored(context, rows):
    return np.asarray(rows) if context is None else context.restore(np.asarray(rows))


def assert_blocks_equal_the_whole(scoring, axes, name, chunk):
    mesh, context, rows = placed(axes)
    normed, matrix = arrays()
    matrix = matrix.T if name == "embed" else matrix

    def scored(given, matrix, batch, mesh, context, chunk):
        head = Head.of(mesh, AXES[name], matrix, (ROWS, LENGTH), chunk)
        assert head.is_whole == (chunk is None)
        how = dataclasses.replace(scoring, context=context)

        def loss(normed, matrix):
            found = score_states(how, head, normed, matrix, batch)
            entropy = 0 if scoring.transforms else found[1].sum()
            return jnp.sum(jnp.cos(found[0]) * batch["loss_mask"]) + entropy, found

        return jax.grad(loss, (0, 1), has_aux=True)(given, matrix)

    run = jax.jit(scored, static_argnums=(3, 4, 5))
    (d_normed, d_matrix), found = run(normed, matrix, packed(), None, None, None)
    given, matrix = rows((normed, packed())), weights(mesh, {name: matrix})[name]
    (d_normed_b, d_matrix_b), found_b = run(given[0], matrix, given[1], mesh, context, chunk)
    for a, b in zip((d_normed, *found), (d_normed_b, *found_b), strict=True):
        np.testing.assert_allclose(a, restored(context, b), rtol=2e-5, atol=4e-5)
    np.testing.assert_allclose(d_matrix, d_matrix_b, rtol=2e-5, atol=4e-5)
    assert mesh is None or d_matrix_b.sharding.is_equivalent_to(matrix.sharding, 2)


@pytest.mark.parametrize("axes", LAYOUTS)
@pytest.mark.parametrize(("name", "chunk"), [("lm_head", 5), ("embed", 13)])
def test_scores_in_blocks_of_the_vocabulary_and_their_gradients(axes, name, chunk):
    assert_blocks_equal_the_whole(Scoring(0.7), axes, name, chunk)


CASES = {
    "filters": {"temperature": 0.7, "top_k": 6, "top_p": 0.8, "logit_bias": {2: 1.5}},
    "penalties": {"presence_penalty": 0.3, "repetition_penalty": 1.4, "min_p": 0.05},
}


@pytest.mark.parametrize(
    ("case", "chunk", "axes"),
    [
        ("penalties", 3, {}),
        pytest.param("filters", 9, MESH, marks=[needs_devices, pytest.mark.slow]),
    ],
)
def test_scores_after_all_transforms_in_blocks_of_tokens(axes, case, chunk):
    transforms = Transforms.of(SamplingParams(**CASES[case], max_tokens=9), (3, 4), VOCAB)
    assert_blocks_equal_the_whole(Scoring(transforms=transforms), axes, "lm_head", chunk)


@pytest.mark.parametrize(
    ("loss", "chunk", "axes"),
    [("kl", 5, {}), pytest.param("tv_e2e", 9, MESH, marks=[needs_devices, pytest.mark.slow])],
)
def test_losses_of_the_head_over_several_steps_in_blocks_of_tokens(axes, loss, chunk):
    cfg, settings = config(tied=False), DraftConfig(loss=loss, unroll_steps=3, step_decay=0.8)
    mesh, context, rows = placed(axes)
    policy = frozen_policy_parts(init_params(cfg, 0))
    policy["lm_head"] = 20 * policy["lm_head"]
    head, (states, _) = head_of(cfg).init(1), arrays()

    def run(given, policy, batch, mesh, context, chunk):
        def value(head):
            more = context, None, mesh, chunk
            with sharding.ambient(mesh):
                return head_loss(cfg, settings, 0.9, head, policy, batch, given, *more)

        return jax.value_and_grad(value, has_aux=True)(head)

    run = jax.jit(run, static_argnums=(3, 4, 5))
    whole = run(states, policy, packed(), None, None, None)
    given = rows((states, packed()))
    blocks = run(given[0], weights(mesh, policy), given[1], mesh, context, chunk)
    for a, b in zip(*map(jax.tree.leaves, (whole, blocks)), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)


def assert_equal_but_for_rounding(found, wanted):
    """Asserts that arrays differ by roundings to bfloat16, and by no common factor."""
    found, wanted = np.asarray(found, "f8"), np.asarray(wanted, "f8")
    np.testing.assert_allclose(found, wanted, rtol=2**-6, atol=2**-10 * np.abs(wanted).max())
    factor = np.sum(found * wanted) / np.sum(wanted * wanted)
    np.testing.assert_allclose(factor, 1, atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("scores", ["temperature", "processed"])
def test_gradients_of_scores_of_bfloat16_states_are_the_same_in_blocks(scores):
    (normed, matrix), batch = arrays(), packed()
    transforms = Transforms.of(SamplingParams(**CASES["filters"], max_tokens=9), (3, 4), VOCAB)
    how = Scoring(transforms=transforms) if scores == "processed" else Scoring(0.7)

    def gradients(chunk):
        head = Head.of(None, AXES["lm_head"], matrix, (ROWS, LENGTH), chunk)

        def loss(normed, matrix):
            found, _ = score_states(how, head, normed, matrix, batch)
            return UNEVEN * jnp.sum(found * batch["loss_mask"])

        return jax.jit(jax.grad(loss, (0, 1)))(jnp.bfloat16(normed), matrix)

    blocks = gradients(5)
    assert [gradient.dtype for gradient in blocks] == [jnp.bfloat16, jnp.float32]
    for found, wanted in zip(blocks, gradients(None), strict=True):
        assert_equal_but_for_rounding(found, wanted)


MORE = {"kl_loss_coef": 0.1, "tis": True, "entropy_coeff": 0.1}


@pytest.mark.parametrize("objective", slow_but([*OBJECTIVES.names, "sft"], "grpo", "gspo"))
def test_gradients_of_every_objective_are_the_same_in_blocks(objective):
    cfg, batch = config(tied=objective == "sft"), packed()
    loss = sft_loss if objective == "sft" else rl_loss(algo(objective, **MORE))
    params = init_params(cfg, 0)
    params["embed"] = 5 * params["embed"]
    found = []
    for chunk in (None, 7):
        trainer = PolicyTrainer(
            cfg, loss, OptimConfig().build(()), temperature=0.8, chunk=chunk, entropy_gradient=True
        )
        zeros = jax.tree.map(jnp.zeros_like, params)
        run = trainer.programs["accumulate"]
        found.append(run(params, zeros, trainer.place(batch), count_denominators([batch])))
    whole, blocks = found
    assert all(np.any(np.asarray(a)) for a in jax.tree.leaves(whole[0]))
    for a, b in zip(*map(jax.tree.leaves, (whole, blocks)), strict=True):
        np.testing.assert_allclose(a, b, rtol=3e-5, atol=3e-5)


@pytest.mark.slow
@needs_devices
def test_a_micro_batch_on_a_mesh_has_the_gradients_of_one_device():
    cfg, batch = config(tied=False), packed()
    mesh, context, _ = placed(MESH)
    params = init_params(cfg, 0)
    loss, denominators = rl_loss(algo()), count_denominators([batch])

    def gradients(mesh, context, chunk):
        trainer = PolicyTrainer(
            cfg, loss, OptimConfig().build(()), mesh, context=context, chunk=chunk
        )
        here, zeros = params, jax.tree.map(jnp.zeros_like, params)
        if mesh is not None:
            where = sharding.param_shardings(mesh, params, trainer.axes)
            here, zeros = jax.device_put((params, zeros), (where, where))
        run = trainer.programs["accumulate"]
        found, _, sums = run(here, zeros, trainer.place(batch), denominators)
        return found, sums

    one = gradients(None, None, None)
    for chunk in (None, 5):
        split = gradients(mesh, context, chunk)
        for a, b in zip(*map(jax.tree.leaves, (one, split)), strict=True):
            np.testing.assert_allclose(a, b, rtol=3e-5, atol=3e-5)
