"""Checkpoints in the layout of Hugging Face: config.json, safetensors files, tokenizer files."""

from __future__ import annotations

import json
import math
import mmap
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import safetensors

from specjax.checked_json import CheckpointError, Keys, pointer_problem, read_json
from specjax.tokenizer import TOKENIZER_FILES, load_tokenizer
from specjax.weights import fp8, mxfp4

CONFIG, GENERATION = "config.json", "generation_config.json"
WEIGHTS, INDEX, HEAD_FILE = "model.safetensors", "model.safetensors.index.json", "mtp.safetensors"
_KINDS = {"F": "float", "BF": "bfloat", "I": "int", "U": "uint"}
_OTHERS = {"BOOL": "bool", "F8_E4M3": fp8.DTYPE}


class Tensor:
    """A tensor of a file; indexing reads a part of it.

    Attributes:
      shape: shape in the file.
      dtype: name of its dtype in numpy, or in safetensors if numpy has none.
    """

    def __init__(self, data: mmap.mmap, start: int, name: str, entry: Mapping[str, Any]):
        self._data, self._name = data, name
        self._start = start + entry["data_offsets"][0]
        self.shape = tuple(entry["shape"])
        self.dtype = _dtype(entry["dtype"])

    def __getitem__(self, index: Any) -> np.ndarray:
        count = math.prod(self.shape)
        values = np.frombuffer(self._data, jnp.dtype(self.dtype), count, self._start)
        part = np.array(values.reshape(self.shape)[index])
        # The pages of a mapped file count as the process's memory until they are given up.
        self._data.madvise(mmap.MADV_DONTNEED)
        return part


def _dtype(name: str) -> str:
    """Returns numpy's name of a dtype of safetensors; the name itself if numpy has none."""
    found = re.fullmatch(r"(BF|F|I|U)(\d+)", name)
    return f"{_KINDS[found[1]]}{found[2]}" if found else _OTHERS.get(name, name)


class Safetensors:
    """A directory in the layout of Hugging Face, as a `specjax.interfaces.Reader`.

    A draft head in a file of its own, `mtp.safetensors`, is read together with the model's weights.
    """

    def __init__(self, path: Path):
        self.path, self.file = path, path / CONFIG

    @staticmethod
    def recognises(path: Path) -> bool:
        """Returns whether a path is of this format."""
        return (path / CONFIG).exists()

    def config(self) -> dict[str, Any]:
        """Returns the content of config.json.

        Raises:
          CheckpointError: there is no config.json, or it is no JSON object.
        """
        if self.path.is_file():
            raise CheckpointError(
                f"{self.path} is a file; expected a checkpoint directory or a GGUF file"
            )
        return read_json(self.file)

    def generation(self) -> dict[str, Any]:
        """Returns the content of generation_config.json; empty where there is none."""
        file = self.path / GENERATION
        return read_json(file) if file.exists() else {}

    def tensors(self) -> Mapping[str, Tensor]:
        """Returns lazy arrays by name; matrices in fp8 and MXFP4 are dequantised.

        Raises:
          CheckpointError: a file is missing or damaged, or scales do not fit.
        """
        files = weight_files(self.path)
        if (self.path / HEAD_FILE).exists():
            files.append(self.path / HEAD_FILE)
        raw = read_json(self.file) if self.file.exists() else {}
        tensors, keys = open_files(files)[0], Keys(self.file, raw)
        return mxfp4.dequantised(fp8.dequantised(tensors, keys), keys)

    @property
    def has_tokenizer(self) -> bool:
        """Returns whether `tokenizer` may return one."""
        return any((self.path / name).is_file() for name in TOKENIZER_FILES)

    def tokenizer(self) -> Any:
        """Returns the tokenizer of the directory; None: there is none."""
        return load_tokenizer(self.path)


def open_files(files: Iterable[Path]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Opens files; returns their tensors and their metadata.

    Raises:
      CheckpointError: a file is missing or damaged, or two hold a tensor of the same name.
    """
    tensors: dict[str, Tensor] = {}
    metadata: dict[str, str] = {}
    for file in files:
        data = _mapped(file)
        start = 8 + int.from_bytes(data[:8], "little")
        header = json.loads(data[8:start])
        metadata |= header.pop("__metadata__", None) or {}
        for name, entry in header.items():
            if name in tensors:
                raise CheckpointError(f"{file}: {name} is in another file as well; keep one")
            tensors[name] = Tensor(data, start, name, entry)
    return tensors, metadata


def _mapped(file: Path) -> mmap.mmap:
    """Maps a file, whose header the library has checked."""
    try:
        with safetensors.safe_open(file, framework="numpy"), file.open("rb") as stream:
            return mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError:
        raise CheckpointError(f"{file} does not exist") from None
    except (OSError, safetensors.SafetensorError) as error:
        raise CheckpointError(
            pointer_problem(file)
            or f"{file} is damaged or no safetensors file ({error}); fetch or export it again"
        ) from error


def weight_files(path: Path) -> list[Path]:
    """Returns the files of a model's weights.

    Raises:
      CheckpointError: there are no files, or some are missing.
    """
    if (path / WEIGHTS).exists():
        return [path / WEIGHTS]
    if not (path / INDEX).exists():
        torch_files = sorted(f.name for f in path.glob("*.bin"))
        hint = f"; convert {', '.join(torch_files)} to safetensors" if torch_files else ""
        raise CheckpointError(f"{path}: expected {WEIGHTS} or {INDEX}, found neither{hint}")
    return listed_files(path / INDEX)


def listed_files(index: Path) -> list[Path]:
    """Returns the weight files that an index lists.

    Raises:
      CheckpointError: the index is malformed, or files are missing.
    """
    names = files_in_index(index)
    missing = [name for name in names if not index.with_name(name).exists()]
    if missing:
        raise CheckpointError(
            f"{index} lists files that are missing: {', '.join(missing)}; fetch them"
        )
    return [index.with_name(name) for name in names]


def files_in_index(index: Path) -> list[str]:
    """Returns the names of the weight files that an index lists, in order.

    Raises:
      CheckpointError: the index lists no files, or is malformed.
    """
    keys = Keys(index, read_json(index))
    names = keys.within("weight_map").raw.values()
    # Only names without a directory: a checkpoint must not read files of other directories.
    if not names or not all(isinstance(n, str) and n and Path(n).name == n for n in names):
        raise keys.error("weight_map", "an object of tensors and the names of their files")
    return sorted(set(names))
