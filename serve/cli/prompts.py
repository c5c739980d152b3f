"""Prompts from arguments and from files: text lines, or JSON lines.

A line that cannot be used is reported by its number, and the others keep their indices.
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
from specjax.spelling import FOREIGN, nearest

STDIN = "-"
JSON_SUFFIXES = (".jsonl", ".ndjson")
_SETTINGS = {field.name for field in dataclasses.fields(SamplingParams)} - {
    "prompt_logprobs", "detokenize",  # the output has a text, and nothing of the prompt
}  # fmt: skip
JSON_SUFFIX = ".json"
_KEYS = ("prompt", "messages")
_KNOWN = {*_KEYS, *_SETTINGS, "id", "chat_template_kwargs"}
_NO_MESSAGES = "messages must be a list of objects with 'role' and 'content', which is text, got "


@dataclasses.dataclass(frozen=True)
class Prompt:
    """A prompt of the command line or of a file.

    Attributes:
      index: number of the prompt from 0; in a file, the line's number minus 1.
      where: name of the prompt in messages.
      text: text or token ids of the prompt; None for a conversation.
      messages: messages of a conversation, for the chat template.
      settings: sampling options of this prompt, by their names in `SamplingParams`; null in a
        file is as if left out.
      template: variables of the chat template.
      id: value of `id` in the line, which is copied to the output.
    """

    index: int
    where: str
    text: str | Sequence[int] | None = None
    messages: Sequence[Mapping[str, str]] | None = None
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    id: Any = None
    template: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def of_arguments(texts: Sequence[str], chat: bool) -> list[Prompt]:
    """Makes one prompt per argument."""
    return [_of_text(i, f"prompt {i + 1}", text, chat) for i, text in enumerate(texts)]


def of_file(name: str, json_lines: bool, chat: bool) -> tuple[list[Prompt], list[str]]:
    """Reads the prompts of a file.

    Args:
      name: name of the file; `-` is standard input.
      json_lines: whether to read JSON lines, whatever the name ends in.
      chat: whether lines of text, and `prompt` in JSON, are messages of a user.

    Returns:
      the prompts, and a message for each line that cannot be used. Empty lines are skipped.

    Raises:
      UsageError: the file cannot be read, or a line has a key that nothing reads.
    """
    try:
        raw = sys.stdin.buffer.read() if name == STDIN else Path(name).read_bytes()
    except OSError as error:
        raise UsageError(f"--file {name}: {error.strerror}") from error
    source = "standard input" if name == STDIN else name
    values = _json_entries(raw) if name.endswith(JSON_SUFFIX) else None
    unit, lines = ("line", raw.split(b"\n")) if values is None else ("entry", values)
    json_lines = json_lines or name.endswith((*JSON_SUFFIXES, JSON_SUFFIX))
    prompts, problems = [], []
    for index, line in enumerate(lines):
        where = f"{source} {unit} {index + 1}"
        try:
            if values is None:
                line = line.decode("utf-8-sig" if index == 0 else "utf-8").removesuffix("\r")
                if not line.strip():
                    continue
                line = json.loads(line) if json_lines else line
            make = _of_value if json_lines else _of_text
            prompts.append(make(index, where, line, chat))
        except (ValueError, RecursionError) as error:
            problems.append(f"{where}: {error}")
    return prompts, problems


def _of_text(index: int, where: str, text: str, chat: bool) -> Prompt:
    if chat:
        return Prompt(index, where, messages=[{"role": "user", "content": text}])
    return Prompt(index, where, text)


def _json_entries(raw: bytes) -> list | None:
    """The entries of a JSON file; None if it is not JSON, as it may be JSON lines."""
    try:
        value = json.loads(raw.decode("utf-8-sig"))
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, list) and not _is_conversation(value) else [value]


def _is_conversation(value: Any) -> bool:
    """Whether a JSON value is a list of messages."""
    return isinstance(value, list) and any(
        isinstance(message, dict) and "role" in message for message in value
    )


def _of_value(index: int, where: str, value: Any, chat: bool) -> Prompt:
    """Makes a prompt from a JSON value; raises ValueError for a value that is no prompt."""
    if _is_conversation(value):
        value = {"messages": value}
    if not isinstance(value, dict):
        raise ValueError(f"expected a JSON object, got {type(value).__name__}")
    json.dumps(value, ensure_ascii=False).encode()  # lone surrogates, which no output could hold
    for key in value.keys() - _KNOWN:  # it may be a misspelt option
        hint = nearest(FOREIGN.get(key, key), _KNOWN, 0.7)
        raise UsageError(
            f"{where}: nothing reads the key {key!r}{hint}; leave it out, or put it into 'id', "
            "which takes any value and is copied to the output"
        )
    if sum(key in value for key in _KEYS) != 1:
        raise ValueError(f"expected either {_KEYS[0]!r} or {_KEYS[1]!r}, got {sorted(value)}")
    settings = {key: value[key] for key in _SETTINGS if value.get(key) is not None}
    template = value.get("chat_template_kwargs") or {}
    if not isinstance(template, dict):
        raise ValueError(f"chat_template_kwargs must be a JSON object, got {_short(template)}")
    if "messages" in value:
        messages = value["messages"]
        if not isinstance(messages, list) or not messages:
            raise ValueError(_NO_MESSAGES + _short(messages))
        messages = [_message(message) for message in messages]
        return Prompt(index, where, None, messages, settings, value.get("id"), template)
    text = value["prompt"]
    if isinstance(text, str):
        made = _of_text(index, where, text, chat)
        return dataclasses.replace(made, settings=settings, id=value.get("id"), template=template)
    if isinstance(text, list) and text and all(type(token) is int for token in text):
        return Prompt(index, where, text, None, settings, value.get("id"))
    raise ValueError(f"prompt must be a string or a list of token ids, got {_short(text)}")


def _message(message: Any) -> dict:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise ValueError(_NO_MESSAGES + _short(message))
    content = message.get("content")
    if isinstance(content, list) and all(
        isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
        for part in content
    ):
        content = "".join(part["text"] for part in content)
    if content is None and message.get("tool_calls"):
        content = ""
    if not isinstance(content, str):
        raise ValueError(_NO_MESSAGES + _short(message))
    return {**message, "content": content}


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}..."
