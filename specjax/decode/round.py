"""One round of speculative decoding; `chunk.py` makes a compiled program of many.

    draft (draft.py) -> verify (verify.py) -> accept (accept.py) -> commit (here, and memory.py)

The *root* is the last token known and row 0 of every tree; `root` in code is its position, which is
`length - 1`. Its keys and values are not in the cache yet, which holds the positions before it (the
*prefix*). A row of depth d lies at position root + d and decides the token at root + d + 1.

    mode        drafted with          accepted by                        equal to plain decoding
    coupled     the position's noise  the walk, with the same noise      token by token
    greedy      no noise              the walk, without noise            token by token
    block       noise of this round   coins of this round, p and q       in distribution
    recursive   noise of this round   coins of this round, p and q       in distribution

"Token by token" holds for equal target logits; several rows at once round differently than one
(docs/lossless.md). All noise is Gumbel, so that the argmax of transformed logits plus noise is a
draw; at temperature 0 none is added. A *position's* noise is keyed by request and position alone,
and a ring keeps that of the next few positions, so that it is generated once. Noise and coins of a
*round* are keyed by the root and by what they are for as well (rng.py).

Plain decoding (`off`) is a round of its own without any of the speculation's plumbing.

Shapes: B slots, T tree rows, E = steps + 1 tokens that a round can emit, P tokens of a path (at
most steps), V vocabulary, D model width.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from specjax.decode import report, rng, sampling, shards
from specjax.decode.accept import accept
from specjax.decode.draft import DraftedTree, draft_tree
from specjax.decode.history import (
    Context,
    Counts,
    Rows,
    add_tokens,
    context_of,
    root_rows,
)
from specjax.decode.part import Part
from specjax.decode.plan import Plan
from specjax.decode.report import Report, RoundView
from specjax.decode.state import (
    INVALID,
    LENGTH,
    RUNNING,
    STOPPED,
    DecodeState,
    prefix_lengths,
    put_positions,
    take_positions,
)
from specjax.decode.tree import Acceptance, plain_bits
from specjax.decode.verify import Verified, verify
from specjax.interfaces import Where
from specjax.memory import Commit, take_path
from specjax.memory import commit as commit_memory
from specjax.models.transformer import Transformer


class Emitted(NamedTuple):
    """What survives stop tokens and limits: count [B] (0 if not running), finish [B]."""

    count: Int[Array, " B"]
    finish: Int[Array, " B"]


def until_invalid(
    state: DecodeState, logits: Float[Array, "B E V"], count: Int[Array, " B"]
) -> tuple[Int[Array, " B"], Bool[Array, " B"]]:
    """How many of the first `count` tokens were drawn from a distribution; whether not all were.

    Which rows a walk comes to does not depend on the logits after its last one, and so these tokens
    are those of plain decoding, which ends at the same position.

    Args:
      logits: the target's raw ones that decided each token.
    """
    valid = sampling.normaliser(logits, state.options.temperature).valid
    drawn = jnp.cumsum(~valid, axis=1) == 0
    kept = (drawn & (jnp.arange(logits.shape[1]) < count[:, None])).sum(axis=1, dtype=jnp.int32)
    return kept, kept < count


def truncate(
    state: DecodeState,
    tokens: Int[Array, "B E"],
    count: Int[Array, " B"],
    invalid: Bool[Array, " B"],
) -> Emitted:
    """Cuts the emitted tokens after the first stop token and at the slot's limit.

    Args:
      invalid: whether the token after the `count` ones has no distribution to be drawn from.
    """
    index = jnp.arange(tokens.shape[1])
    is_stop = (tokens[:, :, None] == state.options.stop_ids[:, None, :]).any(-1)
    stops_before = jnp.cumsum(is_stop, axis=1) - is_stop
    keep = (index < count[:, None]) & (stops_before == 0)
    keep &= state.length[:, None] + index < state.limit[:, None]
    keep &= (state.finish == RUNNING)[:, None]
    kept = keep.sum(axis=1)
    stopped = (keep & is_stop).any(axis=1)
    here = jnp.where(invalid, INVALID, RUNNING)
    ended = jnp.where(state.length + kept >= state.limit, LENGTH, here)
    ended = jnp.where(stopped, STOPPED, ended)
    finish = jnp.where(state.finish == RUNNING, ended, state.finish)
    return Emitted(kept.astype(jnp.int32), finish.astype(jnp.int32))


class Side(NamedTuple):
    """What is handed from round to round of a batch within a chunk, and but for the report dropped.

    Attributes:
      counts: token counts for penalties, made anew for each batch; None if nobody asks for them.
      report: what the chunk tells the host beside tokens.
      begin: [B] lengths at the start of the chunk.
      first: rounds that the chunk had before this batch.
      hidden: [B R D] states of the roots of the batch's R plain rounds, for a draft source that
        will want them.
    """

    counts: Counts | None
    report: Report
    begin: Int[Array, " B"]
    first: Int[Array, ""]
    hidden: Float[Array, "B R D"] | None = None


def spec_round(
    model: Transformer,
    draft_params,
    plan: Plan,
    state: DecodeState,
    side: Side,
    index: Array,
    part: Part | None = None,
) -> tuple[DecodeState, Side]:
    """One draft -> verify -> accept -> commit cycle for every slot.

    Args:
      draft_params: of the draft source.
      index: how many rounds of the chunk went before.
      part: of the tree that is drafted; None: all of it.
    """
    root = state.length - 1
    if plan.draws_noise:
        wanted = (state.finish == RUNNING) & (state.options.temperature > 0)
        noise = rng.refill(state.noise, state.keys, root, wanted, plan.steps + 1)
        state = state._replace(noise=noise)
    context = context_of(state.tokens, state.length, plan.features, side.counts)
    draft = draft_tree(model, draft_params, plan, state, context, part)
    verified = verify(model, plan, state, draft)
    rows = Rows(draft.shape.depth, draft.paths)
    transformed = sampling.transform(verified.logits, state.options, plan.features, context, rows)
    accepted = (plan.rule or accept)(plan, state, draft, transformed)
    return commit(plan, state, side, index, context, draft, verified, transformed, accepted)


def commit(
    plan: Plan,
    state: DecodeState,
    side: Side,
    index: Array,
    context: Context,
    draft: DraftedTree,
    verified: Verified,
    transformed: Float[Array, "B T V"],
    accepted: Acceptance,
) -> tuple[DecodeState, Side]:
    """Takes the accepted path into the memories and appends its tokens.

    The path's steps + 1 rows go to consecutive positions from the root's on. Rows past the emitted
    ones lie at or after the next root, and no prefix reaches its root: they are not read before a
    later commit has written over them. So nothing has to be compacted. The last token emitted is
    the next root, whose row the next round computes; after a sample's last round nobody does.
    """
    logits = _along_path(plan, verified.logits, accepted)
    kept, invalid = until_invalid(state, logits, accepted.count)
    accepted = accepted._replace(count=kept)
    emitted = truncate(state, accepted.tokens, accepted.count, invalid)
    path = None if plan.tree.is_chain else accepted.path  # in a chain, the rows as they stand
    # `after` moves nothing: it has the write wait for everything that reads the pages.
    to = Commit(state.length - 1, state.table, after=emitted.count)
    target = commit_memory(plan.cfg, state.memory, verified.scratch, path, emitted.count, to)
    hidden = _along_path(plan, verified.hidden, accepted)
    memory = plan.source.commit(state.draft, draft.work, hidden, emitted.count)
    noise = None
    if plan.draws_noise and plan.telemetry:
        noise = rng.ring_at(state.noise, state.length[:, None] + np.arange(plan.steps + 1))
    view = RoundView(
        state=state,
        context=context,
        draft=draft,
        accepted=accepted,
        count=emitted.count,
        tokens=accepted.tokens,
        path_logits=logits,
        path_scores=_along_path(plan, transformed, accepted),
        path_rows=Rows(np.arange(plan.steps + 1), _along_path(plan, draft.paths, accepted)),
        noise=noise,
        invalid=invalid,
        records=None if verified.records is None else _along_path(plan, verified.records, accepted),
    )
    state, side = record(plan, state, side, index, view, emitted)
    return state._replace(memory=target, draft=memory), side


def _along_path(plan: Plan, x: Array, accepted: Acceptance) -> Array:
    return x if plan.tree.is_chain else take_path(x, accepted.path)


def plain_round(
    model: Transformer, plan: Plan, state: DecodeState, side: Side, index: Array
) -> tuple[DecodeState, Side]:
    """One token per slot by plain autoregressive decoding, with the noise that `coupled` uses."""
    root = state.length - 1
    where = Where(
        "tree",
        root[:, None],
        prefix=prefix_lengths(state),
        visible=plain_bits(),
        path_rows=np.zeros((1, 1), np.int32),
        depth=np.zeros(1, np.int32),
        table=state.table,
    )
    taps = () if side.hidden is None else plan.taps
    found = model.decode(take_positions(state.tokens, root, 1), where, state.memory, taps=taps)
    logits = model.logits(found.x)
    context = context_of(state.tokens, state.length, plan.features, side.counts)
    here = root_rows(state.length.shape[0])
    transformed = sampling.transform(logits, state.options, plan.features, context, here)
    perturbed = transformed
    if plan.features.sampled:
        wanted = (state.finish == RUNNING) & (state.options.temperature > 0)
        noise = rng.next_noise(state.keys, root, wanted, logits.shape[-1])
        perturbed = sampling.perturb(transformed, state.options.temperature, noise)
    tokens = shards.argmax(perturbed).astype(jnp.int32)
    kept, invalid = until_invalid(state, logits, jnp.ones_like(state.length))
    emitted = truncate(state, tokens, kept, invalid)
    to = Commit(root, state.table, after=tokens[:, 0])
    memory = commit_memory(plan.cfg, state.memory, found.scratch, None, emitted.count, to)
    if side.hidden is not None:
        hidden = found.tapped.astype(side.hidden.dtype)
        at = (0, index - side.first, 0)
        side = side._replace(hidden=jax.lax.dynamic_update_slice(side.hidden, hidden, at))
    view = RoundView(
        state=state,
        context=context,
        draft=None,
        accepted=None,
        count=emitted.count,
        tokens=tokens,
        path_logits=logits,
        path_scores=transformed,
        path_rows=here,
        noise=None,
        invalid=invalid,
        records=found.records,
    )
    state, side = record(plan, state, side, index, view, emitted)
    return state._replace(memory=memory), side


def record(
    plan: Plan, state: DecodeState, side: Side, index: Array, view: RoundView, emitted: Emitted
) -> tuple[DecodeState, Side]:
    """Appends the emitted tokens, and reports the round.

    The log-probabilities reported are the target's, scaled by temperature alone: what a trainer
    recomputes. Those after all transforms are there when asked for.
    """
    counts = side.counts
    if counts is not None:
        counts = add_tokens(counts, view.tokens, emitted.count)
    side = side._replace(
        counts=counts, report=report.write(side.report, plan, index, side.begin, view)
    )
    state = state._replace(
        tokens=put_positions(state.tokens, view.tokens, state.length, emitted.count),
        length=state.length + emitted.count,
        finish=emitted.finish,
    )
    return state, side
