"""Which pages of the caches are free: a free list and reference counts."""

from __future__ import annotations

from collections.abc import Iterable

NULL_PAGE = 0  # writes to positions without a page go here


class PagePool:
    """Pages 1 .. count - 1; page 0 is the null page.

    A page is held by one sequence or more: the full pages of a prompt belong to all its samples.
    """

    def __init__(self, count: int):
        self.count = count
        self._free = list(range(count - 1, 0, -1))
        self._holders = [0] * count

    @property
    def free(self) -> int:
        """Number of free pages."""
        return len(self._free)

    @property
    def used(self) -> int:
        return self.count - 1 - len(self._free)

    def take(self, count: int) -> list[int]:
        """Takes `count` pages, of which there must be so many free ones."""
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._holders[page] = 1
        return pages

    def share(self, pages: Iterable[int]) -> list[int]:
        """Counts one more holder of each page; returns the pages."""
        pages = list(pages)
        for page in pages:
            if not self._holders[page]:
                raise ValueError(f"page {page} is free and cannot be shared")
            self._holders[page] += 1
        return pages

    def release(self, pages: Iterable[int]) -> None:
        """Counts one holder less of each page; pages without a holder become free."""
        for page in pages:
            if not self._holders[page]:
                raise ValueError(f"page {page} is released and is not held")
            self._holders[page] -= 1
            if not self._holders[page]:
                self._free.append(page)


def pages_for(positions: int, size: int) -> int:
    """The number of pages of `size` positions that hold so many positions."""
    return -(-positions // size)
