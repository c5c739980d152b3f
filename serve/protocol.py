"""Request bodies, with OpenAI's names, and vLLM's for fields that OpenAI does not have.

An unknown field gets a 400, and so does an unimplemented value of a known field: to ignore it would
return other tokens than the client asked for. null always means that the field is left out.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    WithJsonSchema,
    create_model,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from serve.errors import KNOWN_FIELDS, UNSUPPORTED_VALUE, ApiError, short
from specjax import SamplingParams
from specjax.config.sampling import MAX_TOP_LOGPROBS, SEED_RANGE, SEEDS, is_seed

T = TypeVar("T")
Model = TypeVar("Model", bound=BaseModel)

# --- fields that are known and not implemented ---


class Unsupported(NamedTuple):
    """A field of OpenAI's or vLLM's requests that this server knows and does not implement.

    Attributes:
      accepted: values beside null that have no effect, such as the default or an empty list.
      instead: reason for which other values are refused, or what to use in place of the field.
    """

    accepted: tuple[Any, ...] = ()
    instead: str = "this server does not implement it"


_FORCED = "a call cannot be forced, which needs constrained decoding"
_OLD_TOOLS = "use tools and tool_calls"
_GUIDED = "text is not constrained to a format here; allowed_token_ids constrains tokens"
_BEAMS = "there is no beam search; ask for several samples (n)"
_REASONING = "chat_template_kwargs hands options to the chat template"
_WHOLE_PROMPTS = "prompts are never truncated; send a shorter one"
_TEXT = "this server reads and writes text"
_NO_TEMPLATE = "completions have no chat template"

_GUIDED_FIELDS = (
    "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar",
    "guided_decoding_backend", "guided_whitespace_pattern", "structural_tag",
)  # fmt: skip
_TRANSFERS = ("kv_transfer_params", "ec_transfer_params", "vllm_xargs", "repetition_detection")

# Fields of both kinds of completions, for some clients send the same settings to both.
UNSUPPORTED_SAMPLING: dict[str, Unsupported] = {
    "response_format": Unsupported(({"type": "text"},), _GUIDED),
    **dict.fromkeys(_GUIDED_FIELDS, Unsupported(({},), _GUIDED)),
    "use_beam_search": Unsupported((False,), _BEAMS),
    "early_stopping": Unsupported((False,), _BEAMS),
    "length_penalty": Unsupported((1,), _BEAMS),
    "detokenize": Unsupported((True,), "return_token_ids gives the tokens beside the text"),
    "return_tokens_as_token_ids": Unsupported((False,), "return_token_ids gives the tokens"),
    "return_token_offsets": Unsupported((False,), "logprobs of completions have text_offset"),
    "return_mm_kwargs": Unsupported((True, False), _TEXT),
    "logprob_token_ids": Unsupported(([],), "the most likely tokens are given (logprobs)"),
    "truncate_prompt_tokens": Unsupported((), _WHOLE_PROMPTS),
    "truncation_side": Unsupported((), _WHOLE_PROMPTS),
    "priority": Unsupported((0,), "requests are served in the order in which they come"),
    "service_tier": Unsupported(("auto", "default"), "all requests are served alike"),
    "store": Unsupported((False,), "answers are not kept"),
    "cache_salt": Unsupported(("",), "prompts that begin alike share cache pages"),
    "stream_interval": Unsupported((1,), "tokens are sent as they come"),
    "thinking_token_budget": Unsupported((-1,), "there is no such limit; see max_tokens"),
    "routed_experts_prompt_start": Unsupported((0,)),
    "watermarking": Unsupported((False,), "text is not marked"),
    "logits_processors": Unsupported(([],), "logit_bias and bad_words change logits"),
    **dict.fromkeys(_TRANSFERS, Unsupported(({},))),
    "tool_choice": Unsupported(("none", "auto"), _FORCED),
    "functions": Unsupported(([],), _OLD_TOOLS),
    "function_call": Unsupported(("none", "auto"), _OLD_TOOLS),
    "modalities": Unsupported((["text"], []), _TEXT),
    "audio": Unsupported((), _TEXT),
    "media_io_kwargs": Unsupported(({},), _TEXT),
    "mm_processor_kwargs": Unsupported(({},), _TEXT),
    "prediction": Unsupported((), "drafts come from the server's own draft source"),
    "reasoning_effort": Unsupported((), _REASONING),
    "include_reasoning": Unsupported((True,), _REASONING),
    "verbosity": Unsupported(("medium",), "say it in a message"),
    "web_search_options": Unsupported((), "the server searches nothing"),
    "moderation": Unsupported((), "texts are not moderated"),
    "prompt_cache_options": Unsupported(({},), "the server decides what it keeps"),
    "prompt_cache_retention": Unsupported(("in_memory",), "cached prompts are kept in memory"),
    "documents": Unsupported(([],), "put them into a message, or into chat_template_kwargs"),
    "chat_template": Unsupported((), "the server is started with its template (chat_template)"),
    "return_prompt_text": Unsupported((False,), "return_token_ids gives the prompt's tokens"),
    "suffix": Unsupported(("",), "text is written behind the prompt only"),
    "prompt_embeds": Unsupported(([],), "a prompt is text or token ids"),
}
UNSUPPORTED_CHAT: dict[str, Unsupported] = {
    "echo": Unsupported((False,), "an answer is the new message alone"),
    "prompt": Unsupported((), "use /v1/completions"),
}
UNSUPPORTED_COMPLETION: dict[str, Unsupported] = {
    "messages": Unsupported((), "use /v1/chat/completions"),
    "max_completion_tokens": Unsupported((), "completions say max_tokens"),
    "top_logprobs": Unsupported((0,), "completions say logprobs"),
    "add_generation_prompt": Unsupported((True,), _NO_TEMPLATE),
    "continue_final_message": Unsupported((False,), _NO_TEMPLATE),
    "chat_template_kwargs": Unsupported(({},), _NO_TEMPLATE),
    "tools": Unsupported(([],), _NO_TEMPLATE),
}
# Fields of messages in responses, which OpenAI's client sends back in the next request.
UNSUPPORTED_MESSAGE: dict[str, Unsupported] = {
    "refusal": Unsupported(("",), "a refusal is a message as any other: send it as content"),
    "annotations": Unsupported(([],), _TEXT),
    "audio": Unsupported((), _TEXT),
    "function_call": Unsupported((), _OLD_TOOLS),
    "reasoning": Unsupported(("",), "send it as reasoning_content"),
}
UNSUPPORTED_TEXT_PART: dict[str, Unsupported] = {
    "annotations": Unsupported(([],), _TEXT),
    "prompt_cache_breakpoint": Unsupported((), "the server decides what it keeps"),
}
UNSUPPORTED_STREAM_OPTIONS: dict[str, Unsupported] = {
    "include_obfuscation": Unsupported((False,), "chunks are as long as their texts"),
}
UNSUPPORTED_WEIGHTS: dict[str, Unsupported] = {
    "load_format": Unsupported(("auto",), "the format is that of the files"),
    "manifest": Unsupported((), "checksums are in the response"),
    "token_step": Unsupported((0,), "versions are counted"),
    "is_async": Unsupported((False,), "the response comes when the new weights serve"),
    "keep_pause": Unsupported((True, False), "/continue_generation ends a pause"),
    "torch_empty_cache": Unsupported((True, False), "there is no torch here"),
    "recapture_cuda_graph": Unsupported((True, False), "graphs stay right with new weights"),
}
UNSUPPORTED_TOKENIZE: dict[str, Unsupported] = {
    name: UNSUPPORTED_SAMPLING[name]
    for name in ("chat_template", "media_io_kwargs", "mm_processor_kwargs")
}


def with_unsupported(base: type[Model], table: dict[str, Unsupported]) -> type[Model]:
    """A body with the fields of a table added."""
    fields: dict[str, Any] = {
        name: (_type(field), Field(None, description=f"ignored: {field.instead}"))
        for name, field in table.items()
    }
    return create_model(f"{base.__name__}Base", __base__=base, **fields)


def _type(field: Unsupported) -> Any:
    expected = " or ".join(["null", *map(json.dumps, field.accepted)])

    def check(value: Any) -> Any:
        if value is not None and not any(_same(value, each) for each in field.accepted):
            message = "expected {expected}, got {got}: {instead}"
            values = {"expected": expected, "got": short(value), "instead": field.instead}
            raise PydanticCustomError(UNSUPPORTED_VALUE, message, values)
        return value

    schema = {"enum": [None, *field.accepted]}
    return Annotated[Any, AfterValidator(check), WithJsonSchema(schema)]


def _same(value: Any, other: Any) -> bool:
    """Whether two JSON values are equal; true does not equal 1."""
    return value == other and isinstance(value, bool) == isinstance(other, bool)


# --- types of values ---


def _whole(text: str) -> str:
    """Refuses half a surrogate pair, which JSON can spell and no tokenizer takes."""
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise ValueError("expected text, got half a surrogate pair")
    return text


def _seed(value: int) -> int:
    if not is_seed(value):
        raise ValueError(f"expected {SEED_RANGE}, got {value}")
    return value


Token = Annotated[int, Field(ge=0, lt=1 << 31, title="Token")]
Text = Annotated[str, AfterValidator(_whole)]
Word = Annotated[str, Field(min_length=1, max_length=256), AfterValidator(_whole)]
Prompt = Annotated[str, Field(min_length=1), AfterValidator(_whole)]
Bias = Annotated[float, Field(ge=-100, le=100)]
Seed = Annotated[
    int,
    AfterValidator(_seed),
    WithJsonSchema({"type": "integer", "minimum": SEEDS[0], "maximum": SEEDS[-1]}),
]
# `fail_fast`: a body may hold hundreds of thousands of wrong values, and listing them all would
# block the event loop.
Ids = Annotated[list[Token], Field(min_length=1, fail_fast=True)]
Several = Annotated[list[T], Field(min_length=1, fail_fast=True)]


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        super().__pydantic_init_subclass__(**kwargs)
        KNOWN_FIELDS.update(cls.model_fields)

    @model_validator(mode="before")
    @classmethod
    def _normalise(cls, data: Any) -> Any:
        """Keeps one unknown field at most, turns 5.0 into 5, and drops null fields."""
        if not isinstance(data, dict):
            return data
        names, fields = list(data), cls.model_fields
        if len(data) > len(fields):
            names = [name for name in fields if name in data]
            names.append(next(name for name in data if name not in fields))
        return {
            name: _whole_numbers(data[name])
            for name in names
            if data[name] is not None or name not in fields or fields[name].is_required()
        }

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema, handler) -> dict[str, Any]:
        """Makes every field that is not required nullable in the OpenAPI document."""
        schema = handler.resolve_ref_schema(handler(core_schema))
        needed = schema.get("required", ())
        for name, kind in schema.get("properties", {}).items():
            nullable = "enum" in kind and None in kind["enum"]
            if name in needed or nullable:
                continue
            kinds = kind.pop("anyOf", None)
            if kinds is None:
                words = ("title", "description", "default")
                kinds = [{key: kind.pop(key) for key in list(kind) if key not in words}]
            if {"type": "null"} not in kinds:
                kinds = [*kinds, {"type": "null"}]
            kind["anyOf"] = kinds
        return schema


def _whole_numbers(value: Any, deep: int = 2) -> Any:
    """Turns floats without a fraction into integers, in nested lists as well."""
    if type(value) is float and value.is_integer() and abs(value) < 1 << 53:
        return int(value)
    if deep and type(value) is list and any(type(each) in (float, list) for each in value):
        return [_whole_numbers(each, deep - 1) for each in value]
    return value


def _at_most(count: int) -> BeforeValidator:
    """Refuses an object with more than `count` entries, before any entry is read."""

    def check(value: Any) -> Any:
        if isinstance(value, dict) and len(value) > count:
            raise ValueError(f"expected at most {count} entries, got {len(value)}")
        return value

    return BeforeValidator(check)


class StreamOptions(with_unsupported(Body, UNSUPPORTED_STREAM_OPTIONS)):
    include_usage: bool = False
    continuous_usage_stats: bool = Field(
        False, description="every chunk has the usage so far, if include_usage is true"
    )


class Sampling(with_unsupported(Body, UNSUPPORTED_SAMPLING)):
    """The fields that completions and chat completions share."""

    model: str | None = Field(None, description="the model's name, see /v1/models")
    temperature: float | None = Field(
        None, ge=0, le=100, description="0 is greedy; default 1, or the model's"
    )
    top_p: float | None = Field(None, gt=0, le=1)
    n: int | None = Field(None, ge=1, description="samples of each prompt")
    seed: Seed | None = Field(None, description="equal prompts and seeds give equal samples")
    stop: Word | Annotated[list[Word], Field(max_length=16, fail_fast=True)] | None = None
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: Annotated[
        dict[Annotated[str, Field(pattern="^[0-9]{1,9}$")], Bias] | None,
        Field(max_length=300),
        _at_most(300),
    ] = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    best_of: int | None = Field(None, ge=1, description="1 or n: all samples are given")
    parallel_tool_calls: bool | None = Field(
        None, description="false: a message has one call of a tool at most"
    )
    user: str | None = Field(None, description="ignored")
    safety_identifier: str | None = Field(None, description="ignored")
    prompt_cache_key: str | None = Field(None, description="ignored")
    request_id: str | None = Field(None, description="ignored")
    session_id: str | None = Field(None, description="ignored")
    metadata: Annotated[dict[str, str] | None, Field(max_length=16), _at_most(16)] = Field(
        None, description="ignored"
    )
    # vLLM's
    top_k: int | None = Field(None, ge=-1, lt=1 << 31, description="0 and -1 keep all tokens")
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, ge=0.01, le=100)
    stop_token_ids: Annotated[list[Token], Field(max_length=64, fail_fast=True)] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: int = Field(0, ge=0)
    bad_words: Annotated[list[Word], Field(max_length=64, fail_fast=True)] | None = None
    allowed_token_ids: Ids | None = None
    add_special_tokens: bool | None = Field(
        None, description="the tokenizer's own (BOS); default: not where a chat template wrote them"
    )
    prompt_logprobs: int | None = Field(
        None,
        ge=0,
        le=MAX_TOP_LOGPROBS,
        description="number of likely tokens to return for each prompt token, beside its own "
        "log-probability, under the raw logits",
    )
    return_token_ids: bool = Field(False, description="return token_ids and prompt_token_ids")
    skip_special_tokens: bool = Field(True, description="leave special tokens out of the text")
    spaces_between_special_tokens: bool = Field(
        True, description="where the tokenizer's own decoder does not decide that"
    )
    # specjax's
    speculative: bool = Field(True, description="false: decode this request plainly")
    return_spec_details: bool = Field(False, description="return statistics of speculation")

    def params(
        self, max_tokens: int, top_logprobs: int, defaults: Mapping[str, Any] = MappingProxyType({})
    ) -> SamplingParams:
        """The sampling parameters of the request.

        Args:
          max_tokens: largest number of tokens to generate.
          top_logprobs: number of most likely tokens to return per position.
          defaults: values of fields that the request leaves out, by the names of `SamplingParams`.

        Raises:
          ApiError: values contradict each other.
        """
        names = SamplingParams.__dataclass_fields__.keys() - {"prompt_logprobs"}
        given = {name: value for name, value in self if name in names and value is not None}
        if self.logit_bias is not None:
            given["logit_bias"] = {int(token): bias for token, bias in self.logit_bias.items()}
        given |= {"max_tokens": max_tokens, "logprobs": top_logprobs or None}
        try:
            return SamplingParams(**{**defaults, **given})
        except ValueError as error:
            raise ApiError(400, str(error), _field_in(str(error))) from error

    @field_validator("stop", mode="before")
    @classmethod
    def _empty_is_none(cls, stop: Any) -> Any:
        return None if stop == "" else stop

    def require_supported(self) -> None:
        """Raises ApiError where fields contradict each other."""
        if self.best_of not in (None, 1, self.n or 1):
            raise ApiError(
                400,
                f"best_of: expected null, 1 or n, got {self.best_of}: no sample is better than "
                "another here; ask for more samples (n)",
                "best_of",
            )
        if self.prompt_logprobs is not None and self.stream:
            raise ApiError(
                400,
                "prompt_logprobs: expected null where stream is true, got "
                f"{self.prompt_logprobs}: they are in no piece of a stream; leave one of them out",
                "prompt_logprobs",
            )
        if self.wanted_tokens == 0 and self.min_tokens:
            raise ApiError(
                400, f"min_tokens is {self.min_tokens} and max_tokens is 0", "min_tokens"
            )

    @property
    def scored_top(self) -> int | None:
        """Number of likely tokens to return per token of the prompt; None: no log-probabilities."""
        echoed = self.top if self.echo and self.wants_logprobs else None
        asked = [most for most in (self.prompt_logprobs, echoed) if most is not None]
        return max(asked, default=None)


class CompletionRequest(with_unsupported(Sampling, UNSUPPORTED_COMPLETION)):
    """POST /v1/completions."""

    prompt: Prompt | Several[Prompt] | Ids | Several[Ids] = Field(
        description="text or token ids, one prompt or several"
    )
    max_tokens: int | None = Field(None, ge=0, description="default 16, or what fits")
    logprobs: int | None = Field(None, ge=0, le=20)
    echo: bool | None = Field(None, description="the prompt before the text, and its logprobs")

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, as a list."""
        bare = isinstance(self.prompt, str) or isinstance(self.prompt[0], int)
        return [self.prompt] if bare else list(self.prompt)

    @property
    def wanted_tokens(self) -> int | None:
        return self.max_tokens

    @property
    def wants_logprobs(self) -> bool:
        return self.logprobs is not None

    @property
    def top(self) -> int:
        """Number of likely tokens to return per position."""
        return self.logprobs or 0


# Fields of a message that templates see only where they are given.
_OPTIONAL = ("name", "tool_call_id", "reasoning_content")


class TextPart(with_unsupported(Body, UNSUPPORTED_TEXT_PART)):
    type: Literal["text"]
    text: Text


class CalledFunction(Body):
    name: Word
    arguments: Text = ""


class ToolCall(Body):
    """A call of a tool, as a response has it; the client sends it back."""

    id: Text | None = None
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None

    def for_template(self) -> dict[str, Any]:
        """Returns the call with its arguments as an object, which templates write as JSON."""
        arguments: Any = self.function.arguments
        with contextlib.suppress(ValueError, RecursionError):
            arguments = json.loads(arguments or "{}")
        function = {"name": self.function.name, "arguments": arguments}
        return {"type": "function", "id": self.id, "function": function}


class Function(BaseModel):
    """A function that the model may call; further fields are for the template."""

    model_config = ConfigDict(extra="allow", strict=True)

    name: Word
    parameters: dict[str, Any] | None = None


class Tool(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)

    type: Literal["function"] = "function"
    function: Function

    def for_template(self) -> dict[str, Any]:
        return {"type": self.type, **self.model_dump(exclude_unset=True)}


class Message(with_unsupported(Body, UNSUPPORTED_MESSAGE)):
    """A message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | Annotated[list[TextPart], Field(fail_fast=True)] | None = None
    name: Text | None = None
    tool_call_id: Text | None = Field(None, description="the call that a tool's message answers")
    tool_calls: Annotated[list[ToolCall], Field(max_length=128, fail_fast=True)] | None = None
    reasoning_content: Text | None = None

    def for_template(self) -> dict[str, Any]:
        content = self.content or ""
        if not isinstance(content, str):
            content = "".join(part.text for part in content)
        optional = {name: getattr(self, name) for name in _OPTIONAL}
        given = {name: value for name, value in optional.items() if value is not None}
        if self.tool_calls:
            given["tool_calls"] = [call.for_template() for call in self.tool_calls]
        return {"role": self.role, "content": content, **given}


class Templated(BaseModel):
    """The fields of requests whose prompt is written by the chat template."""

    add_generation_prompt: bool = Field(
        True, description="end the prompt with the beginning of the assistant's message"
    )
    continue_final_message: bool = Field(
        False, description="end the prompt within the last message; not with add_generation_prompt"
    )
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Annotated[list[Tool], Field(max_length=128, fail_fast=True)] | None = Field(
        None, description="functions that the template describes"
    )

    def require_one_end(self) -> None:
        """Raises ApiError if the prompt is to end in two ways."""
        if self.continue_final_message and self.add_generation_prompt:
            raise ApiError(
                400,
                "continue_final_message: expected false where add_generation_prompt is true, which "
                "is its default; set add_generation_prompt to false",
                "continue_final_message",
            )


class ChatRequest(Templated, with_unsupported(Sampling, UNSUPPORTED_CHAT)):
    """POST /v1/chat/completions."""

    messages: Several[Message]
    max_tokens: int | None = Field(None, ge=0, description="default: what fits")
    max_completion_tokens: int | None = Field(None, ge=0, description="the same")
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)

    @property
    def calls_tools(self) -> bool:
        """Whether calls in the text are given as `tool_calls`."""
        return bool(self.tools) and self.tool_choice != "none"

    @property
    def wanted_tokens(self) -> int | None:
        newer = self.max_completion_tokens
        return self.max_tokens if newer is None else newer

    @property
    def wants_logprobs(self) -> bool:
        return bool(self.logprobs)

    @property
    def top(self) -> int:
        """Number of likely tokens to return per position."""
        return self.top_logprobs or 0

    def require_supported(self) -> None:
        super().require_supported()
        self.require_one_end()
        if self.top_logprobs and not self.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs to be true", "top_logprobs")
        both = (self.max_tokens, self.max_completion_tokens)
        if None not in both and both[0] != both[1]:
            raise ApiError(
                400, f"max_tokens and max_completion_tokens are {both[0]} and {both[1]}; give one",
                "max_completion_tokens",
            )  # fmt: skip


class TokenizeRequest(Templated, with_unsupported(Body, UNSUPPORTED_TOKENIZE)):
    """POST /tokenize, as in vLLM: token ids of a prompt, or of messages by the chat template."""

    model: str | None = None
    prompt: Text | None = None
    messages: Several[Message] | None = None
    add_special_tokens: bool | None = Field(
        None, description="the tokenizer's own (BOS); default: not where a chat template wrote them"
    )
    return_token_strs: bool = Field(False, description="the tokens as the tokenizer writes them")

    def require_supported(self) -> None:
        self.require_one_end()
        given = [name for name in ("prompt", "messages") if getattr(self, name) is not None]
        if len(given) != 1:
            got = " and ".join(given) or "none of them"
            raise ApiError(400, f"expected either prompt or messages, got {got}", "prompt")


class DetokenizeRequest(Body):
    """POST /detokenize, as in vLLM."""

    model: str | None = None
    tokens: Annotated[list[Token], Field(fail_fast=True)]


class WeightsRequest(Body):
    """POST /update_weights."""

    path: str = Field(
        min_length=1,
        description="on the server: a Hugging Face directory, a file of a draft head, the "
        "checkpoints of a training run, or a checkpoint of a head",
    )
    what: Literal["all", "head"] = Field(
        "all", description="policy, with its head where there is one, or the head alone"
    )
    step: int | None = Field(None, ge=0, description="step of a training run; null: the newest")
    running: Literal["recompute", "keep", "finish"] = Field(
        "recompute",
        description="treatment of running samples. recompute: they go on with the new weights, "
        "which read their tokens again; keep: they go on with the new weights and the old caches; "
        "finish: they end with the old weights, and new requests wait. A head alone changes no "
        "token, and running samples go on in any case",
    )


class DiskWeightsRequest(with_unsupported(Body, UNSUPPORTED_WEIGHTS)):
    """POST /update_weights_from_disk, as in SGLang."""

    model_path: str = Field(min_length=1, description="as `path` of /update_weights")
    abort_all_requests: bool = Field(False, description="end running samples where they stand")
    flush_cache: bool = Field(True, description="ignored: new weights always empty the cache")
    weight_version: str | None = Field(None, description="ignored: versions are counted")


class PauseRequest(Body):
    """POST /pause_generation, as in SGLang."""

    mode: Literal["abort", "retract", "in_place"] = Field(
        "abort",
        description="treatment of running samples. abort: they end where they stand; retract: they "
        "go on with the weights of then, which read their tokens again; in_place: they go on with "
        "the present caches",
    )


def _field_in(message: str) -> str | None:
    """The field of `SamplingParams` that its error message begins with."""
    word = message.split(" ", 1)[0]
    return word if word in SamplingParams.__dataclass_fields__ else None
