"""Compiling side by side, and saying that it takes its time.

Nothing is said of what is quick. Else lines come now and then: while programs are compiled ahead
they say how many are ready (`CompileProgress`), and of one that a request needs, which (
`said_if_slow`). They are warnings, so that they show where nobody has set up a log: a call that
takes minutes and says nothing looks like one that hangs.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any

log = logging.getLogger(__name__)

OnProgram = Callable[[int, int], None]  # programs that are ready, and all that there will be
MOMENT = 5.0  # seconds of compiling that nothing is said of
EVERY = 10.0  # seconds between two lines
LOOK = 1.0  # seconds after which whoever watches is called though nothing is new


class CompilePool:
    """Threads that compile, while who asks goes on tracing further programs.

    Compilers run outside of the interpreter's lock. Programs begin in the order in which they were
    submitted. If the body of a `with` fails, what has not begun is given up.

    Args:
      threads: programs that are compiled at once.
      on_built: is called for each that is ready, and every second while `finish` waits, by the
        thread that calls `collect` or `finish`.
    """

    def __init__(self, threads: int, on_built: Callable[[int], None]):
        self._pool = ThreadPoolExecutor(threads, "compile")
        self._on_built = on_built
        self._keep: dict[Future, Callable[[Any], None]] = {}
        self.submitted = 0

    def submit(self, build: Callable[[], Any], keep: Callable[[Any], None]) -> None:
        """Compiles a program; `keep` gets it from `collect` or `finish`."""
        self._keep[self._pool.submit(build)] = keep
        self.submitted += 1

    def collect(self, seconds: float = 0.0) -> None:
        """Takes in what is ready, after so many seconds if nothing is; raises what a build did."""
        ready, _ = wait(self._keep, seconds, FIRST_COMPLETED)
        for future in [future for future in self._keep if future in ready]:
            self._keep.pop(future)(future.result())
            self._on_built(1)
        if seconds and not ready:
            self._on_built(0)

    def finish(self) -> None:
        """Waits for everything that was submitted."""
        while self._keep:
            self.collect(LOOK)

    def __enter__(self) -> CompilePool:
        return self

    def __exit__(self, kind: type | None, *unused: object) -> None:
        # Ctrl-C, too, need not wait for what nobody began.
        self._pool.shutdown(wait=kind is None, cancel_futures=True)


class CompileProgress:
    """An `OnProgram` that says how many programs are ready, once compiling takes long.

    Args:
      say: gets each line. moment: seconds of which nothing is said, `MOMENT` if None; 0: the last
        line always comes.
    """

    def __init__(self, say: Callable[[str], None] = log.warning, moment: float | None = None):
        self._say, self._moment = say, MOMENT if moment is None else moment
        self._began: float | None = None  # it begins with its first call, and anew after its last
        self._next = MOMENT

    def __call__(self, done: int, total: int) -> None:
        now = time.perf_counter()
        if self._began is None:
            self._began, self._next = now, MOMENT
        seconds = now - self._began
        last = done == total
        if seconds >= (self._moment if last else self._next):
            self._next = seconds + EVERY
            self._say(f"compiling: {done} of {total} programs are ready after {seconds:.0f} s")
        if last:
            self._began = None


@contextlib.contextmanager
def unsaid() -> Iterator[None]:
    """Nothing is said by default of what compiles within."""
    log.disabled, before = True, log.disabled
    try:
        yield
    finally:
        log.disabled = before


@contextlib.contextmanager
def said_if_slow(what: str, say: Callable[[str], None] = log.warning) -> Iterator[None]:
    """Says what is compiled within, if that takes longer than a moment."""

    def late() -> None:
        say(
            f"compiling {what} takes more than {MOMENT:.0f} s, and samples wait for it; "
            "JAX_COMPILATION_CACHE_DIR=DIR keeps what was compiled for the next start"
        )

    timer = threading.Timer(MOMENT, late)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
