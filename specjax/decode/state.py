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
from specjax.decode.noise import Ahead
from specjax.decode.options import Features, Options, neutral
from specjax.decode.sampling import Counts
from specjax.decode.tree import DynamicTree, Tree
from specjax.indexing import put, take, take_along
from specjax.interfaces import Draft, Memory, Table

RUNNING, STOPPED, LENGTH, EMPTY, INVALID = 0, 1, 2, 3, 4


@dataclasses.dataclass(frozen=True)
class Plan:
    """Everything that a compiled program is made for: a strategy, its rule and its draft source.

    Fields that are not listed are those of `SpecConfig`.

    Attributes:
      cfg: config of the target.
      tree: tree of the strategy; None: plain decoding.
      source: the draft source; None: there is none.
      mode: acceptance mode.
      features: sampling options that the program takes into account.
      telemetry: whether rejections are recorded.
      rule: function `(plan, state, draft, scores) -> Acceptance` that takes the place of the
        mode's own rule, in benches that decide what is accepted.
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
      tokens: [B max_len] prompt and generated tokens at their absolute positions.
      length: [B] number of tokens known.
      limit: [B] length at which the slot ends.
      finish: [B] RUNNING; STOPPED by a stop token; LENGTH: the limit is reached; EMPTY: the slot
        holds no sequence; INVALID: the target's logits of the next token are no distribution.
      keys: [B 2] request keys.
      options: sampling options of each slot, and its stop tokens.
      memory: the target's memory of the positions below length - 1.
      draft: the draft source's memory; None: there is no draft source.
      noise: the noise that drafting and verification share, while a round runs that needs it.
      table: [B X] the X pages of each slot, while a chunk runs; None: slot b has page b to itself.
      counts: how often each token occurred in each slot, for penalties; None between chunks, and
        without penalties.
    """

    tokens: Int[Array, "B max_len"]
    length: Int[Array, " B"]
    limit: Int[Array, " B"]
    finish: Int[Array, " B"]
    keys: UInt32[Array, "B 2"]
    options: Options
    memory: Memory
    draft: Memory | None
    noise: Ahead | None = None
    table: Table = None
    counts: Counts | None = None


@dataclasses.dataclass(frozen=True)
class StateSizes(interfaces.Room):
    """The sizes of a state: those of its memory, and two more.

    Attributes:
      max_len: number of prompt and generated tokens of a sequence at most.
      stop_width: number of stop tokens of a request at most, the model's own included.
    """

    max_len: int
    stop_width: int


def empty_state(plan: Plan, sizes: StateSizes) -> DecodeState:
    """Makes a state of empty slots.

    Args:
      plan: of the plans that will be used, the one with the most steps.
    """
    cfg, batch = plan.cfg, sizes.slots
    return DecodeState(
        tokens=jnp.zeros((batch, sizes.max_len), jnp.int32),
        length=jnp.ones((batch,), jnp.int32),
        limit=jnp.ones((batch,), jnp.int32),
        finish=jnp.full((batch,), EMPTY, jnp.int32),
        keys=jnp.zeros((batch, 2), jnp.uint32),
        options=neutral(batch, cfg.vocab_size, sizes.stop_width),
        memory=memory.empty(cfg, sizes),
        draft=plan.source.empty(sizes, plan.steps) if plan.source else None,
    )


def prefix_lengths(state: DecodeState) -> Int[Array, " B"]:
    """The positions [B] that a round reads of the pages: 0 for a slot that does not run."""
    return jnp.where(state.finish == RUNNING, state.length - 1, 0)


def per_slot(state: DecodeState) -> DecodeState:
    """Returns the state with only the fields that have slots in front: without pages and table."""
    target = state.memory._replace(pages=None)
    draft = state.draft and state.draft._replace(pages=None)
    return state._replace(memory=target, draft=draft, table=None)


def with_pages(state: DecodeState, pages: DecodeState) -> DecodeState:
    """Joins the slots of `state` with the pages of another state."""
    target = state.memory._replace(pages=pages.memory.pages)
    draft = state.draft and state.draft._replace(pages=pages.draft.pages)
    return state._replace(memory=target, draft=draft)


class RowMap(NamedTuple):
    """The sequences of a chunk: the first ones have its rows, the others wait for rows to be free.

    Attributes:
      slots: [sequences] slot of each sequence.
      active: [sequences] whether each sequence may run; entries that may not are padding.
      table: [sequences X] the pages of each sequence.
    """

    slots: Int[Array, " sequences"]
    active: Bool[Array, " sequences"]
    table: Table

    def of(self, row_to_sequence: Int[Array, " rows"]) -> RowMap:
        """Returns the entries of the sequences that have rows, one entry per row."""
        return jax.tree.map(lambda x: take(x, row_to_sequence), self)

    def running(self, state: DecodeState) -> Bool[Array, " sequences"]:
        """Returns whether each sequence is active and has not ended."""
        return self.active & (take(state.finish, self.slots) == RUNNING)


def take_over(
    unfinished: Bool[Array, " sequences"],
    active: Bool[Array, " sequences"],
    row_to_sequence: Int[Array, " rows"],
) -> Int[Array, " rows"]:
    """Gives the rows of sequences that have ended to sequences that wait, in order.

    Args:
      unfinished: whether each sequence of a row map is active and has not ended.
      active: whether each sequence may run, see `RowMap`.
      row_to_sequence: index into the row map of the sequence that has each row.

    Returns:
      the sequence of each row after the take-over. A row that was never active stays as it is.
    """
    waits = put(unfinished, row_to_sequence, jnp.zeros(len(row_to_sequence), bool))
    queue = jnp.argsort(~waits, stable=True)
    free = take(active & ~unfinished, row_to_sequence)
    turn = jnp.cumsum(free) - 1
    taken = free & (turn < waits.sum())
    following = take(queue, jnp.maximum(turn, 0))
    return jnp.where(taken, following, row_to_sequence).astype(jnp.int32)


def take_slots(state: DecodeState, entries: RowMap) -> DecodeState:
    """Takes some slots as a batch, with all pages; slots that are not active do not run."""
    batch = jax.tree.map(lambda x: take(x, entries.slots), per_slot(state))
    finish = jnp.where(entries.active, batch.finish, jnp.maximum(batch.finish, STOPPED))
    return with_pages(batch._replace(finish=finish, table=entries.table), state)


def put_slots(state: DecodeState, batch: DecodeState, slots: Int[Array, " rows"]) -> DecodeState:
    """Writes a batch that `take_slots` took back to its slots, and takes over its pages.

    Fields that a chunk does not change (limits, keys, options) or has left out (None) stay.
    """

    def write(x, new):
        return put(x, slots, new.astype(x.dtype))

    changed = ("tokens", "length", "finish")
    fields = {name: write(getattr(state, name), getattr(batch, name)) for name in changed}
    kept = memory.put_slots(state.memory.slots, slots, batch.memory.slots)
    fields["memory"] = Memory(batch.memory.pages, kept)
    if batch.draft is not None:
        kept = memory.put_slots(state.draft.slots, slots, batch.draft.slots)
        fields["draft"] = Memory(batch.draft.pages, kept)
    return state._replace(**fields)


def take_positions(x: Array, start: Int[Array, " B"], count: int) -> Array:
    """Takes x[b, start[b] : start[b] + count], clamped to the array's ends: [B ..] -> [B count]."""
    index = jnp.clip(start[:, None] + jnp.arange(count), 0, x.shape[1] - 1)
    return take_along(x, index, axis=1)


def put_positions(x: Array, values: Array, start: Array, count: Array) -> Array:
    """Writes values[b, :count[b]] to x[b, start[b] : ...], by a mask rather than a scatter."""
    offset = jnp.arange(x.shape[1])[None] - start[:, None]
    inside = (offset >= 0) & (offset < count[:, None])
    picked = take_along(values, jnp.clip(offset, 0, values.shape[1] - 1), axis=1)
    return jnp.where(inside, picked.astype(x.dtype), x)
