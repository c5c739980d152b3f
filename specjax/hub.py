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
from specjax.error_text import first_line
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
    if isinstance(name, Path) or not _is_id(name):
        raise ModelNotFoundError(
            f"{name} does not exist; expected a checkpoint directory, or a Hugging Face id such as "
            "Qwen/Qwen3-0.6B"
        )
    owner = find_shipped(name.split("/")[0])
    if owner.is_dir():
        raise ModelNotFoundError(
            f"{name} does not exist; expected a checkpoint directory (it is not taken for a "
            f"Hugging Face id because {owner} is a directory)"
        )
    if revision is not None and not re.fullmatch(r"[\w.-]+(/[\w.-]+)*", revision):
        raise CheckpointError(f"revision: expected a branch, tag or commit, got {revision!r}")
    cached = _cached(name, revision)
    if cached is not None and _is_complete(cached, weights):
        return cached
    from huggingface_hub import constants, is_offline_mode

    if is_offline_mode():
        if cached is not None and _is_complete(cached, weights, tokenizer=False):
            return cached
        place = "only in part in" if cached is not None else "not in"
        raise CheckpointError(
            f"{_label(name, revision)} is {place} the local cache {constants.HF_HUB_CACHE}, "
            "there is no directory of that name, and HF_HUB_OFFLINE forbids to download it"
        )
    return _downloaded(name, revision, weights, cached)


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


def _label(name: str, revision: str | None) -> str:
    return name if revision is None else f"revision {revision!r} of {name}"


# --- the local cache ----------------------------------------------------------------------------


def _cached(name: str, revision: str | None) -> Path | None:
    """The folder of a revision in the local cache, complete or not; None: there is none."""
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(name, "config.json", revision=revision)
    return Path(found).parent if isinstance(found, str) else None


def _is_complete(folder: Path, weights: bool, tokenizer: bool = True) -> bool:
    """Whether a folder has all files that are read."""
    needed = ["config.json", "tokenizer.json"] if tokenizer else ["config.json"]
    complete = all((folder / name).exists() for name in needed)
    return complete and (not weights or _has_weights(folder))


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


# --- downloads ----------------------------------------------------------------------------------


def _downloaded(name: str, revision: str | None, weights: bool, cached: Path | None) -> Path:
    """Downloads the missing files of a revision; returns its folder in the local cache."""
    try:
        folder = _snapshot(name, revision, _SMALL)
        if weights and (folder / "config.json").exists():
            # All of them again: the branch may have moved meanwhile.
            files = [*_weight_names(folder, WEIGHTS, INDEX), HEAD_FILE]
            folder = _snapshot(name, revision, [*_SMALL, *files])
            if not _has_weights(folder):
                files = _weight_names(folder, BIN, BIN_INDEX)
                folder = _snapshot(name, revision, [*_SMALL, *files])
    except CheckpointError:
        raise
    except Exception as error:  # three libraries raise theirs
        if _is_connection_error(error) and cached is not None:
            if _is_complete(cached, weights, tokenizer=False):
                return cached
        raise CheckpointError(_reason(name, revision, error)) from error
    if not (folder / "config.json").exists():
        raise CheckpointError(
            f"{_label(name, revision)} has no config.json; expected a model in the layout of "
            "Hugging Face"
        )
    if weights and not _has_weights(folder):
        raise CheckpointError(
            f"{_label(name, revision)} has no {WEIGHTS} and no complete set of the files of "
            f"{INDEX}, and no {BIN}; specjax reads these only (if it has them, its download was "
            f"interrupted: check the network, or complete {folder})"
        )
    return folder


def _snapshot(name: str, revision: str | None, files: Sequence[str]) -> Path:
    import huggingface_hub

    endpoint = os.environ.get("HF_ENDPOINT")
    return Path(
        huggingface_hub.snapshot_download(
            name, revision=revision, allow_patterns=list(files), endpoint=endpoint
        )
    )


def _is_connection_error(error: Exception) -> bool:
    from huggingface_hub import errors

    return not isinstance(error, (errors.HfHubHTTPError, errors.HFValidationError))


def _reason(name: str, revision: str | None, error: Exception) -> str:
    """One line about an error of huggingface_hub."""
    from huggingface_hub import constants, errors

    label = _label(name, revision)
    login = "log in (`hf auth login`, or HF_TOKEN)"
    if isinstance(error, errors.GatedRepoError):
        return f"{label} is gated: ask for access on its page, then {login}"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{name} has no revision {revision or 'main'!r}; expected a branch, tag or commit"
    if isinstance(error, errors.RepositoryNotFoundError):
        return (
            f"there is no directory {name}, and no model of that id that may be read: check the "
            f"spelling, or {login} if it is private"
        )
    if isinstance(error, errors.HfHubHTTPError):
        return f"{label} cannot be downloaded: {first_line(error)}"
    return (
        f"there is no directory {name}, {label} is not in the local cache "
        f"{constants.HF_HUB_CACHE}, and it cannot be downloaded: {first_line(error)}; check the "
        "network, or copy the model here"
    )
