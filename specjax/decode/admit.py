"""Before the first round: prefill prompts, and place them into slots of a running batch.

Two programs, because one prompt is sampled many times: `prefill` runs the model once per prompt,
`place` copies its rows into every slot that samples it.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, UInt32

from specjax.cache import KVCache
from specjax.decode import rng
from specjax.decode.options import Options
from specjax.decode.plan import Plan
from specjax.decode.state import DecodeState
from specjax.draft.source import Memory
from specjax.models.transformer import Transformer


class Prefilled(NamedTuple):
    """What slots need of R prompts.

    Attributes:
      cache: keys and values of the prompts' P positions. draft: what the draft source knows of
        them; None in plain decoding.
    """

    cache: KVCache
    draft: Memory


class Admission(NamedTuple):
    """M requests to place; a slot that is listed twice is simply written twice.

    Attributes:
      slots: [M] slot of each. rows: [M] its row among the prefilled prompts.
      tokens: [M P] prompts, right padded. lengths: [M]. limit: [M] final length at most.
      words: [M 5] see `rng.request_words`. options: of the M requests.
    """

    slots: Int[Array, " M"]
    rows: Int[Array, " M"]
    tokens: Int[Array, "M P"]
    lengths: Int[Array, " M"]
    limit: Int[Array, " M"]
    words: UInt32[Array, "M 5"]
    options: Options


def prefill(
    model: Transformer,
    draft_params,
    plan: Plan,
    tokens: Int[Array, "R P"],
    lengths: Int[Array, " R"],
) -> Prefilled:
    """Runs prompts through target and draft; rows past a prompt's length are never visible."""
    x, cache = model.prefill(tokens, lengths)
    if plan.source is None:
        return Prefilled(cache, None)
    hidden = model.draft_hidden(x)
    memory = plan.source.prefill(model, draft_params, plan.steps, tokens, lengths, hidden)
    return Prefilled(cache, memory)


def place(state: DecodeState, prefilled: Prefilled, new: Admission) -> DecodeState:
    """Overwrites slots with prefilled prompts; the last prompt token becomes the root."""
    count, room = new.slots.shape[0], state.tokens.shape[1] - new.tokens.shape[1]
    fresh = DecodeState(
        tokens=jnp.pad(new.tokens, ((0, 0), (0, room))),
        logprobs=jnp.zeros((count, state.tokens.shape[1]), jnp.float32),
        length=new.lengths,
        limit=new.limit,
        finish=jnp.zeros((count,), jnp.int32),
        keys=rng.request_keys(new.words),
        options=new.options,
        cache=None,
        draft=None,
        noise=None,
        rounds=jnp.zeros((count,), jnp.int32),
        histogram=jnp.zeros((count, state.histogram.shape[1]), jnp.int32),
    )
    shared, noise = Prefilled(state.cache, state.draft), state.noise
    if noise is not None:  # a slot's new request has noise of its own
        noise = noise._replace(until=noise.until.at[new.slots].set(0))
    state = state._replace(cache=None, draft=None, noise=None)
    own, tree = jax.tree.flatten(state)
    cached, cached_tree = jax.tree.flatten(shared)

    def write(m, arrays):
        own, cached = arrays
        own = _copy_row(own, jax.tree.leaves(fresh), m, new.slots[m])
        cached = _copy_row(cached, jax.tree.leaves(prefilled), new.rows[m], new.slots[m])
        return own, cached

    own, cached = jax.lax.fori_loop(0, count, write, (own, cached))
    shared = jax.tree.unflatten(cached_tree, cached)
    state = jax.tree.unflatten(tree, own)
    return state._replace(cache=shared.cache, draft=shared.draft, noise=noise)


def _copy_row(arrays: list, sources: list, row: Array, slot: Array) -> list:
    """Row `row` of each source to `slot` of each array; shorter caches fill the first positions."""
    out = []
    for array, source in zip(arrays, sources, strict=True):
        axis = 1 if array.ndim == 5 else 0  # a scanned cache has its layers in front
        piece = jax.lax.dynamic_slice_in_dim(source, row, 1, axis=axis)
        start = [0] * array.ndim
        start[axis] = slot
        out.append(jax.lax.dynamic_update_slice(array, piece.astype(array.dtype), start))
    return out
