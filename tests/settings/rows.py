"""What a row of the tables is: a value of a setting, and something that changes with it.

A row says for one field of the library which value it is given, what else has to be set so that
something reads it (`beside`), and an effect: a function of the whole object that runs the code
which the field is for, as cheap a part of it as shows a difference.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from specjax import schema

PLACES = types.SimpleNamespace(policy=None, scratch=None)


@dataclasses.dataclass(frozen=True)
class Row:
    """Attributes:
    value: that the setting is given; a function without arguments makes it when the row is used.
    effect: of an object with and without the value; numbers, arrays, and trees of both.
    beside: further settings, by dotted name, with and without the value.
    """

    value: Any
    effect: Callable[[Any], Any]
    beside: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def leaves(cls: type) -> list[str]:
    """The fields of a class of the library, by dotted name."""
    return [key.name for key in schema.keys_of(cls) if not key.section]


def make(cls: type, settings: Mapping[str, Any]) -> Any:
    """An object with these settings, by dotted name."""
    kinds, values = {key.name: key.type for key in schema.keys_of(cls)}, {}
    for name, value in settings.items():
        section, _, rest = name.rpartition(".")
        values.setdefault(section, {})[rest] = value() if callable(value) else value
    own = values.pop("", {})
    return cls(**own, **{name: section_of(kinds[name])(**of) for name, of in values.items()})


def section_of(kind: Any) -> type:
    """The class of a section, which may be optional."""
    return next(k for k in typing.get_args(kind) or (kind,) if k is not type(None))


def same(a: Any, b: Any) -> bool:
    """Whether two results are equal: values, arrays, and trees of both."""
    (a, tree_a), (b, tree_b) = jax.tree.flatten(a), jax.tree.flatten(b)
    return tree_a == tree_b and all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


def outcome(work: Callable[[], Any]) -> Any:
    """What it returns, or what it raises for the user's sake."""
    try:
        return work()
    except ValueError as error:
        return str(error)


class Stopped(Exception):
    """Raised by a stand-in, for what comes after it is of no interest."""


def scratch(name: str) -> Path:
    """A path of that name below the tests' directory."""
    return PLACES.scratch / name


def written(name: str, text: str) -> Callable[[], str]:
    """Makes a file when its row is used; returns its path."""

    def write() -> str:
        path = scratch(name)
        path.write_text(text, encoding="utf-8")
        return str(path)

    return write
