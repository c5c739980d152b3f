"""Requests that ask for everything: prompts and sampling options drawn at random."""

from __future__ import annotations

import numpy as np

from specjax.config import ModelConfig, SamplingParams

OPTION_SHARE = 0.3  # of the requests, each option


def random_requests(
    rng: np.random.Generator,
    cfg: ModelConfig,
    count: int,
    max_tokens: int = 48,
    longest_prompt: int = 12,
    greedy: bool = False,
) -> tuple[list[list[int]], list[SamplingParams]]:
    """Random prompts, each with random options.

    Args:
      greedy: temperature 0 for all; else greedy and sampled requests are mixed.

    Returns:
      prompts of 1 to `longest_prompt` tokens, and their parameters.
    """
    prompts, params = [], []
    for _ in range(count):
        length = int(rng.integers(1, longest_prompt + 1))
        prompts.append(rng.integers(0, cfg.vocab_size, length).tolist())
        params.append(random_params(rng, cfg, max_tokens, greedy))
    return prompts, params


def random_params(
    rng: np.random.Generator, cfg: ModelConfig, max_tokens: int, greedy: bool = False
) -> SamplingParams:
    """Each option with a probability of its own, so that most requests combine several."""
    vocab = cfg.vocab_size
    options = {
        "top_k": lambda: int(rng.integers(1, min(vocab, 40) + 1)),
        "top_p": lambda: float(rng.uniform(0.3, 1.0)),
        "min_p": lambda: float(rng.uniform(0.0, 0.3)),
        "repetition_penalty": lambda: float(rng.uniform(0.8, 1.8)),
        "presence_penalty": lambda: float(rng.uniform(-1.0, 2.0)),
        "frequency_penalty": lambda: float(rng.uniform(-0.5, 1.5)),
        "logit_bias": lambda: _bias(rng, vocab),
        "allowed_token_ids": lambda: _some_tokens(rng, vocab, max(4, vocab // 2)),
        "bad_words": lambda: _bad_words(rng, vocab),
        "min_tokens": lambda: int(rng.integers(1, max_tokens + 1)),
        "stop_token_ids": lambda: _some_tokens(rng, vocab, 2),
    }
    chosen = {name: draw() for name, draw in options.items() if rng.random() < OPTION_SHARE}
    return SamplingParams(
        temperature=0.0 if greedy else float(rng.choice([0.0, 0.6, 1.0, 1.0, 1.4])),
        max_tokens=max_tokens,
        seed=int(rng.integers(2**62)),
        n=int(rng.integers(1, 3)),
        ignore_eos=bool(rng.random() < 0.7),
        **chosen,
    )


def _some_tokens(rng: np.random.Generator, vocab: int, count: int) -> tuple[int, ...]:
    return tuple(int(t) for t in rng.choice(vocab, min(count, vocab - 1), replace=False))


def _bias(rng: np.random.Generator, vocab: int) -> dict[int, float]:
    return {t: float(rng.normal(0.0, 3.0)) for t in _some_tokens(rng, vocab, 8)}


def _bad_words(rng: np.random.Generator, vocab: int) -> tuple[tuple[int, ...], ...]:
    """One word of one token, and several of two that a small vocabulary will really meet."""
    single, *rest = _some_tokens(rng, vocab, min(9, vocab))
    pairs = zip(rest[::2], rest[1::2], strict=False)
    return ((single,), *((a, b) for a, b in pairs))
