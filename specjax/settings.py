"""Settings: dataclasses whose fields are keys, and what a key needs to have an effect.

A program's settings are one dataclass. Each field is a key, or a section if it is a dataclass
itself; what two programs share is a class that both inherit from. The sentence about a field is
under "Attributes:" of the docstring, or in `option`, which also says what values there are::

    @dataclass
    class Optimizer:
        lr: float = option(1e-4, "peak learning rate", least=0)
        decay_steps: int = option(0, "updates of cosine decay; 0 keeps the rate")
        final_lr_ratio: float = option(0.1, "rate at the end of the decay", needs="decay_steps")

A field's `needs` are data: other fields, or named properties of the settings, that must hold for
the field to be read. They are looked for in the section of the field, and then in those around it:

    decay_steps              is on or set: not 0, false, null, off or empty
    !data.path               is off: the contrary
    control.controller=ema   equals one of several values, with | between them

The first line of a property's docstring says what it stands for, in the message. A name that the
program does not have asks for nothing. `idle` evaluates them all. A program's class may have

    unread     sections and keys of shared classes that it does not read -> the reason
    aliases    further name of a key -> the key
    words      keys that take words without a name, in order; a list takes all that are left

`command_line.py` reads what a user sets.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import json
import math
import re
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import yaml
from omegaconf import MISSING

from specjax.registry import is_own_path

REQUIRED: Any = MISSING  # the default of a key that the user must set


class ConfigError(ValueError):
    """The settings that the user gave cannot be used."""


def option(
    default: Any,
    doc: str = "",
    choices: Sequence[Any] | None = None,
    least: float | None = None,
    below: float | None = None,
    infinite: bool = False,
    own_path: bool = False,
    kind: Any = None,
    needs: str | tuple[str, ...] = (),
    choose: Callable[[Mapping[str, Any]], tuple[type, Mapping[str, Any]]] | None = None,
    several: bool = False,
    internal: bool = False,
) -> Any:
    """Makes a dataclass field of settings.

    Args:
        default: a value (lists, mappings and dataclasses are copied), a class or another function
            that makes it, or `REQUIRED`.
        doc: one line for `--help`, with the unit where there is one.
        choices: the only values allowed.
        least: smallest value of a number.
        below: exclusive upper bound of a number.
        infinite: whether a number may be infinite.
        own_path: whether a user's own path `module:attribute` is allowed beside the choices.
        kind: the type of a field that is annotated with `Any`, because OmegaConf has no such type
            (`str | list[str]`), or because the dataclass keeps the value in another form.
        needs: what must hold for the field, or a section's fields, to have an effect.
        choose: for a section, function of what the user sets in it that returns the class that
            defines its keys, and defaults that stand above those of the class.
        several: whether a text or list that is typed several times has all values, not the last.
        internal: whether the field is no key.
    """
    values = {name: value for name, value in locals().items() if name != "default"}
    metadata = values | {"needs": (needs,) if isinstance(needs, str) else needs}
    if callable(default):
        return dataclasses.field(default_factory=default, metadata=metadata)
    if isinstance(default, (list, dict)) or dataclasses.is_dataclass(default):
        return dataclasses.field(default_factory=lambda: copy.deepcopy(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


@dataclasses.dataclass(frozen=True)
class Key:
    """A key or section by its dotted name.

    Attributes:
      name: dotted name.
      kind: type of the value.
      default: default value; of a section, the dataclass or None. Where a `kind` cannot be null,
        None stands for an empty one.
      doc: the sentence about it.
      section: the dataclass of a section; None for a key.
      needs: its own needs and those of the sections around it, each with the section that they are
        looked for in.
      options: what `option` was told beside these.
    """

    name: str
    kind: Any
    default: Any
    doc: str = ""
    section: type | None = None
    needs: tuple[tuple[str, str], ...] = ()
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def kinds(self) -> list[Any]:
        """The types that a value may have, without None."""
        union = typing.get_origin(self.kind) in (typing.Union, types.UnionType)
        members = typing.get_args(self.kind) if union else (self.kind,)
        return [kind for kind in members if kind is not type(None)]

    @property
    def nullable(self) -> bool:
        return type(None) in typing.get_args(self.kind)

    @property
    def entry(self) -> type | None:
        """The dataclass of the values of a mapping such as `dict[str, EvalSet]`, else None.

        Users name such entries as they like, and set their fields as `SETTING.NAME.FIELD`.
        """
        inner = (typing.get_args(self.kind) or (None,))[-1]
        return inner if self.is_mapping and dataclasses.is_dataclass(inner) else None

    @property
    def is_mapping(self) -> bool:
        return any(typing.get_origin(kind) is dict for kind in self.kinds)

    @property
    def expected(self) -> str:
        """The values that it takes, in words."""
        if self.section is not None:
            return f"a section ({self.name}.KEY=value)"
        plain = self.kind in (int, float, str, bool)
        return self.kind.__name__ if plain else str(self.kind).replace("typing.", "")

    def problem(self, value: Any) -> str | None:
        """What is wrong with a value that OmegaConf has taken; None: nothing."""
        several = isinstance(value, Sequence) and not isinstance(value, str)
        if self.options.get("kind"):  # OmegaConf takes any type
            is_list = several and any(typing.get_origin(kind) is list for kind in self.kinds)
            is_mapping = isinstance(value, Mapping) and self.is_mapping
            is_text = isinstance(value, str) and str in self.kinds
            if not (is_list or is_mapping or is_text or (value is None and self.nullable)):
                return f"expected {self.expected}"
        choices, least = self.options.get("choices"), self.options.get("least")
        may_be_path = self.options.get("own_path") and isinstance(value, str)
        known = choices is None or value in choices
        if not known and not (may_be_path and is_own_path(value, choices)):
            return f"expected one of {', '.join(map(show, choices))}"
        below, infinite = self.options.get("below"), self.options.get("infinite")
        for number in value if several else [value]:
            if not isinstance(number, int | float) or isinstance(number, bool):
                continue
            if math.isnan(number) or (math.isinf(number) and not infinite):
                return "expected a finite number"
            if least is not None and number < least:
                return f"expected at least {least}"
            if below is not None and number >= below:
                return f"expected a number below {below}"
        return None


def keys_of(schema: Any, chosen: Mapping[str, type] | None = None) -> tuple[Key, ...]:
    """Every key that a program reads, with sections before their keys.

    Args:
      schema: the program's dataclass, or an object of it.
      chosen: classes of the sections that have `choose`; by default those of the object.
    """
    cls = schema if isinstance(schema, type) else type(schema)
    if chosen is None and cls is not schema:
        fields = [field for field in dataclasses.fields(cls) if field.metadata.get("choose")]
        chosen = {field.name: type(getattr(schema, field.name)) for field in fields}
    unread = getattr(cls, "unread", {})
    keys = all_keys(cls, tuple((chosen or {}).items()))
    return tuple(key for key in keys if not any(within(key.name, name) for name in unread))


@functools.cache
def all_keys(cls: type, chosen: tuple[tuple[str, type], ...]) -> tuple[Key, ...]:
    """The keys of a class, those included that its program does not read."""
    return tuple(_keys_below(cls, dict(chosen)))


def _keys_below(
    cls: type,
    chosen: Mapping[str, type],
    prefix: str = "",
    defaults: Any = None,
    needs: tuple[tuple[str, str], ...] = (),
) -> Iterator[Key]:
    """Yields the keys of a class, or of one section.

    A section's default (`option(Optimizer(lr=1e-3))`) decides the defaults of its keys. A section
    of type `Section | None` may be null; it exists once one of its keys is set.
    """
    hints, docs = typing.get_type_hints(cls), attribute_docs(cls)
    for field in dataclasses.fields(cls):
        options = field.metadata
        if options.get("internal"):
            continue
        name, kind = prefix + field.name, options.get("kind") or hints[field.name]
        default = field.default
        if defaults is not None:
            default = getattr(defaults, field.name)
        elif field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        elif default is dataclasses.MISSING:
            default = REQUIRED
        choose, members = options.get("choose"), (kind, *typing.get_args(kind))
        section = next((member for member in members if dataclasses.is_dataclass(member)), None)
        if typing.get_origin(kind) is dict:
            section = None
        elif choose:
            section = chosen.get(name) or choose({})[0]
        all_needs = (*needs, *((prefix[:-1], need) for need in options.get("needs", ())))
        doc = options.get("doc") or docs.get(field.name, "")
        yield Key(name, kind, default, doc, section, all_needs, options)
        if section is not None:
            inner = default if isinstance(default, section) else None
            yield from _keys_below(section, chosen, f"{name}.", inner, all_needs)


def within(name: str, section: str) -> bool:
    """Whether a dotted name is a section or a key in it."""
    return name == section or name.startswith(f"{section}.")


def attribute_docs(cls: type) -> dict[str, str]:
    """The sentence about each field, from "Attributes:" in docstrings of a class and its bases."""
    docs: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        text = inspect.cleandoc(base.__dict__.get("__doc__") or "")
        section = text.partition("Attributes:\n")[2].split("\n\n")[0]
        # A line indented further than the first entry goes on with the sentence before it.
        indent = len(section) - len(section.lstrip())
        for entry in re.split(rf"^ {{{indent}}}(?=\S)", section, flags=re.M)[1:]:
            names, _, sentence = entry.partition(": ")
            sentence = " ".join(sentence.split()).removesuffix(".")
            docs |= dict.fromkeys(names.split(", "), sentence)
    return docs


def part(cls: type, settings: Any, **changes: Any) -> Any:
    """Makes a dataclass from those fields of another one that it has, with some changed."""
    names = [field.name for field in dataclasses.fields(cls) if field.init]
    values = {name: getattr(settings, name) for name in names if hasattr(settings, name)}
    return cls(**values | changes)


def describe(keys: Iterable[Key]) -> str:
    """Lists keys with defaults, types and documentation, for `--help`."""
    rows: list[tuple[str, str, str]] = []
    for key in keys:
        if key.section is not None:
            rows.append((f"\n{key.name}", "", key.doc))
            continue
        default = "required" if key.default == REQUIRED else show(_plain(key.default, key))
        choices, doc = key.options.get("choices"), key.doc.replace("`", "")
        if choices:
            path = ", or your own as module:attribute" if key.options["own_path"] else ""
            doc += f" [one of {', '.join(map(show, choices))}{path}]"
        rows.append((f"{key.name}={default}", key.expected, doc))
        for field in keys_of(key.entry) if key.entry else ():
            name = f"{key.name}.NAME.{field.name}={show(field.default)}"
            rows.append((name, field.expected, field.doc))
    left = min(44, max((len(name) for name, _, _ in rows), default=0))
    middle = max((len(kind) for _, kind, _ in rows), default=0)
    lines = [f"  {name:<{left}}  {kind:<{middle}}  {doc}".rstrip() for name, kind, doc in rows]
    lines = [line if not line.startswith("  \n") else "\n  " + line[3:] for line in lines]
    return "keys, with their defaults and types (null is None):\n" + "\n".join(lines)


def show(value: Any) -> str:
    """A value as the user types it; text has no quotes unless it is empty."""
    if isinstance(value, tuple):
        value = [item if isinstance(item, int | float) else str(item) for item in value]
    if isinstance(value, (bool, list, dict)) or value is None:
        return yaml.safe_dump(value, default_flow_style=True, width=math.inf).splitlines()[0]
    return "''" if value == "" else str(value)


# --- values ---------------------------------------------------------------------------------------


def look(settings: Any, name: str) -> Any:
    """The value of a dotted name in a dataclass or a mapping; None where a section is null."""
    for part in name.split(".") if name else ():
        if settings is None:
            return None
        is_mapping = isinstance(settings, Mapping)
        settings = settings.get(part) if is_mapping else getattr(settings, part)
    return settings


def values_of(settings: Any, keys: Iterable[Key] | None = None) -> dict[str, Any]:
    """The values of all keys in sections, as a file has them.

    Args:
      settings: a dataclass, or with `keys` a mapping of sections.
      keys: the keys; by default those of the dataclass.
    """
    values: dict[str, Any] = {}
    for key in keys_of(settings) if keys is None else keys:
        *above, last = key.name.split(".")
        value, place = look(settings, key.name), values
        if (key.section is not None and value is not None) or (
            look(settings, ".".join(above)) is None
        ):
            continue  # a section, whose keys follow, or a key of a section that is null
        for part in above:
            place = place.setdefault(part, {})
        place[last] = _plain(value, key)
    return values


def _plain(value: Any, key: Key) -> Any:
    """A value as JSON and YAML have it; None of a key that cannot be null is empty."""
    if value is None and not key.nullable and key.kind is not Any:
        return {} if key.is_mapping else []
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if key.is_mapping:
        entry, inner = key.entry and keys_of(key.entry), Key("", Any, None)
        pairs = dict(value).items()
        return {name: values_of(v, entry) if entry else _plain(v, inner) for name, v in pairs}
    if isinstance(value, Mapping):
        return dict(value)
    return [_plain(v, key) for v in value] if isinstance(value, (list, tuple)) else str(value)


def fingerprint(config: Any, ignore: Sequence[str] = ()) -> dict[str, Any]:
    """The settings of a run as JSON reads them back, without the top-level keys of `ignore`."""
    settings = json.loads(json.dumps(values_of(config)))
    return {name: value for name, value in settings.items() if name not in ignore}


def require_same_settings(saved: Mapping[str, Any], current: Mapping[str, Any]) -> None:
    """Compares a checkpoint's fingerprint with the one of the run that resumes it.

    Raises:
        ConfigError: they differ; the message names the top-level keys, and says what some of the
            settings were.
    """
    before, now = dict(leaves(saved)), dict(leaves(current))
    changed = sorted(n for n in before.keys() | now.keys() if before.get(n) != now.get(n))
    # Of patterns of products the first that matches decides: their order is a setting, too.
    orders = ([name for name in names if "products." in name] for names in (before, now))
    changed = changed or [old for old, new in zip(*orders, strict=True) if old != new]
    if changed:
        was = [f"{n}={show(before[n])}" if n in before else f"no {n}" for n in changed]
        more = f" and {len(was) - 5} more" if len(was) > 5 else ""
        sections = dict.fromkeys(name.partition(".")[0] for name in changed)
        raise ConfigError(
            f"the checkpoint was made with other settings of {', '.join(sections)}; resume with "
            f"the same configuration ({', '.join(was[:5])}{more}), or start a new run in another "
            "directory"
        )


def leaves(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the dotted names and values of settings in sections."""
    for name, value in settings.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def named_in(sections: Mapping[str, type], error: Exception) -> str:
    """The message of an error, with its section in front of the key that it begins with."""
    first = re.match(r"\w*", str(error))[0]
    of_key = [name for name, cls in sections.items() if first in cls.__dataclass_fields__]
    return f"{of_key[0]}.{error}" if of_key else str(error)


# --- effects --------------------------------------------------------------------------------------


def idle(
    config: Any, names: Iterable[str], values: Mapping[str, Any] | None = None
) -> Iterator[tuple[str, str]]:
    """Finds settings that nothing reads, by the `needs` of their keys.

    Args:
      config: the settings.
      names: keys that were set. A value that is the default, or nothing (0, null, off, none), has
        no needs.
      values: the values that were set, in sections; by default those of `config`.

    Yields:
      (key, message), where the message says why the key has no effect and what to do.
    """
    keys = {key.name: key for key in keys_of(config)}
    for name in sorted(keys.keys() & set(names)):
        key = keys[name]
        if key.section is not None:
            continue
        value = _plain(look(config if values is None else values, name), key)
        unset = value == _plain(key.default, key) or value in ("off", "none")
        if unset or not (value or value is False):
            continue
        lacking = (_lacks(config, section, need) for section, need in key.needs)
        if (message := next(filter(None, lacking), None)) is not None:
            yield name, f"{name}={show(value)} has no effect: {message} or leave {name} out"


def _lacks(config: Any, section: str, need: str) -> str | None:
    """The sentence about a need that does not hold; None if it does."""
    name, _, wanted = need.removeprefix("!").partition("=")
    while not hasattr(holder := look(config, section), name.partition(".")[0]):
        if not section:
            return None  # this program does not have it
        section = section.rpartition(".")[0]
    above, _, last = name.rpartition(".")
    value, path = look(holder, name), f"{section}.{name}".removeprefix(".")
    shown = show(value)
    if wanted:
        holds = shown in wanted.split("|")
    else:
        holds = (shown not in ("off", "none") and bool(value)) != need.startswith("!")
    if holds:
        return None
    meaning = inspect.getattr_static(type(look(holder, above)), last, None)
    if isinstance(meaning, property):
        reason = meaning.__doc__.splitlines()[0].removesuffix(".")
        return f"it needs {reason[0].lower()}{reason[1:]}; change that"
    if need.startswith("!"):
        return f"it needs no {path}, and {path} is {shown}; leave out {path}"
    setting = f"{path}={wanted.replace('|', ' or ')}" if wanted else path
    return f"it needs {setting}, and {path} is {shown}; set {path}"
