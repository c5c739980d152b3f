"""The MTP head as a draft source: it drafts from the target's states, with a cache of its own."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from specjax.config import ModelConfig
from specjax.decode.state import RUNNING, take_positions
from specjax.decode.tree import chain_bits
from specjax.drafts.mtp import head_graphdef, to_panels
from specjax.drafts.source import ABSORBED, WINDOW, Level, Memory, take_parents
from specjax.indexing import take_along
from specjax.memory import KVCache, Table, after_of, commit_rows, empty_cache, page_bytes
from specjax.models.transformer import lm_logits


class HeadSlots(NamedTuple):
    """What the head remembers of each slot.

    Slot j of its cache holds the row (h_j, e(x_{j+1})), counted without the positions skipped.

    Attributes:
      hidden: [B W D] target states of the rows not yet in the cache. The first mtp_num_layers - 1
        repeat rows that are: module s lags s tokens behind.
      pending: [B] how many rows after those are valid.
      skipped: [B] positions that are missing in the cache: plain decoding ran for longer than W.
    """

    hidden: Float[Array, "B W D"]
    pending: Int[Array, " B"]
    skipped: Int[Array, " B"]


class _Work(NamedTuple):
    """Between the steps of a round.

    Attributes:
      cache: with the accepted rows committed. slot: [B] last committed row.
      position: [B] of that row in the sequence. table: of the cache's pages.
      recycled: [B R D] the head's states at the rows last run, which stand for the target's.
      scratch: keys and values [B K total H] of the rows expanded so far; those from `start` on
        (a python integer) are of the module that runs now.
    """

    cache: KVCache
    slot: Int[Array, " B"]
    position: Int[Array, " B"]
    table: Table
    recycled: Float[Array, "B R D"]
    scratch: tuple[Array, Array]
    start: int = 0


class _Pass(NamedTuple):
    """The modules over a run of rows: states for the language-model head and states to recycle of
    the first module [B T D], and every module's keys and values."""

    normed: Array
    recycled: Array
    rows: KVCache


@dataclasses.dataclass(frozen=True)
class MTPSource:
    """See `specjax.drafts.source.DraftSource`; parameters are those of an `MTPHead`."""

    cfg: ModelConfig

    @property
    def tail(self) -> int:
        return self.cfg.mtp_num_layers

    @property
    def looks_around(self) -> bool:
        return False

    def to_panels(self, params):
        return to_panels(params, self.cfg)

    def margin(self, steps: int) -> int:
        return max(steps, ABSORBED) + self.cfg.mtp_num_layers

    def page_bytes(self, size: int) -> int:
        return page_bytes(self.cfg, size, self.cfg.mtp_num_layers)

    def empty_cache(self, pages: int, size: int) -> KVCache:
        return empty_cache(self.cfg, pages, size, self.cfg.mtp_num_layers, stacked=False)

    def empty_slots(self, batch: int, steps: int) -> HeadSlots:
        cfg = self.cfg
        window = max(steps, WINDOW) + cfg.mtp_num_layers
        return HeadSlots(
            hidden=jnp.zeros((batch, window, cfg.hidden_size), jnp.dtype(cfg.compute_dtype)),
            pending=jnp.ones((batch,), jnp.int32),
            skipped=jnp.zeros((batch,), jnp.int32),
        )

    def prefill(self, model, params, cache, tokens, start, hidden, table, run=1) -> KVCache:
        """Rows whose tokens are not known yet are garbage, until `extend` comes past them."""
        count = hidden.shape[1]
        shifted = [tokens[:, 1 + s : 1 + s + count] for s in range(self.cfg.mtp_num_layers)]
        ran = self._run(model, params, cache, hidden, shifted, start, start, table)
        return self._commit(cache, ran.rows, start, ran.normed, table, run)

    def _commit(self, cache, rows, start, normed, table, run=1) -> KVCache:
        return commit_rows(
            cache, rows, start, after_of(normed), table, run, kernel=self.cfg.attention
        )

    def start(self, tokens, prompt_len, states) -> HeadSlots:
        """The first round extends the head over one row, the state before the root; the rows
        before it in the window repeat what the cache holds already."""
        ones = jnp.ones_like(prompt_len)
        return HeadSlots(states, ones, 0 * ones)

    def enter(self, model, params, state, steps: int) -> Memory:
        """Takes in rows until no slot has more of them than a round emits."""
        memory, lag = state.draft, self.cfg.mtp_num_layers - 1
        running, width = state.finish == RUNNING, memory.slots.hidden.shape[1]
        count = min(ABSORBED + lag, width)

        def behind(memory):
            return (running & (memory.slots.pending > steps + 1)).any()

        def absorb(memory):
            slots = memory.slots
            run, slot, _ = self._over_window(model, params, state, memory, count)
            cache = self._commit(memory.cache, run.rows, slot, run.normed, state.table)
            taken = jnp.where(running, jnp.clip(slots.pending - 1, 0, count - lag), 0)
            index = jnp.minimum(taken[:, None] + jnp.arange(width), width - 1)
            hidden = take_along(slots.hidden, index[..., None], axis=1)
            return Memory(cache, HeadSlots(hidden, slots.pending - taken, slots.skipped))

        # What `follow` dropped may have begun with rows that never were.
        first = state.length - 1 - memory.slots.pending - lag
        skipped = jnp.minimum(memory.slots.skipped, jnp.maximum(first, 0))
        memory = memory._replace(slots=memory.slots._replace(skipped=skipped))
        memory = jax.lax.while_loop(behind, absorb, memory)
        window = memory.slots.hidden[:, : steps + lag + 1]
        return memory._replace(slots=memory.slots._replace(hidden=window))

    def leave(self, memory: Memory, between: HeadSlots) -> Memory:
        slots = memory.slots
        room = between.hidden.shape[1] - slots.hidden.shape[1]
        hidden = jnp.pad(slots.hidden, ((0, 0), (0, room), (0, 0)))
        return memory._replace(slots=slots._replace(hidden=hidden))

    def follow(self, memory: Memory, hidden, count) -> Memory:
        """Appends the states. Where they do not fit the earliest are dropped: a hole in the
        head's cache, which is closed up, and costs acceptance but no token. The rows that the
        window repeats are among them: in the cache the later modules lack theirs."""
        slots, lag = memory.slots, self.cfg.mtp_num_layers - 1
        width, known = slots.hidden.shape[1], lag + slots.pending
        dropped = jnp.maximum(known + count - width, 0)
        at = dropped[:, None] + jnp.arange(width)
        behind = width + at - known[:, None]
        index = jnp.where(at < known[:, None], at, behind)
        index = jnp.minimum(index, width + hidden.shape[1] - 1)
        both = jnp.concatenate([slots.hidden, hidden.astype(slots.hidden.dtype)], axis=1)
        return memory._replace(
            slots=HeadSlots(
                hidden=take_along(both, index[..., None], axis=1),
                pending=slots.pending + count - dropped,
                skipped=slots.skipped + dropped,
            )
        )

    def extend(self, model, params, state, steps: int, total: int):
        """Runs every module over the window of pending rows and commits their keys and values.

        The window's last valid row is the prediction at the root.
        """
        memory = state.draft
        slots, lag = memory.slots, self.cfg.mtp_num_layers - 1
        window = slots.hidden.shape[1]
        run, slot, missing = self._over_window(model, params, state, memory, window)
        last = jnp.maximum(lag + slots.pending - 1 - missing, 0)[:, None, None]
        normed, recycled = (take_along(x, last, axis=1) for x in (run.normed, run.recycled))
        batch, kv_heads, _, width = run.rows.k[0].shape
        empty = jnp.zeros((batch, kv_heads, total, width), run.rows.k[0].dtype)
        cache = self._commit(memory.cache, run.rows, slot, run.normed, state.table)
        end = state.length - 2
        work = _Work(cache, end - slots.skipped, end, state.table, recycled, (empty, empty))
        return lm_logits(normed, model.head_weight()), work

    def _over_window(self, model, params, state, memory: Memory, count: int):
        """Every module over `count` rows of the window, the slot of the first of them, and [B] how
        many were passed over: in a short sequence the window begins before its first token."""
        slots, width = memory.slots, memory.slots.hidden.shape[1]
        first = state.length - 1 - slots.pending - (self.cfg.mtp_num_layers - 1)
        missing, first = jnp.maximum(-first, 0), jnp.maximum(first, 0)
        index = jnp.minimum(missing[:, None] + jnp.arange(count), width - 1)
        hidden = take_along(slots.hidden, index[..., None], axis=1)
        tokens = [
            take_positions(state.tokens, first + 1 + s, count)
            for s in range(self.cfg.mtp_num_layers)
        ]
        slot = first - slots.skipped
        run = self._run(model, params, memory.cache, hidden, tokens, first, slot, state.table)
        return run, slot, missing

    def _run(self, model, params, cache, hidden, tokens, first, slot, table) -> _Pass:
        """Every module over T rows whose positions follow `first` [B]; each sees `slot` rows.

        Args:
          tokens: [B T] per module, those that follow the rows.
        """
        head, count = self._head(params), hidden.shape[1]
        positions = first[:, None] + jnp.arange(count)
        bits, rows, outputs = chain_bits(count), [], None
        for s, following in enumerate(tokens):
            embedded = model.embed_tokens(following)
            normed, hidden, kv = head.decode(
                s, hidden, embedded, positions + s, cache.layer(s), slot, bits, table=table
            )
            rows.append(kv)
            outputs = outputs or (normed, hidden)
        return _Pass(*outputs, KVCache(tuple(k for k, _ in rows), tuple(v for _, v in rows)))

    def step(self, model, params, work: _Work, level: Level):
        """Module min(step, last) over one level; only the last module sees earlier levels."""
        modules = self.cfg.mtp_num_layers
        index = min(level.step, modules - 1)
        start = level.offset if level.step == index else work.start
        # Module s > 0 has no base row past slot - s: those rows need tokens not yet known.
        prefix = work.slot + 1 if index == 0 else work.slot - (index - 1)
        positions = jnp.broadcast_to((work.position + level.step)[:, None], level.tokens.shape)
        normed, recycled, scratch = self._head(params).decode(
            index,
            take_parents(work.recycled, level.parents),
            model.embed_tokens(level.tokens),
            positions,
            work.cache.layer(index),
            jnp.maximum(prefix, 0),
            _rows_from(level.visible, start),
            (work.scratch, level.offset),
            work.table,
        )
        work = work._replace(recycled=recycled, scratch=scratch, start=start)
        return lm_logits(normed, model.head_weight()), work

    def commit(self, memory: Memory, work: _Work, hidden, count) -> Memory:
        slots, running = memory.slots, count > 0
        window = _pending_window(slots, hidden)
        return Memory(
            work.cache,
            HeadSlots(
                hidden=jnp.where(running[:, None, None], window, slots.hidden),
                pending=jnp.where(running, count, slots.pending),
                skipped=slots.skipped,
            ),
        )

    def _head(self, params):
        return nnx.merge(head_graphdef(self.cfg), params)


def _pending_window(slots: HeadSlots, hidden: Float[Array, "B E D"]) -> Array:
    """The rows that the head will extend over: the last few valid ones, then the new ones."""
    lag = slots.hidden.shape[1] - hidden.shape[1]
    if not lag:
        return hidden
    old_first = slots.pending[:, None] + jnp.arange(lag)  # last `lag` valid rows of the window
    carried = jnp.take_along_axis(slots.hidden, old_first[..., None], axis=1)
    return jnp.concatenate([carried, hidden], axis=1)


def _rows_from(words, start: int):
    """Bitmask words without the rows before `start`."""
    first = np.arange(words.shape[-1]) * 32
    keep = [sum(1 << bit for bit in range(32) if at + bit >= start) for at in first]
    return words & np.array(keep, np.uint32)
