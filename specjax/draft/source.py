"""What drafts: one protocol for heads, standalone models and n-grams.

A source is a hashable description; its parameters and its memory are passed to it, so that it can
stand in a jitted function. Whatever it proposes, however wrong, costs time and nothing else.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32

Memory = Any  # what a source keeps per slot between rounds: arrays with the slots in front
Work = Any  # what it hands from one step of a round to the next


class Level(NamedTuple):
    """The R rows that a draft step expands, all at one depth of the tree.

    Rows that were expanded in this round are numbered in order: `offset` came in earlier levels,
    these follow, and there will be `total` in all (python integers).

    Attributes:
      step: their depth, 1 or more.
      tokens: [B R]; negative where a row is not valid.
      parents: [R] or [B R], index of each row's parent among the rows of the previous call; the
        first call, `extend`, has one row: the root.
      visible: [R W] or [B R W] bit j is set iff expanded row j is the row or an ancestor of it.
      path: [B R step] tokens from below the root down to the row itself.
    """

    step: int
    offset: int
    total: int
    tokens: Int[Array, "B R"]
    parents: Int[Array, "..."]
    visible: UInt32[Array, "... R W"]
    path: Int[Array, "B R P"]


class DraftSource(Protocol):
    """Proposes tokens. Implementations are frozen dataclasses.

    In a round `extend` is called once, `step` once per further level, `commit` once. Shapes: B
    slots, R rows of a level, V the target's vocabulary, D its width, E = steps + 1.
    """

    def margin(self, steps: int) -> int:
        """Cache slots past the longest sequence that this source may write to."""

    def empty(self, batch: int, slots: int, steps: int) -> Memory:
        """Memory of `batch` empty slots; a cache has `slots` rows per slot."""

    def prefill(
        self,
        model,
        params,
        steps: int,
        tokens: Int[Array, "R P"],
        lengths: Int[Array, " R"],
        hidden: Float[Array, "R P D"],
    ) -> Memory:
        """Memory after R prompts; a cache may have fewer slots (P) than that of `empty`."""

    def extend(self, model, params, state, steps: int, total: int) -> tuple[Array, Work]:
        """Takes in what the last round emitted; raw logits [B 1 V] below the root."""

    def step(self, model, params, work: Work, level: Level) -> tuple[Array, Work]:
        """Raw logits [B R V] below each row of a level."""

    def commit(
        self, memory: Memory, work: Work, hidden: Float[Array, "B E D"], count: Int[Array, " B"]
    ) -> Memory:
        """Memory after a round.

        Args:
          hidden: the target's states along the accepted path, the root's first.
          count: tokens emitted; 0 where a slot is not running, whose memory may not change.
        """


def take_parents(x: Float[Array, "B Q D"], parents: Int[Array, "..."]) -> Float[Array, "B R D"]:
    """What the rows of a level inherit from their parents among the previous call's rows."""
    if parents.ndim == 1:
        return x[:, parents]
    return jnp.take_along_axis(x, parents[..., None], axis=1)
