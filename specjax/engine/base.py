"""The common interface of one engine, of replicas, and of the engines of several processes."""

from __future__ import annotations

import dataclasses
import logging
import operator
import time
from collections.abc import Callable, Sequence

import jax

from specjax.config import SpecConfig
from specjax.control import slower_than_plain
from specjax.decode.options import Features
from specjax.engine.programs import OnProgram
from specjax.engine.request import Job, Limits, SampleOutput, Totals, check_job, features_of
from specjax.engine.runner import Runner
from specjax.engine.sequence import Finished, Sample
from specjax.engine.start_up import StartUp, Wanted, compile_ahead, compile_behind
from specjax.models.transformer import Params
from specjax.telemetry import Collector

log = logging.getLogger(__name__)


class BaseEngine:
    """Takes samples, and generates them step by step.

    Attributes:
      engines: the engines of this process, one or several replicas of equal settings; each has a
        scheduler, a controller and a runner of its own.
      version: version of the weights: the number of calls of `set_params` so far.
      outstanding: number of samples that were added and are not finished.
      has_work: whether `step` has anything to do.
      runner: the runner of the first engine.
      spec: how the engines speculate; None: they decode plainly.
      limits: limits of a single job.
      telemetry: the collector of rejected drafts in this process; None: they are not collected.
      on_poll: function that `step` calls while the devices work, for work of the host that then
        delays nothing. It must not wait for a device.
    """

    engines: tuple
    version: int
    outstanding: int
    has_work: bool
    runner: Runner
    spec: SpecConfig | None
    limits: Limits
    telemetry: Collector | None
    on_poll: Callable[[], None] | None = None
    _checked: tuple = ((None,) * 5, Features())  # what the last job was checked by, its features

    @property
    def drained(self) -> list[int]:
        """The indices of the `engines` that have nothing to do."""
        return [i for i, engine in enumerate(self.engines) if not engine.has_work]

    def warm_up(
        self,
        features: Sequence[Features] = (Features(),),
        on_program: OnProgram | None = None,
        background: bool = False,
    ) -> StartUp:
        """Compiles the programs of generation, and measures them if the controller needs costs.

        The controller takes the measured costs and keeps whatever else it has learned or loaded.

        Args:
          features: sets of features, each of which gets a set of programs. The default one serves
            requests that ask for nothing but a temperature; `Features.all()` serves all requests,
            slower. A request that no set covers has its programs compiled when it comes.
          on_program: function called with the number of programs that are ready and the number of
            all, see `compile_ahead`.
          background: whether to return as soon as samples can be generated, by few programs that
            serve all of them. Threads compile the others, those first that samples ask for, and
            they are measured when nothing runs, or when enough has run. Without
            `may_compile_behind` all are compiled first.

        Raises:
          RuntimeError: samples run, whose caches would be overwritten.
        """
        if not self.engines:
            return StartUp()
        for engine in self.engines:
            if engine.scheduler.positions:
                raise RuntimeError("warm_up would overwrite the caches of samples that run")
        features, measuring = sorted(features, key=lambda wanted: wanted.size), 0.0
        if background and self.may_compile_behind:
            first = [(one.runner, one.first_programs(features[-1])) for one in self.engines]
            start_up = compile_ahead(first, on_program, run=False)
            self.compile_behind(features)
        else:
            start_up = compile_ahead(self._wanted(features), on_program)
            measuring = sum(engine.measure(features[0], engine.batch) for engine in self.engines)
        start_up = dataclasses.replace(start_up, calibration_seconds=measuring)
        log.info("%s", start_up)
        return start_up

    def compile_behind(self, features: Sequence[Features]) -> None:
        """Has threads compile all programs, which are then measured if the controller needs it."""
        compile_behind(self._wanted(features))
        for engine in self.engines:
            engine.measure_later(features[0], engine.batch)

    def _wanted(self, features: Sequence[Features]) -> Wanted:
        return [(engine.runner, engine.programs(features)) for engine in self.engines]

    @property
    def may_compile_behind(self) -> bool:
        """Whether threads may compile while samples run.

        They may not where chunks are CUDA graphs, which are compared before, and where XLA's
        autotuner waits for the other processes of a job, which must compile in the same order.
        """
        is_gpu = self.runner.executables.graphs.line is not None
        return not (self.runner.executables.graphs.wanted or (is_gpu and jax.process_count() > 1))

    @property
    def compiling(self) -> int:
        """The number of programs that threads are still to compile."""
        return sum(len(engine.runner.executables.pending) for engine in self.engines)

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

    def release(self, weights: bool = True) -> None:
        """Frees the device memory of weights and caches until the next `set_params`.

        That call must pass the head as well.

        Args:
          weights: whether to free the weights, too. False frees the caches alone, until the next
            `step`.

        Raises:
          RuntimeError: some samples are not finished, and so need both.
        """

    def make(self, job: Job, before: SampleOutput | None = None) -> Sample:
        """Makes a sample of a job, for `queue`.

        Args:
          job: the sample to generate.
          before: the sample as an earlier run left it, which it continues.

        Raises:
          ValueError: the job does not fit.
        """
        runner = self.runner
        facts = job.params, job.prompt, job.stop_ids, job.bad_words, job.limit
        checked, features = self._checked
        if not all(map(operator.is_, facts, checked)):  # else it is of the same request
            check_job(job.where, job, self.limits)
            features = features_of(job, runner.cfg.vocab_size)
            self._checked = facts, features
        limit, pages = min(job.limit, runner.max_len), runner.pages - 1
        if (wanted := runner.pages_of(limit)) > pages:
            raise ValueError(
                f"{job.where} may take {wanted} cache pages of {runner.page_bytes} bytes, and "
                f"there are {pages}; raise cache_bytes, or lower max_tokens"
            )
        if before is not None:
            _check_continued(job, before, limit - len(job.prompt))
        if job.limit > limit:
            job = dataclasses.replace(job, limit=limit)
        return Sample(job, runner.steps, features, before)

    def queue(self, sample: Sample) -> Sample:
        """Queues a sample that `make` made; returns the object that represents it."""

    def add(self, job: Job, before: SampleOutput | None = None) -> Sample:
        """Queues a sample; returns the object that represents it in `abort` and `step`.

        Args:
          job: the sample to generate.
          before: the sample as an earlier run left it, which it continues.

        Raises:
          ValueError: the job does not fit.
        """
        return self.queue(self.make(job, before))

    def slower_than_plain(self) -> str | None:
        """See `specjax.control.slower_than_plain`, of this process's engines."""
        return slower_than_plain([engine.controller for engine in self.engines])

    def step(self) -> list[Finished]:
        """Enqueues work and takes in results, once; returns the samples that ended."""

    def abort(self, sample: Sample) -> SampleOutput | None:
        """Ends a sample where it stands and frees its slot and pages.

        Returns:
          the sample so far (finish reason `abort`); None if it has ended already.
        """

    def clear(self) -> None:
        """Drops all samples that wait or run."""

    def require_ended(self) -> None:
        """Raises RuntimeError if samples are not finished."""
        if self.outstanding:
            raise RuntimeError(
                f"{self.outstanding} samples are not finished; step() until they are"
            )

    def require_no_work(self) -> None:
        """Raises RuntimeError if samples of `add` are not finished."""
        if self.has_work:
            raise RuntimeError("samples that were added are not finished; step() until they are")

    def generate(
        self,
        jobs: Sequence[Job],
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
        start, totals = time.perf_counter(), Totals(self.runner.steps)
        outputs: list[SampleOutput | None] = [None] * len(jobs)
        try:
            # A sample that ended is dropped at once, since it holds a second copy of its output.
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


def _check_continued(job: Job, before: SampleOutput, room: int) -> None:
    """Raises ValueError if a sample of at most `room` tokens cannot continue from `before`."""
    count, problem = len(before.token_ids), None
    lacks = job.params.transformed_logprobs and len(before.transformed_logprobs or ()) < count
    if job.params.logprobs is not None or lacks:
        problem = "asks for logprobs that are not kept across runs, or were not asked for then"
    elif count >= room:
        problem = f"has {count} tokens of at most {room}; raise max_tokens"
    if problem is not None:
        raise ValueError(f"{job.where} continues an earlier run and {problem}")
