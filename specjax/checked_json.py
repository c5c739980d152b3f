"""JSON files of a checkpoint directory, with every key checked as it is read.

A value of a wrong type or range is a `CheckpointError` of one line that names file and key, what
was expected and what was got.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

_REQUIRED: Any = object()
# Larger than any size of a model; a larger number in a file would exhaust the memory.
LARGEST = 2**31 - 1
_LFS = b"version https://git-lfs.github.com/spec/"
_REMEDY = "correct it, or fetch the file again"


class CheckpointError(RuntimeError):
    """A checkpoint is missing, damaged, does not fit, or could not be written."""


class UnsupportedModelError(ValueError):
    """The checkpoint's model family, or a feature that it uses, is not implemented."""


def pointer_problem(file: Path) -> str:
    """The message about a file that is a Git LFS pointer; empty if it is not one."""
    try:
        with file.open("rb") as stream:
            if not stream.read(len(_LFS)) == _LFS:
                return ""
    except OSError:
        return ""
    return (
        f"{file} is a Git LFS pointer, not the file itself; run `git lfs pull` in {file.parent} "
        "(after `git lfs install`), or download the file"
    )


def read_json(file: Path) -> dict[str, Any]:
    """Reads a JSON object from a file.

    Raises:
      CheckpointError: the file is absent, damaged, a Git LFS pointer, or holds another JSON type.
    """
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(
            f"{file} does not exist; expected a Hugging Face checkpoint directory with "
            "config.json and safetensors files"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(
            pointer_problem(file) or f"{file} cannot be read as JSON ({error}); fetch it again"
        ) from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{file}: expected a JSON object, got {shown(value)}; fetch it again")
    return value


def shown(value: Any) -> str:
    """A value as JSON, cut to 60 characters for a message."""
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else f"{text[:57]}..."


class Keys:
    """A JSON object whose keys are read with their types and ranges checked.

    All methods return `default` for an absent key, and raise without a default. With the default
    None, a key that is null counts as absent; with any other, null has the wrong type, as for
    transformers.

    Args:
      file: path of the object's file, for messages.
      raw: the object.
      inside: key of the object in its file; empty for the whole file.

    Attributes:
      asked: the names of the keys that were asked for.
    """

    def __init__(self, file: Path, raw: Mapping[str, Any], inside: str = ""):
        self.file, self.raw, self.inside = file, raw, inside
        self.asked: set[str] = set()

    def with_defaults(self, defaults: Mapping[str, Any]) -> Keys:
        """The object with values for keys that it lacks; what is asked for counts for both."""
        keys = Keys(self.file, {**defaults, **self.raw}, self.inside)
        keys.asked = self.asked
        return keys

    def integer(
        self, name: str, default: Any = _REQUIRED, least: int = 1, most: int = LARGEST
    ) -> Any:
        """An integer within limits."""
        expected = "a positive integer" if least == 1 else f"an integer of at least {least}"
        if most != LARGEST:
            expected = f"an integer of at least {least} and at most {most}"
        return self._checked(
            name, default, lambda value: _is_integer(value) and least <= value <= most, expected
        )

    def number(self, name: str, default: Any = _REQUIRED, least: float | None = None) -> Any:
        """A finite number of at least `least`; None: greater than 0."""

        def valid(value: Any) -> bool:
            real = _is_integer(value) or isinstance(value, float)
            # Numbers are compared as they are: no float holds a very large integer.
            inside = real and (value > 0 if least is None else value >= least)
            return inside and value <= sys.float_info.max

        limit = "greater than 0" if least is None else f"of at least {least:g}"
        number = self._checked(name, default, valid, f"a finite number {limit}")
        return number if number is default else float(number)

    def flag(self, name: str, default: bool | None = False) -> bool:
        """A boolean; with the default None an absent key is false."""
        flag = self._checked(name, default, lambda value: isinstance(value, bool), "true or false")
        return bool(flag)

    def text(self, name: str, default: Any = _REQUIRED, choices: Sequence[str] = ()) -> Any:
        """A string; one of `choices` if there are any."""

        def valid(value: Any) -> bool:
            return isinstance(value, str) and (not choices or value in choices)

        expected = f"one of {', '.join(choices)}" if choices else "a string"
        return self._checked(name, default, valid, expected)

    def texts(self, name: str) -> list[str]:
        """A list of strings; empty if the key is absent or null."""
        return self._list(name, str, "a list of strings")

    def numbers(self, name: str) -> list[float]:
        """A list of numbers; empty if the key is absent or null."""
        return self._list(name, (int, float), "a list of numbers")

    def _list(self, name: str, kind: Any, expected: str) -> list:
        def valid(value: Any) -> bool:
            return isinstance(value, list) and all(
                isinstance(item, kind) and not isinstance(item, bool) for item in value
            )

        return self._checked(name, None, valid, expected) or []

    def within(self, name: str) -> Keys:
        """A nested object; empty if the key is absent or null."""
        value = self._checked(name, None, lambda value: isinstance(value, dict), "an object")
        return Keys(self.file, value or {}, self._label(name))

    def token_ids(self, name: str, vocabulary: int, several: bool = False) -> list[int]:
        """One token id, or with `several` a list of them; empty if the key is absent or null."""

        def listed(value: Any) -> list:
            return value if several and isinstance(value, list) else [value]

        def valid(value: Any) -> bool:
            return all(_is_integer(token) and 0 <= token < vocabulary for token in listed(value))

        lists = ", a list of them," if several else ""
        expected = f"a token id from 0 to {vocabulary - 1}{lists} or null for none"
        value = self._checked(name, None, valid, expected)
        return [] if value is None else list(listed(value))

    def error(self, name: str, expected: str) -> CheckpointError:
        """The error about the value of a key."""
        got = shown(self.raw.get(name))
        return CheckpointError(
            f"{self.file}: {self._label(name)}: expected {expected}, got {got}; {_REMEDY}"
        )

    def _checked(self, name: str, default: Any, valid: Callable[[Any], bool], expected: str) -> Any:
        """The value, or the default where that applies."""
        self.asked.add(name)
        if name not in self.raw and default is _REQUIRED:
            raise CheckpointError(f"{self.file} lacks the key {self._label(name)!r}; {_REMEDY}")
        if name not in self.raw or (default is None and self.raw[name] is None):
            return default
        if not valid(self.raw[name]):
            raise self.error(name, expected)
        return self.raw[name]

    def _label(self, name: str) -> str:
        return f"{self.inside}.{name}" if self.inside else name


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
