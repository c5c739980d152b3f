"""Tools that are Python functions, as an environment: calls in messages are made and answered.

    class Search(ToolEnvironment):
        functions = [search]                 # with type hints and a docstring

        def judge(self, text, row): ...      # reward of the last message, which calls nothing

The chat template describes the tools by JSON schemas, which transformers makes of the functions.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from specjax.tool_calls import Delta, parser_of
from train.environments.calls import Messages


class ToolEnvironment:
    """Answers calls of tools with what the functions return, or the error that they raise.

    Attributes:
      functions: the functions; each may be `async def`.
      tool_call_parser: name of the format of calls, see `specjax.tool_calls`.
      tools: their JSON schemas.
    """

    functions: Sequence[Callable[..., Any]] = ()
    tool_call_parser = "hermes"

    def __init__(self) -> None:
        from transformers.utils import get_json_schema  # takes seconds to import

        self.tools = [get_json_schema(function) for function in self.functions]

    def judge(self, text: str, row: Mapping[str, Any]) -> float:
        """Returns the reward of a message that calls no tool; a subclass writes it."""
        raise NotImplementedError(f"{type(self).__name__} has no method judge(text, row)")

    def reset(self, row: Mapping[str, Any]) -> Messages:
        """Begins with the row's own prompt, see `train.environments.calls`."""
        self.row, prompt = row, row["prompt"]
        return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)

    async def step(self, messages: Messages) -> tuple[Messages, float, bool]:
        """Makes the calls of the last message."""
        parser, text = (
            parser_of(self.tool_call_parser, None, self.tools, ""),
            messages[-1]["content"],
        )
        delta: Delta = parser.push(text) + parser.finish()
        if not delta.calls:
            return [], float(self.judge(text, self.row)), True
        named = {function.__name__: function for function in self.functions}
        answers = [await _answer(named.get(call.name), call) for call in delta.calls]
        return [{"role": "tool", "content": text} for text in answers], 0.0, False

    def restore(self, messages: Messages) -> None:
        """There is nothing to restore, unless functions keep something."""


async def _answer(function: Callable | None, call: Any) -> str:
    """What a tool returned, as text."""
    if function is None:
        return f"error: there is no tool {call.name}"
    try:
        value = function(**json.loads(call.arguments))
        value = await value if inspect.isawaitable(value) else value
    except Exception as error:  # the policy reads it, and may call again
        return f"error: {type(error).__name__}: {error}"
    return value if isinstance(value, str) else json.dumps(value, default=str)
