"""Key/value caches: read the prefix, commit the accepted path.

The slot of a row is its absolute position. A forward pass reads the cache and returns the new rows
as scratch; `commit_rows` writes them once, to consecutive slots. Rows past the accepted ones may
be written as well: they lie beyond every prefix length and the next commit covers them.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from specjax.config import ModelConfig


class KVCache(NamedTuple):
    """Keys and values, head-major.

    Attributes:
      k, v: `[L B K S H]` when layers are scanned, else a tuple of L arrays `[B K S H]`.
    """

    k: Array | tuple[Array, ...]
    v: Array | tuple[Array, ...]

    def layer(self, i: int) -> tuple[Array, Array]:
        """Keys and values of one layer, each [B K S H]."""
        return self.k[i], self.v[i]


def empty_cache(cfg: ModelConfig, batch: int, slots: int, layers: int, stacked: bool) -> KVCache:
    """A zeroed cache of `slots` rows per sequence."""
    shape = (batch, cfg.num_kv_heads, slots, cfg.head_dim)
    dtype = jnp.dtype(cfg.compute_dtype)
    if stacked:
        return KVCache(*(jnp.zeros((layers, *shape), dtype) for _ in range(2)))
    return KVCache(*(tuple(jnp.zeros(shape, dtype) for _ in range(layers)) for _ in range(2)))


def take_rows(rows: KVCache, index: Int[Array, "B R"]) -> KVCache:
    """Picks tree rows `index` of each sequence, in that order: [.. B K T H] -> [.. B K R H]."""

    def pick(x):
        picks = index[:, None, :, None]
        if x.ndim == 5:
            picks = picks[None]
        return jnp.take_along_axis(x, picks, axis=-2)

    return jax.tree.map(pick, rows)


def take_path(x: Array, path: Int[Array, "B E"]) -> Array:
    """Picks tree rows `path` of states, logits or the like: [B T N] -> [B E N]."""
    return jnp.take_along_axis(x, path[..., None], axis=1)


def commit_rows(
    cache: KVCache, rows: KVCache, start: Int[Array, " B"], after: Int[Array, " B"] | None = None
) -> KVCache:
    """Writes R consecutive rows of each sequence from slot `start[b]` on.

    There must be R slots from every start on, or the write is moved back over the prefix. One
    `dynamic_update_slice` per sequence and array: XLA's CPU scatter costs several times that.

    Args:
      after: numbers >= 0 whose values do not matter, but which cannot be known before everything
        that reads the cache has run. The rows of a layer are known before its attention reads the
        cache; without this dependency XLA may order the write first, and then copies every array
        twice per round to be safe.
    """
    if after is not None:
        start = start + jnp.minimum(after, 0)
    flat_cache, tree = jax.tree.flatten(cache)
    flat_rows = jax.tree.leaves(rows)
    batch = start.shape[0]

    def write(b, arrays):
        out = []
        for array, new in zip(arrays, flat_rows, strict=True):
            lead = (0,) * (array.ndim - 4)
            piece = jax.lax.dynamic_slice_in_dim(new, b, 1, axis=new.ndim - 4)
            out.append(
                jax.lax.dynamic_update_slice(
                    array, piece.astype(array.dtype), (*lead, b, 0, start[b], 0)
                )
            )
        return out

    if batch == 1:
        return jax.tree.unflatten(tree, write(0, flat_cache))
    return jax.tree.unflatten(tree, jax.lax.fori_loop(0, batch, write, flat_cache))
