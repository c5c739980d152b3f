"""Which pages of the caches are free, and which hold the beginning of a prompt (a prefix cache)."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

NULL_PAGE = 0  # writes to positions without a page go here


class PagePool:
    """Pages 1 .. count - 1; page 0 is the null page.

    A page is held by one sequence or more: the full pages of a prompt belong to all its samples. A
    page that is remembered keeps its content while no sequence holds it, until it is taken: the
    others are taken first, then those that were released the longest time ago.
    """

    def __init__(self, count: int):
        self.count = count
        self._free = list(range(count - 1, 0, -1))
        self._holders = [0] * count
        self._pages: dict[bytes, int] = {}  # remembered ones, by key
        self._keys: dict[int, tuple[bytes, Any]] = {}  # their keys and records
        self._idle: dict[int, None] = {}  # those without a holder, the oldest first

    @property
    def free(self) -> int:
        """Number of pages that no sequence holds."""
        return len(self._free) + len(self._idle)

    @property
    def used(self) -> int:
        return self.count - 1 - self.free

    def take(self, count: int) -> list[int]:
        """Takes `count` pages, of which there must be so many free ones."""
        pages = []
        for _ in range(count):
            if not self._free:
                self._forget(next(iter(self._idle)))
            pages.append(self._free.pop())
            self._holders[pages[-1]] = 1
        return pages

    def share(self, pages: Iterable[int]) -> list[int]:
        """Counts one more holder of each page; returns the pages."""
        pages = list(pages)
        for page in pages:
            if not self._holders[page] and page not in self._idle:
                raise ValueError(f"page {page} is free and cannot be shared")
            self._idle.pop(page, None)
            self._holders[page] += 1
        return pages

    def release(self, pages: Sequence[int]) -> None:
        """Counts one holder less of each page; pages without a holder become free."""
        for page in reversed(pages):  # a prefix is of no use without its first page
            if not self._holders[page]:
                raise ValueError(f"page {page} is released and is not held")
            self._holders[page] -= 1
            if self._holders[page]:
                continue
            if page in self._keys:
                self._idle[page] = None
            else:
                self._free.append(page)

    # --- what pages hold -------------------------------------------------------------------------

    def remember(self, page: int, key: bytes, records: Any = None) -> None:
        """Lets a page that is held be found by a key, unless another page has it."""
        if page not in self._keys and key not in self._pages:
            self._pages[key], self._keys[page] = page, (key, records)

    def knows(self, page: int) -> bool:
        """Whether a page is remembered."""
        return page in self._keys

    def find(self, keys: Iterable[bytes]) -> list[int]:
        """Returns the pages of the first keys, up to the first key that no page has."""
        pages = []
        for key in keys:
            if key not in self._pages:
                break
            pages.append(self._pages[key])
        return pages

    def records(self, page: int) -> Any:
        """Returns what was remembered with a page."""
        return self._keys[page][1]

    def idle(self, pages: Iterable[int]) -> int:
        """Counts the pages that no sequence holds."""
        return sum(not self._holders[page] for page in pages)

    def forget(self) -> None:
        """Forgets what all pages hold, whose content is no longer that of the weights."""
        for page in list(self._keys):
            self._forget(page)

    def _forget(self, page: int) -> None:
        key, _ = self._keys.pop(page)
        del self._pages[key]
        if page in self._idle:
            del self._idle[page]
            self._free.append(page)


class StateRows:
    """Rows of recurrent states, each of which was left by the end of a page.

    Args:
      rows: the rows; the one that was not used the longest time is taken first.
    """

    def __init__(self, rows: Iterable[int]):
        self._free, self._rows = list(rows), {}

    def find(self, key: bytes) -> int | None:
        """Returns the row with the state at the end of the page that has a key."""
        row = self._rows.pop(key, None)
        if row is not None:
            self._rows[key] = row
        return row

    def take(self, key: bytes) -> int:
        """Returns the row that is to be written with the state at the end of a page."""
        if not self._free:
            self._free.append(self._rows.pop(next(iter(self._rows))))
        self._rows[key] = self._free.pop()
        return self._rows[key]

    def forget(self) -> None:
        """Forgets what all rows hold."""
        self._free += self._rows.values()
        self._rows = {}


@dataclasses.dataclass(frozen=True)
class Reuse:
    """How the pages of one prompt serve others that begin with the same tokens.

    Attributes:
      ahead: number of tokens behind a page on which its content depends, by the rows of the draft.
      multiple: number of positions of which a reused prefix has a multiple.
      margin: number of tokens at the end of a sample of which the draft may not have written all
        rows; None: pages of generated tokens are not reused.
    """

    ahead: int
    multiple: int
    margin: int | None

    def keys(self, tokens: Sequence[int], size: int) -> Iterator[bytes]:
        """Yields a key of each full page of a prompt, which stands for all tokens up to its end."""
        numbers, digest, begin = np.asarray(tokens, np.int32), hashlib.blake2b(digest_size=16), 0
        for end in range(size + self.ahead, len(numbers) + 1, size):
            digest.update(numbers[begin:end].tobytes())
            begin = end
            yield digest.digest()


def pages_for(positions: int, size: int) -> int:
    """The number of pages of `size` positions that hold so many positions."""
    return -(-positions // size)
