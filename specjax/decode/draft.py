"""`draft_tree`: the draft source proposes a tree of tokens below the root of every slot.

It is what a round begins with; `accept.accept` decides later which of these tokens are kept.

The source gives logits below each row that is expanded: `begin` below the root, then one `step`
per further level. They pass through the target's own sampling transforms, noise is added where the
mode has any, and the best tokens become the row's children (`candidates`).

A static tree is filled depth by depth. A dynamic tree (EAGLE-2, arXiv 2406.16858) expands the
`topk` best nodes of each depth into `topk` children each, and keeps the best rows of all depths. A
dynamic tree was not drawn from q, so only `coupled` and `greedy` take it.

Dimensions: B slots, T tree rows, R rows of one depth, C columns of a proposal, V vocabulary; the
others are written as words: `steps` of the tree, `expanded` rows that have children, `candidates`
of a dynamic tree.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from specjax.decode import sampling, shards
from specjax.decode.noise import DRAFT, noise_at, round_noise
from specjax.decode.sampling import Columns, Context, Rows
from specjax.decode.state import DecodeState, Plan, take_positions
from specjax.decode.tree import (
    DynamicTreePart,
    Tree,
    TreePart,
    TreeShape,
    grown_shape,
)
from specjax.interfaces import Level, Proposal
from specjax.kernels.reference import pack_bits
from specjax.models.transformer import Transformer


class DraftedTree(NamedTuple):
    """The drafted tree of one round.

    Attributes:
      tokens: [B T] token of each row; row 0 is the root; -1: the row holds no drafted token.
      shape: parents, depths and ancestors of the rows.
      paths: [B T steps] tokens from below the root down to the row itself, then -1.
      q: [B expanded V] distribution that the children of each expanded row were drawn from, the
        root's first; None unless the rule is `block` or `recursive`.
      logprobs: [B T] log q of each drafted token, arbitrary where there is none; None without
        telemetry.
      work: the work that the source's last call returned, for its `commit`.
    """

    tokens: Int[Array, "B T"]
    shape: TreeShape
    paths: Int[Array, "B T steps"]
    q: Float[Array, "B expanded V"] | None
    logprobs: Float[Array, "B T"] | None
    work: Any


def draft_tree(
    model: Transformer,
    draft_params,
    plan: Plan,
    state: DecodeState,
    context: Context,
    part: TreePart | None = None,
) -> DraftedTree:
    """Proposes a tree below the root of every slot.

    Args:
      draft_params: parameters of the draft source.
      context: the history of the slots, for the transforms.
      part: part of the tree that is drafted; None: all of it. Rules that need q take None only.
    """
    if plan.tree.is_dynamic:
        draft = _grow_dynamic(model, draft_params, plan, state, context, part)
        inside = True
    else:
        draft = _grow_static(model, draft_params, plan, state, context)
        inside = True if part is None else part.drafted
    # A slot that does not speculate has no drafted tokens: they are -1, and q = 0, which no rule
    # accepts. Its paths may stay as they are, for they only matter below accepted tokens.
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
    with jax.named_scope("draft"):
        proposal, work = plan.source.begin(model, draft_params, state, tree.steps, total)
    offset, q = 0, None
    for step, expansion in enumerate(tree.expansions):
        paths = _paths(tree.shape, tokens, expansion.rows, step)
        if step:
            level = _static_level(tree, step, offset, tokens, paths)
            with jax.named_scope("draft"):
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
    """Describes the rows that are expanded at depth `step` to the source."""
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


def _paths(
    shape: TreeShape, tokens: Array, rows: np.ndarray, depth: int
) -> Int[Array, "B R depth"]:
    """Returns the tokens of each row's ancestors at depths 1..depth, the row's own included, or -1.

    Depths beyond the row's own hold -1.
    """
    index = shape.path_rows[rows][:, 1 : depth + 1]
    beyond = np.arange(1, depth + 1) > shape.depth[rows][:, None]
    return jnp.where(beyond, -1, tokens[:, index])


def _fill(buffer: Array, values: Array, start: int) -> Array:
    """Writes values [B n ..] into columns `start`.. of a preallocated buffer."""
    return jax.lax.dynamic_update_slice_in_dim(buffer, values.astype(buffer.dtype), start, axis=1)


class _Grown(NamedTuple):
    """All candidates of a dynamic tree, depth after depth, in preallocated buffers.

    Attributes:
      tokens: [B candidates] token of each candidate; -1: no token.
      score: [B candidates] sum of the gains along the candidate's path.
      parent: [B candidates] index of the candidate's parent candidate; -1: the root.
      paths: [B candidates steps] tokens from below the root down to the candidate, then -1.
      logprobs: [B candidates] log q of each candidate's token.
    """

    tokens: Int[Array, "B candidates"]
    score: Float[Array, "B candidates"]
    parent: Int[Array, "B candidates"]
    paths: Int[Array, "B candidates steps"]
    logprobs: Float[Array, "B candidates"]


def _grow_dynamic(
    model,
    draft_params,
    plan: Plan,
    state: DecodeState,
    context: Context,
    part: DynamicTreePart | None,
) -> DraftedTree:
    """Expands the `topk` best nodes of each depth, then keeps the best rows of all depths.

    A node's score is the sum of the gains along its path (`_gain`). Gains are never positive, so
    scores never rise along a path, and ties go to the earlier depth: a row that is kept has its
    parent kept.
    """
    tree, batch, topk = plan.tree, state.length.shape[0], plan.tree.topk
    size, total = tree.offsets[-1], topk * (tree.steps - 1)
    grown = _Grown(
        tokens=jnp.full((batch, size), -1, jnp.int32),
        score=jnp.full((batch, size), -jnp.inf),
        parent=jnp.full((batch, size), -1, jnp.int32),
        paths=jnp.full((batch, size, tree.steps), -1, jnp.int32),
        logprobs=jnp.zeros((batch, size)),
    )
    with jax.named_scope("draft"):
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
                visible=pack_bits(seen[..., : first + topk]),
                path=paths[..., :step],
            )
            with jax.named_scope("draft"):
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
    """Writes the children [B R count] of the frontier [B R] behind the candidates so far."""
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
    plan: Plan, state: DecodeState, grown: _Grown, work: Any, part: DynamicTreePart | None
) -> DraftedTree:
    """Keeps the root and the best `rows` - 1 candidates, in the order of their depth."""
    tree = plan.tree
    # Parents stand before their children, and `top_k` takes the earlier of equals.
    _, kept = jax.lax.top_k(grown.score, tree.rows - 1)
    if part is not None:  # the worst rows are dropped; no child is better than its parent
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


# --- candidates below a row -----------------------------------------------------------------------


class Candidates(NamedTuple):
    """The best `count` continuations of each of R rows; fields that the plan does not need: None.

    Attributes:
      tokens: [B R count] token of each continuation; -1 where there are fewer than `count`.
      gain: [B R count] what each continuation adds to the score of its path, at most 0.
      q: [B R V] distribution that the continuations were drawn from; 0 in a row without any.
      logprobs: [B R count] log q of each continuation.
    """

    tokens: Int[Array, "B R count"]
    gain: Float[Array, "B R count"] | None
    q: Float[Array, "B R V"] | None
    logprobs: Float[Array, "B R count"] | None


def candidates(
    plan: Plan,
    state: DecodeState,
    context: Context,
    proposal: Proposal,
    paths: Int[Array, "B R depth"],
    nodes: np.ndarray,
    count: int,
) -> Candidates:
    """Chooses the best continuations of R rows of one depth.

    Args:
      context: the history of the slots, for the transforms.
      proposal: the source's logits, of all tokens or of some.
      paths: tokens from below the root down to each row; their number is the rows' depth.
      nodes: [R] numbers of the rows in the tree, which key noise that is private to a node.
      count: number of continuations per row.
    """
    options, root, depth = state.options, state.length - 1, paths.shape[-1]
    logits, columns = proposal.scores, Columns(None, proposal.scores.shape[-1])
    if proposal.ids is not None:
        columns = Columns(proposal.ids, plan.cfg.vocab_size)
        columns, logits = columns.widened(logits, count)
        logits = columns.masked(logits)
    logits = sampling.sanitise(logits, plan.needs_q)
    # The very transforms that the target's logits will pass through, along each branch.
    if plan.aligned:
        rows = Rows(np.full(paths.shape[1], depth), paths)
        log_q = sampling.transform(logits, options, plan.features, context, rows, columns)
    else:
        log_q = sampling.tempered(logits, options.temperature)
    perturbed = log_q
    if plan.draws_noise:
        # The very noise that will decide the position: the draft guesses the sample, and not
        # merely the distribution. A row at depth d decides position root + d + 1.
        noise = noise_at(state.noise, state.keys, root, np.full(1, depth), columns.ids)
        perturbed = sampling.perturb(log_q, options.temperature, noise)
    elif plan.needs_q and plan.features.sampled:
        # q must be what the tokens were drawn from: noise of its own, not the target's.
        noise = round_noise(state.keys, DRAFT, root, nodes, columns.vocab)
        perturbed = sampling.perturb(log_q, options.temperature, columns.at_rows(noise))
    picked, best = top_candidates(perturbed, count)
    gain = q = logprobs = None
    if plan.tree.is_dynamic:
        gain = _gain(plan, options.temperature, perturbed, best)
        if plan.adaptive_width:
            gain = jnp.where(np.arange(count) < _width(log_q)[..., None], gain, -jnp.inf)
    if plan.needs_q:
        q = sampling.probabilities(log_q, options.temperature)
        q = columns.spread(jnp.where(jnp.isfinite(best[..., :1]), q, 0.0))
    if plan.telemetry:
        of_picked = jnp.take_along_axis(log_q, picked, axis=-1)
        logprobs = of_picked - jax.nn.logsumexp(log_q, axis=-1, keepdims=True)
    tokens = jnp.where(jnp.isfinite(best), columns.tokens(picked), -1)
    return Candidates(tokens, gain, q, logprobs)


def top_candidates(scores: Float[Array, "B R V"], count: int) -> tuple[Array, Array]:
    """Returns columns and values [B R count] of the `count` best scores, ties to the lowest id."""
    best, ids = shards.top_k(scores, count, _top_k)
    return ids.astype(jnp.int32), best


def _top_k(scores: Float[Array, "B R V"], count: int) -> tuple[Array, Array]:
    """Computes `jax.lax.top_k`, by argmaxes for a small count: on CPU it sorts the vocabulary."""
    if count > 8:
        return jax.lax.top_k(scores, count)
    ids, best = [], []
    for _ in range(count):
        value, pick = shards.whole_best(scores)
        ids.append(pick)
        best.append(value)
        scores = jnp.where(jnp.arange(scores.shape[-1]) == pick[..., None], -jnp.inf, scores)
    return jnp.stack(best, axis=-1), jnp.stack(ids, axis=-1)


def _gain(plan: Plan, temperature: Array, perturbed: Array, best: Array) -> Array:
    """Computes what each of the best continuations adds to the score of its path.

    With noise it is log_softmax(perturbed / tau): the noise decides the position, and tau says how
    far the draft's log q can be trusted. Without noise it is log q.
    """
    tau = plan.tau if plan.mode == "coupled" else 1.0
    tau = jnp.where(temperature > 0, tau, 1.0)[:, None, None]
    largest = best[..., :1] / tau  # known already: no pass over the vocabulary to find it
    largest = jnp.where(jnp.isfinite(largest), largest, 0.0)
    total = jnp.log(jnp.exp(perturbed / tau - largest).sum(axis=-1, keepdims=True)) + largest
    return jnp.where(jnp.isfinite(best), jnp.minimum(best / tau - total, 0.0), -jnp.inf)


def _width(log_q: Float[Array, "B R V"]) -> Float[Array, "B R"]:
    """Computes how many children a row should have: the perplexity of its q."""
    log_p = jax.nn.log_softmax(log_q, axis=-1)
    entropy = -jnp.where(jnp.isfinite(log_p), jnp.exp(log_p) * log_p, 0.0).sum(-1)
    return jnp.round(jnp.exp(entropy))
