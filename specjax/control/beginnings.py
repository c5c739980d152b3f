"""What a strategy takes that runs after another one, before and beside its rounds.

What begins is slower in its first chunk, whatever it is. And a draft that runs after plain decoding
has to read what was emitted meanwhile, which may take as long as many rounds.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

_CATCH_UP_ROWS = 128  # that a draft reads at most: the source remembers no more
_AT_ONCE = 32  # that it reads in one go; nobody knows what one takes beside any beginning
_MEDIAN_OF = 5  # the last ones
_MOST_CATCH_UP = 64  # plain rounds: more is taken for a hiccup of the machine
_MOST_BEGIN = 4  # the same of a strategy that has nothing to read


class Beginnings:
    """Medians per bucket of the batch size of what was seen lately, 0 where nothing was."""

    def __init__(self):
        self._first: dict[int, list[float]] = {}  # seconds that a first chunk takes longer
        self._per_row: dict[int, list[float]] = {}  # seconds that a row takes to be read

    def first_seconds(self, bucket: int) -> float:
        """Expected seconds that a first chunk takes longer."""
        return _median(self._first, bucket)

    def reading_seconds(self, bucket: int, rows: int) -> float:
        """Expected seconds until a draft has read `rows` tokens of plain decoding."""
        return _median(self._per_row, bucket) * _read(rows)

    def learn(self, bucket: int, rows: int, late: float, plain: float) -> float:
        """Takes in a first chunk.

        Args:
          rows: tokens that had to be read.
          late: seconds that it took longer than a chunk of so many rounds.
          plain: seconds of a plain round.

        Returns:
          Of `late`, what a beginning can take.
        """
        rows = _read(rows)
        spent = min(late, (_MOST_CATCH_UP if rows else _MOST_BEGIN) * plain)
        if rows:
            reading = max(spent - self.first_seconds(bucket), 0.0)
            seen, own = self._per_row, reading / rows
        else:
            seen, own = self._first, spent
        latest = seen.setdefault(bucket, [])
        latest.append(own)
        del latest[:-_MEDIAN_OF]
        return spent

    def state(self) -> dict[str, Any]:
        named = {"first": self._first, "per_row": self._per_row}
        return {key: {str(at): list(v) for at, v in seen.items()} for key, seen in named.items()}

    def load(self, state: Mapping[str, Any]) -> None:
        self._first, self._per_row = (
            {int(at): list(v) for at, v in state.get(key, {}).items()}
            for key in ("first", "per_row")
        )


def _median(seen: Mapping[int, list[float]], bucket: int) -> float:
    latest = seen.get(bucket)
    return statistics.median(latest) if latest else 0.0


def _read(rows: int) -> int:
    """Rows of reading so many tokens of plain decoding, if that takes a time of its own."""
    rows = min(rows, _CATCH_UP_ROWS)
    return _AT_ONCE * -(-rows // _AT_ONCE) if rows > _AT_ONCE else 0
