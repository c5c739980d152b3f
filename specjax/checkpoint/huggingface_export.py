"""Writing Hugging Face checkpoint directories and draft-head files."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import safetensors.numpy

from specjax.checked_json import CheckpointError
from specjax.checkpoint.huggingface_config import (
    MTP_KEY,
    config_json,
    dtype_name,
    generation_json,
    mtp_json,
)
from specjax.checkpoint.huggingface_names import (
    HEAD_STYLES,
    Slot,
    Tensor,
    head_slots,
    is_head_name,
    policy_slots,
    raise_problems,
    style_on_export,
    tensors_of,
    zero_tensors,
)
from specjax.config import ModelConfig
from specjax.models.families import family_of
from specjax.models.transformer import Params
from specjax.weights import load_tokenizer
from specjax.weights.safetensors import HEAD_FILE, INDEX, TOKENIZER_FILES, WEIGHTS


class _Written(NamedTuple):
    """A tensor to write: its bytes are made only when its file is written."""

    name: str
    shape: tuple[int, ...]
    read: Callable[[], np.ndarray]


def save_checkpoint(
    path: str | Path,
    cfg: ModelConfig,
    params: Params,
    head: Params | None = None,
    tokenizer_dir: str | Path | None = None,
    dtype: str | None = None,
    max_shard_bytes: int = 4 << 30,
) -> None:
    """Writes a directory that `load_checkpoint` and transformers load.

    It is written beside `path` and renamed when complete; a checkpoint that was there is replaced.

    Args:
      params, head: stacked policy parameters and, if there is one, the draft head.
      tokenizer_dir: a directory whose tokenizer files and chat template are copied, or another
        checkpoint that holds a tokenizer.
      dtype: dtype on disk, the parameters' own by default.
      max_shard_bytes: size at which a further weight file is begun; also the host memory needed.

    Raises:
      CheckpointWeightError: parameters that do not fit `cfg`, by name.
      CheckpointError: `path` holds something else than a checkpoint; no tokenizer files found.
      UnsupportedModelError: `cfg.model_type` cannot express the config.
    """
    path = Path(path).absolute()
    dtype = dtype_name(dtype or params["embed"].dtype)
    config = config_json(cfg, head is not None, dtype)
    if path.exists() and not ((path / "config.json").exists() or _is_empty_dir(path)):
        raise CheckpointError(f"{path} exists and is no checkpoint; choose another path")
    style = style_on_export(cfg) if head is not None else None
    body = _named(policy_slots(cfg), params, dtype)
    own_file = family_of(cfg.model_type).head_style is None
    if head is not None and not own_file:
        body += _named(head_slots(cfg, style), head, dtype)
    body += _zeros(cfg, None if own_file else style, dtype)
    with replacing(path) as partial:
        _write_json(partial / "config.json", config)
        _write_json(partial / "generation_config.json", generation_json(cfg))
        _write_weights(partial, body, jnp.dtype(dtype), max_shard_bytes)
        if head is not None and own_file:
            save_head(partial / HEAD_FILE, cfg, head, dtype)
        if tokenizer_dir is not None:
            copy_tokenizer(Path(tokenizer_dir), partial)


def save_head(path: str | Path, cfg: ModelConfig, head: Params, dtype: str | None = None) -> None:
    """Writes a draft head alone, without embedding and language-model head, to one file.

    The names are MiMo's for hidden-first heads and DeepSeek's for embedding-first ones.

    Raises:
      CheckpointWeightError: parameters that do not fit `cfg`, by name.
    """
    path, style = Path(path).absolute(), style_on_export(cfg)
    dtype = dtype_name(dtype or head["blocks"][0]["proj"].dtype)
    tensors = _named(head_slots(cfg, style), head, dtype)
    tensors += [t for t in _zeros(cfg, style, dtype) if is_head_name(cfg, style, t.name)]
    switches = {**mtp_json(cfg), "concat": HEAD_STYLES[style].concat}
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    data = {t.name: t.read() for t in tensors}
    metadata = {"format": "pt", MTP_KEY: json.dumps(switches)}
    safetensors.numpy.save_file(data, partial, metadata=metadata)
    partial.replace(path)


def _named(slots: list[Slot], params: Params, dtype: str) -> list[_Written]:
    """(name, shape, function that reads the tensor) of every tensor, after checking shapes."""
    problems = []
    known = {s.path: s.shape for s in slots}
    got = {
        tuple(p.key for p in path): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(params)
    }
    for key in known.keys() | got.keys():
        label = "/".join(map(str, key))
        if key not in got:
            problems.append(f"missing: {label}, expected {list(known[key])}")
        elif key not in known:
            problems.append(f"unexpected: {label}, {list(got[key].shape)}")
        elif got[key].shape != known[key]:
            problems.append(
                f"wrong shape: {label}, expected {list(known[key])}, got {list(got[key].shape)}"
            )
    raise_problems("the parameter tree", sorted(problems))
    return [
        _Written(name, tensor.shape, _reader(tensor, got, jnp.dtype(dtype)))
        for name, tensor in tensors_of(slots).items()
    ]


def _reader(tensor: Tensor, arrays: Mapping[tuple, Any], dtype: np.dtype):
    def read() -> np.ndarray:
        out = np.empty(tensor.shape, dtype)
        for slot, at, stored in tensor.holds:
            array = arrays[slot.path]
            piece = np.asarray(array[at] if at else array)
            if slot.swap:
                piece = np.roll(piece, piece.shape[0] // 2, axis=0)
            where = [slice(None)] * out.ndim
            if (part := stored.part) is not None:
                where[part.axis] = slice(part.start, part.stop, part.step)
            out[tuple(where)] = piece.swapaxes(-1, -2) if stored.transpose else piece
        return out

    return read


def _zeros(cfg: ModelConfig, style: str | None, dtype: str) -> list[_Written]:
    return [
        _Written(name, shape, lambda shape=shape: np.zeros(shape, jnp.dtype(dtype)))
        for name, shape in zero_tensors(cfg, style).items()
    ]


def _write_weights(folder: Path, tensors: list[_Written], dtype: np.dtype, limit: int) -> None:
    """One file, or several and an index, each at most `limit` bytes where a tensor allows it."""
    shards, size, total = [[]], 0, 0
    for tensor in tensors:
        nbytes = int(np.prod(tensor.shape)) * dtype.itemsize
        if shards[-1] and size + nbytes > limit:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size, total = size + nbytes, total + nbytes
    count, weight_map = len(shards), {}
    for number, shard in enumerate(shards, 1):
        file = WEIGHTS if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"
        data = {t.name: t.read() for t in shard}
        safetensors.numpy.save_file(data, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(data, file)
    if count > 1:
        _write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A directory to fill that takes the place of `path` when the block ends well."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    old = path.with_name(f".{path.name}.{os.getpid()}.old")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        yield partial
        if path.exists():
            shutil.rmtree(old, ignore_errors=True)
            path.rename(old)
        partial.rename(path)
    except BaseException:
        _remove_for_good(partial)
        if old.exists() and not path.exists():
            old.rename(path)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _remove_for_good(path: Path) -> None:
    """Threads of a save that failed may still write: what they make anew goes as well."""
    for wait in (0.05, 0.1, 0.2, 0.4, 0.8):
        shutil.rmtree(path, ignore_errors=True)
        time.sleep(wait)
        if not path.exists():
            return


def _is_empty_dir(path: Path) -> bool:
    return path.is_dir() and not any(path.iterdir())


def copy_tokenizer(source: Path, target: Path) -> None:
    """Copies tokenizer files and chat template, or writes those of a checkpoint that has its
    tokenizer elsewhere; `CheckpointError` where there is none."""
    found = [name for name in TOKENIZER_FILES if (source / name).is_file()]
    if not found:
        tokenizer = load_tokenizer(source, required=False)
        if tokenizer is None:
            raise CheckpointError(f"{source} holds no tokenizer; expected one of {TOKENIZER_FILES}")
        tokenizer.save_pretrained(target)
    for name in found:
        shutil.copyfile(source / name, target / name)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")
