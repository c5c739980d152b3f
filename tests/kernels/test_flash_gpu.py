"""The GPU's attention of packed rows: values, gradients, and the tiles that it reads."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from specjax.config.model import ATTENTION_RESIDUALS
from specjax.kernels import flash_gpu, reference
from specjax.kernels.flash_gpu import Tile, Tiles

# Tiles of several sizes, so that a tile of queries has a part of a tile of keys, and the reverse.
SMALL = Tiles(Tile(32, 16, 4, 1), Tile(16, 32, 4, 1), Tile(16, 32, 4, 1))


@dataclasses.dataclass(frozen=True)
class Case:
    """Sizes and settings of a call; each is compiled once."""

    heads: int = 4
    kv_heads: int = 2
    length: int = 70  # no multiple of any tile
    size: int = 16
    steps: int = 0
    window: int | None = None
    soft_cap: float | None = None
    dtype: str = "float32"

    def arrays(self, seed: int = 0):
        rng = np.random.default_rng(seed)

        def normal(heads):
            shape = 2, heads, self.length, self.size
            return jnp.asarray(rng.normal(size=shape), self.dtype)

        q, k, v = (normal(heads) for heads in (self.heads, self.kv_heads, self.kv_heads))
        return q, k, v, [(normal(self.kv_heads), normal(self.kv_heads)) for _ in range(self.steps)]


@functools.cache
def with_gradients(case: Case, by_kernel: bool):
    """The function from arrays and segments to the result and all gradients, compiled."""
    options = {"window": case.window, "soft_cap": case.soft_cap}

    def attend(q, k, v, own, ids):
        if by_kernel:
            attend = flash_gpu.causal_attention
            return attend(q, k, v, own, ids, **options, tiles=SMALL, interpret=True)
        if not own:
            return reference.causal_attention(q, k, v, ids, **options)
        return reference.causal_attention_with_own(q, k, v, own, ids, **options)

    def loss(arrays, ids):
        out = attend(*arrays, ids).astype(jnp.float32)
        return (jnp.sin(3 * out) * jnp.arange(case.size)).sum(), out

    return jax.jit(jax.value_and_grad(loss, has_aux=True))


def segments_of(lengths, length: int) -> np.ndarray:
    """A row of segments of the given lengths, as many as fit, and padding."""
    ids = np.repeat(np.arange(1, len(lengths) + 1), lengths)[:length]
    return np.pad(ids, (0, length - len(ids))).astype(np.int32)


CASES = [
    Case(),
    Case(heads=3, kv_heads=1, size=24, steps=2, soft_cap=2.0),
    Case(heads=4, kv_heads=4, window=9),
    Case(heads=5, kv_heads=1, window=30, steps=1, soft_cap=5.0),
]


@pytest.mark.parametrize("case", CASES)
@given(
    lengths=st.tuples(*[st.lists(st.integers(1, 60), min_size=1, max_size=8)] * 2),
    seed=st.integers(0, 2**16),
)
@example(lengths=([16, 16, 38], [70]), seed=0)
@example(lengths=([1] * 70, [33]), seed=1)
@settings(max_examples=3, deadline=None)
def test_values_and_gradients_of_packed_rows_are_those_of_the_reference(case, lengths, seed):
    ids = jnp.asarray(np.stack([segments_of(row, case.length) for row in lengths]))
    arrays = case.arrays(seed)
    found, wanted = (with_gradients(case, by_kernel)(arrays, ids) for by_kernel in (True, False))
    np.testing.assert_allclose(found[0][1], wanted[0][1], atol=5e-6)
    for ours, theirs in zip(jax.tree.leaves(found[1]), jax.tree.leaves(wanted[1]), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=3e-4, rtol=1e-4)


def test_segments_in_any_order_and_own_rows_alone_are_those_of_the_reference():
    for case in (Case(), Case(heads=4, kv_heads=1, steps=2, window=2)):  # no base row in the window
        ids = jnp.asarray(np.random.default_rng(1).integers(0, 3, (2, case.length)), jnp.int32)
        found, wanted = (with_gradients(case, kernel)(case.arrays(), ids) for kernel in (1, 0))
        for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
            np.testing.assert_allclose(ours, theirs, atol=3e-4, rtol=1e-4)


def test_bfloat16_rows_are_close_and_keep_their_dtype():
    case = Case(dtype="bfloat16", steps=0)
    ids = jnp.asarray(np.stack([segments_of([20, 30], 70), segments_of([70], 70)]))
    arrays = case.arrays()
    (_, found), gradients = with_gradients(case, True)(arrays, ids)
    (_, wanted), expected = with_gradients(Case(), False)(jax.tree.map(jnp.float32, arrays), ids)
    np.testing.assert_allclose(found, wanted, atol=3e-2)
    for ours, theirs in zip(gradients[:3], expected[:3], strict=True):
        assert ours.dtype == "bfloat16"
        scale = np.abs(theirs).max()
        np.testing.assert_allclose(np.float32(ours) / scale, theirs / scale, atol=2e-2)


# --- what is read ---------------------------------------------------------------------------------


def test_attention_runs_forward_once_where_layers_are_recomputed():
    case = Case()
    q, k, v, _ = case.arrays()
    ids = jnp.ones((2, case.length), jnp.int32)

    def layer(q):
        return jnp.sin(flash_gpu.causal_attention(q, k, v, [], ids, tiles=SMALL, interpret=True))

    def kernels(policy) -> list[int]:
        recomputed = jax.checkpoint(layer, policy=policy)
        jaxpr = jax.make_jaxpr(jax.grad(lambda q: recomputed(q).sum()))(q)
        [text] = [str(jaxpr.jaxpr)]
        names = "forward", "queries", "keys"
        return [text.count(f"name=flash_gpu_{name}\n") for name in names]

    keep = jax.checkpoint_policies.save_only_these_names(ATTENTION_RESIDUALS)
    counts = kernels(keep), kernels(None)
    assert counts[0][0] == 1 and counts[1][0] == 2, counts
    assert counts[0][1:] == counts[1][1:] == [1, 1]


# --- the backend ----------------------------------------------------------------------------------


@pytest.mark.parametrize("head, dtype, steps", [
    (64, "bfloat16", 0), (96, "float32", 1), (256, "float16", 0),
])  # fmt: skip
def test_it_is_lowered_for_gpus_without_sums_by_atomics(head, dtype, steps):
    case = Case(heads=6, kv_heads=2, length=330, size=head, steps=steps, dtype=dtype, soft_cap=9.0)
    ids = jnp.ones((2, case.length), jnp.int32)

    def loss(arrays):
        return flash_gpu.causal_attention(*arrays, ids, soft_cap=9.0, window=99).sum()

    traced = jax.jit(jax.grad(loss)).trace(case.arrays())
    assert "atomic" not in str(traced.jaxpr)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("__gpu$xla.gpu.triton") == 3
    for scores in ("330x330", "352x352", "384x384"):
        assert scores not in text, "no array has an entry for each pair of tokens"
