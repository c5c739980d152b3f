"""Checkpoints whose weights are `pytorch_model.bin`, files of `torch.save`, read without torch.

Such a file is a zip archive. Its entry `data.pkl` is a pickle: a program that makes a dictionary of
tensors, each a view of a storage, and the entries `data/0`, `data/1`, .. hold the storages' bytes.
A pickle may name any function of Python and have it called. Here it finds those that make tensors,
and nothing else is imported.
"""

from __future__ import annotations

import collections
import io
import mmap
import pickle
import struct
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from specjax.checked_json import CheckpointError, UnsupportedModelError, pointer_problem
from specjax.weights.safetensors import CONFIG, INDEX, WEIGHTS, Safetensors, listed_files

BIN, BIN_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
_STORAGES = {
    "DoubleStorage": np.float64, "FloatStorage": np.float32, "HalfStorage": np.float16,
    "BFloat16Storage": ml_dtypes.bfloat16, "LongStorage": np.int64, "IntStorage": np.int32,
    "ShortStorage": np.int16, "CharStorage": np.int8, "ByteStorage": np.uint8,
    "BoolStorage": np.bool_,
}  # fmt: skip


class Pickled(Safetensors):
    """A directory in the layout of Hugging Face with files of `torch.save`, a `Reader`.

    A directory that holds safetensors as well is read from those.
    """

    @staticmethod
    def recognises(path: Path) -> bool:
        """Returns whether a path is of this format."""
        safe = (path / WEIGHTS).exists() or (path / INDEX).exists()
        files = (path / BIN).exists() or (path / BIN_INDEX).exists()
        return files and not safe and (path / CONFIG).exists()

    def tensors(self) -> Mapping[str, Tensor]:
        """Returns lazy arrays by name.

        Raises:
          CheckpointError: a file is missing or damaged.
          UnsupportedModelError: a file is of another format of torch, or names what is no tensor.
        """
        whole = self.path / BIN
        files = [whole] if whole.exists() else listed_files(self.path / BIN_INDEX)
        tensors = [pair for file in files for pair in read_tensors(file).items()]
        if len(dict(tensors)) < len(tensors):
            raise CheckpointError(f"{self.path}: two of its files hold the same tensor; keep one")
        return dict(tensors)


class Tensor:
    """A tensor of a file; indexing reads a part of it.

    Attributes:
      shape: shape of the tensor.
      dtype: name of its dtype in numpy.
    """

    def __init__(self, view: np.ndarray):
        self._view = view
        self.shape, self.dtype = view.shape, view.dtype.name

    def __getitem__(self, index: Any) -> np.ndarray:
        part = np.array(self._view[index])
        # A byte of a truth value may hold any number; NumPy computes with 0 and 1 alone.
        return part.view(np.uint8) != 0 if part.dtype == np.bool_ else part


def read_tensors(file: Path) -> dict[str, Tensor]:
    """Returns the tensors of a file of `torch.save` by name, without reading their numbers.

    Raises:
      CheckpointError: the file is missing or damaged.
      UnsupportedModelError: it names what is no tensor.
    """
    try:
        with file.open("rb") as stream:
            archive = zipfile.ZipFile(stream)
            names = archive.namelist()
            [name] = [name for name in names if name.endswith("data.pkl")]
            folder = name.removesuffix("data.pkl")
            if f"{folder}byteorder" in names and archive.read(f"{folder}byteorder") != b"little":
                raise ValueError("its numbers are not little-endian")
            content = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
            value = _Unpickler(file, archive, folder, content).load()
    except (CheckpointError, UnsupportedModelError):
        raise
    except Exception as error:  # a damaged pickle or archive raises almost anything
        raise CheckpointError(
            pointer_problem(file)
            or f"{file} is damaged, or no file of torch.save 1.6 or later ({error}); "
            "fetch the file again, or convert it to safetensors"
        ) from error
    tensors = value.values() if isinstance(value, dict) else ()
    if not tensors or not all(isinstance(tensor, Tensor) for tensor in tensors):
        raise UnsupportedModelError(
            f"{file} holds something other than a dictionary of tensors by name; save the model's "
            "state_dict alone"
        )
    return value


class _Unpickler(pickle.Unpickler):
    """Runs a pickle that makes tensors.

    Args:
      file: the file, for messages.
      archive: its zip archive.
      folder: the folder in the archive.
      content: all bytes of the file, which are read where a tensor is used.
    """

    def __init__(self, file: Path, archive: zipfile.ZipFile, folder: str, content: mmap.mmap):
        super().__init__(io.BytesIO(archive.read(f"{folder}data.pkl")))
        self._file, self._archive, self._folder, self._content = file, archive, folder, content
        self._admitted = {
            "collections.OrderedDict": collections.OrderedDict,
            "torch._utils._rebuild_tensor_v2": self._tensor,
            "torch._utils._rebuild_parameter": lambda tensor, *_: tensor,
            **{f"torch.{name}": np.dtype(kind) for name, kind in _STORAGES.items()},
        }

    def find_class(self, module: str, name: str) -> Any:
        if f"{module}.{name}" not in self._admitted:
            raise UnsupportedModelError(
                f"{self._file} names {module}.{name}, which was not run; expected tensors alone"
            )
        return self._admitted[f"{module}.{name}"]

    def persistent_load(self, pid: Any) -> tuple[np.dtype, memoryview]:
        """Returns dtype and bytes of a storage, which stay in the file until they are used."""
        _, dtype, key, _, count = pid
        entry = self._archive.getinfo(f"{self._folder}data/{key}")
        size = count * dtype.itemsize
        if entry.compress_type != zipfile.ZIP_STORED or entry.file_size < size:
            raise ValueError(f"storage {key} is compressed or shorter than {size} bytes")
        header = self._content[entry.header_offset : entry.header_offset + 30]
        begin = entry.header_offset + 30 + sum(struct.unpack("<HH", header[26:]))
        return dtype, memoryview(self._content)[begin : begin + size]

    def _tensor(self, storage, offset: int, shape: tuple, strides: tuple, *_: Any) -> Tensor:
        """Returns the view of a storage that `torch._utils._rebuild_tensor_v2` would make.

        numpy raises ValueError for a view that leaves the storage.
        """
        dtype, content = storage
        steps = [step * dtype.itemsize for step in strides]
        return Tensor(np.ndarray(shape, dtype, content, offset * dtype.itemsize, steps))
