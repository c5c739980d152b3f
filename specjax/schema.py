"""Schemas of configurations: dataclasses with documented fields, and the values of their keys.

Fields are made with `option`, so that every key has a type, a default and a sentence of
documentation (for other fields the sentence is read from "Attributes:" in the class's docstring)::

    @dataclass
    class Optimizer:
        lr: float = option(1e-4, "peak learning rate")

    @dataclass
    class Config:
        steps: int = option(100, "number of updates")
        optimizer: Optimizer = option(Optimizer, "the policy's optimizer")

`describe` lists the keys for `--help`; `command_line.py` reads what a user sets.

On a command line the text after `key=` is YAML, except for settings that are text: these take it
as it stands, braces, commas and colons included, so that it needs no second quotes. In such text
`\\n`, `\\t` and `\\\\` are a newline, a tab and a backslash; any other backslash stays. Text in
quotes of its own (`'"..."'` for a shell) is read as YAML. `null`, or nothing at all, is null where
a setting may be null.
"""

from __future__ import annotations

import copy
import dataclasses
import difflib
import functools
import inspect
import math
import re
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import yaml
from omegaconf import MISSING

from specjax.registry import is_own_path

REQUIRED: Any = MISSING  # the default of an option that the user must set


def option(
    default: Any,
    doc: str,
    choices: Sequence[Any] | None = None,
    least: float | None = None,
    below: float | None = None,
    infinite: bool = False,
    own: bool = False,
    kind: Any = None,
    former: Mapping[str, str] | None = None,
) -> Any:
    """Makes a documented dataclass field.

    Args:
        default: a value (lists and dicts are copied), a dataclass for a section of its own, or
            `REQUIRED`.
        doc: one line for `--help`, with the unit where there is one.
        choices: the only values allowed.
        least: smallest value of a number.
        below: exclusive upper bound of a number.
        infinite: whether a number may be infinite.
        own: whether a user's own path `module:attribute` is allowed beside the choices.
        kind: the type of a field that is annotated with `Any`, because OmegaConf has no such type:
            `str | list[str]`, with or without None.
        former: former names of choices -> their names now, for messages.
    """
    metadata = {
        "kind": kind,
        "doc": doc,
        "choices": None if choices is None else tuple(choices),
        "bounds": Bounds(least, below, infinite),
        "own": own,
        "former": former or {},
    }
    if isinstance(default, type) and dataclasses.is_dataclass(default):
        return dataclasses.field(default_factory=default, metadata=metadata)
    if isinstance(default, (list, dict)) or dataclasses.is_dataclass(default):
        return dataclasses.field(default_factory=lambda: copy.deepcopy(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def at_least(section: str, values, **smallest: int) -> None:
    """Checks fields of a section against their smallest values.

    Raises:
      ValueError: a field is smaller.
    """
    for name, least in smallest.items():
        if getattr(values, name) < least:
            key = f"{section}.{name}" if section else name
            raise ValueError(f"{key}: expected at least {least}, got {getattr(values, name)}")


@dataclasses.dataclass(frozen=True)
class Needs:
    """A rule: these settings are read only under a condition, and are refused without it.

    Attributes:
      names: dotted keys, or `section.*` for all keys below a section. A name that begins with !
        is excepted from a section before it.
      when: the condition, a function of the values of all keys by dotted name, without keys of a
        section that is null.
      why: the reason, which the message gives after "KEY=value changes nothing: ". A key in
        brackets is written with its value, [rollout.partial] as rollout.partial=false.
      unless: value that is allowed in any case.
    """

    names: tuple[str, ...]
    when: Callable[[Mapping[str, Any]], bool]
    why: str
    unless: Any = None

    def covers(self, name: str) -> bool:
        if f"!{name}" in self.names:
            return False
        return any(
            name == entry or (entry.endswith(".*") and name.startswith(entry[:-1]))
            for entry in self.names
        )


def rules_of(schema_cls: type) -> list[Needs]:
    """The rules of a schema and of its sections, which are class attributes named `rules`."""
    sections = [_section_of(key.type) for key in keys_of(schema_cls) if key.section]
    return [rule for cls in (schema_cls, *sections) for rule in getattr(cls, "rules", ())]


def without_effect(
    schema_cls: type, values: Mapping[str, Any], given: Iterable[str]
) -> Iterator[tuple[str, str]]:
    """Finds settings that change nothing, by the rules of the schema (`rules_of`).

    Args:
      values: the value of every key.
      given: keys that were set; one whose value equals its default is ignored.

    Yields:
      (key, message), where the message says why the key has no effect and what to do.
    """
    keys, rules = {key.name: key for key in keys_of(schema_cls)}, rules_of(schema_cls)
    for name in sorted(given):
        key = keys[name]
        if key.section or name not in values or values[name] == key.default:
            continue
        for rule in rules:
            if rule.covers(name) and values[name] != rule.unless and not rule.when(values):
                why = re.sub(
                    r"\[([\w.]+)\]", lambda m: f"{m[1]}={show(values.get(m[1]))}", rule.why
                )
                yield name, f"{name}={show(values[name])} changes nothing: {why}"
                break


class Bounds(NamedTuple):
    """The range of the numbers of a setting; NaN is never allowed.

    Attributes:
      least: smallest value; None: no lower bound.
      below: exclusive upper bound; None: no upper bound.
      infinite: whether the number may be infinite.
    """

    least: float | None = None
    below: float | None = None
    infinite: bool = False

    def wanted(self, number: float) -> str | None:
        """The expected value, in words, if a number is not allowed; else None."""
        if math.isnan(number) or (math.isinf(number) and not self.infinite):
            return "a number, or inf" if self.infinite else "a finite number"
        if self.least is not None and number < self.least:
            return f"at least {self.least}"
        if self.below is not None and number >= self.below:
            return f"a number below {self.below}"
        return None


@dataclasses.dataclass(frozen=True)
class Key:
    """A setting or a section of a schema, by its dotted name; other attributes as in `option`."""

    name: str
    type: Any
    default: Any
    doc: str
    choices: tuple[Any, ...] | None
    section: bool
    bounds: Bounds = Bounds()
    own: bool = False
    former: Mapping[str, str] = dataclasses.field(default_factory=dict)


def absent_keys_of(schema_cls: type) -> Mapping[str, str]:
    """Keys of shared sections that a program does not have -> the reason.

    The class attribute `absent_keys` of the program's schema has them.
    """
    return getattr(schema_cls, "absent_keys", {})


@functools.cache
def keys_of(schema_cls: type) -> tuple[Key, ...]:
    """Every key of the schema except `absent_keys`, with sections before their keys."""
    absent = absent_keys_of(schema_cls)
    return tuple(
        key
        for key in _keys_below(schema_cls)
        if not any(key.name == name or key.name.startswith(f"{name}.") for name in absent)
    )


def _keys_below(schema_cls: type, prefix: str = "", section_default: Any = None) -> Iterator[Key]:
    """Yields the keys of a schema, or of one section of it.

    The default of a section (`option(Optimizer(lr=1e-3), ...)`) decides the defaults of its keys. A
    section of type `Section | None` may be null; it exists once one of its keys is set.
    """
    hints = typing.get_type_hints(schema_cls)
    docs = attribute_docs(schema_cls)
    for field in dataclasses.fields(schema_cls):
        kind = field.metadata.get("kind") or hints[field.name]
        inner = _section_of(kind)
        section = inner is not None
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        elif default is dataclasses.MISSING:
            default = REQUIRED
        if section_default is not None:
            default = getattr(section_default, field.name)
        meta = field.metadata
        name = prefix + field.name
        doc = meta.get("doc") or docs.get(field.name, "")
        bounds = meta.get("bounds") or Bounds()
        own, former = meta.get("own", False), meta.get("former", {})
        yield Key(name, kind, default, doc, meta.get("choices"), section, bounds, own, former)
        if inner is not None:
            below = default if isinstance(default, inner) else None
            yield from _keys_below(inner, f"{name}.", below)


def _section_of(kind: Any) -> type | None:
    """The dataclass of a section, which may be optional; None for a key that is no section."""
    found, *others = [k for k in typing.get_args(kind) if k is not type(None)] or [kind]
    section = not others and isinstance(found, type) and dataclasses.is_dataclass(found)
    return found if section else None


def entry_of(kind: Any) -> type | None:
    """The dataclass of the values of a mapping such as `dict[str, EvalSet]`; None for others.

    Users name such entries as they like, and set their fields as `SETTING.NAME.FIELD`.
    """
    inner = (typing.get_args(kind) or (None,))[-1]
    mapping = typing.get_origin(kind) is dict and isinstance(inner, type)
    return inner if mapping and dataclasses.is_dataclass(inner) else None


def attribute_docs(schema_cls: type) -> dict[str, str]:
    """The sentence about each field, from "Attributes:" in docstrings of a class and its bases."""
    docs: dict[str, str] = {}
    for cls in reversed(schema_cls.__mro__):
        text = inspect.cleandoc(cls.__dict__.get("__doc__") or "")
        _, _, section = text.partition("Attributes:\n")
        names, indent = [], 0
        for line in section.splitlines():
            if line and not line.startswith(" "):
                break  # the next section
            entry = _ATTRIBUTE.match(line)
            # A line indented further than the first entry goes on with the sentence before it.
            if entry and (not names or len(entry["indent"]) <= indent):
                indent = len(entry["indent"])
                names = entry["names"].split(", ")
                docs.update(dict.fromkeys(names, entry["text"]))
            else:
                docs.update({name: f"{docs[name]} {line.strip()}".strip() for name in names})
    return {name: doc.removesuffix(".") for name, doc in docs.items()}


_ATTRIBUTE = re.compile(r"(?P<indent> +)(?P<names>\w+(, \w+)*): (?P<text>.+)")


def describe(schema_cls: type) -> str:
    """Lists all keys with defaults, types and documentation, for `--help`."""
    rows: list[tuple[str, str, str]] = []
    for key in keys_of(schema_cls):
        if key.section:
            rows.append((f"\n{key.name}", "", key.doc))
            continue
        default = "required" if key.default == REQUIRED else show(key.default)
        doc = key.doc
        if key.choices:
            own = ", or your own as module:attribute" if key.own else ""
            doc += f" [one of {', '.join(show(choice) for choice in key.choices)}{own}]"
        rows.append((f"{key.name}={default}", type_name(key.type), doc))
        for field in keys_of(entry_of(key.type)) if entry_of(key.type) else ():
            name = f"{key.name}.NAME.{field.name}={show(field.default)}"
            rows.append((name, type_name(field.type), field.doc))
    left = min(44, max((len(name) for name, _, _ in rows), default=0))
    middle = max((len(kind) for _, kind, _ in rows), default=0)
    lines = [f"  {name:<{left}}  {kind:<{middle}}  {doc}".rstrip() for name, kind, doc in rows]
    lines = [line if not line.startswith("  \n") else "\n  " + line[3:] for line in lines]
    return "keys, with their defaults and types:\n" + "\n".join(lines)


def show(value: Any) -> str:
    """A value as the user types it; text has no quotes unless it is empty."""
    if isinstance(value, (bool, list, dict)) or value is None:
        return yaml.safe_dump(value, default_flow_style=True).splitlines()[0]
    return "''" if value == "" else str(value)


def type_name(kind: Any) -> str:
    return kind.__name__ if isinstance(kind, type) and not typing.get_args(kind) else str(kind)


# --- values --------------------------------------------------------------------------------------


class ValueProblem(ValueError):
    """A value does not fit its setting; the message says what was expected."""


class Yaml(yaml.SafeLoader):
    """YAML 1.1, except that `4_1_5`, `off` and `no` are text, and `1e-4` is a number."""

    def construct_mapping(self, node, deep=False):
        keys = [key.value for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} is given twice", node.start_mark
                )
        return super().construct_mapping(node, deep)


_BOOL = "tag:yaml.org,2002:bool"
Yaml.yaml_implicit_resolvers = {
    first: [
        ("tag:yaml.org,2002:str", re.compile(r"[-+]?\d+(_\d+)+$")),
        ("tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$")),
        (_BOOL, re.compile(r"(?i:true|false)$")),
        *((tag, pattern) for tag, pattern in resolvers if tag != _BOOL),
    ]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}

_ESCAPES = {r"\n": "\n", r"\t": "\t", "\\\\": "\\"}
_NULLS = ("", "null", "~", "Null", "NULL")


def read(text: str, key: Key | None) -> Any:
    """Reads the text of a setting as a value.

    Args:
      key: the setting; None for an unknown setting or a section.

    Raises:
      ValueProblem: the text is not YAML.
    """
    if key is not None and _is_text(key.type, text):
        return _text(text, nullable=type(None) in _options(key.type))
    try:
        return yaml.load(text, Yaml)
    except yaml.YAMLError as error:
        problem = getattr(error, "problem", None) or str(error)
        wanted = "a value" if key is None else expected(key.type)
        raise ValueProblem(
            f"expected {wanted}, got {text!r}, which YAML does not read "
            f"({' '.join(problem.split())}); brackets and quotes must be closed"
        ) from error


def _text(text: str, nullable: bool) -> str | None:
    if nullable and text.strip() in _NULLS:
        return None
    bare = text.strip()
    if len(bare) > 1 and bare[0] == bare[-1] and bare[0] in "'\"":
        try:
            found = yaml.load(bare, Yaml)
        except yaml.YAMLError:
            found = None  # quotes within quotes: text like any other
        if isinstance(found, str):
            return found
    return re.sub(r"\\[nt\\]", lambda match: _ESCAPES[match[0]], text)


def check(key: Key, value: Any) -> Any:
    """Checks a value, and converts it to the setting's type.

    Raises:
      ValueProblem: the value has another type, is none of the choices, or is out of bounds.
    """
    value = _checked(key.type, value)
    for number in value if isinstance(value, list) else [value]:
        if isinstance(number, int | float) and (wanted := key.bounds.wanted(number)):
            raise ValueProblem(f"expected {wanted}, got {show(value)}")
    own = key.own and isinstance(value, str) and is_own_path(value, key.choices)
    if key.choices is not None and value not in key.choices and not own:
        choices = ", ".join(show(choice) for choice in key.choices)
        hint = nearest(str(value), key.choices)
        if isinstance(value, str) and value in key.former:
            hint = f", which is called {key.former[value]} now"
        raise ValueProblem(f"expected one of {choices}, got {show(value)}{hint}")
    return value


def nearest(name: str, known: Sequence[Any]) -> str:
    """A suggestion for an unknown name, where a known one is close."""
    close = difflib.get_close_matches(name, [str(k) for k in known if k is not None], n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def _checked(kind: Any, value: Any) -> Any:
    options = _options(kind)
    if value is None:
        if type(None) in options or kind is Any:
            return None
        raise ValueProblem(f"expected {expected(kind)}, got null")
    plain = [option for option in options if option is not type(None)]
    if plain == [str, list[str]]:
        plain = [list[str] if isinstance(value, list) else str]
    if len(plain) != 1 or plain[0] is Any:
        return value
    asked, kind = kind, plain[0]
    origin = typing.get_origin(kind) or kind
    if origin is list:
        if not isinstance(value, list):
            raise ValueProblem(f"expected {expected(asked)}, got {_quoted(value)}")
        (inner,) = typing.get_args(kind) or (Any,)
        found = []
        for i, each in enumerate(value):
            try:
                found.append(_checked(inner, each))
            except ValueProblem as error:
                raise ValueProblem(f"entry {i}: {error}") from error
        return found
    if origin is dict:
        if not isinstance(value, Mapping):
            raise ValueProblem(f"expected {expected(asked)}, got {_quoted(value)}")
        return _mapping(kind, value)
    found = _scalar(kind, value)
    if found is None:
        raise ValueProblem(
            f"expected {expected(asked)}, got {_quoted(value)}{_remedy(kind, value)}"
        )
    return found


def _mapping(kind: Any, value: Mapping) -> Mapping:
    """A mapping with its keys as integers where the type asks for it; in JSON they are text."""
    of_key, of_value = typing.get_args(kind) or (Any, Any)
    if entry_of(kind) is not None:
        return {name: _entry(of_value, name, fields) for name, fields in value.items()}
    if of_key is not int:
        return value
    found: dict[int, Any] = {}
    for name, each in value.items():
        key = _scalar(int, name)
        if key is None or key in found:
            problem = "is given twice" if key in found else "is no whole number (int)"
            raise ValueProblem(f"the key {name!r} {problem}")
        try:
            found[key] = _checked(of_value, each)
        except ValueProblem as error:
            raise ValueProblem(f"entry {key}: {error}") from error
    return found


def _entry(cls: type, name: str, fields: Any) -> dict[str, Any]:
    """The fields of a named entry, checked as settings are."""
    if not isinstance(fields, Mapping):
        raise ValueProblem(f"{name}: expected a mapping of its settings, got {_quoted(fields)}")
    known, found = {key.name: key for key in keys_of(cls)}, {}
    for field, value in fields.items():
        if field not in known:
            hint = nearest(str(field), list(known)) or f"; known are {', '.join(known)}"
            raise ValueProblem(f"{name}: unknown key {field!r}{hint}")
        try:
            found[field] = check(known[field], value)
        except ValueProblem as error:
            raise ValueProblem(f"{name}.{field}: {error}") from error
    return found


def _scalar(kind: type, value: Any) -> Any:
    """The value converted to `kind`; None if it has another type."""
    if isinstance(value, (list, Mapping)):
        return None
    if kind is str:
        return str(value)
    if kind is bool:
        return value if isinstance(value, bool) else None
    if isinstance(value, bool):
        return None
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    if kind is float:
        return number
    if kind is int:
        try:
            return int(value) if isinstance(value, int | str) else _whole(number)
        except ValueError:  # text such as 1e3
            return _whole(number)
    return value


def _whole(number: float) -> int | None:
    return int(number) if number.is_integer() else None


def _remedy(kind: type, value: Any) -> str:
    if kind is str:
        return "; put the text in quotes"
    if kind is bool and str(value).lower() in ("yes", "on", "1", "no", "off", "0"):
        return f"; write {'true' if str(value).lower() in ('yes', 'on', '1') else 'false'}"
    return ""


def expected(kind: Any) -> str:
    """A type in words, followed by its name, such as "a whole number (int)"."""
    options = _options(kind)
    plain = [option for option in options if option is not type(None)]
    if plain == [str, list[str]]:
        return "text (str), or a list such as [a, b]" + " or null" * (len(options) > len(plain))
    if len(plain) != 1:
        return f"a {type_name(kind)}"
    kind, null = plain[0], " or null" if type(None) in options else ""
    origin = typing.get_origin(kind) or kind
    words = {
        int: "a whole number (int)",
        float: "a number (float)",
        bool: "true or false (bool)",
        str: "text (str)",
        dict: "a mapping such as {key: value}",
    }
    if origin is list:
        (inner,) = typing.get_args(kind) or (Any,)
        return f"a list such as [a, b] ({type_name(inner)} each){null}"
    return words.get(origin, type_name(kind)) + null


def _quoted(value: Any) -> str:
    """A value for a message; text is in quotes."""
    return repr(value) if isinstance(value, str) else show(value)


def _options(kind: Any) -> tuple[Any, ...]:
    union = typing.get_origin(kind) in (typing.Union, types.UnionType)
    return typing.get_args(kind) if union else (kind,)


def _is_text(kind: Any, text: str) -> bool:
    """Whether the text of a setting of this type is taken as it stands."""
    plain = [option for option in _options(kind) if option is not type(None)]
    return plain == [str] or (plain == [str, list[str]] and not text.lstrip().startswith("["))
