"""Before the first round: prefill prompts, and place them into slots of a running batch."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32

from specjax.decode import rng
from specjax.decode.state import DecodeState, DraftState
from specjax.draft.mtp import MTPHead
from specjax.models.transformer import Transformer


class Admission(NamedTuple):
    """R requests to place; a slot that is listed twice is simply written twice.

    Attributes:
      slots: [R] slot of each. tokens: [R P] prompts, right padded. lengths: [R].
      limit: [R] final length at most. words: [R 5] see `rng.request_words`.
      temperature: [R]. stop_ids: [R E] padded with -1.
    """

    slots: Int[Array, " R"]
    tokens: Int[Array, "R P"]
    lengths: Int[Array, " R"]
    limit: Int[Array, " R"]
    words: UInt32[Array, "R 5"]
    temperature: Float[Array, " R"]
    stop_ids: Int[Array, "R E"]


def admit(
    model: Transformer, head: MTPHead | None, state: DecodeState, new: Admission
) -> DecodeState:
    """Prefills the prompts and overwrites their slots; the last prompt token becomes the root."""
    x, rows = model.prefill(new.tokens, new.lengths)
    draft = None
    if head is not None:
        hidden = model.draft_hidden(x)
        draft = DraftState(
            cache=head.prefill(hidden, model.embed_tokens(new.tokens), new.lengths),
            hidden=_first_window(hidden, new.lengths, state.draft.hidden.shape[1], head),
            pending=jnp.ones_like(new.lengths),
        )
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
        cache=rows,
        draft=draft,
        rounds=jnp.zeros((count,), jnp.int32),
        histogram=jnp.zeros((count, state.histogram.shape[1]), jnp.int32),
    )
    return _place(state, fresh, new.slots)


def _first_window(hidden: Array, lengths: Array, window: int, head: MTPHead) -> Array:
    """States of the tokens before the root, so that the first round extends over one row."""
    lag = len(head.blocks) - 1
    index = lengths[:, None] - 2 - lag + jnp.arange(window)
    index = jnp.clip(index, 0, hidden.shape[1] - 1)
    return jnp.take_along_axis(hidden, index[..., None], axis=1)


def _place(state: DecodeState, fresh: DecodeState, slots: Int[Array, " R"]) -> DecodeState:
    """Copies row r of every array to slot slots[r]; shorter caches fill the first positions."""
    leaves, tree = jax.tree.flatten(state)
    new_leaves = jax.tree.leaves(fresh)

    def write(r, arrays):
        out = []
        for array, new in zip(arrays, new_leaves, strict=True):
            axis = 1 if array.ndim == 5 else 0  # a scanned cache has its layers in front
            piece = jax.lax.dynamic_slice_in_dim(new, r, 1, axis=axis)
            start = [0] * array.ndim
            start[axis] = slots[r]
            out.append(jax.lax.dynamic_update_slice(array, piece.astype(array.dtype), start))
        return out

    return jax.tree.unflatten(tree, jax.lax.fori_loop(0, slots.shape[0], write, leaves))
