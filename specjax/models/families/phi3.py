"""Phi-3 and Phi-4 (arXiv 2404.14219): Llama's structure, with fused projections and LongRoPE."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specjax.checked_json import Keys
from specjax.config.model import Layer, ModelConfig
from specjax.interfaces import Place
from specjax.models.families import common
from specjax.models.families.mistral import MistralFamily
from specjax.models.rope import LongScaling


class Phi3Family(MistralFamily):
    """Mistral's windows, and files in which projections that share an input are one tensor."""

    def windows(self, keys: Keys, layers: int) -> tuple[int | None, ...]:
        """Passes over a window that leaves no position out, as Phi-3.5's."""
        windows, longest = super().windows(keys, layers), keys.integer("max_position_embeddings")
        return tuple(None if window and window >= longest else window for window in windows)

    def stored(self, cfg: ModelConfig, layer: Layer | None) -> Mapping[str, Place]:
        places = dict(super().stored(cfg, layer))
        if layer is None:
            return places
        mixer, inner = layer.mixer, layer.mlp.intermediate_size
        q, kv = (n * mixer.head_dim for n in (mixer.num_heads, mixer.num_kv_heads))
        for tensor, sizes in (
            ("self_attn.qkv_proj.weight", {"q": q, "k": kv, "v": kv}),
            ("mlp.gate_up_proj.weight", {"gate": inner, "up": inner}),
        ):
            places |= common.parts_of(tensor, "", sizes, transpose=True)
        return places

    def ropes_json(self, cfg: ModelConfig) -> dict[str, Any]:
        rope = cfg.layers[0].mixer.rope
        raw = {**super().ropes_json(cfg), "partial_rotary_factor": rope.share}
        if isinstance(rope.scaling, LongScaling):
            original = rope.scaling.original_max_position
            raw["original_max_position_embeddings"] = original
            if rope.scaling.magnitude == common.long_magnitude(
                cfg.max_position / original, original
            ):
                # transformers 4 refuses the object with any further key.
                long = {name: raw["rope_scaling"][name] for name in ("short_factor", "long_factor")}
                raw["rope_scaling"] = {"type": "longrope", **long}
        return raw


FAMILY = Phi3Family(
    "phi3", "Phi3ForCausalLM", qkv_bias=False, partial_rotary=True,
    defaults={"rms_norm_eps": 1e-5, "sliding_window": None}, inert=("full_attn_mod",),
)  # fmt: skip
