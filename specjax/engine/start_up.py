"""Before the first request: everything is compiled, and what it costs is measured."""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
import time
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Several

import jax
import numpy as np

from specjax.config import SamplingParams
from specjax.control.costs import CostTable, of_rounds
from specjax.decode.chunk import Result, Until
from specjax.decode.options import Features
from specjax.decode.state import RowMap
from specjax.engine.compiling import CompilePool, CompileProgress, OnProgram
from specjax.engine.inputs import admission_of, piece_of, place_size, place_sizes
from specjax.engine.pages import pages_for
from specjax.engine.request import make_jobs
from specjax.engine.runner import Packed, Runner
from specjax.engine.scheduler import Start
from specjax.engine.sequence import Sequence

CONTEXT = 256  # tokens of a sequence while costs are measured, at most
REPEATS_BESIDE = 2  # of every strategy: too large an overhead would make rounds look cheap
IN_A_ROW = 3  # measurements of quick rounds
SAMPLE_SECONDS = 0.01  # of one measurement, about; where a round takes longer it is one round
SLOW_SECONDS = SAMPLE_SECONDS / 4  # of a round: the first one is a measurement, too
LONG_SECONDS = 4 * SAMPLE_SECONDS  # of a round: beside it the noise of the machine is small


@dataclasses.dataclass(frozen=True)
class StartUp:
    """Time and memory that starting took.

    Attributes:
      programs: that were compiled. seconds: for that, and for running each once.
      calibration_seconds: for measuring them.
      code_bytes, temporary_bytes: of all programs, and of the one with the largest temporaries; 0
        where the platform does not tell. cache_bytes: of all pages.
    """

    programs: int
    seconds: float
    calibration_seconds: float
    code_bytes: int
    temporary_bytes: int
    cache_bytes: int

    def __str__(self) -> str:
        sizes = {
            "code": self.code_bytes,
            "temporaries": self.temporary_bytes,
            "caches": self.cache_bytes,
        }
        told = ", ".join(f"{name} {_mib(size)}" for name, size in sizes.items() if size)
        text = f"compiled {self.programs} programs in {self.seconds:.1f} s ({told})"
        if self.calibration_seconds:
            text += f", measured them in {self.calibration_seconds:.1f} s"
        return text


def _mib(count: int) -> str:
    return f"{count / 2**20:.1f} MiB"


@dataclasses.dataclass(frozen=True)
class Programs:
    """The programs that an engine may need, for any features.

    Attributes:
      rows: by width of a piece of prompts, how many are read at once.
      strategies: by bucket, those that a chunk of that size may have.
    """

    runner: Runner
    rows: Mapping[int, Several[int]]
    strategies: Mapping[int, Several[str]]

    @property
    def chunks(self) -> list[tuple[str, int]]:
        """A strategy and a bucket for each program of chunks."""
        programs = {name: run.program for name, run in self.runner.strategies.items()}
        found = {
            (programs[strategy], bucket): (strategy, bucket)
            for strategy in self.runner.plans
            for bucket, strategies in self.strategies.items()
            if strategy in strategies
        }
        return list(found.values())

    def count(self, features: Several[Features]) -> int:
        """How many `start` starts."""
        reads = sum(map(len, self.rows.values()))
        return reads + len(place_sizes(self.runner.batch)) + len(self.chunks) * len(features)

    def start(self, features: Several[Features]) -> Iterator[Result | None]:
        """Starts every program: prefill by width, placement by size, chunks by strategy and bucket.

        Yields:
          what each brings for the host.
        """
        runner = self.runner
        for width, sizes in self.rows.items():
            for rows in sizes:
                yield runner.prefill(piece_of([], rows, width, runner))
        for count in place_sizes(runner.batch):
            yield runner.place(admission_of(_starts(runner, 1, 1), count, runner))
        # Smallest first: what a larger program covers already would not be compiled.
        features = sorted(features, key=lambda f: f.size)
        for strategy, bucket in self.chunks:
            for wanted in features:
                runner.place(admission_of(_starts(runner, 1, _context(runner)), 1, runner))
                yield _start_chunk(runner, strategy, wanted, bucket, rounds=1)


def compile_ahead(
    engines: Several[Programs], features: Several[Features], on_program: OnProgram | None = None
) -> StartUp:
    """Compiles every program of several engines, side by side.

    Programs of replicas are alike, and JAX has no way to load one on other devices than those that
    it was compiled for. (With a cache directory they are found there on GPUs.) Each runs once, over
    a prefix: the first run of a program takes many times as long as those that follow, and what it
    skips then is as slow when it comes.

    Args:
      on_program: hears at the beginning, of each program that is ready, and now and then between,
        how many are ready, and of how many; None: a warning is logged when it takes long.
    """
    started, tell = time.perf_counter(), on_program or CompileProgress()
    runners = [programs.runner for programs in engines]
    built = sum(runner.compilations for runner in runners)
    done, total = 0, sum(programs.count(features) for programs in engines)

    def ready(count: int) -> None:
        nonlocal done
        done += count
        tell(done, total)

    ready(0)
    for runner in runners:
        runner.reset()
    side_by_side = [each for each in engines if each.runner.executables.threads > 1]
    if side_by_side:
        threads = min(each.runner.executables.threads for each in side_by_side)
        with contextlib.ExitStack() as stack, CompilePool(threads, ready) as pool:
            for programs in side_by_side:
                stack.enter_context(programs.runner.executables.ahead(pool))
                submitted = pool.submitted
                for _ in programs.start(features):
                    if pool.submitted == submitted:  # it was compiled before
                        ready(1)
                    submitted = pool.submitted
                    pool.collect()
            pool.finish()
    for programs in engines:
        with programs.runner.executables.ahead(None):
            for result in programs.start(features):
                jax.block_until_ready(result)
                if programs not in side_by_side:
                    ready(1)
        jax.block_until_ready(programs.runner.state)
    memory = [runner.executables.memory() for runner in runners]
    return StartUp(
        programs=sum(runner.compilations for runner in runners) - built,
        seconds=time.perf_counter() - started,
        calibration_seconds=0.0,
        code_bytes=sum(sizes["code"] for sizes in memory),
        temporary_bytes=sum(sizes["temporaries"] for sizes in memory),
        cache_bytes=sum(runner.pages * runner.page_bytes for runner in runners),
    )


def calibrate(programs: Programs, features: Features) -> tuple[CostTable, float]:
    """Seconds per round of every strategy at every bucket, measured in turns.

    What a chunk takes beside its rounds is measured with none. The first turn tells how many rounds
    a measurement needs; that is all that it counts for, unless they take long. Quick rounds are
    measured most often: what runs after a pause is slow for some milliseconds. The least counts.
    It is meant to be short: what it gets wrong is put right while the controller observes.

    Returns:
      the table, and the seconds that measuring took.
    """
    runner, started = programs.runner, time.perf_counter()
    samples: dict[tuple[str, int], list[float]] = {}
    beside: dict[int, float] = {}

    def measured(strategy: str, rounds: int, times: int = 1) -> Iterator[tuple[float, int]]:
        """Seconds of chunks one after the other, and how many rounds each had."""
        starts = _starts(runner, bucket, _context(runner))
        runner.place(admission_of(starts, place_size(runner.batch, bucket), runner))
        jax.block_until_ready(runner.state)
        for _ in range(times):
            begin = time.perf_counter()
            count = _chunk(runner, strategy, features, bucket, rounds)
            yield runner.agreement.agree(time.perf_counter() - begin), count

    for bucket, names in programs.strategies.items():
        beside[bucket] = statistics.median(
            min(next(measured(name, 0))[0] for _ in range(REPEATS_BESIDE)) for name in names
        )
        firsts = {}
        for name in names:
            seconds, _ = next(measured(name, 1))
            firsts[name] = first = of_rounds(seconds, beside[bucket])
            samples[name, bucket] = [first] if first >= SLOW_SECONDS else []
        for name, first in firsts.items():
            rounds = enough_rounds(first, _most_rounds(runner, name, bucket))
            for seconds, count in measured(name, rounds, further_measurements(first)):
                if count:  # else its sequences have no room for more
                    samples[name, bucket].append(of_rounds(seconds, beside[bucket]) / count)
    return CostTable.from_samples(samples, beside), time.perf_counter() - started


def _context(runner: Runner) -> int:
    """Tokens of a sequence while programs are tried and measured."""
    return min(CONTEXT, runner.max_len // 2)


def further_measurements(seconds: float) -> int:
    """How many of a strategy are made after its first round, given the seconds of that."""
    return IN_A_ROW if seconds < SLOW_SECONDS else 1 if seconds <= LONG_SECONDS else 0


def calibration_rounds(seconds: float, most: int) -> int:
    """Rounds in which `calibrate` measures a strategy in all, given the seconds of one."""
    return 1 + further_measurements(seconds) * enough_rounds(seconds, most)


def enough_rounds(seconds: float, most: int) -> int:
    """Rounds of one measurement, given the seconds of one and how many a chunk can have."""
    return min(max(round(SAMPLE_SECONDS / seconds), 1), most)


def _most_rounds(runner: Runner, strategy: str, bucket: int) -> int:
    """Rounds of a chunk of which a sequence has room for `IN_A_ROW`, if it has for one each."""
    room = (runner.max_len - _context(runner)) // (runner.plans[strategy].steps + 1)
    return max(min(runner.rounds(strategy, bucket), room // IN_A_ROW), 1)


def _starts(runner: Runner, count: int, length: int) -> list[Start]:
    """Made-up sequences for the first `count` slots, which will not end soon."""
    prompt = (np.arange(max(length, 1)) % runner.cfg.vocab_size).tolist()
    params = SamplingParams(temperature=1.0, max_tokens=None, n=count, ignore_eos=True)
    starts = []
    for slot, job in enumerate(make_jobs(prompt, params, ())):
        job = dataclasses.replace(job, limit=runner.max_len)
        sequence = Sequence(job, runner.steps)
        sequence.slot = slot
        starts.append(Start(sequence, 0))
    return starts


def _chunk(runner: Runner, strategy, features, bucket, rounds: int) -> int:
    """Runs a chunk and returns how many rounds it had."""
    result = _start_chunk(runner, strategy, features, bucket, rounds)
    return int(result.open().rounds)


def _start_chunk(runner: Runner, strategy, features, bucket, rounds: int) -> Packed[Result]:
    """Starts a chunk of the first slots, each in pages of its own as long as there are enough."""
    emitted = IN_A_ROW * runner.most_tokens(bucket)
    needed = min(_context(runner) + emitted, runner.max_len)
    each = pages_for(needed, runner.page_size)
    table = np.zeros((bucket, runner.table_width), np.int32)
    table[:, :each] = (1 + np.arange(bucket * each) % (runner.pages - 1)).reshape(bucket, each)
    rows = RowMap(np.arange(bucket, dtype=np.int32), np.ones(bucket, bool), table)
    return runner.chunk(strategy, features, runner.alone(rows), Until.of(rounds))
