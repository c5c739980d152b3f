"""Threefry-2x32 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"), unrolled.

The numbers are those of `jax.random` with "threefry2x32". On CPU jax runs the cipher as a loop, to
compile sooner, and XLA starts a dozen operations for each turn of it: noise for one round of one
sample took as long as several layers of a small policy. Without the loop XLA makes one operation of
it all. Nor does anything here depend on `jax_threefry_partitionable`.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.random import define_prng_impl
from jaxtyping import Array, Int, UInt32

ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
PARITY = np.uint32(0x1BD11BDA)


def threefry2x32(key: UInt32[Array, " 2"], x0: Array, x1: Array) -> tuple[Array, Array]:
    """20 rounds over counters `x0`, `x1`, uint32 of one shape."""
    words = key[0], key[1], key[0] ^ key[1] ^ PARITY
    x0, x1 = x0 + words[0], x1 + words[1]
    for group in range(5):
        for by in ROTATIONS[group % 2]:
            x0 = x0 + x1
            x1 = x0 ^ ((x1 << np.uint32(by)) | (x1 >> np.uint32(32 - by)))
        x0 = x0 + words[(group + 1) % 3]
        x1 = x1 + words[(group + 2) % 3] + np.uint32(group + 1)
    return x0, x1


def _counted(key: Array, shape: tuple[int, ...]) -> tuple[Array, Array]:
    """The cipher of 0, 1, 2, ... in two arrays of a shape."""
    if math.prod(shape) >= 1 << 32:
        raise ValueError(f"expected fewer than 2^32 numbers of one key, got shape {shape}")
    low = jnp.zeros(shape, jnp.uint32)
    stride = math.prod(shape)
    for axis, size in enumerate(shape):  # no reshape: a split axis stays split
        stride //= max(size, 1)
        low += jax.lax.broadcasted_iota(jnp.uint32, shape, axis) * np.uint32(stride)
    return threefry2x32(key, jnp.zeros_like(low), low)


def _bits(key: Array, width: int, shape: tuple[int, ...]) -> Array:
    if width != 32:
        raise ValueError(f"expected 32 bits per number, got {width}")
    high, low = _counted(key, shape)
    return high ^ low


def _fold_in(key: Array, data: Int[Array, ""]) -> Array:
    return jnp.stack(threefry2x32(key, jnp.uint32(0), data.astype(jnp.uint32)))


IMPL = define_prng_impl(
    key_shape=(2,),
    seed=lambda seed: jnp.stack([jnp.uint32(0), seed.astype(jnp.uint32)]),
    split=lambda key, shape: jnp.stack(_counted(key, shape), axis=-1),
    random_bits=_bits,
    fold_in=_fold_in,
    name="threefry2x32_unrolled",
    tag="fryu",
)


def key_of(data: UInt32[Array, "*B 2"]) -> Array:
    """A key for `jax.random` from its two words."""
    return jax.random.wrap_key_data(data, impl=IMPL)
