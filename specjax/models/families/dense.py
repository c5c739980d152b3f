"""Models whose layers are all alike, with attention and a gated feed-forward network."""

from __future__ import annotations

from typing import Any

from specjax.config.model import Layer, ModelConfig
from specjax.models.mixers.attention import Attention
from specjax.models.mlps.dense import Dense
from specjax.models.rope import Rope, RopeScaling


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
    rope_scaling: RopeScaling | None = None,
    qkv_bias: bool = False,
    qk_norm: bool = True,
    window: int | None = None,
    rms_norm_eps: float = 1e-6,
    **others: Any,
) -> ModelConfig:
    """The config of a model whose layers are all alike.

    Args:
      vocab_size, hidden_size, intermediate_size, num_layers: V D F L.
      num_heads, num_kv_heads, head_dim, qkv_bias, qk_norm, window: see `Attention`.
      others: further fields of `ModelConfig`.
    """
    rope = Rope(rope_theta, rope_scaling)
    mixer = Attention(
        num_heads, num_kv_heads, head_dim, rope, qkv_bias, qk_norm, rms_norm_eps, window
    )
    return ModelConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        layers=(Layer(mixer, Dense(intermediate_size)),) * num_layers,
        rms_norm_eps=rms_norm_eps,
        **others,
    )


def change_dense(cfg: ModelConfig, **changes: Any) -> ModelConfig:
    """The config with other flat numbers, by the names of `dense_config`'s arguments.

    Raises:
      ValueError: its layers are not all alike.
    """
    if len(set(cfg.layers)) != 1:
        raise ValueError(f"expected layers that are all alike, got {len(set(cfg.layers))} kinds")
    mixer, mlp = cfg.layers[0].mixer, cfg.layers[0].mlp
    flat = {
        "intermediate_size": mlp.intermediate_size,
        "num_layers": cfg.num_layers,
        "num_heads": mixer.num_heads,
        "num_kv_heads": mixer.num_kv_heads,
        "head_dim": mixer.head_dim,
        "rope_theta": mixer.rope.theta,
        "rope_scaling": mixer.rope.scaling,
        "qkv_bias": mixer.qkv_bias,
        "qk_norm": mixer.qk_norm,
        "window": mixer.window,
    }
    others = {name: getattr(cfg, name) for name in cfg.__dataclass_fields__ if name != "layers"}
    return dense_config(**{**flat, **others, **changes})
