"""Step 3 of a round: which drafts are kept, and what is emitted after them.

The rules are pure functions of the drafted tree, both distributions and injected randomness;
`accept` picks the plan's rule and draws its randomness.

`coupled`: walk down from the root; at each node the target's perturbed argmax is emitted, and the
walk goes on while that token is a child. The tokens do not depend on the tree (Daliri et al. 2024).

`greedy` is that walk without noise.

`block`: verification of a whole chain at once (Sun et al. 2024, "Block Verification"): on average
never accepts less than token-wise rejection, exact in distribution, needs sampled drafts and their
q.

`recursive`: rejection among the children of each node of a static tree, see recursive.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from specjax.decode import rng, sampling
from specjax.decode.tree import TreeShape

if TYPE_CHECKING:  # people who bring their own models use the rules without ours
    from specjax.decode.draft import Draft
    from specjax.decode.plan import Plan
    from specjax.decode.state import DecodeState


class Acceptance(NamedTuple):
    """What one round emits, before stop tokens and limits.

    Attributes:
      tokens: [B E] emitted tokens, E = steps + 1; entries past `count` are garbage.
      path: [B E] tree row after which each token was emitted; path[:, 0] is the root.
      count: [B] tokens emitted, 1 + accepted drafts.
    """

    tokens: Int[Array, "B E"]
    path: Int[Array, "B E"]
    count: Int[Array, " B"]


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
    drafted = tokens == jnp.take_along_axis(chosen, parent, axis=1)
    drafted |= jnp.arange(rows) == 0
    reached = (drafted[:, None] | ~shape.visible).all(-1)
    # Siblings hold distinct tokens, so at most one row of each depth is reached.
    depths = jnp.arange(shape.path_rows.shape[-1])
    at_depth = reached[:, None] & (shape.depth[..., None, :] == depths[:, None])
    path = jnp.argmax(at_depth, axis=-1).astype(jnp.int32)
    count = reached.sum(axis=-1, dtype=jnp.int32)
    return Acceptance(jnp.take_along_axis(chosen, path, axis=1), path, count)


def block_thresholds(p: Float[Array, "B E V"], q: Float[Array, "B K V"], drafted: Array):
    """Running weights P_i and thresholds h_i of block verification.

    P_0 = 1; P_i = min(P_{i-1} p(x_i)/q(x_i), 1); S_i = sum over V of (P_i p - q)+ at position i+1;
    h_i = S_i / (S_i + 1 - P_i) for i < K; h_K = P_K. Prefix i is kept if its coin is below h_i.

    Args:
      p: target probabilities at rows 0..K. q: draft probabilities of x_1..x_K.
      drafted: [B K]; a negative id is no draft: its weight is 0 and it is not looked up.

    Returns:
      P [B, K+1] and h [B, K+1], both with entry 0 for the empty prefix (h_0 is not tested).
    """
    steps = drafted.shape[1]
    index = jnp.maximum(drafted, 0)[..., None]
    p_drafted = jnp.take_along_axis(p[:, :-1], index, -1)[..., 0]
    q_drafted = jnp.where(drafted >= 0, jnp.take_along_axis(q, index, -1)[..., 0], 0.0)
    weight = jnp.ones(drafted.shape[0])
    weights, thresholds = [weight], [jnp.ones_like(weight)]
    for i in range(steps):
        # q(x) = 0 cannot be drawn; a zero there means a broken draft, which is rejected.
        ratio = jnp.where(q_drafted[:, i] > 0, p_drafted[:, i] / q_drafted[:, i], 0.0)
        weight = jnp.minimum(weight * ratio, 1.0)
        weights.append(weight)
        if i + 1 < steps:
            surplus = jnp.maximum(weight[:, None] * p[:, i + 1] - q[:, i + 1], 0.0).sum(-1)
            total = surplus + 1.0 - weight
            thresholds.append(jnp.where(total > 0, surplus / total, 1.0))
        else:
            thresholds.append(weight)
    return jnp.stack(weights, 1), jnp.stack(thresholds, 1)


def accept_block(
    tokens: Int[Array, "B T"],
    p: Float[Array, "B T V"],
    q: Float[Array, "B K V"],
    coins: Float[Array, "B K"],
    residual_noise: Float[Array, "B V"],
) -> Acceptance:
    """Block verification of a chain. Row i of the tree is the i-th drafted token.

    Args:
      q: what each drafted token was drawn from; zero where there was no draft (token -1).
      coins: uniform in (0, 1), one per drafted token; all are tested, none is tested twice.
      residual_noise: Gumbel noise for the one token that is not a draft.
    """
    drafted = tokens[:, 1:]
    steps = drafted.shape[1]
    weights, thresholds = block_thresholds(p, q, drafted)
    kept = coins < thresholds[:, 1:]
    accepted = jnp.max(jnp.where(kept, jnp.arange(1, steps + 1), 0), axis=1)
    weight = jnp.take_along_axis(weights, accepted[:, None], 1)
    p_next = jnp.take_along_axis(p, accepted[:, None, None], 1)[:, 0]
    q_padded = jnp.concatenate([q, jnp.zeros_like(q[:, :1])], axis=1)
    q_next = jnp.take_along_axis(q_padded, accepted[:, None, None], 1)[:, 0]
    weight = jnp.where(accepted[:, None] == steps, 1.0, weight)
    residual = jnp.maximum(weight * p_next - q_next, 0.0)
    # Rounding can leave an empty residual where p = q; the target itself is then the limit.
    residual = jnp.where(residual.sum(-1, keepdims=True) > 0, residual, p_next)
    final = jnp.argmax(jnp.log(residual) + residual_noise, axis=-1)
    index = jnp.arange(steps + 1)
    shifted = jnp.concatenate([drafted, drafted[:, :1]], axis=1)
    emitted = jnp.where(index == accepted[:, None], final[:, None], shifted)
    path = jnp.broadcast_to(jnp.asarray(np.arange(steps + 1), jnp.int32), emitted.shape)
    return Acceptance(emitted.astype(jnp.int32), path, accepted.astype(jnp.int32) + 1)


def accept(
    plan: Plan, state: DecodeState, draft: Draft, transformed: Float[Array, "B T V"]
) -> Acceptance:
    """What the round emits, by the plan's rule.

    `coupled` adds the noise of each row's next position, `greedy` nothing; `block` and `recursive`
    draw coins and the noise of their last token anew for every round.

    Args:
      transformed: the target's scores at every row of the drafted tree, after all transforms.
    """
    keys, temperature, root = state.keys, state.options.temperature, state.length - 1
    tokens, shape = draft.tokens, draft.shape
    if plan.mode in ("coupled", "greedy"):
        perturbed = transformed
        if plan.draws_noise:
            noise = rng.ring_at(state.noise, root[:, None] + 1 + shape.depth)
            perturbed = sampling.perturb(transformed, temperature, noise)
        return accept_coupled(tokens, shape, jnp.argmax(perturbed, axis=-1).astype(jnp.int32))
    p = sampling.probabilities(transformed, temperature)
    coins = rng.round_coins(keys, root, np.arange(1, tokens.shape[1]))
    final = rng.round_noise(keys, rng.RESIDUAL, root, np.zeros(1, int), p.shape[-1])[:, 0]
    if plan.mode == "block":
        return accept_block(tokens, p, draft.q, coins, final)
    from specjax.decode.recursive import accept_recursive  # which builds on this module

    greedy = temperature == 0
    return accept_recursive(plan.tree, tokens, p, draft.q, coins, final, greedy)


def __getattr__(name: str):
    """The rules on plain arrays, for people who bring their own models, import from here."""
    from specjax.decode import speculator  # which builds on this module

    if name in speculator.__all__:
        return getattr(speculator, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
