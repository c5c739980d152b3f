"""The host loop: schedule, run, postprocess.

    schedule      prompts are read, sequences start, and get pages for what they may emit. Some more
                  than there are rows start, and wait: chunks give them the rows of those that
                  end, and no device waits for the host to do so
    run           a chunk is enqueued; the one before it may still be running, unless chunks end
                  early: what comes after those depends on who has ended
    postprocess   the results of the chunk before are read: tokens, and who has finished

Bookkeeping is plain Python; device work is in `Runner`'s executables. A sequence that ends leaves
after two chunks at most, and another takes its slot. By the keying of the noise it does not matter
to the tokens when or where a sequence runs, by which strategy, or how often it is interrupted.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable

import numpy as np

from specjax.control import Controller, Observation
from specjax.decode.chunk import Result
from specjax.decode.state import RUNNING
from specjax.engine.chunks import Chunk, InFlight, NextChunk
from specjax.engine.inputs import admission_of, piece_of, place_size, row_map_of
from specjax.engine.outstanding import Outstanding
from specjax.engine.pages import PagePool
from specjax.engine.request import Finished, SampleOutput
from specjax.engine.runner import FEW, Runner
from specjax.engine.scheduler import LengthHistory, Prompt, Scheduler, Start
from specjax.engine.sequence import Brought, Sequence, Watcher, rejections_until
from specjax.engine.settings import EngineConfig, powers
from specjax.engine.start_up import Programs
from specjax.engine.vocabulary import TokenCounts
from specjax.interfaces import Sample
from specjax.telemetry import Collector, SlotInfo, active_transforms

PREFILL_ROWS = 8


class Loop:
    """Runs what is in the intake, chunk by chunk.

    Args:
      runner: the device side. intake: the samples to run. config: how the device is used.
      piece_widths: lengths that pieces of prompts are padded to, in order.
      telemetry: takes why drafts were rejected; None: nobody does.

    Attributes:
      controller: chooses the strategy of each chunk; to be set before the first.
      scheduler: slots, pages and the queue. preemptions: samples that had to make room so far.
      version: of the weights that run now.
      lengths: of earlier samples, by prompt.
      counts: of the tokens that samples have; None: nobody asks.
      others_wait: whether somebody outside holds samples for the slots that become free.
      watcher: is told what each chunk brings; None: nobody is.
      on_look: is called by `step` once the device has all the work there is, see `Engine.on_look`.
      latest: strategy and bucket of the chunk that came in last; None before the first.
      buckets: compiled sizes of a batch, one in `invariant` mode. slots: that run at once.
    """

    controller: Controller

    def __init__(
        self,
        runner: Runner,
        intake: Outstanding,
        config: EngineConfig,
        piece_widths: list[int],
        telemetry: Collector | None,
    ):
        self.runner, self.intake, self.config = runner, intake, config
        self.piece_widths, self.telemetry = piece_widths, telemetry
        self.buckets = [runner.batch] if runner.plan.invariant else powers(runner.batch, 2)
        self.lengths = LengthHistory()
        self.counts: TokenCounts | None = None
        self._fed: list[Sample] = []
        self.version, self.preemptions = 0, 0
        self.watcher: Watcher | None = None
        self.on_look: Callable[[], None] | None = None
        self.latest: tuple[str, int] | None = None
        self.clear(runner.batch)

    def clear(self, slots: int) -> None:
        """Nobody waits and nobody runs.

        Args:
          slots: that are used from now on.
        """
        runner, self.slots = self.runner, slots
        self.scheduler = Scheduler(
            slots + runner.waiting,
            runner.prompts - 1,
            PagePool(runner.pages),
            runner.page_size,
            runner.rewritten,
            self.expected if self.config.order == "longest_first" else None,
        )
        self._table = np.zeros((runner.slots, runner.table_width), np.int32)
        self._in_flight = InFlight(runner)
        self._events: list[Finished] = []
        self.others_wait = False
        self._next_chunk = NextChunk(runner, self.buckets)
        self._rows = 0  # of the next chunk, by what is known when room is made for it
        self._ended: dict[int, None] = {}  # slots, the latest last
        runner.agreement.clear()

    def expected(self, sequence: Sequence) -> float | None:
        """Length that a sample is expected to have, by those of its prompt."""
        return self.lengths.expected(sequence.job.prompt_hash)

    def programs(self) -> Programs:
        """All that may be needed; chunks that the controller never asks for are left out."""
        rows, strategies, smallest = {}, {}, 1
        for width in self.piece_widths:
            most = self.piece_rows(width)
            several = [most] if self.runner.plan.invariant else sorted({1, min(FEW, most), most})
            rows[width] = several
        for bucket in self.buckets:
            strategies[bucket] = [
                name
                for name in self.runner.plans
                if self.config.named_strategies or self.controller.may_choose(name, smallest)
            ]
            smallest = bucket + 1
        return Programs(self.runner, rows, strategies)

    @property
    def running(self) -> list[Sequence]:
        """Those that have a row as far as the host knows, in the order in which they started."""
        return list(self.scheduler.running.values())[: self.slots]

    @property
    def has_work(self) -> bool:
        return bool(len(self.intake) or self._in_flight or self._events)

    @property
    def is_ready(self) -> bool:
        """Whether `step` would find something without waiting for the device."""
        self._in_flight.poll()
        return self._in_flight.is_ready

    def step(self, wait: bool = True) -> list[Finished]:
        """Enqueues a chunk, if there is anything to run, and takes in the one before.

        Args:
          wait: False: takes it in only if the device is done with it.

        Returns:
          the samples that ended.
        """
        if self._fed:
            self.runner.feed(self._fed)
            self._fed = []
        self._in_flight.poll()
        self._in_flight.resume()
        limit = self._in_flight.limit(self._rows_are_taken_over)
        enqueued = len(self._in_flight) < limit and self._schedule()
        if not enqueued and not self._in_flight:
            self._check_that_somebody_runs()
        if self.on_look is not None:
            self.on_look()
        full = len(self._in_flight) >= limit or not enqueued
        wait = wait or self.runner.agreement.is_shared
        if self._in_flight and full and (wait or self.is_ready):
            self._postprocess(self._in_flight.take())
        if not len(self.intake):
            self._in_flight.clear()
        events, self._events = self._events, []
        self._in_flight.pause()
        return events

    @property
    def _rows_are_taken_over(self) -> bool:
        """Whether rows that become free have other sequences before the host looks."""
        return self.scheduler.has_waiting or len(self.scheduler.running) > self.slots

    @property
    def _enough_wait(self) -> bool:
        """Whether the next prompts can wait until a few of them are read at once."""
        few_can_start = self.scheduler.free < FEW and not self.scheduler.is_reading
        return few_can_start and len(self.scheduler.running) > self.slots

    def drain(self) -> None:
        """Takes in all that was enqueued."""
        while self._in_flight:
            self._postprocess(self._in_flight.take())
        self.runner.agreement.settle()

    def drop(self, sequence: Sequence) -> None:
        """Takes a sample out where it stands."""
        self.scheduler.drop(sequence)
        self.intake.forget(sequence)

    def abort(self, sequence: Sequence) -> None:
        """The same, of one that will not go on: it would have been longer."""
        if self.config.order == "longest_first":
            self.lengths.add_longer_than(sequence.job.prompt_hash, len(sequence.tokens))
        self.drop(sequence)

    def _check_that_somebody_runs(self) -> None:
        """Raises RuntimeError where `step` would be called for ever."""
        if len(self.intake) and not self.scheduler.running:
            raise RuntimeError(
                f"{self.scheduler.waiting} samples wait and none can start in "
                f"{self.scheduler.pool.free} free cache pages of {self.scheduler.pool.count - 1}: "
                "a bug of the scheduler; raise cache_bytes to go on without it"
            )

    def _schedule(self) -> bool:
        """Makes room, reads prompts, starts sequences, and enqueues a chunk if any can run.

        Those that run wait while `prefill_chunk` tokens of prompts are read, or one piece if that
        is more; when nobody runs, all slots are filled first, and those that wait come later.
        """
        self._make_room()
        running, room = self.scheduler.running, self.config.prefill_chunk
        idle = not running
        if self._enough_wait:
            room = 0
        while (len(running) < self.slots if idle else room > 0) and (read := self._read_prompts()):
            room -= read
            if idle:
                self._start()
        self._start()
        return self._enqueue()

    def _make_room(self) -> None:
        """Pages for what the running sequences may emit; the latest give way if need be."""
        scheduler, most = self.scheduler, self.runner.most_tokens
        full = scheduler.has_waiting or self.runner.plan.invariant
        self._rows = self.slots if full else min(max(len(scheduler.running), 1), self.slots)
        scheduler.ahead = self._in_flight.most + most(self._rows)
        while latest := scheduler.reserve():
            if self._rows < self.slots:  # a shorter chunk needs less
                self._rows = self.slots
                scheduler.ahead = self._in_flight.most + most(self._rows)
                continue
            if self._in_flight:
                self.drain()  # what they have emitted must be known first
                scheduler.ahead = most(self._rows)
                continue
            for sequence in latest:
                self.step_back(sequence)
                self.preemptions += 1
        for slot, sequence in scheduler.running.items():
            self._table[slot, : len(sequence.pages)] = sequence.pages

    def step_back(self, sequence: Sequence, keep: bool = False) -> None:
        """A running sequence waits again; it will be read anew, with what it has generated.

        In `invariant` mode it is generated anew instead: tokens that are read and tokens that are
        generated have keys and values that differ in their last bits. What earlier weights
        generated cannot come again, and is read.

        Args:
          keep: its tokens stay in that mode, too: other weights are about to come.
        """
        self._table[sequence.slot] = 0
        sequence.unread = 0
        if self.runner.plan.invariant and not keep and sequence.is_of(self.version):
            sequence.restart()
        self.scheduler.step_back(sequence)

    def _read_prompts(self) -> int:
        """Enqueues the reading of one piece of some prompts; returns its tokens, padding included.

        0: there is none to read.
        """
        prompts = self.scheduler.next_to_read(self.piece_rows, self._piece_width)
        if not prompts:
            return 0
        width = self._piece_width(prompts[0])
        rows = self._rows_to_read(len(prompts), width)
        self.runner.prefill(piece_of(prompts, rows, width, self.runner))
        for prompt in prompts:
            prompt.read += min(width, prompt.to_read)
        return rows * width

    def _rows_to_read(self, count: int, width: int) -> int:
        """Rows of the smallest program that was compiled for so many pieces of a width.

        Where there is none, and in `invariant` mode, where one program reads all, as many as are
        ever read at once.
        """
        runner, most = self.runner, self.piece_rows(width)
        fits = [rows for rows in runner.executables.rows(width + runner.tail) if rows >= count]
        return most if runner.plan.invariant else min(fits, default=most)

    def _piece_width(self, prompt: Prompt) -> int:
        """Positions of the next piece of a prompt, padded."""
        return next((w for w in self.piece_widths if w >= prompt.to_read), self.piece_widths[-1])

    def piece_rows(self, width: int) -> int:
        """Prompts of which a piece of that width is read at once."""
        most = min(self.runner.prompts - 1, PREFILL_ROWS)
        return max(1, min(most, self.config.prefill_chunk // width))

    def _start(self) -> None:
        """Enqueues the start of all sequences that can start."""
        starts = self.scheduler.starts()
        most = self.runner.prompts - 1
        for at in range(0, len(starts), most):
            self._place(starts[at : at + most])

    def _place(self, starts: list[Start]) -> None:
        count = place_size(self.runner.batch, len(starts))
        for start in starts:
            sequence = start.sequence
            self._table[sequence.slot] = 0
            self._table[sequence.slot, : len(sequence.pages)] = sequence.pages
            self._ended.pop(sequence.slot, None)
        self.runner.place(admission_of(starts, count, self.runner))

    def _enqueue(self) -> bool:
        """Enqueues a chunk of the sequences that may still run."""
        sure, running = self._in_flight.sure(), self.scheduler.running.values()
        sequences = [s for s in running if s.job.limit - s.length > sure[s]]
        if not sequences:
            return False
        chunk = self._next_chunk(
            sequences, self.slots, self._rows, self.controller, self.intake, self._others_wait
        )
        runner, ended = self.runner, []
        if runner.looks_around and chunk.spare:
            ended = list(self._ended)[-chunk.spare :]
        row_map = row_map_of(
            chunk.sequences, chunk.bucket, chunk.waiting, ended, self._table, runner
        )
        chunk.after, chunk.mark, chunk.version = time.perf_counter(), runner.mark, self.version
        chunk.result = runner.chunk(chunk.strategy, chunk.features, row_map, chunk.ends)
        chunk.result.send()
        chunk.said = runner.agreement.said
        self._in_flight.add(chunk)
        return True

    @property
    def _others_wait(self) -> bool:
        """For the places of those that end, beside those that wait."""
        return self.scheduler.has_waiting or self.others_wait or self.config.follow_ups

    def _postprocess(self, chunk: Chunk) -> None:
        """Waits for a chunk, and takes in what it brought."""
        self.runner.agreement.hear(chunk.said)  # or it may never end
        result, seconds = self._in_flight.wait_for(chunk)
        self.runner.agreement.hear()
        brought = Brought.of(result)
        self._in_flight.cut_short = False
        tree = self.runner.plans[chunk.strategy].tree
        # In a program that can draft the draft reads what is emitted, whether it drafts or not.
        reads = self.runner.arms[chunk.strategy].plan.tree is not None
        rejections = None if self.telemetry is None else result.report.rejections
        who: list[SlotInfo | None] = [None] * len(result.length)
        ends = np.full(len(who), self.runner.max_len)
        ended = catch_up = 0
        for index, sequence in enumerate(chunk.row_map):
            if sequence is None or sequence.slot is None:
                continue
            if rejections is not None:
                who[index] = self._slot_info(sequence)
            known = sequence.length
            sample = sequence.look(index, brought, tree, chunk.version)
            if int(result.rounds) < chunk.rounds and brought.finish[index] == RUNNING:
                self._in_flight.cut_short = True
            if sequence.length == known:  # it waited, or the policy has no next token for it
                if sample is not None:
                    ends[index] = known
                    ended += 1
                    self._finish(sequence, sample)
                continue
            catch_up = max(catch_up, sequence.unread)
            sequence.unread = 0 if reads else sequence.unread + sequence.length - known
            if self.watcher is not None:
                self.watcher.news(sequence.ticket, sequence.news())
            if sample is not None:
                ends[index] = len(sequence.job.prompt) + len(sample.token_ids)
                ended += 1
                self._finish(sequence, sample)
        self.latest = chunk.strategy, chunk.bucket
        if self.watcher is not None:
            self.watcher.chunk(*self.latest, int(result.rounds))
        self._tell_controller(chunk, result, seconds, ended, catch_up)
        if rejections is not None:
            self.telemetry.add(rejections_until(rejections, ends), who)

    def _tell_controller(
        self, chunk: Chunk, result: Result, seconds: float, ended: int, catch_up: int
    ) -> None:
        rounds, sequences = int(result.rounds), chunk.sequences
        opted_out = [s for s in sequences if not s.job.params.speculative]
        accepted = result.report.accepted[:rounds]
        if self.runner.plans[chunk.strategy].tree is None:  # as a program of plain decoding tells
            accepted = np.where(result.report.counts[:rounds] > 0, 0, accepted)
        seen = functools.partial(
            Observation,
            batch_size=len(sequences),
            strategy=chunk.strategy,
            accepted=accepted,
            tokens=int(result.report.counts[:rounds].sum()),
            rounds=rounds,
            catch_up=catch_up,
            opted_out=len(opted_out),
            ended=ended,
            is_try=chunk.is_try,
        )
        observe = self.controller.observe
        self.runner.agreement.ask(seconds, lambda agreed: observe(seen(seconds=agreed)))

    def _finish(self, sequence: Sequence, sample: SampleOutput) -> None:
        self._table[sequence.slot] = 0
        self._ended[sequence.slot] = None
        self.scheduler.finish(sequence)
        self.intake.forget(sequence)
        if self.counts is not None:
            self.counts.add(sample.token_ids)
        if self.runner.takes_samples:
            self._fed.append(Sample(sequence.job.prompt, sample.token_ids))
        if self.config.order == "longest_first":
            self.lengths.add(sequence.job.prompt_hash, len(sample.token_ids))
        self._events.append(Finished(sequence.ticket, sequence.job, sample))

    def _slot_info(self, sequence: Sequence) -> SlotInfo:
        job, transforms = sequence.job, active_transforms(sequence.features)
        return SlotInfo(job.request, job.sample, len(job.prompt), transforms)
