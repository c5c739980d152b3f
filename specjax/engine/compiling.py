"""Compiled programs: which one serves a call, compiling several at once, and messages about it.

Every program is held as a `.lower().compile()` executable, which refuses other shapes, so that
nothing is compiled unnoticed. Compiling can take minutes, and a call that prints nothing seems to
hang. So compiling for longer than `SILENT_SECONDS` is logged as a warning, which Python prints even
if no log was set up: `CompileProgress` counts programs that are compiled ahead, `announce_if_slow`
names a program that a request needs.
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

from specjax.config import ModelConfig
from specjax.decode.options import Features
from specjax.engine.graphs import Graphs
from specjax.error_text import first_line
from specjax.interfaces import Device
from specjax.parallel import sharding
from specjax.weights.matrix import precision_of

log = logging.getLogger(__name__)

OnProgram = Callable[[int, int], None]  # called with the numbers of ready and of all programs
SILENT_SECONDS = 5.0  # compiling time before the first message
MESSAGE_SECONDS = 10.0  # time between two messages
POLL_SECONDS = 1.0  # `CompilePool.finish` calls `on_built` at least this often


_of_thread = threading.local()  # has `saved`, see `_saved_seconds`


def _count_saved_seconds(event: str, seconds: float, **_: object) -> None:
    if event.endswith("/compile_time_saved_sec"):  # JAX keeps whole seconds, rounded down
        _of_thread.saved = _saved_seconds() + max(seconds, 0.0) + 1.0


def _saved_seconds() -> float:
    """The seconds of compiling that JAX's cache directory has saved on this thread."""
    return getattr(_of_thread, "saved", 0.0)


jax.monitoring.register_event_duration_secs_listener(_count_saved_seconds)


class CompilePool:
    """Threads that compile programs while the caller traces further ones.

    Compilers run outside of the interpreter's lock. Programs are compiled in the order in which
    they were submitted. If the body of the `with` fails, those that have not begun are cancelled.

    Args:
      threads: number of programs that are compiled at once.
      on_built: function called with 1 for each program that is ready, and with 0 every
        `POLL_SECONDS` while `finish` waits, in the thread that calls `collect` or `finish`.

    Attributes:
      submitted: number of programs that were submitted.
    """

    def __init__(self, threads: int, on_built: Callable[[int], None]):
        self._pool = ThreadPoolExecutor(threads, "compile")
        self._on_built = on_built
        self._keep: dict[Future, Callable[[Any], None]] = {}
        self.submitted = 0

    def submit(self, build: Callable[[], Any], keep: Callable[[Any], None]) -> None:
        """Runs `build` on a thread; `collect` or `finish` calls `keep` with its result."""
        self._keep[self._pool.submit(build)] = keep
        self.submitted += 1

    def collect(self, seconds: float = 0.0) -> None:
        """Collects programs that are ready; raises the error of a build that failed.

        Args:
          seconds: time to wait for the first one.
        """
        ready, _ = wait(self._keep, seconds, FIRST_COMPLETED)
        for future in [future for future in self._keep if future in ready]:
            self._keep.pop(future)(future.result())
            self._on_built(1)
        if seconds and not ready:
            self._on_built(0)

    def finish(self) -> None:
        """Waits for all programs that were submitted."""
        while self._keep:
            self.collect(POLL_SECONDS)

    def __enter__(self) -> CompilePool:
        return self

    def __exit__(self, kind: type | None, *unused: object) -> None:
        # After an error, Ctrl-C included, do not wait for running builds, and begin no others.
        self._pool.shutdown(wait=kind is None, cancel_futures=True)


class CompileProgress:
    """An `OnProgram` that says how many programs are ready, if compiling takes long.

    Args:
      say: function called with each message.
      silent: compiling time in seconds below which the last message is left out; None:
        `SILENT_SECONDS`; 0: it is never left out.
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
    """A context in which nothing is logged about compiling."""
    log.disabled, before = True, log.disabled
    try:
        yield
    finally:
        log.disabled = before


@contextlib.contextmanager
def announce_if_slow(what: str, say: Callable[[str], None] = log.warning) -> Iterator[None]:
    """A context that logs what is compiled in it, if that takes longer than `SILENT_SECONDS`."""

    def late() -> None:
        text = f"compiling {what} takes more than {SILENT_SECONDS:.0f} s, and samples wait for it"
        if not jax.config.jax_compilation_cache_dir:
            text += "; JAX_COMPILATION_CACHE_DIR=DIR keeps what was compiled for the next start"
        say(text)

    timer = threading.Timer(SILENT_SECONDS, late)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


class NotCompiled:
    """Stands for a program that is still being compiled; returns its donated inputs and None."""

    def __init__(self, donate: tuple[int, ...]):
        self._donate = donate

    def __call__(self, *inputs):
        return (*(inputs[i] for i in self._donate), None)


class DoesNotCompile:
    """Stands for a program that failed to compile; a call raises the error, and donates nothing."""

    def __init__(self, error: jax.errors.JaxRuntimeError):
        self._error = error

    def __call__(self, *inputs):
        raise self._error

    def memory_analysis(self) -> None:
        return None


class Executables:
    """Executables by key, each compiled when it is first asked for.

        key                                       what the program does
        prefill, (rows, positions)                reads pieces of `rows` prompts
        place, count                              starts `count` sequences
        score, (rows, positions), (rows, pages)   gives log-probabilities of pieces of prompts
        chunk, strategy, bucket, features         runs `bucket` rows for several rounds

    Args:
      mesh: mesh that programs run on; None: the default device.
      cfg: config of the target, whose dtype decides the precision of products.
      graphs: whether chunks are CUDA graphs; None: they are not.

    Attributes:
      by_key: the executables.
      graphs: whether chunks are CUDA graphs.
      is_checked: whether the graphs of this engine were run, see `end_check`.
      plain_forms: programs by key that were also compiled without graphs, the first one of each
        program and features, until `end_check`.
      compilations: number of programs that were compiled so far.
      seconds: time that compiling each program took, or would have taken if the cache directory
        had not had it.
      before_build: function called before a program is compiled, which takes seconds.
      build: function that makes the executable of a program from its key, a function that lowers
        it, and the indices of its donated inputs.
      threads: number of programs that are compiled at once.
    """

    def __init__(
        self, mesh: jax.sharding.Mesh | None, cfg: ModelConfig, graphs: Graphs | None = None
    ):
        self._mesh, self._cfg = mesh, cfg
        self.by_key: dict[tuple, jax.stages.Compiled] = {}
        self.graphs = graphs or Graphs(Device("", ""), ())
        self.is_checked, self._is_checking = False, False
        self.plain_forms: dict[tuple, jax.stages.Compiled] = {}
        self._graph_keys: set[tuple] = set()
        self._may_fail: set[tuple] = set()
        self.compilations = 0
        self.seconds: dict[tuple, float] = {}
        self.before_build: Callable[[], None] = lambda: None
        self.build: Callable = self._build
        self.threads = threads_for(mesh)
        self._pool: CompilePool | None = None
        self._is_ahead = False

    def get(
        self,
        key: tuple,
        program: Callable,
        inputs: tuple,
        donate: tuple[int, ...],
        may_fail: bool = False,
    ):
        """The executable of a program; the program returns its donated inputs first, in order.

        Args:
          key: key of the program.
          program: the function.
          inputs: its inputs.
          donate: indices of inputs that are donated.
          may_fail: whether the caller compares the program with another one before it is used, and
            does without it if it fails. It becomes `DoesNotCompile` if it does not compile.
        """
        if key in self.by_key:
            return self.by_key[key]
        if may_fail:
            self._may_fail.add(key)
        self.before_build()
        # Kernels and operations on parts of the vocabulary read the ambient mesh.
        program = precision_of(self._cfg)(sharding.traced_on(self._mesh, program))

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
                lambda: self._attempt(key, lambda: lowered, donate),
                lambda built: self._keep(key, built),
            )
            return self.by_key[key]
        if self._is_ahead:  # the caller of `ahead` reports the progress
            self._keep(key, self._attempt(key, lower, donate))
        else:
            with announce_if_slow(described(key)):
                self._keep(key, self._attempt(key, lower, donate))
        return self.by_key[key]

    def _attempt(self, key: tuple, lower: Callable[[], jax.stages.Lowered], donate: tuple):
        """Makes the executable of a program, or `DoesNotCompile` if it may fail and does."""
        began, saved = time.perf_counter(), _saved_seconds()
        try:
            return self.build(key, lower, donate)
        except jax.errors.JaxRuntimeError as error:
            if key not in self._may_fail:
                raise
            return DoesNotCompile(error)
        finally:
            self.seconds[key] = time.perf_counter() - began + _saved_seconds() - saved

    def _build(self, key: tuple, lower: Callable[[], jax.stages.Lowered], donate: tuple[int, ...]):
        """Compiles a program; may run on any thread.

        Both forms of a program are compiled one after the other on one thread: XLA keeps the
        algorithms that it tuned for the first, so that the second one has the same.
        """
        lowered, plain = lower(), dict(self.graphs.plain_options) or None
        is_compared = self._is_checking or key in self._may_fail
        if not (self.graphs.wanted and key[0] == "chunk" and is_compared):
            return lowered.compile(plain)
        try:
            built = lowered.compile(dict(self.graphs.options(key)))
        except jax.errors.JaxRuntimeError as error:
            self.graphs.stop(f"{described(key)} does not compile to one: {first_line(error)}")
            return lowered.compile(plain)
        self._graph_keys.add(key)
        _, program, _, features = key
        if key not in self._may_fail and self.graphs.is_first((program, features)):
            self.plain_forms[key] = lowered.compile(plain)
            self.compilations += 1
        return built

    def is_graph(self, key: tuple) -> bool:
        """Whether a compiled program is one CUDA graph."""
        return key in self._graph_keys and key in self.by_key

    def begin_check(self) -> None:
        """Lets chunks become CUDA graphs until `end_check`: the caller runs and compares them."""
        self._is_checking = True

    def end_check(self) -> bool:
        """Ends the check of graphs, see `graph_check`; programs of later calls are no graphs.

        Where graphs were turned off it drops all programs that are graphs, but keeps the plain
        forms that were compiled.

        Returns:
          whether programs were dropped, which must be compiled again.
        """
        self.is_checked, self._is_checking = True, False
        dropped = set() if self.graphs.wanted else self._graph_keys & self.by_key.keys()
        for key in dropped:
            del self.by_key[key]
            if key in self.plain_forms:
                self.by_key[key] = self.plain_forms[key]
        self.plain_forms = {}
        self._graph_keys -= dropped
        return bool(dropped)

    def _keep(self, key: tuple, built: Callable) -> None:
        self.by_key[key] = built
        self.compilations += 1

    @contextlib.contextmanager
    def ahead(self, pool: CompilePool | None) -> Iterator[None]:
        """A context in which programs are compiled before they are needed, without messages.

        Args:
          pool: the pool that compiles them; the caller must wait for it before the context ends.
            Until then a program is `NotCompiled` and computes nothing. None: each program is
            compiled when it is asked for.
        """
        self._pool, self._is_ahead = pool, True
        try:
            yield
        finally:
            self._pool, self._is_ahead = None, False
            compiled = {k: v for k, v in self.by_key.items() if not isinstance(v, NotCompiled)}
            self.by_key = compiled

    def rows(self, positions: int) -> list[int]:
        """The number of prompts of each compiled prefill of pieces of so many positions."""
        sizes = [key[1] for key in self.by_key if key[0] == "prefill"]
        return [rows for rows, read in sizes if read == positions]

    def buckets(self, strategy: str, features: Features) -> list[int]:
        """The buckets, ascending, of compiled programs that serve a strategy and features."""
        found = {
            key[2]
            for key in self.by_key
            if key[0] == "chunk" and key[1] == strategy and key[3].covers(features)
        }
        return sorted(found)

    def covering(self, strategy: str, bucket: int, features: Features) -> Features:
        """The features of the smallest compiled program that covers `features`.

        If no program for this strategy and bucket covers them, it returns `features`.
        """
        start = ("chunk", strategy, bucket)
        compiled = [key[3] for key in self.by_key if key[:3] == start and key[3].covers(features)]
        return min(compiled, key=lambda f: f.size, default=features)

    def memory(self) -> dict[str, int]:
        """The bytes of all code, and of the largest program's temporaries.

        Where the platform does not say, they are 0.
        """
        found = [compiled.memory_analysis() for compiled in self.by_key.values()]
        found = [analysis for analysis in found if analysis is not None]
        return {
            "code": sum(a.generated_code_size_in_bytes for a in found),
            "temporaries": max((a.temp_size_in_bytes for a in found), default=0),
        }


def threads_for(mesh: jax.sharding.Mesh | None) -> int:
    """The number of programs to compile at once.

    It is one for each core, since a compiler does much of its work in one thread (XLA for CPUs a
    quarter to a third of a chunk's). It is one where several hosts share a replica, since all of
    them must compile in the same order, and in jobs of several processes on GPUs, where XLA's
    autotuner distributes its measurements over the processes and waits for all, one program at a
    time.
    """
    devices = jax.devices()[:1] if mesh is None else [*mesh.devices.flat]
    several = len(devices) > 1 and len({device.process_index for device in devices}) > 1
    if several or (jax.process_count() > 1 and devices[0].platform == "gpu"):
        return 1
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def described(key: tuple) -> str:
    """The description of a program for a message."""
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
