"""Two ways to write new keys and values to their pages in XLA: by slices, and by one scatter.

Both take flat lists of arrays: pages, of one layer each [P K S H] or of all that are stacked
[L P K S H], and the rows to write to them, [B K R H] or [L B K R H]; P, K, S and H are the same
throughout. What they write is `specjax.memory.commit_rows`, and `write` is the faster way of each
platform.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint
from jaxtyping import Array, Int

from specjax.indexing import divide, put_slice, take, take_along, take_slice
from specjax.interfaces import Table


def write(
    arrays: Sequence[Array],
    rows: Sequence[Array],
    start: Int[Array, " B"],
    table: Table = None,
    *,
    run: int = 1,
) -> list[Array]:
    """Writes rows by scatters on a TPU, and by slices elsewhere; arguments as those of `by_slices`.

    A TPU starts every operation of a loop over sequences anew, which takes about 1,800 cycles for a
    row of 256 bytes; its scatter is one operation per array that writes in place.
    """

    def scattered(arrays, rows, start, table):
        one_slice = start.shape[0] == 1 and run == rows[0].shape[-2]
        return (by_slices if one_slice else by_scatter)(arrays, rows, start, table, run=run)

    def sliced(arrays, rows, start, table):
        return by_slices(arrays, rows, start, table, run=run)

    return jax.lax.platform_dependent(
        list(arrays), list(rows), start, table, tpu=scattered, default=sliced
    )


def by_slices(
    arrays: Sequence[Array],
    rows: Sequence[Array],
    start: Int[Array, " B"],
    table: Table = None,
    *,
    run: int = 1,
) -> list[Array]:
    """Writes rows by a few `dynamic_update_slice` per sequence and array.

    On CPU, XLA's scatter takes several times as long.

    Args:
      run: number of rows in one page, see `specjax.memory.commit_rows`.
    """
    arrays = _laid_out_as_stored(list(arrays))
    size, count = arrays[0].shape[-2], rows[0].shape[-2]
    batch = start.shape[0]
    write = functools.partial(_write_run, rows=rows, start=start, table=table)

    def write_all(arrays, order, number, run):
        """Writes the first `number` sequences of `order`, run by run."""
        runs = count // run

        def one(i, arrays):
            which, part = divide(i, runs)
            return write(arrays, b=take(order, which), first=part * run, run=run)

        return jax.lax.fori_loop(0, number * runs, one, arrays)

    run = count if table is None else run
    if batch == 1 and run == count:
        return write(arrays, b=0, first=0, run=count)
    if run > 1 or run == count or count > size:
        return write_all(arrays, jnp.arange(batch), batch, run)
    # Few paths cross from one page into the next: these are written row by row.
    crosses = divide(start, size)[1] > size - count
    order, within = jnp.argsort(crosses), batch - crosses.sum()
    arrays = write_all(arrays, order, within, count)
    return write_all(arrays, order[::-1], batch - within, 1)


def _laid_out_as_stored(arrays: list[Array]) -> list[Array]:
    """Returns the arrays; on a TPU, with their layout in memory fixed to the order of their axes.

    Where one row of one sequence is written (plain decoding of the last sequence), the TPU compiler
    otherwise chooses another layout for the written array than the one that its readers need, and
    then copies the whole cache twice per round. The layout is fixed before the write and not after
    it, because a result of a program whose layout is fixed cannot take the place of an argument
    without one. CPU and GPU programs are left as they are.
    """

    def fixed(*arrays: Array) -> list[Array]:
        return [with_layout_constraint(x, Layout(tuple(range(x.ndim)))) for x in arrays]

    return jax.lax.platform_dependent(*arrays, tpu=fixed, default=lambda *arrays: list(arrays))


def _write_run(
    arrays: list[Array],
    rows: Sequence[Array],
    start: Array,
    table: Table,
    b: Array | int,
    first: Array | int,
    run: int,
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


def by_scatter(
    arrays: Sequence[Array],
    rows: Sequence[Array],
    start: Int[Array, " B"],
    table: Table = None,
    *,
    run: int = 1,
) -> list[Array]:
    """Writes all rows of all sequences by one scatter per array, whatever `run` is.

    A GPU starts each operation of a loop from the host, so that a loop over sequences would cost
    more than the model.
    """
    arrays = _laid_out_as_stored(list(arrays))
    pages, kv_heads, size, _ = arrays[0].shape[-4:]
    page, offset = jnp.arange(start.shape[0])[:, None], start[:, None]
    offset = offset + jnp.arange(rows[0].shape[-2])
    if table is not None:
        stretch, offset = divide(offset, size)
        page = take_along(table, stretch, axis=1)
        # Page 0 belongs to no sequence. Its rows are dropped, because indices must be unique.
        # (While programs are measured, sequences may share pages; any of their rows may stay.)
        page = jnp.where(page == 0, pages, page)
    # Every axis but a row's own is indexed, in its order. An axis left out between two others would
    # be moved to the end first, in all pages; axes merged into one would gather a tp group's pages.
    at = page[:, None], jnp.arange(kv_heads)[:, None], offset[:, None]  # of [B K R]
    options = dict(mode="drop", unique_indices=True, wrap_negative_indices=False)

    def put_rows(array: Array, new: Array) -> Array:
        layer = [jnp.arange(n)[:, None, None, None] for n in array.shape[:-4]]
        return array.at[(*layer, *at)].set(new.astype(array.dtype), **options)

    return [put_rows(array, new) for array, new in zip(arrays, rows, strict=True)]
