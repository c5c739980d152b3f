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

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint
from jaxtyping import Array, Float, Int

from specjax.config import ModelConfig
from specjax.indexing import divide, put_slice, take, take_along, take_slice
from specjax.kernels import cpu

Table = Int[Array, "B X"] | None  # page of each stretch of positions; None: page b is sequence b's


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
    shape = (pages, cfg.num_kv_heads, size, cfg.head_dim)
    dtype = jnp.dtype(cfg.compute_dtype)
    if stacked:
        return KVCache(*(jnp.zeros((layers, *shape), dtype) for _ in range(2)))
    return KVCache(*(tuple(jnp.zeros(shape, dtype) for _ in range(layers)) for _ in range(2)))


def page_bytes(cfg: ModelConfig, size: int, layers: int) -> int:
    """Bytes of one page of `empty_cache`, keys and values of all layers."""
    width = cfg.num_kv_heads * size * cfg.head_dim
    return 2 * layers * width * jnp.dtype(cfg.compute_dtype).itemsize


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
    columns may be nobody's page. Beside attention made for GPUs or by a library each array is one
    scatter. Elsewhere, without a kernel, it is a few `dynamic_update_slice` per sequence and array:
    XLA's CPU scatter costs several times that.

    Args:
      after: makes the write wait until these are known: any numbers >= 0 that follow from all
        that reads the cache. Their values do not matter. Without it XLA may order the write of a
        layer's rows before its attention, and then copies every array twice per round to be safe.
      run: every `run` consecutive rows, counted from `start`, are sure to lie in one page (a
        divisor of R); with no table, all of them do.
      kernel: as that of attention, see `specjax.kernels.dispatch`; `cpu` has one for this, and
        `gpu` and the library's mean a scatter.
    """
    if after is not None:
        start = start + jnp.minimum(after, 0)
    flat_cache, structure = jax.tree.flatten(cache)
    flat_rows = jax.tree.leaves(rows)
    floats = all(x.dtype == jnp.float32 for x in (*flat_cache, *flat_rows))
    if kernel == "cpu" and floats and flat_cache[0].ndim == 4:
        return jax.tree.unflatten(structure, cpu.commit(flat_cache, flat_rows, start, table))
    if kernel == "gpu" or kernel.startswith("library"):
        flat_cache = _scatter_rows(flat_cache, flat_rows, start, table)
        return jax.tree.unflatten(structure, flat_cache)
    flat_cache = _laid_out_as_stored(flat_cache)
    size, count = flat_cache[0].shape[-2], flat_rows[0].shape[-2]
    batch = start.shape[0]
    write = functools.partial(_write_run, rows=flat_rows, start=start, table=table)

    def write_all(arrays, order, number, run):
        """The first `number` sequences of `order`, run by run."""
        runs = count // run

        def one(i, arrays):
            which, part = divide(i, runs)
            return write(arrays, b=take(order, which), first=part * run, run=run)

        return jax.lax.fori_loop(0, number * runs, one, arrays)

    run = count if table is None else run
    if batch == 1 and run == count:
        flat_cache = write(flat_cache, b=0, first=0, run=count)
    elif run > 1 or run == count or count > size:
        flat_cache = write_all(flat_cache, jnp.arange(batch), batch, run)
    else:  # few paths cross from one page into the next: these go row by row
        crosses = divide(start, size)[1] > size - count
        order, within = jnp.argsort(crosses), batch - crosses.sum()
        flat_cache = write_all(flat_cache, order, within, count)
        flat_cache = write_all(flat_cache, order[::-1], batch - within, 1)
    return jax.tree.unflatten(structure, flat_cache)


def _laid_out_as_stored(arrays: list[Array]) -> list[Array]:
    """The same arrays; on a TPU their layout in memory is fixed to the order of their axes.

    Where one row of one sequence is written (plain decoding of the last sequence), the TPU compiler
    otherwise chooses another layout for the written array than the one that its readers need, and
    then copies the whole cache twice per round. The layout is fixed before the write and not after
    it, because a result of a program whose layout is fixed cannot take the place of an argument
    without one. CPU and GPU programs are left as they are.
    """

    def fixed(*arrays: Array) -> list[Array]:
        return [with_layout_constraint(x, Layout(tuple(range(x.ndim)))) for x in arrays]

    return jax.lax.platform_dependent(*arrays, tpu=fixed, default=lambda *arrays: list(arrays))


def _scatter_rows(
    arrays: list[Array], rows: list[Array], start: Array, table: Table
) -> list[Array]:
    """All rows of all sequences at once.

    A GPU starts each operation of a loop from the host, so that a loop over sequences would cost
    more than the model. Every axis but a row's own is indexed, and in its order: an axis left out
    between two others XLA would move to the end first, in all pages; and were axes merged into one,
    all pages of a tp group would be gathered first. What belongs to nobody's page is dropped, for
    no two rows may go to one place. (While programs are tried and measured, sequences may share
    pages for want of enough; which of their rows stays is then nobody's concern.)
    """
    pages, kv_heads, size, _ = arrays[0].shape[-4:]
    page, offset = jnp.arange(start.shape[0])[:, None], start[:, None]
    offset = offset + jnp.arange(rows[0].shape[-2])
    if table is not None:
        stretch, offset = divide(offset, size)
        page = take_along(table, stretch, axis=1)
        page = jnp.where(page == 0, pages, page)
    at = page[:, None], jnp.arange(kv_heads)[:, None], offset[:, None]  # of [B K R]
    options = dict(mode="drop", unique_indices=True, wrap_negative_indices=False)

    def put_rows(array: Array, new: Array) -> Array:
        layer = [jnp.arange(n)[:, None, None, None] for n in array.shape[:-4]]
        return array.at[(*layer, *at)].set(new.astype(array.dtype), **options)

    return [put_rows(array, new) for array, new in zip(arrays, rows, strict=True)]


def _write_run(
    arrays: list[Array], rows: list[Array], start: Array, table: Table, b, first, run: int
) -> list[Array]:
    """Writes rows first .. first + run - 1 of sequence b, which lie in one page."""
    size, page, offset = arrays[0].shape[-2], b, take(start, b) + first
    if table is not None:
        stretch, offset = divide(offset, size)
        page = take(take(table, b), stretch)
    out = []
    for array, new in zip(arrays, rows, strict=True):
        lead = (0,) * (array.ndim - 4)
        shape = (*new.shape[: new.ndim - 4], 1, new.shape[-3], run, new.shape[-1])
        piece = take_slice(new, (*lead, b, 0, first, 0), shape)
        out.append(put_slice(array, piece.astype(array.dtype), (*lead, page, 0, offset, 0)))
    return out


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


def contiguous(pages: Array, table: Table) -> Array:
    """Pages [P K S H] of one layer as `[B K X*S H]`: every sequence's positions in a row."""
    if table is None:
        return pages
    b, stretches = table.shape
    _, kv_heads, size, width = pages.shape
    gathered = jnp.moveaxis(take(pages, table), 1, 2)
    return gathered.reshape(b, kv_heads, stretches * size, width)
