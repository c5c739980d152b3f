"""The time of a pass of the policy by number of rows: the cost curve of strategies.

Models of 12 and of 4 layers are measured in turns, see `rounds.py`. Several passes are started
before the host waits, which hides the time to start a program, as within a chunk. A pass has the
compiler options of the engine's chunks: on a GPU it is one CUDA graph.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax

from bench.gpu.chunks import Chunk, Size, figures_by_layers, policy_pass, shape_of
from bench.gpu.job import Job
from bench.gpu.program import Built, Place, Program, build
from bench.record import alternate, figure, paired_ratio_interval
from bench.round.batch import full_row_map


class Sizes(NamedTuple):
    """Sizes of the measurement; `passes` is the number of passes before the host waits."""

    shape: str = "8B"
    layers: tuple[int, int] = (12, 4)
    rows: tuple[int, ...] = (1, 16, 5, 32, 64, 8)
    context: int = 2048
    passes: int = 6
    repeats: int = 11


SMALL = Sizes("tiny", (2, 1), (1, 16), 32, 2, 3)


def _chunks(place: Place, sizes: Sizes, batch: int) -> dict[int, Chunk]:
    room = max(sizes.rows)
    size = Size(sizes.shape, batch, sizes.context, rounds=room)
    return {layers: Chunk(place, size._replace(layers=layers)) for layers in sizes.layers}


def _programs(place: Place, sizes: Sizes, chunks: dict[int, Chunk]) -> list[Program]:
    every, found = sum(chunk.held for chunk in chunks.values()), []
    for rows in sizes.rows:
        for layers, chunk in chunks.items():
            params, _, state = chunk.shapes
            inputs = params, state, place.shapes(full_row_map(chunk.runner))
            lower = functools.partial(jax.jit(policy_pass(chunk.runner, rows)).lower, *inputs)
            name = f"{layers}/{rows}"
            options = chunk.runner.executables.graphs.options(("chunk",))
            found.append(Program(name, functools.cache(lower), options, every - chunk.held))
    return found


def programs(place: Place, small: bool, batch: int) -> list[Program]:
    sizes = SMALL if small else Sizes()
    return _programs(place, sizes, _chunks(place, sizes, batch))


def measure(job: Job, batch: int) -> None:
    """Measures `ms/<layers>_layers/<rows>`, and `rows_over_1/<rows>` of the whole model.

    One row is measured beside each other number of rows: `ms/<layers>_layers/1_beside_<rows>`.
    """
    sizes = SMALL if job.small else Sizes()
    job.tell(sizes=sizes._asdict(), batch=batch)
    place = Place()
    chunks = _chunks(place, sizes, batch)
    built = build(_programs(place, sizes, chunks))
    for chunk in chunks.values():
        chunk.load(job.seed)
    job.tell(attention=chunk.cfg.run.attention)
    job.each(
        (f"rows_over_1/{rows}", functools.partial(_figures, sizes, chunks, built, rows))
        for rows in sizes.rows[1:]
    )


def _figures(sizes: Sizes, chunks: dict[int, Chunk], built: Built, rows: int) -> dict:
    def run(layers: int, rows: int) -> None:
        runner, program = chunks[layers].runner, built[f"{layers}/{rows}"]
        inputs = runner.params, runner.state, full_row_map(runner)
        for _ in range(sizes.passes):
            found = program(*inputs)
        jax.block_until_ready(found)

    runs = {
        (layers, count): functools.partial(run, layers, count)
        for layers in sizes.layers
        for count in (1, rows)
    }
    for one in runs.values():
        one()
    seconds = alternate(runs, sizes.repeats)
    total = shape_of(sizes.shape).num_layers
    result, whole = {}, {}
    for count, at in ((1, f"1_beside_{rows}"), (rows, f"{rows}")):
        found = {n: [1e3 * s / sizes.passes for s in seconds[n, count]] for n in sizes.layers}
        whole[count], figures = figures_by_layers(found, at, sizes.layers, total, "ms per pass")
        result |= figures
    ratio, *ends = paired_ratio_interval(whole[rows], whole[1])
    return result | {f"rows_over_1/{rows}": figure(ratio, "times a pass over one row", ends)}
