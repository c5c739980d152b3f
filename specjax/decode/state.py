"""The state of a running batch: one donated pytree, every field with its shape."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32

from specjax.cache import KVCache, empty_cache
from specjax.config import ModelConfig

RUNNING, STOPPED, LENGTH, EMPTY = 0, 1, 2, 3


class DraftState(NamedTuple):
    """What the draft head remembers between rounds.

    Attributes:
      cache: one cache layer per MTP module; slot j holds the row (h_j, e(x_{j+1})).
      hidden: [B W D] target states of the rows not yet in the cache, W = steps + mtp_num_layers.
        The first mtp_num_layers - 1 repeat rows of earlier rounds: module s lags s tokens behind.
      pending: [B] how many rows after those are valid: the tokens emitted last round.
    """

    cache: KVCache
    hidden: Float[Array, "B W D"]
    pending: Int[Array, " B"]


class DecodeState(NamedTuple):
    """A batch of B slots in the middle of generation.

    The root of slot b is `tokens[b, length[b] - 1]`: its row is not in the cache yet.

    Attributes:
      tokens: [B M] prompt and generated tokens at their absolute positions.
      logprobs: [B M] the target's temperature-scaled log-probability of each generated token.
      length: [B] tokens known. limit: [B] the length at which the slot ends.
      finish: [B] RUNNING, STOPPED by a stop token, LENGTH reached, or EMPTY.
      keys: [B 2] request keys. temperature: [B]. stop_ids: [B E] padded with -1.
      cache: the target's keys and values; rows below length - 1 are valid.
      draft: the draft head's memory; None in plain decoding.
      rounds: [B] rounds in which the slot was running.
      histogram: [B steps+2] rounds by number of tokens emitted.
    """

    tokens: Int[Array, "B M"]
    logprobs: Float[Array, "B M"]
    length: Int[Array, " B"]
    limit: Int[Array, " B"]
    finish: Int[Array, " B"]
    keys: UInt32[Array, "B 2"]
    temperature: Float[Array, " B"]
    stop_ids: Int[Array, "B E"]
    cache: KVCache
    draft: DraftState | None
    rounds: Int[Array, " B"]
    histogram: Int[Array, "B X"]


def cache_slots(cfg: ModelConfig, max_len: int, steps: int) -> int:
    """Slots of a cache: a commit may write a whole round or window past the longest sequence."""
    return max_len + max(steps + cfg.mtp_num_layers, steps + 1)


def empty_state(
    cfg: ModelConfig, batch: int, max_len: int, steps: int, stop_width: int
) -> DecodeState:
    """A batch of empty slots.

    Args:
      steps: draft steps of the strategy; 0 is plain decoding, which keeps no draft state.
      stop_width: stop tokens that a request may have, the model's own included.
    """
    window = steps + cfg.mtp_num_layers
    slots = cache_slots(cfg, max_len, steps)
    stacked = cfg.scan_layers
    draft = None
    if steps:
        draft = DraftState(
            cache=empty_cache(cfg, batch, slots, cfg.mtp_num_layers, stacked=False),
            hidden=jnp.zeros((batch, window, cfg.hidden_size), jnp.dtype(cfg.compute_dtype)),
            pending=jnp.ones((batch,), jnp.int32),
        )
    return DecodeState(
        tokens=jnp.zeros((batch, max_len), jnp.int32),
        logprobs=jnp.zeros((batch, max_len), jnp.float32),
        length=jnp.ones((batch,), jnp.int32),
        limit=jnp.ones((batch,), jnp.int32),
        finish=jnp.full((batch,), EMPTY, jnp.int32),
        keys=jnp.zeros((batch, 2), jnp.uint32),
        temperature=jnp.ones((batch,), jnp.float32),
        stop_ids=jnp.full((batch, stop_width), -1, jnp.int32),
        cache=empty_cache(cfg, batch, slots, cfg.num_layers, stacked),
        draft=draft,
        rounds=jnp.zeros((batch,), jnp.int32),
        histogram=jnp.zeros((batch, steps + 2), jnp.int32),
    )


def take_positions(x: Array, start: Int[Array, " B"], count: int) -> Array:
    """x[b, start[b] : start[b] + count], clamped to the array's ends: [B M] -> [B count]."""
    index = jnp.clip(start[:, None] + jnp.arange(count), 0, x.shape[1] - 1)
    return jnp.take_along_axis(x, index, axis=1)


def put_positions(x: Array, values: Array, start: Array, count: Array) -> Array:
    """Writes values[b, :count[b]] to x[b, start[b] : ...], by a mask rather than a scatter."""
    offset = jnp.arange(x.shape[1])[None] - start[:, None]
    inside = (offset >= 0) & (offset < count[:, None])
    picked = jnp.take_along_axis(values, jnp.clip(offset, 0, values.shape[1] - 1), axis=1)
    return jnp.where(inside, picked.astype(x.dtype), x)
