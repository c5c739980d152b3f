"""A controller that follows a list, for tests of what must not depend on what it chooses."""

import itertools

from specjax.control.base import Controller


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
