"""Step 1 of a round: the head extends its cache over what was accepted, then proposes a tree.

The extension and the first draft step are one pass: its last valid row is the prediction at the
root. Each further step runs the head over one level of the tree. In `coupled` mode candidates are
ranked with the very noise that will decide the position, which makes the draft guess the sample and
not merely the distribution. In `block` mode one token is sampled, with noise of its own.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from specjax.cache import KVCache, commit_rows
from specjax.decode import rng, sampling
from specjax.decode.state import DecodeState, DraftState, take_positions
from specjax.decode.tree import Tree, chain_bits, pack_bits
from specjax.draft.mtp import MTPHead
from specjax.models.transformer import Transformer, lm_logits


class Draft(NamedTuple):
    """A drafted tree.

    Attributes:
      tokens: [B T], row 0 the root.
      logits: [B K V] the draft's logits along a chain (`block` needs its q), else None.
      state: the head's memory with the accepted rows committed.
    """

    tokens: Int[Array, "B T"]
    logits: Float[Array, "B K V"] | None
    state: DraftState


class _Frontier(NamedTuple):
    """Where drafting starts: the head's last committed row of each slot."""

    normed: Float[Array, "B 1 D"]
    recycled: Float[Array, "B 1 D"]
    slot: Int[Array, " B"]
    cache: KVCache


def extend(model: Transformer, head: MTPHead, state: DecodeState) -> _Frontier:
    """Runs every module over the window of pending rows and commits their keys and values."""
    modules, window = len(head.blocks), state.draft.hidden.shape[1]
    lag = modules - 1
    first = state.length - 1 - state.draft.pending - lag
    slot = jnp.maximum(first, 0)
    hidden, rows, frontier = state.draft.hidden, [], None
    last = (lag + state.draft.pending - 1)[:, None, None]
    for index in range(modules):
        positions = first[:, None] + jnp.arange(window)
        embedded = model.embed_tokens(take_positions(state.tokens, first + 1 + index, window))
        normed, hidden, kv = head.decode(
            index,
            hidden,
            embedded,
            positions + index,
            state.draft.cache.layer(index),
            None,
            slot,
            chain_bits(window),
        )
        rows.append(kv)
        if index == 0:
            frontier = [jnp.take_along_axis(x, last, axis=1) for x in (normed, hidden)]
    new = KVCache(tuple(k for k, _ in rows), tuple(v for _, v in rows))
    cache = commit_rows(state.draft.cache, new, slot)
    return _Frontier(*frontier, state.length - 2, cache)


def top_candidates(scores: Float[Array, "B R V"], count: int) -> Int[Array, "B R count"]:
    """Ids of the `count` best scores, ties to the lowest id."""
    if count > 8:
        return jax.lax.top_k(scores, count)[1]
    picks = []  # a few argmaxes: XLA's CPU top_k sorts the whole vocabulary
    for _ in range(count):
        best = jnp.argmax(scores, axis=-1)
        picks.append(best)
        scores = jnp.where(jnp.arange(scores.shape[-1]) == best[..., None], -jnp.inf, scores)
    return jnp.stack(picks, axis=-1)


def _candidates(mode, logits, state, noise, root, step, count):
    """Token ids [B R count] proposed below each of the R rows of one level."""
    if mode == "coupled":
        scores = sampling.perturbed(logits, state.temperature, noise[:, step, None])
        return top_candidates(scores, count)
    private = rng.round_noise(state.keys, rng.DRAFT, root, step, logits.shape[-1])
    scores = sampling.perturbed(logits, state.temperature, private[:, None])
    return jnp.argmax(scores, axis=-1)[..., None]


def draft_tree(
    model: Transformer, head: MTPHead, tree: Tree, mode: str, state: DecodeState, noise: Array
) -> Draft:
    """Fills the tree level by level.

    Args:
      noise: [B E V] target noise of the positions after the root (`coupled`).
    """
    batch = state.length.shape[0]
    root = state.length - 1
    root_token = take_positions(state.tokens, root, 1)
    frontier = extend(model, head, state)
    tokens = jnp.zeros((batch, tree.rows), jnp.int32).at[:, 0].set(root_token[:, 0])
    weight = model.head_weight()
    visible, modules = tree.visible(), len(head.blocks)
    normed, recycled = frontier.normed, frontier.recycled
    scratch, scratch_rows, kept_logits = None, [], []
    for step, level in enumerate(tree.expansions):
        if step:
            index = min(step, modules - 1)
            if step == index:
                scratch, scratch_rows = None, []
            scratch_rows += list(level.rows)
            bits = pack_bits(visible[np.ix_(level.rows, scratch_rows)])
            positions = jnp.broadcast_to(
                (frontier.slot + step)[:, None], (batch, len(level.rows))
            )
            # Module s > 0 has no base row past slot - s: those rows need tokens not yet known.
            prefix = frontier.slot + 1 if index == 0 else frontier.slot - (index - 1)
            normed, recycled, scratch = head.decode(
                index,
                recycled,
                model.embed_tokens(tokens[:, level.rows]),
                positions,
                frontier.cache.layer(index),
                scratch,
                jnp.maximum(prefix, 0),
                bits,
            )
        logits = sampling.sanitise(lm_logits(normed, weight))
        kept_logits.append(logits[:, 0])
        picks = _candidates(mode, logits, state, noise, root, step, level.max_children)
        start, stop = level.children
        children = picks[:, level.parents, level.ranks].astype(jnp.int32)
        tokens = jax.lax.dynamic_update_slice_in_dim(tokens, children, start, axis=1)
        if step + 1 < tree.steps:  # the rows to expand next inherit their parents' output
            rows = tree.expansions[step + 1].rows - start
            recycled = recycled[:, level.parents[rows]]
    q_logits = jnp.stack(kept_logits, axis=1) if mode == "block" else None
    return Draft(tokens, q_logits, state.draft._replace(cache=frontier.cache))
