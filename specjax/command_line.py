"""Configuration of a program: a dataclass schema <- a YAML file <- `key=value` arguments.

A schema is a tree of dataclasses whose fields are made with `option`, so that every key has a type,
a default and a sentence of documentation (a field made otherwise has it under "Attributes:" in the
docstring of its class); `--help` lists them and nothing else needs writing::

    @dataclass
    class Optimizer:
        lr: float = option(1e-4, "peak learning rate")

    @dataclass
    class Config:
        steps: int = option(100, "number of updates")
        optimizer: Optimizer = option(Optimizer, "the policy's optimizer")

    config = load_config(Config, sys.argv[1:], prog="train.rl", description="GRPO")

Mistakes of the user (unknown key, wrong type, missing file) end the program with status 2 and one
message; they never show a traceback.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import difflib
import functools
import inspect
import json
import re
import sys
import sysconfig
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import yaml
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

T = TypeVar("T")
REQUIRED: Any = MISSING  # the default of an option that the user must set


def option(default: Any, doc: str, choices: Sequence[Any] | None = None) -> Any:
    """A documented dataclass field.

    Args:
        default: a value (lists and dicts are copied), a dataclass for a section of its own, or
            `REQUIRED`.
        doc: one line for `--help`, with the unit where there is one.
        choices: the only values allowed.
    """
    metadata = {"doc": doc, "choices": None if choices is None else tuple(choices)}
    if isinstance(default, type) and dataclasses.is_dataclass(default):
        return dataclasses.field(default_factory=default, metadata=metadata)
    if isinstance(default, (list, dict)) or dataclasses.is_dataclass(default):
        return dataclasses.field(default_factory=lambda: copy.deepcopy(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def at_least(section: str, values, **smallest: int) -> None:
    """Checks fields of a section against the smallest values that make sense.

    Raises:
      ValueError: one of them is smaller.
    """
    for name, least in smallest.items():
        if getattr(values, name) < least:
            key = f"{section}.{name}" if section else name
            raise ValueError(f"{key}: expected at least {least}, got {getattr(values, name)}")


def load_config(
    schema_cls: type[T],
    argv: Sequence[str] | None = None,
    prog: str | None = None,
    description: str = "",
) -> T:
    """`parse_config` for a program without flags of its own."""
    return parse_config(schema_cls, argv, prog, description)[0]


def parse_config(
    schema_cls: type[T],
    argv: Sequence[str] | None = None,
    prog: str | None = None,
    description: str = "",
    add_arguments: Callable[[argparse.ArgumentParser], None] | None = None,
) -> tuple[T, argparse.Namespace]:
    """Reads the command line of a program.

    Args:
        schema_cls: the dataclass that defines every key.
        argv: arguments without the program's name; None takes them from `sys.argv`.
        prog: the name shown in messages: of a module, as `train.rl`, or of a whole command.
        description: one line for `--help`.
        add_arguments: adds the program's own flags (`--resume`); the namespace returned has them.

    Returns:
        (config, flags): an instance of `schema_cls`, and argparse's namespace.

    Raises:
        SystemExit: status 0 after `--help` or `--print-config`, 2 after a mistake of the user.
    """
    parser = _Parser(
        prog=f"python -m {prog}" if prog and " " not in prog else prog,
        description=description,
        epilog=_describe(schema_cls),
        usage="%(prog)s [--config FILE] [flags] [key=value ...]",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--config", metavar="FILE", help="YAML file with any of the keys below")
    parser.add_argument(
        "--print-config", action="store_true", help="print the merged configuration and exit"
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="win over the file")
    if add_arguments is not None:
        add_arguments(parser)
    flags = parser.parse_intermixed_args(argv)

    try:
        merged = _merge(schema_cls, flags.config, flags.overrides)
        if flags.print_config:
            print(OmegaConf.to_yaml(merged), end="")
            sys.exit(0)
        return _finish(schema_cls, merged), flags
    except ConfigError as error:
        parser.error(str(error))


class ConfigError(ValueError):
    """The configuration that the user gave cannot be used."""


def fingerprint(config: Any, ignore: Sequence[str] = ()) -> dict[str, Any]:
    """The settings of a run as JSON reads them back, without the top-level keys of `ignore`."""
    settings = json.loads(json.dumps(dataclasses.asdict(config)))
    return {name: value for name, value in settings.items() if name not in ignore}


def require_same_settings(saved: Mapping[str, Any], current: Mapping[str, Any]) -> None:
    """Compares the fingerprint in a checkpoint with that of the run that resumes it.

    Raises:
        ConfigError: they differ; the message names the top-level keys that do.
    """
    changed = sorted(name for name in current if current[name] != saved.get(name))
    if changed:
        raise ConfigError(
            f"the checkpoint was made with other settings of {', '.join(changed)}; resume with "
            "the same configuration, or start a new run in another directory"
        )


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        if "unrecognized arguments" in message:
            message += " (settings are written key=value, without dashes)"
        self.exit(2, f"{self.prog}: error: {message}\nTry {self.prog} --help\n")


@dataclasses.dataclass(frozen=True)
class _Key:
    name: str  # dotted
    type: Any
    default: Any
    doc: str
    choices: tuple[Any, ...] | None
    section: bool


@functools.cache
def _keys(schema_cls: type) -> tuple[_Key, ...]:
    """Every key of the schema, depth first, sections before what they hold."""
    return tuple(_keys_below(schema_cls))


def _keys_below(schema_cls: type, prefix: str = "", section_default: Any = None) -> Iterator[_Key]:
    """The keys of a section, or of the whole.

    The default of a section (`option(Optimizer(lr=1e-3), ...)`) decides those of its keys. A
    section of type `Section | None` may be null; it exists once one of its keys is set.
    """
    hints = typing.get_type_hints(schema_cls)
    docs = _attribute_docs(schema_cls)
    for field in dataclasses.fields(schema_cls):
        kind = hints[field.name]
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
        yield _Key(name, kind, default, doc, meta.get("choices"), section)
        if inner is not None:
            below = default if isinstance(default, inner) else None
            yield from _keys_below(inner, f"{name}.", below)


def _section_of(kind: Any) -> type | None:
    """The dataclass of a section, also of one that may be null; None: it is a plain key."""
    options = [k for k in typing.get_args(kind) if k is not type(None)] or [kind]
    found = options[0]
    return found if isinstance(found, type) and dataclasses.is_dataclass(found) else None


def _attribute_docs(schema_cls: type) -> dict[str, str]:
    """Name -> sentence, from "Attributes:" in the docstrings of a class and its bases."""
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


def _describe(schema_cls: type) -> str:
    rows: list[tuple[str, str, str]] = []
    for key in _keys(schema_cls):
        if key.section:
            rows.append((f"\n{key.name}", "", key.doc))
            continue
        default = "required" if key.default == REQUIRED else _show(key.default)
        doc = key.doc
        if key.choices:
            doc += f" [one of {', '.join(_show(choice) for choice in key.choices)}]"
        rows.append((f"{key.name}={default}", _type_name(key.type), doc))
    left = min(44, max((len(name) for name, _, _ in rows), default=0))
    middle = max((len(kind) for _, kind, _ in rows), default=0)
    lines = [f"  {name:<{left}}  {kind:<{middle}}  {doc}".rstrip() for name, kind, doc in rows]
    lines = [line if not line.startswith("  \n") else "\n  " + line[3:] for line in lines]
    return "keys, with their defaults and types:\n" + "\n".join(lines)


def _show(value: Any) -> str:
    if isinstance(value, (bool, list, dict)) or value is None:
        return yaml.safe_dump(value, default_flow_style=True).splitlines()[0]
    return "''" if value == "" else str(value)


def _type_name(kind: Any) -> str:
    return kind.__name__ if isinstance(kind, type) and not typing.get_args(kind) else str(kind)


def _merge(schema_cls: type, config: str | None, overrides: Sequence[str]) -> DictConfig:
    merged = OmegaConf.structured(schema_cls)
    if config is not None:
        path = _find(config)
        merged = _apply(schema_cls, merged, [_read(path)], str(path))
    layers = []
    for override in overrides:
        name, equals, _ = override.partition("=")
        if not equals or not name:
            raise ConfigError(f"expected key=value, got {override!r}{_suggest(schema_cls, name)}")
        try:
            layer = OmegaConf.create()
            OmegaConf.update(layer, name, yaml.load(override[len(name) + 1 :], _Yaml))
        except (OmegaConfBaseException, yaml.YAMLError) as error:
            raise ConfigError(f"cannot read {override!r}: {_first_line(error)}") from error
        layers.append(layer)
    return _apply(schema_cls, merged, layers, "command line")


def _roots() -> list[Path]:
    """Where shipped files lie: the working directory, the checkout, the installed package."""
    installed = Path(sysconfig.get_path("data")) / "share" / "specjax"
    return [Path.cwd(), Path(__file__).resolve().parent.parent, installed]


def find_shipped(name: str) -> Path:
    """The file or directory `name` itself, else the shipped one; `name` unchanged if neither."""
    return next((root / name for root in _roots() if (root / name).exists()), Path(name))


def _find(config: str) -> Path:
    """The config file of that name."""
    path = find_shipped(config)
    if path.is_file():
        return path
    shipped = {path.name for root in _roots() for path in (root / "configs").glob("*.yaml")}
    known = f"; shipped: {', '.join(f'configs/{name}' for name in sorted(shipped))}"
    raise ConfigError(f"--config: no file {config}{known if shipped else ''}")


def _read(path: Path) -> DictConfig:
    try:
        loaded = yaml.load(path.read_text(encoding="utf-8"), _Yaml)
        loaded = OmegaConf.create({} if loaded is None else loaded)
    except (OmegaConfBaseException, yaml.YAMLError, UnicodeDecodeError) as error:
        detail = " ".join(str(error).split())
        raise ConfigError(f"{path} is not valid YAML: {detail}") from error
    if not isinstance(loaded, DictConfig):
        raise ConfigError(f"{path}: expected a mapping of keys at the top, got a list")
    return loaded


class _Yaml(yaml.SafeLoader):
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
_Yaml.yaml_implicit_resolvers = {
    first: [
        ("tag:yaml.org,2002:str", re.compile(r"[-+]?\d+(_\d+)+$")),
        ("tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$")),
        (_BOOL, re.compile(r"(?i:true|false)$")),
        *((tag, pattern) for tag, pattern in resolvers if tag != _BOOL),
    ]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def _apply(
    schema_cls: type, merged: DictConfig, layers: Sequence[DictConfig], source: str
) -> DictConfig:
    for layer in layers:
        _check_names(schema_cls, OmegaConf.to_container(layer, resolve=False), source)
    try:
        return typing.cast(DictConfig, OmegaConf.merge(merged, *layers))
    except OmegaConfBaseException as error:
        raise ConfigError(_type_message(schema_cls, error, source)) from error


def _check_names(schema_cls: type, raw: Any, source: str) -> None:
    """Refuses keys that there are not, and values where there is a section."""
    sections = {key.name: key.section for key in _keys(schema_cls)}
    nullable = {key.name for key in _keys(schema_cls) if key.section and key.default is None}
    for name, value in _flatten(raw, sections):
        if name not in sections:
            raise ConfigError(f"{source}: unknown key {name!r}{_suggest(schema_cls, name)}")
        if sections[name] and not isinstance(value, dict) and (value or name not in nullable):
            raise ConfigError(f"{source}: {name} is a section: set {name}.KEY=value instead")


def _flatten(node: Any, sections: dict[str, bool], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted names as given; does not look into the values of keys that are not sections."""
    for key, value in node.items():
        name = f"{prefix}{key}"
        yield name, value
        if isinstance(value, dict) and sections.get(name, False):
            yield from _flatten(value, sections, f"{name}.")


def _suggest(schema_cls: type, name: str) -> str:
    known = [key.name for key in _keys(schema_cls)]
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    if not close:  # the right key in the wrong section, or without its section
        last = name.rsplit(".", 1)[-1]
        tails = {key.rsplit(".", 1)[-1]: key for key in known}
        close = [tails[tail] for tail in difflib.get_close_matches(last, tails, n=1, cutoff=0.7)]
    return f"; did you mean {close[0]!r}?" if close else "; --help lists every key"


def _type_message(schema_cls: type, error: OmegaConfBaseException, source: str) -> str:
    name = getattr(error, "full_key", None) or "value"
    kinds = {key.name: key.type for key in _keys(schema_cls)}
    expected = f" (expected {_type_name(kinds[name])})" if name in kinds else ""
    return f"{source}: {name}: {_first_line(error)}{expected}"


def _finish(schema_cls: type[T], merged: DictConfig) -> T:
    try:
        missing = sorted(OmegaConf.missing_keys(merged))
        if missing:
            raise ConfigError(f"no value for the required keys {missing}; set them as key=value")
        for key in _keys(schema_cls):
            value = OmegaConf.select(merged, key.name)
            if OmegaConf.select(merged, key.name.rpartition(".")[0] or key.name) is None:
                continue  # a section that is null
            if key.choices is not None and value not in key.choices:
                choices = ", ".join(_show(choice) for choice in key.choices)
                raise ConfigError(f"{key.name}: expected one of {choices}, got {_show(value)}")
        return typing.cast(T, OmegaConf.to_object(merged))
    except OmegaConfBaseException as error:
        raise ConfigError(_type_message(schema_cls, error, "configuration")) from error
    except (ValueError, TypeError, AssertionError) as error:  # a schema's __post_init__
        raise error if isinstance(error, ConfigError) else ConfigError(str(error)) from error


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
