"""The event loop in which a process runs its asynchronous rewards.

Clients of HTTP, locks and semaphores belong to the event loop in which they were first used, and
functions keep them from call to call. So a process has one loop. Calls in the main thread run it
there, since only that thread may set signals such as the alarm of math-verify. From the first call
in any other thread on, or in a main thread that runs a loop of its own, the loop runs in a thread
that lives as long as the process. Calls of `asyncio.to_thread` run in threads that nothing waits
for: neither the call that gave one up at its time limit, nor the end of the process.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")

# Calls of `asyncio.to_thread` that were given up and still run, with which a process is replaced.
MOST_ABANDONED = 100
_END_SECONDS = 1.0  # in which functions may still clean up when the process ends

_lock = threading.Lock()
_loop: _Loop | None = None


def run_in_loop(coroutine: Coroutine[Any, Any, Result]) -> Result:
    """Runs a coroutine in the process's event loop, and waits for it.

    If the wait is interrupted, as by Ctrl-C, the coroutine is cancelled.

    Raises:
      BaseException: what the coroutine raised.
    """
    global _loop
    with _lock:
        if _loop is None or _loop.pid != os.getpid():  # this process was forked from the loop's
            _loop = _Loop()
    return _loop.run(coroutine)


def cancel_unwanted(task: asyncio.Future) -> None:
    """Cancels a task whose result and error are not wanted; returns before it has ended."""
    # asyncio logs errors that were not read.
    task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
    task.cancel()


def abandoned_threads() -> int:
    """The number of calls of `asyncio.to_thread` that were given up and still run."""
    return 0 if _loop is None else _loop.threads.abandoned


class _Loop:
    """The event loop of a process.

    Attributes:
      pid: the process.
      threads: what runs the calls of `asyncio.to_thread`.
    """

    def __init__(self) -> None:
        self.pid, self.threads = os.getpid(), _DaemonThreads()
        self._loop, self._ends = asyncio.new_event_loop(), False
        self._loop.set_default_executor(self.threads)
        # Where the main thread runs the loop, Ctrl-C cancels what runs, and interrupts no line of
        # it; then KeyboardInterrupt is raised.
        self._runner = asyncio.Runner(loop_factory=lambda: self._loop)
        self._guard = threading.Lock()
        self._turn = threading.Lock()  # held by the thread that runs the loop
        self._thread: threading.Thread | None = None  # runs the loop once it has started

    def run(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        """Runs a coroutine in the loop, and waits for it."""
        with self._guard:
            runs_here = self._thread is None and _is_free_main_thread()
            if runs_here:
                self._turn.acquire()
            else:
                self._start()
                future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        if runs_here:
            try:
                return self._run_here(coroutine)
            finally:
                self._turn.release()
        try:
            return future.result()
        finally:
            future.cancel()

    def _run_here(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        task = self._loop.create_task(coroutine)
        try:
            return self._runner.run(_result(task))
        except BaseException:
            # A task that raises SystemExit or KeyboardInterrupt ends the call before its own task.
            if not task.done():
                task.cancel()
                with contextlib.suppress(BaseException):
                    waits = asyncio.wait([task], timeout=_END_SECONDS)
                    self._loop.run_until_complete(waits)
            raise

    def _start(self) -> None:
        if self._thread is None:
            name = "asynchronous rewards"
            self._thread = threading.Thread(target=self._run_forever, daemon=True, name=name)
            self._thread.start()

    def _run_forever(self) -> None:
        with self._turn:  # when the main thread's call, if there is one, has ended
            while not self._ends:
                # A task that raises SystemExit or KeyboardInterrupt has it as its result, too; the
                # loop goes on for the others.
                with contextlib.suppress(BaseException):
                    self._loop.run_forever()

    def end(self) -> None:
        """Cancels what still runs, and ends the loop, unless a function keeps it from ending."""
        if self._thread is None:
            with contextlib.suppress(BaseException):
                self._loop.run_until_complete(self._cancel_all())
            self._loop.close()
            return
        ended = asyncio.run_coroutine_threadsafe(self._cancel_all(), self._loop)
        with contextlib.suppress(TimeoutError):
            ended.result(_END_SECONDS)
        self._ends = True
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_END_SECONDS)
        if not self._thread.is_alive():
            self._loop.close()

    async def _cancel_all(self) -> None:
        running = asyncio.all_tasks() - {asyncio.current_task()}
        for task in running:
            cancel_unwanted(task)
        if running:
            await asyncio.wait(running, timeout=_END_SECONDS)


async def _result(task: asyncio.Task[Result]) -> Result:
    return await task


def _is_free_main_thread() -> bool:
    """Whether this is the main thread, and it runs no event loop, as that of a notebook does."""
    if threading.current_thread() is not threading.main_thread():
        return False
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return True
    return False


@atexit.register
def _end() -> None:
    if _loop is not None and _loop.pid == os.getpid():
        _loop.end()


class _DaemonThreads(concurrent.futures.ThreadPoolExecutor):
    """Runs functions in daemon threads, as many at once as `ThreadPoolExecutor` does by default.

    The interpreter waits for the threads of its base class before it ends. A call that is cancelled
    while it runs cannot be stopped: its thread is left alone, and another call takes its place.

    Attributes:
      abandoned: the number of calls that were cancelled and still run.
    """

    def __init__(self) -> None:
        super().__init__()
        self.abandoned = 0
        self._guard = threading.Lock()
        self._waiting: deque[tuple[_Call, Callable[[], Any]]] = deque()
        self._free = min(32, (os.cpu_count() or 1) + 4)

    def submit(self, function: Callable[..., Any], /, *args: Any, **named: Any) -> _Call:
        call = _Call(self)
        with self._guard:
            self._waiting.append((call, lambda: function(*args, **named)))
        self._start_next()
        return call

    def abandon(self, call: _Call) -> None:
        """Gives the place of a call that runs to another."""
        with self._guard:
            if call.is_abandoned or call.has_ended:
                return
            call.is_abandoned = True
            self.abandoned += 1
            self._free += 1
        self._start_next()

    def end(self, call: _Call) -> None:
        """Notes that the thread of a call ends."""
        with self._guard:
            call.has_ended = True
            if call.is_abandoned:
                self.abandoned -= 1
            else:
                self._free += 1
        self._start_next()

    def _start_next(self) -> None:
        with self._guard:
            if not self._free or not self._waiting:
                return
            self._free -= 1
            call, function = self._waiting.popleft()
        threading.Thread(target=call.run, args=(function,), daemon=True, name="reward").start()


class _Call(concurrent.futures.Future):
    """A call in a thread.

    Args:
      threads: what runs it.

    Attributes:
      is_abandoned: whether it was cancelled while it ran.
      has_ended: whether its thread has ended.
    """

    def __init__(self, threads: _DaemonThreads):
        super().__init__()
        self._threads, self.is_abandoned, self.has_ended = threads, False, False

    def cancel(self) -> bool:
        was_cancelled = super().cancel()
        if self.running():
            self._threads.abandon(self)
        return was_cancelled

    def run(self, function: Callable[[], Any]) -> None:
        """Runs the function of the call, unless the call was cancelled."""
        try:
            if not self.set_running_or_notify_cancel():
                return
            try:
                result = function()
            except BaseException as error:
                self.set_exception(error)
            else:
                self.set_result(result)
        finally:
            self._threads.end(self)
