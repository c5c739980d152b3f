"""The time to launch kernels in a small model: chunks in several CUDA graphs, and in one.

A round of the 135M shape is bound by launching its kernels. XLA by itself puts sequences of them
into graphs (`default`); `min_graph_size` also includes single kernels, and `while` a whole chunk
with the loop over its rounds, which the host then launches once.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

from bench.gpu.chunks import OFF, Chunk, Size, milliseconds_per_round
from bench.gpu.job import Job
from bench.gpu.program import Built, Place, Program, build
from bench.record import figure, median_interval, paired_ratio_interval
from bench.round import counts
from specjax.engine.graphs import ONE_GRAPH

ARMS = {
    "default": {},
    "min_graph_size": {"xla_gpu_graph_min_graph_size": 1},
    "while": dict(ONE_GRAPH),
}
SAFE = ("default", "min_graph_size")  # the part `one_graph` checks whether `while` is safe


class Sizes(NamedTuple):
    shape: str = "135M"
    batches: tuple[int, ...] = (1, 8)
    context: int = 512
    rounds: int = 32
    repeats: int = 11


SMALL = Sizes("tiny", (2,), 32, 3, 3)


def _chunks(place: Place, small: bool, strategy: str) -> dict[int, Chunk]:
    sizes = SMALL if small else Sizes()
    strategy = "2_1_3" if small and strategy != OFF else strategy
    return {
        batch: Chunk(
            place,
            Size(sizes.shape, batch, sizes.context, strategy=strategy, rounds=sizes.rounds),
        )
        for batch in sizes.batches
    }


def _programs(chunks: dict[int, Chunk]) -> list[Program]:
    return [
        p
        for batch, chunk in chunks.items()
        for p in chunk.programs(f"{batch}/", ARMS, as_engine=False)
    ]


def programs(place: Place, small: bool, strategy: str) -> list[Program]:
    return _programs(_chunks(place, small, strategy))


def measure(job: Job, strategy: str) -> None:
    """Measures `ms/batch_<B>/<arm>` of a round, its ratio to `default`, and `kernels/batch_<B>`.

    `best` is the faster one of the `SAFE` arms.
    """
    sizes = SMALL if job.small else Sizes()
    job.tell(sizes=sizes._asdict(), strategy=strategy, arms=ARMS)
    chunks = _chunks(Place(), job.small, strategy)
    built = build(_programs(chunks))
    for chunk in chunks.values():
        chunk.load(job.seed)
        chunk.compiled = built
    job.tell(attention=chunk.cfg.run.attention)
    job.each(
        (f"ms/batch_{batch}/best", functools.partial(_figures, job, sizes, chunk, built, batch))
        for batch, chunk in chunks.items()
    )


def _figures(job: Job, sizes: Sizes, chunk: Chunk, built: Built, batch: int) -> dict:
    at, result, arms, errors = f"batch_{batch}", {}, {}, {}
    for arm in ARMS:  # an arm that fails does not stop the others
        try:
            chunk.prepare()
            chunk.run(f"{batch}/{arm}")
            arms[arm] = (chunk, f"{batch}/{arm}")
        except Exception as error:
            errors[arm] = error
    if not any(arm in arms for arm in SAFE):
        raise errors[SAFE[0]]
    for arm, error in errors.items():
        job.not_measured([f"ms/{at}/{arm}"], error)
    found = milliseconds_per_round(arms, sizes.repeats)
    for arm, values in found.items():
        value, *ends = median_interval(values)
        result[f"ms/{at}/{arm}"] = figure(value, "ms per round", ends)
        if arm != "default" and "default" in found:
            ratio, *ends = paired_ratio_interval(values, found["default"])
            result[f"over_default/{at}/{arm}"] = figure(ratio, "times the round as it is", ends)
    best = min(
        (arm for arm in SAFE if arm in found), key=lambda arm: result[f"ms/{at}/{arm}"]["value"]
    )
    unit = f"ms per round; {best}"
    result[f"ms/{at}/best"] = result[f"ms/{at}/{best}"] | {"unit": unit}
    counted = counts.round_kernels(built[f"{batch}/default"].as_text())
    kinds = ", ".join(f"{n} {opcode}" for opcode, n in counted.most_common())
    return result | {f"kernels/{at}": figure(counted.total(), f"per round, as it is: {kinds}")}
