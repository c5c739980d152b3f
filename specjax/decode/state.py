"""The state of a running batch: one donated pytree, every field with its shape."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, UInt32

from specjax.cache import KVCache, Table, empty_cache
from specjax.decode.options import Options, neutral
from specjax.decode.plan import Plan
from specjax.decode.rng import NoiseRing, empty_ring
from specjax.draft.source import Memory
from specjax.indexing import put, take, take_along

RUNNING, STOPPED, LENGTH, EMPTY = 0, 1, 2, 3


class DecodeState(NamedTuple):
    """B slots in the middle of generation, between chunks or within one.

    The root of slot b is `tokens[b, length[b] - 1]`: its row is not in the cache yet.

    Attributes:
      tokens: [B M] prompt and generated tokens at their absolute positions.
      length: [B] tokens known. limit: [B] the length at which the slot ends.
      finish: [B] RUNNING, STOPPED by a stop token, LENGTH reached, or EMPTY.
      keys: [B 2] request keys. options: how each slot is sampled, and its stop tokens.
      cache: the target's keys and values; rows below length - 1 are valid.
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
    cache: KVCache
    draft: Memory | None
    noise: NoiseRing | None
    table: Table = None


@dataclasses.dataclass(frozen=True)
class Room:
    """The sizes of a state.

    Attributes:
      slots: sequences. max_len: prompt and generated tokens of one. stop_width: stop tokens that a
        request may have, the model's own included.
      pages, page_size: of the caches.
    """

    slots: int
    max_len: int
    stop_width: int
    pages: int
    page_size: int


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
        cache = plan.source.empty_cache(room.pages, room.page_size)
        draft = Memory(cache, plan.source.empty_slots(batch, plan.steps))
    return DecodeState(
        tokens=jnp.zeros((batch, room.max_len), jnp.int32),
        length=jnp.ones((batch,), jnp.int32),
        limit=jnp.ones((batch,), jnp.int32),
        finish=jnp.full((batch,), EMPTY, jnp.int32),
        keys=jnp.zeros((batch, 2), jnp.uint32),
        options=neutral(batch, cfg.vocab_size, room.stop_width),
        cache=empty_cache(cfg, room.pages, room.page_size, cfg.num_layers, cfg.scan_layers),
        draft=draft,
        noise=noise,
    )


def prefix_lengths(state: DecodeState) -> Int[Array, " B"]:
    """How much of the cache a round reads; a slot that does not run must cost nobody time."""
    return jnp.where(state.finish == RUNNING, state.length - 1, 0)


def per_slot(state: DecodeState) -> DecodeState:
    """Only what has slots in front: without the caches' pages."""
    draft = state.draft and state.draft._replace(cache=None)
    return state._replace(cache=None, draft=draft, table=None)


class Standby(NamedTuple):
    """Started sequences that wait for a row of a chunk, see `take_over`.

    Attributes:
      slots: [w] of each. table: [w X] their pages. count: how many there are; the rest is padding.
    """

    slots: Int[Array, " w"]
    table: Table
    count: Int[Array, ""]


def take_over(
    state: DecodeState,
    slots: Int[Array, " b"],
    active: Bool[Array, " b"],
    table: Table,
    standby: Standby,
) -> tuple[Int[Array, " b"], Table, Int[Array, " b"]]:
    """Rows of a chunk whose sequences have ended go to those that stand by, in order.

    So a chunk that was enqueued before the host knew who ended in the one before has no idle rows.

    Returns:
      slots, table: of who runs. who: [b] index of it, among the chunk's own and then those that
      stood by.
    """
    own = jnp.arange(len(slots))
    ended = active & (take(state.finish, slots) != RUNNING)
    turn = jnp.cumsum(ended) - 1
    who = jnp.where(ended & (turn < standby.count), len(slots) + turn, own)
    slots = take(jnp.concatenate([slots, standby.slots]), who)
    table = take(jnp.concatenate([table, standby.table]), who)
    return slots, table, who.astype(jnp.int32)


def take_slots(
    state: DecodeState, slots: Int[Array, " b"], active: Bool[Array, " b"], table: Table
) -> DecodeState:
    """Some slots as a batch of their own, with all pages.

    Args:
      active: False: this one must not run, whatever it was doing.
      table: of these slots.
    """
    here = jax.tree.map(lambda x: take(x, slots), per_slot(state))
    finish = jnp.where(active, here.finish, jnp.maximum(here.finish, STOPPED))
    draft = state.draft and here.draft._replace(cache=state.draft.cache)
    return here._replace(cache=state.cache, draft=draft, finish=finish, table=table)


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
    if here.draft is not None:
        memory = jax.tree.map(write, state.draft.slots, here.draft.slots)
        fields["draft"] = Memory(here.draft.cache, memory)
    return state._replace(**fields, cache=here.cache)


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
