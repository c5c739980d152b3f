"""`recursive`: rejection over a static tree whose siblings were drawn without replacement (RRSw).

The children of a node are tried in the order in which they were drawn. Whatever a rejected child
says about the target is taken out of p, and the child itself out of q, so that the next child
stands before the node as the first one did; what is left of p at the end is what the last draw is
made from. On a chain this is the rule of Leviathan et al. 2023 (arXiv 2211.17192); with several
children it is recursive rejection sampling of Jeon et al. 2024 (arXiv 2402.14160).
"""

from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from specjax.decode import shards
from specjax.decode.tree import Acceptance, Tree


@functools.lru_cache(maxsize=64)
def child_rows(tree: Tree) -> np.ndarray:
    """[T, most children of any row] the child rows of each row in draw order; 0 where none."""
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
    q: Float[Array, "B X V"],
    coins: Float[Array, "B C"],
    residual_noise: Float[Array, "B V"],
    greedy: Bool[Array, " B"],
) -> Acceptance:
    """Walks down from the root, a level at a time; at each node its children are tried in turn.

    Args:
      tree: static: exact only if the shape was fixed before anything was drawn.
      tokens: row 0 the root. A negative id is no draft: it is passed over, and changes nothing.
      p: target probabilities below each row.
      q: draft probabilities below each of the X rows that have children, in row order. A child
        to which q gives no mass was not drawn from q; it is passed over too.
      coins: [B T-1] uniform in (0, 1), that of row r at index r - 1.
      residual_noise: Gumbel noise for the one token that is not a draft.
      greedy: slots whose p is one-hot: a child is accepted iff it is p's argmax, whatever q is.

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
            standing = walking & ~moved & (child > 0)
            heads, left, rest = _try_child(child, standing, tokens, left, rest, coins, greedy)
            node, moved = jnp.where(heads, child, node), moved | heads
        left = jnp.where(moved[:, None], _rows(p, node), left)
        walking = moved
        path.append(node)
    pairs = zip(path[:-1], path[1:], strict=True)
    count = 1 + sum((row > before).astype(jnp.int32) for before, row in pairs)
    final = shards.argmax(jnp.log(left) + residual_noise)
    path = jnp.stack(path, axis=1)
    below = jnp.take_along_axis(tokens, jnp.roll(path, -1, axis=1), axis=1)
    is_last = jnp.arange(path.shape[1]) == count[:, None] - 1
    return Acceptance(jnp.where(is_last, final[:, None], below).astype(jnp.int32), path, count)


def _try_child(child, standing, tokens, left, rest, coins, greedy):
    """One child of one node: is it taken, and what is left of p and q if it is rejected.

    Args:
      child: [B] tree rows. standing: [B] whether the walk stands above them.
      left, rest: [B V] what is left of p and of q.
    """
    token = _entry(tokens, child)
    p_token = _entry(left, jnp.maximum(token, 0))
    q_token = _entry(rest, jnp.maximum(token, 0))
    drawn = standing & (token >= 0)
    # A product instead of p/q, so that nothing is divided by a zero.
    heads = (_entry(coins, child - 1) * q_token < p_token) & (q_token > 0)
    heads = drawn & jnp.where(greedy, token == shards.argmax(left), heads)
    lost = drawn & ~heads & (q_token > 0)
    left = jnp.where(lost[:, None], _normalised(jnp.maximum(left - rest, 0.0), left), left)
    without = jnp.where(jnp.arange(rest.shape[1]) == token[:, None], 0.0, rest)
    return heads, left, jnp.where(lost[:, None], _normalised(without, without), rest)


def _entry(x: Array, index: Int[Array, " B"]) -> Array:
    return jnp.take_along_axis(x, index[:, None], axis=1)[:, 0]


def _rows(x: Float[Array, "B R V"], index: Int[Array, " B"]) -> Float[Array, "B V"]:
    return jnp.take_along_axis(x, index[:, None, None], axis=1)[:, 0]


def _normalised(weights: Float[Array, "B V"], otherwise: Array) -> Float[Array, "B V"]:
    """Weights that sum to one; `otherwise` where there are none, as rounding can leave."""
    total = weights.sum(axis=-1, keepdims=True)
    return jnp.where(total > 0, weights / total, otherwise)
