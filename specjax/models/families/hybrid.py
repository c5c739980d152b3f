"""Models of which some layers are Gated DeltaNet and the others gated attention."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from specjax.checked_json import CheckpointError, Keys
from specjax.config.model import Layer, ModelConfig
from specjax.interfaces import Place
from specjax.models.families import common
from specjax.models.families.dense import DenseFamily
from specjax.models.families.mixture import MixtureFamily
from specjax.models.mixers.attention import Attention
from specjax.models.mixers.gated_delta import GatedDelta
from specjax.models.mlps.moe import Mixture

_LINEAR, _FULL = "linear_attention", "full_attention"
_CONV = "linear_conv_kernel_dim"
_SIZES = {
    "num_k_heads": "linear_num_key_heads",
    "num_v_heads": "linear_num_value_heads",
    "head_k_dim": "linear_key_head_dim",
    "head_v_dim": "linear_value_head_dim",
}


@dataclasses.dataclass(frozen=True)
class HybridFamily(DenseFamily):
    """A family whose `layer_types` are `linear_attention` and `full_attention`.

    Attributes:
      by_key_head: whether the projections of a recurrent layer are two tensors whose rows are
        grouped by key heads (Qwen3-Next), and not four.
    """

    mixer_kinds: ClassVar[tuple[type, ...]] = (Attention, GatedDelta)

    by_key_head: bool = False

    def problems(self, keys: Keys) -> list[str]:
        gate = keys.text("output_gate_type", "silu")  # of the gated norm; Qwen3.6 says swish
        unlike = {
            "attn_output_gate false": not keys.flag("attn_output_gate", True),
            "mtp_use_dedicated_embeddings true": keys.flag("mtp_use_dedicated_embeddings", False),
            f"output_gate_type {gate}": gate not in ("silu", "swish"),
        }
        return [*super().problems(keys), *(problem for problem, is_so in unlike.items() if is_so)]

    def windows(self, keys: Keys, layers: int) -> tuple[int | None, ...]:
        return (None,) * layers

    def mixers(self, keys: Keys, attention: list[Attention]) -> Sequence[Any]:
        every = keys.integer("full_attention_interval", 4)
        kinds = keys.texts("layer_types") or [
            _LINEAR if (i + 1) % every else _FULL for i in range(len(attention))
        ]
        if len(kinds) != len(attention):
            raise keys.error("layer_types", f"as many as num_hidden_layers, {len(attention)}")
        if {*kinds} != {_LINEAR, _FULL}:
            listed = ", ".join(sorted({*kinds}))
            common.refuse(keys, [f"layer_types {listed} (expected both {_LINEAR} and {_FULL})"])
        try:
            linear = GatedDelta(
                **{field: keys.integer(key) for field, key in _SIZES.items()},
                conv_kernel=keys.integer(_CONV, 4, least=2),
                norm_eps=attention[0].norm_eps,
            )
        except ValueError as error:
            raise CheckpointError(f"{keys.file}: {error}; correct it") from error
        return [
            linear if kind == _LINEAR else dataclasses.replace(mixer, gate=True)
            for kind, mixer in zip(kinds, attention, strict=True)
        ]

    def mixers_json(self, mixers: Sequence[Any]) -> dict[str, Any]:
        linear = [mixer for mixer in dict.fromkeys(mixers) if isinstance(mixer, GatedDelta)]
        if len(linear) != 1:
            self.refuse("has recurrent layers of one kind", f"{len(linear)} kinds")
        return {
            "layer_types": [_LINEAR if isinstance(x, GatedDelta) else _FULL for x in mixers],
            **{key: getattr(linear[0], field) for field, key in _SIZES.items()},
            _CONV: linear[0].conv_kernel,
        }

    def stored(self, cfg: ModelConfig, layer: Layer | None) -> Mapping[str, Place]:
        places = super().stored(cfg, layer)
        if layer is None or not isinstance(mixer := layer.mixer, GatedDelta):
            return places
        keys, values = mixer.channels["k"], mixer.channels["v"]
        heads, groups = mixer.num_v_heads, mixer.num_k_heads if self.by_key_head else 1
        tensors = {"qkv": {"q": keys, "k": keys, "v": values}, "z": {"z": values}}
        tensors |= {"b": {"b": heads}, "a": {"a": heads}}
        if self.by_key_head:
            tensors = {"qkvz": tensors["qkv"] | tensors["z"], "ba": {"b": heads, "a": heads}}
        for name, sizes in tensors.items():
            name = f"linear_attn.in_proj_{name}.weight"
            places |= common.parts_of(name, "delta_", sizes, groups, transpose=True)
        return places | common.parts_of("linear_attn.conv1d.weight", "conv_", mixer.channels)


@dataclasses.dataclass(frozen=True)
class HybridMixtureFamily(HybridFamily, MixtureFamily):
    """A hybrid with experts, and one that all rows take, behind a gate."""

    def fields(self, keys: Keys) -> dict[str, Any]:
        return {"shared_size": keys.integer("shared_expert_intermediate_size"), "shared_gate": True}

    def fields_json(self, mlp: Mixture) -> dict[str, Any]:
        return {"shared_expert_intermediate_size": mlp.shared_size}

    def stored(self, cfg: ModelConfig, layer: Layer | None) -> Mapping[str, Place]:
        places = dict(super().stored(cfg, layer))
        for name in ("shared_gate", "shared_up", "shared_down"):
            if name in places:  # layers may be dense
                stored = places[name].name.replace("shared_experts", "shared_expert")
                places[name] = places[name]._replace(name=stored)
        return places


# The options that all of these families share.
HYBRID: dict[str, Any] = {
    "head_style": "qwen3_next",
    "qkv_bias": False,
    "qk_norm": True,
    "norm_offset": True,
    "partial_rotary": True,
    "defaults": {"partial_rotary_factor": 0.25, "head_dim": 256},
}
