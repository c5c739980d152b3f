"""The text of a sample while it grows: whole characters, stop strings, and what is final.

Text is held back as long as a later token could change it: an incomplete character (`TextStream`),
and a possible beginning of a stop string (`StopStrings.text`), because the text of a sample
ends before the stop string.

Stop strings are looked for after each token (`StopStrings`). So the end of a sample depends on its
tokens only, and not on how many of them a chunk emitted. Decoding leaves special tokens out: a stop
string that is one is a stop token, see `request.special_stops`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

Decode = Callable[[Sequence[int]], str]
INCOMPLETE = "\ufffd"  # the text that a tokenizer gives the first bytes of a character
BYTES = 4  # the most bytes, and so the most tokens, of a character
WINDOW = 24  # approximate number of tokens that are decoded at a time


class TextStream:
    """Decodes a growing list of tokens; `text` only grows.

    A few tokens are decoded at a time, after some earlier ones for context: a token's text may
    depend on the token before it (a space is dropped at the start), and a character may take
    several tokens. Text that ends in `INCOMPLETE` is held back. Tokens whose text is settled leave
    the window, so that a long run of tokens without a whole character is not decoded again for
    every further one.

    Attributes:
      text: text of the tokens so far, in whole characters.
    """

    def __init__(self, decode: Decode):
        self._decode = decode
        self._ids: list[int] = []  # the window; ids before _fresh are only context
        self._window = ""  # its text
        self._fresh = 0
        self._grown = 0  # tokens of the window when `text` grew last
        self._known = 0  # number of characters of the window that `text` has already
        self._held = 0  # number of INCOMPLETEs that left the window and are not in `text` yet
        self.text = ""

    def extend(self, tokens: Sequence[int]) -> None:
        """Appends tokens, and decodes once."""
        if not tokens:
            return
        self._ids = [*self._ids, *tokens]
        self._window = self._decode(self._ids)
        whole = self._window.rstrip(INCOMPLETE)
        if len(whole) > self._known:
            self._grow(whole)
        elif len(self._ids) - self._grown > 2 * BYTES:
            self._shrink()

    @property
    def rest(self) -> str:
        """The text of an incomplete character, which is not in `text` yet."""
        return INCOMPLETE * self._held + self._window[self._known :]

    def _grow(self, whole: str) -> None:
        """Appends the window's whole characters to `text`, and drops their tokens."""
        self.text += INCOMPLETE * self._held + whole[self._known :]
        self._known, self._held = len(whole), 0
        if whole == self._window:
            if self._fresh:
                self._ids = self._ids[self._fresh :]
                self._window = self._decode(self._ids)
                self._known = len(self._window)
            self._fresh = len(self._ids)
        elif len(self._ids) > WINDOW:  # the window has always ended within a character
            tail = self._ids[-2 * BYTES :]
            window = self._decode(tail)
            if known := len(window.rstrip(INCOMPLETE)):
                self._ids, self._window, self._known, self._fresh = tail, window, known, 0
        self._grown = len(self._ids)

    def _shrink(self) -> None:
        """Drops tokens that have no character and cannot become part of one any more."""
        before, run = self._ids[: self._grown], self._ids[self._grown :]
        if self._window:  # not at the start of the text, where a space has no text either
            run = [token for token in run if self._decode([token])]
        # Drop the middle of the run, cut where the two sides do not form a character.
        for cut in range(BYTES):
            kept = before + run[:cut] + run[max(cut, len(run) - BYTES) :]
            window = self._decode(kept)
            gone = len(self._window) - len(window)
            if gone >= 0 and window + INCOMPLETE * gone == self._window:
                self._ids, self._window = kept, window
                self._held += gone
                return


class Cut(NamedTuple):
    """The end of a sample: how many of its generated tokens it keeps, and its text."""

    tokens: int
    text: str


class StopStrings:
    """Looks for stop strings in one sample.

    Args:
      strings: the stop strings.
      decode: function from token ids to text without special tokens.
      include: whether the text keeps the stop string.
      min_tokens: number of tokens at the beginning that cannot complete a stop string; stop tokens
        are masked there, too.
    """

    def __init__(
        self, strings: Sequence[str], decode: Decode, include: bool = False, min_tokens: int = 0
    ):
        self._strings, self._include, self._min_tokens = strings, include, min_tokens
        self._stream, self._count = TextStream(decode), 0

    @property
    def text(self) -> str:
        """The text of the tokens so far, without an end that may be the beginning of a stop string.

        It is not cut at a stop string that was found.
        """
        text = self._stream.text
        for begin in range(max(0, len(text) - max(map(len, self._strings)) + 1), len(text)):
            end = text[begin:]
            if any(len(s) > len(end) and s.startswith(end) for s in self._strings):
                return text[:begin]
        return text

    def skip(self, tokens: Sequence[int]) -> None:
        """Takes in tokens that cannot end the sample, for it goes on from them."""
        self._stream.extend(tokens)
        self._count += len(tokens)

    def feed(self, tokens: Sequence[int]) -> Cut | None:
        """Takes in the next tokens; returns where the sample ends once a stop string is complete.

        If one token completes several strings, the one that begins first ends the sample.
        """
        for token in tokens:
            searched = len(self._stream.text)
            self._stream.extend((token,))
            self._count += 1
            if self._count <= self._min_tokens:
                continue
            text = self._stream.text
            matches = [
                (begin, len(string), string)
                for string in self._strings
                if (begin := text.find(string, max(0, searched - len(string) + 1))) >= 0
            ]
            if matches:
                begin, _, string = min(matches)
                return Cut(self._count, text[:begin] + string * self._include)
        return None


class TextPieces:
    """The text of one sample while it is generated, in pieces that are final.

    Args:
      decode: function from token ids to text; None: without a tokenizer, all text is empty.

    Attributes:
      returned: number of characters that were returned.
    """

    def __init__(self, decode: Decode | None):
        self._stream = TextStream(decode or (lambda ids: ""))
        self._text, self.returned = "", 0

    def push(self, tokens: Sequence[int], text: str | None = None) -> str:
        """Adds tokens of a sample that goes on; returns the new text.

        Args:
          text: the sample's text so far, if the engine decodes it (see `News`); given in all calls
            or in none.
        """
        if text is None:
            self._stream.extend(tokens)
            text = self._stream.text
        self._text = text
        return self._new(text)

    def finish(self, tokens: Sequence[int], whole: str, text: str | None = None) -> str:
        """Adds the last tokens of a sample; returns the rest of its text.

        Args:
          tokens: tokens since the last call.
          whole: the text of the whole sample, as the batch API returns it.
          text: as in `push`.
        """
        if whole.startswith(self._text[: self.returned]):
            return self._new(whole)
        # The tokenizer changed earlier text: go on with the text of the stream.
        return self.push(tokens, text) + self._new(self._text + self._stream.rest)

    def _new(self, text: str) -> str:
        piece = text[self.returned :]
        self.returned = max(self.returned, len(text))
        return piece


class TextOffsets:
    """The places of the tokens of a growing text.

    A token that begins or continues a character of several tokens has the place of the character,
    and a token without text, such as a special one that is left out, that of what follows.

    Args:
      decode: as in `TextPieces`.
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
            self._stream.extend((token,))
            new = self._stream.text[place - self.start :]
            # Bytes of earlier tokens that turn out to be no character come first.
            others = len(new) - len(new.lstrip(INCOMPLETE))
            places.append(place + others % max(len(new), 1))
        return places
