"""Checkpoints of fp8 matrices with a scale for each block, as DeepSeek and Qwen publish them.

`X.weight` [O I] is in float8_e4m3fn, and `X.weight_scale_inv` [ceil(O / rows) ceil(I / columns)]
holds what the values of each block are multiplied by. config.json has the size of a block.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from specjax.checked_json import CheckpointError, Keys, shown

DTYPE = "float8_e4m3fn"
_SCALE = "_scale_inv"  # of X.weight the scales are X.weight_scale_inv
_SCALE_DTYPES = ("float32", "bfloat16")
_KNOWN = {"quant_method": ("fp8",), "fmt": ("e4m3", None), "activation_scheme": ("dynamic", None)}


class Matrix:
    """A matrix [O I] of a file; indexing dequantises the part that it reads.

    Attributes:
      values, scales: tensors of the file.
      block: rows and columns that have one scale.
      shape: shape of the matrix.
      dtype: `float32`, in which a value is multiplied by its scale.
      products: format of `specjax.weights.matrix` in which decoding may keep it.
    """

    dtype, products = "float32", "fp8_block"

    def __init__(self, values: Any, scales: Any, block: list[int]):
        self.values, self.scales, self.block = values, scales, block
        self.shape = values.shape

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
    """Lists, as messages, what a `quantization_config` asks for beyond fp8 in blocks.

    Scales of activations that are found at run time (`dynamic`) are none: activations that are not
    quantised are nearer to the model before it was quantised.
    """
    raw, block = method.raw, method.raw.get("weight_block_size")
    if not raw:
        return []
    for name, values in _KNOWN.items():
        if raw.get(name) not in values:
            return [f"{name} {shown(raw.get(name))} (expected {values[0]}, or unquantised weights)"]
    is_block = isinstance(block, list) and [type(n) for n in block] == [int, int] and min(block) > 0
    return [] if is_block else [f"weight_block_size {shown(block)} (expected rows and columns)"]


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
    block, joined = method.raw["weight_block_size"], dict(tensors)
    for name, values in tensors.items():
        if values.dtype != DTYPE:
            continue
        scales = joined.pop(name + _SCALE, None)
        wanted = [-(-n // size) for n, size in zip(values.shape, block, strict=False)]
        got = "none" if scales is None else f"{scales.dtype} {list(scales.shape)}"
        if len(values.shape) != 2 or got not in [f"{dtype} {wanted}" for dtype in _SCALE_DTYPES]:
            raise CheckpointError(
                f"{keys.file.parent}: {name} {list(values.shape)} is in fp8, in blocks of {block}; "
                f"expected {name}{_SCALE} {wanted} in {' or '.join(_SCALE_DTYPES)}, got {got}"
            )
        joined[name] = Matrix(values, scales, block)
    return joined
