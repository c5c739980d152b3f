"""Finds stop strings in a sample's text, on the host.

A sample's text grows token by token and is searched after each one. So the end of a sample depends
on its tokens only, and not on how many of them a chunk emitted.

Decoding leaves special tokens out, but a stop string may be one, or contain one. So the text with
the names of special tokens in their places is searched as well. Only whole names match: `eos` is
not found in `<|eos|>`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

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

    def __init__(self, decode: Callable[[Sequence[int]], str]):
        self._decode = decode
        self._ids: list[int] = []  # the window; ids before _fresh are only context
        self._window = ""  # its text
        self._fresh = 0
        self._grown = 0  # tokens of the window when `text` grew last
        self._known = 0  # number of characters of the window that `text` has already
        self._held = 0  # number of INCOMPLETEs that left the window and are not in `text` yet
        self.text = ""

    def push(self, token: int) -> None:
        """Appends a token."""
        self.extend((token,))

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


class _Named(NamedTuple):
    """The place of a special token's name: its index in the text with names, and its length."""

    at: int
    length: int


class StopStrings:
    """Looks for stop strings in one sample.

    Args:
      strings: the stop strings.
      decode: function from token ids to text without special tokens.
      include: whether the text keeps the stop string.
      min_tokens: number of tokens at the beginning that cannot complete a stop string; stop tokens
        are masked there, too.
      name: function that returns the text of a special token, and an empty one for other tokens;
        None: there are no special tokens.

    Attributes:
      named: text of a sample that was cut, with the names of special tokens in their places.
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
        self.named = ""

    @property
    def text(self) -> str:
        """The text of the tokens so far, without an end that may be the beginning of a stop string.

        It is not cut at a stop string that was found.
        """
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
        """Takes in the next tokens; returns where the sample ends once a stop string is complete.

        If one token completes several strings, the one that begins first ends the sample.
        """
        for token in tokens:
            searched, searched_whole = len(self._stream.text), len(self._whole)
            self._push(token)
            self._count += 1
            if self._count <= self._min_tokens:
                continue
            matches = self._find(self._stream.text, searched)
            found = [(at, len(string), self._with_names(at), string) for at, string in matches]
            if self._names:
                named = self._find(self._whole, searched_whole, self._cuts_a_name)
                found += [(self._without_names(at), len(s), at, s) for at, s in named]
            if found:
                at, _, at_whole, string = min(found)
                more = string * self._include
                self.named = self._whole[:at_whole] + more
                return Cut(self._count, self._stream.text[:at] + more)
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
        """The stop strings that end after the first `searched` characters, and where they begin.

        Args:
          text: the text to search.
          searched: number of characters that were searched before.
          refused: function that returns whether a match from one index to another does not count.
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
        """Whether this range of the text with names holds a part of a name only."""
        for name in reversed(self._names):
            after = name.at + name.length
            if after <= start:
                break
            if name.at < end and (name.at < start or after > end):
                return True
        return False

    def _with_names(self, at: int) -> int:
        """The index in the text with names of an index in the text without names."""
        for name in self._names:
            if name.at > at:
                break
            at += name.length
        return at

    def _without_names(self, at: int) -> int:
        """The index in the text without names of an index in the text with names."""
        return at - sum(min(at - name.at, name.length) for name in self._names if name.at < at)
