"""The `rollout` section of `train.rl`'s configuration, and `rollout.control` in it."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

from specjax.config import SamplingParams, SpecConfig
from specjax.config.spec import DRAFT_SOURCES
from specjax.control import OFF, ControlConfig, FastRLSettings, read_fastrl
from specjax.control.config import CONTROLLERS, DEFAULT_STRATEGIES
from specjax.engine.settings import EngineConfig
from specjax.kernels import panels
from specjax.schema import at_least, option
from specjax.spelling import dotted


@dataclass
class ControlSection:
    """Which strategy a rollout speculates with, chosen while it runs."""

    controller: str = option("goodput", "who chooses", choices=CONTROLLERS)
    strategies: list[str] = option(
        list(DEFAULT_STRATEGIES), "to choose from; ema has those of its candidate_steps instead"
    )
    initial: str | None = option(
        None,
        "static: the strategy, by default the first of strategies if they are set, else "
        "rollout.strategy; ema: where it starts",
    )
    bs_threshold: int | None = option(
        None, "speculate only while at most so many slots run; null: always"
    )
    ema_file: str | None = option(None, "JSON or YAML with the settings of ema, in place of `ema`")
    ema: dict[str, Any] = option({}, "settings of ema, such as {candidate_steps: [1, 3, 7]}")
    bandit: dict[str, Any] = option({}, "settings of bandit, such as {epsilon: 0.1, window: 1000}")
    goodput: dict[str, Any] = option({}, "settings of goodput, such as {probe_fraction: 0.01}")
    fastrl: dict[str, Any] = option(
        {},
        "FastRL's `speculative:` section as it stands, in place of all the above; its "
        "spec_verify_tokens and spec_model_path become rollout's spec_verify_tokens and head",
    )

    def __post_init__(self):
        self.build()

    def build(self, own: str | None = None) -> ControlConfig:
        """The configuration of the controller.

        Args:
          own: what `static` stays at if nothing else is said.

        Raises:
          ValueError: a key is not known, or a value is not valid.
        """
        settings = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "fastrl"}
        lists = self.strategies != list(DEFAULT_STRATEGIES)
        try:
            if not self.fastrl:
                if self.controller == "static" and self.initial is None and not lists:
                    settings["initial"] = own
                return ControlConfig.from_dict(settings)
            if settings != {name: getattr(_NO_CONTROL, name) for name in settings}:
                raise ValueError(
                    "fastrl stands in place of all other keys, and some of them are set, too; "
                    "leave out one or the other"
                )
            return ControlConfig.of_fastrl(self.fastrl_settings())
        except (ValueError, TypeError, OSError) as error:
            raise ValueError(f"rollout.control: {error}") from error

    def fastrl_settings(self) -> FastRLSettings | None:
        return read_fastrl(self.fastrl) if self.fastrl else None


_NO_CONTROL = ControlSection()
# What decides where and when rollouts run, and no token.
PLACEMENT = ("replicas", "tp", "max_batch", "scan_layers")
ENGINE_SETTINGS = (
    "page_size", "cache_bytes", "chunk_tokens", "stretch", "prefill_chunk", "order", "products",
)  # fmt: skip


@dataclass
class RolloutSection:
    """How rollouts are generated."""

    prompts: int = option(16, "prompts per step P")
    n: int = option(8, "samples per prompt G")
    over_sample: float = option(
        1.0,
        "prompts * over_sample groups are started, and the step ends when `prompts` of them are "
        "sure to be the first in tokens",
    )
    partial: bool = option(
        False,
        "the next step goes on with groups that are left (better with over_sample < 2, see "
        "train.groups); otherwise they are dropped",
    )
    max_staleness: int = option(
        4, "steps since the oldest token of a carried group at most; older groups are dropped"
    )
    temperature: float = option(1.0, "sampling temperature")
    max_tokens: int = option(160, "response tokens at most")
    max_prompt_tokens: int = option(
        64, "prompt tokens at most; data.overlong_prompts says what becomes of longer prompts"
    )
    max_batch: int = option(32, "slots that run at once, on each replica")
    replicas: int = option(
        1, "engines that share the samples, each with devices, weights and caches of its own"
    )
    tp: int = option(
        1,
        "devices of each replica; with 1 replica of 1 device rollouts run on the devices of `mesh`",
    )
    order: str = option(
        "fifo",
        "which samples start first; longest_first: those whose problem had long ones before",
        choices=("fifo", "longest_first"),
    )
    page_size: int | None = option(
        None, "positions per cache page; 0: one page per sample; null: the engine chooses"
    )
    cache_bytes: int | None = option(
        None, "memory for all cache pages; null: what all slots need at full length"
    )
    chunk_tokens: int = option(32, "tokens per slot between two looks of the host")
    stretch: int = option(
        8,
        "so many times as many where one slot runs, half of that where two do, and so on; what "
        "over_sample and partial stop, they stop between two looks: 1 wastes least of it",
    )
    prefill_chunk: int = option(512, "prompt tokens that are read at a time")
    products: str = option(
        "auto",
        "by what weights are multiplied: panels, specjax's own kernel on one CPU device; xla",
        choices=panels.ASKED,
    )
    scan_layers: bool = option(
        False, "scan over layers while decoding: short compile, slower on CPU"
    )
    strategy: str = option("4_1_5", "what a round drafts; off: no speculation")
    acceptance: str = option(
        "coupled", "acceptance mode", choices=("coupled", "block", "recursive")
    )
    source: str = option(
        "auto",
        "what drafts: the head; model: a smaller one (draft_model); ngram: what followed the last "
        "tokens earlier; auto: the head, or n-grams under control where the checkpoint has none",
        choices=DRAFT_SOURCES,
    )
    head: str = option(
        "checkpoint",
        "the head to start from: checkpoint (the policy's own), random, or a path; with the latter "
        "two source=auto is head",
    )
    draft_model: str | None = option(
        None, "Hugging Face directory or id of the draft model; with it source=auto is model"
    )
    ngram_max: int = option(4, "longest suffix that source=ngram looks up")
    ngram_min: int = option(1, "shortest suffix that source=ngram looks up")
    ngram_siblings: bool = option(True, "look it up in the prompt's other samples, too")
    aligned: bool = option(True, "draft candidates come from logits transformed as the policy's")
    tau: float = option(0.6, "a dynamic tree scores paths by log_softmax((log q + noise) / tau)")
    adaptive_width: bool = option(
        False, "nodes of a dynamic tree have as many children as the draft's perplexity, rounded"
    )
    spec_verify_tokens: int = option(48, "tree rows at most; a larger dynamic tree is cut")
    telemetry: bool = option(
        False,
        "write why drafts are rejected to <out>/telemetry.jsonl (SPECJAX_TELEMETRY=1 does, too)",
    )
    control: ControlSection | None = option(
        None,
        "chooses the strategy while running; null: always rollout.strategy, but goodput where "
        "source=auto takes n-grams",
    )

    def __post_init__(self):
        at_least("rollout", self, prompts=1, n=2, max_prompt_tokens=1, max_batch=1)
        at_least("rollout", self, max_staleness=1, replicas=1, tp=1)
        if not 1 <= self.over_sample < math.inf:
            raise ValueError(
                f"rollout.over_sample: expected a finite number of at least 1, got "
                f"{self.over_sample}"
            )
        SamplingParams(self.temperature, self.max_tokens)
        self.source = self.spec().source  # a draft model implies it
        exact = self.acceptance in ("coupled", "greedy")
        if self.source == "ngram" and self.ngram_siblings and not exact:
            raise ValueError(
                f"rollout.ngram_siblings with acceptance={self.acceptance}: tokens would depend on "
                "who runs beside whom, and no run could be repeated; set "
                "rollout.ngram_siblings=false, or rollout.acceptance=coupled"
            )
        self.engine_config()
        if self.partial and self.in_air == self.prompts:
            raise ValueError(
                "rollout.partial carries the groups that over-sampling leaves, and with "
                f"rollout.prompts={self.prompts} and rollout.over_sample={self.over_sample} none "
                "are; raise over_sample, or set partial=false"
            )
        if self.control is not None:
            self._check_control(self.control)
        if self.source == "auto" and self.head != "checkpoint":
            self.source = "head"

    def _check_control(self, control: ControlSection) -> None:
        fastrl = control.fastrl_settings()
        if fastrl is not None:
            self.spec_verify_tokens = fastrl.spec_verify_tokens
            if fastrl.spec_model_path is not None and self.head == "checkpoint":
                self.head = fastrl.spec_model_path
        if self.spec().is_off:
            raise ValueError(
                "rollout.control chooses between strategies, and rollout.strategy=off says that "
                f"there is no speculation; leave one of them out ({OFF!r} may be one of "
                "rollout.control.strategies)"
            )
        arms = control.build(self.strategy).arms
        if self.acceptance != "coupled" and len(arms) > 1:
            raise ValueError(
                f"with rollout.acceptance={self.acceptance} the tokens depend on the strategy, and "
                f"rollout.control (controller={control.controller}, of {', '.join(arms)}) would "
                "choose it by time or load: what is learned would depend on the clock. Use "
                "rollout.acceptance=coupled, or rollout.control.controller=static without "
                "bs_threshold"
            )

    @property
    def by_the_clock(self) -> bool:
        """Whether it depends on time in which batch and by which strategy a token is sampled."""
        arms = self.control.build(self.strategy).arms if self.control is not None else ()
        return self.replicas > 1 or len(arms) > 1

    @property
    def in_air(self) -> int:
        """Groups that a step starts with, those that are carried included."""
        return round(self.prompts * self.over_sample)

    @property
    def own_devices(self) -> bool:
        """Whether rollouts do not simply run on the devices of `mesh`."""
        return self.replicas * self.tp > 1

    def engine_config(self) -> EngineConfig:
        """How the engine uses its device.

        Raises:
          ValueError: a value is not valid.
        """
        try:
            return EngineConfig(**{name: getattr(self, name) for name in ENGINE_SETTINGS})
        except ValueError as error:
            raise ValueError(f"rollout.{error}") from error

    def control_config(self) -> ControlConfig | None:
        """How the strategy is chosen; None: it is always `strategy`."""
        return None if self.control is None else self.control.build(self.strategy)

    def spec(self) -> SpecConfig:
        """How rollouts speculate.

        Raises:
          ValueError: a combination that is not exact.
        """
        return SpecConfig(
            self.strategy,
            self.acceptance,
            source=self.source,
            draft_model=self.draft_model,
            ngram_max=self.ngram_max,
            ngram_min=self.ngram_min,
            ngram_siblings=self.ngram_siblings,
            aligned=self.aligned,
            tau=self.tau,
            adaptive_width=self.adaptive_width,
            spec_verify_tokens=self.spec_verify_tokens,
            telemetry=self.telemetry or None,  # None asks the environment
        )


# How settings of the library are typed here.
SAY = dotted(
    {field.name: "rollout" for field in fields(RolloutSection)}
    | {name: "rollout.control" for name in ("controller", "strategies", "initial", "bs_threshold")}
)
