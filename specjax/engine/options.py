"""Checks the sampling options of jobs, and gives them as features and as rows of arrays."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from specjax.config import ModelConfig, SamplingParams
from specjax.decode.options import (
    BAD_WORD_LENGTH,
    BAD_WORDS,
    BIAS_WIDTH,
    Features,
    Options,
    neutral,
)
from specjax.engine.request import NO_LIMIT, Job
from specjax.spelling import SettingError
from specjax.tokenizer import check_ids


@dataclasses.dataclass(frozen=True)
class Limits:
    """The limits of a job in an engine.

    Attributes:
      cfg: config of the model.
      max_len: the most prompt and generated tokens.
      stop_width: the most stop tokens.
      acceptance: acceptance mode of the engine; None: it decodes plainly.
    """

    cfg: ModelConfig
    max_len: int
    stop_width: int
    acceptance: str | None


def check_job(where: str, job: Job, limits: Limits) -> None:
    """Raises ValueError if the job's parameters do not fit the model or the engine."""
    params, cfg = job.params, limits.cfg
    if job.limit == NO_LIMIT and len(job.prompt) >= limits.max_len:
        raise SettingError(
            lambda spell: (
                f"{where} has {len(job.prompt)} tokens, which leaves no room below "
                f"{spell('max_len')} {limits.max_len}; shorten it, or raise {spell('max_len')} "
                f"(the model's own limit is {cfg.max_position})"
            )
        )
    if NO_LIMIT > job.limit > limits.max_len:
        raise SettingError(
            lambda spell: (
                f"{where} has {len(job.prompt)} tokens and {spell('max_tokens')} is "
                f"{params.max_tokens}, together more than {spell('max_len')} {limits.max_len}; "
                f"shorten one, let {spell('max_tokens', None)} take what fits, or raise "
                f"{spell('max_len')} (the model's own limit is {cfg.max_position})"
            )
        )
    if len(job.stop_ids) > limits.stop_width:
        raise SettingError(
            lambda spell: (
                f"{where} has {len(job.stop_ids)} stop tokens, the model's own included; at most "
                f"{limits.stop_width}; raise {spell('max_stop_tokens', ...)}, or stop at strings "
                "(stop)"
            )
        )
    for name, ids in _ids_by_option(job).items():
        check_ids(f"{where}: {name}", ids, cfg.vocab_size)
    _check_widths(where, job)
    _check_something_is_left(where, job, cfg.vocab_size)
    if limits.acceptance == "greedy" and params.temperature > 0:
        raise ValueError(
            f"{where} has temperature {params.temperature}, and acceptance 'greedy' is exact for "
            "temperature 0 only; use acceptance 'coupled', which takes any tree and gives the "
            "tokens of plain decoding at every temperature, or temperature=0"
        )


def _ids_by_option(job: Job) -> dict[str, Sequence[int]]:
    params: SamplingParams = job.params
    return {
        "stop_token_ids": params.stop_token_ids,
        "logit_bias": [token for token, _ in params.logit_bias],
        "allowed_token_ids": params.allowed_token_ids or (),
        "bad_words": [token for word in job.bad_words for token in word],
    }


def _check_widths(where: str, job: Job) -> None:
    biased = len(job.params.logit_bias)
    if biased > BIAS_WIDTH:
        raise ValueError(
            f"{where}: logit_bias has {biased} tokens; at most {BIAS_WIDTH} (to forbid or allow "
            "many, use allowed_token_ids)"
        )
    if len(job.bad_words) > BAD_WORDS:
        raise ValueError(
            f"{where}: bad_words come to {len(job.bad_words)} token sequences (a string makes up "
            f"to two: with and without a space before it); at most {BAD_WORDS}"
        )
    longest = max(job.bad_words, key=len, default=())
    if len(longest) > BAD_WORD_LENGTH:
        raise ValueError(
            f"{where}: a bad word has {len(longest)} tokens, {longest}; at most {BAD_WORD_LENGTH}"
        )


def _check_something_is_left(where: str, job: Job, vocab: int) -> None:
    """Refuses masks under which no token can ever be generated."""
    params = job.params
    banned = {word[0] for word in job.bad_words if len(word) == 1}
    if params.min_tokens:
        banned.update(job.stop_ids)
    allowed = params.allowed_token_ids or range(vocab)
    if len(banned) >= len(allowed) and banned.issuperset(allowed):
        while_short = f" in the first min_tokens = {params.min_tokens} tokens"
        raise ValueError(
            f"{where}: no token is left to generate{while_short if params.min_tokens else ''}: "
            "all that allowed_token_ids leaves are bad words or masked stop tokens; allow more"
        )


def features_of(job: Job, vocab: int) -> Features:
    """The features that a program must have to run this job."""
    p = job.params
    sampled = p.temperature > 0
    return Features(
        sampled=sampled,
        top_k=sampled and keeps(p, vocab) < vocab,
        top_p=sampled and p.top_p < 1,
        min_p=sampled and p.min_p > 0,
        penalties=(
            p.repetition_penalty != 1 or p.presence_penalty != 0 or p.frequency_penalty != 0
        ),
        bias=any(value != 0 for _, value in p.logit_bias),
        allowed=bool(p.allowed_token_ids),
        bad_words=bool(job.bad_words),
        min_tokens=p.min_tokens > 0 and bool(job.stop_ids),
        transformed_logprobs=p.transformed_logprobs,
        top_logprobs=bool(p.logprobs),
    )


def keeps(params: SamplingParams, vocab: int) -> int:
    """The number of tokens that top-k keeps."""
    return params.top_k if 0 < params.top_k < vocab else vocab


def option_rows(jobs: Sequence[Job], vocab: int, stop_width: int) -> Options:
    """The jobs' options as numpy arrays, one row per job."""
    rows = neutral(len(jobs), vocab, stop_width, np=np)
    masks: dict[int, np.ndarray] = {}  # by id of the parameters, which a request's samples share
    for r, job in enumerate(jobs):
        p = job.params
        rows.temperature[r] = p.temperature
        # Greedy jobs keep neutral filters: where another job of the batch needs top-p, it must not
        # change their argmax among tokens that tie.
        if p.temperature > 0:
            rows.top_k[r] = keeps(p, vocab) % vocab  # 0 keeps all
            rows.top_p[r], rows.min_p[r] = p.top_p, p.min_p
        rows.repetition[r] = p.repetition_penalty
        rows.presence[r], rows.frequency[r] = p.presence_penalty, p.frequency_penalty
        for i, (token, value) in enumerate(p.logit_bias):
            rows.bias_ids[r, i], rows.bias_values[r, i] = token, value
        if p.allowed_token_ids:
            mask = masks.get(id(p))
            mask = bitmask(p.allowed_token_ids, vocab) if mask is None else mask
            rows.allowed[r] = masks[id(p)] = mask
        for i, word in enumerate(job.bad_words):
            rows.bad_words[r, i, -len(word) :] = word
        rows.stop_ids[r, : len(job.stop_ids)] = job.stop_ids
        rows.prompt_len[r] = len(job.prompt)
        rows.min_len[r] = len(job.prompt) + p.min_tokens if p.min_tokens else 0
        rows.speculate[r] = p.speculative
    return rows


def bitmask(ids: Sequence[int], vocab: int) -> np.ndarray:
    """Words [ceil(vocab / 32)] in which bit v % 32 of word v // 32 is set iff v is in `ids`."""
    ids = np.asarray(ids, np.uint32)
    words = np.zeros(-(-vocab // 32), np.uint32)
    np.bitwise_or.at(words, ids // 32, np.uint32(1) << (ids % 32))
    return words
