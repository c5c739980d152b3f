"""`SpecConfig`: strategy, draft source and acceptance mode."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from specjax.config.checks import choice
from specjax.config.overrides import checked_overrides
from specjax.config.strategy import Strategy
from specjax.spelling import SettingError, checks_keywords

ACCEPTANCE_MODES = ("coupled", "block", "recursive", "greedy")
# Values of `SpecConfig.draft` that are no path: "./ngram" is a directory of that name.
AUTO_DRAFT, CHECKPOINT_DRAFT, RANDOM_DRAFT, NGRAM_DRAFT = "auto", "checkpoint", "random", "ngram"
DRAFT_WORDS = (AUTO_DRAFT, CHECKPOINT_DRAFT, RANDOM_DRAFT, NGRAM_DRAFT)
DRAFT_KINDS = ("mtp", "eagle3")  # names of `specjax.registry.DRAFTS` of which a head can be made
NGRAM_LIMIT = 127  # match lengths are kept as int8
TELEMETRY_VARIABLE = "SPECJAX_TELEMETRY"
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


@checks_keywords
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
      draft_overrides: settings of an EAGLE-3 head in files that stand in place of those in its
        config.json, where these are wrong: a mapping with some of the names in
        `specjax.config.overrides.OVERRIDES`. It is kept as pairs of a name and a value.
      head_seed: seed of a new head.
      draft_vocab: number of tokens that the head or model may propose; None: the whole vocabulary.
        The draft then computes logits for these tokens alone, which is faster. They are the tokens
        that the engine has emitted most; at first, and with `block` and `recursive` always, the
        lowest token ids and the end tokens.
      token_map: JSON file that lists the tokens which the head or model may propose, the most
        frequent first, in place of a choice by the engine. With `draft_vocab=C` the first C of
        them.
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
      telemetry: whether to record why drafts are rejected; None: as the environment variable
        SPECJAX_TELEMETRY says.
    """

    strategy: Strategy | str | Sequence[Sequence[int]] | None = None
    acceptance: str = "coupled"
    draft: str = AUTO_DRAFT
    draft_kind: str = "mtp"
    draft_overrides: Mapping[str, Any] | tuple[tuple[str, Any], ...] = ()
    head_seed: int = 0
    draft_vocab: int | None = None
    token_map: str | None = None
    ngram_max: int = 4
    ngram_min: int = 1
    ngram_siblings: bool = True
    aligned: bool = True
    tau: float = 0.6
    adaptive_width: bool = False
    spec_verify_tokens: int = 48
    invariant: bool = False
    exact_mode: bool = False
    telemetry: bool | None = None

    def __post_init__(self):
        choice("acceptance", self.acceptance, ACCEPTANCE_MODES)
        if self.strategy is not None:
            object.__setattr__(self, "strategy", Strategy.parse(self.strategy))
        if self.draft is None:
            raise SettingError(
                lambda spell: (
                    f"{spell('draft')}: expected a word, of which 'auto' is the default, a path, "
                    "an id or a class; got None"
                )
            )
        object.__setattr__(self, "draft", str(self.draft))
        choice("draft_kind", self.draft_kind, DRAFT_KINDS)
        if self.draft_kind != "mtp" and self.draft != RANDOM_DRAFT:
            raise SettingError(
                lambda spell: (
                    f"{spell('draft_kind', self.draft_kind)} is the kind of a new head, and "
                    f"{spell('draft', self.draft)} makes none; use {spell('draft', RANDOM_DRAFT)}, "
                    f"or leave out {spell('draft_kind')}"
                )
            )
        self._check_overrides()
        if self.draft_vocab is not None and self.draft_vocab < 1:
            raise SettingError(
                lambda spell: f"{spell('draft_vocab')}: expected at least 1, got {self.draft_vocab}"
            )
        if self.token_map is not None:
            object.__setattr__(self, "token_map", str(self.token_map))
        if self.draft == NGRAM_DRAFT and (self.draft_vocab, self.token_map) != (None, None):
            raise SettingError(
                lambda spell: (
                    f"{spell('draft_vocab')} and {spell('token_map')} are about heads and models, "
                    f"and {spell('draft', NGRAM_DRAFT)} has no language-model head; leave them out"
                )
            )
        if not 0 < self.tau < float("inf"):
            raise ValueError(f"tau must be a finite number greater than 0, got {self.tau}")
        if not 1 <= self.ngram_min <= self.ngram_max <= NGRAM_LIMIT:
            raise SettingError(
                lambda spell: (
                    f"expected 1 <= {spell('ngram_min')} <= {spell('ngram_max')} <= {NGRAM_LIMIT}, "
                    f"got {self.ngram_min} and {self.ngram_max}"
                )
            )
        if not self.is_off:
            self._refuse_what_is_not_exact()

    def _check_overrides(self) -> None:
        """Checks `draft_overrides`, and makes it hashable."""
        given = self.draft_overrides
        if not isinstance(given, (Mapping, tuple)):
            raise SettingError(
                lambda spell: (
                    f"{spell('draft_overrides')}: expected a mapping, such as "
                    f"{{'norm_before_residual': True}}, got {given!r}"
                )
            )
        try:
            given = checked_overrides(dict(given))
        except ValueError as error:
            text = str(error)
            raise SettingError(lambda spell: f"{spell('draft_overrides')}: {text}") from error
        object.__setattr__(self, "draft_overrides", tuple(sorted(given.items())))
        if given and self.draft_path is None:
            raise SettingError(
                lambda spell: (
                    f"{spell('draft_overrides')} is about an EAGLE-3 head in files, and "
                    f"{spell('draft', self.draft)} names none; use {spell('draft', 'DIR')}, or "
                    f"leave out {spell('draft_overrides')}"
                )
            )

    def _refuse_what_is_not_exact(self) -> None:
        strategy = self.resolve()
        where = f"got strategy {self.own_strategy.name!r}"
        if self.acceptance == "block" and not strategy.is_chain:
            nearest = "'coupled'" if strategy.is_dynamic else "'recursive' or 'coupled'"
            raise ValueError(
                f"acceptance 'block' is exact for chains only, {where}; use acceptance {nearest} "
                "for trees, or a chain such as '4_1_5'"
            )
        if self.acceptance == "recursive" and strategy.is_dynamic:
            raise ValueError(
                "acceptance 'recursive' draws its candidates without replacement and is exact only "
                "if the tree's shape is fixed before they are drawn (re-ranking is biased), "
                f"{where}; use acceptance 'coupled', or a static tree such as '4x2x1'"
            )
        for name in ("exact_mode", "invariant"):
            if getattr(self, name) and not self.by_token:
                raise ValueError(
                    f"{name} is about equal tokens, and acceptance {self.acceptance!r} equals "
                    "plain decoding in distribution only; use acceptance 'coupled'"
                )

    @property
    def by_token(self) -> bool:
        """Whether every token equals plain decoding's (`coupled`, `greedy`).

        In the other modes the tokens have the same distribution.
        """
        return self.acceptance in ("coupled", "greedy")

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

    @property
    def telemetry_on(self) -> bool:
        if self.telemetry is None:
            return os.environ.get(TELEMETRY_VARIABLE, "0") not in ("", "0", "false", "False")
        return self.telemetry

    def resolve(self) -> Strategy:
        """The strategy, cut to `spec_verify_tokens`."""
        return self.own_strategy.capped(self.spec_verify_tokens)
