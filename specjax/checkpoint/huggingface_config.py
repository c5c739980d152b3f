"""Hugging Face `config.json` to `ModelConfig` and back: what all families have in common.

The layers are the family's, see `specjax.models.families`. Two dialects are read: transformers 5
writes `dtype`, files in the wild have `torch_dtype`. What is written holds both. Whatever a config
asks for that the transformer here does not compute is an error: a checkpoint is never run as
something slightly different from what it is.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from specjax.checked_json import Keys, UnsupportedModelError, shown
from specjax.checkpoint.huggingface_names import order_of
from specjax.config import ModelConfig, RunConfig
from specjax.config.dtype import DTYPES
from specjax.models.families import common, family_of
from specjax.models.generation_config import sampling_of
from specjax.weights import AUTO, open_checkpoint
from specjax.weights.safetensors import CONFIG, GENERATION

MTP_KEY = "specjax_mtp"
MTP_COUNT_KEY = "num_nextn_predict_layers"
_STORED = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_LARGEST_HEADER = 100_000_000  # bytes, as safetensors itself limits it


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
    family = family_of(raw.get("model_type"), keys.file)
    cfg = family.read(keys)
    dtype = _dtype(keys) or _stored_dtype(file.parent) or "float32"
    return cfg.replace(
        **_tokens(keys, Keys(beside, generation), cfg.vocab_size),
        **_mtp(keys, order_of(family) or cfg.mtp_concat),
        generation=sampling_of(beside, generation),
        run=RunConfig(param_dtype=dtype, compute_dtype=dtype),
    )


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


def _mtp(keys: Keys, concat: str) -> dict[str, Any]:
    own = keys.within(MTP_KEY)
    states = ("post_norm", "pre_norm")
    return {
        "mtp_num_layers": keys.integer(MTP_COUNT_KEY, None, least=0, most=common.MOST_LAYERS) or 0,
        "mtp_concat": own.text("concat", concat, ("embedding_first", "hidden_first")),
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


# --- writing ------------------------------------------------------------------------------------


def config_json(cfg: ModelConfig, with_head: bool, dtype: str) -> dict[str, Any]:
    """What config.json says about `cfg`, in both dialects.

    Raises:
      UnsupportedModelError: the family cannot express the config (for example Qwen2 without
        biases).
    """
    family = family_of(cfg.model_type)
    eos = list(cfg.eos_token_ids)
    out = {
        "architectures": [family.architecture],
        "model_type": cfg.model_type,
        **family.write(cfg),
        "bos_token_id": cfg.bos_token_id,
        "eos_token_id": eos[0] if len(eos) == 1 else eos or None,
        "pad_token_id": cfg.pad_token_id,
        "dtype": dtype,
        "torch_dtype": dtype,
    }
    if with_head:
        out[MTP_COUNT_KEY] = cfg.mtp_num_layers
        concat = order_of(family) or cfg.mtp_concat
        out[MTP_KEY] = {**mtp_json(cfg), "concat": concat}  # as it lies on disk
    return out


def mtp_json(cfg: ModelConfig) -> dict[str, str]:
    """The head's switches that no public config format has a key for."""
    return {
        "concat": cfg.mtp_concat,
        "target_hidden": cfg.mtp_target_hidden,
        "recycle": cfg.mtp_recycle,
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
