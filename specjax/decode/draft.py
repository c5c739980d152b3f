"""Step 1 of a round: the draft source takes in what was accepted, then proposes a tree.

The source gives logits below each row that is expanded: `begin` below the root, then one `step`
for each further level, steps - 1 of them. They pass through the target's own sampling transforms,
noise is added where the mode has any, and the best tokens become the row's children
(`candidates.py`).

Static trees are filled depth by depth. Dynamic trees (EAGLE-2, arXiv 2406.16858) expand the `topk`
best nodes of each depth into `topk` children each, and keep the best rows of all depths. A node's
score is the sum of its path's gains, which are never positive. Without noise a gain is log q, the
draft's log-probability after all transforms. In `coupled` mode the noise of the position, which the
target will use as well, says more: there a gain is the log-softmax over the vocabulary of (log q +
noise) / tau, and `SpecConfig.tau` says how far the draft's log q can be trusted. Scores never rise
along a path and ties go to the earlier depth, so whoever is kept has its parent kept. Such a tree
was not drawn from q, so it comes without one, and only `coupled` and `greedy` take it.

The source's *work* is what it hands from step to step of one round, its *memory* (`state.draft`)
what it keeps from round to round: `commit` gives it the states along the accepted path and their
number, and it takes the tokens from the history. Rows that are expanded below the root are numbered
in the order in which they are expanded: `total` of them in all, `offset` before this level.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from specjax.decode.candidates import Candidates, candidates
from specjax.decode.history import Context
from specjax.decode.part import GrownPart, Part
from specjax.decode.plan import Plan
from specjax.decode.state import DecodeState, take_positions
from specjax.decode.tree import Tree, TreeShape, grown_shape, pack_bits, pack_words
from specjax.interfaces import Level
from specjax.models.transformer import Transformer


class DraftedTree(NamedTuple):
    """A drafted tree.

    Attributes:
      tokens: [B T], row 0 the root; -1 where there is no draft.
      shape: who descends from whom.
      paths: [B T P] tokens from below the root down to the row itself, then -1; P = steps.
      q: [B X V] what the children of the X expanded rows, the root first, were drawn from (`block`
        and `recursive`).
      logprobs: [B T] log q of each drafted token, meaningless at -1 (telemetry).
      work: the source's, for its `commit`.
    """

    tokens: Int[Array, "B T"]
    shape: TreeShape
    paths: Int[Array, "B T P"]
    q: Float[Array, "B X V"] | None
    logprobs: Float[Array, "B T"] | None
    work: Any


def draft_tree(
    model: Transformer,
    draft_params,
    plan: Plan,
    state: DecodeState,
    context: Context,
    part: Part | None = None,
) -> DraftedTree:
    """Proposes a tree below the root of every slot.

    Args:
      draft_params: of the draft source.
      context: what the transforms need of the slots' history.
      part: of the tree that is drafted; None: all of it. Not with rules that need q.
    """
    if plan.tree.is_dynamic:
        draft = _grow_dynamic(model, draft_params, plan, state, context, part)
        inside = True
    else:
        draft = _grow_static(model, draft_params, plan, state, context)
        inside = True if part is None else part.drafted
    # Who opted out has no drafts: tokens of -1, and q = 0, which no rule accepts. Its paths may
    # stay as they are, for they only matter below accepted drafts.
    speculates = state.options.speculate[:, None]
    drafting = (speculates & inside) | (np.arange(plan.tree.rows) == 0)
    tokens = jnp.where(drafting, draft.tokens, -1)
    q = None if draft.q is None else jnp.where(speculates[..., None], draft.q, 0.0)
    return draft._replace(tokens=tokens, q=q)


def _root_tokens(state: DecodeState) -> Int[Array, "B 1"]:
    return take_positions(state.tokens, state.length - 1, 1)


def _grow_static(
    model, draft_params, plan: Plan, state: DecodeState, context: Context
) -> DraftedTree:
    """Fills preallocated rows, one depth after the other."""
    tree, batch = plan.tree, state.length.shape[0]
    tokens = jnp.full((batch, tree.rows), -1, jnp.int32).at[:, :1].set(_root_tokens(state))
    logprobs = jnp.zeros(tokens.shape) if plan.telemetry else None
    total = len(tree.expanded_rows) - 1  # the root is run by `begin`
    proposal, work = plan.source.begin(model, draft_params, state, tree.steps, total)
    offset, q = 0, None
    for step, expansion in enumerate(tree.expansions):
        paths = _paths(tree.shape, tokens, expansion.rows, step)
        if step:
            level = _static_level(tree, step, offset, tokens, paths)
            proposal, work = plan.source.step(model, draft_params, work, level)
        count = expansion.max_children
        found = candidates(plan, state, context, proposal, paths, expansion.rows, count)
        first, _ = expansion.children
        of_parent = (slice(None), expansion.parents, expansion.ranks)
        tokens = _fill(tokens, found.tokens[of_parent], first)
        if plan.telemetry:
            logprobs = _fill(logprobs, found.logprobs[of_parent], first)
        if plan.needs_q:
            q = jnp.zeros((batch, total + 1, found.q.shape[-1])) if q is None else q
            q = _fill(q, found.q, offset + 1 if step else 0)  # the root's is the first
        offset += len(expansion.rows) if step else 0
    paths = _paths(tree.shape, tokens, np.arange(tree.rows), tree.steps)
    return DraftedTree(tokens, tree.shape, paths, q, logprobs, work)


def _static_level(tree: Tree, step: int, offset: int, tokens: Array, paths: Array) -> Level:
    """What the source is told about the rows that are expanded at depth `step`."""
    rows = tree.expansions[step].rows
    so_far = tree.expanded_rows[1 : 1 + offset + len(rows)]
    return Level(
        step=step,
        offset=offset,
        total=len(tree.expanded_rows) - 1,
        tokens=tokens[:, rows],
        parents=np.searchsorted(tree.expansions[step - 1].rows, tree.shape.parent[rows]),
        visible=pack_bits(tree.shape.visible[np.ix_(rows, so_far)]),
        path=paths,
    )


def _paths(shape: TreeShape, tokens: Array, rows: np.ndarray, depth: int) -> Int[Array, "B R P"]:
    """Tokens of each row's ancestors at depths 1..depth, itself included; -1 beyond the row."""
    index = shape.path_rows[rows][:, 1 : depth + 1]
    beyond = np.arange(1, depth + 1) > shape.depth[rows][:, None]
    return jnp.where(beyond, -1, tokens[:, index])


def _fill(buffer: Array, values: Array, start: int) -> Array:
    """Writes values [B n ..] into columns `start`.. of a preallocated buffer."""
    return jax.lax.dynamic_update_slice_in_dim(buffer, values.astype(buffer.dtype), start, axis=1)


class _Grown(NamedTuple):
    """All N candidates of a dynamic tree, depth after depth, in preallocated buffers.

    `parent` is the index of the candidate's parent candidate, -1 for the root.
    """

    tokens: Int[Array, "B N"]
    score: Float[Array, "B N"]
    parent: Int[Array, "B N"]
    paths: Int[Array, "B N P"]
    logprobs: Float[Array, "B N"]


def _grow_dynamic(
    model,
    draft_params,
    plan: Plan,
    state: DecodeState,
    context: Context,
    part: GrownPart | None,
) -> DraftedTree:
    """Expands the `topk` best nodes of each depth, then keeps the best rows of all depths."""
    tree, batch, topk = plan.tree, state.length.shape[0], plan.tree.topk
    size, total = tree.offsets[-1], topk * (tree.steps - 1)
    grown = _Grown(
        tokens=jnp.full((batch, size), -1, jnp.int32),
        score=jnp.full((batch, size), -jnp.inf),
        parent=jnp.full((batch, size), -1, jnp.int32),
        paths=jnp.full((batch, size, tree.steps), -1, jnp.int32),
        logprobs=jnp.zeros((batch, size)),
    )
    proposal, work = plan.source.begin(model, draft_params, state, tree.steps, total)
    frontier = jnp.full((batch, 1), -1, jnp.int32)  # candidates to expand: first the root
    score, paths = jnp.zeros((batch, 1)), jnp.full((batch, 1, tree.steps), -1, jnp.int32)
    seen = jnp.zeros((batch, 1, total), bool)  # the rows expanded so far that each of these sees
    for step in range(tree.steps):
        if step:
            depth = slice(tree.offsets[step - 1], tree.offsets[step])
            score, best = jax.lax.top_k(grown.score[:, depth], topk)
            if part is not None:
                score = jnp.where(np.arange(topk) < part.topk, score, -jnp.inf)
            frontier, parents = best + depth.start, best // topk
            paths = jnp.take_along_axis(grown.paths, frontier[..., None], axis=1)
            first = topk * (step - 1)  # they see what their parents see, and themselves
            seen = jnp.take_along_axis(seen, parents[..., None], axis=1)
            seen |= jnp.arange(total) == first + jnp.arange(topk)[:, None]
            level = Level(
                step=step,
                offset=first,
                total=total,
                tokens=jnp.take_along_axis(grown.tokens, frontier, axis=1),
                parents=parents,
                visible=pack_words(seen[..., : first + topk]),
                path=paths[..., :step],
            )
            proposal, work = plan.source.step(model, draft_params, work, level)
        found = candidates(plan, state, context, proposal, paths[..., :step], frontier, topk)
        if part is not None:
            inside = (np.arange(topk) < part.topk) & (step < part.steps)
            found = found._replace(gain=jnp.where(inside, found.gain, -jnp.inf))
        grown = _add_level(grown, tree.offsets[step], step, frontier, score, paths, found)
    return _best_rows(plan, state, grown, work, part)


def _add_level(
    grown: _Grown, start: int, step: int, frontier, score, paths, found: Candidates
) -> _Grown:
    """Files the children [B R C] of the frontier [B R] behind the candidates so far."""
    batch, rows, count = found.tokens.shape

    def flat(x):
        return x.reshape(batch, rows * count, *x.shape[3:])

    at_end = jnp.arange(paths.shape[-1]) == step
    path = jnp.where(at_end, found.tokens[..., None], paths[:, :, None])
    logprobs = grown.logprobs
    if found.logprobs is not None:
        logprobs = _fill(logprobs, flat(found.logprobs), start)
    return _Grown(
        _fill(grown.tokens, flat(found.tokens), start),
        _fill(grown.score, flat(score[..., None] + found.gain), start),
        _fill(grown.parent, jnp.repeat(frontier, count, axis=1), start),
        _fill(grown.paths, flat(path), start),
        logprobs,
    )


def _best_rows(
    plan: Plan, state: DecodeState, grown: _Grown, work: Any, part: GrownPart | None
) -> DraftedTree:
    """The root and the best `rows` - 1 candidates, in the order of their depth.

    A parent scores at least as well as its child and stands before it, and `top_k` takes the
    earlier of equals: no row is kept without its parent.
    """
    tree = plan.tree
    _, kept = jax.lax.top_k(grown.score, tree.rows - 1)
    if part is not None:  # the worst rows go: no child is better than its parent
        beyond = np.arange(tree.rows - 1)[:, None] >= part.rows - 1
        beyond &= np.arange(grown.score.shape[1]) == kept[..., None]
        grown = grown._replace(score=jnp.where(beyond.any(1), -jnp.inf, grown.score))
    kept = jnp.sort(kept, axis=1)
    # Row of each candidate that is kept: how many were kept up to it (row 0 is the root).
    row_of = jnp.cumsum((jnp.arange(grown.score.shape[1]) == kept[..., None]).any(1), axis=1)

    def pick(x, fill):
        index = kept[..., None] if x.ndim == 3 else kept
        rows = jnp.take_along_axis(x, index, axis=1)
        return jnp.concatenate([jnp.full_like(rows[:, :1], fill), rows], axis=1)

    above = pick(grown.parent, -1)
    at = jnp.take_along_axis(row_of, jnp.maximum(above, 0), axis=1)
    parent = jnp.where(above < 0, 0, at).astype(jnp.int32)
    depth = pick(jnp.broadcast_to(tree.candidate_depth, grown.score.shape), 0)
    valid = jnp.isfinite(pick(grown.score, 0.0))
    tokens = jnp.where(valid, pick(grown.tokens, -1), -1)
    tokens = tokens.at[:, :1].set(_root_tokens(state))
    shape = grown_shape(parent, depth, tree.steps)
    logprobs = pick(grown.logprobs, 0.0) if plan.telemetry else None
    return DraftedTree(tokens, shape, pick(grown.paths, -1), None, logprobs, work)
