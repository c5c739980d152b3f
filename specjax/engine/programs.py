"""The programs of an engine: for which strategies, how each is compiled, and which serves a call.

A strategy's rounds are compiled for a `Plan`. Each strategy has a program of its own; in
`invariant` mode all of them share one, see `programs_of`.

Every program is held as an executable, compiled or loaded (`Kept`), which refuses other shapes, so
that nothing is compiled unnoticed. Threads compile programs before they are needed, see
`Executables.ahead`. Compiling can take minutes, and a call that prints nothing seems to hang. So
compiling for longer than `SILENT_SECONDS` is logged as a warning, which Python prints even if no
log was set up: `CompileProgress` counts programs that are compiled ahead, `announce_if_slow` names
a program that a request needs.

On a GPU a chunk is one CUDA graph, its loops included, where that is known to be right. By itself
XLA puts short sequences of kernels into such graphs, and the host reads the predicate of every
loop. Programs become graphs only while an engine starts: of every strategy and set of features the
program of the smallest bucket is compiled in both ways at first, and both run the same chunks
(`start_up.check_graphs`), unless an earlier start on this machine found them equal. Programs of
other buckets consist of the same operations at other sizes. Where a bit differs, or a graph cannot
be compiled or run, chunks run as XLA compiles them by itself, and one line says so. So run programs
that are compiled later, for a request that no program serves.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import itertools
import logging
import os
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from types import MappingProxyType
from typing import Any, NamedTuple

import jax

from specjax.config import ModelConfig, SpecConfig, Strategy
from specjax.control import OFF
from specjax.decode.options import Features
from specjax.decode.state import Plan
from specjax.decode.tree import TreePart, build_tree, common_strategy, tree_part
from specjax.engine.sources import source_of
from specjax.error_text import first_line
from specjax.interfaces import Device, Draft
from specjax.kernels.check import Verdict
from specjax.kernels.names import GPUS
from specjax.parallel import sharding
from specjax.program_cache import Kept, Lowering, saved_seconds
from specjax.weights.matrix import precision_of

log = logging.getLogger(__name__)

OnProgram = Callable[[int, int], None]  # called with the numbers of ready and of all programs
SILENT_SECONDS = 5.0  # compiling time before the first message
MESSAGE_SECONDS = 10.0  # time between two messages

Options = Mapping[str, str | int]
# Compiler options that make one graph of a chunk. What cuDNN computes is left out: with its
# attention in such a graph other tokens were sampled (on an H200, 26 November 2026).
ONE_GRAPH: Options = MappingProxyType(
    {
        "xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,WHILE,CONDITIONAL",
        "xla_gpu_graph_min_graph_size": 1,
    }
)
# Compiler options under which nothing is put into a graph.
NO_GRAPH: Options = MappingProxyType({"xla_gpu_enable_command_buffer": ""})


# --- strategies -----------------------------------------------------------------------------------


def make_plans(
    cfg: ModelConfig,
    spec: SpecConfig | None,
    source: Draft | None,
    strategies: Sequence[Strategy] | None = None,
) -> dict[str, Plan]:
    """A plan for each strategy, by the strategy's name; features are set when chunks are compiled.

    Args:
      strategies: the strategies, named as the user named them; None: `spec`'s own alone.

    Raises:
      ValueError: a strategy is not exact in `spec`'s acceptance mode, or the draft refuses it.
    """
    if spec is None or spec.is_off:
        return {OFF: Plan(cfg, invariant=spec is not None and spec.invariant)}
    source = source or source_of(cfg, spec)
    if strategies is None:
        strategies = (spec.resolve(),)
    return {strategy.name: _plan(cfg, spec, source, strategy) for strategy in strategies}


def _plan(cfg: ModelConfig, spec: SpecConfig, source: Draft, strategy: Strategy) -> Plan:
    settings = dict(
        mode=spec.acceptance,
        aligned=spec.aligned,
        tau=spec.tau,
        adaptive_width=spec.adaptive_width and strategy.is_dynamic,
        invariant=spec.invariant,
        telemetry=spec.telemetry,
    )
    if strategy.is_off:
        return Plan(cfg, None, source, **settings)
    dataclasses.replace(spec, strategy=strategy)  # refuses a strategy that is not exact
    if reason := source.refuses(strategy):
        raise ValueError(f"strategy {strategy.name!r}: {reason}")
    return Plan(cfg, build_tree(strategy), source, **settings)


class Program(NamedTuple):
    """The program that chunks of a strategy run.

    Attributes:
      name: name of the program.
      plan: the plan that it is compiled for.
      part: the part of the plan's tree that the strategy drafts; None: all of it.
    """

    name: str
    plan: Plan
    part: TreePart | None = None


def programs_of(plans: Mapping[str, Plan], most_rows: int) -> dict[str, Program]:
    """The program of each strategy, by the strategy's name.

    Each strategy has a program of its own; in `invariant` mode all of them share one.

    Args:
      plans: the plans of `make_plans`.
      most_rows: the most rows that a tree may have.

    Raises:
      ValueError: in `invariant` mode the tree that holds those of all strategies has too many
        rows.
    """
    if len(plans) == 1 or not all(plan.invariant for plan in plans.values()):
        return {name: Program(name, plan) for name, plan in plans.items()}
    strategies = [plan.strategy for plan in plans.values() if plan.tree]
    common = common_strategy(strategies)
    if common.rows > most_rows:
        raise ValueError(
            f"with invariant=true all strategies run one program, whose tree holds "
            f"those of {', '.join(s.name for s in strategies)}: it has {common.rows} rows, "
            f"more than spec_verify_tokens = {most_rows}; raise it, or use fewer"
        )
    tree = build_tree(common)
    drafting = next(plan for plan in plans.values() if plan.tree)
    # A strategy that is a chain drafts a part that is one node wide, which cannot become narrower.
    adaptive = any(plan.adaptive_width for plan in plans.values())
    shared = dataclasses.replace(drafting, tree=tree, adaptive_width=adaptive)
    return {
        name: Program(common.name, shared, tree_part(tree, plan.strategy))
        for name, plan in plans.items()
    }


# --- compiling ------------------------------------------------------------------------------------


class CompileProgress:
    """An `OnProgram` that says how many programs are ready, if compiling takes long.

    Args:
      say: function called with each message.
    """

    def __init__(self, say: Callable[[str], None] = log.warning):
        self._say = say
        self._began: float | None = None  # set by the first call, and reset by the last
        self._next = SILENT_SECONDS

    def __call__(self, done: int, total: int) -> None:
        now = time.perf_counter()
        if self._began is None:
            self._began, self._next = now, SILENT_SECONDS
        seconds, is_last = now - self._began, done == total
        if seconds >= (SILENT_SECONDS if is_last else self._next):
            self._next = seconds + MESSAGE_SECONDS
            self._say(f"compiling: {done} of {total} programs are ready after {seconds:.0f} s")
        if is_last:
            self._began = None


@contextlib.contextmanager
def announce_if_slow(what: str) -> Iterator[None]:
    """A context that logs what is compiled in it, if that takes longer than `SILENT_SECONDS`."""
    text = f"compiling {what} takes more than {SILENT_SECONDS:.0f} s, and samples wait for it"
    timer = threading.Timer(SILENT_SECONDS, log.warning, (text,))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


class Graphs:
    """Whether the chunks of an engine, or of all replicas, are one CUDA graph each.

    Args:
      device: devices of the engine.
      kernels: names of the attention kernels of target and draft.
      enforce_eager: whether the user wants no graphs.

    Attributes:
      wanted: whether chunks that are compiled at the start are compiled with `ONE_GRAPH`.
      plain: the compiler options of a program that is not one graph.
      line: line for the log that says whether chunks are graphs; None: the platform has none.
    """

    def __init__(self, device: Device, kernels: Sequence[str], enforce_eager: bool = False):
        is_gpu, reason = device.platform in GPUS, None
        if enforce_eager:
            reason = "enforce_eager"
        elif device.count > 1:
            reason = f"{device.count} devices share a chunk, and such graphs are not tested"
        elif "library:cudnn" in kernels:
            reason = "with cuDNN's attention in graphs other tokens were sampled"
        self.wanted = is_gpu and reason is None
        self.plain: Options = NO_GRAPH if is_gpu and enforce_eager else {}
        self.line = f"CUDA graphs are off: {reason}" if is_gpu else None
        if self.wanted:
            self.line = "CUDA graphs: one for each chunk, if its results are those without"

    def options(self, key: tuple) -> Options:
        """The compiler options of a program at the start, by its key, see `Executables`."""
        return ONE_GRAPH if self.wanted and key[0] == "chunk" else self.plain

    def stop(self, reason: str) -> None:
        """Turns graphs off, for programs that are compiled from now on, and logs the reason."""
        self.wanted, self.line = False, f"CUDA graphs are off: {reason}"
        log.warning(
            "CUDA graphs are off, and chunks are somewhat slower: %s; report this, with the "
            "versions of jax and of the driver",
            reason,
        )


class Compiler:
    """Threads that compile programs, those first that were asked for.

    A process that ends waits for those that are being compiled, and no others.

    Args:
      threads: number of programs that are compiled at once.
    """

    def __init__(self, threads: int):
        self._idle, self._lock = threads, threading.Lock()
        self._threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
        _compilers.add(self)
        self._waiting: OrderedDict[Future, Callable] = OrderedDict()

    def submit(self, build: Callable[[], Callable]) -> Future:
        """Has a thread call `build`; returns a future of its result, which can be cancelled."""
        future = Future()
        with self._lock:
            self._waiting[future] = build
            start, self._idle = self._idle > 0, max(self._idle - 1, 0)
        if start:
            thread = threading.Thread(target=self._work, name="compile", daemon=True)
            thread.start()
            self._threads.add(thread)
        return future

    def ask(self, future: Future) -> None:
        """Has a program compiled next."""
        with self._lock:
            if future in self._waiting:
                self._waiting.move_to_end(future, last=False)

    def run(self, future: Future) -> None:
        """Compiles a program in this thread, if no other has begun to."""
        with self._lock:
            build = self._waiting.pop(future, None)
        if build is not None and future.set_running_or_notify_cancel():
            _set_result(future, build)

    def cancel(self) -> None:
        """Drops what has not begun."""
        with self._lock:
            waiting, self._waiting = self._waiting, OrderedDict()
        for future in waiting:
            future.cancel()

    def join(self) -> None:
        """Waits until all threads have ended."""
        for thread in list(self._threads):
            thread.join()

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._idle += 1
                    return
                future, build = self._waiting.popitem(last=False)
            if future.set_running_or_notify_cancel():
                _set_result(future, build)
            del future, build  # or the thread would hold the program while it waits for a lock


def _set_result(future: Future, build: Callable) -> None:
    try:
        future.set_result(build())
    except BaseException as error:
        # Its frames would hold the runner, and so the weights.
        future.set_exception(error.with_traceback(None))
        if not isinstance(error, Exception):
            raise


_compilers: weakref.WeakSet[Compiler] = weakref.WeakSet()


@atexit.register
def _end_compilers() -> None:
    # A thread that leaves a compiler while the interpreter ends would abort the process.
    for method in (Compiler.cancel, Compiler.join):
        for compiler in list(_compilers):
            method(compiler)


def not_compiled(donate: tuple[int, ...]) -> Callable:
    """Stands for a program that is to be compiled; returns its donated inputs and None."""
    return lambda *inputs: (*(inputs[i] for i in donate), None)


class Executables:
    """Executables by key, each compiled when it is first asked for.

        key                                       what the program does
        prefill, (rows, positions)                reads pieces of `rows` prompts
        place, count                              starts `count` sequences
        score, (rows, positions), (rows, pages)   gives log-probabilities of pieces of prompts
        chunk, program, bucket, features          runs `bucket` rows for several rounds

    Args:
      mesh: mesh that programs run on; None: the default device.
      cfg: config of the target, whose dtype decides the precision of products.
      graphs: whether chunks are CUDA graphs.
      facts: what else decides what is lowered, see `Kept`.

    Attributes:
      by_key: the executables that may run.
      pending: programs that threads compile, see `ahead`, in the order in which they were listed.
      failed: the errors of programs that threads could not compile.
      in_order: whether programs are taken in that order only, since other hosts do the same.
      graphs: whether chunks are CUDA graphs.
      verdicts: of each program that is a CUDA graph, whether an earlier start compared it.
      compilations: number of programs that were compiled so far.
      seconds: time that compiling each program took, or would have taken if no earlier process had
        kept it.
      before_build: function called before a program is compiled, which takes seconds.
      build: function that makes the executable of a program from its key, a function that lowers
        it, and the indices of its donated inputs.
      threads: number of programs that are compiled at once.
      background: threads that compile while requests are served.
      on_compiled: function that these threads call after each program.
      compiler: the threads of `ahead`, within which programs are listed and none runs; else None.
    """

    def __init__(
        self, mesh: jax.sharding.Mesh | None, cfg: ModelConfig, graphs: Graphs, facts: Any
    ):
        self._mesh, self._cfg, self.graphs = mesh, cfg, graphs
        self._devices = jax.devices()[:1] if mesh is None else [*mesh.devices.flat]
        self._kept = Kept((repr(mesh), cfg, facts), self._devices)
        self.by_key: dict[tuple, Callable] = {}
        self.pending: dict[tuple, Future] = {}
        self.failed: dict[tuple, BaseException] = {}
        self.in_order = False
        self.verdicts: dict[tuple, Verdict] = {}
        self.compilations = 0
        self.seconds: dict[tuple, float] = {}
        self.before_build: Callable[[], None] = lambda: None
        self.build: Callable = self._build
        self.threads = threads_for(self._devices)
        # One core is left to the requests that are served meanwhile.
        self.background = Compiler(max(self.threads - 1, 1))
        self.on_compiled: Callable[[], None] = lambda: None
        self.compiler: Compiler | None = None
        self._at_start: set[tuple] = set()  # programs that are compiled before the first request
        self._taken = 0  # number of programs that were taken from `pending`

    def get(self, key: tuple, program: Callable, inputs: tuple, donate: tuple[int, ...]):
        """The executable of a program; the program returns its donated inputs first, in order.

        Args:
          key: key of the program.
          program: the function.
          inputs: its inputs.
          donate: indices of inputs that are donated.
        """
        if self.compiler is not None and (key in self.by_key or key in self.pending):
            return not_compiled(donate)
        self.wait_for(key)
        if key in self.by_key:
            return self.by_key[key]
        self.before_build()
        # Kernels and operations on parts of the vocabulary read the ambient mesh.
        program = precision_of(self._cfg)(sharding.traced_on(self._mesh, program))
        inputs = sharding.without_data(inputs, self._mesh)
        lower = Lowering(program, inputs, donate, self._mesh)

        def build() -> Callable:
            began, saved = time.perf_counter(), saved_seconds()
            built = self.build(key, lower, donate)
            self.seconds[key] = time.perf_counter() - began + saved_seconds() - saved
            return built

        # A program that fails the second time, while a call needs it, fails the call.
        self.failed.pop(key, None)
        if self.compiler is None:
            with announce_if_slow(described(key)):
                self.by_key[key] = build()
            self.compilations += 1
            return self.by_key[key]
        if self.compiler is not self.background:
            self._at_start.add(key)
        future = self.compiler.submit(build)
        future.add_done_callback(lambda _: self.on_compiled())
        self.pending[key] = future
        return not_compiled(donate)

    @property
    def ready(self) -> int:
        """How many programs were taken from `pending` so far, or can be in its order."""
        done = itertools.takewhile(Future.done, self.pending.values())
        return self._taken + sum(1 for _ in done)

    def collect(self, most: int | None = None) -> int:
        """Takes programs that threads have compiled; returns how many are no longer pending.

        Args:
          most: the value of `ready` on the host that has the fewest; None: there is one host, and
            programs are taken in any order.
        """
        keys = [key for key, future in self.pending.items() if future.done()]
        if most is not None:
            keys = [*self.pending][: max(most - self._taken, 0)]
        for key in keys:
            self._take(key)
        return len(keys)

    def wait_for(self, key: tuple) -> bool:
        """Waits for a program if threads compile it; returns whether it has not failed."""
        if key in self.pending:
            self.before_build()
            with announce_if_slow(described(key)):
                if not self.in_order:
                    self.background.run(self.pending[key])
                wait([self.pending[key]])
            self._take(key)
        return key not in self.failed

    def _take(self, key: tuple) -> None:
        future = self.pending.pop(key)
        self._taken += 1
        if future.cancelled():
            return
        if error := future.exception():
            self.failed[key] = error
            log.warning("%s could not be compiled: %s", described(key), first_line(error))
        else:
            self.by_key[key] = future.result()
            self.compilations += 1

    def _build(self, key: tuple, lower: Lowering, donate: tuple[int, ...]):
        """Compiles a program; may run on any thread."""
        options = self.graphs.options(key) if key in self._at_start else self.graphs.plain
        if options is not ONE_GRAPH:
            return self._kept.compiled(key, lower, options)
        lowered = lower()
        self.verdicts[key] = Verdict(self._devices[0], "graph", lowered.as_text())
        return lowered.compile(dict(options))

    def drop_graphs(self) -> None:
        """Drops all programs that were compiled to graphs."""
        self.by_key = {k: v for k, v in self.by_key.items() if k not in self.verdicts}
        self.verdicts = {}

    @contextlib.contextmanager
    def ahead(self, compiler: Compiler) -> Iterator[None]:
        """A context in which threads compile the programs that are called, and none runs.

        Each call returns its donated inputs and None. The caller must `collect` the programs.

        Args:
          compiler: the threads; those of `background` make no graphs.
        """
        self.compiler = compiler
        try:
            yield
        finally:
            self.compiler = None

    def rows(self, positions: int, soon: bool = False) -> list[int]:
        """The number of prompts of each compiled prefill of pieces of so many positions, ascending.

        Args:
          soon: whether to list those that are being compiled, too.
        """
        keys = self._known(soon)
        return sorted(key[1][0] for key in keys if key[0] == "prefill" and key[1][1] == positions)

    def chunks(
        self, program: str, features: Features, soon: bool = False
    ) -> list[tuple[int, Features]]:
        """Bucket and features of each compiled chunk of a program that serves some features.

        The smallest buckets come first, and of a bucket the fewest features.

        Args:
          soon: as in `rows`.
        """
        keys = (key[2:] for key in self._known(soon) if key[:2] == ("chunk", program))
        served = [key for key in keys if key[1].covers(features)]
        return sorted(served, key=lambda key: (key[0], key[1].size))

    def _known(self, soon: bool) -> list[tuple]:
        return [*self.by_key, *(self.pending if soon else ())]


def threads_for(devices: Sequence[jax.Device]) -> int:
    """The number of programs to compile at once.

    It is one for each core, since a compiler does much of its work in one thread (XLA for CPUs a
    quarter to a third of a chunk's). It is one where several hosts share a replica, since all of
    them must compile in the same order, and in jobs of several processes on GPUs, where XLA's
    autotuner distributes its measurements over the processes and waits for all, one program at a
    time.
    """
    several = len({device.process_index for device in devices}) > 1
    if several or (jax.process_count() > 1 and devices[0].platform == "gpu"):
        return 1
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def described(key: tuple) -> str:
    """The description of a program for a message."""
    if key[0] == "chunk":
        return f"strategy {key[1]:.40} for a batch of {key[2]}"  # names of many paths are long
    return " ".join(map(str, key))
