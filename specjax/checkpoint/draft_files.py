"""Drafts in files: finds whose files a path holds, reads and writes them.

The classes in `specjax.registry.DRAFTS` say which files are theirs, what the config means, and
which tensor holds which array, see `specjax.interfaces.Draft`. Nothing here knows a kind of draft.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from specjax.checked_json import CheckpointError, UnsupportedModelError
from specjax.checkpoint import huggingface as hf
from specjax.checkpoint.huggingface_names import Leaf, row_leaves
from specjax.config import ModelConfig
from specjax.interfaces import Draft, Params
from specjax.parallel import sharding
from specjax.registry import DRAFTS
from specjax.weights import load_tokenizer, open_checkpoint, recognised
from specjax.weights.safetensors import CONFIG, Safetensors


class FilesAt:
    """The files at a path, see `specjax.interfaces.DraftFiles`."""

    def __init__(
        self, path: str | Path, mesh: jax.sharding.Mesh | None = None, tokenizer: Any = None
    ):
        self.path, self.mesh = Path(path), mesh
        self.is_policy = recognised(self.path)
        self.vocabulary = None if tokenizer is None else tokenizer.get_vocab()

    @functools.cached_property
    def _reader(self) -> Any:
        return open_checkpoint(self.path)

    @property
    def file(self) -> Path:
        return self._reader.file

    @property
    def is_directory(self) -> bool:
        """Whether it is a directory in the layout of Hugging Face, with or without a config."""
        return self.path.is_dir() and isinstance(self._reader, Safetensors)

    def config(self) -> dict[str, Any]:
        is_there = not self.is_directory or self.file.exists()
        return self._reader.config() if is_there else {}

    def tensors(self, required: bool = True) -> Mapping[str, Any]:
        try:
            return self._reader.tensors()
        except (CheckpointError, UnsupportedModelError):
            if required:
                raise
            return {}

    def tokenizer(self) -> Any:
        return load_tokenizer(self.path, required=False)

    def model_config(self, as_stored: bool = False) -> ModelConfig:
        return (hf.read_stored_config if as_stored else hf.read_config)(self.path)

    def arrays(self, draft: Draft, dtype: str) -> Params:
        leaves, tensors = row_leaves(draft.rows()), self.tensors()
        tensors = {**tensors, **{name: tensors[other] for name, other in draft.aliases.items()}}
        weights = _with_leading_axes(tensors, leaves)
        fixed = {
            stored.name
            for leaf in leaves
            if leaf.path[0] in draft.fixed
            for stored in leaf.pieces.values()
        }
        # Tensors that no row names have been refused by `read`, or are not needed.
        hf.check_weights(self.path, weights, leaves, {}, (), fixed)
        params = draft.loaded(hf.place_weights(weights, leaves, dtype, self.mesh))
        if self.mesh is None:
            return params
        # `loaded` may have made arrays anew.
        return sharding.put(params, sharding.param_shardings(self.mesh, params, draft.axes()))

    def policy(self, dtype: str) -> Params:
        return hf.load_checkpoint(self.path, dtype, self.mesh)[1]

    def policy_head(self, cfg: ModelConfig) -> Params:
        return hf.load_head(self.path, cfg, self.mesh)


def class_of(files: FilesAt, target: ModelConfig | None = None) -> type[Draft]:
    """Returns the class in `DRAFTS` that drafts from files.

    Raises:
      CheckpointError, UnsupportedModelError: the files are those of no draft.
    """
    if files.path.is_file() and files.path.suffix != ".gguf" and find_draft(files.path.parent):
        raise CheckpointError(
            f"{files.path} is one of the files of a draft head, which is read from its directory; "
            f"name the directory {files.path.parent}"
        )
    return next(kind for kind in DRAFTS.all() if kind.recognises(files, target))


def find_draft(path: str | Path) -> type[Draft] | None:
    """Finds the class of the draft whose weights a directory holds in files of their own.

    Returns:
      the class in `DRAFTS`; None: the path holds something else, such as a model.

    Raises:
      CheckpointError: config.json is damaged.
    """
    files = FilesAt(path)
    if not files.is_directory:
        return None
    kinds = (kind for kind in DRAFTS.all() if kind.has_files)
    return next((kind for kind in kinds if kind.recognises(files, None)), None)


def load_draft_files(
    path: str | Path,
    target: ModelConfig,
    mesh: jax.sharding.Mesh | None = None,
) -> tuple[Draft, Params]:
    """Reads a draft in files of its own, and its parameters.

    Args:
      path: a directory that `find_draft` recognises.
      target: config of the target. Parameters get its `run.param_dtype`; integers stay integers.
      mesh: mesh to put the parameters on, see `specjax.parallel.sharding`; None: default device.

    Raises:
      CheckpointError: there is no draft, a file is missing or damaged, or the draft is of another
        target.
      CheckpointWeightError: names every weight that is missing or wrongly shaped.
      UnsupportedModelError: the files ask for what cannot be computed.
    """
    kind, files = find_draft(path), FilesAt(path, mesh)
    if kind is None:
        raise CheckpointError(
            f"{path} holds no draft head that is known; expected a directory with config.json and "
            "the weights of a head, such as EAGLE-3"
        )
    draft = kind.read(files, target)
    return draft, draft.load(files)


def save_draft_files(path: str | Path, source: Draft, params: Params, dtype: str) -> None:
    """Writes a directory that `load_draft_files` reads with every bit the same.

    It is written beside `path` and renamed when complete; a checkpoint at `path` is replaced.

    Args:
      path: directory to write.
      source: the draft source.
      params: its parameters as they are trained.
      dtype: dtype of the weights on disk; integers keep theirs.

    Raises:
      CheckpointError: `path` exists and is no checkpoint.
      CheckpointWeightError: names the parameters that do not fit the source.
      ValueError: files cannot express the source.
    """
    path, dtype = Path(path).absolute(), hf.dtype_name(dtype)
    if reason := source.unwritable():
        raise ValueError(reason)
    raw, named = source.saved(dtype)
    hf.require_replaceable(path)
    tensors = hf.named_weights(row_leaves(named.rows()), source.stored(params), dtype)
    with hf.replacing(path) as partial:
        hf.write_json(partial / CONFIG, raw)
        hf.write_weights(partial, tensors)


def _with_leading_axes(tensors: Mapping[str, Any], leaves: list[Leaf]) -> dict[str, Any]:
    """Gives tensors the leading axes of length one that their rows have and their files lack."""
    whole = dict(tensors)
    for leaf in leaves:
        for stored in leaf.pieces.values():
            if stored.name not in tensors:
                continue
            shape, wanted = tuple(tensors[stored.name].shape), leaf.row.shape
            lacking = wanted[: max(len(wanted) - len(shape), 0)]
            if lacking and set(lacking) == {1} and shape == wanted[len(lacking) :]:
                array = tensors[stored.name][(slice(None),) * len(shape)]
                whole[stored.name] = np.asarray(array).reshape(wanted)
    return whole
