"""Whether bfloat16 samples are those of plain decoding, with and without `invariant`, and its cost.

Products of other shapes sum in another order, so that a verification in bfloat16 may choose other
tokens than plain decoding. With `invariant` all strategies run one program, unless the engine finds
at its start that a program of plain decoding's own gives equal bits (`engine.plain_check`).

Plain rounds are timed in turns: as that engine runs them, by the program that all strategies share,
and by an engine without `invariant`.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from bench.gpu.job import Job
from bench.gpu.parts.engines import Model, engine_of, model_of
from bench.record import alternate, figure, median_interval, paired_ratio_interval
from specjax import LLM, ControlConfig, SamplingParams, SpecConfig
from specjax.engine import plain_check

NOT_AHEAD = "it runs engines, whose chunks other parts compile"
ARMS = ("invariant", "default")


class Sizes(NamedTuple):
    shape: str = "1.7B"
    layers: int | None = 12
    strategy: str = "4_1_5"
    prompt: int = 128
    output: int = 128
    repeats: int = 5

    @property
    def longest(self) -> int:
        return self.prompt + self.output


SMALL = Sizes("tiny", 1, "2_1_3", 8, 8, 2)


def measure(job: Job, batches: tuple[int, ...] = (1, 8, 32), shape: str = "1.7B") -> None:
    """Measures which samples differ, whether the engine gave plain decoding a program, and times.

    Targets are for `differ/invariant/batch_<B>` and `logprobs_differ/invariant/batch_<B>` alone;
    `default` says how many samples differ without the mode.
    """
    sizes = SMALL if job.small else Sizes(shape)
    job.tell(sizes=sizes._asdict())
    model = model_of(sizes.shape, sizes.layers, sizes.longest, job.seed)
    job.each(
        (
            (
                *(f"{what}/{arm}/batch_{batch}" for arm in ARMS for what in _DIFFER),
                *(f"{what}/batch_{batch}" for what in _COSTS),
            ),
            functools.partial(_figures, job, sizes, model, batch),
        )
        for batch in ((2,) if job.small else batches)
    )


_DIFFER = ("differ", "logprobs_differ")
_COSTS = ("own_program", "ms_plain/invariant", "invariant_over_default", "invariant_over_shared")


class Engine:
    """An engine that runs the same prompts plainly and by a strategy.

    Attributes:
      said: what the engine logged about a program of plain decoding's own, "" without a line.
    """

    def __init__(self, job: Job, sizes: Sizes, model: Model, arm: str, batch: int):
        self.sizes, self.seed = sizes, job.seed
        spec = SpecConfig(sizes.strategy, invariant=arm == "invariant")
        # Compiles both, which `static` does not. Each request names its strategy.
        control = ControlConfig("bandit", strategies=("off", sizes.strategy))
        self.llm: LLM = engine_of(model, spec, batch, sizes.longest, control=control)
        rng = np.random.default_rng(job.seed)
        self.prompts = rng.integers(2, model[0].vocab_size, (batch, sizes.prompt)).tolist()
        with _logged(plain_check.log) as lines:
            self.llm.warm_up([self.params("off", 1)])
        self.said = "; ".join(lines)

    @property
    def runner(self):
        return self.llm.engine.runner

    def params(self, strategy: str, tokens: int) -> SamplingParams:
        return SamplingParams(
            temperature=1.0,
            max_tokens=tokens,
            ignore_eos=True,
            seed=self.seed,
            strategy=strategy,
        )

    def run(self, strategy: str, tokens: int) -> list:
        """Generates `tokens` tokens after each prompt; returns the samples."""
        outputs = self.llm.generate(self.prompts, self.params(strategy, tokens))
        return [output.samples[0] for output in outputs]

    def plainly(self, tokens: int) -> None:
        self.run("off", tokens)

    def shared(self, tokens: int) -> None:
        """Generates plainly by the program that all strategies of the engine share."""
        own = set(self.runner.exact_plain)
        self.runner.exact_plain.clear()
        try:
            self.run("off", tokens)
        finally:
            self.runner.exact_plain |= own


def _figures(job: Job, sizes: Sizes, model: Model, batch: int) -> dict:
    engines = {arm: Engine(job, sizes, model, arm, batch) for arm in ARMS}
    found, at = {}, f"batch_{batch}"
    for arm, engine in engines.items():
        found |= _differing(job, engine, f"{arm}/{at}")
    runner, said = engines["invariant"].runner, engines["invariant"].said
    said = said or "this engine has one program for all strategies"
    found[f"own_program/{at}"] = figure(int(bool(runner.exact_plain)), f"1: it runs; {said}")
    block = runner.cfg.run.row_block
    found[f"row_block/{at}"] = figure(block or 0, "rows that are multiplied at once; 0: all")
    return found | _costs(engines["invariant"], engines["default"], at)


def _differing(job: Job, engine: Engine, at: str) -> dict:
    """Figures of samples that differ from plain decoding's, in tokens and in log-probabilities."""
    sizes = engine.sizes
    drafted, plain = engine.run(sizes.strategy, sizes.output), engine.run("off", sizes.output)
    pairs = list(zip(drafted, plain, strict=True))
    counts = {
        "differ": sum(list(a.token_ids) != list(b.token_ids) for a, b in pairs),
        "logprobs_differ": sum(list(a.logprobs) != list(b.logprobs) for a, b in pairs),
    }
    if at.startswith("invariant/") and any(counts.values()):
        differ, logprobs = counts.values()
        job.refute(
            f"{at}: of {len(pairs)} samples {differ} differ from plain decoding's in tokens, "
            f"{logprobs} in bits of log-probabilities"
        )
    unit = f"of {len(pairs)} samples of {sizes.output} tokens"
    return {f"{what}/{at}": figure(count, unit) for what, count in counts.items()}


def _costs(invariant: Engine, default: Engine, at: str) -> dict:
    """Milliseconds of a plain round: calls of many tokens less calls of one."""
    runs: dict[str, Callable[[int], None]] = {
        "invariant": invariant.plainly,
        "shared": invariant.shared,
        "default": default.plainly,
    }
    sizes = invariant.sizes
    jobs = {
        (name, tokens): functools.partial(run, tokens)
        for name, run in runs.items()
        for tokens in (sizes.output, 1)
    }
    for run in jobs.values():
        run()
    seconds = alternate(jobs, sizes.repeats)
    rounds = sizes.output - 1
    ms = {
        name: [
            1e3 * (whole - first) / rounds
            for whole, first in zip(seconds[name, sizes.output], seconds[name, 1], strict=True)
        ]
        for name in runs
    }
    units = {
        "invariant": "ms of a plain round, as the engine runs it",
        "shared": "ms of a plain round by the program that all strategies share",
        "default": "ms of a plain round without `invariant`",
    }
    # The clock may not tell the calls of a tiny model on a CPU.
    short, found = figure(None, "left out: too short for the clock"), {}
    told = {name: values for name, values in ms.items() if min(values) > 0}
    for name in ms:
        entry = short
        if name in told:
            value, *ends = median_interval(told[name])
            entry = figure(value, units[name], ends)
        found[f"ms_plain/{name}/{at}"] = entry
    for other in ("default", "shared"):
        entry = short
        if told.keys() >= {"invariant", other}:
            ratio, *ends = paired_ratio_interval(told["invariant"], told[other])
            entry = figure(ratio, "times, median over turns", ends)
        found[f"invariant_over_{other}/{at}"] = entry
    return found


@contextlib.contextmanager
def _logged(log: logging.Logger) -> Iterator[list[str]]:
    """Yields the lines that a logger has written since."""
    lines: list[str] = []
    handler, level = logging.Handler(logging.INFO), log.level
    handler.emit = lambda record: lines.append(record.getMessage())
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield lines
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
