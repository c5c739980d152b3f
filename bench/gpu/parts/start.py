"""The start of an engine of 8B shapes with three strategies, without a cache of compiled programs.

It compiles all programs, checks the attention kernel and the CUDA graphs, and runs each program
once, as an engine does that is warmed up. Measuring the strategies is counted apart, since the time
for it is that of rounds. Weights are random.
"""

from __future__ import annotations

import functools
import time
from typing import NamedTuple

import jax

from bench.gpu.job import Job
from bench.gpu.parts.round_parts import plain_model
from bench.record import figure
from bench.round.batch import random_weights
from specjax import LLM, ControlConfig, SpecConfig
from specjax.drafts.mtp import init_head_params

NOT_AHEAD = "it is an engine's own start; other parts compile chunks of the same shapes"


class Sizes(NamedTuple):
    """The engine; `shape`, `layers` and `dtype` are those of `round_parts`."""

    shape: str = "assets/shapes/Qwen3-8B"
    layers: int = 36
    dtype: str = "bfloat16"
    batch: int = 64
    max_len: int = 2048
    strategies: tuple[str, ...] = ("off", "2_1_3", "4_1_5")


SMALL = Sizes("assets/sums", 1, "float32", 2, 64, ("off", "1_1_2"))


def measure(job: Job) -> None:
    """Measures `start/seconds` and what was found: `start/programs` and `start/graphs`."""
    sizes = SMALL if job.small else Sizes()
    job.tell(sizes=sizes._asdict())
    names = ("start/seconds", "start/graphs")
    job.each([(names, functools.partial(_figures, job, sizes))])


def _figures(job: Job, sizes: Sizes) -> dict:
    cfg, policy, _ = plain_model(sizes, job.seed)
    head = random_weights(functools.partial(init_head_params, cfg), job.seed + 1)
    control = ControlConfig(strategies=sizes.strategies)  # `static` would compile one of them
    cached = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    try:
        began = time.perf_counter()
        llm = LLM(
            (cfg, policy, head),
            SpecConfig(sizes.strategies[-1]),
            max_batch=sizes.batch,
            max_len=sizes.max_len,
            control=control,
        )
        took = llm.warm_up()
        seconds = time.perf_counter() - began
    finally:
        jax.config.update("jax_enable_compilation_cache", cached)
    runner = llm.engine.runner
    graphs = runner.executables.graphs
    job.tell(attention=runner.cfg.run.attention)
    said = graphs.line or "this platform has no CUDA graphs"
    return {
        "start/seconds": figure(
            seconds - took.calibration_seconds, "s, compiled programs, checks and one run of each"
        ),
        "start/calibration": figure(took.calibration_seconds, "s more, to measure the strategies"),
        "start/warm_up": figure(took.seconds, "s of them, without making the engine"),
        "start/programs": figure(took.programs, "programs that were compiled"),
        "start/graphs": figure(int(graphs.wanted), f"1: chunks are CUDA graphs; {said}"),
    }
