"""`accept`: which tokens of a drafted tree a round keeps, and which token follows them.

    mode        drafted with          accepted by                      equal to plain decoding
    coupled     the position's noise  the walk, with the same noise    token by token
    greedy      no noise              the walk, without noise          token by token
    block       noise of this round   coins of this round, p and q     in distribution
    recursive   noise of this round   coins of this round, p and q     in distribution

Every rule is a pure function of the drafted tree, the target's scores and randomness that it is
given. p and q are the probabilities of target and draft after all sampling transforms, at
temperature 0 all on the best token. "Token by token" holds for equal target logits; several rows at
once round differently than one (docs/lossless.md).

Why `coupled` gives the tokens of plain decoding: plain decoding emits, at each position, the argmax
of the target's scores plus the noise of that position (`plain_round`). The walk emits the same
argmax of the same scores plus the same noise at every node that it reaches, and it reaches a node
only along emitted tokens. The drafted tree decides only how many positions a round gets through.

Dimensions: B slots, T tree rows, A = steps + 1 tokens that a round can emit at most, V vocabulary;
the others are written as words: `steps` of a chain, `expanded` rows that have children.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from specjax.decode import sampling, shards
from specjax.decode.noise import RESIDUAL, noise_at, round_coins, round_noise
from specjax.decode.tree import Tree, TreeShape
from specjax.indexing import take_along

if TYPE_CHECKING:  # plain_arrays.py uses the rules without importing our models
    from specjax.decode.draft import DraftedTree
    from specjax.decode.state import DecodeState, Plan


class Acceptance(NamedTuple):
    """What a rule keeps of one tree, before stop tokens and limits.

    Attributes:
      tokens: [B A] emitted tokens; entries past `count` are arbitrary.
      path: [B A] tree row after which each token was emitted: path[:, 0] is the root, and
        path[:, i] the row that holds token i - 1; arbitrary past `count`.
      count: [B] number of emitted tokens: the accepted drafted tokens and one more.
    """

    tokens: Int[Array, "B A"]
    path: Int[Array, "B A"]
    count: Int[Array, " B"]


def accept(
    plan: Plan, state: DecodeState, draft: DraftedTree, scores: Float[Array, "B T V"]
) -> Acceptance:
    """Applies the rule of the plan's mode, with the randomness that it needs.

    Args:
      scores: the target's scores at every row of the drafted tree, after all transforms.
    """
    keys, temperature, root = state.keys, state.options.temperature, state.length - 1
    tokens, shape = draft.tokens, draft.shape
    if plan.mode in ("coupled", "greedy"):
        if plan.draws_noise:
            # A row at depth d decides position root + d + 1, with the noise of that position: the
            # draft was ranked with the same noise, and plain decoding would use it too.
            noise = noise_at(state.noise, keys, root, shape.depth)
            scores = sampling.perturb(scores, temperature, noise)
        return accept_coupled(tokens, shape, shards.argmax(scores).astype(jnp.int32))
    p = sampling.probabilities(scores, temperature)
    coins = round_coins(keys, root, np.arange(1, tokens.shape[1]))  # of all rows but the root
    # A round draws one token that is not a draft, wherever it ends: noise of one node will do.
    final = round_noise(keys, RESIDUAL, root, np.zeros(1, int), p.shape[-1])[:, 0]
    if plan.mode == "block":
        return accept_block(tokens, p, draft.q, coins, final)
    return accept_recursive(plan.tree, tokens, p, draft.q, coins, final, temperature == 0)


# --- coupled and greedy: a walk down the tree -----------------------------------------------------


def accept_coupled(
    tokens: Int[Array, "B T"], shape: TreeShape, chosen: Int[Array, "B T"]
) -> Acceptance:
    """Walks from the root along the tokens that the target chooses (Daliri et al. 2024).

    Args:
      tokens: drafted tokens, row 0 the root.
      chosen: the token that the target emits after each row, the argmax of its perturbed scores.
    """
    batch, rows = tokens.shape
    parent = jnp.broadcast_to(shape.parent, (batch, rows))
    # A draft is right iff it is what the target chose after its parent.
    right = tokens == take_along(chosen, parent, axis=1)
    right |= jnp.arange(rows) == 0
    # A row is reached iff it and all its ancestors are right; a row sees itself and its ancestors.
    reached = (right[:, None] | ~shape.visible).all(-1)
    # Siblings hold distinct tokens (no draft is -1, which is never chosen): one row per depth.
    depths = jnp.arange(shape.path_rows.shape[-1])
    at_depth = reached[:, None] & (shape.depth[..., None, :] == depths[:, None])
    path = jnp.argmax(at_depth, axis=-1).astype(jnp.int32)
    count = reached.sum(axis=-1, dtype=jnp.int32)
    # Every token is the target's own choice; the last one, after the deepest row, is the bonus.
    return Acceptance(take_along(chosen, path, axis=1), path, count)


# --- block: a whole chain at once -----------------------------------------------------------------


def block_thresholds(p: Float[Array, "B A V"], q: Float[Array, "B steps V"], drafted: Array):
    """Computes weights P_i and thresholds h_i: prefix i is kept if its coin is below h_i.

    Args:
      p: the target's distributions at rows 0..steps.
      q: distributions that the drafted tokens x_1..x_steps were drawn from.
      drafted: [B steps] drafted tokens x_i; a negative id is no draft: its weight is 0.

    Returns:
      P [B A] and h [B A], both with an entry 0 for the empty prefix (h_0 is not tested).
    """
    steps = drafted.shape[1]
    index = jnp.maximum(drafted, 0)[..., None]
    p_drafted = jnp.take_along_axis(p[:, :-1], index, -1)[..., 0]
    q_drafted = jnp.where(drafted >= 0, jnp.take_along_axis(q, index, -1)[..., 0], 0.0)
    weight = jnp.ones(drafted.shape[0])  # P_0 = 1
    weights, thresholds = [weight], [jnp.ones_like(weight)]
    for i in range(steps):
        # q = 0: no draft, or a broken one. It is never accepted.
        ratio = jnp.where(q_drafted[:, i] > 0, p_drafted[:, i] / q_drafted[:, i], 0.0)
        weight = jnp.minimum(weight * ratio, 1.0)  # P_i = min(P_{i-1} p(x_i) / q(x_i), 1)
        weights.append(weight)
        if i + 1 < steps:
            # S_i = sum over V of (P_i p - q)+ at the next position; h_i = S_i / (S_i + 1 - P_i)
            surplus = jnp.maximum(weight[:, None] * p[:, i + 1] - q[:, i + 1], 0.0).sum(-1)
            total = surplus + 1.0 - weight
            thresholds.append(jnp.where(total > 0, surplus / total, 1.0))
        else:
            thresholds.append(weight)  # of the last: h_i = P_i
    return jnp.stack(weights, 1), jnp.stack(thresholds, 1)


def accept_block(
    tokens: Int[Array, "B T"],
    p: Float[Array, "B T V"],
    q: Float[Array, "B steps V"],
    coins: Float[Array, "B steps"],
    residual_noise: Float[Array, "B V"],
) -> Acceptance:
    """Block verification of a chain (Sun et al. 2024); row i of the tree is draft i.

    On average it accepts at least as much as a test of one token after the other.

    Args:
      tokens: drafted tokens, row 0 the root.
      p: the target's distribution after each row.
      q: distribution that each drafted token was drawn from; zero where there is none (token -1).
      coins: uniform numbers in (0, 1), one per drafted token.
      residual_noise: Gumbel noise for the one token that is not a draft.
    """
    # The target may have no distribution after a draft (its row is NaN). The sample ends there if
    # it comes so far, and how far it comes must not depend on that row: any distribution will do.
    p = jnp.where(jnp.isnan(p[..., :1]), 1 / p.shape[-1], p)
    drafted = tokens[:, 1:]
    steps = drafted.shape[1]
    weights, thresholds = block_thresholds(p, q, drafted)
    kept = coins < thresholds[:, 1:]
    # The longest prefix that was kept counts, also where a shorter one was not.
    accepted = jnp.max(jnp.where(kept, jnp.arange(1, steps + 1), 0), axis=1)
    weight = jnp.take_along_axis(weights, accepted[:, None], 1)
    p_next = jnp.take_along_axis(p, accepted[:, None, None], 1)[:, 0]
    q_padded = jnp.concatenate([q, jnp.zeros_like(q[:, :1])], axis=1)
    q_next = jnp.take_along_axis(q_padded, accepted[:, None, None], 1)[:, 0]
    # After a rejection the token is drawn from (P_i p - q)+, after the whole chain from p.
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


# --- recursive: a static tree, child after child --------------------------------------------------


@functools.lru_cache(maxsize=64)
def child_rows(tree: Tree) -> np.ndarray:
    """Returns the child rows of each row [T most_children] in draw order; 0 where there is none."""
    parent = tree.shape.parent
    below = [np.flatnonzero(parent[1:] == row) + 1 for row in range(tree.rows)]
    table = np.zeros((tree.rows, max(map(len, below))), np.int32)
    for row, children in enumerate(below):
        table[row, : len(children)] = children
    return table


def accept_recursive(
    tree: Tree,
    tokens: Int[Array, "B T"],
    p: Float[Array, "B T V"],
    q: Float[Array, "B expanded V"],
    coins: Float[Array, "B T-1"],
    residual_noise: Float[Array, "B V"],
    greedy: Bool[Array, " B"],
) -> Acceptance:
    """Tests the children of each node in turn, from the root down, a level at a time.

    On a chain this is the rule of Leviathan et al. 2023 (arXiv 2211.17192); with several children,
    drawn without replacement, it is recursive rejection sampling of Jeon et al. 2024 (arXiv
    2402.14160).

    Args:
      tree: a static tree: the rule is exact only if the shape was fixed before anything was drawn.
      tokens: drafted tokens, row 0 the root. A negative id is no draft: it is passed over, and
        changes nothing.
      p: the target's distribution after each row.
      q: distribution that the children of each expanded row were drawn from, in row order. A child
        to which q gives no mass was not drawn from q; it is passed over too.
      coins: uniform numbers in (0, 1), that of row r at index r - 1.
      residual_noise: Gumbel noise for the one token that is not a draft.
      greedy: slots whose p is one-hot: a child is accepted iff it is p's argmax, whatever q is. A
        second child may be, and q, one-hot as well, holds the first alone.

    Raises:
      ValueError: the tree is dynamic.
    """
    if not isinstance(tree, Tree):
        raise ValueError(
            "recursive acceptance is exact only for trees whose shape is fixed before sampling, "
            "got a dynamic tree; use a static one such as '4x2x1', or acceptance 'coupled'"
        )
    table = jnp.asarray(child_rows(tree))
    q_index = np.zeros(tree.rows, np.int32)
    q_index[tree.expanded_rows] = np.arange(len(tree.expanded_rows))
    node = jnp.zeros(tokens.shape[:1], jnp.int32)
    left, walking, path = p[:, 0], jnp.ones_like(greedy), [node]
    for expansion in tree.expansions:
        rest, children = _rows(q, jnp.asarray(q_index)[node]), table[node]
        moved = jnp.zeros_like(walking)
        for nth in range(expansion.max_children):
            child = children[:, nth]
            tested = walking & ~moved & (child > 0)
            accepted, left, rest = _try_child(child, tested, tokens, left, rest, coins, greedy)
            node, moved = jnp.where(accepted, child, node), moved | accepted
        # Below an accepted child the test begins anew; where none was, what is left of p stays.
        left = jnp.where(moved[:, None], _rows(p, node), left)
        walking = moved
        path.append(node)
    pairs = zip(path[:-1], path[1:], strict=True)
    count = 1 + sum((row > before).astype(jnp.int32) for before, row in pairs)
    # The last token is drawn from p after the deepest row, or from what rejections left of p.
    final = shards.argmax(jnp.log(left) + residual_noise)
    path = jnp.stack(path, axis=1)
    below = jnp.take_along_axis(tokens, jnp.roll(path, -1, axis=1), axis=1)
    is_last = jnp.arange(path.shape[1]) == count[:, None] - 1
    return Acceptance(jnp.where(is_last, final[:, None], below).astype(jnp.int32), path, count)


def _try_child(child, tested, tokens, left, rest, coins, greedy):
    """Tests one child of one node; returns whether it is accepted, and what is left of p and q.

    Args:
      child: [B] tree row of the child.
      tested: [B] whether the walk is at the child's parent and has accepted no child of it yet.
      left: [B V] what earlier rejections have left of p.
      rest: [B V] what earlier rejections have left of q.
    """
    token = _entry(tokens, child)
    p_token = _entry(left, jnp.maximum(token, 0))
    q_token = _entry(rest, jnp.maximum(token, 0))
    drawn = tested & (token >= 0)
    # Accept with probability min(1, p / q): coin < p / q, as a product, for q may be zero.
    accepted = (_entry(coins, child - 1) * q_token < p_token) & (q_token > 0)
    accepted = drawn & jnp.where(greedy, token == shards.argmax(left), accepted)
    rejected = drawn & ~accepted & (q_token > 0)
    # After a rejection p becomes (p - q)+, normalised: what the draft has not stood for yet.
    left = jnp.where(rejected[:, None], _normalised(jnp.maximum(left - rest, 0.0), left), left)
    # The next sibling was drawn from q without the token that was rejected, normalised.
    without = jnp.where(jnp.arange(rest.shape[1]) == token[:, None], 0.0, rest)
    return accepted, left, jnp.where(rejected[:, None], _normalised(without, without), rest)


def _entry(x: Array, index: Int[Array, " B"]) -> Array:
    return jnp.take_along_axis(x, index[:, None], axis=1)[:, 0]


def _rows(x: Float[Array, "B R V"], index: Int[Array, " B"]) -> Float[Array, "B V"]:
    return jnp.take_along_axis(x, index[:, None, None], axis=1)[:, 0]


def _normalised(weights: Float[Array, "B V"], otherwise: Array) -> Float[Array, "B V"]:
    """Normalises weights to sum to one; `otherwise` where all are 0, as rounding can leave them."""
    total = weights.sum(axis=-1, keepdims=True)
    return jnp.where(total > 0, weights / total, otherwise)
