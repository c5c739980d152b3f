"""Step 3 of a round: which drafts are kept, and what is emitted after them.

The rules are pure functions: what they need of the drafted tree, of both distributions and of
randomness is given to them. `accept` picks the plan's rule and draws its randomness.

`coupled`: walk down from the root; at each node the target's perturbed argmax is emitted, and the
walk goes on while that token is a child. The tokens do not depend on the tree (Daliri et al. 2024).

`greedy` is that walk without noise.

`block` (block.py): a whole chain x_1 .. x_K at once (Sun et al. 2024). The prefix of i drafts has
the weight P_i = min(P_{i-1} p(x_i) / q(x_i), 1), P_0 = 1; with S_i = sum over V of (P_i p - q)+ at
the next position it is kept with probability S_i / (S_i + 1 - P_i), the whole chain with P_K. The
longest prefix that was kept counts, and the token after it is drawn from (P_i p - q)+, normalised,
or from p where all of the chain was kept.

`recursive` (recursive.py): at each node of a static tree its children are tried in the order in
which they were drawn, without replacement, from q. Child x is taken with probability min(1, p(x) /
q(x)); if it is not, p becomes (p - q)+ and q loses x, both normalised, before the next child is
tried. Where no child is left, the token is drawn from what p has become. Only draws from q in a
known order will do, so dynamic trees are refused (plan.py).

p and q are probabilities after all transforms, at temperature 0 all on the best token. A draft
with q = 0 (there was none) is never accepted; residuals that rounding leaves empty are replaced by
what they were made from.

For people who bring their own models, these two are here on plain arrays as well
(`speculative_accept`), see plain_arrays.py.

What a rule returns (`tree.Acceptance`): count, 1 + accepted drafts; the tokens emitted, of which
the first `count` mean something; and path[i], the tree row that decided token i: path[0] is the
root, path[i] the row that holds token i - 1; past `count` it is any row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from specjax.decode import rng, sampling, shards
from specjax.decode.block import accept_block
from specjax.decode.plain_arrays import (
    AcceptDecision,
    DraftProposal,
    VerifyResult,
    speculative_accept,
)
from specjax.decode.recursive import accept_recursive
from specjax.decode.tree import Acceptance, TreeShape
from specjax.indexing import take_along

if TYPE_CHECKING:  # people who bring their own models use the rules without ours
    from specjax.decode.draft import DraftedTree
    from specjax.decode.plan import Plan
    from specjax.decode.state import DecodeState

__all__ = [
    "AcceptDecision",
    "DraftProposal",
    "VerifyResult",
    "accept",
    "accept_coupled",
    "speculative_accept",
]


def accept_coupled(
    tokens: Int[Array, "B T"], shape: TreeShape, chosen: Int[Array, "B T"]
) -> Acceptance:
    """The walk, for any tree: a row is reached if it and its ancestors are what was chosen.

    Args:
      tokens: drafted tokens, row 0 the root.
      chosen: at each row the token that the target picks next, argmax of its perturbed logits.
    """
    batch, rows = tokens.shape
    parent = jnp.broadcast_to(shape.parent, (batch, rows))
    drafted = tokens == take_along(chosen, parent, axis=1)
    drafted |= jnp.arange(rows) == 0
    reached = (drafted[:, None] | ~shape.visible).all(-1)
    # Siblings hold distinct tokens (those without a draft hold -1, which is never chosen), so at
    # most one row of each depth is reached. A row sees itself and its ancestors.
    depths = jnp.arange(shape.path_rows.shape[-1])
    at_depth = reached[:, None] & (shape.depth[..., None, :] == depths[:, None])
    path = jnp.argmax(at_depth, axis=-1).astype(jnp.int32)
    count = reached.sum(axis=-1, dtype=jnp.int32)
    return Acceptance(take_along(chosen, path, axis=1), path, count)


def accept(
    plan: Plan, state: DecodeState, draft: DraftedTree, transformed: Float[Array, "B T V"]
) -> Acceptance:
    """What the round emits, by the plan's rule.

    `coupled` adds the noise of each row's next position, `greedy` nothing; `block` and `recursive`
    draw coins and the noise of their last token anew for every round.

    Args:
      transformed: the target's scores at every row of the drafted tree, after all transforms.
    """
    keys, temperature, root = state.keys, state.options.temperature, state.length - 1
    tokens, shape = draft.tokens, draft.shape
    drafted = np.arange(1, tokens.shape[1])  # all rows but the root
    if plan.mode in ("coupled", "greedy"):
        perturbed = transformed
        if plan.draws_noise:
            noise = rng.ring_at(state.noise, root[:, None] + 1 + shape.depth)
            perturbed = sampling.perturb(transformed, temperature, noise)
        return accept_coupled(tokens, shape, shards.argmax(perturbed).astype(jnp.int32))
    p = sampling.probabilities(transformed, temperature)
    coins = rng.round_coins(keys, root, drafted)
    # A round draws one token that is not a draft, wherever its walk ends: one key does, node 0's.
    once = np.zeros(1, int)
    final = rng.round_noise(keys, rng.RESIDUAL, root, once, p.shape[-1])[:, 0]
    if plan.mode == "block":
        return accept_block(tokens, p, draft.q, coins, final)
    greedy = temperature == 0  # q holds one token then; a further child may be the argmax as well
    return accept_recursive(plan.tree, tokens, p, draft.q, coins, final, greedy)
