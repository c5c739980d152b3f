"""Compiles and checks programs, before or while requests run, and measures what a round costs.

`check_graphs` compares chunks that are one CUDA graph with the same chunks as plain programs: all
that the host reads, to the bit. It runs several chunks in a row from one new state, in which some
sequences end and waiting ones take their rows over, so that all loops of a chunk run. Requests set
an option of each feature, so that its branch is taken. The first chunk records a graph, later ones
update and launch it. It supposes that a plain program gives equal bits whenever it runs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from typing import Any

import jax
import numpy as np

from specjax.config import SamplingParams
from specjax.control.costs import CostTable, of_rounds
from specjax.decode.chunk import Result, Until
from specjax.decode.options import Features
from specjax.decode.state import RowMap
from specjax.engine.pages import pages_for
from specjax.engine.programs import CompileProgress, Compiler, OnProgram, described
from specjax.engine.request import make_jobs
from specjax.engine.runner import Runner, admission_of, piece_of, place_size
from specjax.engine.scheduler import Start
from specjax.engine.sequence import Sample
from specjax.error_text import first_line

# Engines' runners, each with the keys of programs to compile.
Wanted = Sequence[tuple[Runner, Sequence[tuple]]]
OnReady = Callable[[int], None]  # called with the number of programs that became ready

POLL_SECONDS = 1.0  # the caller is told at least this often how many programs are ready
CONTEXT = 256  # the most tokens of a sequence while programs are run and most costs are measured
LONG_CONTEXT = 16384  # the most tokens of a sequence while the growth of costs is measured
# The long context is at least so many times the short one, or costs would hardly differ.
LEAST_GROWTH = 2
# Measurements of a chunk without rounds, per strategy. If this were too large a time, rounds would
# seem cheap.
REPEATS_BESIDE = 2
IN_A_ROW = 3  # number of chunks in a row: measurements of fast rounds, and of comparisons
SAMPLE_SECONDS = 0.01  # approximate duration of a measurement, which has one round at least
SLOW_SECONDS = SAMPLE_SECONDS / 4  # a round that takes longer is measured by the first one, too
LONG_SECONDS = 4 * SAMPLE_SECONDS  # a round that takes longer is measured by the first one alone
COMPARED_ROUNDS = 24  # the most rounds of a chunk that is compared
WAITING = 2  # sequences beyond the bucket, which take over rows in chunks that are compared


@dataclasses.dataclass(frozen=True)
class StartUp:
    """The time that starting took, and the size of the caches.

    Attributes:
      programs: number of programs that were compiled.
      seconds: time to compile them and to run each once.
      calibration_seconds: time to measure them.
      cache_bytes: size of all pages.
    """

    programs: int = 0
    seconds: float = 0.0
    calibration_seconds: float = 0.0
    cache_bytes: int = 0

    def __str__(self) -> str:
        text = f"compiled {self.programs} programs in {self.seconds:.1f} s (caches "
        text += f"{self.cache_bytes / 2**20:.1f} MiB)"
        if self.calibration_seconds:
            text += f", measured them in {self.calibration_seconds:.1f} s"
        return text


def start(runner: Runner, key: tuple) -> Result | None:
    """Enqueues a program, over artificial sequences.

    Args:
      key: its key, see `Executables`.

    Returns:
      its result for the host; None: it has none.
    """
    kind, first, *rest = key
    if kind == "place":
        return _place(runner, 1, 1, first)
    if kind == "prefill":
        rows, positions = first
        return runner.prefill(piece_of([], rows, positions - runner.tail, runner))
    bucket, features = rest
    sizes = [key[1] for key in runner.executables.by_key if key[0] == "place"]
    if sizes and runner.executables.compiler is None:  # a prefix is in the caches
        _place(runner, 1, _context(runner), min(sizes))
    return _start_chunk(runner, strategy_of(runner, first), features, bucket, rounds=1)


def strategy_of(runner: Runner, program: str) -> str:
    """The strategy with the most steps of those whose chunks a program runs."""
    names = [name for name, its in runner.strategies.items() if its.name == program]
    return max(names, key=lambda name: runner.plans[name].steps)


def compile_ahead(wanted: Wanted, on_program: OnProgram | None = None, run: bool = True) -> StartUp:
    """Compiles programs of several engines concurrently, and runs each once.

    Replicas have equal programs, but JAX cannot load a program on other devices than those that it
    was compiled for. (On GPUs a cache directory has it.) Each program runs once, with a prefix in
    the caches: the first run takes many times as long as later ones, and code that it skipped would
    be as slow later.

    Args:
      wanted: the programs.
      on_program: function called at the beginning, after each program and every few seconds with
        the number of programs that are ready and of all; None: a warning is logged if it takes
        long.
      run: whether to run each once. False leaves the caches as they are, unless chunks are CUDA
        graphs, which are compared.
    """
    started, tell = time.perf_counter(), on_program or CompileProgress()
    runners = [runner for runner, _ in wanted]
    built = sum(runner.compilations for runner in runners)
    done, total = 0, sum(len(keys) for _, keys in wanted)

    def ready(count: int) -> None:
        nonlocal done
        done += count
        tell(done, total)

    ready(0)
    graphs = runners[0].executables.graphs  # which replicas share
    begins_with_graphs = graphs.wanted
    try:
        if graphs.wanted:
            check_graphs(*wanted[0])
        if graphs.wanted == begins_with_graphs:
            _build(wanted, ready, run)
    except jax.errors.JaxRuntimeError as error:
        if not graphs.wanted:
            raise
        graphs.stop(f"{described(runners[0].latest)} fails at the start: {first_line(error)}")
    if graphs.wanted != begins_with_graphs:
        for runner in runners:
            runner.executables.drop_graphs()
        _build(wanted, run=run)
    if done < total:  # programs that were compiled again are not counted again
        ready(total - done)
    return StartUp(
        programs=sum(runner.compilations for runner in runners) - built,
        seconds=time.perf_counter() - started,
        cache_bytes=sum(runner.pages * runner.page_bytes for runner in runners),
    )


def _build(wanted: Wanted, ready: OnReady = lambda count: None, run: bool = True) -> None:
    """Compiles the programs of engines that are not compiled yet, and runs all once.

    Compilers run on threads, in the order of the programs.

    Args:
      ready: function called with the number of programs that became ready.
      run: see `compile_ahead`.
    """
    runners = [runner for runner, _ in wanted]
    executables = [runner.executables for runner in runners]
    compiler = Compiler(min(store.threads for store in executables))
    new = [runner for runner in runners if runner.state is None]
    try:
        for (runner, keys), store in zip(wanted, executables, strict=True):
            # The state is made while threads compile, where two programs may be compiled at once.
            beside, known = runner in new and store.threads > 1, len(store.pending)
            if beside:
                runner.hold_state_shapes()
            elif run or runner in new:
                runner.reset()
            store.failed.clear()
            with store.ahead(compiler):
                for key in keys:
                    start(runner, key)
            if beside:
                runner.reset()
            ready(len(keys) - len(store.pending) + known)  # compiled before
        while pending := [f for store in executables for f in store.pending.values()]:
            wait(pending, POLL_SECONDS, FIRST_COMPLETED)
            for count in [1] * sum(store.collect() for store in executables) or [0]:
                ready(count)
            for runner, store in zip(runners, executables, strict=True):
                for runner.latest, error in store.failed.items():
                    raise error
    except BaseException:
        for store in executables:  # some were to become graphs
            store.pending.clear()
        for runner in new:  # some hold shapes
            runner.state = runner.kept = None
        raise
    finally:
        # After an error, Ctrl-C included, do not wait for running builds, and begin no others.
        compiler.cancel()
    for runner, keys in wanted if run else ():
        run_once(runner, keys)


def run_once(runner: Runner, keys: Iterable[tuple]) -> None:
    """Runs programs in a state that is of no use afterwards."""
    for key in keys:
        # Errors show here, while `latest` is the program that failed.
        jax.block_until_ready((start(runner, key), runner.state, runner.kept))


def compile_behind(wanted: Wanted) -> None:
    """Has threads compile programs while engines serve requests, those of all engines in turns."""
    with contextlib.ExitStack() as stack:
        for runner, _ in wanted:
            if runner.state is None:
                runner.reset()
            stack.enter_context(runner.executables.ahead(runner.executables.background))
        for keys in itertools.zip_longest(*(keys for _, keys in wanted)):
            for (runner, _), key in zip(wanted, keys, strict=True):
                if key is not None:
                    start(runner, key)


# --- comparing ------------------------------------------------------------------------------------


def check_graphs(runner: Runner, keys: Sequence[tuple]) -> None:
    """Turns graphs off where they give other results; overwrites the state.

    It compares the program of the smallest bucket of each strategy, for each set of features. That
    a graph is right is kept for later starts.

    Args:
      keys: keys of programs, those of the smallest buckets first.

    Raises:
      JaxRuntimeError: a program cannot be compiled or run.
    """
    executables, chunks = runner.executables, [key for key in keys if key[0] == "chunk"]
    first = {key[1]: key[2] for key in reversed(chunks)}
    smallest = [(runner, [key for key in chunks if first[key[1]] == key[2]])]
    _build(smallest)
    compared = [key for key, verdict in executables.verdicts.items() if not verdict.is_right]
    if not compared:
        return
    built = {key: executables.by_key.pop(key) for key in compared}
    executables.graphs.wanted = False
    _build(smallest)  # as plain programs
    executables.graphs.wanted = True
    for key, graph in built.items():
        strategy = strategy_of(runner, key[1])
        expected = run_chunks(runner, strategy, *key[2:])
        executables.by_key[key] = graph
        if reason := _difference(expected, run_chunks(runner, strategy, *key[2:])):
            executables.graphs.stop(f"{described(key)} {reason}")
            return
        executables.verdicts[key].keep()


def _difference(expected: Sequence[Result], got: Sequence[Result]) -> str | None:
    """What differs between the chunks of a plain program and of one graph; None: nothing."""
    for number, (plain, graph) in enumerate(zip(expected, got, strict=True), 1):
        for name, a, b in zip(Result._fields, plain, graph, strict=True):
            equal = jax.tree.map(lambda x, y: x.tobytes() == y.tobytes(), a, b)
            if not all(jax.tree.leaves(equal)):
                place = f"{name!r} in chunk {number} of {IN_A_ROW}"
                return f"gives other results than without graphs: {place}"
    return None


def run_chunks(runner: Runner, strategy: str, bucket: int, features: Features) -> list[Result]:
    """Runs several chunks of a strategy from a new state, with sequences of different lengths."""
    runner.reset()
    pages, size, steps = runner.pages - 1, runner.page_size, runner.steps
    rounds = min(COMPARED_ROUNDS, runner.rounds(strategy, bucket))
    count = min(bucket + WAITING, pages)
    most = min(1 + IN_A_ROW * rounds * (steps + 1), runner.max_len)
    pages_each = min(pages_for(most, size), pages // count)
    # The first one ends in the first chunk, and a waiting one takes its row over.
    first, longest = 1 + max(1, rounds // 2), min(most, pages_each * size)
    options = _options(runner, features, longest // 2)
    for slot, start in enumerate(_starts(runner, count, 1, **options)):
        limit = min(first + slot * max(longest - first, 0) // max(count - 1, 1), longest)
        start.sequence.job = dataclasses.replace(start.sequence.job, limit=limit)
        runner.place(admission_of([start], 1, runner))
    jax.block_until_ready(runner.state)
    row_map, until = _row_map(runner, bucket, count, pages_each), Until.of(rounds)
    chunks = range(IN_A_ROW)
    return [jax.device_get(runner.chunk(strategy, features, row_map, until)) for _ in chunks]


def _options(runner: Runner, features: Features, least: int) -> dict[str, Any]:
    """Options of a request for each feature that a program has, so that all its branches are taken.

    Args:
      least: tokens before which a stop token is masked.
    """
    options = {
        "top_k": {"top_k": 20},
        "top_p": {"top_p": 0.9},
        "min_p": {"min_p": 0.01},
        "penalties": {"repetition_penalty": 1.1, "frequency_penalty": 0.1},
        "bias": {"logit_bias": {0: 1.0}},
        "allowed": {"allowed_token_ids": tuple(range(runner.cfg.vocab_size // 2 + 1))},
        "bad_words": {"bad_words": ((0,), (1, 2))},
    }
    if runner.stop_width:
        options["min_tokens"] = {"min_tokens": least, "stop_token_ids": (1,)}
    return {k: v for name in features.names for k, v in options.get(name, {}).items()}


# --- measuring ------------------------------------------------------------------------------------


def calibrate(
    runner: Runner, strategies: Mapping[int, Sequence[str]], features: Features
) -> tuple[CostTable, float]:
    """Measures the seconds per round of strategies at every bucket.

    A chunk without rounds gives the time that a chunk takes beside its rounds. The first round of a
    strategy gives the number of rounds of its measurements; it is a measurement itself only if it
    took long. Fast rounds are measured several times, because programs are slow for some
    milliseconds after a pause; the least time counts. Measuring is short: the controller corrects
    errors by what it observes later.

    How costs grow with the context is measured once, with sequences that are said to be long: a
    kernel reads their pages, whatever these hold. Engines whose sequences are short, or have few
    pages, do without.

    Args:
      strategies: the strategies to measure, by bucket, of which programs for `features` are ready.

    Returns:
      the table, and the seconds that measuring took.
    """
    started, largest = time.perf_counter(), max(strategies)
    short, long = _contexts(runner, largest)
    beside: dict[int, float] = {}

    @functools.cache
    def admission(bucket: int, length: int):
        return admission_of(
            _starts(runner, bucket, length), place_size(runner.batch, bucket), runner
        )

    def timed(name: str, bucket: int, length: int, rounds: int, times: int = 1):
        """Yields the seconds and the number of rounds of chunks in a row."""
        runner.place(admission(bucket, length))
        jax.block_until_ready(runner.state)
        for _ in range(times):
            begin = time.perf_counter()
            wanted = dict(reversed(runner.chunks(name, features)))[bucket]  # the fewest that serve
            result = jax.device_get(_start_chunk(runner, name, wanted, bucket, rounds, length))
            seconds = runner.agreement.agree(time.perf_counter() - begin)
            yield seconds, int(result.rounds)

    def measured(name: str, bucket: int, length: int) -> list[float]:
        """The seconds per round of each measurement."""
        seconds, _ = next(timed(name, bucket, length, 1))
        first = of_rounds(seconds, beside[bucket])
        times = IN_A_ROW if first < SLOW_SECONDS else 1 if first <= LONG_SECONDS else 0
        # A sequence has room for all chunks in a row.
        room = (runner.max_len - length) // (runner.plans[name].steps + 1) // IN_A_ROW
        most = max(min(runner.rounds(name, bucket), room), 1)
        rounds = min(max(round(SAMPLE_SECONDS / first), 1), most)
        # Without a round, its sequences have no room for further tokens.
        return [first] * (first >= SLOW_SECONDS) + [
            of_rounds(seconds, beside[bucket]) / count
            for seconds, count in timed(name, bucket, length, rounds, times)
            if count
        ]

    least: dict[tuple[str, int], float] = {}
    for bucket, names in strategies.items():
        beside[bucket] = statistics.median(
            min(next(timed(name, bucket, short, 0))[0] for _ in range(REPEATS_BESIDE))
            for name in names
        )
        # Anything else that the machine does adds to a time, and never takes from it.
        least |= {(n, bucket): min(measured(n, bucket, short), default=None) for n in names}
    slope, first = 0.0, strategies[largest][0]
    if long is not None and (seconds := measured(first, largest, long)) and least[first, largest]:
        slope = max(min(seconds) - least[first, largest], 0.0) / (largest * (long - short))
    buckets = sorted(strategies)
    costs = {name: [least.get((name, b)) for b in buckets] for name in runner.plans}
    table = CostTable(buckets, costs, [beside[b] for b in buckets], slope, short)
    return table, time.perf_counter() - started


def _context(runner: Runner) -> int:
    """The number of tokens of a sequence while programs are run and most costs are measured."""
    return min(CONTEXT, runner.max_len // 2)


def _contexts(runner: Runner, bucket: int) -> tuple[int, int | None]:
    """The numbers of tokens of a sequence at which costs, and their growth, are measured.

    Args:
      bucket: the largest batch, of which each row must have pages of its own, since rows that share
        pages would be faster.

    Returns:
      (short, long); long is None where the growth is not measured.
    """
    short, room = _context(runner), (runner.pages - 1) // bucket * runner.page_size
    if room < runner.max_len:
        room -= IN_A_ROW * runner.most_tokens(bucket)
    long = min(LONG_CONTEXT, 3 * runner.max_len // 4, room)  # which leaves room for some rounds
    return short, long if long >= LEAST_GROWTH * short else None


# --- artificial sequences -------------------------------------------------------------------------


def _starts(runner: Runner, count: int, length: int, **options: Any) -> list[Start]:
    """Sequences of `length` tokens for the first `count` slots, which will not end soon."""
    prompt = (np.arange(max(length, 1)) % runner.cfg.vocab_size).tolist()
    params = SamplingParams(seed=0, max_tokens=None, n=count, ignore_eos=True, **options)
    starts = []
    for slot, job in enumerate(make_jobs(prompt, params, ())):
        sequence = Sample(dataclasses.replace(job, limit=runner.max_len), runner.steps)
        sequence.slot = slot
        starts.append(Start(sequence, 0))
    return starts


def _place(runner: Runner, count: int, length: int, size: int) -> None:
    """Starts artificial sequences by the program for `size` sequences."""
    runner.place(admission_of(_starts(runner, count, length), size, runner))


def _row_map(runner: Runner, bucket: int, count: int, pages_each: int) -> RowMap:
    """The first `count` slots as rows of a chunk, each with `pages_each` pages while there are any.

    Slots beyond the bucket take over rows that become free.
    """
    slots = np.full(bucket + runner.extra_slots, runner.slots - 1, np.int32)
    slots[:count] = np.arange(count)
    table = np.zeros((len(slots), runner.table_width), np.int32)
    numbers = 1 + np.arange(count * pages_each) % (runner.pages - 1)
    table[:count, :pages_each] = numbers.reshape(count, pages_each)
    return RowMap(slots, np.arange(len(slots)) < count, table)


def _start_chunk(
    runner: Runner,
    strategy: str,
    features: Features,
    bucket: int,
    rounds: int,
    length: int | None = None,
) -> Result:
    """Enqueues a chunk of the first slots, each with pages of its own if there are enough.

    Args:
      length: number of tokens of each sequence; None: `_context`.
    """
    emitted = IN_A_ROW * runner.most_tokens(bucket)
    needed = min((_context(runner) if length is None else length) + emitted, runner.max_len)
    row_map = _row_map(runner, bucket, bucket, pages_for(needed, runner.page_size))
    return runner.chunk(strategy, features, row_map, Until.of(rounds))
