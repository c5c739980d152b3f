"""Compares the answers of a load test with plain decoding: what was lost, and what was wrong."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from bench.serve.traffic import Answer, Request
from specjax import LLM
from specjax.engine.compare import first_differences
from specjax.engine.request import RequestOutput, make_jobs

ERROR = {"message", "type", "param", "code"}


@dataclasses.dataclass
class Verdict:
    """Counts of a load test's requests.

    Attributes:
      completed: requests whose answers were compared with plain decoding.
      lost: requests without a complete answer.
      wrong: requests with other tokens, text or finish reasons than plain decoding's, which
        floating point does not explain.
      explained: requests with other tokens that floating point explains.
      left: requests whose clients disconnected; the received part, if any, was compared with the
        beginning of plain decoding.
      malformed: malformed requests.
      accepted: malformed requests that were not refused with a 4xx in OpenAI's shape.
      pairs: requests sent twice, once streamed and once not.
      unlike: pairs with different answers.
      messages: lines about requests that are lost, wrong, accepted or explained.
    """

    completed: int = 0
    lost: int = 0
    wrong: int = 0
    explained: int = 0
    left: int = 0
    malformed: int = 0
    accepted: int = 0
    pairs: int = 0
    unlike: int = 0
    messages: list[str] = dataclasses.field(default_factory=list)


def judge(plain: LLM, requests: Sequence[Request | tuple[str, bytes]], answers: Sequence[Answer]):
    """Compares every answer with what it should be.

    Args:
      plain: an `LLM` without speculation.

    Returns:
      a `Verdict`.
    """
    verdict = Verdict()
    wanted = {request.key: request for request in requests if isinstance(request, Request)}
    ids = {key: _ids(plain.tokenizer, request) for key, request in wanted.items()}
    outputs = plain.generate(list(ids.values()), [request.params for request in wanted.values()])
    expected = dict(zip(wanted, outputs, strict=True))
    seen: dict[str, tuple[Request, Any]] = {}
    for index, (request, answer) in enumerate(zip(requests, answers, strict=True)):
        if not isinstance(request, Request):
            _judge_refusal(verdict, index, request, answer)
        elif request.disconnects:
            _judge_beginning(verdict, plain, index, request, answer, expected[request.key])
        elif not request.disconnects:
            if _is_lost(request, answer):
                verdict.lost += 1
                verdict.messages.append(f"request {index} was lost: {_reason(answer)}")
                continue
            _judge_answer(verdict, plain, index, request, answer, expected[request.key])
            _judge_pair(verdict, index, request, answer, seen)
    return verdict


def _ids(tokenizer, request: Request) -> list[int]:
    # The template of a chat has written the special tokens already.
    return tokenizer.encode(request.prompt, add_special_tokens=not request.chat)


def _is_lost(request: Request, answer: Answer) -> bool:
    count = request.options.get("n", 1)
    whole = len(answer.texts) == count and None not in answer.reasons
    return answer.status != 200 or answer.lost is not None or not whole


def _reason(answer: Answer) -> str:
    return answer.lost or f"status {answer.status}, {answer.refusal!r}"


def _judge_refusal(
    verdict: Verdict, index: int, request: tuple[str, bytes], answer: Answer
) -> None:
    verdict.malformed += 1
    error = answer.refusal.get("error") if isinstance(answer.refusal, dict) else None
    if not (400 <= answer.status < 500 and isinstance(error, dict) and set(error) == ERROR):
        verdict.accepted += 1
        verdict.messages.append(
            f"request {index}, malformed ({request[1][:60]!r}): {_reason(answer)}"
        )


def _judge_answer(
    verdict: Verdict,
    plain: LLM,
    index: int,
    request: Request,
    answer: Answer,
    expected: RequestOutput,
) -> None:
    verdict.completed += 1
    tokens = [sample.token_ids for sample in expected.samples]
    if answer.tokens != tokens:
        _judge_difference(verdict, plain, index, request, answer, expected, tokens)
        return
    texts = [sample.text for sample in expected.samples]
    reasons = [sample.finish_reason for sample in expected.samples]
    if (answer.texts, answer.reasons) != (texts, reasons):
        verdict.wrong += 1
        verdict.messages.append(
            f"request {index}: expected {texts} ({reasons}), got {answer.texts} ({answer.reasons})"
        )


def _judge_difference(
    verdict: Verdict,
    plain: LLM,
    index: int,
    request: Request,
    answer: Answer,
    expected: RequestOutput,
    tokens: Sequence[Sequence[int]],
) -> None:
    """Judges whether floating point explains tokens other than the expected ones."""
    jobs = make_jobs(
        expected.prompt_token_ids, request.params, plain.cfg.eos_token_ids, plain.tokenizer, index
    )
    differences = first_differences(plain.engine.runner, jobs, tokens, answer.tokens)
    verdict.messages += map(str, differences)
    if all(difference.explained for difference in differences):
        verdict.explained += 1
    else:
        verdict.wrong += 1


def _judge_beginning(
    verdict: Verdict,
    plain: LLM,
    index: int,
    request: Request,
    answer: Answer,
    expected: RequestOutput,
) -> None:
    """Compares what a client received before it left with the beginning of plain decoding."""
    verdict.left += 1
    if answer.lost is not None or answer.status not in (0, 200):
        verdict.lost += 1
        verdict.messages.append(
            f"request {index} was lost before its client left: {_reason(answer)}"
        )
        return
    if not answer.tokens:  # it left before anything came
        return
    tokens = [
        sample.token_ids[: len(got)]
        for sample, got in zip(expected.samples, answer.tokens, strict=True)
    ]
    if answer.tokens != tokens:
        _judge_difference(verdict, plain, index, request, answer, expected, tokens)
        return
    for sample, text in zip(expected.samples, answer.texts, strict=True):
        if not sample.text.startswith(text):
            verdict.wrong += 1
            verdict.messages.append(
                f"request {index}: expected {sample.text!r}, got {text!r} first"
            )
            return


def _judge_pair(verdict: Verdict, index: int, request: Request, answer: Answer, seen: dict) -> None:
    """Compares a request with its repetition, of which one is streamed and the other is not."""
    known, got = seen.get(request.key), (answer.tokens, answer.texts, answer.reasons)
    seen[request.key] = request, got
    if known is None or known[0].stream == request.stream:
        return
    verdict.pairs += 1
    if known[1] != got:
        verdict.unlike += 1
        verdict.messages.append(f"request {index}, streamed and not: {known[1]} and {got}")
