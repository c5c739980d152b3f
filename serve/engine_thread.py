"""The one thread that owns the engine.

The event loop leaves calls in a queue (`submit`, `abort`, `call`), and the thread makes them
between two steps of the engine. What a step produced is counted and handed to the event loop in one
call, as soon as the device has its next work: it should not wait while the host serves clients.

    event loop   submit ---> queue of calls ---> add, abort, set_params
    engine                                       step -> chunk -> news of samples
    event loop   request.updates <-------------- one call per step, with the results of calls

After the engine has raised, every request that runs or comes is answered with `EngineDead`.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

from serve.dashboard import Dashboard
from serve.metrics import Metrics, Replica, Snapshot
from specjax import LLM
from specjax.decode.options import Features
from specjax.engine.engine import Engine
from specjax.engine.replicas import Replicas
from specjax.engine.request import Job, SampleOutput
from specjax.engine.sequence import News
from specjax.engine.sequence import Sequence as Sample
from specjax.telemetry import Collector

log = logging.getLogger(__name__)
T = TypeVar("T")


class EngineDead(RuntimeError):
    """The engine has raised an exception and takes no more requests."""


class Asleep(ValueError):
    """The server sleeps: its devices hold neither weights nor caches."""


class ClientGone(Exception):
    """The client closed its connection before the response was complete."""


class Update(NamedTuple):
    """What a sample produced since its last update.

    Attributes:
      index: which sample of the request. news: one entry per chunk, in order.
      sample: the whole sample, if it ended. error: why no update will follow.
    """

    index: int
    news: Sequence[News] = ()
    sample: SampleOutput | None = None
    error: EngineDead | ClientGone | None = None


class Call(NamedTuple):
    """A function that the engine's thread is to call, and the future of its result."""

    function: Callable[[], Any]
    future: asyncio.Future | None = None


class Result(NamedTuple):
    """What a call returned or raised."""

    future: asyncio.Future | None
    value: Any = None
    error: Exception | None = None

    def set(self) -> None:
        """Resolves the future, unless it was cancelled."""
        if self.future is None or self.future.done():
            return
        if self.error is None:
            self.future.set_result(self.value)
        else:
            self.future.set_exception(self.error)


class StepOutput(NamedTuple):
    """What one step of the engine produced.

    Attributes:
      chunks: strategy, bucket and rounds of each chunk.
      news: of each sample that got tokens. ended: what the samples have become that ended.
    """

    chunks: list[tuple[str, int, int]]
    news: list[tuple[Sample, News]]
    ended: dict[Sample, SampleOutput]


class Request:
    """The samples of one HTTP request.

    Attributes:
      updates: of all samples, in the order in which they come. open: samples that have not ended.
      arrived: on the clock of `time.perf_counter`. per_chunk: there is an update for every chunk,
        not only for each sample that ends.
    """

    def __init__(self, jobs: Sequence[Job], arrived: float, per_chunk: bool):
        self.jobs, self.arrived, self.per_chunk = jobs, arrived, per_chunk
        self.updates: asyncio.Queue[Update] = asyncio.Queue()
        self.open = len(jobs)
        self.last = [0.0] * len(jobs)  # when each sample got its last token
        # The engine's thread writes these:
        self.samples: list[Sample] = []
        self.aborted = False


class EngineThread:
    """Runs the engine of an `LLM` until `stop`.

    Args:
      llm: its engine must not be used by any other thread from now on.

    Attributes:
      outstanding: samples that were submitted and have not ended. error: what the engine raised.
      asleep: requests are refused; set in the engine's thread only. dashboard: what the page shows.
    """

    def __init__(self, llm: LLM, metrics: Metrics):
        self.llm, self.metrics = llm, metrics
        self.outstanding = 0
        self.error: BaseException | None = None
        self.asleep = False
        self._engine = llm.engine
        self._engine.on_poll = self._send
        self._engines = llm.engine.engines
        for engine in self._engines:
            engine.watcher = self
            engine.runner.executables.before_build = functools.partial(self._compiles, engine)
        self.dashboard = Dashboard(llm, self._engines, metrics)
        self._calls: queue.SimpleQueue[Call] = queue.SimpleQueue()
        self._to_abort: queue.SimpleQueue[Request] = queue.SimpleQueue()
        self._owners: dict[Sample, tuple[Request, int]] = {}
        self._sent: dict[Sample, int] = {}  # tokens that the event loop has got
        self._current = StepOutput([], [], {})  # of the step that runs
        self._unsent: list[StepOutput] = []
        self._results: list[Result] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._running = True
        self._said_to_compile = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        if self._engine.telemetry is not None:
            count_only(self._engine)
        self._take_snapshot()

    def _compiles(self, engine: Engine) -> None:
        """Sends what is ready before a program is compiled, which takes seconds."""
        if not self._said_to_compile and not engine.runner.compilations:
            self._said_to_compile = True
            log.info(
                "compiling up to %d programs while the first requests wait; fewer: "
                "speculation.strategy=off, fewer in speculation.control.strategies, or a smaller "
                "engine.max_batch; engine.warm_up=sampled compiles before the server listens",
                sum(each.programs().count([Features()]) for each in self._engines),
            )
        self._send()

    # --- called in the event loop ----------------------------------------------------------------

    def start(self) -> None:
        """Starts the thread; updates go to the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def stop(self) -> None:
        """Ends the thread; samples that still run are dropped."""
        self._running = False
        self._calls.put(Call(lambda: None))  # the thread may be waiting for a call
        await asyncio.to_thread(self._thread.join)

    async def submit(
        self, jobs: Sequence[Job], arrived: float | None = None, per_chunk: bool = True
    ) -> Request:
        """Adds samples; they are in the engine when this returns.

        Args:
          per_chunk: see `Request`.

        Raises:
          ValueError: a job does not fit; none was added. EngineDead.
        """
        arrived = time.perf_counter() if arrived is None else arrived
        request = Request(jobs, arrived, per_chunk)
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
        """Aborts the samples of a request that run; their pages are free when the next step begins.

        The last of its updates has the error `ClientGone`.
        """
        if not request.open:
            return
        self.metrics.aborted.inc(request.open)
        self._close(request)
        request.updates.put_nowait(Update(0, error=ClientGone()))
        self._to_abort.put(request)
        self._calls.put(Call(self._abort_requests))

    def _close(self, request: Request) -> None:
        """Marks all samples of a request as ended."""
        self.outstanding -= request.open
        request.open = 0

    async def call(self, function: Callable[[], T]) -> T:
        """Calls a function in the engine's thread, between two steps; it may take long.

        Raises:
          ValueError: the function raised it. EngineDead: the function raised anything else, or the
            engine had died before.
        """

        def send_first() -> T:
            self._send()
            return function()

        return await self._ask(send_first)

    async def _ask(self, function: Callable[[], T]) -> T:
        if self.error is not None:
            raise self._dead()
        future = asyncio.get_running_loop().create_future()
        self._calls.put(Call(function, future))
        return await future

    def finish_all(self) -> None:
        """Steps until no sample runs; to be used within `call`. Other calls than aborts wait."""
        while self._engine.has_work and self._running:
            self._step()
            self._abort_requests()
        self._send()

    # --- called by the engine --------------------------------------------------------------------

    def chunk(self, strategy: str, bucket: int, rounds: int) -> None:
        self._current.chunks.append((strategy, bucket, rounds))

    def news(self, sample: Sample, news: News) -> None:
        self._current.news.append((sample, news))

    # --- the thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        while self._running:
            try:
                idle = not self._engine.has_work or self.error is not None
                if idle:
                    self._send()
                self._run_calls(wait=idle)
                if self.error is None and self._engine.has_work:
                    self._step()
            except BaseException as error:
                log.exception("the engine died")
                self._die(error)

    def _run_calls(self, wait: bool) -> None:
        """Makes the calls that are queued; with `wait`, it blocks until there is one."""
        while True:
            try:
                function, future = self._calls.get(block=wait)
            except queue.Empty:
                return
            wait = False
            if future is not None and future.cancelled():
                continue
            if self.error is not None:
                self._results.append(Result(future, error=self._dead()))
                continue
            try:
                value = function()  # it may send, which replaces `_results`
                self._results.append(Result(future, value))
            except ValueError as error:
                self._results.append(Result(future, error=error))
            except BaseException as error:
                dead = EngineDead(f"{type(error).__name__}: {error}")
                self._results.append(Result(future, error=dead))
                raise

    def _add(self, request: Request) -> None:
        if self.asleep:
            raise Asleep("the server is asleep; POST /wake")
        if request.aborted:
            return
        request.samples = [self._engine.make(job) for job in request.jobs]
        for index, sample in enumerate(request.samples):
            self._owners[sample] = request, index
            self._engine.queue(sample)

    def _abort_requests(self) -> None:
        """Aborts the requests whose clients have gone; one that was not added yet never will be."""
        while True:
            try:
                request = self._to_abort.get_nowait()
            except queue.Empty:
                return
            request.aborted = True
            for sample in request.samples:
                if self._owners.pop(sample, None) is not None:
                    self._engine.abort(sample)
                    self._sent.pop(sample, None)

    def _step(self) -> None:
        """Makes a step; the engine calls `_send` for the one before when this one is enqueued."""
        ended = {event.sequence: event.sample for event in self._engine.step()}
        if ended or self._current.news or self._current.chunks:
            self._unsent.append(self._current._replace(ended=ended))
            self._current = StepOutput([], [], {})

    def _send(self) -> None:
        """Counts what is new since the last time, and sends it to the event loop."""
        if not (self._unsent or self._results):
            return
        self._take_snapshot()
        self._deliver_soon(self._all_updates())

    def _all_updates(self) -> list[tuple[Request, Update]]:
        unsent, self._unsent = self._unsent, []
        return [update for step in unsent for update in self._updates(step)]

    def _updates(self, step: StepOutput) -> list[tuple[Request, Update]]:
        """Counts what a step produced, and sorts it by request."""
        for strategy, bucket, rounds in step.chunks:
            self.metrics.chunk(strategy, bucket, rounds)
            self.dashboard.chunk(strategy, rounds)
        fresh: dict[Sample, list[News]] = {}
        for sample, news in step.news:
            known, end = self._sent.get(sample, news.at), news.at + len(news.tokens)
            self.metrics.news(news, sample.replica)
            self.dashboard.news(news, max(end - known, 0))
            # Without an owner, the client has gone; without new tokens, see `News`.
            if sample in self._owners and end > known:
                self._sent[sample] = end
                fresh.setdefault(sample, []).append(news.since(known))
        updates = []
        for sample in dict.fromkeys([*fresh, *step.ended]):
            owner = self._owners.get(sample)
            if owner is None:
                continue
            request, index = owner
            ended = step.ended.get(sample)
            updates.append((request, Update(index, fresh.get(sample, ()), ended)))
            if ended is not None:
                del self._owners[sample]
                self._sent.pop(sample, None)
        return updates

    def _die(self, error: BaseException) -> None:
        self.error = error
        updates = self._all_updates()  # of samples that ended before
        dead = self._dead()
        owners = {id(request): request for request, _ in self._owners.values()}
        self._owners.clear()
        updates += [(request, Update(0, error=dead)) for request in owners.values()]
        self._deliver_soon(updates)

    def _dead(self) -> EngineDead:
        return EngineDead(
            f"the engine died of {type(self.error).__name__}: {self.error}; restart the server"
        )

    def _take_snapshot(self) -> None:
        """Copies the engine's numbers for /metrics, which must not read a running engine."""
        engine, several = self._engine, self._engines
        schedulers = [one.scheduler for one in several]
        counts = [len(one.running) for one in several]
        running = sum(counts)
        not_finite = {
            name: None
            for one in several
            for name, value in one.runner.checksums.items()
            if not value.finite
        }
        self.metrics.snapshot = Snapshot(
            running=running,
            waiting=engine.outstanding - running,
            pages_used=sum(scheduler.pool.used for scheduler in schedulers),
            pages=sum(scheduler.pool.count - 1 for scheduler in schedulers),
            preemptions=sum(one.preemptions for one in several),
            compilations=sum(one.runner.compilations for one in several),
            version=engine.version,
            rejections={} if engine.telemetry is None else engine.telemetry.causes,
            replicas=tuple(
                Replica(one.controller.active, count, one.outstanding - count)
                for one, count in zip(several, counts, strict=True)
            ),
            bucket=sum(one.latest[1] for one in several if one.scheduler.running and one.latest),
            alarms=tuple(f"the {name}'s weights are not finite" for name in not_finite),
        )
        self.dashboard.look(several)

    def _deliver_soon(self, updates: list[tuple[Request, Update]]) -> None:
        results, self._results = self._results, []
        if results or updates:
            try:
                self._loop.call_soon_threadsafe(self._deliver, results, updates)
            except RuntimeError:  # the event loop has been closed
                self._running = False

    # --- called in the event loop, by the thread -------------------------------------------------

    def _deliver(self, results: list[Result], updates: list[tuple[Request, Update]]) -> None:
        for result in results:
            result.set()
        now = time.perf_counter()
        for request, update in updates:
            if not request.open:  # it was aborted meanwhile
                continue
            if update.error is not None:
                self._close(request)
            else:
                self._time(request, update, now)
            if request.per_chunk or update.sample is not None or update.error is not None:
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
    """Makes an engine's telemetry count without records, whose number would grow for ever."""
    collector = Collector(max_records=0)
    for one in (engine, *engine.engines):
        one.telemetry = collector
