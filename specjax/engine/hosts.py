"""The engines of several processes behind the interface of one.

Every process runs replicas on its own devices, independently of the others. (Only processes that
share a replica run their host loops in step, see `specjax.parallel.agreement`.) All processes make
the same calls in the same order: a sample is added on every process, and runs on those of its
owner. From time to time the processes exchange the new tokens of their samples. `step`, `abort` and
a sample's `tokens` give the state of the last exchange, which is the same on all processes, and so
are all decisions that depend on it. Clocks decide when there is an exchange, and nothing else.

An exchange runs on the devices, after the programs that were enqueued before it. Other work on idle
replicas (see `Hosts.idle_work`) ends before the next exchange, so that no process waits for it.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from specjax.engine.base import BaseEngine
from specjax.engine.engine import Engine
from specjax.engine.replicas import POLL, Replicas
from specjax.engine.request import Job, SampleOutput, Totals
from specjax.engine.sequence import Finished, Sample
from specjax.interfaces import Params
from specjax.models.transformer import split_layout
from specjax.parallel import sharding
from specjax.parallel.copies import Copies, ProcessGroup, checksum, require_equal
from specjax.parallel.distributed import gather
from specjax.weights.matrix import is_exact

# Seconds between two exchanges, unless a process has nothing left to run. An exchange costs all
# processes some time, and early stopping of samples need not be faster than this.
EXCHANGE = 1.0
# Where work on idle replicas takes longer, exchanges are this many times as far apart.
_ROOM = 1.25


@dataclasses.dataclass(eq=False)
class SharedSample:
    """A sample as all processes know it; exchanges update it.

    Attributes:
      number: number of the sample, the same on all processes.
      job: the sample to generate.
      owner: index of the group that runs it, see `ProcessGroup`.
      sample: the sample as of the last exchange.
      local: the sample in this process's engine; None: another group runs it.
    """

    number: int
    job: Job
    owner: int
    sample: SampleOutput
    local: Sample | None = None

    @property
    def tokens(self) -> list[int]:
        """The tokens generated so far, those of earlier runs included."""
        return self.sample.token_ids


class Hosts(BaseEngine):
    """The engines of all processes behind the interface of one.

    The samples of a prompt have one owner: the group with the fewest samples when the first of them
    is added. Where a group has several processes, all of them run its samples in step, and the
    first one reports to the other groups.

    Args:
      own: engine of this process; those of all processes have equal settings. In a process without
        a part of a replica it runs nothing, and only checks the jobs that are added.
      copies: copies the weights to the replicas.
      judge: function that the owner calls with each sample that ended. It returns a judgement, or
        None for no verdict. `done()` says whether its `result()` returns without waiting, which is
        the `verdict` of the `Finished` event, and `wait(seconds)` waits at most so long. The owner
        tells nothing more of the sample until the judgement is done, and runs others meanwhile; so
        for all processes a judgement that takes time is a sample that takes time.
      group: group of this process; None: that of `copies`.
      exchange: function that gathers a value from each process, see `distributed.gather`.

    Attributes:
      idle_work: work for own replicas that are idle while others of the job run, as training of a
        draft head; None if there is none. `seconds_needed` are the seconds for which its next piece
        needs a replica. `use_idle(replicas, seconds)` starts a piece that is done by then, without
        waiting, and returns whether one is running; `wait()` waits until none is.
    """

    def __init__(
        self,
        own: Engine | Replicas,
        copies: Copies,
        judge: Callable[[Job, SampleOutput], Any] | None = None,
        group: ProcessGroup | None = None,
        exchange: Callable[[Any, str], list] = gather,
    ):
        self.own, self.copies, self._judge, self._exchange = own, copies, judge, exchange
        self._group = group or copies.group
        self.runner, self.spec, self.limits = own.runner, own.spec, own.limits
        self.engines = own.engines if self._group.index >= 0 else ()
        self.telemetry = own.telemetry
        self.idle_work: Any = None
        if isinstance(own, Replicas):
            own.on_poll = self._poll
        self._added, self._interval, self._until = 0, EXCHANGE, 0.0
        self._sets = 0  # number of calls of `set_params`
        self.clear()

    @property
    def version(self) -> int:
        return self.own.version if self.engines else self._sets

    @property
    def outstanding(self) -> int:
        """The number of samples that were added and had not ended at the last exchange."""
        return len(self._running)

    @property
    def has_work(self) -> bool:
        return bool(self._running)

    @property
    def drained(self) -> list[int]:
        return self.own.drained if self.engines else []

    @property
    def _idle_replicas(self) -> list[int]:
        """The indices of own replicas that are idle while others run, on any process."""
        drained = self.drained
        if len(drained) < len(self.engines):
            return drained
        others = sum(load for owner, load in enumerate(self._load) if owner != self._group.index)
        return drained if others else []

    # --- weights ---------------------------------------------------------------------------------

    def set_params(self, params: Params, head: Params | None = None, running: str = "recompute"):
        """Gives every replica new weights, see `BaseEngine.set_params`.

        Args:
          params: parameters of the policy, on the devices of all processes.
          head: parameters of the draft source, likewise; None keeps the present ones.
          running: as in `BaseEngine.set_params`.

        Raises:
          RuntimeError: the checksum of the weights changed on the way.
        """
        cfg, self._sets = self.runner.cfg, self._sets + 1
        # It is the same in processes whose engine is not that of a replica.
        convert = split_layout(cfg, self.copies.mesh.shape["tp"])
        convert = self.runner.weights.needed(convert, params)
        placed = self._copied("policy", params, cfg.tie_embeddings, convert)
        heads = [None] * len(placed) if head is None else self._copied("draft", head)
        # The engine for evaluation runs on the first replica of the process only, so `engines` may
        # be fewer than `placed`.
        for engine, here, draft in zip(self.engines, placed, heads, strict=False):
            engine.set_params(here, draft, running)

    def release(self, weights: bool = True) -> None:
        self.own.release(weights)

    def _copied(
        self, name: str, tree: Params, tied: bool = False, convert: Callable | None = None
    ) -> list[Params]:
        """Copies weights to each replica of this process, and compares checksums."""
        placed = self.copies(tree, self.runner.weights.axes, convert)
        exact = convert is None or is_exact(self.runner.cfg.run.products)
        if exact and jax.tree.leaves(tree):
            dtype, repeated = self.runner.cfg.run.compute_dtype, self.runner.weights.repeated
            sent = checksum(tree, dtype, tied, sharding.fetch, repeated)
            for first in placed[:1]:
                require_equal(name, sent, checksum(first, dtype, tied, repeated=repeated))
        return placed

    # --- samples ---------------------------------------------------------------------------------

    def make(self, job: Job, before: SampleOutput | None = None) -> Sample:
        return self.own.make(job, before)

    def queue(self, sample: Sample) -> SharedSample:
        together = self._prompts.setdefault(sample.job.prompt_hash, {})
        owner = next(iter(together)).owner if together else self._load.index(min(self._load))
        self._added += 1
        shared = SharedSample(self._added, sample.job, owner, sample.output())
        together[shared] = None
        self._load[owner] += 1
        self._running[shared.number] = shared
        if owner == self._group.index:
            shared.local = self.own.queue(sample)
            self._local[sample] = shared
        return shared

    def _forget(self, shared: SharedSample) -> None:
        """Removes a sample that has ended."""
        del self._running[shared.number]
        self._judged.pop(shared, None)
        together = self._prompts[shared.job.prompt_hash]
        del together[shared]
        if not together:
            del self._prompts[shared.job.prompt_hash]
        self._load[shared.owner] -= 1
        if shared.local is not None:
            del self._local[shared.local]

    def abort(self, shared: SharedSample) -> SampleOutput | None:
        """Ends a sample; returns its state at the last exchange, or None if it has ended."""
        if shared.number not in self._running:
            return None
        self._forget(shared)
        if shared.local is not None:
            self.own.abort(shared.local)
        return shared.sample

    def generate(
        self,
        jobs: Sequence[Job],
        on_progress: Callable[[int, Totals], None] | None = None,
        on_sample: Callable[[int, SampleOutput], None] | None = None,
    ) -> tuple[list[SampleOutput], Totals]:
        """Runs all jobs to their end, see `BaseEngine.generate`, without calls of `judge`."""
        judge, self._judge = self._judge, None
        try:
            return super().generate(jobs, on_progress, on_sample)
        finally:
            self._judge = judge

    def clear(self) -> None:
        """Drops all samples that wait or run; all processes must call it."""
        self._running: dict[int, SharedSample] = {}  # by number
        self._prompts: dict[int, dict[SharedSample, None]] = {}  # by prompt
        self._load = [0] * self._group.count  # number of samples, by owner
        self._local: dict[Sample, SharedSample] = {}  # samples of the own engine
        # Those that ended and were not told of yet.
        self._judged: dict[SharedSample, tuple[SampleOutput, Any]] = {}
        self.own.clear()

    def step(self) -> list[Finished]:
        """Runs the samples of this process for a while, then exchanges news with the others.

        Returns:
          the samples that ended, on any process: the same list everywhere.
        """
        clock, ended = self.runner.agreement, []
        self._until = clock.now + self._interval
        while self.own.has_work:
            # A sample that was aborted may have ended just before; its result is not wanted.
            ended += [e for e in self.own.step() if e.sequence in self._local]
            if clock.now >= self._until:
                break
        while self._poll():
            time.sleep(POLL)
        needed = 0.0
        if self.idle_work is not None:
            self.idle_work.wait()
            if self._idle_replicas:
                needed = self.idle_work.seconds_needed
        told_here = []
        if self._group.reports:
            for event in ended:
                shared = self._local[event.sequence]
                judgement = self._judge and self._judge(shared.job, event.sample)
                self._judged[shared] = event.sample, judgement
            told_here = self._news()
        events = []
        everyones = self._exchange((told_here, needed), "rollout")
        self._interval = max(EXCHANGE, _ROOM * max(seconds for _, seconds in everyones))
        told = [item for items, _ in everyones for item in items]
        for number, begin, sample, has_ended, verdict in told:
            shared = self._running[number]
            shared.sample = joined(shared.sample, begin, sample)
            if has_ended:
                events.append(Finished(shared, shared.sample, verdict))
                self._forget(shared)
        return events

    def _poll(self) -> bool:
        """Starts work on idle replicas; returns whether such work is running."""
        if self.on_poll is not None:
            self.on_poll()
        if self.idle_work is None:
            return False
        seconds = self._until - self.runner.agreement.now
        return self.idle_work.use_idle(self._idle_replicas, seconds)

    def _news(self) -> list[tuple[int, int, SampleOutput, bool, Any]]:
        """The news of own samples that ended and are judged, and of those that have more tokens.

        Returns:
          for each the sample's number, the index of its first new token, the part of it that is
          new, whether it has ended, and the verdict.
        """
        if self._judged and not self.own.has_work:
            _, first = next(iter(self._judged.values()))
            if first is not None and not first.done():
                first.wait(EXCHANGE)
        known = [
            (shared, sample, True, judgement and judgement.result())
            for shared, (sample, judgement) in self._judged.items()
            if judgement is None or judgement.done()
        ] + [
            (shared, local.output(), False, None)
            for local, shared in self._local.items()
            if shared not in self._judged and len(local.tokens) > len(shared.tokens)
        ]
        told = []
        for shared, sample, has_ended, verdict in known:
            begin = min(len(shared.tokens), len(sample.token_ids))
            told.append((shared.number, begin, rest_of(sample, begin), has_ended, verdict))
        return told


# The fields of `SampleOutput` that have one entry per token, or are None.
_PER_TOKEN = ("token_ids", "logprobs", "transformed_logprobs", "records", "origins")


def rest_of(sample: SampleOutput, begin: int) -> SampleOutput:
    """A sample without the entries of its first `begin` tokens."""
    values = {name: getattr(sample, name) for name in _PER_TOKEN}
    rest = {name: None if value is None else value[begin:] for name, value in values.items()}
    if sample.records is not None and begin:  # behind those of the prompt
        count = len(sample.token_ids) - begin
        rest["records"] = sample.records[len(sample.records) - count :]
    return dataclasses.replace(sample, **rest)


def joined(before: SampleOutput, begin: int, rest: SampleOutput) -> SampleOutput:
    """The whole sample: its first `begin` tokens in `before`, and those after them in `rest`."""

    def whole(name):
        new, old = getattr(rest, name), getattr(before, name)
        if new is None or old is None or not begin:
            return new
        if isinstance(new, np.ndarray):
            prompt = len(old) - len(before.token_ids)
            return np.concatenate([old[: prompt + begin], new])
        if isinstance(new, str):
            return old[:begin] + new
        return [*old[:begin], *new]

    return dataclasses.replace(rest, **{name: whole(name) for name in _PER_TOKEN})
