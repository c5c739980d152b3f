"""What chat models write besides their answer: calls of tools, and reasoning.

A parser takes the text of a message in pieces, as it is generated, and gives back what is final:
`Delta`. Calls are given whole. Text that a parser cannot read stays part of the answer.

The names of parsers are those of vLLM:

    hermes          <tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>
    qwen3_coder     <tool_call><function=f><parameter=x>1</parameter></function></tool_call>
    llama3_json     {"name": "f", "parameters": {"x": 1}}; ..  and nothing else
    openai          gpt-oss: messages in channels, of which `analysis` is reasoning
    qwen3           <think>reasoning</think>, if the message or the prompt's end opens it
    deepseek_r1     the same, where the message begins with reasoning in any case
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

Tools = Sequence[Mapping[str, Any]]


class Call(NamedTuple):
    """A call of a tool.

    Attributes:
      name: name of the function.
      arguments: JSON of an object, as text.
    """

    name: str
    arguments: str


class Delta(NamedTuple):
    """What a piece of text adds to a message."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[Call, ...] = ()

    def __add__(self, other: Delta) -> Delta:
        return Delta(*(a + b for a, b in zip(self, other, strict=True)))


class Text:
    """A message of text alone; the base of parsers."""

    def push(self, text: str) -> Delta:
        """Takes the next piece of the text."""
        return Delta(text)

    def finish(self) -> Delta:
        """Returns what was held back when the text has ended."""
        return Delta()


class Thinking(Text):
    """Reasoning up to `</think>`, then what another parser reads.

    Args:
      then: parser of the rest.
      is_open: whether the message begins within reasoning.
    """

    BEGIN, END = "<think>", "</think>"

    def __init__(self, then: Text, is_open: bool):
        self._then, self._rest, self._is_open = then, "", is_open
        self._begins, self._strips = True, False

    def push(self, text: str) -> Delta:
        self._rest += text
        if self._begins:  # the tag may stand there although the prompt opened it
            start = self._rest.lstrip()
            if len(start) < len(self.BEGIN) and self.BEGIN.startswith(start):
                return Delta()
            self._begins = False
            if start.startswith(self.BEGIN):
                self._rest, self._is_open, self._strips = start[len(self.BEGIN) :], True, True
        if self._strips:  # templates write empty lines behind the tags
            self._rest = self._rest.lstrip("\n")
            self._strips = not self._rest
        if self._is_open:
            reasoning, found, rest = self._rest.partition(self.END)
            if not found:
                reasoning, self._rest = _held(self._rest, self.END)
                return Delta(reasoning=reasoning)
            self._rest, self._is_open, self._strips = rest, False, True
            return Delta(reasoning=reasoning) + self.push("")
        rest, self._rest = self._rest, ""
        return self._then.push(rest)

    def finish(self) -> Delta:
        rest = Delta(reasoning=self._rest) if self._is_open else self._then.push(self._rest)
        return rest + self._then.finish()


class Tagged(Text):
    """Calls between `<tool_call>` and `</tool_call>`; white space around them is dropped.

    Args:
      read: function that reads the text between the tags; None: it cannot.
    """

    BEGIN, END = "<tool_call>", "</tool_call>"

    def __init__(self, read: Callable[[str], Call | None]):
        self._read, self._rest, self._space = read, "", ""
        self._inside = self._called = False

    def push(self, text: str) -> Delta:
        self._rest += text
        delta = Delta()
        while True:
            before, found, rest = self._rest.partition(self.END if self._inside else self.BEGIN)
            if self._inside and not found:
                return delta
            if self._inside:
                delta += self._block(before, self.END)
            else:
                if not found:
                    before, rest = _held(before, self.BEGIN)
                delta += self._outside(before)
            self._rest = rest
            if not found:
                return delta
            self._inside = not self._inside

    def _outside(self, text: str) -> Delta:
        """Passes text on, without the white space at its end, which a call may follow."""
        text = self._space + text
        kept = text.rstrip()
        self._space = text[len(kept) :]
        return Delta(kept)

    def _block(self, text: str, end: str) -> Delta:
        call, space, self._space = self._read(text), self._space, ""
        if call is None:
            return Delta(space + self.BEGIN + text + end)
        self._called = True
        return Delta(calls=(call,))

    def finish(self) -> Delta:
        if self._inside:  # a model may end its message without the last tag
            return self._block(self._rest, "")
        rest = self._space + self._rest
        return Delta() if self._called and rest.isspace() else Delta(rest)


class WholeJSON(Text):
    """A message that consists of calls in JSON, or is text."""

    TAG = "<|python_tag|>"

    def __init__(self):
        self._rest, self._is_text = "", False

    def push(self, text: str) -> Delta:
        if self._is_text:
            return Delta(text)
        self._rest += text
        start = self._rest.lstrip()[: len(self.TAG)]
        if not start or start[0] in "{[" or self.TAG.startswith(start):
            return Delta()
        self._is_text, rest = True, self._rest
        return Delta(rest)

    def finish(self) -> Delta:
        if self._is_text:
            return Delta()
        calls, decoder = [], json.JSONDecoder()
        rest = self._rest.strip().removeprefix(self.TAG).strip()
        try:
            while rest:
                value, end = decoder.raw_decode(rest)
                calls += map(_call, value if isinstance(value, list) else [value])
                rest = rest[end:].lstrip("; \n")
        except (ValueError, RecursionError):
            calls = [None]
        if None in calls or not calls:
            return Delta(self._rest)
        return Delta(calls=tuple(calls))


class Channels(Text):
    """Messages of gpt-oss, each in a channel: header, `<|message|>`, text, `<|end|>`."""

    MARKER = re.compile(r"<\|(start|channel|constrain|message|end|call|return)\|>")
    KNOWN = re.compile(r"\b(assistant|analysis|commentary|final|json)\b|\bto=\S+")  # in headers
    LONGEST = len("<|constrain|>")

    def __init__(self):
        self._rest, self._header, self._body, self._part = "", "", "", "end"

    def push(self, text: str) -> Delta:
        self._rest += text
        delta = Delta()
        while marker := self.MARKER.search(self._rest):
            delta += self._take(self._rest[: marker.start()])
            self._rest = self._rest[marker.end() :]
            if marker[1] in ("end", "call", "return", "start"):
                delta += self._close()
                self._header = ""
            self._header += " "
            self._part = marker[1]
        begin = self._rest.rfind("<")
        held = begin if begin >= 0 and len(self._rest) - begin < self.LONGEST else len(self._rest)
        text, self._rest = self._rest[:held], self._rest[held:]
        return delta + self._take(text)

    def _take(self, text: str) -> Delta:
        if self._part in ("start", "channel"):
            self._header += text
        if self._part == "message":
            if self._recipient is not None:
                self._body += text
            elif "analysis" in self._header.split():
                return Delta(reasoning=text)
            else:
                return Delta(text)
        return Delta(text) if self._part in ("end", "call", "return") else Delta()

    @property
    def _recipient(self) -> str | None:
        name = re.search(r"\bto=(\S+)", self._header)
        return name and name[1].removeprefix("functions.")

    def _close(self, is_cut: bool = False) -> Delta:
        body, self._body = self._body, ""
        if self._part in ("channel", "constrain"):  # a header that no message follows
            return Delta(self.KNOWN.sub("", self._header).strip())
        if self._part != "message" or self._recipient is None or (is_cut and not body.strip()):
            return Delta()
        call = _call({"name": self._recipient, "arguments": body.strip() or "{}"})
        return Delta(body) if call is None else Delta(calls=(call,))

    def finish(self) -> Delta:
        rest, self._rest = self._rest, ""
        delta = self._take(rest)  # which completes a header before it closes
        return delta + self._close(is_cut=True)


def _held(text: str, tag: str) -> tuple[str, str]:
    """Splits text before an end that may be the beginning of a tag."""
    for count in range(min(len(tag) - 1, len(text)), 0, -1):
        if tag.startswith(text[-count:]):
            return text[:-count], text[-count:]
    return text, ""


def _call(value: Any) -> Call | None:
    """Reads the JSON value of a call; None: it is none."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters"))
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return None
    return _named(value["name"], arguments)


def _named(name: str, arguments: Any) -> Call | None:
    """A call; None where it has no name or object, or what JSON in UTF-8 cannot say."""
    try:
        call = Call(name, json.dumps(arguments, ensure_ascii=False, allow_nan=False))
        "".join(call).encode()
    except (ValueError, RecursionError):  # NaN, or half a surrogate pair
        return None
    return call if name and isinstance(arguments, dict) else None


def _json_call(text: str) -> Call | None:
    try:
        return _call(json.loads(text))
    except (ValueError, RecursionError):
        return None


_FUNCTION = re.compile(r"\s*<function=([^>\s]+)>(.*?)(?:</function>\s*)?", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\s]+)>\n?(.*?)\n?</parameter>", re.DOTALL)


def _xml_call(text: str, tools: Tools) -> Call | None:
    """Reads a call whose values are text, which the tool's schema gives types to."""
    function = _FUNCTION.fullmatch(text)
    if function is None or _PARAMETER.sub("", function[2]).strip():
        return None
    schemas = [
        t["function"].get("parameters") for t in tools if t["function"]["name"] == function[1]
    ]
    schema = next((schema for schema in schemas if isinstance(schema, Mapping)), {})
    types = schema.get("properties")
    types = types if isinstance(types, Mapping) else {}
    values = {
        name: _typed(value, _kinds(types.get(name)))
        for name, value in _PARAMETER.findall(function[2])
    }
    return _named(function[1], values)


def _kinds(schema: Any) -> set[str]:
    """The JSON types that a schema allows, as far as it says them."""
    if not isinstance(schema, Mapping):
        return set()
    kind, branches = schema.get("type"), schema.get("anyOf") or schema.get("oneOf") or ()
    kinds = {one for one in (kind if isinstance(kind, list) else [kind]) if isinstance(one, str)}
    return kinds.union(*map(_kinds, branches if isinstance(branches, list) else ()))


def _typed(text: str, kinds: set[str]) -> Any:
    """The value of a parameter; text where that is allowed, or it cannot be read as JSON."""
    if not kinds or "string" in kinds:
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return {"true": True, "false": False, "none": None}.get(text.strip().lower(), text)


CALLS: dict[str, Callable[[Tools], Text]] = {
    "hermes": lambda tools: Tagged(_json_call),
    "qwen3_coder": lambda tools: Tagged(lambda text: _xml_call(text, tools)),
    "llama3_json": lambda tools: WholeJSON(),
    "openai": lambda tools: Channels(),
}
REASONING = ("qwen3", "deepseek_r1")
# What a chat template that uses a format contains; the first one that does decides.
_SIGNS = {
    "openai": "<|channel|>",
    "qwen3_coder": "<function=",
    "hermes": "<tool_call>",
    "llama3_json": '"parameters": dictionary',
}


def named_in(template: str | None) -> str | None:
    """Returns the name of the parser of calls for a chat template; None: it calls no tools."""
    signs = _SIGNS.items() if template else ()
    return next((name for name, sign in signs if sign in template), None)


def parser_of(calls: str | None, reasoning: str | None, tools: Tools, prompt_end: str) -> Text:
    """Makes the parser of a message.

    Args:
      calls: name of the parser of calls; None: they are text.
      reasoning: name of the parser of reasoning; None: it is text.
      tools: the tools of the request.
      prompt_end: the last characters of the prompt.
    """
    parser = Text() if calls is None else CALLS[calls](tools)
    if reasoning is None:
        return parser
    is_open = reasoning == "deepseek_r1" or prompt_end.rstrip().endswith(Thinking.BEGIN)
    return Thinking(parser, is_open)
