"""The classes of problems, examples and tasks (`Layout`), and functions that read columns."""

from __future__ import annotations

import json
import math
import re
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, TypeVar

from specjax.error_text import shortened
from train.rewards.answers.extract import Gold, gold_answer

Message = dict[str, Any]  # {"role": ..., "content": text, ...}
Response = str | Message  # text, or a message of the assistant with more than text
Row = Mapping[str, Any]
T = TypeVar("T")


SPLITS = ("train", "heldout")

# What a message may have beside or in the place of content: its reasoning, by the names that data
# sets give it, and calls of tools.
REASONING = ("reasoning_content", "reasoning", "thinking")
PARTS = (*REASONING, "tool_calls")

# One question in this many is held out.
HELDOUT_SHARE = 16


def split_of(question: str) -> str:
    """The split that a question belongs to, from the CRC-32 of its text."""
    return SPLITS[zlib.crc32(question.encode()) % HELDOUT_SHARE == 0]


@dataclass(frozen=True)
class Unread:
    """The value of a column that should hold a gold answer or a demonstration, and cannot be read.

    Rewards that compare answers refuse such a row, those of the user's own get its value.

    Attributes:
      value: what the column holds.
      why: the column and what was expected of it, for messages.
    """

    value: Any
    why: str


@dataclass(frozen=True)
class Problem:
    """A prompt whose response can be checked.

    Attributes:
      prompt: text, or a conversation.
      answer: the gold answer, or several, of which any is right; "" if the row has none.
      index: number of the problem in its split.
      place: place of its row in a file, for messages.
      columns: further columns of its row, for rewards.
      row: all columns of its row as they are, if it has one.
      unread: the value of a column that should hold the gold answer, and cannot be read; None if
        the answer is read, or the row has none.
    """

    prompt: str | tuple[Message, ...]
    answer: Gold
    index: int
    place: str = ""
    columns: Mapping[str, Any] = field(default_factory=dict)
    row: Mapping[str, Any] = field(default_factory=dict)
    unread: Unread | None = None


@dataclass(frozen=True)
class Demonstration:
    """A prompt with a response to imitate, stop token not included.

    Attributes:
      prompt: text, or a conversation.
      response: text, or the assistant's message with its reasoning or calls of tools.
      tools: JSON schemas of the functions that may be called.
      place: place of its row in a file, for messages.
    """

    prompt: str | tuple[Message, ...]
    response: Response
    tools: tuple[Mapping[str, Any], ...] = ()
    place: str = field(default="", compare=False)


class GeneratedProblems(Sequence):
    """Problems or demonstrations of a split that `make` makes one by one, when they are read.

    Args:
      cfg: settings of the data.
      split: name of the split.
    """

    def __init__(self, cfg: Any, split: str):
        self.cfg, self.split = cfg, split

    def __len__(self) -> int:
        return self.cfg.train_size if self.split == "train" else self.cfg.heldout_size

    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return [self.make(i) for i in range(*index.indices(len(self)))]
        return self.make(range(len(self))[index])

    def make(self, index: int) -> Any:
        """Makes the item with this number."""
        raise NotImplementedError


class RowError(ValueError):
    """A row that its task cannot read; the message names the column and the expected value."""


@dataclass(frozen=True)
class Example:
    """A row after a task has read it.

    Attributes:
      prompt: a question as text, or a conversation up to the assistant's turn.
      answer: the gold answer, or several, of which any is right; "" if the row has none, and
        `Unread` if a column should hold one that cannot be read.
      response: a demonstration without stop token, text or the assistant's message; None if the row
        has none, and `Unread` likewise.
      columns: further columns, for rewards with parameters of their names.
      row: all columns as they are; `train.data` sets it, and not the task.
    """

    prompt: str | tuple[Message, ...]
    answer: Gold | Unread
    response: Response | Unread | None = None
    columns: Mapping[str, Any] = field(default_factory=dict)
    row: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Layout:
    """One layout of rows: a `specjax.interfaces.Task`.

    Attributes:
      name: name of the task in `data.task`.
      columns: names of the columns that it needs, for messages.
      recognises: function that decides from column names whether rows have this layout.
      read: function that makes an example of a row, or raises `RowError`.
      reward: name of the reward that suits its answers.
      template: default of `data.prompt_template` for a model without a chat template.
    """

    name: str
    columns: str
    recognises: Callable[[Collection[str]], bool]
    read: Callable[[Row], Example]
    reward: str = "math_verify"
    template: str = "{question}"


def text_of(row: Row, column: str) -> str:
    """The text of a column, stripped.

    Raises:
      RowError: the column is missing, empty or no text.
    """
    value = row.get(column)
    if not isinstance(value, str) or not value.strip():
        raise RowError(f"column {column!r}: expected text that is not empty, got {shown(value)}")
    return value.strip()


def answers_of(value: Any, column: str) -> list[str]:
    """The distinct answers in a column, as text.

    The value may be text, a number, or a list of these, which may be JSON text (`'["34"]'`). Files
    often hold integers as floats, so a float without fraction is written as an integer.

    Raises:
      RowError: the value is anything else, or an empty list.
    """
    if isinstance(value, str) and _JSON_LIST.match(value):
        value = _parsed(value)
    values = value if isinstance(value, (list, tuple)) else [value]
    while len(values) == 1 and isinstance(values[0], (list, tuple)):
        values = values[0]
    answers = [_answer(one) for one in values]
    if not answers or None in answers:
        raise RowError(
            f"column {column!r}: expected an answer, as text or number, got {shown(value)}"
        )
    return list(dict.fromkeys(answers))


_JSON_LIST = re.compile(r'\s*\[\s*"')  # `[1, 2]` is an interval


def _answer(value: Any) -> str | None:
    if isinstance(value, str):
        return value.strip() or None
    if isinstance(value, (int, float, Decimal)) and not isinstance(value, bool):
        if math.isfinite(value):
            return str(int(value)) if value == int(value) else str(value)
    return None


def unless_unread(read: Callable[[Any, str], T], value: Any, column: str) -> T | Unread:
    """What a function reads in a column; `Unread` where it raises `RowError`.

    Not every reward compares answers, and not every program imitates demonstrations: a column that
    is neither asked for nor a prompt must not refuse the row.
    """
    try:
        return read(value, column)
    except RowError as error:
        return Unread(value, str(error))


def gold_of(value: Any, column: str) -> Gold | Unread:
    """The gold answer in a worked solution: in a box, after `####`, or else all of the text.

    If the column holds a list there may be several, of which any is right. It is `Unread` if there
    is no answer, or no text follows the mark `####`.
    """
    return unless_unread(_gold_of, value, column)


def _gold_of(value: Any, column: str) -> Gold:
    answers = []
    for written in answers_of(value, column):
        gold = gold_answer(written)
        if not gold:
            raise RowError(
                f"column {column!r}: expected an answer after '####', got text that ends in "
                f"{written[-40:]!r}"
            )
        answers.append(gold)
    answers = list(dict.fromkeys(answers))
    return answers[0] if len(answers) == 1 else tuple(answers)


def messages_of(value: Any, column: str) -> tuple[Message, ...]:
    """The conversation in a column: a list of {role, content}, with text or lists of text parts.

    Raises:
      RowError: the value is anything else, or empty.
    """
    if not isinstance(value, (list, tuple)) or not value:
        raise RowError(
            f"column {column!r}: expected a list of {{'role', 'content'}}, got {shown(value)}"
        )
    return tuple(_message(entry, f"{column}[{i}]") for i, entry in enumerate(value))


def split_response(
    conversation: Any, column: str
) -> tuple[tuple[Message, ...], Response | Unread | None]:
    """Splits the assistant's message that ends a conversation off it, as a demonstration.

    Raises:
      RowError: the messages before it are not a conversation, or there are none.
    """
    last = conversation[-1] if isinstance(conversation, (list, tuple)) and conversation else None
    if not isinstance(last, Mapping) or last.get("role") != "assistant":
        return messages_of(conversation, column), None
    if len(conversation) == 1:
        raise RowError(f"column {column!r}: expected a message before the assistant's, got none")
    place = f"{column}[{len(conversation) - 1}]"
    return messages_of(conversation[:-1], column), unless_unread(response_in, last, place)


def response_in(entry: Any, place: str) -> Response:
    """A message as a demonstration: its text if it has nothing else.

    Raises:
      RowError: it is no message.
    """
    message = _message(entry, place)
    return message["content"] if message.keys() == {"role", "content"} else message


def text_of_response(response: Response) -> str:
    """The text of a demonstration, without reasoning and calls."""
    return response if isinstance(response, str) else response.get("content", "")


def tools_of(row: Row) -> tuple[Mapping[str, Any], ...]:
    """The schemas in the column `tools`: a list or a single one, as they are or as JSON.

    They are empty if the row has no such column, or nothing in it.

    Raises:
      RowError: the column holds anything else.
    """
    tools = _parsed(row.get("tools")) or ()
    tools = [*map(_parsed, tools)] if isinstance(tools, (list, tuple)) else [tools]
    if not all(isinstance(tool, Mapping) for tool in tools):
        raise RowError(
            f"column 'tools': expected JSON schemas of functions, got {shown(row['tools'])}; "
            "correct it, or rename the column if it holds something else"
        )
    return tuple(map(_without_nulls, tools))


def _parsed(value: Any) -> Any:
    """What JSON text holds; any other value as it is."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError:
        return value


def _without_nulls(value: Any) -> Any:
    """The value without null entries at any depth: tables have them where a row lacks a key."""
    if isinstance(value, Mapping):
        return {key: _without_nulls(one) for key, one in value.items() if one is not None}
    return [*map(_without_nulls, value)] if isinstance(value, (list, tuple)) else value


def _message(entry: Any, place: str) -> Message:
    if not isinstance(entry, Mapping) or not isinstance(entry.get("role"), str):
        raise RowError(
            f"column {place!r}: expected {{'role': ..., 'content': ...}}, got {shown(entry)}"
        )
    content = entry.get("content")
    if isinstance(content, (list, tuple)):
        parts = [part.get("text") if isinstance(part, Mapping) else None for part in content]
        content = "".join(parts) if all(isinstance(part, str) for part in parts) else None
    keys = {key: _without_nulls(one) for key, one in entry.items() if one not in (None, "", [], {})}
    if entry.get("content") is None and any(part in keys for part in PARTS):
        return keys
    if not isinstance(content, str):
        raise RowError(
            f"column {place!r}: expected content that is text, got {shown(entry.get('content'))}"
        )
    return {**keys, "role": entry["role"], "content": content}


def up_to_answer(conversation: Sequence[Message], column: str) -> tuple[Message, ...]:
    """Checks that a conversation ends before the assistant's turn.

    Raises:
      RowError: the last message is the assistant's.
    """
    if conversation[-1]["role"] == "assistant":
        raise RowError(
            f"column {column!r}: expected a conversation that ends before the assistant's turn"
        )
    return tuple(conversation)


def others(row: Row, *used: str) -> dict[str, Any]:
    """The columns of a row without those in `used`."""
    return {name: value for name, value in row.items() if name not in used}


def shown(value: Any) -> str:
    """A value for a message, shortened."""
    return shortened(repr(value), 80)
