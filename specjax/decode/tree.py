"""Trees as arrays: the parent and depth of each row, and which rows it sees.

Row 0 is the root: the last token known, at position length - 1, whose keys and values are not in
the cache yet. A row of depth d stands at position root + d and decides the token at root + d + 1.
Rows are ordered by depth, and a parent stands before its children.

Chains and static trees are computed once per strategy in numpy and enter the compiled program as
constants. Of a dynamic tree only the layout of the candidates is known beforehand; its shape is
computed on the device, per slot and round (`grown_shape`).

Dimensions: B slots, T rows of a tree, A = steps + 1 depths, R rows that may be seen, W words of 32
bits; `*B T`: numpy constants have no B.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt32

from specjax.config import Strategy
from specjax.indexing import take_along
from specjax.kernels.reference import pack_bits


class TreeShape(NamedTuple):
    """The shape of one round's tree: numpy constants, or arrays with the slots in front.

    Attributes:
      parent: [T] parent row of each row; the root is its own parent.
      depth: [T] depth of each row; the root's is 0.
      visible: [T T] whether row t sees row j: j is t itself or an ancestor of t.
      bits: [T W] `visible` as bitmask words, bit j % 32 of word j // 32.
      path_rows: [T A] row on the path to row t at depth 0, 1, .., steps, t itself included; 0 at
        depths beyond t's.
    """

    parent: Int[Array, "*B T"]
    depth: Int[Array, "*B T"]
    visible: Bool[Array, "*B T T"]
    bits: UInt32[Array, "*B T W"]
    path_rows: Int[Array, "*B T A"]


@dataclasses.dataclass(frozen=True, eq=False)
class Expansion:
    """One draft step: the rows of one depth that have children, and those children.

    Attributes:
      rows: tree rows that are expanded, all of one depth.
      max_children: number of candidates to draw from each expanded row.
      parents: index of each child's parent within `rows`.
      ranks: place of each child among its parent's candidates, 0 for the best.
      children: first child row, and the row after the last: the child rows are contiguous.
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
      strategy: the strategy, a chain or a static tree.
      shape: parents, depths and ancestors of the rows.
      expansions: one expansion per draft step.
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
      strategy: the strategy, a dynamic tree.
      candidate_depth: depth of each candidate.
      offsets: number of the first candidate of each level, and at the end the number of candidates.
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
    """Returns [T T] whether row j is row t or an ancestor of it; parents precede their children."""
    seen = np.zeros((len(parent), len(parent)), bool)
    for row, up in enumerate(parent):
        if up != row:
            seen[row] = seen[up]
        seen[row, row] = True
    return seen


@functools.lru_cache(maxsize=64)
def build_tree(strategy: Strategy) -> Tree | DynamicTree:
    """Builds the arrays of a strategy.

    Raises:
      ValueError: the strategy is plain decoding, which has no tree.
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
    """Computes the shape of a dynamic tree from its parents, on the device."""
    rows = parent.shape[1]
    visible = jnp.broadcast_to(jnp.eye(rows, dtype=bool), (*parent.shape, rows))
    above, path = parent, []
    for _ in range(steps):  # one generation at a time; the root is its own parent
        visible = visible | (jnp.arange(rows) == above[..., None])
        above = jnp.take_along_axis(above, parent, axis=1)
    for level in range(steps + 1):
        path.append(jnp.argmax(visible & (depth == level)[:, None], axis=-1))
    return TreeShape(parent, depth, visible, pack_bits(visible), jnp.stack(path, axis=-1))


def take_parents(
    x: Float[Array, "B before D"], parents: Int[Array, "..."]
) -> Float[Array, "B R D"]:
    """Picks, for each of R rows, the entry of its parent among the rows of the level before."""
    if parents.ndim == 1:
        return x[:, parents]
    return take_along(x, parents[..., None], axis=1)


def plain_bits() -> np.ndarray:
    """Returns the bitmask of plain decoding: one row that sees itself."""
    return np.ones((1, 1), np.uint32)


def chain_bits(rows: int) -> np.ndarray:
    """Returns the bitmask of `rows` consecutive tokens: row t sees rows 0..t."""
    return pack_bits(np.tril(np.ones((rows, rows), bool)))


# --- several strategies in one program ------------------------------------------------------------

# In `invariant` mode the bits of the target's logits must not depend on the strategy, and only
# within one program are equal inputs sure to give equal bits. So all strategies of an engine run
# the program of one common tree, and which part of it a round drafts is data. Rows outside the
# part hold no draft: the target computes them, and no other row sees them.
#
#     chains                      the longest chain; a part is its first rows
#     chains and static trees     all paths of all of them; a part is the paths of one
#     chains and dynamic trees    the most steps, the widest level and the most rows of any; a part
#                                 has fewer steps, narrower levels and fewer rows
#     off                         no row below the root
#
# A static and a dynamic tree have no common tree: what a dynamic tree expands depends on scores.


class StaticTreePart(NamedTuple):
    """A part of a chain or static tree.

    Attributes:
      drafted: [T] whether each row may hold a drafted token.
    """

    drafted: Bool[Array, " T"]


class DynamicTreePart(NamedTuple):
    """A part of a dynamic tree.

    Attributes:
      steps: depth of the part.
      topk: number of nodes that a level expands, and of children of each.
      rows: number of rows, the root included.
    """

    steps: Int[Array, ""]
    topk: Int[Array, ""]
    rows: Int[Array, ""]


TreePart = StaticTreePart | DynamicTreePart


def common_strategy(strategies: Sequence[Strategy]) -> Strategy:
    """Returns the smallest strategy whose tree holds the trees of all strategies.

    Args:
      strategies: the strategies, at least one.

    Raises:
      ValueError: there is no such tree.
    """
    dynamic = [s for s in strategies if s.is_dynamic]
    static = [s for s in strategies if not (s.is_dynamic or s.is_chain)]
    if dynamic and static:
        raise ValueError(
            f"with invariant=true all strategies run one program, and no tree holds both "
            f"{dynamic[0].name!r}, a dynamic tree, and {static[0].name!r}, a static one; use "
            "one kind of tree"
        )
    if dynamic:
        return Strategy.of_sizes(*map(max, zip(*map(_size, strategies), strict=True)))
    paths = {path for strategy in strategies for path in strategy.paths}
    for strategy in strategies:
        if len(strategy.paths) == len(paths):
            return strategy
    return Strategy.from_paths(sorted(paths))


def _size(strategy: Strategy) -> tuple[int, int, int]:
    """Returns steps, topk and rows of a dynamic tree; a chain is one with a topk of 1."""
    return strategy.dynamic or (strategy.steps, 1, strategy.rows)


def tree_part(tree: Tree | DynamicTree, strategy: Strategy) -> TreePart:
    """Returns the part of a common tree that a strategy drafts; `off` drafts no row."""
    if tree.is_dynamic:
        steps, topk, rows = (0, 0, 1) if strategy.is_off else _size(strategy)
        return DynamicTreePart(np.int32(steps), np.int32(topk), np.int32(rows))
    paths = set(strategy.paths)
    return StaticTreePart(np.array([True, *(path in paths for path in tree.strategy.paths)]))
