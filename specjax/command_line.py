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
import re
import sys
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml
from omegaconf import OmegaConf, open_dict, read_write
from omegaconf.errors import OmegaConfBaseException

from specjax import settings
from specjax.settings import ConfigError, Key, idle, keys_of, look, show, values_of, within
from specjax.shipped import find_shipped, roots
from specjax.spelling import nearest, nearest_key

T = TypeVar("T")
Pairs = list[tuple[str, str | list[str]]]  # name and text of settings; several words are a list
_NAME = re.compile(r"[a-z][\w.-]*")  # of what may be a key: `17+25=` is a word
_structured = functools.cache(OmegaConf.structured)  # what it returns is slow to make


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
    try:
        this_call = _Layers(call)
        pairs = _split(argv, _Layers(schema).keys | this_call.keys, getattr(schema, "words", ()))
        of_call = [(name, text) for name, text in pairs if name in this_call.keys]
        this_call.take(_read_all(of_call, this_call.keys, {}), "command line")
        pairs = [(name, text) for name, text in pairs if name not in this_call.keys]
        path = this_call.merged.config and _find(this_call.merged.config)
        aliases = getattr(schema, "aliases", {})
        file = _load(path, aliases) if path else {}
        layers = _Layers(schema, file, pairs)
        if this_call.merged.help:
            print(_help(program, schema, description, this_call.keys, layers.keys))
            sys.exit(0)
        filed = layers.take(file, str(path))
        # The command line may leave settings of a file without effect, because different runs share
        # a file. Within the file they must have one.
        idle_in_file = layers.idle(filed)
        typed = layers.take(_read_all(pairs, layers.keys, aliases), "command line")
        config, values = layers.make(), layers.values
        for _, message in idle(config, typed | idle_in_file, values):
            raise ConfigError(message)
        if require is not None:
            require(config)
        if this_call.merged.print_config:
            print(yaml.safe_dump(values_of(values, layers.keys.values()), sort_keys=False), end="")
            sys.exit(0)
        for name, value in (("typed", typed), ("given", typed | filed), ("argv", tuple(argv))):
            object.__setattr__(config, f"_{name}", value)  # the dataclass may be frozen
        return config, this_call.make()
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
    flags = "\n".join(f"  --{key.name.replace('_', '-'):<14}  {key.doc}" for key in call.values())
    usage = f"usage: {program}{words} [--config FILE] [key=value | --key value ...]"
    return f"{usage}\n\n{description}\n\n{flags}\n\n{settings.describe(keys.values())}"


# --- the command line ----------------------------------------------------------------------------


def _split(argv: Sequence[str], keys: Mapping[str, Key], word_keys: Sequence[str]) -> Pairs:
    """The names and texts of settings, in order; words without a name fill `word_keys`."""
    words, pairs, rest = [], [], ["--help" if argument == "-h" else argument for argument in argv]
    while rest and (argument := rest.pop(0)) != "--":
        name, equals, text = argument.partition("=")
        dashes = len(name) - len(name.lstrip("-"))
        name = name.lstrip("-").replace("-", "_")
        key, denied = keys.get(name), keys.get(name.removeprefix("no_"))
        is_key = dashes > 1 or (len(name) == 1 and key is not None if dashes else equals)
        if not (is_key and _NAME.fullmatch(name)):
            words.append(argument)
            continue
        may_follow = bool(rest) and not rest[0].startswith("--")
        if equals:
            pass
        elif key is None and denied is not None and denied.kinds == [bool]:
            name, text = denied.name, "false"
        elif key is None or key.kinds == [bool]:  # an unknown one may be a switch
            bools = ["true"], ["false"], ["True"], ["False"]
            is_value = may_follow and "=" not in rest[0] if key is None else rest[:1] in bools
            text = rest.pop(0) if is_value else "true"
        elif may_follow:
            text = rest.pop(0)
        else:
            expected = f"{key.expected} after it, got nothing; --{name}=VALUE"
            raise ConfigError(f"--{name}: expected {expected}")
        pairs.append((name, text))
    words += rest
    for name in word_keys:
        is_list = list[str] in keys[name].kinds
        taken, words = (words, []) if is_list else (words[:1], words[1:])
        if taken and any(name == given for given, _ in pairs):
            raise ConfigError(f"{name} is given as {taken[0]}, and as {name}=; choose one")
        if taken:
            pairs.append((name, taken if taken[1:] or str not in keys[name].kinds else taken[0]))
    if words:
        hint = f"{words[0]}=VALUE sets it" if words[0] in keys else "a setting is key=value"
        raise ConfigError(f"expected key=value, got {words[0]!r}; {hint}")
    return pairs


def _read_all(pairs: Pairs, keys: Mapping[str, Key], aliases: Mapping[str, str]) -> dict[str, Any]:
    """The values of the command line, in sections."""
    values: dict[str, Any] = {}
    for name, text in pairs:
        if not (isinstance(text, str) and text.lstrip().startswith("{") and name in keys):
            name = aliases.get(name, name)
        key = keys.get(name) or _entry_key(keys, name)
        try:
            value = _read(text, key) if isinstance(text, str) else text
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
    if path.is_file():
        return path
    raise ConfigError(f"--config: no file {config}; those of specjax are in {roots()[1]}/configs")


def _load(path: Path, aliases: Mapping[str, str]) -> dict[str, Any]:
    """The content of a file, with aliases replaced by the keys that they name.

    Raises:
      ConfigError: the file cannot be read, or is no mapping.
    """
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), Yaml) or {}
    except (yaml.YAMLError, UnicodeDecodeError, OSError) as error:
        raise ConfigError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: expected a mapping of keys at the top, got {content!r}")
    for alias, name in aliases.items():
        if not isinstance(content.get(alias, {}), dict):
            _put(content, name, content.pop(alias))
    return content


# --- layers --------------------------------------------------------------------------------------


class _Layers:
    """The settings of a dataclass: its defaults, over which a file and the command line are laid.

    Args:
      schema: the dataclass.
      file, pairs: what the user sets, of which some values choose the classes of sections.

    Attributes:
      keys: the keys by name, those of the chosen classes included.
      merged: the values so far.
    """

    def __init__(self, schema: type, file: Mapping[str, Any] | None = None, pairs: Pairs = ()):
        self._schema, self._chosen = schema, {}
        self.merged = copy.deepcopy(_structured(schema))
        for key in keys_of(schema):
            if (choose := key.options.get("choose")) and file is not None:
                cls, values = _choice(schema, key.name, choose, file, pairs)
                self._chosen[key.name] = cls
                self.merged[key.name] = OmegaConf.structured(cls)
                self.merged = OmegaConf.merge(self.merged, {key.name: values})
        self.keys = {key.name: key for key in keys_of(schema, self._chosen)}
        for name, key in self.keys.items():  # what is chosen decides the defaults, in messages too
            if key.section is None and any(within(name, section) for section in self._chosen):
                self.keys[name] = dataclasses.replace(key, default=look(self.merged, name))

    def take(self, values: Mapping[str, Any], source: str) -> frozenset[str]:
        """Lays values over those so far; returns the names of their keys.

        OmegaConf adds to mappings, which an empty one is to empty, and does not know the `kind` of
        a key: such values are put into their places, which must exist.
        """
        leaves = {name: _hidden(value) for name, value in _flatten(values, self.keys)}
        owners = {name: self._owner(name, source) for name in leaves}
        layer: dict[str, Any] = {}
        placed = {}
        for name, value in leaves.items():
            key = owners[name]
            if key.kinds == [int] and isinstance(value, float) and value.is_integer():
                value = int(value)
            empty = value == {} and key.is_mapping
            if key.section is None and (empty or key.options.get("kind")):
                placed[name] = value
                name, value = name.rpartition(".")[0], {}
            if name:
                _put(layer, name, value)
        try:
            self.merged = OmegaConf.merge(self.merged, layer)
        except OmegaConfBaseException as error:
            wrong = str(error.full_key or "").partition("[")[0]
            sections = (name for name in leaves if owners[name].section and leaves[name] != {})
            name = next((name for name in leaves if within(wrong, name)), None) or next(sections)
            raise _refused(source, name, owners[name], None, leaves[name]) from error
        for name, value in placed.items():
            section, _, last = name.rpartition(".")
            place = look(self.merged, section)
            if isinstance(value, dict) and value and OmegaConf.is_dict(place[last]):
                value = {**place[last], **value}
            with read_write(place), open_dict(place):
                del place[last]
                place[last] = value
        for name, key in owners.items():
            problem = key.problem(look(self.merged, name)) if key.section is None else None
            if problem is not None:
                raise _refused(source, name, key, problem, leaves[name])
        return frozenset(leaves)

    def _owner(self, name: str, source: str) -> Key:
        if (key := self.keys.get(name) or _entry_key(self.keys, name)) is not None:
            return key
        unread = getattr(self._schema, "unread", {}).items()
        reason = next((f": {why}" for section, why in unread if within(name, section)), None)
        above = name.rpartition(".")[0]
        known = [*self.keys, *(f"{above}.{field}" for field in _entry(self.keys, name))]
        raise ConfigError(f"{source}: unknown key {name!r}{reason or nearest_key(name, known)}")

    @property
    def values(self) -> dict[str, Any]:
        """The values so far, in sections."""
        return _hidden(OmegaConf.to_container(self.merged), "$\0{", "${")

    def make(self) -> Any:
        """The object of these values.

        Raises:
          ConfigError: a value is missing, or the dataclass refuses them.
        """
        if missing := sorted(OmegaConf.missing_keys(self.merged)):
            raise ConfigError(f"no value for {', '.join(missing)}; set {missing[0]}=VALUE")
        return _make(self._schema, self.values, self._chosen)

    def idle(self, names: frozenset[str]) -> set[str]:
        """Those settings of the layers so far that have no effect."""
        try:
            return {name for name, _ in idle(self.make(), names, self.values)}
        except ConfigError:
            return set()  # without the command line it is no whole configuration


def _choice(
    schema: type, section: str, choose: Callable, file: Mapping[str, Any], pairs: Pairs
) -> tuple[type, dict[str, Any]]:
    """The class of a section, and its defaults, by what the user sets in it."""
    values, aliases = file.get(section) or {}, getattr(schema, "aliases", {})
    if not isinstance(values, dict):
        raise ConfigError(f"{section}: expected a section, got {show(values)}")
    chosen = dict(values)
    for name, text in pairs:
        is_mapping = text[:1] == "{"
        name = name if is_mapping else aliases.get(name, name)
        if name == section and is_mapping:
            chosen |= _read(text, None)
        elif within(name, section):
            chosen[name.removeprefix(f"{section}.")] = text
    try:
        return choose(chosen)
    except ValueError as error:
        raise ConfigError(f"{section}.{error}") from error


def _refused(source: str, name: str, key: Key, problem: str | None, value: Any) -> ConfigError:
    problem, hint = problem or f"expected {key.expected}", ""
    if key.options.get("choices"):
        hint = nearest(str(value), key.options["choices"])
    return ConfigError(f"{source}: {name}: {problem}, got {show(value)}{hint}")


def _flatten(
    values: Mapping[str, Any], keys: Mapping[str, Key], prefix: str = ""
) -> Iterator[tuple[str, Any]]:
    """Yields dotted names and values; a mapping that is a value of a key is one value."""
    for last, value in values.items():
        name = f"{prefix}{last}"
        key = keys.get(name) or _entry_key(keys, name)
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


def _make(
    cls: type, values: Mapping[str, Any], chosen: Mapping[str, type], prefix: str = ""
) -> Any:
    """Makes a dataclass of values in sections.

    Raises:
      ConfigError: a dataclass refuses its values; the section is in front of its message.
    """
    made = dict(values)
    for key in settings.all_keys(cls, tuple(chosen.items())):
        value, place = values.get(key.name), f"{prefix}{key.name}."
        if key.section is not None and value is not None:
            made[key.name] = _make(key.section, value, {}, place)
        elif key.entry is not None and value is not None:
            made[key.name] = {n: _make(key.entry, v, {}, f"{place}{n}.") for n, v in value.items()}
    try:
        return cls(**made)
    except (ValueError, TypeError, OSError) as error:
        first = re.match(r"\w*", str(error))[0]
        joint = "" if not prefix else "." if first in cls.__dataclass_fields__ else ": "
        raise ConfigError(f"{prefix[:-1]}{joint}{error}") from error
