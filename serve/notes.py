"""What the event loop and the thread that owns the engine hand each other."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from specjax.engine.request import Job, SampleOutput
from specjax.engine.watch import News


class EngineDead(RuntimeError):
    """The engine has raised, and takes nothing any more."""


class Asleep(ValueError):
    """The engine has neither weights nor caches."""


class ClientGone(Exception):
    """Nobody waits for the answer any more."""


class Update(NamedTuple):
    """What became of a sample since its last update.

    Attributes:
      index: which sample of the request. news: of its chunks, in order.
      sample: the whole of it, if it ended. error: nothing more will come.
    """

    index: int
    news: Sequence[News] = ()
    sample: SampleOutput | None = None
    error: EngineDead | ClientGone | None = None


class Note(NamedTuple):
    """What the engine's thread is asked to do, and who waits for what comes of it."""

    function: Callable[[], Any]
    answer: asyncio.Future | None = None


class Answer(NamedTuple):
    """What came of a note."""

    future: asyncio.Future | None
    result: Any = None
    error: Exception | None = None

    def give(self) -> None:
        """To who waits for it, if anybody still does."""
        if self.future is None or self.future.done():
            return
        if self.error is None:
            self.future.set_result(self.result)
        else:
            self.future.set_exception(self.error)


class Brought(NamedTuple):
    """What one step brought.

    Attributes:
      chunks: strategy, bucket and rounds of each. news: of samples, with their tickets, and the
        replicas that they run on.
      ended: samples, by ticket.
    """

    chunks: list[tuple[str, int, int]]
    news: list[tuple[int, News, int]]
    ended: dict[int, SampleOutput]


class Request:
    """Samples in the engine; the event loop's side of them.

    Attributes:
      updates: of all samples, in the order in which they come. open: samples that have not ended.
      arrived: on the clock of `time.perf_counter`. piecemeal: there is an update for every chunk,
        not only for each sample that ends.
    """

    def __init__(self, jobs: Sequence[Job], arrived: float, piecemeal: bool):
        self.jobs, self.arrived, self.piecemeal = jobs, arrived, piecemeal
        self.updates: asyncio.Queue[Update] = asyncio.Queue()
        self.open = len(jobs)
        self.last = [0.0] * len(jobs)  # when each sample got its last token
        self.tickets: list[int] = []  # the engine thread's
        self.gone = False  # so is this
