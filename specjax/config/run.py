"""How a model is computed: what belongs to a program that runs it, and not to its checkpoint."""

from __future__ import annotations

import dataclasses

from specjax.spelling import checks_keywords


@checks_keywords
@dataclasses.dataclass(frozen=True)
class RunConfig:
    """How a program computes with a model, whatever the model is.

    Two programs may run one checkpoint with different values. It is hashable and travels as
    `ModelConfig.run`.

    Attributes:
      param_dtype: storage of the parameters. Of a model that was just read from a checkpoint, that
        of its files.
      compute_dtype: arithmetic; softmax, norms and logits are float32.
      scan_layers: `lax.scan` over stacked layers (short compile) or an unrolled loop (fast on CPU).
      remat: recompute each layer in the backward pass instead of keeping its activations.
      attention: the kernel, see `specjax.kernels.dispatch`. Engines and trainers fill it in for
        their devices.
      products: how decoding multiplies by weights, see `specjax.weights.matrix`; filled in as
        `attention` is.
    """

    param_dtype: str = "float32"
    compute_dtype: str = "float32"
    scan_layers: bool = False
    remat: bool = False
    attention: str = "reference"
    products: str = "xla"

    @property
    def decode_layout(self) -> str:
        """The layout of decoding parameters: `stacked` or `unrolled`, see `models.transformer`."""
        return "stacked" if self.scan_layers else "unrolled"
