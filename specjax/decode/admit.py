"""Before the first round: prefill prompts into pages, and start sequences in slots.

Two programs, because one prompt is sampled many times: `prefill` runs the model over a prompt,
piece by piece, `place` starts a slot that samples it. The slot's table refers to the prompt's full
pages, which nobody writes any more; of the last page, which the slot will fill up, it gets a copy.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

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
from specjax.memory import (
    Commit,
    after_of,
    choose_slots,
    commit,
    copy_pages,
    empty_slots,
    page_size,
    put_slots,
    take_slots,
)
from specjax.models.transformer import Transformer


class Prompts(NamedTuple):
    """What is kept of Q prompts, beside their pages, for the sequences that start from them.

    Attributes:
      tails: [Q tail N] the target's states before the root that the draft starts from; None: it
        asks for none.
      slots: of the target's memory, after all positions that were read, up to the root.
    """

    tails: Float[Array, "Q tail N"] | None
    slots: Any


class Piece(NamedTuple):
    """Up to T positions of R prompts.

    Attributes:
      tokens: [R T + tail] from `start` on; what is beyond a prompt is arbitrary.
      start: [R] a multiple of the page size, or of T if that is less.
      length: [R] of the whole prompts. prompts: [R] their rows in `Prompts`.
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
      slots: [M] slot of each. prompts: [M] row of its prompt in `Prompts`.
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


def empty_prompts(plan: Plan, prompts: int) -> Prompts:
    """Room for what is kept of so many prompts."""
    tails = None
    if plan.source is not None and plan.source.needs.states:
        width = len(plan.taps) * plan.cfg.hidden_size
        shape = (prompts, plan.source.needs.states, width)
        tails = jnp.zeros(shape, jnp.dtype(plan.cfg.run.compute_dtype))
    return Prompts(tails, empty_slots(plan.cfg, prompts))


def prefill(
    model: Transformer,
    draft_params,
    plan: Plan,
    state: DecodeState,
    kept: Prompts,
    piece: Piece,
    stride: int = 1,
) -> tuple[DecodeState, Prompts]:
    """Runs a piece of R prompts through target and draft source, and takes it into their memory.

    Rows past a prompt's end are written to pages as well, and never visible. A prompt's first piece
    begins with an empty slot, whatever an earlier prompt has left in its row.

    Args:
      stride: pieces start at multiples of it.
    """
    tail = plan.source.needs.states if plan.source else 0
    count, start, table = piece.tokens.shape[1] - tail, piece.start, piece.table
    positions = start[:, None] + jnp.arange(count)
    where = Where("tree", positions, prefix=start, visible=chain_bits(count), table=table)
    before = take_slots(kept.slots, piece.prompts)
    slots = choose_slots(start == 0, empty_slots(plan.cfg, len(start)), before)
    target = Memory(state.memory.pages, slots)
    found = model.decode(piece.tokens[:, :count], where, target, taps=plan.taps)
    run = math.gcd(count, stride, page_size(state.memory.pages))  # within a page
    to = Commit(start, table, after_of(found.x), run)
    known = jnp.clip(piece.length - 1 - start, 0, count)  # without the root
    target = commit(plan.cfg, target, found.scratch, None, known, to)
    kept = kept._replace(slots=put_slots(kept.slots, piece.prompts, target.slots))
    state = state._replace(memory=state.memory._replace(pages=target.pages))
    if plan.source is None:
        return state, kept
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
        found = jnp.where(inside, found.astype(kept.tails.dtype), kept.tails[piece.prompts])
        kept = kept._replace(tails=kept.tails.at[piece.prompts].set(found))
    return state._replace(draft=memory), kept


def place(plan: Plan, state: DecodeState, kept: Prompts, new: Admission) -> DecodeState:
    """Starts sequences in slots; the last token of each becomes its root."""
    zeros = jnp.zeros_like(new.lengths)
    draft, noise = None, None
    pages = copy_pages(state.memory.pages, new.source, new.target)
    if state.noise is not None:  # a slot's new request has noise of its own
        ring = jax.tree.map(lambda x: take(x, new.slots), state.noise)
        noise = ring._replace(until=zeros)
    draft_pages = None
    if plan.source is not None:
        draft_pages = state.draft.pages
        if draft_pages is not None:
            draft_pages = copy_pages(draft_pages, new.source, new.target)
        states = None if kept.tails is None else take(kept.tails, new.prompts)
        started = plan.source.start(new.tokens, new.options.prompt_len, states)
        draft = plan.source.pause(Memory(None, started), state.draft.slots)
    # Of a prompt of one token, the root, nothing is read, and its row holds another's slot.
    slots = take_slots(kept.slots, new.prompts)
    empty = empty_slots(plan.cfg, len(new.slots))
    slots = choose_slots(new.lengths == 1, empty, slots)
    fresh = DecodeState(
        tokens=new.tokens,
        length=new.lengths,
        limit=new.limit,
        finish=zeros + RUNNING,
        keys=rng.request_keys(new.words),
        options=new.options,
        memory=Memory(None, slots),
        draft=draft,
        noise=noise,
    )
    own = jax.tree.map(lambda x, y: put(x, new.slots, y), per_slot(state), fresh)
    copied = state._replace(
        memory=state.memory._replace(pages=pages),
        draft=state.draft and state.draft._replace(pages=draft_pages),
    )
    return with_pages(own, copied)
