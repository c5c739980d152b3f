"""`block`: verification of a whole chain at once (Sun et al. 2024, "Block Verification").

On average it never accepts less than token-wise rejection, and it is exact in distribution. It
needs drafts that were sampled, and the distributions that they were sampled from.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from specjax.decode import shards
from specjax.decode.tree import Acceptance


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
    # The target may have no distribution after a draft (its row is NaN). The sample ends there if
    # it comes so far, and how far it comes must not depend on that row: any distribution will do.
    p = jnp.where(jnp.isnan(p[..., :1]), 1 / p.shape[-1], p)
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
    final = shards.argmax(jnp.log(residual) + residual_noise)
    index = jnp.arange(steps + 1)
    shifted = jnp.concatenate([drafted, drafted[:, :1]], axis=1)
    emitted = jnp.where(index == accepted[:, None], final[:, None], shifted)
    path = jnp.broadcast_to(jnp.asarray(np.arange(steps + 1), jnp.int32), emitted.shape)
    return Acceptance(emitted.astype(jnp.int32), path, accepted.astype(jnp.int32) + 1)
