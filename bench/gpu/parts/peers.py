"""What comparisons with peers have in common: the work, specjax's side of it, and the figures.

Plain decoding is compared, greedy, in turns in one process on one device, with the same shapes,
random weights and dtype: the tokens after the first of each sample.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np

from bench.record import figure, paired_ratio_interval
from bench.throughput import workloads
from bench.throughput.workloads import GREEDY, Point, Workload
from specjax import LLM, ModelConfig
from specjax.models.transformer import Params


class Shape(NamedTuple):
    """Numbers of tokens in prompt and output, batch sizes, and number of turns."""

    prompt: int
    output: int
    batches: tuple[int, ...]
    repeats: int

    @property
    def longest(self) -> int:
        return self.prompt + self.output


FULL, SMALL = Shape(2048, 128, (1, 8), 5), Shape(32, 8, (2,), 2)


def prompts_of(shape: Shape, batch: int, vocab_size: int, seed: int) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return rng.integers(2, vocab_size, (batch, shape.prompt)).tolist()


class OwnCalls:
    """Plain decoding by an `LLM`: calls of the whole output, and of its first token."""

    def __init__(self, cfg: ModelConfig, params: Params, shape: Shape, prompts, seed: int):
        batch, self.shape = len(prompts), shape
        work = Workload(shape.prompt, shape.output, shape.batches, GREEDY)
        point = Point("beside", shape.prompt, shape.output, batch, work)
        cfg = cfg.replace(max_position=max(cfg.max_position, shape.longest))
        self.calls = workloads.Calls(
            LLM((cfg, params, None), None, batch, shape.longest), point, prompts, seed
        )

    def jobs(self) -> dict[str, Callable[[], None]]:
        return {
            "whole": lambda: self.calls.run(self.shape.output),
            "first": lambda: self.calls.run(1),
        }

    def costs(self, seconds: Mapping[str, Sequence[float]]) -> list[float]:
        """Returns the seconds per token of each turn."""
        return self.calls.costs(seconds["whole"], seconds["first"])


def figures(
    peer: str, theirs: Sequence[float], ours: Sequence[float], shape: Shape, batch: int
) -> dict[str, dict]:
    """Makes `<peer>_tokens_per_sec/..`, `specjax_tokens_per_sec/..` and `specjax_over_<peer>/..`.

    Args:
      theirs, ours: seconds per token of each turn; with a tiny model on a CPU they may be too
        short for the clock.
    """
    at, found = f"/batch_{batch}", {}
    short = figure(None, "left out: too short for the clock")
    unit = f"tok/s, decoding behind {shape.prompt} tokens"
    for name, costs in ((peer, theirs), ("specjax", ours)):
        entry = short
        if min(costs) > 0:
            rates = [1 / cost for cost in costs]
            entry = figure(statistics.median(rates), unit, [min(rates), max(rates)])
        found[f"{name}_tokens_per_sec{at}"] = entry
    entry = short
    if min(*theirs, *ours) > 0:
        ratio, *ends = paired_ratio_interval(theirs, ours)
        entry = figure(ratio, "times as fast, median", ends)
    found[f"specjax_over_{peer}{at}"] = entry
    values = [f"{name} {entry['value']}" for name, entry in found.items()]
    print(f"{jax.default_backend()}: {', '.join(values)}", flush=True)
    return found
