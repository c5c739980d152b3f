"""The common interface of one engine, of replicas, and of the engines of several processes."""

from __future__ import annotations

import abc
import dataclasses
import logging
import time
from collections.abc import Callable
from collections.abc import Sequence as Several

import numpy as np

from specjax.config import SpecConfig
from specjax.control import slower_than_plain
from specjax.decode.options import Features
from specjax.engine.compiling import OnProgram
from specjax.engine.options import Limits
from specjax.engine.request import Job, SampleOutput, Totals
from specjax.engine.runner import Runner
from specjax.engine.sequence import Finished, Progress, Sequence
from specjax.engine.start_up import Programs, StartUp, calibrate, compile_ahead
from specjax.engine.unfinished import Unfinished
from specjax.models.transformer import Params
from specjax.telemetry import Collector

log = logging.getLogger(__name__)


class BaseEngine(abc.ABC):
    """Takes samples, and generates them step by step.

    Attributes:
      engines: the engines of this process, one or several replicas of equal settings; each has a
        scheduler, a controller and a runner of its own.
      runner: the runner of the first engine.
      unfinished: the unfinished samples of the first engine.
      spec: how the engines speculate; None: they decode plainly.
      limits: limits of a single job.
      telemetry: the collector of rejected drafts in this process; None: they are not collected.
      on_poll: function that `step` calls while the devices work, for work of the host that then
        delays nothing. It must not wait for a device.
    """

    engines: tuple
    runner: Runner
    unfinished: Unfinished
    spec: SpecConfig | None
    limits: Limits
    telemetry: Collector | None
    on_poll: Callable[[], None] | None = None

    @property
    @abc.abstractmethod
    def version(self) -> int:
        """The version of the weights: the number of calls of `set_params` so far."""

    @property
    @abc.abstractmethod
    def outstanding(self) -> int:
        """The number of samples that were added and are not finished."""

    @property
    @abc.abstractmethod
    def has_work(self) -> bool:
        """Whether `step` has anything to do."""

    @property
    def drained(self) -> list[int]:
        """The indices of the `engines` that have nothing to do."""
        return [i for i, engine in enumerate(self.engines) if not engine.has_work]

    def warm_up(
        self,
        features: Several[Features] = (Features(),),
        on_program: OnProgram | None = None,
    ) -> StartUp:
        """Compiles the programs of generation, and measures them if the controller needs costs.

        The controller takes the measured costs and keeps whatever else it has learned or loaded.

        Args:
          features: sets of features, each of which gets a set of programs. The default one serves
            requests that ask for nothing but a temperature; `Features.all()` serves all requests,
            slower. A request that no set covers has its programs compiled when it comes.
          on_program: function called with the number of programs that are ready and the number of
            all, see `compile_ahead`.

        Raises:
          RuntimeError: samples run, whose caches would be overwritten.
        """
        if not self.engines:
            return StartUp(0, 0.0, 0.0, 0, 0, 0)
        for engine in self.engines:
            if engine.scheduler.positions:
                raise RuntimeError(
                    "warm_up would overwrite the caches of samples that run; call it before "
                    "add(), or suspend() them and add them again"
                )
        programs = [engine.programs() for engine in self.engines]
        return self._prepare(programs, features, on_program)

    def _prepare(
        self,
        programs: Several[Programs],
        features: Several[Features],
        on_program: OnProgram | None = None,
    ) -> StartUp:
        """As `warm_up`, of some programs of each engine; no samples run."""
        start_up = compile_ahead(programs, features, on_program)
        for engine, own in zip(self.engines, programs, strict=True):
            engine.warm_rows = max(own.strategies)
            if engine.control is not None and engine.control.controller == "goodput":
                costs, seconds = calibrate(own, features[0])
                engine.controller.calibrated(costs)
                seconds += start_up.calibration_seconds
                start_up = dataclasses.replace(start_up, calibration_seconds=seconds)
        for engine in self.engines:
            engine.runner.agreement.settle()
            engine.runner.reset()
        log.info("%s", start_up)
        return start_up

    @abc.abstractmethod
    def set_params(self, params: Params, head: Params | None = None, running: str = "recompute"):
        """Takes new weights; compiles nothing after the first time.

        Args:
          params: new parameters of the policy.
          head: new parameters of the draft source; None keeps the present ones.
          running: what becomes of the caches of running sequences: `recompute` reads their tokens
            again with the new weights, `keep` goes on with caches of the old weights. If the old
            head was not finite, `keep` recomputes, too, for NaN would spread from its caches.
            Prompts of waiting sequences are read again either way.
        """

    @abc.abstractmethod
    def set_draft_ids(self, ids: Several[int] | None = None) -> None:
        """Changes the token ids that are drafted from; compiles nothing, and changes no token.

        Args:
          ids: as many different ids as there are now, on all replicas and hosts the same. The
            engine then no longer chooses any itself. None: those that were emitted most so far.

        Raises:
          ValueError: the whole vocabulary is drafted from, the acceptance mode needs fixed ids, or
            `ids` are too many, too few, or no token ids; or there are none, and those in use were
            given, and are not chosen by what is emitted.
        """

    def _check_draft_ids(self, ids: Several[int] | None) -> None:
        """Raises ValueError if the ids to draft from cannot be changed."""
        if self.runner.ids is None:
            raise ValueError(
                "the draft proposes tokens of the whole vocabulary; give SpecConfig(draft_vocab=N) "
                "at the start to have it propose N of them"
            )
        if not self.spec.by_token:
            raise ValueError(
                f"acceptance {self.spec.acceptance!r} is exact only with the ids to draft from "
                "that it began with; use acceptance 'coupled'"
            )
        if ids is None and any(engine.counts is None for engine in self.engines):
            raise ValueError(
                "the ids to draft from were given (token_map, or an earlier call), and are not "
                "chosen by what is emitted; give ids"
            )

    @abc.abstractmethod
    def release(self, weights: bool = True) -> None:
        """Frees the device memory of weights and caches until the next `set_params`.

        That call must pass the head as well.

        Args:
          weights: whether to free the weights, too. False frees the caches alone, until the next
            `step`.

        Raises:
          RuntimeError: some samples are not finished, and so need both.
        """

    def make(self, job: Job, progress: Progress | None = None) -> Sequence:
        """Makes a sequence of a job, for `queue`.

        Args:
          job: the sample to generate.
          progress: state of the sample in an earlier run, which the sequence continues.

        Raises:
          ValueError: the job does not fit.
        """
        return self.unfinished.make(job, progress)

    @abc.abstractmethod
    def queue(self, sequence: Sequence) -> Sequence:
        """Queues a sequence that `make` made; returns the object that represents the sample."""

    def add(self, job: Job, progress: Progress | None = None) -> Sequence:
        """Queues a sample; returns the object that represents it in `abort` and `step`.

        Args:
          job: the sample to generate.
          progress: state of the sample in an earlier run, which it continues.

        Raises:
          ValueError: the job does not fit.
        """
        return self.queue(self.make(job, progress))

    def check(self, job: Job, progress: Progress | None = None) -> None:
        """Raises ValueError if `add` cannot take the job."""
        self.make(job, progress)

    def slower_than_plain(self) -> str | None:
        """See `specjax.control.slower_than_plain`, of this process's engines."""
        return slower_than_plain([engine.controller for engine in self.engines])

    @abc.abstractmethod
    def step(self) -> list[Finished]:
        """Enqueues work and takes in results, once; returns the samples that ended."""

    @abc.abstractmethod
    def abort(self, sequence: Sequence) -> SampleOutput | None:
        """Ends a sample where it stands and frees its slot and pages.

        Returns:
          the sample so far (finish reason `abort`); None if it has ended already.
        """

    @abc.abstractmethod
    def clear(self) -> None:
        """Drops all samples that wait or run."""

    def require_no_work(self) -> None:
        """Raises RuntimeError if samples of `add` are not finished."""
        if self.has_work:
            raise RuntimeError(
                "samples that were added are not finished; step() until they are, or abort them, "
                "before generating others"
            )

    def generate(
        self,
        jobs: Several[Job],
        on_progress: Callable[[int, Totals], None] | None = None,
        on_sample: Callable[[int, SampleOutput], None] | None = None,
    ) -> tuple[list[SampleOutput], Totals]:
        """Runs all jobs to their end.

        Args:
          jobs: the samples to generate.
          on_progress: function called after each step with the number of finished jobs and the
            totals.
          on_sample: function called with the number of a job and its output once it has ended.

        Returns:
          one output per job, in order, and the totals. `text` is None except in samples that a stop
          string ended.

        Raises:
          ValueError: a job does not fit; nothing has run.
          RuntimeError: samples of `add` are not finished; nothing has run.
        """
        self.require_no_work()
        start, steps = time.perf_counter(), self.runner.steps
        totals = Totals(steps, np.zeros(steps + 2, np.int64))
        outputs: list[SampleOutput | None] = [None] * len(jobs)
        try:
            # A sequence that ended is dropped at once, since it holds a second copy of its output.
            remaining = {self.add(job): index for index, job in enumerate(jobs)}
            while self.has_work:
                for event in self.step():
                    index = remaining.pop(event.sequence)
                    outputs[index] = event.sample
                    totals.add(event.sample)
                    if on_sample:
                        on_sample(index, event.sample)
                totals.seconds = time.perf_counter() - start
                if on_progress:
                    on_progress(len(jobs) - len(remaining), totals)
        except BaseException:
            self.clear()  # an interrupted call leaves nothing behind
            raise
        return outputs, totals


class PerEngine:
    """An attribute of each engine that several engines do not have: using it there is an error."""

    def __set_name__(self, owner: type, name: str):
        self._error = (
            f"{owner.__name__} has no {name}: each engine has one of its own; use "
            f"`for one in engine.engines: one.{name}`"
        )

    def __get__(self, instance, owner=None):
        raise AttributeError(self._error)

    def __set__(self, instance, value):
        raise AttributeError(self._error)
