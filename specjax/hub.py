"""Finds models: a local directory, or a Hugging Face id such as `Qwen/Qwen3-0.6B`.

A local directory wins. For an id, the local Hugging Face cache is used as it is when it holds the
revision with config, weights and tokenizer; otherwise the files that specjax reads are downloaded
to it: config.json, generation_config.json, tokenizer and chat template, safetensors, and where
there are none, pytorch_model.bin.

The usual variables are read by huggingface_hub, which is imported when an id is first looked for:
HF_HOME, HF_HUB_CACHE, HF_HUB_OFFLINE, HF_ENDPOINT, and HF_TOKEN for private and gated models.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from specjax.checked_json import CheckpointError
from specjax.error_text import shortened
from specjax.shipped import find_shipped
from specjax.tokenizer import MORE_TEMPLATES, TOKENIZER_FILES
from specjax.weights.pickled import BIN, BIN_INDEX
from specjax.weights.safetensors import HEAD_FILE, INDEX, WEIGHTS, files_in_index

_SMALL = (
    "config.json", "generation_config.json", INDEX, BIN_INDEX, *TOKENIZER_FILES,
    f"{MORE_TEMPLATES}/*.jinja",
)  # fmt: skip
_FORMATS = ((WEIGHTS, INDEX), (BIN, BIN_INDEX))  # the first is preferred
_ID = re.compile(r"[A-Za-z0-9_][\w.-]*/[A-Za-z0-9_][\w.-]*")


class ModelNotFoundError(CheckpointError):
    """The name is neither a local path nor a possible Hugging Face id."""


def find_model(name: str | Path, revision: str | None = None, weights: bool = True) -> Path:
    """Finds the local directory of a model; downloads it if necessary.

    Args:
      name: a directory, one of those that specjax ships (`assets/sums`), or a Hugging Face id,
        `owner/name`. A `Path` is never taken for an id.
      revision: branch, tag or commit of an id; None is its main branch.
      weights: whether weights are needed; without them the config and the tokenizer are enough.

    Raises:
      ModelNotFoundError: there is no such directory, and the name cannot be an id.
      CheckpointError: the model cannot be downloaded; one line says why.
    """
    local = find_shipped(os.path.expanduser(name))
    if os.path.exists(local):  # as `Path.exists`, except that it raises nothing
        if revision is not None:
            raise CheckpointError(
                f"revision {revision!r} belongs to a Hugging Face id, and {name} is a local path; "
                "leave one of them out"
            )
        return local
    is_path = isinstance(name, Path) or not _is_id(name)
    if is_path or find_shipped(name.split("/")[0]).is_dir():
        raise ModelNotFoundError(
            f"{name} does not exist; expected a checkpoint directory, or a Hugging Face id such as "
            "Qwen/Qwen3-0.6B"
        )
    cached = _cached(name, revision)
    if cached is not None and (cached / "tokenizer.json").exists() and _has_all(cached, weights):
        return cached
    label = name if revision is None else f"revision {revision!r} of {name}"
    try:
        folder = _snapshot(name, revision, _SMALL)
        for names in _FORMATS if weights else ():
            if not _has_weights(folder):  # all files again: the branch may have moved meanwhile
                files = [*_SMALL, *_weight_names(folder, *names), HEAD_FILE]
                folder = _snapshot(name, revision, files)
    except CheckpointError:
        raise
    except Exception as error:  # three libraries raise theirs
        reason = shortened(" ".join(str(error).split()))
        raise CheckpointError(
            f"there is no directory {name}, and {label} cannot be downloaded: "
            f"{type(error).__name__}: {reason}; check the spelling, the network and "
            "HF_HUB_OFFLINE, or log in (`hf auth login`, or HF_TOKEN) to a gated or private model"
        ) from error
    if not _has_all(folder, weights):
        raise CheckpointError(
            f"{label} is not complete in {folder}; expected config.json, and {WEIGHTS}, the files "
            f"of {INDEX}, or {BIN}: specjax reads these only; if it has them, check the network"
        )
    return folder


def portable(path: str | Path) -> str:
    """A path for comparison between machines: for one in a local cache, its id and commit."""
    parts = Path(path).parts[-3:]
    if len(parts) == 3 and parts[1] == "snapshots" and parts[0].startswith("models--"):
        return f"{parts[0].removeprefix('models--').replace('--', '/')}@{parts[2]}"
    return str(path)


def _is_id(name: str) -> bool:
    """Whether a name has the form `owner/name` of a Hugging Face id."""
    if "--" in name or ".." in name or name.endswith((".git", ".", "-")):
        return False
    return _ID.fullmatch(name) is not None and len(name) <= 96


def _cached(name: str, revision: str | None) -> Path | None:
    """The folder of a revision in the local cache, complete or not; None: there is none."""
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(name, "config.json", revision=revision)
    return Path(found).parent if isinstance(found, str) else None


def _has_all(folder: Path, weights: bool) -> bool:
    """Whether a folder has the config, and with `weights` all files of its weights."""
    return (folder / "config.json").exists() and (not weights or _has_weights(folder))


def _has_weights(folder: Path) -> bool:
    """Whether a folder has all files of its weights, in one of the two formats."""
    return any(
        all((folder / file).exists() for file in _weight_names(folder, *names))
        for names in _FORMATS
    )


def _weight_names(folder: Path, whole: str, index: str) -> list[str]:
    """The weight files that a folder should have, in the format whose files have these names."""
    if (folder / index).exists() and not (folder / whole).exists():
        return files_in_index(folder / index)
    return [whole]


def _snapshot(name: str, revision: str | None, files: Sequence[str]) -> Path:
    import huggingface_hub

    endpoint = os.environ.get("HF_ENDPOINT")
    return Path(
        huggingface_hub.snapshot_download(
            name, revision=revision, allow_patterns=list(files), endpoint=endpoint
        )
    )
