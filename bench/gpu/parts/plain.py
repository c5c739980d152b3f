"""Plain steps: milliseconds, and bytes per second as a share of a copy's.

Both contexts run in one program, whose page table has room for the longer one, as in an engine.
Models of 12 and of 4 layers are measured in turns, see `rounds.py`.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

from bench.gpu.chunks import (
    Chunk,
    Size,
    figures_by_layers,
    milliseconds_per_round,
    shape_of,
    whole_model,
)
from bench.gpu.job import Job
from bench.gpu.parts.ceilings import copy_rate
from bench.gpu.program import Place, Program, build
from bench.record import figure, median_interval, paired_ratio_interval
from bench.round import counts

ARMS = {
    "triton": {"xla_gpu_enable_triton_gemm": True},
    "no_triton": {"xla_gpu_enable_triton_gemm": False},
}


class Sizes(NamedTuple):
    layers: tuple[int, int] = (12, 4)
    contexts: tuple[int, ...] = (1024, 4096)
    rounds: int = 24
    repeats: int = 9


SMALL = Sizes((2, 1), (16, 32), 3, 3)


def _chunks(place: Place, small: bool, batch: int, shape: str) -> dict[int, Chunk]:
    sizes = SMALL if small else Sizes()
    size = Size("tiny" if small else shape, batch, max(sizes.contexts), rounds=sizes.rounds)
    return {layers: Chunk(place, size._replace(layers=layers)) for layers in sizes.layers}


def _programs(chunks: dict[int, Chunk]) -> list[Program]:
    every = sum(chunk.held for chunk in chunks.values())
    return [
        program
        for layers, chunk in chunks.items()
        for program in chunk.programs(f"{layers}/", ARMS, every - chunk.held)
    ]


def programs(place: Place, small: bool, batch: int, shape: str = "8B") -> list[Program]:
    return _programs(_chunks(place, small, batch, shape))


def measure(job: Job, batch: int, shape: str = "8B") -> None:
    """Measures `ms/<layers>_layers/<context>/<arm>`, `share/..` and `triton_over_not/..`."""
    sizes = SMALL if job.small else Sizes()
    job.tell(sizes=sizes._asdict(), batch=batch, shape=shape)
    chunks = _chunks(Place(), job.small, batch, shape)
    built = build(_programs(chunks))
    copy = copy_rate(job)
    for chunk in chunks.values():
        chunk.load(job.seed)
        chunk.compiled = built
    total = shape_of(chunk.size.shape).num_layers
    job.tell(attention=chunk.cfg.run.attention)
    job.each(
        (
            tuple(f"{kind}/{total}_layers/{context}/best" for kind in ("ms", "share")),
            functools.partial(_figures, sizes, chunks, context, copy, total),
        )
        for context in sizes.contexts
    )


def _figures(sizes: Sizes, chunks: dict[int, Chunk], context: int, copy: float, total: int) -> dict:
    arms = {
        f"{layers}/{arm}": (chunk.at(context), f"{layers}/{arm}")
        for layers, chunk in chunks.items()
        for arm in ARMS
    }
    found, result, whole = milliseconds_per_round(arms, sizes.repeats), {}, {}
    size = whole_bytes(chunks, sizes.layers, total, context)
    for arm in ARMS:
        of_arm = {n: found[f"{n}/{arm}"] for n in sizes.layers}
        whole[arm], figures = figures_by_layers(
            of_arm, f"{context}/{arm}", sizes.layers, total, "ms per step"
        )
        result |= figures
        least = 1e3 * size / copy
        share, *ends = median_interval([least / ms for ms in whole[arm]])
        unit = "of a copy's bytes/s, weights and caches counted"
        result[f"share/{total}_layers/{context}/{arm}"] = figure(share, unit, ends)
    best = min(ARMS, key=lambda arm: result[f"ms/{total}_layers/{context}/{arm}"]["value"])
    for kind in ("ms", "share"):
        of_best = result[f"{kind}/{total}_layers/{context}/{best}"]
        unit = f"{of_best['unit']}; {best}"
        result[f"{kind}/{total}_layers/{context}/best"] = of_best | {"unit": unit}
    ratio, *ends = paired_ratio_interval(whole["triton"], whole["no_triton"])
    result[f"triton_over_not/{context}"] = figure(ratio, "times the step without", ends)
    return result


def whole_bytes(chunks: dict[int, Chunk], layers: tuple[int, int], total: int, context: int):
    """Returns the bytes that a step of the whole model must read and write."""
    sizes = [
        counts.forward_bytes(c.cfg, c.runner.params, c.size.batch, 1, context)
        for c in (chunks[n] for n in layers)
    ]
    return whole_model(sizes[:1], sizes[1:], layers, total)[0]
