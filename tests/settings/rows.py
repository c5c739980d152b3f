"""What a row of the tables is: a value of a setting, and something that changes with it.

A row says for one setting which value it is given, what else has to be set so that something reads
it (`beside`), and an effect: a function of the whole configuration that runs the code which the
setting is for, as cheap a part of it as shows a difference. The test calls it with and without the
value and fails where both are the same. Where a program hands a setting on to the library, the row
may be `Reaches`: the value arrives in the library's own object, whose row shows what it does there.
A setting of a program's main loop is `ReadBy` the module that has the loop.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import types
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from specjax import schema
from specjax.spelling import python, spelled

PLACES = types.SimpleNamespace(policy=None, scratch=None)


@dataclasses.dataclass(frozen=True)
class Row:
    """Attributes:
    value: that the setting is given; a function without arguments makes it when the row is used.
    effect: of a configuration; whatever `same` can compare.
    beside: further settings, by dotted name, with and without the value.
    """

    value: Any
    effect: Callable[[Any], Any]
    beside: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Reaches:
    """A setting that becomes a field of an object of the library.

    Attributes:
      arrives: that object, as the program makes it of a configuration and hands it on.
      library: its class. field: which of its fields; the class has a row for it.
    """

    value: Any
    arrives: Callable[[Any], Any]
    library: type
    field: str
    beside: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Refused:
    """A setting of a section that programs share, which this program never takes.

    Attributes:
      said: a part of the message that says why.
    """

    value: Any
    said: str
    beside: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class ReadBy:
    """A setting of a program's main loop, whose effect the tests of that program show.

    Attributes:
      module: the module that reads it as an attribute, such as `cfg.checkpoint.every`.
    """

    value: Any
    module: types.ModuleType
    beside: Mapping[str, Any] = dataclasses.field(default_factory=dict)


AnyRow = Row | Reaches | Refused | ReadBy
Rows = AnyRow | tuple[AnyRow, ...]  # of a setting that acts in several places, each of which counts


# --- configurations -------------------------------------------------------------------------------


def leaves(program: type) -> dict[str, schema.Key]:
    """The settings of a program, or the fields of a class of the library, by dotted name."""
    return {key.name: key for key in schema.keys_of(program) if not key.section}


def make(program: type, settings: Mapping[str, Any]) -> Any:
    """A configuration with these settings, as the command line makes it but without text.

    Raises:
      ValueError: the settings do not fit together, or one of them changes nothing.
    """
    settings = {name: value() if callable(value) else value for name, value in settings.items()}
    for decides, variant in getattr(program, "variants", ()):
        if decides in settings:
            program = variant(program, settings[decides])
    unknown = sorted(settings.keys() - leaves(program).keys())
    assert not unknown, f"{program.__name__} has no setting {', '.join(unknown)}"
    values = {name: key.default for name, key in leaves(program).items()}
    sections = {k.name for k in schema.keys_of(program) if k.section and k.default is None}
    unset = [s for s in sections if not any(name.startswith(f"{s}.") for name in settings)]
    values = {n: v for n, v in values.items() if not any(n.startswith(f"{s}.") for s in unset)}
    values |= settings
    for _, message in schema.without_effect(program, values, settings):
        raise ValueError(message)
    try:
        return _built(program, "", settings, None)
    except ValueError as error:
        raise ValueError(spelled(error, getattr(program, "spell", python))) from error


def _built(cls: type, prefix: str, settings: Mapping[str, Any], default: Any) -> Any:
    hints, values = typing.get_type_hints(cls), {}
    for field in dataclasses.fields(cls):
        name = f"{prefix}{field.name}"
        inner = schema._section_of(hints[field.name])
        own = _default(field) if default is None else getattr(default, field.name)
        if name in settings:
            values[field.name] = settings[name]
        elif inner is None:
            values[field.name] = own
        elif own is None and not any(key.startswith(f"{name}.") for key in settings):
            values[field.name] = None
        else:
            values[field.name] = _built(inner, f"{name}.", settings, own)
    return cls(**values)


def _default(field: dataclasses.Field) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return None if field.default is dataclasses.MISSING else field.default


# --- the check ------------------------------------------------------------------------------------


def check(
    program: type,
    name: str,
    row: Rows,
    library: Mapping[type, Mapping[str, Rows]],
    base: Mapping[str, Any],
):
    """Fails where a row does not show that its setting changes something.

    Args:
      library: rows of the classes that `Reaches` may name.
      base: settings that every configuration of the program needs.
    """
    __tracebackhide__ = True
    if isinstance(row, tuple):
        for each in row:
            check(program, name, each, library, base)
        return
    value = row.value() if callable(row.value) else row.value
    assert not same(value, leaves(program)[name].default), f"{name}: the row gives its default"
    without = {**base, **row.beside}
    with_value = {**without, name: value}
    if isinstance(row, Refused):
        try:
            make(program, with_value)
        except ValueError as error:
            assert row.said in str(error), f"{name}: {error}"
            make(program, without)
            return
        raise AssertionError(f"{name}={value!r} is taken; give it a row with an effect")
    usual, changed = (make(program, settings) for settings in (without, with_value))
    if isinstance(row, ReadBy):
        read = f"cfg.{name}"
        assert any(text.endswith(read) for text in attributes(row.module)), f"nothing reads {read}"
        return
    if isinstance(row, Reaches):
        known = [k for k in library[row.library] if k.split(".")[0] == row.field]
        assert known, f"{row.library.__name__} has no row for {row.field}"
        usual, changed = (row.arrives(cfg) for cfg in (usual, changed))
        assert isinstance(changed, row.library), f"{name}: {type(changed).__name__} arrives"
        usual, changed = getattr(usual, row.field), getattr(changed, row.field)
    else:
        usual, changed = (row.effect(cfg) for cfg in (usual, changed))
    assert not (_has_failed(usual) and _has_failed(changed)), f"{name}: {usual!r}, {changed!r}"
    assert not same(usual, changed), f"{name}={value!r} changes nothing: {usual!r}"


@functools.cache
def attributes(module: types.ModuleType) -> frozenset[str]:
    """The attributes that the source of a module reads, as text: `self.cfg.checkpoint.every`."""
    nodes = ast.walk(ast.parse(inspect.getsource(module)))
    return frozenset(ast.unparse(node) for node in nodes if isinstance(node, ast.Attribute))


def same(a: Any, b: Any) -> bool:
    """Whether two results are equal: values, arrays, and trees of both."""
    if dataclasses.is_dataclass(a) and not isinstance(a, type):
        return type(a) is type(b) and a == b
    leaves_a, tree_a = jax.tree.flatten(a)
    leaves_b, tree_b = jax.tree.flatten(b)
    if tree_a != tree_b:
        return False
    return all(_equal(x, y) for x, y in zip(leaves_a, leaves_b, strict=True))


def _equal(a: Any, b: Any) -> bool:
    arrays = (np.ndarray, jax.Array)
    if isinstance(a, arrays) or isinstance(b, arrays):
        a, b = np.asarray(a), np.asarray(b)
        return a.shape == b.shape and a.dtype == b.dtype and np.array_equal(a, b, equal_nan=True)
    return type(a) is type(b) and a == b


# --- what effects are made of ---------------------------------------------------------------------


def outcome(work: Callable[[], Any]) -> Any:
    """What it returns, or what it raises for the user's sake."""
    try:
        return work()
    except (TypeError, AttributeError, NameError, LookupError):  # a mistake of the row
        raise
    except (Exception, SystemExit) as error:
        return Raised(type(error).__name__, str(error))


class Raised(NamedTuple):
    """An error, as a result."""

    kind: str
    message: str


def _has_failed(result: Any) -> bool:
    found = jax.tree.leaves(result, is_leaf=lambda x: isinstance(x, Raised))
    return any(isinstance(leaf, Raised) for leaf in found)


class Stopped(Exception):
    """Raised by a stand-in, for what comes after it is of no interest."""


def reads(field: str) -> Callable[[Any], Any]:
    """A getter of a dotted attribute."""
    return lambda x: functools.reduce(getattr, field.split("."), x)


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


def called_with(target: Any, name: str, work: Callable[[], Any]) -> inspect.BoundArguments | None:
    """The arguments that `work` calls `target.name` with first; None: it is not called.

    Nothing is run of what would come after the call.
    """
    found: list[Any] = []
    original = getattr(target, name)
    signature = inspect.signature(original)

    def stand_in(*args, **kwargs):
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        found.append(bound)
        raise Stopped

    setattr(target, name, stand_in)
    try:
        work()
    except Stopped:
        pass
    finally:
        setattr(target, name, original)
    return found[0] if found else None
