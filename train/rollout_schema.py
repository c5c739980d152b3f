"""The `rollout` section of `train.rl`'s configuration."""

from __future__ import annotations

from dataclasses import dataclass

from specjax.config import Strategy
from specjax.config.dtype import AUTO, ENGINE_DTYPES
from specjax.config.sampling import Sampling
from specjax.control.config import Speculation
from specjax.engine.settings import EngineConfig, strategies_of
from specjax.settings import option, part
from specjax.weights.matrix import is_exact

# Settings other than the temperature that change the distribution.
FILTERS = ("top_k", "top_p", "min_p")  # without effect at temperature 0
PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")
TRANSFORMS = (*FILTERS, *PENALTIES, "logit_bias", "min_tokens")
# Settings that change where and when rollouts run, and no token.
PLACEMENT = ("replicas", "tp", "max_batch", "scan_layers")
ENGINE_SETTINGS = (
    "page_size", "cache_bytes", "chunk_tokens", "stretch", "prefill_chunk", "order", "products",
    "enforce_eager",
)  # fmt: skip


@dataclass(frozen=True)
class SamplingSection(Sampling):
    """How all samples of a program are drawn.

    Attributes:
      max_tokens: response tokens at most.
      stop: strings that end a response; it is trained on with the tokens of the string, and the
        reward sees the text before it.
      include_stop_str_in_output: the reward sees the stop string, too.
    """

    max_tokens: int = 512

    @property
    def draws(self) -> bool:
        """A temperature above 0, at which more than the most likely token may be drawn."""
        return self.temperature > 0

    @property
    def stops(self) -> bool:
        """A string in `stop`."""
        return bool(self.stop)

    @property
    def transforms(self) -> list[str]:
        """A transform beside the temperature, such as rollout.top_p."""
        names = [name for name in TRANSFORMS if self.draws or name not in FILTERS]
        changed = [name for name in names if getattr(self, name) != getattr(_NEUTRAL, name)]
        return [name for name in changed if name != "top_k" or self.top_k > 0]


_NEUTRAL = Sampling()


@dataclass(frozen=True)
class RolloutSection(SamplingSection, Speculation, EngineConfig):
    """How rollouts are generated: how they sample, how they speculate, and on which devices.

    Attributes:
      prompts: prompts per step P.
      n: samples per prompt G.
      over_sample: prompts * over_sample groups are started, and the step ends when `prompts` of
        them are certain to be the shortest in tokens.
      partial: the next step goes on with groups that are left (better with over_sample < 2, see
        train.rollout.groups); otherwise they are dropped.
      max_staleness: steps since the oldest token of a carried group at most; older groups are
        dropped.
      max_prompt_tokens: prompt tokens at most; data.overlong_prompts says what becomes of longer
        prompts.
      max_batch: slots that run at once, on each replica.
      replicas: engines that share the samples, each with devices, weights and caches of its own.
      tp: devices of each replica; with 1 replica of 1 device rollouts run on the devices of `mesh`.
      dtype: dtype of weights and arithmetic in rollouts and evaluation, cast when new weights come;
        auto: dtype.compute.
      scan_layers: scan over the layers while decoding, on one device or a mesh: compiles faster,
        decodes slower.
    """

    prompts: int = option(16, least=1)
    n: int = option(8, least=1)
    over_sample: float = option(1.0, least=1)
    partial: bool = False
    max_staleness: int = option(4, least=1, needs="partial")
    max_prompt_tokens: int = option(512, least=1)
    max_batch: int = option(32, least=1)
    replicas: int = option(1, least=1)
    tp: int = option(1, least=1)
    dtype: str = option(AUTO, choices=ENGINE_DTYPES)
    scan_layers: bool = False
    # Log-probabilities enter the loss, and must not depend on when a program is compiled.
    stand_in: bool = option(False, internal=True)

    def __post_init__(self):
        Sampling.__post_init__(self)
        Speculation.__post_init__(self)
        EngineConfig.__post_init__(self)
        if self.draft == "ngram" and self.ngram_siblings and not self.by_token:
            raise ValueError(
                f"ngram_siblings with rollout.acceptance={self.acceptance}: tokens would depend on "
                "the samples that share a batch, and no run could be repeated; set "
                "rollout.ngram_siblings=false, or rollout.acceptance=coupled"
            )
        if self.partial and self.in_flight == self.prompts:
            raise ValueError(
                "partial carries the groups that over-sampling leaves, and with rollout.prompts="
                f"{self.prompts} and rollout.over_sample={self.over_sample} none are; raise "
                "over_sample, or set partial=false"
            )
        if self.acceptance == "greedy" and self.draws and self.speculates:
            raise ValueError(
                "acceptance=greedy takes samples of temperature 0 only, got rollout.temperature="
                f"{self.temperature}; use rollout.acceptance=coupled"
            )
        if not self.by_token and self._has_choice:
            raise ValueError(
                f"acceptance={self.acceptance} lets tokens depend on the strategy, and "
                f"rollout.control.controller={self.control.controller} would choose that by time "
                "or load: what is learned would depend on the clock. Use rollout.acceptance="
                "coupled, or rollout.control.controller=static without bs_threshold"
            )

    @property
    def speculates(self) -> bool:
        """Speculation, which rollout.strategy=off and draft.mode=none turn off."""
        return not self.is_off

    @property
    def strategies(self) -> list[Strategy]:
        """The strategies that rollouts may use; `off` drafts nothing."""
        spec = self.spec()
        return strategies_of(spec, self.control_config()) or [spec.resolve()]

    @property
    def plain_by(self) -> str:
        """The setting that turns speculation off, as the user types it."""
        return f"rollout.strategy={self.own_strategy}"

    @property
    def _has_choice(self) -> bool:
        control = self.control_config()
        return control is not None and len(control.arms) > 1

    @property
    def by_the_clock(self) -> bool:
        """Whether the last bits of log-probabilities depend on time.

        They do if the batch or strategy in which a token is sampled depends on it.
        """
        return (self.replicas > 1 or self._has_choice) and not self.invariant

    @property
    def may_change(self) -> tuple[str, ...]:
        """Settings that a resumed run may change without changing the result of training."""
        if not self.invariant:
            names = ("telemetry", "exact_mode", *PLACEMENT, *ENGINE_SETTINGS)
            return tuple(name for name in names if name != "products" or is_exact(self.products))
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
        """The settings of the engine."""
        return part(EngineConfig, self)


SECTIONS = {"rollout": RolloutSection}  # of the keys that messages of the library begin with
