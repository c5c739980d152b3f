"""Compiles all programs before the first request, and measures what a round costs."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Several

import jax
import numpy as np

from specjax.config import SamplingParams
from specjax.control import OFF
from specjax.control.costs import CostTable, of_rounds
from specjax.decode.admit import Admission
from specjax.decode.chunk import Result, Until
from specjax.decode.options import Features
from specjax.decode.state import RowMap
from specjax.engine.compiling import (
    CompilePool,
    CompileProgress,
    OnProgram,
    described,
    first_line,
)
from specjax.engine.graph_check import check_graphs
from specjax.engine.inputs import admission_of, piece_of, place_size, place_sizes
from specjax.engine.pages import pages_for
from specjax.engine.plain_check import check_plain, served_by
from specjax.engine.plans import StrategyProgram
from specjax.engine.request import make_jobs
from specjax.engine.runner import Packed, Runner
from specjax.engine.scheduler import Start
from specjax.engine.sequence import Sequence

OnReady = Callable[[int], None]  # called with the number of programs that became ready

CONTEXT = 256  # the most tokens of a sequence while programs are run and most costs are measured
LONG_CONTEXT = 16384  # the most tokens of a sequence while the growth of costs is measured
# The long context is at least so many times the short one, or costs would hardly differ.
LEAST_GROWTH = 2
# The growth of costs is measured as long as that took less than this share of the seconds that were
# measured before.
LONG_SHARE = 0.5
# Measurements of a chunk without rounds, per strategy. If this were too large a time, rounds would
# seem cheap.
REPEATS_BESIDE = 2
IN_A_ROW = 3  # number of measurements of fast rounds
SAMPLE_SECONDS = 0.01  # approximate duration of a measurement, which has one round at least
SLOW_SECONDS = SAMPLE_SECONDS / 4  # a round that takes longer is measured by the first one, too
LONG_SECONDS = 4 * SAMPLE_SECONDS  # a round that takes longer is measured by the first one alone


@dataclasses.dataclass(frozen=True)
class StartUp:
    """Time and memory that starting took.

    Attributes:
      programs: number of programs that were compiled.
      seconds: time to compile them and to run each once.
      calibration_seconds: time to measure them.
      code_bytes: size of the code of all programs; 0 where the platform does not say.
      temporary_bytes: size of the temporaries of the program with the largest ones, likewise.
      cache_bytes: size of all pages.
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
        told = ", ".join(f"{name} {size / 2**20:.1f} MiB" for name, size in sizes.items() if size)
        text = f"compiled {self.programs} programs in {self.seconds:.1f} s ({told})"
        if self.calibration_seconds:
            text += f", measured them in {self.calibration_seconds:.1f} s"
        return text


@dataclasses.dataclass(frozen=True)
class Programs:
    """The programs that an engine may need, for any features.

    Attributes:
      runner: runner of the engine.
      rows: numbers of prompts that are read at once, by width of their pieces.
      strategies: strategies that chunks may run, by bucket.
    """

    runner: Runner
    rows: Mapping[int, Several[int]]
    strategies: Mapping[int, Several[str]]

    @property
    def chunks(self) -> list[tuple[str, int]]:
        """A strategy and a bucket for each program that runs chunks.

        The smallest buckets come first, and of a bucket the strategies with the most steps.
        """
        longest_first = sorted(self.runner.plans, key=lambda name: -self.runner.plans[name].steps)
        programs = {name: run.program for name, run in self.runner.strategies.items()}
        found: dict[tuple[str, int], tuple[str, int]] = {}
        for bucket, strategies in self.strategies.items():
            for strategy in longest_first:
                if strategy in strategies:
                    found.setdefault((programs[strategy], bucket), (strategy, bucket))
        return list(found.values())

    def count(self, features: Several[Features]) -> int:
        """The number of programs that `start` and `start_plain` enqueue."""
        reads = sum(map(len, self.rows.values()))
        chunks = len(self.chunks) + (self.runner.own_plain is not None)
        return reads + len(place_sizes(self.runner.batch)) + chunks * len(features)

    def start(self, features: Several[Features]) -> Iterator[Result | None]:
        """Enqueues every program: place by size, chunks by strategy and bucket, prefill by width.

        Those that take longest to compile come early, so that the last ones are soon ready.

        Yields:
          the result of each program for the host; None: it has none.
        """
        runner = self.runner
        for count in place_sizes(runner.batch):
            yield runner.place(admission_of(_starts(runner, 1, 1), count, runner))
        # The smallest set comes first, for it would not be compiled after one that covers it.
        features = sorted(features, key=lambda f: f.size)
        for strategy, bucket in self.chunks:
            for wanted in features:
                runner.place(admission_of(_starts(runner, 1, _context(runner)), 1, runner))
                yield _start_chunk(runner, strategy, wanted, bucket, rounds=1)
        for width, sizes in self.rows.items():
            for rows in sizes:
                yield runner.prefill(piece_of([], rows, width, runner))

    def start_plain(self, features: Several[Features]) -> Iterator[None]:
        """Enqueues `Runner.own_plain` where it is not compiled; `check_plain` runs and compares it.

        It is called after `start`.
        """
        runner, own = self.runner, self.runner.own_plain
        if own is None:
            return
        for wanted in features:
            served = served_by(runner, wanted)
            if ("chunk", own.program, runner.batch, served) not in runner.executables.by_key:
                _start_chunk(runner, OFF, served, runner.batch, rounds=1, run=own)
                yield


def compile_ahead(
    engines: Several[Programs], features: Several[Features], on_program: OnProgram | None = None
) -> StartUp:
    """Compiles every program of several engines concurrently, and runs each once.

    Replicas have equal programs, but JAX cannot load a program on other devices than those that it
    was compiled for. (On GPUs a cache directory has it.) Each program runs once, with a prefix in
    the caches: the first run takes many times as long as later ones, and code that it skipped would
    be as slow later.

    Args:
      engines: programs of each engine.
      features: sets of features, each of which gets programs for chunks.
      on_program: function called at the beginning, after each program and every few seconds with
        the number of programs that are ready and of all; None: a warning is logged if it takes
        long.
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
        runner.executables.begin_check()
    side_by_side = [each for each in engines if each.runner.executables.threads > 1]
    _compile(side_by_side, features, ready)
    for programs in engines:
        _run_each_once(programs, features, None if programs in side_by_side else ready)
    # Where a graph is wrong, all engines compile their chunks again.
    again = [each for each in engines if each.runner.executables.end_check()]
    _compile([each for each in again if each in side_by_side], features)
    for programs in again:
        _run_each_once(programs, features)
    for runner in runners:
        check_plain(runner, features)
    if done < total:  # programs that were compiled again are not counted again
        ready(total - done)
    memory = [runner.executables.memory() for runner in runners]
    return StartUp(
        programs=sum(runner.compilations for runner in runners) - built,
        seconds=time.perf_counter() - started,
        calibration_seconds=0.0,
        code_bytes=sum(sizes["code"] for sizes in memory),
        temporary_bytes=sum(sizes["temporaries"] for sizes in memory),
        cache_bytes=sum(runner.pages * runner.page_bytes for runner in runners),
    )


def _compile(
    engines: Several[Programs], features: Several[Features], ready: OnReady | None = None
) -> None:
    """Compiles the programs of engines side by side that are not compiled yet.

    Args:
      ready: function called with the number of programs that became ready.
    """
    if not engines:
        return
    ready = ready or (lambda count: None)
    threads = min(each.runner.executables.threads for each in engines)
    with contextlib.ExitStack() as stack, CompilePool(threads, ready) as pool:
        for programs in engines:
            stack.enter_context(programs.runner.executables.ahead(pool))
            submitted = pool.submitted
            for _ in programs.start(features):
                if pool.submitted == submitted:  # it was compiled before
                    ready(1)
                submitted = pool.submitted
                pool.collect()
            for _ in programs.start_plain(features):
                pool.collect()
        pool.finish()


def _run_each_once(
    programs: Programs, features: Several[Features], ready: OnReady | None = None
) -> None:
    """Runs every program once; compiles those that are not compiled yet.

    If a program that is a CUDA graph fails, graphs are turned off, and the programs that were not
    run yet are left.
    """
    runner, executables = programs.runner, programs.runner.executables
    try:
        with executables.ahead(None):
            for result in programs.start(features):
                # Errors show here, while `latest` is the program that failed.
                jax.block_until_ready((result, runner.state, runner.kept))
                if ready is not None:
                    ready(1)
    except jax.errors.JaxRuntimeError as error:
        failed = runner.latest
        if not executables.is_graph(failed):
            raise
        executables.graphs.stop(f"{described(failed)} fails at the start: {first_line(error)}")
        runner.reset()
        return
    if executables.plain_forms:
        check_graphs(runner)
        runner.reset()


def calibrate(programs: Programs, features: Features) -> tuple[CostTable, float]:
    """Measures the seconds per round of every strategy at every bucket.

    A chunk without rounds gives the time that a chunk takes beside its rounds. The first round of a
    strategy gives the number of rounds of its measurements; it is a measurement itself only if it
    took long. Fast rounds are measured several times, because programs are slow for some
    milliseconds after a pause; the least time counts. Measuring is short: the controller corrects
    errors by what it observes later.

    How costs grow with the context is measured in the same way, with sequences that are said to be
    long: a kernel reads their pages, whatever these hold. It is measured for the largest and the
    smallest bucket of each strategy, between which seconds per token of context hardly differ, and
    until that has taken `LONG_SHARE` of the seconds of the rest. Engines whose sequences are short,
    or have few pages, do without.

    Returns:
      the table, and the seconds that measuring took.
    """
    runner, started = programs.runner, time.perf_counter()
    room = _room(runner, max(programs.strategies))
    short, long = calibration_contexts(runner.max_len, room)
    samples: dict[tuple[str, int], list[float]] = {}
    longer: dict[tuple[str, int], list[float]] = {}
    beside: dict[int, float] = {}
    spent = 0.0  # measured seconds

    @functools.cache
    def admission(bucket: int, length: int) -> Admission:
        starts = _starts(runner, bucket, length)
        return admission_of(starts, place_size(runner.batch, bucket), runner)

    def measured(
        name: str, bucket: int, length: int, rounds: int, times: int = 1
    ) -> Iterator[tuple[float, int]]:
        """The seconds and the number of rounds of each of `times` chunks."""
        nonlocal spent
        runner.place(admission(bucket, length))
        jax.block_until_ready(runner.state)
        for _ in range(times):
            begin = time.perf_counter()
            result = _start_chunk(runner, name, features, bucket, rounds, length)
            count = int(result.open().rounds)
            seconds = runner.agreement.agree(time.perf_counter() - begin)
            spent += seconds
            yield seconds, count

    def first_round(name: str, bucket: int, length: int) -> tuple[float, list[float]]:
        """The seconds of the first round, and a list with it if it is a measurement."""
        seconds, _ = next(measured(name, bucket, length, 1))
        first = of_rounds(seconds, beside[bucket])
        return first, [first] if first >= SLOW_SECONDS else []

    def further(name: str, bucket: int, length: int, first: float) -> list[float]:
        """The seconds per round of further measurements."""
        rounds = enough_rounds(first, _most_rounds(runner, name, bucket, length, features))
        found = measured(name, bucket, length, rounds, further_measurements(first))
        # Without a round, its sequences have no room for further tokens.
        return [of_rounds(seconds, beside[bucket]) / count for seconds, count in found if count]

    for bucket, names in programs.strategies.items():
        beside[bucket] = statistics.median(
            min(next(measured(name, bucket, short, 0))[0] for _ in range(REPEATS_BESIDE))
            for name in names
        )
        firsts = {}
        for name in names:
            firsts[name], samples[name, bucket] = first_round(name, bucket, short)
        for name, first in firsts.items():
            samples[name, bucket] += further(name, bucket, short, first)
    if long is None:
        return CostTable.from_samples(samples, beside), time.perf_counter() - started
    limit = (1 + LONG_SHARE) * spent
    for name, bucket in lengthened(programs.runner.plans, programs.strategies):
        if spent >= limit:  # the clock of all hosts, so that they agree
            break
        first, found = first_round(name, bucket, long)
        found += further(name, bucket, long, first)
        if found and samples[name, bucket]:
            longer[name, bucket] = found
    table = CostTable.from_samples(samples, beside, (short, long), longer)
    return table, time.perf_counter() - started


def _context(runner: Runner) -> int:
    """The number of tokens of a sequence while programs are run and measured."""
    return calibration_contexts(runner.max_len)[0]


def calibration_contexts(max_len: int, room: int | None = None) -> tuple[int, int | None]:
    """The numbers of tokens of a sequence at which costs, and their growth, are measured.

    Args:
      max_len: the most tokens of a sequence.
      room: tokens for which each row of the largest batch has pages of its own, since rows that
        share pages would be faster; None: all.

    Returns:
      (short, long); long is None where the growth is not measured.
    """
    short = min(CONTEXT, max_len // 2)
    long = min(LONG_CONTEXT, 3 * max_len // 4)  # which leaves room for some rounds
    long = long if room is None else min(long, room)
    return short, long if long >= LEAST_GROWTH * short else None


def _room(runner: Runner, bucket: int) -> int:
    """The most tokens of a sequence such that each row of a chunk has pages of its own."""
    own = (runner.pages - 1) // bucket * runner.page_size
    return own if own >= runner.max_len else own - IN_A_ROW * runner.most_tokens(bucket)


def lengthened(
    names: Several[str], strategies: Mapping[int, Several[str]]
) -> list[tuple[str, int]]:
    """The strategies and buckets with which the growth of costs is measured, in this order.

    The largest bucket, where the context counts most, comes first.

    Args:
      names: all strategies.
      strategies: those of each bucket.
    """
    found: list[tuple[str, int]] = []
    for pick in (max, min):
        for name in names:
            buckets = [bucket for bucket, of_bucket in strategies.items() if name in of_bucket]
            if buckets and (name, pick(buckets)) not in found:
                found.append((name, pick(buckets)))
    return found


def further_measurements(seconds: float) -> int:
    """The number of measurements of a strategy after its first round, given the seconds of it."""
    return IN_A_ROW if seconds < SLOW_SECONDS else 1 if seconds <= LONG_SECONDS else 0


def enough_rounds(seconds: float, most: int) -> int:
    """The number of rounds of a measurement, given the seconds of one and the most of a chunk."""
    return min(max(round(SAMPLE_SECONDS / seconds), 1), most)


def _most_rounds(
    runner: Runner, strategy: str, bucket: int, length: int, features: Features
) -> int:
    """The most rounds of a chunk such that a sequence has room for `IN_A_ROW` chunks."""
    room = (runner.max_len - length) // (runner.plans[strategy].steps + 1)
    return max(min(runner.rounds(strategy, bucket, features), room // IN_A_ROW), 1)


def _starts(runner: Runner, count: int, length: int) -> list[Start]:
    """Artificial sequences for the first `count` slots, which will not end soon."""
    prompt = (np.arange(max(length, 1)) % runner.cfg.vocab_size).tolist()
    params = SamplingParams(seed=0, max_tokens=None, n=count, ignore_eos=True)
    starts = []
    for slot, job in enumerate(make_jobs(prompt, params, ())):
        job = dataclasses.replace(job, limit=runner.max_len)
        sequence = Sequence(job, runner.steps)
        sequence.slot = slot
        starts.append(Start(sequence, 0))
    return starts


def _start_chunk(
    runner: Runner,
    strategy,
    features,
    bucket,
    rounds: int,
    length: int | None = None,
    run: StrategyProgram | None = None,
) -> Packed[Result]:
    """Enqueues a chunk of the first slots, each with pages of its own if there are enough.

    Args:
      length: number of tokens of each sequence; None: `_context`.
      run: as in `Runner.chunk`.
    """
    emitted = IN_A_ROW * runner.most_tokens(bucket)
    needed = min((_context(runner) if length is None else length) + emitted, runner.max_len)
    each = pages_for(needed, runner.page_size)
    table = np.zeros((bucket, runner.table_width), np.int32)
    table[:, :each] = (1 + np.arange(bucket * each) % (runner.pages - 1)).reshape(bucket, each)
    rows = RowMap(np.arange(bucket, dtype=np.int32), np.ones(bucket, bool), table)
    return runner.chunk(strategy, features, runner.alone(rows), Until.of(rounds), run)
