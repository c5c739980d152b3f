"""Step 2 of a round: one target forward over the whole tree."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from specjax.cache import KVCache
from specjax.decode.state import DecodeState
from specjax.decode.tree import Tree
from specjax.models.transformer import Transformer


class Verified(NamedTuple):
    """The target's view of every tree row.

    Attributes:
      logits: [B T V] float32; row t decides the token after row t.
      hidden: [B T D] what the draft head is given for row t.
      rows: keys and values of the rows, as scratch.
    """

    logits: Float[Array, "B T V"]
    hidden: Float[Array, "B T D"]
    rows: KVCache


def verify(
    model: Transformer, tree: Tree, state: DecodeState, tokens: Int[Array, "B T"]
) -> Verified:
    """A row's RoPE position is the root's plus its depth; it sees the prefix and its ancestors."""
    root = state.length - 1
    x, rows = model.decode(
        tokens, root[:, None] + jnp.asarray(tree.depth), state.cache, root, tree.visible_bits
    )
    return Verified(model.logits(x), model.draft_hidden(x), rows)
