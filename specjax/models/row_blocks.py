"""Rows of a tree in blocks of one fixed size, so that several strategies multiply alike.

A product rounds differently with its number of rows. In `invariant` mode an engine's programs pass
the rows of all slots through the layers in blocks of `RunConfig.row_block` rows, filled up with
zeros: plain decoding, of B rows, and a tree, of B T, then have products of one shape.

The compiler must not fuse what is computed of blocks with what puts rows in and out, which depends
on B and T: it could round otherwise. So there is a barrier at each crossing, which GPU programs
respect. On CPU the compiler drops barriers.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


@dataclasses.dataclass(frozen=True)
class RowBlocks:
    """How the rows [B T] lie in blocks [M size]: block after block, first the roots of all slots.

    Attributes:
      batch: number of slots B.
      rows: number of rows T of each.
      size: number of rows of a block.
    """

    batch: int
    rows: int
    size: int

    @property
    def count(self) -> int:
        """Number of blocks M."""
        return -(-self.batch * self.rows // self.size)

    def split(self, x: Float[Array, "B T *D"]) -> Float[Array, "M size *D"]:
        """Puts rows into blocks."""
        rows = x.swapaxes(0, 1).reshape(self.batch * self.rows, *x.shape[2:])
        spare = self.count * self.size - len(rows)
        rows = jnp.pad(rows, [(0, spare)] + [(0, 0)] * (rows.ndim - 1))
        return jax.lax.optimization_barrier(rows.reshape(self.count, self.size, *x.shape[2:]))

    def join(self, x: Float[Array, "M size *D"]) -> Float[Array, "B T *D"]:
        """Takes rows out of blocks."""
        x = jax.lax.optimization_barrier(x)
        rows = x.reshape(self.count * self.size, *x.shape[2:])[: self.batch * self.rows]
        return rows.reshape(self.rows, self.batch, *x.shape[2:]).swapaxes(0, 1)

    def split_heads(self, x: Float[Array, "B N T H"]) -> Float[Array, "M N size H"]:
        return self.split(x.swapaxes(1, 2)).swapaxes(1, 2)

    def join_heads(self, x: Float[Array, "M N size H"]) -> Float[Array, "B N T H"]:
        return self.join(x.swapaxes(1, 2)).swapaxes(1, 2)
