"""Stacks of matrices in MXFP4, as gpt-oss is published: 4-bit values, a scale for 32 of them.

Of a stack X [E I O], `X_blocks` [E O I/32 16] holds two values of 4 bits in a byte, the first in
the low half, and `X_scales` [E O I/32] the exponents of two, plus 127, by which they are multiplied
(OCP Microscaling Formats, version 1.0). Both are uint8.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
from jaxtyping import Float, UInt8

from specjax.checked_json import CheckpointError, Keys, UnsupportedModelError

METHOD = "mxfp4"  # `quant_method`, and the name of a dtype of files
NAMES = ("experts.gate_up_proj", "experts.down_proj")  # ends of the names of stacks
CONFIG = {
    "quant_method": METHOD,
    "modules_to_not_convert": [
        "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head",
    ],
}  # fmt: skip
BLOCK, _BIAS = 32, 127
_BLOCKS, _SCALES = "_blocks", "_scales"
_CODES = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)
_PAIRS = np.stack([np.tile(_CODES, 16), np.repeat(_CODES, 16)], axis=-1)  # by a byte


class Stack:
    """A stack [E I O] of a file; indexing dequantises the blocks that it reads.

    Attributes:
      shape: shape of the stack.
      dtype: `bfloat16`, which has every value exactly.
      products: format of `specjax.weights.matrix` in which decoding may keep it.
      blocks: tensor [E O I/32 16] of the file.
      scales: tensor [E O I/32] of the file.
    """

    dtype, products = "bfloat16", "mxfp4"

    def __init__(self, blocks: Any, scales: Any):
        self.blocks, self.scales = blocks, scales
        *lead, outputs, count, _ = blocks.shape
        self.shape = (*lead, count * BLOCK, outputs)

    def __getitem__(self, index: Any) -> np.ndarray:
        """Reads a part; `index` is up to three slices, in steps of one."""
        index = index if isinstance(index, tuple) else (index,)
        index += (slice(None),) * (len(self.shape) - len(index))
        *lead, inputs, outputs = index
        start, stop, _ = inputs.indices(self.shape[-2])
        first = start // BLOCK
        read = (*lead, outputs, slice(first, -(-stop // BLOCK)))
        part = unpack_blocks(self.blocks[read], self.scales[read])
        return part[..., start - first * BLOCK : stop - first * BLOCK].swapaxes(-1, -2)


def unpack_blocks(
    blocks: UInt8[np.ndarray, "*N G 16"], scales: UInt8[np.ndarray, "*N G"]
) -> np.ndarray:
    """Returns the values [.. G*32] of blocks, bfloat16."""
    factors = np.ldexp(np.float32(1), scales.astype(np.int32) - _BIAS)
    values = np.empty((*blocks.shape, 2), ml_dtypes.bfloat16)
    for number, matrix in enumerate(blocks):  # float32 numbers of one matrix at a time
        values[number] = _PAIRS[matrix] * factors[number, ..., None, None]
    return values.reshape(*scales.shape[:-1], -1)


def pack_blocks(
    values: Float[np.ndarray, "*N I"],
) -> tuple[UInt8[np.ndarray, "*N G 16"], UInt8[np.ndarray, "*N G"]]:
    """Rounds values to blocks and scales; those that are values of blocks stay as they are.

    The largest value of a block is between 4 and 8 times the power of two of its scale. Values are
    rounded to the nearest, ties to even codes, and none becomes more than 6 times that power.

    Args:
      values: numbers, a multiple of 32 along the last axis. If one is not finite, its whole block
        becomes so.
    """
    values = np.ascontiguousarray(values, np.float32).reshape(*values.shape[:-1], -1, BLOCK)
    largest = np.abs(values).max(-1)
    _, exponents = np.frexp(largest)  # of a number in [0.5, 1)
    scales = np.where(np.isfinite(largest), np.clip(exponents - 3 + _BIAS, 0, 254), 255)
    scales = scales.astype(np.uint8)
    scaled = np.ldexp(values, _BIAS - scales[..., None].astype(np.int32))
    codes = scaled.astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
    return codes[..., ::2] | codes[..., 1::2] << 4, scales


def dequantised(tensors: Mapping[str, Any], keys: Keys) -> Mapping[str, Any]:
    """Joins the blocks of files with their scales, if config.json says that there are any.

    Args:
      tensors: tensors of the files by name.
      keys: content of config.json.

    Raises:
      CheckpointError: scales are missing, or do not fit their blocks.
    """
    if keys.within("quantization_config").raw.get("quant_method") != METHOD:
        return tensors
    joined = dict(tensors)
    for name in [name for name in tensors if name.endswith(_BLOCKS)]:
        stem = name.removesuffix(_BLOCKS)
        blocks, scales = joined.pop(name), joined.pop(stem + _SCALES, None)
        shape = list(blocks.shape)
        got = "none" if scales is None else f"{scales.dtype} {list(scales.shape)}"
        if len(shape) != 4 or shape[-1] != BLOCK // 2 or got != f"uint8 {shape[:-1]}":
            raise CheckpointError(
                f"{keys.file.parent}: {name} {shape} must be [E O I/32 16], and {stem}{_SCALES} "
                f"uint8 {shape[:-1]}, got {got}; fetch the files again"
            )
        joined[stem] = Stack(blocks, scales)
    return joined


def packed(name: str, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """Returns the names and shapes of the blocks and scales of a stack; empty: it is not packed.

    Raises:
      UnsupportedModelError: its matrices do not consist of whole blocks.
    """
    if not name.endswith(NAMES):
        return {}
    *lead, inputs, outputs = shape
    if inputs % BLOCK:
        raise UnsupportedModelError(
            f"{name} {list(shape)} cannot be written in MXFP4: expected inputs in {BLOCK}s"
        )
    scales = (*lead, outputs, inputs // BLOCK)
    return {name + _BLOCKS: (*scales, BLOCK // 2), name + _SCALES: scales}
