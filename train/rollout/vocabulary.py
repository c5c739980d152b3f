"""The part of the vocabulary that is drafted from, chosen between steps (`rollout.draft_vocab`).

The policy changes, and with it the tokens that it emits. So each step counts the tokens of its
complete groups, in which earlier steps count less, and the next one drafts from the ids that were
emitted most. They are data of the programs of rollouts: another choice compiles nothing. In
`coupled` acceptance it changes no token either.

The counts depend on tokens alone, which are the same on all processes and in a run that was
resumed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from specjax.engine.vocabulary import TokenCounts

DECAY = 0.8  # weight that counts keep from step to step


class DraftVocabulary(TokenCounts):
    """Chooses the ids to draft from, and keeps them and their counts for a checkpoint.

    Args:
      vocab, first, always, own: see `TokenCounts`.
      follows: whether the ids follow what is emitted; else the first ids stay.
    """

    def __init__(
        self,
        vocab: int,
        first: np.ndarray,
        always: Sequence[int],
        follows: bool,
        own: np.ndarray | None = None,
    ):
        super().__init__(vocab, first, always, own)
        self._follows = follows
        if follows:
            self.choose()

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
        covered = float(np.isin(tokens, self.drafted).mean())
        self.add(tokens.astype(np.int64), DECAY)
        if self._follows:
            self.choose()
        return {"rollout/draft_vocab_coverage": covered}
