"""What drafts: one protocol for heads, standalone models and n-grams.

A source is a hashable description; its parameters and its memory are passed to it, so that it can
stand in a jitted function. Whatever it proposes, however wrong, costs time and nothing else.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from jaxtyping import Array, Float, Int, UInt32

from specjax.indexing import take_along
from specjax.memory import KVCache, Table

ABSORBED = 32  # rows that a source takes in at a time when it catches up
Slots = Any  # what a source keeps per slot: arrays with the slots in front
Work = Any  # what it hands from one step of a round to the next


class Memory(NamedTuple):
    """What a source keeps between rounds.

    Attributes:
      cache: its own keys and values, paged by the tables of the target's; None without any.
      slots: everything else.
    """

    cache: KVCache | None
    slots: Slots


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


WINDOW = 128  # target states that a slot remembers while plain decoding runs


class DraftSource(Protocol):
    """Proposes tokens. Implementations are frozen dataclasses.

    A sequence comes in by `prefill` (its prompt, piece by piece) and `start` (into a slot). The
    rounds of a batch (a chunk has one or more) begin with `enter` and end with `leave`, so that the
    next may use another strategy; in a round `extend` is called once, `step` once per further
    level, `commit` once. After rounds of plain decoding there is `follow` alone. Shapes: B slots,
    R rows, V the target's vocabulary, D its width, E = steps + 1.

    Attributes:
      tail: how many of the target's states, up to that of the token before the root, `start` needs.
      looks_around: drafts for one slot from the tokens of others.
    """

    tail: int
    looks_around: bool

    def margin(self, steps: int) -> int:
        """Positions past the longest sequence that this source may write to."""

    def page_bytes(self, size: int) -> int:
        """Bytes of a page of `size` positions."""

    def empty_cache(self, pages: int, size: int) -> KVCache | None:
        """A cache of pages with `size` positions."""

    def empty_slots(self, batch: int, steps: int) -> Slots:
        """Empty slots, as they are between chunks of up to `steps` steps."""

    def prefill(
        self,
        model,
        params,
        cache: KVCache | None,
        tokens: Int[Array, "R N"],
        start: Int[Array, " R"],
        hidden: Float[Array, "R T D"],
        table: Table,
        run: int = 1,
    ) -> KVCache | None:
        """Takes in positions start .. start + T - 1 of R prompts, of which those before are known.

        Args:
          tokens: from `start` on, N = T + tail of them; what is not known yet is arbitrary.
          run: rows that lie in one page, see `commit_rows`; it divides start and T.
        """

    def start(
        self, tokens: Int[Array, "R P"], prompt_len: Int[Array, " R"], states: Array
    ) -> Slots:
        """Slots of R sequences at their beginning.

        Args:
          tokens: the first `prompt_len` are the prompt. states: [R tail D].
        """

    def enter(self, model, params, state, steps: int) -> Memory:
        """Memory for rounds of `steps` steps: catches up with whatever was emitted."""

    def leave(self, memory: Memory, between: Slots) -> Memory:
        """Memory as it is between chunks; `between` shows the shapes."""

    def follow(
        self, memory: Memory, hidden: Float[Array, "B R D"], count: Int[Array, " B"]
    ) -> Memory:
        """Memory after plain decoding has emitted `count` tokens, from these states of roots."""

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
    return take_along(x, parents[..., None], axis=1)
