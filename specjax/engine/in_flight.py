"""Chunks that were enqueued and not yet taken in, and the seconds that each of them took.

A device does not say when it begins or ends something: the host can ask now and then what is done.
So it knows that a chunk began after one moment and by another, and that it was done by a third, and
tells its seconds only where these lie close together.
"""

from __future__ import annotations

import dataclasses
import time
from collections import Counter, deque

import jax

from specjax.decode.chunk import Result
from specjax.engine.parcel import Parcel
from specjax.engine.runner import Runner
from specjax.engine.sequence import Sequence


@dataclasses.dataclass
class Chunk:
    """A chunk that was enqueued.

    Attributes:
      rows: the sequence of each row of the batch. waiting: those that take the rows of who ends, in
        order. result: on the device. version: of the weights.
      mark: is ready when the chunk begins to run; None: as soon as the chunk before it is done.
      after: it began after that, on the host's clock: when it was enqueued, or last seen waiting.
      by: it had begun by then; None: it has not been seen running.
      unseen: seconds in which nobody looked whether it is done, and it was done at their end.
      sure: tokens that each of `rows` emits at least, if it does not end.
      rounds: at most. most: tokens of a sample that they can bring.
      said: what the hosts of the replica had said when it was enqueued, see `Agreement`.
      is_try: see `Turn`.
    """

    rows: list[Sequence | None]
    waiting: list[Sequence]
    result: Parcel[Result]
    strategy: str
    version: int
    mark: jax.Array | None
    after: float
    sure: int
    rounds: int
    most: int
    said: int
    is_try: bool = False
    by: float | None = None
    unseen: float | None = None


class InFlight:
    """Chunks in the order in which they run.

    Args:
      runner: that runs them; while it compiles, the host sees nothing.
    """

    def __init__(self, runner: Runner):
        self._runner = runner
        self._chunks: deque[Chunk] = deque()
        self._arrived, self._done = 0.0, 0.0  # the last chunk; it may have been done before
        self._left, self._built = 0.0, runner.compilations

    def __len__(self) -> int:
        return len(self._chunks)

    @property
    def is_ready(self) -> bool:
        """Whether the device is done with the next chunk, as it is where there is none."""
        return not self._chunks or self._chunks[0].result.is_ready

    def add(self, chunk: Chunk) -> None:
        self._chunks.append(chunk)

    def take(self) -> Chunk:
        """The next chunk, which leaves; see `wait_for`."""
        return self._chunks.popleft()

    def clear(self) -> None:
        """Nobody is left whom they could bring a token."""
        self._chunks.clear()

    def sure(self) -> Counter[int]:
        """Tokens that they will have emitted at least for each sample that goes on, by ticket."""
        sure = Counter()
        for chunk in self._chunks:
            sure.update({s.ticket: chunk.sure for s in chunk.rows if s is not None})
        return sure

    @property
    def most(self) -> int:
        """Tokens that they can bring a sample."""
        return sum(chunk.most for chunk in self._chunks)

    def look(self) -> None:
        """Narrows down when the next chunk began."""
        if not self._chunks or self._chunks[0].by is not None:
            return
        chunk = self._chunks[0]
        if chunk.mark is None or chunk.mark.is_ready():
            chunk.by = time.perf_counter()
        else:
            chunk.after = time.perf_counter()

    def look_away(self) -> None:
        """Nobody knows from now on what is done, until the next call of `notice_what_is_done`."""
        self._left = time.perf_counter()

    def notice_what_is_done(self) -> None:
        """Whoever looks now may have been away for longer than the device was busy."""
        for chunk in self._chunks:
            if chunk.unseen is None and chunk.result.is_ready:
                chunk.unseen = time.perf_counter() - self._left

    def wait_for(self, chunk: Chunk) -> tuple[Result, float]:
        """The result on the host, and the seconds that it took to run, prompts before it left out.

        They are nan where the host did not see well enough when the prompts or the chunk itself
        were done, and where it compiled a program meanwhile.
        """
        after, by = max(self._done, chunk.after), chunk.by
        if chunk.mark is None:
            by = max(self._arrived, chunk.after)
        elif by is None and chunk.mark.is_ready():
            by = time.perf_counter()
        elif by is None:
            jax.block_until_ready(chunk.mark)
            after = by = time.perf_counter()
        result = chunk.result.open()
        self._arrived = time.perf_counter()
        self._done = self._arrived - (chunk.unseen or 0.0)
        most, least = self._arrived - after, self._done - max(by, after)
        compiled, self._built = self._built != self._runner.compilations, self._runner.compilations
        return result, float("nan") if compiled or least < 0.8 * most else least
