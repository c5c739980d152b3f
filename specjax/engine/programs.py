"""The programs of an engine: for which strategies, how each is compiled, and which serves a call.

A strategy's rounds are compiled for a `Plan`. Each strategy has a program of its own; in
`invariant` mode all of them share one, see `programs_of`.

Every program is held as a `.lower().compile()` executable, which refuses other shapes, so that
nothing is compiled unnoticed. Compiling can take minutes, and a call that prints nothing seems to
hang. So compiling for longer than `SILENT_SECONDS` is logged as a warning, which Python prints even
if no log was set up: `CompileProgress` counts programs that are compiled ahead, `announce_if_slow`
names a program that a request needs.

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

import contextlib
import dataclasses
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future
from types import MappingProxyType
from typing import NamedTuple

import jax

from specjax.config import ModelConfig, SpecConfig, Strategy
from specjax.control import OFF
from specjax.decode.options import Features
from specjax.decode.state import Plan
from specjax.decode.tree import TreePart, build_tree, common_strategy, tree_part
from specjax.engine.sources import source_of
from specjax.interfaces import Device, Draft
from specjax.kernels.check import Verdict
from specjax.kernels.names import GPUS
from specjax.parallel import sharding
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

_of_thread = threading.local()  # has `saved`, see `_saved_seconds`


def _count_saved_seconds(event: str, seconds: float, **_: object) -> None:
    if event.endswith("/compile_time_saved_sec"):  # JAX keeps whole seconds, rounded down
        _of_thread.saved = _saved_seconds() + max(seconds, 0.0) + 1.0


def _saved_seconds() -> float:
    """The seconds of compiling that JAX's cache directory has saved on this thread."""
    return getattr(_of_thread, "saved", 0.0)


jax.monitoring.register_event_duration_secs_listener(_count_saved_seconds)


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
        seconds, is_last = now - self._began, done == total
        if seconds >= (self._silent if is_last else self._next):
            self._next = seconds + MESSAGE_SECONDS
            self._say(f"compiling: {done} of {total} programs are ready after {seconds:.0f} s")
        if is_last:
            self._began = None


@contextlib.contextmanager
def announce_if_slow(what: str, say: Callable[[str], None] = log.warning) -> Iterator[None]:
    """A context that logs what is compiled in it, if that takes longer than `SILENT_SECONDS`."""
    text = f"compiling {what} takes more than {SILENT_SECONDS:.0f} s, and samples wait for it"
    if not jax.config.jax_compilation_cache_dir:
        text += "; JAX_COMPILATION_CACHE_DIR=DIR keeps what was compiled for the next start"
    timer = threading.Timer(SILENT_SECONDS, say, (text,))
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


class NotCompiled:
    """Stands for a program that is still being compiled; returns its donated inputs and None."""

    def __init__(self, donate: tuple[int, ...]):
        self._donate = donate

    def __call__(self, *inputs):
        return (*(inputs[i] for i in self._donate), None)


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

    Attributes:
      by_key: the executables.
      pending: programs that a pool of `ahead` compiles.
      graphs: whether chunks are CUDA graphs.
      is_checked: whether this engine has started, so that graphs were compared.
      verdicts: of each program that is a CUDA graph, whether an earlier start compared it.
      compilations: number of programs that were compiled so far.
      seconds: time that compiling each program took, or would have taken if the cache directory
        had not had it.
      before_build: function called before a program is compiled, which takes seconds.
      build: function that makes the executable of a program from its key, a function that lowers
        it, and the indices of its donated inputs.
      threads: number of programs that are compiled at once.
    """

    def __init__(self, mesh: jax.sharding.Mesh | None, cfg: ModelConfig, graphs: Graphs):
        self._mesh, self._cfg, self.graphs = mesh, cfg, graphs
        self.by_key: dict[tuple, Callable] = {}
        self.is_checked = False
        self.verdicts: dict[tuple, Verdict] = {}
        self.compilations = 0
        self.seconds: dict[tuple, float] = {}
        self.before_build: Callable[[], None] = lambda: None
        self.build: Callable = self._build
        self.threads = threads_for(mesh)
        self._pool: Executor | None = None
        self.pending: dict[tuple, Future] = {}

    def get(self, key: tuple, program: Callable, inputs: tuple, donate: tuple[int, ...]):
        """The executable of a program; the program returns its donated inputs first, in order.

        Args:
          key: key of the program.
          program: the function.
          inputs: its inputs.
          donate: indices of inputs that are donated.
        """
        if key in self.by_key:
            return self.by_key[key]
        self.before_build()
        # Kernels and operations on parts of the vocabulary read the ambient mesh.
        program = precision_of(self._cfg)(sharding.traced_on(self._mesh, program))

        def lower() -> jax.stages.Lowered:
            out = None
            if self._mesh is not None:
                shapes = jax.eval_shape(program, *inputs)
                out = tuple(sharding.state_shardings(self._mesh, shape) for shape in shapes)
            return jax.jit(program, donate_argnums=donate, out_shardings=out).lower(*inputs)

        def build(lower: Callable[[], jax.stages.Lowered]) -> Callable:
            began, saved = time.perf_counter(), _saved_seconds()
            built = self.build(key, lower, donate)
            self.seconds[key] = time.perf_counter() - began + _saved_seconds() - saved
            return built

        if self._pool is not None:
            lowered = lower()
            self.by_key[key] = NotCompiled(donate)
            self.pending[key] = self._pool.submit(build, lambda: lowered)
        else:
            with announce_if_slow(described(key)):
                self._keep(key, build(lower))
        return self.by_key[key]

    def _keep(self, key: tuple, built: Callable) -> None:
        self.by_key[key] = built
        self.compilations += 1

    def collect(self) -> int:
        """Takes programs that a pool has compiled; returns how many, or raises a compiler's error.

        Programs that are not ready stay `NotCompiled`.
        """
        ready = [key for key, future in self.pending.items() if future.done()]
        for key in ready:
            self._keep(key, self.pending.pop(key).result())
        return len(ready)

    def _build(self, key: tuple, lower: Callable[[], jax.stages.Lowered], donate: tuple[int, ...]):
        """Compiles a program; may run on any thread."""
        lowered = lower()
        options = self.graphs.plain if self._pool is None else self.graphs.options(key)
        if options is ONE_GRAPH:
            device = jax.devices()[0] if self._mesh is None else self._mesh.devices.flat[0]
            self.verdicts[key] = Verdict(device, "graph", lowered.as_text())
        return lowered.compile(dict(options) or None)

    def drop_graphs(self) -> None:
        """Drops all programs that were compiled to graphs."""
        self.by_key = {k: v for k, v in self.by_key.items() if k not in self.verdicts}
        self.verdicts = {}

    @contextlib.contextmanager
    def ahead(self, pool: Executor) -> Iterator[None]:
        """A context in which programs are compiled before they are needed, without messages.

        Args:
          pool: threads that compile them; the caller must `collect` all before the context ends.
            Until then a program is `NotCompiled` and computes nothing. Compilers run outside of the
            interpreter's lock.
        """
        self._pool = pool
        try:
            yield
        finally:
            self._pool, self.pending = None, {}
            compiled = {k: v for k, v in self.by_key.items() if not isinstance(v, NotCompiled)}
            self.by_key = compiled

    def rows(self, positions: int) -> list[int]:
        """The number of prompts of each compiled prefill of pieces of so many positions."""
        sizes = [key[1] for key in self.by_key if key[0] == "prefill"]
        return [rows for rows, read in sizes if read == positions]

    def buckets(self, program: str, features: Features) -> list[int]:
        """The buckets, ascending, of compiled chunks of a program that serve some features."""
        chunks = [key for key in self.by_key if key[:2] == ("chunk", program)]
        return sorted({bucket for _, _, bucket, its in chunks if its.covers(features)})

    def covering(self, program: str, bucket: int, features: Features) -> Features:
        """The features of the smallest compiled program that covers `features`.

        If none of this name and bucket covers them, it returns `features`.
        """
        start = ("chunk", program, bucket)
        compiled = [key[3] for key in self.by_key if key[:3] == start and key[3].covers(features)]
        return min(compiled, key=lambda f: f.size, default=features)


def threads_for(mesh: jax.sharding.Mesh | None) -> int:
    """The number of programs to compile at once.

    It is one for each core, since a compiler does much of its work in one thread (XLA for CPUs a
    quarter to a third of a chunk's). It is one where several hosts share a replica, since all of
    them must compile in the same order, and in jobs of several processes on GPUs, where XLA's
    autotuner distributes its measurements over the processes and waits for all, one program at a
    time.
    """
    devices = jax.devices()[:1] if mesh is None else [*mesh.devices.flat]
    several = len({device.process_index for device in devices}) > 1
    if several or (jax.process_count() > 1 and devices[0].platform == "gpu"):
        return 1
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def described(key: tuple) -> str:
    """The description of a program for a message."""
    if key[0] == "chunk":
        return f"strategy {key[1]:.40} for a batch of {key[2]}"  # names of many paths are long
    return " ".join(map(str, key))
