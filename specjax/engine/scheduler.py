"""Decides which prompts are read, which sequences start, and which are preempted.

It is plain bookkeeping and uses no device. Sequences wait under their prompts, because a prompt is
read once for all its samples; its beginning is not read where pages hold it already, see `Reuse`.
Prompts are ordered by arrival, or by expected length (see
`LengthHistory`). A preempted sequence goes to the front, under a prompt that includes its generated
tokens: the noise is keyed so that it continues with the same tokens.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence

from specjax.engine.pages import PagePool, Reuse, StateRows, pages_for
from specjax.engine.sequence import PieceRecords, Sample, records_between

Key = tuple[int, ...]


@dataclasses.dataclass
class Prompt:
    """A prompt to be read, and the sequences that wait for it.

    Attributes:
      tokens: token ids. All but the last, which becomes the root, are read into pages.
      waiting: sequences that start from this prompt.
      read: number of positions that were read so far.
      pages: pages that the prompt holds until its sequences have started; None: it has none yet.
      row: row of the prompt in `decode.admit.Prompts`; None: it has none yet.
      cached: number of positions that were found in pages.
      boundary: position at which a piece ends, so that the recurrent state there can be kept.
      state: row of the recurrent state that its first piece begins with; None: it has its own.
      keys: keys of its full pages, see `Reuse.keys`; None: they are not computed yet.
      records: what the model recorded of the positions that were read, see `PieceRecords`.
    """

    tokens: Key
    waiting: deque[Sample] = dataclasses.field(default_factory=deque)
    read: int = 0
    pages: list[int] | None = None
    row: int | None = None
    cached: int = 0
    boundary: int = 0
    state: int | None = None
    keys: list[bytes] | None = None
    records: list[PieceRecords] = dataclasses.field(default_factory=list)

    @property
    def to_read(self) -> int:
        """Number of positions that are still to be read."""
        return len(self.tokens) - 1 - self.read

    @property
    def left(self) -> int:
        """Number of positions until its pieces end, at the boundary or behind the last one."""
        return self.boundary - self.read if self.read < self.boundary else self.to_read

    @property
    def is_ready(self) -> bool:
        return self.pages is not None and self.to_read == 0


@dataclasses.dataclass(frozen=True)
class Start:
    """A sequence to start.

    Attributes:
      prompt_row: row of its prompt in `decode.admit.Prompts`.
      copies: pages to copy for it, as (source, target).
    """

    sequence: Sample
    prompt_row: int
    copies: tuple[tuple[int, int], ...] = ()


class Scheduler:
    """Slots, pages and the queue of one engine.

    Args:
      slots: the most sequences that run at once.
      prompts: the most prompts that hold pages at once.
      pool: the free pages.
      page_size: positions per page.
      rewritten: number of positions at the end of a prompt that each of its samples writes again.
      expected: function that returns the expected length of a sample, or None if it has none. Those
        expected to be longest start first. None: samples start in the order of arrival.
      reuse: how pages serve other prompts; None: they do not.
      states: rows for the recurrent states at the ends of these pages; None: the model has none.

    Attributes:
      running: the sequences that run, by slot, in the order in which they started.
      ahead: number of positions that a sequence may need until pages are reserved again. The engine
        keeps it up to date.
      queried: number of tokens of prompts that were looked up in pages so far.
      hits: number of those that were found.
    """

    def __init__(
        self,
        slots: int,
        prompts: int,
        pool: PagePool,
        page_size: int,
        rewritten: int = 0,
        expected: Callable[[Sample], float | None] | None = None,
        reuse: Reuse | None = None,
        states: StateRows | None = None,
    ):
        self.pool, self.page_size, self.ahead, self._expected = pool, page_size, 0, expected
        self._rewritten, self._reuse, self._states = rewritten, reuse, states
        self.queried = self.hits = 0
        self.running: dict[int, Sample] = {}
        self._slots, self._rows = deque(range(slots)), deque(range(prompts))
        self._queue: OrderedDict[Key, Prompt] = OrderedDict()
        self._reading: dict[Key, Prompt] = {}

    # --- coming and going ------------------------------------------------------------------------

    @property
    def waiting(self) -> int:
        """Number of sequences that have no slot."""
        return sum(len(p.waiting) for p in self._prompts())

    def holds(self, sequence: Sample) -> bool:
        """Whether the prompt of a waiting sequence is being read."""
        return any(not one.is_ready and sequence in one.waiting for one in self._reading.values())

    @property
    def has_waiting(self) -> bool:
        return bool(self._queue or self._reading)

    @property
    def free(self) -> int:
        """Number of free slots."""
        return len(self._slots)

    @property
    def is_reading(self) -> bool:
        """Whether a prompt holds pages and is not completely read."""
        return any(not prompt.is_ready for prompt in self._reading.values())

    @property
    def positions(self) -> int:
        """Number of positions in the caches, of running sequences and of prompts that were read."""
        running = sum(sequence.length for sequence in self.running.values())
        return running + sum(prompt.read for prompt in self._reading.values())

    def _prompts(self) -> Iterator[Prompt]:
        yield from self._reading.values()
        yield from self._queue.values()

    def add(self, sequence: Sample, first: bool = False) -> None:
        """Queues a sequence.

        Args:
          first: whether it goes ahead of all others.
        """
        key = tuple(sequence.known)
        prompt = self._reading.get(key) or self._queue.get(key)
        if prompt is None:
            prompt = self._queue[key] = Prompt(key)
        if first:
            prompt.waiting.appendleft(sequence)
            if key in self._queue:
                self._queue.move_to_end(key, last=False)
        else:
            prompt.waiting.append(sequence)

    def finish(self, sequence: Sample) -> None:
        """Frees the slot and the pages of a running sequence."""
        del self.running[sequence.slot]
        self._slots.append(sequence.slot)
        if self._reuse is not None and self._reuse.margin is not None and sequence.tokens:
            keys = self._reuse.keys(sequence.known, self.page_size)
            records = sequence.records
            pieces = [] if records is None else [(records[None], 0, slice(0, len(records)))]
            ready = sequence.reusable - self._reuse.margin
            self._remember(keys, sequence.pages, ready, pieces)
        self.pool.release(sequence.pages)
        sequence.slot, sequence.pages = None, []

    def drop(self, sequence: Sample) -> None:
        """Removes a sequence that runs or waits."""
        if sequence.slot is not None:
            self.finish(sequence)
            return
        for prompt in self._prompts():
            if sequence in prompt.waiting:
                prompt.waiting.remove(sequence)
                if not prompt.waiting:
                    self._forget(prompt)
                return

    def preempt(self, sequence: Sample) -> None:
        """Puts a running sequence at the front of the queue and frees its slot and pages."""
        self.finish(sequence)
        self.add(sequence, first=True)

    def forget_prompts(self, but: Prompt | None = None) -> None:
        """Puts prompts that have been read back into the queue, to be read again.

        Args:
          but: a prompt that stays.
        """
        for prompt in reversed(list(self._reading.values())):
            if prompt is not but:
                self._unread(prompt)

    def _unread(self, prompt: Prompt) -> None:
        self._forget(prompt)
        self._queue[prompt.tokens] = prompt
        self._queue.move_to_end(prompt.tokens, last=False)

    def _forget(self, prompt: Prompt) -> None:
        """Removes a prompt and frees its pages and its row."""
        self._reading.pop(prompt.tokens, None)
        self._queue.pop(prompt.tokens, None)
        if prompt.pages is not None:
            self.pool.release(prompt.pages)
            self._rows.append(prompt.row)
        prompt.pages, prompt.row, prompt.read, prompt.records = None, None, 0, []

    # --- pages that serve other prompts ----------------------------------------------------------

    def has_read(self, prompt: Prompt, count: int, records: PieceRecords | None) -> None:
        """Takes note that `count` more positions of a prompt were read."""
        prompt.read += count
        prompt.state = None
        if records is not None:
            prompt.records.append(records)
        if self._reuse is not None:
            ready = len(prompt.tokens) - self._reuse.ahead
            if self._reuse.margin is None:  # a last piece is not of the width that others have
                ready = prompt.read // self._reuse.multiple * self._reuse.multiple
            self._remember(prompt.keys, prompt.pages, min(ready, prompt.read), prompt.records)

    def _remember(
        self, keys: Iterable[bytes], pages: list[int], ready: int, records: list[PieceRecords]
    ) -> None:
        """Remembers the pages that end at most at position `ready`."""
        size = self.page_size
        for number, (page, key) in enumerate(zip(pages, keys, strict=False)):
            if (number + 1) * size > ready:
                return
            if self.pool.knows(page):
                continue
            those = records_between(records, number * size, (number + 1) * size)
            self.pool.remember(page, key, those)

    def row_to_keep(self, prompt: Prompt, count: int) -> int | None:
        """The row for the recurrent state after the next `count` positions of a prompt, if any."""
        number, rest = divmod(prompt.read + count, self.page_size)
        if self._states is None or rest or number > len(prompt.keys):
            return None
        if (prompt.read + count) % self._reuse.multiple:
            return None
        key = prompt.keys[number - 1]
        return self._states.take(key) if self._states.find(key) is None else None

    def cached(self, tokens: Sequence[int]) -> int:
        """Number of the first tokens that pages hold."""
        if self._reuse is None:
            return 0
        return len(self.pool.find(self._reuse.keys(tokens, self.page_size))) * self.page_size

    def _look_up(self, prompt: Prompt) -> list[int]:
        """Looks for the beginning of a prompt in pages, and returns these.

        The states before the root are computed anew for the draft, which starts from them.
        """
        if self._reuse is None:
            return []
        size, multiple = self.page_size, self._reuse.multiple
        if prompt.keys is None:
            prompt.keys = [*self._reuse.keys(prompt.tokens, size)]
        most = max(len(prompt.tokens) - 1 - max(self._reuse.ahead, 1), 0) // size
        pages = self.pool.find(prompt.keys[:most])
        count = len(pages) * size // multiple * multiple // size
        prompt.state = None
        if self._states is not None:
            if self._reuse.margin is not None:
                prompt.boundary = most * size
            while count and (row := self._states.find(prompt.keys[count - 1])) is None:
                count -= multiple // size
            prompt.state = row if count else None
        prompt.read = count * size
        return pages[:count]

    def forget_pages(self) -> None:
        """Forgets what pages hold, before weights or pages change."""
        self.pool.forget()
        if self._states is not None:
            self._states.forget()
        for sequence in self.running.values():
            sequence.reusable = 0

    # --- pages of running sequences --------------------------------------------------------------

    def reserve(self) -> Sample | None:
        """Gives every running sequence the pages that it may need, the earliest first.

        Where there are too few pages, prompts that were read and wait lose theirs first.

        Returns:
          the latest sequence, if pages are missing nevertheless: the caller must `preempt` it and
          call this again. Else None.
        """
        for sequence in self.running.values():
            missing = self._needs(sequence) - len(sequence.pages)
            if missing <= 0:
                continue
            while missing > self.pool.free and self._reading:
                self._unread(self._reading[next(reversed(self._reading))])
            if missing > self.pool.free:
                return next(reversed(self.running.values()))
            sequence.pages += self.pool.take(missing)
        return None

    def _needs(self, sequence: Sample) -> int:
        """Number of pages that a sequence needs until pages are reserved again."""
        ahead = min(sequence.length + self.ahead, sequence.job.limit)
        return pages_for(ahead, self.page_size)

    def _soon(self, sequence: Sample) -> int:
        """Number of further pages that a sequence needs until pages have been reserved twice.

        A sequence that has not started needs one more, for a copy of a page of its prompt.
        """
        ahead = min(sequence.length + 2 * self.ahead, sequence.job.limit)
        copied = sequence.slot is None
        return max(0, pages_for(ahead, self.page_size) + copied - len(sequence.pages))

    # --- reading prompts, starting sequences -----------------------------------------------------

    def next_to_read(
        self, count: Callable[[int], int], width: Callable[[Prompt], int]
    ) -> list[Prompt]:
        """Prompts of equal width of which to read the next piece, as many as slots are free for.

        Args:
          count: function that returns how many pieces of a width are read at once.
          width: function that returns the padded length of a prompt's next piece.
        """
        chosen = [p for p in self._reading.values() if not p.is_ready]
        if chosen:
            same = width(chosen[0])
            chosen = [p for p in chosen if width(p) == same][: count(same)]
        wanted = len(self._slots) - sum(len(p.waiting) for p in self._reading.values())
        while wanted > 0 and self._queue and self._rows:
            prompt = self._queue[self._next_key()]
            cached = self._look_up(prompt)
            if chosen and len(chosen) == count(width(chosen[0])):
                break
            if prompt.to_read and chosen and width(prompt) != width(chosen[0]):
                break
            if not self._open(prompt, cached):
                break
            wanted -= len(prompt.waiting)
            if prompt.to_read:
                chosen.append(prompt)
        return chosen

    def _next_key(self) -> Key:
        first = next(iter(self._queue))
        if self._expected is None or self._queue[first].waiting[0].admitted:  # preempted
            return first
        return max(self._queue, key=lambda key: self._expected(self._queue[key].waiting[0]) or 0.0)

    def _open(self, prompt: Prompt, cached: list[int]) -> bool:
        """Gives a prompt pages if it and one of its sequences fit beside those that run.

        Args:
          cached: the pages that hold its beginning.

        Returns:
          whether it did.
        """
        wanted = pages_for(len(prompt.tokens) - 1, self.page_size) - len(cached)
        soon = self._soon(prompt.waiting[0]) + sum(map(self._soon, self.running.values()))
        free = self.pool.free - self.pool.idle(cached)
        if free < wanted + soon and (self.running or self._reading or free < wanted):
            return False
        prompt.cached = prompt.read
        self.queried += len(prompt.tokens)
        self.hits += prompt.cached
        prompt.records = [piece for page in cached for piece in self.pool.records(page)]
        del self._queue[prompt.tokens]
        self._reading[prompt.tokens] = prompt
        prompt.pages = self.pool.share(cached) + self.pool.take(wanted)
        prompt.row = self._rows.popleft()
        return True

    def starts(self) -> list[Start]:
        """Puts sequences whose prompts have been read into free slots."""
        starts = []
        for prompt in list(self._reading.values()):
            while prompt.is_ready and prompt.waiting and self._slots:
                start = self._start(prompt)
                if start is None and not self.running:  # no sequence would free pages by ending
                    self.forget_prompts(but=prompt)
                    start = self._start(prompt)
                if start is None:
                    return starts
                starts.append(start)
            if prompt.is_ready and not prompt.waiting:
                self._forget(prompt)
        return starts

    def _start(self, prompt: Prompt) -> Start | None:
        """Starts the first sequence that waits for a prompt; None if there are too few pages."""
        sequence = prompt.waiting[0]
        needs = max(self._needs(sequence), len(prompt.pages))
        full = max(len(prompt.tokens) - 1 - self._rewritten, 0) // self.page_size
        last = len(prompt.waiting) == 1
        shared = len(prompt.pages) if last else full
        if needs - shared > self.pool.free:
            return None
        prompt.waiting.popleft()
        sequence.pages = self.pool.share(prompt.pages[:shared]) + self.pool.take(needs - shared)
        copies = tuple(zip(prompt.pages[shared:], sequence.pages[shared:], strict=False))
        sequence.slot = self._slots.popleft()
        if not sequence.admitted:
            sequence.cached = prompt.cached
        sequence.admitted, sequence.reusable = True, len(prompt.tokens)
        sequence.take_prompt(prompt.records)
        self.running[sequence.slot] = sequence
        return Start(sequence, prompt.row, copies)


class LengthHistory:
    """Lengths of earlier samples by prompt, from which those of later samples are expected.

    For a prompt without samples the average over all prompts is expected. Keys are hashes of
    prompts.
    """

    DECAY = 0.7  # weight of the earlier lengths of a prompt when a new length is added
    MOST = 1 << 16  # the most prompts that are remembered, those that were sampled last

    def __init__(self):
        self._of: dict[int, float] = {}
        self._all: float | None = None

    def add(self, key: int, length: int) -> None:
        self._of[key] = self.DECAY * self._of.pop(key, length) + (1 - self.DECAY) * length
        if len(self._of) > self.MOST:
            del self._of[next(iter(self._of))]
        self._all = length if self._all is None else 0.99 * self._all + 0.01 * length

    def add_longer_than(self, key: int, length: int) -> None:
        """Adds the length of an aborted sample if it is longer than was expected."""
        if length > (self.expected(key) or 0.0):
            self.add(key, length)

    def expected(self, key: int) -> float | None:
        return self._of.get(key, self._all)
