"""Bodies of responses, in OpenAI's shapes.

If the request asks for them, a choice also has vLLM's `token_ids` and `prompt_token_ids`, and
`spec_details`:

    accept_length           tokens per round, bonus included
    draft_acceptance_rate   accepted drafts over drafted tokens; null where nothing was drafted
    acceptance_histogram    rounds that accepted 0, 1, 2, .. drafts
    rounds                  number of rounds
    plain_rounds            number of rounds that drafted nothing
    drafted                 number of drafted tokens
    accepted                number of accepted drafts
    origins                 origin of each token (in a stream, of each token of the chunk): "draft"
                            (accepted), "bonus" (the last of a round that drafted) or "plain"
"""

from __future__ import annotations

import functools
import json
import re
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence

from fastapi.responses import StreamingResponse

from specjax.engine.prompt_scores import PromptScores
from specjax.engine.request import BONUS, DRAFT, PLAIN, SampleOutput
from specjax.engine.sequence import News, origins_of
from specjax.tokenizer import decode
from specjax.tool_calls import Delta

MIN_LOGPROB = -9999.0  # OpenAI's value for minus infinity


_ORIGINS = {DRAFT: "draft", BONUS: "bonus", PLAIN: "plain"}


def origins(news: Sequence[News]) -> list[str]:
    """The origin of each token: `draft`, `bonus` or `plain`."""
    return [_ORIGINS[each] for chunk in news for each in origins_of(chunk.rounds, chunk.steps)]


def spec_details(sample: SampleOutput) -> dict:
    """The statistics of speculation for a whole sample."""
    stats = sample.stats
    return {
        "accept_length": stats.accept_length if stats.rounds else None,
        "draft_acceptance_rate": stats.accepted / stats.drafted if stats.drafted else None,
        "acceptance_histogram": list(stats.histogram[1:]),
        "rounds": stats.rounds,
        "plain_rounds": stats.plain_rounds,
        "drafted": stats.drafted,
        "accepted": stats.accepted,
    }


class TokenTexts:
    """The text and the bytes of single tokens, for logprobs.

    The tokenizer's decoder says how the vocabulary writes its tokens:

        byte-level    every character of a token is a byte, in GPT-2's alphabet
        sentencepiece `▁` is a space, and with byte fallback `<0x0A>` is a byte
        any other     the token's text is that of decoding it alone

    Decoding a sentencepiece token alone would drop the space that it begins with, and make a
    replacement character of a byte that is part of a character.
    """

    def __init__(self, tokenizer):
        self._tokenizer = tokenizer
        decoders = _decoders(tokenizer)
        self._byte_of = _bytes_by_character() if "ByteLevel" in decoders else None
        self._space = decoders.get("Metaspace", decoders.get("Replace"))
        self._has_bytes = "ByteFallback" in decoders
        self._added: dict[int, str] = {}
        for token, added in getattr(tokenizer, "added_tokens_decoder", {}).items():
            self._added[token] = getattr(added, "content", str(added))
        self.bytes_of = functools.lru_cache(maxsize=1 << 16)(self._bytes_of)

    def text(self, token: int) -> str:
        """The text of a token; part of a character is written `bytes:\\xe2\\x82`, as by OpenAI."""
        raw = self.bytes_of(token)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def by_text(self, logprobs: Mapping[int, float], chosen: int) -> dict[str, float]:
        """Log-probabilities by the tokens' texts, in their order.

        If several tokens have the same text, it stands for the generated token if that is among
        them, else for the first one. The others are `token_id:N`, as in vLLM.
        """
        chosen_among = [chosen] if chosen in logprobs else []
        texts = {token: self.text(token) for token in logprobs}
        owner = {texts[token]: token for token in (*reversed(texts), *chosen_among)}
        return {
            texts[token] if owner[texts[token]] == token else f"token_id:{token}": _clipped(logprob)
            for token, logprob in logprobs.items()
        }

    def _bytes_of(self, token: int) -> bytes:
        if self._tokenizer is None:
            return f"token_id:{token}".encode()
        if token in self._added:
            return self._added[token].encode(errors="replace")
        piece = self._tokenizer.convert_ids_to_tokens(token)
        if piece is None:  # the model's vocabulary is larger than the tokenizer's
            return b""
        if self._byte_of is not None and all(c in self._byte_of for c in piece):
            return bytes(self._byte_of[c] for c in piece)
        if self._has_bytes and (byte := _BYTE.fullmatch(piece)):
            return bytes([int(byte[1], 16)])
        if self._space:
            return piece.replace(self._space, " ").encode(errors="replace")
        return decode(self._tokenizer, [token], skip_special_tokens=False).encode(errors="replace")


_BYTE = re.compile("<0x([0-9A-Fa-f]{2})>")
_SPACE = "\u2581"  # sentencepiece's character for a space


def _decoders(tokenizer) -> dict[str, str | None]:
    """The steps of a tokenizer's decoder, each with its character for a space, or None."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if getattr(backend, "decoder", None) is None:
        # transformers' wrapper of the sentencepiece library has no decoder.
        return {"Replace": _SPACE, "ByteFallback": None} if hasattr(tokenizer, "sp_model") else {}
    decoder = json.loads(backend.to_str())["decoder"]
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    found: dict[str, str | None] = {}
    for step in steps:
        kind, space = step["type"], step.get("replacement")
        if kind == "Replace":
            space = step["pattern"].get("String") if step["content"] == " " else None
            if space is None:
                continue
        found[kind] = space
    return found


def _bytes_by_character() -> dict[str, int]:
    """The byte of each character of GPT-2's alphabet.

    Printable bytes stand for themselves, the others for the characters from U+0100 on.
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    found = {chr(byte): byte for byte in printable}
    return found | {chr(256 + i): byte for i, byte in enumerate(others)}


class CompletionResponse:
    """Responses of /v1/completions.

    Attributes:
      has_one_prompt: whether the prompt's log-probabilities are a field of the response, and not of
        each choice.
    """

    has_one_prompt = False
    id_prefix, whole, part = "cmpl", "text_completion", "text_completion"

    def __init__(self, model: str, texts: TokenTexts):
        self._head = {"id": f"{self.id_prefix}-{uuid.uuid4().hex}", "created": int(time.time())}
        self._model, self._texts = model, texts

    def body(self, choices: list[dict], usage: dict | None, streams: bool) -> dict:
        kind = self.part if streams else self.whole
        reply = {**self._head, "object": kind, "model": self._model, "choices": choices}
        return reply if usage is None else {**reply, "usage": usage}

    def opening(self, index: int) -> dict | None:
        """The first chunk of a choice in a stream, before any text."""
        return None

    def choice(
        self,
        index: int,
        text: str,
        reason: str | None,
        logprobs: dict | None,
        streams: bool,
        first_call: int = 0,
    ) -> dict:
        return {"index": index, "text": text, "finish_reason": reason, "logprobs": logprobs}

    def logprobs(self, tokens, values, top, offsets: Sequence[int], most: int) -> dict:
        """The log-probabilities of some tokens.

        Args:
          tokens: token ids.
          values: log-probability of each token; None for the first token of a prompt.
          top: most likely tokens at each position, see `News`; None: not asked for.
          offsets: place of each token in the text of the choice, in characters.
          most: number of likely tokens that were asked for, beside the generated one.
        """
        texts = [self._texts.text(token) for token in tokens]
        likely = None
        if top is not None:
            likely = [
                entry and self._texts.by_text(entry, token)
                for entry, token in zip(top, tokens, strict=True)
            ]
        return {
            "tokens": texts,
            "token_logprobs": [None if value is None else _clipped(value) for value in values],
            "top_logprobs": likely,
            "text_offset": list(offsets),
        }

    def prompt_logprobs(self, prompt: Sequence[int], scores: PromptScores) -> list[dict | None]:
        """The log-probabilities of a prompt, as vLLM: token id -> logprob, rank and text."""
        found: list[dict | None] = []
        for token, rank, top in zip(prompt, scores.ranks, scores.top, strict=True):
            found.append(
                top
                and {
                    str(other): {
                        "logprob": _clipped(value),
                        "rank": rank if other == token else place,
                        "decoded_token": self._texts.text(other),
                    }
                    for place, (other, value) in enumerate(top.items(), 1)
                }
            )
        return found


class ChatResponse(CompletionResponse):
    """Responses of /v1/chat/completions."""

    has_one_prompt = True
    id_prefix, whole, part = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def opening(self, index: int) -> dict | None:
        delta = {"role": "assistant", "content": ""}
        return {"index": index, "delta": delta, "finish_reason": None, "logprobs": None}

    def choice(self, index, text: Delta, reason, logprobs, streams, first_call: int = 0) -> dict:
        """Writes a choice.

        Args:
          text: what a message, or the next piece of it, consists of.
          first_call: number of calls in the pieces before.
        """
        choice = {"index": index, "finish_reason": reason, "logprobs": logprobs}
        calls = [
            {
                **({"index": number} if streams else {}),
                "id": f"call_{uuid.uuid4().hex[:24]}",
                "type": "function",
                "function": call._asdict(),
            }
            for number, call in enumerate(text.calls, first_call)
        ]
        more = {"tool_calls": calls} if calls else {}
        if text.reasoning:
            more["reasoning_content"] = text.reasoning
        if streams:
            has_content = text.content or not (more or reason)
            return {
                **choice,
                "delta": {**({"content": text.content} if has_content else {}), **more},
            }
        content = None if calls and not text.content else text.content
        message = {"role": "assistant", "content": content, "refusal": None, **more}
        return {**choice, "message": message}

    def logprobs(self, tokens, values, top, offsets: Sequence[int], most: int) -> dict:
        content = []
        for i, (token, value) in enumerate(zip(tokens, values, strict=True)):
            entry = self._entry(token, value)
            likely = [] if top is None else list(top[i].items())[:most]
            entry["top_logprobs"] = [self._entry(t, v) for t, v in likely]
            content.append(entry)
        return {"content": content, "refusal": None}

    def _entry(self, token: int, value: float) -> dict:
        raw = self._texts.bytes_of(token)
        return {"token": self._texts.text(token), "logprob": _clipped(value), "bytes": list(raw)}


def _clipped(value: float) -> float:
    return max(float(value), MIN_LOGPROB)


class EventStream(StreamingResponse):
    """A response of server-sent events.

    Args:
      events: the events.
      on_end: function to call when the last event has been sent or the client has gone.
    """

    def __init__(self, events: AsyncIterator[str], on_end: Callable[[], None]):
        super().__init__(
            events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"}
        )
        self._on_end = on_end

    async def __call__(self, scope, receive, send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._on_end()
