"""Which of the compiled programs reads prompts and runs a chunk, and when a chunk ends early."""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Iterable
from typing import TYPE_CHECKING

from specjax.decode.chunk import Until
from specjax.decode.options import Features
from specjax.engine.sequence import Sequence

if TYPE_CHECKING:
    from specjax.engine.loop import Loop


IN_FLIGHT = 2  # chunks that are enqueued at most
REFILL_SHARE = 6  # while others wait a chunk ends when one row in so many would be free


def until(rounds: int, alive: int, waiting: int, others_wait: bool, smaller: int) -> Until:
    """When a chunk ends: others take the places of those that ended, or the batch shrinks.

    Args:
      alive: rows that run when it begins. waiting: that take them over. others_wait: beside those;
        if nobody waits they are not to wait for more than one chunk.
      smaller: the next smaller size of a batch, or 0.
    """
    refill = max(1, alive // REFILL_SHARE)
    if others_wait and waiting:  # each chunk that is enqueued has its share of those
        return Until.of(rounds, ended=max(refill, waiting // IN_FLIGHT))
    return Until.of(rounds, leave_at=alive - refill if others_wait else smaller)


def rows_to_read(loop: Loop, count: int, width: int) -> int:
    """Rows of the smallest program that was compiled for so many pieces of a width.

    Where there is none, and in `invariant` mode, where one program reads all, as many as are ever
    read at once.
    """
    runner, most = loop.runner, loop.piece_rows(width)
    fits = [rows for rows in runner.executables.rows(width + runner.tail) if rows >= count]
    return most if runner.plan.invariant else min(fits, default=most)


def choose_program(loop: Loop, strategy: str, alive: list[Sequence]) -> tuple[Features, int]:
    """Features and bucket to ask the runner for, so that little is compiled, and once.

    A chunk takes the cheapest program that was compiled and covers the samples in it. Where none
    covers all that was added, the next wider of a few fixed sets of features is compiled, for as
    many slots as will be needed. In `invariant` mode all chunks run one program until nobody is
    left, for only within one program equal inputs are sure to give equal bits.

    Args:
      alive: what the chunk is to run.
    """
    runner, asked = loop.runner, loop.intake.asked
    wanted = all_of(asked)
    if runner.plan.invariant:
        return loop.intake.seen.widened(), runner.batch
    if not any(b >= len(alive) for b in runner.buckets(strategy, wanted)):
        most = min(runner.batch, len(loop.intake))
        return wanted.widened(), next(b for b in loop.buckets if b >= most)
    here = wanted if len(asked) == 1 else all_of({s.features for s in alive})
    return here, min(b for b in runner.buckets(strategy, here) if b >= len(alive))


def waiting_for_rows(
    others: list[Sequence], alive: list[Sequence], features: Features
) -> list[Sequence]:
    """Of those that have no row, the first that may run in a chunk of others, see `RowMap`.

    Args:
      alive: those that the chunk is to run. features: that its program serves.
    """
    served = {s.job.params.strategy for s in alive}
    drafts = any(s.job.params.speculative for s in alive)  # or the chunk decodes plainly

    def fits(sequence: Sequence) -> bool:
        params = sequence.job.params
        same = params.strategy in served and params.speculative <= drafts
        return same and features.covers(sequence.features)

    return list(itertools.takewhile(fits, others))


def all_of(features: Iterable[Features]) -> Features:
    """What any of them asks for."""
    return functools.reduce(operator.or_, features)
