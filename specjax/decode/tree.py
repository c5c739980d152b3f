"""Static trees as arrays: who is whose parent, how deep, and who sees whom.

Everything here is computed once per strategy in numpy and enters the compiled program as
constants. Rows are ordered by depth, so that a level is a slice and a parent always stands before
its children.
"""

from __future__ import annotations

import dataclasses
import functools

import numpy as np

from specjax.config import Strategy


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
      parent, depth: [T] int32; the root is its own parent at depth 0.
      visible_bits: [T W] uint32, bit j of row t set iff j is t itself or an ancestor of t.
      expansions: one per draft step.
      levels: per depth, the (start, stop) slice of its rows.
    """

    strategy: Strategy
    parent: np.ndarray
    depth: np.ndarray
    visible_bits: np.ndarray
    expansions: tuple[Expansion, ...]
    levels: tuple[tuple[int, int], ...]

    @property
    def rows(self) -> int:
        return len(self.parent)

    @property
    def steps(self) -> int:
        return len(self.expansions)

    @property
    def is_chain(self) -> bool:
        return self.strategy.is_chain

    def visible(self) -> np.ndarray:
        """Booleans [T, T]: row t sees row j."""
        return ancestors(self.parent)


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
def build_tree(strategy: Strategy) -> Tree:
    """The arrays of a chain or static tree."""
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
    bits = pack_bits(ancestors(parent))
    return Tree(strategy, parent, depth, bits, tuple(expansions), levels)


def plain_bits() -> np.ndarray:
    """The bitmask of plain decoding: one row that sees itself."""
    return np.ones((1, 1), np.uint32)


def chain_bits(rows: int) -> np.ndarray:
    """The bitmask of `rows` consecutive tokens: row t sees rows 0..t."""
    return pack_bits(np.tril(np.ones((rows, rows), bool)))
