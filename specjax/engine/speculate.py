"""The host loop for people who bring their own models: propose, verify, accept, commit, again.

One sequence at a time. What a round keeps is decided by `specjax.decode.plain_arrays`, and the
tokens have the target's joint distribution, whatever the draft is:

    speculate(draft, target, context, n=4, seed=0, max_tokens=64).tokens

For the library's own models behind this protocol see source_speculator.py; generation in bulk is
`specjax.LLM`'s.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple, Protocol

from specjax.decode.plain_arrays import (
    AcceptDecision,
    DraftProposal,
    VerifyResult,
    speculative_accept,
)


class Speculator(Protocol):
    """A model. To draft it needs `propose`, to verify it needs `verify`; `commit` is optional."""

    def propose(self, context: Sequence[int], n: int) -> DraftProposal:
        """At most `n` tokens to follow the context; their randomness must be the draft's own."""

    def verify(self, context: Sequence[int], tokens: Sequence[int]) -> VerifyResult:
        """The target's distributions at each drafted token and, for a bonus token, after the last.

        Rows after a token of -1 decide nothing; they must be distributions all the same. Without
        drafted tokens there is one row, the target's distribution after the context.
        """

    def commit(self, context: Sequence[int], tokens: Sequence[int]) -> None:
        """Is told what was emitted after the context; models with a state advance it here.

        Does nothing unless a model has its own; a model without a state needs no such method.
        """
        return None


class Speculation(NamedTuple):
    """Tokens emitted after the context, and the decision of each round (the last may be cut)."""

    tokens: tuple[int, ...]
    decisions: tuple[AcceptDecision, ...]

    @property
    def accept_length(self) -> float:
        """Tokens per round, bonus tokens included; 0 without a round."""
        return sum(d.total_tokens for d in self.decisions) / max(len(self.decisions), 1)


def speculate(
    draft: Speculator,
    target: Speculator,
    context: Sequence[int],
    n: int,
    seed: int,
    max_tokens: int,
    acceptance: str = "block",
    stop_ids: Collection[int] = (),
) -> Speculation:
    """Rounds of propose, verify, accept and commit, until `max_tokens` or a stop token.

    A target that gives no distribution after the last draft gets no bonus token: a round that
    accepts all n drafts emits n tokens.

    Args:
      context: at least one token. n: drafted tokens per round; the draft may propose fewer.
      stop_ids: generation ends after one of these, which is emitted.

    Raises:
      ValueError: an empty context, or what `speculative_accept` refuses.
    """
    if not len(context):
        raise ValueError("expected a context of at least one token, got none; pass the BOS token")
    context, decisions = list(context), []
    start = len(context)
    while len(context) - start < max_tokens:
        proposal = draft.propose(tuple(context), n)
        verified = target.verify(tuple(context), tuple(proposal.tokens.tolist()))
        decision = speculative_accept(proposal, verified, seed, len(context) - 1, acceptance)
        emitted = decision.tokens[: max_tokens - (len(context) - start)]
        stops = [i for i, token in enumerate(emitted) if token in stop_ids]
        emitted = emitted[: stops[0] + 1] if stops else emitted
        for model in (draft, target):
            commit = getattr(model, "commit", None)
            if commit is not None:
                commit(tuple(context), emitted)
        context += emitted
        decisions.append(decision)
        if stops:
            break
    return Speculation(tuple(context[start:]), tuple(decisions))
