"""The sampling transforms again: one row at a time, plain Python and float64, no code shared.

Written from the definitions in `SamplingParams`, for tests that compare programs with it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np

from specjax.config import SamplingParams

DEFAULTS = dataclasses.asdict(SamplingParams())


def transform(
    logits: Sequence[float],
    params: SamplingParams | Mapping,
    prompt: Sequence[int],
    output: Sequence[int],
    path: Sequence[int],
    stop_ids: Sequence[int] = (),
    vocab: int | None = None,
) -> np.ndarray:
    """Scores of the token that follows prompt + output + path.

    Args:
      logits: the raw logits of one row.
      params: fields of SamplingParams; a mapping may leave some out. Bad words are token ids.
      output: tokens generated so far, the root included. path: tokens below the root.
      stop_ids: what ends the sample, and is masked before min_tokens.
      vocab: expected number of logits.

    Returns:
      [V] float64 transformed logits over the temperature, -inf where the token is impossible.
    """
    given = dataclasses.asdict(params) if dataclasses.is_dataclass(params) else dict(params)
    unknown = given.keys() - DEFAULTS.keys()
    if unknown:
        raise ValueError(f"expected fields of SamplingParams, got {sorted(unknown)}")
    options = DEFAULTS | given
    scores = [float(x) for x in logits]
    if vocab is not None and len(scores) != vocab:
        raise ValueError(f"expected {vocab} logits, got {len(scores)}")
    generated = [*output, *path]
    scores = penalised(scores, options, prompt, generated)
    scores = masked(scores, options, prompt, generated, stop_ids)
    temperature = options["temperature"]
    if temperature == 0:
        return np.array(scores)
    scores = [x / temperature for x in scores]
    scores = keep_top_k(scores, options["top_k"])
    scores = keep_top_p(scores, options["top_p"])
    return np.array(keep_min_p(scores, options["min_p"]))


def penalised(scores, options, prompt, generated):
    bias = options["logit_bias"] or ()
    bias = dict(bias.items() if isinstance(bias, Mapping) else bias)
    result = []
    for token, x in enumerate(scores):
        if token in prompt or token in generated:
            repetition = options["repetition_penalty"]
            x = x / repetition if x > 0 else x * repetition
        x -= options["frequency_penalty"] * list(generated).count(token)
        if token in generated:
            x -= options["presence_penalty"]
        result.append(x + bias.get(token, 0.0))
    return result


def masked(scores, options, prompt, generated, stop_ids):
    """Allowed ids, minimum length, bad words: each only if it leaves something of what is left."""
    history = [*prompt, *generated]
    endings = set()
    for word in options["bad_words"]:
        beginning = list(word[:-1])
        if history[len(history) - len(beginning) :] == beginning:
            endings.add(word[-1])
    allowed = options["allowed_token_ids"]
    early = len(generated) < options["min_tokens"]
    outside = set() if allowed is None else set(range(len(scores))) - set(allowed)
    for forbidden in (outside, set(stop_ids) if early else set(), endings):
        result = [-math.inf if token in forbidden else x for token, x in enumerate(scores)]
        if max(result) > -math.inf:
            scores = result
    return scores


def keep_top_k(scores, k):
    if k <= 0 or k >= len(scores):
        return scores
    last = sorted(scores, reverse=True)[k - 1]
    return [x if x >= last else -math.inf for x in scores]


def keep_top_p(scores, p):
    if p >= 1 or max(scores) == -math.inf:
        return scores
    best = max(scores)
    weights = sorted(((math.exp(x - best), x) for x in scores), reverse=True)
    total, mass = math.fsum(weight for weight, _ in weights), 0.0
    for weight, x in weights:
        mass += weight / total
        last = x
        if mass >= p:
            break
    return [x if x >= last else -math.inf for x in scores]


def keep_min_p(scores, p):
    if p <= 0:
        return scores
    best = max(scores)
    return [x if x >= best + math.log(p) else -math.inf for x in scores]
