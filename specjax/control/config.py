"""Which controller, over which strategies, with which settings."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from specjax.config.checks import choice, from_known_keys
from specjax.config.spec import SpecConfig
from specjax.config.strategy import Strategy
from specjax.control.bandit import Bandit, BanditConfig
from specjax.control.base import Controller, log, parse_arms
from specjax.control.costs import CostTable
from specjax.control.ema import EmaConfig, EmaTiers
from specjax.control.fastrl import FASTRL_ROWS, FastRLSettings, read_fastrl
from specjax.control.goodput import Goodput, GoodputConfig
from specjax.control.static import Gate, Static
from specjax.spelling import checks_keywords

CONTROLLERS = ("goodput", "static", "ema", "bandit")
DEFAULT_STRATEGIES = tuple(map(Strategy.chain, (0, 1, 2, 4, 7)))


@checks_keywords
@dataclasses.dataclass(frozen=True)
class ControlConfig:
    """Settings of the controller that chooses the strategy while running.

    Attributes:
      controller: kind of controller, `goodput`, `static`, `ema` or `bandit`.
      strategies: the strategies to choose from, each a `Strategy` or what `Strategy.parse` reads.
        `ema` takes the chains of its tiers instead.
      initial: the strategy of `static`, by default the first of `strategies`; the tier at which
        `ema` starts, by default three steps. A tree makes `ema` static, because its tiers are
        chains.
      bs_threshold: largest number of running slots for which to speculate; None for no limit.
      ema_file: path of a JSON or YAML file with the settings of `ema`, in place of `ema`.
      ema: settings of the controller `ema`.
      bandit: settings of the controller `bandit`.
      goodput: settings of the controller `goodput`.
    """

    controller: str = "goodput"
    strategies: tuple[Strategy | str, ...] = DEFAULT_STRATEGIES
    initial: Strategy | str | None = None
    bs_threshold: int | None = None
    ema_file: str | None = None
    ema: EmaConfig = dataclasses.field(default_factory=EmaConfig)
    bandit: BanditConfig = dataclasses.field(default_factory=BanditConfig)
    goodput: GoodputConfig = dataclasses.field(default_factory=GoodputConfig)

    def __post_init__(self):
        choice("controller", self.controller, CONTROLLERS)
        if isinstance(self.strategies, str):
            raise ValueError(
                f"strategies must be a list such as ['off', '4_1_5'], got {self.strategies!r}"
            )
        strategies = tuple(dict.fromkeys(map(Strategy.parse, self.strategies)))
        if not strategies:
            raise ValueError("strategies must list at least one, got none; 'off' is one")
        object.__setattr__(self, "strategies", strategies)
        if self.initial is not None:
            object.__setattr__(self, "initial", Strategy.parse(self.initial))
        if self.bs_threshold is not None and self.bs_threshold < 0:
            raise ValueError(
                f"bs_threshold must be at least 0, or null for no gate; got {self.bs_threshold}"
            )
        if self.ema_file is not None:
            object.__setattr__(self, "ema", EmaConfig.from_file(Path(self.ema_file)))

    @classmethod
    def of(cls, asked: ControlConfig | Mapping[str, Any] | str) -> ControlConfig:
        """Builds one from the name of a controller, or from a map of settings.

        Raises:
          ValueError: a setting is not valid, see `from_dict`.
          TypeError: `asked` is none of these.
        """
        if isinstance(asked, str):
            return cls(controller=asked)
        if isinstance(asked, Mapping):
            return cls.from_dict(asked)
        if not isinstance(asked, cls):
            raise TypeError(
                f"control: expected a ControlConfig, the name of a controller or a map of its "
                f"settings, got {asked!r}"
            )
        return asked

    @classmethod
    def from_dict(cls, settings: Mapping[str, Any]) -> ControlConfig:
        """Builds one from nested maps, such as YAML gives.

        Raises:
          ValueError: a key is not known, or a value is not valid.
        """
        known = [field.name for field in dataclasses.fields(cls)]
        unknown = sorted(set(settings) - set(known))
        if unknown:
            raise ValueError(
                f"unknown control setting {', '.join(map(repr, unknown))}; the keys are "
                f"{', '.join(known)}"
            )
        values = dict(settings)
        for name, section in (("bandit", BanditConfig), ("goodput", GoodputConfig)):
            if isinstance(values.get(name), Mapping):
                values[name] = from_known_keys(section, values[name], where=" of " + name)
        if isinstance(values.get("ema"), Mapping):
            values["ema"] = EmaConfig.from_dict(values["ema"])
        return cls(**values)

    @classmethod
    def from_fastrl(cls, section: Mapping[str, Any], seed: int = 0) -> ControlConfig:
        """Builds one from FastRL's `speculative:` section.

        Raises:
          ValueError: the section sets the head or the rows, which `specjax.control.from_fastrl`
            takes; or it is not valid, see `read_fastrl`.
        """
        settings = read_fastrl(section, seed)
        if settings.spec_model_path is not None or settings.spec_verify_tokens != FASTRL_ROWS:
            raise ValueError(
                f"spec_model_path={settings.spec_model_path} and spec_verify_tokens="
                f"{settings.spec_verify_tokens} are the head and the rows, which no ControlConfig "
                "holds; use specjax.control.from_fastrl(section), which also gives a SpecConfig"
            )
        return cls.of_fastrl(settings)

    @classmethod
    def of_fastrl(
        cls, settings: FastRLSettings, bandit: Mapping[str, Any] | None = None
    ) -> ControlConfig:
        """Builds one from FastRL's section as `read_fastrl` returned it.

        Args:
          settings: the section.
          bandit: settings of the bandit that FastRL's section has no key for, such as
            {"reward": "accept_length"}.

        Raises:
          ValueError: `bandit` is given and the section asks for no bandit, or `bandit` sets the
            thresholds, which the section sets.
        """
        more = dict(bandit or {})
        if more and settings.controller != "bandit":
            raise ValueError(
                "settings of the bandit were given, but FastRL's section asks for no bandit; set "
                "its tune_algorithm to 'BEG' or 'EG', or leave them out"
            )
        if "thresholds" in more:
            raise ValueError(
                "thresholds of the bandit are FastRL's mab_bs_threshold; set that, and leave "
                "thresholds out"
            )
        values = dataclasses.asdict(settings.bandit)
        return cls(
            controller=settings.controller,
            strategies=settings.strategies,
            bs_threshold=settings.bs_threshold,
            bandit=from_known_keys(BanditConfig, values | more, where=" of bandit"),
        )

    @property
    def arms(self) -> tuple[Strategy, ...]:
        """Every strategy that may be selected, and so has to be compiled."""
        if self.controller == "ema" and self._ema_falls_back() is None:
            arms = [Strategy.chain(steps) for steps in self.ema.candidate_steps]
        elif self.controller in ("static", "ema"):
            arms = [self.initial or self.strategies[0]]
        else:
            arms = list(self.strategies)
        return tuple(dict.fromkeys(arms if self.bs_threshold is None else [*arms, Strategy.OFF]))

    def _ema_falls_back(self) -> str | None:
        """Returns why `ema` cannot adapt; None where it can."""
        initial = self.initial
        if initial is None or initial.is_chain:
            return None
        return f"its tiers are chains (topk 1), and {initial.name!r} is a tree"


def from_fastrl(
    section: Mapping[str, Any], bandit: Mapping[str, Any] | None = None, seed: int = 0
) -> tuple[SpecConfig | None, ControlConfig | None]:
    """Reads FastRL's `speculative:` section for `LLM(DIR, spec, control=control)`.

    Args:
      section: the section, see `read_fastrl`.
      bandit: settings of the bandit that the section has no key for.
      seed: seed of the bandit's random choices.

    Returns:
      The speculation and its control; (None, None), which is plain decoding, for `enable: false`.

    Raises:
      ValueError: the section is not valid, see `read_fastrl` and `ControlConfig.of_fastrl`.
    """
    settings = read_fastrl(section, seed)
    control = ControlConfig.of_fastrl(settings, bandit)
    if not settings.enabled:
        return None, None
    spec = SpecConfig(
        next(strategy for strategy in settings.strategies if not strategy.is_off),
        draft=settings.spec_model_path or "auto",
        spec_verify_tokens=settings.spec_verify_tokens,
    )
    return spec, control


def make_controller(
    config: ControlConfig | Mapping[str, Any] | str = "goodput",
    strategies: Sequence[str | Strategy] | None = None,
    *,
    costs: CostTable | None = None,
) -> Controller:
    """Builds a controller.

    Args:
      config: the configuration, a map with its keys, or the name of a controller.
      strategies: the compiled strategies, by default `config.arms`; with the name of a controller,
        also those that it chooses from.
      costs: seconds per round, calibrated at start; `goodput` uses them.

    Raises:
      ValueError: the configuration is not valid, or it names a strategy that is not compiled.
    """
    if isinstance(config, str) and strategies is not None:
        config = ControlConfig(controller=config, strategies=tuple(strategies))
    config = ControlConfig.of(config)
    compiled = parse_arms(config.arms if strategies is None else strategies)
    names = [arm.name for arm in config.arms]
    missing = [name for name in names if name not in compiled]
    if missing:
        raise ValueError(
            f"controller {config.controller!r} may select {', '.join(missing)}, but only "
            f"{', '.join(compiled)} are compiled; compile ControlConfig.arms, or list fewer"
        )
    chosen = [compiled[name] for name in names]  # these may have fewer rows
    controller = _build(config, chosen, costs)
    if config.bs_threshold is not None:
        controller = Gate(controller, config.bs_threshold)
    log.info(
        "Controller %s over %s%s", config.controller, ", ".join(names),
        "" if config.bs_threshold is None else f", speculating up to batch {config.bs_threshold}",
    )  # fmt: skip
    return controller


def _build(config: ControlConfig, chosen: list[Strategy], costs: CostTable | None) -> Controller:
    if config.controller == "static":
        return Static(chosen[0])
    if config.controller == "ema":
        reason = config._ema_falls_back()
        if reason is not None:
            log.warning("Adaptive steps fall back to static %s: %s", config.initial, reason)
            return Static(chosen[0])
        return EmaTiers(config.ema, 3 if config.initial is None else config.initial.steps)
    if config.bs_threshold is not None and Strategy.OFF not in config.strategies:
        chosen = chosen[:-1]  # the `off` of `Gate` is not for the inner controller
    if config.controller == "bandit":
        return Bandit(chosen, config.bandit)
    return Goodput(chosen, costs, config.goodput)
