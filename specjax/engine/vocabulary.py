"""The part of the vocabulary that is drafted from: ids of a file, or those emitted most often.

The reference is FR-Spec (arXiv:2502.14856), and SGLang's `speculative_token_map`.

In `coupled` mode the choice changes no token. In `block` and `recursive` mode it stays fixed: if
the tokens of a request decided what is drafted when the request is replayed, p/q acceptance would
be biased.
"""

from __future__ import annotations

import base64
import json
import operator
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from specjax.config import ModelConfig, SpecConfig
from specjax.engine.weights import Weights
from specjax.interfaces import Draft, Params

FIRST_COUNT = 4096  # number of emitted tokens after which the ids are first chosen again


def own_ids(source: Draft | None, head: Params | None) -> np.ndarray | None:
    """The ids of the tokens that a head drafts, ascending; None: all, or there is no head."""
    head_ids = None if source is None or head is None else source.head(head)
    return None if head_ids is None or head_ids[1] is None else np.asarray(head_ids[1])


def draft_ids(
    cfg: ModelConfig, spec: SpecConfig, head_ids: np.ndarray | None = None
) -> np.ndarray | None:
    """The ids, ascending, that are drafted from at the start; None: all.

    Without a file they are the tokens that end a sequence, and the lowest ids: byte-pair encoding
    numbers tokens in the order in which it merged them, the most frequent first. Tokens that the
    head has come before others.

    Args:
      head_ids: ids of the tokens that the head drafts; None: all.

    Raises:
      ValueError: the file cannot be read (see `read_token_map`), has fewer ids than
        `draft_vocab`, or lists none that the head drafts.
    """
    size, name, vocab = spec.draft_vocab, spec.token_map, cfg.vocab_size
    if size is None and name is None:
        return None
    if name is not None:
        listed, what = read_token_map(name, vocab), f"the ids in {name}"
    else:
        what, ends = "the tokens of the vocabulary", [t for t in cfg.eos_token_ids if t < vocab]
        listed = np.array(list(dict.fromkeys([*ends, *range(vocab)])), np.int32)
        if head_ids is not None:
            listed = listed[np.argsort(~np.isin(listed, head_ids), kind="stable")]
    size = len(listed) if size is None else size
    if not 1 <= size <= len(listed):
        raise ValueError(f"draft_vocab: expected 1 to {len(listed)}, {what}, got {size}")
    if head_ids is not None and not np.isin(listed[:size], head_ids).any():
        raise ValueError(
            f"token_map: the head drafts {len(head_ids)} of {vocab} tokens, and "
            f"none of the {size} ids in {name}; give a list for this model"
        )
    return np.sort(listed[:size])


def read_token_map(name: str, vocab: int) -> np.ndarray:
    """The token ids in a file, a JSON list with the most frequent first.

    Raises:
      ValueError: the file cannot be read, or holds something else.
    """
    try:
        listed, got = json.loads(Path(name).read_text(encoding="utf-8")), "something else"
    except (OSError, ValueError) as error:  # it is absent, not UTF-8, or not JSON
        listed, got = None, str(error)
    is_list = isinstance(listed, list) and listed and all(type(token) is int for token in listed)
    if not is_list or min(listed) < 0 or max(listed) >= vocab or len({*listed}) < len(listed):
        raise ValueError(
            f"token_map: expected a file with a JSON list of different token ids "
            f"below {vocab}, the most frequent first, got {name}: {got}"
        )
    return np.array(listed, np.int32)


class TokenCounts:
    """Counts how often each token is emitted, to choose which ids to draft from.

    Args:
      vocab: size of the vocabulary.
      first: ids that are drafted from at the start, ascending, which precede others with equal
        counts.
      always: ids that are always among those chosen, as many as there is room for, the first ones
        first: the tokens that end a sequence.
      own: ids of the tokens that the head drafts, before which no others are chosen; None: all.

    Attributes:
      ids: ids that were chosen last, ascending: as many as `first`.
    """

    def __init__(
        self,
        vocab: int,
        first: np.ndarray,
        always: Sequence[int] = (),
        own: np.ndarray | None = None,
    ):
        self._counts = np.zeros(vocab)
        self._rank = np.full(vocab, len(always))
        self._rank[list(always)] = np.arange(len(always))
        self.begin_with(first, own)
        self._total, self._due = 0, FIRST_COUNT

    def begin_with(self, first: np.ndarray, own: np.ndarray | None) -> None:
        """Begins with other ids, and with a head that drafts others; see the arguments `first`
        and `own`. The counts stay."""
        self.ids = np.asarray(first, np.int32)
        self._later = ~np.isin(np.arange(len(self._counts)), first)
        self._lacking = np.zeros(len(self._counts), bool)
        if own is not None:
            self._lacking = ~np.isin(np.arange(len(self._counts)), own)

    def add(self, tokens: Sequence[int], kept: float = 1.0) -> None:
        """Counts tokens.

        Args:
          kept: weight that earlier counts keep.
        """
        if kept != 1.0:
            self._counts *= kept
        np.add.at(self._counts, np.asarray(tokens, np.int64), 1.0)
        self._total += len(tokens)

    @property
    def is_due(self) -> bool:
        """Whether twice as many tokens were counted as when the ids were last chosen."""
        return self._total >= self._due

    def choose(self) -> np.ndarray:
        """Sets `ids` to those that were emitted most often, and returns them."""
        self._due = 2 * max(self._total, FIRST_COUNT // 2)
        ranks = np.arange(len(self._counts)), self._later, -self._counts, self._rank
        order = np.lexsort((*ranks, self._lacking))  # the last key is the first that counts
        self.ids = np.sort(order[: len(self.ids)]).astype(np.int32)
        return self.ids

    @property
    def drafted(self) -> np.ndarray:
        """Those of `ids` that the head drafts."""
        return self.ids[~self._lacking[self.ids]]

    def state(self) -> dict[str, str]:
        """The ids and the counts, for JSON.

        When a choice is due is not among them: only engines ask that, which keep no state, and
        whoever restores one (`train.rollout.vocabulary`) chooses by steps.
        """
        some = np.flatnonzero(self._counts).astype(np.int32)
        arrays = {"ids": self.ids, "counted": some, "counts": self._counts[some]}
        return {name: base64.b64encode(array.tobytes()).decode() for name, array in arrays.items()}

    def load_state(self, state: Mapping[str, str]) -> None:
        """Restores what `state` returned.

        Raises:
          ValueError: it is of a vocabulary or a number of ids of another size.
        """
        saved = {name: base64.b64decode(state[name]) for name in ("ids", "counted", "counts")}
        ids, counted = (np.frombuffer(saved[name], np.int32) for name in ("ids", "counted"))
        if len(ids) != len(self.ids) or max(ids.max(), counted.max(initial=0)) >= len(self._later):
            raise ValueError(
                f"expected {len(self.ids)} ids below {len(self._later)}, got {len(ids)}"
            )
        self.ids = ids.copy()
        self._counts[:] = 0
        self._counts[counted] = np.frombuffer(saved["counts"], np.float64)


class DraftedIds:
    """The ids that an engine drafts from: which they are with a new head, or after many tokens.

    Args:
      cfg: the model's config.
      spec: how to speculate.
      source: the draft source.
      weights: the engine's weights, which hold the ids in use.

    Attributes:
      counts: how often each token was emitted, to choose the ids by, shared by replicas; None: they
        are fixed.
      own: ids of the tokens that the head drafts; None: all.
    """

    def __init__(self, cfg: ModelConfig, spec: SpecConfig, source: Draft, weights: Weights):
        self._cfg, self._spec, self._source, self._weights = cfg, spec, source, weights
        self.own: np.ndarray | None = None
        self.counts: TokenCounts | None = None
        if spec.token_map is None and spec.by_token:
            ends = [token for token in cfg.eos_token_ids if token < cfg.vocab_size]
            self.counts = TokenCounts(cfg.vocab_size, weights.ids, ends)

    def take_head(self, head: Params) -> None:
        """Begins to draft from tokens that a head has, unless they were given by a call.

        Raises:
          ValueError: the head drafts none of the ids that `token_map` lists.
        """
        before, head_ids = self.own, own_ids(self._source, head)
        if head_ids is None or np.array_equal(head_ids, before):
            self.own = head_ids
            return
        # A head that is refused here leaves nothing changed, so that it is refused again.
        ids = draft_ids(self._cfg, self._spec, head_ids)
        self.own = head_ids
        if self.counts is not None:
            self.counts.begin_with(ids, head_ids)
        if self.counts is not None or (before is None and not self._spec.by_token):
            self._weights.ids = ids

    def update(self) -> None:
        """Chooses the ids anew where that is due, between two chunks."""
        if self.counts is not None:
            if self.counts.is_due:
                self.counts.choose()
            if self.counts.ids is not self._weights.ids:  # another replica may have chosen
                self._weights.set_ids(self.counts.ids)

    def set(self, ids: Sequence[int] | None) -> None:
        """Takes the ids to draft from, which then stay; None: those that were emitted most.

        Raises:
          ValueError: they are more or fewer than the programs are compiled for, or one is repeated
            or no token id; or `ids` is None, and they are not chosen by what is emitted.
        """
        if not self._spec.by_token:
            raise ValueError(
                f"acceptance {self._spec.acceptance!r} is exact only with ids that stay"
            )
        if ids is None:
            if self.counts is None:
                raise ValueError("the ids were given (token_map, or an earlier call); give ids")
            self._weights.set_ids(self.counts.choose())
            return
        size, vocab = len(self._weights.ids), self._cfg.vocab_size
        given = np.unique([operator.index(token) for token in ids])
        if not len(given) == len(ids) == size or given[0] < 0 or given[-1] >= vocab:
            raise ValueError(
                f"expected {size} (draft_vocab) different token ids below {vocab}, got {len(given)}"
            )
        self.counts = None
        self._weights.set_ids(given.astype(np.int32))
