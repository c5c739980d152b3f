"""Keys of config.json that most families share, read and written, and names of tensors.

Two dialects are read: transformers 5 writes `rope_parameters`, files in the wild have `rope_theta`
and `rope_scaling`. What is written holds both.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from specjax.checked_json import Keys, UnsupportedModelError, shown
from specjax.interfaces import Stored, TensorSlice
from specjax.models.rope import LinearScaling, LongScaling, Rope, RopeScaling, YarnScaling
from specjax.weights import fp8, mxfp4

_THETA = 10_000.0  # of RoPE, the default
# How each rescaling of frequencies is named in files, and fields that are named otherwise there.
_ROPE_TYPES = {
    None: "default", LinearScaling: "linear", RopeScaling: "llama3", YarnScaling: "yarn",
    LongScaling: "longrope",
}  # fmt: skip
_ROPE_KEYS = {
    "original_max_position": "original_max_position_embeddings",
    "magnitude": "attention_factor",
    "short": "short_factor",
    "long": "long_factor",
}
MOST_LAYERS = 10_000  # a larger number in a file would exhaust the memory
LAYER_PREFIX = "model.layers.{}."
MTP_KEY = "num_nextn_predict_layers"  # the number of MTP modules
_MOE_KEYS = ("num_experts", "num_local_experts", "n_routed_experts")


def refuse(keys: Keys, problems: list[str]) -> None:
    """Raises `UnsupportedModelError` if there are problems, with all of them in the message."""
    if problems:
        raise UnsupportedModelError(
            f"{keys.file}: this {keys.text('model_type')} checkpoint needs what is not "
            f"implemented: {'; '.join(problems)}"
        )


def not_dense(keys: Keys, experts: Collection[str] = ()) -> list[str]:
    """Lists, as messages, what a config asks for beyond attention and dense layers.

    Args:
      experts: keys of the number of experts, of a family that has any.
    """
    problems = [
        f"{name} {keys.raw[name]} (mixture of experts)"
        for name in _MOE_KEYS
        if name not in experts and keys.integer(name, None, least=0)
    ]
    classes = keys.texts("architectures")
    if classes and not any(name.endswith("ForCausalLM") for name in classes):
        problems.append(f"architectures {', '.join(classes)} (expected a language model)")
    if keys.flag("mlp_bias", None):
        problems.append("mlp_bias true")
    for name in ("quantization_config", "compression_config"):
        method = keys.within(name)
        if method.raw.get("quant_method") != mxfp4.METHOD:
            problems += [f"{name}: {problem}" for problem in fp8.problems(method)]
    return problems


# Keys that change what is computed, by parts of their names, and keys that have such a part and
# change nothing at inference.
_COMPUTING = re.compile(
    "cap|scal|multipl|rope|rotary|window|chunk|sink|norm|bias|expert|moe|router|lora|latent|conv|ssm"
    "|mamba|linear|alibi|clip|qk_|kv_|attn|attention|residual|parallel|layer_types|temperature_tun"
    "|position_embed|_act$|activation|mup|gate|shared|mixer|recurrent|mlp|nope|swiglu|clamp"
    "|head_size|sandwich|neox|causal"
)
_INERT = re.compile(
    "^output_(attentions|hidden_states|router_logits)$|^use_cache$|kv_cache_|implementation|_version$"
    "|dropout|pdrop|initializer|aux_loss|max_window|(tensor|sequence|pipeline)_parallel|^_"
)
_USUALLY_TRUE = ("use_rope", "is_neox_style", "is_causal", "causal", "use_causal_mask")


def refuse_unread(keys: Keys, inert: Collection[str]) -> None:
    """Refuses a config with keys that change what is computed and were not read.

    Args:
      keys: the keys of config.json, after everything was read.
      inert: further keys that change nothing.

    Raises:
      UnsupportedModelError: there are such keys; the message names them.
    """

    def is_neutral(name: str, value: Any) -> bool:
        if name in _USUALLY_TRUE:
            return value in (None, True)
        is_one = value == 1 and not isinstance(value, bool)
        factor = is_one and re.search("scal|multipl|factor|parallel", name) is not None
        return factor or value in (None, False, 0, "", [], {})

    if keys.raw.get("use_sliding_window") is False:
        inert = {*inert, "sliding_window"}
    unread = [
        f"{name} {shown(value)}"
        for name, value in keys.raw.items()
        if name not in keys.asked and name not in inert and not is_neutral(name, value)
        if _COMPUTING.search(name) and not _INERT.search(name)
    ]
    refuse(keys, unread)


def read_heads(keys: Keys, has_size: bool) -> tuple[int, ...]:
    """Reads the numbers of query heads and of key and value heads, and the size of a head.

    Args:
      has_size: whether files say the size of a head, or the width is divided among the heads where
        they do not.
    """
    heads, hidden = keys.integer("num_attention_heads"), keys.integer("hidden_size")
    kv_heads = keys.integer("num_key_value_heads", None) or heads
    if heads % kv_heads:
        raise keys.error(
            "num_key_value_heads", f"a divisor of num_attention_heads, which is {heads}"
        )
    head_dim = keys.integer("head_dim") if has_size else keys.integer("head_dim", None)
    if head_dim is None:
        if hidden % heads:
            raise keys.error(
                "hidden_size", f"a multiple of num_attention_heads, which is {heads}, or a head_dim"
            )
        head_dim = hidden // heads
    if head_dim % 2:
        raise keys.error("head_dim", f"an even number, for RoPE turns pairs ({head_dim} here)")
    return heads, kv_heads, head_dim


def read_rope(keys: Keys, max_position: int, partial: bool = False) -> Rope:
    """Reads the rotary embedding of all layers.

    Args:
      partial: whether the family may rotate a part of each head.

    Raises:
      UnsupportedModelError: its type is not implemented, or the file gives two that differ.
    """
    new, old = _rope_objects(keys)
    places = {"rope_parameters": new, "rope_scaling": old}
    given = {name: raw for name, raw in places.items() if raw} or {"rope_parameters": {}}
    return _agreed(keys, given, max_position, partial)


def _agreed(
    keys: Keys, places: Mapping[str, Mapping[str, Any]], max_position: int, partial: bool
) -> Rope:
    """Reads the rotary embedding that each of these objects of a config describes alike."""
    ropes = {
        _rope_of(keys, Keys(keys.file, raw, name), max_position, partial)
        for name, raw in places.items()
    }
    if len(ropes) > 1:  # transformers lets `rope_scaling` replace the other, other readers do not
        got = " and ".join(f"{name} {shown(raw)}" for name, raw in places.items())
        raise UnsupportedModelError(
            f"{keys.file}: {got} differ; expected one of the two, or both with the same "
            "parameters: remove what the model was not trained with"
        )
    return ropes.pop()


def read_ropes(keys: Keys, max_position: int, thetas: Mapping[str, str]) -> dict[str, Rope]:
    """Reads a rotary embedding for each type of layer.

    Args:
      thetas: for each type of layer the key that holds the base where `rope_parameters` do not say
        it; the last type is the one that `rope_scaling` of old files is about.

    Raises:
      UnsupportedModelError: a type is not implemented, or `rope_parameters` are not by layer type.
    """
    new, old = _rope_objects(keys)
    if not {*new} <= {*thetas}:
        raise UnsupportedModelError(
            f"{keys.file}: rope_parameters {shown(new)}: expected those of the layer types "
            f"{', '.join(thetas)}"
        )
    found = {}
    for kind, name in thetas.items():
        theta, label = {"rope_theta": keys.number(name, _THETA)}, f"rope_parameters.{kind}"
        places = {label: new.get(kind), "rope_scaling": old if kind == [*thetas][-1] else None}
        given = {place: theta | raw for place, raw in places.items() if raw} or {label: theta}
        found[kind] = _agreed(keys, given, max_position, partial=False)
    return found


def _rope_objects(keys: Keys) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Returns `rope_parameters` and `rope_scaling`; what is beside them is read if they lack it."""
    keys.asked |= {"rope_theta", "partial_rotary_factor", "original_max_position_embeddings"}
    return keys.within("rope_parameters").raw, keys.within("rope_scaling").raw


def _rope_of(keys: Keys, rope: Keys, max_position: int, partial: bool) -> Rope:
    """Reads one rotary embedding from its own object `rope` in a config."""
    kind = rope.text("rope_type", None) or rope.text("type", None) or "default"
    kind = "longrope" if kind == "su" else kind
    if kind not in _ROPE_TYPES.values() or any(isinstance(v, dict) for v in rope.raw.values()):
        changes = (
            " (it changes with the current length, and equal seeds would not give equal tokens)"
        )
        raise UnsupportedModelError(
            f"{keys.file}: {rope.inside} {shown(rope.raw)} is not supported"
            f"{changes if kind == 'dynamic' else ''}; expected one set of parameters of one of the "
            f"types {', '.join(_ROPE_TYPES.values())}"
        )
    shares = (place.number("partial_rotary_factor", None) for place in (rope, keys))
    share = next((share for share in shares if share is not None), 1.0)
    if share > 1 or (share != 1 and not partial):
        raise UnsupportedModelError(
            f"{keys.file}: partial_rotary_factor {share} is not supported; expected 1"
        )
    theta = rope.number("rope_theta", None)
    theta = keys.number("rope_theta", None) if theta is None else theta
    theta = _THETA if theta is None else theta
    return Rope(theta, _scaling_of(keys, rope, kind, theta, max_position), share)


def _scaling_of(keys: Keys, rope: Keys, kind: str, theta: float, max_position: int) -> Any:
    """Reads how frequencies are rescaled; None: not at all."""
    if kind == "linear":
        return LinearScaling(rope.number("factor"))
    name = "original_max_position_embeddings"
    original = keys.integer(name, None)
    if kind != "longrope" or original is None:
        original = rope.integer(name, None) or original or max_position
    if kind == "llama3":
        factors = [rope.number(name) for name in ("factor", "low_freq_factor", "high_freq_factor")]
        if factors[2] <= factors[1]:
            raise rope.error("high_freq_factor", f"more than low_freq_factor, {factors[1]:g}")
        return RopeScaling(*factors, original)
    if kind == "yarn":
        if theta <= 1:
            raise rope.error("rope_theta", "more than 1 for YaRN")
        return _read_yarn(rope, original, max_position)
    if kind == "longrope":
        factor = rope.number("factor", None) or max_position / original
        magnitude = rope.number("attention_factor", None)
        if magnitude is None:
            magnitude = long_magnitude(factor, original)
        short, long = (tuple(map(float, rope.numbers(f"{x}_factor"))) for x in ("short", "long"))
        if not 0 < len(short) == len(long):
            raise rope.error("short_factor", "as many factors as long_factor has, one or more")
        return LongScaling(short, long, original, magnitude, max_position)
    return None


def long_magnitude(factor: float, original: int) -> float:
    """Returns LongRoPE's factor of cosines and sines where a file does not say it."""
    return math.sqrt(1 + math.log(max(factor, 1.0)) / math.log(original))


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


def rope_json(rope: Rope) -> dict[str, Any]:
    """Returns the keys of a rotary embedding, in both dialects."""
    scaling = None
    if rope.scaling is not None:
        fields = dataclasses.asdict(rope.scaling)
        scaling = {"rope_type": _ROPE_TYPES[type(rope.scaling)]}
        scaling |= {
            _ROPE_KEYS.get(name, name): list(value) if isinstance(value, tuple) else value
            for name, value in fields.items()
            if name != "longest"
        }
    share = {} if rope.share == 1 else {"partial_rotary_factor": rope.share}
    scaling = scaling and {**scaling, **share}
    parameters = {"rope_theta": rope.theta, **(scaling or {"rope_type": "default", **share})}
    return {
        "rope_parameters": parameters,
        "rope_theta": rope.theta,
        "rope_scaling": scaling,
    }


def window_kind(window: int | None) -> str:
    """Returns the type of a layer, as `layer_types` name it."""
    return "full_attention" if window is None else "sliding_attention"


def layer_windows(
    keys: Keys,
    layers: int,
    window: int | None,
    first: int = 0,
    kinds: Sequence[str] = (),
) -> tuple[int | None, ...]:
    """Returns the window of each layer, by `layer_types` where a file has them; None: no window.

    Args:
      keys: the keys of config.json.
      layers: number of layers.
      window: window of the layers that have one; None: no layer has one.
      first: number of the first layer that has a window, where the file has no `layer_types`; all
        later layers have it, too.
      kinds: the type of each layer where the file has no `layer_types`, instead of `first`.

    Raises:
      UnsupportedModelError: a layer is of another kind.
    """
    kinds = keys.texts("layer_types") or kinds
    if not kinds:
        return (None,) * min(first, layers) + (window,) * max(layers - first, 0)
    if len(kinds) != layers:
        raise keys.error("layer_types", f"as many as num_hidden_layers, {layers}")
    if other := sorted(set(kinds) - {"full_attention", "sliding_attention"}):
        refuse(keys, [f"layer_types {', '.join(other)}"])
    if "sliding_attention" in kinds and window is None:
        raise keys.error("layer_types", "full_attention alone, for no sliding_window is in use")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def parts_of(
    name: str, prefix: str, sizes: Mapping[str, int], groups: int = 1, transpose: bool = False
) -> dict[str, Stored]:
    """Returns the places of arrays that stand one after the other in a tensor, or in its groups."""
    if len(sizes) == 1:
        return {prefix + array: Stored(name, transpose) for array in sizes}
    places, start, whole = {}, 0, sum(sizes.values())
    for array, size in sizes.items():
        stop = start + size // groups
        part = TensorSlice(axis=0, start=start, stop=stop, size=whole, groups=groups)
        places[prefix + array], start = Stored(name, transpose, part), stop
    return places
