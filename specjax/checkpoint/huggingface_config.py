"""Hugging Face `config.json` to `ModelConfig` and back.

Two dialects are read: transformers 5 writes `rope_parameters` and `dtype`, files in the wild have
`rope_theta`, `rope_scaling` and `torch_dtype`. What is written holds both. Whatever a config asks
for that the transformer here does not compute is an error: a checkpoint is never run as something
slightly different from what it is.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp

from specjax.checked_json import Keys, UnsupportedModelError, shown
from specjax.config import ModelConfig, RunConfig
from specjax.config.dtype import DTYPES
from specjax.models.families.dense import dense_config
from specjax.models.generation_config import sampling_of
from specjax.models.rope import Rope, RopeScaling
from specjax.weights import AUTO, open_checkpoint
from specjax.weights.safetensors import CONFIG, GENERATION

MTP_KEY = "specjax_mtp"
MTP_COUNT_KEY = "num_nextn_predict_layers"


class Family(NamedTuple):
    """What a `model_type` fixes.

    Attributes:
      architecture: the class name in `architectures`.
      qkv_bias: None when `attention_bias` decides.
      concat: order of the MTP head's input in checkpoints of this family.
    """

    architecture: str
    qkv_bias: bool | None
    qk_norm: bool
    concat: str = "embedding_first"


FAMILIES = {
    "llama": Family("LlamaForCausalLM", None, False),
    "qwen2": Family("Qwen2ForCausalLM", True, False),
    "qwen3": Family("Qwen3ForCausalLM", None, True),
    "mimo": Family("MiMoForCausalLM", True, False, "hidden_first"),
}
_STORED = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_LARGEST_HEADER = 100_000_000  # bytes, as safetensors itself limits it
_THETA = 10_000.0  # of RoPE, where a file does not say
_MOST_LAYERS = 10_000  # each has a name in the files: a larger number would exhaust the memory
_MOE_KEYS = ("num_experts", "num_local_experts", "n_routed_experts")


def dtype_name(dtype) -> str:
    """The name of a parameter dtype, given as anything jax takes for one."""
    name = jnp.dtype(dtype).name
    if name not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {name!r}")
    return name


def read_config(path: str | Path, load_format: str = AUTO) -> ModelConfig:
    """The `ModelConfig` of a checkpoint, see `specjax.weights.open_checkpoint`.

    Parameter and compute dtype are both the file's `dtype`, or where it names none that of its
    weights. End-of-sequence ids are those of config.json followed by those that only
    generation_config.json lists.

    Raises:
      CheckpointError: a file is absent or damaged, lacks a key, or a key holds what cannot be
        meant; one line that names file and key.
      UnsupportedModelError: an unknown family, or a feature that is not implemented.
    """
    reader = open_checkpoint(path, load_format)
    return config_of(reader.file, reader.config(), reader.generation())


def config_of(file: Path, raw: dict[str, Any], generation: Mapping[str, Any]) -> ModelConfig:
    """The `ModelConfig` that the contents of config.json and generation_config.json mean.

    Args:
      file: config.json or what stands for it, for messages; the other lies beside it.

    Raises:
      CheckpointError, UnsupportedModelError: see `read_config`.
    """
    keys, beside = Keys(file, raw), file
    if file.name == CONFIG:
        beside = file.with_name(GENERATION)
    name = keys.text("model_type", None)
    family = FAMILIES.get(name)
    if family is None:
        raise UnsupportedModelError(
            f"{keys.file}: model_type {name!r:.60} is not supported; expected one of "
            f"{', '.join(FAMILIES)}"
        )
    sizes = _sizes(keys, name)
    _refuse_unsupported(keys, name, sizes["num_layers"])
    dtype = _dtype(keys) or _stored_dtype(file.parent) or "float32"
    return dense_config(
        **sizes,
        **_rope(keys, sizes["max_position"]),
        **_tokens(keys, Keys(beside, generation), sizes["vocab_size"]),
        generation=sampling_of(beside, generation),
        **_mtp(keys, family),
        model_type=name,
        rms_norm_eps=keys.number("rms_norm_eps", 1e-6, least=0.0),
        tie_embeddings=keys.flag("tie_word_embeddings"),
        qkv_bias=keys.flag("attention_bias") if family.qkv_bias is None else family.qkv_bias,
        qk_norm=family.qk_norm,
        run=RunConfig(param_dtype=dtype, compute_dtype=dtype),
    )


def _sizes(keys: Keys, model_type: str) -> dict[str, int]:
    heads = keys.integer("num_attention_heads")
    hidden = keys.integer("hidden_size")
    kv_heads = keys.integer("num_key_value_heads", None) or heads
    if heads % kv_heads:
        raise keys.error(
            "num_key_value_heads", f"a divisor of num_attention_heads, which is {heads}"
        )
    # As transformers: Qwen3 has a size of its own and refuses null, the others divide the width.
    head_dim = keys.integer("head_dim", *((128,) if model_type == "qwen3" else (None,)))
    if head_dim is None:
        if hidden % heads:
            raise keys.error(
                "hidden_size", f"a multiple of num_attention_heads, which is {heads}, or a head_dim"
            )
        head_dim = hidden // heads
    if head_dim % 2:
        raise keys.error("head_dim", f"an even number, for RoPE turns pairs ({head_dim} here)")
    return {
        "vocab_size": keys.integer("vocab_size"),
        "hidden_size": hidden,
        "intermediate_size": keys.integer("intermediate_size"),
        "num_layers": keys.integer("num_hidden_layers", most=_MOST_LAYERS),
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": head_dim,
        "max_position": keys.integer("max_position_embeddings"),
    }


def _rope(keys: Keys, max_position: int) -> dict[str, Any]:
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
    if kind not in ("default", "llama3") or any(isinstance(v, dict) for v in raw.values()):
        raise UnsupportedModelError(
            f"{keys.file}: {inside} {shown(raw)} is not supported; expected one set of parameters "
            "of type 'default' or 'llama3'"
        )
    for place in (rope, keys):
        if place.number("partial_rotary_factor", None) not in (None, 1.0):
            raise UnsupportedModelError(
                f"{keys.file}: partial_rotary_factor {place.raw['partial_rotary_factor']} is not "
                "supported; expected 1"
            )
    scaling = None
    if kind == "llama3":
        factors = [rope.number(name) for name in ("factor", "low_freq_factor", "high_freq_factor")]
        if factors[2] <= factors[1]:
            raise rope.error("high_freq_factor", f"more than low_freq_factor, {factors[1]:g}")
        name = "original_max_position_embeddings"
        original = rope.integer(name, None) or keys.integer(name, None)
        scaling = RopeScaling(*factors, original or max_position)
    theta = rope.number("rope_theta", None)
    theta = keys.number("rope_theta", None) if theta is None else theta
    return {"rope_theta": _THETA if theta is None else theta, "rope_scaling": scaling}


def _plain_rope(keys: Keys, raw: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters of one of the two keys with what the file says of them elsewhere, for comparison:
    an old file has `type`, and its `rope_theta` lies beside the object."""
    given = {name: value for name, value in raw.items() if value is not None}
    kind = given.pop("type", "default")
    theta = keys.raw.get("rope_theta")
    defaults = {"rope_type": kind, "rope_theta": _THETA if theta is None else theta}
    return {**defaults, **given}


def _tokens(keys: Keys, generation: Keys, vocabulary: int) -> dict[str, Any]:
    def ids(name: str) -> list[int]:
        several = name == "eos_token_id"
        return [
            token
            for place in (keys, generation)
            for token in place.token_ids(name, vocabulary, several)
        ]

    return {
        "eos_token_ids": tuple(dict.fromkeys(ids("eos_token_id"))),
        "bos_token_id": next(iter(ids("bos_token_id")), None),
        "pad_token_id": next(iter(ids("pad_token_id")), None),
    }


def _mtp(keys: Keys, family: Family) -> dict[str, Any]:
    own = keys.within(MTP_KEY)
    states = ("post_norm", "pre_norm")
    return {
        "mtp_num_layers": keys.integer(MTP_COUNT_KEY, None, least=0, most=_MOST_LAYERS) or 0,
        "mtp_concat": own.text("concat", family.concat, ("embedding_first", "hidden_first")),
        "mtp_target_hidden": own.text("target_hidden", "post_norm", states),
        "mtp_recycle": own.text("recycle", "post_norm", states),
    }


def _dtype(keys: Keys) -> str | None:
    """The dtype that config.json names, in either dialect."""
    for name in ("dtype", "torch_dtype"):
        asked = keys.text(name, None)
        if asked is not None:
            asked = asked.removeprefix("torch.")
            if asked not in DTYPES:
                raise UnsupportedModelError(
                    f"{keys.file}: {name} {shown(asked)} is not supported; expected one of "
                    f"{', '.join(DTYPES)}"
                )
            return asked
    return None


def _stored_dtype(path: Path) -> str | None:
    """The dtype of the first weight of floating type, as transformers infers what is not said."""
    for file in sorted(path.glob("model*.safetensors")):
        try:
            with file.open("rb") as stream:
                size = int.from_bytes(stream.read(8), "little")
                header = json.loads(stream.read(min(size, _LARGEST_HEADER)))
            kinds = [tensor.get("dtype") for name, tensor in sorted(header.items())]
        except (OSError, ValueError, AttributeError, RecursionError):
            return None  # whoever reads the weights says what is wrong with the file
        for kind in kinds:
            if kind in _STORED:
                return _STORED[kind]
    return None


def _refuse_unsupported(keys: Keys, model_type: str, layers: int) -> None:
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
    problems += _sliding(keys, layers)
    if problems:
        raise UnsupportedModelError(
            f"{keys.file}: this {model_type} checkpoint needs what is not implemented: "
            + "; ".join(problems)
        )


def _sliding(keys: Keys, layers: int) -> list[str]:
    """Layers that slide; most Qwen2 configs name a window and then do not use it."""
    kinds = keys.texts("layer_types")
    used = keys.flag("use_sliding_window", None)
    window = keys.integer("sliding_window", None, least=0)
    full = keys.integer("max_window_layers", None, least=0)
    if kinds:
        if len(kinds) != layers:
            raise keys.error("layer_types", f"as many as num_hidden_layers, {layers}")
        other = sorted({kind for kind in kinds if kind != "full_attention"})
        return [f"layer_types {', '.join(other)} (sliding_window {window})"] if other else []
    if not used or window is None or (28 if full is None else full) >= layers:
        return []
    return [f"a sliding window of {window} in use"]


# --- writing ------------------------------------------------------------------------------------


def config_json(cfg: ModelConfig, with_head: bool, dtype: str) -> dict[str, Any]:
    """What config.json says about `cfg`, in both dialects.

    Raises:
      UnsupportedModelError: the family cannot express the config (for example Qwen2 without
        biases).
    """
    family = FAMILIES.get(cfg.model_type)
    if family is None:
        raise UnsupportedModelError(
            f"model_type {cfg.model_type!r} cannot be written; expected one of "
            f"{', '.join(FAMILIES)}"
        )
    if len(set(cfg.layers)) != 1:
        raise UnsupportedModelError(
            f"model_type {cfg.model_type!r} has layers that are all alike, got "
            f"{len(set(cfg.layers))} kinds; set a model_type that fits"
        )
    mixer, mlp = cfg.layers[0].mixer, cfg.layers[0].mlp
    if (mixer.kind, mlp.kind) != ("attention", "dense") or mixer.window is not None:
        raise UnsupportedModelError(
            f"model_type {cfg.model_type!r} has layers of attention to all positions and a dense "
            f"mlp, got {mixer} and {mlp}; set a model_type that fits"
        )
    if family.qk_norm != mixer.qk_norm or family.qkv_bias not in (None, mixer.qkv_bias):
        raise UnsupportedModelError(
            f"model_type {cfg.model_type!r} has qk_norm {family.qk_norm} and qkv_bias "
            f"{'free' if family.qkv_bias is None else family.qkv_bias}, got qk_norm "
            f"{mixer.qk_norm} and qkv_bias {mixer.qkv_bias}; set a model_type that fits"
        )
    eos = list(cfg.eos_token_ids)
    out = {
        "architectures": [family.architecture],
        "model_type": cfg.model_type,
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
        "bos_token_id": cfg.bos_token_id,
        "eos_token_id": eos[0] if len(eos) == 1 else eos or None,
        "pad_token_id": cfg.pad_token_id,
        "dtype": dtype,
        "torch_dtype": dtype,
    }
    if cfg.model_type != "llama":
        out["use_sliding_window"] = False
    out |= _rope_json(mixer.rope)
    if with_head:
        out[MTP_COUNT_KEY] = cfg.mtp_num_layers
        concat = family.concat if cfg.model_type == "mimo" else cfg.mtp_concat
        out[MTP_KEY] = {**mtp_json(cfg), "concat": concat}  # as it lies on disk
    return out


def mtp_json(cfg: ModelConfig) -> dict[str, str]:
    """The head's switches that no public config format has a key for."""
    return {
        "concat": cfg.mtp_concat,
        "target_hidden": cfg.mtp_target_hidden,
        "recycle": cfg.mtp_recycle,
    }


def _rope_json(rope: Rope) -> dict[str, Any]:
    scaling = None
    if rope.scaling is not None:
        scaling = {
            "rope_type": "llama3",
            "factor": rope.scaling.factor,
            "low_freq_factor": rope.scaling.low_freq_factor,
            "high_freq_factor": rope.scaling.high_freq_factor,
            "original_max_position_embeddings": rope.scaling.original_max_position,
        }
    parameters = {"rope_theta": rope.theta, **(scaling or {"rope_type": "default"})}
    return {
        "rope_parameters": parameters,
        "rope_theta": rope.theta,
        "rope_scaling": scaling,
    }


def generation_json(cfg: ModelConfig) -> dict[str, Any]:
    """What generation_config.json says: the ids that begin, end and pad a text, and how to sample
    one."""
    eos = list(cfg.eos_token_ids)
    ids = {
        "bos_token_id": cfg.bos_token_id,
        "eos_token_id": eos[0] if len(eos) == 1 else eos or None,
        "pad_token_id": cfg.pad_token_id,
    }
    return {k: v for k, v in ids.items() if v is not None} | dict(cfg.generation)
