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
    """How the strategy is chosen while running.

    Attributes:
      controller: `goodput`, `static`, `ema` or `bandit`.
      strategies: to choose from, each a `Strategy` or what `Strategy.parse` reads. `ema` has those
        of its tiers instead.
      initial: `static`: the strategy, by default the first; `ema`: where it starts, by default
        three steps. A tree there makes `ema` static, for its tiers are chains.
      bs_threshold: speculate only while at most so many slots run; None: no gate.
      ema_file: JSON or YAML with the settings of `ema`, in place of `ema`.
      ema, bandit, goodput: settings of the three.
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
        """Of the name of a controller, or of maps with the keys of a configuration.

        Raises:
          ValueError: see `from_dict`.
          TypeError: it is none of these.
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
        """From nested maps, such as YAML gives.

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
        """From FastRL's `speculative:` section, which must say nothing of head and rows.

        Raises:
          ValueError: it does, and `specjax.control.from_fastrl` gives what takes them; or it is not
            valid, see `read_fastrl`.
        """
        settings = read_fastrl(section, seed)
        if settings.spec_model_path is not None or settings.spec_verify_tokens != FASTRL_ROWS:
            raise ValueError(
                f"spec_model_path={settings.spec_model_path} and spec_verify_tokens="
                f"{settings.spec_verify_tokens} are the head and the rows, which no ControlConfig "
                "has; use specjax.control.from_fastrl(section), which gives the SpecConfig beside "
                "it"
            )
        return cls.of_fastrl(settings)

    @classmethod
    def of_fastrl(
        cls, settings: FastRLSettings, bandit: Mapping[str, Any] | None = None
    ) -> ControlConfig:
        """Of the section as it was read.

        Args:
          bandit: settings of the bandit that FastRL's section has no key for, such as
            {"reward": "accept_length"}.

        Raises:
          ValueError: it does not ask for the bandit, or says itself what `bandit` says.
        """
        more = dict(bandit or {})
        if more and settings.controller != "bandit":
            raise ValueError(
                "settings of the bandit stand beside FastRL's section, and it asks for no bandit; "
                "set its tune_algorithm to 'BEG' or 'EG', or leave them out"
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
        """Every strategy that may be selected: what has to be compiled."""
        if self.controller == "ema" and self._ema_falls_back() is None:
            arms = [Strategy.chain(steps) for steps in self.ema.candidate_steps]
        elif self.controller in ("static", "ema"):
            arms = [self.initial or self.strategies[0]]
        else:
            arms = list(self.strategies)
        return tuple(dict.fromkeys(arms if self.bs_threshold is None else [*arms, Strategy.OFF]))

    def _ema_falls_back(self) -> str | None:
        """Why `ema` cannot adapt; None where it can."""
        initial = self.initial
        if initial is None or initial.is_chain:
            return None
        return f"its tiers are chains (topk 1), and {initial.name!r} is a tree"


def from_fastrl(
    section: Mapping[str, Any], bandit: Mapping[str, Any] | None = None, seed: int = 0
) -> tuple[SpecConfig | None, ControlConfig | None]:
    """What FastRL's `speculative:` section asks for: `LLM(DIR, spec, control=control)`.

    Args:
      bandit: see `ControlConfig.of_fastrl`.

    Returns:
      spec and control; (None, None), which is plain decoding, for `enable: false`.

    Raises:
      ValueError: see `read_fastrl` and `ControlConfig.of_fastrl`.
    """
    settings = read_fastrl(section, seed)
    control = ControlConfig.of_fastrl(settings, bandit)
    if not settings.enabled:
        return None, None
    spec = SpecConfig(
        next(strategy for strategy in settings.strategies if not strategy.is_off),
        head=settings.spec_model_path or "checkpoint",
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
      config: the configuration, maps with its keys, or the name of a controller.
      strategies: what is compiled. The controller chooses among these; by default among
        `config.arms`.
      costs: seconds per round, calibrated at start (`goodput`).

    Raises:
      ValueError: the configuration is not valid, or asks for what is not compiled.
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
    chosen = [compiled[name] for name in names]  # which may be cut to fewer rows
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
        chosen = chosen[:-1]  # the gate's `off` is no arm
    if config.controller == "bandit":
        return Bandit(chosen, config.bandit)
    return Goodput(chosen, costs, config.goodput)
