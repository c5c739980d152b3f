"""What a model is, and how a program computes with it."""

from __future__ import annotations

import dataclasses
from typing import Any

from specjax.config.checks import choice

REMAT_POLICIES = ("save_attention", "full")
# The name, see `jax.ad_checkpoint.checkpoint_name`, of what `save_attention` keeps.
ATTENTION_RESIDUALS = "attention"


@dataclasses.dataclass(frozen=True)
class Layer:
    """One decoder layer: a mixer and an mlp, each with norms and a residual.

    Attributes:
      mixer: a `specjax.interfaces.Mixer`, such as `specjax.models.mixers.attention.Attention`.
      mlp: a `specjax.interfaces.Mlp`, such as `specjax.models.mlps.dense.Dense`.
      norms: where the norms of either half are: `before` it (Llama), `after` it and before the
        residual (OLMo 2), or `both` (Gemma 2).
      norm_offset: whether these norms multiply by 1 + w (Gemma).
      residual_multiplier: factor of what either half adds to the residual stream (Granite).
    """

    mixer: Any
    mlp: Any
    norms: str = "before"
    norm_offset: bool = False
    residual_multiplier: float = 1.0

    def __post_init__(self):
        choice("norms", self.norms, ("before", "after", "both"))


@dataclasses.dataclass(frozen=True)
class LogitForm:
    """How logits follow from the products of states and the language-model head's matrix.

    Attributes:
      multiplier: factor of the products.
      soft_cap: bound of the result, which becomes soft_cap * tanh(result / soft_cap); None: none.
    """

    multiplier: float = 1.0
    soft_cap: float | None = None


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """How a program computes with a model, whatever the model is.

    Two programs may run one checkpoint with different values. It is hashable and travels as
    `ModelConfig.run`.

    Attributes:
      param_dtype: dtype in which the parameters are stored; after a checkpoint was read, the dtype
        of its files.
      compute_dtype: dtype of arithmetic; softmax, norms and logits are float32.
      scan_layers: `lax.scan` over stacked layers, which compiles faster, or an unrolled loop, which
        decodes faster: a scan copies weights and pages of each layer out of the stacks.
      fused: whether unrolled layers have the projections that share an input side by side in one
        matrix. Engines set it where one device decodes; a mesh could not split such a matrix.
      remat: recompute each layer in the backward pass instead of keeping its activations.
      remat_policy: what is kept of a layer that is recomputed, one of `REMAT_POLICIES`. `full`:
        only its inputs; `save_attention`: the output of attention and its log-sum-exp, too, so that
        the attention kernel runs forward once (B * S * N * (H + 2) * 2 bytes in bfloat16). It does
        so with splash attention, and where rows are split over devices.
      sequence_parallel: in training under a mesh with an axis `tp`, split the tokens of states over
        it between the products of layers: norms and what `remat` keeps are then a share of each
        device, and a product's sum over `tp` scatters its result.
      attention: name of the attention kernel, see `specjax.kernels.dispatch`. Engines and trainers
        set it for their devices.
      products: number format in which decoding multiplies by weights, see
        `specjax.weights.matrix`. Engines set it for their devices.
    """

    param_dtype: str = "float32"
    compute_dtype: str = "float32"
    scan_layers: bool = False
    fused: bool = True
    remat: bool = False
    remat_policy: str = "save_attention"
    sequence_parallel: bool = False
    attention: str = "reference"
    products: str | tuple[tuple[str, str], ...] = "xla"

    def __post_init__(self):
        choice("remat_policy", self.remat_policy, REMAT_POLICIES)

    @property
    def decode_layout(self) -> str:
        """The layout of decoding parameters: `stacked` or `unrolled`, see `models.transformer`."""
        return "stacked" if self.scan_layers else "unrolled"


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A decoder-only transformer, described by its layers.

    `specjax.models.families.dense.dense_config` makes one whose layers are all alike.

    Attributes:
      vocab_size: number of tokens V.
      hidden_size: width D of the residual stream.
      layers: the layers in order; they alone say how many there are and what they compute.
      model_type: Hugging Face `model_type`; decides weight names on export.
      norm_offset: whether the final norm, and the norms of an MTP head, multiply by 1 + w.
      embedding_multiplier: factor of the embeddings of tokens.
      logits: how logits follow from the language-model head's products.
      mtp_num_layers: number of MTP modules in the draft head, 0 without a head; step s uses module
        min(s, mtp_num_layers - 1).
      mtp_concat: order of the halves of the head's input, `embedding_first` (DeepSeek, GLM) or
        `hidden_first` (MiMo).
      mtp_target_hidden: whether the head's first step takes the target's hidden state after
        (`post_norm`) or before (`pre_norm`) the final norm.
      mtp_recycle: the same for later steps, which take the hidden state of the step before.
      generation: sampling keys and values of generation_config.json, see
        `specjax.models.generation_config`.
      run: how a program computes with the model, the only field that is not a fact of the
        checkpoint. With it, one hashable value holds all that a jitted function must know.
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
    norm_offset: bool = False
    embedding_multiplier: float = 1.0
    logits: LogitForm = LogitForm()
    mtp_num_layers: int = 0
    mtp_concat: str = "embedding_first"
    mtp_target_hidden: str = "post_norm"
    mtp_recycle: str = "post_norm"
    generation: tuple[tuple[str, bool | int | float], ...] = ()
    run: RunConfig = RunConfig()

    def __post_init__(self):
        choice("mtp_concat", self.mtp_concat, ("embedding_first", "hidden_first"))
        choice("mtp_target_hidden", self.mtp_target_hidden, ("post_norm", "pre_norm"))
        choice("mtp_recycle", self.mtp_recycle, ("post_norm", "pre_norm"))

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    def mixers(self, kind: str) -> tuple[Any, ...]:
        """The distinct mixers of a kind, such as `attention`, in the order of the layers."""
        found = (layer.mixer for layer in self.layers if layer.mixer.kind == kind)
        return tuple(dict.fromkeys(found))

    def for_length(self, longest: int) -> ModelConfig:
        """A copy for sequences of at most so many tokens: some rotary embeddings depend on it."""

        def fixed(layer: Layer) -> Layer:
            rope = getattr(layer.mixer, "rope", None)
            if not hasattr(getattr(rope, "scaling", None), "longest"):
                return layer
            scaling = dataclasses.replace(rope.scaling, longest=longest)
            rope = dataclasses.replace(rope, scaling=scaling)
            return dataclasses.replace(layer, mixer=dataclasses.replace(layer.mixer, rope=rope))

        return self.replace(layers=tuple(map(fixed, self.layers)))

    def replace(self, **changes) -> ModelConfig:
        """A copy of the config with other values of these fields."""
        return dataclasses.replace(self, **changes)

    def running(self, **changes) -> ModelConfig:
        """A copy of the config with other values of these fields of `RunConfig`."""
        return dataclasses.replace(self, run=dataclasses.replace(self.run, **changes))
