"""Which speculation settings need which others, for every program that has them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from specjax.config.strategy import OFF_NAMES, Strategy
from specjax.control.config import ControlConfig
from specjax.schema import Needs, keys_of
from specjax.speculation import ControlSection, SpeculationSettings

Values = Mapping[str, Any]


def _control_of(v: Values, section: str) -> ControlSection | None:
    names = [each.name for each in fields(ControlSection)]
    if f"{section}.control.{names[0]}" not in v:
        return None
    return ControlSection(**{name: v[f"{section}.control.{name}"] for name in names})


def is_switched_off(v: Values, section: str) -> bool:
    """Whether FastRL's section says that nothing is drafted."""
    control = _control_of(v, section)
    try:
        return control is not None and control.is_switched_off
    except ValueError:  # a mistake that is named elsewhere
        return False


def is_off(v: Values, section: str) -> bool:
    """Whether the strategy, or FastRL's section, says that nothing is drafted."""
    return str(v[f"{section}.strategy"]).lower() in OFF_NAMES or is_switched_off(v, section)


def switched_on(section: str, names: tuple[str, ...], unless: Any = None) -> Needs:
    """The row of settings that nothing reads where FastRL's section says `enable: false`."""
    return Needs(
        names,
        lambda v: not is_switched_off(v, section),
        f"{section}.control.fastrl says enable: false, which decodes plainly; set enable: true, or "
        "leave this out",
        unless=unless,
    )


def drafts_with_head(v: Values, section: str) -> bool:
    """Whether the head may draft; `auto` is not known before the checkpoint is."""
    return v[f"{section}.source"] in ("auto", "head") and v[f"{section}.draft_model"] is None


def speculation_rules(
    section: str, speculates: Callable[[Values], bool] | None = None, instead: str | None = None
) -> tuple[Needs, ...]:
    """The rows of a program.

    Args:
      section: where the program has the keys.
      speculates, instead: whether it speculates at all, and what is said where it does not; by
        default the strategy decides.
    """
    key, control = f"{section}.", f"{section}.control."

    def on(v: Values) -> bool:
        return not is_off(v, section)

    def may_look_up(v: Values) -> bool:
        """Whether n-grams may draft."""
        asked = v[f"{key}draft_model"] is not None or v[f"{key}head"] != "checkpoint"
        source = v[f"{key}source"]
        return source == "ngram" or (source == "auto" and not asked)

    def built(v: Values) -> ControlConfig | None:
        """The controller; None: there is none, or it is a mistake that is named elsewhere."""
        asked = _control_of(v, section)
        try:
            return None if asked is None else asked.build(v[f"{key}strategy"])
        except (ValueError, TypeError, OSError):
            return None

    def selectable(v: Values) -> list[Strategy] | None:
        """Those that may be selected and draft; None: one is a mistake that is named elsewhere."""
        found = built(v)
        try:
            arms = (Strategy.parse(v[f"{key}strategy"]),) if found is None else found.arms
        except ValueError:
            return None
        return [arm for arm in arms if not arm.is_off]

    def grows_trees(v: Values) -> bool:
        found = selectable(v)
        return found is None or any(strategy.is_dynamic for strategy in found)

    def is_selectable(v: Values) -> bool:
        """Whether `strategy` may be selected, or is where the controller starts."""
        found = selectable(v)
        if found is None or controlled_by("ema")(v) or is_off(v, section):
            return True
        try:
            return Strategy.parse(v[f"{key}strategy"]) in found
        except ValueError:  # likewise
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

    idle_when_plain = tuple(
        key + each.name
        for each in keys_of(SpeculationSettings)
        if each.name.partition(".")[0] not in ("strategy", "control", "invariant")
    )
    return (
        switched_on(section, idle_when_plain),
        Needs(
            idle_when_plain,
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
            (f"{key}head",),
            lambda v: drafts_with_head(v, section),
            f"[{key}source] with [{key}draft_model] drafts without a head; set {key}source=head, "
            "or leave it out",
        ),
        Needs(
            (f"{key}draft_vocab", f"{key}token_map"),
            lambda v: v[f"{key}source"] != "ngram",
            f"[{key}source] has no language-model head; leave it out",
        ),
        Needs(
            (f"{key}ngram_max", f"{key}ngram_min", f"{key}ngram_siblings"),
            may_look_up,
            f"n-grams do not draft, with [{key}source], [{key}draft_model] and [{key}head]; set "
            f"{key}source=ngram, or leave it out",
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
