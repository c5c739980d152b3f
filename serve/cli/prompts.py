"""Prompts from arguments and from files: text lines, or JSON lines.

A line that cannot be used is named by its number and loses nobody else's place.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from serve.cli import UsageError
from specjax.config import SamplingParams

STDIN = "-"
JSON_SUFFIXES = (".jsonl", ".ndjson")
_SETTINGS = frozenset(field.name for field in dataclasses.fields(SamplingParams))
_KEYS = ("prompt", "messages")


@dataclasses.dataclass(frozen=True)
class Prompt:
    """One prompt.

    Attributes:
      index: its place, from 0: the line's number in a file minus 1, lines that cannot be used
        counted. where: for messages.
      text: of the prompt, or its token ids; None where there are messages.
      messages: of a conversation, for the chat template.
      settings: sampling options of its own, by their names in `SamplingParams`.
      id: handed on to the output, if the line has one.
    """

    index: int
    where: str
    text: str | Sequence[int] | None = None
    messages: Sequence[Mapping[str, str]] | None = None
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    id: Any = None


def of_arguments(texts: Sequence[str], chat: bool) -> list[Prompt]:
    """One prompt per argument."""
    return [_of_text(i, f"prompt {i + 1}", text, chat) for i, text in enumerate(texts)]


def of_file(name: str, json_lines: bool, chat: bool) -> tuple[list[Prompt], list[str]]:
    """Reads a file.

    Args:
      name: of the file; `-` is standard input. json_lines: whatever its name ends in.
      chat: lines of text, and `prompt` in JSON, are what a user says.

    Returns:
      the prompts, and what is wrong with the lines that are none. Empty lines are passed over.

    Raises:
      UsageError: the file cannot be read.
    """
    try:
        raw = sys.stdin.buffer.read() if name == STDIN else Path(name).read_bytes()
    except OSError as error:
        raise UsageError(f"--file {name}: {error.strerror}") from error
    json_lines = json_lines or name.endswith(JSON_SUFFIXES)
    shown = "standard input" if name == STDIN else name
    prompts, problems = [], []
    for index, line in enumerate(raw.split(b"\n")):
        where = f"{shown} line {index + 1}"
        try:
            text = line.decode("utf-8-sig" if index == 0 else "utf-8").removesuffix("\r")
            if text.strip():
                read = _of_json if json_lines else _of_text
                prompts.append(read(index, where, text, chat))
        except (ValueError, RecursionError) as error:
            problems.append(f"{where}: {error}")
    return prompts, problems


def _of_text(index: int, where: str, text: str, chat: bool) -> Prompt:
    if chat:
        return Prompt(index, where, messages=[{"role": "user", "content": text}])
    return Prompt(index, where, text)


def _of_json(index: int, where: str, line: str, chat: bool) -> Prompt:
    """Raises ValueError where the line is no prompt."""
    value = json.loads(line)
    if not isinstance(value, dict):
        raise ValueError(f"expected a JSON object, got {type(value).__name__}")
    json.dumps(value, ensure_ascii=False).encode()  # lone surrogates, which no output could hold
    if sum(key in value for key in _KEYS) != 1:
        raise ValueError(f"expected either {_KEYS[0]!r} or {_KEYS[1]!r}, got {sorted(value)}")
    settings = {key: value[key] for key in value.keys() & _SETTINGS}
    if "messages" in value:
        messages = _checked(value["messages"])
        return Prompt(index, where, None, messages, settings, value.get("id"))
    text = value["prompt"]
    if isinstance(text, str):
        made = _of_text(index, where, text, chat)
        return dataclasses.replace(made, settings=settings, id=value.get("id"))
    if isinstance(text, list) and text and all(type(token) is int for token in text):
        return Prompt(index, where, text, None, settings, value.get("id"))
    raise ValueError(f"prompt must be a string or a list of token ids, got {_short(text)}")


def _checked(messages: Any) -> list[dict]:
    fits = isinstance(messages, list) and all(
        isinstance(message, dict)
        and all(isinstance(message.get(key), str) for key in ("role", "content"))
        for message in messages
    )
    if not fits or not messages:
        raise ValueError(
            "messages must be a list of objects with 'role' and 'content', got " + _short(messages)
        )
    return messages


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}..."
