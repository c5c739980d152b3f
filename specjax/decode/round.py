"""One round of speculative decoding; `chunk.py` makes a compiled program of many.

    draft (draft.py) -> verify (here) -> accept (accept.py) -> commit (here, and memory.py)

The *root* is the last token known and row 0 of every tree; `root` in code is its position, which is
`length - 1`. Its keys and values are not in the cache yet, which holds the positions before it (the
*prefix*). Plain decoding (`off`) is a round of its own, `plain_round`.

Dimensions: B slots, T tree rows, A = steps + 1 tokens that a round can emit at most, V vocabulary.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from specjax.decode import sampling, shards
from specjax.decode.accept import Acceptance, accept
from specjax.decode.draft import DraftedTree, draft_tree
from specjax.decode.noise import draw_ahead, target_noise
from specjax.decode.report import Round
from specjax.decode.sampling import Rows, add_tokens, context_of, root_rows
from specjax.decode.state import (
    INVALID,
    LENGTH,
    RUNNING,
    STOPPED,
    DecodeState,
    Plan,
    prefix_lengths,
    put_positions,
    take_positions,
)
from specjax.decode.tree import TreePart, plain_bits
from specjax.interfaces import Forward, Where
from specjax.memory import Commit, take_path
from specjax.memory import commit as commit_memory
from specjax.models.transformer import Transformer


def spec_round(
    model: Transformer, draft_params, plan: Plan, state: DecodeState, part: TreePart | None = None
) -> tuple[DecodeState, Round]:
    """Runs one draft -> verify -> accept -> commit cycle for every slot.

    Args:
      draft_params: parameters of the draft source.
      part: part of the tree that is drafted; None: all of it.

    Returns:
      the state after the round, and a `Round`, from which `report.write` computes the report.
    """
    if plan.draws_noise:
        count, vocab, root = plan.steps + 1, plan.cfg.vocab_size, state.length - 1
        noise = draw_ahead(state.keys, root, count, vocab, plan.tree.is_chain)
        state = state._replace(noise=noise)
    context = context_of(state.tokens, state.length, plan.features, state.counts)
    draft = draft_tree(model, draft_params, plan, state, context, part)
    logits, found = verify(model, plan, state, draft)
    # The transforms of each row see the path down to it: what plain decoding would have seen there.
    rows = Rows(draft.shape.depth, draft.paths)
    scores = sampling.transform(logits, state.options, plan.features, context, rows)
    accepted = (plan.rule or accept)(plan, state, draft, scores)
    logits = along_path(plan, logits, accepted)
    accepted, invalid = until_invalid(state, logits, accepted)
    count, finish = truncate(state, accepted, invalid)
    summary = Round(
        state=state,
        context=context,
        draft=draft,
        accepted=accepted,
        count=count,
        invalid=invalid,
        logits=logits,
        scores=along_path(plan, scores, accepted),
        rows=Rows(np.arange(plan.steps + 1), along_path(plan, draft.paths, accepted)),
        records=None if found.records is None else along_path(plan, found.records, accepted),
    )
    state = commit(plan, state, draft, found, accepted, count, finish)
    return state._replace(noise=None), summary


def verify(
    model: Transformer, plan: Plan, state: DecodeState, draft: DraftedTree
) -> tuple[Float[Array, "B T V"], Forward]:
    """Runs the target once over all rows of the tree; row t's logits decide the token after it.

    In `invariant` mode a row attends to its ancestors in the order of their positions, as plain
    decoding would. A token of -1, no draft, is embedded as some token; no accepted row sees it.
    """
    root, shape = state.length - 1, draft.shape
    where = Where(
        "by_position" if plan.invariant else "tree",
        root[:, None] + shape.depth,  # RoPE: siblings stand at one position
        prefix=prefix_lengths(state),
        visible=shape.bits,  # a row sees the prefix, its ancestors and itself
        path_rows=shape.path_rows,
        depth=shape.depth,
        table=state.table,
    )
    found = model.decode(draft.tokens, where, state.memory, taps=plan.taps)
    return model.logits(found.x), found


def along_path(plan: Plan, x: Array, accepted: Acceptance) -> Array:
    """Picks the rows of the accepted path: [B T ..] -> [B A ..]."""
    return x if plan.tree.is_chain else take_path(x, accepted.path)


def until_invalid(
    state: DecodeState, logits: Float[Array, "B A V"], accepted: Acceptance
) -> tuple[Acceptance, Bool[Array, " B"]]:
    """Cuts the emitted tokens before the first that was drawn from logits that are no distribution.

    Which rows are accepted does not depend on the logits after the last of them, so the tokens kept
    are those of plain decoding, which ends at the same position.

    Args:
      logits: the target's raw logits that decided each token.

    Returns:
      the acceptance with fewer tokens, and [B] whether tokens were cut.
    """
    valid = sampling.normaliser(logits, state.options.temperature).valid
    drawn = jnp.cumsum(~valid, axis=1) == 0
    inside = jnp.arange(logits.shape[1]) < accepted.count[:, None]
    kept = (drawn & inside).sum(axis=1, dtype=jnp.int32)
    return accepted._replace(count=kept), kept < accepted.count


def truncate(
    state: DecodeState, accepted: Acceptance, invalid: Bool[Array, " B"]
) -> tuple[Int[Array, " B"], Int[Array, " B"]]:
    """Cuts the emitted tokens after the first stop token and at the slot's limit.

    Args:
      invalid: whether the token after the accepted ones has no distribution to be drawn from.

    Returns:
      [B] the number of tokens left, 0 where a slot does not run, and [B] the slot's `finish`.
    """
    tokens = accepted.tokens
    index = jnp.arange(tokens.shape[1])
    is_stop = (tokens[:, :, None] == state.options.stop_ids[:, None, :]).any(-1)
    stops_before = jnp.cumsum(is_stop, axis=1) - is_stop
    keep = (index < accepted.count[:, None]) & (stops_before == 0)
    keep &= state.length[:, None] + index < state.limit[:, None]
    keep &= (state.finish == RUNNING)[:, None]
    kept = keep.sum(axis=1)
    stopped = (keep & is_stop).any(axis=1)
    unless_ended = jnp.where(invalid, INVALID, RUNNING)
    ended = jnp.where(state.length + kept >= state.limit, LENGTH, unless_ended)
    ended = jnp.where(stopped, STOPPED, ended)
    finish = jnp.where(state.finish == RUNNING, ended, state.finish)
    return kept.astype(jnp.int32), finish.astype(jnp.int32)


def commit(
    plan: Plan,
    state: DecodeState,
    draft: DraftedTree,
    found: Forward,
    accepted: Acceptance,
    count: Int[Array, " B"],
    finish: Int[Array, " B"],
) -> DecodeState:
    """Writes the accepted path to the memories of target and draft, and appends its tokens.

    All A rows of the path are written, to consecutive positions from the root's on, although only
    `count` were accepted. The rows past `count` lie at or after the next root, where no prefix
    reaches: a later commit overwrites them before they are read, so nothing has to be compacted.
    The last emitted token is the next root; the next round computes its row.

    Args:
      draft: the drafted tree, with the source's work.
      found: the target's forward pass over the tree.
      count: number of emitted tokens of each slot; 0 where a slot does not run.
      finish: `DecodeState.finish` of each slot after the round.
    """
    path = None if plan.tree.is_chain else accepted.path  # a chain's rows stand in order
    # The value of `after` is not used. `count` depends on the logits, and so on all attention over
    # the pages: XLA must finish reading them before it writes, and need not copy them.
    to = Commit(state.length - 1, state.table, after=count)
    target = commit_memory(plan.cfg, state.memory, found.scratch, path, count, to)
    hidden = along_path(plan, found.tapped, accepted)
    with jax.named_scope("commit"):
        own = plan.source.commit(state.draft, draft.work, hidden, count)
    return append(state, accepted.tokens, count, finish)._replace(memory=target, draft=own)


def append(
    state: DecodeState, tokens: Int[Array, "B A"], count: Int[Array, " B"], finish: Array
) -> DecodeState:
    """Appends the first `count` tokens to each slot."""
    counts = state.counts
    return state._replace(
        tokens=put_positions(state.tokens, tokens, state.length, count),
        length=state.length + count,
        finish=finish,
        counts=None if counts is None else add_tokens(counts, tokens, count),
    )


def plain_round(
    model: Transformer, plan: Plan, state: DecodeState, taps: tuple = ()
) -> tuple[DecodeState, Round, Float[Array, "B 1 taps_width"]]:
    """Emits one token per slot by plain autoregressive decoding, with the noise of `coupled`.

    Args:
      taps: hidden states of the target to return, see `DraftNeeds.taps`.

    Returns:
      the state after the round, a `Round` for `report.write`, and the hidden states.
    """
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
    found = model.decode(take_positions(state.tokens, root, 1), where, state.memory, taps=taps)
    logits = model.logits(found.x)
    context = context_of(state.tokens, state.length, plan.features, state.counts)
    rows = root_rows(state.length.shape[0])
    scores = sampling.transform(logits, state.options, plan.features, context, rows)
    perturbed = scores
    if plan.features.sampled:
        noise = target_noise(state.keys, root[:, None] + 1, logits.shape[-1])
        perturbed = sampling.perturb(scores, state.options.temperature, noise)
    tokens = shards.argmax(perturbed).astype(jnp.int32)
    chosen = Acceptance(tokens, jnp.zeros_like(tokens), jnp.ones_like(state.length))
    chosen, invalid = until_invalid(state, logits, chosen)
    count, finish = truncate(state, chosen, invalid)
    to = Commit(root, state.table, after=tokens[:, 0])
    memory = commit_memory(plan.cfg, state.memory, found.scratch, None, count, to)
    summary = Round(
        state=state,
        context=context,
        draft=None,
        accepted=chosen,
        count=count,
        invalid=invalid,
        logits=logits,
        scores=scores,
        rows=rows,
        records=found.records,
    )
    return append(state, tokens, count, finish)._replace(memory=memory), summary, found.tapped
