"""Tree attention by itself, for `bench.gpu`: its values, and its share of a copy's bandwidth.

Values: bfloat16 on the device against the float32 reference, which is computed on the host's CPU.
Pages lie in no order, and what is past a prefix is as large as what is not.

Bandwidth: keys and values of the prefix and the tree, queries and results, over the seconds of a
call. Calls are repeated inside one program, as layers are in a model; each reads other pages than
the one before, so that a cache of the chip does not serve them. A copy that takes turns with it,
and is repeated inside its program likewise, is what the device can do.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bench.common import alternate, figure, median_interval, paired_ratio_interval
from bench.gpu_job import Absent, Job
from specjax.config import ModelConfig
from specjax.decode.tree import ancestors, chain_bits, pack_bits
from specjax.kernels import dispatch, reference
from specjax.kernels.choice import choose

SAFE, EXPERIMENTAL = ("reference", "library:xla", "library:cudnn"), ("gpu",)
TOLERANCE = 2e-2  # absolute and relative, in bfloat16


# --- who is there ------------------------------------------------------------------------------


def model_of(head: int) -> ModelConfig:
    """As much of a model as decides about its kernel."""
    sizes = {"vocab_size": 8, "hidden_size": head, "intermediate_size": head, "num_layers": 1}
    heads = {"num_heads": 1, "num_kv_heads": 1, "head_dim": head}
    return ModelConfig(**sizes, **heads, compute_dtype="bfloat16")


def kernels_here(asked: tuple[str, ...], head: int) -> list[str]:
    """Those that the device has.

    Raises:
      Absent: it has none of them.
    """
    device, found, reasons = jax.devices()[0], [], []
    for name in asked:
        try:
            found.append(choose(device.platform, device.device_kind, model_of(head), name).name)
        except ValueError as error:
            reasons.append(str(error))
    if not found:
        raise Absent("not on this device", "; ".join(reasons))
    return found


# --- values --------------------------------------------------------------------------------------


class Case(NamedTuple):
    """A call: B slots, K key/value heads of `group` queries each, T rows, pages per slot."""

    batch: int = 4
    kv_heads: int = 8
    group: int = 4
    rows: int = 16
    head: int = 128
    page: int = 128
    pages: int = 6
    window: int | None = None
    sinks: bool = False
    lse: bool = False


CASES = {
    "plain": Case(rows=1),
    "chain_of_5": Case(rows=5),
    "tree_of_16": Case(),
    "tree_of_33": Case(rows=33),
    "tree_of_64": Case(rows=64),
    "one_long_slot": Case(batch=1, pages=64),
    "many_slots": Case(batch=48, rows=8, pages=2),
    "one_head_of_8": Case(kv_heads=1, group=8),
    "no_groups": Case(kv_heads=4, group=1),
    "heads_of_64": Case(head=64),
    "pages_of_64": Case(page=64),
    "window": Case(window=200),
    "sinks_and_lse": Case(sinks=True, lse=True),
    "window_sinks_and_lse": Case(rows=64, window=90, sinks=True, lse=True),
}
_TINY = Case(batch=2, kv_heads=2, group=2, rows=8, head=16, page=16, pages=3)
SMALL_CASES = {"tree_of_8": _TINY, "sinks": _TINY._replace(window=20, sinks=True, lse=True)}


def arrays_of(case: Case, seed: int) -> tuple[tuple, np.ndarray | None]:
    """Arguments of `tree_attention` up to the table, in bfloat16, and sinks."""
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return rng.standard_normal(shape, np.float32).astype(jnp.bfloat16)

    batch, rows, heads = case.batch, case.rows, case.kv_heads * case.group
    parents = [[0, *(rng.integers(0, r) for r in range(1, rows))] for _ in range(batch)]
    bits = np.stack([pack_bits(ancestors(np.array(p))) for p in parents])
    most = case.pages * case.page
    prefix = rng.integers(1, most + 1, batch)
    for slot, special in zip(range(batch), (most, 0, case.page), strict=False):
        prefix[slot] = special  # all pages full, nothing, one page full
    table = 1 + rng.permutation(batch * case.pages).reshape(batch, case.pages)
    q = normal(batch, heads, rows, case.head)
    trees = [normal(batch, case.kv_heads, rows, case.head) for _ in range(2)]
    shape = 1 + batch * case.pages, case.kv_heads, case.page, case.head
    pages = [normal(*shape) for _ in range(2)]
    sinks = rng.standard_normal(heads, np.float32) if case.sinks else None
    return (q, *trees, *pages, prefix.astype(np.int32), bits, table.astype(np.int32)), sinks


def wanted(case: Case, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Attention in float32 and its log-sum-exp, by the reference on the host."""
    arrays, sinks = arrays_of(case, seed)
    arrays = [x.astype(np.float32) if x.dtype == jnp.bfloat16 else x for x in arrays]
    attend = functools.partial(reference.tree_attention, window=case.window, with_lse=True)
    with jax.default_device(jax.devices("cpu")[0]):
        out, lse = jax.jit(attend)(*arrays, sinks=sinks)
    return np.asarray(out), np.asarray(lse)


def error_of(case: Case, kernel: str, seed: int, expected: tuple) -> float:
    """The largest difference, in units of what is allowed there.

    Raises:
      FloatingPointError: something is not finite.
    """
    arrays, sinks = arrays_of(case, seed)
    options = {"window": case.window, "with_lse": case.lse, "kernel": kernel}
    attend = functools.partial(dispatch.tree_attention, **options)
    found = jax.device_get(jax.jit(attend)(*arrays, sinks=sinks))
    found = found if case.lse else (found,)
    worst = 0.0
    for got, want in zip(found, expected, strict=False):
        got = np.asarray(got, np.float32)
        if not np.isfinite(got).all():
            raise FloatingPointError(f"{np.count_nonzero(~np.isfinite(got))} values are not finite")
        allowed = TOLERANCE * (1 + np.abs(want))
        worst = max(worst, float((np.abs(got - want) / allowed).max()))
    return worst


def values(job: Job, asked: tuple[str, ...] = SAFE) -> None:
    """`values/<kernel>/<case>`: the error of each kernel that is there."""
    cases = SMALL_CASES if job.small else CASES
    kernels = kernels_here(asked, next(iter(cases.values())).head)
    expected = functools.cache(lambda name: wanted(cases[name], job.seed))

    def one(kernel: str, case: str) -> dict:
        name = f"values/{kernel}/{case}"
        worst = error_of(cases[case], kernel, job.seed, expected(case))
        if worst > 1:
            job.fail(f"{name}: {worst:.1f} times the difference that is allowed")
        unit = f"largest difference, of the {TOLERANCE} + {TOLERANCE} |value| that are allowed"
        return {name: figure(worst, unit)}

    job.each(
        (f"values/{kernel}/{case}", functools.partial(one, kernel, case))
        for kernel in kernels
        for case in cases
    )


# --- bandwidth -----------------------------------------------------------------------------------


class Sizes(NamedTuple):
    """What is measured, the most important first.

    Attributes:
      call_bytes: that calls of one program read together, roughly; `most` calls at most.
      pool_bytes: of pages at least, more than a chip's own cache. copy_bytes: of the array.
    """

    rows: tuple[int, ...] = (16, 1, 64, 8, 32)
    prefixes: tuple[int, ...] = (8192, 32_768, 1024)
    batches: tuple[int, ...] = (8, 1, 64)
    kv_heads: int = 8
    group: int = 4
    head: int = 128
    page: int = 128
    call_bytes: float = 16e9
    most: int = 128
    pool_bytes: float = 512e6
    copy_bytes: int = 1 << 30
    repeats: int = 7


SMALL = Sizes((8, 1), (64, 32), (2,), 2, 2, 16, 16, 1e6, 4, 1e5, 1 << 16, 3)


class Cell(NamedTuple):
    """One shape: T rows, positions of every slot's prefix, B slots."""

    rows: int
    prefix: int
    batch: int

    def bytes(self, sizes: Sizes) -> int:
        """That a call has to read and write."""
        queries = 2 * self.batch * sizes.kv_heads * sizes.group * self.rows
        keys = 2 * self.batch * sizes.kv_heads * (self.prefix + self.rows)
        return 2 * sizes.head * (queries + keys)


class Pool(NamedTuple):
    """Pages [P K S H], and several tables [X B pages] that between them use all of them."""

    k: jax.Array
    v: jax.Array
    tables: jax.Array


def pool_of(sizes: Sizes, seed: int, prefix: int, batch: int) -> Pool:
    """Random pages for a batch, or for several batches where one is small."""
    per_slot = prefix // sizes.page
    page_bytes = 2 * 2 * sizes.kv_heads * sizes.page * sizes.head
    sets = max(1, round(sizes.pool_bytes / (batch * per_slot * page_bytes)))
    count = sets * batch * per_slot
    order = 1 + np.random.default_rng(seed).permutation(count)
    tables = order.reshape(sets, batch, per_slot).astype(np.int32)
    if sets == 1:  # nobody is to know that all calls read the same
        tables = np.concatenate([tables, tables[:, ::-1]])
    few = min(64, 1 + count)
    shape = few, sizes.kv_heads, sizes.page, sizes.head

    @jax.jit
    def make(key):
        drawn = jax.random.normal(key, shape, jnp.bfloat16)
        return jnp.tile(drawn, (-(-(1 + count) // few), 1, 1, 1))[: 1 + count]

    keys = jax.random.split(jax.random.key(seed))
    return Pool(make(keys[0]), make(keys[1]), jnp.asarray(tables))


def repeated_attention(kernel: str, sizes: Sizes, cell: Cell, pool: Pool, calls: int) -> Callable:
    """A function that attends `calls` times and waits."""
    shape = cell.batch, sizes.kv_heads, cell.rows, sizes.head
    q_shape = cell.batch, sizes.kv_heads * sizes.group, cell.rows, sizes.head
    keys = jax.random.split(jax.random.key(1), 3)
    q, k_tree, v_tree = (
        jax.random.normal(key, dims, jnp.bfloat16)
        for key, dims in zip(keys, (q_shape, shape, shape), strict=True)
    )
    lengths = jnp.full(cell.batch, cell.prefix, jnp.int32)
    bits = jnp.asarray(chain_bits(cell.rows))

    def program(q, k_tree, v_tree, pool, lengths, bits):
        def call(i, q):
            table = pool.tables[i % pool.tables.shape[0]]
            arrays = q, k_tree, v_tree, pool.k, pool.v, lengths, bits, table
            return dispatch.tree_attention(*arrays, kernel=kernel)  # the next call's queries

        return jax.lax.fori_loop(0, calls, call, q)

    inputs = q, k_tree, v_tree, pool, lengths, bits
    compiled = jax.jit(program).lower(*inputs).compile()
    return lambda: jax.block_until_ready(compiled(*inputs))


def repeated_copy(size: int, calls: int) -> tuple[Callable[[], None], int]:
    """A function that reads and writes `size` bytes `calls` times, and the bytes of that."""
    array = jnp.zeros(size // 4, jnp.float32)
    program = jax.jit(lambda x: jax.lax.fori_loop(0, calls, lambda _, x: x + 1, x))
    compiled = program.lower(array).compile()
    return (lambda: jax.block_until_ready(compiled(array))), 2 * array.nbytes * calls


def bandwidth(job: Job, asked: tuple[str, ...] | None = None) -> None:
    """`bandwidth_share/<kernel>/..` of the kernel that is the device's default, or of `asked`."""
    sizes = SMALL if job.small else Sizes()
    if asked is None:
        device = jax.devices()[0]
        asked = (choose(device.platform, device.device_kind, model_of(sizes.head)).name,)
    [kernel] = kernels_here(asked, sizes.head)
    copy = repeated_copy(sizes.copy_bytes, max(1, round(sizes.call_bytes / sizes.copy_bytes / 2)))
    job.each(_cells(job, sizes, kernel, copy))


def _cells(job: Job, sizes: Sizes, kernel: str, copy) -> Iterator[tuple[str, Callable]]:
    """Name and measurement of every cell; those of one pool follow each other."""
    pool = functools.lru_cache(maxsize=1)(functools.partial(pool_of, sizes, job.seed))
    for prefix in sizes.prefixes:
        for batch in sizes.batches:
            for rows in sizes.rows:
                cell = Cell(rows, prefix, batch)
                at = f"{kernel}/T_{rows}/prefix_{prefix}/batch_{batch}"
                if missing := too_large(cell, sizes, kernel):
                    job.leave_out(f"bandwidth_share/{at}", missing)
                    continue
                measure = functools.partial(_cell, sizes, kernel, copy, cell, pool, at)
                yield f"bandwidth_share/{at}", measure


def too_large(cell: Cell, sizes: Sizes, kernel: str) -> str | None:
    """Why a cell's cache does not fit, as far as the device tells its memory."""
    limit = (jax.devices()[0].memory_stats() or {}).get("bytes_limit")
    own = max(cell.bytes(sizes), sizes.pool_bytes)
    # jax's attention wants keys side by side: gathered, and once more with the tree behind them.
    needed = own + 2 * sizes.copy_bytes + (2 * own if kernel.startswith("library") else 0)
    if limit is None or needed <= limit:
        return None
    return f"it needs {needed / 1e9:.1f} GB, the device gives {limit / 1e9:.1f} GB"


def _cell(sizes: Sizes, kernel: str, copy, cell: Cell, pool: Callable, at: str) -> dict:
    size = cell.bytes(sizes)
    calls = int(np.clip(round(sizes.call_bytes / size), 2, sizes.most))
    attend = repeated_attention(kernel, sizes, cell, pool(cell.prefix, cell.batch), calls)
    run_copy, copied = copy
    attend(), run_copy()
    seconds = alternate({"attention": attend, "copy": run_copy}, sizes.repeats)
    spent = [s / calls for s in seconds["attention"]]
    per_byte = [s / size for s in spent]
    share, *ends = paired_ratio_interval([s / copied for s in seconds["copy"]], per_byte)
    rate, *rates = median_interval([size / s / 1e9 for s in spent])
    middle, *span = median_interval([1e6 * s for s in spent])
    best, *copies = median_interval([copied / s / 1e9 for s in seconds["copy"]])
    print(
        f"{at}: {rate:.0f} of {best:.0f} GB/s, {share:.0%} [{ends[0]:.0%}, {ends[1]:.0%}], "
        f"{middle:.1f} us a call",
        flush=True,
    )
    return {
        f"bandwidth_share/{at}": figure(share, "of the copy's bytes/s", ends),
        f"bandwidth/{at}": figure(rate, "GB/s", rates),
        f"microseconds/{at}": figure(middle, "us a call", span),
        f"copy_bandwidth/{at}": figure(best, "GB/s, of the copy that took turns", copies),
    }
