"""Which controller, over which strategies, with which settings."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from specjax.config.checks import choice, require
from specjax.config.spec import DEFAULT_STRATEGY, SpecConfig
from specjax.config.strategy import Strategy
from specjax.control.bandit import Bandit, BanditConfig
from specjax.control.base import Controller, Static, parse_arms
from specjax.control.costs import CostTable
from specjax.control.ema import EmaConfig, EmaTiers
from specjax.control.goodput import Goodput, GoodputConfig
from specjax.settings import option, part

CONTROLLERS = ("goodput", "static", "ema", "bandit")
DEFAULT_STRATEGIES = tuple(map(Strategy.chain, (0, 1, 2, 4, 7)))


@dataclasses.dataclass(frozen=True)
class ControlConfig:
    """Settings of the controller that chooses the strategy while running.

    Attributes:
      controller: kind of controller, `goodput`, `static`, `ema` or `bandit`.
      strategies: the strategies to choose from, each a `Strategy` or what `Strategy.parse` reads.
        `ema` takes the chains of its tiers instead. Beside a `strategy` of its own, `Speculation`
        adds that to the default ones.
      initial: the strategy of `static`, by default the first of `strategies`; the tier at which
        `ema` starts, a chain, by default three steps, or `strategy` beside one.
      bs_threshold: largest number of running slots for which to speculate; None for no limit.
      ema: settings of the controller `ema`.
      bandit: settings of the controller `bandit`.
      goodput: settings of the controller `goodput`.
    """

    controller: str = option("goodput", choices=CONTROLLERS, needs="speculates")
    strategies: Any = option(
        tuple(map(str, DEFAULT_STRATEGIES)),
        kind=list[str],
        needs=("speculates", "chooses_among_strategies"),
    )
    initial: Any = option(None, kind=str | None, needs=("speculates", "controller=static|ema"))
    bs_threshold: int | None = option(None, needs="speculates")
    ema: EmaConfig = option(EmaConfig, needs=("speculates", "controller=ema"))
    bandit: BanditConfig = option(BanditConfig, needs=("speculates", "controller=bandit"))
    goodput: GoodputConfig = option(GoodputConfig, needs=("speculates", "controller=goodput"))

    def __post_init__(self):
        values: dict[str, Any] = {}
        for name, cls in (("ema", EmaConfig), ("bandit", BanditConfig), ("goodput", GoodputConfig)):
            if isinstance(section := getattr(self, name), Mapping):
                values[name] = cls(**section)
        choice("controller", self.controller, CONTROLLERS)
        if isinstance(self.strategies, str) or not self.strategies:
            raise ValueError(
                "strategies must be a list of at least one, such as ['off', '4_1_5'], got "
                f"{self.strategies!r}"
            )
        values["strategies"] = tuple(dict.fromkeys(map(Strategy.parse, self.strategies)))
        if self.initial is not None:
            values["initial"] = Strategy.parse(self.initial)
            if self.controller == "ema" and not values["initial"].is_chain:
                raise ValueError(
                    f"controller=ema chooses among chains, and starts at a tree, {self.initial}; "
                    "give it a chain, or use controller=goodput"
                )
        require(self, "bs_threshold", (self.bs_threshold or 0) >= 0, "at least 0")
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @classmethod
    def of(cls, given: ControlConfig | Mapping[str, Any] | str) -> ControlConfig:
        """Builds one from the name of a controller, or from a map of settings.

        Raises:
          ValueError: a value is not valid.
          TypeError: it is none of these, or a key is not known.
        """
        if isinstance(given, str):
            return cls(controller=given)
        return given if isinstance(given, cls) else cls(**given)

    @property
    def chooses_among_strategies(self) -> bool:
        """A controller that chooses among them (goodput, bandit; static takes a single one)."""
        if self.controller == "static":
            return self.initial is None and len(self.strategies) == 1
        return self.controller != "ema"

    @property
    def arms(self) -> tuple[Strategy, ...]:
        """Every strategy that may be selected, and so has to be compiled."""
        if self.controller == "ema":
            arms = [Strategy.chain(steps) for steps in self.ema.candidate_steps]
        elif self.controller == "static":
            arms = [self.initial or self.strategies[0]]
        else:
            arms = list(self.strategies)
        return tuple(dict.fromkeys(arms if self.bs_threshold is None else [*arms, Strategy.OFF]))


@dataclasses.dataclass(frozen=True)
class Speculation(SpecConfig):
    """How a program speculates: with `SpecConfig`, and the controller beside it.

    Attributes:
      control: the controller that chooses the strategy while running; None: always `strategy`, but
        goodput if that is None or draft=auto takes n-grams.
    """

    # Programs whose top has these keys need no section for those of the controller.
    aliases: ClassVar[Mapping[str, str]] = {
        field.name: f"control.{field.name}" for field in dataclasses.fields(ControlConfig)
    }

    control: ControlConfig | None = None

    def __post_init__(self):
        super().__post_init__()
        spec = self.spec()
        for strategy in self._arms:
            dataclasses.replace(spec, strategy=strategy)  # raises where it is not exact

    def control_config(self) -> ControlConfig | None:
        """The controller, with `strategy` among its strategies; None if there is none."""
        control, own = self.control, self.own_strategy
        if control is None or self.is_off:
            return None
        changes: dict[str, Any] = {}
        is_open = control.strategies == DEFAULT_STRATEGIES
        if is_open:
            changes["strategies"] = (*DEFAULT_STRATEGIES, own)
        if control.initial is None and (
            control.controller == "ema" or (control.controller == "static" and is_open)
        ):
            changes["initial"] = own
        return dataclasses.replace(control, **changes)

    def spec(self) -> SpecConfig:
        """How to speculate.

        If `strategy` is the default one, and the controller does not list that, it is the first of
        the controller's strategies that drafts. Without a dynamic tree there is no adaptive width.
        """
        strategy, drafting = self.strategy, [arm for arm in self._arms if not arm.is_off]
        is_default = self.own_strategy == DEFAULT_STRATEGY
        if drafting and is_default and not self.is_selectable:
            strategy = drafting[0]
        adaptive = self.adaptive_width and self.grows_trees
        return part(SpecConfig, self, strategy=strategy, adaptive_width=adaptive)

    @property
    def _arms(self) -> tuple[Strategy, ...]:
        control = self.control_config()
        return (self.own_strategy,) if control is None else control.arms

    @property
    def grows_trees(self) -> bool:
        """A dynamic tree, such as 6_4_16, as strategy or among control.strategies."""
        return any(arm.is_dynamic for arm in self._arms)

    @property
    def is_selectable(self) -> bool:
        """A controller that may choose it: one whose control.strategies have it."""
        is_ema = self.control is not None and self.control.controller == "ema"
        return is_ema or self.own_strategy in self._arms


def make_controller(
    config: ControlConfig | Mapping[str, Any] | str = "goodput",
    strategies: Sequence[str | Strategy] | None = None,
    *,
    costs: CostTable | None = None,
) -> Controller:
    """Builds a controller.

    Args:
      config: the configuration, a map with its keys, or the name of a controller.
      strategies: the compiled strategies, by default `config.arms`.
      costs: seconds per round, calibrated at start; `goodput` uses them.

    Raises:
      ValueError: the configuration is not valid.
    """
    config = ControlConfig.of(config)
    compiled = parse_arms(config.arms if strategies is None else strategies)
    chosen = [compiled[arm.name] for arm in config.arms]  # these may have fewer rows
    controller = _build(config, chosen, costs)
    controller.bs_threshold = config.bs_threshold
    return controller


def _build(config: ControlConfig, chosen: list[Strategy], costs: CostTable | None) -> Controller:
    if config.controller == "static":
        return Static(chosen[0])
    if config.controller == "ema":
        return EmaTiers(config.ema, 3 if config.initial is None else config.initial.steps)
    if config.bs_threshold is not None and Strategy.OFF not in config.strategies:
        chosen = chosen[:-1]  # `off` is for larger batches alone
    if config.controller == "bandit":
        return Bandit(chosen, config.bandit)
    return Goodput(chosen, costs, config.goodput)
