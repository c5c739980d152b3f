"""One round of speculative decoding, and the chunks of rounds that make up a compiled program.

    draft (draft.py) -> verify (verify.py) -> accept (accept.py) -> commit (here, and cache.py)

A chunk is one `lax.while_loop`: the host is asked once per chunk, not once per token. Plain
decoding (`off`) is a program of its own without any of the speculation's plumbing.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from specjax.cache import commit_rows, take_rows
from specjax.decode import rng, sampling
from specjax.decode.accept import Acceptance, accept
from specjax.decode.draft import draft_tree
from specjax.decode.state import (
    LENGTH,
    RUNNING,
    STOPPED,
    DecodeState,
    DraftState,
    put_positions,
    take_positions,
)
from specjax.decode.tree import Tree, plain_bits
from specjax.decode.verify import Verified, verify
from specjax.draft.mtp import MTPHead
from specjax.models.transformer import Transformer


class Emitted(NamedTuple):
    """What survives stop tokens and limits: count [B] (0 if not running), finish [B]."""

    count: Int[Array, " B"]
    finish: Int[Array, " B"]


def truncate(state: DecodeState, tokens: Int[Array, "B E"], count: Int[Array, " B"]) -> Emitted:
    """Cuts the emitted tokens after the first stop token and at the slot's limit."""
    index = jnp.arange(tokens.shape[1])
    is_stop = (tokens[:, :, None] == state.stop_ids[:, None, :]).any(-1)
    stops_before = jnp.cumsum(is_stop, axis=1) - is_stop
    keep = (index < count[:, None]) & (stops_before == 0)
    keep &= (state.length[:, None] + index < state.limit[:, None])
    keep &= (state.finish == RUNNING)[:, None]
    kept = keep.sum(axis=1)
    stopped = (keep & is_stop).any(axis=1)
    ended = jnp.where(stopped, STOPPED, jnp.where(state.length + kept >= state.limit, LENGTH, 0))
    finish = jnp.where(state.finish == RUNNING, ended, state.finish)
    return Emitted(kept.astype(jnp.int32), finish.astype(jnp.int32))


def record(
    state: DecodeState, tokens: Int[Array, "B E"], logprobs: Float[Array, "B E"], emitted: Emitted
) -> DecodeState:
    """Appends the emitted tokens and counts the round."""
    running = (state.finish == RUNNING).astype(jnp.int32)
    bins = jnp.arange(state.histogram.shape[1])
    return state._replace(
        tokens=put_positions(state.tokens, tokens, state.length, emitted.count),
        logprobs=put_positions(state.logprobs, logprobs, state.length, emitted.count),
        length=state.length + emitted.count,
        finish=emitted.finish,
        rounds=state.rounds + running,
        histogram=state.histogram + running[:, None] * (bins == emitted.count[:, None]),
    )


def commit(
    state: DecodeState, tree: Tree, draft: DraftState, verified: Verified, accepted: Acceptance
) -> DecodeState:
    """Writes the accepted path to both caches' future and appends its tokens.

    At most steps + 1 rows go to consecutive slots; nothing rejected survives, nothing is compacted.
    """
    rows, hidden, logits = verified.rows, verified.hidden, verified.logits
    if not tree.is_chain:  # in a chain the path is the rows as they stand
        rows = take_rows(rows, accepted.path)
        hidden = jnp.take_along_axis(hidden, accepted.path[..., None], axis=1)
        logits = jnp.take_along_axis(logits, accepted.path[..., None], axis=1)
    emitted = truncate(state, accepted.tokens, accepted.count)
    logprobs = sampling.chosen_logprobs(logits, state.temperature, accepted.tokens)
    cache = commit_rows(state.cache, rows, state.length - 1, after=emitted.count)
    state = record(state, accepted.tokens, logprobs, emitted)
    running = emitted.count > 0
    window = pending_window(draft, hidden, emitted.count)
    return state._replace(
        cache=cache,
        draft=DraftState(
            cache=draft.cache,
            hidden=jnp.where(running[:, None, None], window, draft.hidden),
            pending=jnp.where(running, emitted.count, draft.pending),
        ),
    )


def pending_window(draft: DraftState, hidden: Float[Array, "B E D"], count: Array) -> Array:
    """The rows that the head will extend over: the last few valid ones, then the new ones."""
    lag = draft.hidden.shape[1] - hidden.shape[1]
    if not lag:
        return hidden
    old_first = draft.pending[:, None] + jnp.arange(lag)  # last `lag` valid rows of the old window
    carried = jnp.take_along_axis(draft.hidden, old_first[..., None], axis=1)
    return jnp.concatenate([carried, hidden], axis=1)


def spec_round(
    model: Transformer, head: MTPHead, tree: Tree, mode: str, state: DecodeState
) -> DecodeState:
    """One draft -> verify -> accept -> commit cycle for every slot."""
    root = state.length - 1
    noise = None
    if mode == "coupled":
        positions = root[:, None] + 1 + jnp.arange(tree.steps + 1)
        noise = rng.target_noise(state.keys, positions, model.cfg.vocab_size)
    draft = draft_tree(model, head, tree, mode, state, noise)
    verified = verify(model, tree, state, draft.tokens)
    accepted = accept(
        mode,
        tree,
        draft.tokens,
        verified.logits,
        state.temperature,
        noise,
        draft.logits,
        state.keys,
        root,
    )
    return commit(state, tree, draft.state, verified, accepted)


def plain_round(model: Transformer, state: DecodeState) -> DecodeState:
    """One token per slot by plain autoregressive decoding, with the same noise."""
    root = state.length - 1
    x, rows = model.decode(
        take_positions(state.tokens, root, 1), root[:, None], state.cache, root, plain_bits()
    )
    logits = model.logits(x)
    noise = rng.target_noise(state.keys, root[:, None] + 1, logits.shape[-1])
    scores = sampling.perturbed(logits, state.temperature, noise)
    tokens = jnp.argmax(scores, axis=-1).astype(jnp.int32)
    emitted = truncate(state, tokens, jnp.ones_like(state.length))
    logprobs = sampling.chosen_logprobs(logits, state.temperature, tokens)
    cache = commit_rows(state.cache, rows, root, after=emitted.count)
    return record(state, tokens, logprobs, emitted)._replace(cache=cache)


def run_chunk(
    one_round, state: DecodeState, max_rounds: Int[Array, ""], leave_early: Bool[Array, ""]
) -> tuple[DecodeState, Int[Array, ""]]:
    """Rounds until all slots are done, `max_rounds` are, or (`leave_early`) any slot finishes.

    Returns:
      the state and the number of rounds that ran.
    """
    running_at_start = (state.finish == RUNNING).sum()

    def go_on(carry):
        state, rounds = carry
        running = (state.finish == RUNNING).sum()
        undisturbed = ~leave_early | (running == running_at_start)  # a free slot can be refilled
        return (running > 0) & (rounds < max_rounds) & undisturbed

    def body(carry):
        state, rounds = carry
        return one_round(state), rounds + 1

    return jax.lax.while_loop(go_on, body, (state, jnp.int32(0)))
