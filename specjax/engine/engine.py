"""An engine: requests come in, samples go out.

Its host loop is `Engine.step`:

    schedule      prompts are read, sequences start, and get pages for what they may emit. More
                  sequences start than there are rows: within a chunk they take over the rows of
                  those that end, so that the device need not wait for the host
    run           a chunk is enqueued while the one before it may still run. After a chunk that
                  ended early the next one waits for its result, on which it depends
    postprocess   the result of the chunk before is read: its tokens, and which samples finished

Bookkeeping is plain Python; device work is in `Runner`'s executables. The slot of a sequence that
ended is free after two chunks at most. The noise is keyed so that tokens do not depend on when or
where a sequence runs, by which strategy, or how often it is interrupted.
"""

from __future__ import annotations

import functools
import itertools
import logging
import math
import operator
import time
import weakref
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from specjax import control as controllers
from specjax.config import ModelConfig, SpecConfig
from specjax.control import OFF, ControlConfig, Controller, Observation, Static
from specjax.decode.chunk import Result
from specjax.decode.options import Features
from specjax.decode.report import Rejections
from specjax.decode.state import RUNNING
from specjax.engine import settings
from specjax.engine.base import BaseEngine
from specjax.engine.chunks import Chunk, InFlight, choose_program, next_chunk
from specjax.engine.pages import PagePool, StateRows
from specjax.engine.request import Limits, SampleOutput
from specjax.engine.runner import (
    FEW,
    Runner,
    admission_of,
    piece_of,
    place_size,
    place_sizes,
    row_map_of,
)
from specjax.engine.scheduler import LengthHistory, Prompt, Scheduler
from specjax.engine.sequence import Finished, Sample, Unfinished, listed
from specjax.engine.settings import EngineConfig
from specjax.engine.start_up import calibrate, compile_ahead, compile_behind, run_once
from specjax.error_text import first_line
from specjax.interfaces import FinishedSample
from specjax.kernels.dispatch import device_of
from specjax.models.transformer import Params
from specjax.telemetry import Collector, SlotInfo, active_transforms
from specjax.weights.matrix import is_exact

log = logging.getLogger(__name__)

PREFILL_ROWS = 8  # the most prompts that one prefill reads
FIRST_WIDTH = 64  # positions of the pieces of prompts that can be read first
# Bounds of the time that a program takes, in units of the time to compile the plain program that
# takes longest: to run it once and measure it, and to compile it. On two busy cores, compiling
# and measuring the 9 missing chunks of assets/sums for 16 rows (4 plain, 5 that draft) took 103 s,
# which is 17 units. These give 29.
MEASURING_COST, PLAIN_COST, DRAFTING_COST = 1, 1, 3


class Engine(BaseEngine):
    """Continuous batching over a fixed number of slots.

    Args:
      cfg: the model's config.
      spec: how to speculate; None: plain decoding.
      batch: number of slots.
      max_len: the most prompt and generated tokens of a sample.
      control: how strategies are chosen; None: always `spec`'s own.
      prompt_widths: lengths that pieces of prompts are padded to, each with executables of its own;
        None: powers of two.
      config: how the device is used.
      mesh: mesh over which the engine is sharded, see `Runner`.
      more: further arguments of `Runner`.

    Attributes:
      runner: the device side: weights, state and executables.
      scheduler: slots, pages and the queue.
      controller: the controller that chooses the strategy of each chunk.
      unfinished: the samples that have not ended.
      buckets: compiled batch sizes, ascending; one in `invariant` mode.
      piece_widths: lengths that pieces of prompts are padded to, ascending.
      telemetry: the collector of rejected drafts; None unless `spec` turns it on.
      watcher: object whose methods are called with the results of each chunk, and must return
        quickly; None: there is none. `chunk(strategy, bucket, rounds, stands_in)` is called after a
        result was read, `news(sample, news)` for each sample that got tokens.
      lengths: lengths of earlier samples, by prompt.
      others_wait: whether samples outside this engine wait for slots that become free.
      latest: strategy and bucket of the last chunk whose result was read; None before the first.
      replica: index of this engine among the replicas.
      replicas: number of replicas, which compile one after the other.
      warm_rows: the largest batch that the controller chooses for: the programs of larger ones are
        not compiled and measured yet.
      to_measure: features and largest bucket of chunks to measure, see `measure_later`.
      preemptions: number of samples that were preempted for lack of pages so far.
    """

    version, replica, replicas = 0, 0, 1

    def __init__(
        self,
        cfg: ModelConfig,
        spec: SpecConfig | None,
        batch: int,
        max_len: int,
        *,
        control: ControlConfig | None = None,
        prompt_widths: Sequence[int] | None = None,
        config: EngineConfig = EngineConfig(),  # noqa: B008
        mesh: jax.sharding.Mesh | None = None,
        **more: Any,
    ):
        self.config, self._prompt_widths = config, prompt_widths
        self.control, self.batch, self.max_len = control, batch, max_len
        self.spec = None if spec is None or spec.is_off else spec
        platform, strategies = device_of(mesh).platform, settings.strategies_of(self.spec, control)
        sizes = {"widths": self._widths(platform), "strategies": strategies}
        self.runner = runner = Runner(
            cfg, spec, batch, max_len, mesh=mesh, config=config, **sizes, **more
        )
        spec, acceptance = self.spec, self.spec.acceptance if self.spec else None
        self.limits = Limits(cfg, max_len, runner.stop_width, acceptance)
        self.size_for(platform)
        self.controller, self._plain = Static(runner.plan.strategy), Static(OFF)
        if control is not None:
            compiled = [plan.strategy for plan in runner.plans.values()]
            self.controller = controllers.make_controller(control, compiled)
        self.telemetry = Collector() if spec and spec.telemetry else None
        self.watcher: Any = None
        self.lengths = LengthHistory()
        self.latest: tuple[str, int] | None = None
        self.preemptions = 0
        self._to_feed: list[FinishedSample] = []
        self.clear()
        # With several strategies `step` compiles all of them, at first or later.
        self.warm_rows = batch if len(runner.plans) == 1 else 0
        self.to_measure: tuple[Features, int] | None = None
        # Threads hold the runner, and with it the weights, while programs wait for them.
        weakref.finalize(self, runner.executables.background.cancel)
        self._plain_seconds = 0.0  # duration of plain chunks since programs were compiled last

    @property
    def engines(self) -> tuple[Engine]:
        """A tuple of this engine alone.

        It is no attribute, because that would be a reference cycle, which keeps the device memory
        of a deleted engine until the garbage collector runs.
        """
        return (self,)

    def size_for(self, platform: str) -> None:
        """Sets `buckets` and `piece_widths` to those of engines on a platform.

        They are those of the engine's own devices; a plan sets them for devices that others stand
        for. Programs that are compiled for other sizes are not used.
        """
        self.piece_widths = self._widths(platform)
        base = settings.bucket_base(platform)
        is_one = self.runner.plan.invariant
        self.buckets = [self.batch] if is_one else settings.powers(self.batch, base)

    def _widths(self, platform: str) -> list[int]:
        return settings.piece_widths(self.config, self.max_len, self._prompt_widths, platform)

    def clear(self) -> None:
        runner, self.unfinished = self.runner, Unfinished()

        def expected_length(sample: Sample) -> float | None:
            return self.lengths.expected(sample.job.prompt_hash)

        self.scheduler = Scheduler(
            self.batch + runner.extra_slots,
            runner.prompts - 1,
            PagePool(runner.pages),
            runner.page_size,
            runner.rewritten,
            expected_length if self.config.order == "longest_first" else None,
            runner.reuse if self.config.enable_prefix_caching else None,
            StateRows(runner.state_rows) if runner.state_rows else None,
        )
        self._in_flight = InFlight(runner)
        # The batch size that decides how many rounds the next chunk has.
        self._rows = 0
        self._events: list[Finished] = []
        self._ended: dict[int, None] = {}  # slots of ended samples, the latest last
        self.others_wait = False
        runner.agreement.clear()
        # A program may have failed after the buffers of the state were donated to it.
        if any(x.is_deleted() for x in jax.tree.leaves((runner.state, runner.kept))):
            runner.state = None

    # --- before the first request ----------------------------------------------------------------

    def programs(self, features: Sequence[Features], largest: int | None = None) -> list[tuple]:
        """The keys of programs that may be needed, see `Executables`, in the order of compiling.

        The smallest buckets come first, and of a bucket the strategies with the most steps.

        Args:
          features: sets of features, each of which gets programs for chunks. Plain rounds get one
            program for all sets, since further options do not slow them.
          largest: the bucket of the largest chunks; None: the last.
        """
        runner, keys = self.runner, [("place", size) for size in place_sizes(self.batch)]
        for bucket, names in self.choices(largest or self.batch).items():
            for name in names:
                plain = runner.strategies[name].plan.tree is None
                several = [functools.reduce(operator.or_, features)] if plain else features
                keys += [runner.chunk_key(name, one, bucket) for one in several]
        for width in self.piece_widths:
            most = self._piece_rows(width)
            several = [most] if runner.plan.invariant else sorted({1, min(FEW, most), most})
            keys += [runner.piece_key(rows, width) for rows in several]
        return list(dict.fromkeys(keys))

    def choices(self, largest: int) -> dict[int, list[str]]:
        """The strategies that the controller may choose, those with the most steps first.

        Returns:
          them by bucket, of buckets up to `largest`.
        """
        plans, may_choose = self.runner.plans, self.controller.may_choose
        longest_first = sorted(plans, key=lambda name: -plans[name].steps)
        return {
            bucket: [name for name in longest_first if may_choose(name, smaller + 1)]
            for smaller, bucket in itertools.pairwise([0, *self.buckets])
            if bucket <= largest
        }

    def first_programs(self, features: Features) -> list[tuple]:
        """Programs by which all samples can be generated, if only slowly: one of each kind.

        Where others may stand in, pieces of prompts are short and read one by one.
        """
        runner, widths = self.runner, self.piece_widths
        width, rows = next((w for w in widths if w >= FIRST_WIDTH), widths[-1]), 1
        if runner.plan.invariant or not self.config.stand_in:
            width, rows = widths[-1], self._piece_rows(widths[-1])
        chunk = runner.chunk_key(self._controller_for(self.batch).active, features, self.batch)
        return [("place", place_size(self.batch, FEW)), chunk, runner.piece_key(rows, width)]

    def share_programs(self, other: Engine) -> bool:
        """Takes the compiled programs of another engine with the same draft source.

        What it knows, holds and generates stays its own.

        Returns:
          whether the engines have equal programs; else nothing changes.
        """
        equal = self.program_settings == other.program_settings
        if equal:
            self.runner.share_programs(other.runner)
        return equal

    @property
    def program_settings(self) -> tuple:
        """All that decides which programs are compiled, besides the draft source."""
        runner, sizes = self.runner, (self.batch, self.max_len, self.runner.stop_width)
        plans = tuple(runner.plans)
        return runner.cfg, runner.mesh, self.spec, self.config, plans, sizes, self.piece_widths

    def reset(self) -> None:
        """Empties the caches; no samples run."""
        self.scheduler.forget_pages()
        self.runner.reset()

    def start_lines(self) -> list[str]:
        """Lines for the log at the start: whether it speculates, how, and on which kernel."""
        first = self.controller if self.warm_rows or not self._starts_plain else self._plain
        plans, using = self.runner.plans, f"Using strategy: {first.active}"
        if len(plans) > 1:
            using += f" at first, of {', '.join(plans)}"
        enabled = any(plan.tree is not None for plan in plans.values())
        kernel = f"attention kernel: {self.runner.cfg.run.attention}"
        products = self.runner.cfg.run.products
        if not is_exact(products):
            pairs = [("*", products)] if isinstance(products, str) else products
            using += f"; weights: {', '.join(map(' '.join, pairs))}"
        graphs = self.runner.executables.graphs.line
        return [f"Speculative decoding enabled: {enabled}", using, kernel, *filter(None, [graphs])]

    # --- weights ---------------------------------------------------------------------------------

    def set_params(self, params: Params, head: Params | None = None, running: str = "recompute"):
        if running not in ("recompute", "keep"):
            raise ValueError(f"running must be 'recompute' or 'keep', got {running!r}")
        self.drain()
        # Samples that wait for a row hold nothing but what was read, and read it again.
        recompute = running == "recompute" or not self._draft_is_finite
        self._preempt_all(keep=True, first=0 if recompute else self.batch)
        self.scheduler.forget_prompts()
        self.scheduler.forget_pages()
        self.runner.weights.set(params, head)
        self.version += 1
        self._weights_changed()

    def set_head(self, head: Params) -> None:
        """Takes new parameters of the draft source alone.

        They change no token, and so not the version of the weights. Running samples go on with
        the draft caches of the old head, unless that was not finite: then their tokens are read
        again.

        Raises:
          ValueError: the engine decodes plainly.
        """
        if self.spec is None:
            raise ValueError("got a draft head, and this engine drafts nothing; give it a spec")
        self.drain()
        if not self._draft_is_finite:
            self._preempt_all()
            self.scheduler.forget_prompts()
            self.scheduler.forget_pages()
        self.runner.weights.set_head(head)
        self._weights_changed()

    def _weights_changed(self) -> None:
        self.scheduler.forget_pages()
        if not self.scheduler.pool.used:
            self.runner.state = None  # it is allocated anew, and zeroed, when it is needed
        self.controller.weights_changed()

    @property
    def _draft_is_finite(self) -> bool:
        """Whether the draft's weights hold no NaN or infinity, which caches would take over."""
        head = self.runner.weights.checksums.get("draft")
        return head is None or head.finite

    def retract(self, keep: bool = True) -> None:
        """Puts all running samples back into the queue, where they hold no pages.

        With `keep` their tokens are read again in `invariant` mode too: other weights may come.
        """
        self.drain()
        self._preempt_all(keep)
        self.scheduler.forget_prompts()

    def _preempt_all(self, keep: bool = False, first: int = 0) -> None:
        """Puts running samples back into the queue.

        Args:
          keep: as in `preempt`.
          first: number of samples, in the order of their starts, that run on.
        """
        for sample in reversed(list(self.scheduler.running.values())[first:]):
            self.preempt(sample, keep)

    def release(self, weights: bool = True) -> None:
        self.require_ended()
        self.drain()
        self.scheduler.forget_pages()
        self.runner.state = self.runner.kept = self.runner.mark = None
        if weights:
            self.runner.weights.release()

    # --- samples ---------------------------------------------------------------------------------

    @property
    def outstanding(self) -> int:
        return len(self.unfinished)

    @property
    def has_work(self) -> bool:
        return bool(self.unfinished or self._in_flight or self._events)

    @property
    def running(self) -> list[Sample]:
        """The samples that have a row as far as the host knows, in the order of their starts."""
        return list(self.scheduler.running.values())[: self.batch]

    def queue(self, sample: Sample) -> Sample:
        sample.replica = self.replica
        self.unfinished.add(sample)
        self.scheduler.add(sample)
        return sample

    def abort(self, sample: Sample) -> SampleOutput | None:
        if sample not in self.unfinished:
            return None
        if self.config.order == "longest_first":  # without the abort it would have been longer
            self.lengths.add_longer_than(sample.job.prompt_hash, len(sample.tokens))
        self._drop(sample)
        return sample.output("abort")

    def suspend(self) -> list[Sample]:
        """Removes and returns all samples that are not finished.

        `add(sample.job, sample.output())` continues one later. The next `step` returns the
        samples that ended meanwhile.
        """
        self.drain()
        suspended = list(self.unfinished)
        for sample in suspended:
            self._drop(sample)
        return suspended

    def _drop(self, sample: Sample) -> None:
        self.scheduler.drop(sample)
        del self.unfinished[sample]

    # --- the host loop ---------------------------------------------------------------------------

    @property
    def is_ready(self) -> bool:
        """Whether `step` would find a result without waiting for the device."""
        self._in_flight.poll()
        return self._in_flight.is_ready

    def step(self, wait: bool = True) -> list[Finished]:
        """Enqueues a chunk, if there is anything to run, and reads the result of the one before.

        Args:
          wait: whether to wait for that result. False: it is read only if the device is done.

        Returns:
          the samples that ended.
        """
        runner, executables = self.runner, self.runner.executables
        if runner.weights.policy is None:
            raise RuntimeError("there are no weights; call set_params() before step()")
        self._warm_up_if_due()
        if self.unfinished and not executables.by_key and not executables.pending:
            self._compile_first()
        if runner.state is None:
            runner.reset()
        if self._to_feed:
            runner.weights.feed(self._to_feed)
            self._to_feed = []
        self._in_flight.poll()
        taken_over = self.scheduler.has_waiting or len(self.scheduler.running) > self.batch
        limit = self._in_flight.limit(taken_over)
        enqueued = len(self._in_flight) < limit and self._schedule()
        if self.unfinished and not (enqueued or self._in_flight or self.scheduler.running):
            raise RuntimeError(f"{self.scheduler.waiting} samples wait and none can start: a bug")
        if self.on_poll is not None:
            self.on_poll()
        full = len(self._in_flight) >= limit or not enqueued
        wait = wait or runner.agreement.is_shared
        if self._in_flight and full and (wait or self.is_ready):
            self._postprocess(self._in_flight.take())
        if not self.unfinished:
            self._in_flight.clear()
        events, self._events = self._events, []
        self._in_flight.poll()
        return events

    @property
    def _starts_plain(self) -> bool:
        """Whether samples are decoded plainly until compiling programs that draft seems worth it.

        Several hosts of a replica have clocks that differ, and compile all programs at first.
        """
        chooses = isinstance(self.controller, controllers.Goodput) and OFF in self.runner.plans
        return chooses and not self.runner.agreement.is_shared

    def _warm_up_if_due(self) -> None:
        """Has all strategies compiled and measured, unless the work may be too short for that.

        Where plain decoding is a choice of the controller, samples are decoded plainly until their
        chunks took as long as compiling and measuring will take at most, for batches as large as
        the present one. The same holds when larger batches come.
        """
        rows = min(self.batch, max(len(self.unfinished), 1))
        self.measure_if_due()
        if rows <= self.warm_rows or self.to_measure is not None:
            return
        features = self.unfinished.features.widened()
        if not self._starts_plain:
            self.warm_up([features])
            return
        seconds = self._plain_compiling()
        if not self.runner.executables.seconds or not self.unfinished:
            return
        largest = next(bucket for bucket in self.buckets if bucket >= rows)
        chunks = [key for key in self.programs([features], largest) if key[0] == "chunk"]
        plain, ready = self.runner.strategies[OFF].name, self.runner.executables.by_key
        missing = [key[1] for key in chunks if key not in ready]
        units = sum(PLAIN_COST if name == plain else DRAFTING_COST for name in missing)
        units += MEASURING_COST * sum(map(len, self.choices(largest).values()))
        if self._plain_seconds < seconds * units * self.replicas:
            return
        if not self.may_compile_behind:
            self.retract(keep=False)
            compile_ahead([(self.runner, chunks)])
            self.measure(features, largest)
        else:
            compile_behind([(self.runner, chunks)])
            self.measure_later(features, largest)
        self._plain_seconds = 0.0

    def _plain_compiling(self) -> float:
        """The most seconds that compiling a program of plain decoding took; 0: there is none."""
        plain = self.runner.strategies[OFF].name
        timed = list(self.runner.executables.seconds.items())  # threads add to it
        return max([s for k, s in timed if k[0] != "chunk" or k[1] == plain], default=0.0)

    def measure_later(self, features: Features, largest: int) -> None:
        """Has chunks measured once they are compiled, if the controller needs their costs.

        Args:
          features: features of the chunks.
          largest: the largest bucket.
        """
        if self._measures:
            self.to_measure = features, largest
        else:
            self.warm_rows = largest

    @property
    def _measures(self) -> bool:
        """Whether the controller needs the costs of strategies."""
        return self.control is not None and self.control.controller == "goodput"

    def measure_if_due(self) -> None:
        """Measures what was compiled for `measure_later`, once nothing runs or enough has run.

        Samples that run are then read again.
        """
        runner, store = self.runner, self.runner.executables
        if store.pending:  # take those that threads have compiled
            store.collect(runner.agreement.least_ready(store.ready))
        if self.to_measure is None or store.pending or runner.weights.policy is None:
            return
        features, largest = self.to_measure
        count = sum(map(len, self.choices(largest).values()))
        # Clocks of several hosts differ, and without plain decoding all wait for the controller.
        if self.unfinished and not runner.agreement.is_shared and OFF in runner.plans:
            if self._plain_seconds < self._plain_compiling() * MEASURING_COST * count:
                return
        self.retract(keep=False)
        runner.reset()
        self._plain_seconds = 0.0
        try:
            keys = [key for key in self.programs([features], largest) if key[0] == "chunk"]
            run_once(runner, filter(store.by_key.__contains__, keys))
            seconds = self.measure(features, largest)
            log.info("measured %d programs in %.1f s", count, seconds)
        except jax.errors.JaxRuntimeError as error:
            log.warning("strategies could not be measured: %s", first_line(error))
            self.to_measure, self.warm_rows = None, largest
            self.reset()

    def measure(self, features: Features, largest: int) -> float:
        """Gives the controller the costs of chunks, if it needs them; no samples run.

        Args:
          features, largest: as in `measure_later`.

        Returns:
          the seconds that measuring took.
        """
        self.to_measure, self.warm_rows, seconds, chunks = None, largest, 0.0, self.runner.chunks
        ready = {}
        for bucket, names in self.choices(largest).items() if self._measures else ():
            if names := [name for name in names if bucket in dict(chunks(name, features))]:
                ready[bucket] = names
        if ready:
            costs, seconds = calibrate(self.runner, ready, features)
            self.controller.calibrated(costs)
        self.runner.agreement.settle()
        self.reset()
        return seconds

    def _controller_for(self, rows: int) -> Controller:
        """The controller of chunks of so many rows."""
        waits = rows > self.warm_rows and OFF in self.runner.plans
        return self._plain if waits else self.controller

    def _compile_first(self) -> None:
        """Compiles the programs of the first prompts and the first chunk, side by side.

        It is called before the first step of an engine that was not warmed up, while nothing is in
        the caches. CUDA graphs are checked by the chunk's program.
        """
        runner, first = self.runner, list(self.unfinished)[: self.batch]
        strategy = self._controller_for(min(len(first), self.batch)).active
        chunk = choose_program(runner, self.buckets, self.unfinished, strategy, first)
        width = self._padded(len(first[0].job.prompt) - 1)
        rows = self._piece_rows(width)
        keys = [
            ("place", place_size(self.batch, min(len(first), rows))),
            runner.chunk_key(*chunk),
            runner.piece_key(rows, width),
        ]
        compares = runner.executables.graphs.wanted
        compile_ahead([(runner, keys)], run=False)
        if compares:
            self.reset()

    def _choose(self, asked: tuple, *others: tuple) -> tuple:
        """The key of the program to run: the one asked for, or another while it is not ready.

        Another runs where it may stand in, see `_waits`, or where the one asked for fails.

        Args:
          others: keys of programs that are compiled or being compiled, the nearest first.
        """
        store = self.runner.executables
        if asked in store.by_key:
            return asked
        chosen = None
        if not self._waits:
            chosen = next((key for key in others if key in store.by_key), None)
        if chosen is None:  # `wait_for` holds for one that is to be compiled now
            chosen = next((key for key in (asked, *others) if store.wait_for(key)), asked)
        if chosen != asked and asked not in store.failed:
            if asked not in store.pending:
                compile_behind([(self.runner, [asked])])
            if not store.in_order:
                store.background.ask(store.pending[asked])
        return chosen

    def drain(self) -> None:
        """Waits for all chunks that were enqueued, and reads their results."""
        while self._in_flight:
            self._postprocess(self._in_flight.take())
        self.runner.agreement.settle()

    def _schedule(self) -> bool:
        """Reserves pages, reads prompts, starts samples, and enqueues a chunk if any can run.

        Running samples wait while at most `prefill_chunk` tokens of prompts are read, or one piece
        if that is more. Where only a few could start, the next prompts wait for others to be read
        with. When no sample runs, prompts are read until all slots are filled.
        """
        self._make_room()
        scheduler, running, room = self.scheduler, self.scheduler.running, self.config.prefill_chunk
        idle, few = not running, scheduler.free < FEW and not scheduler.is_reading
        if few and len(running) > self.batch:
            room = 0
        while (len(running) < self.batch if idle else room > 0) and (read := self._read_prompts()):
            room -= read
            if idle:
                self._start()
        self._start()
        return self._enqueue()

    def _make_room(self) -> None:
        """Reserves pages for what running samples may emit; preempts the latest if need be."""
        scheduler = self.scheduler
        full = scheduler.has_waiting or self.runner.plan.invariant
        self._rows = self.batch if full else min(max(len(scheduler.running), 1), self.batch)
        while True:
            scheduler.ahead = self._in_flight.max_tokens + self.runner.most_tokens(self._rows)
            latest = scheduler.reserve()
            if latest is None:
                return
            if self._rows < self.batch:  # a shorter chunk needs less
                self._rows = self.batch
            elif self._in_flight:
                self.drain()  # what the samples have emitted must be known first
            else:
                self.preempt(latest)
                self.preemptions += 1

    def preempt(self, sample: Sample, keep: bool = False) -> None:
        """Puts a running sample back into the queue.

        Its prompt and its generated tokens are read again. In `invariant` mode the tokens are
        generated again instead, because keys and values of tokens that are read and of tokens that
        are generated differ in their last bits. Tokens that earlier weights generated cannot be
        generated again, and are read.

        Args:
          keep: read the generated tokens in `invariant` mode, too, since the weights are about to
            change.
        """
        sample.unread = 0
        if self.runner.plan.invariant and not keep and sample.is_of(self.version):
            sample.restart()
        self.scheduler.preempt(sample)

    def _read_prompts(self) -> int:
        """Enqueues the reading of one piece of some prompts.

        Returns:
          the number of tokens read, padding included; 0: there is no prompt to read.
        """
        prompts = self.scheduler.next_to_read(self._ready_rows, self._piece_width)
        if not prompts:
            return 0
        runner, width = self.runner, self._piece_width(prompts[0])
        # The smallest compiled program that reads them. Where there is none, and in `invariant`
        # mode, where one program reads all prompts, it is that of the most rows.
        known = [rows for rows in self._compiled_rows(width, True) if rows >= len(prompts)]
        most = self._piece_rows(width)
        asked = most if runner.plan.invariant or not known else known[0]
        keys = [runner.piece_key(count, width) for count in (asked, *known)]
        _, (rows, _) = self._choose(*keys)
        counts = [min(width, prompt.left) for prompt in prompts]
        keep = list(map(self.scheduler.row_to_keep, prompts, counts))
        records = runner.prefill(piece_of(prompts, rows, width, runner, keep))
        if records is not None:
            records.copy_to_host_async()
        for row, (prompt, count) in enumerate(zip(prompts, counts, strict=True)):
            piece = None if records is None else (records, row, slice(0, count))
            self.scheduler.has_read(prompt, count, piece)
        return rows * width

    def _piece_width(self, prompt: Prompt) -> int:
        """The padded length of the next piece of a prompt.

        While no program that reads such pieces is ready, it is that of others which may begin where
        the prompt stands: the shortest that is long enough, or else the longest.
        """
        runner, widths, left = self.runner, self.piece_widths, prompt.left
        size, end = runner.page_size, runner.page_size * runner.table_width
        fits = {w for w in widths if prompt.read % min(size, w) == 0 and prompt.read + w <= end}
        if (prompt.read - prompt.cached) % widths[-1] == 0:  # else others stood in before
            fits.add(self._padded(left))
        width, *others = sorted(fits, key=lambda width: (width < left, abs(width - left)))
        if self._compiled_rows(width):
            return width
        keys = [runner.piece_key(rows, w) for w in others for rows in self._compiled_rows(w, True)]
        _, (_, positions) = self._choose(runner.piece_key(self._piece_rows(width), width), *keys)
        return positions - runner.tail

    def _padded(self, tokens: int) -> int:
        """The shortest width of a piece that holds so many tokens, or else the longest."""
        return next((w for w in self.piece_widths if w >= tokens), self.piece_widths[-1])

    def _ready_rows(self, width: int) -> int:
        """The most prompts of which a piece of this width is read at once by what is ready."""
        compiled, most = self._compiled_rows(width, self._waits), self._piece_rows(width)
        return most if not compiled or most in compiled else compiled[-1]

    def _compiled_rows(self, width: int, soon: bool = False) -> list[int]:
        """The numbers of prompts of which pieces of this width can be read, see `Executables`."""
        return self.runner.executables.rows(width + self.runner.tail, soon)

    @property
    def _waits(self) -> bool:
        """Whether chunks and prompts wait for their own programs, though another could stand in.

        Which program is ready follows the clock, and another one may round otherwise. In
        `invariant` mode all chunks run one program. Where nothing else follows the clock, as with
        one strategy on one replica, log-probabilities are repeatable, and in less than float32 the
        tokens of a seed. (With a prefix cache their bits also depend on who read the beginning of a
        prompt.)
        """
        plans, dtype = self.runner.plans, self.runner.cfg.run.compute_dtype
        if self.runner.plan.invariant or not (self.config.stand_in and self.may_compile_behind):
            return True
        repeatable = (sample.job.is_repeatable(dtype) for sample in self.unfinished)
        return len(plans) == self.replicas == 1 and any(repeatable)

    def _piece_rows(self, width: int) -> int:
        """The most prompts of which a piece of this width is read at once."""
        most = min(self.runner.prompts - 1, PREFILL_ROWS)
        return max(1, min(most, self.config.prefill_chunk // width))

    def _start(self) -> None:
        """Enqueues the start of all samples that can start."""
        starts, runner = self.scheduler.starts(), self.runner
        while starts:
            asked = "place", place_size(runner.batch, len(starts))
            ready = [key for key in runner.executables.by_key if key[0] == "place"]
            _, size = self._choose(asked, *sorted(ready, reverse=True))
            placed, starts = starts[:size], starts[size:]
            for start in placed:
                self._ended.pop(start.sequence.slot, None)
            runner.place(admission_of(placed, size, runner))

    def _enqueue(self) -> bool:
        """Enqueues a chunk of the samples that may still run."""
        runner, certain = self.runner, self._in_flight.certain_tokens()
        running = self.scheduler.running.values()
        samples = [s for s in running if s.job.limit - s.length > certain[s]]
        if not samples:
            return False
        chunk = next_chunk(
            runner,
            samples,
            self.batch,
            self._rows,
            self.buckets,
            self._controller_for(min(len(samples), self.batch)),
            self.unfinished,
            self.scheduler.has_waiting or self.others_wait or self.config.follow_ups,
            self._choose,
        )
        ended = list(self._ended)[-chunk.spare :] if chunk.spare else []
        ended = ended if runner.drafts_from("siblings") else []
        row_map = row_map_of(chunk.sequences, chunk.bucket, chunk.waiting, ended, runner)
        chunk.begun_after, chunk.start_mark = time.perf_counter(), runner.mark
        chunk.version = self.version
        chunk.result = runner.chunk(chunk.strategy, chunk.features, row_map, chunk.ends)
        jax.tree.map(lambda x: x.copy_to_host_async(), chunk.result)
        chunk.announced = runner.agreement.announced
        self._in_flight.add(chunk)
        return True

    def _postprocess(self, chunk: Chunk) -> None:
        """Waits for a chunk, and reads its result."""
        # Hosts that disagree about programs raise here; else the chunk might never end.
        self.runner.agreement.receive(chunk.announced)
        result, seconds = self._in_flight.wait_for(chunk)
        self.runner.agreement.receive()
        lists = listed(result)
        self._in_flight.cut_short = False
        tree = self.runner.plans[chunk.strategy].tree
        # In a program that can draft, the draft reads the emitted tokens even in plain rounds.
        reads = self.runner.strategies[chunk.strategy].plan.tree is not None
        rejections = None if self.telemetry is None else result.report.rejections
        infos: list[SlotInfo | None] = [None] * len(result.length)
        ends = np.full(len(infos), self.runner.max_len)
        ended = catch_up = context = 0
        for index, sample in enumerate(chunk.row_map):
            if sample is None or sample.slot is None:
                continue
            if rejections is not None:
                job, transforms = sample.job, active_transforms(sample.features)
                infos[index] = SlotInfo(job.request, job.sample, len(job.prompt), transforms)
            known = sample.length
            output = sample.take_in(index, lists, tree, chunk.version)
            if int(result.rounds) < chunk.rounds and lists.finish[index] == RUNNING:
                self._in_flight.cut_short = True
            if sample.length > known:  # else it had no row, or its logits were invalid
                if sample.reusable == known and (reads or not self.runner.draft_has_pages):
                    sample.reusable = sample.length
                catch_up = max(catch_up, sample.unread)
                ran = sum(count > 0 for count in lists.report.counts[index])
                context += ran * (known + sample.length) / 2
                sample.unread = 0 if reads else sample.unread + sample.length - known
                if self.watcher is not None:
                    self.watcher.news(sample, sample.news())
            if output is not None:
                ends[index] = len(sample.job.prompt) + len(output.token_ids)
                ended += 1
                self._finish(sample, output)
        self.latest = chunk.strategy, chunk.bucket
        if self.watcher is not None:
            self.watcher.chunk(*self.latest, int(result.rounds), chunk.stands_in)
        self._observe(chunk, result, seconds, ended, catch_up, context)
        if rejections is not None:
            self.telemetry.add(_rejections_until(rejections, ends), infos)

    def _observe(
        self,
        chunk: Chunk,
        result: Result,
        seconds: float,
        ended: int,
        catch_up: int,
        context: float,
    ) -> None:
        """Tells the controller of a chunk.

        Args:
          ended: number of samples that ended.
          catch_up: as in `Observation`.
          context: tokens in the caches of all slots, summed over the rounds in which they ran.
        """
        rounds, sequences = int(result.rounds), chunk.sequences
        if chunk.stands_in or self.runner.executables.pending:
            seconds = math.nan  # they are not those of the strategy alone
        accepted = result.report.accepted[:rounds]
        if self.runner.plans[chunk.strategy].tree is None:
            # A program that can draft reports plain rounds as plain decoding's own program does.
            accepted = np.where(result.report.counts[:rounds] > 0, 0, accepted)
        observation = functools.partial(
            Observation,
            batch_size=len(sequences),
            strategy=chunk.strategy,
            accepted=accepted,
            tokens=int(result.report.counts[:rounds].sum()),
            rounds=rounds,
            catch_up=catch_up,
            ended=ended,
            context=context / rounds if rounds else None,
        )
        if chunk.bucket > self.warm_rows and chunk.strategy == OFF and math.isfinite(seconds):
            self._plain_seconds += seconds
        observe = self._controller_for(chunk.bucket).observe
        self.runner.agreement.ask(seconds, lambda agreed: observe(observation(seconds=agreed)))

    def _finish(self, sample: Sample, output: SampleOutput) -> None:
        self._ended[sample.slot] = None
        self.scheduler.finish(sample)
        del self.unfinished[sample]
        if self.runner.drafts_from("history"):
            self._to_feed.append(FinishedSample(sample.job.prompt, output.token_ids))
        if self.config.order == "longest_first":
            self.lengths.add(sample.job.prompt_hash, len(output.token_ids))
        self._events.append(Finished(sample, output))


def _rejections_until(rejections: Rejections, ends: np.ndarray) -> Rejections:
    """Drops rejections after the end of each sample, where a stop string ended it in the chunk.

    Args:
      ends: number of prompt and generated tokens of each sample, [B].
    """
    begins = rejections.position - rejections.accepted  # a round's first token
    return rejections._replace(
        accepted=np.where(begins >= ends, -1, rejections.accepted),
        emitted=rejections.emitted & (rejections.position < ends),
    )
