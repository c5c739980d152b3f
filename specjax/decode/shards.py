"""Operations on rows over the vocabulary, which a mesh's `tp` axis may split.

The language-model head leaves each device with V / tp logits of every row. They stay there, and so
do the noise, the counts and whatever else has a number per token. Elementwise work is local, sums
are all-reduced by the partitioner, and noise is generated on its own shard (the generator counts,
so a token's bits at a position do not depend on the device). `argmax` and `top_k` take each shard's
own best and choose among those: a few numbers per row cross devices.

The mesh is the ambient one at lowering (`jax.set_mesh`). Where there is none, or its `tp` is 1 or
does not divide V (then the head is kept whole as well, see `specjax.parallel.sharding`), every
function here is the plain operation and adds nothing to the program.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from specjax.parallel.sharding import PHYSICAL, spec_for

[AXIS] = PHYSICAL["vocab"]


def ways(vocab: int) -> int:
    """Returns how many devices the vocabulary is split over in the program that is being traced."""
    mesh = jax.sharding.get_abstract_mesh()
    number = 1 if mesh.empty else mesh.shape.get(AXIS, 1)
    return 1 if vocab % number else number


def pin(x: Array) -> Array:
    """Keeps x [.. V] split over the vocabulary; the numbers do not change."""
    if ways(x.shape[-1]) == 1:
        return x
    anyhow = (jax.P.UNCONSTRAINED,) * (x.ndim - 1)
    return jax.lax.with_sharding_constraint(x, jax.P(*anyhow, AXIS))


@jax.named_scope("sampling")
def argmax(x: Float[Array, "*R V"]) -> Int[Array, "*R"]:
    """Computes `jnp.argmax` over the vocabulary: ties go to the lowest id; the first NaN wins."""
    number = ways(x.shape[-1])
    if number == 1:
        return whole_argmax(x)
    best, ids = _of_each_shard(lambda part: jax.tree.map(_column, whole_best(part)), x)
    _, shard = jax.tree.map(_column, _in_two_passes(best))
    ids = jnp.take_along_axis(ids, shard, axis=-1) + shard * (x.shape[-1] // number)
    return ids[..., 0]


def whole_argmax(x: Float[Array, "*R V"]) -> Int[Array, "*R"]:
    """Computes `argmax` of rows that are whole on one device.

    On CPU XLA's own argmax is not vectorised, nor is what is fused with it, such as noise: that
    takes several times as long as finding the maximum and then its place. The TPU compiler keeps
    the unused maximum of `jnp.argmax` in bfloat16, and may compare rounded numbers: there integers
    of the same order are compared, in one pass.
    """

    def two(x):
        return _in_two_passes(x)[1]

    def one(x):
        return jnp.argmax(x, axis=-1).astype(jnp.int32)

    return jax.lax.platform_dependent(x, cpu=two, tpu=argmax_of_keys, default=one)


def argmax_of_keys(x: Float[Array, "*R V"]) -> Int[Array, "*R"]:
    """Computes `whole_argmax` of float32 by comparing integers of the same order."""

    def better(a, b):
        (key, index), (other, other_index) = a, b
        first = (key > other) | ((key == other) & (index < other_index))
        return jnp.where(first, key, other), jnp.where(first, index, other_index)

    bits = jax.lax.bitcast_convert_type(x, jnp.int32)
    keys = jnp.where(bits < 0, bits ^ jnp.int32(0x7FFFFFFF), bits)
    keys = jnp.where(x == 0, 0, keys)  # -0.0 and 0.0 are equal
    keys = jnp.where(jnp.isnan(x), jnp.iinfo(jnp.int32).max, keys)
    ids = jax.lax.broadcasted_iota(jnp.int32, x.shape, x.ndim - 1)
    least = jnp.int32(jnp.iinfo(jnp.int32).min), jnp.int32(jnp.iinfo(jnp.int32).max)
    return jax.lax.reduce((keys, ids), least, better, (x.ndim - 1,))[1]


def whole_best(x: Float[Array, "*R V"]) -> tuple[Float[Array, "*R"], Int[Array, "*R"]]:
    """Returns the largest number of each row that is whole on one device, and its index.

    Where only the place is needed use `whole_argmax`. One pass over the row finds both; on CPUs two
    passes are faster.
    """
    return jax.lax.platform_dependent(x, cpu=_in_two_passes, default=_in_one_pass)


def _in_two_passes(x: Array) -> tuple[Array, Array]:
    largest = x.max(axis=-1, keepdims=True)  # which of XLA's maxima pass NaN on is left open
    ids = jax.lax.broadcasted_iota(jnp.int32, x.shape, x.ndim - 1)
    nan = jnp.isnan(x)
    found = jnp.where(nan.any(axis=-1, keepdims=True), nan, x == largest)
    ids = jnp.where(found, ids, x.shape[-1]).min(axis=-1)
    return jnp.take_along_axis(x, ids[..., None], axis=-1)[..., 0], ids


def _in_one_pass(x: Array) -> tuple[Array, Array]:
    """Reduces pairs in any order: of equal numbers, or NaN, the one with the lowest id wins."""

    def better(a, b):
        (value, index), (other, other_index) = a, b
        nan, other_nan = jnp.isnan(value), jnp.isnan(other)
        equal = (value == other) | (nan & other_nan)
        larger = (value > other) | (nan & ~other_nan)
        first = larger | (equal & (index < other_index))
        return jnp.where(first, value, other), jnp.where(first, index, other_index)

    ids = jax.lax.broadcasted_iota(jnp.int32, x.shape, x.ndim - 1)
    least = jnp.array(-jnp.inf, x.dtype), jnp.int32(0)
    return jax.lax.reduce((x, ids), least, better, (x.ndim - 1,))


def _column(x: Array) -> Array:
    return x[..., None]


@jax.named_scope("sampling")
def top_k(
    x: Float[Array, "*R V"], count: int, plain: Callable = jax.lax.top_k
) -> tuple[Float[Array, "*R C"], Int[Array, "*R C"]]:
    """Returns values and ids of the `count` best tokens, best first, ties to the lowest id.

    A shard's own best come in that order, and shards stand in the order of their ids: a stable
    choice among all of these is the choice among all tokens. Where fewer than `count` tokens are
    above -inf, the ids of the rest are of some tokens at -inf.

    Args:
      plain: function of the same kind for rows that are whole on one device.
    """
    number, vocab = ways(x.shape[-1]), x.shape[-1]
    if number == 1:
        return plain(x, count)
    per_shard = min(count, vocab // number)  # a shard may have fewer tokens than are asked for
    best, ids = _of_each_shard(lambda part: plain(part, per_shard), x)
    ids = ids + jnp.repeat(jnp.arange(number) * (vocab // number), per_shard)
    best, at = jax.lax.top_k(best, count)
    return best, jnp.take_along_axis(ids, at, axis=-1)


def _of_each_shard(function: Callable, x: Float[Array, "*R V"]):
    """Applies `function` to each shard's part of x; every device gets all results [B .. n]."""
    mesh, inside = jax.sharding.get_abstract_mesh(), (None,) * (x.ndim - 2)
    split = spec_for(mesh, ("batch", *inside, "vocab"), x.shape)
    parts = jax.shard_map(function, in_specs=split, out_specs=split)(x)
    together = jax.P(*split[:-1], None)
    return jax.tree.map(lambda y: jax.lax.with_sharding_constraint(y, together), parts)
