"""What a model is."""

from __future__ import annotations

import dataclasses

from specjax.config.checks import choice
from specjax.spelling import checks_keywords


@checks_keywords
@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """The `llama3` frequency rescaling of RoPE (Llama 3.1); lengths in tokens."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


@checks_keywords
@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A decoder-only transformer: Llama 3, Qwen2, Qwen3 and MiMo are settings of it.

    Attributes:
      model_type: Hugging Face `model_type`; decides weight names on export.
      hidden_size, intermediate_size, num_layers, num_heads, num_kv_heads, head_dim: D F L N K H.
      qkv_bias: biases on q, k and v (Qwen2, MiMo). qk_norm: RMSNorm per head before RoPE (Qwen3).
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
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    model_type: str = "qwen3"
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    rms_norm_eps: float = 1e-6
    tie_embeddings: bool = True
    qkv_bias: bool = False
    qk_norm: bool = True
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
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads must be a multiple of num_kv_heads, got {self.num_heads} and "
                f"{self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even for RoPE, got {self.head_dim}")
        choice("mtp_concat", self.mtp_concat, ("embedding_first", "hidden_first"))
        choice("mtp_target_hidden", self.mtp_target_hidden, ("post_norm", "pre_norm"))
        choice("mtp_recycle", self.mtp_recycle, ("post_norm", "pre_norm"))

    @property
    def decode_layout(self) -> str:
        """Of the parameters that decode: `stacked` or `unrolled`, see `models.transformer`."""
        return "stacked" if self.scan_layers else "unrolled"

    def replace(self, **changes) -> ModelConfig:
        return dataclasses.replace(self, **changes)
