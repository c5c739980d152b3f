"""EAGLE-3 heads whose weights are split over devices draft and learn what they do on one."""

import dataclasses

import drive
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from test_eagle3 import HEADS, STEPS, TARGET_WIDTH, VOCAB, drafter, made_up, params_of
from test_mtp import enter, prompts_of, propose

from specjax.models.families.dense import dense_config
from specjax.models.rows import param_axes
from specjax.parallel import sharding
from specjax.parallel.context import context_of
from specjax.parallel.sharding import MeshConfig, make_mesh, rollout_mesh
from train.heads import DraftConfig, DraftTrainer, inner_taps

pytestmark = pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 devices")

# The first has an embedding, tokens and columns of its own, the other has none.
FIRST, OTHER = list(HEADS)[:2]
TARGET_AXES = {"embed": ("vocab", "embed"), "lm_head": ("embed", "vocab")}
POLICY = dense_config(
    vocab_size=VOCAB, hidden_size=TARGET_WIDTH, intermediate_size=16, num_layers=5, num_heads=4,
    num_kv_heads=2, head_dim=8, tie_embeddings=False,
)  # fmt: skip


def split(mesh, tree, axes):
    return jax.device_put(tree, sharding.param_shardings(mesh, tree, axes))


def parts_of(array) -> int:
    return array.size // array.addressable_shards[0].data.size


@pytest.mark.parametrize("name", [FIRST, pytest.param(OTHER, marks=pytest.mark.slow)])
def test_a_round_on_a_mesh_proposes_what_it_does_on_one_device(name):
    """On the mesh that rollouts have after training on fsdp=2 and tp=2."""
    source, rng = HEADS[name], np.random.default_rng(0)
    mesh = rollout_mesh(make_mesh(MeshConfig(fsdp=2, tp=2)))
    run = enter(drafter(source, prompts_of(rng, 3, 9)), STEPS)
    grown = drive.random_tree(rng, 2, (2, 3), VOCAB, True)
    whole, _ = propose(run, grown)
    several = run._replace(
        params=split(mesh, run.params, source.axes()),
        target=split(mesh, run.target, TARGET_AXES),
        state=jax.device_put(run.state, sharding.state_shardings(mesh, run.state)),
    )
    assert parts_of(several.params["fc"]) == parts_of(several.params["layers"][0]["q"]) == 2
    with jax.set_mesh(mesh):
        parts, _ = propose(several, grown)
    for got, want in zip(parts, whole, strict=True):
        np.testing.assert_allclose(got, want, atol=1e-5)


@dataclasses.dataclass
class Sgd:
    """Stands in for `OptimConfig`: a step of size one is the gradient."""

    lr: float = 1.0

    def build(self) -> optax.GradientTransformation:
        return optax.sgd(self.lr)


def updated(source, config: MeshConfig):
    """Sums of an update, and what it adds to the head; two sequences in each of four rows."""
    rng, mesh = np.random.default_rng(1), make_mesh(config)
    context = context_of(config, mesh)
    target, _ = made_up(source, 1)
    policy = {**target._asdict(), "norm": jnp.ones(TARGET_WIDTH)}
    batch = {
        "tokens": rng.integers(0, VOCAB, (4, 16)),
        "positions": np.tile([*range(9), *range(7)], (4, 1)),
        "segment_ids": np.tile(np.repeat([1, 2], [9, 7]), (4, 1)),
        "loss_mask": np.ones((4, 16), np.float32),
    }
    settings = dataclasses.replace(DraftConfig(loss="kl", unroll_steps=2), optim=Sgd())
    trainer = DraftTrainer(POLICY, settings, 0.7, mesh, context, source=source)
    width = TARGET_WIDTH * (1 + len(inner_taps(source)))
    states = rng.normal(size=(4, 16, width)).astype(np.float32)
    head = before = jax.tree.map(np.asarray, params_of(source))
    if mesh is None:
        head = jax.tree.map(jnp.array, head)
    else:
        head, policy = split(mesh, head, source.axes()), split(mesh, policy, param_axes(POLICY))
        assert parts_of(head["fc"]) == parts_of(head["layers"][0]["q"]) == mesh.size
        if context is not None:
            batch, states = jax.tree.map(context.permute, (batch, states))
        batch, states = jax.device_put((batch, states), sharding.rows_sharding(mesh))
    head, _, sums = trainer.update(head, trainer.init_opt_state(head), policy, [batch], [states])
    return sums, jax.tree.map(lambda new, old: np.asarray(new) - old, head, before)


@pytest.mark.parametrize(
    ("name", "config"),
    [
        (FIRST, MeshConfig(fsdp=2, tp=2)),
        pytest.param(FIRST, MeshConfig(fsdp=2, tp=2, cp=2), marks=pytest.mark.slow),
        pytest.param(OTHER, MeshConfig(fsdp=2, tp=2, cp=2), marks=pytest.mark.slow),
    ],
)
def test_an_update_on_a_mesh_is_that_of_one_device(name, config):
    source = HEADS[name]
    (want, whole), (got, parts) = (updated(source, each) for each in (MeshConfig(), config))
    assert want["mtp_tokens"].tolist() == [48, 40]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4), got, want)
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(parts), jax.tree.leaves(whole), strict=True
    ):
        size = np.abs(b).max()
        moved = size > 0 or path[-1].key in source.fixed
        assert moved, f"{jax.tree_util.keystr(path)} has no gradient"
        np.testing.assert_allclose(a, b, atol=1e-4 * size + 1e-7, err_msg=str(path))
