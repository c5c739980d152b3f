"""Token ids of prompts and demonstrations, the same in training, rollouts and generation."""

from __future__ import annotations

import contextlib
import datetime
import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from specjax.command_line import ConfigError
from specjax.config import ModelConfig
from specjax.tokenizer import (
    chat_text,
    check_ids,
    check_options,
    decode,
    has_chat_template,
    prompt_ids,
    reads_date,
    with_tokenizer_end,
)
from train.data.tasks.layout import (
    PARTS,
    REASONING,
    Demonstration,
    Message,
    Problem,
    Response,
    text_of_response,
    tools_of,
)
from train.rewards.scoring import row_name
from train.schema import DataConfig


class Pair(NamedTuple):
    """A prompt and what follows it, as token ids; the latter is trained on.

    Attributes:
      prompt: ids of the prompt, as generation reads it.
      tokens: ids of the response, with the token that ends it.
      dropped: keys of the assistant's message that are not imitated, because the chat template does
        not write them.
    """

    prompt: Sequence[int]
    tokens: Sequence[int]
    dropped: tuple[str, ...] = ()


class Prompts:
    """Encodes problems and demonstrations; errors about one name its row.

    Args:
      tokenizer: tokenizer of the model.
      cfg: settings of the data.
      longest: largest number of tokens of a prompt; None for no limit.
      model: config of the model, which must have all tokens of what is encoded; None: nothing is
        checked.

    Attributes:
      chat: whether prompts that are text become messages of a conversation.
      date: date that the chat template writes; None: it writes none.
      render: function from messages to the text that the chat template writes.

    Raises:
      ValueError: the settings need a chat template, and the tokenizer has none.
    """

    def __init__(
        self,
        tokenizer,
        cfg: DataConfig,
        longest: int | None = None,
        model: ModelConfig | None = None,
    ):
        self.tokenizer, self.cfg, self.longest, self.model = tokenizer, cfg, longest, model
        self._has_template, options = has_chat_template(tokenizer), cfg.chat_template_kwargs
        if not self._has_template and (cfg.chat == "on" or options):
            name = "chat=on" if cfg.chat == "on" else "chat_template_kwargs"
            raise ValueError(f"data.{name}: the model's tokenizer has no chat template")
        check_options(tokenizer, options)
        self.chat = self._has_template and cfg.chat != "off"
        date = cfg.date or datetime.datetime.now(datetime.UTC).date().isoformat()
        self.date = date if reads_date(tokenizer) else None
        self.render = functools.partial(chat_text, tokenizer, options=options, date=date)

    # --- prompts ---------------------------------------------------------------------------------

    def whole(self, problem: Problem) -> list[int]:
        """Returns all token ids of a prompt, without regard to its length."""
        name = row_name(problem)
        with _naming(name):
            ids = self._ids(self._text(problem.prompt, tools_of(problem.row)), problem.prompt)
        return self.known(ids, name)

    def fit(self, problem: Problem) -> tuple[list[int] | None, bool]:
        """Encodes a prompt, and drops or cuts it if it is too long (`data.overlong_prompts`).

        Returns:
          its token ids, or the last of them if it is cut, or None if it is dropped; and whether it
          is too long.
        """
        ids = self.whole(problem)
        if self.longest is None or len(ids) <= self.longest:
            return ids, False
        return (ids[-self.longest :] if self.cfg.overlong_prompts == "truncate" else None), True

    def known(self, ids: Sequence[int], where: str) -> Sequence[int]:
        """Returns token ids of `where`, which the model must have; see `specjax.tokenizer`.

        Raises:
          ConfigError: the model has no such token.
        """
        if self.model is not None:
            try:
                check_ids(where, ids, self.model.vocab_size, self.tokenizer)
            except ValueError as error:
                raise ConfigError(str(error)) from error
        return ids

    def _ids(self, text: str, prompt: str | Sequence[Message]) -> list[int]:
        if isinstance(prompt, str) and not self.chat:
            return prompt_ids(self.tokenizer, text)
        return list(self.tokenizer.encode(text, add_special_tokens=False))  # the template has them

    def _text(self, prompt: str | Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> str:
        """Writes a prompt as text, with the chat template applied to conversations.

        Raises:
          ValueError: the tokenizer has no template for a conversation, or it refuses this one, or
            the prompt has tools or calls of tools that no template writes.
        """
        messages = self._messages(prompt)
        if messages and not self._has_template:
            raise ValueError(
                "prompts that are conversations need a chat template, and the model's tokenizer "
                "has none; use the instruct model's, or rows whose prompts are text"
            )
        text = self.render(messages, tools=tools) if messages else prompt
        if tools and not (messages and self._differs(text, messages)):
            raise ValueError(
                "the row has a column `tools`, and no chat template writes it; delete or rename it"
            )
        if any("tool_calls" in message for message in messages):
            without = [_without(message, "tool_calls") for message in messages]
            if not self._differs(text, without, tools=tools):
                raise ValueError(
                    "the prompt has messages with `tool_calls`, and the chat template does not "
                    "write them; write them into the content"
                )
        return text

    def _messages(self, prompt: str | Sequence[Message]) -> Sequence[Message]:
        """Returns a conversation, or a text as one message; empty for text without a template."""
        if not isinstance(prompt, str):
            return prompt
        return [{"role": "user", "content": prompt}] if self.chat else []

    def _differs(self, text: str, messages: Sequence[Message], **options) -> bool:
        """Returns whether the template writes other messages in another way, or refuses them."""
        try:
            return self.render(messages, **options) != text
        except ValueError:
            return True

    # --- demonstrations --------------------------------------------------------------------------

    def demonstration(self, item: Demonstration) -> Pair:
        """Encodes a prompt and what is imitated after it.

        In a conversation that is what the chat template writes of the assistant's message beyond
        the prompt that generation reads. The ids are those of the whole text, up to the first token
        that ends the response, which is added if there is none. A token of the whole text may hold
        the end of the prompt and the beginning of the response. Generation cannot sample it,
        because it begins after the last token of the prompt. Then the ids of the prompt are those
        that generation reads, and the response is encoded by itself.

        Raises:
          ConfigError: a template refuses the row, or nothing would be imitated.
        """
        name = demonstration_name(item)
        with _naming(name):
            prompt, response = item.prompt, item.response
            context = self._text(prompt, item.tools)
            if messages := self._messages(prompt):
                text, dropped = self._written(messages, item, context)
            else:
                text, dropped = text_of_response(response), _keys(response)
            encode = functools.partial(self.tokenizer.encode, add_special_tokens=False)
            ids, whole = list(encode(context)), list(encode(context + text))
            same = whole[: len(ids)] == ids
            imitated = self._ended(whole[len(ids) :] if same else _continuation(encode, text))
            has_content = text_of_response(response).strip() or (
                {*PARTS} & {*_keys(response)} - {*dropped}
            )
            if len(imitated) < 2 or not has_content:
                raise ValueError(
                    "the end token alone would be imitated: the demonstration is empty, or the "
                    f"chat template writes nothing of its {', '.join(dropped) or 'content'}; "
                    "delete the row"
                )
            ids = ids if messages else prompt_ids(self.tokenizer, context)
        self.known((*ids, *imitated), name)
        return Pair(ids, imitated, dropped)

    def _written(
        self, messages: Sequence[Message], item: Demonstration, context: str
    ) -> tuple[str, tuple[str, ...]]:
        """Returns what a chat template writes of a response, and the keys that are not imitated.

        Args:
          messages: the messages of the prompt.
          item: the demonstration.
          context: text of the prompt.

        Raises:
          ValueError: reasoning or calls of the response cannot be told from the prompt.
        """
        response, options = item.response, {"tools": item.tools, "add_generation_prompt": False}
        text = isinstance(response, str)
        message = {"role": "assistant", "content": response} if text else response
        content = message.get("content", "")
        whole = self.render([*messages, message], **options)
        if not whole.startswith(context):
            if parts := [name for name in PARTS if name in message]:
                raise ValueError(
                    f"the assistant's message has {', '.join(parts)}, and what the chat template "
                    "writes of the conversation does not begin with the prompt that generation "
                    "reads; change data.chat_template_kwargs, or write them into the content"
                )
            return _without_opened_tag(content, context), _keys(response)
        dropped = []
        for name in _keys(response):
            names = REASONING if name in REASONING else (name,)
            if not self._differs(whole, [*messages, _without(message, *names)], **options):
                dropped.append(name)
        text = whole[len(context) :]
        if "".join(content.split()) not in "".join(text.split()):
            dropped.append("content")
        # Sampling ends with the answer, and not with the spaces that the template writes after it.
        spaces, written = (t[len(t.rstrip()) :] for t in (content, text))
        return text.rstrip() + (spaces if written.startswith(spaces) else ""), tuple(dropped)

    def _ended(self, ids: Sequence[int]) -> list[int]:
        """Cuts a response after the first token that ends it, or adds one."""
        ends, last = self._ends, len(ids)
        while last and (
            ids[last - 1] in ends or not decode(self.tokenizer, [ids[last - 1]], False).strip()
        ):
            last -= 1
        first = next((i for i in range(last, len(ids)) if ids[i] in ends), None)
        return [*ids, ends[0]] if first is None else [*ids[: first + 1]]

    @functools.cached_property
    def _ends(self) -> tuple[int, ...]:
        """The ids that end a response, first the one that demonstrations end with.

        That is the tokenizer's, or the model's if the model does not know the tokenizer's.
        """
        end = self.tokenizer.eos_token_id
        if self.model is None:
            known = () if end is None else (end,)
        else:
            known = with_tokenizer_end(self.model, self.tokenizer).eos_token_ids
        if not known:
            raise ValueError(
                "neither config.json nor the tokenizer names an end-of-sequence token to end "
                "demonstrations with; set eos_token_id in config.json"
            )
        return (end, *(token for token in known if token != end)) if end in known else known


def demonstration_name(item: Demonstration) -> str:
    """Names a demonstration in messages."""
    return f"the row {item.place}" if item.place else "a generated demonstration"


@contextlib.contextmanager
def _naming(name: str) -> Iterator[None]:
    """Adds the name of a row to the errors about it."""
    try:
        yield
    except ValueError as error:
        raise ConfigError(f"{name}: {error}") from error


def _without(message: Message, *names: str) -> Message:
    return {key: value for key, value in message.items() if key not in names}


def _keys(response: Response) -> tuple[str, ...]:
    """Returns the keys of a response that is a message, beside role and content."""
    return () if isinstance(response, str) else tuple(_without(response, "role", "content"))


def _without_opened_tag(content: str, context: str) -> str:
    """Removes from content the tag that a prompt ends with, such as `<think>`, and its spaces."""
    opened = re.search(r"(<[^<>/\s][^<>\s]*>)(\s*)\Z", context)
    if opened is None or not content.lstrip().startswith(opened[1]):
        return content
    return content.lstrip().removeprefix(opened[1]).removeprefix(opened[2])


def _continuation(encode: Callable[[str], Sequence[int]], text: str) -> list[int]:
    """Encodes a text without the space that some tokenizers put before a first word."""
    for before in ("\n", "a"):
        head, ids = list(encode(before)), list(encode(before + text))
        if ids[: len(head)] == head:
            return ids[len(head) :]
    return list(encode(text))
