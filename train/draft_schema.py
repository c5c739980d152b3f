"""The configuration of `train.draft`: every key, its type, default and meaning."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from specjax.config import SamplingParams, SpecConfig, Strategy
from specjax.config.dtype import AUTO
from specjax.config.sampling import SEED_RANGE, is_seed
from specjax.drafts.alignment import METHODS
from specjax.hub import portable
from specjax.parallel.sharding import MeshConfig
from specjax.registry import check_setting
from specjax.settings import option, values_of
from specjax.weights.matrix import ASKED, check_products, is_exact
from train.heads.training import DraftConfig
from train.rollout_schema import SamplingSection
from train.schema import Common, DataConfig, LogSection, PackingSection

KINDS = ("eagle3", "mtp")
LAYOUTS = ("speculators",)  # of the files of an EAGLE-3 head
STATES = ("stream", "cache")


@dataclass
class DraftDataConfig(DataConfig):
    """Origin and layout of the prompts that the policy answers, or of given texts.

    Attributes:
      texts: rows to train on in place of the policy's own samples: files as in data.path, or the
        directory `samples` of another run. A row has a prompt with a demonstration, in any layout
        that data.task knows; or `text`, every token of which is trained on; or `prompt_token_ids`
        and `token_ids`, as in that directory.
    """

    texts: Any = option(None, kind=str | list[str] | None)

    @property
    def has_rows(self) -> bool:
        """Rows with columns, of data.path or data.texts."""
        return bool(self.path or self.texts)

    def require_path(self) -> None:
        """See `DataConfig.require_path`; given texts are rows to read, too."""
        if self.texts is None:
            super().require_path()


@dataclass(frozen=True)
class SamplesSection(SamplingSection):
    """How the policy's own samples are drawn; the head is trained for these settings.

    Attributes:
      prompts: prompts that are sampled from, in all; more than there are: again, with new samples.
      n: samples per prompt.
      max_prompt_tokens: prompt tokens at most; data.overlong_prompts says what becomes of longer
        prompts.
      max_batch: slots that run at once.
      scan_layers: scan over the layers while decoding: compiles faster, decodes slower.
    """

    prompts: int = option(1024, least=1, needs="!data.texts")
    n: int = option(1, least=1, needs="!data.texts")
    max_prompt_tokens: int = option(512, least=1)
    max_batch: int = option(32, least=1, needs="!data.texts")
    scan_layers: bool = False

    def sampling_params(self, seed: int = 0, n: int = 1, greedy: bool = False) -> SamplingParams:
        """The sampling parameters of a prompt; `greedy`: at temperature 0 and without filters."""
        if greedy:
            return SamplingParams(temperature=0.0, max_tokens=self.max_tokens, seed=seed, n=n)
        return super().sampling_params(seed, n)

    @property
    def longest(self) -> int:
        """The most tokens of a sample with its prompt."""
        return self.max_prompt_tokens + self.max_tokens


@dataclass
class CurveSection:
    """Held-out accept length: prompts of the split `heldout` are decoded with the head as draft.

    Attributes:
      problems: held-out prompts; 0 is no evaluation.
      every: updates between evaluations; 0: only at start and end.
      strategy: strategy that the prompts are decoded by.
      max_batch: slots that run at once.
      policy_products: number format of the policy that is decoded; null: that of the samples.
      seed: seed of the samples, the same at every evaluation.
    """

    problems: int = option(64, least=0)
    every: int = option(0, least=0, needs="any")
    strategy: str = option("4_1_5", needs="any")
    max_batch: int = option(8, least=1, needs="any")
    policy_products: str | None = option(None, needs=("any", "products=auto"))
    seed: int = option(1234, needs="any")

    def __post_init__(self):
        if self.policy_products is not None:
            check_setting("policy_products", self.policy_products, ASKED)
        if SpecConfig(strategy=self.strategy).is_off:
            raise ValueError(
                "strategy=off drafts nothing, and the accept length would be 1; set a strategy "
                "such as 4_1_5, or eval.problems=0 for no evaluation"
            )

    @property
    def any(self) -> bool:
        """Something to evaluate, by eval.problems."""
        return self.problems > 0


_ONE_PROGRAM = "the head is the only thing that train.draft trains; leave it out"
_AS_THEY_ARE = "data.texts are trained on as they are; leave it out"
_NO_TRANSFORM = "a head is trained for the temperature, top_k, top_p and min_p alone; leave it out"


@dataclass
class DraftRunConfig(Common):
    """`python -m train.draft`: trains a draft head for a policy that stays as it is.

    Attributes:
      model: directory, GGUF file, Hugging Face id or run of the policy.
      kind: head that is trained.
      init: directory or id of a head of this kind to go on with; null: a new one.
      seed: decides samples, new weights, and the order of training.
      steps: updates; null: those of `epochs` passes.
      epochs: passes over all samples.
      states: hidden states of the policy: stream, computed for each update; cache, computed in the
        first pass and kept for further ones.
      cache_bytes: bytes of states that the host keeps at most; the others are streamed.
      draft_vocab: tokens that an EAGLE-3 head drafts from: those that are most frequent in the
        samples; null: the whole vocabulary.
      data: prompts, or texts.
      rollout: the policy's own samples.
      draft: the head's training.
      packing: batches: one per update.
      eval: held-out accept length.
      save_every: updates between checkpoints; 0 saves only at the end.
      keep_last: checkpoints kept.
      log_every: updates between records.
      export: layout of an EAGLE-3 head in <out>/head; none: no files.
      export_dtype: dtype of the exported head.
      dtype: dtype of the policy's weights and of all arithmetic; auto: the checkpoint's on GPU and
        TPU (bfloat16 for one in float16), float32 on CPU. The head's weights are float32.
      products: number formats of the policy's matrices, as in rollout.products of train.rl: samples
        and states are those of the policy with its weights rounded to them.
      align: how a head of `init` is first aligned with packed weights, without updates: some of
        norm, scales and temperature, see `specjax.drafts.alignment`. With steps=0 the aligned head
        is what is written.
      log: what the run shows.
    """

    unread: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("data.slip", "data.impatience"), _AS_THEY_ARE),
        "data.unwinnable": "it is about gold answers, which train.rl checks; leave it out",
        "draft.mode": _ONE_PROGRAM,
        "draft.spot": "train.draft has no rollouts with gaps in them; leave it out",
        "draft.mtp_loss_scaling_factor": f"{_ONE_PROGRAM}, and set draft.optim.lr",
        "draft.epochs": "train.draft counts passes over all samples: set epochs",
        "draft.max_microbatches": "train.draft counts updates: set steps",
        **{
            f"rollout.{name}": _NO_TRANSFORM
            for name in ("repetition_penalty", "presence_penalty", "frequency_penalty",
                         "logit_bias", "min_tokens", "stop", "include_stop_str_in_output")
        },
    }  # fmt: skip

    model: str = "assets/sums"
    out: str = "runs/draft"
    kind: str = option("eagle3", choices=KINDS)
    init: str | None = None
    seed: int = option(0, least=0, below=1 << 32)  # jax cuts off more than 32 bits
    steps: int | None = option(None, least=0)
    epochs: int = option(1, least=1, needs="!steps")
    states: str = option("stream", choices=STATES, needs="passes_again")
    cache_bytes: int = option(4 << 30, least=0, needs="states=cache")
    # Any head may draft from a part of the policy's vocabulary where it is used.
    draft_vocab: int | None = option(None, least=1, needs=("kind=eagle3", "!init"))
    data: DraftDataConfig = option(DraftDataConfig)
    rollout: SamplesSection = option(SamplesSection)
    draft: DraftConfig = option(DraftConfig(unroll_steps=4))
    packing: PackingSection = option(PackingSection(rows=4))
    eval: CurveSection = option(CurveSection)
    save_every: int = option(100, least=0)
    keep_last: int = option(2, least=1)
    log_every: int = option(10, least=1)
    export: str = option("speculators", choices=(*LAYOUTS, "none"), needs="kind=eagle3")
    export_dtype: str = option(
        "bfloat16", choices=("float32", "bfloat16"), needs="export=speculators"
    )
    dtype: str = option(AUTO, choices=(AUTO, "float32", "bfloat16"))
    products: Any = option(AUTO, kind=str | dict[str, str])
    align: list[str] | None = option(None, needs=("init", "rounds"))
    log: LogSection = option(LogSection)

    def __post_init__(self):
        self.products = check_products(self.products)
        if unknown := set(self.align or ()) - set(METHODS):
            raise ValueError(
                f"align: expected some of {', '.join(METHODS)}, got {', '.join(sorted(unknown))}"
            )
        if self.data.texts is not None and self.data.overlong_prompts == "truncate":
            raise ValueError(
                "data.overlong_prompts=truncate cuts prompts that are answered, and the "
                "demonstrations of data.texts are not cut: raise packing.row_length, or set "
                "data.overlong_prompts=drop"
            )
        # A held-out prompt adds its number to the seed.
        if not (is_seed(self.eval.seed) and is_seed(self.eval.seed + self.eval.problems)):
            raise ValueError(f"eval.seed: expected {SEED_RANGE}, got {self.eval.seed}")
        self.draft.settle(self.strategy.steps)
        self.draft.optim.settle(is_new=self.init is None)
        self.packing.settle(self.rollout.longest, MeshConfig().row_multiple)
        if self.data.texts is None and self.packing.row_length < self.rollout.longest:
            raise ValueError(
                "a sample of rollout.max_prompt_tokens + rollout.max_tokens = "
                f"{self.rollout.longest} tokens must fit a row, got "
                f"packing.row_length={self.packing.row_length}"
            )

    @property
    def passes_again(self) -> bool:
        """Several passes over the samples, by epochs above 1 or steps."""
        return self.steps is not None or self.epochs > 1

    @property
    def rounds(self) -> bool:
        """Formats that round weights, by products."""
        return not is_exact(self.products)

    @property
    def strategy(self) -> Strategy:
        """The strategy of evaluation."""
        return SpecConfig(strategy=self.eval.strategy).resolve()

    def sampled(self) -> dict[str, Any]:
        """The settings that decide samples, for the file beside them."""
        values = values_of(self)
        sampled = {name: values[name] for name in ("model", "revision", "seed", "data", "rollout")}
        if self.rounds:
            sampled["products"] = values["products"]
        # The caches of machines lie in different places.
        return sampled | {"model": portable(self.model)}
