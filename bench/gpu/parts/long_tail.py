"""The long tail of a rollout: a full batch at first, a few long samples at its end.

Samples have lengths from a distribution with a long tail, and acceptance is scripted, see
`rounds.py`. Plain decoding, one strategy throughout, and the controller `goodput`, which changes
the strategy as the batch empties, take turns. Calibration is timed apart.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from bench.gpu.job import Job
from bench.gpu.parts.engines import Model, engine_of, model_of
from bench.gpu.parts.rounds import Scripted
from bench.record import alternate, figure, median_interval, paired_ratio_interval
from specjax import LLM, ControlConfig, SamplingParams, SpecConfig

NOT_AHEAD = "it runs engines, whose chunks other parts compile"
ARMS = ("off", "static", "goodput")


class Sizes(NamedTuple):
    """Sizes of the rollout.

    Attributes:
      median, longest: tokens of the median and of the longest sample.
      strategies: strategies of the controller; the last one runs throughout in `static`.
    """

    shape: str = "1.7B"
    layers: int | None = None
    batch: int = 64
    prompt: int = 64
    median: int = 96
    longest: int = 1536
    acceptance: float = 0.7
    strategies: tuple[str, ...] = ("off", "2_1_3", "4_1_5")
    repeats: int = 3


SMALL = Sizes("tiny", 1, 2, 8, 6, 12, 0.7, ("off", "1_1_2"), 2)


def lengths_of(sizes: Sizes, seed: int) -> list[int]:
    """Returns the tokens of each sample: log-normal, the longest one as long as allowed."""
    drawn = np.random.default_rng(seed).lognormal(np.log(sizes.median), 0.8, sizes.batch)
    drawn[0] = sizes.longest
    return np.clip(drawn.astype(int), 2, sizes.longest).tolist()


def measure(job: Job) -> None:
    """Measures `seconds/<arm>`, `calibration`, and `off_over/<arm>`: how many times as fast."""
    sizes = SMALL if job.small else Sizes()
    lengths = lengths_of(sizes, job.seed)
    job.tell(sizes=sizes._asdict(), lengths=lengths)
    room = sizes.prompt + sizes.longest
    model = model_of(sizes.shape, sizes.layers, room, job.seed)
    names = [f"off_over/{arm}" for arm in ARMS[1:]]
    job.each([(names, functools.partial(_figures, job, sizes, lengths, room, model))])


def _engines(sizes: Sizes, room: int, model: Model) -> dict[str, LLM]:
    rule, static = Scripted(sizes.acceptance), sizes.strategies[-1]
    control = ControlConfig(strategies=sizes.strategies)
    make = functools.partial(engine_of, model, batch=sizes.batch, max_len=room)
    return {
        "off": make(None),
        "static": make(SpecConfig(static), rule=rule),
        "goodput": make(SpecConfig(sizes.strategies[-1]), rule=rule, control=control),
    }


def _figures(job: Job, sizes: Sizes, lengths: Sequence[int], room: int, model: Model) -> dict:
    rng = np.random.default_rng(job.seed)
    prompts = rng.integers(2, model[0].vocab_size, (sizes.batch, sizes.prompt)).tolist()
    params = [
        SamplingParams(temperature=1.0, max_tokens=length, ignore_eos=True, seed=job.seed)
        for length in lengths
    ]
    engines, result = _engines(sizes, room, model), {}
    for arm, llm in engines.items():
        started = llm.warm_up(params[:1])
        unit = "s to trace, compile and run all programs"
        result[f"start/{arm}"] = figure(started.seconds, unit)
        if started.calibration_seconds:
            seconds = started.calibration_seconds
            result[f"calibration/{arm}"] = figure(seconds, "s to measure the strategies")
    runs = {arm: functools.partial(llm.generate, prompts, params) for arm, llm in engines.items()}
    seconds = alternate(runs, sizes.repeats)
    for arm, values in seconds.items():
        value, *ends = median_interval(values)
        result[f"seconds/{arm}"] = figure(value, f"s for {sum(lengths)} tokens", ends)
        if arm != "off":
            ratio, *ends = paired_ratio_interval(seconds["off"], values)
            result[f"off_over/{arm}"] = figure(ratio, "times as fast as plain decoding", ends)
            length = engines[arm].totals.accept_length
            result[f"accept_length/{arm}"] = figure(length, "tokens per round")
    return result
