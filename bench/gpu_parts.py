"""The parts of the GPU queue: functions of a job, a table of them, and the targets they are for.

A part builds its programs by `job.build`, where `--dry` ends, and measures by `job.each`. Models
have the shapes of known ones and random weights. The arms of a comparison take turns. Models of 12
and of 4 layers stand for one of 36: large batches fit, programs compile fast, and the difference
gives the time of one layer.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from bench import gpu_process as records
from bench.gpu_process import MODEL, ROWS, Absent, Built, Job, Part
from bench.programs import (
    OFF,
    Chunk,
    Place,
    Program,
    Size,
    accept_by,
    config_of,
    figures_by_layers,
    forward_bytes,
    full_row_map,
    milliseconds_per_round,
    policy_pass,
    random_model,
    random_pages,
    shape_of,
    tree_bytes,
    whole_model,
)
from bench.record import alternate, figure, median_figure, median_interval, ratio_figure
from specjax import LLM, ControlConfig, ModelConfig, RunConfig, SamplingParams, SpecConfig
from specjax.control import Static
from specjax.decode import sampling
from specjax.decode.accept import Acceptance, accept
from specjax.decode.draft import DraftedTree
from specjax.decode.state import DecodeState, Plan
from specjax.decode.tree import ancestors, chain_bits, pack_bits
from specjax.indexing import take_along
from specjax.kernels import check, dispatch, reference
from specjax.kernels.backend import choose
from specjax.models.families.dense import dense_config
from train.run.files import METRICS_FILE, read_metrics

TIMES, LAYERS, SMALL_LAYERS = "times", (12, 4), (2, 1)
TOP_P = {"temperature": 1.0, "top_p": 0.9}

# --- peaks of a card -----------------------------------------------------------------------------


def ceilings(job: Job) -> None:
    """Measures `copy` in GB/s, read and written: the denominator of all shares."""
    rates = _copies(job, 3 if job.small else 15)
    job.add({"copy": median_figure([rate / 1e9 for rate in rates], "GB/s, both ways")})


def copy_rate(job: Job) -> float:
    """Returns the bytes per second, read and written, of a copy on the job's card: of the card's
    record, or measured briefly; the job's settings say which."""
    record = records.read(records.path_of(job.out, "ceilings", job.card))
    if record is not None and "copy" in record["figures"]:
        job.tell(copy=f"of the part, {record['date']}")
        return 1e9 * record["figures"]["copy"]["value"]
    rate, *_ = median_interval(_copies(job, 3))
    job.tell(copy=f"measured in this process: {rate / 1e9:.0f} GB/s")
    return rate


def _copies(job: Job, repeats: int) -> list[float]:
    """Measures the bytes per second of a program that makes several copies."""
    size, calls = (1 << 16, 2) if job.small else (1 << 32, 10)

    def copies(x):
        # Each copy reads the result of the one before, so the compiler cannot remove any.
        return jax.lax.fori_loop(0, calls, lambda i, x: x ^ i.astype(x.dtype), x)

    shape = jax.ShapeDtypeStruct((size // 4,), jnp.uint32)
    # The array is donated; otherwise it would be copied once before the calls.
    lower = functools.partial(jax.jit(copies, donate_argnums=0).lower, job.place.shapes(shape))
    copy = job.build([Program("copy", lower)])["copy"]
    held = [jnp.zeros(shape.shape, shape.dtype)]

    def run() -> None:
        held[0] = jax.block_until_ready(copy(held[0]))

    run(), run()
    return [2.0 * size * calls / s for s in alternate({"copy": run}, repeats)["copy"]]


# --- attention -----------------------------------------------------------------------------------

# The Pallas kernels that read pages where they lie, and, last, cuDNN, for which pages are gathered.
KERNELS = ("gpu", "triton", "library:cudnn")


def _kernels_on(
    place: Place, asked: Sequence[str], head: int, dtype: str = "bfloat16"
) -> list[str]:
    """Returns the kernels that a device supports for heads of a size; raises Absent without one."""
    sizes = {"vocab_size": 8, "hidden_size": head, "intermediate_size": head, "num_layers": 1}
    heads = {"num_heads": 1, "num_kv_heads": 1, "head_dim": head}
    cfg, found, reasons = dense_config(**sizes, **heads, run=RunConfig(compute_dtype=dtype)), [], []
    for name in asked:
        try:
            found.append(choose(place.platform, place.kind, cfg, name).name)
        except ValueError as error:
            reasons.append(str(error))
    if not found:
        raise Absent("not on this device", "; ".join(reasons))
    return found


class Cells(NamedTuple):
    """Shapes of attention, the most important first.

    Attributes:
      lengths: (prefix, positions of the page table) of every slot.
      call_bytes: approximate bytes that the calls of one program read together, so that the time to
        start it is negligible: 10 ms of a copy; at most `most` calls.
      pool_bytes: least bytes that calls read before one reads the same pages again: ten times the
        50 MB of the chip's cache.
    """

    kernels: tuple[str, ...] = KERNELS
    rows: tuple[int, ...] = (16, 1, 5)
    lengths: tuple[tuple[int, int], ...] = ((8192, 8192), (2048, 2048), (2048, 16_384))
    kv_heads: int = 8
    group: int = 4
    head: int = 128
    page: int = 128
    call_bytes: float = 32e9
    most: int = 8192
    pool_bytes: float = 512e6
    repeats: int = 9


SMALL_CELLS = Cells(
    ("reference", "library:xla"), (8, 1), ((32, 64),), 2, 2, 16, 16, 1e6, 4, 1e5, 3
)  # fmt: skip


class Cell(NamedTuple):
    """One shape: number of rows, slots, positions of a prefix, positions of the page table."""

    rows: int
    batch: int
    prefix: int
    table: int

    @property
    def name(self) -> str:
        return f"{self.rows}/{self.prefix}/{self.table}"

    def bytes(self, sizes: Cells) -> int:
        """Returns the bytes that a call must read and write: keys and values of the prefix and the
        tree, queries and results, whatever the length of the page table."""
        queries, keys = 2 * sizes.group * self.rows, 2 * (self.prefix + self.rows)
        return 2 * self.batch * sizes.kv_heads * sizes.head * (queries + keys)

    def calls(self, sizes: Cells) -> int:
        return int(np.clip(round(sizes.call_bytes / self.bytes(sizes)), 2, sizes.most))

    def shapes(self, sizes: Cells) -> list[jax.ShapeDtypeStruct]:
        """Returns the shapes of q, of the tree's keys and values, of their pages, and of tables.

        There are so many tables without common pages that no call's pages are cached.
        """
        batch, pages = self.batch, self.table // sizes.page
        read = batch * -(-self.prefix // sizes.page)
        sets = math.ceil(sizes.pool_bytes / (read * 4 * sizes.kv_heads * sizes.page * sizes.head))
        tree = batch, sizes.kv_heads, self.rows, sizes.head
        q = batch, sizes.kv_heads * sizes.group, self.rows, sizes.head
        pool = 1 + sets * batch * pages, sizes.kv_heads, sizes.page, sizes.head
        arrays = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in (q, tree, tree, pool, pool)]
        return [*arrays, jax.ShapeDtypeStruct((max(sets, 2), batch, pages), jnp.int32)]

    def inputs(self, sizes: Cells, seed: int) -> list[jax.Array]:
        """Makes random arrays; each slot has pages of its own, in random order."""
        *arrays, tables = self.shapes(sizes)
        keys = jax.random.split(jax.random.key(seed), len(arrays))
        drawn = [random_pages(k, x.shape, x.dtype) for k, x in zip(keys, arrays, strict=True)]
        sets, batch, pages = tables.shape
        order = 1 + np.random.default_rng(seed).permutation(drawn[-1].shape[0] - 1)
        order = order.reshape(-1, batch, pages).astype(np.int32)
        if len(order) < sets:  # the compiler must not take the reads out of the loop
            order = np.concatenate([order, np.roll(order, batch // 2, axis=1)])
        return [*drawn, jnp.asarray(order)]

    def attend(self, kernel: str, calls: int, q, k_tree, v_tree, k, v, tables):
        """Calls attention again and again, like layers in a model."""
        lengths, bits = jnp.full(self.batch, self.prefix), jnp.asarray(chain_bits(self.rows))

        def call(i, q):
            arrays = q, k_tree, v_tree, k, v, lengths, bits, tables[i % tables.shape[0]]
            return dispatch.tree_attention(*arrays, kernel=kernel)  # the next call's queries

        return jax.lax.fori_loop(0, calls, call, q)


def attention(job: Job, batch: int) -> None:
    """Measures `us` a call and `share` of a copy's bytes/s, `../<kernel>/<rows>/<prefix>/<table>`;
    `over/<kernel>/..` are its seconds over those of the last kernel."""
    sizes = SMALL_CELLS if job.small else Cells()
    job.tell(sizes=sizes._asdict(), batch=batch)
    kernels = _kernels_on(job.place, sizes.kernels, sizes.head)

    copy = functools.cache(functools.partial(copy_rate, job))

    @functools.cache
    def built(prefix: int, table: int) -> Built:
        """Compiles shapes of the same lengths together, before the first of them is measured."""
        found = []
        for cell in (Cell(rows, batch, prefix, table) for rows in sizes.rows):
            inputs = job.place.shapes(cell.shapes(sizes))
            for kernel in kernels:
                attend = functools.partial(cell.attend, kernel, cell.calls(sizes))
                lower = functools.partial(jax.jit(attend).lower, *inputs)
                found.append(Program(f"{kernel}/{cell.name}", functools.cache(lower)))
        return job.build(found)

    def measure(cell: Cell) -> dict:
        programs, runs = built(cell.prefix, cell.table), {}
        inputs, result, errors = cell.inputs(sizes, job.seed), {}, {}
        for kernel in kernels:  # one that fails does not stop the others
            try:
                run = functools.partial(programs[f"{kernel}/{cell.name}"], *inputs)
                runs[kernel] = lambda run=run: jax.block_until_ready(run())
                runs[kernel]()
            except Exception as error:
                runs.pop(kernel, None)
                errors[kernel] = error
        if not runs:
            raise next(iter(errors.values()))
        for kernel, error in errors.items():
            job.not_measured([f"share/{kernel}/{cell.name}"], error)
        seconds, calls = alternate(runs, sizes.repeats), cell.calls(sizes)
        least = calls * cell.bytes(sizes) / copy()
        for kernel, values in seconds.items():
            at, unit = f"{kernel}/{cell.name}", "of a copy's bytes/s"
            result[f"us/{at}"] = median_figure([1e6 * s / calls for s in values], "us a call")
            result[f"share/{at}"] = median_figure([least / s for s in values], unit)
        shares = {kernel: result[f"share/{kernel}/{cell.name}"] for kernel in seconds}
        best = max(shares, key=lambda kernel: shares[kernel]["value"])
        result[f"share/best/{cell.name}"] = shares[best] | {"unit": f"{unit}; {best}"}
        for kernel in seconds.keys() - {kernels[-1]} if kernels[-1] in seconds else ():
            ratio = ratio_figure(seconds[kernel], seconds[kernels[-1]], f"times {kernels[-1]}")
            result[f"over/{kernel}/{cell.name}"] = ratio
        return result

    cells = [Cell(rows, batch, *length) for length in sizes.lengths for rows in sizes.rows]
    job.each((f"share/best/{c.name}", functools.partial(measure, c)) for c in cells)


class Case(NamedTuple):
    """Sizes of a call: rows of a tree, slots, key/value heads of `group` queries each, pages of
    `page` positions per slot."""

    rows: int = 16
    batch: int = 4
    kv_heads: int = 8
    group: int = 4
    head: int = 128
    page: int = 128
    pages: int = 6
    window: int | None = None
    sinks: bool = False
    lse: bool = False
    soft_cap: float | None = None
    dtype: str = "bfloat16"

    @property
    def options(self) -> dict[str, Any]:
        capped = {} if self.soft_cap is None else {"soft_cap": self.soft_cap}
        return {"window": self.window, "with_lse": self.lse, **capped}


CASES = {
    "plain": Case(1),
    "tree_of_16": Case(),
    "tree_of_33": Case(33),
    "tree_of_100": Case(100),
    "one_long_slot": Case(batch=1, pages=64),
    "many_slots": Case(8, batch=48, pages=2),
    "one_head_of_8": Case(kv_heads=1, group=8),
    "pages_of_64": Case(page=64),
    "window_sinks_and_lse": Case(64, window=90, sinks=True, lse=True),
    "heads_of_64": Case(head=64),
    "heads_of_96": Case(head=96),
    "heads_of_256": Case(head=256),
    "soft_cap": Case(soft_cap=20.0),
    "float32": Case(dtype="float32", lse=True),
}
SMALL_CASES = {"tree_of_8": Case(8, 2, 2, 2, 16, 16, 3, 20, True, True)}


def _arrays(case: Case, seed: int) -> tuple:
    """Returns the arguments of `tree_attention` up to the table, and sinks; values past the end of
    a prefix are as large as those before."""
    rng, heads = np.random.default_rng(seed), case.kv_heads * case.group

    def normal(*shape):
        return rng.standard_normal(shape, np.float32).astype(jnp.dtype(case.dtype))

    batch, rows, most = case.batch, case.rows, case.pages * case.page
    parents = [[0, *(rng.integers(0, r) for r in range(1, rows))] for _ in range(batch)]
    bits = np.stack([pack_bits(ancestors(np.array(p))) for p in parents])
    prefix = rng.integers(1, most + 1, batch)
    special = [most, 0, case.page][:batch]  # all pages full, an empty prefix, one page full
    prefix[: len(special)] = special
    table = 1 + rng.permutation(batch * case.pages).reshape(batch, case.pages)
    trees = [normal(batch, n, rows, case.head) for n in (heads, case.kv_heads, case.kv_heads)]
    shape = 1 + batch * case.pages, case.kv_heads, case.page, case.head
    pages = [normal(*shape) for _ in range(2)]
    sinks = rng.standard_normal(heads, np.float32) if case.sinks else None
    return *trees, *pages, prefix.astype(np.int32), bits, table.astype(np.int32), sinks


def values(job: Job, kernels: tuple[str, ...]) -> None:
    """Compares kernels with the float32 reference on the host: `values/<kernel>/<case>` is the
    largest difference over the allowed one."""
    cases, programs, absent = SMALL_CASES if job.small else CASES, {}, None
    for name, case in cases.items():
        inputs = job.place.shapes(_arrays(case, 0))
        try:
            asked = ("reference",) if job.small else kernels
            served = _kernels_on(job.place, asked, case.head, case.dtype)
        except Absent as error:
            absent, served = error, []
        for kernel in served:
            attend = functools.partial(dispatch.tree_attention, kernel=kernel, **case.options)
            lower = functools.partial(jax.jit(attend).lower, *inputs[:-1], sinks=inputs[-1])
            programs[f"values/{kernel}/{name}"] = Program(f"values/{kernel}/{name}", lower)
    if not programs:
        raise absent
    built = job.build(list(programs.values()))

    @functools.cache
    def wanted(name: str) -> list[np.ndarray]:
        arrays = [
            x if x is None or x.dtype.kind in "iu" else x.astype(np.float32)
            for x in _arrays(cases[name], job.seed)
        ]
        attend = jax.jit(functools.partial(reference.tree_attention, **cases[name].options))
        with jax.default_device(jax.devices("cpu")[0]):
            return jax.device_get(jax.tree.leaves(attend(*arrays[:-1], sinks=arrays[-1])))

    def measure(program: str) -> dict:
        name, worst = program.rpartition("/")[2], 0.0
        *arrays, sinks = _arrays(cases[name], job.seed)
        found = jax.device_get(jax.tree.leaves(built[program](*arrays, sinks=sinks)))
        for got, want in zip(found, wanted(name), strict=True):
            got, allowed = got.astype(np.float32), check.TOLERANCE[cases[name].dtype]
            error = float((np.abs(got - want) / (allowed * (1 + np.abs(want)))).max())
            worst = max(worst, error if np.isfinite(got).all() else 1e30)  # which JSON can say
        if worst > 1:
            job.refute(f"{program}: {worst:.3g} times the difference that is allowed")
        return {program: figure(worst, "largest difference, of what is allowed")}

    job.each((name, functools.partial(measure, name)) for name in built)


# --- rounds --------------------------------------------------------------------------------------


def plain(job: Job, batch: int, shape: str = "8B", products: Any = "auto") -> None:
    """Measures plain steps with Triton's products or not, `ms/<layers>_layers/<context>/<arm>`, and
    their `share` of a copy's bandwidth: weights and caches are counted."""
    layers, contexts, rounds, repeats = LAYERS, (1024, 4096), 24, 9
    if job.small:
        layers, contexts, rounds, repeats = SMALL_LAYERS, (16, 32), 3, 3
        shape, products = "tiny", "auto"
    arms = {
        name: {"xla_gpu_enable_triton_gemm": name == "triton"} for name in ("triton", "no_triton")
    }
    size = Size(shape, batch, max(contexts), rounds=rounds, products=products)
    chunks = {n: Chunk(job.place, size._replace(layers=n)) for n in layers}
    every = sum(tree_bytes(chunk.shapes) for chunk in chunks.values())
    programs = [
        program
        for n, chunk in chunks.items()
        for program in chunk.programs(f"{n}/", arms, every - tree_bytes(chunk.shapes))
    ]
    built, total = job.build(programs), shape_of(shape).num_layers
    for chunk in chunks.values():
        chunk.load(job.seed)
        chunk.compiled = built
    job.tell(batch=batch, shape=shape, attention=chunk.cfg.run.attention)
    copy = copy_rate(job)

    def measure(context: int) -> dict:
        turns = {f"{n}/{a}": (c.at(context), f"{n}/{a}") for n, c in chunks.items() for a in arms}
        found, result, whole = milliseconds_per_round(turns, repeats), {}, {}
        few = [forward_bytes(c.cfg, c.shapes[0], batch, 1, context) for c in chunks.values()]
        [size] = whole_model(few[:1], few[1:], layers, total)
        for arm in arms:
            of_arm, at = {n: found[f"{n}/{arm}"] for n in layers}, f"{context}/{arm}"
            whole[arm], figures = figures_by_layers(of_arm, at, layers, total, "ms per step")
            shares = [1e3 * size / copy / ms for ms in whole[arm]]
            result |= figures
            result[f"share/{total}_layers/{at}"] = median_figure(shares, "of a copy's bytes/s")
        best = min(arms, key=lambda arm: result[f"ms/{total}_layers/{context}/{arm}"]["value"])
        for kind in ("ms", "share"):
            at = f"{kind}/{total}_layers/{context}"
            unit = f"{result[f'{at}/{best}']['unit']}; {best}"
            result[f"{at}/best"] = result[f"{at}/{best}"] | {"unit": unit}
        ratio = ratio_figure(whole["triton"], whole["no_triton"], "times the step without")
        return result | {f"triton_over_not/{context}": ratio}

    def names(context: int) -> tuple[str, ...]:
        return tuple(f"{kind}/{total}_layers/{context}/best" for kind in ("ms", "share"))

    job.each((names(context), functools.partial(measure, context)) for context in contexts)


def rows(job: Job, batch: int) -> None:
    """Measures passes over several rows per slot, `ms/<layers>_layers/<rows>`, and `rows_over_1`.

    Several passes are started before the host waits, which hides the time to start a program, as
    within a chunk; each has the compiler options of the engine's chunks.
    """
    shape, layers, counts, context = "8B", LAYERS, (1, 16, 5, 32, 64, 8), 2048
    passes, repeats = (2, 3) if job.small else (6, 11)
    if job.small:
        shape, layers, counts, context = "tiny", SMALL_LAYERS, (1, 16), 32
    size = Size(shape, batch, context, rounds=max(counts))
    chunks = {n: Chunk(job.place, size._replace(layers=n)) for n in layers}
    every, programs = sum(tree_bytes(chunk.shapes) for chunk in chunks.values()), []
    for count in counts:
        for n, chunk in chunks.items():
            params, _, state = chunk.shapes
            inputs = params, state, job.place.shapes(full_row_map(chunk.runner))
            lower = functools.partial(jax.jit(policy_pass(chunk.runner, count)).lower, *inputs)
            options = chunk.runner.executables.graphs.options(("chunk",))
            beside = every - tree_bytes(chunk.shapes)
            programs.append(Program(f"{n}/{count}", functools.cache(lower), options, beside))
    built, total = job.build(programs), shape_of(shape).num_layers
    for chunk in chunks.values():
        chunk.load(job.seed)
    job.tell(batch=batch, attention=chunk.cfg.run.attention)

    def run(n: int, count: int) -> None:
        runner = chunks[n].runner
        inputs = runner.weights.policy, runner.state, full_row_map(runner)
        for _ in range(passes):
            found = built[f"{n}/{count}"](*inputs)
        jax.block_until_ready(found)

    def measure(count: int) -> dict:
        pairs = [(n, c) for n in layers for c in (1, count)]
        runs = {pair: functools.partial(run, *pair) for pair in pairs}
        for one in runs.values():
            one()
        seconds, result, whole = alternate(runs, repeats), {}, {}
        for c, at in ((1, f"1_beside_{count}"), (count, f"{count}")):
            found = {n: [1e3 * s / passes for s in seconds[n, c]] for n in layers}
            whole[c], figures = figures_by_layers(found, at, layers, total, "ms per pass")
            result |= figures
        ratio = ratio_figure(whole[count], whole[1], "times a pass over one row")
        return result | {f"rows_over_1/{count}": ratio}

    job.each((f"rows_over_1/{count}", functools.partial(measure, count)) for count in counts[1:])


PRIME = 8191  # period of the script, in positions


@functools.cache
def script(probability: float) -> np.ndarray:
    """Returns [PRIME] booleans: whether the token drafted for a position is accepted."""
    return np.random.default_rng(0).random(PRIME) < probability


@dataclasses.dataclass(frozen=True)
class Scripted:
    """An acceptance rule for chains, see `Plan.rule`: the drafts of a random head are hardly ever
    accepted, so a script decides for each position of each slot.

    The strategy's own rule runs as usual; the last token that it emits, which the target chose,
    follows the accepted tokens.
    """

    probability: float

    def __call__(
        self, plan: Plan, state: DecodeState, draft: DraftedTree, transformed
    ) -> Acceptance:
        own = accept(dataclasses.replace(plan, rule=None), state, draft, transformed)
        steps = plan.steps
        positions = (state.length[:, None] + np.arange(steps)).astype(state.keys.dtype)
        places = (state.keys[:, :1] % PRIME + positions) % PRIME
        taken = jnp.asarray(script(self.probability))[places]
        count = 1 + jnp.cumprod(taken.astype(jnp.int32), axis=1).sum(axis=1)
        rows = np.arange(steps + 1)
        drafted = jnp.pad(draft.tokens[:, 1:], ((0, 0), (0, 1)))
        last = take_along(own.tokens, (own.count - 1)[:, None], axis=1)
        tokens = jnp.where(rows < (count - 1)[:, None], drafted, last)
        path = jnp.broadcast_to(rows.astype(own.path.dtype), own.path.shape)
        return Acceptance(tokens.astype(own.tokens.dtype), path, count.astype(own.count.dtype))


def rounds(job: Job, batch: int, draft_vocab: int | None = None, **size_fields: Any) -> None:
    """Measures speculative rounds against plain ones: `ms/..` of a round, `round_over_plain`, and
    `speedup/<acceptance>` at the accept length that is expected of scripted drafts."""
    layers, strategy, count, repeats = LAYERS, "4_1_5", 24, 9
    sizes = {"shape": "8B", "context": 1024, **size_fields}
    if job.small:
        sizes |= {"shape": "tiny", "context": 32, "products": "auto"}
        layers, strategy, count, repeats = SMALL_LAYERS, "2_1_3", 3, 3
        draft_vocab = draft_vocab and 32
    chunks: dict[str, Chunk] = {}
    for n in layers:
        size = Size(batch=batch, layers=n, rounds=count, **sizes)
        chunks[f"{n}/{OFF}"] = Chunk(job.place, size)
        spec = size._replace(strategy=strategy, draft_vocab=draft_vocab)
        chunks |= {f"{n}/{p}": Chunk(job.place, spec, Scripted(p)) for p in (0.6, 0.8)}
    # Chunks with the same number of layers share the policy's weights.
    weights = {chunk.cfg.num_layers: tree_bytes(chunk.shapes[0]) for chunk in chunks.values()}
    every = sum(tree_bytes(c.shapes[1:]) for c in chunks.values()) + sum(weights.values())
    programs = [
        program
        for name, chunk in chunks.items()
        for program in chunk.programs(name, beside=every - tree_bytes(chunk.shapes))
    ]
    built, total = job.build(programs), shape_of(sizes["shape"]).num_layers
    for n in layers:
        first = None
        for name, chunk in chunks.items():
            if name.startswith(f"{n}/"):
                chunk.load(job.seed, first)
                first, chunk.compiled = first or chunk, built
    job.tell(**sizes, batch=batch, draft_vocab=draft_vocab, attention=first.cfg.run.attention)

    def measure() -> dict:
        arms = {name: (chunk, name) for name, chunk in chunks.items()}
        found, whole, result = milliseconds_per_round(arms, repeats), {}, {}
        for arm in (OFF, 0.6, 0.8):
            of_arm = {n: found[f"{n}/{arm}"] for n in layers}
            whole[arm], figures = figures_by_layers(of_arm, f"{arm}", layers, total, "ms per round")
            result |= figures
        for p in (0.6, 0.8):
            length = sum(p**i for i in range(chunks[f"{layers[0]}/{p}"].runner.steps + 1))
            per_token = [ms / length for ms in whole[p]]
            result[f"speedup/{p}"] = ratio_figure(whole[OFF], per_token, "tok/s over plain's")
            result[f"accept_length/{p}"] = figure(length, "tokens per round, expected")
        # Acceptance changes no shape, so the rounds of both probabilities are equal work.
        ratio = ratio_figure(whole[0.6] + whole[0.8], whole[OFF] * 2, "times a plain step")
        return result | {"round_over_plain": ratio}

    job.each([("round_over_plain", measure)])


class _Halving(Chunk):
    """A chunk whose thresholds are found by halvings."""

    def _lower(self) -> jax.stages.Lowered:
        jax.clear_caches()  # functions that were traced with digits
        with mock.patch.object(sampling, "digits_by_one_reduction", sampling.by_halving):
            lowered = super()._lower()
        jax.clear_caches()
        return lowered


def top_p(job: Job, batch: int) -> None:
    """Measures rounds without top-p, with thresholds by digits, and by halvings of their range:
    `ms/<strategy>/<arm>`, `digits_over_halvings/<strategy>`. Layers do not matter."""
    size, strategies, repeats = Size("8B", batch, 256, 2), (OFF, "4_1_5"), 9
    if job.small:
        size, strategies, repeats = Size("tiny", batch, 24, 1, rounds=3), (OFF, "2_1_3"), 2
    chunks = {}
    for name in strategies:
        plainly = size._replace(strategy=name)
        filtered = plainly._replace(options=TOP_P)
        chunks[name, "none"] = Chunk(job.place, plainly)
        chunks[name, "digits"] = Chunk(job.place, filtered)
        chunks[name, "halvings"] = _Halving(job.place, filtered)
    built = job.build([p for at, c in chunks.items() for p in c.programs("/".join(at))])

    def measure(strategy: str) -> dict:
        arms, first = {}, None
        for (name, arm), chunk in chunks.items():
            if name == strategy:
                chunk.load(job.seed, first)
                first, chunk.compiled = first or chunk, built
                arms[arm] = chunk, f"{strategy}/{arm}"
        found = milliseconds_per_round(arms, repeats)
        result = {f"ms/{strategy}/{a}": median_figure(v, "ms per round") for a, v in found.items()}
        ratio = ratio_figure(found["digits"], found["halvings"], "times the round by halvings")
        return result | {f"digits_over_halvings/{strategy}": ratio}

    job.each((f"digits_over_halvings/{s}", functools.partial(measure, s)) for s in strategies)


# --- engines -------------------------------------------------------------------------------------


def _prompts(cfg: ModelConfig, batch: int, length: int, seed: int) -> list[list[int]]:
    return np.random.default_rng(seed).integers(2, cfg.vocab_size, (batch, length)).tolist()


def identity(job: Job, shape: str, batches: tuple[int, ...]) -> None:
    """Measures how many bfloat16 samples differ from plain decoding's, with and without
    `invariant`, and `seconds_plain/..` of whole plain calls."""
    layers, strategy, length, repeats = 12, "4_1_5", 128, 5
    if job.small:
        shape, layers, strategy, length, repeats, batches = "tiny", 1, "2_1_3", 8, 2, (2,)
    job.tell(shape=shape, layers=layers)
    model = random_model(config_of(shape, layers, 2 * length), job.seed)

    def measure(batch: int) -> dict:
        prompts, unit = _prompts(model[0], batch, length, job.seed), f"of {batch}"
        result, arms = {}, {}
        for arm in ("invariant", "default"):
            spec = SpecConfig(strategy, invariant=arm == "invariant")
            # Compiles both, which `static` does not.
            control = ControlConfig("bandit", strategies=(OFF, strategy))
            llm = LLM(model, spec, batch, 2 * length, control=control)
            llm.warm_up([_sampled(1, job.seed)])
            llm.engine.controller = Static(strategy)

            def run(speculative: bool, llm=llm) -> list:
                outputs = llm.generate(prompts, _sampled(length, job.seed, speculative))
                return [output.samples[0] for output in outputs]

            arms[arm] = functools.partial(run, False)
            pairs = list(zip(run(True), run(False), strict=True))
            counts = {
                "differ": sum(a.token_ids != b.token_ids for a, b in pairs),
                "logprobs_differ": sum(a.logprobs != b.logprobs for a, b in pairs),
            }
            result |= {f"{w}/{arm}/batch_{batch}": figure(n, unit) for w, n in counts.items()}
            if arm == "invariant":
                if any(counts.values()):
                    job.refute(f"batch {batch}: {counts} samples in invariant mode")
        seconds = alternate(arms, repeats)
        for arm, values in seconds.items():
            result[f"seconds_plain/{arm}/batch_{batch}"] = median_figure(values, "s of a call")
        ratio = ratio_figure(seconds["invariant"], seconds["default"], TIMES)
        return result | {f"invariant_over_default/batch_{batch}": ratio}

    def names(batch: int) -> tuple[str, ...]:
        return tuple(f"{what}/invariant/batch_{batch}" for what in ("differ", "logprobs_differ"))

    job.each((names(batch), functools.partial(measure, batch)) for batch in batches)


def _sampled(tokens: int, seed: int, speculative: bool = True) -> SamplingParams:
    return SamplingParams(
        temperature=1.0, max_tokens=tokens, ignore_eos=True, seed=seed, speculative=speculative
    )


def long_tail(job: Job) -> None:
    """Measures a rollout whose samples end one by one, drafts accepted by script: `seconds/<arm>`
    of plain decoding, one strategy and `goodput`, and `off_over/<arm>`: how many times as fast."""
    shape, layers, batch, prompt, median, longest = "1.7B", None, 64, 64, 96, 1536
    strategies, repeats = (OFF, "2_1_3", "4_1_5"), 3
    if job.small:
        shape, layers, batch, prompt, median, longest = "tiny", 1, 2, 8, 6, 12
        strategies, repeats = (OFF, "1_1_2"), 2
    drawn = np.random.default_rng(job.seed).lognormal(np.log(median), 0.8, batch)
    drawn[0] = longest
    lengths = np.clip(drawn.astype(int), 2, longest).tolist()
    job.tell(shape=shape, lengths=lengths, strategies=strategies)
    model = random_model(config_of(shape, layers, prompt + longest), job.seed)

    def measure() -> dict:
        prompts, result, llms = _prompts(model[0], batch, prompt, job.seed), {}, {}
        params = [_sampled(length, job.seed) for length in lengths]
        spec, control = SpecConfig(strategies[-1]), ControlConfig(strategies=strategies)
        for arm in ("off", "static", "goodput"):
            llms[arm] = llm = LLM(
                model,
                None if arm == "off" else spec,
                batch,
                prompt + longest,
                control=control if arm == "goodput" else None,
            )
            accept_by(Scripted(0.7), llm.engine.runner)
            started = llm.warm_up(params[:1])
            result[f"start/{arm}"] = figure(started.seconds, "s until all programs are ready")
            calibration = started.calibration_seconds
            result[f"calibration/{arm}"] = figure(calibration, "s to measure the strategies")
        graphs = llm.engine.runner.executables.graphs
        result["graphs"] = figure(int(graphs.wanted), f"1: chunks are CUDA graphs; {graphs.line}")
        runs = {a: functools.partial(llm.generate, prompts, params) for a, llm in llms.items()}
        seconds = alternate(runs, repeats)
        for arm, values in seconds.items():
            result[f"seconds/{arm}"] = median_figure(values, f"s for {sum(lengths)} tokens")
            ratio = ratio_figure(seconds["off"], values, "times as fast as plain decoding")
            result[f"off_over/{arm}"] = ratio
        return result

    job.each([(("off_over/static", "off_over/goodput"), measure)])


# --- training ------------------------------------------------------------------------------------

METRICS = {
    "rollout/tokens_per_sec": "tok/s",
    "rollout/spec_accept_length": "tokens per round",
    "time/rollout": "s",
    "time/train": "s",
    "time/draft": "s",
    "perf/mfu/actor": "of the peak",
    "train/mtp_loss": "nats per token",
}
FINITE = ("rollout/reward", "train/loss", "train/grad_norm", "train/mtp_loss")
SHORT = ("eval.problems=0", "checkpoint.every=0", "checkpoint.export=false", "steps=100000")
TINY = (
    "data.max_terms=3", "rollout.prompts=2", "rollout.n=2", "rollout.max_tokens=8",
    "rollout.max_prompt_tokens=24", "rollout.max_batch=2", "rollout.strategy=1_1_2", "steps=3",
    "packing.row_length=32", "packing.rows=2", "draft.unroll_steps=1",
    "algo.dynamic_sampling=false",
)  # fmt: skip


def training(job: Job, arms: Mapping[str, Sequence[str]], own: bool = False) -> None:
    """Runs `train.rl` with the settings of each arm for its share of the time, in a process of its
    own, and measures `<arm>/..`: seconds of a step after the first, which compiles, rates, losses.

    Args:
      own: whether model and rows are the user's, from `--model DIR --rows FILE`.
    """
    settings = [*SHORT, *(TINY if job.small and not own else ())]
    for name, key in ((MODEL, "model"), (ROWS, "data.path")) if own else ():
        if not os.environ.get(name):
            raise Absent("not given", "give python -m bench.gpu --model DIR --rows FILE")
        settings.append(f"{key}={os.environ[name]}")
    seconds = job.left / (len(arms) + 1)  # what comes before and after them takes time, too

    def measure(words: Sequence[str]) -> dict:
        with tempfile.TemporaryDirectory() as scratch:
            out = Path(scratch) / "run"
            command = [sys.executable, "-m", "train.rl", *words, *settings, f"out={out}"]
            # The new process needs the device's memory. It ends with the part's process group.
            env = {k: v for k, v in os.environ.items() if k != "XLA_PYTHON_CLIENT_PREALLOCATE"}
            process, code = subprocess.Popen(command, env=env), 0
            try:
                code = process.wait(seconds)
            except subprocess.TimeoutExpired:
                process.terminate()
                try:
                    process.wait(30)
                except subprocess.TimeoutExpired:
                    process.kill()
            found = read_metrics(out) if (out / METRICS_FILE).exists() else []
            found = [record for record in found if record["step"] > 0]
        if code or len(found) < 2:
            raise RuntimeError(f"train.rl: {len(found)} steps logged, exit status {code}")
        return _of_steps(found)

    def named(arm: str, words: Sequence[str]) -> dict:
        return {f"{arm}/{name}": entry for name, entry in measure(words).items()}

    job.each((f"{a}/step_seconds", functools.partial(named, a, w)) for a, w in arms.items())


def _of_steps(logged: Sequence[Mapping]) -> dict[str, dict]:
    """Returns the figures of the steps after the first; raises FloatingPointError for a NaN."""
    for record in logged:
        if odd := [name for name in FINITE if name in record.get("nonfinite", ())]:
            raise FloatingPointError(f"step {record['step']}: {', '.join(odd)} not finite")
    times = np.diff([record["wall_time"] for record in logged])
    result = {"step_seconds": median_figure(times, f"s per step, of {len(times)}")}
    for name, unit in METRICS.items():
        values = [record[name] for record in logged[1:] if record.get(name) is not None]
        if values:
            result[name] = median_figure(values, f"{unit}, median of steps; {values[-1]} at last")
    return result


# --- tables --------------------------------------------------------------------------------------


def _part(name: str, decides: str, function: str, seconds: float = 180.0, **more) -> Part:
    about = {key: more.pop(key) for key in ("ahead", "shares_memory") if key in more}
    return Part(name, decides, f"bench.gpu_parts:{function}", more, seconds, **about)


ENGINE = {"ahead": False}
APART = {"ahead": False, "shares_memory": True}
_ARMS = {
    "off": ["rollout.strategy=off"],
    "static": ["rollout.strategy=4_1_5"],
    "goodput": ["rollout.control.controller=goodput"],
}
_SUMS = {"run": ["--config", "configs/sums.yaml", "dtype.compute=float32"]}
_OSS = {"shape": "gpt-oss-20b", "products": {"layers.*.experts_*": "mxfp4"}}
_PENALTIES = {"temperature": 0.0, "repetition_penalty": 1.1, "frequency_penalty": 0.5}
_PROTOCOL = (  # name, context, batches, sampling options
    ("greedy", 2048, (1, 4, 8), {"temperature": 0.0}),
    ("top_p", 2048, (1, 4, 8), {"temperature": 0.7, "top_p": 0.9}),
    ("penalties", 2048, (1,), _PENALTIES),
    ("long", 16_384, (1,), {"temperature": 0.0}),
)
PARTS: tuple[Part, ...] = (
    _part("ceilings", "denominators of all shares", "ceilings", 60),
    _part("values/own", "are the Pallas kernels right", "values", kernels=("gpu", "triton")),
    _part("values", "are libraries' kernels right", "values", kernels=("library:xla", KERNELS[-1])),
    *(_part(f"attention/{n}", "default kernel", "attention", batch=n) for n in (8, 1, 64)),
    *(_part(f"plain/{n}", "share of the roofline", "plain", batch=n) for n in (1, 8, 32, 128)),
    _part("plain_1.7B/1", "share of the roofline at 1.7B", "plain", batch=1, shape="1.7B"),
    _part("plain_135M/1", "time to launch kernels", "plain", batch=1, shape="135M"),
    *(_part(f"rows/{n}", "cost curve of strategies", "rows", batch=n) for n in (1, 8, 32)),
    *(_part(f"round/{n}", "true speed-ups", "rounds", batch=n) for n in (1, 8, 32, 128)),
    *(
        _part(f"round_32k/{n}", "draft vocabulary", "rounds", batch=n, draft_vocab=32_768)
        for n in (1, 8)
    ),
    _part("top_p/8", "how thresholds are found", "top_p", batch=8),
    _part(
        "identity/1.7B", "is bfloat16 lossless in invariant mode", "identity", shape="1.7B",
        batches=(1, 8, 32), **ENGINE,
    ),
    _part("identity/8B", "the same", "identity", shape="8B", batches=(1, 8), **ENGINE),
    # gpt-oss-20b's shape as it is published, and the protocol of speculation on it, by an EAGLE-3
    # head. In 4 layers that takes two states, not three: less than 1% of a round's bytes.
    *(_part(f"plain_oss/{n}", "bytes of MXFP4", "plain", batch=n, **_OSS) for n in (1, 8)),
    *(
        _part(
            f"round_oss_{name}/{n}", "speculation on gpt-oss", "rounds",
            batch=n, context=context, options=options, draft_kind="eagle3", **_OSS,
        )
        for name, context, batches, options in _PROTOCOL
        for n in batches
    ),
    _part("long_tail", "the controller", "long_tail", **ENGINE),
    _part("train.rl", "end to end", "training", 120, arms=_SUMS, **APART),
    _part("own_model", "a real model", "training", 480, arms=_ARMS, own=True, **APART),
)  # fmt: skip


class Target(NamedTuple):
    """A bound that the figures of some parts must meet; the worst figure is compared.

    Attributes:
      name: name of the target.
      part: pattern, as of a shell, for names of parts; each of them must have such figures.
      figures: pattern for names of figures.
      h100, h200: the bound on each card.
      unit: unit of the bound.
      most: whether the bound is an upper one.
    """

    name: str
    part: str
    figures: str
    h100: float
    h200: float
    unit: str = TIMES
    most: bool = True

    @property
    def bounds(self) -> dict[str, float]:
        return {"h100": self.h100, "h200": self.h200}


_COPY, _MS, _8B = "of a copy's bytes/s", "ms", "plain/1"
TARGETS: tuple[Target, ...] = (
    Target("kernels equal the reference", "values*", "values/*", 1, 1, "of what is allowed"),
    Target("prefix of 8k", "attention/[0-9]*", "share/best/*/8192/8192", 0.8, 0.8, _COPY, False),
    Target("plain 8B step, batch 1", _8B, "ms/36_layers/1024/best", 5.9, 4.1, _MS),
    Target("its share of a copy", _8B, "share/36_layers/*/best", 0.85, 0.85, _COPY, False),
    Target("the same, 1.7B", "plain_1.7B/1", "share/28_layers/*/best", 0.7, 0.7, _COPY, False),
    Target("plain 135M step", "plain_135M/1", "ms/30_layers/1024/best", 1.0, 1.0, _MS),
    Target("verify 16 rows / 1, batch 1", "rows/1", "rows_over_1/16", 1.05, 1.05),
    Target("verify 16 rows / 1, batch 8", "rows/8", "rows_over_1/16", 1.12, 1.15),
    Target("verify 16 rows / 1, batch 32", "rows/32", "rows_over_1/16", 1.9, 2.3),
    Target("round / plain step, batch 1", "round/1", "round_over_plain", 1.55, 1.55),
    Target("round / plain step, batch 8", "round/8", "round_over_plain", 1.55, 1.55),
    Target("round / plain step, 32k", "round_32k/*", "round_over_plain", 1.30, 1.30),
    Target("top-p by digits / by halvings", "top_p/*", "digits_over_halvings/*", 1, 1),
    Target("bfloat16, invariant", "identity/*", "*differ/invariant/*", 0, 0, "samples differ"),
    Target("goodput / plain", "long_tail", "off_over/goodput", 1, 1, TIMES, False),
    Target("its engine starts", "long_tail", "start/goodput", 90, 90, "s"),
    Target("its chunks are CUDA graphs", "long_tail", "graphs", 1, 1, "of 1", False),
)
