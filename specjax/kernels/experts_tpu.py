"""Products of sorted rows with matrices of a stack, for TPUs.

See `specjax.kernels.experts`. A Pallas kernel multiplies few rows, as in decoding: it holds all of
them in VMEM, and reads the matrices of the groups that have rows, one after the other, from HBM.
Many rows are multiplied by XLA's own kernel for `jax.lax.ragged_dot`, which XLA may give a copy of
all matrices in VMEM, where they fit. The derivatives are jax's Pallas kernels of the megablox
library: those of `ragged_dot` would copy the stack, and multiply all rows by all matrices. These
kernels leave rows in no group as the memory was.

float32 is multiplied as float32, not as bfloat16.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.tpu as pltpu
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm, tgmm
from jax.experimental.xla_metadata import set_xla_metadata
from jaxtyping import Array, Float, Int

from specjax.kernels.backend import Declined
from specjax.kernels.tiles import BYTE_ROWS, dot

DTYPES = ("float32", "bfloat16")
LANES, PACKED = 128, 16  # multiples of which arrays in VMEM have columns, and rows of any dtype
ROWS = 128  # rows of a block
# By default kernels have 16 MiB of VMEM, for two blocks of each array and for sums in float32;
# every chip has more.
VMEM, UNPACKED = 40 * 2**20, 18 * 2**20  # bytes asked for, and of the largest block to be unpacked
BLOCK, WIDEST = 7 * 2**19, 2048  # bytes of a block of a matrix, and its columns
LONGEST = 8 * 2**10  # bytes of a row of a block of rows
FEW, FEW_BYTES, FEW_OUT = 512, 2**21, 2**20  # few rows, their bytes, and those of their results


def experts(
    x: Float[Array, "M I"],
    stack: Float[Array, "E I O"],
    sizes: Int[Array, " E"],
    interpret: bool = False,
) -> Float[Array, "M O"]:
    """Computes `specjax.kernels.dispatch.experts`, with derivatives; sums are float32.

    Args:
      interpret: whether to interpret the Pallas kernels on CPU, for tests.

    Raises:
      Declined: rows and stack are not both of one of `DTYPES`, or a side of the matrices is no
        multiple of 128: the stack would be copied to another layout in each call.
    """
    if x.dtype != stack.dtype or x.dtype not in DTYPES:
        raise Declined(f"it multiplies {' or '.join(DTYPES)}, got {x.dtype} rows by {stack.dtype}")
    if any(side % LANES for side in stack.shape[1:]):
        raise Declined(f"it multiplies by matrices of multiples of {LANES}, got {stack.shape[1:]}")
    return _experts(x, stack, sizes, interpret)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _experts(x, stack, sizes, interpret: bool):
    column = LANES * stack.shape[1] * x.dtype.itemsize
    if len(x) <= FEW and x.nbytes <= FEW_BYTES and column <= BLOCK:
        return _few(x, stack, sizes, x.dtype, interpret)
    x, rows = _padded(x, ROWS), len(x)
    tiling = ROWS, *_block(*stack.shape[1:], x.dtype)
    with _exactly(x.dtype), set_xla_metadata(ragged_dot_tiling=",".join(map(str, tiling))):
        out = jax.lax.ragged_dot(x, stack, sizes, preferred_element_type=x.dtype)
    return _of_groups(out[:rows], sizes)


def _backward(interpret: bool, residuals, d_out):
    x, stack, sizes = residuals
    (x, rows), d_out = (_padded(x, ROWS), len(x)), _padded(d_out, ROWS)
    inner, columns = stack.shape[1:]
    with _exactly(x.dtype):
        tiling = ROWS, *_block(columns, inner, x.dtype)
        d_x = gmm(d_out, stack, sizes, x.dtype, tiling, transpose_rhs=True, interpret=interpret)
        # All of a block of the result is added up in float32.
        tiling = ROWS, _divisor(inner, 1024), _divisor(columns, 768)
        d_stack = tgmm(x.T, d_out, sizes, stack.dtype, tiling, interpret=interpret)
    return _of_groups(d_x[:rows], sizes), d_stack, None


_experts.defvjp(lambda *given: (_experts(*given), given[:3]), _backward)


# --- few rows -------------------------------------------------------------------------------------


def multiply_packed(
    x: Float[Array, "M I"],
    weight: Any,
    sizes: Int[Array, " E"],
    dtype: Any,
    interpret: bool = False,
) -> Float[Array, "M O"]:
    """Multiplies few rows by a stack of packed matrices [E I O]; see `experts`.

    Args:
      weight: a `specjax.weights.packed.Packed`, which the kernel unpacks in VMEM.
      dtype: dtype of the result.

    Raises:
      Declined: there are many rows, a part of the matrices has no whole tiles, or a block of all
        their inputs is too large for VMEM.
    """
    if x.dtype not in DTYPES or len(x) > FEW or x.nbytes > 2 * FEW_BYTES:
        raise Declined(f"it multiplies up to {FEW} rows of {DTYPES}, got {x.shape} of {x.dtype}")
    rows = weight.values.shape[1]
    block = LANES * (weight.shape[1] * x.dtype.itemsize + 2 * rows)
    if weight.group % BYTE_ROWS or rows % BYTE_ROWS or block > UNPACKED:
        wanted = f"{BYTE_ROWS} rows of a group, in blocks of {UNPACKED} bytes"
        raise Declined(f"it unpacks {wanted}, got {weight.shape} in blocks of {block}")
    return _few(x, weight, sizes, dtype, interpret)


@functools.partial(jax.jit, static_argnums=(3, 4))  # equal products are traced once
def _few(x, stack, sizes, dtype: Any, interpret: bool) -> Float[Array, "M O"]:
    """Multiplies rows that are all in VMEM, by one matrix of a group that has rows at a time.

    The stack is an array [E I O] or a `Packed`; `dtype` is that of the result.
    """
    (count, inner, columns), rows = stack.shape, len(x)
    x = _padded(x, PACKED)
    side = min(BLOCK // inner, FEW_OUT // len(x)) // x.dtype.itemsize
    if isinstance(stack, jax.Array):
        side = _divisor(columns, min(WIDEST, side))
        kernel, parts, scratch = _few_kernel, [stack], []
    else:  # it is unpacked a block at a time
        side = min(columns, max(min(side // LANES, WIDEST // LANES), 1) * LANES)
        kernel, parts = functools.partial(_packed_kernel, stack), [stack.values, stack.scales]
        groups = math.prod(stack.scales.shape[1:-1])
        scratch = [pltpu.VMEM((inner, side), x.dtype), pltpu.VMEM((groups, side), jnp.float32)]
    ends, active = jnp.cumsum(sizes), jnp.cumsum(sizes > 0)
    turn = jnp.arange(min(rows, count))
    matrix = jnp.searchsorted(active, turn, side="right", method="compare_all")
    matrix = jnp.minimum(matrix, count - 1)

    def block(part: Array) -> pl.BlockSpec:
        whole = part.shape[1:-1]
        return pl.BlockSpec(
            (None, *whole, side), lambda j, i, matrix, *_: (matrix[i], *(0,) * len(whole), j)
        )

    call = pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((len(x), columns), dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(pl.cdiv(columns, side), jnp.maximum(active[-1], 1)),
            in_specs=[pl.BlockSpec(x.shape, lambda *_: (0, 0)), *map(block, parts)],
            out_specs=pl.BlockSpec((len(x), side), lambda j, *_: (0, j)),
            scratch_shapes=scratch,
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"),
            vmem_limit_bytes=VMEM if inner * side * x.dtype.itemsize > BLOCK else None,
        ),
        interpret=interpret,
        name="experts",
    )
    if not interpret:  # else XLA copies all matrices to VMEM ahead of time, where they fit
        parts = [pltpu.with_memory_space_constraint(part, pltpu.HBM) for part in parts]
    return call(matrix, (ends - sizes)[matrix], ends[matrix], x, *parts)[:rows]


def _few_kernel(matrix, begin, end, x, weights, out, scale=None):
    turn, block = pl.program_id(1), min(len(x) & -len(x), ROWS)
    first, limit = begin[turn], end[turn]

    @pl.when(turn == 0)
    def _():
        out[...] = jnp.zeros_like(out)

    def add(i, _):
        start = pl.multiple_of(i * block, block)
        span = pl.ds(start, block)
        row = start + jax.lax.broadcasted_iota(jnp.int32, (block, out.shape[1]), 0)
        product = dot(x[span], weights[...])
        product = (product if scale is None else product * scale[...]).astype(out.dtype)
        out[span] = jnp.where((first <= row) & (row < limit), product, out[span])

    blocks = jax.lax.div(first, block), jax.lax.div(limit + block - 1, block)
    jax.lax.fori_loop(*blocks, add, None)


def _packed_kernel(packed, matrix, begin, end, x, codes, scales, out, weights, factors):
    """Unpacks a block of a matrix, a tile of rows after the other, and multiplies by it."""
    parts, turn = 2 if packed.halves else 1, pl.program_id(1)
    groups = len(factors) // parts

    def unpack(i, _):
        span, scale = pl.ds(pl.multiple_of(i * BYTE_ROWS, BYTE_ROWS), BYTE_ROWS), None
        if packed.group:
            group = jax.lax.div(i * BYTE_ROWS, packed.group)
            scale = [factors[pl.ds(part * groups + group, 1)] for part in range(parts)]
        for part, tile in enumerate(packed.unpacked(codes[span], scale)):
            place = pl.multiple_of(part * len(codes) + i * BYTE_ROWS, BYTE_ROWS)
            weights[pl.ds(place, BYTE_ROWS)] = tile.astype(weights.dtype)

    @pl.when(begin[turn] < end[turn])
    def _():
        factors[...] = packed.factor(scales[...]).reshape(factors.shape)
        jax.lax.fori_loop(0, len(codes) // BYTE_ROWS, unpack, None)

    # Values are exact in every dtype, and values by their scale are not.
    _few_kernel(matrix, begin, end, x, weights, out, None if packed.group else factors)


# --- blocks ---------------------------------------------------------------------------------------


def _exactly(dtype):
    """Returns a context in which products of a dtype are exact; Mosaic refuses it for bfloat16."""
    return jax.default_matmul_precision("highest" if dtype == jnp.float32 else "default")


def _padded(x: Float[Array, "M I"], multiple: int) -> Float[Array, "N I"]:
    return jnp.pad(x, [(0, -len(x) % multiple), (0, 0)])


def _of_groups(out: Float[Array, "M O"], sizes: Int[Array, " E"]) -> Float[Array, "M O"]:
    return jnp.where(jnp.arange(len(out))[:, None] < sizes.sum(), out, 0)


def _block(inner: int, columns: int, dtype) -> tuple[int, int]:
    """Returns the sides of a block of a matrix [inner columns], of which both are parts.

    A block has all rows of the matrix where it can: then a matrix is read once for all the rows of
    its group.
    """
    inner = _divisor(inner, LONGEST // dtype.itemsize)
    return inner, _divisor(columns, min(WIDEST, BLOCK // dtype.itemsize // inner))


def _divisor(size: int, most: int) -> int:
    """Returns the largest multiple of 128 up to `most` that divides a size."""
    return max(n for n in range(LANES, min(size, most) + 1, LANES) if size % n == 0)
