"""Before the first round: prefill prompts, and place them into slots of a running batch.

Two programs, because one prompt is sampled many times: `prefill` runs the model once per prompt,
`place` copies its rows into every slot that samples it.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32

from specjax.cache import KVCache
from specjax.decode import rng
from specjax.decode.state import DecodeState, DraftState
from specjax.draft.mtp import MTPHead
from specjax.models.transformer import Transformer


class Prefilled(NamedTuple):
    """What slots need of R prompts.

    Attributes:
      cache: keys and values of the prompts' P positions. draft: likewise of the head, with the
        window of the first round; None in plain decoding.
    """

    cache: KVCache
    draft: DraftState | None


class Admission(NamedTuple):
    """M requests to place; a slot that is listed twice is simply written twice.

    Attributes:
      slots: [M] slot of each. rows: [M] its row among the prefilled prompts.
      tokens: [M P] prompts, right padded. lengths: [M]. limit: [M] final length at most.
      words: [M 5] see `rng.request_words`. temperature: [M]. stop_ids: [M E] padded with -1.
    """

    slots: Int[Array, " M"]
    rows: Int[Array, " M"]
    tokens: Int[Array, "M P"]
    lengths: Int[Array, " M"]
    limit: Int[Array, " M"]
    words: UInt32[Array, "M 5"]
    temperature: Float[Array, " M"]
    stop_ids: Int[Array, "M E"]


def prefill(
    model: Transformer,
    head: MTPHead | None,
    steps: int,
    tokens: Int[Array, "R P"],
    lengths: Int[Array, " R"],
) -> Prefilled:
    """Runs prompts through policy and head; rows past a prompt's length are never visible."""
    x, cache = model.prefill(tokens, lengths)
    if head is None:
        return Prefilled(cache, None)
    hidden = model.draft_hidden(x)
    modules = len(head.blocks)
    # The first round extends the head over one row, the state before the root; `modules - 1` rows
    # before it repeat what the cache holds already (see `DraftState`).
    index = lengths[:, None] - 1 - modules + jnp.arange(steps + modules)
    index = jnp.clip(index, 0, hidden.shape[1] - 1)
    draft = DraftState(
        cache=head.prefill(hidden, model.embed_tokens(tokens), lengths),
        hidden=jnp.take_along_axis(hidden, index[..., None], axis=1),
        pending=jnp.ones_like(lengths),
    )
    return Prefilled(cache, draft)


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
        temperature=new.temperature,
        stop_ids=new.stop_ids,
        cache=None,
        draft=None,
        rounds=jnp.zeros((count,), jnp.int32),
        histogram=jnp.zeros((count, state.histogram.shape[1]), jnp.int32),
    )
    shared = Prefilled(state.cache, state.draft)
    state = state._replace(cache=None, draft=None)
    own, tree = jax.tree.flatten(state)
    cached, cached_tree = jax.tree.flatten(shared)

    def write(m, arrays):
        own, cached = arrays
        own = _copy_row(own, jax.tree.leaves(fresh), m, new.slots[m])
        cached = _copy_row(cached, jax.tree.leaves(prefilled), new.rows[m], new.slots[m])
        return own, cached

    own, cached = jax.lax.fori_loop(0, count, write, (own, cached))
    shared = jax.tree.unflatten(cached_tree, cached)
    return jax.tree.unflatten(tree, own)._replace(cache=shared.cache, draft=shared.draft)


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
