"""The acceptance rules on plain arrays, for models of one's own: probabilities in, tokens out.

One round: a draft proposes a chain of tokens and says what it drew them from, the target says what
it would have drawn at each of these places and after the last one, and `speculative_accept` decides
what is kept. The tokens that come out have the target's joint distribution, whatever the draft is:

    proposal = DraftProposal(tokens=[7, 2], probs=q)    # q [2, V], tokens drawn from q
    verified = VerifyResult(probs=p)                    # p [3, V], given context, 7, and 7 2
    decision = speculative_accept(proposal, verified, seed=0, position=len(context) - 1)
    context += decision.tokens

A target that has no distribution after the last drafted token passes p [2, V]; when both drafted
tokens are kept, no token follows them in that round.

`probs` are probabilities after every transform (temperature, top-p, penalties, ...), p's and q's
own. No model is needed or imported here; the rules are those of the library (accept.py). For whole
sequences see `specjax.engine.speculate`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt32

from specjax.config import Strategy
from specjax.decode import shards
from specjax.decode.accept import Acceptance, accept_block, accept_recursive
from specjax.decode.noise import (
    RESIDUAL,
    request_keys,
    request_words,
    round_coins,
    round_noise,
)
from specjax.decode.tree import build_tree

__all__ = [
    "AcceptDecision",
    "DraftProposal",
    "VerifyResult",
    "accept_chains",
    "speculative_accept",
]

RULES = ("block", "recursive", "greedy")
SUM_TOLERANCE = 1e-3


@dataclasses.dataclass(frozen=True, eq=False)
class DraftProposal:
    """A chain of drafted tokens, and what they were drawn from.

    Attributes:
      tokens: [n] ids of the drafted tokens; n may be 0. -1 is no token, and never accepted. Whether
        there is a token at a place may depend on everything before that place, but not on what is
        drawn there.
      probs: [n V] distribution that each token was drawn from (not the target's, and not a softmax
        whose argmax the token is: see `deterministic`). Rows of tokens -1 are unused.

    Raises:
      ValueError: shapes, ids or probabilities are invalid.
    """

    tokens: Int[np.ndarray, " n"]
    probs: Float[np.ndarray, "n V"]

    def __post_init__(self):
        tokens = np.asarray(self.tokens)
        tokens = tokens.astype(np.int32) if tokens.size == 0 else tokens
        if tokens.ndim != 1 or not np.issubdtype(tokens.dtype, np.integer):
            raise ValueError(
                f"tokens must be one row of integer ids [n], got {tokens.dtype} {tokens.shape}; "
                "call once per sequence"
            )
        rows = _table(
            "DraftProposal.probs",
            self.probs,
            f"[n, V] with a row for each of the n = {len(tokens)} drafted tokens",
            len(tokens),
        )
        vocab = rows.shape[1]
        if len(tokens) and not -1 <= tokens.min() <= tokens.max() < vocab:
            raise ValueError(
                f"drafted ids must be in [0, {vocab}), or -1 for no draft, got {tokens.tolist()}; "
                "map a draft's own vocabulary to the target's first"
            )
        real = tokens >= 0
        rows[~real] = 0.0  # an unused row must not be subtracted from p
        _check_distributions("DraftProposal.probs", rows, np.flatnonzero(real))
        impossible = np.flatnonzero(real & (rows[np.arange(len(tokens)), tokens] == 0))
        if len(impossible):
            i = int(impossible[0])
            raise ValueError(
                f"expected tokens drawn from their row of probs, got token {tokens[i]} at place "
                f"{i} to which the row gives no probability; pass the distribution it was drawn "
                "from, after top-k and the like, or use DraftProposal.deterministic"
            )
        object.__setattr__(self, "tokens", tokens.astype(np.int32))
        object.__setattr__(self, "probs", _normalised(rows))

    @classmethod
    def deterministic(cls, tokens: Sequence[int], vocab: int) -> DraftProposal:
        """Makes a proposal of tokens that were not drawn: of a greedy draft, an n-gram, a lookup.

        Their q is one-hot. A softmax of which the token is the argmax would be a wrong q, and the
        result biased.
        """
        tokens = np.asarray(tokens, np.int32)
        return cls(tokens, (tokens[:, None] == np.arange(vocab)).astype(np.float32))


@dataclasses.dataclass(frozen=True, eq=False)
class VerifyResult:
    """The target's distributions along a proposal of n tokens.

    Attributes:
      probs: [n+1 V] the target's distribution after the context and the first 0, 1, .., n drafted
        tokens. The last row is for the bonus token, which follows when every drafted token is
        accepted. [n V], for n > 0, leaves it out: then a round that accepts all n emits them alone.
        Which tokens are kept does not depend on that row.

    Raises:
      ValueError: shapes or probabilities are invalid.
    """

    probs: Float[np.ndarray, "n+1 V"]

    def __post_init__(self):
        rows = _table(
            "VerifyResult.probs",
            self.probs,
            "[n + 1, V] with a row for each drafted token and one after the last, or [n, V] for "
            "n > 0 drafted tokens without the one after the last",
            None,
        )
        _check_distributions("VerifyResult.probs", rows, np.arange(len(rows)))
        object.__setattr__(self, "probs", _normalised(rows))


class AcceptDecision(NamedTuple):
    """The tokens that a round emits.

    Attributes:
      accepted: ids of the drafted tokens that were kept, 0 to n of them.
      next_token: id of the token that follows: drawn from the residual after a rejection, from the
        bonus row where there was no rejection; None where there was no bonus row either.
      all_accepted: whether every drafted token was kept.
    """

    accepted: tuple[int, ...]
    next_token: int | None
    all_accepted: bool

    @property
    def tokens(self) -> tuple[int, ...]:
        return self.accepted if self.next_token is None else (*self.accepted, self.next_token)

    @property
    def total_tokens(self) -> int:
        """Counts the emitted tokens: 1 to n + 1, or 1 to n without the bonus row."""
        return len(self.tokens)


def speculative_accept(
    proposal: DraftProposal,
    verified: VerifyResult,
    seed: int,
    position: int,
    acceptance: str = "block",
) -> AcceptDecision:
    """Decides what one round of one sequence emits. A pure function.

    Args:
      proposal: the drafted tokens, and what they were drawn from.
      verified: the target's distributions along them.
      seed: seed of the sequence; the draft's own randomness must not come from it.
      position: position of the last token of the context. Coins and noise are keyed by (seed,
        position), so that no two rounds of a sequence use the same ones; two rounds at one position
        must not share a seed.
      acceptance: the rule. "block" (Sun et al. 2024) accepts most; "recursive" tests token by
        token, as Leviathan et al. 2023; "greedy" accepts a token that is the argmax of p, and emits
        such tokens only.

    Raises:
      ValueError: proposal and result do not fit together, or the rule is none of these.
    """
    if acceptance not in RULES:
        raise ValueError(
            f"acceptance must be one of {RULES}, got {acceptance!r}; Leviathan's rule is what "
            "'recursive' is on a chain"
        )
    if position < 0:
        raise ValueError(f"position must be that of the last context token, >= 0, got {position}")
    n, vocab = proposal.probs.shape
    shapes = [(n + 1, vocab), (n, vocab)] if n else [(1, vocab)]
    if verified.probs.shape not in shapes:
        without = f", or [n, V] = {(n, vocab)} without that row, where no bonus is wanted"
        raise ValueError(
            f"expected VerifyResult.probs of shape [n + 1, V] = {(n + 1, vocab)} for {n} drafted "
            "tokens, the last row being the target's distribution after all drafts"
            f"{without if n else ''}; got {verified.probs.shape}"
        )
    p = verified.probs
    bonus = len(p) > n
    if not bonus:
        p = np.concatenate([p, p[-1:]])  # any distribution: its token is left out below
    words = request_words(seed, (), 0)[None]
    drafted, q, p = (x[None] for x in (proposal.tokens, proposal.probs, p))
    out = accept_chains(acceptance, words, np.array([position], np.int32), drafted, q, p)
    kept, tokens = int(out.count[0]) - 1, np.asarray(out.tokens[0]).tolist()
    follows = tokens[kept] if bonus or kept < n else None
    return AcceptDecision(tuple(tokens[:kept]), follows, kept == n)


@functools.partial(jax.jit, static_argnums=0)
def accept_chains(
    acceptance: str,
    words: UInt32[Array, "B 5"],
    position: Int[Array, " B"],
    drafted: Int[Array, "B n"],
    q: Float[Array, "B n V"],
    p: Float[Array, "B n+1 V"],
) -> Acceptance:
    """Does what `speculative_accept` does for many sequences at once, jitted, without checks.

    Args:
      acceptance: the rule, as in `speculative_accept`.
      words: words that identify each sequence, see `request_words`.
      position: position of the last token of each context.
      drafted: ids of the drafted tokens; -1: no token.
      q: distribution that each token was drawn from; zero where there is no token.
      p: the target's distributions. The last row decides only the token after n accepted ones.
        Where no such token is wanted, give any distribution there, and drop the token.
    """
    batch, steps = drafted.shape
    keys = request_keys(words)
    noise = round_noise(keys, RESIDUAL, position, np.zeros(1, int), p.shape[-1])[:, 0]
    greedy = jnp.full((batch,), acceptance == "greedy")
    if acceptance == "greedy":
        p = jax.nn.one_hot(shards.argmax(p), p.shape[-1])
    if steps == 0:
        final = shards.argmax(jnp.log(p[:, 0]) + noise)
        first = jnp.zeros((batch, 1), jnp.int32)
        return Acceptance(final[:, None], first, first[:, 0] + 1)
    coins = round_coins(keys, position, np.arange(1, steps + 1))
    tokens = jnp.pad(drafted, ((0, 0), (1, 0)))  # row 0 is the root
    if acceptance == "block":
        return accept_block(tokens, p, q, coins, noise)
    chain = build_tree(Strategy.chain(steps))
    return accept_recursive(chain, tokens, p, q, coins, noise, greedy)


def _table(name: str, probs: Any, expected: str, count: int | None) -> Float[np.ndarray, "n V"]:
    """Returns a float64 copy of `count` rows, which may be changed; None: one row or more."""
    rows = np.array(probs, np.float64)
    fits = rows.ndim == 2 and rows.shape[1] > 0
    if not fits or (len(rows) != count if count is not None else len(rows) == 0):
        raise ValueError(f"{name} must be {expected}, got shape {rows.shape}")
    return rows


def _check_distributions(name: str, rows: Float[np.ndarray, "n V"], which: np.ndarray) -> None:
    for i in which.tolist():
        total = rows[i].sum()
        if not (abs(total - 1) <= SUM_TOLERANCE and rows[i].min() >= 0):
            raise ValueError(
                f"row {i} of {name} must be probabilities that sum to 1 within {SUM_TOLERANCE}, "
                f"got sum {total:.6g}, least {rows[i].min():.6g}; pass a softmax in float32, not "
                "logits"
            )


def _normalised(rows: Float[np.ndarray, "n V"]) -> Float[np.ndarray, "n V"]:
    total = rows.sum(axis=-1, keepdims=True)
    return np.divide(rows, total, out=np.zeros_like(rows), where=total > 0).astype(np.float32)
