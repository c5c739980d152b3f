"""Programs of the queue, and the cards that they are compiled for.

A part builds its programs for a `Place`: the device of the process, or, with `--dry`, a card that
is described to the compiler.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import MappingProxyType
from typing import Any, NamedTuple
from unittest import mock

import jax
from jax.experimental import topologies

from specjax.kernels import commit_kernel

# --- cards ----------------------------------------------------------------------------------------

# XLA's compiler takes a device as a GpuTargetConfigProto; the numbers are NVIDIA's.
SHARE = 0.92  # share of the memory that a process takes: XLA_PYTHON_CLIENT_MEM_FRACTION


class Card(NamedTuple):
    """A model of GPU.

    Attributes:
      kind: its `jax.Device.device_kind`.
      memory: bytes of memory.
      bandwidth: nominal bytes per second, which the compiler's estimates use.
    """

    kind: str
    memory: int
    bandwidth: int

    @property
    def usable(self) -> int:
        """Bytes that programs and their arguments may take."""
        return int(SHARE * self.memory)

    @property
    def config(self) -> str:
        """The GpuTargetConfigProto, as text."""
        return _HOPPER % {
            "kind": self.kind,
            "memory": self.memory,
            "bandwidth": self.bandwidth,
        }


CARDS = {
    "h100": Card("NVIDIA H100 80GB HBM3", 85_520_809_984, 3_350_000_000_000),
    "h200": Card("NVIDIA H200", 151_397_597_184, 4_800_000_000_000),
}

_HOPPER = """
gpu_device_info {
  name: "%(kind)s" device_vendor: "NVIDIA Corporation"
  cuda_compute_capability { major: 9 feature_extension: ACCELERATED_FEATURES }
  core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.98
  memory_bandwidth: %(bandwidth)d device_memory_size: %(memory)d l2_cache_size: 52428800
  threads_per_warp: 32 threads_per_block_limit: 1024 threads_per_core_limit: 2048
  shared_memory_per_block: 49152 shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  device_address_bits: 64 platform_version: "Compute Capability 9.0a"
  driver_version: "13.0.0" runtime_version: "13.0.0" compile_time_toolkit_version: "13.0.0"
  dnn_version: "9.10.0"
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 patch: 0 }
device_description_str: "%(kind)s"
"""


def short_name(kind: str) -> str:
    """Returns a card's name in file names: `h100`, `h200`, or the kind in plain letters."""
    for name in CARDS:
        if re.search(rf"\b{name}\b", kind, re.IGNORECASE):
            return name
    return re.sub(r"[^a-z0-9]+", "-", kind.lower()).strip("-")


# --- programs -------------------------------------------------------------------------------------


class Program(NamedTuple):
    """One program of a part.

    Attributes:
      name: name, unique in its part.
      lower: function that traces the program; programs with the same function are traced once.
      options: compiler options, in addition to the process's flags.
      beside: bytes that the part holds while the program runs, in addition to the program's own.
    """

    name: str
    lower: Callable[[], jax.stages.Lowered]
    options: Mapping[str, Any] = MappingProxyType({})
    beside: int = 0

    def compile(self) -> jax.stages.Compiled:
        return self.lower().compile(dict(self.options))


class Place:
    """The default device of this process.

    Attributes:
      platform, kind: platform and kind of the device, as jax names them.
      card: the described card; None: the device is real.
    """

    card: Card | None = None

    @property
    def platform(self) -> str:
        return jax.devices()[0].platform

    @property
    def kind(self) -> str:
        return jax.devices()[0].device_kind

    def shapes(self, tree):
        """Returns the shapes of a tree's arrays, on the device."""
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)

    @contextlib.contextmanager
    def seen(self) -> Iterator[None]:
        """Within, `jax.devices` returns the place's."""
        yield


class Ahead(Place):
    """A card that is not there. Needs jax's CUDA plugin, and no GPU.

    Raises:
      RuntimeError: the plugin is not installed.
    """

    platform = kind = ""

    def __init__(self, name: str):
        self.card = CARDS[name]
        self.platform, self.kind = "gpu", self.card.kind
        where = {"topology": "1x1x1", "target_config": self.card.config}
        [self._device] = topologies.get_topology_desc(name, "cuda", **where).devices

    def shapes(self, tree):
        here = jax.sharding.SingleDeviceSharding(self._device)
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here), tree)

    @contextlib.contextmanager
    def seen(self) -> Iterator[None]:
        device = mock.Mock(platform=self.platform, device_kind=self.kind)
        # Pallas Triton asks the mesh in use, of no axes here, which GPU it lowers for.
        described = jax.sharding.AbstractDevice(self.kind, None, self.platform)
        mesh = jax.sharding.AbstractMesh((), (), abstract_device=described)
        with (
            mock.patch("jax.devices", lambda *_: [device]),
            jax.sharding.use_abstract_mesh(mesh),
            commit_kernel.unchecked(),
        ):
            yield


def traced_once(lower: Callable[[], jax.stages.Lowered]) -> Callable[[], jax.stages.Lowered]:
    return functools.cache(lower)


class Built(Mapping):
    """Compiled programs by name; one that did not compile raises its error when it is asked for."""

    def __init__(self, found: Mapping[str, Any]):
        self._found = found

    def __getitem__(self, name: str) -> jax.stages.Compiled:
        compiled = self._found[name]
        if isinstance(compiled, Exception):
            raise compiled
        return compiled

    def __iter__(self) -> Iterator[str]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)


def build(programs: Sequence[Program]) -> Built:
    """Compiles, several at once where that helps: one for CPUs, whose compiler has threads.

    Tracing is one after the other; each program is handed to the compiler as soon as it is traced.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    threads = 1 if jax.default_backend() == "cpu" else cores
    found: dict[str, Any] = {}
    with ThreadPoolExecutor(threads, "compile") as pool:
        waiting = {}
        for program in programs:
            try:
                program.lower()
                waiting[program.name] = pool.submit(program.compile)
            except Exception as error:  # of this program; the others may be measured
                found[program.name] = error
        for name, started in waiting.items():
            found[name] = started.exception() or started.result()
    for name, entry in found.items():
        if isinstance(entry, Exception):
            print(f"{name} did not compile: {type(entry).__name__}: {str(entry)[:300]}", flush=True)
    return Built({program.name: found[program.name] for program in programs})
