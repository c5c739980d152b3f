"""Refuses requests that cannot be served, before anything runs, in words that help."""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Iterable, Sequence

from specjax.config import ModelConfig, SamplingParams
from specjax.decode.options import BAD_WORD_LENGTH, BAD_WORDS, BIAS_WIDTH
from specjax.engine.request import NO_LIMIT, Job
from specjax.spelling import SettingError


@dataclasses.dataclass(frozen=True)
class Limits:
    """What an engine can serve: prompt and generated tokens, stop tokens, and its rule."""

    cfg: ModelConfig
    max_len: int
    stop_width: int
    acceptance: str | None


def check_prompt(where: str, prompt: Iterable, vocab: int) -> list[int]:
    """The prompt as a list of token ids.

    Raises:
      ValueError: it is empty, or holds something that is no token id below `vocab`.
    """
    prompt = list(prompt)
    wrong = [t for t in prompt if not isinstance(t, numbers.Integral) or isinstance(t, bool)]
    if wrong:
        raise ValueError(f"{where} holds {wrong[0]!r}; expected token ids, which are integers")
    if not prompt:
        raise ValueError(f"{where} is empty; expected at least one token")
    ids = [int(t) for t in prompt]
    _check_ids(where, ids, vocab)
    return ids


def check_job(where: str, job: Job, limits: Limits) -> None:
    """Raises ValueError if the job's parameters do not fit the model or the engine."""
    params, cfg = job.params, limits.cfg
    if job.limit == NO_LIMIT and len(job.prompt) >= limits.max_len:
        raise SettingError(
            lambda say: (
                f"{where} has {len(job.prompt)} tokens, which leaves no room below "
                f"{say('max_len')} {limits.max_len}; shorten it, or raise {say('max_len')} (the "
                f"model's own limit is {cfg.max_position})"
            )
        )
    if NO_LIMIT > job.limit > limits.max_len:
        raise SettingError(
            lambda say: (
                f"{where} has {len(job.prompt)} tokens and {say('max_tokens')} is "
                f"{params.max_tokens}, together more than {say('max_len')} {limits.max_len}; "
                f"shorten one, let {say('max_tokens', None)} take what fits, or raise "
                f"{say('max_len')} (the model's own limit is {cfg.max_position})"
            )
        )
    if len(job.stop_ids) > limits.stop_width:
        raise SettingError(
            lambda say: (
                f"{where} has {len(job.stop_ids)} stop tokens, the model's own included; at most "
                f"{limits.stop_width}; raise {say('max_stop_tokens', ...)}, or stop at strings "
                "(stop)"
            )
        )
    for name, ids in _ids_by_option(job).items():
        _check_ids(f"{where}: {name}", ids, cfg.vocab_size)
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


def _check_ids(where: str, ids: Sequence[int], vocab: int) -> None:
    bad = [t for t in ids if not 0 <= t < vocab]
    if bad:
        raise ValueError(f"{where} holds token id {bad[0]}; expected 0 <= id < {vocab}")


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
    """Masks that never leave a token are a slip; that they sometimes leave none is provided for."""
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
