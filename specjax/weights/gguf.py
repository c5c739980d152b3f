"""Checkpoints in GGUF, the format of llama.cpp: the equivalent of config.json, and the weights.

    general.architecture   model_type here
    llama, qwen2, qwen3    the same

The model is the one that llama.cpp runs: weights have the values that it uses, and an absent key
has the default that it has there. The package `gguf` dequantises tensors when they are read. The
rows of `q` and `k`, which llama.cpp stores in the order of its own RoPE for the architecture
`llama`, are put back into the order of Hugging Face. A key or a tensor that no family here supports
is refused: by the family where config.json has a key for it, and here otherwise.
"""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from specjax.checked_json import CheckpointError, Keys, UnsupportedModelError, shown
from specjax.tokenizer import load_tokenizer
from specjax.weights.gguf_file import GGUFFile
from specjax.weights.gguf_tokenizer import end_names, tokenizer_of

SUFFIX = ".gguf"
ARCHITECTURES = ("llama", "qwen2", "qwen3")
_PERMUTED = ("llama",)  # architectures whose rows of q and k are in llama.cpp's order
_FACTORED = ("llama",)  # architectures that may have `_ROPE_FACTORS`

_TOP = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_NO_TOKENIZER = "no_vocab"  # `tokenizer.ggml.model` of a file without a tokenizer
_ROPE_FACTORS = "rope_freqs.weight"
# Keys below the architecture's name that are read, or that do not affect the computation here.
_KNOWN = frozenset(
    (
        "vocab_size", "context_length", "embedding_length", "block_count", "feed_forward_length",
        "attention.head_count", "attention.head_count_kv", "attention.key_length",
        "attention.value_length", "attention.layer_norm_rms_epsilon", "attention.sliding_window",
        "rope.freq_base", "rope.dimension_count", "rope.scaling.type", "rope.scaling.factor",
        "rope.scaling.original_context_length", "rope.scaling.finetuned", "expert_count",
        "tensor_data_layout",
    )
)  # fmt: skip
# Keys that do not affect the computation if they have this value.
_NEUTRAL = {"attention.causal": True, "expert_used_count": 0, "rope.scale_linear": 1.0}
_SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
# A file with RoPE factors does not hold their original length: these are the lengths in use.
_LLAMA3_LENGTHS = (8192, 4096, 2048, 16384, 32768, 65536, 131072)
_BLOCK_ROWS = 1024  # rows that are dequantised at once


def package():
    """Imports the package `gguf`, which has the types of tensors.

    Raises:
      CheckpointError: the package is not installed.
    """
    try:
        return importlib.import_module("gguf")
    except ImportError as error:
        raise CheckpointError(
            f"the weights of GGUF files are read by the package gguf, which cannot be imported "
            f"({error}); install it: pip install 'specjax[gguf]'"
        ) from error


def file_of(path: Path) -> Path | None:
    """Returns the GGUF file of a path: itself, or the only one in a directory without config.json.

    Raises:
      CheckpointError: the directory holds several.
    """
    if not path.is_dir():
        return path if path.suffix.lower() == SUFFIX else None
    if (path / "config.json").exists():
        return None
    found = sorted(f for f in path.iterdir() if f.suffix.lower() == SUFFIX)
    if len(found) > 1:
        raise CheckpointError(
            f"{path} holds several GGUF files, {', '.join(f.name for f in found)}; name one of them"
        )
    return found[0] if found else None


class Tensor:
    """A tensor of a file, in the layout of Hugging Face; indexing dequantises what it reads.

    Attributes:
      shape: [out in] for a matrix, [n] for a vector.
      dtype: dtype of the values that indexing returns: float16 and bfloat16 for tensors of those
        types, else float32.
    """

    def __init__(self, file: GGUFFile, name: str, heads: int | None = None):
        """Finds a tensor by its name in the file.

        Args:
          heads: number of heads whose rows are permuted within the head; None: none are.
        """
        stored = file.tensors[name]
        self._file, self._name, self._heads = file, name, heads
        self.shape = stored.shape
        try:
            self._kind, self._block, self._bytes = _kind(stored.kind)
        except (ValueError, KeyError, NotImplementedError) as error:
            raise UnsupportedModelError(
                f"{file.file}: tensor {name} is of a type that the package gguf does not "
                f"dequantise ({error}); expected one that it does, such as F16, Q8_0 or Q4_K"
            ) from error
        self._data()  # raises if the file is cut off
        self.dtype = {"F16": "float16", "BF16": "bfloat16"}.get(self._kind.name, "float32")

    def __getitem__(self, index: Any) -> np.ndarray:
        first, *rest = index if isinstance(index, tuple) else (index,)
        data = self._data()
        if len(self.shape) == 1:
            values = self._values(data[None])[0]
            return self._typed(values if self._heads is None else values[self._order()])[first]
        rows = np.arange(self.shape[0])[first]
        if self._heads is not None:
            rows = self._order()[rows]
        columns = (np.arange(self.shape[1])[tuple(rest)] if rest else np.arange(self.shape[1])).size
        out = np.empty((len(rows), columns), np.float32)
        for start in range(0, len(rows), _BLOCK_ROWS):
            block = rows[start : start + _BLOCK_ROWS]
            out[start : start + len(block)] = self._values(data[block])[(slice(None), *rest)]
        return self._typed(out)

    def _data(self) -> np.ndarray:
        """Returns the tensor's bytes [.. bytes of a row]."""
        row = self.shape[-1] // self._block * self._bytes
        count = math.prod(self.shape[:-1]) * row
        return self._file.read(self._name, count).reshape(*self.shape[:-1], row)

    def _values(self, data: np.ndarray) -> np.ndarray:
        return package().dequantize(data, self._kind)

    def _typed(self, values: np.ndarray) -> np.ndarray:
        return values if self.dtype == "float32" else values.astype(jnp.dtype(self.dtype))

    def _order(self) -> np.ndarray:
        """Returns the order of rows: row r of Hugging Face's matrix is row `order[r]` in the file.

        In the file the two rows of each RoPE pair are adjacent; Hugging Face has the first rows of
        all pairs of a head, then the second ones.
        """
        rows = np.arange(self.shape[0])
        return rows.reshape(self._heads, -1, 2).swapaxes(1, 2).reshape(-1)


@functools.cache
def _kind(number: int) -> tuple[Any, int, int]:
    """Returns a type of tensors, the number of values in a block of it, and the bytes of a block.

    Raises:
      ValueError, KeyError, NotImplementedError: the type cannot be dequantised.
    """
    library = package()
    kind = library.GGMLQuantizationType(number)
    values, size = library.GGML_QUANT_SIZES[kind]
    library.dequantize(np.zeros(size, np.uint8), kind)
    return kind, values, size


class GGUF:
    """A checkpoint in one GGUF file, as a `specjax.interfaces.Reader`.

    Args:
      path: the file, or a directory that holds it and no config.json.

    Raises:
      CheckpointError: the file is absent, damaged or no GGUF file.
      UnsupportedModelError: the file holds no model, one of an unsupported architecture, or one
        part of several.
    """

    def __init__(self, path: Path):
        file = file_of(path)
        if file is None:
            raise CheckpointError(f"{path}: expected a GGUF file, or a directory with one")
        self.file, self._held = file, GGUFFile(file)
        self._beside = path if (path / "tokenizer.json").is_file() else None
        self._keys = Keys(file, self._held.metadata)
        self.architecture = self._keys.text("general.architecture")
        if self.architecture not in ARCHITECTURES:
            raise UnsupportedModelError(
                f"{file}: general.architecture {shown(self.architecture)} is not supported; "
                f"expected one of {', '.join(ARCHITECTURES)}"
            )
        prefix, there = f"{self.architecture}.", self._held.metadata.items()
        mine = {k.removeprefix(prefix): v for k, v in there if k.startswith(prefix)}
        self._within = Keys(file, mine, self.architecture)  # messages show their full names
        what = self._keys.text("general.type", "model")
        if what != "model":
            raise UnsupportedModelError(f"{file}: it holds a {what}; expected a model")
        if (self._keys.integer("split.count", 1, least=0) or 1) > 1:
            raise UnsupportedModelError(
                f"{file} is one part of several; merge them by `llama-gguf-split --merge`"
            )

    @staticmethod
    def recognises(path: Path) -> bool:
        """Returns whether a path is of this format."""
        return file_of(path) is not None

    # --- config ------------------------------------------------------------------------------

    def config(self) -> dict[str, Any]:
        """Returns the equivalent of config.json.

        Raises:
          CheckpointError: a key is absent, or its value is invalid.
          UnsupportedModelError: config.json has no equivalent of a key's value.
        """
        keys = self._within
        self._refuse_unknown()
        width, heads = keys.integer("embedding_length"), keys.integer("attention.head_count")
        head_dim = self._head_dim(width, heads)
        window = keys.integer("attention.sliding_window", None, least=0)
        rotated = keys.integer("rope.dimension_count", head_dim)
        stored = self._held.tensors
        tokens = self._held.metadata.get("tokenizer.ggml.tokens")
        size = len(tokens) if isinstance(tokens, list) else None
        raw: dict[str, Any] = {
            "model_type": self.architecture,
            "vocab_size": keys.integer("vocab_size", *(() if size is None else (size,))),
            "hidden_size": width,
            "intermediate_size": keys.integer("feed_forward_length"),
            "num_hidden_layers": keys.integer("block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": keys.integer("attention.head_count_kv", heads),
            "head_dim": head_dim,
            "max_position_embeddings": keys.integer("context_length"),
            "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon", least=0.0),
            "rope_theta": keys.number("rope.freq_base", 10_000.0),
            "rope_scaling": self._rope_scaling(head_dim),
            "tie_word_embeddings": "output.weight" not in stored,
            "attention_bias": "blk.0.attn_q.bias" in stored,
            "eos_token_id": self._ends() or None,
            "bos_token_id": self._id("bos"),
            "pad_token_id": self._id("padding"),
            "dtype": self._dtype(),
        }  # fmt: skip
        if rotated != head_dim:
            raw["partial_rotary_factor"] = rotated / head_dim
        if window:
            raise UnsupportedModelError(
                f"{self.file}: {self.architecture}.attention.sliding_window {window} is not "
                "supported: llama.cpp does not use it for this architecture, and the file does "
                "not say in which layers the model was trained with it"
            )
        experts = keys.integer("expert_count", 0, least=0)
        if experts:
            raw["num_experts"] = experts
        return raw

    def generation(self) -> dict[str, Any]:
        """Returns the equivalent of generation_config.json: the sampling defaults of the file."""
        there = self._held.metadata
        return {
            name: there[f"general.sampling.{key}"]
            for key, name in _SAMPLING.items()
            if f"general.sampling.{key}" in there
        }

    def _refuse_unknown(self) -> None:
        for name, value in self._within.raw.items():
            if name not in _KNOWN and not (name in _NEUTRAL and _NEUTRAL[name] == value):
                raise UnsupportedModelError(
                    f"{self.file}: {self.architecture}.{name} {shown(value)} is not supported: "
                    "its effect on the model is unknown"
                )

    def _head_dim(self, width: int, heads: int) -> int:
        keys = self._within
        size = keys.integer("attention.key_length", None) or width // heads
        values = keys.integer("attention.value_length", size)
        if values != size:
            raise UnsupportedModelError(
                f"{self.file}: {self.architecture}.attention.value_length {values} is not "
                f"supported; expected that of keys, {size}"
            )
        return size

    def _rope_scaling(self, head_dim: int) -> dict[str, Any] | None:
        """Returns `rope_scaling` of config.json; the family refuses types that it does not have."""
        keys = self._within
        kind = keys.text("rope.scaling.type", "linear")  # llama.cpp's default
        factor = keys.number("rope.scaling.factor", 0.0, least=0.0)
        if kind == "yarn":
            raise UnsupportedModelError(
                f'{self.file}: {self.architecture}.rope.scaling.type "yarn" is not supported in '
                "GGUF files; use the model's safetensors files"
            )
        scaled = kind != "none" and not (kind == "linear" and factor in (0.0, 1.0))
        factors = Tensor(self._held, _ROPE_FACTORS)[:] if self._has_factors else np.ones(1)
        if scaled and not (factors == 1).all():
            raise UnsupportedModelError(
                f"{self.file}: {_ROPE_FACTORS} is not supported beside rope.scaling.type "
                f"{shown(kind)} with factor {factor:g}, which llama.cpp applies together; use the "
                "model's safetensors files"
            )
        if scaled:
            return {"rope_type": kind, "factor": factor}
        if not self._has_factors:
            return None
        theta = keys.number("rope.freq_base", 10_000.0)
        if factors.shape == (head_dim // 2,):
            largest = float(str(factors.max()))
            for length in _LLAMA3_LENGTHS:
                made = llama3_factors(head_dim, theta, largest, length)
                if np.allclose(made, factors, rtol=1e-5, atol=0.0):
                    return {
                        "rope_type": "llama3",
                        "factor": largest,
                        "low_freq_factor": 1.0,
                        "high_freq_factor": 4.0,
                        "original_max_position_embeddings": length,
                    }
        raise UnsupportedModelError(
            f"{self.file}: {_ROPE_FACTORS} {list(factors.shape)} is not supported; expected "
            f"[{head_dim // 2}] factors of Llama 3.1, with low_freq_factor 1, high_freq_factor 4 "
            f"and an original length of {', '.join(map(str, sorted(_LLAMA3_LENGTHS)))}"
        )

    @property
    def _has_factors(self) -> bool:
        """Returns whether the architecture uses a tensor of RoPE factors, and the file has it."""
        return self.architecture in _FACTORED and _ROPE_FACTORS in self._held.tensors

    def _id(self, name: str) -> int | None:
        return self._keys.integer(f"tokenizer.ggml.{name}_token_id", None, least=0)

    def _ends(self) -> list[int]:
        """Returns the token ids that end a text, a turn or a message, by their keys or names."""
        ids = [self._id(name) for name in ("eos", "eot", "eom")]
        tokens = self._held.metadata.get("tokenizer.ggml.tokens")
        if isinstance(tokens, list):
            ends = end_names(tokens)
            ids += [i for i, token in enumerate(tokens) if token in ends]
        return list(dict.fromkeys(token for token in ids if token is not None))

    def _dtype(self) -> str:
        """Returns the dtype of all matrices if it is a 16-bit one, else float32."""
        kinds = {t.kind for t in self._held.tensors.values() if len(t.shape) > 1}
        return {frozenset((1,)): "float16", frozenset((30,)): "bfloat16"}.get(
            frozenset(kinds), "float32"
        )

    # --- weights and tokenizer ---------------------------------------------------------------

    @functools.cached_property
    def _permuted_heads(self) -> dict[str, int]:
        """Returns the number of heads of each tensor whose rows are in llama.cpp's order."""
        if self.architecture not in _PERMUTED:
            return {}
        heads = self._within.integer("attention.head_count")
        return {
            "attn_q": heads,
            "attn_k": self._within.integer("attention.head_count_kv", heads),
        }

    def tensors(self) -> Mapping[str, Tensor]:
        """Returns lazy arrays by Hugging Face's names; unknown tensors keep their own names.

        Raises:
          CheckpointError: the package gguf is missing, or the file is cut off.
          UnsupportedModelError: a tensor is of a type that cannot be dequantised.
        """
        found = {}
        for name in self._held.tensors:
            if name == _ROPE_FACTORS and self._has_factors:
                continue  # `config` has read it
            stem, _, kind = name.rpartition(".")
            new, part = name, stem
            if stem in _TOP:
                new = f"{_TOP[stem]}.{kind}"
            elif stem.startswith("blk.") and stem.count(".") == 2:
                _, layer, part = stem.split(".")
                if part in _LAYER:
                    new = f"model.layers.{layer}.{_LAYER[part]}.{kind}"
            found[new] = Tensor(self._held, name, self._permuted_heads.get(part))
        return found

    @property
    def has_tokenizer(self) -> bool:
        """Returns whether `tokenizer` returns one."""
        named = self._held.metadata.get("tokenizer.ggml.model", _NO_TOKENIZER)
        return self._beside is not None or named != _NO_TOKENIZER

    def tokenizer(self) -> Any:
        """Returns the tokenizer of the directory, or the one in the file; None: there is neither.

        Raises:
          CheckpointError, UnsupportedModelError: see `tokenizer_of`.
        """
        if not self.has_tokenizer:
            return None
        if self._beside is not None:
            return load_tokenizer(self._beside)
        return tokenizer_of(self.file, self._held.metadata, self._within.integer("context_length"))


def llama3_factors(head_dim: int, theta: float, factor: float, length: int) -> np.ndarray:
    """Returns Llama 3.1's divisors of the RoPE frequencies [head_dim / 2].

    They are those of low_freq_factor 1 and high_freq_factor 4; `length` is the original context.
    """
    freqs = theta ** -(np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    turns = length * freqs / (2 * math.pi)
    smooth = np.clip((turns - 1.0) / (4.0 - 1.0), 0.0, 1.0)
    return 1.0 / ((1 - smooth) / factor + smooth)
