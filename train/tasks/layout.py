"""Problems, the class of tasks (`Layout`), and functions that read columns."""

from __future__ import annotations

import json
import math
import re
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

from train.answers.extract import Gold, gold_answer

Message = dict[str, Any]  # {"role": ..., "content": text, ...}
Row = Mapping[str, Any]


SPLITS = ("train", "heldout")

# One question in so many is held out.
HELDOUT_SHARE = 16


def split_of(question: str) -> str:
    """The split that a question belongs to, from the CRC-32 of its text."""
    return SPLITS[zlib.crc32(question.encode()) % HELDOUT_SHARE == 0]


def check_split(split: str) -> str:
    """Returns `split`, or raises ValueError if there is no such split."""
    if split not in SPLITS:
        raise ValueError(f"unknown split {split!r}; expected one of {', '.join(SPLITS)}")
    return split


@dataclass(frozen=True)
class Problem:
    """A prompt whose response can be checked.

    Attributes:
      prompt: text, or a conversation. answer: the gold answer, or several of which any is right.
      index: its place in the split.
      place: where it stands in a file, for messages. columns: of its row, for rewards.
    """

    prompt: str | tuple[Message, ...]
    answer: Gold
    index: int
    place: str = ""
    columns: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Demonstration:
    """A prompt with a response to imitate, stop token not included."""

    prompt: str | tuple[Message, ...]
    response: str


class RowError(ValueError):
    """A row is not what its task says; the message says which column, and what was expected."""


@dataclass(frozen=True)
class Example:
    """A row as a task reads it.

    Attributes:
      prompt: a question as text, or a conversation up to the assistant's turn.
      answer: the gold answer, "" where the row has none; several of which any is right.
      response: a demonstration, without stop token; None: the row has none.
      columns: further columns, for rewards that ask for them by name.
    """

    prompt: str | tuple[Message, ...]
    answer: Gold
    response: str | None = None
    columns: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Layout:
    """One way to write problems down as rows: a `specjax.interfaces.Task`.

    Attributes:
      name: as in `data.task`. columns: those it needs, for messages.
      recognises: whether rows with these column names have it.
      read: makes an example of a row; raises `RowError`.
      reward: the name of the reward that suits its answers.
      template: what `data.prompt_template` is by default, for a model without a chat template.
    """

    name: str
    columns: str
    recognises: Callable[[Collection[str]], bool]
    read: Callable[[Row], Example]
    reward: str = "math_verify"
    template: str = "{question}"


def text_of(row: Row, column: str) -> str:
    """A column that must hold text; it is stripped.

    Raises:
      RowError: it is missing, empty or no text.
    """
    value = row.get(column)
    if not isinstance(value, str) or not value.strip():
        raise RowError(f"column {column!r}: expected text that is not empty, got {shown(value)}")
    return value.strip()


def answers_of(value: Any, column: str) -> list[str]:
    """Answers as text: of text, of a number, or of a list with one or more of these, which may be
    written as JSON (`'["34"]'`). No answer is there twice.

    A float that is a whole number is written without its point: files often hold integers so.

    Raises:
      RowError: it is anything else, or an empty list.
    """
    if isinstance(value, str) and _JSON_LIST.match(value):
        value = _from_json(value)
    values = value if isinstance(value, (list, tuple)) else [value]
    while len(values) == 1 and isinstance(values[0], (list, tuple)):
        values = values[0]
    found = [_answer(one) for one in values]
    if not found or None in found:
        raise RowError(
            f"column {column!r}: expected an answer (text, a number, or a list of these, of which "
            f"any is right), got {shown(value)}"
        )
    return list(dict.fromkeys(found))


_JSON_LIST = re.compile(r'\s*\[\s*"')  # `[1, 2]` is an interval


def _from_json(text: str) -> str | list[str]:
    try:
        found = json.loads(text)
    except ValueError:
        return text
    return found if all(isinstance(one, str) for one in found) else text


def _answer(value: Any) -> str | None:
    if isinstance(value, str):
        return value.strip() or None
    if isinstance(value, (int, float, Decimal)) and not isinstance(value, bool):
        if math.isfinite(value):
            return str(int(value)) if value == int(value) else str(value)
    return None


def gold_of(value: Any, column: str) -> Gold:
    """The gold answer in a worked solution: boxed, or after `####`; else all of it. Several, where
    the column holds a list of several: any of them is right.

    Raises:
      RowError: there is none, or the mark `####` has nothing behind it.
    """
    found = []
    for written in answers_of(value, column):
        gold = gold_answer(written)
        if not gold:
            raise RowError(
                f"column {column!r}: expected an answer after '####', got text that ends in "
                f"{written[-40:]!r}"
            )
        found.append(gold)
    found = list(dict.fromkeys(found))
    return found[0] if len(found) == 1 else tuple(found)


def messages_of(value: Any, column: str) -> tuple[Message, ...]:
    """A conversation: a list of {role, content}, contents being text or lists of text parts.

    Raises:
      RowError: it is anything else, or empty.
    """
    if not isinstance(value, (list, tuple)) or not value:
        raise RowError(
            f"column {column!r}: expected a list of {{'role', 'content'}}, got {shown(value)}"
        )
    return tuple(_message(entry, f"{column}[{i}]") for i, entry in enumerate(value))


def _message(entry: Any, place: str) -> Message:
    if not isinstance(entry, Mapping) or not isinstance(entry.get("role"), str):
        raise RowError(
            f"column {place!r}: expected {{'role': ..., 'content': ...}}, got {shown(entry)}"
        )
    content = entry.get("content")
    if isinstance(content, (list, tuple)):
        parts = [part.get("text") if isinstance(part, Mapping) else None for part in content]
        content = "".join(parts) if all(isinstance(part, str) for part in parts) else None
    if not isinstance(content, str):
        raise RowError(
            f"column {place!r}: expected content that is text, got {shown(entry.get('content'))}"
        )
    # Tables of several kinds of messages have null where a message lacks a key.
    more = {key: value for key, value in entry.items() if value is not None}
    return {**more, "role": entry["role"], "content": content}


def up_to_answer(conversation: Sequence[Message], column: str) -> tuple[Message, ...]:
    """A conversation that ends where the assistant is to speak.

    Raises:
      RowError: the assistant has spoken last.
    """
    if conversation[-1]["role"] == "assistant":
        raise RowError(
            f"column {column!r}: expected a conversation that ends before the assistant's turn, "
            "got one whose last message is the assistant's"
        )
    return tuple(conversation)


def others(row: Row, *used: str) -> dict[str, Any]:
    """The columns of a row that a task has not used up."""
    return {name: value for name, value in row.items() if name not in used}


def shown(value: Any) -> str:
    """A value for a message, shortened."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
