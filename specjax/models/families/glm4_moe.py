"""GLM-4.5, GLM-4.5-Air and GLM-4.6 (arXiv 2508.06471), with their MTP head."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from specjax.checked_json import Keys
from specjax.config.model import Layer, ModelConfig
from specjax.models.families.mixture import MixtureFamily
from specjax.models.mlps.moe import Mixture


class Glm4MoeFamily(MixtureFamily):
    """The first layers are dense; the others have DeepSeek-V3's router and a shared expert."""

    def fields(self, keys: Keys) -> dict[str, Any]:
        shared = keys.integer("n_shared_experts", 1, least=0)
        return {
            "router": "sigmoid",
            "correction": True,
            "n_group": keys.integer("n_group", 1),
            "topk_group": keys.integer("topk_group", 1),
            "scaling": keys.number("routed_scaling_factor", 1.0),
            "shared_size": shared * keys.integer(self.width_key),
        }

    def fields_json(self, mlp: Mixture) -> dict[str, Any]:
        return {
            "n_group": mlp.n_group,
            "topk_group": mlp.topk_group,
            "routed_scaling_factor": mlp.scaling,
            "n_shared_experts": mlp.shared_size // mlp.intermediate_size,
        }

    def sparse(self, keys: Keys, layers: int) -> list[bool]:
        first = keys.integer("first_k_dense_replace", 1, least=0)
        return [i >= first for i in range(layers)]

    def sparse_json(self, sparse: Sequence[bool]) -> dict[str, Any]:
        return {"first_k_dense_replace": sparse.index(True) if any(sparse) else len(sparse)}

    def ropes_json(self, cfg: ModelConfig) -> dict[str, Any]:
        return {
            **super().ropes_json(cfg),
            "partial_rotary_factor": cfg.layers[0].mixer.rope.share,
        }

    def zeros(self, cfg: ModelConfig, layer: Layer) -> Mapping[str, tuple[int, ...]]:
        return {}  # biases are those of q, k and v alone


FAMILY = Glm4MoeFamily(
    "glm4_moe", "Glm4MoeForCausalLM", head_style="deepseek", qk_norm=None, partial_rotary=True,
    experts_keys=("n_routed_experts", "num_local_experts"), normed=True,
    defaults={"partial_rotary_factor": 0.5, "rms_norm_eps": 1e-5},
)  # fmt: skip
