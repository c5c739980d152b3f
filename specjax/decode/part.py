"""Several strategies in one program: a tree that holds the trees of all of them, and the part of it
that a round drafts, which is data.

In `invariant` mode the bits of the target's logits must not depend on the strategy, and only within
one program are equal inputs sure to give equal bits. So all strategies of an engine run the program
of one tree. Rows outside the strategy's part hold no draft, as the rows of a sequence that does not
speculate: the target reads them, and nobody ever sees them. What is drafted within the part is what
the strategy's own program would draft.

    chains                      the longest holds all; a part is its first rows
    chains and static trees     all paths of all of them; a part is the paths of one
    chains and dynamic trees    the most steps, the widest level and the most rows of any; a part
                                has fewer steps, narrower levels and fewer rows
    off                         no row below the root

A static tree and a dynamic one have no such tree: what a dynamic tree expands depends on scores.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Array, Bool, Int

from specjax.config import Strategy
from specjax.decode.tree import DynamicTree, Tree
from specjax.spelling import SettingError


class FixedPart(NamedTuple):
    """Of a chain or static tree: drafted [T], whether a row may hold a draft."""

    drafted: Bool[Array, " T"]


class GrownPart(NamedTuple):
    """Of a dynamic tree: the steps, the nodes that a level expands and the children of each, and
    the rows, root included."""

    steps: Int[Array, ""]
    topk: Int[Array, ""]
    rows: Int[Array, ""]


Part = FixedPart | GrownPart


def common_strategy(strategies: Sequence[Strategy]) -> Strategy:
    """The smallest strategy whose tree holds those of all.

    Args:
      strategies: at least one.

    Raises:
      ValueError: there is no such tree.
    """
    dynamic = [s for s in strategies if s.is_dynamic]
    static = [s for s in strategies if not (s.is_dynamic or s.is_chain)]
    if dynamic and static:
        raise SettingError(
            lambda say: (
                f"with {say('invariant', True)} all strategies run one program, and no tree holds "
                f"both {dynamic[0].name!r} (a dynamic tree, whose nodes are chosen by score) and "
                f"{static[0].name!r} (a static tree, whose nodes are fixed); use chains with one "
                f"kind of tree, or {say('invariant', False)}"
            )
        )
    if dynamic:
        return Strategy.of_sizes(*map(max, zip(*map(_size, strategies), strict=True)))
    paths = {path for strategy in strategies for path in strategy.paths}
    for strategy in strategies:
        if len(strategy.paths) == len(paths):
            return strategy
    return Strategy.from_paths(sorted(paths))


def _size(strategy: Strategy) -> tuple[int, int, int]:
    """Steps, topk and rows of a dynamic tree; a chain is one with a topk of 1."""
    return strategy.dynamic or (strategy.steps, 1, strategy.rows)


def part_of(tree: Tree | DynamicTree, strategy: Strategy) -> Part:
    """What a strategy drafts of a tree that holds its own; `off` drafts nothing."""
    if tree.is_dynamic:
        steps, topk, rows = (0, 0, 1) if strategy.is_off else _size(strategy)
        return GrownPart(np.int32(steps), np.int32(topk), np.int32(rows))
    mine = set(strategy.paths)
    return FixedPart(np.array([True, *(path in mine for path in tree.strategy.paths)]))
