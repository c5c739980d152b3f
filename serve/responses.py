"""Bodies of answers, in OpenAI's shapes.

Beside OpenAI's fields, where the request asks for them: `token_ids` of a choice, `prompt_token_ids`
(vLLM's), and `spec_details`, what speculation did for a choice:

    accept_length           tokens per round, bonus included
    draft_acceptance_rate   accepted drafts over drafted tokens; null where nothing was drafted
    acceptance_histogram    rounds that accepted 0, 1, 2, .. drafts
    rounds, plain_rounds    all, and those that drafted nothing
    drafted, accepted       tokens
    origins                 how each token came: "draft" (accepted), "bonus" (the last of a round
                            that drafted) or "plain". In a stream each piece says its own
"""

from __future__ import annotations

import functools
import itertools
import json
import re
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence

from fastapi.responses import StreamingResponse

from specjax.engine.prompt_scores import PromptScores
from specjax.engine.request import SampleOutput
from specjax.engine.watch import News

LEAST = -9999.0  # what OpenAI writes for minus infinity


def origins(news: Sequence[News]) -> list[str]:
    """How each token came."""
    found = []
    for chunk in news:
        for count in chunk.rounds:
            drafted = ["draft"] * (count - 1) + ["bonus"]
            found += drafted if chunk.steps else ["plain"] * count
    return found


def spec_details(sample: SampleOutput) -> dict:
    """What speculation did for a whole sample."""
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


class Pieces:
    """Tokens as text and bytes, for logprobs.

    A vocabulary spells its tokens in one of a few ways, which the tokenizer's decoder tells:

        byte-level    every character of a token is a byte, in GPT-2's alphabet
        sentencepiece `▁` is a space, and `<0x0A>` a byte, where it falls back to bytes
        any other     what decoding the token alone gives

    To decode a sentencepiece token alone would drop the space that it begins with, and make a
    replacement character of a byte that is part of one.
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
        """As OpenAI: a token that is part of a character is spelt `bytes:\\xe2\\x82`."""
        raw = self.bytes_of(token)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def by_text(self, logprobs: Mapping[int, float], chosen: int) -> dict[str, float]:
        """Log-probabilities by the tokens' texts, in their order.

        Several tokens may have one text. It is that of the token that was generated, or else of the
        first; the others are called `token_id:N`, as vLLM has it.
        """
        texts = {token: self.text(token) for token in logprobs}
        owner = {text: token for token, text in reversed(texts.items())}
        if chosen in texts:
            owner[texts[chosen]] = chosen
        found = {}
        for token, logprob in logprobs.items():
            text = texts[token] if owner[texts[token]] == token else f"token_id:{token}"
            while text in found:  # a vocabulary may hold that as well
                text = f"token_id:{text}"
            found[text] = _least(logprob)
        return found

    def _bytes_of(self, token: int) -> bytes:
        if self._tokenizer is None:
            return f"token_id:{token}".encode()
        if token in self._added:
            return self._added[token].encode(errors="replace")
        piece = self._tokenizer.convert_ids_to_tokens(token)
        if piece is None:  # the model's table is longer than the tokenizer's
            return b""
        if self._byte_of is not None and all(c in self._byte_of for c in piece):
            return bytes(self._byte_of[c] for c in piece)
        if self._has_bytes and (byte := _BYTE.fullmatch(piece)):
            return bytes([int(byte[1], 16)])
        if self._space:
            return piece.replace(self._space, " ").encode(errors="replace")
        return self._tokenizer.decode([token], skip_special_tokens=False).encode(errors="replace")


_BYTE = re.compile("<0x([0-9A-Fa-f]{2})>")
_SPACE = "\u2581"  # sentencepiece's


def _decoders(tokenizer) -> dict[str, str | None]:
    """The steps of a tokenizer's decoder, each with what it writes a space as, if it does."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if getattr(backend, "decoder", None) is None:
        # transformers' wrapper of the sentencepiece library has no such steps.
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
    """GPT-2's alphabet: printable bytes are themselves, the others follow from U+0100 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    found = {chr(byte): byte for byte in printable}
    return found | {chr(256 + i): byte for i, byte in enumerate(others)}


class CompletionReply:
    """Answers of /v1/completions.

    Attributes:
      tells_of_one_prompt: what there is to say of it belongs to no choice.
    """

    tells_of_one_prompt = False
    id_prefix, whole, part = "cmpl", "text_completion", "text_completion"

    def __init__(self, model: str, pieces: Pieces):
        self._head = {"id": f"{self.id_prefix}-{uuid.uuid4().hex}", "created": int(time.time())}
        self._model, self._pieces = model, pieces

    def body(self, choices: list[dict], usage: dict | None, streams: bool) -> dict:
        kind = self.part if streams else self.whole
        reply = {**self._head, "object": kind, "model": self._model, "choices": choices}
        return reply if usage is None else {**reply, "usage": usage}

    def opening(self, index: int) -> dict | None:
        """The first piece of a choice in a stream, before any text."""
        return None

    def choice(
        self, index: int, text: str, reason: str | None, logprobs: dict | None, streams: bool
    ) -> dict:
        return {"index": index, "text": text, "finish_reason": reason, "logprobs": logprobs}

    def logprobs(self, tokens, values, top, offset: int, most: int) -> dict:
        """Of some tokens.

        Args:
          values: None for the first token of a prompt, which follows nothing, and likewise in top.
          top: of each token, see `News`; None without. offset: characters before these.
          most: likely tokens that were asked for; the one that was generated may come on top.
        """
        texts = [self._pieces.text(token) for token in tokens]
        offsets = list(itertools.accumulate(map(len, texts), initial=offset))[:-1]
        likely = None
        if top is not None:
            likely = [
                entry and self._pieces.by_text(entry, token)
                for entry, token in zip(top, tokens, strict=True)
            ]
        return {
            "tokens": texts,
            "token_logprobs": [None if value is None else _least(value) for value in values],
            "top_logprobs": likely,
            "text_offset": offsets,
        }

    def prompt_logprobs(self, prompt: Sequence[int], scores: PromptScores) -> list[dict | None]:
        """Of a prompt's tokens, in vLLM's shape: token id -> logprob, rank and text."""
        told: list[dict | None] = []
        for token, rank, top in zip(prompt, scores.ranks, scores.top, strict=True):
            told.append(
                top
                and {
                    str(other): {
                        "logprob": _least(value),
                        "rank": rank if other == token else place,
                        "decoded_token": self._pieces.text(other),
                    }
                    for place, (other, value) in enumerate(top.items(), 1)
                }
            )
        return told


class ChatReply(CompletionReply):
    """Answers of /v1/chat/completions."""

    tells_of_one_prompt = True
    id_prefix, whole, part = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def opening(self, index: int) -> dict | None:
        delta = {"role": "assistant", "content": ""}
        return {"index": index, "delta": delta, "finish_reason": None, "logprobs": None}

    def choice(self, index, text, reason, logprobs, streams) -> dict:
        said = {"index": index, "finish_reason": reason, "logprobs": logprobs}
        if streams:
            return {**said, "delta": {"content": text} if text or reason is None else {}}
        message = {"role": "assistant", "content": text, "refusal": None}
        return {**said, "message": message}

    def logprobs(self, tokens, values, top, offset: int, most: int) -> dict:
        content = []
        for i, (token, value) in enumerate(zip(tokens, values, strict=True)):
            entry = self._entry(token, value)
            likely = [] if top is None else list(top[i].items())[:most]
            entry["top_logprobs"] = [self._entry(t, v) for t, v in likely]
            content.append(entry)
        return {"content": content, "refusal": None}

    def _entry(self, token: int, value: float) -> dict:
        raw = self._pieces.bytes_of(token)
        return {"token": self._pieces.text(token), "logprob": _least(value), "bytes": list(raw)}


def usage_of(prompt_tokens: int, completion_tokens: int) -> dict:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


def _least(value: float) -> float:
    return max(float(value), LEAST)


class EventStream(StreamingResponse):
    """Server-sent events.

    Args:
      on_end: is called when the last was sent, or the client went away.
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
