"""Attention of rows that are split over devices, by the TPU's kernels."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiers import slow_but

from specjax.kernels import dispatch, flash, reference
from specjax.parallel import sharding
from specjax.parallel.context import context_of
from specjax.parallel.sharding import MeshConfig, make_mesh

HEADS, KV_HEADS, SIZE = 4, 2, 16
TILES = flash.Tiles(unit=8, largest=16, interpret=True)


def packed(rows: int, length: int):
    """Queries, keys, values, and segments of several lengths, with padding at the end of a row."""
    rng = np.random.default_rng(0)
    arrays = [
        rng.normal(size=(rows, heads, length, SIZE)).astype(np.float32)
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    ]
    segments = np.ones((rows, length), np.int32)
    segments[0, : length - 9] = np.repeat([1, 2, 3], [20, 8, length - 37])
    segments[0, length - 9 :] = 0
    return arrays, segments


def whole(arrays, segments, window):
    """Results and gradients of the reference, for a loss that tells all entries apart."""

    def loss(arrays):
        out = reference.causal_attention(*arrays, jnp.asarray(segments), window=window)
        return (jnp.sin(3 * out) * jnp.arange(SIZE)).sum(), out

    (_, out), gradients = jax.value_and_grad(loss, has_aux=True)(arrays)
    return out, gradients


@pytest.mark.parametrize("window", slow_but([None, 9, 30], 9))
def test_attention_and_its_gradients_equal_the_reference(window):
    (q, k, v), segments = packed(2, 61)  # no multiple of any tile
    expected, (d_q, d_k, d_v) = whole([q, k, v], segments, window)
    order = np.roll(np.arange(61), 24)  # of the keys
    queries, keys = (segments, np.arange(61)), (segments[:, order], order)
    arrays = q * SIZE**-0.5, k[:, :, order], v[:, :, order], queries, keys, window
    out, lse = flash.attend(*arrays, TILES)
    np.testing.assert_allclose(out, expected, atol=2e-6)
    d_out = 3 * jnp.cos(3 * out) * jnp.arange(SIZE)
    found_q, *found = flash.gradients(*arrays, lse, d_out, (out * d_out).sum(-1), TILES)
    np.testing.assert_allclose(found_q * SIZE**-0.5, d_q, atol=1e-4)
    for ours, theirs in zip(found, (d_k, d_v), strict=True):
        np.testing.assert_allclose(ours, theirs[:, :, order], atol=2e-4)


@pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 devices")
@pytest.mark.parametrize(
    ("axes", "window"),
    [
        pytest.param({"cp": 4, "fsdp": 2}, None, marks=pytest.mark.slow),
        ({"cp": 2, "tp": 4}, 30),  # more parts than key/value heads
    ],
)
def test_attention_over_devices_by_the_kernels_equals_the_reference(axes, window):
    config = MeshConfig(**axes)
    context = context_of(config, make_mesh(config))
    arrays, segments = packed(2, 64)
    expected, wanted = whole(arrays, segments, window)
    places, back = context.places(64), np.argsort(context.places(64))
    put = jax.device_put(context.permute(segments), sharding.rows_sharding(context.mesh))

    @functools.partial(jax.jit, static_argnums=2)
    def run(arrays, segments, kernel):
        def loss(arrays):
            out = dispatch.causal_attention(
                *arrays, segments, context, window=window, kernel=kernel
            )
            return (jnp.sin(3 * out) * jnp.arange(SIZE)).sum(), out

        return jax.value_and_grad(loss, has_aux=True)(arrays)

    there = [x[:, :, places] for x in arrays]
    assert "pallas_call" in str(run.trace(there, put, "tests.kernels.interpreted:TPU").jaxpr)
    (_, out), gradients = run(there, put, "tests.kernels.interpreted:TPU")
    np.testing.assert_allclose(np.asarray(out)[:, :, back], expected, atol=1e-5)
    for ours, theirs in zip(gradients, wanted, strict=True):
        np.testing.assert_allclose(np.asarray(ours)[:, :, back], theirs, rtol=1e-5, atol=2e-4)
