"""Who runs next, by which strategy: a chunk has one, and requests may name different ones."""

from __future__ import annotations

import functools
from typing import NamedTuple

from specjax.control import OFF, Controller
from specjax.engine.runner import Runner
from specjax.engine.sequence import Sequence


class Turn(NamedTuple):
    """What the next chunk is.

    Attributes:
      strategy: that all of its `sequences` run by. rounds: at most.
      is_try: the controller wants to see so many rounds, whoever ends meanwhile.
    """

    strategy: str
    sequences: list[Sequence]
    rounds: int
    is_try: bool


class Turns:
    """Sequences that name different strategies take turns, the group that waited longest first.

    Those that name none run by the controller's choice, and those that named just that one with
    them. While some wait, nobody's turn has more rounds than theirs would have: plain decoding has
    several times as many in a chunk as drafting, and one sequence that asks for it would keep all
    others waiting for most of the time.
    """

    def __init__(self, runner: Runner):
        self._runner = runner
        self._last: dict[str | None, int] = {}  # turn of each group, as a running number

    def next(self, alive: list[Sequence], controller: Controller, rows: int | None) -> Turn:
        """The next chunk of sequences that may run, at least one.

        Args:
          rows: by which chunks are long, see `Runner.rounds`.
        """
        most = functools.partial(self._runner.rounds, rows=rows)
        groups: dict[str | None, list[Sequence]] = {}
        for sequence in alive:
            groups.setdefault(sequence.job.params.strategy, []).append(sequence)
        name = min(groups, key=lambda name: (self._last.get(name, 0), name is not None))
        strategy, hint, served = name, None, {name}
        if name is None:
            strategy, hint = self._choose(groups[None], controller)
            served |= {strategy} & groups.keys()
        rounds = most(strategy) if hint is None else min(hint, most(strategy))
        if len(groups) > 1:
            self._last |= dict.fromkeys(served, 1 + max(self._last.values(), default=0))
            waiting = {other or controller.current or strategy for other in groups.keys() - served}
            rounds = min(rounds, *map(most, waiting | {strategy}))
        sequences = [s for s in alive if s.job.params.strategy in served]
        return Turn(strategy, sequences, rounds, hint is not None)

    def _choose(self, free: list[Sequence], controller: Controller) -> tuple[str, int | None]:
        """Strategy, and rounds that suffice, for sequences that name none; `off` if none drafts."""
        if OFF in self._runner.plans and not any(s.job.params.speculative for s in free):
            return OFF, None
        return controller.select(len(free)), controller.rounds_hint
