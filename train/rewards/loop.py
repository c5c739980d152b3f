"""The event loop in which a process runs its asynchronous rewards.

Clients of HTTP, locks and semaphores belong to the event loop in which they were first used, and
functions keep them from call to call. So a process has one loop, in a thread that lives as long as
the process. Calls of `asyncio.to_thread` run in threads that nothing waits for: neither the call
that gave one up at its time limit, nor the end of the process.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")

# Calls of `asyncio.to_thread` that were given up and still run, with which a process is replaced.
MOST_ABANDONED = 100
_CALL = "call of asyncio.to_thread"  # the name of their threads

_lock = threading.Lock()
_loops: dict[int, asyncio.AbstractEventLoop] = {}  # by process: a fork has no thread of its parent


def run_in_loop(coroutine: Coroutine[Any, Any, Result]) -> Result:
    """Runs a coroutine in the process's event loop, and waits for it.

    If the wait is interrupted, as by Ctrl-C, the coroutine is cancelled.

    Raises:
      BaseException: what the coroutine raised.
    """
    future = asyncio.run_coroutine_threadsafe(coroutine, _running_loop())
    try:
        return future.result()
    finally:
        future.cancel()


def cancel_unwanted(task: asyncio.Future) -> None:
    """Cancels a task whose result and error are not wanted; returns before it has ended."""
    # asyncio logs errors that were not read.
    task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
    task.cancel()


def abandoned_threads() -> int:
    """The number of calls of `asyncio.to_thread` that still run; none of a call that goes on."""
    return sum(thread.name == _CALL for thread in threading.enumerate())


def _running_loop() -> asyncio.AbstractEventLoop:
    with _lock:
        if os.getpid() not in _loops:
            loop = _loops[os.getpid()] = asyncio.new_event_loop()
            loop.set_default_executor(_DaemonThreads())
            threading.Thread(target=_run, args=(loop,), daemon=True, name="rewards").start()
        return _loops[os.getpid()]


def _run(loop: asyncio.AbstractEventLoop) -> None:
    while True:
        # A task that raises SystemExit or KeyboardInterrupt has it as its result, too; the loop
        # goes on for the others.
        with contextlib.suppress(BaseException):
            loop.run_forever()


class _DaemonThreads(concurrent.futures.ThreadPoolExecutor):
    """Runs each call in a daemon thread of its own.

    The threads of the base class are few, so that calls which hang would keep all others waiting,
    and the interpreter waits for them before it ends.
    """

    def submit(
        self, function: Callable[..., Any], /, *args: Any, **named: Any
    ) -> concurrent.futures.Future:
        future: concurrent.futures.Future = concurrent.futures.Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(function(*args, **named))
            except BaseException as error:
                future.set_exception(error)

        threading.Thread(target=run, daemon=True, name=_CALL).start()
        return future
