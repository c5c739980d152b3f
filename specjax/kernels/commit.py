"""New keys and values written to their pages in XLA, by one scatter per array."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint
from jaxtyping import Array, Int

from specjax.indexing import divide, take_along
from specjax.interfaces import Table


def by_scatter(
    arrays: Sequence[Array], rows: Sequence[Array], start: Int[Array, " B"], table: Table = None
) -> list[Array]:
    """Writes what `specjax.memory.commit_rows` describes; rows without a page are dropped.

    Args:
      arrays: pages, of one layer each [P K S H] or of all that are stacked [L P K S H]; P, K, S and
        H are the same throughout.
      rows: the rows to write to them, [B K R H] or [L B K R H].
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
