"""The host loop: schedule, run, postprocess.

    schedule      prompts are read, sequences start, and get pages for what they may emit
    run           a chunk is enqueued; the one before it may still be running, unless chunks end
                  early: what comes after those depends on who has ended
    postprocess   the results of the chunk before are read: tokens, and who has finished

Bookkeeping is plain Python; device work is in `Runner`'s executables. A sequence that ends leaves
after two chunks at most, and another takes its slot. By the keying of the noise it does not matter
to the tokens when or where a sequence runs, by which strategy, or how often it is interrupted.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Several

import jax
import numpy as np

from specjax.config import ModelConfig, SpecConfig, Strategy
from specjax.control import OFF, ControlConfig, Controller, Observation, make_controller
from specjax.decode.options import Features
from specjax.decode.plan import Plan
from specjax.decode.round import Result
from specjax.decode.state import RUNNING
from specjax.draft.source import DraftSource
from specjax.engine.checks import Limits, check_job
from specjax.engine.inputs import admission_of, piece_of, place_sizes
from specjax.engine.options_rows import features_of
from specjax.engine.pages import PagePool, pages_for
from specjax.engine.programs import choose_program, leave_at
from specjax.engine.request import Job, SampleOutput, Totals
from specjax.engine.run import run_to_the_end
from specjax.engine.runner import Runner
from specjax.engine.scheduler import LengthHistory, Prompt, Scheduler, Start
from specjax.engine.sequence import Brought, Progress, Sequence, rejections_until
from specjax.engine.settings import EngineConfig, piece_widths, powers, strategies_of
from specjax.engine.start_up import StartUp, calibrate, compile_ahead
from specjax.models.transformer import Params
from specjax.telemetry import Collector, SlotInfo, active_transforms

PREFILL_ROWS = 8
IN_FLIGHT = 2

log = logging.getLogger(__name__)


@dataclasses.dataclass
class Chunk:
    """A chunk that was enqueued.

    Attributes:
      rows: the sequence of each row of the batch. result: on the device. version: of the weights.
      enqueued: when. mark: is ready when the chunk begins to run; None: as soon as the chunk before
        it is done.
      sure: tokens that each of its sequences emits at least, if it does not end.
      rounds: at most.
    """

    rows: list[Sequence | None]
    result: Result
    strategy: str
    version: int
    enqueued: float
    mark: jax.Array | None
    sure: int
    rounds: int


@dataclasses.dataclass(frozen=True)
class Finished:
    """A sample that ended, and the ticket that `Engine.add` gave for it."""

    ticket: int
    job: Job
    sample: SampleOutput


class Engine:
    """Continuous batching over a fixed number of slots.

    Args:
      cfg: model config. spec: None is plain decoding. batch: slots.
      max_len: prompt and generated tokens of a sample at most.
      stop_width: stop tokens per request at most, the model's own included.
      mesh: see `Runner`.
      prompt_widths: lengths that (pieces of) prompts are padded to, one set of executables each;
        none: powers of two.
      source: what drafts, see `Runner`.
      config: how the device is used.
      control: how strategies are chosen; None: always `spec`'s own.

    Attributes:
      telemetry: why drafts were rejected; None unless `spec` turns it on.
      controller: chooses the strategy of each chunk.
      version: of the weights, 1 after the first `set_params`.
      stale_positions: of caches that were kept when the weights changed, so far.
      lengths: of earlier samples, by prompt.
      asked: features, and how many of the samples that were added and have not ended ask for them.
    """

    def __init__(
        self,
        cfg: ModelConfig,
        spec: SpecConfig | None,
        batch: int,
        max_len: int,
        stop_width: int = 8,
        mesh: jax.sharding.Mesh | None = None,
        prompt_widths: Several[int] | None = None,
        source: DraftSource | None = None,
        config: EngineConfig | None = None,
        control: ControlConfig | None = None,
    ):
        self.config = config or EngineConfig()
        spec = None if spec is None or spec.is_off else spec
        self.spec, self.control = spec, control
        self.runner = Runner(
            cfg,
            spec,
            batch,
            max_len,
            stop_width,
            mesh,
            source,
            self.config.chunk_tokens,
            strategies_of(spec, control),
            self.config.page_size,
            self.config.cache_bytes,
        )
        self.limits = Limits(cfg, max_len, stop_width, spec.acceptance if spec else None)
        self.batch, self.max_len = batch, max_len
        self.piece_widths = piece_widths(self.config, max_len, prompt_widths)
        self.buckets = powers(batch, 2)
        self.telemetry = Collector() if spec and spec.telemetry_on else None
        self.lengths = LengthHistory()
        self.controller = self._controller(None)
        self.version = 0
        self.stale_positions = 0
        self._vocab = cfg.vocab_size
        self._tickets = 0
        self._last_asked: tuple[tuple, Features] = ((), Features())
        self._is_warm = len(self.runner.plans) == 1  # several strategies are compiled ahead
        self.clear()

    def warm_up(self, features: Several[Features] = (Features(),)) -> StartUp:
        """Compiles all that generation can need, and measures it if the controller asks for that.

        Args:
          features: one set of programs each. The default one serves requests that ask for nothing
            but a temperature; `Features.all()` serves all, slower. A request that no set covers
            compiles its own when it comes.
        """
        self._is_warm = True
        start_up = compile_ahead(self, features)
        if self.control is not None and self.control.controller == "goodput":
            costs, seconds = calibrate(self, features[0])
            start_up = dataclasses.replace(start_up, calibration_seconds=seconds)
            self.controller = self._controller(costs)
        self.runner.reset()
        log.info("%s", start_up)
        return start_up

    def _controller(self, costs) -> Controller:
        if self.control is None:
            own = self.runner.plan.tree
            return make_controller(
                ControlConfig(controller="static", strategies=(OFF,))
                if own is None
                else ControlConfig(controller="static", strategies=(own.strategy,))
            )
        return make_controller(self.control, _drafts(self.runner.plans), costs=costs)

    def clear(self, slots: int | None = None) -> None:
        """Nobody waits and nobody runs.

        Args:
          slots: that are used from now on, at most `batch`; None: all. Fewer run in the smaller
            buckets, as the tail of a rollout does, and compile nothing.
        """
        runner = self.runner
        slots = runner.batch if slots is None else slots
        if not 1 <= slots <= runner.batch:
            raise ValueError(f"slots must be between 1 and {runner.batch}, got {slots}")
        expected = self.lengths.expected if self.config.order == "longest_first" else None
        self.scheduler = Scheduler(
            slots,
            runner.prompts - 1,
            PagePool(runner.pages),
            runner.page_size,
            IN_FLIGHT * runner.most_tokens,
            runner.rewritten,
            expected,
        )
        self._table = np.zeros((runner.slots, runner.table_width), np.int32)
        self._sequences: dict[int, Sequence] = {}
        self.asked: Counter[Features] = Counter()
        self._in_flight: deque[Chunk] = deque()
        self._events: list[Finished] = []
        self._arrived = 0.0
        self._cut_short = False  # whether the last chunk ended early, and others still ran
        self._ended: dict[int, None] = {}  # slots, the latest last

    # --- weights ---------------------------------------------------------------------------------

    def set_params(self, params: Params, head: Params | None = None, running: str = "recompute"):
        """Takes new weights; compiles nothing after the first time.

        Args:
          head: of the draft source; None keeps the one there is.
          running: what becomes of the caches of sequences that run: `recompute` reads them again
            with the new weights, `keep` goes on with what the old weights made of them.
        """
        if running not in ("recompute", "keep"):
            raise ValueError(f"running must be 'recompute' or 'keep', got {running!r}")
        self._drain()
        if running == "recompute":
            latest_first = sorted(self.scheduler.running.values(), key=lambda s: -s.admitted)
            for sequence in latest_first:
                self._step_back(sequence)
            self.scheduler.forget_prompts()
        else:
            self.stale_positions += sum(s.length for s in self.scheduler.running.values())
        self.runner.set_params(params, self.runner.head if head is None else head)
        if not self.scheduler.pool.used:
            self.runner.state = None  # allocated anew, and zeroed, when it is needed
        self.version += 1
        self.controller.weights_changed()

    # --- requests --------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        return bool(self._sequences or self._in_flight or self._events)

    def add(self, job: Job, progress: Progress | None = None) -> int:
        """Queues a sample; returns its ticket.

        Args:
          progress: of an earlier run, which it continues.

        Raises:
          ValueError: the job does not fit.
        """
        self.check(job, progress)
        if job.limit > self.max_len:
            job = dataclasses.replace(job, limit=self.max_len)
        self._tickets += 1
        features = self._features_of(job)
        sequence = Sequence(self._tickets, job, self.runner.steps, features, progress)
        self._sequences[sequence.ticket] = sequence
        self.asked[features] += 1
        self.scheduler.add(sequence)
        return sequence.ticket

    def check(self, job: Job, progress: Progress | None = None) -> None:
        """Raises ValueError if `add` cannot take the job."""
        self._features_of(job)
        limit = min(job.limit, self.max_len)
        copied = 1 + pages_for(self.runner.rewritten, self.runner.page_size)
        wanted, there = pages_for(limit, self.runner.page_size) + copied, self.runner.pages - 1
        if wanted > there:
            raise ValueError(
                f"prompt {job.request} may take {wanted} cache pages of {self.runner.page_size} "
                f"positions, and there are {there}; raise cache_bytes (a page takes "
                f"{self.runner.page_bytes} bytes), or lower max_tokens"
            )
        if progress is None:
            return
        if job.params.transformed_logprobs or job.params.top_logprobs:
            raise ValueError(
                f"prompt {job.request} continues an earlier run and asks for transformed or top "
                "logprobs, which are not kept across runs; leave them out"
            )
        room = limit - len(job.prompt)
        if len(progress.tokens) >= room:
            raise ValueError(
                f"prompt {job.request} continues an earlier run that has {len(progress.tokens)} "
                f"tokens already, and there is room for {room}; it has ended, or raise max_tokens"
            )

    def _features_of(self, job: Job) -> Features:
        """What a job asks for; raises ValueError if it does not fit.

        Samples of one request differ in nothing that matters here, so that the last answer serves
        them all.
        """
        asks = (job.params, job.prompt, job.stop_ids, job.bad_words, job.limit)
        known, features = self._last_asked
        if len(known) != len(asks) or any(a is not b for a, b in zip(known, asks, strict=True)):
            check_job(f"prompt {job.request}", job, self.limits)
            features = features_of(job, self._vocab)
            self._last_asked = asks, features
        return features

    def abort(self, ticket: int) -> SampleOutput | None:
        """Ends a sample where it stands and frees what it holds.

        Returns:
          what there is of it (finish reason `abort`); None if it has ended already.
        """
        sequence = self._sequences.get(ticket)
        if sequence is None:
            return None
        self.scheduler.drop(sequence)
        self._forget(sequence)
        return sequence.output("abort")

    def suspend(self) -> list[tuple[int, Job, Progress]]:
        """Takes out all samples that are not finished: tickets, jobs, and how far they came.

        What ended meanwhile is the next `step`'s result.
        """
        self._drain()
        found = []
        for sequence in list(self._sequences.values()):
            self.scheduler.drop(sequence)
            self._forget(sequence)
            found.append((sequence.ticket, sequence.job, sequence.progress()))
        return found

    def progress(self, ticket: int) -> Progress | None:
        """How far a sample has come; None if it has ended."""
        sequence = self._sequences.get(ticket)
        return sequence and sequence.progress()

    def _forget(self, sequence: Sequence) -> None:
        del self._sequences[sequence.ticket]
        self.asked[sequence.features] -= 1
        if not self.asked[sequence.features]:
            del self.asked[sequence.features]

    def generate(
        self, jobs: Several[Job], on_progress: Callable[[int, Totals], None] | None = None
    ) -> tuple[list[SampleOutput], Totals]:
        """Runs all jobs to their end.

        Args:
          on_progress: called after each chunk with the number of finished jobs and the totals.

        Returns:
          one output per job, in order (`text` is None but where a stop string cut it), and the
          totals.

        Raises:
          ValueError: a job does not fit. RuntimeError: samples of `add` are not finished. Nothing
            has run by then.
        """
        return run_to_the_end(self, jobs, on_progress)

    # --- schedule -> run -> postprocess ----------------------------------------------------------

    @property
    def outstanding(self) -> int:
        """Samples that were added and are not finished."""
        return len(self._sequences)

    @property
    def is_ready(self) -> bool:
        """Whether `step` would find something without waiting for the device."""
        return not self._in_flight or self._in_flight[0].result.length.is_ready()

    def step(self, wait: bool = True) -> list[Finished]:
        """Enqueues a chunk, if there is anything to run, and takes in the one before.

        Args:
          wait: False: takes it in only if the device is done with it.

        Returns:
          the samples that ended.
        """
        self._prepare()
        ahead = 1 if self._cut_short else IN_FLIGHT
        enqueued = len(self._in_flight) < ahead and self._schedule()
        if not enqueued and not self._in_flight:
            self._check_that_somebody_runs()
        full = len(self._in_flight) >= ahead or not enqueued
        if self._in_flight and full and (wait or self.is_ready):
            self._postprocess(self._in_flight.popleft())
        if not self._sequences:
            self._in_flight.clear()  # nobody is left whom it could bring a token
        events, self._events = self._events, []
        return events

    def _check_that_somebody_runs(self) -> None:
        """Raises RuntimeError where `step` would be called for ever."""
        if self._sequences and not self.scheduler.running:
            raise RuntimeError(
                f"{self.scheduler.waiting} samples wait and none can start in "
                f"{self.scheduler.pool.free} free cache pages of {self.scheduler.pool.count - 1}: "
                "a bug of the scheduler; raise cache_bytes to go on without it"
            )

    def _prepare(self) -> None:
        if not self._is_warm:
            self.warm_up()
        if self.runner.state is None:
            self.runner.reset()

    def _schedule(self) -> bool:
        """Makes room, reads prompts, starts sequences, and enqueues a chunk if any can run.

        Those that run wait while `prefill_chunk` tokens of prompts are read, or one piece if that
        is more; when nobody runs, all slots are filled first.
        """
        self._make_room()
        idle, room = not self.scheduler.running, self.config.prefill_chunk
        while (idle or room > 0) and (read := self._read_prompts()):
            room -= read
            if idle:
                self._start()
        self._start()
        return self._enqueue()

    def _make_room(self) -> None:
        """Pages for what the running sequences may emit; the latest give way if need be."""
        while latest := self.scheduler.reserve():
            if self._in_flight:
                self._drain()  # what they have emitted must be known first
                continue
            for sequence in latest:
                self._step_back(sequence)
                self.scheduler.preemptions += 1
        for slot, sequence in self.scheduler.running.items():
            self._table[slot, : len(sequence.pages)] = sequence.pages

    def _step_back(self, sequence: Sequence) -> None:
        """A running sequence waits again; it will be read anew, with what it has generated.

        In `invariant` mode it is generated anew instead: tokens that are read and tokens that are
        generated have keys and values that differ in their last bits.
        """
        self._table[sequence.slot] = 0
        if self.runner.plan.invariant:
            self.scheduler.finish(sequence)
            sequence.restart()
            self.scheduler.add(sequence, first=True)
        else:
            self.scheduler.step_back(sequence)

    def _read_prompts(self) -> int:
        """Enqueues the reading of one piece of some prompts; returns its tokens, padding included.

        0: there is none to read.
        """
        prompts = self.scheduler.next_to_read(self.piece_rows, self._piece_width)
        if not prompts:
            return 0
        width = self._piece_width(prompts[0])
        rows = self.runner.rows_to_read(len(prompts), width, self.piece_rows(width))
        self.runner.prefill(piece_of(prompts, rows, width, self.runner))
        for prompt in prompts:
            prompt.read += min(width, prompt.to_read)
        return rows * width

    def _piece_width(self, prompt: Prompt) -> int:
        """Positions of the next piece of a prompt, padded."""
        return next((w for w in self.piece_widths if w >= prompt.to_read), self.piece_widths[-1])

    def piece_rows(self, width: int) -> int:
        """Prompts of which a piece of that width is read at once."""
        return max(1, min(self.batch, PREFILL_ROWS, self.config.prefill_chunk // width))

    def _start(self) -> None:
        """Enqueues the start of all sequences that can start."""
        starts = self.scheduler.starts()
        for at in range(0, len(starts), self.batch):
            self._place(starts[at : at + self.batch])

    def _place(self, starts: list[Start]) -> None:
        count = next(n for n in place_sizes(self.batch) if n >= len(starts))
        for start in starts:
            sequence = start.sequence
            self._table[sequence.slot] = 0
            self._table[sequence.slot, : len(sequence.pages)] = sequence.pages
            self._ended.pop(sequence.slot, None)
        self.runner.place(admission_of(starts, count, self.runner))

    def _enqueue(self) -> bool:
        """Enqueues a chunk of the sequences that may still run."""
        sure = Counter()  # tokens that each will have emitted when this chunk begins
        for chunk in self._in_flight:
            sure.update({s.ticket: chunk.sure for s in chunk.rows if s is not None})
        alive = [
            s
            for _, s in sorted(self.scheduler.running.items())
            if s.job.limit - s.length > sure[s.ticket]
        ]
        if not alive:
            return False
        strategy = self.controller.select(len(alive))
        hint = self.controller.rounds_hint
        rounds = min(self.runner.rounds(strategy), hint or self.max_len)
        features, bucket = choose_program(self, strategy, alive)
        slots, active = self._rows(alive, bucket)
        leave_at = 0 if hint else self._leave_at(len(alive), strategy, features, bucket)
        table = np.where(active[:, None], self._table[slots], 0)
        enqueued, mark = time.perf_counter(), self.runner.mark
        result = self.runner.chunk(strategy, features, slots, active, table, rounds, leave_at)
        jax.tree.map(lambda x: x.copy_to_host_async(), result)
        rows = alive + [None] * (bucket - len(alive))
        sure = 0 if leave_at else rounds
        self._in_flight.append(
            Chunk(rows, result, strategy, self.version, enqueued, mark, sure, rounds)
        )
        return True

    def _leave_at(self, alive: int, strategy: str, features: Features, bucket: int) -> int:
        others_wait = self.scheduler.has_waiting or self.config.follow_ups
        smaller = (b for b in self.runner.buckets(strategy, features) if b < bucket)
        return leave_at(alive, others_wait, max(smaller, default=0))

    def _rows(self, alive: list[Sequence], bucket: int) -> tuple[np.ndarray, np.ndarray]:
        """Slots of a batch, and which of them are to run."""
        spare = bucket - len(alive)
        slots = [sequence.slot for sequence in alive]
        if self.runner.looks_around:  # what has ended can be drafted from
            slots += list(self._ended)[-spare:] if spare else []
        slots += [self.runner.slots - 1] * (bucket - len(slots))
        return np.array(slots, np.int32), np.arange(bucket) < len(alive)

    def _drain(self) -> None:
        """Takes in all that was enqueued."""
        while self._in_flight:
            self._postprocess(self._in_flight.popleft())

    def _postprocess(self, chunk: Chunk) -> None:
        """Waits for a chunk, and takes in what it brought."""
        result, seconds = self._wait_for(chunk)
        brought = Brought.of(result)
        self._cut_short = int(result.rounds) < chunk.rounds and RUNNING in brought.finish
        tree = self.runner.plans[chunk.strategy].tree
        drafts = tree.rows - 1 if tree else 0
        rejections = None if self.telemetry is None else result.report.rejections
        who: list[SlotInfo | None] = [None] * len(chunk.rows)
        ends = np.full(len(chunk.rows), self.max_len)
        for row, sequence in enumerate(chunk.rows):
            if sequence is None or sequence.slot is None:
                continue
            if rejections is not None:
                who[row] = self._slot_info(sequence)
            sample = sequence.look(row, brought, drafts, chunk.version)
            if sample is not None:
                ends[row] = len(sequence.job.prompt) + len(sample.token_ids)
                self._finish(sequence, sample)
        self.controller.observe(
            Observation(
                batch_size=sum(s is not None for s in chunk.rows),
                strategy=chunk.strategy,
                accepted=result.report.accepted[: int(result.rounds)],
                seconds=seconds,
            )
        )
        if rejections is not None:
            self.telemetry.add(rejections_until(rejections, ends), who)

    def _wait_for(self, chunk: Chunk) -> tuple[Result, float]:
        """The result on the host, and the seconds that it took to run, prompts before it left out.

        They are nan where the host came too late to see when the prompts were done.
        """
        earliest, late = max(self._arrived, chunk.enqueued), False
        if chunk.mark is not None:
            late = chunk.mark.is_ready()
            jax.block_until_ready(chunk.mark)
        begun = earliest if chunk.mark is None else time.perf_counter()
        result = jax.device_get(chunk.result)
        self._arrived = time.perf_counter()
        most, least = self._arrived - earliest, self._arrived - begun
        return result, float("nan") if late and least < 0.8 * most else least

    def _finish(self, sequence: Sequence, sample: SampleOutput) -> None:
        self._table[sequence.slot] = 0
        self._ended[sequence.slot] = None
        self.scheduler.finish(sequence)
        self._forget(sequence)
        if self.config.order == "longest_first":
            self.lengths.add(sequence.job.prompt, len(sample.token_ids))
        self._events.append(Finished(sequence.ticket, sequence.job, sample))

    def _slot_info(self, sequence: Sequence) -> SlotInfo:
        job, transforms = sequence.job, active_transforms(sequence.features)
        return SlotInfo(job.request, job.sample, len(job.prompt), transforms)


def _drafts(plans: Mapping[str, Plan]) -> list[Strategy | str]:
    return [OFF if plan.tree is None else plan.tree.strategy for plan in plans.values()]
