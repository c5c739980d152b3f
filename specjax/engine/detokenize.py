"""Incremental detokenization: text is returned once no later token can change it.

Two kinds of text are held back: an incomplete character (`TextStream`), and a possible beginning of
a stop string, because the text of a sample ends before the stop string.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from specjax.engine.sequence import News
from specjax.engine.stops import INCOMPLETE, TextStream

Decode = Callable[[Sequence[int]], str]


class IncrementalDetokenizer:
    """The text of one sample that is still generated.

    Args:
      decode: function from token ids to text; None: without a tokenizer, all text is empty.
      stop: strings that end the sample.

    Attributes:
      returned: number of characters that were returned.
    """

    def __init__(self, decode: Decode | None, stop: Sequence[str] = ()):
        self._stop, self.returned = tuple(stop), 0
        self._stream = TextStream(decode or (lambda ids: ""))
        self._whole = ""  # all characters so far

    def push(self, tokens: Sequence[int], text: str | None = None) -> str:
        """Adds tokens of a sample that goes on; returns the new text that is final.

        Args:
          text: the sample's text so far, if the engine decodes it (see `News`); given in all calls
            or in none.
        """
        text = self._extend(tokens, text)
        return self._return_new(text[: len(text) - self._held(text)])

    def finish(self, tokens: Sequence[int], text: str, so_far: str | None = None) -> str:
        """Adds the last tokens of a sample; returns the rest of its text.

        Args:
          tokens: tokens since the last call.
          text: the text of the whole sample, as the batch API returns it.
          so_far: `text` of `push`.
        """
        if text.startswith(self._whole[: self.returned]):
            return self._return_new(text)
        # The tokenizer changed earlier text: go on with the text of the stream.
        return self._return_new(self._extend(tokens, so_far) + self._stream.rest)

    def _extend(self, tokens: Sequence[int], text: str | None) -> str:
        if text is None:
            self._stream.extend(tokens)
            text = self._stream.text
        self._whole = text
        return text

    def _return_new(self, text: str) -> str:
        piece = text[self.returned :]
        self.returned = max(self.returned, len(text))
        return piece

    def _held(self, text: str) -> int:
        """Number of characters at the end that could be the beginning of a stop string."""
        longest = max(map(len, self._stop), default=1) - 1
        for count in range(min(longest, len(text)), 0, -1):
            end = text[len(text) - count :]
            if any(len(string) > count and string.startswith(end) for string in self._stop):
                return count
        return 0


class TextOffsets:
    """The places of the tokens of a growing text.

    A token that begins or continues a character of several tokens has the place of the character,
    and a token without text, such as a special one that is left out, that of what follows.

    Args:
      decode: as in `IncrementalDetokenizer`.
      start: number of characters before the text.
    """

    def __init__(self, decode: Decode | None, start: int = 0):
        self._stream, self.start = None if decode is None else TextStream(decode), start

    @property
    def end(self) -> int:
        """The place of the next token."""
        return self.start + (0 if self._stream is None else len(self._stream.text))

    def extend(self, tokens: Sequence[int]) -> list[int]:
        """Adds tokens; returns the place of each, in characters."""
        if self._stream is None:
            return [self.start] * len(tokens)
        places = []
        for token in tokens:
            place = self.end
            self._stream.push(token)
            news = self._stream.text[place - self.start :]
            # Bytes of earlier tokens that turn out to be no character come first.
            others = len(news) - len(news.lstrip(INCOMPLETE))
            places.append(place + others % max(len(news), 1))
        return places


class SampleStream:
    """The text of one sample while the engine generates it.

    Args:
      decode: as in `IncrementalDetokenizer`.
      stop: strings that end the sample.
    """

    def __init__(self, decode: Decode | None, stop: Sequence[str] = ()):
        self._stream = IncrementalDetokenizer(decode, stop)
        self._tokens: list[int] = []
        self._text: str | None = None
        self._known = 0

    def add(self, news: News) -> None:
        """Takes in the tokens of a chunk; `invariant` mode may report the same ones again."""
        self._tokens += news.since(self._known).tokens
        self._text = news.text
        self._known = max(self._known, news.at + len(news.tokens))

    def take(self, text: str | None = None) -> tuple[list[int], str]:
        """Returns the tokens since the last call, and the text that is final since then.

        Args:
          text: the text of the whole sample, once it has ended; it may end before its last tokens.
        """
        tokens, self._tokens = self._tokens, []
        if text is None:
            return tokens, self._stream.push(tokens, self._text)
        return tokens, self._stream.finish(tokens, text, self._text)
