"""The requests of `bench.serve`, the clients that send them, and the answers.

A request is made under the names of `SamplingParams`, and its body from that: the reference is
decoded with the same parameters, so an error in how the server reads bodies is found.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import time
from collections.abc import Callable, Sequence
from typing import Any

import httpx
import numpy as np

from specjax import SamplingParams

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
TIMEOUT = 600.0
# Malformed bodies, with the path they go to.
BROKEN: tuple[tuple[str, bytes], ...] = tuple(
    (path, text.encode("utf-8", "surrogatepass"))
    for path, text in (
        (COMPLETIONS, ""),
        (COMPLETIONS, "{"),
        (COMPLETIONS, "[1, 2"),
        (COMPLETIONS, '"text"'),
        (COMPLETIONS, '{"prompt": "1+1=", "max_tokens": 0}'),
        (COMPLETIONS, '{"prompt": "1+1=", "max_tokens": 1000000000}'),
        (COMPLETIONS, '{"prompt": "1+1=", "max_tokens": "4"}'),
        (COMPLETIONS, '{"prompt": "1+1=", "temperature": -0.5}'),
        (COMPLETIONS, '{"prompt": "1+1=", "temperature": NaN}'),
        (COMPLETIONS, '{"prompt": "1+1=", "top_p": 0}'),
        (COMPLETIONS, '{"prompt": "1+1=", "n": 100000}'),
        (COMPLETIONS, '{"prompt": "1+1=", "temprature": 1}'),
        (COMPLETIONS, '{"prompt": "1+1=", "model": "another"}'),
        (COMPLETIONS, '{"prompt": "1+1=", "speculative": "9_9_99"}'),
        (COMPLETIONS, '{"prompt": "1+1=", "logit_bias": {"a": 1}}'),
        (COMPLETIONS, '{"prompt": "1+1=", "stop": [""]}'),
        (COMPLETIONS, '{"prompt": []}'),
        (COMPLETIONS, '{"prompt": [123456789]}'),
        (COMPLETIONS, '{"prompt": "\\ud800"}'),
        (COMPLETIONS, '{"prompt": "\ud800"}'),
        (CHAT, '{"messages": []}'),
        (CHAT, '{"messages": [{"role": "unknown", "content": "1+1="}]}'),
        (CHAT, '{"prompt": "1+1="}'),
        ("/v1/embeddings", "{}"),
    )
)


@dataclasses.dataclass(frozen=True)
class Request:
    """One request of a client.

    Attributes:
      prompt: text of the prompt.
      options: fields of `SamplingParams`, by name.
      chat: whether it is a chat completion.
      stream: whether the answer is streamed.
      speculative: the body's field `speculative`, which may name a strategy; None: no field.
      disconnects: whether the client disconnects.
      leaves_after: pieces of a stream, or hundredths of a second, before it disconnects.
    """

    prompt: str
    options: dict[str, Any]
    chat: bool = False
    stream: bool = False
    speculative: bool | str | None = None
    disconnects: bool = False
    leaves_after: int = 0

    @property
    def path(self) -> str:
        return CHAT if self.chat else COMPLETIONS

    @property
    def params(self) -> SamplingParams:
        return SamplingParams(**self.options)

    @property
    def key(self) -> str:
        """A text that is equal for requests whose samples must be equal."""
        return json.dumps([self.prompt, self.options, self.chat], sort_keys=True)

    def body(self, model: str) -> bytes:
        fields = {**self.options, "model": model, "stream": self.stream, "return_token_ids": True}
        top = fields.pop("logprobs", None)
        if self.chat:
            fields["messages"] = [{"role": "user", "content": self.prompt}]
        else:
            fields["prompt"] = self.prompt
        if top is not None:
            fields |= {"logprobs": True, "top_logprobs": top} if self.chat else {"logprobs": top}
        if self.speculative is not None:
            fields["speculative"] = self.speculative
        return json.dumps(fields).encode()


@dataclasses.dataclass
class Answer:
    """The answer to a request, as far as the client received it.

    Attributes:
      status: HTTP status; 0: there was no answer.
      texts, tokens, reasons: text, tokens and finish reason of each sample, as far as they were
        received.
      refusal: body of a refusal.
      lost: error of the transport, in words.
      sent: time of the request, by `time.perf_counter`, as the other times.
      first: time of the first token of a stream.
      gaps: seconds between tokens of a stream; a piece's seconds are divided among its tokens.
      ended: time of the end of the answer.
    """

    status: int = 0
    texts: list[str] = dataclasses.field(default_factory=list)
    tokens: list[list[int]] = dataclasses.field(default_factory=list)
    reasons: list[str | None] = dataclasses.field(default_factory=list)
    refusal: Any = None
    lost: str | None = None
    sent: float = 0.0
    first: float | None = None
    gaps: list[float] = dataclasses.field(default_factory=list)
    ended: float = 0.0

    @property
    def written(self) -> int:
        return sum(map(len, self.tokens))


# --- requests --------------------------------------------------------------------------------


def traffic(
    count: int,
    prompts: Sequence[str],
    strategies: Sequence[str],
    seed: int,
    longest: int,
    disconnects: float,
    malformed: float,
) -> list[Request | tuple[str, bytes]]:
    """Draws requests, in the order in which they are sent.

    Every fourth repeats the one before, streamed if that was not and the other way round, with
    another choice of speculation: the samples must be equal.

    Args:
      longest: largest `max_tokens`.
      disconnects, malformed: shares of the requests.
    """
    random = np.random.default_rng(seed)
    found: list[Request | tuple[str, bytes]] = []
    for index in range(count):
        draw = random.random()
        if draw < malformed:
            found.append(BROKEN[index % len(BROKEN)])
            continue
        before = found[-1] if found else None
        if index % 4 == 3 and isinstance(before, Request):
            request = dataclasses.replace(before, stream=not before.stream, disconnects=False)
        else:
            request = _request(random, prompts[random.integers(len(prompts))], longest)
        request = dataclasses.replace(request, speculative=_speculative(random, strategies))
        if draw < malformed + disconnects:
            leaves_after = int(random.integers(1, 6) if request.stream else random.integers(1, 40))
            request = dataclasses.replace(request, disconnects=True, leaves_after=leaves_after)
        found.append(request)
    return found


def _speculative(random: np.random.Generator, strategies: Sequence[str]) -> bool | str | None:
    """Draws what a body says of speculation; most say nothing."""
    named = str(random.choice(strategies))
    return (None, True, False, named)[random.choice(4, p=[0.6, 0.1, 0.2, 0.1])]


def _request(random: np.random.Generator, prompt: str, longest: int) -> Request:
    """Draws a request; each of the rarer options is set now and then."""

    def now_and_then(share: float) -> bool:
        return random.random() < share

    longest_now = int(np.exp(random.uniform(np.log(4), np.log(longest))))
    options: dict[str, Any] = {
        "seed": int(random.integers(1 << 31)),
        "max_tokens": min(max(longest_now, 1), longest),
        "temperature": float(random.choice([0.0, 0.6, 1.0, 1.0, 1.3])),
    }
    if now_and_then(0.2):
        options["n"] = int(random.integers(2, 4))
    if now_and_then(0.25):
        options["top_p"] = float(random.choice([0.5, 0.8, 0.95]))
    if now_and_then(0.15):
        options["top_k"] = int(random.choice([1, 5, 40]))
    if now_and_then(0.1):
        options["min_p"] = 0.05
    if now_and_then(0.15):
        options |= {"presence_penalty": 0.4, "frequency_penalty": 0.2}
    if now_and_then(0.1):
        options["repetition_penalty"] = 1.1
    if now_and_then(0.2):
        options["stop"] = [str(random.choice([";", " so", "####", "3", " then"]))]
    if now_and_then(0.2):
        options["logprobs"] = int(random.integers(1, 6))
    if now_and_then(0.15):
        options["ignore_eos"] = True
    if now_and_then(0.1):
        options["min_tokens"] = min(4, options["max_tokens"])
    return Request(prompt, options, chat=now_and_then(0.4), stream=now_and_then(0.5))


# --- clients ---------------------------------------------------------------------------------


async def send_all(
    url: str,
    model: str,
    requests: Sequence[Request | tuple[str, bytes]],
    clients: int,
    on_answer: Callable[[int], None] = lambda done: None,
) -> list[Answer]:
    """Sends the requests in order, `clients` at a time.

    Args:
      on_answer: called after each answer with the number of answers so far.
    """
    answers = [Answer() for _ in requests]
    waiting, done = iter(range(len(requests))), 0
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=clients)

    async def client(http: httpx.AsyncClient) -> None:
        nonlocal done
        for index in waiting:
            answer, request = answers[index], requests[index]
            answer.sent = time.perf_counter()
            try:
                if isinstance(request, Request):
                    await _send(http, model, request, answer)
                else:
                    _refused(answer, await _post(http, *request))
            except (httpx.HTTPError, ValueError, KeyError) as error:
                answer.lost = f"{type(error).__name__}: {error}"
            answer.ended = time.perf_counter()
            done += 1
            on_answer(done)

    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT, limits=limits) as http:
        await asyncio.gather(*(client(http) for _ in range(clients)))
    return answers


async def _post(http: httpx.AsyncClient, path: str, body: bytes) -> httpx.Response:
    return await http.post(path, content=body, headers={"Content-Type": "application/json"})


def _refused(answer: Answer, response: httpx.Response) -> None:
    answer.status = response.status_code
    try:
        answer.refusal = response.json()
    except ValueError:
        answer.refusal = response.text


async def _send(http: httpx.AsyncClient, model: str, request: Request, answer: Answer) -> None:
    if request.stream:
        await _stream(http, model, request, answer)
        return
    work = _post(http, request.path, request.body(model))
    try:
        # Where time runs out the connection is closed, as by a client that went away.
        leaves_after = request.leaves_after / 100 if request.disconnects else None
        response = await asyncio.wait_for(work, leaves_after)
    except TimeoutError:
        return
    if response.status_code != 200:
        _refused(answer, response)
        return
    answer.status = 200
    for choice in response.json()["choices"]:
        answer.texts.append(choice["message"]["content"] if request.chat else choice["text"])
        answer.tokens.append(choice["token_ids"])
        answer.reasons.append(choice["finish_reason"])


async def _stream(http: httpx.AsyncClient, model: str, request: Request, answer: Answer) -> None:
    """Reads a stream to its end, or leaves it after some pieces."""
    count = request.options.get("n", 1)
    texts: list[list[str]] = [[] for _ in range(count)]
    tokens: list[list[int]] = [[] for _ in range(count)]
    reasons: list[str | None] = [None] * count
    last: list[float | None] = [None] * count
    headers = {"Content-Type": "application/json"}
    pieces, done, left = 0, False, False
    async with http.stream(
        "POST", request.path, content=request.body(model), headers=headers
    ) as response:
        if response.status_code != 200:
            await response.aread()
            _refused(answer, response)
            return
        async for line in response.aiter_lines():
            if not line:
                continue
            pieces += 1
            done = line == "data: [DONE]"
            if done:
                continue
            now = time.perf_counter()
            for choice in json.loads(line.removeprefix("data: "))["choices"]:
                at, new = choice["index"], choice.get("token_ids") or []
                text = choice["delta"].get("content") if request.chat else choice["text"]
                texts[at].append(text or "")
                tokens[at] += new
                reasons[at] = reasons[at] or choice["finish_reason"]
                if new and last[at] is None:
                    answer.first = answer.first or now
                elif new:
                    answer.gaps += [(now - last[at]) / len(new)] * len(new)
                last[at] = now if new else last[at]
            left = request.disconnects and pieces >= request.leaves_after
            if left:
                break  # the connection is closed with the rest unread
    if not (done or left):
        raise ValueError("the stream ended without [DONE]")
    answer.status = 200
    answer.texts, answer.tokens, answer.reasons = ["".join(t) for t in texts], tokens, reasons
