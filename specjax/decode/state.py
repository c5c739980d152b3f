"""The state of a running batch: one donated pytree, every field with its shape."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, UInt32

from specjax import interfaces, memory
from specjax.decode.options import Options, neutral
from specjax.decode.plan import Plan
from specjax.decode.rng import NoiseRing, empty_ring
from specjax.indexing import put, take, take_along
from specjax.interfaces import Memory, Table

RUNNING, STOPPED, LENGTH, EMPTY, INVALID = 0, 1, 2, 3, 4


class DecodeState(NamedTuple):
    """B slots in the middle of generation, between chunks or within one.

    The root of slot b is `tokens[b, length[b] - 1]`: its row is not in the cache yet.

    Attributes:
      tokens: [B M] prompt and generated tokens at their absolute positions.
      length: [B] tokens known. limit: [B] the length at which the slot ends.
      finish: [B] RUNNING, STOPPED by a stop token, LENGTH reached, EMPTY, or INVALID: the target's
        logits of the next token are no distribution.
      keys: [B 2] request keys. options: how each slot is sampled, and its stop tokens.
      memory: the target's, of the positions below length - 1.
      draft: the draft source's memory; None without one.
      noise: the ring that drafting and verification share; None unless the mode is `coupled`.
      table: [B X] the pages of each slot, while a chunk runs; None: slot b has page b.
    """

    tokens: Int[Array, "B M"]
    length: Int[Array, " B"]
    limit: Int[Array, " B"]
    finish: Int[Array, " B"]
    keys: UInt32[Array, "B 2"]
    options: Options
    memory: Memory
    draft: Memory | None
    noise: NoiseRing | None
    table: Table = None


@dataclasses.dataclass(frozen=True)
class Room(interfaces.Room):
    """The sizes of a state.

    Attributes:
      max_len: prompt and generated tokens of a sequence. stop_width: stop tokens that a request may
        have, the model's own included.
    """

    max_len: int
    stop_width: int


def margin(plan: Plan) -> int:
    """Positions past the longest sequence that a commit or a draft source may write to."""
    return max(plan.steps + 1, plan.source.margin(plan.steps) if plan.source else 0)


def empty_state(plan: Plan, room: Room) -> DecodeState:
    """Empty slots.

    Args:
      plan: the one with the most steps of those that will be used.
    """
    cfg, batch = plan.cfg, room.slots
    noise = draft = None
    if plan.tree and plan.mode == "coupled":
        noise = empty_ring(batch, plan.steps + 1, cfg.vocab_size)
    if plan.source:
        draft = plan.source.empty(room, plan.steps)
    return DecodeState(
        tokens=jnp.zeros((batch, room.max_len), jnp.int32),
        length=jnp.ones((batch,), jnp.int32),
        limit=jnp.ones((batch,), jnp.int32),
        finish=jnp.full((batch,), EMPTY, jnp.int32),
        keys=jnp.zeros((batch, 2), jnp.uint32),
        options=neutral(batch, cfg.vocab_size, room.stop_width),
        memory=memory.empty(cfg, room),
        draft=draft,
        noise=noise,
    )


def prefix_lengths(state: DecodeState) -> Int[Array, " B"]:
    """The positions [B] that a round reads of the pages: 0 for a slot that does not run."""
    return jnp.where(state.finish == RUNNING, state.length - 1, 0)


def per_slot(state: DecodeState) -> DecodeState:
    """Only what has slots in front: without the memories' pages."""
    target = state.memory._replace(pages=None)
    draft = state.draft and state.draft._replace(pages=None)
    return state._replace(memory=target, draft=draft, table=None)


def with_pages(state: DecodeState, pages: DecodeState) -> DecodeState:
    """The slots of one state and the pages of another."""
    target = state.memory._replace(pages=pages.memory.pages)
    draft = state.draft and state.draft._replace(pages=pages.draft.pages)
    return state._replace(memory=target, draft=draft)


class RowMap(NamedTuple):
    """Started sequences, in the order in which they run: the first have the rows of a chunk, the
    others wait, and take the rows of those that end.

    Attributes:
      slots: [N] of each. active: [N] those that may run; the others fill up. table: [N X] pages.
    """

    slots: Int[Array, " N"]
    active: Bool[Array, " N"]
    table: Table

    def of(self, who: Int[Array, " b"]) -> RowMap:
        """Some of them."""
        return jax.tree.map(lambda x: take(x, who), self)

    def running(self, state: DecodeState) -> Bool[Array, " N"]:
        return self.active & (take(state.finish, self.slots) == RUNNING)


def take_over(
    runs: Bool[Array, " N"], active: Bool[Array, " N"], who: Int[Array, " b"]
) -> Int[Array, " b"]:
    """Rows whose sequences have ended go to those that wait, in order.

    Args:
      runs: of a row map, those that have not ended. active: see `RowMap`. who: has each row, as an
        index into it.

    Returns:
      who has each row now. A row that was never active stays as it is.
    """
    waits = put(runs, who, jnp.zeros(len(who), bool))
    line = jnp.argsort(~waits, stable=True)
    free = take(active & ~runs, who)
    turn = jnp.cumsum(free) - 1
    taken = free & (turn < waits.sum())
    return jnp.where(taken, take(line, jnp.maximum(turn, 0)), who).astype(jnp.int32)


def take_slots(state: DecodeState, rows: RowMap) -> DecodeState:
    """Some slots as a batch of their own, with all pages; who is not active must not run."""
    here = jax.tree.map(lambda x: take(x, rows.slots), per_slot(state))
    finish = jnp.where(rows.active, here.finish, jnp.maximum(here.finish, STOPPED))
    return with_pages(here._replace(finish=finish, table=rows.table), state)


def put_slots(state: DecodeState, here: DecodeState, slots: Int[Array, " b"]) -> DecodeState:
    """The whole state after `take_slots` and a chunk; the pages are those of `here`.

    What a chunk does not change (limits, keys, options), or has left out (None), is not written.
    """

    def write(x, new):
        return put(x, slots, new.astype(x.dtype))

    changed = ("tokens", "length", "finish", "noise")
    fields = {
        name: jax.tree.map(write, getattr(state, name), new)
        for name in changed
        if (new := getattr(here, name)) is not None
    }
    kept = memory.put_slots(state.memory.slots, slots, here.memory.slots)
    fields["memory"] = Memory(here.memory.pages, kept)
    if here.draft is not None:
        kept = memory.put_slots(state.draft.slots, slots, here.draft.slots)
        fields["draft"] = Memory(here.draft.pages, kept)
    return state._replace(**fields)


def take_positions(x: Array, start: Int[Array, " B"], count: int) -> Array:
    """x[b, start[b] : start[b] + count], clamped to the array's ends: [B M] -> [B count]."""
    index = jnp.clip(start[:, None] + jnp.arange(count), 0, x.shape[1] - 1)
    return take_along(x, index, axis=1)


def put_positions(x: Array, values: Array, start: Array, count: Array) -> Array:
    """Writes values[b, :count[b]] to x[b, start[b] : ...], by a mask rather than a scatter."""
    offset = jnp.arange(x.shape[1])[None] - start[:, None]
    inside = (offset >= 0) & (offset < count[:, None])
    picked = take_along(values, jnp.clip(offset, 0, values.shape[1] - 1), axis=1)
    return jnp.where(inside, picked.astype(x.dtype), x)
