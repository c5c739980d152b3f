"""An engine: requests come in, samples go out; what runs when is `Loop`'s business.

Here are the things that a caller does to an engine (add, abort, suspend, swap the weights, warm it
up); `loop` is the host loop, `scheduler` decides what runs next, `runner` holds the programs.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from collections.abc import Sequence as Several

import jax

from specjax.config import ModelConfig, SpecConfig
from specjax.control import ControlConfig, Controller, make_controller
from specjax.decode.options import Features
from specjax.engine.compiling import OnProgram
from specjax.engine.loop import Loop
from specjax.engine.options import Limits
from specjax.engine.outstanding import Outstanding, all_of
from specjax.engine.request import Finished, Job, SampleOutput, Totals
from specjax.engine.run import run_to_the_end
from specjax.engine.runner import Runner
from specjax.engine.scheduler import Scheduler
from specjax.engine.sequence import Progress, Watcher
from specjax.engine.settings import EngineConfig, piece_widths, strategies_of
from specjax.engine.start_up import StartUp, calibrate, compile_ahead
from specjax.engine.vocabulary import TokenCounts
from specjax.interfaces import Draft
from specjax.models.transformer import Params
from specjax.telemetry import Collector

log = logging.getLogger(__name__)


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
      runner: the device side. intake: the samples that have not ended. loop: runs them.
      stale_positions: of caches that were kept when the weights changed, so far.
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
        source: Draft | None = None,
        config: EngineConfig | None = None,
        control: ControlConfig | None = None,
    ):
        self.config = config or EngineConfig()
        widths = piece_widths(self.config, max_len, prompt_widths)
        asked, spec = spec, None if spec is None or spec.is_off else spec
        self.spec, self.control = spec, control
        self.runner = Runner(
            cfg,
            asked,
            batch,
            max_len,
            stop_width,
            mesh,
            source,
            self.config.chunk_tokens,
            strategies_of(spec, control),
            self.config.page_size,
            self.config.cache_bytes,
            stride=widths[-1],
            attention=self.config.attention,
            products=self.config.products,
            stretch=self.config.stretch,
        )
        self.limits = Limits(cfg, max_len, stop_width, spec.acceptance if spec else None)
        self.batch, self.max_len = batch, max_len
        telemetry = Collector() if spec and spec.telemetry_on else None
        self.intake = Outstanding(self.runner, self.limits)
        self.loop = Loop(self.runner, self.intake, self.config, widths, telemetry)
        if self.runner.ids is not None and spec.token_map is None and spec.by_token:
            self.loop.counts = TokenCounts(cfg.vocab_size, self.runner.ids)
        self.controller = self._controller()
        self.stale_positions = 0
        self._is_warm = len(self.runner.plans) == 1  # several strategies are compiled ahead

    @property
    def engines(self) -> tuple[Engine, ...]:
        """Itself; `Replicas` have several."""
        return (self,)

    @property
    def controller(self) -> Controller:
        """Chooses the strategy of each chunk."""
        return self.loop.controller

    @controller.setter
    def controller(self, controller: Controller) -> None:
        self.loop.controller = controller

    @property
    def telemetry(self) -> Collector | None:
        """Why drafts were rejected; None unless `spec` turns it on."""
        return self.loop.telemetry

    @property
    def watcher(self) -> Watcher | None:
        """Is told what each chunk brings."""
        return self.loop.watcher

    @watcher.setter
    def watcher(self, watcher: Watcher | None) -> None:
        self.loop.watcher = watcher

    @property
    def on_look(self) -> Callable[[], None] | None:
        """Is called by `step` once the device has all the work there is: what takes the host a
        moment costs nobody time then. It must not wait for a device."""
        return self.loop.on_look

    @on_look.setter
    def on_look(self, on_look: Callable[[], None] | None) -> None:
        self.loop.on_look = on_look

    @property
    def preemptions(self) -> int:
        """Samples that had to make room so far."""
        return self.loop.preemptions

    @property
    def scheduler(self) -> Scheduler:
        """Slots, pages and the queue."""
        return self.loop.scheduler

    @property
    def version(self) -> int:
        """Of the weights, 1 after the first `set_params`."""
        return self.loop.version

    def warm_up(
        self,
        features: Several[Features] = (Features(),),
        on_program: OnProgram | None = None,
    ) -> StartUp:
        """Compiles all that generation can need, and measures it if the controller asks for that.

        The controller takes the measured costs and keeps whatever else it has learned or loaded.

        Args:
          features: one set of programs each. The default one serves requests that ask for nothing
            but a temperature; `Features.all()` serves all, slower. A request that no set covers
            compiles its own when it comes.
          on_program: hears of each program that is ready: how many are, and of how many; see
            `compile_ahead`.

        Raises:
          RuntimeError: samples run, whose caches would be overwritten.
        """
        return warm_up([self], features, on_program)

    def start_lines(self) -> list[str]:
        """What to say when it starts: whether it speculates, how, and on which kernel.

        Later a controller names the strategy and the accept length in the log of `specjax.control`,
        at `LOG_EVERY` chunks or more between two lines of a kind.
        """
        plans, using = self.runner.plans, f"Using strategy: {self.controller.active}"
        if len(plans) > 1:
            kind = self.control.controller
            using += f" at first; the controller {kind} chooses among {', '.join(plans)}"
            if self.control.bs_threshold is not None:
                using += f", off for more than {self.control.bs_threshold} samples at once"
        enabled = any(plan.tree is not None for plan in plans.values())
        kernel = f"attention kernel: {self.runner.cfg.run.attention}"
        return [f"Speculative decoding enabled: {enabled}", using, kernel]

    def _controller(self) -> Controller:
        if self.control is None:
            own = self.runner.plan.strategy
            return make_controller(ControlConfig(controller="static", strategies=(own,)))
        return make_controller(self.control, [p.strategy for p in self.runner.plans.values()])

    def clear(self, slots: int | None = None) -> None:
        """Nobody waits and nobody runs.

        Args:
          slots: that are used from now on, at most `batch`; None: all. Fewer run in the smaller
            buckets, as the tail of a rollout does, and compile nothing.
        """
        slots = self.batch if slots is None else slots
        if not 1 <= slots <= self.batch:
            raise ValueError(f"slots must be between 1 and {self.batch}, got {slots}")
        self.intake.clear()
        self.loop.clear(slots)
        if self.runner.is_broken:
            self.runner.state = None

    # --- weights ---------------------------------------------------------------------------------

    def set_params(self, params: Params, head: Params | None = None, running: str = "recompute"):
        """Takes new weights; compiles nothing after the first time.

        Args:
          head: of the draft source; None keeps the one there is.
          running: what becomes of the caches of sequences that run: `recompute` reads them again
            with the new weights, `keep` goes on with what the old weights made of them, unless the
            old head was not finite: such caches would spoil what comes after them. Prompts of
            sequences that still wait are read again either way.
        """
        if running not in ("recompute", "keep"):
            raise ValueError(f"running must be 'recompute' or 'keep', got {running!r}")
        self.loop.drain()
        scheduler = self.scheduler
        if running == "recompute" or self._caches_are_spoilt:
            self._step_back(keep=True)
        else:  # those that wait have had no row yet
            self._step_back(keep=True, first=self.loop.slots)
        scheduler.forget_prompts()
        self.stale_positions += scheduler.positions  # of those that run on
        self.runner.set_params(params, self.runner.head if head is None else head)
        self.loop.version += 1
        self._weights_changed()

    def _weights_changed(self) -> None:
        if not self.scheduler.pool.used:
            self.runner.state = None  # allocated anew, and zeroed, when it is needed
        self.controller.weights_changed()

    @property
    def _caches_are_spoilt(self) -> bool:
        """Whether the head that made them is not finite, and so neither are they."""
        head = self.runner.checksums.get("draft")
        return head is not None and not head.finite

    def _step_back(self, keep: bool = False, first: int = 0) -> None:
        """All that run wait again, in order, from the one on that started as the `first`; `keep`:
        see `Loop.step_back`."""
        for sequence in reversed(list(self.scheduler.running.values())[first:]):
            self.loop.step_back(sequence, keep)

    def set_head(self, head: Params) -> None:
        """Takes new parameters of the draft source alone.

        They change no token, and so neither the version of the weights nor the samples that run:
        these go on, and are drafted for with what the old head made of their past. Where that was
        not finite they step back, see `set_params`.

        Raises:
          ValueError: nothing is drafted here.
        """
        if self.spec is None:
            raise ValueError("got a draft head, and this engine drafts nothing; give it a spec")
        self.loop.drain()
        if self._caches_are_spoilt:
            self._step_back()
            self.scheduler.forget_prompts()
        self.runner.moved = 0
        self.runner.set_head(head)
        self._weights_changed()

    def release(self, weights: bool = True) -> None:
        """Gives back the device memory of weights and caches, until the next `set_params`, which
        must then have the head as well.

        Args:
          weights: False gives back the caches alone, until something runs.

        Raises:
          RuntimeError: samples are not finished, which need both.
        """
        if self.outstanding:
            raise RuntimeError(
                f"{self.outstanding} samples are not finished; step() until they are, or suspend() "
                "them and add them again later"
            )
        self.loop.drain()
        runner = self.runner
        runner.state = runner.kept = runner.mark = None
        if weights:
            runner.params = runner.head = runner.vocabulary = runner.history = None

    # --- requests --------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        return self.loop.has_work

    @property
    def outstanding(self) -> int:
        """Samples that were added and are not finished."""
        return len(self.intake)

    @property
    def is_ready(self) -> bool:
        """Whether `step` would find something without waiting for the device."""
        return self.loop.is_ready

    def add(self, job: Job, progress: Progress | None = None) -> int:
        """Queues a sample; returns its ticket.

        Args:
          progress: of an earlier run, which it continues.

        Raises:
          ValueError: the job does not fit.
        """
        sequence = self.intake.add(job, progress)
        self.scheduler.add(sequence)
        return sequence.ticket

    def check(self, job: Job, progress: Progress | None = None) -> None:
        """Raises ValueError if `add` cannot take the job."""
        self.intake.check(job, progress)

    def step(self, wait: bool = True) -> list[Finished]:
        """Enqueues a chunk, if there is anything to run, and takes in the one before.

        Args:
          wait: False: takes it in only if the device is done with it.

        Returns:
          the samples that ended.
        """
        if self.runner.params is None:
            raise RuntimeError(
                "there are no weights to run with: they were released, or never came; call "
                "set_params() before step()"
            )
        if not self._is_warm:  # for what has been added: nothing should compile while it runs
            self.warm_up([all_of(self.intake.asked or [Features()]).widened()])
        if self.runner.state is None:
            self.runner.reset()
        counts = self.loop.counts
        if counts is not None and counts.is_due:
            self.runner.set_ids(counts.most_frequent())
        return self.loop.step(wait)

    def abort(self, ticket: int) -> SampleOutput | None:
        """Ends a sample where it stands and frees what it holds.

        Returns:
          what there is of it (finish reason `abort`); None if it has ended already.
        """
        sequence = self.intake.find(ticket)
        if sequence is None:
            return None
        self.loop.abort(sequence)
        return sequence.output("abort")

    def suspend(self) -> list[tuple[int, Job, Progress]]:
        """Takes out all samples that are not finished: tickets, jobs, and how far they came.

        What ended meanwhile is the next `step`'s result.
        """
        self.loop.drain()
        found = []
        for sequence in self.intake:
            self.loop.drop(sequence)
            found.append((sequence.ticket, sequence.job, sequence.progress()))
        return found

    def emitted(self, ticket: int) -> int:
        """Tokens of a sample so far, those of earlier runs included; 0 if it has ended."""
        sequence = self.intake.find(ticket)
        return len(sequence.tokens) if sequence else 0

    def peek(self, ticket: int) -> SampleOutput | None:
        """A sample as it stands, which goes on (finish reason `abort`); None if it has ended."""
        sequence = self.intake.find(ticket)
        return sequence and sequence.output("abort")

    def progress(self, ticket: int) -> Progress | None:
        """How far a sample has come; None if it has ended."""
        sequence = self.intake.find(ticket)
        return sequence and sequence.progress()

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


def warm_up(
    engines: Several[Engine],
    features: Several[Features] = (Features(),),
    on_program: OnProgram | None = None,
) -> StartUp:
    """`Engine.warm_up` of several engines, whose programs are compiled side by side."""
    for engine in engines:
        if engine.scheduler.positions:
            raise RuntimeError(
                "warm_up would overwrite the caches of samples that run; call it before add(), or "
                "suspend() them and add them again"
            )
        engine._is_warm = True
    start_up = compile_ahead([engine.loop.programs() for engine in engines], features, on_program)
    for engine in engines:
        if engine.control is not None and engine.control.controller == "goodput":
            costs, seconds = calibrate(engine.loop.programs(), features[0])
            engine.controller.calibrated(costs)
            seconds += start_up.calibration_seconds
            start_up = dataclasses.replace(start_up, calibration_seconds=seconds)
    for engine in engines:
        engine.runner.agreement.settle()
        engine.runner.reset()
    log.info("%s", start_up)
    return start_up
