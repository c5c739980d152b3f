"""Which speculation settings need which others, for every door that has them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from specjax.config.strategy import OFF_NAMES, Strategy
from specjax.control.config import DEFAULT_STRATEGIES
from specjax.schema import Needs, keys_of
from specjax.speculation import SpeculationSettings

Values = Mapping[str, Any]


def is_off(strategy: Any) -> bool:
    return str(strategy).lower() in OFF_NAMES


def drafts_with_head(v: Values, section: str) -> bool:
    """Whether the head may draft; `auto` is not known before the checkpoint is."""
    return v[f"{section}.source"] in ("auto", "head") and v[f"{section}.draft_model"] is None


def speculation_rules(
    section: str, speculates: Callable[[Values], bool] | None = None, instead: str | None = None
) -> tuple[Needs, ...]:
    """The rows of a door.

    Args:
      section: where the door has the keys.
      speculates, instead: whether it speculates at all, and what is said where it does not; by
        default the strategy decides.
    """
    key, control = f"{section}.", f"{section}.control."

    def on(v: Values) -> bool:
        return not is_off(v[f"{key}strategy"])

    def may_look_up(v: Values) -> bool:
        """Whether n-grams may draft."""
        asked = v[f"{key}draft_model"] is not None or v[f"{key}head"] != "checkpoint"
        source = v[f"{key}source"]
        return source == "ngram" or (source == "auto" and not asked)

    def strategies(v: Values) -> list[str]:
        """Those that may be used, `strategy` among them where it is one."""
        own, controller = v[f"{key}strategy"], v.get(f"{control}controller")
        listed = v.get(f"{control}strategies")
        if controller is None or controller == "ema" or listed is None:
            more = () if controller is None or listed is not None else DEFAULT_STRATEGIES
            return [own, *(listed or more), *_initial(v)]
        return [own, *listed, *_initial(v)] if controller == "static" else list(listed)

    def _initial(v: Values) -> list[str]:
        found = v.get(f"{control}initial")
        return [] if found is None else [found]

    def grows_trees(v: Values) -> bool:
        for strategy in strategies(v):
            try:
                if Strategy.parse(strategy).is_dynamic:
                    return True
            except ValueError:  # `off`, or a mistake that is named elsewhere
                continue
        return False

    def controlled_by(*names: str) -> Callable[[Values], bool]:
        return lambda v: v.get(f"{control}controller") in names

    def of_one(name: str, *keys: str) -> Needs:
        return Needs(
            tuple(control + each for each in keys),
            controlled_by(name),
            f"[{control}controller] has other settings; use {control}controller={name}, or leave "
            "it out",
        )

    return (
        Needs(
            tuple(
                key + each.name
                for each in keys_of(SpeculationSettings)
                if each.name.partition(".")[0] not in ("strategy", "control", "invariant")
            ),
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
            (f"{key}ngram_max", f"{key}ngram_min", f"{key}ngram_siblings"),
            may_look_up,
            f"n-grams do not draft, with [{key}source], [{key}draft_model] and [{key}head]; set "
            f"{key}source=ngram, or leave it out",
        ),
        Needs(
            (f"{key}tau",),
            lambda v: grows_trees(v) and v[f"{key}acceptance"] == "coupled",
            f"it scores the paths of a dynamic tree, and [{key}strategy] is none; use one such as "
            "6_4_16, or leave it out",
        ),
        Needs(
            (f"{key}strategy",),
            lambda v: is_off(v[f"{key}strategy"]) or v[f"{key}strategy"] in strategies(v),
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
                v.get(f"{control}controller") != "ema"
                and not (
                    v.get(f"{control}controller") == "static"
                    and v.get(f"{control}initial") is not None
                )
            ),
            f"[{control}controller] does not choose among them (ema has those of its "
            f"candidate_steps, static the one of {control}initial); leave it out",
        ),
    )
