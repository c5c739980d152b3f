"""What top-p costs a round: without it, by digits as GPUs find thresholds, and by halvings.

A threshold takes 8 passes over the scores by hexadecimal digits, and 32 by halving their range, in
a loop. Every draft step has one. Models have few layers, because the threshold does not depend on
them.
"""

from __future__ import annotations

import functools
from typing import NamedTuple
from unittest import mock

import jax

from bench.gpu.chunks import OFF, Chunk, Size, milliseconds_per_round
from bench.gpu.job import Job
from bench.gpu.program import Place, Program, build
from bench.record import figure, median_interval, paired_ratio_interval
from specjax.decode import sampling
from specjax.decode.options import Features

TOP_P = {"temperature": 1.0, "top_p": 0.9}
ARMS = ("none", "digits", "halvings")


class Sizes(NamedTuple):
    shape: str = "8B"
    layers: int = 2
    context: int = 256
    rounds: int = 24
    repeats: int = 9
    strategies: tuple[str, ...] = (OFF, "4_1_5")


SMALL = Sizes("tiny", 1, 24, 3, 2, (OFF, "2_1_3"))


class Halving(Chunk):
    """A chunk whose thresholds are found by halvings."""

    def _lower(self) -> jax.stages.Lowered:
        jax.clear_caches()  # functions that were traced with digits
        with mock.patch.object(sampling, "digits_by_one_reduction", sampling.by_halving):
            lowered = super()._lower()
        jax.clear_caches()
        return lowered


def _chunks(place: Place, small: bool, batch: int) -> dict[str, Chunk]:
    sizes, found = SMALL if small else Sizes(), {}
    for strategy in sizes.strategies:
        size = Size(sizes.shape, batch, sizes.context, sizes.layers, strategy, sizes.rounds)
        with_top_p = size._replace(options=TOP_P, features=Features(sampled=True, top_p=True))
        found[f"{strategy}/none"] = Chunk(place, size)
        found[f"{strategy}/digits"] = Chunk(place, with_top_p)
        found[f"{strategy}/halvings"] = Halving(place, with_top_p)
    return found


def _programs(chunks: dict[str, Chunk]) -> list[Program]:
    return [program for name, chunk in chunks.items() for program in chunk.programs(name)]


def programs(place: Place, small: bool, batch: int) -> list[Program]:
    return _programs(_chunks(place, small, batch))


def measure(job: Job, batch: int) -> None:
    """Measures `ms/<strategy>/<arm>`, `us/<strategy>/..` of top-p, and `digits_over_halvings/..`.

    The three arms of a strategy take turns.
    """
    sizes = SMALL if job.small else Sizes()
    job.tell(sizes=sizes._asdict(), batch=batch)
    chunks = _chunks(Place(), job.small, batch)
    built = build(_programs(chunks))
    job.each(
        (
            (f"us/{strategy}/digits", f"digits_over_halvings/{strategy}"),
            functools.partial(_figures, job, sizes, chunks, built, strategy),
        )
        for strategy in sizes.strategies
    )


def _figures(job: Job, sizes: Sizes, chunks: dict[str, Chunk], built, strategy: str) -> dict:
    arms, result, first = {}, {}, None
    for arm in ARMS:
        chunk = chunks[f"{strategy}/{arm}"]
        chunk.load(job.seed, first)
        first, chunk.compiled = first or chunk, built
        arms[arm] = chunk, f"{strategy}/{arm}"
    found = milliseconds_per_round(arms, sizes.repeats)
    for arm, values in found.items():
        value, *ends = median_interval(values)
        result[f"ms/{strategy}/{arm}"] = figure(value, "ms per round", ends)
    for arm in ARMS[1:]:
        more = [1e3 * (a - b) for a, b in zip(found[arm], found["none"], strict=True)]
        value, *ends = median_interval(more)
        result[f"us/{strategy}/{arm}"] = figure(value, "us of top-p in a round", ends)
    ratio, *ends = paired_ratio_interval(found["digits"], found["halvings"])
    unit = "times the round by halvings"
    return result | {f"digits_over_halvings/{strategy}": figure(ratio, unit, ends)}
