"""Acceptance rules that look right and are not, in plain Python: what tests must be able to catch.

Each takes the target's and the draft's tables (a distribution for every context) and gives one
round on a choice tape, like the exact rules in `reference`. Most were shipped by a real system.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from reference import (
    Tape,
    children_of,
    leviathan_accept,
    path_tokens,
    recursive_accept,
)

Table = Callable[[tuple[int, ...]], np.ndarray]
Round = Callable[[Tape, tuple[int, ...]], Sequence[int]]


def rows_along(table: Table, context: tuple[int, ...], drafted: Sequence[int]) -> np.ndarray:
    """[K+1, V] what comes after 0, 1, .., K drafted tokens."""
    return np.array([table((*context, *drafted[:i])) for i in range(len(drafted) + 1)])


def rows_of_tree(table: Table, context: tuple, parent: Sequence[int], tokens: Sequence[int]):
    """Per tree row, what comes below it."""
    return [table((*context, *path_tokens(parent, tokens, row))) for row in range(len(parent))]


def draw_chain(table: Table, context: tuple, steps: int, pick: Callable) -> list[int]:
    drafted = []
    for _ in range(steps):
        drafted.append(pick(table((*context, *drafted))))
    return drafted


def best(weights: np.ndarray, count: int = 1) -> list[int]:
    return np.argsort(-weights, kind="stable")[:count].tolist()


# --- candidates that were not drawn from q --------------------------------------------------------


def greedy_draft_with_softmax_q(p: Table, q: Table, steps: int = 2) -> Round:
    """The draft takes its argmax and passes on its softmax as if it had sampled."""

    def one_round(tape, context):
        drafted = draw_chain(q, context, steps, lambda weights: best(weights)[0])
        rows = rows_along(p, context, drafted), rows_along(q, context, drafted)
        return leviathan_accept(*rows, drafted, tape.flip, tape.pick)

    return one_round


def top_k_candidates_with_p_over_q(p: Table, q: Table, parent: Sequence[int]) -> Round:
    """A tree of the k best candidates, tested as if they had been drawn."""

    def one_round(tape, context):
        tokens = [-1] * len(parent)
        for row in range(len(parent)):
            children = children_of(parent, row)
            ids = best(q((*context, *path_tokens(parent, tokens, row))), len(children))
            for child, token in zip(children, ids, strict=True):
                tokens[child] = token
        rows = [rows_of_tree(table, context, parent, tokens) for table in (p, q)]
        return recursive_accept(parent, tokens, *rows, tape.flip, tape.pick)[0]

    return one_round


# --- a choice among outcomes ----------------------------------------------------------------------


def longest_path_wins(p: Table, q: Table, steps: int = 2, sampled: bool = True) -> Round:
    """Two paths are verified each on its own, and the one that got further is taken."""

    def one_round(tape, context):
        if sampled:
            paths = [draw_chain(q, context, steps, tape.pick) for _ in range(2)]
        else:
            paths = [
                draw_chain(q, context, steps, lambda weights, i=i: best(weights, 2)[i])
                for i in range(2)
            ]
        emitted = []
        for drafted in paths:
            rows = rows_along(p, context, drafted), rows_along(q, context, drafted)
            emitted.append(leviathan_accept(*rows, drafted, tape.flip, tape.pick))
        return max(emitted, key=len)

    return one_round


# --- the last draw --------------------------------------------------------------------------------


def inverse_cdf_pick(tape: Tape, weights: np.ndarray, low: float, high: float) -> int:
    """A draw by inverse CDF with a uniform number known to lie in [low, high)."""
    edges = np.concatenate([[0.0], np.cumsum(weights) / np.sum(weights)])
    inside = np.minimum(edges[1:], high) - np.maximum(edges[:-1], low)
    return tape.pick(np.maximum(inside, 0.0))


def draft_noise_used_again_for_the_residual(p: Table, q: Table) -> Round:
    """One uniform number draws the draft from q and later the correction from the residual."""

    def one_round(tape, context):
        p_row, q_row = p(context), q(context)
        token = tape.pick(q_row)
        if tape.flip(min(1.0, p_row[token] / q_row[token])):
            return [token]
        edges = np.concatenate([[0.0], np.cumsum(q_row)])
        residual = np.maximum(p_row - q_row, 0.0)
        return [inverse_cdf_pick(tape, residual, edges[token], edges[token + 1])]

    return one_round
