"""Key/value caches in pages: read the prefix, commit the accepted path.

A cache is a pool of pages of S positions, and a sequence's *table* says which page holds its first
S positions, which the next S, and so on. Without a table (None) sequence b has page b to itself:
the contiguous cache is the case of one page per sequence. Page 0 of a pool that is shared by tables
is nobody's: what is written for positions without a page lands there or nowhere, and is never read.

A forward pass reads the cache and returns the new rows as scratch; `commit_rows` writes them once,
to consecutive positions. Values are always finite (`with_marked_keys`). Rows past the accepted ones
may be written as well: they lie at or after the next root, and later commits write over them before
any prefix reaches so far. Sequences may share pages as long as nobody writes to them; who has to
write gets a copy first (`copy_pages`).
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from specjax.config import ModelConfig
from specjax.indexing import put_slice, take_along, take_slice
from specjax.interfaces import Table
from specjax.kernels import dispatch


class KVCache(NamedTuple):
    """Keys and values, head-major, in P pages of S positions each.

    Attributes:
      k, v: `[L P K S H]` when layers are scanned, else a tuple of L arrays `[P K S H]`.
    """

    k: Array | tuple[Array, ...]
    v: Array | tuple[Array, ...]

    AXES = dict.fromkeys("kv", ("heads", None, None))  # by which a mesh splits them

    def layer(self, i: int) -> tuple[Array, Array]:
        """Keys and values of one layer, each [P K S H]."""
        return self.k[i], self.v[i]


def empty_cache(cfg: ModelConfig, pages: int, size: int, layers: int, stacked: bool) -> KVCache:
    """A zeroed cache of pages with `size` positions each."""
    kv_heads, head_dim = _heads(cfg)
    shape = (pages, kv_heads, size, head_dim)
    dtype = jnp.dtype(cfg.run.compute_dtype)
    if stacked:
        return KVCache(*(jnp.zeros((layers, *shape), dtype) for _ in range(2)))
    return KVCache(*(tuple(jnp.zeros(shape, dtype) for _ in range(layers)) for _ in range(2)))


def page_bytes(cfg: ModelConfig, size: int, layers: int) -> int:
    """Bytes of one page of `empty_cache`, keys and values of all layers."""
    kv_heads, head_dim = _heads(cfg)
    width = kv_heads * size * head_dim
    return 2 * layers * width * jnp.dtype(cfg.run.compute_dtype).itemsize


def _heads(cfg: ModelConfig) -> tuple[int, int]:
    """Key and value heads of every layer, and their size."""
    found = {(mixer.num_kv_heads, mixer.head_dim) for mixer in cfg.mixers("attention")}
    if len(found) != 1:
        raise NotImplementedError(
            f"expected layers of attention with one number and size of key and value heads, got "
            f"{sorted(found)}"
        )
    return found.pop()


def with_marked_keys(
    k: Float[Array, "*B K T H"], v: Float[Array, "*B K T H"]
) -> tuple[Float[Array, "*B K T H"], Float[Array, "*B K T H"]]:
    """The rows; of one that is not finite the key is all NaN, and the value 0.

    Attention multiplies the values that a row may not see by zero, and zero times NaN is NaN; their
    scores it leaves out. So a token that the model has no numbers for, drafted or in a page that
    somebody had before, does nothing to those that do not see it, and those that do get NaN.
    """
    finite = (jnp.isfinite(k) & jnp.isfinite(v)).all(-1, keepdims=True)
    return jnp.where(finite, k, jnp.nan), jnp.where(finite, v, 0)


def take_rows(rows: KVCache, index: Int[Array, "B R"]) -> KVCache:
    """Picks tree rows `index` of each sequence, in that order: [.. B K T H] -> [.. B K R H]."""

    def pick(x):
        picks = index[:, None, :, None]
        if x.ndim == 5:
            picks = picks[None]
        return take_along(x, picks, axis=-2)

    return jax.tree.map(pick, rows)


def take_path(x: Array, path: Int[Array, "B E"]) -> Array:
    """Picks tree rows `path` of states, logits or the like: [B T N] -> [B E N]."""
    return take_along(x, path[..., None], axis=1)


def after_of(x: Float[Array, "B T D"]) -> Int[Array, " B"]:
    """Numbers >= 0 that follow from x, for `after` of `commit_rows`."""
    return (x[:, 0] > 0).sum(axis=-1)


def commit_rows(
    cache: KVCache,
    rows: KVCache,
    start: Int[Array, " B"],
    after: Int[Array, " B"] | None = None,
    table: Table = None,
    run: int = 1,
    kernel: str = "reference",
) -> KVCache:
    """Writes R consecutive rows of each sequence from position `start[b]` on.

    There must be R positions from every start on, or the write is moved back over the prefix, or
    left out: the engine's tables are that much longer than the longest sequence, and their last
    columns may be nobody's page.

    Args:
      after: makes the write wait until these are known: any numbers >= 0 that follow from all
        that reads the cache. Their values do not matter. Without it XLA may order the write of a
        layer's rows before its attention, and then copies every array twice per round to be safe.
      run: every `run` consecutive rows, counted from `start`, are sure to lie in one page (a
        divisor of R); with no table, all of them do.
      kernel: whose write it is, see `specjax.kernels.dispatch.commit`.
    """
    if after is not None:
        start = start + jnp.minimum(after, 0)
    arrays, structure = jax.tree.flatten(cache)
    written = dispatch.commit(arrays, jax.tree.leaves(rows), start, table, run=run, kernel=kernel)
    return jax.tree.unflatten(structure, written)


def copy_pages(cache: KVCache, source: Int[Array, " M"], target: Int[Array, " M"]) -> KVCache:
    """Copies page source[m] to page target[m], one after the other.

    For sequences that share a prompt and write to different ends of its last page.
    """

    def copy(m, arrays):
        out = []
        for array in arrays:
            axis = array.ndim - 4
            lead, rest = (0,) * axis, (0,) * 3
            sizes = (*array.shape[:axis], 1, *array.shape[axis + 1 :])
            page = take_slice(array, (*lead, source[m], *rest), sizes)
            out.append(put_slice(array, page, (*lead, target[m], *rest)))
        return out

    flat, structure = jax.tree.flatten(cache)
    return jax.tree.unflatten(structure, jax.lax.fori_loop(0, source.shape[0], copy, flat))
