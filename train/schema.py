"""The configuration of `train.sft` and `train.rl`: every key, its type, default and meaning."""

from __future__ import annotations

import datetime
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from specjax.config import ModelConfig, RunConfig
from specjax.config.dtype import AUTO, about_dtype, resolve_dtype
from specjax.config.model import REMAT_POLICIES
from specjax.config.sampling import SEED_RANGE, is_seed
from specjax.kernels.names import ATTENTION, ATTENTION_DOC
from specjax.models.families.dense import dense_config
from specjax.parallel.distributed import DistributedConfig
from specjax.parallel.sharding import MeshConfig
from specjax.schema import Needs, at_least, option
from specjax.spelling import Spell
from train.eval_schema import EvalSection, asked_sets
from train.foreign_names import FOREIGN_NAMES
from train.heads.training import MOST_STEPS, DraftConfig
from train.loss.algo import DEFAULT, algo_section, with_objective, with_preset
from train.loss.optim import OptimConfig, SFTOptimConfig
from train.registry import REWARDS, TASKS
from train.rewards.builtin import THINKS_FIRST
from train.rewards.scoring import labels_of
from train.rollout_schema import PENALTIES, SPELL, RolloutSection, SamplingSection
from train.rules import RL_ABSENT_KEYS, RL_RULES, SFT_ABSENT_KEYS, SFT_RULES


@dataclass
class ModelSection:
    """Shape of a policy trained from nothing (Qwen3 architecture), and of a new draft head."""

    hidden_size: int = option(192, "model width D")
    intermediate_size: int = option(640, "feed-forward width F")
    num_layers: int = option(12, "decoder layers L")
    num_heads: int = option(6, "query heads N")
    num_kv_heads: int = option(2, "key/value heads K")
    head_dim: int = option(32, "head size H")
    rope_theta: float = option(10000.0, "RoPE base", least=1)
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
        return dense_config(
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
            run=RunConfig(param_dtype=dtypes.params, compute_dtype=dtypes.compute),
        )


@dataclass
class DtypeSection:
    """Storage and arithmetic; softmax, norms and logits are always float32."""

    params: str = option("float32", "dtype of parameters", choices=("float32", "bfloat16"))
    compute: str = option(
        AUTO,
        "dtype of arithmetic, in rollouts as well; auto: the checkpoint's on GPU and TPU "
        "(bfloat16 for one in float16), float32 on CPU",
        choices=(AUTO, "float32", "bfloat16"),
    )

    def settle(self, stored: str, platform: str) -> str:
        """Fills in `compute` if it is auto, and returns the line about dtypes at start.

        Args:
          stored: dtype of the checkpoint.
          platform: platform of the devices that train.
        """
        asked, self.compute = self.compute, resolve_dtype(self.compute, stored, platform)
        said = about_dtype(asked, self.compute, stored, f"dtype.compute={stored}")
        if self.compute == "float16":
            self.compute = "bfloat16"
            said = (
                "arithmetic in bfloat16, because gradients in the checkpoint's float16 would vanish"
            )
        return f"parameters in {self.params}; {said}"


SUMS, REASONING_GYM = GENERATED = "sums", "reasoning_gym"  # tasks that are generated


@dataclass
class DataConfig:
    """Origin and layout of problems and demonstrations.

    Attributes:
      prompt_key: column of the prompt, text or messages, where rows have a layout of their own.
      answer_key: column of the gold answer; a name with dots leads into mappings.
      seed: seed of generated problems and demonstrations, and of the order of training.
      prompt_template: format string with `{question}` for prompts that are text; None takes the
        task's own, or the question alone where a chat template is applied.
      chat: whether a prompt that is text becomes one message of the user: auto, when the tokenizer
        has a chat template; on; off. Conversations always go through the template.
      chat_template_kwargs: given to the chat template, such as {enable_thinking: false}.
      date: date that chat templates write, as YYYY-MM-DD; null: that of the run's first start, UTC.
      overlong_prompts: treatment of prompts of more than rollout.max_prompt_tokens tokens: auto,
        drop, and an error at start if they are more than a tenth; drop, however many they are
        (verl: filter_overlong_prompts); truncate (on the left, as verl's truncation=left); error.
        In train.sft, and of data.texts, it is about demonstrations of more tokens than
        packing.row_length or the model's positions, without truncate.
      duplicates: keep, or drop rows whose prompt and answer an earlier row has.
      unwinnable: treatment of rows whose gold answer scores less than 1 by a built-in reward:
        error ends the run at start, drop skips them, keep only warns.
      strip_calculator: drop GSM8K's `<<48/2=24>>` annotations from demonstrations.
      dataset: name of a data set of reasoning-gym, with task=reasoning_gym; `seed` is its seed.
      dataset_args: further arguments of that data set, such as {max_digits: 2}.
      train_size: number of generated training problems.
      heldout_size: largest number of held-out problems.
      min_terms: smallest number of terms of a generated sum.
      max_terms: largest number of terms of a generated sum.
      max_number: largest term of a generated sum; the smallest is 1.
      slip: probability that a step of a generated demonstration is wrong.
      impatience: probability that a generated demonstration guesses the result.
    """

    task: str = option(
        "auto",
        "what rows mean: auto, by their columns (and the generated `sums` without a path); sums; "
        "reasoning_gym, which generates data.dataset; "
        f"{', '.join(TASKS.names)}; or module:attribute, a task of your own (docs/extend.md)",
    )
    path: Any = option(
        None,
        "rows to train on: a file (JSON lines, a JSON array, parquet or Arrow, each perhaps "
        "gzipped), a pattern, a directory, a folder of datasets.save_to_disk, or a list of these",
        kind=str | list[str] | None,
    )
    heldout_path: Any = option(
        None,
        "rows that are held out, likewise; null: a sixteenth of data.path, chosen by hash",
        kind=str | list[str] | None,
    )
    prompt_key: str | None = None
    answer_key: str | None = None
    dataset: str | None = None
    dataset_args: dict[str, Any] = field(default_factory=dict)
    seed: int = 0
    prompt_template: str | None = None
    chat: str = "auto"
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    date: str | None = None
    overlong_prompts: str = "auto"
    duplicates: str = "keep"
    unwinnable: str = "error"
    strip_calculator: bool = True
    train_size: int = 1_000_000
    heldout_size: int = 512
    min_terms: int = 2
    max_terms: int = 12
    max_number: int = 99
    slip: float = 0.08
    impatience: float = 0.3

    def __post_init__(self) -> None:
        try:
            check_task(self.task)
        except ValueError as error:
            raise ValueError(f"data.task: {error}") from error
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise ValueError(
                    f"data.{name} must be one of {', '.join(choices)}, got {getattr(self, name)!r}"
                )
        for name in ("path", "heldout_path"):
            paths = getattr(self, name)
            if paths is not None and (not paths or "" in paths and isinstance(paths, list)):
                raise ValueError(f"data.{name}: expected a path, or several in a list, got {paths}")
        if (self.prompt_key or self.answer_key) and self.task not in ("auto", "prompt"):
            raise ValueError(
                "data.prompt_key and data.answer_key say which columns are the prompt and the "
                f"answer, and so does data.task={self.task}; leave out one of them"
            )
        if self.task == REASONING_GYM and not self.dataset:
            raise ValueError(
                f"data.task={REASONING_GYM} needs the name of a data set of reasoning-gym; set "
                "data.dataset, such as data.dataset=basic_arithmetic"
            )
        if self.task in GENERATED and self.path:
            raise ValueError(
                f"data.task={self.task} is generated and reads no file, but data.path="
                f"{self.path} is set; leave out data.task to read the file"
            )
        if self.date is not None:
            try:
                datetime.date.fromisoformat(self.date)
            except ValueError as error:
                raise ValueError(f"data.date: expected YYYY-MM-DD, got {self.date!r}") from error
        for name in ("slip", "impatience"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"data.{name} is a probability, got {getattr(self, name)}")
        if not 2 <= self.min_terms <= self.max_terms:
            raise ValueError(
                "expected 2 <= data.min_terms <= data.max_terms, "
                f"got {self.min_terms} and {self.max_terms}"
            )
        if self.max_number < 9 or self.seed < 0 or self.train_size < 1 or self.heldout_size < 1:
            raise ValueError(
                "expected data.max_number >= 9, data.seed >= 0 and sizes >= 1, got "
                f"{self.max_number}, {self.seed}, {self.train_size}, {self.heldout_size}"
            )
        if self.prompt_template is not None:
            fill_template(self.prompt_template, "")

    @property
    def named(self) -> str:
        """The path, or the paths, for messages."""
        return self.path if isinstance(self.path, str) else ", ".join(self.path or ())

    def require_path(self) -> None:
        """Raises ValueError if the task reads a file and `path` is not set."""
        if self.task not in ("auto", *GENERATED) and not self.path:
            raise ValueError(f"task {self.task} reads a file: set data.path=/path/to/train.jsonl")


_CHOICES = {
    "chat": ("auto", "on", "off"),
    "overlong_prompts": ("auto", "drop", "truncate", "error"),
    "duplicates": ("keep", "drop"),
    "unwinnable": ("error", "drop", "keep"),
}


def check_task(name: str) -> None:
    """Raises ValueError unless a name can be `data.task`; imports nothing."""
    if name in ("auto", *GENERATED):
        return
    try:
        TASKS.check(name)
    except ValueError as error:
        raise ValueError(f"{error}; or auto, {', or '.join(GENERATED)}") from error


def fill_template(template: str, question: str) -> str:
    """The prompt for a question.

    Raises:
      ValueError: the template has no `{question}`, or other fields.
    """
    try:
        if "{question}" not in template:
            raise KeyError("question")
        return template.format(question=question)
    except (KeyError, IndexError, ValueError) as error:
        raise ValueError(
            "data.prompt_template must be a format string whose only field is {question} "
            f"(literal braces doubled), got {template!r}"
        ) from error


MOST_POSITIONS = 4096  # of a micro-batch on each device, where steps decide its rows


@dataclass
class PackingSection:
    """Packed micro-batches: R rows of S tokens."""

    row_length: int | None = option(
        None,
        "tokens per row S; no sample may be longer; null: 256, or for longer rollouts the "
        "smallest multiple of 128 with room for one",
    )
    rows: int | None = option(
        None,
        "rows per micro-batch R; null: as many as a step fills, in micro-batches of at most three "
        f"sizes, the largest of {MOST_POSITIONS} tokens per device",
        least=1,
    )

    def __post_init__(self):
        if self.row_length is not None:
            at_least("packing", self, row_length=1)

    def sizes(self, mesh: MeshConfig) -> tuple[int, ...]:
        """The numbers of rows that a micro-batch may have, the largest first.

        With `rows` null they are multiples of the devices that rows are split over: 16, 4 and 1
        times as many, and fewer where so many rows have more than `MOST_POSITIONS` tokens.
        `row_length` must be settled.
        """
        if self.rows is not None:
            return (self.rows,)
        most = min(16, max(1, MOST_POSITIONS // self.row_length))
        times = dict.fromkeys((most, max(1, most // 4), 1))
        return tuple(mesh.row_devices * each for each in times)

    def settle(self, longest: int, multiple: int) -> None:
        """Fills in `row_length` if it is null.

        Args:
          longest: largest number of tokens of a sample.
          multiple: number that has to divide the row length.
        """
        if self.row_length is None:
            step = math.lcm(128, multiple)
            self.row_length = math.ceil(max(256, longest) / step) * step


@dataclass
class SFTPackingSection(PackingSection):
    """An update of `train.sft` has a fixed number of micro-batches (RL: what samples fill)."""

    row_length: int | None = option(
        None,
        "tokens per row S; longer demonstrations, and those of more tokens than the model has "
        "positions, are passed over; null: 1024, or the next length that the mesh can split",
    )
    rows: int = option(4, "rows per micro-batch R", least=1)
    microbatches: int = option(2, "micro-batches per update A (gradient accumulation)")

    def __post_init__(self):
        super().__post_init__()
        at_least("packing", self, microbatches=1)


@dataclass
class CheckpointSection:
    """Orbax checkpoints under `<out>/checkpoints`."""

    every: int = option(10, "steps between checkpoints; 0 saves only at the end")
    keep_last: int = option(2, "checkpoints kept")

    def __post_init__(self):
        at_least("checkpoint", self, every=0, keep_last=1)


@dataclass
class RLCheckpointSection(CheckpointSection):
    """Checkpoints of `train.rl`."""

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
    live: bool = option(
        True,
        "in a terminal, show a table that is updated during the run; false: one line per step, as "
        "when the output is no terminal",
    )


@dataclass
class RLLogSection(LogSection):
    samples: int = option(
        4,
        "samples of each step and of each evaluation that are written to <out>/samples.jsonl; 0: "
        "none",
        least=0,
    )


CHUNK_DOC = (
    "tokens per device whose logits exist at once (or as many logits, of all tokens and a part of "
    "the vocabulary); null: as many as take 128 MB in float32 (512 MB on GPUs), or 512"
)


@dataclass
class SFTConfig:
    """`python -m train.sft`: trains policy and head on demonstrations."""

    rules: ClassVar[tuple[Needs, ...]] = SFT_RULES
    absent_keys: ClassVar[Mapping[str, str]] = SFT_ABSENT_KEYS
    aliases: ClassVar[dict[str, str]] = {"model": "init"}  # as `train.rl` calls it

    out: str = option("runs/sft", "directory of the run")
    init: str | None = option(
        None, "Hugging Face directory or id to start from (also --model MODEL); none: from nothing"
    )
    revision: str | None = option(None, "branch, tag or commit of a Hugging Face id")
    family: str | None = option(
        None,
        "a model family of your own, module:attribute, for checkpoints of its model_type; those of "
        "the package need no setting",
    )
    seed: int = option(0, "decides initial weights")
    steps: int = option(1000, "updates of the policy")
    draft_steps: int = option(
        300,
        "updates of the head afterwards, on the final policy's states; none if draft.mode is none "
        "or frozen",
    )
    vocab_size: int = option(512, "BPE vocabulary at most, when starting from nothing")
    tokenizer_texts: int = option(5000, "demonstrations that the tokenizer is trained on")
    loss_on: str = option("response", "tokens in the loss", choices=("response", "all"))
    log_every: int = option(1, "steps between records")
    export_dtype: str = option(
        "bfloat16", "dtype of the exported <out>/hf", choices=("float32", "bfloat16")
    )
    model: ModelSection = option(
        ModelSection, "shape, when starting from nothing; mtp_*: also when `init` has no head"
    )
    dtype: DtypeSection = option(DtypeSection, "dtypes")
    data: DataConfig = option(DataConfig, "demonstrations")
    packing: SFTPackingSection = option(SFTPackingSection, "batches")
    optim: SFTOptimConfig = option(SFTOptimConfig, "the policy's optimizer")
    draft: DraftConfig = option(DraftConfig(unroll_steps=4), "the head's training")
    mesh: MeshConfig = option(MeshConfig, "devices per axis")
    remat: bool = option(False, "recompute activations in the backward pass")
    remat_policy: str = option(
        "save_attention",
        "what is kept of a recomputed layer: the output and log-sum-exp of attention, or nothing",
        choices=REMAT_POLICIES,
    )
    logprob_chunk_size: int | None = option(None, CHUNK_DOC, least=1)
    attention: str = option("auto", ATTENTION_DOC, choices=ATTENTION, own=True)
    checkpoint: CheckpointSection = option(CheckpointSection(every=100), "checkpoints")
    log: LogSection = option(LogSection, "what the run shows")

    def __post_init__(self):
        at_least("", self, steps=0, draft_steps=0, log_every=1, tokenizer_texts=1)
        if self.data.overlong_prompts == "truncate":
            raise ValueError(
                "data.overlong_prompts=truncate cuts the prompts of train.rl, and train.sft cuts "
                "no demonstration: raise packing.row_length, or set data.overlong_prompts=drop"
            )
        if self.revision is not None and not self.init:
            raise ValueError(
                "revision belongs to a Hugging Face id, and init names none; leave it out"
            )
        if self.family is not None and not self.init:
            raise ValueError("family is of a checkpoint, and init names none; leave it out")
        if self.draft.mode == "auto":
            self.draft.mode = "online" if self.draft.moves else "frozen"
        self.optim.settle(is_new=self.init is None)
        if self.init is None:  # else the checkpoint decides
            self.draft.optim.settle(is_new=True)
        self.draft.settle(MOST_STEPS)  # nothing drafts here
        check_short_seed("seed", self.seed)
        check_short_seed("data.seed", self.data.seed)
        self.packing.settle(1024, self.mesh.row_multiple)
        _rows_divide(self.packing, self.mesh)


Algo = algo_section(DEFAULT)


def reward_names(reward: str | list[str]) -> tuple[str, ...]:
    """The names of the rewards in the setting `reward`."""
    return (reward,) if isinstance(reward, str) else tuple(reward)


@dataclass
class RewardsSection:
    """How rewards are computed."""

    weights: list[float] | None = option(
        None, "weight of each of the rewards, which are added; null: 1 each"
    )
    workers: int | None = option(
        None,
        "processes in which rewards run; 0: this process, without a time limit; null: 0 for exact, "
        "number, choice, and format with the default pattern, else half of the processors, 8 at "
        "most",
        least=0,
    )
    timeout: float = option(
        10.0,
        "seconds that a worker may take for a completion; then it is ended and replaced, and the "
        "reward counts as failed",
    )
    pattern: str = option(
        THINKS_FIRST,
        "regular expression that the reward `format` looks for in a completion (. is any "
        "character); the default wants <think>...</think> and then an answer",
    )

    def __post_init__(self):
        if not 0 < self.timeout < math.inf:
            raise ValueError(f"rewards.timeout: expected seconds above 0, got {self.timeout:g}")
        if self.weights is not None and not all(map(math.isfinite, self.weights)):
            raise ValueError(f"rewards.weights: expected finite numbers, got {self.weights}")
        if self.weights and not any(self.weights):
            raise ValueError(
                f"rewards.weights: expected a weight other than 0, got {self.weights}: the sum "
                "would always be 0, and the policy would learn nothing"
            )
        try:
            re.compile(self.pattern)
        except re.error as error:
            raise ValueError(
                f"rewards.pattern: expected a regular expression, got {self.pattern!r}: {error}"
            ) from error


@dataclass
class RLConfig:
    """`python -m train.rl`: GRPO with speculative rollouts and an online-trained draft head."""

    spell: ClassVar[Spell] = staticmethod(SPELL)
    rules: ClassVar[tuple[Needs, ...]] = RL_RULES
    absent_keys: ClassVar[Mapping[str, str]] = RL_ABSENT_KEYS
    renamed: ClassVar[dict[str, str]] = {
        "algo.max_resample": "algo.max_num_gen_batches",
        **FOREIGN_NAMES,
    }
    # `algo=dapo` is short for a preset; `algo={...}` is the section.
    aliases: ClassVar[dict[str, str]] = {"algo": "algo.preset"}
    variants: ClassVar = (("algo.preset", with_preset), ("algo.objective", with_objective))

    model: str = option("assets/sums", "Hugging Face directory or id of the policy (and head)")
    revision: str | None = option(None, "branch, tag or commit of a Hugging Face id")
    family: str | None = option(
        None,
        "a model family of your own, module:attribute, for checkpoints of its model_type; those of "
        "the package need no setting",
    )
    out: str = option("runs/rl", "directory of the run")
    seed: int = option(0, "run seed: with step and prompt it keys every token")
    steps: int = option(100, "RL steps")
    reward: Any = option(
        "auto",
        f"{', '.join(REWARDS.names)}, or module:function, or a list of these, which are added; "
        "auto: what suits the rows of data",
        kind=str | list[str],
    )
    rewards: RewardsSection = option(RewardsSection, "weights, processes and options of rewards")
    max_failed_rewards: float = option(
        0.5,
        "largest share of a step's rewards that may fail (raise, or return no finite number): they "
        "count as 0; where more do, the run ends, and can be resumed",
    )
    data: DataConfig = option(DataConfig, "problems")
    rollout: RolloutSection = option(RolloutSection, "rollouts")
    algo: Algo = option(Algo, "what the policy is trained on")
    optim: OptimConfig = option(OptimConfig, "the policy's optimizer")
    draft: DraftConfig = option(DraftConfig(unroll_steps=None), "the draft head")
    packing: PackingSection = option(PackingSection, "training batches")
    eval: EvalSection = option(EvalSection, "evaluation")
    dtype: DtypeSection = option(DtypeSection, "dtypes")
    mesh: MeshConfig = option(MeshConfig, "devices per axis")
    remat: bool = option(False, "recompute activations in the backward pass")
    remat_policy: str = option(
        "save_attention",
        "what is kept of a recomputed layer: the output and log-sum-exp of attention, or nothing",
        choices=REMAT_POLICIES,
    )
    logprob_chunk_size: int | None = option(None, CHUNK_DOC, least=1)
    attention: str = option("auto", ATTENTION_DOC, choices=ATTENTION, own=True)
    deterministic: bool = option(
        False,
        "on a GPU, run the same algorithms in every process, and none that adds by atomics: a run "
        "and its repetitions, --resume included, then have the same bits",
    )
    checkpoint: RLCheckpointSection = option(RLCheckpointSection, "checkpoints")
    log: RLLogSection = option(RLLogSection, "what the run shows")
    distributed: DistributedConfig = option(DistributedConfig, "the processes of the job")

    def __post_init__(self):
        at_least("", self, steps=1)
        names = reward_names(self.reward)
        if not names or len(set(names)) < len(names):
            raise ValueError(f"reward: expected one or several different rewards, got {names}")
        for name in names:
            if name != "auto" or len(names) > 1:
                REWARDS.check(name)
        self.algo.filter_groups.check(() if names == ("auto",) else labels_of(names))
        least = getattr(self.algo.build(), "least_samples", 2)
        if self.rollout.n < least:
            raise ValueError(
                f"rollout.n: expected at least {least}, got {self.rollout.n}: "
                f"algo.objective={self.algo.objective} compares the samples of a prompt (an "
                "objective of your own that does not has the attribute least_samples = 1)"
            )
        if self.rewards.weights is not None and len(self.rewards.weights) != len(names):
            raise ValueError(
                f"rewards.weights: expected {len(names)} numbers, one for each of "
                f"reward={', '.join(names)}, got {self.rewards.weights}"
            )
        # A held-out problem adds its number to the seed.
        for key, seed, last in (
            ("seed", self.seed, self.seed),
            ("eval.seed", self.eval.seed, self.eval.seed + self.eval.problems),
        ):
            if not (is_seed(seed) and is_seed(last)):
                raise ValueError(f"{key}: expected {SEED_RANGE}, got {seed}")
        check_short_seed("data.seed", self.data.seed)
        if not 0 <= self.max_failed_rewards <= 1:
            raise ValueError(
                "max_failed_rewards: expected a share between 0 and 1, got "
                f"{self.max_failed_rewards}"
            )
        longest = self.rollout.max_prompt_tokens + self.rollout.max_tokens
        self.packing.settle(longest, self.mesh.row_multiple)
        self.algo.settle(self.rollout.max_tokens)
        _rows_divide(self.packing, self.mesh)
        for asked in asked_sets(self.eval, self.rollout):
            asked.check()
        self._settle_draft_mode()
        self.draft.settle(max(strategy.steps for strategy in self.rollout.strategies))
        self.draft.optim.settle(is_new=self.rollout.draft == "random")
        if self.rollout.draft == "ngram" and self.draft.mode == "online":
            raise ValueError(
                "draft.mode=online trains the draft head, and with rollout.draft=ngram nothing "
                "drafts with it; leave out draft.mode, or set rollout.draft=checkpoint"
            )
        if self.algo.logprobs == "processed" and self.mesh.cp > 1:
            for name in PENALTIES:
                if getattr(self.rollout, name) != getattr(SamplingSection, name):
                    raise ValueError(
                        f"algo.logprobs=processed with rollout.{name} counts the tokens before "
                        f"each one, and mesh.cp={self.mesh.cp} splits them over devices; set "
                        "mesh.cp=1, or algo.logprobs=temperature"
                    )
        if longest > self.packing.row_length:
            raise ValueError(
                "a sample of rollout.max_prompt_tokens + rollout.max_tokens = "
                f"{longest} tokens must fit a row, got packing.row_length={self.packing.row_length}"
            )
        _check_spot(self)

    def _settle_draft_mode(self) -> None:
        """Settles `draft.mode=auto` if the draft source is known (else `settle_drafting` does)."""
        if self.draft.mode != "auto":
            return
        if self.rollout.spec().is_off:
            self.draft.mode = "none"
        elif self.rollout.draft in ("checkpoint", "random"):
            self.draft.mode = "online" if self.draft.moves else "frozen"
        elif self.rollout.draft == "ngram":
            self.draft.mode = "frozen"

    @property
    def row_sizes(self) -> tuple[int, ...]:
        """The numbers of rows that a micro-batch may have, see `PackingSection.sizes`."""
        return self.packing.sizes(self.mesh)

    @property
    def rollout_devices(self) -> int:
        """The number of devices that rollouts run on."""
        roll = self.rollout
        return roll.replicas * roll.tp if roll.own_devices else self.mesh.size


def check_short_seed(key: str, seed: int) -> None:
    """Refuses a seed of more than 32 bits, which jax would cut off."""
    if not 0 <= seed < 1 << 32:
        raise ValueError(f"{key}: expected an integer of 32 bits, 0 to {(1 << 32) - 1}, got {seed}")


def _rows_divide(packing: PackingSection, mesh: MeshConfig) -> None:
    if packing.rows is not None and packing.rows % mesh.row_devices:
        raise ValueError(
            f"packing.rows must be a multiple of mesh.data * mesh.fsdp = {mesh.row_devices}, got "
            f"{packing.rows}"
        )
    if packing.row_length % mesh.row_multiple:
        why = []
        if mesh.cp > 1:
            why.append(f"mesh.cp={mesh.cp} cuts rows into chunks in {mesh.cp_order} order")
        if mesh.sequence_parallel:
            why.append(f"mesh.sequence_parallel splits tokens over mesh.tp={mesh.tp}")
        raise ValueError(
            f"packing.row_length must be a multiple of {mesh.row_multiple}, for "
            f"{' and '.join(why)}, got {packing.row_length}"
        )


def _check_spot(cfg: RLConfig) -> None:
    """Refuses settings with which spot training cannot train a head."""
    spot, positions = cfg.draft.spot, max(cfg.row_sizes) * cfg.packing.row_length
    if not spot.enabled:
        return
    trained = cfg.draft.mode in ("auto", "online") and cfg.draft.moves
    if not trained or cfg.rollout.spec().is_off:
        raise ValueError(
            f"draft.spot.enabled trains the draft head, and with draft.mode={cfg.draft.mode}, "
            f"draft.mtp_loss_scaling_factor={cfg.draft.mtp_loss_scaling_factor:g} and "
            f"{cfg.rollout.plain_by} there is none to train; set "
            "draft.mode=online, a factor above 0 and a strategy, or draft.spot.enabled=false"
        )
    if spot.gaps and cfg.rollout.replicas == 1:
        raise ValueError(
            "draft.spot trains the head on replicas that are idle while others run, and with "
            "rollout.replicas=1 there is no other replica. Raise rollout.replicas, set "
            "draft.spot.enabled=false, or draft.spot.gaps=false "
            "for the same schedule without gaps"
        )
    spot.settle(max(1, cfg.draft.max_microbatches) * positions)
    if spot.buffer_tokens < positions:
        raise ValueError(
            f"draft.spot.buffer_tokens: expected room for a micro-batch of {max(cfg.row_sizes)} "
            f"rows * packing.row_length = {positions} positions, got {spot.buffer_tokens}"
        )


def as_run(cfg: RLConfig | SFTConfig) -> dict:
    """Returns the fields of `RunConfig` with which a run trains; its dtypes must be settled."""
    return {
        "compute_dtype": cfg.dtype.compute,
        "remat": cfg.remat,
        "remat_policy": cfg.remat_policy,
        "sequence_parallel": cfg.mesh.sequence_parallel,
    }
