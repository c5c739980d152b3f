"""What the chips can do, by their vendors, and what a forward pass costs by counting.

Every figure of a chip that the project uses is in this table. Bandwidths and peaks are the
vendor's; programs do not reach them, so seconds that follow from them are lower bounds.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from specjax.config import Layer

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


def layer_weights(layers: Sequence[Layer], width: int) -> int:
    """Weights of decoder layers that tokens are multiplied with: all but norms and biases.

    Of experts these are all of them, which are read where a batch is large; a token is multiplied
    with a few.
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
    """Numbers that the keys and values of so many positions are, where no window cuts them off."""
    heads = (mixer.num_kv_heads * mixer.head_dim for mixer in _attention(layers))
    return 2 * sum(heads) * positions


def attention_operations(layers: Sequence[Layer], pairs: int) -> int:
    """Operations of attention over so many pairs of a query's and a key's position, at most."""
    return 4 * sum(mixer.num_heads * mixer.head_dim for mixer in _attention(layers)) * pairs


def _attention(layers: Sequence[Layer]) -> list[Any]:
    """The mixers of layers that have attention alone.

    Raises:
      ValueError: some are not attention, whose costs are all that is known here.
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
      width: of the model.
      extra: further weights that are read and multiplied (language-model head, projections).
      context: tokens in each sample's cache.
    """
    weights = layer_weights(layers, width) + extra
    read = BYTES * (weights + cache_values(layers, context * batch))
    attention = attention_operations(layers, context * batch * rows)
    operations = 2 * weights * batch * rows + attention
    return max(read / chip.bandwidth, operations / chip.peak)
