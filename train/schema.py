"""The configuration of `train.sft` and `train.rl`: every key, its type, default and meaning."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

from specjax.config import ModelConfig, SamplingParams, SpecConfig
from specjax.config.spec import DRAFT_SOURCES
from specjax.control import OFF, ControlConfig, FastRLSettings, read_fastrl
from specjax.control.config import CONTROLLERS, DEFAULT_STRATEGIES
from specjax.engine.engine import EngineConfig
from specjax.sharding import MeshConfig
from train.config import option
from train.data import DataConfig
from train.draft import DraftConfig
from train.grpo import GRPOConfig
from train.optim import OptimConfig
from train.spot import check_spot


@dataclass
class ModelSection:
    """Shape of a policy trained from nothing (Qwen3 architecture), and of a new draft head."""

    hidden_size: int = option(192, "model width D")
    intermediate_size: int = option(640, "feed-forward width F")
    num_layers: int = option(12, "decoder layers L")
    num_heads: int = option(6, "query heads N")
    num_kv_heads: int = option(2, "key/value heads K")
    head_dim: int = option(32, "head size H")
    rope_theta: float = option(10000.0, "RoPE base")
    max_position: int = option(1024, "longest sequence, tokens")
    mtp_num_layers: int = option(1, "modules of the draft head")
    mtp_concat: str = option(
        "embedding_first",
        "order of the halves of the head's input",
        choices=("embedding_first", "hidden_first"),
    )
    mtp_target_hidden: str = option(
        "post_norm",
        "the policy's state given to the head: after or before the final norm",
        choices=("post_norm", "pre_norm"),
    )
    mtp_recycle: str = option(
        "post_norm",
        "the head's own state given to its next step: after or before its final norm",
        choices=("post_norm", "pre_norm"),
    )

    def head_switches(self) -> dict[str, int | str]:
        """The fields of `ModelConfig` that describe the head."""
        names = ("mtp_num_layers", "mtp_concat", "mtp_target_hidden", "mtp_recycle")
        return {name: getattr(self, name) for name in names}

    def build(self, vocab_size: int, eos: int, pad: int, dtypes: DtypeSection) -> ModelConfig:
        return ModelConfig(
            vocab_size=vocab_size,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            rope_theta=self.rope_theta,
            max_position=self.max_position,
            **self.head_switches(),
            eos_token_ids=(eos,),
            pad_token_id=pad,
            param_dtype=dtypes.params,
            compute_dtype=dtypes.compute,
        )


@dataclass
class DtypeSection:
    """Storage and arithmetic; softmax, norms and logits are always float32."""

    params: str = option("float32", "dtype of parameters", choices=("float32", "bfloat16"))
    compute: str = option("float32", "dtype of arithmetic", choices=("float32", "bfloat16"))


@dataclass
class PackingSection:
    """Packed micro-batches: R rows of S tokens."""

    row_length: int = option(256, "tokens per row S; no sample may be longer")
    rows: int = option(16, "rows per micro-batch R")

    def __post_init__(self):
        _at_least("packing", self, row_length=1, rows=1)


@dataclass
class SFTPackingSection(PackingSection):
    """An update of `train.sft` has a fixed number of micro-batches (RL: what samples fill)."""

    microbatches: int = option(2, "micro-batches per update A (gradient accumulation)")

    def __post_init__(self):
        super().__post_init__()
        _at_least("packing", self, microbatches=1)


@dataclass
class CheckpointSection:
    """Orbax checkpoints under `<out>/checkpoints`."""

    every: int = option(10, "steps between checkpoints; 0 saves only at the end")
    keep_last: int = option(2, "checkpoints kept")

    def __post_init__(self):
        _at_least("checkpoint", self, every=0, keep_last=1)


@dataclass
class RLCheckpointSection(CheckpointSection):
    """What `train.rl` writes besides."""

    export: bool = option(True, "write a Hugging Face directory <out>/hf at the end")
    draft_only: bool = option(
        False,
        "also save the head alone, without embedding and lm_head, asynchronously, under "
        "<out>/draft/<step>",
    )


@dataclass
class LogSection:
    tensorboard: bool = option(False, "also write TensorBoard event files")
    wandb: bool = option(False, "also log to Weights & Biases")


@dataclass
class SFTConfig:
    """`python -m train.sft`: trains policy and head on demonstrations."""

    out: str = option("runs/sft", "directory of the run")
    init: str | None = option(None, "Hugging Face directory to start from; none: from nothing")
    seed: int = option(0, "decides initial weights")
    steps: int = option(1000, "updates of the policy")
    draft_steps: int = option(
        300,
        "updates of the head afterwards, on the final policy's states; none unless draft.mode is "
        "online",
    )
    vocab_size: int = option(512, "BPE vocabulary at most, when starting from nothing")
    tokenizer_texts: int = option(5000, "demonstrations that the tokenizer is trained on")
    loss_on: str = option("response", "tokens in the loss", choices=("response", "all"))
    log_every: int = option(20, "steps between records")
    export_dtype: str = option(
        "bfloat16", "dtype of the exported <out>/hf", choices=("float32", "bfloat16")
    )
    model: ModelSection = option(
        ModelSection, "shape, when starting from nothing; mtp_*: also when `init` has no head"
    )
    dtype: DtypeSection = option(DtypeSection, "dtypes")
    data: DataConfig = option(DataConfig, "demonstrations")
    packing: SFTPackingSection = option(SFTPackingSection, "batches")
    optim: OptimConfig = option(OptimConfig, "the policy's optimizer")
    draft: DraftConfig = option(DraftConfig(loss="soft_ce", unroll_steps=4), "the head's training")
    mesh: MeshConfig = option(MeshConfig, "devices per axis")
    remat: bool = option(False, "recompute activations in the backward pass")
    checkpoint: CheckpointSection = option(CheckpointSection, "checkpoints")
    log: LogSection = option(LogSection, "further sinks")

    def __post_init__(self):
        _at_least("", self, steps=0, draft_steps=0, log_every=1, tokenizer_texts=1)
        _rows_divide(self.packing, self.mesh)


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
PLACEMENT = ("replicas", "tp")
ENGINE_SETTINGS = ("page_size", "cache_bytes", "chunk_tokens", "prefill_chunk", "order")


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
    max_prompt_tokens: int = option(64, "prompts that are longer are passed over")
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
    chunk_tokens: int = option(32, "tokens per slot between two looks of the host at most")
    prefill_chunk: int = option(512, "prompt tokens that are read at a time")
    scan_layers: bool = option(
        False, "scan over layers while decoding: short compile, slower on CPU"
    )
    strategy: str = option("4_1_5", "what a round drafts; off: no speculation")
    acceptance: str = option(
        "coupled", "acceptance mode", choices=("coupled", "block", "recursive")
    )
    source: str = option(
        "head",
        "what drafts: the head; model: a smaller one (draft_model); ngram: what followed the last "
        "tokens earlier",
        choices=DRAFT_SOURCES,
    )
    head: str = option(
        "checkpoint", "the head to start from: checkpoint (the policy's own), random, or a path"
    )
    draft_model: str | None = option(
        None, "Hugging Face directory of the draft model; implies source=model"
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
        None, "chooses the strategy while running; null: always rollout.strategy"
    )

    def __post_init__(self):
        _at_least("rollout", self, prompts=1, n=2, max_prompt_tokens=1, max_batch=1)
        _at_least("rollout", self, max_staleness=1, replicas=1, tp=1)
        if not 1 <= self.over_sample < math.inf:
            raise ValueError(
                f"rollout.over_sample: expected a finite number of at least 1, got "
                f"{self.over_sample}"
            )
        SamplingParams(self.temperature, self.max_tokens)
        self.source = self.spec().source  # a draft model implies it
        self.engine_config()
        if self.partial and self.in_air == self.prompts:
            raise ValueError(
                "rollout.partial carries the groups that over-sampling leaves, and with "
                f"rollout.prompts={self.prompts} and rollout.over_sample={self.over_sample} none "
                "are; raise over_sample, or set partial=false"
            )
        if self.control is not None:
            self._check_control(self.control)

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


@dataclass
class AlgoSection(GRPOConfig):
    """GRPO, and how many updates a rollout feeds.

    Attributes:
      updates_per_rollout: policy updates that the samples of a step are divided among.
      dynamic_sampling: train only on groups whose rewards differ (DAPO, arXiv 2503.14476).
      max_resample: times that a step samples at most, with new problems for the groups dropped.
    """

    updates_per_rollout: int = 1
    dynamic_sampling: bool = True
    max_resample: int = 1

    def __post_init__(self):
        super().__post_init__()
        _at_least("algo", self, updates_per_rollout=1, max_resample=1)


@dataclass
class EvalSection:
    """Held-out reward, sampled at the rollout's temperature."""

    problems: int = option(512, "held-out problems; 0 is no evaluation")
    every: int = option(0, "steps between evaluations; 0: only at start and end")
    max_batch: int = option(64, "slots that run at once")
    seed: int = option(1234, "seed of the samples, the same at every evaluation")

    def __post_init__(self):
        _at_least("eval", self, problems=0, every=0, max_batch=1)


@dataclass
class RLConfig:
    """`python -m train.rl`: GRPO with speculative rollouts and an online-trained draft head."""

    model: str = option("assets/sums", "Hugging Face directory of the policy (and head)")
    out: str = option("runs/rl", "directory of the run")
    seed: int = option(0, "run seed: with step and prompt it keys every token")
    steps: int = option(16, "RL steps")
    reward: str = option("exact", "exact, number, math_verify, or module:function")
    data: DataConfig = option(DataConfig, "problems")
    rollout: RolloutSection = option(RolloutSection, "rollouts")
    algo: AlgoSection = option(AlgoSection, "GRPO")
    optim: OptimConfig = option(OptimConfig(lr=1e-4), "the policy's optimizer")
    draft: DraftConfig = option(DraftConfig, "the draft head")
    packing: PackingSection = option(PackingSection, "training batches")
    eval: EvalSection = option(EvalSection, "held-out evaluation")
    dtype: DtypeSection = option(DtypeSection, "dtypes")
    mesh: MeshConfig = option(MeshConfig, "devices per axis")
    remat: bool = option(False, "recompute activations in the backward pass")
    checkpoint: RLCheckpointSection = option(RLCheckpointSection, "checkpoints")
    log: LogSection = option(LogSection, "further sinks")

    def __post_init__(self):
        _at_least("", self, steps=1)
        _rows_divide(self.packing, self.mesh)
        if self.rollout.source != "head" and self.draft.mode == "online":
            raise ValueError(
                "draft.mode=online trains the draft head, and with rollout.source="
                f"{self.rollout.source} nothing drafts with it; set draft.mode=frozen, or "
                "rollout.source=head"
            )
        longest = self.rollout.max_prompt_tokens + self.rollout.max_tokens
        if longest > self.packing.row_length:
            raise ValueError(
                "a sample of rollout.max_prompt_tokens + rollout.max_tokens = "
                f"{longest} tokens must fit a row, got packing.row_length={self.packing.row_length}"
            )
        check_spot(self)

    @property
    def rollout_devices(self) -> int:
        """Devices that a rollout runs on."""
        roll = self.rollout
        return roll.replicas * roll.tp if roll.own_devices else self.mesh.size


def _at_least(section: str, values, **smallest: int) -> None:
    """Checks fields of a section against the smallest value that makes sense."""
    for name, least in smallest.items():
        if getattr(values, name) < least:
            key = f"{section}.{name}" if section else name
            raise ValueError(f"{key}: expected at least {least}, got {getattr(values, name)}")


def _rows_divide(packing: PackingSection, mesh: MeshConfig) -> None:
    ways = mesh.data * mesh.fsdp
    if packing.rows % ways:
        raise ValueError(
            f"packing.rows must be a multiple of mesh.data * mesh.fsdp = {ways}, got {packing.rows}"
        )
