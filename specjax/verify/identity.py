"""Are the speculative tokens plain decoding's? Or else, does floating point explain it?"""

from __future__ import annotations

import numpy as np

from specjax.engine.llm import LLM
from specjax.verify.requests import random_requests
from specjax.verify.verdict import FAILED, PASSED, Check, Drafts

MOST_DETAILS = 5


def identity_check(llm: LLM, requests: int, max_tokens: int, seed: int) -> Check:
    """Random requests with every option, decoded with and without speculation.

    In `block` and `recursive` mode sampled tokens equal plain decoding's in distribution only;
    there all requests are greedy.
    """
    greedy = llm.spec.acceptance != "coupled"
    rng = np.random.default_rng(seed)
    longest = max(1, min(12, llm.max_len - max_tokens))
    prompts, params = random_requests(rng, llm.cfg, requests, max_tokens, longest, greedy)
    found = llm.compare_with_plain(prompts, params)
    unexplained = [d for d in found if not d.explained]
    totals = llm.totals
    figures = {
        "requests": requests,
        "tokens": totals.tokens,
        **Drafts(totals.accepted, totals.rounds).figures(),
        "explained": len(found) - len(unexplained),
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
