"""Several engines that know nothing of each other, fed from one queue.

Rollouts scale out by replicas: each engine has its own devices, weights and caches, and chooses its
own strategies. By the keying of the noise it does not matter to the tokens which replica a sample
runs on.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Several
from typing import NamedTuple

import jax

from specjax.decode.options import Features
from specjax.engine.checksum import require_same
from specjax.engine.compiling import OnProgram
from specjax.engine.engine import Engine, warm_up
from specjax.engine.request import Finished, Job, SampleOutput, Totals
from specjax.engine.run import run_to_the_end
from specjax.engine.runner import WAITING
from specjax.engine.sequence import News, Progress, Watcher
from specjax.engine.start_up import StartUp
from specjax.models.transformer import Params
from specjax.parallel.reshard import Mover, cast
from specjax.parallel.sharding import joined_mesh

POLL = 1e-3  # seconds between looks when no replica has anything new; its next chunk is enqueued


class Waiting(NamedTuple):
    """A sample that no replica has yet."""

    ticket: int
    job: Job
    progress: Progress | None


class _Watched:
    """Passes on what one replica tells, with the tickets that `Replicas.add` gave."""

    def __init__(self, watcher: Watcher, tickets: dict[int, int]):
        self._watcher, self._tickets = watcher, tickets
        self.chunk = watcher.chunk

    def news(self, ticket: int, news: News) -> None:
        self._watcher.news(self._tickets[ticket], news)


class Replicas:
    """Engines of one kind behind the interface of one.

    A sample goes to the replica with the most free slots at the moment when a slot is free, and the
    samples of a prompt, which is read once per replica, stay together: all of them while as many
    others wait as there are slots, and then as many as there is room for. The engines' `order` is
    that of the one queue.

    Args:
      engines: one per group of devices, with equal settings.

    Attributes:
      engines: the replicas.
      on_look: called whenever `step` has looked at all replicas, every millisecond or so.
        It must not wait for a device: meanwhile nobody feeds the replicas.
    """

    def __init__(self, engines: Several[Engine]):
        if not engines:
            raise ValueError("expected at least one engine, got none")
        self.engines = tuple(engines)
        first = self.engines[0]
        self.limits, self.batch, self.max_len = first.limits, first.batch, first.max_len
        for engine in self.engines:  # one collector and one history, as if they were one engine
            engine.loop.telemetry = first.telemetry
            engine.loop.lengths = first.loop.lengths
        self._slots = sum(engine.batch for engine in self.engines)
        self._tickets = 0
        self._seen = Features()  # by which `invariant` mode chooses a program: all replicas alike
        self._unfed: dict[int, Waiting] = {}  # by ticket
        self._queue: dict[int, dict[int, Waiting]] = {}  # the same, by prompt and ticket
        self._where: dict[int, tuple[int, int]] = {}  # ticket -> replica and its own ticket
        self._tickets_of: list[dict[int, int]] = [{} for _ in self.engines]
        self._events: list[Finished] = []
        self.on_look: Callable[[], None] | None = None
        self._watcher: Watcher | None = None
        joined = joined_mesh([engine.runner.mesh for engine in self.engines])
        self._spread = None if joined is None else Mover(joined, self.runner.axes)

    # --- what an engine has ----------------------------------------------------------------------

    def check(self, job: Job, progress: Progress | None = None) -> None:
        """Raises ValueError if `add` cannot take the job."""
        self.engines[0].check(job, progress)  # all have the same room

    @property
    def runner(self):
        return self.engines[0].runner

    @property
    def spec(self):
        return self.engines[0].spec

    @property
    def controller(self):
        """Of the first replica; each has its own."""
        return self.engines[0].controller

    @property
    def telemetry(self):
        return self.engines[0].telemetry

    @property
    def version(self) -> int:
        return self.engines[0].version

    @property
    def has_work(self) -> bool:
        return bool(self._queue or self._events or any(e.has_work for e in self.engines))

    @property
    def outstanding(self) -> int:
        """Samples that were added and are not finished."""
        return len(self._unfed) + sum(engine.outstanding for engine in self.engines)

    @property
    def stale_positions(self) -> int:
        """Of caches that were kept when the weights changed, of all replicas."""
        return sum(engine.stale_positions for engine in self.engines)

    @property
    def watcher(self) -> Watcher | None:
        """Is told what each chunk of any replica brings."""
        return self._watcher

    @watcher.setter
    def watcher(self, watcher: Watcher | None) -> None:
        self._watcher = watcher
        for engine, tickets in zip(self.engines, self._tickets_of, strict=True):
            engine.watcher = watcher and _Watched(watcher, tickets)

    @property
    def preemptions(self) -> int:
        """Samples that had to make room so far, on any replica."""
        return sum(engine.preemptions for engine in self.engines)

    @property
    def drained(self) -> list[int]:
        """Replicas that have nothing to do while nobody waits, by index."""
        if self._queue:
            return []
        return [i for i, engine in enumerate(self.engines) if not engine.has_work]

    @property
    def gaps(self) -> list[int]:
        """Replicas that have nothing to do while others run, by index."""
        drained = self.drained
        return drained if len(drained) < len(self.engines) else []

    def warm_up(
        self,
        features: Several[Features] = (Features(),),
        on_program: OnProgram | None = None,
    ) -> StartUp:
        """Compiles for every replica, see `Engine.warm_up`; returns what all of them took."""
        return warm_up(self.engines, features, on_program)

    def replica_of(self, ticket: int) -> int | None:
        """On which replica a sample runs; None: on none, or it has ended."""
        return self._where.get(ticket, (None, 0))[0]

    def set_params(self, params: Params, head: Params | None = None, running: str = "recompute"):
        """Gives every replica new weights, see `Engine.set_params`.

        Replicas that divide all devices of training among them get them by one program.
        """
        received = 0
        if self._spread is not None:
            dtype, tied = self.runner.cfg.run.compute_dtype, self.runner.cfg.tie_embeddings
            sent, params = params, self._spread(params, cast(dtype))
            received = self._spread.received
            require_same("policy", sent, params, dtype, tied, self.runner.repeated)
            if head is not None:
                head, more = self._spread_head(head)
                received += more
        for engine in self.engines:
            engine.set_params(params, head, running)
            engine.runner.moved += received

    def set_head(self, head: Params) -> None:
        """Gives every replica a new draft head, see `Engine.set_head`."""
        head, received = self._spread_head(head)
        for engine in self.engines:
            engine.set_head(head)
            engine.runner.moved += received

    def _spread_head(self, head: Params) -> tuple[Params, int]:
        """A head on the devices of all replicas, where they divide those of training, and the bytes
        that a device received."""
        if self._spread is None or not jax.tree.leaves(head):
            return head, 0
        sent, head = head, self._spread(head)
        dtype = self.runner.cfg.run.compute_dtype
        require_same("draft", sent, head, dtype, False, self.runner.repeated)
        return head, self._spread.received

    def release(self, weights: bool = True) -> None:
        """Gives back the memory of weights and caches of all replicas, see `Engine.release`."""
        if self.outstanding:
            raise RuntimeError(
                f"{self.outstanding} samples are not finished; step() until they are"
            )
        for engine in self.engines:
            engine.release(weights)

    def add(self, job: Job, progress: Progress | None = None) -> int:
        """Queues a sample, see `Engine.add`."""
        features = self.engines[0].intake.check(job, progress)
        self._seen = self._seen | features if self.outstanding else features
        for engine in self.engines:
            engine.intake.seen |= features
        self._tickets += 1
        self._unfed[self._tickets] = waiting = Waiting(self._tickets, job, progress)
        self._queue.setdefault(job.prompt_hash, {})[self._tickets] = waiting
        return self._tickets

    def _pop(self, waiting: Waiting) -> None:
        """Takes a sample out of the queue."""
        together = self._queue[waiting.job.prompt_hash]
        del self._unfed[waiting.ticket], together[waiting.ticket]
        if not together:
            del self._queue[waiting.job.prompt_hash]

    def abort(self, ticket: int) -> SampleOutput | None:
        """Ends a sample, see `Engine.abort`."""
        if waiting := self._unfed.get(ticket):
            self._pop(waiting)
            engine = self.engines[0]
            return engine.abort(engine.add(waiting.job, waiting.progress))
        replica, own = self._where.get(ticket, (0, None))
        sample = None if own is None else self.engines[replica].abort(own)
        if sample is not None:  # else it has ended, and the next step says so
            del self._where[ticket], self._tickets_of[replica][own]
        return sample

    def peek(self, ticket: int) -> SampleOutput | None:
        """A sample as it stands, see `Engine.peek`; None also if no replica has it yet."""
        replica, own = self._where.get(ticket, (0, None))
        return None if own is None else self.engines[replica].peek(own)

    def progress(self, ticket: int) -> Progress | None:
        """How far a sample has come; None if it has ended."""
        if waiting := self._unfed.get(ticket):
            return waiting.progress or Progress([], [], [])
        if ticket not in self._where:
            return None
        replica, own = self._where[ticket]
        return self.engines[replica].progress(own)

    def emitted(self, ticket: int) -> int:
        """Tokens of a sample so far, see `Engine.emitted`."""
        if ticket in self._where:
            replica, own = self._where[ticket]
            return self.engines[replica].emitted(own)
        waiting = self._unfed.get(ticket)
        return len(waiting.progress.tokens) if waiting and waiting.progress else 0

    def suspend(self) -> list[tuple[int, Job, Progress]]:
        """Takes out all samples that are not finished, see `Engine.suspend`."""
        found = []
        for replica, engine in enumerate(self.engines):
            for own, job, progress in engine.suspend():
                ticket = self._tickets_of[replica].pop(own)
                del self._where[ticket]
                found.append((ticket, job, progress))
        found += [
            (w.ticket, w.job, w.progress or Progress([], [], [])) for w in self._unfed.values()
        ]
        self._unfed, self._queue = {}, {}
        return found

    def generate(
        self, jobs: Several[Job], on_progress: Callable[[int, Totals], None] | None = None
    ) -> tuple[list[SampleOutput], Totals]:
        """Runs all jobs to their end, see `Engine.generate`."""
        return run_to_the_end(self, jobs, on_progress)

    def clear(self) -> None:
        """Drops everything that waits or runs."""
        self._unfed, self._queue = {}, {}
        self._events, self._where = [], {}
        for engine, tickets in zip(self.engines, self._tickets_of, strict=True):
            tickets.clear()
            engine.clear()

    def step(self) -> list[Finished]:
        """Lets every replica enqueue, and takes in what is there; waits if nothing is.

        Returns:
          the samples that ended; none if a chunk came in that ended nobody.
        """
        while True:
            self._feed()
            came = False
            for replica, engine in enumerate(self.engines):
                if engine.has_work:
                    came |= engine.is_ready
                    self._take(replica, engine.step(wait=False))
            if self.on_look is not None:
                self.on_look()
            if self._events or came or not self.has_work:
                events, self._events = self._events, []
                return events
            if not any(engine.has_work and engine.is_ready for engine in self.engines):
                time.sleep(POLL)

    def _feed(self) -> None:
        """Hands out waiting samples as slots become free."""
        while self._queue:
            # Some wait while enough others remain to even out what the replicas have to do.
            enough = len(self._unfed) > self._slots + WAITING * len(self.engines)
            more = WAITING if enough else 0
            free = [engine.batch + more - engine.outstanding for engine in self.engines]
            replica = max(range(len(free)), key=free.__getitem__)
            if free[replica] <= 0:
                break
            together = list(self._queue[self._next_prompt()].values())
            # Siblings come along, so that their prompt is read once, in a like case.
            others = len(self._unfed) - len(together)
            count = len(together) if others >= self._slots else free[replica]
            for waiting in together[:count]:
                self._pop(waiting)
                own = self.engines[replica].add(waiting.job, waiting.progress)
                self.engines[replica].intake.seen |= self._seen
                self._where[waiting.ticket] = replica, own
                self._tickets_of[replica][own] = waiting.ticket
        for engine in self.engines:
            engine.loop.others_wait = bool(self._queue)

    def _next_prompt(self) -> int:
        """Whose samples start next: the first that came, or those expected to be the longest."""
        loop = self.engines[0].loop
        if loop.config.order == "fifo":
            return next(iter(self._queue))
        return max(self._queue, key=lambda key: loop.lengths.expected(key) or 0.0)

    def _take(self, replica: int, events: list[Finished]) -> None:
        for event in events:
            ticket = self._tickets_of[replica].pop(event.ticket)
            del self._where[ticket]
            self._events.append(Finished(ticket, event.job, event.sample))
