"""The one thread that owns the engine.

Everybody else leaves it notes: `submit`, `abort` and `call` are for the event loop, and what the
engine is asked to do is done between two of its steps. What a step brought is counted and handed to
the event loop as soon as the device has its next work, all of it by one call: while the host looks
after clients the device should not wait. Then it lies in the queues of the requests it belongs to.

    event loop   submit ---> notes ---> add, abort, set_params
    engine                              step -> chunk -> news of samples
    event loop   request.updates <----- one call per step, answers to notes with it

An engine that raises is dead: what runs and what comes is answered with `EngineDead`.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from serve.live import Live
from serve.metrics import Metrics, Replica, Snapshot
from serve.notes import Answer, Asleep, Brought, ClientGone, EngineDead, Note, Request, Update
from specjax import LLM
from specjax.decode.options import Features
from specjax.engine.engine import Engine
from specjax.engine.replicas import Replicas
from specjax.engine.request import Job
from specjax.engine.start_up import count_programs
from specjax.engine.watch import News
from specjax.telemetry import Collector

log = logging.getLogger(__name__)
T = TypeVar("T")


class EngineThread:
    """Runs the engine of an `LLM` until `stop`.

    Args:
      llm: nobody else may use its engine from now on.

    Attributes:
      outstanding: samples that were submitted and have not ended. error: what the engine died of.
      asleep: nothing is taken; to be set in the engine's thread. live: what the page shows.
    """

    def __init__(self, llm: LLM, metrics: Metrics):
        self.llm, self.metrics = llm, metrics
        self.outstanding = 0
        self.error: BaseException | None = None
        self.asleep = False
        self._engine = llm.engine
        self._engine.watcher, self._engine.on_look = self, self._tell
        self._engines = llm.engine.engines
        for engine in self._engines:
            engine.runner.executables.before_build = functools.partial(self._compiles, engine)
        self.live = Live(llm, self._engines, metrics)
        self._notes: queue.SimpleQueue[Note] = queue.SimpleQueue()
        self._gone: queue.SimpleQueue[Request] = queue.SimpleQueue()  # whose clients have left
        self._owners: dict[int, tuple[Request, int]] = {}  # by ticket
        self._seen: dict[int, int] = {}  # tokens of a ticket that were handed over
        self._coming = Brought([], [], {})  # by the step that is being made
        self._brought: list[Brought] = []  # and that nobody has been told of
        self._answers: list[Answer] = []
        self._changed = False  # whether something else is to be told of
        self._loop: asyncio.AbstractEventLoop | None = None
        self._running = True
        self._said_to_compile = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        if self._engine.telemetry is not None:
            count_only(self._engine)
        self._look()

    def _compiles(self, engine: Engine) -> None:
        """Called before each program is compiled: who has an answer need not wait for it."""
        if not self._said_to_compile and not engine.runner.compilations:
            self._said_to_compile = True
            log.info(
                "compiling up to %d programs while the first requests wait; fewer: "
                "speculation.strategy=off, fewer in speculation.control.strategies, or a smaller "
                "engine.max_batch; engine.warm_up=sampled compiles before the server listens",
                sum(count_programs(each.loop, [Features()]) for each in self._engines),
            )
        self._tell()

    # --- for the event loop ----------------------------------------------------------------------

    def start(self) -> None:
        """Starts the thread; updates go to the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def stop(self) -> None:
        """Ends the thread; what still runs is dropped."""
        self._running = False
        self._notes.put(Note(lambda: None))  # in case it waits for one
        await asyncio.to_thread(self._thread.join)

    async def submit(
        self, jobs: Sequence[Job], arrived: float | None = None, piecemeal: bool = True
    ) -> Request:
        """Adds samples; they are in the engine when this returns.

        Args:
          piecemeal: see `Request`.

        Raises:
          ValueError: a job does not fit; none was added. EngineDead.
        """
        arrived = time.perf_counter() if arrived is None else arrived
        request = Request(jobs, arrived, piecemeal)
        self.outstanding += request.open
        try:
            await self._ask(lambda: self._add(request))
        except asyncio.CancelledError:  # it may have been added all the same
            self.abort(request)
            raise
        except BaseException:
            self._close(request)
            raise
        return request

    def abort(self, request: Request) -> None:
        """Drops what has not ended of a request; its pages are free when the next step begins.

        Whoever waits for its updates hears `ClientGone`.
        """
        if not request.open:
            return
        self.metrics.aborted.inc(request.open)
        self._close(request)
        request.updates.put_nowait(Update(0, error=ClientGone()))
        self._gone.put(request)
        self._notes.put(Note(self._drop_gone))

    def _close(self, request: Request) -> None:
        """Nothing more comes of it."""
        self.outstanding -= request.open
        request.open = 0

    async def call(self, function: Callable[[], T]) -> T:
        """Runs something in the engine's thread, between two steps. It may take its time.

        Raises:
          ValueError: the function did. EngineDead: it raised anything else, or something had.
        """

        def after_telling() -> T:
            self._tell()  # what there is does not wait for it
            return function()

        return await self._ask(after_telling)

    async def _ask(self, function: Callable[[], T]) -> T:
        if self.error is not None:
            raise self._dead()
        answer = asyncio.get_running_loop().create_future()
        self._notes.put(Note(function, answer))
        return await answer

    def finish_all(self) -> None:
        """To be `call`ed: steps until nothing runs. What is asked meanwhile waits, save aborts."""
        while self._engine.has_work and self._running:
            self._step()
            self._drop_gone()
        self._changed = True
        self._tell()

    # --- told by the engine ----------------------------------------------------------------------

    def chunk(self, strategy: str, bucket: int, rounds: int) -> None:
        self._coming.chunks.append((strategy, bucket, rounds))

    def news(self, ticket: int, news: News) -> None:
        replica = self._engine.replica_of(ticket) if len(self._engines) > 1 else 0
        self._coming.news.append((ticket, news, replica))

    # --- the thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        while self._running:
            try:
                idle = not self._engine.has_work or self.error is not None
                if idle:
                    self._tell()
                self._obey(wait=idle)
                if self.error is None and self._engine.has_work:
                    self._step()
            except BaseException as error:
                log.exception("the engine died")
                self._die(error)

    def _obey(self, wait: bool) -> None:
        """Does what was asked; waits until something is, if told so."""
        while True:
            try:
                function, answer = self._notes.get(block=wait)
            except queue.Empty:
                return
            wait = False
            if answer is not None and answer.cancelled():
                continue
            if self.error is not None:
                self._answer(answer, error=self._dead())
                continue
            try:
                self._answer(answer, function())
            except ValueError as error:
                self._answer(answer, error=error)
            except BaseException as error:
                self._answer(answer, error=EngineDead(f"{type(error).__name__}: {error}"))
                raise

    def _answer(
        self, answer: asyncio.Future | None, result: Any = None, error: Exception | None = None
    ) -> None:
        """To be told, with whatever the note has changed."""
        self._answers.append(Answer(answer, result, error))
        self._changed = True

    def _add(self, request: Request) -> None:
        if self.asleep:
            raise Asleep("the server is asleep; POST /wake")
        if request.gone:
            return
        for job in request.jobs:
            self._engine.check(job)
        for index, job in enumerate(request.jobs):
            ticket = self._engine.add(job)
            request.tickets.append(ticket)
            self._owners[ticket] = request, index

    def _drop_gone(self) -> None:
        """Aborts what clients have left; one that waits to be added will not be."""
        while True:
            try:
                request = self._gone.get_nowait()
            except queue.Empty:
                return
            request.gone = True
            for ticket in request.tickets:
                if self._owners.pop(ticket, None) is not None:
                    self._engine.abort(ticket)
                    self._seen.pop(ticket, None)

    def _step(self) -> None:
        """The engine tells of the step before (`_tell`) when it has enqueued what this one is."""
        ended = {event.ticket: event.sample for event in self._engine.step()}
        if ended or self._coming.news or self._coming.chunks:
            self._brought.append(self._coming._replace(ended=ended))
            self._coming = Brought([], [], {})

    def _tell(self) -> None:
        """Counts what came since the last time, and hands it over."""
        if not (self._brought or self._changed):
            return
        self._look()
        updates, self._changed = self._all_updates(), False
        answers, self._answers = self._answers, []
        self._hand_over(answers, updates)

    def _all_updates(self) -> list[tuple[Request, Update]]:
        """What came since the last time, for those who wait."""
        brought, self._brought = self._brought, []
        return [update for step in brought for update in self._updates(step)]

    def _updates(self, step: Brought) -> list[tuple[Request, Update]]:
        """What a step means to those who wait; it is counted."""
        for strategy, bucket, rounds in step.chunks:
            self.metrics.chunk(strategy, bucket, rounds)
            self.live.chunk(strategy, rounds)
        fresh: dict[int, list[News]] = {}
        for ticket, news, replica in step.news:
            known, end = self._seen.get(ticket, news.at), news.at + len(news.tokens)
            self.metrics.news(news, replica)
            self.live.news(news, max(end - known, 0))
            # Else its client has gone, or they come again, see `News`.
            if ticket in self._owners and end > known:
                self._seen[ticket] = end
                fresh.setdefault(ticket, []).append(news.since(known))
        updates = []
        for ticket in dict.fromkeys([*fresh, *step.ended]):
            owner = self._owners.get(ticket)
            if owner is None:
                continue
            request, index = owner
            sample = step.ended.get(ticket)
            updates.append((request, Update(index, fresh.get(ticket, ()), sample)))
            if sample is not None:
                del self._owners[ticket]
                self._seen.pop(ticket, None)
        return updates

    def _die(self, error: BaseException) -> None:
        self.error = error
        updates = self._all_updates()  # what had ended before is whole
        dead, answers, self._answers = self._dead(), self._answers, []
        owners = {id(request): request for request, _ in self._owners.values()}
        self._owners.clear()
        updates += [(request, Update(0, error=dead)) for request in owners.values()]
        self._hand_over(answers, updates)

    def _dead(self) -> EngineDead:
        return EngineDead(
            f"the engine died of {type(self.error).__name__}: {self.error}; restart the server"
        )

    def _look(self) -> None:
        """Leaves numbers for /metrics, which must not ask a running engine for them."""
        engine, several = self._engine, self._engines
        schedulers = [one.scheduler for one in several]
        counts = [len(one.loop.running) for one in several]
        running = sum(counts)
        sums = {
            name: value
            for one in several
            for name, value in one.runner.checksums.items()
            if not value.finite
        }
        self.metrics.snapshot = Snapshot(
            running=running,
            waiting=engine.outstanding - running,
            pages_used=sum(scheduler.pool.used for scheduler in schedulers),
            pages=sum(scheduler.pool.count - 1 for scheduler in schedulers),
            preemptions=engine.preemptions,
            compilations=sum(one.runner.compilations for one in several),
            version=engine.version,
            rejections={} if engine.telemetry is None else engine.telemetry.causes,
            replicas=tuple(
                Replica(one.controller.active, count, one.outstanding - count)
                for one, count in zip(several, counts, strict=True)
            ),
            bucket=sum(
                one.loop.latest[1] for one in several if one.scheduler.running and one.loop.latest
            ),
            alarms=tuple(f"the {name}'s weights are not finite" for name in sums),
        )
        self.live.look(several)

    # --- back to the event loop ------------------------------------------------------------------

    def _hand_over(self, answers: list[Answer], updates: list[tuple[Request, Update]]) -> None:
        if answers or updates:
            try:
                self._loop.call_soon_threadsafe(self._deliver, answers, updates)
            except RuntimeError:  # the event loop has ended, and with it everybody who waits
                self._running = False

    def _deliver(self, answers: list[Answer], updates: list[tuple[Request, Update]]) -> None:
        for answer in answers:
            answer.give()
        now = time.perf_counter()
        for request, update in updates:
            if not request.open:  # its client has gone meanwhile
                continue
            if update.error is not None:
                self._close(request)
            else:
                self._time(request, update, now)
            if request.piecemeal or update.sample is not None or update.error is not None:
                request.updates.put_nowait(update)

    def _time(self, request: Request, update: Update, now: float) -> None:
        metrics, tokens = self.metrics, sum(len(news.tokens) for news in update.news)
        last, request.last[update.index] = request.last[update.index], now
        if not last:
            metrics.first_token.observe(now - request.arrived)
        elif tokens:
            metrics.per_token.observe((now - last) / tokens, tokens)
        metrics.generation_tokens.inc(tokens)
        if update.sample is not None:
            metrics.ended.labels(update.sample.finish_reason).inc()
            metrics.latency.observe(now - request.arrived)
            request.open -= 1
            self.outstanding -= 1


def count_only(engine: Engine | Replicas) -> None:
    """Telemetry that counts and keeps no records: a server runs for ever."""
    collector = Collector(max_records=0)
    for one in engine.engines:
        one.loop.telemetry = collector
