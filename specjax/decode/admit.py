"""Before the first round: prefill prompts into pages, and start sequences in slots.

Two programs, because one prompt is sampled many times: `prefill` runs the model over a prompt,
piece by piece, `place` starts a slot that samples it. The slot's table refers to the prompt's full
pages, which nobody writes any more; of the last page, which the slot will fill up, it gets a copy.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32

from specjax.decode import rng
from specjax.decode.options import Options
from specjax.decode.plan import Plan
from specjax.decode.state import RUNNING, DecodeState, per_slot, with_pages
from specjax.decode.tree import chain_bits
from specjax.indexing import put, take, take_along
from specjax.interfaces import Memory, Where
from specjax.memory import Commit, after_of, commit, copy_pages, page_size
from specjax.models.transformer import Transformer

Tails = Float[Array, "Q tail D"] | None  # per prompt: the target's states that a slot starts from


class Piece(NamedTuple):
    """Up to T positions of R prompts.

    Attributes:
      tokens: [R T + tail] from `start` on; what is beyond a prompt is arbitrary.
      start: [R] a multiple of the page size, or of T if that is less.
      length: [R] of the whole prompts. prompts: [R] their rows among the tails.
      table: [R X] their pages; pages of positions that are to be forgotten are 0.
    """

    tokens: Int[Array, "R N"]
    start: Int[Array, " R"]
    length: Int[Array, " R"]
    prompts: Int[Array, " R"]
    table: Int[Array, "R X"]


class Admission(NamedTuple):
    """M sequences to start; a slot that is listed twice is simply written twice.

    Attributes:
      slots: [M] slot of each. prompts: [M] row of its prompt among the tails.
      source, target: [C] the prompts' pages that are copied, and to which; 0 to 0 is nothing.
      tokens: [M max_len], right padded. lengths: [M]. limit: [M] final length at most.
      words: [M 5] see `rng.request_words`. options: of the M requests.
    """

    slots: Int[Array, " M"]
    prompts: Int[Array, " M"]
    source: Int[Array, " C"]
    target: Int[Array, " C"]
    tokens: Int[Array, "M max_len"]
    lengths: Int[Array, " M"]
    limit: Int[Array, " M"]
    words: UInt32[Array, "M 5"]
    options: Options


def empty_tails(plan: Plan, prompts: int) -> Tails:
    """Room for the tails of so many prompts; None if the source asks for none."""
    if plan.source is None or not plan.source.needs.states:
        return None
    width = len(plan.taps) * plan.cfg.hidden_size
    shape = (prompts, plan.source.needs.states, width)
    return jnp.zeros(shape, jnp.dtype(plan.cfg.run.compute_dtype))


def prefill(
    model: Transformer,
    draft_params,
    plan: Plan,
    state: DecodeState,
    tails: Tails,
    piece: Piece,
    stride: int = 1,
) -> tuple[DecodeState, Tails]:
    """Runs a piece of R prompts through target and draft source, and writes their pages.

    Rows past a prompt's end are written as well, and never visible.

    Args:
      stride: pieces start at multiples of it.
    """
    tail = plan.source.needs.states if plan.source else 0
    count, start, table = piece.tokens.shape[1] - tail, piece.start, piece.table
    positions = start[:, None] + jnp.arange(count)
    where = Where("tree", positions, prefix=start, visible=chain_bits(count), table=table)
    found = model.decode(piece.tokens[:, :count], where, state.memory, taps=plan.taps)
    run = math.gcd(count, stride, page_size(state.memory.pages))  # within a page
    to = Commit(start, table, after_of(found.x), run)
    known = jnp.clip(piece.length - 1 - start, 0, count)  # without the root
    target = commit(plan.cfg, state.memory, found.scratch, None, known, to)
    state = state._replace(memory=target)
    if plan.source is None:
        return state, tails
    hidden = found.tapped
    memory = state.draft._replace(
        pages=plan.source.prefill(
            model, draft_params, state.draft.pages, piece.tokens, start, hidden, table, run
        )
    )
    if tail:
        # The states of the last positions before the root, as far as they lie in this piece.
        at = piece.length[:, None] - 1 - tail + jnp.arange(tail) - start[:, None]
        found = take_along(hidden, jnp.clip(at, 0, count - 1)[..., None], axis=1)
        inside = ((at >= 0) & (at < count))[..., None]
        found = jnp.where(inside, found.astype(tails.dtype), tails[piece.prompts])
        tails = tails.at[piece.prompts].set(found)
    return state._replace(draft=memory), tails


def place(plan: Plan, state: DecodeState, tails: Tails, new: Admission) -> DecodeState:
    """Starts sequences in slots; the last token of each becomes its root."""
    zeros = jnp.zeros_like(new.lengths)
    draft, noise = None, None
    pages = copy_pages(state.memory.pages, new.source, new.target)
    if state.noise is not None:  # a slot's new request has noise of its own
        kept = jax.tree.map(lambda x: take(x, new.slots), state.noise)
        noise = kept._replace(until=zeros)
    draft_pages = None
    if plan.source is not None:
        draft_pages = state.draft.pages
        if draft_pages is not None:
            draft_pages = copy_pages(draft_pages, new.source, new.target)
        states = None if tails is None else take(tails, new.prompts)
        started = plan.source.start(new.tokens, new.options.prompt_len, states)
        draft = plan.source.pause(Memory(None, started), state.draft.slots)
    fresh = DecodeState(
        tokens=new.tokens,
        length=new.lengths,
        limit=new.limit,
        finish=zeros + RUNNING,
        keys=rng.request_keys(new.words),
        options=new.options,
        memory=Memory(None, state.memory.slots),
        draft=draft,
        noise=noise,
    )
    own = jax.tree.map(lambda x, y: put(x, new.slots, y), per_slot(state), fresh)
    copied = state._replace(
        memory=state.memory._replace(pages=pages),
        draft=state.draft and state.draft._replace(pages=draft_pages),
    )
    return with_pages(own, copied)
