"""Compiling side by side, and saying that it takes its time.

Nothing is said of what is quick. Else lines come now and then: while programs are compiled ahead
they say how many are ready (`CompileProgress`), and of one that a request needs, which (
`said_if_slow`). They are warnings, so that they show where nobody has set up a log: a call that
takes minutes and says nothing looks like one that hangs.
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


class Noted:
    """Stands for a program that is not compiled yet."""

    def __init__(self, donate: tuple[int, ...]):
        self._donate = donate

    def __call__(self, *inputs):
        return (*(inputs[i] for i in self._donate), None)


class Executables:
    """Compiles each program when it is first asked for.

    Args:
      mesh: that programs run on; None is the default device.

    Attributes:
      by_key: what was compiled.
      compilations: programs that were built so far.
      before_build: is called before a program is compiled, which takes seconds.
      build: makes what runs of a program, given its key, what lowers it, and which inputs it is
        donated.
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
        # Kernels and what works on parts of the vocabulary ask for the ambient mesh.
        program = sharding.traced_on(self._mesh, program)

        def lower() -> jax.stages.Lowered:
            out = None
            if self._mesh is not None:
                shapes = jax.eval_shape(program, *inputs)
                out = tuple(sharding.state_shardings(self._mesh, shape) for shape in shapes)
            return jax.jit(program, donate_argnums=donate, out_shardings=out).lower(*inputs)

        if self._pool is not None:
            lowered = lower()
            self.by_key[key] = Noted(donate)
            self._pool.submit(
                lambda: self.build(key, lambda: lowered, donate),
                lambda built: self._keep(key, built),
            )
        elif self._is_ahead:  # whoever compiles ahead says how far that is
            self._keep(key, self.build(key, lower, donate))
        else:
            with said_if_slow(_described(key)):
                self._keep(key, self.build(key, lower, donate))
        return self.by_key[key]

    def _keep(self, key: tuple, built: Callable) -> None:
        self.by_key[key] = built
        self.compilations += 1

    @contextlib.contextmanager
    def ahead(self, pool: CompilePool | None) -> Iterator[None]:
        """Of what is asked for within nobody is told that it compiles: the caller says so.

        Args:
          pool: compiles what is asked for, and must be waited for within. Meanwhile such a program
            does nothing: it gives back the inputs that it is donated, and None. None: each program
            is compiled when it is asked for.
        """
        self._pool, self._is_ahead = pool, True
        try:
            yield
        finally:
            self._pool, self._is_ahead = None, False
            self.by_key = {k: v for k, v in self.by_key.items() if not isinstance(v, Noted)}

    def rows(self, positions: int) -> list[int]:
        """Of the programs that read pieces of so many positions, how many each reads at once."""
        sizes = [key[1] for key in self.by_key if key[0] == "prefill"]
        return [rows for rows, read in sizes if read == positions]

    def buckets(self, strategy: str, features: Features) -> list[int]:
        """Buckets for which a program was compiled that serves this, in order."""
        found = {
            key[2]
            for key in self.by_key
            if key[0] == "chunk" and key[1] == strategy and key[3].covers(features)
        }
        return sorted(found)

    def covering(self, strategy: str, bucket: int, features: Features) -> Features:
        """Of the programs that were compiled for this strategy and bucket and serve requests that
        ask for this, the features of the smallest; if there is none, just these."""
        start = ("chunk", strategy, bucket)
        compiled = [key[3] for key in self.by_key if key[:3] == start and key[3].covers(features)]
        return min(compiled, key=lambda f: f.size, default=features)

    def memory(self) -> dict[str, int]:
        """Bytes of what was compiled, as far as the platform tells: code, and the temporaries of
        the program that needs most."""
        found = [compiled.memory_analysis() for compiled in self.by_key.values()]
        found = [analysis for analysis in found if analysis is not None]
        return {
            "code": sum(a.generated_code_size_in_bytes for a in found),
            "temporaries": max((a.temp_size_in_bytes for a in found), default=0),
        }


def threads_for(mesh: jax.sharding.Mesh | None) -> int:
    """Programs that are worth compiling at once: one for each core, for compilers do a good part of
    their work in one thread (XLA for CPUs a quarter to a third of a chunk's).

    One where all hosts of a replica compile a program, for they have to do so in one order, and in
    jobs of several processes on GPUs: there XLA's autotuner shares out what it measures among the
    processes, and waits for all of them, program by program.
    """
    devices = jax.devices()[:1] if mesh is None else [*mesh.devices.flat]
    several = len(devices) > 1 and len({device.process_index for device in devices}) > 1
    if several or (jax.process_count() > 1 and devices[0].platform == "gpu"):
        return 1
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def _described(key: tuple) -> str:
    """A program in words, for who waits for it."""
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
