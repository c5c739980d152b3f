"""The part of the vocabulary that is drafted from, chosen between steps (`rollout.draft_vocab`).

The policy changes, and with it the tokens that it emits. So each step counts the tokens of its
complete groups, in which earlier steps count less, and every few steps the ids that are drafted
from are those that were emitted most. They are data of the programs of rollouts: another choice
compiles nothing. In `coupled` acceptance it changes no token either.

The counts depend on tokens alone, which are the same on all processes and in a run that was
resumed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from specjax.engine.vocabulary import TokenCounts

FALL = 0.01  # share of tokens by which a choice covers fewer than at first, to be replaced at once


class DraftVocabulary:
    """Chooses the ids to draft from, and keeps them and their counts for a checkpoint.

    Args:
      vocab: size of the vocabulary.
      first: ids at the start.
      always: ids that are always among those chosen: end tokens, special tokens.
      every: number of steps between two choices; 0: the first ids stay.
      decay: weight that counts keep from step to step.
      own: ids of the tokens that the head drafts, before which no others are chosen; None: all.
    """

    def __init__(
        self,
        vocab: int,
        first: np.ndarray,
        always: Sequence[int],
        every: int,
        decay: float,
        own: np.ndarray | None = None,
    ):
        self._counts = TokenCounts(vocab, first, always, own)
        self._every, self._decay = every, decay
        self._steps = 0  # since the last choice
        self._covered: float | None = None  # share of the tokens of the first step after it
        if every:
            self._counts.choose()

    @property
    def ids(self) -> np.ndarray:
        """The ids to draft from, ascending."""
        return self._counts.ids

    def end_step(self, samples: Iterable[Sequence[int]]) -> dict[str, float]:
        """Counts the tokens of a step, and chooses the ids of the next one.

        Args:
          samples: token ids of each sample.

        Returns:
          `rollout/draft_vocab_coverage`, the share of the tokens that could be drafted in this
          step; nothing if there were no tokens.
        """
        tokens = np.concatenate([np.zeros(0, np.int64), *map(np.asarray, samples)])
        if not len(tokens):
            return {}
        covered = float(np.isin(tokens, self._counts.drafted).mean())
        self._counts.add(tokens.astype(np.int64), self._decay)
        self._steps += 1
        self._covered = covered if self._covered is None else self._covered
        fell = covered < self._covered - FALL
        if self._every and (self._steps >= self._every or fell):
            self._counts.choose()
            self._steps, self._covered = 0, None
        return {"rollout/draft_vocab_coverage": covered}

    def state(self) -> dict[str, Any]:
        """For the metadata of a checkpoint."""
        return {**self._counts.state(), "steps": self._steps, "covered": self._covered}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._counts.load_state(state)
        self._steps, self._covered = state["steps"], state["covered"]
