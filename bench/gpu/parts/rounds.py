"""Speculative rounds against plain ones, with scripted acceptance: true speed-ups.

Models of 12 and of 4 layers take turns, so that large batches fit and programs compile fast; their
difference gives the time of one layer, and with it that of the whole model.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np

from bench.gpu.chunks import OFF, Chunk, Size, figures_by_layers, milliseconds_per_round, shape_of
from bench.gpu.job import Job
from bench.gpu.program import Place, Program, build
from bench.gpu.script import Scripted, scripted_lengths
from bench.record import figure, paired_ratio_interval


class Sizes(NamedTuple):
    """layers: of the models that are measured, the larger number first."""

    shape: str = "8B"
    layers: tuple[int, int] = (12, 4)
    strategy: str = "4_1_5"
    context: int = 1024
    rounds: int = 24
    repeats: int = 9
    acceptance: tuple[float, ...] = (0.6, 0.8)


SMALL = Sizes("tiny", (2, 1), "2_1_3", 32, 3, 3)


def _sizes(small: bool) -> Sizes:
    return SMALL if small else Sizes()


def _chunks(place: Place, sizes: Sizes, batch: int) -> dict[str, Chunk]:
    """`<layers>/<arm>`: plain decoding, and the strategy at each probability of acceptance."""
    found = {}
    for layers in sizes.layers:
        size = Size(sizes.shape, batch, sizes.context, layers, rounds=sizes.rounds)
        found[f"{layers}/{OFF}"] = Chunk(place, size)
        for probability in sizes.acceptance:
            spec = size._replace(strategy=sizes.strategy)
            found[f"{layers}/{probability}"] = Chunk(place, spec, Scripted(probability))
    return found


def _programs(chunks: dict[str, Chunk]) -> list[Program]:
    # Those of equally many layers hold the policy's weights together, see `load`.
    weights = {chunk.cfg.num_layers: chunk.weights for chunk in chunks.values()}
    every = sum(chunk.held - chunk.weights for chunk in chunks.values()) + sum(weights.values())
    return [
        program
        for name, chunk in chunks.items()
        for program in chunk.programs(name, beside=every - chunk.held)
    ]


def programs(place: Place, small: bool, batch: int) -> list[Program]:
    return _programs(_chunks(place, _sizes(small), batch))


def measure(job: Job, batch: int) -> None:
    """`ms/..` of a round, `round_over_plain`, `speedup/<acceptance>`, `accept_length/..`.

    The speed-up is of the measured time of a round at the accept length that is expected at the
    probability; few slots in few rounds have another one by their scripts, `script_length/..`.
    """
    sizes = _sizes(job.small)
    job.tell(sizes=sizes._asdict(), batch=batch)
    chunks = _chunks(Place(), sizes, batch)
    built = build(_programs(chunks))
    for layers in sizes.layers:
        first = None
        for name, chunk in chunks.items():
            if name.startswith(f"{layers}/"):
                chunk.load(job.seed, first)
                first = first or chunk
                chunk.compiled = built
    job.tell(attention=first.cfg.run.attention)
    job.each([("round_over_plain", functools.partial(_figures, sizes, batch, chunks))])


def _figures(sizes: Sizes, batch: int, chunks: dict[str, Chunk]) -> dict:
    result, lengths = {}, {}
    more, less = sizes.layers
    for probability in sizes.acceptance:
        chunk = chunks[f"{less}/{probability}"]
        lengths[probability] = _script_length(sizes, chunk, f"{less}/{probability}", probability)
    arms = {name: (chunk, name) for name, chunk in chunks.items()}
    found = milliseconds_per_round(arms, sizes.repeats)
    total = shape_of(sizes.shape).num_layers
    whole = {}
    for arm in (OFF, *sizes.acceptance):
        of_arm = {n: found[f"{n}/{arm}"] for n in sizes.layers}
        whole[arm], figures = figures_by_layers(
            of_arm, f"{arm}", sizes.layers, total, "ms per round"
        )
        result |= figures
    for probability in sizes.acceptance:
        length = expected_length(probability, chunks[f"{more}/{probability}"].runner.steps)
        ratio, *ends = paired_ratio_interval(whole[OFF], [ms / length for ms in whole[probability]])
        unit = "tokens per second at the expected accept length, over plain decoding's"
        result[f"speedup/{probability}"] = figure(ratio, unit, ends)
        result[f"accept_length/{probability}"] = figure(length, "tokens per round, expected")
        unit = "tokens per round, as measured and by the script"
        result[f"script_length/{probability}"] = figure(lengths[probability], unit)
    # Which drafts are accepted changes no shape, so either arm's round is the strategy's.
    rounds = [ms for probability in sizes.acceptance for ms in whole[probability]]
    ratio, *ends = paired_ratio_interval(rounds, whole[OFF] * len(sizes.acceptance))
    return result | {"round_over_plain": figure(ratio, "times a plain step", ends)}


def expected_length(probability: float, steps: int) -> float:
    """Tokens per round of a chain, each of whose drafts is accepted with the probability."""
    return sum(probability**i for i in range(steps + 1))


def _script_length(sizes: Sizes, chunk: Chunk, name: str, probability: float) -> float:
    """Tokens per round; checks that they are what the script says.

    Raises:
      RuntimeError: they are not.
    """
    chunk.prepare()
    keys = np.asarray(chunk.runner.state.keys)[: chunk.size.batch]
    emitted = chunk.emitted(chunk.run(name))
    steps = chunk.runner.steps
    wanted = scripted_lengths(probability, keys, sizes.context, steps, sizes.rounds)
    if (emitted != wanted).any():
        raise RuntimeError(
            f"expected {wanted.tolist()} tokens by the script, got {emitted.tolist()}"
        )
    return float(emitted.mean() / sizes.rounds)
