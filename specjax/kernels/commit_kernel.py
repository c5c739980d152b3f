"""New keys and values of all layers, written to their pages by one Pallas Triton kernel.

It writes what `specjax.kernels.commit.by_scatter` writes by a scatter per array. A GPU takes longer
to start these, 72 for a model of 36 layers, than to write their rows. The kernel takes the arrays
of all layers at once, each of which is an argument and a result in the same memory.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.triton as plgpu
import jax.numpy as jnp
from jaxtyping import Array, Int

from specjax.interfaces import Table
from specjax.kernels.commit import by_scatter

MOST_ARRAYS = 128  # of one call: a CUDA kernel takes 4 KiB of parameters, 3 pointers per array


def by_kernel(
    arrays: Sequence[Array],
    rows: Sequence[Array],
    start: Int[Array, " B"],
    table: Table = None,
    *,
    run: int = 1,
    interpret: bool = False,
) -> list[Array]:
    """Writes all rows of all sequences, whatever `run` is; arguments as those of `by_scatter`.

    Arrays of stacked layers, which are few, and arrays on a mesh, which the compiler splits, are
    written by `by_scatter`.

    Args:
      interpret: whether the kernel is interpreted, which needs no GPU.
    """
    arrays, rows = list(arrays), list(rows)
    mesh = jax.sharding.get_abstract_mesh()
    if arrays[0].ndim > 4 or not (mesh.empty or mesh.size == 1):
        return by_scatter(arrays, rows, start, table, run=run)
    written = []
    for i in range(0, len(arrays), MOST_ARRAYS):
        some = slice(i, i + MOST_ARRAYS)
        written += _written(arrays[some], rows[some], start, table, interpret)
    return written


def _written(arrays, rows, start, table: Table, interpret: bool) -> list[Array]:
    number, (batch, _, count, _) = len(arrays), rows[0].shape
    places = [start.astype(jnp.int32)]
    if table is not None:
        places.append(table.astype(jnp.int32))
    return pl.pallas_call(
        functools.partial(_kernel, number, len(places)),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays],
        grid=(number, batch, count),
        input_output_aliases={len(places) + number + i: i for i in range(number)},
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="commit",
    )(*places, *rows, *arrays)


def _kernel(number: int, places: int, *refs) -> None:
    """Runs a program: one row of one sequence, of all heads of one array."""
    (start, *table), refs = refs[:places], refs[places:]
    rows, written = refs[:number], refs[2 * number :]
    array, sequence, row = (pl.program_id(axis) for axis in range(3))
    _, kv_heads, size, width = written[0].shape
    page, offset, owned = sequence, start[sequence] + row, True
    if table:
        [table] = table
        stretch = jax.lax.div(offset, jnp.int32(size))
        page, offset = table[sequence, stretch], jax.lax.rem(offset, jnp.int32(size))
        owned = page != 0  # page 0 belongs to no sequence
    # Blocks of Triton have powers of two as sizes.
    head = jax.lax.broadcasted_iota(jnp.int32, (_power(kv_heads), 1), 0)
    column = jax.lax.broadcasted_iota(jnp.int32, (1, _power(width)), 1)
    inside = (head < kv_heads) & (column < width)

    def write(new, old) -> None:
        numbers = plgpu.load(new.at[sequence, head, row, column], mask=inside)
        numbers = numbers.astype(old.dtype)
        plgpu.store(old.at[page, head, offset, column], numbers, mask=inside & owned)

    pairs = zip(rows, written, strict=True)
    _choose(array, [functools.partial(write, new, old) for new, old in pairs])


def _choose(index: Array, calls: Sequence[Callable[[], None]]) -> None:
    """Calls one of several functions, found by halving."""
    if len(calls) == 1:
        return calls[0]()
    half = len(calls) // 2
    return jax.lax.cond(
        index < half,
        lambda: _choose(index, calls[:half]),
        lambda: _choose(index - half, calls[half:]),
    )


def _power(number: int) -> int:
    """Returns the smallest power of two that is no less."""
    return 1 << (number - 1).bit_length()
