"""Data-sheet figures of chips, and lower bounds on the cost of a forward pass.

Every figure of a chip that the project uses is in this table. Bandwidths and peaks are the
vendor's; programs do not reach them, so seconds that follow from them are lower bounds.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from specjax.config import Layer

BYTES = 2  # bytes of a bfloat16 number


@dataclasses.dataclass(frozen=True)
class Chip:
    """One chip, or several that act as one.

    Attributes:
      memory: bytes of HBM.
      bandwidth: bytes/s that can be read from HBM.
      peak: dense bfloat16 operations/s.
      network: bytes/s that a chip can receive from its neighbours over all links.
    """

    title: str
    memory: float
    bandwidth: float
    peak: float
    network: float

    def times(self, count: int, title: str) -> Chip:
        """The figures of `count` chips among which work is divided perfectly."""
        return Chip(title, *(count * x for x in dataclasses.astuple(self)[1:]))


# TPU: https://cloud.google.com/tpu/docs/v5e, /v5p and /v6e, "key chip specifications". They give
# the network both ways together (400, 1200 and 800 GB/s); here is one way. GPU: NVIDIA's data
# sheets, whose figures with sparsity are halved; NVLink 3, 4 and 5 are 600, 900 and 1800 GB/s both
# ways together. Cards without it have PCIe, 64 (generation 4) or 128 GB/s both ways together.
CHIPS = {
    "v5e": Chip("TPU v5e", 16e9, 819e9, 197e12, 200e9),
    "v5p": Chip("TPU v5p", 95 * 2**30, 2765e9, 459e12, 600e9),
    "v6e": Chip("TPU v6e", 32e9, 1600e9, 918e12, 400e9),
    "h100": Chip("H100 SXM", 80e9, 3.35e12, 989e12, 450e9),
    "h200": Chip("H200 SXM", 141e9, 4.8e12, 989e12, 450e9),
    "b200": Chip("B200 SXM", 180e9, 7.7e12, 2250e12, 900e9),
    "a100": Chip("A100 SXM 80 GB", 80e9, 2039e9, 312e12, 300e9),
    "a100_40": Chip("A100 SXM 40 GB", 40e9, 1555e9, 312e12, 300e9),
    "a100_pcie": Chip("A100 PCIe 80 GB", 80e9, 1935e9, 312e12, 32e9),
    "h100_pcie": Chip("H100 PCIe", 80e9, 2e12, 756e12, 64e9),
    "h100_nvl": Chip("H100 NVL", 94e9, 3.9e12, 835e12, 300e9),
    "l40s": Chip("L40S", 48e9, 864e9, 362e12, 32e9),
    "l4": Chip("L4", 24e9, 300e9, 121e12, 32e9),
}
# What JAX calls them. A slice of a card (MIG) has a longer name, and figures of its own.
_KINDS = {
    "TPU v5 lite": "v5e",
    "TPU v5e": "v5e",
    "TPU v5": "v5p",
    "TPU v5p": "v5p",
    "TPU v6 lite": "v6e",
    "TPU v6e": "v6e",
    "NVIDIA H100 80GB HBM3": "h100",
    "NVIDIA H200": "h200",
    "NVIDIA B200": "b200",
    "NVIDIA A100-SXM4-80GB": "a100",
    "NVIDIA A100-SXM4-40GB": "a100_40",
    "NVIDIA A100 80GB PCIe": "a100_pcie",
    "NVIDIA H100 PCIe": "h100_pcie",
    "NVIDIA H100 NVL": "h100_nvl",
    "NVIDIA L40S": "l40s",
    "NVIDIA L4": "l4",
}


def chip_of(device_kind: str) -> Chip | None:
    """The figures of a device, by the `device_kind` that JAX gives it; None: they are not known."""
    name = _KINDS.get(device_kind)
    return None if name is None else CHIPS[name]


def layer_weights(layers: Sequence[Layer], width: int) -> int:
    """Number of matrix weights in decoder layers, without norms and biases.

    All experts count: a large batch reads all of them, though a token uses only a few.
    """
    rows = {
        layer: (*layer.mixer.params(width).values(), *layer.mlp.params(width).values())
        for layer in set(layers)
    }
    sizes = {
        layer: sum(math.prod(row.shape) for row in of if row.matrix) for layer, of in rows.items()
    }
    return sum(sizes[layer] for layer in layers)


def cache_values(layers: Sequence[Layer], positions: int) -> int:
    """Number of cached key and value entries for `positions` positions, without windows."""
    heads = (mixer.num_kv_heads * mixer.head_dim for mixer in _attention(layers))
    return 2 * sum(heads) * positions


def attention_operations(layers: Sequence[Layer], pairs: int) -> int:
    """Upper bound on attention operations for `pairs` pairs of a query and a key position."""
    return 4 * sum(mixer.num_heads * mixer.head_dim for mixer in _attention(layers)) * pairs


def _attention(layers: Sequence[Layer]) -> list[Any]:
    """The mixers of layers whose mixers are all attention.

    Raises:
      ValueError: a mixer is of another kind, whose cost is not known.
    """
    mixers = [layer.mixer for layer in layers]
    if others := sorted({mixer.kind for mixer in mixers} - {"attention"}):
        raise ValueError(
            f"the costs of layers with {', '.join(others)} are not known; expected attention alone"
        )
    return mixers


def roofline(
    chip: Chip,
    layers: Sequence[Layer],
    width: int,
    extra: int,
    batch: int,
    rows: int,
    context: int,
) -> float:
    """Seconds of one forward pass of layers over batch x rows tokens in bfloat16.

    Args:
      width: hidden size of the model.
      extra: number of further weights that are read and multiplied (language-model head,
        projections).
      batch: number of samples.
      rows: tokens per sample.
      context: tokens in each sample's cache.
    """
    weights = layer_weights(layers, width) + extra
    read = BYTES * (weights + cache_values(layers, context * batch))
    attention = attention_operations(layers, context * batch * rows)
    operations = 2 * weights * batch * rows + attention
    return max(read / chip.bandwidth, operations / chip.peak)
