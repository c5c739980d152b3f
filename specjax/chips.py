"""Data-sheet figures of chips: every figure of a chip that the project uses is in this table."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple


@dataclasses.dataclass(frozen=True)
class Chip:
    """One chip.

    Attributes:
      memory: bytes of HBM.
      peak: dense bfloat16 operations/s.
      kinds: what jax calls it. A slice of a card (MIG) has a longer name, and figures of its own.
    """

    title: str
    memory: float
    peak: float
    kinds: tuple[str, ...]


# TPU: https://cloud.google.com/tpu/docs/v5e, /v5p and /v6e, "key chip specifications". GPU: the
# data sheets of NVIDIA, whose figures with sparsity are halved.
CHIPS = {
    "v5e": Chip("TPU v5e", 16e9, 197e12, ("TPU v5 lite", "TPU v5e")),
    "v5p": Chip("TPU v5p", 95 * 2**30, 459e12, ("TPU v5", "TPU v5p")),
    "v6e": Chip("TPU v6e", 32e9, 918e12, ("TPU v6 lite", "TPU v6e")),
    "h100": Chip("H100 SXM", 80e9, 989e12, ("NVIDIA H100 80GB HBM3",)),
    "h200": Chip("H200 SXM", 141e9, 989e12, ("NVIDIA H200",)),
    "b200": Chip("B200 SXM", 180e9, 2250e12, ("NVIDIA B200",)),
    "a100": Chip("A100 SXM 80 GB", 80e9, 312e12, ("NVIDIA A100-SXM4-80GB",)),
    "a100_40": Chip("A100 SXM 40 GB", 40e9, 312e12, ("NVIDIA A100-SXM4-40GB",)),
    "a100_pcie": Chip("A100 PCIe 80 GB", 80e9, 312e12, ("NVIDIA A100 80GB PCIe",)),
    "h100_pcie": Chip("H100 PCIe", 80e9, 756e12, ("NVIDIA H100 PCIe",)),
    "h100_nvl": Chip("H100 NVL", 94e9, 835e12, ("NVIDIA H100 NVL",)),
    "l40s": Chip("L40S", 48e9, 362e12, ("NVIDIA L40S",)),
    "l4": Chip("L4", 24e9, 121e12, ("NVIDIA L4",)),
}


def chip_of(device_kind: str) -> Chip | None:
    """The figures of a device, by the `device_kind` that JAX gives it; None: they are not known."""
    return next((chip for chip in CHIPS.values() if device_kind in chip.kinds), None)


# --- GPUs to compile for -------------------------------------------------------------------------

# XLA's compiler takes a device as a GpuTargetConfigProto; the numbers are NVIDIA's.
SHARE = 0.92  # share of the memory that a process takes: XLA_PYTHON_CLIENT_MEM_FRACTION


class Card(NamedTuple):
    """A model of GPU: its `jax.Device.device_kind`, bytes of memory, nominal bytes per second."""

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
        return _HOPPER % self._asdict()


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
