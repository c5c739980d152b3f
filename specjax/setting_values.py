r"""What the text of a setting means, and whether a value is of the setting's type.

On a command line the text after `key=` is YAML, but for settings that are text: these take it as it
stands, braces, commas and colons included, so that nothing has to be quoted twice. In it `\n`, `\t`
and `\\` are a newline, a tab and a backslash; any other backslash stays. Text in quotes of its own
(`'"..."'` for a shell) is YAML's again: in single quotes nothing is an escape. `null`, or nothing
at all, is null where a setting may be null.
"""

from __future__ import annotations

import difflib
import re
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from specjax.registry import is_own_path
from specjax.schema import Key, show, type_name


class ValueProblem(ValueError):
    """A text, or a value, cannot be that of its setting; the message says what was expected."""


class Yaml(yaml.SafeLoader):
    """YAML 1.1, but what looks like text or a number is: `4_1_5` (not 415), `off`, `no`; `1e-4`."""

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
    """The value that a text stands for.

    Args:
      key: the setting; None where there is none of that name, or the text is for a section.

    Raises:
      ValueProblem: the text is no YAML.
    """
    if key is not None and _is_text(key.type):
        return _text(text, _may_be_null(key.type))
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
    """The value as the setting's type has it.

    Raises:
      ValueProblem: it is of another type, none of the choices, or outside of the bounds.
    """
    value = _checked(key.type, value)
    for number in value if isinstance(value, list) else [value]:
        if isinstance(number, int | float) and (wanted := key.bounds.wanted(number)):
            raise ValueProblem(f"expected {wanted}, got {show(value)}")
    own = key.own and isinstance(value, str) and is_own_path(value, key.choices)
    if key.choices is not None and value not in key.choices and not own:
        choices = ", ".join(show(choice) for choice in key.choices)
        raise ValueProblem(
            f"expected one of {choices}, got {show(value)}{nearest(str(value), key.choices)}"
        )
    return value


def nearest(name: str, known: Sequence[Any]) -> str:
    """A suggestion, where one of the names is close."""
    close = difflib.get_close_matches(name, [str(k) for k in known if k is not None], n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def _checked(kind: Any, value: Any) -> Any:
    options = _options(kind)
    if value is None:
        if type(None) in options or kind is Any:
            return None
        raise ValueProblem(f"expected {expected(kind)}, got null")
    plain = [option for option in options if option is not type(None)]
    if len(plain) != 1 or plain[0] is Any:
        return value
    asked, kind = kind, plain[0]
    origin = typing.get_origin(kind) or kind
    if origin is list:
        if not isinstance(value, list):
            raise ValueProblem(f"expected {expected(asked)}, got {_shown(value)}")
        (inner,) = typing.get_args(kind) or (Any,)
        return [_element(inner, i, each) for i, each in enumerate(value)]
    if origin is dict:
        if not isinstance(value, Mapping):
            raise ValueProblem(f"expected {expected(asked)}, got {_shown(value)}")
        return _mapping(kind, value)
    found = _scalar(kind, value)
    if found is None:
        raise ValueProblem(f"expected {expected(asked)}, got {_shown(value)}{_remedy(kind, value)}")
    return found


def _mapping(kind: Any, value: Mapping) -> Mapping:
    """A mapping whose keys are numbers where they are to be: in JSON they are text."""
    of_key, of_value = typing.get_args(kind) or (Any, Any)
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


def _element(kind: Any, index: int, value: Any) -> Any:
    try:
        return _checked(kind, value)
    except ValueProblem as error:
        raise ValueProblem(f"entry {index}: {error}") from error


def _scalar(kind: type, value: Any) -> Any:
    """The value as a `kind`; None: it is none."""
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
    """A type in words, with its name."""
    options = _options(kind)
    plain = [option for option in options if option is not type(None)]
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


def _shown(value: Any) -> str:
    """A value as it would be typed."""
    return repr(value) if isinstance(value, str) else show(value)


def _options(kind: Any) -> tuple[Any, ...]:
    union = typing.get_origin(kind) in (typing.Union, types.UnionType)
    return typing.get_args(kind) if union else (kind,)


def _is_text(kind: Any) -> bool:
    return [option for option in _options(kind) if option is not type(None)] == [str]


def _may_be_null(kind: Any) -> bool:
    return type(None) in _options(kind)
