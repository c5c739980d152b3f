"""Products of sorted rows with matrices of a stack in Pallas Triton, for GPUs from Ampere on.

See `specjax.kernels.experts`. A program multiplies one block of rows of one group by some columns
of the group's matrix. The blocks are listed in XLA, before the kernel runs. Rows in no group are
listed as one more group, of which a program stores zeros and reads nothing; the same group has the
blocks of the list that are not used. So no matrix is read that no row needs, and each row of the
result is written once. The product with transposed matrices, for the gradient of the rows, is the
same kernel: it reads the stack where it lies.

In the gradient of the stack a program adds up a tile of one matrix over the rows of its group.

Decoding and training differ in the size of the tiles alone. float32 is multiplied as float32, not
as TF32.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.triton as plgpu
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from specjax.kernels.backend import Declined
from specjax.kernels.experts import block_rows, blocks_of
from specjax.kernels.tiles import BYTE_ROWS, dot
from specjax.kernels.triton_lowering import as_on_a_gpu

DTYPES = ("float32", "bfloat16", "float16")
LEAST = 16  # rows of the smallest product that tensor cores have
LINE = 128  # bytes of a row that are loaded at once


class Tile(NamedTuple):
    """What a program computes: a tile of the result, some terms of its sums at a time.

    Three stages of both operands are at most 96 KiB: every GPU from Ampere on has 99 KiB of shared
    memory.
    """

    rows: int
    columns: int
    terms: int

    @classmethod
    def of(cls, rows: int, dtype: jnp.dtype) -> Tile:
        """Returns the tile of so many rows, a power of two, or of the most that a dtype allows."""
        # Tensor cores multiply no float32, and large tiles of it do not fit into registers.
        rows = min(max(rows, LEAST), 32 if dtype == jnp.float32 else 128)
        return cls(rows, 128 if rows > 32 else 64, LINE // dtype.itemsize)

    @property
    def params(self) -> plgpu.CompilerParams:
        large = self.rows * self.columns > 64 * 128
        return plgpu.CompilerParams(num_warps=8 if large else 4, num_stages=3)


def experts(
    x: Float[Array, "M I"],
    stack: Float[Array, "E I O"],
    sizes: Int[Array, " E"],
    interpret: bool = False,
) -> Float[Array, "M O"]:
    """Computes `specjax.kernels.dispatch.experts`, with derivatives; sums are float32.

    Args:
      interpret: whether to interpret the kernels on CPU, for tests.

    Raises:
      Declined: the dtype of the rows and of the stack is not one of `DTYPES`.
    """
    if x.dtype != stack.dtype or x.dtype not in DTYPES:
        raise Declined(f"it multiplies {', '.join(DTYPES)}, got {x.dtype} rows by {stack.dtype}")
    return _experts(x, stack, sizes, interpret)


def multiply_packed(
    x: Float[Array, "M I"],
    weight: Any,
    sizes: Int[Array, " E"],
    dtype: Any,
    interpret: bool = False,
) -> Float[Array, "M O"]:
    """Multiplies rows by a stack of packed matrices [E I O]; see `experts`.

    Args:
      weight: a `specjax.weights.packed.Packed`, of which each program unpacks the bytes it reads.
      dtype: dtype of the result.

    Raises:
      Declined: the dtype of the rows is not one of `DTYPES`, or the inputs are in no whole groups.
    """
    rows = weight.values.shape[1]
    if x.dtype not in DTYPES or rows % BYTE_ROWS or weight.group % BYTE_ROWS:
        raise Declined(f"it multiplies {DTYPES} by {BYTE_ROWS} rows, got {x.dtype} by {rows}")
    return _multiply(x, weight, sizes, dtype, interpret)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _experts(x, stack, sizes, interpret: bool):
    return _multiply(x, stack, sizes, x.dtype, interpret)


def _backward(interpret: bool, residuals, d_out):
    x, stack, sizes = residuals
    d_x = _multiply(d_out, stack, sizes, d_out.dtype, interpret, transposed=True)
    return d_x, _outer(x, d_out, sizes, interpret), None


_experts.defvjp(lambda *given: (_experts(*given), given[:3]), _backward)


def _span(index: Array, length: int) -> Int[Array, " length"]:
    return index * length + jax.lax.broadcasted_iota(jnp.int32, (length,), 0)


def _place(rows: Array, columns: Array, height: Array | int, width: int):
    """Returns the indices of a tile, and where it has numbers: before `height` and `width`."""
    dims = len(rows), len(columns)
    place = jnp.broadcast_to(rows[:, None], dims), jnp.broadcast_to(columns[None], dims)
    return place, (place[0] < height) & (place[1] < width)


# Equal products are traced and lowered once.
@functools.partial(jax.jit, static_argnames=("dtype", "interpret", "transposed"))
def _multiply(x, stack, sizes, dtype, interpret: bool, transposed=False) -> Float[Array, "M O"]:
    """Multiplies groups of rows [M I] by their matrices [I O], or by their transposes [O I]."""
    count, *sides = stack.shape
    rows, columns = len(x), sides[0 if transposed else 1]
    tile = Tile.of(block_rows(rows, count), x.dtype)
    blocks = blocks_of(jnp.append(sizes, rows - sizes.sum()), rows, tile.rows)
    packed, parts = None, [stack]
    if not isinstance(stack, jax.Array):
        packed, codes = stack, stack.values
        if jnp.issubdtype(codes.dtype, jnp.floating):  # Triton loads no float8 under a mask
            codes = jax.lax.bitcast_convert_type(codes, jnp.uint8)
        halves = 2 if stack.halves else 1
        parts = [codes, stack.scales.reshape(count, halves, -1, columns)]
    call = pl.pallas_call(
        functools.partial(_multiply_kernel, tile, packed, transposed),
        out_shape=jax.ShapeDtypeStruct((rows, columns), dtype),
        # Programs that run at the same time share rows, and a few matrices.
        grid=(pl.cdiv(columns, tile.columns), len(blocks.matrix)),
        compiler_params=tile.params,
        interpret=interpret,
        name="experts",
    )
    with as_on_a_gpu():
        return call(*(a.astype(jnp.int32) for a in blocks[:3]), x, *parts)


def _multiply_kernel(tile: Tile, packed, transposed: bool, matrix, first, end, x, stack, *refs):
    *scales, out = refs
    block = pl.program_id(1)
    columns, number = _span(pl.program_id(0), tile.columns), matrix[block]
    rows, limit = first[block] + _span(0, tile.rows), end[block]
    count, *shape = stack.shape
    height, terms = shape[1 if transposed else 0], BYTE_ROWS if packed else tile.terms

    def factor(part, group):
        [ref], mask = scales, (columns < out.shape[1]) & (number < count)
        scale = plgpu.load(ref.at[number, part, group, columns], mask=mask, other=0)
        return packed.factor(scale)[None]

    def add(i, total):
        inner = _span(i, terms)
        place, mask = _place(*((columns, inner) if transposed else (inner, columns)), *shape)
        parts = [plgpu.load(stack.at[number, *place], mask=mask, other=0)]
        if packed:
            factors = None
            if packed.group:
                group = jax.lax.div(i * terms, packed.group)
                factors = [factor(part, group) for part in range(scales[0].shape[1])]
            parts = packed.unpacked(*parts, factors)
        for part, right in enumerate(parts):
            place, mask = _place(rows, part * height + inner, limit, x.shape[1])
            left = plgpu.load(x.at[place], mask=mask, other=0)
            total += dot(left, right.astype(x.dtype), ((1,), (1 if transposed else 0,)))
        return total

    steps = jnp.where(number < count, jnp.int32(pl.cdiv(height, terms)), 0)
    total = jnp.zeros((tile.rows, tile.columns), jnp.float32)
    total = jax.lax.fori_loop(0, steps, add, total)
    if packed and not packed.group:  # values are exact in every dtype, those by scales are not
        total *= factor(0, 0)
    place, mask = _place(rows, columns, limit, out.shape[1])
    plgpu.store(out.at[place], total.astype(out.dtype), mask=mask)


@functools.partial(jax.jit, static_argnames=("interpret",))
def _outer(x, y, sizes, interpret: bool) -> Float[Array, "E I O"]:
    """Returns `x.T @ y` of the rows of each group."""
    tile = Tile.of(128, x.dtype)
    shape = len(sizes), x.shape[1], y.shape[1]
    ends = jnp.cumsum(sizes).astype(jnp.int32)
    call = pl.pallas_call(
        functools.partial(_outer_kernel, tile),
        out_shape=jax.ShapeDtypeStruct(shape, x.dtype),
        grid=(pl.cdiv(shape[2], tile.columns), pl.cdiv(shape[1], tile.rows), shape[0]),
        compiler_params=tile.params,
        interpret=interpret,
        name="experts_outer",
    )
    with as_on_a_gpu():
        return call((ends - sizes).astype(jnp.int32), ends, x, y)


def _outer_kernel(tile: Tile, begin, end, x, y, out):
    number = pl.program_id(2)
    columns, inner = (_span(pl.program_id(i), n) for i, n in enumerate((tile.columns, tile.rows)))
    first, limit = begin[number], end[number]

    def load(ref, rows, columns):
        place, mask = _place(rows, columns, limit, ref.shape[1])
        return plgpu.load(ref.at[place], mask=mask, other=0)

    def add(i, total):
        rows = first + _span(i, tile.terms)
        return total + dot(load(x, rows, inner), load(y, rows, columns), ((0,), (0,)))

    steps = jax.lax.div(limit - first + (tile.terms - 1), jnp.int32(tile.terms))
    total = jnp.zeros((tile.rows, tile.columns), jnp.float32)
    total = jax.lax.fori_loop(0, steps, add, total)
    place, mask = _place(inner, columns, *out.shape[1:])
    plgpu.store(out.at[number, *place], total.astype(out.dtype), mask=mask)
