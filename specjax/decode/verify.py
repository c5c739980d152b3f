"""Step 2 of a round: one target forward over the whole tree."""

from __future__ import annotations

from typing import NamedTuple

from jaxtyping import Array, Float, Int

from specjax.decode.draft import DraftedTree
from specjax.decode.plan import Plan
from specjax.decode.state import DecodeState, prefix_lengths
from specjax.interfaces import Scratch, Where
from specjax.models.transformer import Transformer


class Verified(NamedTuple):
    """The target's view of every tree row.

    Attributes:
      logits: [B T V] float32; row t decides the token after row t.
      hidden: [B T D] what the draft head is given for row t.
      scratch: what the rows would add to the memory, by layer.
      records: [B T M ..] see `specjax.interfaces.Forward`.
    """

    logits: Float[Array, "B T V"]
    hidden: Float[Array, "B T D"]
    scratch: tuple[Scratch, ...]
    records: Int[Array, "B T M ..."] | None = None


def verify(model: Transformer, plan: Plan, state: DecodeState, draft: DraftedTree) -> Verified:
    """A row's RoPE position is the root's plus its depth; it sees the prefix and its ancestors.

    The prefix is everything before the root. In `invariant` mode a row sees its ancestors in the
    order of their positions, as plain decoding would. A token of -1, no draft, is embedded as some
    token; nothing that is accepted ever sees its row.
    """
    root, shape = state.length - 1, draft.shape
    where = Where(
        "by_position" if plan.invariant else "tree",
        root[:, None] + shape.depth,
        prefix=prefix_lengths(state),
        visible=shape.bits,
        path_rows=shape.path_rows,
        depth=shape.depth,
        table=state.table,
    )
    found = model.decode(draft.tokens, where, state.memory, taps=plan.taps)
    return Verified(model.logits(found.x), found.tapped, found.scratch, found.records)
