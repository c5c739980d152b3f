"""The one thread that runs the engine.

The event loop puts calls into a queue (`submit`, `abort`, `call`), and the thread makes them
between two steps of the engine. The output of a step is counted and passed to the event loop in one
call. This happens after the next step has been enqueued on the device, so that the device does not
wait while the host serves clients.

    event loop   submit ---> queue of calls ---> add, abort, set_params
    engine                                       step -> chunk -> news of samples
    event loop   request.updates <-------------- one call per step

Once the engine has raised an exception, all running and later requests get `EngineDead`.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import NamedTuple, TypeVar

from serve.dashboard import Dashboard
from serve.metrics import Metrics, Replica, Snapshot
from specjax import LLM
from specjax.engine.engine import Engine
from specjax.engine.replicas import Replicas
from specjax.engine.request import Job, SampleOutput
from specjax.engine.sequence import News, Sample
from specjax.telemetry import CAUSES, Collector

log = logging.getLogger(__name__)
T = TypeVar("T")


class EngineDead(RuntimeError):
    """The engine has raised an exception and takes no more requests."""


class Asleep(ValueError):
    """The server is asleep: its devices hold neither weights nor caches."""


class QueuedTooLong(Exception):
    """A request waited for a slot longer than the server lets requests wait."""


class ClientGone(Exception):
    """The client closed its connection before the response was complete."""


class Update(NamedTuple):
    """The output of a sample since its last update.

    Attributes:
      index: number of the sample in its request.
      news: new tokens, one entry per chunk, in order.
      sample: the whole sample if it has ended.
      error: the reason why no update will follow.
    """

    index: int
    news: Sequence[News] = ()
    sample: SampleOutput | None = None
    error: EngineDead | ClientGone | QueuedTooLong | None = None


class StepOutput(NamedTuple):
    """The output of one step of the engine.

    Attributes:
      chunks: of each chunk the strategy, bucket, rounds, and whether its program stood in.
      news: samples with new tokens, and these tokens.
      ended: samples that ended, and their outputs.
    """

    chunks: list[tuple[str, int, int, bool]]
    news: list[tuple[Sample, News]]
    ended: dict[Sample, SampleOutput]


class Request:
    """The samples of one HTTP request.

    Attributes:
      jobs: the jobs of the samples.
      updates: queue of the updates of all samples.
      first: an update that was taken from the queue, and is to be handled before the others.
      open: number of samples that have not ended.
      arrived: time of arrival, on the clock of `time.perf_counter`.
      waits_since: the same, later by the pauses since then.
      per_chunk: whether there is an update for every chunk, or only for each sample that ends.
    """

    def __init__(self, jobs: Sequence[Job], arrived: float, per_chunk: bool):
        self.jobs, self.arrived, self.per_chunk = jobs, arrived, per_chunk
        self.waits_since = arrived
        self.updates: asyncio.Queue[Update] = asyncio.Queue()
        self.first: Update | None = None
        self.open = len(jobs)
        self.last = [0.0] * len(jobs)  # when each sample got its last token
        # The engine's thread writes these:
        self.samples: list[Sample] = []
        self.aborted = False


class EngineThread:
    """Runs the engine of an `LLM` until `stop`.

    Args:
      llm: the model, whose engine no other thread may use afterwards.
      metrics: counters of the server.

    Attributes:
      outstanding: number of samples that were submitted and have not ended.
      error: the exception that the engine raised.
      asleep: whether requests are refused because the server sleeps; set by the engine's thread.
      paused: mode in which `/pause_generation` has stopped all samples; None: they run. Likewise.
      queue_seconds: the longest time that a request waits for a slot; None: any time.
      dashboard: the data of the page.
    """

    def __init__(self, llm: LLM, metrics: Metrics):
        self.llm, self.metrics = llm, metrics
        self.outstanding = 0
        self.error: BaseException | None = None
        self.asleep = False
        self.paused: str | None = None
        self.queue_seconds: float | None = None
        self._engine = llm.engine
        self._engine.on_poll = self._send
        self._engines = llm.engine.engines
        for engine in self._engines:
            engine.watcher = self
            # Compiling takes seconds: output that is ready is sent before.
            engine.runner.executables.before_build = self._send
        self.dashboard = Dashboard(llm, self._engines, metrics)
        self._calls: queue.SimpleQueue[tuple[Callable, Future]] = queue.SimpleQueue()
        self._to_abort: queue.SimpleQueue[Request] = queue.SimpleQueue()
        self._owners: dict[Sample, tuple[Request, int]] = {}
        self._queued: dict[Request, None] = {}  # those that may wait for a slot, as they came
        self._sent: dict[Sample, int] = {}  # number of tokens that the event loop has
        self._current = StepOutput([], [], {})  # of the running step
        self._unsent: list[StepOutput] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._running = True
        for engine in self._engines:
            engine.runner.executables.on_compiled = lambda: self._calls.put((int, Future()))
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        if self._engine.telemetry is not None:
            count_only(self._engine)
        self._take_snapshot()

    # --- called in the event loop ----------------------------------------------------------------

    def start(self) -> None:
        """Starts the thread; updates go to the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def stop(self) -> None:
        """Ends the thread; samples that still run are dropped."""
        self._running = False
        self._calls.put((lambda: None, Future()))  # the thread may be waiting for a call
        await asyncio.to_thread(self._thread.join)

    async def submit(
        self, jobs: Sequence[Job], arrived: float | None = None, per_chunk: bool = True
    ) -> Request:
        """Adds samples; they are in the engine when this returns.

        Args:
          jobs: the jobs of the samples.
          arrived: time of arrival; None: now.
          per_chunk: see `Request`.

        Raises:
          ValueError: the engine cannot run a job, and none was added.
          EngineDead: the engine has raised an exception.
        """
        arrived = time.perf_counter() if arrived is None else arrived
        request = Request(jobs, arrived, per_chunk)
        self.outstanding += request.open
        try:
            await self._ask(lambda: self._add(request))
        except asyncio.CancelledError:  # the request may have been added already
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
        self._calls.put((self._abort_requests, Future()))

    def _close(self, request: Request) -> None:
        """Marks all samples of a request as ended."""
        self.outstanding -= request.open
        request.open = 0

    async def call(self, function: Callable[[], T]) -> T:
        """Calls a function in the engine's thread, between two steps; it may take long.

        Raises:
          ValueError: the function raised it.
          EngineDead: the function raised any other exception, or the engine had raised one before.
        """

        def between_steps() -> T:
            self._send()
            value = function()
            self._take_snapshot()
            return value

        return await self._ask(between_steps)

    async def _ask(self, function: Callable[[], T]) -> T:
        if self.error is not None:
            raise self._dead()
        future: Future[T] = Future()
        self._calls.put((function, future))
        return await asyncio.wrap_future(future)

    def finish_all(self) -> None:
        """Steps until no sample runs; to be used within `call`. Of other calls only aborts run."""
        while self._engine.has_work and self._running:
            self._step()
            self._abort_requests()
        self._send()

    # --- called by the engine --------------------------------------------------------------------

    def chunk(self, *facts) -> None:
        self._current.chunks.append(facts)

    def news(self, sample: Sample, news: News) -> None:
        self._current.news.append((sample, news))

    # --- the thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        while self._running:
            try:
                has_nothing_to_run = (
                    not self._engine.has_work or self.error is not None or self.paused is not None
                )
                if has_nothing_to_run:
                    self._send()
                    if self.error is None:
                        for engine in self._engines if self.paused is None else ():
                            engine.measure_if_due()
                        self._take_snapshot()
                self._run_calls(wait=has_nothing_to_run)
                if self.error is None and self.paused is None and self._engine.has_work:
                    self._step()
                    self._expire()
            except BaseException as error:
                log.exception("the engine died")
                self._die(error)

    def _run_calls(self, wait: bool) -> None:
        """Makes the queued calls; with `wait`, blocks until there is one."""
        while True:
            try:
                function, future = self._calls.get(block=wait)
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
        if request.aborted:
            return
        request.samples = [self._engine.make(job) for job in request.jobs]
        for index, sample in enumerate(request.samples):
            self._owners[sample] = request, index
            self._engine.queue(sample)
        if self.queue_seconds is not None:
            self._queued[request] = None

    def _expire(self) -> None:
        """Ends requests none of whose samples got a slot in the time that they may wait."""
        for request in list(self._queued):  # the oldest first
            samples = request.samples
            if request.aborted or any(sample.admitted for sample in samples):
                del self._queued[request]
                continue
            waited = time.perf_counter() - request.waits_since
            if self.queue_seconds is None or waited < self.queue_seconds:
                return
            if any(one.scheduler.holds(sample) for sample in samples for one in self._engines):
                continue
            for sample in samples:
                self._owners.pop(sample, None)
                self._engine.abort(sample)
            message = f"it waited {waited:.0f} s for a slot, and this server's limit is "
            error = QueuedTooLong(f"{message}{self.queue_seconds:g} s (limits.queue_seconds)")
            self._deliver_soon([(request, Update(0, error=error))])
            del self._queued[request]

    def pause(self, mode: str) -> None:
        """Stops all samples until `resume`; see `paused`."""
        self.paused, self._paused_at = mode, time.perf_counter()

    def resume(self) -> None:
        """Lets samples go on; the pause does not count as waiting for a slot."""
        if self.paused is not None:
            for request in self._queued:
                request.waits_since += time.perf_counter() - self._paused_at
        self.paused = None

    def abort_all(self) -> None:
        """Ends all samples where they stand; their requests are answered with what there is."""
        updates = []
        self._queued.clear()
        for sample, (request, index) in list(self._owners.items()):
            output = self._engine.abort(sample)
            if output is not None:  # else it has ended, and the next step says so
                updates.append((request, Update(index, sample=output)))
                del self._owners[sample]
                self._sent.pop(sample, None)
        self._deliver_soon(updates)

    def _abort_requests(self) -> None:
        """Aborts the requests whose clients have gone, also those that are still to be added."""
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
        """Makes a step, during which the engine calls `_send` for the output of the last one."""
        ended = {event.sequence: event.sample for event in self._engine.step()}
        if ended or self._current.news or self._current.chunks:
            self._unsent.append(self._current._replace(ended=ended))
            self._current = StepOutput([], [], {})

    def _send(self) -> None:
        """Counts the output since the last call, and sends it to the event loop."""
        if self._unsent:
            self._take_snapshot()
            self._deliver_soon(self._all_updates())

    def _all_updates(self) -> list[tuple[Request, Update]]:
        unsent, self._unsent = self._unsent, []
        return [update for step in unsent for update in self._updates(step)]

    def _updates(self, step: StepOutput) -> list[tuple[Request, Update]]:
        """Counts the output of a step, and sorts it by request."""
        for chunk in step.chunks:
            self.metrics.chunk(*chunk)
        fresh: dict[Sample, list[News]] = {}
        for sample, news in step.news:
            known, end = self._sent.get(sample, news.at), news.at + len(news.tokens)
            self.metrics.news(news, sample.replica, max(end - known, 0))
            # Without an owner, the client has gone. `News` says when there are no new tokens.
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
        updates = self._all_updates()  # with samples that ended before the error
        dead = self._dead()
        owners = {id(request): request for request, _ in self._owners.values()}
        self._owners.clear()
        updates += [(request, Update(0, error=dead)) for request in owners.values()]
        self._deliver_soon(updates)

    @property
    def failure(self) -> str | None:
        """The error of a dead engine."""
        return None if self.error is None else f"{type(self.error).__name__}: {self.error}"

    @property
    def state(self) -> str:
        return "dead" if self.error is not None else "asleep" if self.asleep else "ok"

    def _dead(self) -> EngineDead:
        return EngineDead(f"the engine died of {self.failure}; restart the server")

    def _take_snapshot(self) -> None:
        """Copies the engine's numbers for /metrics, which must not read a running engine."""
        engine, several = self._engine, self._engines
        schedulers = [one.scheduler for one in several]
        counts = [len(one.running) for one in several]
        running = sum(counts)
        not_finite = {
            name: None
            for one in several
            for name, value in one.runner.weights.checksums.items()
            if not value.finite
        }
        self.metrics.snapshot = Snapshot(
            running=running,
            waiting=engine.outstanding - running,
            pages_used=sum(scheduler.pool.used for scheduler in schedulers),
            pages=sum(scheduler.pool.count - 1 for scheduler in schedulers),
            preemptions=sum(one.preemptions for one in several),
            prefix_queries=sum(scheduler.queried for scheduler in schedulers),
            prefix_hits=sum(scheduler.hits for scheduler in schedulers),
            compilations=sum(one.runner.compilations for one in several),
            compiling=engine.compiling,
            version=engine.version,
            rejections=_rejections(engine.telemetry),
            replicas=tuple(
                Replica(one.controller.active, count, one.outstanding - count)
                for one, count in zip(several, counts, strict=True)
            ),
            bucket=sum(one.latest[1] for one in several if one.scheduler.running and one.latest),
            alarms=tuple(f"the {name}'s weights are not finite" for name in not_finite),
        )
        self.dashboard.copy_state(several)

    def _deliver_soon(self, updates: list[tuple[Request, Update]]) -> None:
        try:
            self._loop.call_soon_threadsafe(self._deliver, updates)
        except RuntimeError:  # the event loop has been closed
            self._running = False

    # --- called in the event loop, by the thread -------------------------------------------------

    def _deliver(self, updates: list[tuple[Request, Update]]) -> None:
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
            for _ in range(tokens):
                metrics.per_token.observe((now - last) / tokens)
        metrics.generation_tokens.inc(tokens)
        if update.sample is not None:
            metrics.ended.labels(update.sample.finish_reason).inc()
            metrics.latency.observe(now - request.arrived)
            request.open -= 1
            self.outstanding -= 1


def _rejections(telemetry: Collector | None) -> dict[str, int]:
    """The number of rejected drafts by cause, those without any included."""
    return {} if telemetry is None else {name: telemetry.summary().causes[name] for name in CAUSES}


def count_only(engine: Engine | Replicas) -> None:
    """Makes an engine's telemetry count without records, which would fill the memory."""
    collector = Collector(max_records=0)
    for one in (engine, *engine.engines):
        one.telemetry = collector
