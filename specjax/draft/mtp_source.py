"""The MTP head as a draft source: it drafts from the target's states, with a cache of its own."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from specjax.cache import KVCache, commit_rows, empty_cache
from specjax.config import ModelConfig
from specjax.decode.state import take_positions
from specjax.decode.tree import chain_bits
from specjax.draft.mtp import head_graphdef
from specjax.draft.source import Level, take_parents
from specjax.models.transformer import lm_logits


class HeadMemory(NamedTuple):
    """What the head remembers between rounds.

    Attributes:
      cache: one cache layer per MTP module; slot j holds the row (h_j, e(x_{j+1})).
      hidden: [B W D] target states of the rows not yet in the cache, W = steps + mtp_num_layers.
        The first mtp_num_layers - 1 repeat rows of earlier rounds: module s lags s tokens behind.
      pending: [B] how many rows after those are valid: the tokens emitted last round.
    """

    cache: KVCache
    hidden: Float[Array, "B W D"]
    pending: Int[Array, " B"]


class _Work(NamedTuple):
    """Between the steps of a round.

    Attributes:
      cache: with the accepted rows committed. slot: [B] last committed row.
      recycled: [B R D] the head's states at the rows last run, which stand for the target's.
      scratch: keys and values [B K total H] of the rows expanded so far; those from `start` on
        (a python integer) are of the module that runs now.
    """

    cache: KVCache
    slot: Int[Array, " B"]
    recycled: Float[Array, "B R D"]
    scratch: tuple[Array, Array]
    start: int = 0


@dataclasses.dataclass(frozen=True)
class MTPSource:
    """See `specjax.draft.source.DraftSource`; parameters are those of an `MTPHead`."""

    cfg: ModelConfig

    def margin(self, steps: int) -> int:
        return steps + self.cfg.mtp_num_layers

    def empty(self, batch: int, slots: int, steps: int) -> HeadMemory:
        cfg = self.cfg
        window = steps + cfg.mtp_num_layers
        return HeadMemory(
            cache=empty_cache(cfg, batch, slots, cfg.mtp_num_layers, stacked=False),
            hidden=jnp.zeros((batch, window, cfg.hidden_size), jnp.dtype(cfg.compute_dtype)),
            pending=jnp.ones((batch,), jnp.int32),
        )

    def prefill(self, model, params, steps, tokens, lengths, hidden) -> HeadMemory:
        """The first round extends the head over one row, the state before the root; the rows
        before it in the window repeat what the cache holds already."""
        modules = self.cfg.mtp_num_layers
        index = lengths[:, None] - 1 - modules + jnp.arange(steps + modules)
        index = jnp.clip(index, 0, hidden.shape[1] - 1)
        return HeadMemory(
            cache=self._head(params).prefill(hidden, model.embed_tokens(tokens), lengths),
            hidden=jnp.take_along_axis(hidden, index[..., None], axis=1),
            pending=jnp.ones_like(lengths),
        )

    def extend(self, model, params, state, steps: int, total: int):
        """Runs every module over the window of pending rows and commits their keys and values.

        The window's last valid row is the prediction at the root.
        """
        head, memory = self._head(params), state.draft
        modules, window = self.cfg.mtp_num_layers, memory.hidden.shape[1]
        lag = modules - 1
        first = state.length - 1 - memory.pending - lag
        slot = jnp.maximum(first, 0)
        hidden, rows, frontier = memory.hidden, [], None
        last = (lag + memory.pending - 1)[:, None, None]
        for index in range(modules):
            positions = first[:, None] + jnp.arange(window)
            embedded = model.embed_tokens(take_positions(state.tokens, first + 1 + index, window))
            normed, hidden, kv = head.decode(
                index,
                hidden,
                embedded,
                positions + index,
                memory.cache.layer(index),
                slot,
                chain_bits(window),
            )
            rows.append(kv)
            if index == 0:
                frontier = [jnp.take_along_axis(x, last, axis=1) for x in (normed, hidden)]
        new = KVCache(tuple(k for k, _ in rows), tuple(v for _, v in rows))
        normed, recycled = frontier
        batch, kv_heads, _, width = rows[0][0].shape
        empty = jnp.zeros((batch, kv_heads, total, width), rows[0][0].dtype)
        cache = commit_rows(memory.cache, new, slot)
        work = _Work(cache, state.length - 2, recycled, (empty, empty))
        return lm_logits(normed, model.head_weight()), work

    def step(self, model, params, work: _Work, level: Level):
        """Module min(step, last) over one level; only the last module sees earlier levels."""
        modules = self.cfg.mtp_num_layers
        index = min(level.step, modules - 1)
        start = level.offset if level.step == index else work.start
        # Module s > 0 has no base row past slot - s: those rows need tokens not yet known.
        prefix = work.slot + 1 if index == 0 else work.slot - (index - 1)
        positions = jnp.broadcast_to((work.slot + level.step)[:, None], level.tokens.shape)
        normed, recycled, scratch = self._head(params).decode(
            index,
            take_parents(work.recycled, level.parents),
            model.embed_tokens(level.tokens),
            positions,
            work.cache.layer(index),
            jnp.maximum(prefix, 0),
            _rows_from(level.visible, start),
            (work.scratch, level.offset),
        )
        work = work._replace(recycled=recycled, scratch=scratch, start=start)
        return lm_logits(normed, model.head_weight()), work

    def commit(self, memory: HeadMemory, work: _Work, hidden, count) -> HeadMemory:
        running = count > 0
        window = _pending_window(memory, hidden)
        return HeadMemory(
            cache=work.cache,
            hidden=jnp.where(running[:, None, None], window, memory.hidden),
            pending=jnp.where(running, count, memory.pending),
        )

    def _head(self, params):
        return nnx.merge(head_graphdef(self.cfg), params)


def _pending_window(memory: HeadMemory, hidden: Float[Array, "B E D"]) -> Array:
    """The rows that the head will extend over: the last few valid ones, then the new ones."""
    lag = memory.hidden.shape[1] - hidden.shape[1]
    if not lag:
        return hidden
    old_first = memory.pending[:, None] + jnp.arange(lag)  # last `lag` valid rows of the window
    carried = jnp.take_along_axis(memory.hidden, old_first[..., None], axis=1)
    return jnp.concatenate([carried, hidden], axis=1)


def _rows_from(words, start: int):
    """Bitmask words without the rows before `start`."""
    first = np.arange(words.shape[-1]) * 32
    keep = [sum(1 << bit for bit in range(32) if at + bit >= start) for at in first]
    return words & np.array(keep, np.uint32)
