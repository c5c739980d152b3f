"""CUDA graphs: on a GPU the host launches a whole chunk at once, where that is known to be right.

By itself XLA puts short sequences of kernels into CUDA graphs, which it calls command buffers, and
the host reads the predicate of every loop. With `ONE_GRAPH` a chunk is one graph, its loops
included. Programs become graphs only while an engine starts, where they are checked: all that
`warm_up` compiles, or the program of the first chunk of an engine that was not warmed up. Each runs
once, for one round. Of every strategy and set of features the program of the smallest bucket is
compiled in both ways, and both run the same chunks from the same state, options of all features
included (`graph_check.py`). Programs of other buckets are compared with nothing. Where a bit of the
results differs, or a graph cannot be compiled or run, the engine runs chunks as XLA compiles them
by itself, and says so in one line. So it runs programs that are compiled later, for a request that
no program serves.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Hashable, Mapping
from collections.abc import Sequence as Several
from types import MappingProxyType

from specjax.interfaces import Device
from specjax.kernels.names import GPUS

log = logging.getLogger(__name__)

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
AS_IT_IS: Options = MappingProxyType({})


class Graphs:
    """Whether the chunks of an engine, or of all replicas, are one CUDA graph each.

    Args:
      device: devices of the engine.
      kernels: names of the attention kernels of target and draft.
      enforce_eager: whether the user wants no graphs.

    Attributes:
      wanted: whether chunks that are compiled at the start are compiled with `ONE_GRAPH`.
      line: line for the log that says whether chunks are graphs; None: the platform has none.
    """

    def __init__(self, device: Device, kernels: Several[str], enforce_eager: bool = False):
        self._plain, self._lock = AS_IT_IS, threading.Lock()
        self._seen: set = set()
        self.line: str | None = None
        if device.platform not in GPUS:
            self.wanted = False
            return
        why = None
        if enforce_eager:
            why, self._plain = "enforce_eager", NO_GRAPH
        elif device.count > 1:
            why = f"{device.count} devices share a chunk, whose transfers in graphs are not tested"
        elif "library:cudnn" in kernels:
            why = "with cuDNN's attention in graphs other tokens were sampled"
        self.wanted = why is None
        found = "one for each chunk, if its results are those of a plain program"
        self.line = f"CUDA graphs: {found}" if self.wanted else f"CUDA graphs are off: {why}"

    def options(self, key: tuple) -> Options:
        """The compiler options of a program at the start, by its key, see `Executables`."""
        return ONE_GRAPH if self.wanted and key[0] == "chunk" else self._plain

    @property
    def plain_options(self) -> Options:
        """The compiler options of a program that is not one graph."""
        return self._plain

    def is_first(self, what: Hashable) -> bool:
        """Whether this is the first call for `what`.

        It may be called by several threads. Replicas share a `Graphs`, and check once for all.
        """
        with self._lock:
            is_first = what not in self._seen
            self._seen.add(what)
            return is_first

    def stop(self, reason: str) -> None:
        """Turns graphs off, for programs that are compiled from now on, and logs the reason once.

        It may be called by several threads.
        """
        with self._lock:
            if self.wanted:
                self.wanted, self.line = False, f"CUDA graphs are off: {reason}"
                log.warning(
                    "CUDA graphs are off, and chunks are somewhat slower: %s; report this, with "
                    "the versions of jax and of the driver",
                    reason,
                )
