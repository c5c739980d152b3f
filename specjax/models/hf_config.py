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

from specjax.checkpoint_format import CheckpointError
from specjax.config import ModelConfig, RopeScaling

DTYPES = ("float32", "bfloat16", "float16")
MTP_KEY = "specjax_mtp"
MTP_COUNT_KEY = "num_nextn_predict_layers"


class UnsupportedModelError(ValueError):
    """The checkpoint is of a family, or uses a feature, that is not implemented."""


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
_MOE_KEYS = ("num_experts", "num_local_experts", "n_routed_experts")


def dtype_name(dtype) -> str:
    """The name of a parameter dtype, given as anything jax takes for one."""
    name = jnp.dtype(dtype).name
    if name not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {name!r}")
    return name


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; `CheckpointError` when it is absent or damaged."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(
            f"{path} does not exist; expected a Hugging Face checkpoint directory with "
            "config.json and safetensors files"
        ) from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON ({error}); fetch it again") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: expected a JSON object, got {type(value).__name__}")
    return value


def read_config(path: str | Path) -> ModelConfig:
    """The `ModelConfig` of a checkpoint directory.

    Parameter and compute dtype are both the file's `dtype`. End-of-sequence ids are those of
    config.json followed by those that only generation_config.json lists.

    Raises:
      CheckpointError: config.json is absent, damaged, or lacks a key.
      UnsupportedModelError: an unknown family, or a feature that is not implemented.
    """
    path = Path(path)
    raw = read_json(path / "config.json")
    generation = {}
    if (path / "generation_config.json").exists():
        generation = read_json(path / "generation_config.json")
    return config_of(path, raw, generation)


def config_of(path: Path, raw: dict[str, Any], generation: Mapping[str, Any]) -> ModelConfig:
    """The `ModelConfig` that the contents of config.json and generation_config.json mean.

    Args:
      path: where they lie, for messages.

    Raises:
      CheckpointError, UnsupportedModelError: see `read_config`.
    """
    family = FAMILIES.get(raw.get("model_type"))
    if family is None:
        raise UnsupportedModelError(
            f"{path}: model_type {raw.get('model_type')!r} is not supported; expected one of "
            f"{', '.join(FAMILIES)}"
        )
    _refuse_unsupported(path, raw)
    try:
        return ModelConfig(
            **_sizes(raw),
            **_rope(path, raw),
            **_tokens(raw, generation),
            **_mtp(raw, family),
            model_type=raw["model_type"],
            rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
            tie_embeddings=bool(raw.get("tie_word_embeddings", False)),
            qkv_bias=bool(raw.get("attention_bias", False))
            if family.qkv_bias is None
            else family.qkv_bias,
            qk_norm=family.qk_norm,
            **_dtypes(path, raw),
        )
    except KeyError as error:
        raise CheckpointError(f"{path / 'config.json'} lacks the key {error}") from error


def _sizes(raw: dict) -> dict:
    heads = raw["num_attention_heads"]
    head_dim = raw.get("head_dim") or (
        128 if raw["model_type"] == "qwen3" else raw["hidden_size"] // heads
    )
    return {
        "vocab_size": raw["vocab_size"],
        "hidden_size": raw["hidden_size"],
        "intermediate_size": raw["intermediate_size"],
        "num_layers": raw["num_hidden_layers"],
        "num_heads": heads,
        "num_kv_heads": raw.get("num_key_value_heads") or heads,
        "head_dim": head_dim,
        "max_position": raw["max_position_embeddings"],
    }


def _rope(path: Path, raw: dict) -> dict:
    rope = {"rope_theta": raw.get("rope_theta"), **(raw.get("rope_scaling") or {})}
    rope |= raw.get("rope_parameters") or {}
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind not in ("default", "llama3") or any(isinstance(v, dict) for v in rope.values()):
        raise UnsupportedModelError(
            f"{path}: RoPE {rope} is not supported; expected one set of parameters of type "
            "'default' or 'llama3'"
        )
    if rope.get("partial_rotary_factor", raw.get("partial_rotary_factor")) not in (None, 1, 1.0):
        raise UnsupportedModelError(f"{path}: partial_rotary_factor must be 1, got RoPE {rope}")
    scaling = None
    if kind == "llama3":
        original = rope.get("original_max_position_embeddings") or raw.get(
            "original_max_position_embeddings"
        )
        scaling = RopeScaling(
            float(rope["factor"]),
            float(rope["low_freq_factor"]),
            float(rope["high_freq_factor"]),
            int(original or raw["max_position_embeddings"]),
        )
    theta = rope.get("rope_theta")
    return {"rope_theta": 10_000.0 if theta is None else float(theta), "rope_scaling": scaling}


def _ids(value: int | list[int] | None) -> list[int]:
    if value is None:
        return []
    return [int(v) for v in value] if isinstance(value, list) else [int(value)]


def _tokens(raw: dict, generation: Mapping) -> dict:
    eos = _ids(raw.get("eos_token_id")) + _ids(generation.get("eos_token_id"))

    def first(key):
        ids = _ids(raw.get(key)) + _ids(generation.get(key))
        return ids[0] if ids else None

    return {
        "eos_token_ids": tuple(dict.fromkeys(eos)),
        "bos_token_id": first("bos_token_id"),
        "pad_token_id": first("pad_token_id"),
    }


def _mtp(raw: dict, family: Family) -> dict:
    own = raw.get(MTP_KEY) or {}
    return {
        "mtp_num_layers": int(raw.get(MTP_COUNT_KEY) or 0),
        "mtp_concat": own.get("concat", family.concat),
        "mtp_target_hidden": own.get("target_hidden", "post_norm"),
        "mtp_recycle": own.get("recycle", "post_norm"),
    }


def _dtypes(path: Path, raw: dict) -> dict:
    name = str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch.")
    if name not in DTYPES:
        raise UnsupportedModelError(f"{path}: dtype {name!r} must be one of {', '.join(DTYPES)}")
    return {"param_dtype": name, "compute_dtype": name}


def _refuse_unsupported(path: Path, raw: dict) -> None:
    problems = [f"{key} {raw[key]} (mixture of experts)" for key in _MOE_KEYS if raw.get(key)]
    if raw.get("hidden_act", "silu") != "silu":
        problems.append(f"hidden_act {raw['hidden_act']!r} (expected 'silu')")
    if raw.get("mlp_bias"):
        problems.append("mlp_bias true")
    if raw.get("quantization_config"):
        problems.append("quantization_config (expected unquantised weights)")
    if _sliding_layers(raw):
        problems.append(f"a sliding window of {raw.get('sliding_window')} in use")
    if problems:
        raise UnsupportedModelError(
            f"{path}: this {raw['model_type']} checkpoint needs what is not implemented: "
            + "; ".join(problems)
        )


def _sliding_layers(raw: dict) -> bool:
    """Whether any layer slides; most Qwen2 configs name a window and then do not use it."""
    if raw.get("layer_types"):
        return any(kind != "full_attention" for kind in raw["layer_types"])
    if not raw.get("use_sliding_window", False) or not raw.get("sliding_window"):
        return False
    return raw.get("max_window_layers", 28) < raw.get("num_hidden_layers", 0)


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
    if family.qk_norm != cfg.qk_norm or family.qkv_bias not in (None, cfg.qkv_bias):
        raise UnsupportedModelError(
            f"model_type {cfg.model_type!r} has qk_norm {family.qk_norm} and qkv_bias "
            f"{'free' if family.qkv_bias is None else family.qkv_bias}, got qk_norm {cfg.qk_norm} "
            f"and qkv_bias {cfg.qkv_bias}; set a model_type that fits"
        )
    eos = list(cfg.eos_token_ids)
    out = {
        "architectures": [family.architecture],
        "model_type": cfg.model_type,
        "vocab_size": cfg.vocab_size,
        "hidden_size": cfg.hidden_size,
        "intermediate_size": cfg.intermediate_size,
        "num_hidden_layers": cfg.num_layers,
        "num_attention_heads": cfg.num_heads,
        "num_key_value_heads": cfg.num_kv_heads,
        "head_dim": cfg.head_dim,
        "hidden_act": "silu",
        "attention_bias": cfg.qkv_bias,
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
    out |= _rope_json(cfg)
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


def _rope_json(cfg: ModelConfig) -> dict[str, Any]:
    scaling = None
    if cfg.rope_scaling is not None:
        scaling = {
            "rope_type": "llama3",
            "factor": cfg.rope_scaling.factor,
            "low_freq_factor": cfg.rope_scaling.low_freq_factor,
            "high_freq_factor": cfg.rope_scaling.high_freq_factor,
            "original_max_position_embeddings": cfg.rope_scaling.original_max_position,
        }
    parameters = {"rope_theta": cfg.rope_theta, **(scaling or {"rope_type": "default"})}
    return {
        "rope_parameters": parameters,
        "rope_theta": cfg.rope_theta,
        "rope_scaling": scaling,
    }


def generation_json(cfg: ModelConfig) -> dict[str, Any]:
    """What generation_config.json says: the ids that begin, end and pad a text."""
    eos = list(cfg.eos_token_ids)
    ids = {
        "bos_token_id": cfg.bos_token_id,
        "eos_token_id": eos[0] if len(eos) == 1 else eos or None,
        "pad_token_id": cfg.pad_token_id,
    }
    return {k: v for k, v in ids.items() if v is not None}
