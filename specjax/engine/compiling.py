"""Compiled programs: which one serves a call, compiling several at once, and messages about it.

Every program is held as a `.lower().compile()` executable, which refuses other shapes: nothing
compiles unseen. Compiling can take minutes, and a call that prints nothing looks like one that
hangs. So whatever takes longer than `SILENT_SECONDS` is logged as a warning, which shows where no
log was set up: `CompileProgress` counts programs that are compiled ahead, `announce_if_slow` names
one that a request needs.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any

import jax

from specjax.decode.options import Features
from specjax.parallel import sharding

log = logging.getLogger(__name__)

OnProgram = Callable[[int, int], None]  # programs that are ready, and all that there will be
SILENT_SECONDS = 5.0  # of compiling before the first message
MESSAGE_SECONDS = 10.0  # between two messages
POLL_SECONDS = 1.0  # `CompilePool.finish` calls `on_built` at least this often


class CompilePool:
    """Threads that compile, while the caller goes on tracing further programs.

    Compilers run outside of the interpreter's lock. Programs begin in the order in which they were
    submitted. If the body of a `with` fails, those that have not begun are cancelled.

    Args:
      threads: programs that are compiled at once.
      on_built: is called with 1 for each program that is ready, and with 0 every `POLL_SECONDS`
        while `finish` waits, by the thread that calls `collect` or `finish`.
    """

    def __init__(self, threads: int, on_built: Callable[[int], None]):
        self._pool = ThreadPoolExecutor(threads, "compile")
        self._on_built = on_built
        self._keep: dict[Future, Callable[[Any], None]] = {}
        self.submitted = 0

    def submit(self, build: Callable[[], Any], keep: Callable[[Any], None]) -> None:
        """Starts `build` on a thread; `keep` gets its result from `collect` or `finish`."""
        self._keep[self._pool.submit(build)] = keep
        self.submitted += 1

    def collect(self, seconds: float = 0.0) -> None:
        """Takes in what is ready, waiting so long for the first; raises what a build raised."""
        ready, _ = wait(self._keep, seconds, FIRST_COMPLETED)
        for future in [future for future in self._keep if future in ready]:
            self._keep.pop(future)(future.result())
            self._on_built(1)
        if seconds and not ready:
            self._on_built(0)

    def finish(self) -> None:
        """Waits for everything that was submitted."""
        while self._keep:
            self.collect(POLL_SECONDS)

    def __enter__(self) -> CompilePool:
        return self

    def __exit__(self, kind: type | None, *unused: object) -> None:
        # After an error, Ctrl-C included, do not wait for what runs, nor begin anything else.
        self._pool.shutdown(wait=kind is None, cancel_futures=True)


class CompileProgress:
    """An `OnProgram` that says how many programs are ready, once compiling takes long.

    Args:
      say: gets each message.
      silent: seconds without a message, `SILENT_SECONDS` if None; with 0 the last one always comes.
    """

    def __init__(self, say: Callable[[str], None] = log.warning, silent: float | None = None):
        self._say, self._silent = say, SILENT_SECONDS if silent is None else silent
        self._began: float | None = None  # set by the first call, and reset by the last
        self._next = SILENT_SECONDS

    def __call__(self, done: int, total: int) -> None:
        now = time.perf_counter()
        if self._began is None:
            self._began, self._next = now, SILENT_SECONDS
        seconds = now - self._began
        last = done == total
        if seconds >= (self._silent if last else self._next):
            self._next = seconds + MESSAGE_SECONDS
            self._say(f"compiling: {done} of {total} programs are ready after {seconds:.0f} s")
        if last:
            self._began = None


@contextlib.contextmanager
def no_messages() -> Iterator[None]:
    """Nothing is logged about what compiles within."""
    log.disabled, before = True, log.disabled
    try:
        yield
    finally:
        log.disabled = before


@contextlib.contextmanager
def announce_if_slow(what: str, say: Callable[[str], None] = log.warning) -> Iterator[None]:
    """Names what is compiled within, if that takes longer than `SILENT_SECONDS`."""

    def late() -> None:
        say(
            f"compiling {what} takes more than {SILENT_SECONDS:.0f} s, and samples wait for it; "
            "JAX_COMPILATION_CACHE_DIR=DIR keeps what was compiled for the next start"
        )

    timer = threading.Timer(SILENT_SECONDS, late)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


class NotCompiled:
    """The place of a program that is still being compiled: returns its donated inputs, and None."""

    def __init__(self, donate: tuple[int, ...]):
        self._donate = donate

    def __call__(self, *inputs):
        return (*(inputs[i] for i in self._donate), None)


class Executables:
    """Programs by key, each compiled when it is first asked for.

        key                                       the program
        prefill, (rows, positions)                reads pieces of so many prompts
        place, count                              starts so many sequences
        score, (rows, positions), (rows, pages)   gives log-probabilities of pieces of prompts
        chunk, strategy, bucket, features         runs so many slots for several rounds

    Args:
      mesh: that programs run on; None is the default device.

    Attributes:
      by_key: the executables.
      compilations: programs that were built so far.
      before_build: is called before a program is compiled, which takes seconds.
      build: makes the executable of a program, given its key, a function that lowers it, and the
        numbers of its donated inputs.
      threads: programs that are compiled at once.
    """

    def __init__(self, mesh: jax.sharding.Mesh | None):
        self._mesh = mesh
        self.by_key: dict[tuple, jax.stages.Compiled] = {}
        self.compilations = 0
        self.before_build: Callable[[], None] = lambda: None
        self.build: Callable = lambda key, lower, donate: lower().compile()
        self.threads = threads_for(mesh)
        self._pool: CompilePool | None = None
        self._is_ahead = False

    def get(self, key: tuple, program: Callable, inputs: tuple, donate: tuple[int, ...]):
        """The executable of a program whose output begins with its donated inputs, in order."""
        if key in self.by_key:
            return self.by_key[key]
        self.before_build()
        # Kernels and operations on parts of the vocabulary read the ambient mesh.
        program = sharding.traced_on(self._mesh, program)

        def lower() -> jax.stages.Lowered:
            out = None
            if self._mesh is not None:
                shapes = jax.eval_shape(program, *inputs)
                out = tuple(sharding.state_shardings(self._mesh, shape) for shape in shapes)
            return jax.jit(program, donate_argnums=donate, out_shardings=out).lower(*inputs)

        if self._pool is not None:
            lowered = lower()
            self.by_key[key] = NotCompiled(donate)
            self._pool.submit(
                lambda: self.build(key, lambda: lowered, donate),
                lambda built: self._keep(key, built),
            )
        elif self._is_ahead:  # the caller of `ahead` reports progress
            self._keep(key, self.build(key, lower, donate))
        else:
            with announce_if_slow(_described(key)):
                self._keep(key, self.build(key, lower, donate))
        return self.by_key[key]

    def _keep(self, key: tuple, built: Callable) -> None:
        self.by_key[key] = built
        self.compilations += 1

    @contextlib.contextmanager
    def ahead(self, pool: CompilePool | None) -> Iterator[None]:
        """Programs within are compiled before they are needed, and none is announced.

        Args:
          pool: compiles what is asked for, and must be waited for within. Until then such a program
            is `NotCompiled` and computes nothing. None: each is compiled when it is asked for.
        """
        self._pool, self._is_ahead = pool, True
        try:
            yield
        finally:
            self._pool, self._is_ahead = None, False
            compiled = {k: v for k, v in self.by_key.items() if not isinstance(v, NotCompiled)}
            self.by_key = compiled

    def rows(self, positions: int) -> list[int]:
        """How many prompts each program reads at once that reads pieces of so many positions."""
        sizes = [key[1] for key in self.by_key if key[0] == "prefill"]
        return [rows for rows, read in sizes if read == positions]

    def buckets(self, strategy: str, features: Features) -> list[int]:
        """The buckets, ascending, for which a compiled program serves this strategy and these
        features."""
        found = {
            key[2]
            for key in self.by_key
            if key[0] == "chunk" and key[1] == strategy and key[3].covers(features)
        }
        return sorted(found)

    def covering(self, strategy: str, bucket: int, features: Features) -> Features:
        """The features of the smallest compiled program for this strategy and bucket that covers
        `features`; where there is none, `features` themselves."""
        start = ("chunk", strategy, bucket)
        compiled = [key[3] for key in self.by_key if key[:3] == start and key[3].covers(features)]
        return min(compiled, key=lambda f: f.size, default=features)

    def memory(self) -> dict[str, int]:
        """Bytes of all code, and of the largest program's temporaries; 0 where the platform does
        not tell."""
        found = [compiled.memory_analysis() for compiled in self.by_key.values()]
        found = [analysis for analysis in found if analysis is not None]
        return {
            "code": sum(a.generated_code_size_in_bytes for a in found),
            "temporaries": max((a.temp_size_in_bytes for a in found), default=0),
        }


def threads_for(mesh: jax.sharding.Mesh | None) -> int:
    """The number of programs to compile at once: one for each core, since a compiler does much of
    its work in one thread (XLA for CPUs a quarter to a third of a chunk's).

    One where all hosts of a replica compile a program, for they must do so in one order, and in
    jobs of several processes on GPUs: there XLA's autotuner shares out its measurements among the
    processes, and waits for all of them, program by program.
    """
    devices = jax.devices()[:1] if mesh is None else [*mesh.devices.flat]
    several = len(devices) > 1 and len({device.process_index for device in devices}) > 1
    if several or (jax.process_count() > 1 and devices[0].platform == "gpu"):
        return 1
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def _described(key: tuple) -> str:
    """A program in words, for a message."""
    kind, *sizes = key
    if kind == "chunk":
        name, batch = sizes[:2]
        if name.startswith("paths:"):  # a tree of many paths has a long name
            return f"a static tree of {2 + name.count(',')} rows for a batch of {batch}"
        return f"strategy {name} for a batch of {batch}"
    if kind == "place":
        return f"the start of {sizes[0]} samples"
    rows, positions = sizes[0]
    does = "reads" if kind == "prefill" else "scores"
    return f"what {does} {positions} positions of {rows} prompts"
