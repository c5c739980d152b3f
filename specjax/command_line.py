"""Reads the configuration of a program: defaults of a schema, a YAML file, `key=value` arguments.

    config = load_config(Config, sys.argv[1:], prog="train.rl", description="GRPO")

A setting is written `key=value`, `--key=value` or `--key value`, with dashes or underscores within
words; `schema.py` says how its text is read. Mistakes of the user (unknown key, wrong type,
missing file, a setting that changes nothing) end the program with status 2 and one message; they
never show a traceback.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import difflib
import functools
import json
import os
import re
import sys
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeVar

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from specjax.schema import (
    REQUIRED,
    Key,
    ValueProblem,
    Yaml,
    absent_keys_of,
    check,
    describe,
    entry_of,
    expected,
    keys_of,
    read,
    show,
    type_name,
    without_effect,
)
from specjax.shipped import find_shipped, roots
from specjax.spelling import flags as as_flag
from specjax.spelling import foreign, python, spelled

T = TypeVar("T")
# Attributes of a configuration: see `typed_in`, `given_in` and `arguments_of`.
_TYPED, _GIVEN, _ARGUMENTS = "_typed", "_given", "_arguments"


def load_config(
    schema_cls: type[T],
    argv: Sequence[str] | None = None,
    prog: str | None = None,
    description: str = "",
) -> T:
    """Reads the command line of a program without flags of its own, see `parse_config`."""
    return parse_config(schema_cls, argv, prog, description)[0]


def parse_config(
    schema_cls: type[T],
    argv: Sequence[str] | None = None,
    prog: str | None = None,
    description: str = "",
    add_arguments: Callable[[argparse.ArgumentParser], None] | None = None,
    require: Callable[[T], None] | None = None,
) -> tuple[T, argparse.Namespace]:
    """Reads the command line of a program.

    Args:
        schema_cls: the dataclass that defines every key. It may have class attributes:
            `rules`: conditions under which settings are read (`schema.Needs`).
            `aliases`: further names of keys.
            `renamed`: names of keys in former versions or elsewhere -> the key, or what to do.
            `absent_keys`: keys of shared sections that the program does not have, with reasons.
            `spell`: function that names settings of the library in messages (`spelling.py`).
            `variants`: pairs of a key and a function of the schema and the key's value that returns
            the schema to use, for keys that decide which further keys or defaults there are.
        argv: arguments without the program's name; None takes them from `sys.argv`.
        prog: name of the program in messages: a module, such as `train.rl`, or a whole command.
        description: one line for `--help`.
        add_arguments: function that adds the program's own flags, such as `--resume`.
        require: function that raises ValueError for a configuration that this program cannot use.

    Returns:
        (config, flags): an instance of `schema_cls`, and argparse's namespace.

    Raises:
        SystemExit: status 0 after `--help` or `--print-config`, 2 after a mistake of the user.
    """
    parser = _Parser(
        prog=f"python -m {prog}" if prog and " " not in prog else prog,
        description=description,
        usage="%(prog)s [--config FILE] [flags] [key=value ...]",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--config", metavar="FILE", help="YAML file with any of the keys below")
    parser.add_argument(
        "--print-config",
        action="store_true",
        help="print the merged configuration and exit; what a run would refuse is refused",
    )
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="key=value",
        help="win over the file; --key value and --key=value are the same",
    )
    if add_arguments is not None:
        add_arguments(parser)
    argv = [str(argument) for argument in (sys.argv[1:] if argv is None else argv)]
    try:
        schema = _Schema.of(_variant(schema_cls, argv))
        parser.epilog = describe(schema.cls)
        arguments, overrides = _split(schema, parser, argv)
    except ConfigError as error:
        parser.error(str(error))
    flags = parser.parse_intermixed_args(arguments)
    try:
        merged, given = _merge(schema, flags.config, overrides)
        config = _finish(schema, merged)
        _require_effect(schema, merged, given)
        if require is not None:
            try:
                require(config)
            except ValueError as error:
                raise ConfigError(str(error)) from error
        if flags.print_config:
            print(OmegaConf.to_yaml(_without_absent_keys(schema, merged)), end="")
            sys.exit(0)
        setattr(config, _TYPED, given.typed)
        setattr(config, _GIVEN, given.typed | given.filed)
        setattr(config, _ARGUMENTS, tuple(argv))
        return config, flags
    except ConfigError as error:
        parser.error(str(error))


class ConfigError(ValueError):
    """The configuration that the user gave cannot be used."""


def typed_in(config: Any) -> frozenset[str]:
    """The keys that were set on the command line from which `config` was read."""
    return getattr(config, _TYPED, frozenset())


def arguments_of(config: Any) -> tuple[str, ...]:
    """The arguments from which `config` was read; empty if it was made in Python."""
    return getattr(config, _ARGUMENTS, ())


def given_in(config: Any) -> frozenset[str]:
    """The keys that were set on the command line or in the file of `config`."""
    return getattr(config, _GIVEN, frozenset())


def require_effect(config: Any, given: Iterable[str] | None = None) -> None:
    """Applies the schema's rules to a configuration that is made or changed in Python.

    Args:
        given: keys that were set, by default those of the command line. A value that equals its
            default counts as not set.

    Raises:
        ConfigError: a setting has no effect.
    """
    schema = _Schema.of(type(config))
    values = dict(_flatten(dataclasses.asdict(config), schema.sections))
    _refuse_without_effect(schema, values, typed_in(config) if given is None else frozenset(given))


def fingerprint(config: Any, ignore: Sequence[str] = ()) -> dict[str, Any]:
    """The settings of a run as JSON reads them back, without the top-level keys of `ignore`."""
    settings = json.loads(json.dumps(dataclasses.asdict(config)))
    return {name: value for name, value in settings.items() if name not in ignore}


def require_same_settings(
    saved: Mapping[str, Any], current: Mapping[str, Any], schema_cls: type
) -> None:
    """Compares a checkpoint's fingerprint with the one of the run that resumes it.

    A key that the checkpoint lacks, because its version had no such setting, must have its default.
    A choice that has another name now counts under that name.

    Args:
        saved: the fingerprint in the checkpoint.
        current: the fingerprint of the run.
        schema_cls: the schema of the run's configuration.

    Raises:
        ConfigError: the fingerprints differ; the message names the top-level keys, and says what
            some of the settings were.
    """
    keys = _Schema.of(schema_cls).keys
    found = {name: list(_changes(keys, name, saved, current)) for name in sorted(current)}
    changed = [name for name, changes in found.items() if changes]
    if changed:
        was = [change for name in changed for change in found[name]]
        more = f" and {len(was) - 5} more" if len(was) > 5 else ""
        raise ConfigError(
            f"the checkpoint was made with other settings of {', '.join(changed)}; resume with "
            f"the same configuration ({', '.join(was[:5])}{more}), or start a new run in another "
            "directory"
        )


def _changes(
    keys: Mapping[str, Key], name: str, saved: Mapping[str, Any], current: Mapping[str, Any]
) -> Iterator[str]:
    """Yields what differs of a key, or of all keys of a section, as settings of the checkpoint.

    Args:
        name: dotted name of the key.
        saved: the section that holds the key, in the checkpoint.
        current: the section that holds the key, in the run.
    """
    last, key = name.rpartition(".")[2], keys.get(name)
    now = current[last]
    if last in saved:
        before = saved[last]
    elif key is None:  # a key of a shared section that this program does not have
        return
    elif key.default == REQUIRED:
        yield f"no {name}"
        return
    else:
        before = json.loads(json.dumps(key.default, default=dataclasses.asdict))
    nested = key is not None and key.section
    if not (nested and isinstance(now, dict) and isinstance(before, dict)):
        if key is not None and isinstance(before, str):
            before = key.former.get(before, before)
        if now != before:
            yield f"{name}={show(before)}"
        return
    for inner in sorted(before.keys() - now.keys()):
        if f"{name}.{inner}" not in keys:  # this version has no such setting
            yield f"{name}.{inner}={show(before[inner])}"
    # Keys that only the checkpoint has are left out of the run's fingerprint: they may differ.
    for inner in now:
        yield from _changes(keys, f"{name}.{inner}", before, now)


class ArgumentParser(argparse.ArgumentParser):
    """argparse's parser, which also reads `--max_batch` as `--max-batch` and the reverse.

    For an unknown flag it suggests a known one.
    """

    def parse_known_args(self, args=None, namespace=None):
        return super().parse_known_args(self._as_known(args), namespace)

    def parse_known_intermixed_args(self, args=None, namespace=None):
        return super().parse_known_intermixed_args(self._as_known(args), namespace)

    def _as_known(self, args: Iterable[str] | None) -> list[str]:
        known = {underscored(option): option for option in self._option_string_actions}
        args = sys.argv[1:] if args is None else args
        return [_as_known(str(argument), known) for argument in args]

    def error(self, message: str) -> NoReturn:
        unknown = re.match(r"unrecognized arguments: (--[\w.-]+)(?:[ =]([^\s-]\S*))?", message)
        if unknown:
            found = foreign(underscored(unknown[1])[2:], *filter(None, [unknown[2]]))
            if found is not None and as_flag(found[0]) in self._option_string_actions:
                message += f"; use {as_flag(*found)}"
            else:
                message += nearest_flag(unknown[1], self._option_string_actions)
        super().error(message)


class _Parser(ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\nTry {self.prog} --help\n")


class _Schema(NamedTuple):
    """The keys of a schema by name.

    Attributes:
      cls: the schema.
      keys: settings and sections by dotted name.
      sections: whether each key is a section.
      aliases: further name of a key -> the key.
    """

    cls: type
    keys: dict[str, Key]
    sections: dict[str, bool]
    aliases: dict[str, str]

    @classmethod
    def of(cls, schema_cls: type) -> _Schema:
        keys = {key.name: key for key in keys_of(schema_cls)}
        sections = {name: key.section for name, key in keys.items()}
        return cls(schema_cls, keys, sections, getattr(schema_cls, "aliases", {}))

    def key_of(self, name: str) -> Key | None:
        """The setting of that name; None for a section or an unknown name.

        `SETTING.NAME.FIELD` is a field of a named entry, see `schema.entry_of`.
        """
        key = self.keys.get(name)
        above, _, field = name.rpartition(".")
        outer = self.keys.get(above.rpartition(".")[0])
        entry = None if key is not None or outer is None else entry_of(outer.type)
        if entry is not None:
            return {each.name: each for each in keys_of(entry)}.get(field)
        return None if key is None or key.section else key

    def renamed_in(self, name: str, value: Any) -> tuple[str, Any]:
        """The first key of an unknown section that `renamed` has, with its value.

        It is the section itself, with its content, where there is none.
        """
        renamed = getattr(self.cls, "renamed", {})
        left = [(name, value)]
        while left:
            here, content = left.pop(0)
            if here in renamed:
                return here, content
            if isinstance(content, dict):
                left = [(f"{here}.{inner}", each) for inner, each in content.items()] + left
        return name, value

    def suggestion(self, name: str, *value: Any) -> str:
        """The end of the message about an unknown key: a similar key, or why there is none.

        Args:
          name: the key.
          value: its value, if it is known.
        """
        for absent, why in absent_keys_of(self.cls).items():
            if name == absent or name.startswith(f"{absent}."):
                return f": {why}"
        renamed = getattr(self.cls, "renamed", {}).get(name)
        if renamed is not None:
            return f"; {renamed}" if " " in renamed else f"; did you mean {renamed!r}?"
        section, _, last = name.rpartition(".")
        found = foreign(last, *value)
        if found is not None and self.key_of(f"{section}.{found[0]}") is not None:
            return f"; use {section}.{found[0]}={show(found[1])}"
        # The right key in a wrong section, or without its section.
        same = [key for key in self.keys if key.rsplit(".", 1)[-1] == last]
        close = difflib.get_close_matches(name, same, n=1, cutoff=0.0)
        if not close:
            known = [*self.keys, *self.aliases]
            close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
        if not close:  # a similar key in a wrong section
            tails = {key.rsplit(".", 1)[-1]: key for key in self.keys}
            close = [tails[t] for t in difflib.get_close_matches(last, tails, n=1, cutoff=0.7)]
        return f"; did you mean {close[0]!r}?" if close else "; --help lists every key"


# --- the command line ----------------------------------------------------------------------------


def _split(
    schema: _Schema, parser: argparse.ArgumentParser, argv: Sequence[str]
) -> tuple[list[str], list[str]]:
    """Splits arguments into flags, for argparse, and settings as `key=value`, in order."""
    flags = {underscored(option): option for option in parser._option_string_actions}
    ours, settings, rest = [], [], [*argv]
    while rest:
        argument = rest.pop(0)
        name, equals, value = argument.partition("=")
        if argument == "--":
            continue
        if not argument.startswith("--"):
            short = argument in parser._option_string_actions
            (ours if short else settings).append(argument)
            continue
        name = underscored(name)
        if name in flags:
            ours.append(flags[name] + equals + value)
            action = parser._option_string_actions[flags[name]]
            if action.nargs is None and not equals and rest:  # a value may look like anything
                ours.append(rest.pop(0))
            continue
        name = name.removeprefix("--")
        key = schema.key_of(schema.aliases.get(name, name))
        if key is None and name not in schema.keys and name not in schema.aliases:
            found = [value] if equals else rest[:1]
            hint = nearest_flag(f"--{name}", flags.values()) or schema.suggestion(name, *found)
            raise ConfigError(f"command line: unknown key {name!r}{hint}")
        if not equals:
            value = _value_after(name, key, rest)
        settings.append(f"{name}={value}")
    return ours, settings


def _variant(schema_cls: type, argv: Sequence[str]) -> type:
    """The schema that the values of some keys select, see `variants` of `parse_config`."""
    for name, variant in getattr(schema_cls, "variants", ()):
        schema = _Schema.of(schema_cls)
        value = _look_up(schema, schema.keys[name], argv)
        try:
            value = schema.keys[name].default if value is None else str(value)
            schema_cls = variant(schema_cls, value)
        except ValueError as error:
            raise ConfigError(f"{name}: {error}") from error
    return schema_cls


def _look_up(schema: _Schema, key: Key, argv: Sequence[str]) -> Any:
    """The value of a key `section.name` on the command line, or else in the file; None if not set.

    It is needed before the whole schema is known.
    """
    section, last = key.name.split(".")
    names = [key.name, *(alias for alias, name in schema.aliases.items() if name == key.name)]
    found, config, rest = None, None, [*argv]
    while rest:
        argument, equals, text = rest.pop(0).partition("=")
        name = underscored(argument).removeprefix("--")
        if name in (*names, "config") and argument.startswith("--") and not equals and rest:
            text = rest.pop(0)
        if argument.startswith("--") and name == "config":
            config = text
        elif name == section and text.lstrip().startswith("{"):
            with contextlib.suppress(ValueProblem):  # reported when all values are read
                found = read(text, None).get(last, found)
        elif name in names:
            found = read(text, key)
    if found is None and config:
        inside = _file(_find(config)).get(section)
        short = inside if section in names else None
        found = inside.get(last) if isinstance(inside, dict) else short
    return found


def _value_after(name: str, key: Key | None, rest: list[str]) -> str:
    """The value of `--name`, taken from the front of `rest`; `--name` alone is true."""
    if key is not None and key.type is bool:
        has_value = rest and rest[0].lower() in ("true", "false")
        return rest.pop(0) if has_value else "true"
    if not rest or rest[0].startswith("--"):
        wanted = "a value" if key is None else expected(key.type)
        raise ConfigError(f"--{name}: expected {wanted} after it, got nothing; --{name}=VALUE")
    return rest.pop(0)


def _read_overrides(schema: _Schema, overrides: Sequence[str]) -> dict[str, Any]:
    """Reads values by dotted name; the last of several values of a key wins.

    Raises:
      ConfigError: a text is no value, or a key is given by two names.
    """
    found: dict[str, Any] = {}
    typed: dict[str, str] = {}
    for override in overrides:
        name, equals, text = override.partition("=")
        name = underscored(name.strip())
        if not equals or not name:
            hint = f"; {name}=VALUE sets it" if name in schema.keys else schema.suggestion(name)
            raise ConfigError(f"expected key=value, got {override!r}{hint}")
        alias = schema.aliases.get(name)
        asked = name
        if alias is not None and not text.lstrip().startswith("{"):
            name = alias
        before = typed.setdefault(name, asked)
        if before != asked:
            raise ConfigError(
                f"command line: {before if asked == name else asked} is another name of {name}, "
                "and both are given"
            )
        above = name.rpartition(".")[0]
        outer = schema.key_of(above)
        if outer is not None and typing.get_origin(outer.type) is not dict:
            raise ConfigError(
                f"command line: unknown key {name!r}; {above} is {expected(outer.type)}"
            )
        try:
            value = read(text, schema.key_of(name))
        except ValueProblem as error:
            raise ConfigError(f"command line: {name}: {error}") from error
        found[name] = value
    for name in [name for name, value in found.items() if value == {}]:
        if inside := next((other for other in found if other.startswith(f"{name}.")), None):
            raise ConfigError(
                f"command line: {name}={{}} leaves nothing of the mapping, and {inside} is given, "
                f"too; leave out one of them, or give the whole mapping in a file"
            )
    return found


# --- layers --------------------------------------------------------------------------------------


class _Given(NamedTuple):
    """The keys that the user set.

    Attributes:
      typed: keys of the command line.
      filed: keys of the file.
      file_alone: the configuration that the file gives without the command line.
    """

    typed: frozenset[str]
    filed: frozenset[str]
    file_alone: DictConfig


def _merge(
    schema: _Schema, config: str | None, overrides: Sequence[str]
) -> tuple[DictConfig, _Given]:
    merged = _structured(schema.cls)
    filed: frozenset[str] = frozenset()
    if config is not None:
        path = _find(config)
        raw = _without_aliases(schema, _file(path), str(path))
        merged = _apply(schema, merged, raw, str(path))
        filed = frozenset(name for name, _ in _flatten(raw, schema.sections))
    file_alone = merged
    nested: dict[str, Any] = {}
    for name, value in _read_overrides(schema, overrides).items():
        _put(nested, name, value)
    merged = _apply(schema, merged, nested, "command line")
    typed = frozenset(name for name, _ in _flatten(nested, schema.sections))
    return merged, _Given(typed, filed, file_alone)


def _without_aliases(schema: _Schema, raw: dict[str, Any], source: str) -> dict[str, Any]:
    """The content of a file, with aliases replaced by the keys that they name."""
    given = dict(_flatten(raw, schema.sections))
    for alias, name in schema.aliases.items():
        if alias not in given or isinstance(given[alias], dict):
            continue
        if name in given:
            raise ConfigError(f"{source}: {alias} is another name of {name}, and both are given")
        *above, last = alias.split(".")
        holder = raw
        for part in above:
            holder = holder[part]
        _put(raw, name, holder.pop(last))
    return raw


def _without_absent_keys(schema: _Schema, merged: DictConfig) -> Any:
    """The configuration without the keys that the program does not have."""
    values = typing.cast(dict, OmegaConf.to_container(merged))
    for name in absent_keys_of(schema.cls):
        *above, last = name.split(".")
        del functools.reduce(dict.__getitem__, above, values)[last]
    return OmegaConf.create(values)


@functools.cache
def _structured(cls: type) -> DictConfig:
    """The schema as a structured config; cached because it is slow to make."""
    return OmegaConf.structured(cls)


def _put(nested: dict[str, Any], name: str, value: Any) -> None:
    """Sets a dotted name in nested mappings."""
    *above, last = name.split(".")
    for part in above:
        nested = nested.setdefault(part, {})
        if not isinstance(nested, dict):
            raise ConfigError(f"command line: {part} is given as a value and as a section; choose")
    if isinstance(value, dict) and isinstance(nested.get(last), dict):
        nested[last].update(value)
    else:
        nested[last] = value


def _find(config: str) -> Path:
    """The path of a config file: the file itself, or a file that specjax ships."""
    path = find_shipped(config)
    if os.path.isfile(path):
        return path
    found = "a directory, not a file," if os.path.isdir(path) else "no file"
    shipped = {path.name for root in roots() for path in (root / "configs").glob("*.yaml")}
    known = f"; shipped: {', '.join(f'configs/{name}' for name in sorted(shipped))}"
    raise ConfigError(f"--config: {found} {config}{known if shipped else ''}")


def _file(path: Path) -> dict[str, Any]:
    try:
        loaded = yaml.load(path.read_text(encoding="utf-8"), Yaml)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        detail = " ".join(str(error).split())
        raise ConfigError(f"{path} is not valid YAML: {detail}") from error
    except OSError as error:
        why = error.strerror or error
        raise ConfigError(f"--config: {path} cannot be read ({why}); name another file") from error
    if loaded is None:
        return {}
    if not isinstance(loaded, dict):
        found = "a list" if isinstance(loaded, list) else repr(loaded)
        raise ConfigError(f"{path}: expected a mapping of keys at the top, got {found}")
    return loaded


def _apply(schema: _Schema, merged: DictConfig, raw: dict[str, Any], source: str) -> DictConfig:
    """Merges a file or the command line into a configuration."""
    layer: dict[str, Any] = {}
    emptied = []
    for name, value in _flatten(raw, schema.sections):
        if name not in schema.keys:
            name, value = schema.renamed_in(name, value)
            raise ConfigError(f"{source}: unknown key {name!r}{schema.suggestion(name, value)}")
        key = schema.keys[name]
        if key.section:
            if isinstance(value, dict) and value:
                continue  # its keys follow
            if value or (value is None and key.default is not None):
                inside = next(k for k in schema.keys if k.startswith(f"{name}."))
                raise ConfigError(
                    f"{source}: {name} is a section: set {name}.KEY=value instead, such as "
                    f"{inside}=..., got {value if isinstance(value, str) else show(value)}"
                )
        else:
            of_file = source != "command line"
            if not (of_file and _refers(value)):
                try:
                    value = check(key, unescaped(value) if of_file else value)
                except ValueProblem as error:
                    raise ConfigError(f"{source}: {name}: {error}") from error
                value = escaped(value)
            if value == {}:
                emptied.append(name)
        _put(layer, name, value)
    try:
        merged = typing.cast(DictConfig, OmegaConf.merge(merged, layer))  # a copy
        for name in emptied:  # merging adds to a mapping, and an empty one is to leave nothing
            OmegaConf.update(merged, name, {}, merge=False)
        return merged
    except OmegaConfBaseException as error:
        raise ConfigError(_type_message(schema, error, source)) from error


def escaped(value: Any) -> Any:
    """A value as a file holds it: with no text that refers to another key (`${KEY}`)."""
    return _with_texts(value, lambda text: _REFERENCE.sub(lambda m: rf"{m[1] * 2}\${{", text))


def unescaped(value: Any) -> Any:
    """The value of which `escaped` makes a given one."""
    return _with_texts(
        value, lambda text: _REFERENCE.sub(lambda m: m[1][: len(m[1]) // 2] + "${", text)
    )


def _refers(value: Any) -> bool:
    """Whether a value in a file refers to another key."""
    if isinstance(value, str):
        return any(len(backslashes) % 2 == 0 for backslashes in _REFERENCE.findall(value))
    inner = value.values() if isinstance(value, Mapping) else value
    return isinstance(value, (Mapping, list)) and any(map(_refers, inner))


def _with_texts(value: Any, change: Callable[[str], str]) -> Any:
    """A value with all texts in it changed, except for keys of mappings."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {name: _with_texts(each, change) for name, each in value.items()}
    return [_with_texts(each, change) for each in value] if isinstance(value, list) else value


_REFERENCE = re.compile(r"(\\*)\$\{")  # to another key, after an even number of backslashes


def _flatten(node: Any, sections: dict[str, bool], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields dotted names and values; a mapping that is no section is one value."""
    for key, value in node.items():
        name = f"{prefix}{key}"
        yield name, value
        if isinstance(value, dict) and sections.get(name, False):
            yield from _flatten(value, sections, f"{name}.")


def _type_message(schema: _Schema, error: OmegaConfBaseException, source: str) -> str:
    name = getattr(error, "full_key", None) or "value"
    key = schema.keys.get(name)
    wanted = f" (expected {type_name(key.type)})" if key is not None else ""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return f"{source}: {name}: {lines[0]}{wanted}"


# --- the merged configuration --------------------------------------------------------------------


def _require_effect(schema: _Schema, merged: DictConfig, given: _Given) -> None:
    """Refuses settings that change nothing.

    The command line may leave settings of a file without effect, because different runs share a
    file. Within the file they must have an effect.
    """
    values = _values(schema, merged)
    _refuse_without_effect(schema, values, given.typed)
    of_file = _values(schema, given.file_alone)
    filed = [name for name, _ in without_effect(schema.cls, of_file, given.filed)]
    _refuse_without_effect(schema, values, frozenset(filed))


def _values(schema: _Schema, merged: DictConfig) -> dict[str, Any]:
    try:
        raw = OmegaConf.to_container(merged, resolve=True)
    except OmegaConfBaseException as error:
        raise ConfigError(_type_message(schema, error, "configuration")) from error
    return dict(_flatten(raw, schema.sections))


def _refuse_without_effect(
    schema: _Schema, values: Mapping[str, Any], given: frozenset[str]
) -> None:
    for _, message in without_effect(schema.cls, values, given):
        raise ConfigError(message)


def _finish(schema: _Schema, merged: DictConfig) -> Any:
    try:
        missing = sorted(OmegaConf.missing_keys(merged))
        if missing:
            raise ConfigError(
                f"no value for the required keys {missing}; set them as {missing[0]}=VALUE"
            )
        return OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:
        raise ConfigError(_type_message(schema, error, "configuration")) from error
    except (ValueError, TypeError, AssertionError) as error:  # a schema's __post_init__
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(spelled(error, getattr(schema.cls, "spell", python))) from error


# --- flags of commands ---------------------------------------------------------------------------


def underscored(option: str) -> str:
    """A flag or key with underscores in place of dashes."""
    dashes = len(option) - len(option.lstrip("-"))
    return option[:dashes] + option[dashes:].replace("-", "_")


def nearest_flag(option: str, known: Iterable[str]) -> str:
    """A suggestion for an unknown flag, where a known one is close."""
    flags = {underscored(flag): flag for flag in known if flag.startswith("--")}
    close = difflib.get_close_matches(underscored(option), flags, n=1, cutoff=0.7)
    return f"; did you mean {flags[close[0]]!r}?" if close else ""


def _as_known(argument: str, known: dict[str, str]) -> str:
    name, equals, value = argument.partition("=")
    if not name.startswith("--"):
        return argument
    return known.get(underscored(name), name) + equals + value
