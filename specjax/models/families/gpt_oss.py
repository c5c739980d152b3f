"""gpt-oss (arXiv 2508.10925): sinks, a window in every other layer, and experts with biases."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from specjax.checked_json import Keys
from specjax.config.model import Layer, ModelConfig
from specjax.interfaces import Place, Stored, TensorSlice
from specjax.models.families.dense import SlidingFamily
from specjax.models.families.mixture import MixtureFamily
from specjax.models.mixers.attention import Attention
from specjax.models.mlps.moe import Mixture
from specjax.models.rope import Rope

_LIMIT, _ALPHA = "swiglu_limit", "swiglu_alpha"
# Where a file says nothing of RoPE, as in transformers.
_ROPE = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class GptOssFamily(MixtureFamily, SlidingFamily):
    """In files the experts are one tensor [E in out], of which gate and up alternate in columns."""

    def mixers(self, keys: Keys, attention: list[Attention]) -> Sequence[Any]:
        return [dataclasses.replace(one, sinks=True, o_bias=one.qkv_bias) for one in attention]

    def ropes(self, keys: Keys, max_position: int, windows: Sequence[int | None]) -> Sequence[Rope]:
        if not (keys.raw.get("rope_parameters") or keys.raw.get("rope_scaling")):
            asked, keys = keys.asked, Keys(keys.file, {**keys.raw, "rope_scaling": _ROPE})
            keys.asked = asked
        return super().ropes(keys, max_position, windows)

    def fields(self, keys: Keys) -> dict[str, Any]:
        if keys.integer("experts_per_token", None) not in (None, keys.raw["num_experts_per_tok"]):
            raise keys.error("experts_per_token", "what num_experts_per_tok says")
        return {
            "router": "topk_softmax",
            "biases": True,
            "limit": keys.number(_LIMIT),
            "alpha": keys.number(_ALPHA),
        }

    def fields_json(self, mlp: Mixture) -> dict[str, Any]:
        return {
            _LIMIT: mlp.limit,
            _ALPHA: mlp.alpha,
            "experts_per_token": mlp.num_experts_per_tok,
        }

    def stored(self, cfg: ModelConfig, layer: Layer | None) -> Mapping[str, Place]:
        places = dict(super().stored(cfg, layer))
        if layer is None:
            return places
        places["router"] = Stored("mlp.router.weight", transpose=True)
        places["logit_bias"] = Stored("mlp.router.bias")
        size = layer.mlp.intermediate_size
        for suffix, axis in (("", 2), ("_bias", 1)):
            for order, name in enumerate(("gate", "up")):
                part = TensorSlice(axis, order, order + 1, 2 * size, groups=size)
                stored = Stored(f"mlp.experts.gate_up_proj{suffix}", part=part)
                places[f"experts_{name}{suffix}"] = stored
            places[f"experts_down{suffix}"] = Stored(f"mlp.experts.down_proj{suffix}")
        return places

    def zeros(self, cfg: ModelConfig, layer: Layer) -> Mapping[str, tuple[int, ...]]:
        return {}  # the output projection has a bias of its own


FAMILY = GptOssFamily(
    "gpt_oss", "GptOssForCausalLM", period=2,
    experts_keys=("num_local_experts", "num_experts"), width_key="intermediate_size",
    defaults={"attention_bias": True, "head_dim": 64, "num_experts_per_tok": 4,
              "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 150_000.0,
              "sliding_window": 128, _LIMIT: 7.0, _ALPHA: 1.702},
)  # fmt: skip
