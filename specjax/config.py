"""Frozen configuration: what a model is, how to speculate, how to sample.

Everything here is hashable, so that it can be a static argument of a jitted function. Vocabulary
(strategy, rows, static tree, acceptance mode, `off`) is the project's: a strategy
`"steps_topk_rows"` with topk 1 is a chain, a static tree is given by its children per level
(`"4x2x1"`) or by path tuples.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

ACCEPTANCE_MODES = ("coupled", "block")
OFF_NAMES = ("off", "disable", "none")

# Wide near the root, narrower later: four children, two below the best two, one each after.
DEFAULT_TREE_PATHS = (
    (0,), (1,), (2,), (3,),
    (0, 0), (0, 1), (1, 0), (1, 1),
    (0, 0, 0), (0, 1, 0), (1, 0, 0), (1, 1, 0),
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """The `llama3` frequency rescaling of RoPE (Llama 3.1); lengths in tokens."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A decoder-only transformer: Llama 3, Qwen2, Qwen3 and MiMo are settings of it.

    Attributes:
      model_type: Hugging Face `model_type`; decides weight names on export.
      hidden_size, intermediate_size, num_layers, num_heads, num_kv_heads, head_dim: D F L N K H.
      qkv_bias: biases on q, k and v (Qwen2, MiMo). qk_norm: RMSNorm per head before RoPE (Qwen3).
      mtp_num_layers: MTP modules in the draft head; step s uses module min(s, mtp_num_layers - 1).
      mtp_concat: order of the halves of the head's input, `embedding_first` (DeepSeek, GLM) or
        `hidden_first` (MiMo).
      mtp_target_hidden, mtp_recycle: whether the state handed to the head, by the target and by the
        head's own previous step, is taken after or before the final norm.
      param_dtype, compute_dtype: storage and arithmetic; softmax, norms and logits are float32.
      scan_layers: `lax.scan` over stacked layers (short compile) or an unrolled loop (fast on CPU).
      remat: recompute each layer in the backward pass instead of keeping its activations.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    model_type: str = "qwen3"
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    rms_norm_eps: float = 1e-6
    tie_embeddings: bool = True
    qkv_bias: bool = False
    qk_norm: bool = True
    max_position: int = 4096
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    pad_token_id: int | None = None
    mtp_num_layers: int = 0
    mtp_concat: str = "embedding_first"
    mtp_target_hidden: str = "post_norm"
    mtp_recycle: str = "post_norm"
    param_dtype: str = "float32"
    compute_dtype: str = "float32"
    scan_layers: bool = False
    remat: bool = False

    def __post_init__(self):
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads must be a multiple of num_kv_heads, got {self.num_heads} and "
                f"{self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even for RoPE, got {self.head_dim}")
        _choice("mtp_concat", self.mtp_concat, ("embedding_first", "hidden_first"))
        _choice("mtp_target_hidden", self.mtp_target_hidden, ("post_norm", "pre_norm"))
        _choice("mtp_recycle", self.mtp_recycle, ("post_norm", "pre_norm"))

    def replace(self, **changes) -> ModelConfig:
        return dataclasses.replace(self, **changes)


def _choice(name: str, value: str, choices: Sequence[str]) -> None:
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}; got {value!r}")


@dataclasses.dataclass(frozen=True)
class Strategy:
    """What one round drafts: a prefix-closed set of paths below the root.

    A path `(i, j)` is the j-th best child of the i-th best child of the root. The root itself is
    row 0 of the tree and is not listed. Paths are ordered by depth, then lexicographically.
    """

    name: str
    paths: tuple[tuple[int, ...], ...]

    @property
    def rows(self) -> int:
        """Tree rows T, root included."""
        return len(self.paths) + 1

    @property
    def steps(self) -> int:
        """Draft steps: the depth of the deepest path."""
        return max(map(len, self.paths))

    @property
    def is_chain(self) -> bool:
        return all(not any(path) for path in self.paths)

    @classmethod
    def parse(cls, spec: str | Sequence[Sequence[int]] | Strategy) -> Strategy:
        """Reads `"4_1_5"`, `"4x2x1"`, `"default"` (twelve paths) or explicit path tuples.

        Raises:
          ValueError: the text is no strategy, its numbers disagree, or it asks for a dynamic tree.
        """
        if isinstance(spec, Strategy):
            return spec
        if not isinstance(spec, str):
            return cls.from_paths(spec)
        if spec.lower() in OFF_NAMES:
            raise ValueError(
                f"{spec!r} is plain decoding, which drafts no tree; use spec=None, or "
                "SpecConfig(strategy='off')"
            )
        if spec == "default":
            return dataclasses.replace(cls.from_paths(DEFAULT_TREE_PATHS), name="default")
        if re.fullmatch(r"\d+_\d+_\d+", spec):
            return _parse_steps_topk_rows(*map(int, spec.split("_")))
        if re.fullmatch(r"\d+(x\d+)*", spec):
            return _parse_children(spec, [int(c) for c in spec.split("x")])
        raise ValueError(
            f"strategy {spec!r} is not understood; expected 'steps_topk_rows' such as '4_1_5', "
            "children per level such as '4x2x1', 'default', path tuples, or 'off'"
        )

    @classmethod
    def from_paths(cls, paths: Sequence[Sequence[int]]) -> Strategy:
        """A static tree from path tuples; every prefix and every better sibling must be listed."""
        tuples = sorted({tuple(int(i) for i in p) for p in paths}, key=lambda p: (len(p), p))
        if not tuples:
            raise ValueError("a static tree needs at least one path, got none; use 'off' instead")
        known = set(tuples)
        for path in tuples:
            if not path or min(path) < 0:
                raise ValueError(f"tree path {path} must hold child ranks >= 0")
            if len(path) > 1 and path[:-1] not in known:
                raise ValueError(f"tree path {path} has no parent: add {path[:-1]}")
            if path[-1] and (*path[:-1], path[-1] - 1) not in known:
                raise ValueError(
                    f"tree path {path} skips a better sibling: add {(*path[:-1], path[-1] - 1)}"
                )
        return cls("paths:" + ",".join("".join(map(str, p)) for p in tuples), tuple(tuples))


def _parse_steps_topk_rows(steps: int, topk: int, rows: int) -> Strategy:
    name = f"{steps}_{topk}_{rows}"
    if topk != 1:
        raise ValueError(
            f"strategy {name!r} is a dynamic re-ranked tree (topk {topk} > 1), which is not "
            "available; use a chain such as '4_1_5' or a static tree such as '4x2x1'"
        )
    if steps < 1 or rows != steps + 1:
        raise ValueError(
            f"chain {name!r} needs steps >= 1 and rows = steps + 1 (the root counts); "
            f"use '{max(steps, 1)}_1_{max(steps, 1) + 1}'"
        )
    return Strategy(name, tuple((0,) * d for d in range(1, steps + 1)))


def _parse_children(name: str, children: list[int]) -> Strategy:
    if min(children) < 1:
        raise ValueError(f"static tree {name!r} needs at least one child per level")
    paths, level = [], [()]
    for count in children:
        level = [(*path, i) for path in level for i in range(count)]
        paths += level
    return Strategy(name, tuple(paths))


@dataclasses.dataclass(frozen=True)
class SpecConfig:
    """How to speculate.

    Attributes:
      strategy: see `Strategy.parse`; `"off"` (also `"disable"`) is plain decoding.
      acceptance: `coupled` (any tree, token-identical to plain decoding) or `block` (chains,
        identical in distribution).
      head: `checkpoint` takes the draft head that lies with the policy, `random` draws one from
        `head_seed` (for training it online from nothing).
    """

    strategy: str | tuple[tuple[int, ...], ...] | Strategy = "4_1_5"
    acceptance: str = "coupled"
    head: str = "checkpoint"
    head_seed: int = 0

    def __post_init__(self):
        _choice("acceptance", self.acceptance, ACCEPTANCE_MODES)
        _choice("head", self.head, ("checkpoint", "random"))
        if isinstance(self.strategy, list):
            object.__setattr__(self, "strategy", tuple(map(tuple, self.strategy)))
        if self.is_off:
            return
        if not self.resolve().is_chain and self.acceptance == "block":
            raise ValueError(
                f"acceptance 'block' is exact for chains only, got strategy {self.strategy!r}; "
                "use acceptance 'coupled' for trees, or a chain such as '4_1_5'"
            )

    @property
    def is_off(self) -> bool:
        return isinstance(self.strategy, str) and self.strategy.lower() in OFF_NAMES

    def resolve(self) -> Strategy:
        return Strategy.parse(self.strategy)


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How one request is sampled.

    Attributes:
      temperature: 0 is greedy.
      max_tokens: tokens to generate at most.
      seed: the request's seed; with the prompt's token ids it keys every random number.
      n: samples of this prompt, each with its own noise.
      ignore_eos: do not stop at the model's end-of-sequence tokens.
      stop_token_ids: further tokens that end a sample; kept as its last token.
    """

    temperature: float = 1.0
    max_tokens: int = 256
    seed: int = 0
    n: int = 1
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()

    def __post_init__(self):
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(
                f"temperature must be a finite number >= 0 (0 is greedy), got {self.temperature}"
            )
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {self.max_tokens}")
        if self.n < 1:
            raise ValueError(f"n must be at least 1, got {self.n}")
