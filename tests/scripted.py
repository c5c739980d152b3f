"""A controller that follows a list, for tests of what must not depend on what it chooses."""

import itertools

import numpy as np

from specjax.control.base import Controller, Observation


def observed(batch_size, strategy, per_round, seconds) -> Observation:
    """A chunk, by the accepted drafts of the slots that ran, one list per round."""
    width = max(map(len, per_round), default=0)
    accepted = np.full((len(per_round), width), -1, np.int64)
    for row, values in zip(accepted, per_round, strict=True):
        row[: len(values)] = values
    return chunk_of(batch_size, strategy, accepted, seconds)


def chunk_of(batch_size, strategy, accepted, seconds, **more) -> Observation:
    """A chunk whose tokens and rounds are those of `accepted` [R B], unless they are given."""
    tokens, rounds = int((accepted + 1).sum()), int((accepted >= 0).any(axis=1).sum())
    return Observation(
        batch_size, strategy, accepted, seconds, **{"tokens": tokens, "rounds": rounds, **more}
    )


class Flips(Controller):
    """These strategies, one per chunk, over and over."""

    kind = "flips"

    def __init__(self, arms, names):
        super().__init__(arms)
        self._names = itertools.cycle(names)

    def choose(self, batch_size):
        return next(self._names)

    def learn(self, seen):
        pass
