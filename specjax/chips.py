"""Data-sheet figures of chips: every figure of a chip that the project uses is in this table."""

from __future__ import annotations

import dataclasses


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
