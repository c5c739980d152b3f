"""The shapes of a call of `tree_attention` on a device that need not be there."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Sizes(NamedTuple):
    """The sizes that calls of one script share; `pages` is of a slot."""

    slots: int
    kv_heads: int
    page: int
    pages: int


def shapes(device, sizes: Sizes, rows: int, group: int, head: int, dtype) -> tuple[list, object]:
    """Returns the shapes of the arguments up to the page table, and that of the sinks."""
    where = jax.sharding.SingleDeviceSharding(device)
    slots, kv_heads, page, pages = sizes

    def shape(*dims, dtype=dtype):
        return jax.ShapeDtypeStruct(dims, dtype, sharding=where)

    arrays = [
        shape(slots, kv_heads * group, rows, head),
        *[shape(slots, kv_heads, rows, head)] * 2,
        *[shape(1 + slots * pages, kv_heads, page, head)] * 2,
        shape(slots, dtype=jnp.int32),
        shape(slots, rows, -(-rows // 32), dtype=jnp.uint32),
        shape(slots, pages, dtype=jnp.int32),
    ]
    return arrays, shape(kv_heads * group, dtype=jnp.float32)
