"""Measured peaks of a card: bytes per second of a copy, operations per second of a product.

Shares in other parts are of the copy: the figure of this part on the same card, or a short
measurement of their own if there is none.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from bench.gpu import records
from bench.gpu.job import Job
from bench.gpu.program import Place, Program, build
from bench.record import alternate, figure, median_interval


class Sizes(NamedTuple):
    """Sizes of the measurement.

    Attributes:
      bytes: bytes of the array that is copied.
      side: rows and columns of the matrices.
      calls: number of calls in a program, an even number.
    """

    bytes: int = 1 << 32
    side: int = 8192
    calls: int = 10
    repeats: int = 15


SMALL = Sizes(1 << 16, 64, 2, 3)
NAMES = ("copy", "matmul")
BRIEF = 3  # repeats of a short measurement in another part


def _copy(calls: int, x):
    # Each copy reads the result of the one before, so the compiler cannot remove any.
    return jax.lax.fori_loop(0, calls, lambda i, x: x ^ i.astype(x.dtype), x)


def _matmul(calls: int, a, b):
    # Two at a time: the second writes to the first one's input, so that nothing is copied.
    return jax.lax.fori_loop(0, calls // 2, lambda _, a: jnp.dot(jnp.dot(a, b), b), a)


def _inputs(sizes: Sizes) -> dict[str, tuple]:
    matrix = jax.ShapeDtypeStruct((sizes.side, sizes.side), jnp.bfloat16)
    return {
        "copy": (jax.ShapeDtypeStruct((sizes.bytes // 4,), jnp.uint32),),
        "matmul": (matrix, matrix),
    }


def programs(place: Place, small: bool, names: Sequence[str] = NAMES) -> list[Program]:
    sizes = SMALL if small else Sizes()
    inputs = {name: place.shapes(shapes) for name, shapes in _inputs(sizes).items()}
    bodies = {"copy": _copy, "matmul": _matmul}
    return [
        Program(
            name,
            functools.partial(
                # The updated array is donated; otherwise it would be copied once before the calls.
                jax.jit(functools.partial(body, sizes.calls), donate_argnums=0).lower,
                *inputs[name],
            ),
        )
        for name, body in bodies.items()
        if name in names
    ]


def _runs(
    small: bool, seed: int, names: Sequence[str]
) -> dict[str, tuple[Callable[[], None], float]]:
    """Returns, by name, a function that runs once and waits, and its bytes or operations."""
    sizes = SMALL if small else Sizes()
    built = build(programs(Place(), small, names))
    keys = jax.random.split(jax.random.key(seed), 3)
    matrix = (sizes.side, sizes.side)
    inputs: dict[str, tuple] = {}
    if "copy" in names:
        inputs["copy"] = (jax.random.bits(keys[0], (sizes.bytes // 4,), jnp.uint32),)
    if "matmul" in names:  # the second is scaled, so that products of products stay as large
        inputs["matmul"] = (
            jax.random.normal(keys[1], matrix, jnp.bfloat16),
            sizes.side**-0.5 * jax.random.normal(keys[2], matrix, jnp.bfloat16),
        )
    work = {
        "copy": 2.0 * sizes.bytes * sizes.calls,
        "matmul": 2.0 * sizes.side**3 * sizes.calls,
    }

    def run(name: str) -> None:
        _, *rest = inputs[name]
        inputs[name] = jax.block_until_ready(built[name](*inputs[name])), *rest

    for name in inputs:
        run(name), run(name)
    return {name: (functools.partial(run, name), work[name]) for name in inputs}


def _rates(small: bool, seed: int, repeats: int, names=NAMES) -> dict[str, list[float]]:
    runs = _runs(small, seed, names)
    seconds = alternate({name: run for name, (run, _) in runs.items()}, repeats)
    return {name: [runs[name][1] / s for s in seconds[name]] for name in runs}


def measure(job: Job) -> None:
    """Measures `copy` in GB/s and `matmul` in TFLOP/s."""
    sizes = SMALL if job.small else Sizes()
    job.tell(sizes=sizes._asdict())
    rates = _rates(job.small, job.seed, sizes.repeats)
    copy, *copies = median_interval([rate / 1e9 for rate in rates["copy"]])
    matmul, *matmuls = median_interval([rate / 1e12 for rate in rates["matmul"]])
    size = f"{sizes.side}^3 in bfloat16"
    job.add(
        {
            "copy": figure(copy, f"GB/s, {sizes.bytes} bytes read and written", copies),
            "matmul": figure(matmul, f"TFLOP/s, {size}", matmuls),
        }
    )


def copy_rate(job: Job) -> float:
    """Returns the bytes per second, read and written, of a copy on the job's card.

    It is taken from the card's record, or measured briefly; the job's settings say which.
    """
    record = records.read(records.path_of(job.out, "ceilings", job.card))
    if record is not None and "copy" in record["figures"]:
        job.tell(copy=f"of the part, {record['date']}")
        return 1e9 * record["figures"]["copy"]["value"]
    rate, *_ = median_interval(_rates(job.small, job.seed, BRIEF, ("copy",))["copy"])
    job.tell(copy=f"measured in this process: {rate / 1e9:.0f} GB/s")
    return rate
