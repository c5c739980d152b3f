"""Checks the prompts, parameters and conversations given to `LLM` and makes lists of them."""

from __future__ import annotations

import numbers
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from specjax.config import SamplingParams
from specjax.tokenizer import check_ids

Prompt = str | Sequence[int]
PromptDict = Mapping[str, Any]  # {"prompt": text} or {"prompt_token_ids": ids}
Message = Mapping[str, Any]  # with the keys `role` and `content`

_FORMS = "text, a list of token ids, {'prompt': text} or {'prompt_token_ids': ids}"
_MESSAGES = (
    "messages are a list of {'role': 'user', 'content': text}, or a list of such lists for several "
    "conversations"
)


def as_prompts(given: Any) -> list[Prompt]:
    """Makes a list of texts and token lists; `check_prompt` checks the token ids.

    Args:
      given: a prompt or a sequence of prompts. A prompt is text, token ids (a list or an array), or
        one of vLLM's prompt dicts.

    Raises:
      ValueError: `given` is none of these.
    """
    if isinstance(given, (str, Mapping)):
        return [_as_prompt("the prompt", given)]
    several = _as_list(given)
    if several is None:
        raise ValueError(f"prompts: expected {_FORMS}, or a list of these, got {_named(given)}")
    if not several:
        raise ValueError("no prompts were given; expected at least one")
    if isinstance(several[0], numbers.Number):
        return [several]
    return [_as_prompt(f"prompt {index}", prompt) for index, prompt in enumerate(several)]


def _as_prompt(where: str, given: Any) -> Prompt:
    if isinstance(given, str):
        return given
    if isinstance(given, Mapping):
        return _from_dict(where, given)
    ids = _as_list(given)
    if ids is None:
        raise ValueError(f"{where}: expected {_FORMS}, got {_named(given)}")
    return ids


def _from_dict(where: str, given: Mapping) -> Prompt:
    """The prompt in one of vLLM's prompt dicts."""
    if list(given) == ["prompt"] and isinstance(given["prompt"], str):
        return given["prompt"]
    if list(given) == ["prompt_token_ids"]:
        ids = _as_list(given["prompt_token_ids"])
        if ids is not None:
            return ids
    hint = "; for messages use LLM.chat" if {"role", "content", "messages"} & set(given) else ""
    raise ValueError(
        f"{where}: expected a dict with one key, {{'prompt': text}} or "
        f"{{'prompt_token_ids': ids}}, got {_named(given)}{hint}"
    )


def as_params(given: Any, prompts: int) -> list[SamplingParams]:
    """Makes a list with one `SamplingParams` for each prompt.

    Args:
      given: one for all prompts, or a sequence with one for each.
      prompts: number of prompts.

    Raises:
      ValueError: `given` is something else, or their number is not that of the prompts.
    """
    if isinstance(given, SamplingParams):
        return [given] * prompts
    several = _as_list(given)
    wrong = (
        [given] if several is None else [p for p in several if not isinstance(p, SamplingParams)]
    )
    if wrong:
        raise ValueError(
            "params: expected SamplingParams, or a list with one for each prompt, got "
            f"{_named(wrong[0])}; write SamplingParams(temperature=..., max_tokens=...)"
        )
    if len(several) != prompts:
        raise ValueError(
            f"got {len(several)} SamplingParams for {prompts} prompts; give one for all, or one "
            "for each"
        )
    return several


def as_conversations(given: Any) -> list[list[Message]]:
    """Makes a list of conversations, each a list of messages, of one conversation or several.

    Raises:
      ValueError: `given` is neither, or a message has no role or no content.
    """
    items = None if isinstance(given, Mapping) else _as_list(given)
    if not items:
        raise ValueError(f"{_MESSAGES}, got {_named(given)}")
    if isinstance(items[0], Mapping):
        items = [items]
    conversations = []
    for item in items:
        messages = None if isinstance(item, Mapping) else _as_list(item)
        if not messages:
            raise ValueError(f"{_MESSAGES}, got {_named(item)} among them")
        for message in messages:
            _check_message(message)
        conversations.append(messages)
    return conversations


def _check_message(message: Any) -> None:
    if not isinstance(message, Mapping):
        raise ValueError(f"{_MESSAGES}, got {_named(message)} for a message")
    content = message.get("content")
    # A model's message that calls a tool may have no content.
    has_content = isinstance(content, str) or _as_list(content) is not None
    if not isinstance(message.get("role"), str) or not (has_content or message.get("tool_calls")):
        raise ValueError(
            f"{_MESSAGES}, got {_named(message)}; each needs 'role' and 'content', which are text"
        )


def _as_list(given: Any) -> list | None:
    """A sequence or array as a list; None for text, bytes and anything else."""
    if hasattr(given, "tolist") and getattr(given, "ndim", 0):
        return given.tolist()
    if isinstance(given, Sequence) and not isinstance(given, (str, bytes, bytearray, memoryview)):
        return list(given)
    return None


def _named(value: Any) -> str:
    """A value and its type, short enough for one line."""
    text = " ".join(repr(value).split())
    return f"{text if len(text) <= 80 else text[:77] + '...'} ({type(value).__name__})"


def check_prompt(where: str, prompt: Iterable, vocab: int, tokenizer=None) -> list[int]:
    """The prompt as a list of token ids; the tokenizer gives errors the token's text.

    Raises:
      ValueError: the prompt is empty, or holds something that is no token id below `vocab`.
    """
    prompt = list(prompt)
    wrong = [t for t in prompt if not isinstance(t, numbers.Integral) or isinstance(t, bool)]
    if wrong:
        raise ValueError(f"{where} holds {wrong[0]!r}; expected token ids, which are integers")
    if not prompt:
        raise ValueError(f"{where} is empty; expected at least one token")
    ids = [int(t) for t in prompt]
    check_ids(where, ids, vocab, tokenizer)
    return ids


def padded_widths(max_len: int) -> list[int]:
    """The lengths that prompts are padded to: 16, 32, 64, .. and `max_len`."""
    widths = [min(16, max_len)]
    while widths[-1] < max_len:
        widths.append(min(widths[-1] * 2, max_len))
    return widths
