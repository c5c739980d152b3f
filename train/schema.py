"""The configuration of `train.sft` and `train.rl`: every key, its type, default and meaning."""

from __future__ import annotations

import dataclasses
import datetime
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from specjax.config import ModelConfig, RunConfig
from specjax.config.dtype import AUTO, about_dtype, resolve_dtype
from specjax.config.model import REMAT_POLICIES
from specjax.config.sampling import SEED_RANGE, is_seed
from specjax.kernels.names import ATTENTION
from specjax.models.families.dense import dense_config
from specjax.parallel.distributed import DistributedConfig
from specjax.parallel.sharding import MeshConfig
from specjax.settings import option
from train.eval_schema import EvalSection, asked_sets, check_weights
from train.heads.training import MOST_STEPS, DraftConfig
from train.loss.algo import AlgoSection, algo, choose_algo
from train.loss.optim import OptimConfig, SFTOptimConfig
from train.registry import ENVIRONMENTS, REWARDS, TASKS
from train.rewards.builtin import THINKS_FIRST
from train.rollout_schema import PENALTIES, RolloutSection


@dataclass
class ModelSection:
    """Shape of a policy trained from nothing (Qwen3 architecture), and of a new draft head.

    Attributes:
      hidden_size: model width D.
      intermediate_size: feed-forward width F.
      num_layers: decoder layers L.
      num_heads: query heads N.
      num_kv_heads: key/value heads K.
      head_dim: head size H.
      rope_theta: RoPE base.
      max_position: longest sequence, tokens.
      mtp_num_layers: modules of the draft head.
      mtp_concat: order of the halves of the head's input.
      mtp_target_hidden: the policy's state given to the head: after or before the final norm.
      mtp_recycle: the head's own state given to its next step: after or before its final norm.
    """

    hidden_size: int = option(192, needs="!init")
    intermediate_size: int = option(640, needs="!init")
    num_layers: int = option(12, needs="!init")
    num_heads: int = option(6, needs="!init")
    num_kv_heads: int = option(2, needs="!init")
    head_dim: int = option(32, needs="!init")
    rope_theta: float = option(10000.0, least=1, needs="!init")
    max_position: int = option(1024, needs="!init")
    mtp_num_layers: int = 1
    mtp_concat: str = option("embedding_first", choices=("embedding_first", "hidden_first"))
    mtp_target_hidden: str = option("post_norm", choices=("post_norm", "pre_norm"))
    mtp_recycle: str = option("post_norm", choices=("post_norm", "pre_norm"))

    def head_switches(self) -> dict[str, int | str]:
        """The fields of `ModelConfig` that describe the head."""
        return {name: value for name, value in vars(self).items() if name.startswith("mtp_")}

    def build(self, vocab_size: int, eos: int, pad: int, dtypes: DtypeSection) -> ModelConfig:
        return dense_config(
            vocab_size=vocab_size,
            **vars(self),
            eos_token_ids=(eos,),
            pad_token_id=pad,
            run=RunConfig(param_dtype=dtypes.params, compute_dtype=dtypes.compute),
        )


@dataclass
class DtypeSection:
    """Storage and arithmetic; softmax, norms and logits are always float32.

    Attributes:
      params: dtype of parameters.
      compute: dtype of arithmetic, in rollouts as well; auto: the checkpoint's on GPU and TPU
        (bfloat16 for one in float16), float32 on CPU.
    """

    params: str = option("float32", choices=("float32", "bfloat16"))
    compute: str = option(AUTO, choices=(AUTO, "float32", "bfloat16"))

    def settle(self, stored: str, platform: str) -> str:
        """Fills in `compute` if it is auto, and returns the line about dtypes at start.

        Args:
          stored: dtype of the checkpoint.
          platform: platform of the devices that train.
        """
        setting, self.compute = self.compute, resolve_dtype(self.compute, stored, platform)
        line = about_dtype(setting, self.compute, stored)
        if self.compute == "float16":
            self.compute = "bfloat16"
            line = "arithmetic in bfloat16, for gradients in the checkpoint's float16 would vanish"
        return f"parameters in {self.params}; {line}"


SUMS, REASONING_GYM = GENERATED = "sums", "reasoning_gym"  # tasks that are generated


@dataclass
class DataConfig:
    """Origin and layout of problems and demonstrations.

    Attributes:
      task: what rows mean: auto, by their columns (and the generated `sums` without a path); sums;
        reasoning_gym, which generates data.dataset; a name of `train.registry.TASKS` (verl, math,
        gsm8k, slime, prompt, messages); or module:attribute, a task of your own (docs/extend.md).
      path: rows to train on: a file (JSON lines, a JSON array, parquet or Arrow, each perhaps
        gzipped), a pattern, a directory, a folder of datasets.save_to_disk, or a list of these.
      heldout_path: rows that are held out, likewise; null: a sixteenth of data.path, chosen by
        hash.
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
        (verl: filter_overlong_prompts); truncate (on the left, as verl's truncation=left).
        In train.sft, and of data.texts, it is about demonstrations of more tokens than
        packing.row_length or the model's positions, without truncate.
      duplicates: keep, or drop rows whose prompt and answer an earlier row has.
      unwinnable: treatment of rows whose gold answer scores less than 1 by a built-in reward:
        error ends the run at start, keep warns.
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

    task: str = "auto"
    path: Any = option(None, kind=str | list[str] | None)
    heldout_path: Any = option(None, kind=str | list[str] | None, needs="path")
    prompt_key: str | None = option(None, needs="has_rows")
    answer_key: str | None = option(None, needs="has_rows")
    dataset: str | None = option(None, needs="task=reasoning_gym")
    dataset_args: dict[str, Any] = option({}, needs="task=reasoning_gym")
    seed: int = option(0, least=0, below=1 << 32)  # jax cuts off more than 32 bits
    prompt_template: str | None = None
    chat: str = option("auto", choices=("auto", "on", "off"))
    chat_template_kwargs: dict[str, Any] = option({})
    date: str | None = None
    overlong_prompts: str = option("auto", choices=("auto", "drop", "truncate"))
    duplicates: str = option("keep", choices=("keep", "drop"), needs="path")
    unwinnable: str = option("error", choices=("error", "keep"), needs=("path", "checks_gold"))
    train_size: int = option(1_000_000, least=1, needs="!path")
    heldout_size: int = option(512, least=1, needs="eval.any")
    min_terms: int = option(2, least=2, needs=("!path", "task=auto|sums"))
    max_terms: int = option(12, needs=("!path", "task=auto|sums"))
    max_number: int = option(99, least=9, needs=("!path", "task=auto|sums"))
    slip: float = option(0.08, least=0, needs=("!path", "task=auto|sums"))
    impatience: float = option(0.3, least=0, needs=("!path", "task=auto|sums"))

    def __post_init__(self) -> None:
        try:
            check_task(self.task)
        except ValueError as error:
            raise ValueError(f"task: {error}") from error
        for name in ("path", "heldout_path"):
            paths = getattr(self, name)
            wrong = not isinstance(paths, (str, list)) or not paths or "" in (*paths,)
            if paths is not None and wrong:
                raise ValueError(f"{name}: expected a path, or several in a list, got {paths}")
        if (self.prompt_key or self.answer_key) and self.task not in ("auto", "prompt"):
            raise ValueError(
                "prompt_key and data.answer_key say which columns are the prompt and the answer, "
                f"and so does data.task={self.task}; leave out one of them"
            )
        if self.task == REASONING_GYM and not self.dataset:
            raise ValueError(
                f"task={REASONING_GYM} needs the name of a data set of reasoning-gym; set "
                "data.dataset, such as data.dataset=basic_arithmetic"
            )
        if self.task in GENERATED and self.path:
            raise ValueError(
                f"task={self.task} is generated and reads no file, but data.path={self.path} is "
                "set; leave out data.task to read the file"
            )
        if self.date is not None:
            try:
                datetime.date.fromisoformat(self.date)
            except ValueError as error:
                raise ValueError(f"date: expected YYYY-MM-DD, got {self.date!r}") from error
        for name in ("slip", "impatience"):
            if getattr(self, name) > 1:
                raise ValueError(f"{name} is a probability, got {getattr(self, name)}")
        if self.min_terms > self.max_terms:
            raise ValueError(
                f"min_terms: expected at most data.max_terms={self.max_terms}, got {self.min_terms}"
            )
        if self.prompt_template is not None:
            fill_template(self.prompt_template, "")

    @property
    def has_rows(self) -> bool:
        """Rows with columns, of data.path."""
        return bool(self.path)

    @property
    def named(self) -> str:
        """The path, or the paths, for messages."""
        return self.path if isinstance(self.path, str) else ", ".join(self.path or ())

    def require_path(self) -> None:
        """Raises ValueError if the task reads a file and `path` is not set."""
        if self.task not in ("auto", *GENERATED) and not self.path:
            raise ValueError(f"task {self.task} reads a file: set data.path=/path/to/train.jsonl")


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
            "prompt_template must be a format string whose only field is {question} "
            f"(literal braces doubled), got {template!r}"
        ) from error


MOST_POSITIONS = 4096  # of a micro-batch on each device, where steps decide its rows


@dataclass
class PackingSection:
    """Packed micro-batches: R rows of S tokens.

    Attributes:
      row_length: tokens per row S; no sample may be longer; null: 256, or for longer rollouts the
        smallest multiple of 128 with room for one.
      rows: rows per micro-batch R; null: as many as a step fills, in micro-batches of at most three
        sizes, the largest of 4096 tokens per device.
    """

    row_length: int | None = option(None, least=1)
    rows: int | None = option(None, least=1)

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
        return tuple(mesh.row_devices * factor for factor in times)

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
    """An update of `train.sft` has a fixed number of micro-batches (RL: what samples fill).

    Attributes:
      row_length: tokens per row S; longer demonstrations, and those of more tokens than the model
        has positions, are passed over; null: 1024, or the next length that the mesh can split.
      rows: rows per micro-batch R.
      microbatches: micro-batches per update A (gradient accumulation).
    """

    rows: int = option(4, least=1)
    microbatches: int = option(2, least=1)


@dataclass
class CheckpointSection:
    """Orbax checkpoints under `<out>/checkpoints`.

    Attributes:
      every: steps between checkpoints; 0 saves only at the end.
      keep_last: checkpoints kept.
    """

    every: int = option(10, least=0)
    keep_last: int = option(2, least=1)


@dataclass
class RLCheckpointSection(CheckpointSection):
    """Checkpoints of `train.rl`.

    Attributes:
      export: write a Hugging Face directory <out>/hf at the end.
    """

    export: bool = True


@dataclass
class LogSection:
    """What a run shows.

    Attributes:
      tensorboard: also write TensorBoard event files.
      wandb: also log to Weights & Biases.
      live: in a terminal, show a table that is updated during the run; false: one line per step, as
        when the output is no terminal.
    """

    tensorboard: bool = False
    wandb: bool = False
    live: bool = True


@dataclass
class RLLogSection(LogSection):
    """What a run of `train.rl` shows.

    Attributes:
      samples: samples of each step and of each evaluation that are written to <out>/samples.jsonl;
        0: none.
    """

    samples: int = option(4, least=0)


@dataclass
class Common:
    """The keys that all programs of training share.

    Attributes:
      revision: branch, tag or commit of a Hugging Face id.
      family: a model family of your own, module:attribute, for checkpoints of its model_type; those
        of the package need no setting.
      out: directory of the run.
      seed: decides initial weights, samples and the order of training.
      logprob_chunk_size: tokens per device whose logits exist at once (or as many logits, of all
        tokens and a part of the vocabulary); null: as many as take 128 MB in float32 (512 MB on
        GPUs), or 512.
      attention: the attention kernel: auto, the platform's own, with a line at start that says
        which; or by name, which is refused where it cannot run.
    """

    revision: str | None = None
    family: str | None = None
    out: str = "runs"
    seed: int = 0
    logprob_chunk_size: int | None = option(None, least=1)
    attention: str = option("auto", choices=ATTENTION, own_path=True)


@dataclass
class Trained(Common):
    """The keys of programs that train a policy.

    Attributes:
      dtype: dtypes.
      mesh: devices per axis.
      remat: recompute activations in the backward pass.
      remat_policy: what is kept of a recomputed layer: the output and log-sum-exp of attention, or
        nothing.
    """

    dtype: DtypeSection = option(DtypeSection)
    mesh: MeshConfig = option(MeshConfig)
    remat: bool = False
    remat_policy: str = option("save_attention", choices=REMAT_POLICIES, needs="remat")


_OF_DEMONSTRATIONS = "it is about worked answers to imitate, which train.sft reads; leave it out"


@dataclass
class SFTConfig(Trained):
    """`python -m train.sft`: trains policy and head on demonstrations.

    Attributes:
      init: Hugging Face directory or id to start from (also --model MODEL); null: from nothing.
      steps: updates of the policy.
      draft_steps: updates of the head afterwards, on the final policy's states; none if draft.mode
        is none or frozen.
      vocab_size: BPE vocabulary at most, when starting from nothing.
      tokenizer_texts: demonstrations that the tokenizer is trained on.
      loss_on: tokens in the loss.
      log_every: steps between records.
      export_dtype: dtype of the exported <out>/hf.
      model: shape, when starting from nothing; mtp_*: also when `init` has no head.
      data: demonstrations.
      packing: batches.
      optim: the policy's optimizer.
      draft: the head's training.
      checkpoint: checkpoints.
      log: what the run shows.
    """

    unread: ClassVar[Mapping[str, str]] = {
        "data.heldout_size": "train.sft evaluates nothing; leave it out",
        "data.dataset": "reasoning-gym has no worked answers to imitate; leave it out",
        "data.dataset_args": "reasoning-gym has no worked answers to imitate; leave it out",
        "data.unwinnable": "it is about gold answers, which train.rl checks; leave it out",
        "draft.spot": "train.sft has no rollouts, and so no gaps in them; leave it out",
    }
    aliases: ClassVar[Mapping[str, str]] = {"model": "init"}  # as `train.rl` calls it

    out: str = "runs/sft"
    init: str | None = None
    revision: str | None = option(None, needs="init")
    family: str | None = option(None, needs="init")
    seed: int = option(0, least=0, below=1 << 32)  # jax cuts off more than 32 bits
    steps: int = option(1000, least=0)
    draft_steps: int = option(300, least=0, needs="draft.mode=online")
    vocab_size: int = option(512, needs="!init")
    tokenizer_texts: int = option(5000, least=1, needs="!init")
    loss_on: str = option("response", choices=("response", "all"), needs="steps")
    log_every: int = option(1, least=1)
    export_dtype: str = option("bfloat16", choices=("float32", "bfloat16"))
    model: ModelSection = option(ModelSection)
    data: DataConfig = option(DataConfig)
    packing: SFTPackingSection = option(SFTPackingSection)
    optim: SFTOptimConfig = option(SFTOptimConfig, needs="steps")
    draft: DraftConfig = option(DraftConfig(unroll_steps=4))
    checkpoint: CheckpointSection = option(CheckpointSection(every=100))
    log: LogSection = option(LogSection)

    def __post_init__(self):
        if self.data.overlong_prompts == "truncate":
            raise ValueError(
                "data.overlong_prompts=truncate cuts the prompts of train.rl, and train.sft cuts "
                "no demonstration: raise packing.row_length, or set data.overlong_prompts=drop"
            )
        if self.draft.mode == "auto":
            self.draft.mode = "online" if self.draft.moves else "frozen"
        self.optim.settle(is_new=self.init is None)
        if self.init is None:  # else the checkpoint decides
            self.draft.optim.settle(is_new=True)
        self.draft.settle(MOST_STEPS)  # nothing drafts here
        self.packing.settle(1024, self.mesh.row_multiple)
        _rows_divide(self.packing, self.mesh)

    @property
    def trains_head(self) -> bool:
        """Training of the head, by draft_steps with draft.mode=online."""
        return self.draft_steps > 0 and self.draft.mode == "online"


def reward_names(reward: str | list[str]) -> tuple[str, ...]:
    """The names of the rewards in the setting `reward`."""
    return (reward,) if isinstance(reward, str) else tuple(reward)


@dataclass
class RewardsSection:
    """How rewards are computed.

    Attributes:
      weights: weight of each of the rewards, which are added; null: 1 each.
      workers: processes in which rewards run; 0: this process, without a time limit; null: 0 for
        exact, number, choice, and format with the default pattern, else half of the processors, 8
        at most.
      timeout: seconds that a worker may take for a completion; then it is ended and replaced, and
        the reward counts as failed.
      pattern: regular expression that the reward `format` looks for in a completion (. is any
        character); the default wants <think>...</think> and then an answer.
    """

    weights: list[float] | None = None
    workers: int | None = option(None, least=0)
    timeout: float = 10.0
    pattern: str = option(THINKS_FIRST, needs="scores_format")

    def __post_init__(self):
        if self.timeout <= 0:
            raise ValueError(f"timeout: expected seconds above 0, got {self.timeout:g}")
        check_weights(self.weights)
        try:
            re.compile(self.pattern)
        except re.error as error:
            raise ValueError(
                f"pattern: expected a regular expression, got {self.pattern!r}: {error}"
            ) from error


@dataclass
class RLConfig(Trained):
    """`python -m train.rl`: GRPO with speculative rollouts and an online-trained draft head.

    Attributes:
      model: Hugging Face directory or id of the policy (and head).
      seed: run seed: with step and prompt it keys every token.
      steps: RL steps.
      reward: exact, number, math_verify, choice, format, reasoning_gym, or module:function, or a
        list of these, which are added; auto: what suits the rows of data.
      rewards: weights, processes and options of rewards.
      environment: calculator, guess, or module:attribute, which the policy talks to over several
        turns and which gives the reward, see `train.environments.calls`; null: one turn.
      max_turns: the most turns of a sample; rollout.max_tokens are those of all its turns.
      max_failed_rewards: largest share of a step's rewards that may fail (raise, or return no
        finite number): they count as 0; where more do, the run ends, and can be resumed.
      data: problems.
      rollout: rollouts.
      algo: what the policy is trained on.
      optim: the policy's optimizer.
      draft: the draft head.
      packing: training batches.
      eval: evaluation.
      deterministic: on a GPU, run XLA's default algorithms, and none that adds by atomics: a run
        and its repetitions, --resume included, then have the same bits.
      checkpoint: checkpoints.
      log: what the run shows.
      distributed: the processes of the job.
    """

    unread: ClassVar[Mapping[str, str]] = {
        "data.slip": _OF_DEMONSTRATIONS,
        "data.impatience": _OF_DEMONSTRATIONS,
        "rollout.attention": "rollouts and training have one kernel; did you mean 'attention'?",
    }
    # `algo=dapo` is short for a preset; `algo={...}` is the section.
    aliases: ClassVar[Mapping[str, str]] = {"algo": "algo.preset"}

    model: str = "assets/sums"
    out: str = "runs/rl"
    steps: int = option(100, least=1)
    reward: Any = option("auto", kind=str | list[str])
    rewards: RewardsSection = option(RewardsSection)
    environment: str | None = None
    max_turns: int = option(8, least=1, needs="has_turns")
    max_failed_rewards: float = option(0.5, least=0)
    data: DataConfig = option(DataConfig)
    rollout: RolloutSection = option(RolloutSection)
    algo: AlgoSection = option(algo, choose=choose_algo)
    optim: OptimConfig = option(OptimConfig)
    draft: DraftConfig = option(DraftConfig(unroll_steps=None))
    packing: PackingSection = option(PackingSection)
    eval: EvalSection = option(EvalSection)
    deterministic: bool = False
    checkpoint: RLCheckpointSection = option(RLCheckpointSection)
    log: RLLogSection = option(RLLogSection)
    distributed: DistributedConfig = option(DistributedConfig)

    def __post_init__(self):
        self._check_rewards()
        # A held-out problem adds its number to the seed.
        for key, seed, last in (
            ("seed", self.seed, self.seed),
            ("eval.seed", self.eval.seed, self.eval.seed + self.eval.problems),
        ):
            if not (is_seed(seed) and is_seed(last)):
                raise ValueError(f"{key}: expected {SEED_RANGE}, got {seed}")
        longest = self.rollout.max_prompt_tokens + self.rollout.max_tokens
        self.packing.settle(longest, self.mesh.row_multiple)
        self.algo = self.algo.settled(self.rollout.max_tokens)
        _rows_divide(self.packing, self.mesh)
        asked_sets(self.eval, self.rollout)  # checks them
        self._settle_draft()
        if self.algo.logprobs == "processed" and self.mesh.cp > 1:
            for name in PENALTIES:
                if name in self.rollout.transforms:
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

    @property
    def has_turns(self) -> bool:
        """An environment."""
        return self.environment is not None

    def _check_rewards(self) -> None:
        if self.environment is not None:
            ENVIRONMENTS.check(self.environment)
            if self.reward != "auto" or self.eval.sets:
                raise ValueError(
                    f"environment={self.environment} gives the rewards of its problems; leave "
                    "reward and eval.sets out"
                )
            if getattr(self.algo, "logprobs", None) == "processed":
                raise ValueError(
                    "algo.logprobs=processed scores a sample as one response, and those of an "
                    "environment have several; set algo.logprobs=temperature"
                )
        names = reward_names(self.reward)
        if not names or len(set(names)) < len(names):
            raise ValueError(f"reward: expected one or several different rewards, got {names}")
        for name in names:
            if name != "auto" or len(names) > 1:
                REWARDS.check(name)
        least = getattr(self.algo, "least_samples", 2)
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
        if self.max_failed_rewards > 1:
            raise ValueError(f"max_failed_rewards: expected 0 to 1, got {self.max_failed_rewards}")

    def _settle_draft(self) -> None:
        """Settles what trains the head, as far as the draft is known (see `settle_drafting`)."""
        if self.draft.mode == "none":
            self.rollout = dataclasses.replace(self.rollout, strategy="off", control=None)
        elif self.draft.mode == "auto" and not self.rollout.speculates:
            self.draft.mode = "none"
        elif self.draft.mode == "auto" and self.rollout.draft in ("checkpoint", "random"):
            self.draft.mode = "online" if self.draft.moves else "frozen"
        elif self.draft.mode == "auto" and self.rollout.draft == "ngram":
            self.draft.mode = "frozen"
        self.draft.settle(max(strategy.steps for strategy in self.rollout.strategies))
        self.draft.optim.settle(is_new=self.rollout.draft == "random")

    @property
    def trains_head(self) -> bool:
        """A draft head that is trained: one that drafts, with draft.mode=online."""
        may_train = self.draft.mode in ("auto", "online") and self.draft.moves
        return may_train and self.rollout.speculates and self.rollout.drafts_by_network

    @property
    def has_head_to_train(self) -> bool:
        """A head to train, which rollout.strategy=off and rollout.draft=ngram do not have."""
        return self.draft.mode != "online" or self.trains_head

    @property
    def off_policy(self) -> bool:
        """Tokens of an older policy, by algo.updates_per_rollout above 1 or rollout.partial."""
        return self.algo.updates_per_rollout > 1 or self.rollout.partial

    @property
    def scores_format(self) -> bool:
        """The reward `format`, of the run or of a set in eval.sets."""
        rewards = [self.reward, *(chosen.reward or [] for chosen in self.eval.sets.values())]
        return any("format" in reward_names(reward) for reward in rewards)

    @property
    def checks_gold(self) -> bool:
        """A built-in reward that compares answers, which reward=module:function is not."""
        others = ("format", "reasoning_gym")
        return any(":" not in name and name not in others for name in reward_names(self.reward))

    @property
    def row_sizes(self) -> tuple[int, ...]:
        """The numbers of rows that a micro-batch may have, see `PackingSection.sizes`."""
        return self.packing.sizes(self.mesh)

    @property
    def rollout_devices(self) -> int:
        """The number of devices that rollouts run on."""
        roll = self.rollout
        return roll.replicas * roll.tp if roll.own_devices else self.mesh.size


def _rows_divide(packing: PackingSection, mesh: MeshConfig) -> None:
    if packing.rows is not None and packing.rows % mesh.row_devices:
        raise ValueError(
            "packing.rows must be a multiple of mesh.data * mesh.fsdp * mesh.expert = "
            f"{mesh.row_devices}, got {packing.rows}"
        )
    if packing.row_length % mesh.row_multiple:
        raise ValueError(
            f"packing.row_length must be a multiple of {mesh.row_multiple}, by which mesh.cp="
            f"{mesh.cp} and mesh.tp={mesh.tp} divide it, got {packing.row_length}"
        )


def _check_spot(cfg: RLConfig) -> None:
    """Refuses settings with which spot training cannot train a head."""
    spot, positions = cfg.draft.spot, max(cfg.row_sizes) * cfg.packing.row_length
    if not spot.enabled:
        return
    if not cfg.trains_head:
        raise ValueError(
            f"draft.spot.enabled trains the draft head, and with draft.mode={cfg.draft.mode}, "
            f"rollout.draft={cfg.rollout.draft} and {cfg.rollout.plain_by} there is none to train; "
            "set draft.mode=online and a strategy, or draft.spot.enabled=false"
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


def as_run(cfg: Trained) -> dict[str, Any]:
    """Returns the fields of `RunConfig` with which a run trains; its dtypes must be settled."""
    return {
        "compute_dtype": cfg.dtype.compute,
        "remat": cfg.remat,
        "remat_policy": cfg.remat_policy,
        "sequence_parallel": cfg.mesh.sequence_parallel,
    }
