"""Whether bfloat16 tokens are those of plain decoding, with and without `invariant`.

Products of other shapes sum in another order, so that a verification in bfloat16 may choose other
tokens than plain decoding. With `invariant` both run one program with the same arithmetic.
"""

from __future__ import annotations

import functools
import time
from typing import NamedTuple

import numpy as np

from bench.gpu.job import Job
from bench.gpu.parts.engines import Model, engine_of, model_of
from bench.record import figure
from specjax import ControlConfig, SamplingParams, SpecConfig

NOT_AHEAD = "it runs engines, whose chunks other parts compile"


class Sizes(NamedTuple):
    shape: str = "1.7B"
    layers: int | None = 8
    strategy: str = "4_1_5"
    prompt: int = 128
    output: int = 128


SMALL = Sizes("tiny", 1, "2_1_3", 8, 8)


def measure(job: Job, batches: tuple[int, ...] = (1, 8)) -> None:
    """Measures `differ/<arm>/batch_<B>` and `seconds_over_plain/<arm>/batch_<B>`.

    Targets are for the arm `invariant` alone; `default` says how many samples differ without it.
    """
    sizes = SMALL if job.small else Sizes()
    job.tell(sizes=sizes._asdict())
    model = model_of(sizes.shape, sizes.layers, sizes.prompt + sizes.output, job.seed)
    job.each(
        (
            f"differ/{arm}/batch_{batch}",
            functools.partial(_figures, job, sizes, model, arm, batch),
        )
        for batch in ((2,) if job.small else batches)
        for arm in ("invariant", "default")
    )


def _figures(job: Job, sizes: Sizes, model: Model, arm: str, batch: int) -> dict:
    spec = SpecConfig(sizes.strategy, invariant=arm == "invariant")
    control = ControlConfig("static", strategies=("off", sizes.strategy), initial=sizes.strategy)
    llm = engine_of(model, spec, batch, sizes.prompt + sizes.output, control=control)
    llm.warm_up([SamplingParams(temperature=1.0, max_tokens=1)])
    rng = np.random.default_rng(job.seed)
    prompts = rng.integers(2, model[0].vocab_size, (batch, sizes.prompt)).tolist()
    tokens, seconds = {}, {}
    for speculative in (True, False):
        params = SamplingParams(
            temperature=1.0,
            max_tokens=sizes.output,
            ignore_eos=True,
            seed=job.seed,
            speculative=speculative,
        )
        began = time.perf_counter()
        outputs = llm.generate(prompts, params)
        seconds[speculative] = time.perf_counter() - began
        tokens[speculative] = [list(output.samples[0].token_ids) for output in outputs]
    differ = sum(a != b for a, b in zip(tokens[True], tokens[False], strict=True))
    at = f"{arm}/batch_{batch}"
    if differ and arm == "invariant":
        job.refute(f"{at}: tokens of {differ} of {batch} samples differ from plain decoding's")
    length = llm.totals.accept_length
    ratio = seconds[True] / seconds[False]
    return {
        f"differ/{at}": figure(differ, f"of {batch} samples of {sizes.output} tokens"),
        f"seconds/{at}/plain": figure(seconds[False], "s of a call without speculation"),
        f"seconds_over_plain/{at}": figure(ratio, "times a call without speculation"),
        f"accept_length/{at}": figure(length, "tokens per round of the last call"),
    }
