"""Speculative decoding of one sequence over models of your own: propose, verify, accept, commit.

    speculate(draft, target, context, n=4, seed=0, max_tokens=64).tokens

`draft` and `target` are any objects with the methods of `Speculator`. The tokens have the target's
joint distribution, whatever the draft proposes: `specjax.decode.plain_arrays.speculative_accept`
decides which drafted tokens are kept. It runs one sequence at a time, from the host; to generate
many with a model of this library, use `specjax.LLM`.
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
    """A model of your own: a draft has `propose`, a target has `verify`; `commit` is optional."""

    def propose(self, context: Sequence[int], n: int) -> DraftProposal:
        """Drafts at most `n` tokens to follow the context, with randomness of its own."""

    def verify(self, context: Sequence[int], tokens: Sequence[int]) -> VerifyResult:
        """Gives the target's distribution at each drafted token and, for a bonus, after the last.

        Without drafted tokens there is one row, the distribution after the context. Rows after a
        token of -1 are not used, but must be distributions all the same.
        """

    def commit(self, context: Sequence[int], tokens: Sequence[int]) -> None:
        """Updates the model's state with the tokens emitted after the context."""


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
    """Runs rounds of propose, verify, accept and commit, until `max_tokens` or a stop token.

    If the target gives no distribution after the last draft there is no bonus token: a round that
    accepts all n drafts emits n tokens.

    Args:
      draft: the model that proposes.
      target: the model that verifies.
      context: token ids, at least one.
      n: number of drafted tokens per round; the draft may propose fewer.
      seed: seed of the random numbers by which tokens are accepted.
      max_tokens: number of tokens to generate.
      acceptance: acceptance mode, see `speculative_accept`.
      stop_ids: tokens that end the generation; they are emitted.

    Raises:
      ValueError: the context is empty, or `speculative_accept` refuses the arrays.
    """
    if not len(context):
        raise ValueError("expected a context of at least one token, got none; pass the BOS token")
    known, decisions, end, stopped = tuple(context), [], len(context) + max_tokens, False
    while len(known) < end and not stopped:
        proposal = draft.propose(known, n)
        verified = target.verify(known, tuple(proposal.tokens.tolist()))
        decision = speculative_accept(proposal, verified, seed, len(known) - 1, acceptance)
        emitted = decision.tokens[: end - len(known)]
        stops = [i for i, token in enumerate(emitted, 1) if token in stop_ids]
        emitted, stopped = emitted[: stops[0] if stops else None], bool(stops)
        for model in (draft, target):
            if hasattr(model, "commit"):
                model.commit(known, emitted)
        known += emitted
        decisions.append(decision)
    return Speculation(known[len(context) :], tuple(decisions))
