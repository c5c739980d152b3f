"""Stop strings: found on the host, in the text, however tokens and chunks cut it up.

A sample's text grows token by token, and each token's text is searched as if it had come alone.
So where a sample ends follows from its tokens, not from how many of them a chunk brought.

Special tokens are not part of the text, and yet a stop string may be one, or hold one: what is
searched as well is the text with their names where they stand. A name counts as a whole: what holds
only a part of it, as `eos` of `<|eos|>`, is not there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

INCOMPLETE = "\ufffd"  # what a tokenizer makes of the first bytes of a character
BYTES = 4  # of a character, at most; so many tokens can be
WINDOW = 24  # tokens that are decoded at a time, about


class TextStream:
    """The text of a growing list of tokens; what it has given out never changes.

    A few tokens are decoded at a time, with the ones before them as context, because the text of a
    token may depend on its left neighbour (a space that is dropped at the start) and a character
    may take several tokens. The last, incomplete one is held back, as is whatever else ends in
    `INCOMPLETE`. Tokens that bring no character, however many follow each other, are not decoded
    again and again: what nothing can change any more leaves the window.

    Attributes:
      text: so far.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]):
        self._decode = decode
        self._ids: list[int] = []  # the window; those before _fresh are there for context only
        self._window = ""  # its text
        self._fresh = 0
        self._grown = 0  # tokens of the window when `text` grew last
        self._known = 0  # characters of the window that `text` has already
        self._held = 0  # INCOMPLETEs that have left the window, and are not in `text` yet
        self.text = ""

    def push(self, token: int) -> None:
        """Appends a token."""
        self.extend((token,))

    def extend(self, tokens: Sequence[int]) -> None:
        """Appends tokens, at the cost of one."""
        if not tokens:
            return
        self._ids = [*self._ids, *tokens]
        self._window = self._decode(self._ids)
        whole = self._window.rstrip(INCOMPLETE)
        if len(whole) > self._known:
            self._grow(whole)
        elif len(self._ids) - self._grown > 2 * BYTES:
            self._leave_out()

    @property
    def rest(self) -> str:
        """What is held back: the first bytes of a character that has not been completed."""
        return INCOMPLETE * self._held + self._window[self._known :]

    def _grow(self, whole: str) -> None:
        """Gives out what the window has in whole characters."""
        self.text += INCOMPLETE * self._held + whole[self._known :]
        self._known, self._held = len(whole), 0
        if whole == self._window:
            if self._fresh:
                self._ids = self._ids[self._fresh :]
                self._window = self._decode(self._ids)
                self._known = len(self._window)
            self._fresh = len(self._ids)
        elif len(self._ids) > WINDOW:  # it has ended in the middle of a character time and again
            tail = self._ids[-2 * BYTES :]
            window = self._decode(tail)
            if known := len(window.rstrip(INCOMPLETE)):
                self._ids, self._window, self._known, self._fresh = tail, window, known, 0
        self._grown = len(self._ids)

    def _leave_out(self) -> None:
        """Drops what brought no character and cannot become a part of one any more."""
        before, run = self._ids[: self._grown], self._ids[self._grown :]
        if self._window:  # tokens without any text; at the very start a space may look like one
            run = [token for token in run if self._decode([token])]
        for cut in range(BYTES):  # where what is left on both sides makes no character
            kept = before + run[:cut] + run[max(cut, len(run) - BYTES) :]
            window = self._decode(kept)
            gone = len(self._window) - len(window)
            if gone >= 0 and window + INCOMPLETE * gone == self._window:
                self._ids, self._window = kept, window
                self._held += gone
                return


class Cut(NamedTuple):
    """Where a sample ends: how many of its generated tokens it keeps, and its text."""

    tokens: int
    text: str


class _Named(NamedTuple):
    """A special token's name: where it begins in the text that has names, and its length."""

    at: int
    length: int


class StopStrings:
    """Looks for stop strings in one sample.

    Args:
      decode: token ids to text, special tokens left out. include: the text keeps the stop string.
      min_tokens: strings completed by one of the first `min_tokens` tokens are passed over, as
        stop tokens are masked there.
      name: what a special token is called; empty for all others. None: there are no special ones.
    """

    def __init__(
        self,
        strings: Sequence[str],
        decode: Callable[[Sequence[int]], str],
        include: bool = False,
        min_tokens: int = 0,
        name: Callable[[int], str] | None = None,
    ):
        self._strings, self._include, self._min_tokens = strings, include, min_tokens
        self._stream, self._name = TextStream(decode), name
        self._whole = ""  # the text with the names of special tokens
        self._names: list[_Named] = []
        self._count = 0

    @property
    def text(self) -> str:
        """Of the tokens so far, in whole characters, without what may be the beginning of a stop
        string; it goes on behind a stop string."""
        longest = max(map(len, self._strings)) - 1
        for count in range(min(longest, len(self._whole)), 0, -1):
            at = len(self._whole) - count
            end = self._whole[at:]
            if self._cuts_a_name(at, len(self._whole)):
                continue
            if any(len(string) > count and string.startswith(end) for string in self._strings):
                return self._stream.text[: self._without_names(at)]
        return self._stream.text

    def feed(self, tokens: Sequence[int]) -> Cut | None:
        """Takes in the next tokens; where the sample ends, if a stop string is completed.

        Of several strings that one token completes, the one that begins first counts.
        """
        for token in tokens:
            searched, searched_whole = len(self._stream.text), len(self._whole)
            self._push(token)
            self._count += 1
            if self._count <= self._min_tokens:
                continue
            found = self._find(self._stream.text, searched)
            if self._names:
                named = self._find(self._whole, searched_whole, self._cuts_a_name)
                found += [(self._without_names(at), string) for at, string in named]
            if found:
                at, string = min(found, key=lambda each: (each[0], len(each[1])))
                return Cut(self._count, self._stream.text[:at] + string * self._include)
        return None

    def _push(self, token: int) -> None:
        before = len(self._stream.text)
        self._stream.push(token)
        self._whole += self._stream.text[before:]
        if name := self._name and self._name(token):
            self._names.append(_Named(len(self._whole), len(name)))
            self._whole += name

    def _find(
        self, text: str, searched: int, refused: Callable[[int, int], bool] | None = None
    ) -> list[tuple[int, str]]:
        """Strings that end past the first `searched` characters of a text, and where they begin.

        Args:
          refused: whether a string does not count that stands from one place to another.
        """
        found = []
        for string in self._strings:
            at = text.find(string, max(0, searched - len(string) + 1))
            while at >= 0 and refused and refused(at, at + len(string)):
                at = text.find(string, at + 1)
            if at >= 0:
                found.append((at, string))
        return found

    def _cuts_a_name(self, start: int, end: int) -> bool:
        """Whether this part of the text with names holds some of a name, and not all of it."""
        for name in reversed(self._names):
            after = name.at + name.length
            if after <= start:
                break
            if name.at < end and (name.at < start or after > end):
                return True
        return False

    def _without_names(self, at: int) -> int:
        """A place in the text with names, as one in the text without them."""
        return at - sum(min(at - name.at, name.length) for name in self._names if name.at < at)
