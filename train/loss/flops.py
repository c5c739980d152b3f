"""Floating-point operations of the policy's update, and the share of a chip's peak that it reaches.

They are the operations that the mathematics needs (the usual convention of MFU: PaLM,
arXiv:2204.02311, appendix B, and verl's `perf/mfu/actor`), whatever the programs do:

    forward    2 for each matrix weight that a token is multiplied with, those of the language-model
               head included; and what the mixers declare (`Mixer.operations`): of attention 4 x
               heads x head size for each pair of a query and a key that it sees, by the actual
               lengths of the samples and by windows
    backward   twice the forward

Tokens are those of prompts and responses, without the padding of rows. Not counted: activations
that are computed again in the backward pass (`remat`), logits that are computed again, norms,
rotations and softmax, the lookup of embeddings, and the optimizer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax

from specjax.chips import Chip, chip_of
from specjax.config import ModelConfig

_BACKWARD = 2  # operations of the backward pass, relative to the forward pass


class UpdateSpeed:
    """Counts the operations of updates, and turns their duration into metrics.

    Args:
      cfg: config of the policy.
      devices: the devices that train.

    Attributes:
      chip: the kind of the devices; None: its peak is not known.
      notes: lines to print at start, about metrics that are left out.
    """

    def __init__(self, cfg: ModelConfig, devices: Sequence[jax.Device]):
        self._cfg, self._count, self._weights = cfg, len(devices), None
        kind = devices[0].device_kind
        self.chip: Chip | None = chip_of(kind)
        self.notes: list[str] = []
        others = {x.mlp.kind for x in cfg.layers if not hasattr(x.mlp, "weights_of_a_row")}
        others |= {x.mixer.kind for x in cfg.layers if not hasattr(x.mixer, "operations")}
        if others:
            self.notes.append(
                "no perf/tflops/actor and perf/mfu/actor: the operations of layers with "
                f"{', '.join(sorted(others))} are not known"
            )
            return
        self._weights = cfg.vocab_size * cfg.hidden_size
        for layer in cfg.layers:
            mixer = layer.mixer.params(cfg.hidden_size).values()
            self._weights += sum(math.prod(row.shape) for row in mixer if row.matrix)
            self._weights += layer.mlp.weights_of_a_row(cfg.hidden_size)
        if self.chip is None:
            self.notes.append(
                f"no perf/mfu/actor: the peak of {kind!r} is not known (specjax/chips.py); "
                "perf/tflops/actor is reported"
            )

    def update(self, lengths: Sequence[int]) -> int:
        """Operations of an update over samples of these lengths, forward and backward."""
        mixing = sum(layer.mixer.operations(n) for layer in self._cfg.layers for n in lengths)
        return (1 + _BACKWARD) * (2 * self._weights * sum(lengths) + mixing)

    def metrics(self, lengths: Sequence[int], seconds: float) -> dict[str, float]:
        """The metrics of updates.

        Args:
          lengths: tokens of each sample, prompt and response.
          seconds: duration of the updates.

        Returns:
          `perf/tflops/actor`, TFLOP/s of each device, and `perf/mfu/actor`, its share of the dense
          bfloat16 peak of the data sheet; without those that are not known.
        """
        if self._weights is None:
            return {}
        rate = self.update(lengths) / max(seconds, 1e-9) / self._count
        speed = {"perf/tflops/actor": rate / 1e12}
        return speed if self.chip is None else {**speed, "perf/mfu/actor": rate / self.chip.peak}
