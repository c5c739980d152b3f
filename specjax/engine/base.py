"""The interface of one engine, of replicas, and of the engines of several processes."""

from __future__ import annotations

import abc
import dataclasses
import logging
import time
from collections.abc import Callable
from collections.abc import Sequence as Several

import numpy as np

from specjax.config import SpecConfig
from specjax.decode.options import Features
from specjax.engine.compiling import OnProgram
from specjax.engine.options import Limits
from specjax.engine.request import Job, SampleOutput, Totals
from specjax.engine.runner import Runner
from specjax.engine.sequence import Finished, Progress, Sequence
from specjax.engine.start_up import StartUp, calibrate, compile_ahead
from specjax.engine.unfinished import Unfinished
from specjax.models.transformer import Params
from specjax.telemetry import Collector

log = logging.getLogger(__name__)


class BaseEngine(abc.ABC):
    """Takes samples, and generates them step by step.

    Attributes:
      engines: those of this process, one or several replicas of equal settings; each has a
        scheduler, a controller and a runner of its own.
      runner: the device side of the first of them. unfinished: its samples that have not ended.
      spec: how they speculate. limits: of a single job.
      telemetry: takes why drafts were rejected, in this process; None: nothing does.
      on_poll: is called by `step` while the devices work: what takes the host a moment delays
        nothing then. It must not wait for a device.
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
        """Version of the weights, 1 after the first `set_params`."""

    @property
    @abc.abstractmethod
    def outstanding(self) -> int:
        """Samples that were added and are not finished."""

    @property
    @abc.abstractmethod
    def has_work(self) -> bool:
        """Whether `step` has anything to do."""

    @property
    def drained(self) -> list[int]:
        """Indices of the `engines` that have nothing to do."""
        return [i for i, engine in enumerate(self.engines) if not engine.has_work]

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
        if not self.engines:
            return StartUp(0, 0.0, 0.0, 0, 0, 0)
        for engine in self.engines:
            if engine.scheduler.positions:
                raise RuntimeError(
                    "warm_up would overwrite the caches of samples that run; call it before "
                    "add(), or suspend() them and add them again"
                )
            engine.is_warm = True
        programs = [engine.programs() for engine in self.engines]
        start_up = compile_ahead(programs, features, on_program)
        for engine in self.engines:
            if engine.control is not None and engine.control.controller == "goodput":
                costs, seconds = calibrate(engine.programs(), features[0])
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
          head: of the draft source; None keeps the one there is.
          running: what becomes of the caches of sequences that run: `recompute` reads them again
            with the new weights, `keep` goes on with what the old weights made of them, unless the
            old head was not finite: such caches would spoil what comes after them. Prompts of
            sequences that still wait are read again either way.
        """

    @abc.abstractmethod
    def release(self, weights: bool = True) -> None:
        """Gives back the device memory of weights and caches, until the next `set_params`, which
        must then have the head as well.

        Args:
          weights: False gives back the caches alone, until something runs.

        Raises:
          RuntimeError: samples are not finished, which need both.
        """

    def make(self, job: Job, progress: Progress | None = None) -> Sequence:
        """A sequence of a job, for `queue`.

        Args:
          progress: of an earlier run, which it continues.

        Raises:
          ValueError: the job does not fit.
        """
        return self.unfinished.make(job, progress)

    @abc.abstractmethod
    def queue(self, sequence: Sequence) -> Sequence:
        """Queues what `make` made; returns what stands for the sample from now on."""

    def add(self, job: Job, progress: Progress | None = None) -> Sequence:
        """Queues a sample, which is known by the object that this returns.

        Args:
          progress: of an earlier run, which it continues.

        Raises:
          ValueError: the job does not fit.
        """
        return self.queue(self.make(job, progress))

    def check(self, job: Job, progress: Progress | None = None) -> None:
        """Raises ValueError if `add` cannot take the job."""
        self.make(job, progress)

    @abc.abstractmethod
    def step(self) -> list[Finished]:
        """Runs for a moment; returns the samples that ended."""

    @abc.abstractmethod
    def abort(self, sequence: Sequence) -> SampleOutput | None:
        """Ends a sample where it stands and frees what it holds.

        Returns:
          what there is of it (finish reason `abort`); None if it has ended already.
        """

    @abc.abstractmethod
    def clear(self) -> None:
        """Drops all that waits or runs."""

    def generate(
        self, jobs: Several[Job], on_progress: Callable[[int, Totals], None] | None = None
    ) -> tuple[list[SampleOutput], Totals]:
        """Runs all jobs to their end.

        Args:
          on_progress: called after each step with the number of finished jobs and the totals.

        Returns:
          one output per job, in order (`text` is None but where a stop string cut it), and the
          totals.

        Raises:
          ValueError: a job does not fit. RuntimeError: samples of `add` are not finished. Nothing
            has run by then.
        """
        if self.has_work:
            raise RuntimeError(
                "samples that were added are not finished; step() until they are, or abort them, "
                "before generate()"
            )
        start, steps = time.perf_counter(), self.runner.steps
        totals = Totals(steps, np.zeros(steps + 2, np.int64))
        outputs: list[SampleOutput | None] = [None] * len(jobs)
        try:
            # A sequence is let go when it ends: it holds what its output holds, once more.
            remaining = {self.add(job): index for index, job in enumerate(jobs)}
            while self.has_work:
                for event in self.step():
                    outputs[remaining.pop(event.sequence)] = event.sample
                    totals.add(event.sample)
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
