"""The state of a running batch: one donated pytree, every field with its shape."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32

from specjax.cache import KVCache, empty_cache
from specjax.decode.options import Options, neutral
from specjax.decode.plan import Plan
from specjax.decode.rng import NoiseRing, empty_ring
from specjax.draft.source import Memory

RUNNING, STOPPED, LENGTH, EMPTY = 0, 1, 2, 3


class DecodeState(NamedTuple):
    """A batch of B slots in the middle of generation.

    The root of slot b is `tokens[b, length[b] - 1]`: its row is not in the cache yet.

    Attributes:
      tokens: [B M] prompt and generated tokens at their absolute positions.
      logprobs: [B M] the target's temperature-scaled log-probability of each generated token.
      length: [B] tokens known. limit: [B] the length at which the slot ends.
      finish: [B] RUNNING, STOPPED by a stop token, LENGTH reached, or EMPTY.
      keys: [B 2] request keys. options: how each slot is sampled, and its stop tokens.
      cache: the target's keys and values; rows below length - 1 are valid.
      draft: the draft source's memory; None in plain decoding.
      noise: the ring that drafting and verification share; None unless the mode is `coupled`.
      rounds: [B] rounds in which the slot was running.
      histogram: [B steps+2] rounds by number of tokens emitted.
    """

    tokens: Int[Array, "B M"]
    logprobs: Float[Array, "B M"]
    length: Int[Array, " B"]
    limit: Int[Array, " B"]
    finish: Int[Array, " B"]
    keys: UInt32[Array, "B 2"]
    options: Options
    cache: KVCache
    draft: Memory
    noise: NoiseRing | None
    rounds: Int[Array, " B"]
    histogram: Int[Array, "B X"]


def cache_slots(plan: Plan, max_len: int) -> int:
    """Slots of a cache: a commit may write a whole round or window past the longest sequence."""
    margin = plan.source.margin(plan.steps) if plan.source else 0
    return max_len + max(plan.steps + 1, margin)


def empty_state(plan: Plan, batch: int, max_len: int, stop_width: int) -> DecodeState:
    """A batch of empty slots.

    Args:
      plan: plain decoding keeps neither draft memory nor noise.
      stop_width: stop tokens that a request may have, the model's own included.
    """
    cfg, slots = plan.cfg, cache_slots(plan, max_len)
    noise = None
    if plan.tree and plan.mode == "coupled":
        noise = empty_ring(batch, plan.steps + 1, cfg.vocab_size)
    return DecodeState(
        tokens=jnp.zeros((batch, max_len), jnp.int32),
        logprobs=jnp.zeros((batch, max_len), jnp.float32),
        length=jnp.ones((batch,), jnp.int32),
        limit=jnp.ones((batch,), jnp.int32),
        finish=jnp.full((batch,), EMPTY, jnp.int32),
        keys=jnp.zeros((batch, 2), jnp.uint32),
        options=neutral(batch, cfg.vocab_size, stop_width),
        cache=empty_cache(cfg, batch, slots, cfg.num_layers, cfg.scan_layers),
        draft=plan.source.empty(batch, slots, plan.steps) if plan.tree else None,
        noise=noise,
        rounds=jnp.zeros((batch,), jnp.int32),
        histogram=jnp.zeros((batch, plan.steps + 2), jnp.int32),
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
