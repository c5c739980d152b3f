"""Checkpoints of fp8 matrices with a scale for each block, or for each output.

`X.weight` [O I] is in float8_e4m3fn. Blocks are as DeepSeek and Qwen publish them:
`X.weight_scale_inv` [ceil(O / rows) ceil(I / columns)] holds what the values of each block are
multiplied by, and config.json the size of a block. Outputs are as llm-compressor writes them in its
format compressed-tensors: their scales are `X.weight_scale` [O 1].
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from specjax.checked_json import CheckpointError, Keys, shown

DTYPE = "float8_e4m3fn"
_SCALE_DTYPES = ("float32", "bfloat16")
_KNOWN = {"quant_method": ("fp8",), "fmt": ("e4m3", None), "activation_scheme": ("dynamic", None)}
_OUTPUTS = "compressed-tensors"  # `quant_method` of files with a scale for each output
_GROUP = {
    "num_bits": (8,), "type": ("float",), "strategy": ("channel",), "symmetric": (True, None),
    "dynamic": (False, None),
}  # fmt: skip


class Matrix:
    """A matrix [O I] of a file; indexing dequantises the part that it reads.

    Attributes:
      values, scales: tensors of the file.
      block: rows and columns that have one scale.
      shape: shape of the matrix.
      dtype: `float32`, in which a value is multiplied by its scale.
      products: format of `specjax.weights.matrix` in which decoding may keep it.
    """

    dtype = "float32"

    def __init__(self, values: Any, scales: Any, block: list[int]):
        self.values, self.scales, self.block = values, scales, block
        self.shape = values.shape
        self.products = "fp8" if block == [1, self.shape[1]] else "fp8_block"

    def __getitem__(self, index: Any) -> np.ndarray:
        """Reads a part; `index` is one slice or two, in steps of one."""
        index = (*index, slice(None)) if isinstance(index, tuple) else (index, slice(None))
        rows, columns = (range(n)[s] for n, s in zip(self.shape, index, strict=False))
        height, width = self.block
        out = self.values[rows.start : rows.stop, columns.start : columns.stop].astype(np.float32)
        scales = self.scales[rows.start // height :, :].astype(np.float32)
        scales = scales[:, np.arange(columns.start, columns.stop) // width]
        ends = range(height - rows.start % height, len(out), height)
        for part, scale in zip(np.split(out, ends), scales, strict=False):
            part *= scale
        return out


def problems(method: Keys) -> list[str]:
    """Lists, as messages, what a `quantization_config` asks for beyond fp8 as read here.

    Scales of activations that are found at run time (`dynamic`) are none: activations that are not
    quantised are nearer to the model before it was quantised.
    """
    raw, block = method.raw, method.raw.get("weight_block_size")
    if not raw:
        return []
    if raw.get("quant_method") == _OUTPUTS:
        return _problems_of_groups(raw)
    if wrong := _others(raw, _KNOWN):
        return wrong
    is_block = isinstance(block, list) and [type(n) for n in block] == [int, int] and min(block) > 0
    return [] if is_block else [f"weight_block_size {shown(block)} (expected rows and columns)"]


def _others(raw: Mapping[str, Any], known: Mapping[str, tuple]) -> list[str]:
    """Returns a message about the first setting that is none of the known ones; at most one."""
    return [
        f"{name} {shown(raw.get(name))} (expected {values[0]}, or unquantised weights)"
        for name, values in known.items()
        if raw.get(name) not in values
    ][:1]


def _problems_of_groups(raw: Mapping[str, Any]) -> list[str]:
    """`problems` of compressed-tensors, which lists the settings of groups of matrices."""
    groups = raw.get("config_groups")
    parts = groups.values() if isinstance(groups, Mapping) else ()
    if not all(isinstance(g, Mapping) and isinstance(g.get("weights"), Mapping) for g in parts):
        return [f"config_groups {shown(groups)} (expected settings of groups)"]
    for name, group in groups.items():
        activations = group.get("input_activations") or {"dynamic": True}
        wrong = _others(group["weights"], _GROUP)
        if wrong := wrong or _others(activations, {"dynamic": (True,)}):
            return [f"config_groups.{name}: {wrong[0]}"]
    return _others(raw, {"kv_cache_scheme": (None,)})


def dequantised(tensors: Mapping[str, Any], keys: Keys) -> Mapping[str, Any]:
    """Joins the fp8 matrices of files with their scales, if config.json says how.

    Args:
      tensors: tensors of the files by name.
      keys: content of config.json. Where it asks for something else, the tensors stay as they are,
        and reading the config raises the error.

    Raises:
      CheckpointError: scales are missing, or do not fit their matrix.
    """
    text, name = keys.within("text_config"), "quantization_config"
    method = text.within(name) if text.raw.get(name) else keys.within(name)
    if not method.raw or problems(method):
        return tensors
    joined, of_outputs = dict(tensors), method.raw["quant_method"] == _OUTPUTS
    end = "_scale" if of_outputs else "_scale_inv"
    for name, values in tensors.items():
        if values.dtype != DTYPE:
            continue
        scales = joined.pop(name + end, None)
        block = [1, values.shape[-1]] if of_outputs else method.raw["weight_block_size"]
        wanted = [-(-n // size) for n, size in zip(values.shape, block, strict=False)]
        got = "none" if scales is None else f"{scales.dtype} {list(scales.shape)}"
        if len(values.shape) != 2 or got not in [f"{dtype} {wanted}" for dtype in _SCALE_DTYPES]:
            raise CheckpointError(
                f"{keys.file.parent}: {name} {list(values.shape)} is in fp8, in blocks of {block}; "
                f"expected {name}{end} {wanted} in {' or '.join(_SCALE_DTYPES)}, got {got}"
            )
        joined[name] = Matrix(values, scales, block)
    return joined
