"""Stop strings: found on the host, in the text, however tokens and chunks cut it up.

A sample's text grows token by token, and each token's text is searched as if it had come alone.
So where a sample ends follows from its tokens, not from how many of them a chunk brought.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

INCOMPLETE = "\ufffd"  # what a tokenizer makes of the first bytes of a character


class TextStream:
    """The text of a growing list of tokens; what it has given out never changes.

    A few tokens are decoded at a time, with the ones before them as context, because the text of a
    token may depend on its left neighbour (a space that is dropped at the start) and a character
    may take several tokens. The last, incomplete one is held back.

    Attributes:
      text: so far.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]):
        self._decode = decode
        self._ids: list[int] = []
        # Tokens from _context on are decoded; those before _fresh are there for context only.
        self._context = self._fresh = 0
        self._known = 0  # characters of the decoded window that `text` has already
        self.text = ""

    def push(self, token: int) -> None:
        """Appends a token."""
        self._ids.append(token)
        window = self._decode(self._ids[self._context :])
        whole = window.rstrip(INCOMPLETE)
        if len(whole) <= self._known:
            return
        self.text += whole[self._known :]
        self._known = len(whole)
        if whole == window:
            self._context, self._fresh = self._fresh, len(self._ids)
            self._known = len(self._decode(self._ids[self._context :]))

    @property
    def rest(self) -> str:
        """What is held back: the first bytes of a character that has not been completed."""
        return self._decode(self._ids[self._context :])[self._known :]


class Cut(NamedTuple):
    """Where a sample ends: how many of its generated tokens it keeps, and its text."""

    tokens: int
    text: str


class StopStrings:
    """Looks for stop strings in one sample.

    Args:
      decode: token ids to text. include: the text keeps the stop string.
      min_tokens: strings completed by one of the first `min_tokens` tokens are passed over, as
        stop tokens are masked there.
    """

    def __init__(
        self,
        strings: Sequence[str],
        decode: Callable[[Sequence[int]], str],
        include: bool = False,
        min_tokens: int = 0,
    ):
        self._strings, self._include, self._min_tokens = strings, include, min_tokens
        self._stream = TextStream(decode)
        self._count = 0

    def feed(self, tokens: Sequence[int]) -> Cut | None:
        """Takes in the next tokens; where the sample ends, if a stop string is completed.

        Of several strings that one token completes, the one that begins first counts.
        """
        for token in tokens:
            searched = len(self._stream.text)
            self._stream.push(token)
            self._count += 1
            if self._count <= self._min_tokens:
                continue
            found = self._find(searched)
            if found is not None:
                return Cut(self._count, self._stream.text[:found])
        return None

    def _find(self, searched: int) -> int | None:
        """Where the text is cut, if a string ends past its first `searched` characters."""
        text, found = self._stream.text, []
        for string in self._strings:
            at = text.find(string, max(0, searched - len(string) + 1))
            if at >= 0:
                found.append((at, at + len(string) if self._include else at))
        return min(found)[1] if found else None
