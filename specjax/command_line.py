"""Reads the settings of a program: defaults, a YAML file, and the command line, in this order.

    config, _ = parse_config(Config, sys.argv[1:], "train.rl", "GRPO")

A setting is written `key=value`, `--key=value` or `--key value`, with dashes or underscores within
words; `--key` alone is true and `--no-key` false; the last value of a key wins. Mistakes of the
user (an unknown key, a wrong type, a missing file, a setting without effect) end the program with
status 2 and one message; they never show a traceback.

The text after `key=` is YAML, except for settings that are text: these take it as it stands,
braces, commas and colons included. In such text `\\n`, `\\t` and `\\\\` are a newline, a tab and a
backslash; any other backslash stays. Text in quotes of its own (`'"..."'` for a shell) is read as
YAML. `null`, or nothing at all, is null where a setting may be null. A list needs no brackets.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import os
import re
import sys
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml
from omegaconf import DictConfig, OmegaConf, open_dict, read_write
from omegaconf.errors import OmegaConfBaseException

from specjax.settings import (
    ConfigError,
    Key,
    all_keys,
    describe,
    idle,
    keys_of,
    look,
    show,
    values_of,
    within,
)
from specjax.shipped import find_shipped, roots
from specjax.spelling import nearest, nearest_key

T = TypeVar("T")
_NAME = re.compile(r"[a-z][\w.-]*")  # of what may be a key: `17+25=` is a word


@dataclasses.dataclass
class Call:
    """Keys that are about one call of a program, and that `--print-config` does not print.

    Attributes:
      config: YAML file with any of the keys below.
      print_config: print the merged settings and exit; what a run would refuse is refused.
      help: print this and exit.
    """

    config: str | None = None
    print_config: bool = False
    help: bool = False


def parse_config(
    schema: type[T],
    argv: Sequence[str] | None = None,
    prog: str | None = None,
    description: str = "",
    call: type = Call,
    require: Callable[[T], None] | None = None,
) -> tuple[T, Any]:
    """Reads the command line of a program.

    Args:
      schema: the dataclass of its settings, see `specjax.settings`.
      argv: arguments without the program's name; None takes them from `sys.argv`.
      prog: name of the program in messages: a module, such as `train.rl`, or a whole command.
      description: the text above the keys in `--help`.
      call: class with further keys like those of `Call`, such as `resume`.
      require: function that raises ValueError for settings that this program cannot use.

    Returns:
      (settings, call): objects of the two classes.

    Raises:
      SystemExit: status 0 after `--help` or `--print-config`, 2 after a mistake of the user.
    """
    program = f"python -m {prog}" if prog and " " not in prog else prog or "specjax"
    argv = [str(argument) for argument in (sys.argv[1:] if argv is None else argv)]
    call_keys = {key.name: key for key in keys_of(call)}
    try:
        words, pairs = _split(argv, {key.name: key for key in keys_of(schema)} | call_keys)
        of_call = {name: _read(text, call_keys[name]) for name, text in pairs if name in call_keys}
        this_call, _ = _merge(call, call_keys, _structured(call), of_call, "command line")
        pairs = [(name, text) for name, text in pairs if name not in call_keys]
        path = None if this_call.config is None else _find(this_call.config)
        file = {} if path is None else _load(path, schema)
        base, keys = _defaults(schema, file, pairs)
        if this_call.help:
            print(_help(program, schema, description, call_keys, keys))
            sys.exit(0)
        chosen = {name: key.section for name, key in keys.items() if key.options.get("choose")}
        base, filed = _merge(schema, keys, base, file, str(path))
        alone = _plain(base)  # what the file says without the command line
        typed_values = _typed(schema, keys, words, pairs)
        base, typed = _merge(schema, keys, base, typed_values, "command line")
        config, values = _finish(schema, base, chosen), _plain(base)
        # The command line may leave settings of a file without effect, because different runs share
        # a file. Within the file they must have one.
        for _, message in idle(config, typed | _idle_in(schema, alone, chosen, filed), values):
            raise ConfigError(message)
        if require is not None:
            require(config)
        if this_call.print_config:
            print(yaml.safe_dump(values_of(values, keys.values()), sort_keys=False), end="")
            sys.exit(0)
        for name, value in (("typed", typed), ("given", typed | filed), ("argv", tuple(argv))):
            object.__setattr__(config, f"_{name}", value)  # the dataclass may be frozen
        return config, _finish(call, this_call)
    except ValueError as error:
        print(f"{program}: error: {error}\nTry {program} --help", file=sys.stderr)
        sys.exit(2)


def typed_in(config: Any) -> frozenset[str]:
    """The keys that were set on the command line from which `config` was read."""
    return getattr(config, "_typed", frozenset())


def require_effect(config: Any) -> None:
    """Raises ConfigError if `config`, changed since, leaves a typed setting without effect."""
    for _, message in idle(config, typed_in(config)):
        raise ConfigError(message)


def given_in(config: Any) -> frozenset[str]:
    """The keys that were set on the command line or in the file of `config`."""
    return getattr(config, "_given", frozenset())


def arguments_of(config: Any) -> tuple[str, ...]:
    """The arguments from which `config` was read; empty if it was made in Python."""
    return getattr(config, "_argv", ())


def _help(
    program: str, schema: type, description: str, call: Mapping[str, Key], keys: Mapping[str, Key]
) -> str:
    words = "".join(f" {name.upper()}" for name in getattr(schema, "words", ()))
    own = "\n".join(f"  --{key.name.replace('_', '-'):<14}  {key.doc}" for key in call.values())
    usage = f"usage: {program}{words} [--config FILE] [key=value | --key value ...]"
    return f"{usage}\n\n{description}\n\n{own}\n\n{describe(keys.values())}"


# --- the command line ----------------------------------------------------------------------------


def _split(argv: Sequence[str], keys: Mapping[str, Key]) -> tuple[list[str], list[tuple[str, str]]]:
    """Splits arguments into words without a name, and settings as (name, text), in order."""
    words, pairs, rest = [], [], ["--help" if argument == "-h" else argument for argument in argv]
    while rest:
        argument = rest.pop(0)
        name, equals, text = argument.partition("=")
        dashes = len(name) - len(name.lstrip("-"))
        name = name.lstrip("-").replace("-", "_")
        key = keys.get(name)
        is_key = dashes > 1 or (name in keys and len(name) == 1 if dashes else equals)
        if argument == "--":
            words += rest
            break
        if not is_key or not _NAME.fullmatch(name):
            words.append(argument)
            continue
        denied = keys.get(name.removeprefix("no_"))
        if not equals and key is None and denied is not None and denied.kinds == [bool]:
            name, text = denied.name, "false"
        elif not equals and (key is None or key.kinds == [bool]):  # an unknown one may be a switch
            has_value = rest and (
                rest[0].lower() in ("true", "false") or (key is None and "=" not in rest[0])
            )
            text = rest.pop(0) if has_value and not rest[0].startswith("--") else "true"
        elif not equals:
            if not rest or rest[0].startswith("--"):
                expected = f"{key.expected} after it, got nothing; --{name}=VALUE"
                raise ConfigError(f"--{name}: expected {expected}")
            text = rest.pop(0)
        pairs.append((name, text))
    return words, pairs


def _typed(
    schema: type, keys: Mapping[str, Key], words: Sequence[str], pairs: Sequence[tuple[str, str]]
) -> dict[str, Any]:
    """The values of the command line, in sections."""
    values: dict[str, Any] = {}
    names, left = getattr(schema, "words", ()), [*words]
    for name in names:
        kinds = keys[name].kinds
        taken, left = (left, []) if list[str] in kinds else (left[:1], left[1:])
        if taken:
            values[name] = taken if len(taken) > 1 or str not in kinds else taken[0]
    if left:
        hint = f"{left[0]}=VALUE sets it" if left[0] in keys else "a setting is key=value"
        raise ConfigError(f"expected key=value, got {left[0]!r}; {hint}")
    aliases = getattr(schema, "aliases", {})
    for name, text in pairs:
        if not text.lstrip().startswith("{"):
            name = aliases.get(name, name)
        key = keys.get(name) or _entry_key(keys, name)
        if name in names and name in values:
            raise ConfigError(f"{name} is given as a word and as {name}={text}; choose one")
        try:
            value = _read(text, key)
            if key is not None and key.options.get("several"):
                both = (look(values, name) or [], value)
                value = [item for x in both for item in (x if isinstance(x, list) else [x])]
            _put(values, name, value)
        except ValueError as error:
            raise ConfigError(f"command line: {name}: {error}") from error
    return values


def _put(values: dict[str, Any], name: str, value: Any) -> None:
    *above, last = name.split(".")
    for section in above:
        values = values.setdefault(section, {})
        if not isinstance(values, dict):
            raise ValueError(f"{section} is given as a value and as a section")
    if isinstance(value, dict) and isinstance(values.get(last), dict):
        values[last].update(value)
    else:
        values[last] = value


class Yaml(yaml.SafeLoader):
    """YAML 1.1, except that `4_1_5`, `off` and `no` are text, and `1e-4` is a number."""

    def construct_mapping(self, node, deep=False):
        keys = [key.value for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                problem = f"the key {key!r} is given twice"
                raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
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


def _read(text: str, key: Key | None) -> Any:
    """Reads the text of a setting as a value; `key` None: it is unknown, or a section."""
    bare, kinds = text.strip(), key.kinds if key is not None and key.section is None else [Any]
    if key is not None and key.nullable and bare.lower() in ("", "null", "~"):
        return None
    quoted = len(bare) > 1 and bare[0] == bare[-1] and bare[0] in "'\""
    other = (
        list[str] in kinds and bare.startswith("[") or key and key.is_mapping and bare[:1] == "{"
    )
    if str in kinds and not other:
        try:
            value = yaml.load(bare, Yaml) if quoted else None
        except yaml.YAMLError:
            value = None  # quotes within quotes: text like any other
        escapes = {r"\n": "\n", r"\t": "\t", "\\\\": "\\"}
        as_it_stands = re.sub(r"\\[nt\\]", lambda match: escapes[match[0]], text)
        return value if isinstance(value, str) else as_it_stands
    if key is not None and key.nullable and bare.lower() == "none":
        return None
    if any(typing.get_origin(kind) in (list, tuple) for kind in kinds) and bare[:1] != "[":
        bare = f"[{bare}]"
    try:
        return yaml.load(bare, Yaml)
    except yaml.YAMLError as error:
        problem = " ".join((getattr(error, "problem", None) or str(error)).split())
        wanted = "a value" if key is None else key.expected
        raise ValueError(
            f"expected {wanted}, got {text!r}, which is no YAML ({problem})"
        ) from error


# --- files ---------------------------------------------------------------------------------------


def _find(config: str) -> Path:
    """The path of a config file: the file itself, or a file that specjax ships."""
    path = find_shipped(config)
    if os.path.isfile(path):
        return path
    shipped = {path.name for root in roots() for path in (root / "configs").glob("*.yaml")}
    known = f"; shipped: {', '.join(f'configs/{name}' for name in sorted(shipped))}"
    raise ConfigError(f"--config: no file {config}{known if shipped else ''}")


def _load(path: Path, schema: type) -> dict[str, Any]:
    """The content of a file, with aliases replaced by the keys that they name."""
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), Yaml) or {}
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from error
    except OSError as error:
        raise ConfigError(f"--config: {path} cannot be read: {error.strerror}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: expected a mapping of keys at the top, got {content!r}")
    for alias, name in getattr(schema, "aliases", {}).items():
        if not isinstance(content.get(alias, {}), dict):
            _put(content, name, content.pop(alias))
    return content


# --- layers --------------------------------------------------------------------------------------


def _defaults(
    schema: type, file: Mapping[str, Any], pairs: Sequence[tuple[str, str]]
) -> tuple[DictConfig, dict[str, Key]]:
    """The defaults and the keys of a program, with the sections that the user's values choose."""
    base, chosen, aliases = copy.deepcopy(_structured(schema)), {}, getattr(schema, "aliases", {})
    for key in keys_of(schema):
        if choose := key.options.get("choose"):
            section = dict(file.get(key.name) or {})
            for name, text in pairs:
                name = name if text.lstrip().startswith("{") else aliases.get(name, name)
                if name == key.name:
                    section |= _read(text, None) or {}
                elif within(name, key.name):
                    section[name.removeprefix(f"{key.name}.")] = text
            try:
                chosen[key.name], values = choose(section)
            except ValueError as error:
                raise ConfigError(f"{key.name}.{error}") from error
            base[key.name] = OmegaConf.structured(chosen[key.name])
            base = typing.cast(DictConfig, OmegaConf.merge(base, {key.name: dict(values)}))
    keys = {key.name: key for key in keys_of(schema, chosen)}
    for name, key in keys.items():  # what is chosen decides the defaults, in messages as well
        if key.section is None and any(within(name, section) for section in chosen):
            keys[name] = dataclasses.replace(key, default=look(base, name))
    return base, keys


@functools.cache
def _structured(schema: type) -> DictConfig:
    return OmegaConf.structured(schema)  # slow to make


def _merge(
    schema: type, keys: Mapping[str, Key], base: DictConfig, values: Mapping[str, Any], source: str
) -> tuple[DictConfig, frozenset[str]]:
    """Merges a file or the command line into the settings; returns also the names of its keys."""
    leaves = {name: _hidden(value) for name, value in _flatten(values, keys)}
    owners = {name: keys.get(name) or _entry_key(keys, name) for name in leaves}
    for name, key in owners.items():
        if key is None:
            unread = getattr(schema, "unread", {}).items()
            reason = next((f": {why}" for section, why in unread if within(name, section)), None)
            known = [*keys, *(f"{name.rpartition('.')[0]}.{field}" for field in _entry(keys, name))]
            raise ConfigError(f"{source}: unknown key {name!r}{reason or nearest_key(name, known)}")
        value = leaves[name]
        if key.kinds == [int] and isinstance(value, float) and value.is_integer():
            leaves[name] = int(value)
    try:
        merged = _merged(base, leaves, owners)
    except OmegaConfBaseException:
        merged = None
    for name, key in owners.items():
        if merged is not None:
            problem = key.problem(look(merged, name)) if key.section is None else None
        else:  # one of them has another type
            problem = None if _fits(base, name, leaves[name], key) else f"expected {key.expected}"
        if problem is not None:
            hint = nearest(str(leaves[name]), key.options.get("choices") or ())
            raise ConfigError(f"{source}: {name}: {problem}, got {show(leaves[name])}{hint}")
    return merged, frozenset(leaves)


def _merged(base: DictConfig, leaves: Mapping[str, Any], owners: Mapping[str, Key]) -> DictConfig:
    """A copy of the settings with these values.

    OmegaConf adds to mappings, which an empty one is to empty, and does not know the `kind` of a
    key: such values are put into their places, which must exist.
    """
    layer: dict[str, Any] = {}
    placed = {
        name: value
        for name, value in leaves.items()
        if owners[name].section is None and (value == {} or owners[name].options.get("kind"))
    }
    for name, value in leaves.items():
        section = name.rpartition(".")[0]
        if name not in placed:
            _put(layer, name, value)
        elif section:
            _put(layer, section, {})
    merged = typing.cast(DictConfig, OmegaConf.merge(base, layer))
    for name, value in placed.items():
        section, _, last = name.rpartition(".")
        place = look(merged, section)
        if isinstance(value, dict) and value and OmegaConf.is_dict(place[last]):
            value = {**place[last], **value}
        with read_write(place), open_dict(place):
            del place[last]
            place[last] = value
    return merged


def _fits(base: DictConfig, name: str, value: Any, key: Key) -> bool:
    try:
        _merged(base, {name: value}, {name: key})
    except OmegaConfBaseException:
        return False
    return True


def _flatten(
    values: Mapping[str, Any], keys: Mapping[str, Key], prefix: str = ""
) -> Iterator[tuple[str, Any]]:
    """Yields dotted names and values; a mapping that is a value of a key is one value."""
    for last, value in values.items():
        name = f"{prefix}{last}"
        key = keys.get(name)
        if isinstance(value, dict) and value and (key is None or key.section or key.entry):
            yield from _flatten(value, keys, f"{name}.")
        else:
            yield name, value


def _entry(keys: Mapping[str, Key], name: str) -> dict[str, Key]:
    """The keys of the named entry that a key such as `eval.sets.NAME.path` would be in."""
    mapping = keys.get(name.rpartition(".")[0].rpartition(".")[0])
    entry = mapping and mapping.entry
    return {key.name: key for key in keys_of(entry)} if entry else {}


def _entry_key(keys: Mapping[str, Key], name: str) -> Key | None:
    """The key of a named entry, or the entry itself."""
    above, _, last = name.rpartition(".")
    mapping = keys.get(above)
    if mapping is not None and mapping.entry:
        return dataclasses.replace(mapping, name=name, section=mapping.entry)
    return _entry(keys, name).get(last)


def _hidden(value: Any, text: str = "${", instead: str = "$\0{") -> Any:
    """A value whose texts refer to no other key, as they would for OmegaConf by `${KEY}`."""
    if isinstance(value, str):
        return value.replace(text, instead)
    if isinstance(value, Mapping):
        return {name: _hidden(inner, text, instead) for name, inner in value.items()}
    is_list = isinstance(value, (list, tuple))
    return [_hidden(inner, text, instead) for inner in value] if is_list else value


def _plain(merged: DictConfig) -> dict[str, Any]:
    return _hidden(OmegaConf.to_container(merged), "$\0{", "${")


# --- objects --------------------------------------------------------------------------------------


def _finish(cls: type, merged: DictConfig, chosen: Mapping[str, type] | None = None) -> Any:
    if missing := sorted(OmegaConf.missing_keys(merged)):
        raise ConfigError(f"no value for {', '.join(missing)}; set {missing[0]}=VALUE")
    return _make(cls, _plain(merged), chosen or {})


def _make(
    cls: type, values: Mapping[str, Any], chosen: Mapping[str, type], prefix: str = ""
) -> Any:
    """Makes a dataclass of values in sections.

    Raises:
      ConfigError: a dataclass refuses its values; the section is in front of its message.
    """
    made = dict(values)
    for key in all_keys(cls, chosen):
        if "." in key.name:
            continue
        value = values.get(key.name)
        if key.section is not None and value is not None:
            made[key.name] = _make(key.section, value, {}, f"{prefix}{key.name}.")
        elif key.entry is not None:
            place = f"{prefix}{key.name}."
            made[key.name] = {
                name: _make(key.entry, fields, {}, f"{place}{name}.")
                for name, fields in value.items()
            }
    try:
        return cls(**made)
    except (ValueError, TypeError, OSError) as error:
        if isinstance(error, ConfigError) or not prefix:
            raise ConfigError(str(error)) from error
        first = re.match(r"\w*", str(error))[0]
        joint = "." if first in cls.__dataclass_fields__ else ": "
        raise ConfigError(f"{prefix[:-1]}{joint}{error}") from error


def _idle_in(
    schema: type, values: Mapping[str, Any], chosen: Mapping[str, type], names: frozenset[str]
) -> set[str]:
    """The names of settings that have no effect where a file stands alone."""
    try:
        return {name for name, _ in idle(_make(schema, values, chosen), names, values)}
    except ConfigError:
        return set()  # without the command line it is no whole configuration
