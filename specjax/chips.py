"""What the chips can do, by their vendors, and what a forward pass costs by counting.

Every figure of a chip that the project uses is in this table. Bandwidths and peaks are the
vendor's; nobody reaches them, so seconds that follow from them are lower bounds.
"""

from __future__ import annotations

import dataclasses

from specjax.config import ModelConfig

BYTES = 2  # of a number in bfloat16


@dataclasses.dataclass(frozen=True)
class Chip:
    """One chip, or several that act as one.

    Attributes:
      memory: bytes of HBM. bandwidth: bytes/s from it. peak: bfloat16 operations/s, dense.
      network: bytes/s that a chip can receive from its neighbours, all links together.
    """

    title: str
    memory: float
    bandwidth: float
    peak: float
    network: float

    def times(self, count: int, title: str) -> Chip:
        """Several of them, perfectly divided among."""
        return Chip(title, *(count * x for x in dataclasses.astuple(self)[1:]))


# TPU: https://cloud.google.com/tpu/docs/v5e, /v5p and /v6e, "key chip specifications". They give
# the network both ways together (400, 1200 and 800 GB/s); here is one way. GPU: NVIDIA's data
# sheets of the SXM modules; NVLink 4 is 900 GB/s both ways together.
CHIPS = {
    "v5e": Chip("TPU v5e", 16e9, 819e9, 197e12, 200e9),
    "v5p": Chip("TPU v5p", 95 * 2**30, 2765e9, 459e12, 600e9),
    "v6e": Chip("TPU v6e", 32e9, 1600e9, 918e12, 400e9),
    "h100": Chip("H100 SXM", 80e9, 3.35e12, 989e12, 450e9),
    "h200": Chip("H200 SXM", 141e9, 4.8e12, 989e12, 450e9),
}


def layer_weights(cfg: ModelConfig) -> int:
    """Weights of one decoder layer, norms left out."""
    d, heads = cfg.hidden_size, 2 * cfg.num_heads + 2 * cfg.num_kv_heads
    return d * cfg.head_dim * heads + 3 * d * cfg.intermediate_size


def cache_values(cfg: ModelConfig, layers: int, positions: int) -> int:
    """Numbers that the keys and values of so many positions are."""
    return 2 * layers * cfg.num_kv_heads * cfg.head_dim * positions


def attention_operations(cfg: ModelConfig, layers: int, pairs: int) -> int:
    """Operations of attention over so many pairs of a query's and a key's position."""
    return 4 * layers * cfg.num_heads * cfg.head_dim * pairs


def roofline(
    chip: Chip, cfg: ModelConfig, layers: int, extra: int, batch: int, rows: int, context: int
) -> float:
    """Seconds of one forward pass of `layers` layers over batch x rows tokens in bfloat16.

    Args:
      extra: further weights that are read and multiplied (language-model head, projections).
      context: tokens in each sample's cache.
    """
    weights = layers * layer_weights(cfg) + extra
    read = BYTES * (weights + cache_values(cfg, layers, context * batch))
    attention = attention_operations(cfg, layers, context * batch * rows)
    operations = 2 * weights * batch * rows + attention
    return max(read / chip.bandwidth, operations / chip.peak)
