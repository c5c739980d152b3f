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
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from specjax.config import Strategy
from specjax.config.checks import choice
from specjax.decode import shards
from specjax.decode.accept import Acceptance, accept_block, accept_recursive
from specjax.decode.noise import RESIDUAL, request_keys, request_words, round_coins, round_noise
from specjax.decode.tree import build_tree

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
        if tokens.ndim != 1 or (tokens.size and not np.issubdtype(tokens.dtype, np.integer)):
            raise ValueError(
                f"tokens must be one row of integer ids [n], got {tokens.dtype} {tokens.shape}; "
                "call once per sequence"
            )
        tokens = tokens.astype(np.int32)
        rows = _distributions("DraftProposal.probs", self.probs, tokens >= 0)
        vocab = rows.shape[1]
        if len(tokens) and not -1 <= tokens.min() <= tokens.max() < vocab:
            raise ValueError(
                f"drafted ids must be in [0, {vocab}), or -1 for no draft, got {tokens.tolist()}; "
                "map a draft's own vocabulary to the target's first"
            )
        impossible = np.flatnonzero((tokens >= 0) & (rows[np.arange(len(tokens)), tokens] == 0))
        if len(impossible):
            raise ValueError(
                f"the token at place {impossible[0]} has no probability in its row of probs; pass "
                "the distribution that it was drawn from, or use DraftProposal.deterministic"
            )
        object.__setattr__(self, "tokens", tokens)
        object.__setattr__(self, "probs", rows)

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
        object.__setattr__(self, "probs", _distributions("VerifyResult.probs", self.probs))


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
    choice("acceptance", acceptance, RULES)
    (n, vocab), p = proposal.probs.shape, verified.probs
    bonus = len(p) == n + 1
    if p.shape[1] != vocab or not (bonus or len(p) == n > 0):
        raise ValueError(
            f"expected VerifyResult.probs of shape [n + 1, V] = {(n + 1, vocab)} for {n} drafted "
            f"tokens, or [n, V] without a bonus row; got {p.shape}"
        )
    if not bonus:
        p = np.concatenate([p, p[-1:]])  # any distribution: its token is left out below
    words = request_words(seed, (), 0)
    out = _accepted(acceptance, words, np.int32(position), proposal.tokens, proposal.probs, p)
    kept, tokens = int(out.count[0]) - 1, out.tokens[0].tolist()
    follows = tokens[kept] if bonus or kept < n else None
    return AcceptDecision(tuple(tokens[:kept]), follows, kept == n)


@functools.partial(jax.jit, static_argnums=0)
def _accepted(acceptance: str, words, position, drafted, q, p) -> Acceptance:
    """Applies a rule to one sequence, as a batch of one."""
    position, drafted, q, p = (x[None] for x in (position, drafted, q, p))
    keys, steps = request_keys(words[None]), drafted.shape[1]
    noise = round_noise(keys, RESIDUAL, position, np.zeros(1, int), p.shape[-1])[:, 0]
    if acceptance == "greedy":
        p = jax.nn.one_hot(shards.argmax(p), p.shape[-1])
    if steps == 0:
        final = shards.argmax(jnp.log(p[:, 0]) + noise)
        return Acceptance(final[:, None], jnp.zeros((1, 1), jnp.int32), jnp.ones(1, jnp.int32))
    coins = round_coins(keys, position, np.arange(1, steps + 1))
    tokens = jnp.pad(drafted, ((0, 0), (1, 0)))  # row 0 is the root
    if acceptance == "block":
        return accept_block(tokens, p, q, coins, noise)
    chain, greedy = build_tree(Strategy.chain(steps)), jnp.full((1,), acceptance == "greedy")
    return accept_recursive(chain, tokens, p, q, coins, noise, greedy)


def _distributions(name: str, probs, used: np.ndarray | None = None) -> Float[np.ndarray, "n V"]:
    """Returns a float32 copy whose used rows sum to 1, and whose other rows are zero."""
    rows = np.array(probs, np.float64)
    count = len(rows) if used is None and rows.ndim else np.size(used)
    if rows.ndim != 2 or not rows.shape[1] or len(rows) != count:
        tokens = "" if used is None else f" for {count} tokens"
        raise ValueError(f"{name} must be a row over the vocabulary each, got {rows.shape}{tokens}")
    if used is not None:
        rows[~used] = 0.0  # an unused row must not be subtracted from p
    total = rows.sum(axis=-1, keepdims=True)
    wrong = (rows < 0).any(-1) | ~(np.abs(total[:, 0] - 1) <= SUM_TOLERANCE)
    for i in np.flatnonzero(wrong if used is None else wrong & used)[:1]:
        raise ValueError(
            f"row {i} of {name} must be probabilities that sum to 1 within {SUM_TOLERANCE}, got "
            f"sum {total[i, 0]:.6g}, least {rows[i].min():.6g}; pass a softmax, not logits"
        )
    return np.divide(rows, total, out=rows, where=total > 0).astype(np.float32)
