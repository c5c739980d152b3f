"""Chunks: what the next one runs and when it ends, and those that were enqueued.

A chunk is a number of rounds that run in one program, without the host. How many is decided in
this file: settings and the size of the batch bound them (`Runner.rounds`), and so do stop strings
and probes of the controller. A chunk may end early, when rows are free that waiting sequences could
have (`until`).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import operator
import time
from collections import Counter, deque
from collections.abc import Callable
from typing import NamedTuple

import jax

from specjax.control import OFF, Controller
from specjax.decode.chunk import Result, Until
from specjax.decode.options import Features
from specjax.engine.runner import Runner
from specjax.engine.sequence import Sample, Unfinished

IN_FLIGHT = 2  # the largest number of chunks that are enqueued at once
REFILL_SHARE = 6  # while sequences wait, a chunk ends when 1 of this many rows would be free


class Choice(NamedTuple):
    """The program of a chunk: its strategy, the features that it serves, and its rows."""

    strategy: str
    features: Features
    bucket: int


@dataclasses.dataclass(eq=False)
class Chunk:
    """A chunk to run, or one that was enqueued.

    Attributes:
      strategy: name of the strategy of all its rounds.
      features: features that its program serves.
      bucket: number of rows.
      sequences: the sequences in the first rows.
      waiting: sequences that take over the rows of those that end, in order.
      ends: the conditions under which it ends.
      rounds: the most rounds that it runs.
      max_tokens: the most tokens that it can emit for one sample.
      stands_in: whether its program runs in place of another that is not ready.

      result: its result, on the device.
      version: version of the weights that it runs with.
      start_mark: an output of the program enqueued before it, which is ready when the chunk can
        begin; None: that program is a chunk, too.
      announced: number of announcements by the hosts of the replica when it was enqueued, see
        `Agreement`.
      begun_after: the latest time on the host's clock at which it was known not to have begun: when
        it was enqueued, or last polled before it began.
      begun_before: the time of the poll that first found it begun; None: no poll has.
      running_at: the time of the last poll that found it not done.
    """

    strategy: str
    features: Features
    bucket: int
    sequences: list[Sample]
    waiting: list[Sample]
    ends: Until
    rounds: int
    max_tokens: int
    stands_in: bool = False

    result: Result | None = None
    version: int = 0
    start_mark: jax.Array | None = None
    announced: int = 0
    begun_after: float = 0.0
    begun_before: float | None = None
    running_at: float = 0.0

    @property
    def is_done(self) -> bool:
        """Whether the device has run it."""
        return self.result.length.is_ready()

    @property
    def spare(self) -> int:
        """Number of rows that no sequence has when the chunk begins."""
        return self.bucket - len(self.sequences)

    @property
    def row_map(self) -> list[Sample | None]:
        """The sequence of each row, and then the sequences that wait for a row."""
        return [*self.sequences, *[None] * self.spare, *self.waiting]

    @property
    def certain_tokens(self) -> int:
        """The fewest tokens that each of `sequences` emits in this chunk, if it does not end."""
        return 0 if self.ends.may_be_early else self.rounds


def next_chunk(
    runner: Runner,
    sequences: list[Sample],
    slots: int,
    rows: int,
    buckets: list[int],
    controller: Controller,
    unfinished: Unfinished,
    others_wait: bool,
    choose: Callable[..., tuple],
) -> Chunk:
    """The next chunk of sequences that may run, at least one, in the order of their starts.

    The controller chooses the strategy; it is `off` if all of them opted out of speculation.

    Args:
      slots: the most sequences that have a row.
      rows: the batch size that decides how many rounds the chunk has, as it was known when pages
        were reserved.
      buckets: compiled batch sizes.
      others_wait: whether further sequences, not among `sequences`, wait for a row.
      choose: function that returns the key of the program to run, of its own and those of
        others that may stand in, see `Engine._choose`.
    """
    # The host finds stop strings, so chunks of samples that have some are short.
    short = any(s.job.stop for s in sequences)
    # The earliest sequences have the rows, so that none that took one over loses it again.
    sequences, waiting = sequences[:slots], sequences[slots:]
    length = None if short else max(rows, len(sequences))
    strategy, hint = OFF, None
    if OFF not in runner.plans or any(s.job.params.speculative for s in sequences):
        context = sum(sequence.length for sequence in sequences)
        strategy = controller.select(len(sequences), context)
        hint = controller.rounds_hint
    asked = choose_program(runner, buckets, unfinished, strategy, sequences)
    choices: dict[tuple, Choice] = {}
    for choice in (asked, *stand_ins(runner, asked, sequences)):
        choices.setdefault(runner.chunk_key(*choice), choice)
    strategy, features, bucket = choice = choices[choose(*choices)]
    rounds = min(runner.rounds(strategy, length), runner.rounds(strategy, bucket))
    waiting = waiting_for_rows(waiting, sequences, features)
    # A probe has all its rounds, whichever samples end meanwhile.
    if hint is not None and strategy == asked.strategy:
        rounds = min(hint, rounds)
        ends = Until.of(rounds)
    else:
        others = runner.chunks(strategy, features, soon=choice == asked)
        smaller = max((b for b, _ in others if b < bucket), default=0)
        ends = until(rounds, len(sequences), len(waiting), others_wait, smaller)
    tokens = rounds * (runner.plans[strategy].steps + 1)
    stands_in = choice != asked
    return Chunk(strategy, features, bucket, sequences, waiting, ends, rounds, tokens, stands_in)


def choose_program(
    runner: Runner,
    buckets: list[int],
    unfinished: Unfinished,
    strategy: str,
    sequences: list[Sample],
) -> Choice:
    """The own program of a chunk, whether it is compiled or not, chosen so that little is compiled.

    A chunk takes the cheapest program that covers its samples, of those that are compiled or being
    compiled. Where none covers all unfinished samples, it is the next wider of a few fixed sets of
    features, for as many slots as will be needed. In `invariant` mode all chunks run one program
    until no sample is left, because equal inputs are certain to give equal bits only within one
    program.

    Args:
      buckets: compiled batch sizes, ascending.
      sequences: sequences that the chunk runs.
    """
    wanted, here = unfinished.features, features_of(sequences)
    if runner.plan.invariant:
        known = runner.chunks(strategy, unfinished.seen.widened(), soon=True)
        served = next((served for _, served in known), unfinished.seen.widened())
        return Choice(strategy, served, runner.batch)
    if not any(b >= len(sequences) for b, _ in runner.chunks(strategy, wanted, soon=True)):
        most = min(runner.batch, len(unfinished))
        return Choice(strategy, wanted.widened(), next(b for b in buckets if b >= most))
    known = runner.chunks(strategy, here, soon=True)
    bucket, served = next(chunk for chunk in known if chunk[0] >= len(sequences))
    return Choice(strategy, served, bucket)


def features_of(sequences: list[Sample]) -> Features:
    return functools.reduce(operator.or_, {sample.features for sample in sequences})


def stand_ins(runner: Runner, asked: Choice, sequences: list[Sample]) -> list[Choice]:
    """The programs that may run in place of the one that is asked for, the nearest first.

    They have more rows, or else another strategy, with the number of steps that is nearest, where
    tokens do not depend on the strategy.
    """
    plans, here, names = runner.plans, features_of(sequences), [asked.strategy]
    if not runner.longest.needs_q:  # else tokens depend on the strategy
        steps = plans[asked.strategy].steps
        names = sorted(plans, key=lambda n: (n != names[0], abs(plans[n].steps - steps)))
    return [
        Choice(name, served, bucket)
        for name in names
        for bucket, served in runner.chunks(name, here, soon=True)
        if bucket >= len(sequences)
    ]


def waiting_for_rows(
    others: list[Sample], sequences: list[Sample], features: Features
) -> list[Sample]:
    """The first sequences of `others` that can take over rows in a chunk, see `RowMap`.

    Args:
      others: sequences without a row, in order.
      sequences: sequences that have the rows of the chunk.
      features: features that its program serves.
    """
    drafts = any(s.job.params.speculative for s in sequences)  # or the chunk decodes plainly

    def fits(sequence: Sample) -> bool:
        return sequence.job.params.speculative <= drafts and features.covers(sequence.features)

    return list(itertools.takewhile(fits, others))


def until(rounds: int, running: int, waiting: int, others_wait: bool, smaller: int) -> Until:
    """When a chunk ends: when enough rows are free for waiting sequences, or the batch can shrink.

    Args:
      rounds: the most rounds that it runs.
      running: number of rows that run when it begins.
      waiting: number of sequences that take over rows within it.
      others_wait: whether further sequences wait. If `waiting` is 0, the chunk ends early for them,
        so that they wait for one chunk at most.
      smaller: the next smaller batch size, or 0.
    """
    refill = max(1, running // REFILL_SHARE)
    if others_wait and waiting:  # each enqueued chunk has its share of the waiting sequences
        return Until.of(rounds, ended=max(refill, waiting // IN_FLIGHT))
    return Until.of(rounds, leave_at=running - refill if others_wait else smaller)


class InFlight:
    """The enqueued chunks, in order, and a measurement of the seconds that each of them took.

    A device does not say when it begins or ends a program; the host can only poll what is done. So
    it knows a time before and a time after the beginning of a chunk, and likewise its end. It gives
    the seconds of a chunk only where these bounds lie close together.

    Args:
      runner: the runner of the chunks. While it compiles, the host does not poll.

    Attributes:
      cut_short: whether the chunk that was taken last ended early while some samples still ran.
    """

    def __init__(self, runner: Runner):
        self._runner = runner
        self._chunks: deque[Chunk] = deque()
        self.cut_short = False
        # When the last result arrived, and the earliest time at which its chunk may have been done.
        self._arrived, self._done = 0.0, 0.0
        self._built = runner.compilations

    def __len__(self) -> int:
        return len(self._chunks)

    @property
    def is_ready(self) -> bool:
        """Whether the device is done with the next chunk; True if there is none."""
        return not self._chunks or self._chunks[0].is_done

    def limit(self, taken_over: bool) -> int:
        """The number of chunks that may be enqueued at once.

        Args:
          taken_over: whether waiting sequences take over free rows within a chunk.
        """
        # The chunk after one that ended early depends on which samples have ended.
        alone = self.cut_short and not taken_over
        return 1 if alone or self._runner.agreement.one_by_one else IN_FLIGHT

    def add(self, chunk: Chunk) -> None:
        self._chunks.append(chunk)

    def take(self) -> Chunk:
        """Removes and returns the next chunk; `wait_for` gives its result."""
        return self._chunks.popleft()

    def clear(self) -> None:
        """Drops all chunks: no sample is left that they could emit a token for."""
        self._chunks.clear()
        self.cut_short = False

    def certain_tokens(self) -> Counter[Sample]:
        """The fewest tokens that the chunks emit for each sample that goes on."""
        certain = Counter()
        for chunk in self._chunks:
            certain.update(dict.fromkeys(chunk.sequences, chunk.certain_tokens))
        return certain

    @property
    def max_tokens(self) -> int:
        """The most tokens that the chunks can emit for one sample."""
        return sum(chunk.max_tokens for chunk in self._chunks)

    def poll(self) -> None:
        """Records, of each chunk, whether it has begun and whether it is done."""
        now = time.perf_counter()
        for chunk in self._chunks:
            if chunk.start_mark is not None and not chunk.start_mark.is_ready():
                chunk.begun_after = now
            elif chunk.begun_before is None:
                chunk.begun_before = now
            if not chunk.is_done:
                chunk.running_at = now

    def wait_for(self, chunk: Chunk) -> tuple[Result, float]:
        """The result on the host, and the seconds that the chunk ran, without prompts before it.

        The seconds are nan where the bounds of the beginning or the end of the chunk are too far
        apart, and where the host compiled a program meanwhile.
        """
        after, before = max(self._done, chunk.begun_after), chunk.begun_before
        if chunk.start_mark is None:
            before = max(self._arrived, chunk.begun_after)
        elif before is None:
            was_waiting = not chunk.start_mark.is_ready()
            jax.block_until_ready(chunk.start_mark)
            before = time.perf_counter()
            after = before if was_waiting else after
        was_running = not chunk.is_done
        result = jax.device_get(chunk.result)
        self._arrived = time.perf_counter()
        self._done = self._arrived if was_running else max(after, chunk.running_at)
        most, least = self._arrived - after, self._done - max(before, after)
        compiled, self._built = self._built != self._runner.compilations, self._runner.compilations
        return result, float("nan") if compiled or least < 0.8 * most else least
