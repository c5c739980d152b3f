"""Fields of OpenAI's and vLLM's requests that this server knows and does nothing about.

One rule holds for all of them, and for every other field of a body too: null is as good as leaving
the field out. Beside null, a field of these tables passes with the values that are listed, which
ask for nothing: the default, or what is empty. Any other value asks for something that is not done
here, and is a 400 that names the field. What is said nowhere is refused as an unknown field.

A table holds a field's name, the values that ask for nothing, and what there is instead.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, NamedTuple, TypeVar

from pydantic import AfterValidator, BaseModel, Field, WithJsonSchema, create_model
from pydantic_core import PydanticCustomError

REFUSAL = "asks_for_more"  # the type of the errors that are raised here
Model = TypeVar("Model", bound=BaseModel)


class Nothing(NamedTuple):
    """What a field may say without asking for anything.

    Attributes:
      values: beside null. instead: why there is no more, or what to ask for in its place.
    """

    values: tuple[Any, ...] = ()
    instead: str = "there is no such thing here"


_TOOLS = "no tools are called here"
_GUIDED = "text is not constrained to a format here; allowed_token_ids constrains tokens"
_BEAMS = "there is no beam search; ask for several samples (n)"
_REASONING = "chat_template_kwargs hands options to the chat template"
_WHOLE_PROMPTS = "prompts are never truncated; send a shorter one"
_TEXT = "this server reads and writes text"

_GUIDED_FIELDS = (
    "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar",
    "guided_decoding_backend", "guided_whitespace_pattern", "structural_tag",
)  # fmt: skip
_TRANSFERS = ("kv_transfer_params", "ec_transfer_params", "vllm_xargs", "repetition_detection")

# Of completions and chat completions alike, for clients that have one set of settings for both.
SAMPLING: dict[str, Nothing] = {
    "response_format": Nothing(({"type": "text"},), _GUIDED),
    **dict.fromkeys(_GUIDED_FIELDS, Nothing(({},), _GUIDED)),
    "use_beam_search": Nothing((False,), _BEAMS),
    "early_stopping": Nothing((False,), _BEAMS),
    "length_penalty": Nothing((1,), _BEAMS),
    "skip_special_tokens": Nothing((True,), "return_token_ids gives the tokens themselves"),
    "detokenize": Nothing((True,), "return_token_ids gives the tokens beside the text"),
    "return_tokens_as_token_ids": Nothing((False,), "return_token_ids gives the tokens"),
    "return_token_offsets": Nothing((False,), "logprobs of completions have text_offset"),
    "return_mm_kwargs": Nothing((True, False), _TEXT),
    "logprob_token_ids": Nothing(([],), "the most likely tokens are given (logprobs)"),
    "truncate_prompt_tokens": Nothing((), _WHOLE_PROMPTS),
    "truncation_side": Nothing((), _WHOLE_PROMPTS),
    "priority": Nothing((0,), "requests are served in the order in which they come"),
    "service_tier": Nothing(("auto", "default"), "all requests are served alike"),
    "store": Nothing((False,), "answers are not kept"),
    "cache_salt": Nothing(("",), "prompts that begin alike share cache pages"),
    "stream_interval": Nothing((1,), "tokens are sent as they come"),
    "thinking_token_budget": Nothing((-1,), "there is no such limit; see max_tokens"),
    "routed_experts_prompt_start": Nothing((0,)),
    "watermarking": Nothing((False,), "text is not marked"),
    "logits_processors": Nothing(([],), "logit_bias and bad_words change logits"),
    **dict.fromkeys(_TRANSFERS, Nothing(({},))),
    "tools": Nothing(([],), _TOOLS),
    "tool_choice": Nothing(("none", "auto"), _TOOLS),
    "functions": Nothing(([],), _TOOLS),
    "function_call": Nothing(("none", "auto"), _TOOLS),
    "modalities": Nothing((["text"], []), _TEXT),
    "audio": Nothing((), _TEXT),
    "media_io_kwargs": Nothing(({},), _TEXT),
    "mm_processor_kwargs": Nothing(({},), _TEXT),
    "prediction": Nothing((), "drafts come from the server's own draft source"),
    "reasoning_effort": Nothing((), _REASONING),
    "include_reasoning": Nothing((True,), _REASONING),
    "verbosity": Nothing(("medium",), "say it in a message"),
    "web_search_options": Nothing((), _TOOLS),
    "moderation": Nothing((), "texts are not moderated"),
    "prompt_cache_options": Nothing(({},), "the server decides what it keeps"),
    "prompt_cache_retention": Nothing(("in_memory",), "cached prompts lie in memory"),
    "continue_final_message": Nothing((False,), "use /v1/completions with the text so far"),
    "documents": Nothing(([],), "put them into a message, or into chat_template_kwargs"),
    "chat_template": Nothing((), "the server is started with its template (chat_template)"),
    "return_prompt_text": Nothing((False,), "return_token_ids gives the prompt's tokens"),
    "suffix": Nothing(("",), "text is written behind the prompt only"),
    "prompt_embeds": Nothing(([],), "a prompt is text or token ids"),
}
CHATS: dict[str, Nothing] = {
    "echo": Nothing((False,), "an answer is the new message alone"),
    "prompt": Nothing((), "use /v1/completions"),
}
COMPLETIONS: dict[str, Nothing] = {
    "messages": Nothing((), "use /v1/chat/completions"),
    "max_completion_tokens": Nothing((), "completions say max_tokens"),
    "top_logprobs": Nothing((0,), "completions say logprobs"),
    "add_generation_prompt": Nothing((True,), "completions have no chat template"),
    "chat_template_kwargs": Nothing(({},), "completions have no chat template"),
}
# What OpenAI's own client has in the messages that it was answered with.
MESSAGES: dict[str, Nothing] = {
    "refusal": Nothing(("",), "a refusal is a message as any other: send it as content"),
    "annotations": Nothing(([],), _TEXT),
    "audio": Nothing((), _TEXT),
    "function_call": Nothing((), _TOOLS),
    "tool_calls": Nothing(([],), _TOOLS),
    "reasoning": Nothing(("",), "send it as content"),
    "reasoning_content": Nothing(("",), "send it as content"),
}
TEXT_PARTS: dict[str, Nothing] = {
    "annotations": Nothing(([],), _TEXT),
    "prompt_cache_breakpoint": Nothing((), "the server decides what it keeps"),
}
STREAM_OPTIONS: dict[str, Nothing] = {
    "include_obfuscation": Nothing((False,), "pieces are as long as their texts"),
}
TOKENIZE: dict[str, Nothing] = {
    name: SAMPLING[name]
    for name in (
        "tools", "continue_final_message", "chat_template", "media_io_kwargs",
        "mm_processor_kwargs",
    )
}  # fmt: skip


def with_nothing(base: type[Model], table: dict[str, Nothing]) -> type[Model]:
    """A body that takes the fields of a table as well."""
    fields: dict[str, Any] = {
        name: (_type(nothing), Field(None, description=f"ignored: {nothing.instead}"))
        for name, nothing in table.items()
    }
    return create_model(f"{base.__name__}WithNothing", __base__=base, **fields)


def _type(nothing: Nothing) -> Any:
    expected = " or ".join(["null", *map(json.dumps, nothing.values)])

    def check(value: Any) -> None:
        if value is not None and not any(_same(value, each) for each in nothing.values):
            message = "expected {expected}, which asks for nothing, got {got}: {instead}"
            told = {"expected": expected, "got": short(value), "instead": nothing.instead}
            raise PydanticCustomError(REFUSAL, message, told)

    schema = {"enum": [None, *nothing.values]}
    return Annotated[Any, AfterValidator(check), WithJsonSchema(schema)]


def _same(value: Any, other: Any) -> bool:
    """Equality as JSON has it: true is not 1."""
    return value == other and isinstance(value, bool) == isinstance(other, bool)


def short(value: Any) -> str:
    """A value that a client sent, for a message."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 80 else f"{text[:77]}..."
