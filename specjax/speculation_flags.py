"""The speculation settings as flags of a command: one for each key, by the last part of its name.

`speculation.control.bs_threshold=4` of the server is `--bs-threshold 4` here. Lists are written
with commas, maps as JSON or YAML, and `--fastrl` also takes the name of a file.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

import yaml

from specjax.command_line import require_effect
from specjax.kernels.names import ATTENTION, ATTENTION_DOC, attention_flag
from specjax.schema import Key, Needs, keys_of, show
from specjax.setting_values import ValueProblem, Yaml, check, read
from specjax.speculation import ControlSection, SpeculationSettings
from specjax.speculation_rules import speculation_rules
from specjax.spelling import flags, spelled

_ALL = [key for key in keys_of(SpeculationSettings) if not key.section]
KEYS = {key.name.rpartition(".")[2]: key for key in _ALL}
_OF_CONTROL = {key.name for key in keys_of(ControlSection)}
# Of keys that stand for a file as well.
_FILES = ("fastrl",)


def add_flags(group: Any, refused: Mapping[str, str] = MappingProxyType({})) -> None:
    """Adds the flags to a parser or a group of one, and `--no-speculation` and `--attention`.

    Args:
      refused: keys that this command cannot do, with the reason; their flags say it.
    """
    for name, key in KEYS.items():
        flag, kind = "--" + name.replace("_", "-"), key.type
        default = None if name in _OF_CONTROL else key.default
        doc = _spelled(key.doc)
        if key.choices:
            doc += f" [one of {', '.join(key.choices)}]"
        doc = doc.replace("%", "%%")
        if name in refused:
            group.add_argument(
                flag,
                nargs="?",
                action=_refuse(refused[name]),
                default=argparse.SUPPRESS,
                help=argparse.SUPPRESS,
            )
        elif kind is bool or kind == (bool | None):
            group.add_argument(
                flag, action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, help=doc
            )
        else:
            said = f" (default: {show(key.default)})" if default is not None else ""
            group.add_argument(
                flag,
                type=_reader(name, key),
                default=argparse.SUPPRESS,
                metavar=_metavar(key),
                help=doc + said.replace("%", "%%"),
            )
    group.add_argument(
        "--no-speculation",
        dest="strategy",
        action="store_const",
        const="off",
        default=argparse.SUPPRESS,
        help="decode plainly: --strategy off",
    )
    group.add_argument(
        "--attention",
        default="auto",
        type=attention_flag,
        metavar="NAME",
        help=f"{ATTENTION_DOC} [one of {', '.join(ATTENTION)}, or your own as module:attribute] "
        "(default: auto)",
    )


def settings_of(args: argparse.Namespace) -> SpeculationSettings:
    """What was said on the command line.

    Raises:
      ValueError: the settings do not go together, or one of them changes nothing.
    """
    said = {name: getattr(args, name) for name in KEYS if hasattr(args, name)}
    control = {name: said.pop(name) for name in list(said) if name in _OF_CONTROL}
    try:
        if control:
            said["control"] = ControlSection(**control)
        found = SpeculationSettings(**said)
        given = [f"speculation.{KEYS[name].name}" for name in (*said, *control) if name in KEYS]
        require_effect(_Flags(found), given)
    except (ValueError, TypeError, OSError) as error:
        raise ValueError(as_flags(spelled(error, flags))) from error
    return found


@dataclasses.dataclass
class _Flags:
    """The settings where the rules expect them."""

    rules: ClassVar[tuple[Needs, ...]] = speculation_rules("speculation")

    speculation: SpeculationSettings


def as_flags(message: str) -> str:
    """A message about settings of the server, which flags stand for, in flags."""

    def flag(match: re.Match) -> str:
        name, value = match["name"], match["value"]
        if value in ("true", "false"):
            return flags(name, value == "true")
        if value == "null":
            value = "none"
        elif value and value.startswith("["):
            value = ",".join(part.strip(" '") for part in value[1:-1].split(","))
        return flags(name, value) if value else flags(name)

    return _SETTING.sub(flag, message.removeprefix("speculation.control: "))


_SETTING = re.compile(
    r"\b(?:(?:speculation\.control|speculation|engine)\.|(?=(?:model|chat_template):))(?P<name>\w+)"
    r"(?:=(?P<value>\[[^\]]*\]|[^\s,;:)]+))?"
)


def _spelled(doc: str) -> str:
    """A sentence about keys, with flags."""
    for name in sorted(KEYS, key=len, reverse=True):
        flag = "--" + name.replace("_", "-")
        doc = doc.replace(f"`{name}`", flag).replace(f"{name}=", f"{flag}=")
    return doc.replace("null:", "by default:")


def _metavar(key: Key) -> str:
    name = key.name.rpartition(".")[2]
    if name in _FILES:
        return "FILE|JSON"
    by_kind = {"list": "A,B", "dict": "JSON", "int": "N", "float": "X"}
    said = str(key.type)
    found = next((mark for kind, mark in by_kind.items() if kind in said), None)
    return found or {"head": "HEAD", "ema_file": "FILE", "draft_model": "MODEL"}.get(name, "NAME")


def _reader(name: str, key: Key) -> Callable[[str], Any]:
    def value(text: str) -> Any:
        try:
            if "list" in str(key.type) and not text.startswith("["):
                found = [part.strip() for part in text.split(",")]
            elif name in _FILES and not text.lstrip().startswith("{"):
                found = _file(text)
            else:
                found = read(text, key)
            return check(key, found)
        except (ValueProblem, OSError) as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return value


def _file(name: str) -> Any:
    try:
        return yaml.load(Path(name).read_text(encoding="utf-8"), Yaml)
    except yaml.YAMLError as error:
        problem = " ".join(str(error).split())
        raise ValueProblem(f"{name} is neither JSON nor YAML: {problem}") from error


def _refuse(reason: str) -> type[argparse.Action]:
    class Refuse(argparse.Action):
        def __call__(self, parser, namespace, values, option_string=None):
            raise argparse.ArgumentError(self, reason)

    return Refuse
