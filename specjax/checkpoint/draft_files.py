"""Draft sources in files of their own: finds which one a directory holds, reads and writes it.

The classes in `specjax.registry.DRAFTS` say which files are theirs, what the config means, and
which tensor holds which array, see `specjax.interfaces.Draft`. Nothing here knows a kind of draft.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from specjax.checked_json import CheckpointError, UnsupportedModelError
from specjax.checkpoint.huggingface import (
    Weights,
    check_weights,
    dtype_name,
    named_weights,
    place_weights,
    replacing,
    write_json,
    write_weights,
)
from specjax.checkpoint.huggingface_names import Leaf, row_leaves
from specjax.config import ModelConfig
from specjax.interfaces import Draft, Params
from specjax.parallel import sharding
from specjax.registry import DRAFTS
from specjax.weights import open_checkpoint
from specjax.weights.safetensors import CONFIG, Safetensors


def find_draft(path: str | Path) -> type[Draft] | None:
    """Finds the class of the draft source whose weights a directory holds.

    Args:
      path: a local path.

    Returns:
      the class in `DRAFTS`; None: the path holds something else, such as a model.

    Raises:
      CheckpointError: config.json is damaged.
    """
    reader = _reader(Path(path))
    if reader is None:
        return None
    try:
        tensors = reader.tensors()
    except (CheckpointError, UnsupportedModelError):
        tensors = {}  # loading raises the error
    return _class_of(_config(reader), tensors)


def load_draft_files(
    path: str | Path,
    target: ModelConfig,
    mesh: jax.sharding.Mesh | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> tuple[Draft, Params]:
    """Reads a draft source and its parameters.

    Args:
      path: a directory that `find_draft` recognises.
      target: config of the target. Parameters get its `run.param_dtype`; integers stay integers.
      mesh: mesh to put the parameters on, see `specjax.parallel.sharding`; None: default device.
      overrides: settings by hand in place of those of the files, see `Draft.read`.

    Raises:
      CheckpointError: there is no draft, a file is missing or damaged, or the draft is of another
        target.
      CheckpointWeightError: names every weight that is missing or wrongly shaped.
      UnsupportedModelError: the files ask for what cannot be computed.
      ValueError: a setting by hand is unknown, or has an invalid value.
    """
    path = Path(path)
    kind, reader = find_draft(path), _reader(path)
    if kind is None or reader is None:
        raise CheckpointError(
            f"{path} holds no draft head that is known; expected a directory with config.json and "
            "the weights of a head, such as EAGLE-3"
        )
    raw = _config(reader)
    try:
        tensors = reader.tensors()
    except CheckpointError:
        with contextlib.suppress(CheckpointError):  # the config may name another kind of head
            kind.read(reader.file, raw, {}, target, overrides)
        raise
    source = kind.read(reader.file, raw, tensors, target, overrides)
    leaves = row_leaves(source.rows())
    held = {**tensors, **{name: tensors[other] for name, other in source.aliases.items()}}
    weights = Weights(_with_leading_axes(held, leaves))
    fixed = {
        stored.name
        for leaf in leaves
        if leaf.path[0] in source.fixed
        for stored in leaf.pieces.values()
    }
    # Tensors that no row names have been refused by `read`, or are not needed.
    check_weights(path, weights, leaves, {}, (), fixed)
    params = source.loaded(place_weights(weights, leaves, target.run.param_dtype, mesh))
    if mesh is not None:  # `loaded` may have made arrays anew
        params = sharding.put(params, sharding.param_shardings(mesh, params, source.axes()))
    return source, params


def save_draft_files(
    path: str | Path, source: Draft, params: Params, layout: str, dtype: str
) -> None:
    """Writes a directory that `load_draft_files` reads with every bit the same.

    It is written beside `path` and renamed when complete; a checkpoint at `path` is replaced.

    Args:
      path: directory to write.
      source: the draft source.
      params: its parameters as they are trained.
      layout: name of the layout, see `Draft.saved`.
      dtype: dtype of the weights on disk; integers keep theirs.

    Raises:
      CheckpointError: `path` exists and is no checkpoint.
      CheckpointWeightError: names the parameters that do not fit the source.
      ValueError: there is no such layout, or it cannot express the source.
    """
    path, dtype = Path(path).absolute(), dtype_name(dtype)
    raw, named = source.saved(layout, dtype)
    if path.exists() and not (
        (path / CONFIG).exists() or (path.is_dir() and not any(path.iterdir()))
    ):
        raise CheckpointError(f"{path} exists and is no checkpoint; choose another path")
    tensors = named_weights(row_leaves(named.rows()), source.stored(params), dtype)
    with replacing(path) as partial:
        write_json(partial / CONFIG, raw)
        write_weights(partial, tensors)


def _with_leading_axes(tensors: Mapping[str, Any], leaves: list[Leaf]) -> dict[str, Any]:
    """Gives tensors the leading axes of length one that their rows have and their files lack."""
    found = dict(tensors)
    for leaf in leaves:
        for stored in leaf.pieces.values():
            if stored.name not in tensors:
                continue
            shape, wanted = tuple(tensors[stored.name].shape), leaf.row.shape
            lacking = wanted[: max(len(wanted) - len(shape), 0)]
            if lacking and set(lacking) == {1} and shape == wanted[len(lacking) :]:
                whole = tensors[stored.name][(slice(None),) * len(shape)]
                found[stored.name] = np.asarray(whole).reshape(wanted)
    return found


def _reader(path: Path) -> Safetensors | None:
    """Returns the reader of a directory in the layout of Hugging Face; None: it is none."""
    if not path.is_dir():
        return None
    reader = open_checkpoint(path)
    return reader if isinstance(reader, Safetensors) else None


def _config(reader: Safetensors) -> dict[str, Any]:
    return reader.config() if reader.file.exists() else {}


def _class_of(raw: Mapping[str, Any], tensors: Mapping[str, Any]) -> type[Draft] | None:
    classes = (DRAFTS.named(name) for name in DRAFTS.names)
    return next((kind for kind in classes if kind.recognises(raw, tensors)), None)
