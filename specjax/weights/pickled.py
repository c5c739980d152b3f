"""Checkpoints whose weights are `pytorch_model.bin`, files of `torch.save`, read without torch.

Such a file is a zip archive. Its entry `data.pkl` is a pickle: a program that makes a dictionary of
tensors, each a view of a storage, and the entries `data/0`, `data/1`, .. hold the storages' bytes.
A pickle may name any function of Python and have it called, so that reading it the usual way runs
whatever its author wrote. `_Machine` runs the instructions that make dictionaries, lists, tuples,
numbers and tensors, imports nothing and calls nothing: what a pickle names besides tensors is
refused by its name. Values may be nested and shared as their author likes, so that nothing here
compares, hashes or prints one of them before its type is known: the time that a file takes is
in proportion to its size.
"""

from __future__ import annotations

import io
import math
import mmap
import pickletools
import struct
import zipfile
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from specjax.checked_json import CheckpointError, UnsupportedModelError, pointer_problem
from specjax.weights.safetensors import CONFIG, INDEX, WEIGHTS, Safetensors, files_in_index

BIN, BIN_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
_STORAGES = {
    "DoubleStorage": np.dtype(np.float64),
    "FloatStorage": np.dtype(np.float32),
    "HalfStorage": np.dtype(np.float16),
    "BFloat16Storage": np.dtype(ml_dtypes.bfloat16),
    "LongStorage": np.dtype(np.int64),
    "IntStorage": np.dtype(np.int32),
    "ShortStorage": np.dtype(np.int16),
    "CharStorage": np.dtype(np.int8),
    "ByteStorage": np.dtype(np.uint8),
    "BoolStorage": np.dtype(np.bool_),
}
_DICT = "collections.OrderedDict"
_TENSOR, _PARAMETER = "torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_parameter"
_ADMITTED = {_DICT, _TENSOR, _PARAMETER, *(f"torch.{name}" for name in _STORAGES)}
_LEGACY = b"\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."  # the magic number that begins a file before 1.6
_LARGEST_PICKLE = 1 << 26  # bytes; that of a model of a trillion parameters is a few MB
_LONGEST_ORDER = 16  # bytes of the entry that names the byte order
_MOST_SIZES = 64  # of a tensor, as in torch
_ADVICE = "fetch the file again, or convert it to safetensors"
# What the standard library raises for damaged archives.
_DAMAGES = (
    OSError,
    EOFError,
    RuntimeError,
    ValueError,
    struct.error,
    zipfile.BadZipFile,
    zlib.error,
)


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
          CheckpointError: a file is missing or damaged, or two hold a tensor of the same name.
          UnsupportedModelError: a file is of another format of torch, or names what is no tensor.
        """
        found: dict[str, Tensor] = {}
        for file in self._files():
            for name, tensor in read_tensors(file).items():
                if name in found:
                    raise CheckpointError(f"{file}: {name} is in another file as well; keep one")
                found[name] = tensor
        return found

    def _files(self) -> list[Path]:
        if (self.path / BIN).exists():
            return [self.path / BIN]
        names = files_in_index(self.path / BIN_INDEX)
        missing = [name for name in names if not (self.path / name).exists()]
        if missing:
            raise CheckpointError(
                f"{self.path / BIN_INDEX} lists files that are missing: {', '.join(missing)}; "
                "fetch them"
            )
        return [self.path / name for name in names]


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
      UnsupportedModelError: it is of another format of torch, or names what is no tensor.
    """
    try:
        with file.open("rb") as stream:
            start = stream.read(2 + len(_LEGACY))
            if start[2:] == _LEGACY:
                raise UnsupportedModelError(
                    f"{file} is in torch's legacy format, from before version 1.6, expected its "
                    "zip format; load and save it again with torch.save, or convert it to "
                    "safetensors"
                )
            archive = _Archive(file, zipfile.ZipFile(stream))
            content = archive.pickle()
            whole = np.frombuffer(mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
            value = _Machine(file, lambda storage: _stored(archive, whole, storage)).run(content)
    except (CheckpointError, UnsupportedModelError):
        raise
    except FileNotFoundError:
        raise CheckpointError(f"{file} does not exist") from None
    except _DAMAGES as error:
        raise CheckpointError(
            pointer_problem(file)
            or f"{file} is damaged or no file of torch.save ({error}); {_ADVICE}"
        ) from error
    if not isinstance(value, dict):
        raise UnsupportedModelError(
            f"{file} holds {_shown(value)}, expected a dictionary of tensors by name; save the "
            "model's state_dict"
        )
    for name, tensor in value.items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            raise UnsupportedModelError(
                f"{file}: {_shown(name)} is {_shown(tensor)}, expected a name and its tensor; save "
                "the model's state_dict alone"
            )
    return value


# --- the archive ----------------------------------------------------------------------------------


class _Archive:
    """The zip archive of a file, whose entries are not compressed."""

    def __init__(self, file: Path, archive: zipfile.ZipFile):
        self._file, self._archive = file, archive
        pickles = [n for n in archive.namelist() if n.endswith("data.pkl")]
        if any(n.endswith("constants.pkl") for n in archive.namelist()):
            raise UnsupportedModelError(
                f"{file} is a TorchScript program, expected the weights of torch.save; save the "
                "model's state_dict"
            )
        if len(pickles) != 1:
            raise CheckpointError(
                f"{file}: expected a zip archive of torch.save with one data.pkl, got "
                f"{len(pickles)} of them; {_ADVICE}"
            )
        self._folder = pickles[0].removesuffix("data.pkl")
        order = self._folder + "byteorder"
        if order in archive.namelist() and self._read(order, _LONGEST_ORDER) != b"little":
            raise UnsupportedModelError(
                f"{file} was written on a machine of another byte order, expected little-endian "
                "numbers; convert it to safetensors there"
            )

    def pickle(self) -> bytes:
        """Returns the content of data.pkl."""
        return self._read(self._folder + "data.pkl", _LARGEST_PICKLE)

    def _read(self, name: str, most: int) -> bytes:
        """Returns the content of an entry of so many bytes at most."""
        entry = self._entry(name)
        if entry.file_size > most:
            raise CheckpointError(
                f"{self._file}: its entry {name} has {entry.file_size} bytes, expected at most "
                f"{most}; {_ADVICE}"
            )
        return self._archive.read(entry)

    def _entry(self, name: str) -> zipfile.ZipInfo:
        """Returns an entry, which is not compressed: the file's size bounds what is read of it."""
        try:
            entry = self._archive.getinfo(name)
        except KeyError:
            raise CheckpointError(f"{self._file} lacks its entry {name}; {_ADVICE}") from None
        if entry.compress_type != zipfile.ZIP_STORED or entry.flag_bits & 1:
            raise UnsupportedModelError(
                f"{self._file}: {name} is compressed or encrypted, expected plain bytes, as "
                "torch.save writes them; save it again"
            )
        return entry

    def place(self, key: str) -> tuple[int, int]:
        """Returns where in the file the bytes of a storage begin, and how many they are."""
        name = f"{self._folder}data/{key}"
        entry = self._entry(name)
        with self._file.open("rb") as stream:
            stream.seek(entry.header_offset)
            header = stream.read(30)
        if len(header) < 30 or header[:4] != b"PK\x03\x04":
            raise CheckpointError(f"{self._file} is damaged at its entry {name}; {_ADVICE}")
        start = entry.header_offset + 30 + sum(struct.unpack("<HH", header[26:30]))
        return start, entry.file_size


class _Storage(NamedTuple):
    """A storage as a pickle names it."""

    dtype: np.dtype
    key: str
    count: int


def _stored(archive: _Archive, whole: np.ndarray, storage: _Storage) -> np.ndarray:
    """Returns the numbers of a storage, which stay in the file until they are used."""
    start, size = archive.place(storage.key)
    wanted = storage.count * storage.dtype.itemsize
    if size < wanted or start + wanted > whole.size:
        raise _Wrong(
            f"storage {storage.key} has {min(size, whole.size - start)} bytes, expected {wanted} "
            f"for {storage.count} numbers of {storage.dtype.name}"
        )
    return whole[start : start + wanted].view(storage.dtype)


# --- the pickle -----------------------------------------------------------------------------------


class _Wrong(Exception):
    """A pickle is damaged; the message is completed by `_Machine.run`."""


class _Global(str):
    """The name of a function or class, which is never imported."""

    __slots__ = ()


class _Mark:
    """The mark that a pickle puts on its stack."""


_MARK = _Mark()
_NUMBERS = {"BININT", "BININT1", "BININT2", "LONG1", "LONG4", "INT", "LONG", "FLOAT", "BINFLOAT"}
_TEXTS = {"BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "UNICODE"}
_VALUES = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_NEW: dict[str, Callable[[], Any]] = {"EMPTY_DICT": dict, "EMPTY_LIST": list, "EMPTY_TUPLE": tuple}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


class _Machine:
    """Runs the instructions of a pickle that make tensors and plain containers.

    Args:
      file: file of the pickle, for messages.
      numbers: returns the array of a storage.
    """

    def __init__(self, file: Path, numbers: Callable[[_Storage], np.ndarray]):
        self._file, self._numbers = file, numbers
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}

    def run(self, content: bytes) -> Any:
        """Returns the value that a pickle makes."""
        try:
            for code, argument, _ in pickletools.genops(io.BytesIO(content)):
                if code.name == "STOP":
                    return self._pop()
                self._step(code.name, argument)
            raise _Wrong("it has no end")
        except UnsupportedModelError:
            raise
        except (_Wrong, ValueError, TypeError, KeyError, IndexError, OverflowError) as error:
            raise CheckpointError(
                f"{self._file}: its data.pkl is damaged ({error}); {_ADVICE}"
            ) from error

    def _step(self, name: str, argument: Any) -> None:
        """Runs one instruction."""
        stack = self._stack
        if name in ("PROTO", "FRAME"):
            return
        if name in _NUMBERS or name in _TEXTS:
            stack.append(argument)
        elif name in _VALUES:
            stack.append(_VALUES[name])
        elif name in _NEW:
            stack.append(_NEW[name]())
        elif name == "MARK":
            stack.append(_MARK)
        elif name == "TUPLE":
            stack.append(tuple(self._to_mark()))
        elif name in _TUPLES:
            items = [self._pop() for _ in range(_TUPLES[name])]
            stack.append(tuple(reversed(items)))
        elif name == "LIST":
            stack.append(self._to_mark())
        elif name == "DICT":
            stack.append(self._pairs(self._to_mark()))
        elif name in ("APPEND", "APPENDS"):
            items = [self._pop()] if name == "APPEND" else self._to_mark()
            self._top(list).extend(items)
        elif name in ("SETITEM", "SETITEMS"):
            items = [self._pop(), self._pop()][::-1] if name == "SETITEM" else self._to_mark()
            self._top(dict).update(self._pairs(items))
        elif name in ("BINPUT", "LONG_BINPUT", "PUT", "MEMOIZE"):
            self._memo[len(self._memo) if name == "MEMOIZE" else argument] = self._top(object)
        elif name in ("BINGET", "LONG_BINGET", "GET"):
            stack.append(self._memo[argument])
        elif name == "GLOBAL":
            stack.append(self._named(argument.replace(" ", ".", 1)))
        elif name == "STACK_GLOBAL":
            attribute, module = self._pop(), self._pop()
            if type(module) is not str or type(attribute) is not str:
                names = f"{_shown(module)} and {_shown(attribute)}"
                raise _Wrong(f"expected the texts of a module and a name, got {names}")
            stack.append(self._named(f"{module}.{attribute}"))
        elif name == "BINPERSID":
            stack.append(self._storage(self._pop()))
        elif name == "REDUCE":
            arguments, function = self._pop(), self._pop()
            stack.append(self._made(function, arguments))
        elif name == "BUILD":  # the attribute `_metadata` of a state_dict, which is not read
            self._pop()
            self._top(dict)
        else:
            raise self._refusal(f"the instruction {name}")

    def _pop(self) -> Any:
        if not self._stack or self._stack[-1] is _MARK:
            raise _Wrong("it takes a value from an empty stack")
        return self._stack.pop()

    def _to_mark(self) -> list[Any]:
        """Takes the values above the last mark, and the mark."""
        at = next((i for i in reversed(range(len(self._stack))) if self._stack[i] is _MARK), None)
        if at is None:
            raise _Wrong("it lacks a mark")
        items = self._stack[at + 1 :]
        del self._stack[at:]
        return items

    def _pairs(self, items: list[Any]) -> dict[str, Any]:
        """Returns the dictionary of keys that alternate with their values."""
        for key in items[::2]:
            if type(key) is not str:
                raise self._refusal(f"a dictionary with the key {_shown(key)}")
        return dict(zip(items[::2], items[1::2], strict=True))

    def _top(self, kind: type) -> Any:
        if not self._stack or not isinstance(self._stack[-1], kind):
            raise _Wrong(f"expected {kind.__name__}, got {self._last()}")
        return self._stack[-1]

    def _last(self) -> str:
        return _shown(self._stack[-1]) if self._stack else "an empty stack"

    def _named(self, name: str) -> _Global:
        if name not in _ADMITTED:
            raise self._refusal(name)
        return _Global(name)

    def _refusal(self, what: str) -> UnsupportedModelError:
        return UnsupportedModelError(
            f"{self._file}: its pickle asks for {what:.200}, expected tensors alone, and nothing "
            "of it was run; save the model's state_dict alone, or use the model's safetensors"
        )

    # --- tensors ---------------------------------------------------------------------------------

    def _storage(self, given: Any) -> _Storage:
        """Returns what a persistent id names: ("storage", class, key, location, count)."""
        if not isinstance(given, tuple) or len(given) != 5 or given[0] != "storage":
            raise _Wrong(f"expected a storage, got {_shown(given)}")
        _, kind, key, _, count = given
        if not isinstance(kind, _Global) or not kind.endswith("Storage"):
            raise _Wrong(f"expected a class of storages, got {_shown(kind)}")
        if not isinstance(key, str) or not _is_size(count):
            raise _Wrong(f"expected a storage's key and size, got {_shown((key, count))}")
        return _Storage(_STORAGES[kind.removeprefix("torch.")], key, count)

    def _made(self, function: Any, arguments: Any) -> Any:
        """Returns what one of the admitted functions would make."""
        if not isinstance(function, _Global) or not isinstance(arguments, tuple):
            raise _Wrong(f"it calls {_shown(function)}")
        if function == _DICT and not arguments:
            return {}
        if function == _PARAMETER and len(arguments) == 3 and isinstance(arguments[0], Tensor):
            return arguments[0]
        if function == _TENSOR and len(arguments) in (6, 7):
            return self._tensor(*arguments[:4])
        raise _Wrong(f"it calls {function} with {_shown(arguments)}")

    def _tensor(self, storage: Any, offset: Any, shape: Any, strides: Any) -> Tensor:
        """Returns the view of a storage that `torch._utils._rebuild_tensor_v2` would make."""
        if not isinstance(storage, _Storage):
            raise _Wrong(f"expected a tensor's storage, got {_shown(storage)}")
        for sizes in (shape, strides):
            if not isinstance(sizes, tuple) or not all(map(_is_size, sizes[:_MOST_SIZES])):
                raise _Wrong(f"expected the sizes or strides of a tensor, got {_shown(sizes)}")
            if len(sizes) > _MOST_SIZES:
                raise _Wrong(f"a tensor has {len(sizes)} sizes, expected at most {_MOST_SIZES}")
        if len(shape) != len(strides) or not _is_size(offset):
            raise _Wrong(f"expected an offset and a stride for each size, got {_shown(strides)}")
        last = offset + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
        empty = math.prod(shape) == 0
        if not empty and last >= storage.count:
            raise _Wrong(
                f"a tensor {list(shape)} with strides {list(strides)} from {offset} on is outside "
                f"of its storage of {storage.count} numbers"
            )
        if empty:
            return Tensor(np.empty(shape, storage.dtype))
        numbers = self._numbers(storage)
        steps = tuple(step * storage.dtype.itemsize for step in strides)
        return Tensor(
            np.lib.stride_tricks.as_strided(numbers[offset:], shape, steps, writeable=False)
        )


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 62


def _shown(value: Any) -> str:
    """A value for a message, cut to 60 characters; of a container or long number its type."""
    if isinstance(value, _Global):
        return value
    kind = text = type(value).__name__
    if isinstance(value, str):
        text = f"{kind} {value[:60]!r}"
    elif isinstance(value, float) or (isinstance(value, int) and value.bit_length() <= 64):
        text = f"{kind} {value!r}"
    return text if len(text) <= 60 else f"{text[:57]}..."
