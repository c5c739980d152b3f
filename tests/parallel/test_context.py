"""Rows whose tokens are split over devices: shifts, attention, and whole training programs."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from specjax.config import RunConfig
from specjax.drafts.mtp import init_head_params, weight_axes
from specjax.kernels import dispatch
from specjax.models.families.dense import dense_config
from specjax.models.transformer import init_params
from specjax.parallel import sharding
from specjax.parallel.context import Context, context_of, shift
from specjax.parallel.sharding import MeshConfig, make_mesh
from train.heads.training import DraftConfig, DraftTrainer
from train.loss.algo import algo
from train.loss.packing import Sample, pack
from train.loss.policy import PolicyTrainer
from train.loss.terms import count_denominators, rl_loss

pytestmark = pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 devices")


def make_context(cp: int, **axes) -> Context:
    config = MeshConfig(cp=cp, **axes)
    return context_of(config, make_mesh(config))


def placed(rows, context: Context):
    return jax.device_put(context.permute(rows), sharding.rows_sharding(context.mesh))


# --- who holds what -------------------------------------------------------------------------------


def test_every_device_has_the_same_causal_work():
    context = make_context(2)
    assert context.places(8).tolist() == [0, 1, 6, 7, 2, 3, 4, 5]  # chunks 0 and 3, 1 and 2
    assert len(set((make_context(4).places(64).reshape(4, -1) + 1).sum(1).tolist())) == 1
    rows = np.arange(32).reshape(2, 16)
    assert (context.restore(context.permute(rows)) == rows).all()
    with pytest.raises(ValueError, match="a multiple of 4"):
        context.places(18)


@pytest.mark.parametrize("cp", [4, 8])
def test_shifts_across_devices_equal_those_of_whole_rows(cp):
    context = make_context(cp)
    rng = np.random.default_rng(0)
    rows, wide = rng.integers(1, 99, (2, 32)), rng.normal(size=(2, 32, 3)).astype(np.float32)
    steps = (1, 2, -1, 5, -6)  # further than a chunk of 2 or 4 tokens

    @functools.partial(jax.jit, static_argnums=1)
    def shifts(x, context=None):
        return [[shift(array, by, context) for by in steps] for array in x]

    expected = shifts((rows, wide))
    assert expected[0][0].tolist() == [[*row[1:], 0] for row in rows.tolist()]
    assert expected[0][2].tolist() == [[0, *row[:-1]] for row in rows.tolist()]
    split = shifts(tuple(placed(x, context) for x in (rows, wide)), context)
    for whole, parts in zip(jax.tree.leaves(expected), jax.tree.leaves(split), strict=True):
        np.testing.assert_array_equal(context.restore(parts), whole)


# --- attention ------------------------------------------------------------------------------------


def attention_inputs(heads=4, kv_heads=2, rows=2, length=32):
    """Queries, keys, values, two steps of own rows, and packed segments with padding."""
    rng = np.random.default_rng(1)
    shapes = [(rows, heads, length, 8), *[(rows, kv_heads, length, 8)] * 6]
    arrays = [rng.normal(size=shape).astype(np.float32) for shape in shapes]
    segments = np.zeros((rows, length), np.int32)
    for row, lengths in enumerate([(3, 17, 7), (1, 30)][:rows]):
        segments[row, : sum(lengths)] = np.repeat(np.arange(1, len(lengths) + 1), lengths)
    return arrays, segments


def attend_twice(arrays, segments, context=None):
    """Both kinds of training attention of the same queries; padding counts for nothing."""
    q, k, v, k1, v1, k2, v2 = arrays
    base = dispatch.causal_attention(q, k, v, segments, context)
    own = [(k1, v1), (k2, v2)]
    more = dispatch.causal_attention_with_own(q, k, v, own, segments, context)
    return jnp.where(segments[:, None, :, None] > 0, jnp.stack([base, more]), 0.0)


def with_gradients(arrays, segments, context=None):
    def loss(arrays):
        out = attend_twice(arrays, segments, context)
        return (jnp.sin(3 * out) * jnp.arange(8)).sum(), out

    (_, out), gradients = jax.value_and_grad(loss, has_aux=True)(arrays)
    return out, gradients


CASES = [
    {"cp": 4, "fsdp": 2},
    {"cp": 2, "tp": 4},  # more parts than key/value heads
]


@pytest.mark.parametrize("axes", CASES)
def test_attention_over_devices_and_its_gradients_equal_the_reference(axes):
    context = make_context(**axes)
    arrays, segments = attention_inputs()
    out, gradients = jax.jit(with_gradients)(arrays, segments)
    there = [x[:, :, context.places(32)] for x in arrays]
    run = jax.jit(with_gradients, static_argnums=2)
    split, split_gradients = run(there, placed(segments, context), context)
    places = np.argsort(context.places(32))
    np.testing.assert_allclose(np.asarray(split)[:, :, :, places], out, atol=1e-5)
    for ours, theirs in zip(split_gradients, gradients, strict=True):
        np.testing.assert_allclose(np.asarray(ours)[:, :, places], theirs, rtol=1e-5, atol=1e-4)


def test_chunks_that_nothing_sees_are_left_out():
    """Values that are not a number spoil whatever is multiplied with them, by zero as well."""
    context = make_context(2)
    places, back = context.places(32), np.argsort(context.places(32))
    arrays, _ = attention_inputs(rows=1)
    segments = np.repeat([1, 2, 2, 3], 8)[None].astype(np.int32)
    attend = jax.jit(lambda q, k, v, ids: dispatch.causal_attention(q, k, v, ids, context))
    q, k, v = arrays[:3]
    v = v.copy()
    v[:, :, 16:24] = np.nan  # the third chunk: later than 1 and 2, of another segment than 4
    there = [x[:, :, places] for x in (q, k, v)]
    out = np.asarray(attend(*there, context.permute(segments)))[:, :, back]
    spoilt = np.isnan(out).any(axis=(0, 1, 3))
    assert spoilt.reshape(4, 8).all(1).tolist() == [False, False, True, False]
    assert spoilt.sum() == 8


# --- training -------------------------------------------------------------------------------------

MODEL = dense_config(
    vocab_size=64, hidden_size=32, intermediate_size=32, num_layers=2, num_heads=8,
    num_kv_heads=4, head_dim=4, mtp_num_layers=1, tie_embeddings=False,
    run=RunConfig(scan_layers=True),
)  # fmt: skip


@dataclasses.dataclass
class Sgd:
    """Stands in for `OptimConfig`."""

    lr: float = 1.0

    def build(self, decayed) -> optax.GradientTransformation:
        return optax.sgd(self.lr)


STEP = Sgd()
DRAFT = dataclasses.replace(DraftConfig(loss="kl", unroll_steps=2), optim=STEP)


@pytest.fixture(scope="module")
def batch():
    """One micro-batch [8 32] of packed samples that end anywhere in a chunk."""
    rng = np.random.default_rng(0)
    samples = []
    for i in range(24):
        prompt, length = rng.integers(0, 64, 1 + i % 4), 2 + i % 9
        logprobs = rng.uniform(-5, -3, length)
        response = rng.integers(0, 64, length)
        samples.append(Sample(i, prompt, response, logprobs, logprobs, float(rng.normal())))
    return pack(samples, 32, 8, 1)[0]


def train_once(batch, config: MeshConfig):
    """Losses, states and gradients of policy and head; a step of size one is the gradient."""
    mesh = make_mesh(config)
    context = context_of(config, mesh)
    model = MODEL.running(sequence_parallel=config.sequence_parallel)
    params, head = init_params(MODEL, 0), init_head_params(MODEL, 1)
    if mesh is not None:
        params = jax.device_put(params, sharding.param_shardings(mesh, params, weight_axes(MODEL)))
        head = jax.device_put(head, sharding.param_shardings(mesh, head, weight_axes(MODEL)))
    loss = rl_loss(algo(loss_aggregation="sequence"), on_policy=True)
    policy = PolicyTrainer(model, loss, optax.sgd(1.0), mesh, context=context)
    draft = DraftTrainer(model, DRAFT, 0.7, mesh, context)
    before, here = jax.device_get((params, head)), policy.place(batch)
    params, _, states, sums = policy.update(
        params, policy.init_opt_state(params), [here], count_denominators([batch])
    )
    head, _, draft_sums = draft.update(head, draft.init_opt_state(head), params, [here], states)
    if mesh is not None:
        assert states[0].sharding == sharding.rows_sharding(mesh)
        for tree in (params, head):
            split = sharding.param_shardings(mesh, tree, weight_axes(MODEL))
            assert jax.tree.map(lambda a: a.sharding, tree) == split
    numbers = [sums["loss"], sums["entropy"], *draft_sums.values()]
    gradients = jax.tree.map(lambda old, new: old - new, before, jax.device_get((params, head)))
    return numbers, policy.fetch(states[0]), *gradients


@pytest.fixture(scope="module")
def one_device(batch):
    return train_once(batch, MeshConfig())


def layouts():
    """Every way to spread 8 devices over the axes."""
    usual = {(1, 2, 2, 2)}
    for sizes in itertools.product((1, 2, 4, 8), repeat=4):
        if np.prod(sizes) == 8:
            axes = dict(zip(("data", "fsdp", "tp", "cp"), sizes, strict=True))
            marks = () if sizes in usual else pytest.mark.slow
            yield pytest.param(MeshConfig(**axes), marks=marks, id=str(sizes))

    for sizes in ((1, 2, 2, 2), (2, 1, 4, 1)):
        axes = dict(zip(("data", "fsdp", "tp", "cp"), sizes, strict=True))
        config = MeshConfig(**axes, sequence_parallel=True)
        yield pytest.param(config, marks=pytest.mark.slow, id=f"{sizes}-sequence_parallel")


def relative(ours, theirs) -> float:
    difference = optax.tree.norm(jax.tree.map(lambda a, b: a - b, ours, theirs))
    return float(difference / optax.tree.norm(theirs))


@pytest.mark.parametrize("config", list(layouts()))
def test_losses_and_gradients_are_those_of_one_device_in_every_layout(batch, one_device, config):
    numbers, states, *gradients = train_once(batch, config)
    for sharded, whole in zip(numbers, one_device[0], strict=True):
        np.testing.assert_allclose(sharded, whole, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(states, one_device[1], rtol=1e-5, atol=1e-5)
    for sharded, whole in zip(gradients, one_device[2:], strict=True):
        assert relative(sharded, whole) < 1e-5
