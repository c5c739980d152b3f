"""From a request's parameters to its row of device options and the features it asks for."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specjax.config import SamplingParams
from specjax.decode.options import Features, Options, neutral
from specjax.engine.request import Job


def features_of(job: Job, vocab: int) -> Features:
    """What the programs that this job runs in must take into account."""
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
        top_logprobs=p.top_logprobs > 0,
    )


def keeps(params: SamplingParams, vocab: int) -> int:
    """How many tokens top-k keeps."""
    return params.top_k if 0 < params.top_k < vocab else vocab


def option_rows(jobs: Sequence[Job], vocab: int, stop_width: int) -> Options:
    """The jobs' options as numpy arrays, one row each.

    Greedy jobs get neutral filters: a program with top-p in it, compiled for their neighbours, must
    not move their argmax among tokens that tie.
    """
    rows = neutral(len(jobs), vocab, stop_width, np=np)
    masks: dict[int, np.ndarray] = {}  # one per request, of which there may be many samples
    for r, job in enumerate(jobs):
        p = job.params
        rows.temperature[r] = p.temperature
        if p.temperature > 0:
            rows.top_k[r] = keeps(p, vocab) % vocab  # all is 0
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
    """Words [ceil(vocab / 32)] in which bit v % 32 of word v // 32 is set iff v is among `ids`."""
    ids = np.asarray(ids, np.uint32)
    words = np.zeros(-(-vocab // 32), np.uint32)
    np.bitwise_or.at(words, ids // 32, np.uint32(1) << (ids % 32))
    return words
