"""What a round works on: its static plan, and the state of a batch as one donated pytree."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, UInt32

from specjax import interfaces, memory
from specjax.config import ModelConfig, Strategy
from specjax.decode.noise import NoiseRing, empty_ring
from specjax.decode.options import Features, Options, neutral
from specjax.decode.sampling import Counts
from specjax.decode.tree import DynamicTree, Tree
from specjax.indexing import put, take, take_along
from specjax.interfaces import Draft, Memory, Table

RUNNING, STOPPED, LENGTH, EMPTY, INVALID = 0, 1, 2, 3, 4


@dataclasses.dataclass(frozen=True)
class Plan:
    """Everything that a compiled program is made for: a strategy, its rule and its draft source.

    Attributes:
      tree: None is plain decoding.
      mode: acceptance mode. telemetry: record rejections. The rest is as in `SpecConfig`.
      rule: `(plan, state, draft, scores) -> Acceptance` in place of the mode's own rule, for
        benches that decide what is accepted.
    """

    cfg: ModelConfig
    tree: Tree | DynamicTree | None = None
    source: Draft | None = None
    mode: str = "coupled"
    features: Features = Features()
    aligned: bool = True
    tau: float = 0.6
    adaptive_width: bool = False
    invariant: bool = False
    telemetry: bool = False
    rule: Callable | None = None

    @property
    def strategy(self) -> Strategy:
        return self.tree.strategy if self.tree else Strategy.OFF

    @property
    def steps(self) -> int:
        return self.strategy.steps

    @property
    def taps(self) -> tuple[int | str, ...]:
        """Hidden states of the target that the draft source is given."""
        return self.source.needs.taps if self.source else ()

    @property
    def needs_q(self) -> bool:
        """Whether the rule divides by the draft's probabilities."""
        return self.mode in ("block", "recursive")

    @property
    def draws_noise(self) -> bool:
        """Whether rounds need the noise of positions."""
        return self.tree is not None and self.mode == "coupled" and self.features.sampled


class DecodeState(NamedTuple):
    """B slots that generate, between chunks or within one.

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
      counts: of the slots' tokens, for penalties; None between chunks, and without penalties.
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
    counts: Counts | None = None


@dataclasses.dataclass(frozen=True)
class StateSizes(interfaces.Room):
    """The sizes of a state.

    Attributes:
      max_len: prompt and generated tokens of a sequence. stop_width: stop tokens that a request may
        have, the model's own included.
    """

    max_len: int
    stop_width: int


def margin(plan: Plan) -> int:
    """How many positions past the longest sequence a commit or a draft source may write to."""
    return max(plan.steps + 1, plan.source.margin(plan.steps) if plan.source else 0)


def empty_state(plan: Plan, sizes: StateSizes) -> DecodeState:
    """A state of empty slots.

    Args:
      plan: the one with the most steps of those that will be used.
    """
    cfg, batch = plan.cfg, sizes.slots
    noise = draft = None
    if plan.tree and plan.mode == "coupled":
        noise = empty_ring(batch, plan.steps + 1, cfg.vocab_size)
    if plan.source:
        draft = plan.source.empty(sizes, plan.steps)
    return DecodeState(
        tokens=jnp.zeros((batch, sizes.max_len), jnp.int32),
        length=jnp.ones((batch,), jnp.int32),
        limit=jnp.ones((batch,), jnp.int32),
        finish=jnp.full((batch,), EMPTY, jnp.int32),
        keys=jnp.zeros((batch, 2), jnp.uint32),
        options=neutral(batch, cfg.vocab_size, sizes.stop_width),
        memory=memory.empty(cfg, sizes),
        draft=draft,
        noise=noise,
    )


def prefix_lengths(state: DecodeState) -> Int[Array, " B"]:
    """The positions [B] that a round reads of the pages: 0 for a slot that does not run."""
    return jnp.where(state.finish == RUNNING, state.length - 1, 0)


def per_slot(state: DecodeState) -> DecodeState:
    """The fields that have slots in front: all but the memories' pages."""
    target = state.memory._replace(pages=None)
    draft = state.draft and state.draft._replace(pages=None)
    return state._replace(memory=target, draft=draft, table=None)


def with_pages(state: DecodeState, pages: DecodeState) -> DecodeState:
    """The slots of one state and the pages of another."""
    target = state.memory._replace(pages=pages.memory.pages)
    draft = state.draft and state.draft._replace(pages=pages.draft.pages)
    return state._replace(memory=target, draft=draft)


class RowMap(NamedTuple):
    """The sequences of a chunk: the first have its rows, the others wait for rows to be free.

    Attributes:
      slots: [N] of each. active: [N] whether it may run; the others are padding.
      table: [N X] the pages of each.
    """

    slots: Int[Array, " N"]
    active: Bool[Array, " N"]
    table: Table

    def of(self, who: Int[Array, " b"]) -> RowMap:
        """The entries of the sequences `who`."""
        return jax.tree.map(lambda x: take(x, who), self)

    def running(self, state: DecodeState) -> Bool[Array, " N"]:
        return self.active & (take(state.finish, self.slots) == RUNNING)


def take_over(
    runs: Bool[Array, " N"], active: Bool[Array, " N"], who: Int[Array, " b"]
) -> Int[Array, " b"]:
    """Gives the rows of sequences that have ended to those that wait, in order.

    Args:
      runs: whether each sequence of a row map has not ended. active: see `RowMap`.
      who: the sequence of each row, as an index into the row map.

    Returns:
      the sequence of each row from now on. A row that was never active stays as it is.
    """
    waits = put(runs, who, jnp.zeros(len(who), bool))
    line = jnp.argsort(~waits, stable=True)
    free = take(active & ~runs, who)
    turn = jnp.cumsum(free) - 1
    taken = free & (turn < waits.sum())
    return jnp.where(taken, take(line, jnp.maximum(turn, 0)), who).astype(jnp.int32)


def take_slots(state: DecodeState, rows: RowMap) -> DecodeState:
    """Takes some slots as a batch of their own, with all pages; what is not active does not run."""
    here = jax.tree.map(lambda x: take(x, rows.slots), per_slot(state))
    finish = jnp.where(rows.active, here.finish, jnp.maximum(here.finish, STOPPED))
    return with_pages(here._replace(finish=finish, table=rows.table), state)


def put_slots(state: DecodeState, here: DecodeState, slots: Int[Array, " b"]) -> DecodeState:
    """The whole state after `take_slots` and a chunk; the pages are those of `here`.

    Fields that a chunk does not change (limits, keys, options) or has left out (None) stay.
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
