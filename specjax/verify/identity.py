"""Checks that speculative tokens equal those of plain decoding, for random requests."""

from __future__ import annotations

import numpy as np

from specjax.config import ModelConfig, SamplingParams
from specjax.engine.llm import LLM
from specjax.verify.verdict import FAILED, PASSED, Check

MOST_DETAILS = 5  # largest number of differences that are printed
OPTION_SHARE = 0.3  # share of the requests that have an option, for each option


def identity_check(
    llm: LLM, requests: int, max_tokens: int, seed: int, progress: bool = False
) -> Check:
    """Decodes random requests with every option, with and without speculation.

    In `block` and `recursive` mode sampled tokens equal those of plain decoding only in
    distribution, so all requests are greedy.
    """
    greedy = llm.spec.acceptance != "coupled"
    rng = np.random.default_rng(seed)
    longest = max(1, min(12, llm.max_len - max_tokens))
    prompts, params = random_requests(rng, llm.cfg, requests, max_tokens, longest, greedy)
    differences = llm.compare_with_plain(prompts, params, progress)
    unexplained = [d for d in differences if not d.explained]
    totals = llm.totals
    figures = {
        "requests": requests,
        "tokens": totals.tokens,
        "accepted": totals.accepted,
        "accept_length": totals.accept_length,
        "explained": len(differences) - len(unexplained),
        "unexplained": len(unexplained),
    }
    details = [str(d) for d in unexplained[:MOST_DETAILS]]
    if len(unexplained) > MOST_DETAILS:
        details.append(f"and {len(unexplained) - MOST_DETAILS} more")
    summary = (
        f"{totals.tokens} tokens of {sum(p.n for p in params)} samples, accept length "
        f"{totals.accept_length:.2f}: {figures['explained']} differences that floating point "
        f"explains, {len(unexplained)} that it does not"
    )
    name = "identity with plain decoding" + (", greedy requests" if greedy else "")
    return Check(name, FAILED if unexplained else PASSED, summary, tuple(details), figures)


def random_requests(
    rng: np.random.Generator,
    cfg: ModelConfig,
    count: int,
    max_tokens: int = 48,
    longest_prompt: int = 12,
    greedy: bool = False,
) -> tuple[list[list[int]], list[SamplingParams]]:
    """Draws prompts, each with random sampling options.

    Args:
      greedy: True: all requests have temperature 0; False: greedy and sampled ones are mixed.

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
    """Draws sampling options; most sets combine several."""
    vocab = cfg.vocab_size
    options = {
        "top_k": lambda: int(rng.integers(1, min(vocab, 40) + 1)),
        "top_p": lambda: float(rng.uniform(0.3, 1.0)),
        "min_p": lambda: float(rng.uniform(0.0, 0.3)),
        "repetition_penalty": lambda: float(rng.uniform(0.8, 1.8)),
        "presence_penalty": lambda: float(rng.uniform(-1.0, 2.0)),
        "frequency_penalty": lambda: float(rng.uniform(-0.5, 1.5)),
        "logit_bias": lambda: {t: float(rng.normal(0.0, 3.0)) for t in _some_tokens(rng, vocab, 8)},
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


def _bad_words(rng: np.random.Generator, vocab: int) -> tuple[tuple[int, ...], ...]:
    """Draws one word of one token, and several of two, which a small vocabulary does generate."""
    single, *rest = _some_tokens(rng, vocab, min(9, vocab))
    pairs = zip(rest[::2], rest[1::2], strict=False)
    return ((single,), *((a, b) for a, b in pairs))
