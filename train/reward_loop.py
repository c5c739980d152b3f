"""The event loop in which a process runs its asynchronous rewards.

Clients of HTTP, locks and semaphores belong to the event loop in which they were first used, and
functions keep them from call to call. So a process has one loop, which runs in a thread of its own
until the process ends. Calls of `asyncio.to_thread` run in threads that nothing waits for: neither
the call that gave one up at its time limit, nor the end of the process.
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

_END_SECONDS = 1.0  # in which functions may still clean up when the process ends

_lock = threading.Lock()
_thread: _LoopThread | None = None


def run_in_loop(coroutine: Coroutine[Any, Any, Result]) -> Result:
    """Runs a coroutine in the process's event loop, from any other thread, and waits for it.

    If the wait is interrupted, as by Ctrl-C, the coroutine is cancelled.

    Raises:
      BaseException: what the coroutine raised.
    """
    global _thread
    with _lock:
        # In a process that was forked from this one, the thread does not run.
        if _thread is None or not _thread.is_alive():
            _thread = _LoopThread()
            _thread.start()
        future = asyncio.run_coroutine_threadsafe(coroutine, _thread.loop)
    try:
        return future.result()
    finally:
        future.cancel()


class _LoopThread(threading.Thread):
    """The thread of an event loop.

    Attributes:
      loop: the event loop.
    """

    def __init__(self) -> None:
        super().__init__(daemon=True, name="asynchronous rewards")
        self.loop, self._ends = asyncio.new_event_loop(), False
        self.loop.set_default_executor(_DaemonThreads())

    def run(self) -> None:
        while not self._ends:
            # A task that raises SystemExit or KeyboardInterrupt has it as its result, too; the loop
            # goes on for the others.
            with contextlib.suppress(BaseException):
                self.loop.run_forever()

    def end(self) -> None:
        """Cancels what still runs, and ends the loop, unless a function keeps it from ending."""
        ended = asyncio.run_coroutine_threadsafe(self._cancel_all(), self.loop)
        with contextlib.suppress(TimeoutError):
            ended.result(_END_SECONDS)
        self._ends = True
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.join(_END_SECONDS)
        if not self.is_alive():
            self.loop.close()

    async def _cancel_all(self) -> None:
        running = asyncio.all_tasks() - {asyncio.current_task()}
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


@atexit.register
def _end() -> None:
    if _thread is not None and _thread.is_alive():
        _thread.end()


class _DaemonThreads(concurrent.futures.ThreadPoolExecutor):
    """Runs functions in daemon threads, as many at once as `ThreadPoolExecutor` does by default.

    The interpreter waits for the threads of its base class before it ends. A call that is cancelled
    while it runs cannot be stopped: its thread is left alone, and another call takes its place.
    """

    def __init__(self) -> None:
        super().__init__()
        self._guard = threading.Lock()
        self._waiting: deque[tuple[_Call, Callable[[], Any]]] = deque()
        self._free = min(32, (os.cpu_count() or 1) + 4)

    def submit(self, function: Callable[..., Any], /, *args: Any, **named: Any) -> _Call:
        call = _Call(self._add_place)
        with self._guard:
            self._waiting.append((call, lambda: function(*args, **named)))
        self._start_next()
        return call

    def _add_place(self) -> None:
        with self._guard:
            self._free += 1
        self._start_next()

    def _start_next(self) -> None:
        with self._guard:
            if not self._free or not self._waiting:
                return
            self._free -= 1
            call = self._waiting.popleft()
        threading.Thread(target=_run, args=call, daemon=True, name="reward").start()


class _Call(concurrent.futures.Future):
    """A call in a thread.

    Args:
      leave: called once, when it has ended, or was cancelled while it ran.
    """

    def __init__(self, leave: Callable[[], None]):
        super().__init__()
        self._leave, self._left, self._guard = leave, False, threading.Lock()

    def cancel(self) -> bool:
        was_cancelled = super().cancel()
        if self.running():
            self.leave()
        return was_cancelled

    def leave(self) -> None:
        """Gives the place of the call to another."""
        with self._guard:
            left, self._left = self._left, True
        if not left:
            self._leave()


def _run(call: _Call, function: Callable[[], Any]) -> None:
    try:
        if not call.set_running_or_notify_cancel():
            return
        try:
            result = function()
        except BaseException as error:
            call.set_exception(error)
        else:
            call.set_result(result)
    finally:
        call.leave()
