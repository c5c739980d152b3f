"""Before the first request: everything is compiled, and what it costs is measured."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence as Several
from typing import TYPE_CHECKING

import jax
import numpy as np

from specjax.config import SamplingParams
from specjax.control.costs import CostTable
from specjax.decode.options import Features
from specjax.engine.inputs import admission_of, piece_of, place_sizes
from specjax.engine.request import make_jobs
from specjax.engine.scheduler import Start
from specjax.engine.sequence import Sequence

if TYPE_CHECKING:
    from specjax.engine.engine import Engine

CONTEXT = 256  # tokens of a sequence while costs are measured, at most
REPEATS = 2
FEW = 4  # prompts: a program of their own, as slots become free a few at a time
SAMPLE_SECONDS = 0.01  # of one measurement, about; where a round takes longer it is one round


@dataclasses.dataclass(frozen=True)
class StartUp:
    """What starting took.

    Attributes:
      programs: that were compiled. seconds: for that. calibration_seconds: for measuring them.
      code_bytes, temporary_bytes: of all programs, and of the one with the largest temporaries; 0
        where the platform does not tell. cache_bytes: of all pages.
    """

    programs: int
    seconds: float
    calibration_seconds: float
    code_bytes: int
    temporary_bytes: int
    cache_bytes: int

    @classmethod
    def sum(cls, several: Several[StartUp]) -> StartUp:
        """What several engines took, one after the other."""
        rows = map(dataclasses.astuple, several)
        return cls(*map(sum, zip(*rows, strict=True)))

    def __str__(self) -> str:
        text = (
            f"compiled {self.programs} programs in {self.seconds:.1f} s "
            f"(code {_mib(self.code_bytes)}, temporaries {_mib(self.temporary_bytes)}, caches "
            f"{_mib(self.cache_bytes)})"
        )
        if self.calibration_seconds:
            text += f", measured them in {self.calibration_seconds:.1f} s"
        return text


def _mib(count: int) -> str:
    return f"{count / 2**20:.1f} MiB"


def compile_ahead(engine: Engine, features: Several[Features]) -> StartUp:
    """Builds every program: prefill by width, placement by size, chunks by strategy and bucket.

    Each runs once, over a prefix: the first run of a program takes many times as long as those that
    follow, and what it skips then is as slow when it comes.
    """
    runner, started = engine.runner, time.perf_counter()
    built = runner.compilations
    runner.reset()
    for width in engine.piece_widths:
        most = engine.piece_rows(width)
        for rows in [most] if runner.plan.invariant else sorted({1, min(FEW, most), most}):
            runner.prefill(piece_of([], rows, width, runner))
    for count in place_sizes(engine.batch):
        runner.place(admission_of(_starts(engine, 1, 1), count, runner))
    buckets = [engine.batch] if runner.plan.invariant else engine.buckets
    for strategy in runner.plans:
        for bucket in buckets:
            # Smallest first: what a larger program covers already would not be compiled.
            for wanted in sorted(features, key=lambda f: f.size):
                runner.place(admission_of(_starts(engine, 1, _context(engine)), 1, runner))
                _chunk(engine, strategy, wanted, bucket, rounds=1)
    jax.block_until_ready(runner.state)
    memory = runner.memory()
    return StartUp(
        programs=runner.compilations - built,
        seconds=time.perf_counter() - started,
        calibration_seconds=0.0,
        code_bytes=memory["code"],
        temporary_bytes=memory["temporaries"],
        cache_bytes=runner.pages * runner.page_bytes,
    )


def calibrate(engine: Engine, features: Features) -> tuple[CostTable, float]:
    """Seconds per round of every strategy at every bucket, measured in turns.

    What a chunk costs beside its rounds is measured with none, and charged as a full chunk has it:
    else what is measured in few rounds would look dear. It is meant to be short: what it gets wrong
    is put right while the controller observes.

    Returns:
      the table, and the seconds that measuring took.
    """
    runner, started = engine.runner, time.perf_counter()
    samples: dict[tuple[str, int], list[float]] = {}

    def measured(strategy: str, rounds: int) -> float:
        starts = _starts(engine, bucket, _context(engine))
        runner.place(admission_of(starts, _size(engine, bucket), runner))
        jax.block_until_ready(runner.state)
        begin = time.perf_counter()
        _chunk(engine, strategy, features, bucket, rounds)
        return time.perf_counter() - begin

    for bucket in engine.buckets:
        rounds = dict.fromkeys(runner.plans, 1)
        beside = {strategy: measured(strategy, 0) for strategy in runner.plans}
        for turn in range(REPEATS + 1):
            for strategy in runner.plans:
                mine = samples.setdefault((strategy, bucket), [])
                if len(mine) == REPEATS:
                    continue
                count, most = rounds[strategy], runner.rounds(strategy)
                seconds = measured(strategy, count)
                each = max(seconds - beside[strategy], 0.1 * seconds) / count
                rounds[strategy] = enough_rounds(each, most)
                if count >= rounds[strategy] // 2 or turn == REPEATS:
                    mine.append(each + beside[strategy] / most)
    return CostTable.from_samples(samples), time.perf_counter() - started


def _context(engine: Engine) -> int:
    """Tokens of a sequence while programs are tried and measured."""
    return min(CONTEXT, engine.max_len // 2)


def enough_rounds(seconds: float, most: int) -> int:
    """Rounds of one measurement, given the seconds of one and how many a chunk can have."""
    return min(max(round(SAMPLE_SECONDS / seconds), 1), most)


def _size(engine: Engine, count: int) -> int:
    return next(n for n in place_sizes(engine.batch) if n >= count)


def _starts(engine: Engine, count: int, length: int) -> list[Start]:
    """Made-up sequences for the first `count` slots, which will not end soon."""
    prompt = (np.arange(max(length, 1)) % engine.runner.cfg.vocab_size).tolist()
    params = SamplingParams(temperature=1.0, max_tokens=None, n=count, ignore_eos=True)
    starts = []
    for slot, job in enumerate(make_jobs(prompt, params, ())):
        job = dataclasses.replace(job, limit=engine.max_len)
        sequence = Sequence(0, job, engine.runner.steps)
        sequence.slot = slot
        starts.append(Start(sequence, 0))
    return starts


def _chunk(engine: Engine, strategy, features, bucket, rounds: int) -> int:
    """Runs a chunk of the first slots, all of whose positions lie in nobody's page.

    Returns:
      how many rounds it had.
    """
    runner = engine.runner
    table = np.zeros((bucket, runner.table_width), np.int32)
    active = np.ones(bucket, bool)
    slots = np.arange(bucket, dtype=np.int32)
    result = runner.chunk(strategy, features, slots, active, table, rounds)
    return int(jax.block_until_ready(result).rounds)
