"""Configuration of a program: a schema (`schema.py`) <- a YAML file <- `key=value` arguments.

    config = load_config(Config, sys.argv[1:], prog="train.rl", description="GRPO")

Mistakes of the user (unknown key, wrong type, missing file) end the program with status 2 and one
message; they never show a traceback.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import json
import re
import sys
import sysconfig
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from specjax.schema import describe, keys_of, show, type_name

T = TypeVar("T")


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
        epilog=describe(schema_cls),
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
    sections = {key.name: key.section for key in keys_of(schema_cls)}
    nullable = {key.name for key in keys_of(schema_cls) if key.section and key.default is None}
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
    known = [key.name for key in keys_of(schema_cls)]
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    if not close:  # the right key in the wrong section, or without its section
        last = name.rsplit(".", 1)[-1]
        tails = {key.rsplit(".", 1)[-1]: key for key in known}
        close = [tails[tail] for tail in difflib.get_close_matches(last, tails, n=1, cutoff=0.7)]
    return f"; did you mean {close[0]!r}?" if close else "; --help lists every key"


def _type_message(schema_cls: type, error: OmegaConfBaseException, source: str) -> str:
    name = getattr(error, "full_key", None) or "value"
    kinds = {key.name: key.type for key in keys_of(schema_cls)}
    expected = f" (expected {type_name(kinds[name])})" if name in kinds else ""
    return f"{source}: {name}: {_first_line(error)}{expected}"


def _finish(schema_cls: type[T], merged: DictConfig) -> T:
    try:
        missing = sorted(OmegaConf.missing_keys(merged))
        if missing:
            raise ConfigError(f"no value for the required keys {missing}; set them as key=value")
        for key in keys_of(schema_cls):
            value = OmegaConf.select(merged, key.name)
            if OmegaConf.select(merged, key.name.rpartition(".")[0] or key.name) is None:
                continue  # a section that is null
            if key.choices is not None and value not in key.choices:
                choices = ", ".join(show(choice) for choice in key.choices)
                raise ConfigError(f"{key.name}: expected one of {choices}, got {show(value)}")
        return typing.cast(T, OmegaConf.to_object(merged))
    except OmegaConfBaseException as error:
        raise ConfigError(_type_message(schema_cls, error, "configuration")) from error
    except (ValueError, TypeError, AssertionError) as error:  # a schema's __post_init__
        raise error if isinstance(error, ConfigError) else ConfigError(str(error)) from error


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
