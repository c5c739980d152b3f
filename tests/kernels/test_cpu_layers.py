"""Whole layers and commits by the kernels for CPUs, against XLA's operation after operation."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from test_cpu import MODEL, normal, pytestmark  # noqa: F401  (skips without a compiler)
from test_tpu import random_case

from bench.programs import change_dense
from specjax.decode.tree import chain_bits
from specjax.drafts.mtp import MTPHead, init_head_params, to_format
from specjax.interfaces import Memory, Room, Scratch, Where
from specjax.kernels import dispatch
from specjax.kernels.cpu import native
from specjax.memory import KVCache, commit_rows, empty
from specjax.models.mixers.attention import Attention
from specjax.models.mlps.dense import Dense
from specjax.models.rope import Rope
from specjax.models.transformer import graphdef, init_params, to_decode_layout
from specjax.weights.matrix import dot

PANELS = MODEL.running(products="panels", attention="reference")


def noisy(params, seed):
    """With norms and biases that are not all alike."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: x + 0.1 * normal(rng, *x.shape), params)


def decode_of(bias: bool, qk_norm: bool, kernel: str):
    """A policy's `decode` by one kernel of attention, jitted, with its parameters."""
    return _decode_of(bias, qk_norm, kernel, native.LAYERS)


@functools.cache
def _decode_of(bias, qk_norm, kernel, library):
    """One for each library, whose name tracing puts into the program."""
    cfg = change_dense(PANELS, qkv_bias=bias, qk_norm=qk_norm).running(attention=kernel)
    params = noisy(to_decode_layout(init_params(cfg, seed=3), cfg), seed=5)

    @functools.partial(jax.jit, static_argnums=6)
    def decode(tokens, positions, cache, prefix, bits, scratch, held, table):
        model = nnx.merge(graphdef(cfg, cfg.run.decode_layout), params)
        where = Where("tree", positions, prefix=prefix, visible=bits, held=held, table=table)
        memory = Memory(by_layer(cache), (None,) * 2)
        if scratch is not None:
            scratch = tuple(Scratch(layer, None) for layer in by_layer(scratch))
        x, scratch, *_ = model.decode(tokens, where, memory, scratch)
        k, v = zip(*(layer.pages for layer in scratch), strict=True)
        return x, KVCache(k, v)

    return decode


def by_layer(cache: KVCache) -> tuple[KVCache, ...]:
    return tuple(KVCache(*pair) for pair in zip(*cache, strict=True))


CASES = dict(
    seed=st.integers(0, 2**16),
    batch=st.integers(1, 4),
    rows=st.integers(1, 9),
    before=st.integers(0, 6),
    stretches=st.integers(1, 3),
    bias=st.booleans(),
    qk_norm=st.booleans(),
    by_table=st.booleans(),
)


def compare_layers(seed, batch, rows, before, stretches, bias, qk_norm, by_table):
    cfg, rng = MODEL, np.random.default_rng(seed)
    mixer = cfg.layers[0].mixer
    shape = batch, mixer.num_kv_heads, mixer.num_heads // mixer.num_kv_heads, rows, 16, stretches
    *_, prefix, bits, table = random_case(seed, *shape, "float32", before=before, head=16)
    if not by_table:
        table, prefix = None, np.minimum(prefix, 16)
    pages = 1 + batch * stretches if by_table else batch

    def kv(*shape):
        return KVCache(*(tuple(normal(rng, *shape) for _ in range(2)) for _ in range(2)))

    cache = kv(pages, mixer.num_kv_heads, 16, 16)
    scratch = kv(batch, mixer.num_kv_heads, before + rows + 2, 16) if before else None
    tokens = rng.integers(0, cfg.vocab_size, (batch, rows))
    positions = prefix[:, None] + rng.integers(0, 5, (batch, rows))
    args = tokens, positions, cache, prefix, bits, scratch, before, table
    wanted = decode_of(bias, qk_norm, "reference")(*args)
    found = decode_of(bias, qk_norm, "cpu")(*args)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), found, wanted)


@settings(max_examples=6)
@given(**CASES)
def test_layers_equal_those_of_xla(**case):
    compare_layers(**case)


@pytest.mark.parametrize("batch", [1, 3])
def test_a_row_is_the_same_bits_beside_any_others(batch):
    """Of a chain of drafts, and as the next token of plain decoding: bit by bit."""
    rng, length, cfg = np.random.default_rng(1), 7, MODEL
    decode = decode_of(True, True, "cpu")
    pages = normal(rng, 4, 4, cfg.layers[0].mixer.num_kv_heads, 32, 16)
    cache = KVCache(tuple(pages[:2]), tuple(pages[2:]))
    tokens = rng.integers(0, cfg.vocab_size, (batch, length))
    prefix = np.array([9, 0, 16], np.int32)[:batch]
    positions = prefix[:, None] + np.arange(length)
    table = np.arange(1, batch + 1, dtype=np.int32)[:, None]
    whole, rows = decode(tokens, positions, cache, prefix, chain_bits(length), None, 0, table)
    for at in range(length):
        here = slice(at, at + 1)
        alone, new = decode(
            tokens[:1, here], positions[:1, here], cache, prefix[:1] + at,
            chain_bits(1), None, 0, table[:1],
        )  # fmt: skip
        np.testing.assert_array_equal(alone[0, 0], whole[0, at])
        for mine, all_of in zip(jax.tree.leaves(new), jax.tree.leaves(rows), strict=True):
            np.testing.assert_array_equal(mine[0, :, 0], all_of[0, :, at])
        cache = commit_rows(cache, new, prefix[:1] + at, table=table[:1], kernel="cpu")


def test_a_head_drafts_what_it_drafts_by_xla():
    cfg = change_dense(PANELS, mtp_num_layers=2)
    head = noisy(init_head_params(cfg, seed=2), 4)
    rng, batch, rows = np.random.default_rng(0), 2, 3
    hidden, embedded = (normal(rng, batch, rows, cfg.hidden_size) for _ in range(2))
    cache = tuple(normal(rng, batch, cfg.layers[0].mixer.num_kv_heads, 16, 16) for _ in range(2))
    buffers = tuple(normal(rng, batch, cfg.layers[0].mixer.num_kv_heads, 5, 16) for _ in range(2))
    positions = np.broadcast_to(np.arange(4, 4 + rows), (batch, rows))
    prefix, bits = np.array([4, 9], np.int32), chain_bits(rows + 2)[2:]

    def drafted(**how):
        mine = cfg.running(**how)
        params = to_format(head, mine) if mine.run.products == "panels" else head
        module = MTPHead(mine, params)
        where = Where("tree", positions, prefix=prefix, visible=bits, held=2)
        pages, earlier = (KVCache(*cache),), Scratch((KVCache(*buffers),), None)
        return module.decode(1, hidden, embedded, where, pages, earlier)

    wanted = drafted(products="xla")
    for kernel in ("cpu", "reference"):
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5),
            drafted(attention=kernel), wanted,
        )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Relu2(Dense):
    """Derived from `Dense`, with its fields and its kind, and another function."""

    def run(self, w, x, where=None, given=None):
        gate, up = jnp.split(dot(x, w["gate_up"]), 2, -1) if "gate_up" in w else (
            dot(x, w["gate"]), dot(x, w["up"])
        )  # fmt: skip
        return dot(jax.nn.relu(gate) ** 2 * up, w["down"]), None, None


@dataclasses.dataclass(frozen=True)
class Quiet(Attention):
    """Derived from `Attention`: half of what it attends to."""

    def output(self, w, attended, gate=None):
        return super().output(w, attended, gate) / 2


def other_mlp(layer):
    return dataclasses.replace(layer, mlp=Relu2(layer.mlp.intermediate_size))


def other_mixer(layer):
    fields = {f.name: getattr(layer.mixer, f.name) for f in dataclasses.fields(layer.mixer)}
    return dataclasses.replace(layer, mixer=Quiet(**fields))


def with_mixer(**fields):
    return lambda layer: dataclasses.replace(
        layer, mixer=dataclasses.replace(layer.mixer, **fields)
    )


CHANGES = {
    "mlp": other_mlp,
    "mixer": other_mixer,
    "eps": with_mixer(norm_eps=0.5),
    "scale": with_mixer(scale=0.1),
    "share": with_mixer(rope=Rope(share=0.5)),
    "multiplier": lambda layer: dataclasses.replace(layer, residual_multiplier=0.5),
    "activation": lambda layer: dataclasses.replace(
        layer, mlp=dataclasses.replace(layer.mlp, activation="gelu_pytorch_tanh")
    ),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_layers_that_differ_from_the_kernel_s_decode_as_they_train(change):
    cfg = change_dense(PANELS, qk_norm=True).running(attention="cpu")
    assert dispatch.runs_layers(cfg)
    usual, cfg = cfg, cfg.replace(layers=tuple(map(change, cfg.layers)))
    params = noisy(init_params(cfg, seed=3), seed=5)
    tokens = np.random.default_rng(0).integers(0, cfg.vocab_size, (1, 6))
    positions, ones = np.arange(6)[None], np.ones((1, 6), np.int32)

    def trained(cfg):
        model = nnx.merge(graphdef(cfg), params)
        return model.hidden(tokens, positions, ones).x

    @jax.jit
    def decoded():
        model = nnx.merge(graphdef(cfg, cfg.run.decode_layout), to_decode_layout(params, cfg))
        memory = empty(cfg, Room(1, 1, 16))
        where = Where("tree", positions, prefix=np.zeros(1, np.int32), visible=chain_bits(6))
        return model.decode(tokens, where, memory).x

    wanted = trained(cfg)
    np.testing.assert_allclose(decoded(), wanted, atol=2e-5)
    assert np.abs(wanted - trained(usual)).max() > 1e-3, "the change changes nothing"


# --- commits --------------------------------------------------------------------------------------


@settings(max_examples=10)
@given(
    seed=st.integers(0, 2**16),
    batch=st.integers(1, 5),
    rows=st.integers(1, 20),
    stretches=st.integers(1, 4),
    by_table=st.booleans(),
)
def test_rows_are_committed_where_xla_commits_them(seed, batch, rows, stretches, by_table):
    rng, size = np.random.default_rng(seed), 24
    table = rng.permutation(batch * stretches).reshape(batch, stretches).astype(np.int32) + 1
    table = jnp.asarray(table) if by_table else None
    pages = 1 + batch * stretches if by_table else batch
    reach = size * (stretches if by_table else 1)
    start = jnp.asarray(rng.integers(0, reach - rows + 1, batch), jnp.int32)
    cache = KVCache(*((normal(rng, pages, 2, size, 16),) * 2 for _ in range(2)))
    new = KVCache(*((normal(rng, batch, 2, rows, 16),) * 2 for _ in range(2)))
    wanted = commit_rows(cache, new, start, start, table)
    found = jax.jit(functools.partial(commit_rows, kernel="cpu"))(cache, new, start, start, table)
    jax.tree.map(np.testing.assert_array_equal, found, wanted)


def test_what_a_program_is_donated_is_written_in_place():
    cache = KVCache((jnp.zeros((3, 1, 16, 16)),), (jnp.zeros((3, 1, 16, 16)),))
    rows = KVCache((jnp.ones((2, 1, 4, 16)),), (jnp.ones((2, 1, 4, 16)),))

    def loop(cache):
        def body(_, cache):
            return commit_rows(cache, rows, jnp.array([0, 3]), None, None, kernel="cpu")

        return jax.lax.fori_loop(0, 3, body, cache)

    text = jax.jit(loop, donate_argnums=0).lower(cache).compile().as_text()
    inside = text[text.index(native.COMMIT) - 2000 : text.index(native.COMMIT)]
    assert "f32[3,1,16,16]{3,2,1,0} copy(" not in inside
