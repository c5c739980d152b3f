"""The configuration of `train.draft`: every key, its type, default and meaning."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from specjax.config import SamplingParams, SpecConfig, Strategy
from specjax.config.dtype import AUTO
from specjax.config.overrides import OVERRIDES, checked_overrides
from specjax.config.sampling import SEED_RANGE, is_seed
from specjax.hub import portable
from specjax.kernels.names import ATTENTION, ATTENTION_DOC
from specjax.parallel.sharding import MeshConfig
from specjax.schema import Needs, at_least, option
from specjax.spelling import Spell, dotted, spelled
from train.heads import DraftConfig
from train.rollout_schema import FILTERS
from train.rules import DATA_RULES, DEPTH_RULE, decay_rule
from train.schema import CHUNK_DOC, DataConfig, LogSection, PackingSection, check_short_seed

KINDS = ("eagle3", "mtp")
LAYOUTS = ("speculators",)  # of the files of an EAGLE-3 head
STATES = ("stream", "cache")

# Attributes of settings of the library in this configuration, for messages.
SPELL: Spell = dotted({"strategy": "eval"}, {"head": "init", "draft": "init"})


@dataclass
class DraftDataConfig(DataConfig):
    """Origin and layout of the prompts that the policy answers, or of given texts."""

    texts: Any = option(
        None,
        "rows to train on in place of the policy's own samples: files as in data.path, or the "
        "directory `samples` of another run. A row has a prompt with a demonstration, in any "
        "layout that data.task knows; or `text`, every token of which is trained on; or "
        "`prompt_token_ids` and `token_ids`, as in that directory",
        kind=str | list[str] | None,
    )

    def require_path(self) -> None:
        """See `DataConfig.require_path`; given texts are rows to read, too."""
        if self.texts is None:
            super().require_path()


@dataclass
class SamplesSection:
    """How the policy's own samples are drawn; the head is trained for these settings."""

    prompts: int = option(
        1024, "prompts that are sampled from, in all; more than there are: again, with new samples"
    )
    n: int = option(1, "samples per prompt")
    temperature: float = option(1.0, "sampling temperature; 0 is greedy")
    top_k: int = option(0, "keep the k most likely tokens; 0 or -1: all")
    top_p: float = option(1.0, "keep the fewest most likely tokens with this share of the mass")
    min_p: float = option(0.0, "keep tokens at least so many times as likely as the likeliest one")
    max_tokens: int = option(512, "response tokens at most")
    max_prompt_tokens: int = option(
        512, "prompt tokens at most; data.overlong_prompts says what becomes of longer prompts"
    )
    max_batch: int = option(32, "slots that run at once")
    scan_layers: bool = option(
        False, "scan over the layers while decoding: compiles faster, decodes slower"
    )

    def __post_init__(self):
        at_least("rollout", self, prompts=1, n=1, max_prompt_tokens=1, max_batch=1)
        self.sampling_params()

    @property
    def longest(self) -> int:
        """The most tokens of a sample with its prompt."""
        return self.max_prompt_tokens + self.max_tokens

    def sampling_params(self, seed: int = 0, n: int = 1, greedy: bool = False) -> SamplingParams:
        """The sampling parameters of a prompt.

        Args:
          seed: seed of the prompt.
          n: number of samples.
          greedy: whether to take temperature 0 in place of the settings.

        Raises:
          ValueError: a value is not valid.
        """
        own = {} if greedy else {name: getattr(self, name) for name in FILTERS}
        temperature = 0.0 if greedy else self.temperature
        most = self.max_tokens
        try:
            return SamplingParams(temperature=temperature, max_tokens=most, seed=seed, n=n, **own)
        except ValueError as error:
            raise ValueError(f"rollout.{error}") from error


@dataclass
class CurveSection:
    """Held-out accept length: prompts of the split `heldout` are decoded with the head as draft."""

    problems: int = option(64, "held-out prompts; 0 is no evaluation")
    every: int = option(0, "updates between evaluations; 0: only at start and end")
    strategy: str = option("4_1_5", "strategy that the prompts are decoded by")
    max_batch: int = option(8, "slots that run at once")
    seed: int = option(1234, "seed of the samples, the same at every evaluation")

    def __post_init__(self):
        at_least("eval", self, problems=0, every=0, max_batch=1)
        try:
            off = SpecConfig(strategy=self.strategy).is_off
        except ValueError as error:
            raise ValueError(f"eval.strategy: {spelled(error, SPELL)}") from error
        if off:
            raise ValueError(
                "eval.strategy=off drafts nothing, and the accept length would be 1; set a "
                "strategy such as 4_1_5, or eval.problems=0 for no evaluation"
            )


def _generates(v: Mapping[str, Any]) -> bool:
    return v["data.texts"] is None


def _passes(v: Mapping[str, Any]) -> bool:
    return v["steps"] is not None or v["epochs"] > 1


_IS_GIVEN = (
    "[data.texts] gives the texts to train on, and the policy generates none; leave out one of them"
)
_NO_EVALUATION = "[eval.problems] evaluates nothing; raise eval.problems, or leave it out"
DRAFT_RULES = (
    *(rule for rule in DATA_RULES if "data.prompt_key" not in rule.names),
    Needs(
        ("data.duplicates",),
        lambda v: v["data.path"] is not None,
        "[data.path] names no rows, of which some might be equal; set data.path=FILE, or leave it "
        "out",
    ),
    Needs(
        ("data.prompt_key", "data.answer_key"),
        lambda v: v["data.path"] is not None or v["data.texts"] is not None,
        "[data.path] and [data.texts] name no rows with columns; set one of them, or leave it out",
    ),
    Needs(
        ("data.dataset", "data.dataset_args"),
        lambda v: v["data.task"] == "reasoning_gym",
        "[data.task] has no data set of that name; set data.task=reasoning_gym, or leave it out",
    ),
    Needs(
        (
            "rollout.prompts", "rollout.n", "rollout.max_batch", "data.seed", "data.train_size",
            "data.min_terms", "data.max_terms", "data.max_number",
        ),
        _generates,
        _IS_GIVEN,
    ),
    Needs(
        tuple(f"rollout.{name}" for name in FILTERS),
        lambda v: v["rollout.temperature"] > 0,
        "[rollout.temperature] takes the most likely token each time; raise rollout.temperature, "
        "or leave it out",
    ),
    Needs(
        ("epochs",),
        lambda v: v["steps"] is None,
        "[steps] says how many updates there are; leave out one of them",
    ),
    Needs(
        ("states",),
        _passes,
        "[epochs] reads the states once, and a cache would never be used; raise epochs, or leave "
        "it out",
    ),
    Needs(
        ("cache_bytes", "cache_dir"),
        lambda v: v["states"] == "cache",
        "[states] keeps no states; set states=cache, or leave it out",
    ),
    Needs(
        ("draft_vocab",),
        lambda v: v["kind"] == "eagle3" and v["init"] is None,
        "[kind] with [init]: only a new EAGLE-3 head has a vocabulary of its own. Any head may "
        "draft from a part of the policy's where it is used, by draft_vocab there; leave it out",
    ),
    Needs(
        ("draft_overrides",),
        lambda v: v["kind"] == "eagle3" and v["init"] is not None,
        "it is about an EAGLE-3 head in files, and [kind] with [init] names none; set init=DIR, or "
        "leave it out",
    ),
    Needs(
        ("export",),
        lambda v: v["kind"] == "eagle3",
        "[kind] has one layout, the policy's own names; leave it out",
        unless="none",
    ),
    Needs(
        ("export_dtype",),
        lambda v: v["export"] != "none",
        "[export] writes no files; leave out one of them",
    ),
    Needs(
        ("eval.every", "eval.strategy", "eval.max_batch", "eval.seed", "data.heldout_size"),
        lambda v: v["eval.problems"] > 0,
        _NO_EVALUATION,
    ),
    DEPTH_RULE,
    decay_rule("draft.optim"),
)  # fmt: skip

_ONE_PROGRAM = "the head is the only thing that train.draft trains; leave it out"
DRAFT_ABSENT_KEYS = {
    **dict.fromkeys(
        ("data.slip", "data.impatience", "data.strip_calculator"),
        "it is about demonstrations that are generated or cleaned, which train.sft imitates; "
        "data.texts are trained on as they are: leave it out",
    ),
    "data.unwinnable": (
        "it is about gold answers, which train.rl checks and train.draft does not; leave it out"
    ),
    "draft.mode": _ONE_PROGRAM,
    "draft.spot": "train.draft has no rollouts with gaps in them; leave it out",
    "draft.mtp_loss_scaling_factor": f"{_ONE_PROGRAM}, and set draft.optim.lr",
    "draft.epochs": "train.draft counts passes over all samples: set epochs",
    "draft.max_microbatches": "train.draft counts updates: set steps",
}


@dataclass
class DraftRunConfig:
    """`python -m train.draft`: trains a draft head for a policy that stays as it is."""

    spell: ClassVar[Spell] = staticmethod(SPELL)
    rules: ClassVar[tuple[Needs, ...]] = DRAFT_RULES
    absent_keys: ClassVar[Mapping[str, str]] = DRAFT_ABSENT_KEYS

    model: str = option("assets/sums", "directory, GGUF file, Hugging Face id or run of the policy")
    revision: str | None = option(None, "branch, tag or commit of a Hugging Face id")
    family: str | None = option(
        None,
        "a model family of your own, module:attribute, for checkpoints of its model_type; those of "
        "the package need no setting",
    )
    kind: str = option("eagle3", "head that is trained", choices=KINDS)
    init: str | None = option(
        None, "directory or id of a head of this kind to go on with; null: a new one"
    )
    draft_overrides: dict[str, Any] = option(
        {},
        "settings of the EAGLE-3 head at `init` in place of those in its config.json, such as "
        f"{{norm_before_residual: true}}; of {', '.join(OVERRIDES)}",
    )
    out: str = option("runs/draft", "directory of the run")
    seed: int = option(0, "decides samples, new weights, and the order of training")
    steps: int | None = option(None, "updates; null: those of `epochs` passes", least=0)
    epochs: int = option(1, "passes over all samples", least=1)
    states: str = option(
        "stream",
        "hidden states of the policy: stream, computed for each update; cache, computed in the "
        "first pass and kept for further ones",
        choices=STATES,
    )
    cache_bytes: int = option(
        4 << 30, "bytes of states that are kept at most; the others are streamed", least=0
    )
    cache_dir: str | None = option(
        None, "directory that the states are kept in; null: in the host's memory"
    )
    draft_vocab: int | None = option(
        None,
        "tokens that an EAGLE-3 head drafts from: those that are most frequent in the samples; "
        "null: the whole vocabulary",
        least=1,
    )
    data: DraftDataConfig = option(DraftDataConfig, "prompts, or texts")
    rollout: SamplesSection = option(SamplesSection, "the policy's own samples")
    draft: DraftConfig = option(DraftConfig(unroll_steps=4), "the head's training")
    packing: PackingSection = option(PackingSection(rows=4), "batches: one per update")
    eval: CurveSection = option(CurveSection, "held-out accept length")
    save_every: int = option(100, "updates between checkpoints; 0 saves only at the end", least=0)
    keep_last: int = option(2, "checkpoints kept", least=1)
    log_every: int = option(10, "updates between records", least=1)
    export: str = option(
        "speculators",
        "layout of an EAGLE-3 head in <out>/head; none: no files",
        choices=(*LAYOUTS, "none"),
    )
    export_dtype: str = option(
        "bfloat16", "dtype of the exported head", choices=("float32", "bfloat16")
    )
    dtype: str = option(
        AUTO,
        "dtype of the policy's weights and of all arithmetic; auto: the checkpoint's on GPU and "
        "TPU (bfloat16 for one in float16), float32 on CPU. The head's weights are float32",
        choices=(AUTO, "float32", "bfloat16"),
    )
    logprob_chunk_size: int | None = option(None, CHUNK_DOC, least=1)
    attention: str = option("auto", ATTENTION_DOC, choices=ATTENTION, own=True)
    log: LogSection = option(LogSection, "what the run shows")

    def __post_init__(self):
        check_short_seed("seed", self.seed)
        check_short_seed("data.seed", self.data.seed)
        if self.data.texts is not None and self.data.overlong_prompts == "truncate":
            raise ValueError(
                "data.overlong_prompts=truncate cuts prompts that are answered, and the "
                "demonstrations of data.texts are not cut: raise packing.row_length, or set "
                "data.overlong_prompts=drop"
            )
        # A held-out prompt adds its number to the seed.
        if not (is_seed(self.eval.seed) and is_seed(self.eval.seed + self.eval.problems)):
            raise ValueError(f"eval.seed: expected {SEED_RANGE}, got {self.eval.seed}")
        try:
            checked_overrides(self.draft_overrides)
        except ValueError as error:
            raise ValueError(f"draft_overrides: {error}") from error
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
    def strategy(self) -> Strategy:
        """The strategy of evaluation."""
        return SpecConfig(strategy=self.eval.strategy).resolve()

    def sampled(self) -> dict[str, Any]:
        """The settings that decide samples, for the file beside them."""
        names = "model", "revision", "seed", "data", "rollout"
        found = {name: getattr(self, name) for name in names}
        found["model"] = portable(self.model)  # the caches of machines lie in different places
        return {
            name: dataclasses.asdict(value) if dataclasses.is_dataclass(value) else value
            for name, value in found.items()
        }
