"""`SpecConfig`: strategy, draft source and acceptance mode."""

from __future__ import annotations

import dataclasses
import re
from typing import Any, NamedTuple

from specjax.config.checks import choice
from specjax.config.strategy import Strategy
from specjax.settings import option

ACCEPTANCE_MODES = ("coupled", "block", "recursive", "greedy")
# Values of `SpecConfig.draft` that are no path: "./ngram" is a directory of that name.
AUTO_DRAFT, CHECKPOINT_DRAFT, RANDOM_DRAFT, NGRAM_DRAFT = "auto", "checkpoint", "random", "ngram"
DRAFT_WORDS = (AUTO_DRAFT, CHECKPOINT_DRAFT, RANDOM_DRAFT, NGRAM_DRAFT)
DRAFT_KINDS = ("mtp", "eagle3")  # names of `specjax.registry.DRAFTS` of which a head can be made
NGRAM_LIMIT = 127  # match lengths are kept as int8
DEFAULT_STRATEGY = Strategy.chain(4)


_OWN_CLASS = re.compile(r"(?P<name>[A-Za-z_][\w.]*:[A-Za-z_][\w.]*)(?::(?P<path>.+))?")


class OwnDraft(NamedTuple):
    """A user's own class of drafts, `module:attribute[:PATH]`.

    Attributes:
      name: `module:attribute`.
      path: path or id of what its `load` reads; None: nothing.
    """

    name: str
    path: str | None

    @classmethod
    def parse(cls, text: str) -> OwnDraft | None:
        """Returns the class that a text names; None: it is a word, a path or an id."""
        found = _OWN_CLASS.fullmatch(text)
        return found and cls(found["name"], found["path"])


@dataclasses.dataclass(frozen=True)
class SpecConfig:
    """How to speculate.

    Attributes:
      strategy: a `Strategy`, or a value that `Strategy.parse` reads, such as `"4_1_5"`; `"off"`
        is plain decoding. None: a controller chooses between `4_1_5` and `off` while running, or,
        where tokens depend on the strategy (`block`, `recursive`), `4_1_5`.
      acceptance: `coupled` (any tree, token-identical to plain decoding), `block` (chains,
        identical in distribution), `recursive` (chains and static trees, identical in
        distribution) or `greedy` (any tree, for requests of temperature 0 only; token-identical).
      draft: what drafts. `auto`: the head in the policy's checkpoint, else n-grams; a table is in
        docs/settings.md. `checkpoint`: that head, and an error if there is none. `random`: a new
        head, drawn from `head_seed`, to be trained online. `ngram`: the tokens that followed
        earlier occurrences of the last ones. Else the directory or Hugging Face id of a head or of
        a smaller model, which its files tell apart, or `module:attribute[:PATH]`: a class of your
        own, see `specjax.interfaces.Draft`, and what its `load` reads. A path such as `./ngram`
        is a directory, whatever its name.
      draft_kind: kind of a new head, `mtp` or `eagle3`; only with `draft="random"`.
      head_seed: seed of a new head.
      draft_vocab: number of the tokens in `token_map` that the head or model may propose, from the
        first; None: all of these.
      token_map: JSON file that lists the tokens which the head or model may propose, the most
        frequent first; None: the whole vocabulary. The draft then computes logits for these tokens
        alone, which is faster.
      ngram_max: length of the longest suffix that is looked up.
      ngram_min: length of the shortest suffix that is looked up.
      ngram_siblings: whether to look in the other samples of the same prompt as well.
      aligned: whether the sampling transforms of the target (top-k, penalties, ...) are applied to
        the draft's logits as well; False applies the temperature alone (for measurements).
      tau: temperature of the node scores of a dynamic tree in `coupled` acceptance. The score of a
        child is log_softmax((log q + noise) / tau), and the nodes with the best sums of scores
        along their paths are kept. A small tau concentrates the tree on the child that the noise
        favours; a large tau spreads its nodes over more branches. It changes speed, never tokens.
      adaptive_width: whether a node of a dynamic tree has as many children as the rounded
        perplexity of its draft distribution q, up to topk. Other strategies are unchanged; an
        engine without a dynamic tree refuses it.
      spec_verify_tokens: largest number of tree rows; a larger dynamic tree is cut.
      invariant: whether plain decoding and all strategies run one program with the same arithmetic,
        so that log-probabilities are bitwise equal, too; slower (`coupled`, `greedy`).
      exact_mode: whether everything is decoded plainly as well and compared, and the first
        difference reported.
      telemetry: whether to record why drafts are rejected.
    """

    strategy: Any = option(None, kind=str | None, needs=("speculates", "is_selectable"))
    acceptance: str = option("coupled", choices=ACCEPTANCE_MODES, needs="speculates")
    draft: str = option(AUTO_DRAFT, needs="speculates")
    draft_kind: str = option("mtp", choices=DRAFT_KINDS, needs=("speculates", "draft=random"))
    head_seed: int = option(0, internal=True)
    draft_vocab: int | None = option(None, least=1, needs=("speculates", "token_map"))
    token_map: str | None = option(None, needs=("speculates", "drafts_by_network"))
    ngram_max: int = option(4, needs=("speculates", "draft=auto|ngram"))
    ngram_min: int = option(1, needs=("speculates", "draft=auto|ngram"))
    ngram_siblings: bool = option(True, needs=("speculates", "draft=auto|ngram"))
    aligned: bool = option(True, needs=("speculates", "transforms"))
    tau: float = option(0.6, needs=("speculates", "grows_trees", "acceptance=coupled"))
    adaptive_width: bool = option(False, needs=("speculates", "grows_trees"))
    spec_verify_tokens: int = option(48, needs="speculates")
    invariant: bool = False
    exact_mode: bool = option(False, needs="speculates")
    telemetry: bool = option(False, needs="speculates")

    def __post_init__(self):
        choice("acceptance", self.acceptance, ACCEPTANCE_MODES)
        choice("draft_kind", self.draft_kind, DRAFT_KINDS)
        for name, value in (
            ("strategy", None if self.strategy is None else Strategy.parse(self.strategy)),
            ("draft", str(self.draft)),
            ("token_map", self.token_map and str(self.token_map)),
        ):
            object.__setattr__(self, name, value)
        if self.draft_vocab is not None and (self.draft_vocab < 1 or self.token_map is None):
            raise ValueError(f"draft_vocab: got {self.draft_vocab}; it is 1 or more of token_map")
        if not 0 < self.tau < float("inf"):
            raise ValueError(f"tau must be a finite number greater than 0, got {self.tau}")
        if not 1 <= self.ngram_min <= self.ngram_max <= NGRAM_LIMIT:
            raise ValueError(
                f"ngram_max: expected 1 <= ngram_min <= ngram_max <= {NGRAM_LIMIT}, got "
                f"ngram_min={self.ngram_min} and ngram_max={self.ngram_max}"
            )
        if not self.is_off:
            self._refuse_what_is_not_exact()

    def _refuse_what_is_not_exact(self) -> None:
        strategy = self.resolve()
        where = f"got strategy={self.own_strategy.name}"
        if self.acceptance == "block" and not strategy.is_chain:
            other = "coupled" if strategy.is_dynamic else "recursive or coupled"
            raise ValueError(
                f"acceptance=block is exact for chains only, {where}; use acceptance={other} for "
                "trees, or a chain such as 4_1_5"
            )
        if self.acceptance == "recursive" and strategy.is_dynamic:
            raise ValueError(
                "acceptance=recursive draws its candidates without replacement and is exact only "
                "if the tree's shape is fixed before they are drawn (re-ranking is biased), "
                f"{where}; use acceptance=coupled, or a static tree such as 4x2x1"
            )
        for name in ("exact_mode", "invariant"):
            if getattr(self, name) and not self.by_token:
                raise ValueError(
                    f"{name} is about equal tokens, and acceptance={self.acceptance} equals plain "
                    "decoding in distribution only; use acceptance=coupled"
                )

    @property
    def by_token(self) -> bool:
        """Whether every token equals plain decoding's (`coupled`, `greedy`).

        In the other modes the tokens have the same distribution.
        """
        return self.acceptance in ("coupled", "greedy")

    @property
    def speculates(self) -> bool:
        """Speculation, which strategy=off turns off."""
        return not self.is_off

    @property
    def drafts_by_network(self) -> bool:
        """A head or a model that drafts, and not draft=ngram."""
        return self.draft != NGRAM_DRAFT

    @property
    def draft_path(self) -> str | None:
        """The path or id of a head or a model; None: a word, or a class of the user's own."""
        named = self.draft in DRAFT_WORDS or self.own_draft is not None
        return None if named else self.draft

    @property
    def own_draft(self) -> OwnDraft | None:
        """The user's own class of drafts; None: `draft` names none."""
        return OwnDraft.parse(self.draft)

    @property
    def own_strategy(self) -> Strategy:
        """The strategy that drafts unless a controller chooses another one."""
        return DEFAULT_STRATEGY if self.strategy is None else self.strategy

    @property
    def is_off(self) -> bool:
        return self.own_strategy.is_off

    def resolve(self) -> Strategy:
        """The strategy, cut to `spec_verify_tokens`."""
        return self.own_strategy.capped(self.spec_verify_tokens)
