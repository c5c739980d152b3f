"""Keys of config.json that most families share, read and written, and names of tensors.

Two dialects are read: transformers 5 writes `rope_parameters`, files in the wild have `rope_theta`
and `rope_scaling`. What is written holds both.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from specjax.checked_json import Keys, UnsupportedModelError, shown
from specjax.config.model import Layer, ModelConfig
from specjax.interfaces import Place
from specjax.models.rope import LinearScaling, Rope, RopeScaling, YarnScaling
from specjax.models.rows import layer_rows, top_rows

_THETA = 10_000.0  # of RoPE, the default
# How each rescaling of frequencies is named in files, and fields that are named otherwise there.
_ROPE_TYPES = {None: "default", LinearScaling: "linear", RopeScaling: "llama3", YarnScaling: "yarn"}
_ROPE_KEYS = {
    "original_max_position": "original_max_position_embeddings",
    "magnitude": "attention_factor",
}
MOST_LAYERS = 10_000  # a larger number in a file would exhaust the memory
LAYER_PREFIX = "model.layers.{}."
_MOE_KEYS = ("num_experts", "num_local_experts", "n_routed_experts")


def refuse(keys: Keys, problems: list[str]) -> None:
    """Raises `UnsupportedModelError` if there are problems, with all of them in the message."""
    if problems:
        raise UnsupportedModelError(
            f"{keys.file}: this {keys.text('model_type')} checkpoint needs what is not "
            f"implemented: {'; '.join(problems)}"
        )


def not_dense(keys: Keys) -> list[str]:
    """Lists, as messages, what a config asks for beyond attention and dense layers."""
    problems = [
        f"{name} {keys.raw[name]} (mixture of experts)"
        for name in _MOE_KEYS
        if keys.integer(name, None, least=0)
    ]
    classes = keys.texts("architectures")
    if classes and not any(name.endswith("ForCausalLM") for name in classes):
        problems.append(f"architectures {', '.join(classes)} (expected a language model)")
    if keys.text("hidden_act", "silu") != "silu":
        problems.append(f"hidden_act {keys.raw['hidden_act']!r} (expected 'silu')")
    if keys.flag("mlp_bias", None):
        problems.append("mlp_bias true")
    for name in ("quantization_config", "compression_config"):
        method = keys.within(name)
        if method.raw:
            kind = method.text("quant_method", None)
            problems.append(f"{name} {kind or ''} (expected unquantised weights)")
    return problems


def read_heads(keys: Keys, head_dim: int | None, kv_heads: int | None = None) -> tuple[int, ...]:
    """Reads the numbers of query heads and of key and value heads, and the size of a head.

    Args:
      keys: the keys of config.json.
      head_dim: size of a head where the file does not say it; None: the width is divided among the
        heads.
      kv_heads: number of key and value heads where the file does not say it; None: as many as query
        heads.
    """
    heads, hidden = keys.integer("num_attention_heads"), keys.integer("hidden_size")
    said = "num_key_value_heads" in keys.raw
    kv_heads = keys.integer("num_key_value_heads", None) or (None if said else kv_heads) or heads
    if heads % kv_heads:
        raise keys.error(
            "num_key_value_heads", f"a divisor of num_attention_heads, which is {heads}"
        )
    head_dim = keys.integer("head_dim", head_dim)
    if head_dim is None:
        if hidden % heads:
            raise keys.error(
                "hidden_size", f"a multiple of num_attention_heads, which is {heads}, or a head_dim"
            )
        head_dim = hidden // heads
    if head_dim % 2:
        raise keys.error("head_dim", f"an even number, for RoPE turns pairs ({head_dim} here)")
    return heads, kv_heads, head_dim


def read_rope(keys: Keys, max_position: int) -> Rope:
    """Reads the rotary embedding of all layers.

    Raises:
      UnsupportedModelError: its type is not implemented, or the file gives two that differ.
    """
    new, old = (keys.within(name).raw for name in ("rope_parameters", "rope_scaling"))
    # transformers lets `rope_scaling` replace `rope_parameters` as a whole, other readers do not.
    if new and old and _plain_rope(keys, new) != _plain_rope(keys, old):
        raise UnsupportedModelError(
            f"{keys.file}: rope_parameters {shown(new)} and rope_scaling {shown(old)} differ; "
            "expected one of the two, or both with the same parameters: remove what the model was "
            "not trained with"
        )
    inside, raw = ("rope_parameters", new) if new else ("rope_scaling", old)
    rope = Keys(keys.file, raw, inside)
    kind = rope.text("rope_type", None) or rope.text("type", None) or "default"
    if kind not in _ROPE_TYPES.values() or any(isinstance(v, dict) for v in raw.values()):
        raise UnsupportedModelError(
            f"{keys.file}: {inside} {shown(raw)} is not supported; expected one set of parameters "
            f"of one of the types {', '.join(_ROPE_TYPES.values())}"
        )
    for place in (rope, keys):
        if place.number("partial_rotary_factor", None) not in (None, 1.0):
            raise UnsupportedModelError(
                f"{keys.file}: partial_rotary_factor {place.raw['partial_rotary_factor']} is not "
                "supported; expected 1"
            )
    theta = rope.number("rope_theta", None)
    theta = keys.number("rope_theta", None) if theta is None else theta
    theta = _THETA if theta is None else theta
    if kind == "linear":
        return Rope(theta, LinearScaling(rope.number("factor")))
    name = "original_max_position_embeddings"
    original = rope.integer(name, None) or keys.integer(name, None) or max_position
    if kind == "llama3":
        factors = [rope.number(name) for name in ("factor", "low_freq_factor", "high_freq_factor")]
        if factors[2] <= factors[1]:
            raise rope.error("high_freq_factor", f"more than low_freq_factor, {factors[1]:g}")
        return Rope(theta, RopeScaling(*factors, original))
    if kind == "yarn":
        if theta <= 1:
            raise rope.error("rope_theta", "more than 1 for YaRN")
        return Rope(theta, _read_yarn(rope, original, max_position))
    return Rope(theta)


def _read_yarn(rope: Keys, original: int, max_position: int) -> YarnScaling:
    """Reads YaRN's parameters as transformers does."""
    factor = rope.number("factor", None)
    factor = max_position / original if factor is None else factor

    def growth(scale: float) -> float:
        """The factor of cosines and sines that follows from that of frequencies."""
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    magnitude = rope.number("attention_factor", None)
    if magnitude is None:
        scales = [rope.number(name, None, least=0.0) for name in ("mscale", "mscale_all_dim")]
        magnitude = growth(scales[0]) / growth(scales[1]) if all(scales) else growth(1.0)
    fast = rope.number("beta_fast", None, least=0.0) or 32.0
    slow = rope.number("beta_slow", None, least=0.0) or 1.0
    truncate = rope.flag("truncate", True)
    return YarnScaling(factor, original, magnitude, fast, slow, truncate)


def _plain_rope(keys: Keys, raw: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the parameters of one of the two keys in one form, for comparison.

    An old file has `type`, and its `rope_theta` beside the object.
    """
    given = {name: value for name, value in raw.items() if value is not None}
    kind = given.pop("type", "default")
    theta = keys.raw.get("rope_theta")
    defaults = {"rope_type": kind, "rope_theta": _THETA if theta is None else theta}
    return {**defaults, **given}


def rope_json(rope: Rope) -> dict[str, Any]:
    """Returns the keys of a rotary embedding, in both dialects."""
    scaling = None
    if rope.scaling is not None:
        fields = dataclasses.asdict(rope.scaling)
        scaling = {"rope_type": _ROPE_TYPES[type(rope.scaling)]}
        scaling |= {_ROPE_KEYS.get(name, name): value for name, value in fields.items()}
    parameters = {"rope_theta": rope.theta, **(scaling or {"rope_type": "default"})}
    return {
        "rope_parameters": parameters,
        "rope_theta": rope.theta,
        "rope_scaling": scaling,
    }


def layer_windows(
    keys: Keys, layers: int, window: int | None, first: int = 0
) -> tuple[int | None, ...]:
    """Returns the window of each layer, by `layer_types` where a file has them; None: no window.

    Args:
      keys: the keys of config.json.
      layers: number of layers.
      window: window of the layers that have one; None: no layer has one.
      first: number of the first layer that has a window, where the file has no `layer_types`; all
        later layers have it, too.

    Raises:
      UnsupportedModelError: a layer is of another kind.
    """
    kinds = keys.texts("layer_types")
    if not kinds:
        return (None,) * min(first, layers) + (window,) * max(layers - first, 0)
    if len(kinds) != layers:
        raise keys.error("layer_types", f"as many as num_hidden_layers, {layers}")
    if other := sorted(set(kinds) - {"full_attention", "sliding_attention"}):
        refuse(keys, [f"layer_types {', '.join(other)}"])
    if "sliding_attention" in kinds and window is None:
        raise keys.error("layer_types", "full_attention alone, for no sliding_window is in use")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def stored(cfg: ModelConfig, layer: Layer | None) -> dict[str, Place]:
    """Returns the places of arrays in files that their rows name: what most families use."""
    rows = top_rows(cfg) if layer is None else layer_rows(layer, cfg.hidden_size)
    return {name: row.stored for name, row in rows.items()}
