"""The cards that programs are compiled for ahead of time, and what a card is called in file names.

What XLA's compiler asks of a device is its GpuTargetConfigProto; the numbers are NVIDIA's.
"""

from __future__ import annotations

import re
from typing import NamedTuple

SHARE = 0.92  # of the memory, that a process takes: XLA_PYTHON_CLIENT_MEM_FRACTION


class Card(NamedTuple):
    """kind: as `jax.Device.device_kind` says it. memory: bytes. bandwidth: bytes per second that
    the maker names, which the compiler's own estimates go by."""

    kind: str
    memory: int
    bandwidth: int

    @property
    def usable(self) -> int:
        """Bytes that programs and what they hold may take."""
        return int(SHARE * self.memory)

    @property
    def config(self) -> str:
        """The target, as text."""
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
    """A card's name in file names: `h100`, `h200`, or the kind in plain letters."""
    for name in CARDS:
        if re.search(rf"\b{name}\b", kind, re.IGNORECASE):
            return name
    return re.sub(r"[^a-z0-9]+", "-", kind.lower()).strip("-")
