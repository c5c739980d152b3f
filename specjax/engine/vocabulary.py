"""The part of the vocabulary that is drafted from: ids of a file, or those emitted most often.

In `coupled` mode the choice changes no token. In `block` and `recursive` mode it stays fixed: if
the tokens of a request decided what is drafted when the request is replayed, p/q acceptance would
be biased.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from specjax.config import ModelConfig, SpecConfig
from specjax.spelling import SettingError

FIRST_COUNT = 4096  # number of emitted tokens after which the ids are first chosen again


def draft_ids(cfg: ModelConfig, spec: SpecConfig) -> np.ndarray | None:
    """The ids, ascending, that are drafted from at the start; None: all.

    Without a file they are the tokens that end a sequence, and the lowest ids: byte-pair encoding
    numbers tokens in the order in which it merged them, the most frequent first.

    Raises:
      SettingError: the file cannot be read (see `read_token_map`), or has fewer ids than
        `draft_vocab`.
    """
    size, name, vocab = spec.draft_vocab, spec.token_map, cfg.vocab_size
    if size is None and name is None:
        return None
    if name is None:
        ends = [token for token in cfg.eos_token_ids if token < vocab]
        listed = np.array(list(dict.fromkeys([*ends, *range(vocab)])), np.int32)
    else:
        listed = read_token_map(name, vocab)
    if size is None:
        size = len(listed)
    if not 1 <= size <= len(listed):
        what = f"the vocabulary has {vocab} tokens" if name is None else f"{name} has {len(listed)}"
        raise SettingError(
            lambda spell: (
                f"{spell('draft_vocab')}: expected 1 to {len(listed)} ({what}), got {size}"
            )
        )
    return np.sort(listed[:size])


def read_token_map(name: str, vocab: int) -> np.ndarray:
    """The token ids in a file, a JSON list with the most frequent first.

    Raises:
      SettingError: the file cannot be read, or holds something else.
    """

    def refused(got: str) -> SettingError:
        return SettingError(
            lambda spell: (
                f"{spell('token_map')}: expected a file with a JSON list of different token ids "
                f"below {vocab}, the most frequent first, got {got}; a list that torch saved is "
                'converted by `python -c "import json, torch; '
                "json.dump(torch.load('map.pt').tolist(), open('map.json', 'w'))\"`"
            )
        )

    try:
        listed = json.loads(Path(name).read_text(encoding="utf-8"))
    except OSError as error:
        raise refused(f"{name}: {error.strerror}") from error
    except ValueError as error:  # it is not UTF-8, or not JSON
        raise refused(f"{name}, which is not JSON") from error
    whole = isinstance(listed, list) and all(type(token) is int for token in listed)
    if not whole or not listed or not all(0 <= token < vocab for token in listed):
        raise refused(f"{name} with something else")
    if len(set(listed)) < len(listed):
        raise refused(f"{name} which lists an id twice")
    return np.array(listed, np.int32)


class TokenCounts:
    """Counts how often each token is emitted, to choose which ids to draft from.

    Args:
      vocab: size of the vocabulary.
      first: ids that are drafted from at the start, which precede others with equal counts.
    """

    def __init__(self, vocab: int, first: np.ndarray):
        self._counts, self._size = np.zeros(vocab, np.int64), len(first)
        self._later = np.ones(vocab, bool)
        self._later[first] = False
        self._total, self._due = 0, FIRST_COUNT

    def add(self, tokens: Sequence[int]) -> None:
        np.add.at(self._counts, np.asarray(tokens, np.int64), 1)
        self._total += len(tokens)

    @property
    def is_due(self) -> bool:
        """Whether twice as many tokens were counted as when the ids were last chosen."""
        return self._total >= self._due

    def most_frequent(self) -> np.ndarray:
        """The ids to draft from, ascending: as many as at the start, emitted most often."""
        self._due = 2 * self._total
        order = np.lexsort((np.arange(len(self._counts)), self._later, -self._counts))
        return np.sort(order[: self._size]).astype(np.int32)
