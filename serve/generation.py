"""Completions and chat completions: from the body of a request to samples, and back."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from fastapi import Request as HttpRequest
from fastapi.responses import JSONResponse, Response

from serve.engine_thread import (
    Asleep,
    ClientGone,
    EngineDead,
    EngineThread,
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
    usage_of,
)
from serve.settings import SPELL, ServeConfig
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
from specjax.spelling import spelled
from specjax.tokenizer import (
    chat_ids,
    check_template_options,
    decode,
    has_chat_template,
    prompt_ids,
)

CLIENT_CLOSED_REQUEST = 499  # nginx's status, for the access log
DEFAULT_TOKENS = 16  # of completions, as OpenAI
TOO_LONG = "context_length_exceeded"
SHORT_BODY = 4096  # bytes; its prompt is encoded sooner than a thread would start


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

    @property
    def generates_nothing(self) -> bool:
        return self.body.wanted_tokens == 0


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
        self._encoding = threading.Lock()
        self._defaults = sampling_defaults(thread.llm.generation)
        slots = cfg.engine.max_batch * cfg.engine.replicas
        self._max_samples = slots + cfg.limits.queue
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
            parsed = await self._parse_body(body, http)
        finally:
            self._being_encoded -= samples
        parsed = await self._with_scores(parsed)
        request = await self._submit(parsed, arrived)
        kind = ChatResponse if isinstance(body, ChatRequest) else CompletionResponse
        response = kind(self._cfg.name, self._texts)
        if body.stream:
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
        prompts = 1
        if isinstance(body, CompletionRequest):
            prompts = len(body.prompts)
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

    async def _parse_body(self, body: CompletionRequest | ChatRequest, http: HttpRequest) -> Parsed:
        """Encodes the prompts, in the event loop if that is quick and the tokenizer is free."""
        several = isinstance(body, CompletionRequest) and len(body.prompts) > 1
        short = (
            int(http.headers.get("content-length", SHORT_BODY + 1)) <= SHORT_BODY and not several
        )
        if short and self._encoding.acquire(blocking=False):
            try:
                return self._parse(body)
            finally:
                self._encoding.release()
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._encoder, self._parse_locked, body)

    def _parse_locked(self, body: CompletionRequest | ChatRequest) -> Parsed:
        with self._encoding:
            return self._parse(body)

    async def tokenize(self, body: TokenizeRequest) -> list[int]:
        """Token ids of a prompt or of messages, the same as in a request for text.

        Raises:
          ApiError: there is no tokenizer, or the messages do not fit the chat template.
        """
        body.require_supported()
        self.require_model(body.model)
        if self._tokenizer is None:
            raise ApiError(400, "the model has no tokenizer; prompts are token ids")

        def encode() -> list[int]:
            with self._encoding:
                if body.messages is not None:
                    return self._chat_prompt(body)
                return self._encode(body.prompt, body)

        return await asyncio.get_running_loop().run_in_executor(self._encoder, encode)

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
            started = await self._thread.call(start)
            if isinstance(started, Exception):
                raise started
            scores = await asyncio.to_thread(self._scorer.read, started, top)
        except Asleep as error:
            raise ApiError(503, str(error)) from error
        except EngineDead as error:
            raise ApiError(500, str(error)) from error
        except InvalidLogitsError as error:
            raise _invalid(str(error)) from error
        except Exception as error:
            cause = f"{type(error).__name__}: {error}"
            message = f"the prompt's logprobs could not be computed: {cause}"
            raise ApiError(500, message) from error
        return parsed._replace(scores=scores)

    async def _submit(self, parsed: Parsed, arrived: float) -> Request:
        per_chunk = bool(parsed.body.stream) or parsed.body.return_spec_details
        try:
            if parsed.generates_nothing:
                request = await self._end_at_once(parsed, arrived)
            else:
                request = await self._thread.submit(parsed.jobs, arrived, per_chunk)
        except Asleep as error:
            raise ApiError(503, str(error)) from error
        except EngineDead as error:
            raise ApiError(500, str(error)) from error
        except ValueError as error:
            raise ApiError(400, spelled(error, SPELL)) from error
        self._thread.metrics.prompt_tokens.inc(sum(map(len, parsed.prompts)))
        return request

    async def _end_at_once(self, parsed: Parsed, arrived: float) -> Request:
        """A request with max_tokens 0, whose samples have all ended without tokens."""

        def check() -> None:
            if self._thread.asleep:
                raise Asleep("the server is asleep; POST /wake")
            for job in parsed.jobs:
                self._llm.engine.check(dataclasses.replace(job, limit=len(job.prompt)))

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
                eos = self._llm.cfg.eos_token_ids
                jobs += make_jobs(ids[-1], params, eos, self._tokenizer, index, seeds=seeds)
            except ValueError as error:
                raise ApiError(400, spelled(error, SPELL)) from error
        return Parsed(body, ids, jobs)

    def _chat_prompt(self, body: ChatRequest | TokenizeRequest) -> list[int]:
        if not has_chat_template(self._tokenizer):
            raise ApiError(
                400,
                "the model has no chat template; use /v1/completions, or start the server with "
                "chat_template=FILE",
            )
        variables = body.chat_template_kwargs
        try:
            check_template_options(self._tokenizer, variables)
        except ValueError as error:
            raise ApiError(400, str(error), "chat_template_kwargs") from error
        messages = [message.for_template() for message in body.messages]
        try:
            return chat_ids(
                self._tokenizer,
                messages,
                variables,
                body.add_generation_prompt,
                add_special_tokens=bool(body.add_special_tokens),
                tools=body.tools,
                continue_final_message=body.continue_final_message,
            )
        except (TypeError, ValueError) as error:
            raise ApiError(400, str(error), "messages") from error

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
        watch = asyncio.ensure_future(self._watch(http, request))
        try:
            return JSONResponse(await self._collect(parsed, request, response))
        except ClientGone:
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        finally:
            watch.cancel()
            self._thread.abort(request)  # does nothing if all have ended

    async def _watch(self, http: HttpRequest, request: Request) -> None:
        """Aborts the request when its client closes the connection."""
        while (await http.receive())["type"] != "http.disconnect":
            pass
        self._thread.abort(request)

    async def _collect(
        self, parsed: Parsed, request: Request, response: CompletionResponse
    ) -> dict:
        choices: list[dict | None] = [None] * len(parsed.jobs)
        token_origins: list[list[str]] = [[] for _ in parsed.jobs]
        written = 0
        async for update in _updates(request):
            if isinstance(update.error, EngineDead):
                raise ApiError(500, str(update.error)) from update.error
            if update.error is not None:
                raise update.error
            if parsed.body.return_spec_details:
                token_origins[update.index] += origins(update.news)
            sample, index = update.sample, update.index
            if sample is None:
                continue
            if sample.error is not None:
                raise _invalid(sample.error, index, len(parsed.jobs))
            written += len(sample.token_ids)
            tokens, values, top = sample.token_ids, sample.logprobs, sample.top_logprobs
            text, scores = self._text(parsed, index, sample), self._scores(parsed, index)
            echo = self._echo(parsed, index) if parsed.body.echoes else ""
            places = self._offsets(parsed, index, echo).extend(tokens)
            text = echo + text
            if parsed.body.echoes and scores is not None:
                prompt = parsed.jobs[index].prompt
                tokens, values = [*prompt, *tokens], [*scores.logprobs, *values]
                places = [*self._prompt_offsets(prompt, echo), *places]
                top = [*scores.top, *(top or ())] if parsed.body.top else None
            places = [min(place, len(text)) for place in places]  # a stop string is cut off
            logprobs = self._logprobs(parsed.body, response, tokens, values, top, places)
            choice = response.choice(index, text, sample.finish_reason, logprobs, streams=False)
            if parsed.body.prompt_logprobs is not None:
                prompt = parsed.jobs[index].prompt
                choice["prompt_logprobs"] = response.prompt_logprobs(prompt, scores)
            if parsed.body.return_token_ids:
                choice["token_ids"] = sample.token_ids
                choice["prompt_token_ids"] = list(parsed.jobs[index].prompt)
            if parsed.body.return_spec_details:
                choice["spec_details"] = {**spec_details(sample), "origins": token_origins[index]}
            choices[index] = choice
        usage = usage_of(sum(map(len, parsed.prompts)), written)
        whole = response.body(choices, usage, streams=False)
        if parsed.body.prompt_logprobs is not None and response.has_one_prompt:
            # As in vLLM, a chat's response has the logprobs of its one prompt, not each choice.
            whole["prompt_logprobs"] = [c.pop("prompt_logprobs") for c in choices][0]
        return whole

    def _scores(self, parsed: Parsed, index: int) -> PromptScores | None:
        """The log-probabilities of the prompt of a choice, if they were asked for."""
        return None if parsed.scores is None else parsed.scores[parsed.jobs[index].request]

    def _echo(self, parsed: Parsed, index: int) -> str:
        """The text of the prompt of a choice; token ids are decoded."""
        prompt = parsed.body.prompts[parsed.jobs[index].request]
        if isinstance(prompt, str):
            return prompt
        return "" if self._tokenizer is None else self.detokenize(prompt)

    def _offsets(self, parsed: Parsed, index: int, echo: str = "") -> TextOffsets:
        """Counts the places of a choice's tokens, where completions report them."""
        reports = parsed.body.wants_logprobs and isinstance(parsed.body, CompletionRequest)
        return TextOffsets(self._decoder(parsed.jobs[index]) if reports else None, len(echo))

    def _prompt_offsets(self, prompt: Sequence[int], echo: str) -> list[int]:
        """The places of a prompt's tokens in its text."""
        offsets = TextOffsets(None if self._tokenizer is None else self.detokenize)
        places = offsets.extend(prompt)
        begun = max(offsets.end - len(echo), 0)  # the tokenizer has begun a text with BOS
        return [max(place - begun, 0) for place in places]

    async def _events(
        self, parsed: Parsed, request: Request, response: CompletionResponse
    ) -> AsyncIterator[str]:
        """Server-sent events: chunks of choices as they come, then the usage if asked for."""
        texts = [TextPieces(self._decoder(job)) for job in parsed.jobs]
        offsets = [self._offsets(parsed, index) for index in range(len(parsed.jobs))]
        written = 0
        for index in range(len(parsed.jobs)):
            opening = response.opening(index)
            if parsed.body.echoes:
                opening, echo = self._echoed(parsed, response, index)
                offsets[index] = self._offsets(parsed, index, echo)
            if opening is not None:
                yield self._event(response.body([opening], None, streams=True), parsed, written)
        async for update in _updates(request):
            if update.error is not None:
                yield f"data: {json.dumps(ApiError(500, str(update.error)).body())}\n\n"
                return
            index, sample = update.index, update.sample
            if sample is not None and sample.error is not None:
                error = _invalid(sample.error, index, len(parsed.jobs))
                yield f"data: {json.dumps(error.body())}\n\n"
                return
            tokens = [token for news in update.news for token in news.tokens]
            written += len(tokens)
            decoded = update.news[-1].text if update.news else None
            if sample is None:
                text, reason = texts[index].push(tokens, decoded), None
            else:
                text = texts[index].finish(tokens, self._text(parsed, index, sample), decoded)
                reason = sample.finish_reason
            places = offsets[index].extend(tokens)
            if sample is not None:  # a stop string is cut off
                end = texts[index].returned + offsets[index].start
                places = [min(place, end) for place in places]
            logprobs = self._streamed_logprobs(parsed.body, response, update, places)
            details = self._details(parsed, update, tokens)
            if text or reason or logprobs or details:
                choice = response.choice(index, text, reason, logprobs, streams=True) | details
                yield self._event(response.body([choice], None, streams=True), parsed, written)
        if parsed.body.wants_usage:
            usage = usage_of(sum(map(len, parsed.prompts)), written)
            yield f"data: {json.dumps(response.body([], usage, streams=True))}\n\n"
        yield "data: [DONE]\n\n"

    def _event(self, body: dict, parsed: Parsed, written: int) -> str:
        if parsed.body.wants_usage_always:
            body = {**body, "usage": usage_of(sum(map(len, parsed.prompts)), written)}
        elif parsed.body.wants_usage:  # null in all chunks but the last
            body = {**body, "usage": None}
        return f"data: {json.dumps(body)}\n\n"

    def _echoed(self, parsed: Parsed, response: CompletionResponse, index: int) -> tuple[dict, str]:
        """The first chunk of a choice that begins with its prompt, and the text of the prompt."""
        scores, prompt, logprobs = self._scores(parsed, index), parsed.jobs[index].prompt, None
        echo = self._echo(parsed, index)
        if scores is not None:
            top = scores.top if parsed.body.top else None
            places = self._prompt_offsets(prompt, echo)
            logprobs = self._logprobs(parsed.body, response, prompt, scores.logprobs, top, places)
        return response.choice(index, echo, None, logprobs, streams=True), echo

    def _details(self, parsed: Parsed, update: Update, tokens: Sequence[int]) -> dict:
        """Fields of a chunk that OpenAI does not have."""
        details = {}
        if parsed.body.return_token_ids and tokens:
            details["token_ids"] = list(tokens)
        if parsed.body.return_spec_details:
            whole = {} if update.sample is None else spec_details(update.sample)
            details["spec_details"] = {**whole, "origins": origins(update.news)}
        return details

    def _streamed_logprobs(self, body, response, update: Update, places) -> dict | None:
        tokens = [token for news in update.news for token in news.tokens]
        values = [value for news in update.news for value in news.logprobs]
        top = [entry for news in update.news for entry in news.top or ()]
        return (
            self._logprobs(body, response, tokens, values, top or None, places) if tokens else None
        )

    def _logprobs(self, body, response, tokens, values, top, places) -> dict | None:
        if not body.wants_logprobs:
            return None
        return response.logprobs(tokens, values, top, places, body.top)

    def _text(self, parsed: Parsed, index: int, sample: SampleOutput) -> str:
        """The text of a whole sample, as `LLM` returns it."""
        if sample.text is not None:
            return sample.text
        decode = self._decoder(parsed.jobs[index])
        return "" if decode is None else decode(sample.token_ids)

    def _decoder(self, job: Job) -> Callable[[Sequence[int]], str] | None:
        return None if self._tokenizer is None else decoder_of(self._tokenizer, job.params)


def _invalid(message: str, index: int = 0, choices: int = 1) -> ApiError:
    """The error response for logits that are no distribution, such as NaN."""
    which = f"choice {index}: " if choices > 1 else ""
    return ApiError(500, f"{which}{message}", code="invalid_logits")


async def _updates(request: Request) -> AsyncIterator[Update]:
    """The updates of a request, until all its samples have ended or one has an error."""
    left = len(request.jobs)
    while left:
        update = await request.updates.get()
        left = 0 if update.error is not None else left - (update.sample is not None)
        yield update
