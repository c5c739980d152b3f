"""Compares attention kernels on the device with the float32 reference on the host.

Pages are in random order, and values past the end of a prefix are as large as those before.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bench.gpu.job import Absent, Job
from bench.gpu.parts.attention import kernels_on
from bench.gpu.program import Built, Place, Program, build
from bench.record import figure
from specjax.decode.tree import ancestors, pack_bits
from specjax.kernels import check, dispatch, reference

SAFE = ("reference", "library:xla", "library:cudnn")
TOLERANCE = check.TOLERANCE["bfloat16"]  # absolute and relative, of most cases
NOT_FINITE = 1e30  # stands for an infinite difference, which JSON cannot represent


class Case(NamedTuple):
    """Sizes of a call: slots, key/value heads of `group` queries each, rows, pages per slot."""

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
    soft_cap: float | None = None
    dtype: str = "bfloat16"


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
    "tree_of_100": Case(rows=100),
    "heads_of_96": Case(head=96),
    "heads_of_256": Case(head=256),
    "soft_cap": Case(soft_cap=20.0),
    "float32": Case(dtype="float32"),
    "float32_heads_of_64": Case(head=64, dtype="float32", lse=True),
}
_TINY = Case(batch=2, kv_heads=2, group=2, rows=8, head=16, page=16, pages=3)
SMALL_CASES = {"tree_of_8": _TINY, "sinks": _TINY._replace(window=20, sinks=True, lse=True)}


def arrays_of(case: Case, seed: int) -> tuple[tuple, np.ndarray | None]:
    """Returns the arguments of `tree_attention` up to the table, and sinks."""
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return rng.standard_normal(shape, np.float32).astype(jnp.dtype(case.dtype))

    batch, rows, heads = case.batch, case.rows, case.kv_heads * case.group
    parents = [[0, *(rng.integers(0, r) for r in range(1, rows))] for _ in range(batch)]
    bits = np.stack([pack_bits(ancestors(np.array(p))) for p in parents])
    most = case.pages * case.page
    prefix = rng.integers(1, most + 1, batch)
    for slot, special in zip(range(batch), (most, 0, case.page), strict=False):
        prefix[slot] = special  # all pages full, an empty prefix, one page full
    table = 1 + rng.permutation(batch * case.pages).reshape(batch, case.pages)
    q = normal(batch, heads, rows, case.head)
    trees = [normal(batch, case.kv_heads, rows, case.head) for _ in range(2)]
    shape = 1 + batch * case.pages, case.kv_heads, case.page, case.head
    pages = [normal(*shape) for _ in range(2)]
    sinks = rng.standard_normal(heads, np.float32) if case.sinks else None
    return (q, *trees, *pages, prefix.astype(np.int32), bits, table.astype(np.int32)), sinks


def wanted(case: Case, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Computes attention in float32 and its log-sum-exp, by the reference on the host."""
    arrays, sinks = arrays_of(case, seed)
    arrays = [x.astype(np.float32) if x.dtype == jnp.bfloat16 else x for x in arrays]
    options = {"window": case.window, "soft_cap": case.soft_cap, "with_lse": True}
    attend = functools.partial(reference.tree_attention, **options)
    with jax.default_device(jax.devices("cpu")[0]):
        out, lse = jax.jit(attend)(*arrays, sinks=sinks)
    return np.asarray(out), np.asarray(lse)


def _program(place: Place, case: Case, kernel: str, name: str) -> Program:
    arrays, sinks = arrays_of(case, 0)
    options = {"window": case.window, "soft_cap": case.soft_cap, "with_lse": case.lse}
    options["kernel"] = kernel
    attend = jax.jit(functools.partial(dispatch.tree_attention, **options))
    inputs = place.shapes(arrays)
    sinks = None if sinks is None else place.shapes(sinks)
    return Program(name, lambda: attend.lower(*inputs, sinks=sinks))


def programs(place: Place, small: bool, kernels: tuple[str, ...] = SAFE) -> list[Program]:
    cases, found = SMALL_CASES if small else CASES, []
    missing: list[Absent] = []
    for name, case in cases.items():
        try:
            served = kernels_on(place, kernels, case.head, case.dtype)
        except Absent as absent:
            missing.append(absent)
            continue
        found += [_program(place, case, kernel, f"values/{kernel}/{name}") for kernel in served]
    if not found:
        raise missing[0]
    return found


def error_of(case: Case, compiled, seed: int, expected: tuple) -> float:
    """Returns the largest difference over the allowed one; `NOT_FINITE` for infinite values."""
    arrays, sinks = arrays_of(case, seed)
    found = jax.device_get(compiled(*arrays, sinks=sinks))
    found = found if case.lse else (found,)
    worst = 0.0
    for got, want in zip(found, expected, strict=False):
        got = np.asarray(got, np.float32)
        if not np.isfinite(got).all():
            print(f"{np.count_nonzero(~np.isfinite(got))} values are not finite", flush=True)
            return NOT_FINITE
        allowed = check.TOLERANCE[case.dtype] * (1 + np.abs(want))
        worst = max(worst, float((np.abs(got - want) / allowed).max()))
    return worst


def measure(job: Job, kernels: tuple[str, ...] = SAFE) -> None:
    """Measures `values/<kernel>/<case>`: the error of each kernel that the device supports."""
    cases = SMALL_CASES if job.small else CASES
    job.tell(cases={name: case._asdict() for name, case in cases.items()})
    built = build(programs(Place(), job.small, tuple(kernels)))
    expected = functools.cache(lambda name: wanted(cases[name], job.seed))
    job.each(
        (name, functools.partial(_figures, job, cases, built, name, expected)) for name in built
    )


def _figures(job: Job, cases: dict[str, Case], built: Built, name: str, expected) -> dict:
    case = name.rpartition("/")[2]
    worst = error_of(cases[case], built[name], job.seed, expected(case))
    if worst > 1:
        what = f"{worst:.1f} times the difference that is allowed"
        job.refute(f"{name}: " + ("values are not finite" if worst == NOT_FINITE else what))
    allowed = check.TOLERANCE[cases[case].dtype]
    unit = f"largest difference, of the {allowed} + {allowed} |value| that are allowed"
    return {name: figure(worst, unit)}
