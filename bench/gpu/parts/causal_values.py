"""Compares kernels of training's attention with the float32 reference: results and gradients.

Rows are packed with samples of unequal lengths, some of which fill no tile, and end in padding.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bench.gpu.job import Absent, Job
from bench.gpu.parts.attention import model_of
from bench.gpu.parts.values import NOT_FINITE, TOLERANCE
from bench.gpu.program import Place, Program, build
from bench.record import figure
from specjax.kernels import dispatch, reference
from specjax.kernels.backend import choose

KERNELS = ("gpu:flash", "library:cudnn")
NAMES = "out", "dq", "dk", "dv"


class Case(NamedTuple):
    """Sizes of a call: rows, key/value heads of `group` queries each, positions."""

    rows: int = 2
    kv_heads: int = 2
    group: int = 4
    length: int = 1024
    head: int = 128
    window: int | None = None
    soft_cap: float | None = None
    dtype: str = "bfloat16"


CASES = {
    "plain": Case(),
    "no_groups": Case(kv_heads=4, group=1),
    "heads_of_64": Case(head=64),
    "heads_of_96": Case(head=96),
    "heads_of_256": Case(head=256),
    "window": Case(window=100),
    "soft_cap": Case(soft_cap=20.0),
    "uneven": Case(length=1000),
    "float32": Case(dtype="float32"),
}
SMALL_CASES = {"tiny": Case(2, 1, 2, 24, 16, dtype="float32")}


def arrays_of(case: Case, seed: int) -> tuple[np.ndarray, ...]:
    """Returns q, k, v, segment ids, and the cotangent of the result."""
    rng = np.random.default_rng(seed)

    def normal(heads):
        shape = case.rows, heads, case.length, case.head
        return rng.standard_normal(shape, np.float32).astype(jnp.dtype(case.dtype))

    segments = np.zeros((case.rows, case.length), np.int32)
    for row in segments:
        ends = np.sort(rng.choice(np.arange(1, case.length), 5, replace=False))
        for number, (begin, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True), 1):
            row[begin:end] = number
    heads = case.kv_heads * case.group
    return normal(heads), normal(case.kv_heads), normal(case.kv_heads), segments, normal(heads)


def _program(case: Case, attend):
    def run(q, k, v, segments, cotangent):
        out, back = jax.vjp(lambda q, k, v: attend(q, k, v, segments), q, k, v)
        real = (segments > 0)[:, None, :, None]  # what padding attends to is not compared
        return jnp.where(real, out, 0), *back(jnp.where(real, cotangent, 0))

    return jax.jit(run)


def _kernels(place: Place, case: Case) -> list[str]:
    found = []
    for name in KERNELS:
        cfg = model_of(case.head).running(compute_dtype=case.dtype)
        try:
            found.append(choose(place.platform, place.kind, cfg, name, decoding=False).name)
        except ValueError:
            continue
    return found


def programs(place: Place, small: bool) -> list[Program]:
    found = []
    for name, case in (SMALL_CASES if small else CASES).items():
        kernels = ["reference"] if small else _kernels(place, case)
        for kernel in kernels:
            options = {"window": case.window, "soft_cap": case.soft_cap, "kernel": kernel}
            attend = functools.partial(dispatch.causal_attention, **options)
            inputs = place.shapes(arrays_of(case, 0))
            lower = functools.partial(_program(case, attend).lower, *inputs)
            found.append(Program(f"values/{kernel}/{name}", lower))
    if not found:
        raise Absent("not on this device", "no kernel of training's attention is for this device")
    return found


def wanted(case: Case, seed: int) -> list[np.ndarray]:
    """Computes results and gradients in float32, by the reference on the host."""
    arrays = arrays_of(case, seed)
    arrays = [x if x.dtype == np.int32 else x.astype(np.float32) for x in arrays]
    options = {"window": case.window}
    if case.soft_cap is not None:
        options["soft_cap"] = case.soft_cap
    attend = functools.partial(reference.causal_attention, **options)
    with jax.default_device(jax.devices("cpu")[0]):
        return [np.asarray(x) for x in _program(case, attend)(*arrays)]


def measure(job: Job) -> None:
    """Measures `values/<kernel>/<case>`: the largest difference over the allowed one."""
    cases = SMALL_CASES if job.small else CASES
    job.tell(cases={name: case._asdict() for name, case in cases.items()})
    built = build(programs(Place(), job.small))
    expected = functools.cache(lambda name: wanted(cases[name], job.seed))
    job.each(
        (name, functools.partial(_figures, job, cases, built, name, expected)) for name in built
    )


def _figures(job: Job, cases: dict[str, Case], built, name: str, expected) -> dict:
    case = name.rpartition("/")[2]
    found, worst, where = built[name](*arrays_of(cases[case], job.seed)), 0.0, "out"
    for what, got, want in zip(NAMES, found, expected(case), strict=True):
        got = np.asarray(got, np.float32)
        # A gradient sums over many positions: what is allowed is of its largest value.
        scale = 1 + np.abs(want) if what == "out" else np.abs(want).max()
        error = np.abs(got - want) / (TOLERANCE * scale)
        here = float(error.max()) if np.isfinite(got).all() else NOT_FINITE
        worst, where = max((worst, where), (here, what))
    if worst > 1:
        what = f"{worst:.1f} times the difference that is allowed"
        job.refute(f"{name}, {where}: " + ("not finite" if worst == NOT_FINITE else what))
    return {name: figure(worst, f"largest difference, in {where}, of what is allowed")}
