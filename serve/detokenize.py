"""Incremental detokenization: text is given out once no later token can change it.

Two things are held back: an incomplete character (`TextStream`), and what could be the beginning of
a stop string, because the text of a sample ends before it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from specjax.engine.stops import TextStream

Decode = Callable[[Sequence[int]], str]


class IncrementalDetokenizer:
    """The text of one sample while it grows.

    Args:
      decode: token ids to text; None: there is no tokenizer, and all text is empty.
      stop: strings that end the sample.

    Attributes:
      given: number of characters that were given out.
    """

    def __init__(self, decode: Decode | None, stop: Sequence[str] = ()):
        self._stop, self.given = tuple(stop), 0
        self._stream = TextStream(decode or (lambda ids: ""))
        self._whole = ""  # all characters so far

    def push(self, tokens: Sequence[int], text: str | None = None) -> str:
        """Adds tokens of a sample that goes on; returns the new text that is final.

        Args:
          text: of the sample so far, if the engine has decoded it already (see `News`); either
            always or never.
        """
        text = self._take(tokens, text)
        return self._give(text[: len(text) - self._held(text)])

    def finish(self, tokens: Sequence[int], text: str, so_far: str | None = None) -> str:
        """Adds the last tokens of a sample; returns the rest of its text.

        Args:
          text: of the whole sample, as the batch API gives it. so_far: as in `push`.
        """
        if text.startswith(self._whole[: self.given]):
            return self._give(text)
        # A tokenizer whose text depends on what follows: the stream's is as good.
        return self._give(self._take(tokens, so_far) + self._stream.rest)

    def _take(self, tokens: Sequence[int], text: str | None) -> str:
        if text is None:
            self._stream.extend(tokens)
            text = self._stream.text
        self._whole = text
        return text

    def _give(self, text: str) -> str:
        piece = text[self.given :]
        self.given = max(self.given, len(text))
        return piece

    def _held(self, text: str) -> int:
        """Number of characters at the end that could be the beginning of a stop string."""
        longest = max(map(len, self._stop), default=1) - 1
        for count in range(min(longest, len(text)), 0, -1):
            end = text[len(text) - count :]
            if any(len(string) > count and string.startswith(end) for string in self._stop):
                return count
        return 0
