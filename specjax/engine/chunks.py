"""Chunks: what the next one runs and when it ends, and those that were enqueued.

A chunk is a number of rounds that run in one program, without the host. How many is decided in
this file: settings and the size of the batch bound them (`Runner.rounds`), and so do stop strings,
probes of the controller, and others whose turn it is. A chunk may end early, when rows are free
that others could have (`until`).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import time
from collections import Counter, deque

import jax

from specjax.control import OFF, Controller
from specjax.decode.chunk import Result, Until
from specjax.decode.options import Features
from specjax.engine.runner import Packed, Runner
from specjax.engine.sequence import Sequence
from specjax.engine.unfinished import Unfinished, all_of

IN_FLIGHT = 2  # chunks that are enqueued at most
REFILL_SHARE = 6  # while others wait a chunk ends when one row in so many would be free


@dataclasses.dataclass(eq=False)
class Chunk:
    """A chunk to run, or one that was enqueued.

    Attributes:
      strategy: of all its rounds. features: that its program serves. bucket: rows.
      sequences: have the first rows. waiting: take over the rows of those that end, in order.
      ends: when it does. rounds: at most.
      most: tokens that it can bring a sample.

      result: on the device. version: of the weights.
      mark: is ready when the chunk begins to run; None: as soon as the chunk before it is done.
      announced: by the hosts of the replica when it was enqueued, see `Agreement`.
      after: it began after that, on the host's clock: when it was enqueued, or last seen waiting.
      by: it had begun by then; None: it has not been seen running.
      unseen: seconds in which the host did not ask whether it is done, and it was at their end.
    """

    strategy: str
    features: Features
    bucket: int
    sequences: list[Sequence]
    waiting: list[Sequence]
    ends: Until
    rounds: int
    most: int

    result: Packed[Result] | None = None
    version: int = 0
    mark: jax.Array | None = None
    announced: int = 0
    after: float = 0.0
    by: float | None = None
    unseen: float | None = None

    @property
    def spare(self) -> int:
        """Rows that no sequence has when it begins."""
        return self.bucket - len(self.sequences)

    @property
    def row_map(self) -> list[Sequence | None]:
        """The sequence of each row, and then those that wait for one."""
        return [*self.sequences, *[None] * self.spare, *self.waiting]

    @property
    def sure(self) -> int:
        """Tokens that each of `sequences` emits at least, if it does not end."""
        return 0 if self.ends.may_be_early else self.rounds


class NextChunk:
    """Decides what the next chunk is.

    Sequences that name different strategies take turns, the group that waited longest first. Those
    that name none run by the controller's choice, and those that named just that one with them.
    """

    def __init__(self, runner: Runner):
        self._runner = runner
        self._last: dict[str | None, int] = {}  # turn of each group, as a running number

    def rows(self, running: int, slots: int, has_waiting: bool) -> int:
        """By how many rows the next chunk is long, as far as is known when room is made for it."""
        full = has_waiting or self._runner.plan.invariant
        return slots if full else min(max(running, 1), slots)

    def __call__(
        self,
        sequences: list[Sequence],
        slots: int,
        rows: int,
        buckets: list[int],
        controller: Controller,
        unfinished: Unfinished,
        others_wait: bool,
    ) -> Chunk:
        """The next chunk of sequences that may run, at least one, in the order of their starts.

        Args:
          slots: that have a row at most. rows: what `rows` gave, for which there is room in pages.
          buckets: sizes of a batch.
          others_wait: for the places of those that end, beside `sequences`.
        """
        runner = self._runner
        short = any(s.job.params.stop for s in sequences)  # the host finds where they end
        # The earliest have the rows, so none that has taken one over loses it again.
        sequences, waiting = sequences[:slots], sequences[slots:]
        length = None if short else max(rows, len(sequences))
        strategy, sequences, rounds, is_probe = self._turn(sequences, controller, length)
        features, bucket = choose_program(runner, buckets, unfinished, strategy, sequences)
        rounds = min(rounds, runner.rounds(strategy, bucket))
        waiting = waiting_for_rows(waiting, sequences, features)
        ends = Until.of(rounds)
        if not is_probe:  # which has so many rounds, whichever samples end meanwhile
            smaller = (b for b in runner.buckets(strategy, features) if b < bucket)
            ends = until(rounds, len(sequences), len(waiting), others_wait, max(smaller, default=0))
        most = rounds * (runner.plans[strategy].steps + 1)
        return Chunk(strategy, features, bucket, sequences, waiting, ends, rounds, most)

    def _turn(
        self, sequences: list[Sequence], controller: Controller, rows: int | None
    ) -> tuple[str, list[Sequence], int, bool]:
        """Whose turn it is: strategy, sequences, rounds at most, and whether it is a probe.

        Args:
          rows: by which chunks are long, see `Runner.rounds`.
        """
        most = functools.partial(self._runner.rounds, rows=rows)
        groups: dict[str | None, list[Sequence]] = {}
        for sequence in sequences:
            groups.setdefault(sequence.job.params.strategy, []).append(sequence)
        name = min(groups, key=lambda name: (self._last.get(name, 0), name is not None))
        strategy, hint, served = name, None, {name}
        if name is None:
            strategy, hint = self._choose(groups[None], controller)
            served |= {strategy} & groups.keys()
        rounds = most(strategy) if hint is None else min(hint, most(strategy))
        if len(groups) > 1:
            self._last |= dict.fromkeys(served, 1 + max(self._last.values(), default=0))
            # While others wait, a turn has no more rounds than theirs would have: plain decoding
            # has several times as many in a chunk as drafting, and would run most of the time.
            waiting = {other or controller.current or strategy for other in groups.keys() - served}
            rounds = min(rounds, *map(most, waiting | {strategy}))
        of_turn = [s for s in sequences if s.job.params.strategy in served]
        return strategy, of_turn, rounds, hint is not None

    def _choose(self, free: list[Sequence], controller: Controller) -> tuple[str, int | None]:
        """Strategy, and rounds that suffice, for sequences that name none; `off` if none drafts."""
        if OFF in self._runner.plans and not any(s.job.params.speculative for s in free):
            return OFF, None
        return controller.select(len(free)), controller.rounds_hint


def choose_program(
    runner: Runner,
    buckets: list[int],
    unfinished: Unfinished,
    strategy: str,
    sequences: list[Sequence],
) -> tuple[Features, int]:
    """Features and bucket to ask the runner for, so that little is compiled, and once.

    A chunk takes the cheapest program that was compiled and covers the samples in it. Where none
    covers all that was added, the next wider of a few fixed sets of features is compiled, for as
    many slots as will be needed. In `invariant` mode all chunks run one program until no sample is
    left, for only within one program equal inputs are sure to give equal bits.

    Args:
      buckets: sizes of a batch. sequences: that the chunk is to run.
    """
    if runner.plan.invariant:
        return unfinished.seen.widened(), runner.batch
    wanted = all_of(unfinished.asked)
    if not any(b >= len(sequences) for b in runner.buckets(strategy, wanted)):
        most = min(runner.batch, len(unfinished))
        return wanted.widened(), next(b for b in buckets if b >= most)
    here = wanted if len(unfinished.asked) == 1 else all_of({s.features for s in sequences})
    return here, min(b for b in runner.buckets(strategy, here) if b >= len(sequences))


def waiting_for_rows(
    others: list[Sequence], sequences: list[Sequence], features: Features
) -> list[Sequence]:
    """The first of those that have no row that may run in a chunk of others, see `RowMap`.

    Args:
      sequences: that the chunk is to run. features: that its program serves.
    """
    served = {s.job.params.strategy for s in sequences}
    drafts = any(s.job.params.speculative for s in sequences)  # or the chunk decodes plainly

    def fits(sequence: Sequence) -> bool:
        params = sequence.job.params
        same = params.strategy in served and params.speculative <= drafts
        return same and features.covers(sequence.features)

    return list(itertools.takewhile(fits, others))


def until(rounds: int, running: int, waiting: int, others_wait: bool, smaller: int) -> Until:
    """When a chunk ends: others take the places of those that ended, or the batch shrinks.

    Args:
      running: rows that run when it begins. waiting: that take them over. others_wait: beside
        those; if none does they are not to wait for more than one chunk.
      smaller: the next smaller size of a batch, or 0.
    """
    refill = max(1, running // REFILL_SHARE)
    if others_wait and waiting:  # each chunk that is enqueued has its share of those
        return Until.of(rounds, ended=max(refill, waiting // IN_FLIGHT))
    return Until.of(rounds, leave_at=running - refill if others_wait else smaller)


class InFlight:
    """Chunks in the order in which they run, and the seconds that each of them took.

    A device does not say when it begins or ends something: the host can ask now and then what is
    done. So it knows that a chunk began after one moment and by another, and that it was done by a
    third, and gives its seconds only where these lie close together.

    Args:
      runner: that runs them; while it compiles, the host sees nothing.

    Attributes:
      cut_short: the chunk that was taken last ended early, and others still ran.
    """

    def __init__(self, runner: Runner):
        self._runner = runner
        self._chunks: deque[Chunk] = deque()
        self.cut_short = False
        self._arrived, self._done = 0.0, 0.0  # the last chunk; it may have been done before
        self._paused, self._built = 0.0, runner.compilations

    def __len__(self) -> int:
        return len(self._chunks)

    @property
    def is_ready(self) -> bool:
        """Whether the device is done with the next chunk, as it is where there is none."""
        return not self._chunks or self._chunks[0].result.is_ready

    def limit(self, taken_over: bool) -> int:
        """Chunks that may be enqueued at once.

        Args:
          taken_over: rows that become free are taken over before the host looks.
        """
        # What comes after a chunk that ends early depends on which samples have ended.
        alone = self.cut_short and not taken_over
        return 1 if alone or self._runner.agreement.one_by_one else IN_FLIGHT

    def add(self, chunk: Chunk) -> None:
        self._chunks.append(chunk)

    def take(self) -> Chunk:
        """The next chunk, which leaves; see `wait_for`."""
        return self._chunks.popleft()

    def clear(self) -> None:
        """No sample is left that they could bring a token."""
        self._chunks.clear()
        self.cut_short = False

    def sure(self) -> Counter[Sequence]:
        """Tokens that they will have emitted at least for each sample that goes on."""
        sure = Counter()
        for chunk in self._chunks:
            sure.update(dict.fromkeys(chunk.sequences, chunk.sure))
        return sure

    @property
    def most(self) -> int:
        """Tokens that they can bring a sample."""
        return sum(chunk.most for chunk in self._chunks)

    def poll(self) -> None:
        """Notes whether the next chunk has begun."""
        if not self._chunks or self._chunks[0].by is not None:
            return
        chunk = self._chunks[0]
        if chunk.mark is None or chunk.mark.is_ready():
            chunk.by = time.perf_counter()
        else:
            chunk.after = time.perf_counter()

    def pause(self) -> None:
        """The host does not ask from now on what is done, until `resume`."""
        self._paused = time.perf_counter()

    def resume(self) -> None:
        """Notes what was done in a pause, which may have been longer than the device was busy."""
        for chunk in self._chunks:
            if chunk.unseen is None and chunk.result.is_ready:
                chunk.unseen = time.perf_counter() - self._paused

    def wait_for(self, chunk: Chunk) -> tuple[Result, float]:
        """The result on the host, and the seconds that it took to run, prompts before it left out.

        They are nan where the host did not see well enough when the prompts or the chunk itself
        were done, and where it compiled a program meanwhile.
        """
        after, by = max(self._done, chunk.after), chunk.by
        if chunk.mark is None:
            by = max(self._arrived, chunk.after)
        elif by is None and chunk.mark.is_ready():
            by = time.perf_counter()
        elif by is None:
            jax.block_until_ready(chunk.mark)
            after = by = time.perf_counter()
        result = chunk.result.open()
        self._arrived = time.perf_counter()
        self._done = self._arrived - (chunk.unseen or 0.0)
        most, least = self._arrived - after, self._done - max(by, after)
        compiled, self._built = self._built != self._runner.compilations, self._runner.compilations
        return result, float("nan") if compiled or least < 0.8 * most else least
