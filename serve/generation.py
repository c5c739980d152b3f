"""Completions and chat completions: from the body of a request to samples, and back."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import json
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

from fastapi import Request as HttpRequest
from fastapi.responses import JSONResponse, Response

from serve.engine_thread import (
    Asleep,
    ClientGone,
    EngineDead,
    EngineThread,
    QueuedTooLong,
    Request,
    Update,
)
from serve.errors import ApiError
from serve.protocol import ChatRequest, CompletionRequest, Sampling, TokenizeRequest
from serve.responses import (
    ChatResponse,
    CompletionResponse,
    EventStream,
    TokenTexts,
    origins,
    spec_details,
)
from serve.settings import ServeConfig
from specjax import tool_calls
from specjax.engine.prompt_scores import PromptScorer, PromptScores, Started
from specjax.engine.request import (
    CallSeeds,
    InvalidLogitsError,
    Job,
    SampleOutput,
    SpecStats,
    check_prompt,
    decoder_of,
    make_jobs,
)
from specjax.engine.text import TextOffsets, TextPieces
from specjax.models.generation_config import sampling_defaults
from specjax.tokenizer import (
    chat_ids,
    decode,
    has_chat_template,
    prompt_ids,
)

CLIENT_CLOSED_REQUEST = 499  # nginx's status, for the access log
DEFAULT_TOKENS = 16  # of completions, as OpenAI
TOO_LONG = "context_length_exceeded"
T = TypeVar("T")


class Parsed(NamedTuple):
    """A request whose prompts are token ids.

    Attributes:
      body: the body of the request.
      prompts: token ids of each prompt.
      jobs: one job per choice, in the order of the prompts; with max_tokens 0 none is run.
      scores: log-probabilities of each prompt; None: not asked for.
    """

    body: CompletionRequest | ChatRequest
    prompts: list[list[int]]
    jobs: list[Job]
    scores: list[PromptScores] | None = None


class Generation:
    """Handles requests for text.

    Args:
      cfg: the settings of the server, with the limits of a request.
      thread: the engine's thread, which runs the samples.
    """

    def __init__(self, cfg: ServeConfig, thread: EngineThread):
        self._cfg, self._thread, self._llm = cfg, thread, thread.llm
        self._tokenizer = thread.llm.tokenizer
        self._texts = TokenTexts(self._tokenizer)
        self._scorer = PromptScorer(thread.llm.engine, thread.llm.max_len)
        # A long prompt must not block the event loop, and a tokenizer is not safe for threads.
        self._encoder = ThreadPoolExecutor(1, thread_name_prefix="encode")
        self._defaults = sampling_defaults(thread.llm.generation)
        slots = cfg.engine.max_batch * cfg.engine.replicas
        self._max_samples = slots + cfg.limits.queue
        template = getattr(self._tokenizer, "chat_template", None)
        self._calls = cfg.tool_call_parser or tool_calls.named_in(str(template or ""))
        self._being_encoded = 0  # samples whose prompts are being encoded

    async def create(self, body: CompletionRequest | ChatRequest, http: HttpRequest) -> Response:
        """Handles POST /v1/completions and /v1/chat/completions.

        Raises:
          ApiError: the request cannot be served.
        """
        arrived = time.perf_counter()
        self.require_model(body.model)
        body.require_supported()
        self._require(body.n or 1, self._cfg.limits.n, "n")
        samples = self._require_room(body)
        self._being_encoded += samples
        try:
            parsed = await self._encoded(lambda: self._parse(body))
        finally:
            self._being_encoded -= samples
        parsed = await self._with_scores(parsed)
        request = await self._submit(parsed, arrived)
        kind = ChatResponse if isinstance(body, ChatRequest) else CompletionResponse
        response = kind(self._cfg.name, self._texts)
        if body.stream:
            if self._thread.queue_seconds is not None:  # while the status can still say so
                try:
                    async with self._watched(request, http):
                        request.first = await request.updates.get()
                except BaseException:
                    self._thread.abort(request)
                    raise
                if isinstance(request.first.error, ClientGone):
                    return Response(status_code=CLIENT_CLOSED_REQUEST)
                if request.first.error is not None:
                    raise _failed(request.first.error)
            events = self._events(parsed, request, response)
            return EventStream(events, lambda: self._thread.abort(request))
        return await self._complete(parsed, request, response, http)

    def require_model(self, name: str | None) -> None:
        if name and name != self._cfg.name:
            raise ApiError(
                404,
                f"the model {name!r} does not exist; this server has {self._cfg.name!r}",
                "model",
                "model_not_found",
            )

    # --- requests --------------------------------------------------------------------------------

    def _require_room(self, body: CompletionRequest | ChatRequest) -> int:
        """Counts the samples of a request, before its prompts are encoded.

        Raises:
          ApiError: there are too many samples.
        """
        prompts = len(body.prompts) if isinstance(body, CompletionRequest) else 1
        self._require(prompts, self._cfg.limits.prompts, "prompts", "prompt")
        samples = prompts * (body.n or 1)
        outstanding = self._thread.outstanding + self._being_encoded
        self._require(samples, self._max_samples, "prompts times n", "n")
        if outstanding + samples > self._max_samples:
            raise ApiError(
                429,
                f"{outstanding} samples run or wait, and {samples} more would exceed the limit of "
                f"{self._max_samples}; try again later",
                code="rate_limit_exceeded",
            )
        return samples

    async def _encoded(self, encode: Callable[[], T]) -> T:
        """Calls a function that uses the tokenizer."""
        return await asyncio.get_running_loop().run_in_executor(self._encoder, encode)

    async def tokenize(self, body: TokenizeRequest) -> list[int]:
        """Token ids of a prompt or of messages, the same as in a request for text.

        Raises:
          ApiError: there is no tokenizer, or the messages do not fit the chat template.
        """
        body.require_supported()
        self.require_model(body.model)
        if self._tokenizer is None:
            raise ApiError(400, "the model has no tokenizer; prompts are token ids")

        if body.messages is not None:
            return await self._encoded(lambda: self._chat_prompt(body))
        return await self._encoded(lambda: self._encode(body.prompt, body))

    def detokenize(self, ids: Sequence[int]) -> str:
        """The text of token ids, special tokens included."""
        if self._tokenizer is None:
            raise ApiError(400, "the model has no tokenizer")
        most = self._llm.cfg.vocab_size
        if ids and max(ids) >= most:
            raise ApiError(400, f"tokens: expected ids below {most}, got {max(ids)}", "tokens")
        return decode(self._tokenizer, ids, skip_special_tokens=False)

    async def _with_scores(self, parsed: Parsed) -> Parsed:
        """Adds the policy's log-probabilities of the prompts, if the request asks for them."""
        top = parsed.body.scored_top
        if top is None:
            return parsed

        def start() -> Started | Exception:
            if self._thread.asleep:
                raise Asleep("the server is asleep; POST /wake")
            try:
                return self._scorer.start(parsed.prompts)
            except Exception as error:  # such as a lack of memory; running samples go on
                return error

        try:
            with refused():
                started = await self._thread.call(start)
            if isinstance(started, Exception):
                raise started
            scores = await asyncio.to_thread(self._scorer.read, started, top)
        except ApiError:
            raise
        except InvalidLogitsError as error:
            raise _invalid(str(error)) from error
        except Exception as error:
            cause = f"{type(error).__name__}: {error}"
            message = f"the prompt's logprobs could not be computed: {cause}"
            raise ApiError(500, message) from error
        return parsed._replace(scores=scores)

    async def _submit(self, parsed: Parsed, arrived: float) -> Request:
        per_chunk = bool(parsed.body.stream) or parsed.body.return_spec_details
        with refused():
            if parsed.body.wanted_tokens == 0:
                request = await self._end_at_once(parsed, arrived)
            else:
                request = await self._thread.submit(parsed.jobs, arrived, per_chunk)
        self._thread.metrics.prompt_tokens.inc(sum(map(len, parsed.prompts)))
        return request

    async def _end_at_once(self, parsed: Parsed, arrived: float) -> Request:
        """A request with max_tokens 0, whose samples have all ended without tokens."""

        def check() -> None:
            if self._thread.asleep:
                raise Asleep("the server is asleep; POST /wake")
            for job in parsed.jobs:
                self._llm.engine.make(dataclasses.replace(job, limit=len(job.prompt)))

        await self._thread.call(check)
        request = Request(parsed.jobs, arrived, False)
        request.open = 0
        empty = SampleOutput([], "", [], "length", SpecStats((0,)))
        for index in range(len(parsed.jobs)):
            request.updates.put_nowait(Update(index, (), empty))
        return request

    def _parse(self, body: CompletionRequest | ChatRequest) -> Parsed:
        if isinstance(body, ChatRequest):
            prompts, default = [self._chat_prompt(body)], None
        else:
            prompts, default = body.prompts, DEFAULT_TOKENS
        ids, jobs, seeds = [], [], CallSeeds()
        for index, prompt in enumerate(prompts):
            try:
                ids.append(self._ids(f"prompt {index}", prompt, body))
                # The engine cannot take max_tokens 0; this job asks for one token and never runs.
                most = self._tokens(body, len(ids[-1]), default) or 1
                params = body.params(most, body.top, self._defaults)
                if self._parsers(body) != (None, None):  # which look for special tokens
                    params = dataclasses.replace(params, skip_special_tokens=False)
                eos = self._llm.cfg.eos_token_ids
                jobs += make_jobs(ids[-1], params, eos, self._tokenizer, index, seeds=seeds)
            except ValueError as error:
                raise ApiError(400, str(error)) from error
        return Parsed(body, ids, jobs)

    def _parsers(self, body: CompletionRequest | ChatRequest) -> tuple[str | None, str | None]:
        """The names of the parsers of calls and of reasoning for a request.

        Raises:
          ApiError: it has tools, and the format of calls is not known.
        """
        if not isinstance(body, ChatRequest):
            return None, None
        if body.calls_tools and self._calls is None:
            raise ApiError(
                400,
                "tools: the chat template does not say how the model calls tools; start the server "
                "with tool_call_parser=NAME, or send tool_choice none",
                "tools",
            )
        # The text of gpt-oss is in channels whatever it was asked for.
        calls = self._calls if body.calls_tools or self._calls == "openai" else None
        return calls, self._cfg.reasoning_parser

    def _chat_prompt(self, body: ChatRequest | TokenizeRequest) -> list[int]:
        if not has_chat_template(self._tokenizer):
            raise ApiError(
                400,
                "the model has no chat template; use /v1/completions, or start the server with "
                "chat_template=FILE",
            )
        variables = body.chat_template_kwargs
        messages = [message.for_template() for message in body.messages]
        try:
            return chat_ids(
                self._tokenizer,
                messages,
                variables,
                body.add_generation_prompt,
                add_special_tokens=bool(body.add_special_tokens),
                tools=None if body.tools is None else [tool.for_template() for tool in body.tools],
                continue_final_message=body.continue_final_message,
            )
        except (TypeError, ValueError) as error:
            text, name = str(error), "chat_template_kwargs"
            raise ApiError(400, text, name if text.startswith(name) else "messages") from error

    def _encode(self, text: str, body: Sampling | TokenizeRequest) -> list[int]:
        try:
            return prompt_ids(self._tokenizer, text, body.add_special_tokens is not False)
        except (TypeError, ValueError) as error:
            raise ApiError(400, f"the tokenizer cannot encode the prompt: {error}") from error

    def _ids(self, where: str, prompt: str | list[int], body: Sampling) -> list[int]:
        if isinstance(prompt, str):
            if self._tokenizer is None:
                raise ApiError(
                    400, f"{where} is text and the model has no tokenizer; send token ids", "prompt"
                )
            prompt = self._encode(prompt, body)
        return check_prompt(where, prompt, self._llm.cfg.vocab_size, self._tokenizer)

    def _tokens(self, body: Sampling, prompt: int, default: int | None) -> int:
        """The number of tokens to generate at most after a prompt of `prompt` tokens."""
        limits, most = self._cfg.limits, self._llm.max_len
        wanted = body.wanted_tokens
        if limits.prompt_tokens is not None and prompt > limits.prompt_tokens:
            raise ApiError(
                400,
                f"the prompt has {prompt} tokens, and this server takes {limits.prompt_tokens}",
                code=TOO_LONG,
            )
        if limits.max_tokens is not None and wanted is not None:
            self._require(wanted, limits.max_tokens, "max_tokens")
        if prompt + (1 if wanted is None else wanted) > most:
            raise ApiError(
                400,
                f"the model's context is {most} tokens; the prompt has {prompt}, and "
                f"{'at least 1' if wanted is None else wanted} are to be generated; shorten one of "
                "them",
                code=TOO_LONG,
            )
        if wanted is not None:
            return wanted
        sizes = (
            most - prompt,
            limits.max_tokens,
            default and max(default, body.min_tokens),
            self._defaults.get("max_tokens"),
        )
        return min(size for size in sizes if size is not None)

    def _require(self, got: int, most: int, what: str, param: str | None = None) -> None:
        if got > most:
            raise ApiError(400, f"{what} is {got}, and this server takes {most}", param or what)

    # --- responses -------------------------------------------------------------------------------

    async def _complete(
        self, parsed: Parsed, request: Request, response: CompletionResponse, http: HttpRequest
    ) -> Response:
        """The whole response, after all samples have ended or the client has gone."""
        try:
            async with self._watched(request, http):
                return JSONResponse(await self._collect(parsed, request, response))
        except ClientGone:
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        finally:
            self._thread.abort(request)  # does nothing if all have ended

    @contextlib.asynccontextmanager
    async def _watched(self, request: Request, http: HttpRequest) -> AsyncIterator[None]:
        """Aborts the request if the client goes meanwhile."""

        async def watch() -> None:
            while (await http.receive())["type"] != "http.disconnect":
                pass
            self._thread.abort(request)

        watching = asyncio.ensure_future(watch())
        try:
            yield
        finally:
            watching.cancel()

    def _choices(self, parsed: Parsed, response: CompletionResponse) -> list[Choice]:
        names, body = self._parsers(parsed.body), parsed.body
        tools = [tool.for_template() for tool in (body.tools or ())] if names[0] else []
        ends = frozenset(self._llm.cfg.eos_token_ids if any(names) else ())
        choices = []
        for index, job in enumerate(parsed.jobs):
            parser = None
            if isinstance(body, ChatRequest):
                end = decode(self._tokenizer, job.prompt[-8:], skip_special_tokens=False)
                parser = tool_calls.parser_of(*names, tools, end)
            hidden = ends and ends | set(job.stop_ids)
            choices.append(Choice(parsed, index, response, self._tokenizer, parser, hidden))
        return choices

    async def _collect(
        self, parsed: Parsed, request: Request, response: CompletionResponse
    ) -> dict:
        choices, body = self._choices(parsed, response), parsed.body
        bodies: list[dict] = [{}] * len(choices)
        written, cached = 0, {}
        async for update in _updates(request):
            if isinstance(update.error, ClientGone):
                raise update.error
            if update.error is not None:
                raise _failed(update.error) from update.error
            sample, choice = update.sample, choices[update.index]
            choice.origins += origins(update.news)
            if sample is None:
                continue
            if sample.error is not None:
                raise _invalid(sample.error, update.index, len(choices))
            written += len(sample.token_ids)
            cached[parsed.jobs[update.index].request] = sample.cached_tokens
            bodies[update.index] = choice.whole(sample)
        whole = response.body(bodies, usage_of(parsed, written, cached), streams=False)
        if body.prompt_logprobs is not None and response.has_one_prompt:
            # As in vLLM, a chat's response has the logprobs of its one prompt, not each choice.
            whole["prompt_logprobs"] = [each.pop("prompt_logprobs") for each in bodies][0]
        return whole

    async def _events(
        self, parsed: Parsed, request: Request, response: CompletionResponse
    ) -> AsyncIterator[str]:
        """Server-sent events: chunks of choices as they come, then the usage if asked for."""
        choices, options, written = self._choices(parsed, response), parsed.body.stream_options, 0
        wants_usage = options is not None and options.include_usage
        cached: dict[int, int] = {}

        def event(choice: dict) -> str:
            chunk = response.body([choice], None, streams=True)
            if wants_usage:  # null in all chunks but the last, unless each is to have it
                always = options.continuous_usage_stats
                chunk["usage"] = usage_of(parsed, written, cached) if always else None
            return _event(chunk)

        for choice in choices:
            if (opening := choice.opening()) is not None:
                yield event(opening)
        async for update in _updates(request):
            sample = update.sample
            if update.error is not None:
                yield _event(ApiError(500, str(update.error)).body())
                return
            if sample is not None and sample.error is not None:
                yield _event(_invalid(sample.error, update.index, len(choices)).body())
                return
            written += sum(len(news.tokens) for news in update.news)
            if sample is not None:
                cached[parsed.jobs[update.index].request] = sample.cached_tokens
            if (piece := choices[update.index].piece(update)) is not None:
                yield event(piece)
        if wants_usage:
            yield _event(response.body([], usage_of(parsed, written, cached), streams=True))
        yield "data: [DONE]\n\n"


class Choice:
    """Writes one choice of a response, whole or in pieces.

    Args:
      parsed: the request.
      index: number of the choice.
      response: writes OpenAI's shapes.
      tokenizer: tokenizer of the model; None: there is none.
      parser: reads the text of a chat message; None: it is text alone.
      ends: token ids that end a message, and are not part of its text.

    Attributes:
      origins: origin of each token of a choice that is written whole.
    """

    def __init__(
        self,
        parsed: Parsed,
        index: int,
        response: CompletionResponse,
        tokenizer,
        parser: tool_calls.Text | None = None,
        ends: Collection[int] = (),
    ):
        self._body, self._index, self._response = parsed.body, index, response
        job = parsed.jobs[index]
        self._prompt = job.prompt
        self._scores = None if parsed.scores is None else parsed.scores[job.request]
        self._decode, self._decode_prompt = None, lambda tokens: ""
        if tokenizer is not None:
            text_of = decoder_of(tokenizer, job.params)
            self._decode = text_of
            if ends:
                self._decode = lambda ids: text_of([token for token in ids if token not in ends])
            self._decode_prompt = functools.partial(decode, tokenizer, skip_special_tokens=False)
        self._echo = ""
        if parsed.body.echo:
            text = parsed.body.prompts[job.request]
            self._echo = text if isinstance(text, str) else self._decode_prompt(text)
        reports = parsed.body.wants_logprobs and isinstance(parsed.body, CompletionRequest)
        self._offsets = TextOffsets(self._decode if reports else None, len(self._echo))
        self._pieces = TextPieces(self._decode)
        self._parser = parser
        self._calls = 0  # number of calls of tools so far
        self.origins: list[str] = []

    def _parsed(self, text: str, reason: str | None, ended: bool) -> tuple[Any, str | None]:
        """What the next piece of text means, and the reason why the choice ends."""
        if self._parser is None:
            return text, reason
        delta = self._parser.push(text)
        if ended:
            delta += self._parser.finish()
        if self._body.parallel_tool_calls is False:
            delta = delta._replace(calls=delta.calls[: max(0, 1 - self._calls)])
        self._calls += len(delta.calls)
        return delta, "tool_calls" if reason == "stop" and self._calls else reason

    def whole(self, sample: SampleOutput) -> dict:
        """Returns the choice of a sample that has ended."""
        body, prompt, scores = self._body, self._prompt, self._scores
        tokens, values, top = sample.token_ids, sample.logprobs, sample.top_logprobs
        text = self._echo + self._text(sample)
        places = self._offsets.extend(tokens)
        if body.echo and scores is not None:
            tokens, values = [*prompt, *tokens], [*scores.logprobs, *values]
            places = [*self._prompt_places(), *places]
            top = [*scores.top, *(top or ())] if body.top else None
        places = [min(place, len(text)) for place in places]  # a stop string is cut off
        logprobs = self._logprobs(tokens, values, top, places)
        text, reason = self._parsed(text, sample.finish_reason, ended=True)
        choice = self._choice(text, reason, logprobs, streams=False)
        if body.prompt_logprobs is not None:
            choice["prompt_logprobs"] = self._response.prompt_logprobs(prompt, scores)
        if body.return_token_ids:
            choice["token_ids"] = sample.token_ids
            choice["prompt_token_ids"] = list(prompt)
        if body.return_spec_details:
            choice["spec_details"] = {**spec_details(sample), "origins": self.origins}
        return choice

    def opening(self) -> dict | None:
        """Returns the first piece, before any sampled text: the prompt if it is echoed."""
        if not self._body.echo:
            return self._response.opening(self._index)
        logprobs, scores = None, self._scores
        if scores is not None:
            top = scores.top if self._body.top else None
            logprobs = self._logprobs(self._prompt, scores.logprobs, top, self._prompt_places())
        return self._choice(self._echo, None, logprobs, streams=True)

    def piece(self, update: Update) -> dict | None:
        """Returns the piece of an update; None: it says nothing."""
        sample, reason = update.sample, None
        tokens = [token for news in update.news for token in news.tokens]
        decoded = update.news[-1].text if update.news else None
        places = self._offsets.extend(tokens)
        if sample is None:
            text = self._pieces.push(tokens, decoded)
        else:
            text = self._pieces.finish(tokens, self._text(sample), decoded)
            reason = sample.finish_reason
            end = self._pieces.returned + self._offsets.start  # a stop string is cut off
            places = [min(place, end) for place in places]
        logprobs, details = None, {}
        if tokens:
            values = [value for news in update.news for value in news.logprobs]
            top = [entry for news in update.news for entry in news.top or ()]
            logprobs = self._logprobs(tokens, values, top or None, places)
        if self._body.return_token_ids and tokens:
            details["token_ids"] = tokens
        if self._body.return_spec_details:
            statistics = {} if sample is None else spec_details(sample)
            details["spec_details"] = {**statistics, "origins": origins(update.news)}
        first_call = self._calls
        text, reason = self._parsed(text, reason, ended=sample is not None)
        if any(text) or reason or logprobs or details:
            return self._choice(text, reason, logprobs, True, first_call) | details
        return None

    def _choice(self, text, reason: str | None, logprobs: dict | None, *more: Any, **named: Any):
        return self._response.choice(self._index, text, reason, logprobs, *more, **named)

    def _logprobs(self, tokens, values, top, places) -> dict | None:
        if not self._body.wants_logprobs:
            return None
        return self._response.logprobs(tokens, values, top, places, self._body.top)

    def _prompt_places(self) -> list[int]:
        """Returns the places of the prompt's tokens in its text."""
        offsets = TextOffsets(self._decode_prompt)
        places = offsets.extend(self._prompt)
        begun = max(offsets.end - len(self._echo), 0)  # the tokenizer has begun a text with BOS
        return [max(place - begun, 0) for place in places]

    def _text(self, sample: SampleOutput) -> str:
        """Returns the text of a whole sample, as `LLM` does."""
        if sample.text is not None:
            return sample.text
        return "" if self._decode is None else self._decode(sample.token_ids)


def usage_of(parsed: Parsed, written: int, cached: Mapping[int, int]) -> dict:
    """Writes OpenAI's usage.

    Args:
      written: number of generated tokens.
      cached: number of tokens of each prompt that the prefix cache had, as far as they are known.
    """
    read = sum(map(len, parsed.prompts))
    return {
        "prompt_tokens": read,
        "completion_tokens": written,
        "total_tokens": read + written,
        "prompt_tokens_details": {"cached_tokens": sum(cached.values())},
    }


def _event(body: dict) -> str:
    return f"data: {json.dumps(body)}\n\n"


@contextlib.contextmanager
def refused() -> Iterator[None]:
    """Answers errors of the engine's thread."""
    try:
        yield
    except Asleep as error:
        raise ApiError(503, str(error)) from error
    except EngineDead as error:
        raise ApiError(500, str(error)) from error
    except ValueError as error:
        raise ApiError(400, str(error)) from error


def _failed(error: EngineDead | QueuedTooLong) -> ApiError:
    if isinstance(error, EngineDead):
        return ApiError(500, str(error))
    return ApiError(503, f"{error}; try again later", code="queue_timeout")


def _invalid(message: str, index: int = 0, choices: int = 1) -> ApiError:
    """The error response for logits that are no distribution, such as NaN."""
    which = f"choice {index}: " if choices > 1 else ""
    return ApiError(500, f"{which}{message}", code="invalid_logits")


async def _updates(request: Request) -> AsyncIterator[Update]:
    """The updates of a request, until all its samples have ended or one has an error."""
    left = len(request.jobs)
    while left:
        update, request.first = request.first or await request.updates.get(), None
        left = 0 if update.error is not None else left - (update.sample is not None)
        yield update
