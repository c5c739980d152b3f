"""Step 2 of a round: one target forward over the whole tree."""

from __future__ import annotations

from typing import NamedTuple

from jaxtyping import Array, Float

from specjax.decode.draft import Draft
from specjax.decode.plan import Plan
from specjax.decode.state import DecodeState, prefix_lengths
from specjax.memory import KVCache
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


def verify(model: Transformer, plan: Plan, state: DecodeState, draft: Draft) -> Verified:
    """A row's RoPE position is the root's plus its depth; it sees the prefix and its ancestors.

    The prefix is everything before the root. In `invariant` mode a row sees its ancestors in the
    order of their positions, as plain decoding would. A token of -1, no draft, is embedded as some
    token; nothing that is accepted ever sees its row.
    """
    root, shape = state.length - 1, draft.shape
    x, rows = model.decode(
        draft.tokens,
        root[:, None] + shape.depth,
        state.cache,
        prefix_len=prefix_lengths(state),
        visible_bits=shape.bits,
        by_position=(shape.path_rows, shape.depth) if plan.invariant else None,
        table=state.table,
    )
    return Verified(model.logits(x), model.draft_hidden(x), rows)
