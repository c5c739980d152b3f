"""What a model is."""

from __future__ import annotations

import dataclasses
from typing import Any

from specjax.config.checks import choice
from specjax.spelling import checks_keywords


@checks_keywords
@dataclasses.dataclass(frozen=True)
class Layer:
    """One decoder layer: pre-norm, mixer, residual, pre-norm, mlp, residual.

    Attributes:
      mixer: a `specjax.interfaces.Mixer`, such as `specjax.models.mixers.attention.Attention`.
      mlp: a `specjax.interfaces.Mlp`, such as `specjax.models.mlps.dense.Dense`.
    """

    mixer: Any
    mlp: Any


@checks_keywords
@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A decoder-only transformer, by its layers; `specjax.models.families.dense.dense_config` makes
    one whose layers are all alike from flat numbers.

    Attributes:
      vocab_size, hidden_size: V D.
      layers: what layers it has, in order. Nothing else says how many there are or what they hold.
      model_type: Hugging Face `model_type`; decides weight names on export.
      mtp_num_layers: MTP modules in the draft head; step s uses module min(s, mtp_num_layers - 1).
      mtp_concat: order of the halves of the head's input, `embedding_first` (DeepSeek, GLM) or
        `hidden_first` (MiMo).
      mtp_target_hidden, mtp_recycle: whether the state handed to the head, by the target and by the
        head's own previous step, is taken after or before the final norm.
      generation: keys and values of generation_config.json that say how it asks to be sampled, see
        `specjax.models.generation_config`.
      param_dtype, compute_dtype: storage and arithmetic; softmax, norms and logits are float32.
      scan_layers: `lax.scan` over stacked layers (short compile) or an unrolled loop (fast on CPU).
      remat: recompute each layer in the backward pass instead of keeping its activations.
      attention: the kernel, see `specjax.kernels.dispatch`. Of a program, not of a checkpoint:
        engines and trainers fill it in for their devices.
      products: how decoding multiplies by weights, see `specjax.kernels.panels`; as `attention`.
    """

    vocab_size: int
    hidden_size: int
    layers: tuple[Layer, ...]
    model_type: str = "qwen3"
    rms_norm_eps: float = 1e-6
    tie_embeddings: bool = True
    max_position: int = 4096
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    pad_token_id: int | None = None
    mtp_num_layers: int = 0
    mtp_concat: str = "embedding_first"
    mtp_target_hidden: str = "post_norm"
    mtp_recycle: str = "post_norm"
    generation: tuple[tuple[str, bool | int | float], ...] = ()
    param_dtype: str = "float32"
    compute_dtype: str = "float32"
    scan_layers: bool = False
    remat: bool = False
    attention: str = "reference"
    products: str = "xla"

    def __post_init__(self):
        choice("mtp_concat", self.mtp_concat, ("embedding_first", "hidden_first"))
        choice("mtp_target_hidden", self.mtp_target_hidden, ("post_norm", "pre_norm"))
        choice("mtp_recycle", self.mtp_recycle, ("post_norm", "pre_norm"))

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def decode_layout(self) -> str:
        """Of the parameters that decode: `stacked` or `unrolled`, see `models.transformer`."""
        return "stacked" if self.scan_layers else "unrolled"

    def mixers(self, kind: str) -> tuple[Any, ...]:
        """The different mixers of a kind (`attention`) that the layers have, in order."""
        found = (layer.mixer for layer in self.layers if layer.mixer.kind == kind)
        return tuple(dict.fromkeys(found))

    def replace(self, **changes) -> ModelConfig:
        return dataclasses.replace(self, **changes)
