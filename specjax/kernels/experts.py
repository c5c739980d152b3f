"""Products of rows with one matrix each of a stack, in XLA: the layers of mixtures of experts.

Rows [M I] are sorted by their matrix: the first `sizes[0]` rows are multiplied with the first
matrix, the next `sizes[1]` rows with the second, and so on. Rows behind those are in no group, may
hold anything, and are zero in the result.

`by_blocks` reads the matrices that some row needs and no others. It serves any number of rows, and
a row's bits depend on no other row: each block of rows is one product of a fixed shape.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

LEAST_BLOCK, LARGEST_BLOCK = 8, 256  # rows of a block


class Blocks(NamedTuple):
    """The blocks into which groups of rows are cut, in order; only the first `count` are used.

    Attributes:
      matrix: the matrix of each block.
      first: the first row of each block.
      end: the row behind the last of the block's group.
      count: number of blocks.
    """

    matrix: Int[Array, " blocks"]
    first: Int[Array, " blocks"]
    end: Int[Array, " blocks"]
    count: Int[Array, ""]


def block_rows(rows: int, matrices: int) -> int:
    """Returns the number of rows of a block: a power of two, near the mean size of a group."""
    mean = -(-rows // matrices)
    return min(LARGEST_BLOCK, max(LEAST_BLOCK, 1 << (mean - 1).bit_length()))


def blocks_of(sizes: Int[Array, " E"], rows: int, block: int) -> Blocks:
    """Cuts groups of `sizes` rows, at most `rows` together, into blocks of `block` rows."""
    counts = -(-sizes // block)
    ends, last = jnp.cumsum(sizes), jnp.cumsum(counts)
    number = jnp.arange(rows // block + min(len(sizes), rows))
    matrix = jnp.searchsorted(last, number, side="right", method="compare_all")
    matrix = jnp.minimum(matrix, len(sizes) - 1)
    inside = number - (last - counts)[matrix]
    return Blocks(matrix, (ends - sizes)[matrix] + inside * block, ends[matrix], last[-1])


def by_blocks(
    x: Float[Array, "M I"],
    stack: Any,
    sizes: Int[Array, " E"],
    dot: Callable[[Array, Any], Array] = jnp.matmul,
) -> Float[Array, "M O"]:
    """Multiplies sorted rows, block by block; see the module text.

    Args:
      stack: an array [E I O], or a pytree of arrays of which slices are what `dot` takes.
      dot: multiplies rows [block I] by one matrix of the stack.
    """
    rows, block = len(x), block_rows(len(x), len(sizes))
    blocks, x = blocks_of(sizes, rows, block), jnp.pad(x, [(0, block), (0, 0)])

    def product(i: Array) -> Array:
        matrix = jax.tree.map(lambda a: a[blocks.matrix[i]], stack)
        return dot(jax.lax.dynamic_slice_in_dim(x, blocks.first[i], block), matrix)

    def body(i: Array, out: Array) -> Array:
        # What a block writes behind its group, a later one writes again.
        return jax.lax.dynamic_update_slice_in_dim(out, product(i), blocks.first[i], 0)

    shape = jax.eval_shape(product, 0)
    out = jnp.zeros((rows + block, shape.shape[-1]), shape.dtype)
    out = jax.lax.fori_loop(0, blocks.count, body, out)[:rows]
    return jnp.where(jnp.arange(rows)[:, None] < sizes.sum(), out, 0)


def _outer(
    x: Float[Array, "M I"], y: Float[Array, "M O"], sizes: Int[Array, " E"]
) -> Float[Array, "E I O"]:
    """Returns `x.T @ y` of the rows of each group, float32."""
    rows, block = len(x), block_rows(len(x), len(sizes))
    blocks = blocks_of(sizes, rows, block)
    x, y = (jnp.pad(a, [(0, block), (0, 0)]) for a in (x, y))

    def body(i: Array, out: Array) -> Array:
        first = blocks.first[i]
        inside = (first + jnp.arange(block) < blocks.end[i])[:, None]
        a, b = (jnp.where(inside, jax.lax.dynamic_slice_in_dim(z, first, block), 0) for z in (x, y))
        return out.at[blocks.matrix[i]].add(jnp.matmul(a.T, b, preferred_element_type=jnp.float32))

    out = jnp.zeros((len(sizes), x.shape[-1], y.shape[-1]), jnp.float32)
    return jax.lax.fori_loop(0, blocks.count, body, out)


@jax.custom_vjp
def experts(
    x: Float[Array, "M I"], stack: Float[Array, "E I O"], sizes: Int[Array, " E"]
) -> Float[Array, "M O"]:
    """Computes `by_blocks` of an array, with derivatives: a loop of unknown length has none."""
    return by_blocks(x, stack, sizes)


def _experts_bwd(residuals, d_out):
    x, stack, sizes = residuals
    d_x = by_blocks(d_out, stack, sizes, lambda rows, matrix: rows @ matrix.T)
    return d_x, _outer(x, d_out, sizes).astype(stack.dtype), None


experts.defvjp(lambda *given: (experts(*given), given), _experts_bwd)
