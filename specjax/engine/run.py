"""All jobs to their end, by whatever takes them one by one."""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Several

import numpy as np

from specjax.engine.request import Job, SampleOutput, Totals


def run_to_the_end(
    engine, jobs: Several[Job], on_progress: Callable[[int, Totals], None] | None = None
) -> tuple[list[SampleOutput], Totals]:
    """`Engine.generate`, for everything that has `add`, `step` and `clear` as an engine has."""
    if engine.has_work:
        raise RuntimeError(
            "samples that were added are not finished; step() until they are, or abort them, "
            "before generate()"
        )
    start = time.perf_counter()
    steps = engine.runner.steps
    totals = Totals(steps, np.zeros(steps + 2, np.int64))
    finished = 0
    try:
        index = {engine.add(job): i for i, job in enumerate(jobs)}
        outputs: list[SampleOutput | None] = [None] * len(jobs)
        while engine.has_work:
            for event in engine.step():
                outputs[index[event.ticket]] = event.sample
                totals.add(event.sample)
                finished += 1
            totals.seconds = time.perf_counter() - start
            if on_progress:
                on_progress(finished, totals)
    except BaseException:
        engine.clear()  # an interrupted call leaves nothing behind
        raise
    return outputs, totals
