"""GGUF, the container of llama.cpp: typed metadata and named tensors in one file.

    "GGUF"  version u32  number of tensors u64  number of keys u64
    keys:     name, type u32, value; an array is its type u32, its length u64 and its items
    tensors:  name, number of dimensions u32, dimensions u64 (the innermost first), type u32,
              offset u64
    padding to `general.alignment`, then the data that the offsets count from

A string is its length u64 and UTF-8. Numbers are little-endian. This file handles the container
only, not models.
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from specjax.checked_json import CheckpointError, UnsupportedModelError, pointer_problem

_MAGIC, _VERSIONS = b"GGUF", (2, 3)
_ALIGNMENT = "general.alignment"
_STRING, _ARRAY, _FLOAT32 = 8, 9, 6
_NUMBERS = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip


class Stored(NamedTuple):
    """A tensor in a file.

    Attributes:
      shape: its dimensions, the outermost first, as in numpy.
      kind: number of its type, see `gguf.GGMLQuantizationType`.
      offset: position of its first byte in the file.
    """

    shape: tuple[int, ...]
    kind: int
    offset: int


class GGUFFile:
    """A GGUF file: its metadata, and tensors that are read on demand.

    Attributes:
      file: path of the file.
      metadata: numbers, strings, booleans, and lists of them, by key. A float32 number is read as
        the shortest decimal that rounds to it.
      tensors: stored tensors, by name.

    Raises:
      CheckpointError: the file is absent, damaged, or no GGUF file.
      UnsupportedModelError: the file is of another version or byte order.
    """

    def __init__(self, file: Path):
        self.file = file
        try:
            with file.open("rb") as stream:
                self._bytes = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        except FileNotFoundError:
            raise CheckpointError(f"{file} does not exist; expected a GGUF file") from None
        except (OSError, ValueError) as error:  # ValueError: the file is empty
            raise self.damaged(str(error)) from error
        self._at = 0
        if self._bytes[:4] != _MAGIC:
            raise CheckpointError(
                pointer_problem(file)
                or f"{file} is no GGUF file: expected it to begin with 'GGUF', got "
                f"{self._bytes[:4]!r}; fetch it again, or name a checkpoint directory"
            )
        self._at = 4
        try:
            self._read_header()
        except UnsupportedModelError:
            raise
        except (struct.error, ValueError, KeyError, TypeError, ArithmeticError) as error:
            raise self.damaged(f"its header at byte {self._at}: {error}") from error

    def damaged(self, why: str) -> CheckpointError:
        """Returns the error for a file that violates the format."""
        return CheckpointError(f"{self.file} is damaged or cut off: {why}; fetch it again")

    def read(self, name: str, count: int) -> np.ndarray:
        """Returns the first `count` bytes of a tensor [count], without a copy."""
        offset = self.tensors[name].offset
        if offset + count > len(self._bytes):
            raise self.damaged(
                f"tensor {name} needs bytes {offset} to {offset + count}, and the file has "
                f"{len(self._bytes)}"
            )
        return np.frombuffer(self._bytes, np.uint8, count, offset)

    # --- reading the header ------------------------------------------------------------------

    def _read_header(self) -> None:
        version = self._number("I")
        if version not in _VERSIONS:
            raise UnsupportedModelError(
                f"{self.file}: expected a little-endian GGUF file of version 2 or 3, got {version}"
            )
        tensors, keys = self._count(), self._count()
        self.metadata: dict[str, Any] = {}
        for _ in range(keys):
            name = self._text()
            self.metadata[name] = self._value(self._number("I"))
        self.tensors: dict[str, Stored] = {}
        for _ in range(tensors):
            name, dimensions = self._text(), self._number("I")
            shape = struct.unpack(f"<{dimensions}Q", self._take(8 * dimensions))[::-1]
            self.tensors[name] = Stored(shape, self._number("I"), self._number("Q"))
        if len(self.metadata) < keys or len(self.tensors) < tensors:
            raise ValueError("a name occurs twice")
        start = self._at + -self._at % int(self.metadata.get(_ALIGNMENT, 32))
        self.tensors = {
            name: tensor._replace(offset=start + tensor.offset)
            for name, tensor in self.tensors.items()
        }

    def _take(self, count: int) -> bytes:
        self._at += count
        return self._bytes[self._at - count : self._at]

    def _number(self, code: str) -> Any:
        return struct.unpack("<" + code, self._take(struct.calcsize("<" + code)))[0]

    def _count(self) -> int:
        """Reads the number of items that follow; each has at least one byte."""
        count = self._number("Q")
        if count > len(self._bytes) - self._at:
            raise ValueError(f"it claims {count} items")
        return count

    def _text(self) -> str:
        return self._take(self._count()).decode("utf-8")

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._text()
        if kind == _ARRAY:
            inner, length = self._number("I"), self._count()
            if inner == _STRING:
                return [self._text() for _ in range(length)]
            code = f"{length}{_NUMBERS[inner]}"
            values = struct.unpack("<" + code, self._take(struct.calcsize("<" + code)))
            return [_shortest(v) for v in values] if inner == _FLOAT32 else list(values)
        value = self._number(_NUMBERS[kind])
        return _shortest(value) if kind == _FLOAT32 else value


def _shortest(value: float) -> float:
    """Returns the shortest decimal that rounds to a float32: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))
