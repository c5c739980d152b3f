"""The `rollout` section of `train.rl`'s configuration."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from specjax.config import SamplingParams, Strategy
from specjax.config.dtype import AUTO, ENGINE_DTYPES
from specjax.engine.settings import EngineConfig, strategies_of
from specjax.schema import at_least, option
from specjax.speculation import SpeculationSettings, sections_of
from specjax.spelling import dotted
from specjax.weights.matrix import ASKED

# Settings other than the temperature that change the distribution.
FILTERS = ("top_k", "top_p", "min_p")  # without effect at temperature 0
PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")
TRANSFORMS = (*FILTERS, *PENALTIES, "logit_bias", "min_tokens")


@dataclass
class SamplingSection:
    """How the samples of a rollout, and those of the evaluation, are drawn."""

    temperature: float = option(1.0, "sampling temperature; 0 is greedy")
    max_tokens: int = option(512, "response tokens at most")
    min_tokens: int = option(
        0, "stop tokens are masked, and stop strings ignored, before so many response tokens"
    )
    top_k: int = option(0, "keep the k most likely tokens; 0 or -1: all")
    top_p: float = option(1.0, "keep the fewest most likely tokens with this share of the mass")
    min_p: float = option(0.0, "keep tokens at least so many times as likely as the likeliest one")
    repetition_penalty: float = option(
        1.0,
        "divides positive logits of tokens seen in prompt or response, multiplies negative ones",
    )
    presence_penalty: float = option(0.0, "subtracted from logits of tokens of the response")
    frequency_penalty: float = option(0.0, "likewise, once per occurrence")
    logit_bias: dict[int, float] = option(
        {}, 'token id -> number added to its logit, such as {5: -100} or {"5": -100}'
    )
    stop: list[str] = option(
        [],
        "strings that end a response; it is trained on with the tokens of the string, and the "
        "reward sees the text before it",
    )
    include_stop_str_in_output: bool = option(False, "the reward sees the stop string, too")

    def sampling_params(
        self, seed: int = 0, n: int = 1, transformed_logprobs: bool = False
    ) -> SamplingParams:
        """The sampling parameters of a group.

        Args:
          seed: seed of the group.
          n: number of samples.
          transformed_logprobs: whether the engine also returns log-probabilities after all
            transforms.

        Raises:
          ValueError: a value is not valid.
        """
        own = {f.name: getattr(self, f.name) for f in fields(SamplingSection)}
        own |= {"stop": tuple(self.stop), "logit_bias": tuple(self.logit_bias.items())}
        try:
            return SamplingParams(**own, seed=seed, n=n, transformed_logprobs=transformed_logprobs)
        except ValueError as error:
            raise ValueError(f"rollout.{error}") from error


def transforms(values: Mapping[str, Any]) -> list[str]:
    """The names in TRANSFORMS that have an effect in a rollout.

    Args:
      values: values of the settings in `rollout`, by name without the section.
    """
    neutral = {f.name: f.default for f in fields(SamplingParams)}
    names = [
        name
        for name in TRANSFORMS
        if (values[name] or None) != (neutral[name] or None)  # {} is () here
        and not (name in FILTERS and values["temperature"] == 0)
    ]
    return [name for name in names if name != "top_k" or values[name] > 0]


# Settings that change where and when rollouts run, and no token.
PLACEMENT = ("replicas", "tp", "max_batch", "scan_layers")
ENGINE_SETTINGS = (
    "page_size", "cache_bytes", "chunk_tokens", "stretch", "prefill_chunk", "order", "products",
    "enforce_eager",
)  # fmt: skip


@dataclass
class RolloutSection(SamplingSection, SpeculationSettings):
    """How rollouts are generated: how they sample, and how they speculate."""

    section: ClassVar[str] = "rollout"

    prompts: int = option(16, "prompts per step P")
    n: int = option(8, "samples per prompt G")
    over_sample: float = option(
        1.0,
        "prompts * over_sample groups are started, and the step ends when `prompts` of them are "
        "certain to be the shortest in tokens",
    )
    partial: bool = option(
        False,
        "the next step goes on with groups that are left (better with over_sample < 2, see "
        "train.rollout.groups); otherwise they are dropped",
    )
    max_staleness: int = option(
        4, "steps since the oldest token of a carried group at most; older groups are dropped"
    )
    max_prompt_tokens: int = option(
        512, "prompt tokens at most; data.overlong_prompts says what becomes of longer prompts"
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
        choices=ASKED,
        own=True,
    )
    enforce_eager: bool = option(False, "run GPUs without CUDA graphs")
    draft_vocab_every: int = option(
        1,
        "steps after which the draft_vocab tokens are chosen anew, by what rollouts emitted; "
        "earlier if they cover fewer tokens than at first; 0: those of the start stay",
    )
    draft_vocab_decay: float = option(
        0.8, "weight in that choice that tokens of earlier steps keep from step to step"
    )
    dtype: str = option(
        AUTO,
        "dtype of weights and arithmetic in rollouts and evaluation, cast when new weights come; "
        "auto: dtype.compute",
        choices=ENGINE_DTYPES,
    )
    scan_layers: bool = option(
        False,
        "scan over the layers while decoding, on one device or a mesh: compiles faster, decodes "
        "slower",
    )

    def __post_init__(self):
        at_least("rollout", self, prompts=1, n=1, max_prompt_tokens=1, max_batch=1)
        at_least("rollout", self, max_staleness=1, replicas=1, tp=1, draft_vocab_every=0)
        if not 0 <= self.draft_vocab_decay <= 1:
            raise ValueError(
                "rollout.draft_vocab_decay: expected a number between 0 and 1, got "
                f"{self.draft_vocab_decay}"
            )
        if not 1 <= self.over_sample < math.inf:
            raise ValueError(
                f"rollout.over_sample: expected a finite number of at least 1, got "
                f"{self.over_sample}"
            )
        self.sampling_params()
        super().__post_init__()
        self._check_acceptance()
        _ = self.strategies  # checks them
        if self.draft == "ngram" and self.ngram_siblings and not self._same_tokens:
            raise ValueError(
                f"rollout.ngram_siblings with acceptance={self.acceptance}: tokens would depend on "
                "the samples that share a batch, and no run could be repeated; set "
                "rollout.ngram_siblings=false, or rollout.acceptance=coupled"
            )
        self.engine_config()
        if self.partial and self.in_flight == self.prompts:
            raise ValueError(
                "rollout.partial carries the groups that over-sampling leaves, and with "
                f"rollout.prompts={self.prompts} and rollout.over_sample={self.over_sample} none "
                "are; raise over_sample, or set partial=false"
            )

    @property
    def strategies(self) -> list[Strategy]:
        """The strategies that rollouts may use; `off` drafts nothing."""
        spec = self.spec()
        return strategies_of(spec, self.control_config()) or [spec.resolve()]

    @property
    def _same_tokens(self) -> bool:
        """Whether tokens are those of plain decoding, for all drafts."""
        return self.acceptance in ("coupled", "greedy")

    def _check_acceptance(self) -> None:
        """Refuses settings with which tokens would depend on time, and greedy with sampling."""
        if self.acceptance == "greedy" and self.temperature > 0 and not self.spec().is_off:
            raise ValueError(
                "rollout.acceptance=greedy takes samples of temperature 0 only, got "
                f"rollout.temperature={self.temperature}; use rollout.acceptance=coupled"
            )
        control = self.control_config()
        if control is not None and not self._same_tokens and len(control.arms) > 1:
            raise ValueError(
                f"with rollout.acceptance={self.acceptance} the tokens depend on the strategy, and "
                f"rollout.control (controller={control.controller}, of "
                f"{', '.join(map(str, control.arms))}) "
                "would choose it by time or load: what is learned would depend on the clock. Use "
                "rollout.acceptance=coupled, or rollout.control.controller=static without "
                "bs_threshold"
            )

    @property
    def by_the_clock(self) -> bool:
        """Whether the last bits of log-probabilities depend on time.

        They do if the batch or strategy in which a token is sampled depends on it.
        """
        control = self.control_config()
        several = self.replicas > 1 or (control is not None and len(control.arms) > 1)
        return several and not self.invariant

    @property
    def may_change(self) -> tuple[str, ...]:
        """Settings that a resumed run may change without changing the result of training."""
        if not self.invariant:
            return ("telemetry", "exact_mode", *PLACEMENT, *ENGINE_SETTINGS)
        # Bits are those of one program: what it is compiled for must stay.
        fixed = ("order", "exact_mode")
        return (*fixed, "replicas") if self.own_devices else fixed

    @property
    def in_flight(self) -> int:
        """The number of groups that a step starts with, carried ones included."""
        return round(self.prompts * self.over_sample)

    @property
    def own_devices(self) -> bool:
        """Whether rollouts have devices other than those of `mesh`."""
        return self.replicas * self.tp > 1

    def engine_config(self) -> EngineConfig:
        """The settings of the engine.

        Raises:
          ValueError: a value is not valid.
        """
        try:
            return EngineConfig(**{name: getattr(self, name) for name in ENGINE_SETTINGS})
        except ValueError as error:
            raise ValueError(f"rollout.{error}") from error


# The names of the library's settings in this configuration, for messages.
SPELL = dotted(
    {field.name: "rollout" for field in fields(RolloutSection)} | sections_of(RolloutSection)
)


def with_draft_key(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings in a checkpoint with what drafts in one key.

    Versions before it had `rollout.source`, `rollout.head` and `rollout.draft_model`.
    """
    if "source" not in saved.get("rollout", {}):
        return dict(saved)
    rollout = dict(saved["rollout"])
    source, head, model = (rollout.pop(name) for name in ("source", "head", "draft_model"))
    named = {"head": head, "model": model}.get(source, source)
    rollout["draft"] = named if source in ("head", "model") or not model else f"{source}:{model}"
    return {**saved, "rollout": rollout}
