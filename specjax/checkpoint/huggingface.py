"""Hugging Face checkpoint directories in and out, without torch.

Loading checks every tensor's name and shape from the file headers first, then builds one parameter
at a time, in the target dtype, reading only the slices that each device holds: at no time does
more than one parameter exist twice in host memory. Saving writes what transformers loads.

A draft head lies in the model's own files under MiMo's names when the family is MiMo; transformers
knows no head in the other families, so there it is a file of its own, `mtp.safetensors`.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.checked_json import CheckpointError, Keys
from specjax.checkpoint.huggingface_config import (
    MTP_KEY,
    UnsupportedModelError,
    config_of,
    dtype_name,
    mtp_json,
    read_config,
)
from specjax.checkpoint.huggingface_export import save_checkpoint, save_head
from specjax.checkpoint.huggingface_names import (
    CheckpointWeightError,
    Slot,
    head_slots,
    is_head_name,
    is_redundant,
    policy_slots,
    raise_problems,
    style_of,
    swap_concat,
    swap_last,
    tensors_of,
    zero_tensors,
)
from specjax.config import ModelConfig
from specjax.interfaces import Stored
from specjax.models.families import family_of
from specjax.models.transformer import Params
from specjax.parallel import sharding
from specjax.weights import AUTO, open_checkpoint
from specjax.weights.safetensors import HEAD_FILE, open_files, weight_files

__all__ = [
    "CheckpointError",
    "CheckpointWeightError",
    "UnsupportedModelError",
    "load_checkpoint",
    "load_head",
    "read_config",
    "save_checkpoint",
    "save_head",
    "swap_concat",
]

_FLOATS = ("float64", "float32", "float16", "bfloat16")
_BLOCK_ROWS = 4096  # that are compared at a time
log = logging.getLogger(__name__)


# --- tensors ------------------------------------------------------------------------------------


class _Weights:
    """The tensors of a checkpoint, read by slices."""

    def __init__(self, tensors: Mapping[str, Any]):
        self._tensors = dict(tensors)

    def names(self) -> list[str]:
        return list(self._tensors)

    def describe(self, name: str) -> tuple[tuple[int, ...], str]:
        """Shape and dtype, without reading the tensor."""
        tensor = self._tensors[name]
        return tuple(tensor.shape), str(tensor.dtype)

    def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        return self._tensors[name][index]

    def rename(self, old: str, new: str) -> None:
        """Gives a tensor another name than it has in its file."""
        self._tensors[new] = self._tensors.pop(old)

    def equal(self, one: str, other: str) -> bool:
        """Whether two tensors have the same shape, dtype and bits; read in blocks of rows."""
        described = self.describe(one)
        if described != self.describe(other):
            return False
        rows = described[0][0] if described[0] else 0
        for start in range(0, rows, _BLOCK_ROWS):
            block = (slice(start, min(start + _BLOCK_ROWS, rows)),)
            if self.read(one, block).tobytes() != self.read(other, block).tobytes():
                return False
        return True


# --- checking -----------------------------------------------------------------------------------


def _check(source: Path, weights: _Weights, slots: list[Slot], zeros: dict, extra: list[str]):
    """Raises `CheckpointWeightError` with one line per weight that does not fit."""
    expected = {name: tensor.shape for name, tensor in tensors_of(slots).items()}
    present = set(weights.names())
    problems = [
        f"missing: {name}, expected {list(shape)}"
        for name, shape in expected.items()
        if name not in present
    ]
    for name, shape in (expected | zeros).items():
        if name not in present:
            continue
        got, dtype = weights.describe(name)
        if got != shape:
            problems.append(f"wrong shape: {name}, expected {list(shape)}, got {list(got)}")
        elif dtype not in _FLOATS:
            problems.append(f"wrong dtype: {name}, expected one of {_FLOATS}, got {dtype}")
        elif name in zeros and np.any(weights.read(name, (slice(None),))):
            problems.append(f"not supported: {name} is not zero")
    problems += [
        f"unexpected: {name}, {list(weights.describe(name)[0])}"
        for name in extra
        if name not in expected and name not in zeros
    ]
    raise_problems(source, problems)


# --- placing ------------------------------------------------------------------------------------


def _place(weights: _Weights, slots: list[Slot], dtype: str, mesh) -> Params:
    """Builds the parameter tree, one array at a time, in its dtype and sharding."""
    arrays = {}
    for slot in slots:
        whole = (slice(None),) * len(slot.shape)
        if mesh is None:
            arrays[slot.path] = jax.device_put(_read(weights, slot, jnp.dtype(dtype), whole))
            continue
        pieces = {}  # devices that hold the same slice share one read

        def fill(index, slot=slot, pieces=pieces):
            key = tuple(s.indices(n) for s, n in zip(index, slot.shape, strict=True))
            if key not in pieces:
                pieces[key] = _read(weights, slot, jnp.dtype(dtype), index)
            return pieces[key]

        target = jax.NamedSharding(mesh, sharding.spec_for(mesh, slot.axes, slot.shape))
        arrays[slot.path] = jax.make_array_from_callback(
            slot.shape, target, fill, dtype=jnp.dtype(dtype)
        )
    return _nest(arrays)


def _read(weights: _Weights, slot: Slot, dtype: np.dtype, index: tuple[slice, ...]) -> np.ndarray:
    """One slice of a parameter; `index` is in the parameter's own axes."""
    index = tuple(slice(*s.indices(n)) for s, n in zip(index, slot.shape, strict=True))
    out = np.empty([s.stop - s.start for s in index], dtype)
    which, inside = index[: slot.lead], index[slot.lead :]
    for at in np.ndindex(out.shape[: slot.lead]):
        stored = slot.pieces[tuple(s.start + i for s, i in zip(which, at, strict=True))]
        if slot.swap:  # the two halves may lie in one slice: read whole, then cut
            whole = _read_piece(weights, stored, tuple(slice(0, n) for n in slot.row.shape))
            out[at] = np.roll(whole, whole.shape[0] // 2, axis=0)[inside]
        else:
            out[at] = _read_piece(weights, stored, inside)
    return out


def _read_piece(weights: _Weights, stored: Stored, index: tuple[slice, ...]) -> np.ndarray:
    """One slice of a piece of a parameter; `index` is in the piece's own axes."""
    index, every = list(swap_last(index, stored)), [slice(None)] * len(index)
    if (part := stored.part) is not None:
        rows = range(part.start, part.stop, part.step)[index[part.axis]]
        # Not every format reads in steps: what lies between is read as well, and dropped.
        index[part.axis] = slice(rows.start, rows[-1] + 1 if rows else rows.start)
        every[part.axis] = slice(None, None, part.step)
    piece = weights.read(stored.name, tuple(index))[tuple(every)]
    return piece.swapaxes(-1, -2) if stored.transpose else piece


def _nest(flat: dict) -> Params:
    tree: Params = {}
    for path, leaf in flat.items():
        node = tree
        for key in path[:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = leaf
    return tree


# --- tied embeddings ----------------------------------------------------------------------------


def _as_stored(path: Path, cfg: ModelConfig, weights: _Weights) -> ModelConfig:
    """The config with `tie_embeddings` as the weights have it, by the rule of transformers.

    A language-model head of its own beside the embedding is used although config.json ties the two;
    one that stands alone is the embedding as well.
    """
    stored = family_of(cfg.model_type).stored(cfg, None)
    places = stored["embed"], stored["lm_head"]
    if not all(isinstance(place, Stored) and place.part is None for place in places):
        return cfg
    embed, head = (place.name for place in places)
    names = weights.names()
    if not cfg.tie_embeddings or head not in names:
        return cfg
    if embed not in names:
        weights.rename(head, embed)
        return cfg
    if weights.equal(embed, head):
        return cfg
    log.warning(
        "%s: tie_word_embeddings is true, but %s and %s differ: each is used as it is stored; set "
        "tie_word_embeddings to false in config.json to say so",
        path, embed, head,
    )  # fmt: skip
    return cfg.replace(tie_embeddings=False)


# --- loading ------------------------------------------------------------------------------------


def load_checkpoint(
    path: str | Path,
    param_dtype: str | None = None,
    mesh: jax.sharding.Mesh | None = None,
    mtp_concat: str | None = None,
    load_format: str = AUTO,
) -> tuple[ModelConfig, Params, Params | None]:
    """Reads a local checkpoint.

    Args:
      param_dtype: dtype of the parameters, and of the config's arithmetic; the file's by default.
      mesh: place the parameters as `specjax.parallel.sharding` says; None is the default device.
      mtp_concat: order in which the head is held in memory; the checkpoint's by default.
      load_format: see `specjax.weights.open_checkpoint`.

    Where config.json ties the embedding and the language-model head and the file has two that
    differ, both are used, as by transformers, with a warning, and the config says so.

    Returns:
      config, stacked parameters, head parameters or None (`num_nextn_predict_layers` absent or 0).

    Raises:
      CheckpointError: no config.json, a missing or damaged file.
      CheckpointWeightError: names every weight that is missing, unexpected or wrongly shaped.
      UnsupportedModelError: see `read_config`.
    """
    reader = open_checkpoint(path, load_format)
    cfg = config_of(reader.file, reader.config(), reader.generation())
    if param_dtype is not None:
        dtype = dtype_name(param_dtype)
        cfg = cfg.running(param_dtype=dtype, compute_dtype=dtype)
    if mtp_concat is not None:
        cfg = cfg.replace(mtp_concat=mtp_concat)
    weights = _Weights(reader.tensors())
    cfg = _as_stored(Path(path), cfg, weights)
    policy, head, style = policy_slots(cfg), [], None
    if cfg.mtp_num_layers:
        style = style_of(cfg, weights.names())
        head = head_slots(cfg, style)
    extra = [name for name in weights.names() if not is_redundant(cfg, name)]
    _check(Path(path), weights, policy + head, zero_tensors(cfg, style), extra)
    params = _place(weights, policy, cfg.run.param_dtype, mesh)
    return cfg, params, (_place(weights, head, cfg.run.param_dtype, mesh) if head else None)


def load_head(path: str | Path, cfg: ModelConfig, mesh: jax.sharding.Mesh | None = None) -> Params:
    """Reads a draft head alone: a file of `save_head`, or a checkpoint directory that has one.

    The head comes in `cfg.mtp_concat` order and `cfg.run.param_dtype`, whatever the file's are.

    Raises:
      CheckpointError: a missing or damaged file, or a head that was trained with other switches.
      CheckpointWeightError: names every weight that is missing, unexpected or wrongly shaped.
    """
    path = Path(path)
    file = path
    if path.is_dir() and (path / HEAD_FILE).exists():
        file = path / HEAD_FILE
    tensors, metadata = open_files(weight_files(path) if file.is_dir() else [file])
    weights = _Weights(tensors)
    style = style_of(cfg, weights.names())
    if not file.is_dir():
        _check_switches(file, cfg, metadata)
    slots = head_slots(cfg, style)
    extra = [
        name
        for name in weights.names()
        if not is_redundant(cfg, name) and (not file.is_dir() or is_head_name(cfg, style, name))
    ]
    zeros = {n: s for n, s in zero_tensors(cfg, style).items() if is_head_name(cfg, style, n)}
    _check(file, weights, slots, zeros, extra)
    return _place(weights, slots, cfg.run.param_dtype, mesh)


def _check_switches(file: Path, cfg: ModelConfig, metadata: dict[str, str]) -> None:
    """What a head takes as h is not in its shapes: a wrong switch would only lower acceptance."""
    wanted = mtp_json(cfg)
    try:
        saved = Keys(file, {MTP_KEY: json.loads(metadata.get(MTP_KEY, "{}"))}).within(MTP_KEY).raw
    except ValueError as error:
        raise CheckpointError(f"{file}: its metadata {MTP_KEY} is damaged ({error})") from error
    for key in ("target_hidden", "recycle"):
        if saved.get(key, wanted[key]) != wanted[key]:
            raise CheckpointError(
                f"{file}: the head was trained with {key} {saved[key]!r}, the config says "
                f"{wanted[key]!r}; set mtp_{key}={saved[key]}"
            )
