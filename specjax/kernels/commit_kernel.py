"""New keys and values of all layers, written to their pages by one Pallas Triton kernel.

It writes what `specjax.kernels.commit.by_scatter` writes by a scatter per array. A GPU takes longer
to start these, 72 for a model of 36 layers, than to write their rows. The kernel takes the arrays
of all layers at once, each of which is an argument and a result in the same memory.

A kernel that compiles may be wrong on a device that it was not tried on. So programs use it only
after `why_wrong` has compared what it writes on a device of this process.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.triton as plgpu
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from specjax.error_text import first_line
from specjax.interfaces import Table
from specjax.kernels.commit import by_scatter
from specjax.kernels.triton_lowering import (
    OutOfMemory,
    as_on_a_gpu,
    is_out_of_memory,
)

log = logging.getLogger(__name__)

MOST_ARRAYS = 128  # of one call: a CUDA kernel takes 4 KiB of parameters, 3 pointers per array
CHECKED_BYTES = 2**30  # largest size of the pages for which the kernel is checked


class Choice:
    """Whether programs traced from now on use the kernel; None: it was not checked yet."""

    on: bool | None = None


class Sizes(NamedTuple):
    """What a model's programs write at once.

    Attributes:
      number: number of arrays: keys and values of all layers whose arrays are alike.
      kv_heads, page, head: sizes of an array's pages [P kv_heads page head].
      dtype: dtype of the pages.
      rows: numbers of rows of a sequence that programs write.
    """

    number: int
    kv_heads: int
    page: int
    head: int
    dtype: str
    rows: tuple[int, ...]

    def __str__(self) -> str:
        return (
            f"{self.number} {self.dtype} arrays of {self.kv_heads} heads of {self.head}, pages of "
            f"{self.page}"
        )


def settle(why: str | None) -> None:
    """Lets programs use the kernel if it is right on the device, else warns.

    Once it was wrong for a model, no program uses it.

    Args:
      why: what `why_wrong` returned.
    """
    if why is not None and Choice.on is not False:
        log.warning(
            "new keys and values are written by scatters, and not by one kernel: %s; report this, "
            "with the versions of jax and of the driver",
            why,
        )
    Choice.on = Choice.on is not False and why is None


def why_wrong(sizes: Sizes, device: jax.Device, interpret: bool = False) -> str | None:
    """Returns how the kernel fails on a device, or that it is wrong; None: it is right.

    Rows cross pages, run past the table of a sequence where that of the next one begins, and belong
    to a sequence without pages. What they should be is computed on the host.

    Raises:
      OutOfMemory: the device has no room for the comparison.
    """
    rng, size, shape = np.random.default_rng(0), sizes.page, (sizes.kv_heads, sizes.head)
    for count in sizes.rows:
        pages = -(-count // size) + 1
        table = np.zeros((4, pages), np.int32)
        table[:3] = 1 + rng.permutation(3 * pages).reshape(3, pages)
        # The third one does not write to its first page, so that the second one's rows would stay.
        start = np.array([size - 1, pages * size - (count + 1) // 2, size, 0], np.int32)
        drawn = rng.standard_normal((1 + 3 * pages, shape[0], size, shape[1]), np.float32)
        new = rng.standard_normal((4, shape[0], count, shape[1]), np.float32)
        drawn, new = drawn.astype(jnp.dtype(sizes.dtype)), new.astype(jnp.dtype(sizes.dtype))
        number = min(sizes.number, MOST_ARRAYS, max(CHECKED_BYTES // drawn.nbytes, 2))
        arrays = [np.roll(drawn, i) for i in range(number)]
        rows = [np.roll(new, i) for i in range(number)]
        try:
            with jax.default_device(device):
                write = jax.jit(functools.partial(_written, interpret=interpret))
                got = jax.device_get(write(arrays, rows, jnp.asarray(start), jnp.asarray(table)))
        except Exception as error:  # noqa: BLE001 (whatever it is, scatters can run)
            if is_out_of_memory(error):
                raise OutOfMemory(first_line(error)) from error
            return f"it fails here: {first_line(error)}"
        # The last sequence has no pages.
        at = start[:3, None] + np.arange(count)
        sequence, row = np.nonzero(at < pages * size)
        page = table[sequence, at[sequence, row] // size]
        for array, written, found in zip(arrays, rows, got, strict=True):
            array[page, :, at[sequence, row] % size] = written[sequence, :, row]
            if array.tobytes() != found.tobytes():
                return f"it is wrong here, for {count} rows of {sizes}"
    return None


def by_kernel(
    arrays: Sequence[Array],
    rows: Sequence[Array],
    start: Int[Array, " B"],
    table: Table = None,
    interpret: bool = False,
) -> list[Array]:
    """Writes all rows of all sequences; arguments as those of `by_scatter`.

    Arrays of stacked layers, which are few, and arrays on a mesh, which the compiler splits, are
    written by `by_scatter`; and so are all before the kernel was checked.

    Args:
      interpret: whether the kernel is interpreted, which needs no GPU.
    """
    arrays, rows = list(arrays), list(rows)
    mesh = jax.sharding.get_abstract_mesh()
    together = mesh.empty or mesh.size == 1
    if arrays[0].ndim > 4 or not together or not (Choice.on or interpret):
        return by_scatter(arrays, rows, start, table)
    written = []
    for i in range(0, len(arrays), MOST_ARRAYS):
        some = slice(i, i + MOST_ARRAYS)
        written += _written(arrays[some], rows[some], start, table, interpret)
    return written


def _written(arrays, rows, start, table: Table, interpret: bool) -> list[Array]:
    number, (batch, _, count, _) = len(arrays), rows[0].shape
    places, pages = [start.astype(jnp.int32)], None
    if table is not None:
        places.append(table.astype(jnp.int32).reshape(-1))
        pages = table.shape[1]
    call = pl.pallas_call(
        functools.partial(_kernel, number, pages),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays],
        grid=(number, batch, count),
        input_output_aliases={len(places) + number + i: i for i in range(number)},
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="commit",
    )
    with as_on_a_gpu():
        return call(*places, *rows, *arrays)


def _kernel(number: int, pages: int | None, *refs) -> None:
    """Runs a program: one row of one sequence, of all heads of one array.

    A row that lies past the pages of its sequence, or before them, is not written.

    Args:
      pages: pages of a sequence in the table; None: there is no table.
    """
    start, *refs = refs
    if pages is not None:
        table, *refs = refs
    rows, written = refs[:number], refs[2 * number :]
    array, sequence, row = (pl.program_id(axis) for axis in range(3))
    _, kv_heads, size, width = written[0].shape
    position, most = start[sequence] + row, size * (1 if pages is None else pages)
    owned = (position >= 0) & (position < most)
    # A GPU reads where it is told, and past its table a sequence would find the next one's pages.
    position = jnp.clip(position, 0, most - 1)
    page, offset = sequence, position
    if pages is not None:
        page = table[sequence * pages + jax.lax.div(position, jnp.int32(size))]
        offset = jax.lax.rem(position, jnp.int32(size))
        owned = owned & (page != 0)  # page 0 belongs to no sequence
    # Blocks of Triton have powers of two as sizes.
    head = jax.lax.broadcasted_iota(jnp.int32, (pl.next_power_of_2(kv_heads), 1), 0)
    column = jax.lax.broadcasted_iota(jnp.int32, (1, pl.next_power_of_2(width)), 1)
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
