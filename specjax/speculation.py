"""Speculation settings: one section for every program, its rules, and the flags of commands.

`train.rl` has the keys under `rollout`, the server under `speculation`, and `specjax generate` and
`verify` have a flag for each: the server's `speculation.control.bs_threshold=4` is their
`--bs-threshold 4`. All make of them the `SpecConfig` and the `ControlConfig` that `LLM` takes.
Keys, defaults and checks are the same everywhere.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

import yaml

from specjax.command_line import require_effect
from specjax.config.overrides import OVERRIDES
from specjax.config.spec import (
    ACCEPTANCE_MODES,
    DEFAULT_STRATEGY,
    DRAFT_KINDS,
    DRAFT_WORDS,
    OwnDraft,
    SpecConfig,
)
from specjax.config.strategy import OFF_NAMES, Strategy
from specjax.control.config import CONTROLLERS, DEFAULT_STRATEGIES, ControlConfig
from specjax.control.fastrl import FastRLSettings, read_fastrl
from specjax.kernels.names import ATTENTION, ATTENTION_DOC, attention_flag
from specjax.schema import Key, Needs, ValueProblem, Yaml, check, keys_of, option, read, show
from specjax.spelling import flags, spelled

_LISTED = ", ".join(map(str, DEFAULT_STRATEGIES))


@dataclass
class ControlSection:
    """The controller, which chooses the strategy while the engine runs."""

    controller: str = option("goodput", "the controller", choices=CONTROLLERS)
    strategies: list[str] | None = option(
        None,
        f"strategies to choose from; null: {_LISTED}, and `strategy`; ema uses the chains of its "
        "candidate_steps instead",
    )
    initial: str | None = option(
        None,
        "with static, the strategy; with ema, the first strategy (if it is a tree, the only one, "
        "because ema chooses among chains); null: `strategy`, or with static the first of the list",
    )
    bs_threshold: int | None = option(
        None, "largest number of running samples with which to speculate; null: no limit"
    )
    ema_file: str | None = option(
        None, "JSON or YAML file with the settings of ema, in place of `ema`"
    )
    ema: dict[str, Any] = option({}, "settings of ema, such as {candidate_steps: [1, 3, 7]}")
    bandit: dict[str, Any] = option(
        {}, "settings of bandit, such as {epsilon: 0.1, window: 1000, reward: accept_length}"
    )
    goodput: dict[str, Any] = option({}, "settings of goodput, such as {probe_fraction: 0.01}")
    fastrl: dict[str, Any] = option(
        {},
        "FastRL's `speculative:` section, unchanged, in place of all the above except settings of "
        "`bandit` that it has no key for, such as the reward; its spec_verify_tokens and "
        "spec_model_path become spec_verify_tokens and draft, and enable: false decodes plainly",
    )

    @property
    def is_switched_off(self) -> bool:
        """Whether FastRL's section says `enable: false`."""
        return bool(self.fastrl) and not read_fastrl(self.fastrl).enabled

    def build(self, own: str | None = None) -> ControlConfig:
        """Makes the configuration of the controller.

        Args:
          own: the setting `strategy` of the section that has this one.

        Raises:
          ValueError: a key is not known, or a value is not valid.
        """
        settings = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "fastrl"}
        if self.fastrl:
            others = {name: value for name, value in settings.items() if name != "bandit"}
            if others != {name: getattr(_NO_CONTROL, name) for name in others}:
                raise ValueError(
                    "fastrl stands in place of all other keys but bandit, and some of them are "
                    "set, too; leave out one or the other"
                )
            return ControlConfig.of_fastrl(read_fastrl(self.fastrl), self.bandit)
        listed = self.strategies
        if self.initial is None and (
            self.controller == "ema" or (self.controller == "static" and listed is None)
        ):
            settings["initial"] = own
        if listed is None:
            settings["strategies"] = (*DEFAULT_STRATEGIES, *([] if own is None else [own]))
        return ControlConfig.from_dict(settings)


_NO_CONTROL = ControlSection()


@dataclass
class SpeculationSettings:
    """The fields of `SpecConfig`, and the section `control`."""

    section: ClassVar[str] = "speculation"  # the section that has the keys

    strategy: str | None = option(
        None,
        "what a round drafts, such as 4_1_5 (a chain) or 6_4_16 (a tree); off: nothing; null: "
        "goodput chooses between 4_1_5 and off while running, or with acceptance=block and "
        "recursive always 4_1_5",
    )
    acceptance: str = option(
        "coupled",
        "acceptance mode; greedy: for temperature 0 only",
        choices=ACCEPTANCE_MODES,
    )
    draft: str = option(
        "auto",
        "what drafts: auto, the checkpoint's head, or without one n-grams; checkpoint, that head; "
        "random, a new head; ngram; the directory or Hugging Face id of a head or a model; or your "
        "own class as module:attribute[:PATH]",
    )
    draft_kind: str = option("mtp", "kind of a new head, with draft=random", choices=DRAFT_KINDS)
    draft_overrides: dict[str, Any] = option(
        {},
        "settings of an EAGLE-3 head in place of those in its config.json, such as "
        f"{{norm_before_residual: true}}; of {', '.join(OVERRIDES)}",
    )
    draft_vocab: int | None = option(
        None,
        "number of tokens that the head or model may propose, those that are emitted most; null: "
        "all tokens",
    )
    token_map: str | None = option(
        None,
        "JSON file that lists the token ids which the head or model may propose, the most frequent "
        "first; with draft_vocab=N the first N of them",
    )
    ngram_max: int = option(
        4, "most last tokens that draft=ngram looks up earlier in the text, to propose the next"
    )
    ngram_min: int = option(1, "fewest last tokens that draft=ngram looks up")
    ngram_siblings: bool = option(True, "look in other samples of the prompt, too")
    aligned: bool = option(
        True, "apply the model's sampling transforms (top_k, penalties, ..) to the draft as well"
    )
    tau: float = option(
        0.6,
        "temperature of node scores, log_softmax((log q + noise) / tau), by which a dynamic tree "
        "keeps its best nodes",
    )
    adaptive_width: bool = option(
        False, "nodes of a dynamic tree have as many children as the draft's perplexity, rounded"
    )
    spec_verify_tokens: int = option(48, "most rows of a tree; a larger dynamic tree is cut")
    invariant: bool = option(
        False,
        "make tokens and log-probabilities bitwise equal with and without speculation, for any "
        "strategy, batch and replica, by one program with attention by position in XLA; slower",
    )
    exact_mode: bool = option(
        False,
        "decode everything a second time plainly, compare every token, and report the first "
        "difference of each sample; needs acceptance=coupled or greedy",
    )
    telemetry: bool | None = option(
        None, "record why drafts are rejected; null: as the variable SPECJAX_TELEMETRY says"
    )
    control: ControlSection | None = option(
        None,
        "controller that chooses the strategy while running; null: always `strategy`, but goodput "
        "if that is null or draft=auto takes n-grams",
    )

    def __post_init__(self):
        control = self.control_config()
        if control is not None and self.control.fastrl:
            self._take_fastrl(read_fastrl(self.control.fastrl))
        spec = self.spec()
        if control is not None:
            self._check_strategies(spec, control)

    def _take_fastrl(self, fastrl: FastRLSettings) -> None:
        """Takes the rows and the draft from FastRL's section."""
        self.spec_verify_tokens = fastrl.spec_verify_tokens
        path = fastrl.spec_model_path
        if path is None:
            return
        if self.draft not in ("auto", path):
            raise ValueError(
                f"{self.section}.draft={self.draft} drafts, and spec_model_path={path} of "
                f"{self.section}.control.fastrl is a head that would; leave out one of them"
            )
        self.draft = path

    def _check_strategies(self, spec: SpecConfig, control: ControlConfig) -> None:
        """Refuses a controller that has no choice, or a strategy that is not exact."""
        if spec.is_off:
            key = f"{self.section}.control"
            raise ValueError(
                f"{key}.controller chooses between strategies, and {self.section}.strategy="
                f"{self.strategy} says that there is no speculation; leave one of them out "
                f"('off' may be one of {key}.strategies)"
            )
        for strategy in control.arms:
            dataclasses.replace(spec, strategy=strategy)  # raises where it is not exact

    def control_config(self) -> ControlConfig | None:
        """The configuration of the controller; None if the strategy is always the one of `spec()`.

        Raises:
          ValueError: a key of `control` is not known, or a value is not valid.
        """
        if self.control is None:
            return None
        try:
            found = self.control.build(self.strategy or DEFAULT_STRATEGY.name)
        except (ValueError, TypeError, OSError) as error:
            raise ValueError(f"{self.section}.control: {error}") from error
        return None if self.control.is_switched_off else found

    def spec(self) -> SpecConfig:
        """The configuration of speculation.

        Raises:
          ValueError: the combination of settings is not exact.
        """
        values = {f.name: getattr(self, f.name) for f in fields(SpeculationSettings)}
        del values["control"]
        control = self.control_config()
        spec = SpecConfig(**{**values, "strategy": self._own_strategy(control)})
        selectable = (spec.own_strategy,) if control is None else control.arms
        # Without a dynamic tree, the rules refuse `adaptive_width` of a user.
        adaptive = self.adaptive_width and any(one.is_dynamic for one in selectable)
        return dataclasses.replace(spec, adaptive_width=adaptive)

    def _own_strategy(self, control: ControlConfig | None) -> Strategy | str | None:
        """The strategy of `spec()`.

        If `strategy` is the default, and FastRL's section or `strategies` does not have it, it is
        the first of the controller's strategies that drafts. None: it is not set.
        """
        if self.control is not None and self.control.is_switched_off:
            return Strategy.OFF
        # ema starts at the nearest tier, which need not be equal.
        is_default = self.strategy in (None, DEFAULT_STRATEGY.name)
        if control is None or control.controller == "ema" or not is_default:
            return self.strategy
        drafting = [strategy for strategy in control.arms if not strategy.is_off]
        keeps_own = not drafting or (DEFAULT_STRATEGY in drafting and not self.control.fastrl)
        return self.strategy if keeps_own else drafting[0]

    @property
    def plain_by(self) -> str:
        """The setting that turns speculation off, as the user types it."""
        if self.control is not None and self.control.is_switched_off:
            return f"{self.section}.control.fastrl with enable: false"
        return f"{self.section}.strategy={self.strategy}"


def sections_of(cls: type[SpeculationSettings]) -> dict[str, str]:
    """The section of each setting of a class, for `spelling.dotted`."""
    return {
        **{f.name: cls.section for f in fields(SpeculationSettings)},
        **{f.name: f"{cls.section}.control" for f in fields(ControlSection)},
    }


# --- rules ---------------------------------------------------------------------------------------

Values = Mapping[str, Any]


def _control_of(v: Values, section: str) -> ControlSection | None:
    names = [each.name for each in fields(ControlSection)]
    if f"{section}.control.{names[0]}" not in v:
        return None
    return ControlSection(**{name: v[f"{section}.control.{name}"] for name in names})


def is_switched_off(v: Values, section: str) -> bool:
    """Whether FastRL's section says `enable: false`."""
    control = _control_of(v, section)
    try:
        return control is not None and control.is_switched_off
    except ValueError:  # `ControlSection.build` raises it, too
        return False


def is_off(v: Values, section: str) -> bool:
    """Whether the strategy or FastRL's section turns speculation off."""
    return str(_strategy_of(v, section)).lower() in OFF_NAMES or is_switched_off(v, section)


def _strategy_of(v: Values, section: str) -> str:
    return v[f"{section}.strategy"] or DEFAULT_STRATEGY.name


def switched_on(section: str, names: tuple[str, ...], unless: Any = None) -> Needs:
    """The rule of settings that have no effect where FastRL's section says `enable: false`."""
    return Needs(
        names,
        lambda v: not is_switched_off(v, section),
        f"{section}.control.fastrl says enable: false, which decodes plainly; set enable: true, or "
        "leave this out",
        unless=unless,
    )


def drafts_with_head(v: Values, section: str) -> bool:
    """Whether a head may draft; with `auto` and paths that depends on files."""
    return v[f"{section}.draft"] != "ngram"


def may_be_files(draft: str) -> bool:
    """Whether a value of `draft` is a path or an id."""
    return draft not in DRAFT_WORDS and OwnDraft.parse(draft) is None


def speculation_rules(
    section: str, speculates: Callable[[Values], bool] | None = None, instead: str | None = None
) -> tuple[Needs, ...]:
    """The rules of the speculation settings of a program.

    Args:
      section: the section that has the keys.
      speculates: whether the program speculates, a function of the settings; by default the
        strategy decides.
      instead: the reason in messages if the program does not speculate.
    """
    key, control = f"{section}.", f"{section}.control."

    def on(v: Values) -> bool:
        return not is_off(v, section)

    def may_look_up(v: Values) -> bool:
        """Whether n-grams may draft."""
        return v[f"{key}draft"] in ("auto", "ngram")

    def built(v: Values) -> ControlConfig | None:
        """The controller; None if there is none, or if its section raises an error itself."""
        asked = _control_of(v, section)
        try:
            return None if asked is None else asked.build(_strategy_of(v, section))
        except (ValueError, TypeError, OSError):
            return None

    def selectable(v: Values) -> list[Strategy] | None:
        """The strategies that draft and may be selected; None if one raises an error itself."""
        found = built(v)
        try:
            own = Strategy.parse(_strategy_of(v, section))
            every = (own,) if found is None else found.arms
        except ValueError:
            return None
        return [strategy for strategy in every if not strategy.is_off]

    def grows_trees(v: Values) -> bool:
        found = selectable(v)
        return found is None or any(strategy.is_dynamic for strategy in found)

    def is_selectable(v: Values) -> bool:
        """Whether `strategy` may be selected, or is the controller's first one."""
        found = selectable(v)
        if found is None or controlled_by("ema")(v) or is_off(v, section):
            return True
        try:
            return Strategy.parse(_strategy_of(v, section)) in found
        except ValueError:  # `SpecConfig` raises it, too
            return True

    def has_initial(v: Values) -> bool:
        return v.get(f"{control}initial") is not None

    def all_selectable(v: Values) -> bool:
        """Whether each strategy that is listed may be selected."""
        found = built(v)
        return found is None or set(found.strategies) <= set(found.arms)

    no_tree = (
        "no strategy that may be selected is one; use one such as 6_4_16, as "
        f"{key}strategy or among {control}strategies, or leave it out"
    )

    def controlled_by(*names: str) -> Callable[[Values], bool]:
        return lambda v: v.get(f"{control}controller") in names

    def of_one(name: str, *keys: str) -> Needs:
        return Needs(
            tuple(control + each for each in keys),
            controlled_by(name),
            f"[{control}controller] has other settings; use {control}controller={name}, or leave "
            "it out",
        )

    unread_when_plain = tuple(
        key + each.name
        for each in keys_of(SpeculationSettings)
        if each.name.partition(".")[0] not in ("strategy", "control", "invariant")
    )
    return (
        switched_on(section, unread_when_plain),
        Needs(
            unread_when_plain,
            speculates or on,
            instead or f"{key}strategy=off decodes plainly; leave out one of them",
        ),
        Needs(
            (f"{key}strategy", f"{key}spec_verify_tokens"),
            lambda v: not v.get(f"{control}fastrl"),
            f"{control}fastrl says which strategies there are, and how many rows; leave out one of "
            "them",
            unless="off",
        ),
        Needs(
            (f"{key}draft_kind",),
            lambda v: v[f"{key}draft"] == "random",
            f"it is the kind of a new head, and [{key}draft] makes none; set {key}draft=random, or "
            "leave it out",
        ),
        Needs(
            (f"{key}draft_overrides",),
            lambda v: may_be_files(v[f"{key}draft"]),
            f"it is about an EAGLE-3 head in files, and [{key}draft] names none; set "
            f"{key}draft=DIR, or leave it out",
        ),
        Needs(
            (f"{key}draft_vocab", f"{key}token_map"),
            lambda v: v[f"{key}draft"] != "ngram",
            f"[{key}draft] has no language-model head; leave it out",
        ),
        Needs(
            (f"{key}ngram_max", f"{key}ngram_min", f"{key}ngram_siblings"),
            may_look_up,
            f"n-grams do not draft, with [{key}draft]; set {key}draft=ngram, or leave it out",
        ),
        Needs(
            (f"{key}tau",),
            grows_trees,
            f"it scores the paths of a dynamic tree, and {no_tree}",
        ),
        Needs(
            (f"{key}tau",),
            lambda v: v[f"{key}acceptance"] == "coupled",
            f"[{key}acceptance] adds no noise to what is drafted; use {key}acceptance=coupled, or "
            "leave it out",
        ),
        Needs(
            (f"{key}adaptive_width",),
            grows_trees,
            f"it changes the width of dynamic trees, and {no_tree}",
        ),
        Needs(
            (f"{key}strategy",),
            lambda v: not (controlled_by("static")(v) and has_initial(v)) or is_selectable(v),
            f"{control}controller=static always has [{control}initial]; leave out one of them",
        ),
        Needs(
            (f"{key}strategy",),
            is_selectable,
            f"{control}strategies does not list it, and [{control}controller] chooses among these; "
            "list it there, or leave it out",
        ),
        Needs(
            (f"{control}initial",),
            controlled_by("static", "ema"),
            f"[{control}controller] starts where its measurements say; use "
            f"{control}controller=static or ema, or leave it out",
        ),
        of_one("ema", "ema", "ema_file"),
        Needs(
            (f"{control}bandit",),
            lambda v: v.get(f"{control}controller") == "bandit" or v.get(f"{control}fastrl"),
            f"[{control}controller] has other settings; use {control}controller=bandit, or leave "
            "it out",
        ),
        of_one("goodput", "goodput"),
        Needs(
            (f"{control}strategies",),
            lambda v: (
                not (controlled_by("ema")(v) or (controlled_by("static")(v) and has_initial(v)))
            ),
            f"[{control}controller] does not choose among them (ema has those of its "
            f"candidate_steps, static the one of {control}initial); leave it out",
        ),
        Needs(
            (f"{control}strategies",),
            all_selectable,
            f"{control}controller=static always has the first of them; list that one alone, or use "
            "a controller that chooses, such as goodput",
        ),
    )


# --- flags ---------------------------------------------------------------------------------------

_ALL = [key for key in keys_of(SpeculationSettings) if not key.section]
KEYS = {key.name.rpartition(".")[2]: key for key in _ALL}
_OF_CONTROL = {key.name for key in keys_of(ControlSection)}
# Keys whose flags also take the name of a file.
_FILES = ("fastrl",)


def add_flags(group: Any, refused: Mapping[str, str] = MappingProxyType({})) -> None:
    """Adds the flags to a parser or a group, and `--no-speculation` and `--attention`.

    Args:
      refused: keys that this command does not have -> the reason.
    """
    for name, key in KEYS.items():
        flag, kind = "--" + name.replace("_", "-"), key.type
        default = None if name in _OF_CONTROL else key.default
        doc = _spelled(key.doc)
        if key.choices:
            doc += f" [one of {', '.join(key.choices)}]"
        doc = doc.replace("%", "%%")
        shown = f" (default: {show(key.default)})" if default is not None else ""
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
                flag,
                action=argparse.BooleanOptionalAction,
                default=argparse.SUPPRESS,
                help=doc + shown,
            )
        else:
            group.add_argument(
                flag,
                type=_reader(name, key),
                default=argparse.SUPPRESS,
                metavar=_metavar(key),
                help=doc + shown.replace("%", "%%"),
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
    """The settings of a parsed command line.

    Raises:
      ValueError: the settings contradict each other, or one of them has no effect.
    """
    values = {name: getattr(args, name) for name in KEYS if hasattr(args, name)}
    control = {name: values.pop(name) for name in list(values) if name in _OF_CONTROL}
    try:
        if control:
            values["control"] = ControlSection(**control)
        found = SpeculationSettings(**values)
        given = [f"speculation.{KEYS[name].name}" for name in (*values, *control) if name in KEYS]
        require_effect(_Flags(found), given)
    except (ValueError, TypeError, OSError) as error:
        raise ValueError(as_flags(spelled(error, flags))) from error
    return found


@dataclasses.dataclass
class _Flags:
    """The settings in the section that the rules expect."""

    rules: ClassVar[tuple[Needs, ...]] = speculation_rules("speculation")

    speculation: SpeculationSettings


def as_flags(message: str) -> str:
    """Rewrites a message about settings of the server in terms of flags."""

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
    """Rewrites a sentence about keys in terms of flags."""
    for name in sorted(KEYS, key=len, reverse=True):
        flag = "--" + name.replace("_", "-")
        doc = doc.replace(f"`{name}`", flag).replace(f"{name}=", f"{flag}=")
    return doc.replace("null:", "by default:")


def _metavar(key: Key) -> str:
    name = key.name.rpartition(".")[2]
    if name in _FILES:
        return "FILE|JSON"
    by_kind = {"list": "A,B", "dict": "JSON", "int": "N", "float": "X"}
    found = next((mark for kind, mark in by_kind.items() if kind in str(key.type)), None)
    return found or {"draft": "DRAFT", "ema_file": "FILE"}.get(name, "NAME")


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
