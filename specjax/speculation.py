"""How to speculate and who chooses the strategy: one section of settings for every program.

`train.rl` has its keys under `rollout`, the server under `speculation`, and `specjax generate` and
`verify` have a flag for each (`speculation_flags.py`). What they make of it are the `SpecConfig`
and the `ControlConfig` that `LLM` takes. Keys, defaults and checks are the same everywhere; what a
program cannot do it refuses itself.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from specjax.config.spec import ACCEPTANCE_MODES, SpecConfig
from specjax.config.strategy import Strategy
from specjax.control.config import CONTROLLERS, DEFAULT_STRATEGIES, ControlConfig
from specjax.control.fastrl import FastRLSettings, read_fastrl
from specjax.schema import option

_LISTED = ", ".join(map(str, DEFAULT_STRATEGIES))


@dataclass
class ControlSection:
    """Which strategy is speculated with, chosen while running."""

    controller: str = option("goodput", "who chooses", choices=CONTROLLERS)
    strategies: list[str] | None = option(
        None,
        f"to choose from; null: {_LISTED}, and `strategy`; ema has those of its candidate_steps "
        "instead",
    )
    initial: str | None = option(
        None,
        "static: the strategy; ema: where it starts (a tree makes it static, for its tiers are "
        "chains); null: `strategy`, or with static the first of strategies if they are set",
    )
    bs_threshold: int | None = option(
        None, "speculate only while at most so many slots run; null: always"
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
        "FastRL's `speculative:` section as it stands, in place of all the above, but for what "
        "`bandit` says that it has no key for, such as the reward; its spec_verify_tokens and "
        "spec_model_path become spec_verify_tokens and head, and enable: false decodes plainly",
    )

    @property
    def is_switched_off(self) -> bool:
        """Whether FastRL's section says that nothing is drafted."""
        return bool(self.fastrl) and not read_fastrl(self.fastrl).enabled

    def build(self, own: str | None = None) -> ControlConfig:
        """The configuration of the controller.

        Args:
          own: the strategy that stands beside this section.

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
            more = () if own is None else (own,)
            settings["strategies"] = (*DEFAULT_STRATEGIES, *more)
        return ControlConfig.from_dict(settings)


_NO_CONTROL = ControlSection()


@dataclass
class SpeculationSettings:
    """How to speculate; the fields are those of `SpecConfig`, and `control` beside them."""

    section: ClassVar[str] = "speculation"  # where the keys stand

    strategy: str = option("4_1_5", "what a round drafts; off: no speculation")
    acceptance: str = option(
        "coupled",
        "acceptance mode; greedy: for temperature 0 only",
        choices=ACCEPTANCE_MODES,
    )
    source: str = option(
        "auto",
        "what drafts: the head; model: a smaller one (draft_model); ngram: what followed the last "
        "tokens earlier; auto: the head, or n-grams under a controller that may choose off where "
        "the checkpoint has none; module:attribute: a class of your own",
    )
    head: str = option(
        "checkpoint",
        "the head: checkpoint (the model's own), random, or a path; with the latter two "
        "source=auto is head",
    )
    draft_model: str | None = option(
        None, "Hugging Face directory or id of the draft model; with it source=auto is model"
    )
    draft_vocab: int | None = option(
        None,
        "the head or model drafts from so many tokens, those that are emitted most; null: from all",
    )
    token_map: str | None = option(
        None,
        "JSON file with a list of token ids, the most frequent first, for the head or model to "
        "draft from; the first draft_vocab of them, or all",
    )
    ngram_max: int = option(4, "longest suffix that source=ngram looks up")
    ngram_min: int = option(1, "shortest suffix that source=ngram looks up")
    ngram_siblings: bool = option(True, "look it up in the prompt's other samples, too")
    aligned: bool = option(True, "draft candidates come from logits transformed as the model's")
    tau: float = option(0.6, "a dynamic tree scores paths by log_softmax((log q + noise) / tau)")
    adaptive_width: bool = option(
        False, "nodes of a dynamic tree have as many children as the draft's perplexity, rounded"
    )
    spec_verify_tokens: int = option(48, "tree rows at most; a larger dynamic tree is cut")
    invariant: bool = option(
        False,
        "equal bits of tokens and log-probabilities with and without speculation, by any strategy, "
        "beside any others, on any replica: one program throughout, attention by position in XLA; "
        "slower",
    )
    exact_mode: bool = option(
        False,
        "decode everything a second time plainly, compare every token, and report the first "
        "difference of each sample; forces acceptance=coupled or greedy",
    )
    telemetry: bool | None = option(
        None, "record why drafts are rejected; null: if SPECJAX_TELEMETRY=1"
    )
    control: ControlSection | None = option(
        None,
        "chooses the strategy while running; null: always `strategy`, but goodput where "
        "source=auto takes n-grams",
    )

    def __post_init__(self):
        control = self.control_config()
        if control is not None and self.control.fastrl:
            self._take_fastrl(read_fastrl(self.control.fastrl))
        spec = self.spec()
        self.source = spec.source  # a draft model or a head implies it
        if control is not None:
            self._check_strategies(spec, control)

    def _take_fastrl(self, fastrl: FastRLSettings) -> None:
        """What FastRL's section says that is not the controller's."""
        self.spec_verify_tokens = fastrl.spec_verify_tokens
        path = fastrl.spec_model_path
        if path is None:
            return
        if self.head not in ("checkpoint", path) or self.draft_model is not None:
            mine = "head" if self.draft_model is None else "draft_model"
            raise ValueError(
                f"{self.section}.{mine}={getattr(self, mine)} drafts, and spec_model_path={path} "
                f"of {self.section}.control.fastrl is a head that would; leave out one of them"
            )
        self.head = path

    def _check_strategies(self, spec: SpecConfig, control: ControlConfig) -> None:
        """Refuses a controller without a choice, and one that may choose what is not exact."""
        if spec.is_off:
            key = f"{self.section}.control"
            raise ValueError(
                f"{key}.controller chooses between strategies, and {self.section}.strategy="
                f"{self.strategy} says that there is no speculation; leave one of them out "
                f"('off' may be one of {key}.strategies)"
            )
        for arm in control.arms:
            dataclasses.replace(spec, strategy=arm)  # refuses what is not exact

    def control_config(self) -> ControlConfig | None:
        """How the strategy is chosen; None: it is always that of `spec()`.

        Raises:
          ValueError: a key of `control` is not known, or a value is not valid.
        """
        if self.control is None:
            return None
        try:
            found = self.control.build(self.strategy)
        except (ValueError, TypeError, OSError) as error:
            raise ValueError(f"{self.section}.control: {error}") from error
        return None if self.control.is_switched_off else found

    def spec(self) -> SpecConfig:
        """How to speculate.

        Raises:
          ValueError: a combination that is not exact.
        """
        values = {f.name: getattr(self, f.name) for f in fields(SpeculationSettings)}
        del values["control"]
        control = self.control_config()
        strategy = self._own_strategy(control)
        arms = (strategy,) if control is None else control.arms
        # Where no strategy is a dynamic tree, the rules tell who asked for it.
        adaptive = self.adaptive_width and any(arm.is_dynamic for arm in arms)
        return SpecConfig(**{**values, "strategy": strategy, "adaptive_width": adaptive})

    def _own_strategy(self, control: ControlConfig | None) -> Strategy:
        """The strategy beside the controller. It is the first that drafts of the controller's own
        where nobody set `strategy`, and it is FastRL's or the default may not be selected."""
        if self.control is not None and self.control.is_switched_off:
            return Strategy.OFF
        own, unset = Strategy.parse(self.strategy), self.strategy == SpeculationSettings.strategy
        # ema starts at the tier next to it, which need not be equal.
        if control is None or control.controller == "ema" or not unset:
            return own
        drafting = [arm for arm in control.arms if not arm.is_off]
        stays = not drafting or (own in drafting and not self.control.fastrl)
        return own if stays else drafting[0]

    @property
    def plain_by(self) -> str:
        """The setting that decides whether there is speculation at all, as it is typed."""
        if self.control is not None and self.control.is_switched_off:
            return f"{self.section}.control.fastrl with enable: false"
        return f"{self.section}.strategy={self.strategy}"


def sections_of(cls: type[SpeculationSettings]) -> dict[str, str]:
    """The section of each setting of `cls`, for `spelling.dotted`."""
    return {
        **{f.name: cls.section for f in fields(SpeculationSettings)},
        **{f.name: f"{cls.section}.control" for f in fields(ControlSection)},
    }
