"""Models of attention and gated feed-forward networks, which most families are settings of."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from specjax.checked_json import Keys, UnsupportedModelError
from specjax.config.model import Layer, ModelConfig
from specjax.interfaces import Place
from specjax.models.families import common
from specjax.models.mixers.attention import Attention
from specjax.models.mlps.dense import Dense
from specjax.models.rope import Rope, Scaling


@dataclasses.dataclass(frozen=True)
class DenseFamily:
    """A `specjax.interfaces.Family` of Llama's structure.

    Attributes:
      model_type: see `Family`, as for `architecture`, `head_style` and `layer_prefix`.
      qkv_bias: whether q, k and v have biases; None: the key `attention_bias` says it.
      qk_norm: whether queries and keys are normed per head.
      head_dim: size of a head where a file does not say it, see `read_heads`.
      kv_heads: number of key and value heads where a file does not say it, see `read_heads`.
    """

    model_type: str
    architecture: str
    head_style: str | None = None
    qkv_bias: bool | None = None
    qk_norm: bool = False
    head_dim: int | None = None
    kv_heads: int | None = None
    layer_prefix: str = common.LAYER_PREFIX

    # --- config in and out -----------------------------------------------------------------------

    def read(self, keys: Keys) -> ModelConfig:
        """See `Family.read`."""
        heads, kv_heads, head_dim = common.read_heads(keys, self.head_dim, self.kv_heads)
        layers = keys.integer("num_hidden_layers", most=common.MOST_LAYERS)
        common.refuse(keys, common.not_dense(keys))
        max_position = keys.integer("max_position_embeddings")
        eps = keys.number("rms_norm_eps", 1e-6, least=0.0)
        mixer = Attention(
            heads, kv_heads, head_dim, common.read_rope(keys, max_position),
            qkv_bias=keys.flag("attention_bias") if self.qkv_bias is None else self.qkv_bias,
            qk_norm=self.qk_norm, norm_eps=eps,
        )  # fmt: skip
        mlp = Dense(keys.integer("intermediate_size"))
        return ModelConfig(
            vocab_size=keys.integer("vocab_size"),
            hidden_size=keys.integer("hidden_size"),
            layers=tuple(
                Layer(dataclasses.replace(mixer, window=window), mlp)
                for window in self.windows(keys, layers)
            ),
            model_type=self.model_type,
            rms_norm_eps=eps,
            tie_embeddings=keys.flag("tie_word_embeddings"),
            max_position=max_position,
        )

    def windows(self, keys: Keys, layers: int) -> tuple[int | None, ...]:
        """Returns the window of each layer; None: the layer sees all positions before its own."""
        return common.layer_windows(keys, layers, None)

    def write(self, cfg: ModelConfig) -> dict[str, Any]:
        """See `Family.write`."""
        windows = self._expressed(cfg)
        mixer, mlp = cfg.layers[0].mixer, cfg.layers[0].mlp
        return {
            "vocab_size": cfg.vocab_size,
            "hidden_size": cfg.hidden_size,
            "intermediate_size": mlp.intermediate_size,
            "num_hidden_layers": cfg.num_layers,
            "num_attention_heads": mixer.num_heads,
            "num_key_value_heads": mixer.num_kv_heads,
            "head_dim": mixer.head_dim,
            "hidden_act": "silu",
            "attention_bias": mixer.qkv_bias,
            "attention_dropout": 0.0,
            "max_position_embeddings": cfg.max_position,
            "rms_norm_eps": cfg.rms_norm_eps,
            "tie_word_embeddings": cfg.tie_embeddings,
            "use_cache": True,
            **self.windows_json(windows),
            **common.rope_json(mixer.rope),
        }

    def windows_json(self, windows: tuple[int | None, ...]) -> dict[str, Any]:
        """Returns the keys that `windows` reads.

        Raises:
          UnsupportedModelError: the family has no such windows.
        """
        if set(windows) != {None}:
            self.refuse("sees all positions in every layer", f"windows {_listed(windows)}")
        return {}

    def refuse(self, has: str, got: str) -> None:
        """Raises `UnsupportedModelError`, for a config that the family cannot express."""
        raise UnsupportedModelError(
            f"model_type {self.model_type!r} {has}, got {got}; set a model_type that fits"
        )

    def _expressed(self, cfg: ModelConfig) -> tuple[int | None, ...]:
        """Returns the window of each layer, and checks that layers differ in nothing else."""
        # A class derived from one of them may compute something else than the family means.
        kinds = {type(part) for layer in cfg.layers for part in (layer.mixer, layer.mlp)}
        if others := sorted(kind.__name__ for kind in kinds - {Attention, Dense}):
            self.refuse("has Attention and Dense in every layer", ", ".join(others))
        windows = tuple(layer.mixer.window for layer in cfg.layers)
        alike = {
            dataclasses.replace(layer, mixer=dataclasses.replace(layer.mixer, window=None))
            for layer in cfg.layers
        }
        if len(alike) != 1:
            self.refuse("has layers that differ in nothing but windows", f"{len(alike)} kinds")
        mixer = cfg.layers[0].mixer
        if self.qk_norm != mixer.qk_norm or self.qkv_bias not in (None, mixer.qkv_bias):
            free = "free" if self.qkv_bias is None else self.qkv_bias
            self.refuse(
                f"has qk_norm {self.qk_norm} and qkv_bias {free}",
                f"qk_norm {mixer.qk_norm} and qkv_bias {mixer.qkv_bias}",
            )
        if mixer.norm_eps != cfg.rms_norm_eps:
            self.refuse("has one epsilon of norms", f"{mixer.norm_eps} and {cfg.rms_norm_eps}")
        if mixer.soft_cap is not None:
            self.refuse("has scores without a bound", f"a soft_cap of {mixer.soft_cap}")
        if mixer.o_bias:
            self.refuse("has no bias in the output projection of attention", "o_bias True")
        return windows

    # --- files -----------------------------------------------------------------------------------

    def stored(self, cfg: ModelConfig, layer: Layer | None) -> Mapping[str, Place]:
        """See `Family.stored`."""
        return common.stored(cfg, layer)

    def zeros(self, cfg: ModelConfig, layer: Layer) -> Mapping[str, tuple[int, ...]]:
        """Lists the bias of the output projection, where `attention_bias` decides on biases.

        transformers gives the output projection a bias then, and checkpoints that were converted
        from a family without this bias hold zeros.
        """
        if self.qkv_bias is None and layer.mixer.qkv_bias:
            return {"self_attn.o_proj.bias": (cfg.hidden_size,)}
        return {}


def _listed(windows: tuple[int | None, ...]) -> str:
    return ", ".join(str(window) for window in dict.fromkeys(windows))


# --- by flat numbers ------------------------------------------------------------------------------


def dense_config(
    vocab_size: int,
    hidden_size: int,
    intermediate_size: int,
    num_layers: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    *,
    rope_theta: float = 10_000.0,
    rope_scaling: Scaling | None = None,
    qkv_bias: bool = False,
    qk_norm: bool = True,
    window: int | None = None,
    soft_cap: float | None = None,
    o_bias: bool = False,
    rms_norm_eps: float = 1e-6,
    **others: Any,
) -> ModelConfig:
    """Makes the config of a model whose layers are all alike.

    Arguments that are not listed are those of `Attention`, `Dense` and `Rope`.

    Args:
      vocab_size: size V of the vocabulary.
      hidden_size: width D.
      num_layers: number L of layers.
      others: further fields of `ModelConfig`.
    """
    rope = Rope(rope_theta, rope_scaling)
    mixer = Attention(
        num_heads, num_kv_heads, head_dim, rope, qkv_bias, qk_norm, rms_norm_eps, window, soft_cap,
        o_bias,
    )  # fmt: skip
    return ModelConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        layers=(Layer(mixer, Dense(intermediate_size)),) * num_layers,
        rms_norm_eps=rms_norm_eps,
        **others,
    )
