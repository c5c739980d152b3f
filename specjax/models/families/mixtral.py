"""Mixtral (arXiv 2401.04088): Mistral's structure, with 8 experts in every layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specjax.checked_json import Keys
from specjax.config.model import Layer, ModelConfig
from specjax.interfaces import Place, Stored
from specjax.models.families.mistral import MistralFamily
from specjax.models.families.mixture import MixtureFamily
from specjax.models.mlps.moe import Mixture

_NAMES = {"experts_gate": "w1", "experts_up": "w3", "experts_down": "w2"}


class MixtralFamily(MixtureFamily, MistralFamily):
    """Weights are a softmax over the logits of the chosen experts."""

    def fields(self, keys: Keys) -> dict[str, Any]:
        return {"router": "topk_softmax"}

    def stored(self, cfg: ModelConfig, layer: Layer | None) -> Mapping[str, Place]:
        places = dict(super().stored(cfg, layer))
        if layer is not None and isinstance(layer.mlp, Mixture):
            prefix = "block_sparse_moe."
            places["router"] = Stored(f"{prefix}gate.weight", transpose=True)
            for name, tensor in _NAMES.items():
                places[name] = tuple(
                    Stored(f"{prefix}experts.{i}.{tensor}.weight", transpose=True)
                    for i in range(layer.mlp.num_experts)
                )
        return places


FAMILY = MixtralFamily(
    "mixtral", "MixtralForCausalLM", qkv_bias=False,
    experts_keys=("num_local_experts",), width_key="intermediate_size",
    defaults={"num_key_value_heads": 8, "sliding_window": None, "rms_norm_eps": 1e-5,
              "rope_theta": 1e6},
)  # fmt: skip
