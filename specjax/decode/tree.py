"""Trees as arrays: who is whose parent, how deep, and who sees whom.

Rows are ordered by depth, and a parent always stands before its children. Everything about a chain
or static tree is computed once per strategy in numpy and enters the compiled program as constants.
Of a dynamic tree only the layout of the candidates is known beforehand; its shape is computed on
the device, per slot and round (`grown_shape`).
"""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt32

from specjax.config import Strategy
from specjax.indexing import take_along


class TreeShape(NamedTuple):
    """The shape of one round's tree: numpy constants, or arrays with the slots in front.

    Attributes:
      parent, depth: [T]; the root is its own parent at depth 0.
      visible: [T T] row t sees row j: j is t itself or an ancestor of t.
      bits: the same as bitmask words, bit j % 32 of word j // 32.
      path_rows: [T E] the ancestor of row t at depth 0, 1, .., steps, itself included; 0 beyond.
    """

    parent: Int[Array, "*B T"]
    depth: Int[Array, "*B T"]
    visible: Bool[Array, "*B T T"]
    bits: UInt32[Array, "*B T W"]
    path_rows: Int[Array, "*B T E"]


class Acceptance(NamedTuple):
    """What one round keeps of its tree and emits, before stop tokens and limits.

    Attributes:
      tokens: [B E] emitted tokens, E = steps + 1; entries past `count` are garbage.
      path: [B E] tree row after which each token was emitted; path[:, 0] is the root.
      count: [B] tokens emitted, 1 + accepted drafts.
    """

    tokens: Int[Array, "B E"]
    path: Int[Array, "B E"]
    count: Int[Array, " B"]


@dataclasses.dataclass(frozen=True, eq=False)
class Expansion:
    """One draft step: the rows of one depth that have children, and those children.

    Attributes:
      rows: tree rows that are expanded, all of depth `step`.
      max_children: candidates to draw from each expanded row.
      parents: per child, the index of its parent within `rows`.
      ranks: per child, which candidate of its parent it is (0 = best).
      children: the child rows, a contiguous slice (start, stop).
    """

    rows: np.ndarray
    max_children: int
    parents: np.ndarray
    ranks: np.ndarray
    children: tuple[int, int]


@dataclasses.dataclass(frozen=True, eq=False)
class Tree:
    """The arrays of one strategy.

    Attributes:
      shape: see `TreeShape`.
      expansions: one per draft step.
    """

    strategy: Strategy
    shape: TreeShape
    expansions: tuple[Expansion, ...]

    is_dynamic = False

    @property
    def rows(self) -> int:
        return len(self.shape.parent)

    @property
    def steps(self) -> int:
        return len(self.expansions)

    @property
    def is_chain(self) -> bool:
        return self.strategy.is_chain

    @functools.cached_property
    def expanded_rows(self) -> np.ndarray:
        """Rows that have children, in order: the ones that the draft source is run on."""
        return np.concatenate([level.rows for level in self.expansions])


@dataclasses.dataclass(frozen=True, eq=False)
class DynamicTree:
    """The candidates of a dynamic tree, level by level: topk, then topk^2 per further step.

    Laid out so that parents come first: among equal scores a parent wins over its children.

    Attributes:
      candidate_depth: [N]. offsets: where each level starts, and N.
    """

    strategy: Strategy
    candidate_depth: np.ndarray
    offsets: tuple[int, ...]

    is_chain, is_dynamic = False, True

    @property
    def steps(self) -> int:
        return self.strategy.steps

    @property
    def topk(self) -> int:
        return self.strategy.dynamic[1]

    @property
    def rows(self) -> int:
        return self.strategy.rows


def ancestors(parent: np.ndarray) -> np.ndarray:
    """Booleans [T, T] of "is self or an ancestor", from parents that precede their children."""
    seen = np.zeros((len(parent), len(parent)), bool)
    for row, up in enumerate(parent):
        if up != row:
            seen[row] = seen[up]
        seen[row, row] = True
    return seen


def pack_bits(visible: np.ndarray) -> np.ndarray:
    """Booleans [T, R] to uint32 words [T, ceil(R / 32)], bit j % 32 of word j // 32."""
    rows, columns = visible.shape
    words = np.zeros((rows, -(-columns // 32)), np.uint32)
    for j in range(columns):
        words[:, j // 32] |= visible[:, j].astype(np.uint32) << np.uint32(j % 32)
    return words


@functools.lru_cache(maxsize=64)
def build_tree(strategy: Strategy) -> Tree | DynamicTree:
    """The arrays of a strategy.

    Raises:
      ValueError: it is plain decoding, which has no tree.
    """
    if strategy.is_off:
        raise ValueError("'off' is plain decoding, which drafts no tree; name one, such as '4_1_5'")
    if strategy.dynamic:
        steps, topk, _ = strategy.dynamic
        counts = [topk] + [topk * topk] * (steps - 1)
        depth = np.repeat(np.arange(1, steps + 1), counts).astype(np.int32)
        return DynamicTree(strategy, depth, tuple(np.cumsum([0, *counts]).tolist()))
    row_of = {(): 0} | {path: i + 1 for i, path in enumerate(strategy.paths)}
    parent = np.array([row_of[path[:-1]] for path in row_of], np.int32)
    depth = np.array([len(path) for path in row_of], np.int32)
    levels = tuple(
        (int(np.argmax(depth == d)), int(np.argmax(depth == d) + (depth == d).sum()))
        for d in range(strategy.steps + 1)
    )
    expansions = []
    for step in range(strategy.steps):
        start, stop = levels[step + 1]
        rows = np.unique(parent[start:stop])
        ranks = np.array([path[-1] for path in strategy.paths[start - 1 : stop - 1]], np.int32)
        parents = np.searchsorted(rows, parent[start:stop]).astype(np.int32)
        expansions.append(Expansion(rows, int(ranks.max()) + 1, parents, ranks, (start, stop)))
    return Tree(strategy, _static_shape(parent, depth), tuple(expansions))


def _static_shape(parent: np.ndarray, depth: np.ndarray) -> TreeShape:
    visible = ancestors(parent)
    path_rows = np.zeros((len(parent), depth.max() + 1), np.int32)
    for row, seen in enumerate(visible):
        path_rows[row, : depth[row] + 1] = np.flatnonzero(seen)
    return TreeShape(parent, depth, visible, pack_bits(visible), path_rows)


def grown_shape(parent: Int[Array, "B T"], depth: Int[Array, "B T"], steps: int) -> TreeShape:
    """The shape of a dynamic tree from its parents, on the device."""
    rows = parent.shape[1]
    visible = jnp.broadcast_to(jnp.eye(rows, dtype=bool), (*parent.shape, rows))
    above, path = parent, []
    for _ in range(steps):  # one generation at a time; the root is its own parent
        visible = visible | (jnp.arange(rows) == above[..., None])
        above = jnp.take_along_axis(above, parent, axis=1)
    for level in range(steps + 1):
        path.append(jnp.argmax(visible & (depth == level)[:, None], axis=-1))
    return TreeShape(parent, depth, visible, pack_words(visible), jnp.stack(path, axis=-1))


def pack_words(visible: Bool[Array, "*B T R"]) -> UInt32[Array, "*B T W"]:
    """`pack_bits` for trees whose shape is known on the device only."""
    columns = visible.shape[-1]
    words = -(-columns // 32)
    padded = jnp.pad(visible, [(0, 0)] * (visible.ndim - 1) + [(0, words * 32 - columns)])
    bits = padded.reshape(*visible.shape[:-1], words, 32).astype(jnp.uint32)
    return (bits << jnp.arange(32, dtype=jnp.uint32)).sum(-1, dtype=jnp.uint32)


def take_parents(x: Float[Array, "B Q D"], parents: Int[Array, "..."]) -> Float[Array, "B R D"]:
    """What the rows of a level inherit from their parents among the previous call's rows."""
    if parents.ndim == 1:
        return x[:, parents]
    return take_along(x, parents[..., None], axis=1)


def plain_bits() -> np.ndarray:
    """The bitmask of plain decoding: one row that sees itself."""
    return np.ones((1, 1), np.uint32)


def chain_bits(rows: int) -> np.ndarray:
    """The bitmask of `rows` consecutive tokens: row t sees rows 0..t."""
    return pack_bits(np.tril(np.ones((rows, rows), bool)))
