"""The one thread that owns the engine.

Everybody else leaves it notes: `submit`, `abort` and `call` are for the event loop, and what the
engine is asked to do is done between two of its steps. After each step the tokens that came in are
handed to the event loop at once, and lie in the queues of the requests they belong to.

    event loop   submit ---> notes ---> add, abort, set_params
    engine                              step -> chunk -> news of samples
    event loop   request.updates <----- one call per step

An engine that raises is dead: what runs and what comes is answered with `EngineDead`.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple, TypeVar

from serve.live import Live
from serve.metrics import Metrics, Snapshot
from specjax import LLM
from specjax.engine.engine import Engine
from specjax.engine.replicas import Replicas
from specjax.engine.request import Job, SampleOutput
from specjax.engine.watch import News
from specjax.telemetry import Collector

log = logging.getLogger(__name__)
T = TypeVar("T")


class EngineDead(RuntimeError):
    """The engine has raised, and takes nothing any more."""


class Asleep(ValueError):
    """The engine has neither weights nor caches."""


class Update(NamedTuple):
    """What became of a sample since its last update.

    Attributes:
      index: which sample of the request. news: of its chunks, in order.
      sample: the whole of it, if it ended. error: nothing more will come.
    """

    index: int
    news: Sequence[News] = ()
    sample: SampleOutput | None = None
    error: EngineDead | None = None


class Request:
    """Samples in the engine; the event loop's side of them.

    Attributes:
      updates: of all samples, in the order in which they come. open: samples that have not ended.
      arrived: on the clock of `time.perf_counter`.
    """

    def __init__(self, jobs: Sequence[Job], arrived: float):
        self.jobs, self.arrived = jobs, arrived
        self.updates: asyncio.Queue[Update] = asyncio.Queue()
        self.open = len(jobs)
        self.last = [0.0] * len(jobs)  # when each sample got its last token
        self.tickets: list[int] = []  # the engine thread's
        self.gone = False  # so is this


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
        self._engine.watcher = self
        several = isinstance(llm.engine, Replicas)
        self._engines = llm.engine.engines if several else (llm.engine,)
        self.live = Live(llm, self._engines, metrics)
        self._notes: queue.SimpleQueue[tuple[Future, Callable[[], Any]]] = queue.SimpleQueue()
        self._gone: queue.SimpleQueue[Request] = queue.SimpleQueue()  # whose clients have left
        self._owners: dict[int, tuple[Request, int]] = {}  # by ticket
        self._seen: dict[int, int] = {}  # tokens of a ticket that were handed over
        self._news: dict[int, list[News]] = {}  # by ticket, since the last step
        self._loop: asyncio.AbstractEventLoop | None = None
        self._running = True
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        if self._engine.telemetry is not None:
            count_only(self._engine)
        self._look()

    # --- for the event loop ----------------------------------------------------------------------

    def start(self) -> None:
        """Starts the thread; updates go to the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def stop(self) -> None:
        """Ends the thread; what still runs is dropped."""
        self._running = False
        self._notes.put((Future(), lambda: None))  # in case it waits for one
        await asyncio.to_thread(self._thread.join)

    async def submit(self, jobs: Sequence[Job], arrived: float | None = None) -> Request:
        """Adds samples; they are in the engine when this returns.

        Raises:
          ValueError: a job does not fit; none was added. EngineDead.
        """
        request = Request(jobs, time.perf_counter() if arrived is None else arrived)
        self.outstanding += request.open
        try:
            await self.call(lambda: self._add(request))
        except asyncio.CancelledError:  # it may have been added all the same
            self.abort(request)
            raise
        except BaseException:
            self._close(request)
            raise
        return request

    def abort(self, request: Request) -> None:
        """Drops what has not ended of a request; its pages are free when the next step begins."""
        if not request.open:
            return
        self.metrics.aborted.inc(request.open)
        self._close(request)
        self._gone.put(request)
        self._notes.put((Future(), self._drop_gone))

    def _close(self, request: Request) -> None:
        """Nothing more comes of it."""
        self.outstanding -= request.open
        request.open = 0

    async def call(self, function: Callable[[], T]) -> T:
        """Runs something in the engine's thread, between two steps.

        Raises:
          ValueError: the function did. EngineDead: it raised anything else, or something had.
        """
        if self.error is not None:
            raise self._dead()
        future: Future = Future()
        self._notes.put((future, function))
        return await asyncio.wrap_future(future)

    def finish_all(self) -> None:
        """To be `call`ed: steps until nothing runs. What is asked meanwhile waits, save aborts."""
        while self._engine.has_work and self._running:
            self._step()
            self._drop_gone()
            self._look()

    # --- told by the engine ----------------------------------------------------------------------

    def chunk(self, strategy: str, bucket: int, rounds: int) -> None:
        self.metrics.chunk(strategy, bucket, rounds)
        self.live.chunk(strategy, rounds)

    def news(self, ticket: int, news: News) -> None:
        self.metrics.news(news)
        known = self._seen.get(ticket, 0)
        self._seen[ticket] = max(known, news.at + len(news.tokens))
        self.live.news(news, self._seen[ticket] - known)
        if news.at + len(news.tokens) > known:
            self._news.setdefault(ticket, []).append(news.since(known))

    # --- the thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        while self._running:
            try:
                self._obey(wait=not self._engine.has_work or self.error is not None)
                if self.error is None and self._engine.has_work:
                    self._step()
                self._look()
            except BaseException as error:
                log.exception("the engine died")
                self._die(error)

    def _obey(self, wait: bool) -> None:
        """Does what was asked; waits until something is, if told so."""
        while True:
            try:
                future, function = self._notes.get(block=wait)
            except queue.Empty:
                return
            wait = False
            if not future.set_running_or_notify_cancel():
                continue
            if self.error is not None:
                future.set_exception(self._dead())
                continue
            try:
                future.set_result(function())
            except ValueError as error:
                future.set_exception(error)
            except BaseException as error:
                future.set_exception(EngineDead(f"{type(error).__name__}: {error}"))
                raise

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
        finished = {event.ticket: event.sample for event in self._engine.step()}
        updates = []
        for ticket in dict.fromkeys([*self._news, *finished]):
            owner = self._owners.get(ticket)
            if owner is None:  # its client has gone
                continue
            request, index = owner
            sample = finished.get(ticket)
            updates.append((request, Update(index, self._news.get(ticket, ()), sample)))
            if sample is not None:
                del self._owners[ticket]
        for ticket in finished:
            self._seen.pop(ticket, None)
        self._news.clear()
        self._hand_over(updates)

    def _die(self, error: BaseException) -> None:
        self.error = error
        dead = self._dead()
        owners = {id(request): request for request, _ in self._owners.values()}
        self._owners.clear()
        self._hand_over([(request, Update(0, error=dead)) for request in owners.values()])

    def _dead(self) -> EngineDead:
        return EngineDead(
            f"the engine died of {type(self.error).__name__}: {self.error}; restart the server"
        )

    def _look(self) -> None:
        """Leaves numbers for /metrics, which must not ask a running engine for them."""
        engine, several = self._engine, self._engines
        schedulers = [one.scheduler for one in several]
        running = sum(len(scheduler.running) for scheduler in schedulers)
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
            strategies=tuple(one.controller.current or "" for one in several),
            bucket=sum(
                one.loop.latest[1] for one in several if one.scheduler.running and one.loop.latest
            ),
            alarms=tuple(f"the {name}'s weights are not finite" for name in sums),
        )
        self.live.look(several)

    # --- back to the event loop ------------------------------------------------------------------

    def _hand_over(self, updates: list[tuple[Request, Update]]) -> None:
        if updates:
            try:
                self._loop.call_soon_threadsafe(self._deliver, updates)
            except RuntimeError:  # the event loop has ended, and with it everybody who waits
                self._running = False

    def _deliver(self, updates: list[tuple[Request, Update]]) -> None:
        now = time.perf_counter()
        for request, update in updates:
            if not request.open:  # its client has gone meanwhile
                continue
            if update.error is not None:
                self._close(request)
            else:
                self._time(request, update, now)
            request.updates.put_nowait(update)

    def _time(self, request: Request, update: Update, now: float) -> None:
        metrics, tokens = self.metrics, sum(len(news.tokens) for news in update.news)
        last, request.last[update.index] = request.last[update.index], now
        if not last:
            metrics.first_token.observe(now - request.arrived)
        else:
            for _ in range(tokens):
                metrics.per_token.observe((now - last) / tokens)
        metrics.generation_tokens.inc(tokens)
        if update.sample is not None:
            metrics.ended.labels(update.sample.finish_reason).inc()
            metrics.latency.observe(now - request.arrived)
            request.open -= 1
            self.outstanding -= 1


def count_only(engine: Engine | Replicas) -> None:
    """Telemetry that counts and keeps no records: a server runs for ever."""
    collector = Collector(max_records=0)
    for one in engine.engines if isinstance(engine, Replicas) else (engine,):
        one.loop.telemetry = collector
