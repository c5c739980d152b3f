"""Tree attention by itself: a comparison of kernels, as shares of a copy's bandwidth.

The bytes of a call are keys and values of the prefix and the tree, queries and results, whatever
the length of the page table. Calls are repeated inside one program, like layers in a model; each
reads other pages than the one before, so that they do not come from the chip's cache.

Shapes with the same lengths are compiled together, before the first of them is measured, so that a
part with too little time has measured whole shapes, by all kernels, the most important first.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bench.gpu.chunks import random_pages
from bench.gpu.job import Absent, Job
from bench.gpu.parts.ceilings import copy_rate
from bench.gpu.program import Built, Place, Program, build
from bench.record import alternate, figure, median_interval, paired_ratio_interval
from specjax.config import ModelConfig, RunConfig
from specjax.decode.tree import chain_bits
from specjax.kernels import dispatch
from specjax.kernels.backend import choose
from specjax.models.families.dense import dense_config

# The Pallas kernels that read pages where they lie, and, last, cuDNN, for which pages are gathered.
KERNELS = ("gpu", "triton", "library:cudnn")
MIXED = "mixed"  # in place of a batch: slots of different lengths


def model_of(head: int, dtype: str = "bfloat16") -> ModelConfig:
    """Returns a model with the sizes that the choice of a kernel depends on."""
    sizes = {"vocab_size": 8, "hidden_size": head, "intermediate_size": head, "num_layers": 1}
    heads = {"num_heads": 1, "num_kv_heads": 1, "head_dim": head}
    return dense_config(**sizes, **heads, run=RunConfig(compute_dtype=dtype))


def kernels_on(place: Place, asked: Sequence[str], head: int, dtype: str = "bfloat16") -> list[str]:
    """Returns the kernels that a device supports.

    Raises:
      Absent: it supports none of them.
    """
    found, reasons = [], []
    for name in asked:
        try:
            found.append(choose(place.platform, place.kind, model_of(head, dtype), name).name)
        except ValueError as error:
            reasons.append(str(error))
    if not found:
        raise Absent("not on this device", "; ".join(reasons))
    return found


class Sizes(NamedTuple):
    """Sizes of the measurement, the most important first.

    Attributes:
      lengths: (prefix, positions of the page table) of every slot.
      mixed: batch sizes with slots of lengths from `shortest` to the whole `table`.
      call_bytes: approximate bytes that the calls of one program read together, so that the time to
        start it is negligible: 10 ms of a copy; at most `most` calls.
      pool_bytes: least bytes that calls read before one reads the same pages again: ten times the
        50 MB of the chip's cache.
    """

    kernels: tuple[str, ...] = KERNELS
    rows: tuple[int, ...] = (16, 1, 5)
    lengths: tuple[tuple[int, int], ...] = ((8192, 8192), (2048, 2048), (2048, 16_384))
    mixed: tuple[int, ...] = (8, 64)
    shortest: int = 256
    table: int = 8192
    kv_heads: int = 8
    group: int = 4
    head: int = 128
    page: int = 128
    call_bytes: float = 32e9
    most: int = 8192
    pool_bytes: float = 512e6
    repeats: int = 9


SMALL = Sizes(
    kernels=("reference", "library:xla"),
    rows=(8, 1),
    lengths=((32, 64),),
    mixed=(3,),
    shortest=16,
    table=64,
    kv_heads=2,
    group=2,
    head=16,
    page=16,
    call_bytes=1e6,
    most=4,
    pool_bytes=1e5,
    repeats=3,
)


class Cell(NamedTuple):
    """One shape: number of rows, positions of each slot's prefix, positions of the page table."""

    rows: int
    prefixes: tuple[int, ...]
    table: int

    @property
    def name(self) -> str:
        lengths = set(self.prefixes)
        prefix = str(lengths.pop()) if len(lengths) == 1 else f"mixed_{len(self.prefixes)}"
        return f"{self.rows}/{prefix}/{self.table}"

    def bytes(self, sizes: Sizes) -> int:
        """Returns the bytes that a call must read and write."""
        batch = len(self.prefixes)
        queries = 2 * batch * sizes.kv_heads * sizes.group * self.rows
        keys = 2 * sizes.kv_heads * (sum(self.prefixes) + batch * self.rows)
        return 2 * sizes.head * (queries + keys)

    def calls(self, sizes: Sizes) -> int:
        return int(np.clip(round(sizes.call_bytes / self.bytes(sizes)), 2, sizes.most))

    def sets(self, sizes: Sizes) -> int:
        """Returns the number of tables without common pages, so that no call's pages are cached.

        Only pages that are read count: a table may be much longer than the prefix.
        """
        read = sum(-(-prefix // sizes.page) for prefix in self.prefixes)
        page_bytes = 2 * 2 * sizes.kv_heads * sizes.page * sizes.head
        return math.ceil(sizes.pool_bytes / (read * page_bytes))


def cells(sizes: Sizes, batch: int | str) -> list[Cell]:
    if batch != MIXED:
        return [
            Cell(rows, (prefix,) * batch, table)
            for prefix, table in sizes.lengths
            for rows in sizes.rows
        ]
    found = []
    for count in sizes.mixed:
        lengths = np.geomspace(sizes.shortest, sizes.table, count).astype(int)
        lengths = np.random.default_rng(0).permutation(lengths)  # in no order
        prefixes = tuple(map(int, lengths))
        found += [Cell(rows, prefixes, sizes.table) for rows in sizes.rows]
    return found


# --- programs ------------------------------------------------------------------------------------


def _shapes(sizes: Sizes, cell: Cell) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Returns the shapes of q, of the tree's keys and values, of their pages, and of tables."""
    batch, pages = len(cell.prefixes), cell.table // sizes.page
    tree = batch, sizes.kv_heads, cell.rows, sizes.head
    q = batch, sizes.kv_heads * sizes.group, cell.rows, sizes.head
    sets = cell.sets(sizes)
    pool = 1 + sets * batch * pages, sizes.kv_heads, sizes.page, sizes.head
    arrays = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in (q, tree, tree, pool, pool)]
    return *arrays, jax.ShapeDtypeStruct((max(sets, 2), batch, pages), jnp.int32)


def _attend(kernel: str, cell: Cell, calls: int, q, k_tree, v_tree, k, v, tables):
    lengths, bits = jnp.asarray(cell.prefixes, jnp.int32), jnp.asarray(chain_bits(cell.rows))

    def call(i, q):
        table = tables[i % tables.shape[0]]
        arrays = q, k_tree, v_tree, k, v, lengths, bits, table
        return dispatch.tree_attention(*arrays, kernel=kernel)  # the next call's queries

    return jax.lax.fori_loop(0, calls, call, q)


def programs(place: Place, small: bool, batch: int | str) -> list[Program]:
    sizes = SMALL if small else Sizes()
    return _programs(place, sizes, cells(sizes, batch))


def _programs(place: Place, sizes: Sizes, several: Sequence[Cell]) -> list[Program]:
    kernels, found = kernels_on(place, sizes.kernels, sizes.head), []
    for cell in several:
        inputs = place.shapes(_shapes(sizes, cell))
        for kernel in kernels:
            attend = functools.partial(_attend, kernel, cell, cell.calls(sizes))
            lower = functools.partial(jax.jit(attend).lower, *inputs)
            found.append(Program(f"{kernel}/{cell.name}", functools.cache(lower)))
    return found


# --- running --------------------------------------------------------------------------------------


def _inputs(sizes: Sizes, cell: Cell, seed: int) -> tuple[jax.Array, ...]:
    """Makes random arrays; each slot has pages of its own, in random order."""
    *arrays, tables = _shapes(sizes, cell)
    keys = jax.random.split(jax.random.key(seed), len(arrays))
    drawn = [random_pages(key, x.shape, jnp.bfloat16) for key, x in zip(keys, arrays, strict=True)]
    sets, batch, pages = tables.shape
    count = drawn[-1].shape[0] - 1
    order = 1 + np.random.default_rng(seed).permutation(count)
    order = order.reshape(-1, batch, pages).astype(np.int32)
    if len(order) < sets:  # the compiler must not take the reads out of the loop
        order = np.concatenate([order, np.roll(order, batch // 2, axis=1)])
    return *drawn, jnp.asarray(order)


def measure(job: Job, batch: int | str) -> None:
    """Measures `us` a call and `share` of the copy, `../<kernel>/<rows>/<prefix>/<table>`.

    `over/<kernel>/..` are its seconds over those of the last one of `Sizes.kernels`.
    """
    sizes, place = SMALL if job.small else Sizes(), Place()
    job.tell(sizes=sizes._asdict(), batch=batch)
    kernels_on(place, sizes.kernels, sizes.head)  # raises Absent where there is none
    copy = copy_rate(job)

    @functools.cache
    def built(prefixes: tuple[int, ...], table: int) -> Built:
        alike = [c for c in cells(sizes, batch) if (c.prefixes, c.table) == (prefixes, table)]
        return build(_programs(place, sizes, alike))

    job.each(
        (
            f"share/best/{cell.name}",
            functools.partial(_figures, job, sizes, cell, built, copy),
        )
        for cell in cells(sizes, batch)
    )


def _figures(
    job: Job, sizes: Sizes, cell: Cell, built_for: Callable[..., Built], copy: float
) -> dict:
    built = built_for(cell.prefixes, cell.table)
    inputs, result, runs, errors = _inputs(sizes, cell, job.seed), {}, {}, {}

    def run(compiled) -> None:
        jax.block_until_ready(compiled(*inputs))

    for kernel in sizes.kernels:  # a kernel that fails does not stop the others
        if f"{kernel}/{cell.name}" not in built:
            continue
        try:
            runs[kernel] = functools.partial(run, built[f"{kernel}/{cell.name}"])
            runs[kernel]()
        except Exception as error:
            runs.pop(kernel, None)
            errors[kernel] = error
    if not runs:
        raise next(iter(errors.values()))
    for kernel, error in errors.items():
        job.not_measured([f"share/{kernel}/{cell.name}"], error)
    found = _timed(sizes, cell, runs)
    for kernel, seconds in found.items():
        at = f"{kernel}/{cell.name}"
        middle, *ends = median_interval([1e6 * s for s in seconds])
        result[f"us/{at}"] = figure(middle, "us a call", ends)
        least = cell.bytes(sizes) / copy
        share, *ends = median_interval([least / s for s in seconds])
        result[f"share/{at}"] = figure(share, "of a copy's bytes/s", ends)
    best = max(found, key=lambda kernel: result[f"share/{kernel}/{cell.name}"]["value"])
    unit = f"of a copy's bytes/s; {best}"
    result[f"share/best/{cell.name}"] = result[f"share/{best}/{cell.name}"] | {"unit": unit}
    last = sizes.kernels[-1]
    for kernel in found.keys() - {last} if last in found else ():
        ratio, *ends = paired_ratio_interval(found[kernel], found[last])
        unit = f"times the seconds of {last}"
        result[f"over/{kernel}/{cell.name}"] = figure(ratio, unit, ends)
    return result


def _timed(sizes: Sizes, cell: Cell, runs: dict[str, Callable]) -> dict[str, list[float]]:
    """Measures the seconds of a call, for each kernel and turn."""
    calls = cell.calls(sizes)
    found = alternate(runs, sizes.repeats)
    return {kernel: [s / calls for s in seconds] for kernel, seconds in found.items()}
