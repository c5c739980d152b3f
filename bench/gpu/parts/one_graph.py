"""Checks that a chunk in one CUDA graph gives the tokens of the same chunk in several.

Both are compiled with the same algorithms (without tuning) and run several chunks from the same
state: `off` and a chain with top-p, with cuDNN's attention and with the Pallas kernel.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from bench.gpu.chunks import OFF, Chunk, Size
from bench.gpu.job import Job
from bench.gpu.program import Place, Program, build
from bench.record import figure
from specjax.decode.options import Features
from specjax.engine.graphs import ONE_GRAPH

UNTUNED = {"xla_gpu_autotune_level": 0}
ARMS = {"default": UNTUNED, "while": {**ONE_GRAPH, **UNTUNED}}
TOP_P = {"temperature": 1.0, "top_p": 0.9}


class Sizes(NamedTuple):
    """Sizes of the check; `chunks` is the number of consecutive chunks."""

    shape: str = "135M"
    layers: int = 4
    batch: int = 8
    context: int = 256
    rounds: int = 16
    chunks: int = 3
    kernels: tuple[str, ...] = ("library:cudnn", "gpu")
    strategies: tuple[str, ...] = (OFF, "4_1_5")


SMALL = Sizes("tiny", 1, 2, 32, 3, 2, ("reference",), (OFF, "2_1_3"))


def _chunks(place: Place, small: bool) -> dict[str, Chunk]:
    sizes = SMALL if small else Sizes()
    features = Features(sampled=True, top_p=True)

    def chunk(strategy: str, kernel: str) -> Chunk:
        size = Size(
            sizes.shape,
            sizes.batch,
            sizes.context,
            sizes.layers,
            strategy,
            sizes.rounds,
            kernel,
            TOP_P,
            features,
            sizes.chunks,
        )
        return Chunk(place, size)

    return {f"{s}/{k}": chunk(s, k) for k in sizes.kernels for s in sizes.strategies}


def _programs(chunks: dict[str, Chunk]) -> Iterator[Program]:
    for name, chunk in chunks.items():
        yield from chunk.programs(f"{name}/", ARMS, as_engine=False)


def programs(place: Place, small: bool) -> list[Program]:
    return list(_programs(_chunks(place, small)))


def measure(job: Job) -> None:
    """Measures `differ/<strategy>/<kernel>`: the number of samples whose tokens differ."""
    sizes = SMALL if job.small else Sizes()
    job.tell(sizes=sizes._asdict(), arms=ARMS)
    chunks = _chunks(Place(), job.small)
    built = build(list(_programs(chunks)))
    job.each(
        (f"differ/{name}", functools.partial(_differ, job, sizes, name, chunk, built))
        for name, chunk in chunks.items()
    )


def _differ(job: Job, sizes: Sizes, name: str, chunk: Chunk, built) -> dict:
    tokens = {}
    for arm in ARMS:
        chunk.load(job.seed)  # the same state, to the bit
        chunk.compiled = built
        chunk.prepare()
        found = []
        for _ in range(sizes.chunks):
            result = chunk.run(f"{name}/{arm}")
            found.append((result.tokens, result.length))
        tokens[arm] = found
    differ = np.zeros(sizes.batch, bool)
    for (a, lengths), (b, others) in zip(tokens["default"], tokens["while"], strict=True):
        differ |= (a != b).any(axis=1)[: sizes.batch] | (lengths != others)[: sizes.batch]
    ran = int(tokens["default"][-1][1][: sizes.batch].sum() - sizes.batch * sizes.context)
    if differ.any():
        job.refute(f"{name}: tokens of {differ.sum()} of {sizes.batch} samples differ")
    return {f"differ/{name}": figure(int(differ.sum()), f"of {sizes.batch} samples, {ran} tokens")}
