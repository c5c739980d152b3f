"""Acceptance rules that look right and are not, in plain Python: what tests must be able to catch.

Each takes the target's and the draft's tables (a distribution for every context) and gives one
round on a choice tape, like the exact rules in `reference`. Most were shipped by somebody.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import numpy as np
from reference import (
    Tape,
    block_accept,
    children_of,
    draw_tree,
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


def draw_three_keep_best_two(p: Table, q: Table) -> Round:
    """Three are drawn, the two that the draft likes best are tested in the order drawn."""

    def one_round(tape, context):
        drawn = draw_tree([0, 0, 0, 0], q, context, tape.pick)[1:]
        kept = sorted(drawn, key=lambda token: -q(context)[token])[:2]
        parent, tokens = [0, 0, 0], [-1, *(t for t in drawn if t in kept)]
        rows = [rows_of_tree(table, context, parent, tokens) for table in (p, q)]
        return recursive_accept(parent, tokens, *rows, tape.flip, tape.pick)[0]

    return one_round


def global_re_rank(p: Table, q: Table, parent: Sequence[int], keep: int) -> Round:
    """A tree is drawn, and of its nodes only the `keep` with the likeliest paths are tested."""

    def one_round(tape, context):
        tokens = draw_tree(parent, q, context, tape.pick)
        scores = {}
        for row in range(1, len(parent)):
            path = path_tokens(parent, tokens, row)
            steps = [q((*context, *path[:i]))[path[i]] for i in range(len(path))]
            scores[row] = float(np.prod(steps))
        kept = [0, *sorted(sorted(scores, key=lambda row: -scores[row])[:keep])]
        tokens = [tokens[row] for row in kept]
        shape = [kept.index(parent[row]) for row in kept]
        rows = [rows_of_tree(table, context, shape, tokens) for table in (p, q)]
        return recursive_accept(shape, tokens, *rows, tape.flip, tape.pick)[0]

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


def correction_from_the_full_target(p: Table, q: Table, steps: int = 2) -> Round:
    def one_round(tape, context):
        drafted = draw_chain(q, context, steps, tape.pick)
        p_rows, q_rows = rows_along(p, context, drafted), rows_along(q, context, drafted)
        # The residual is thrown away and the target drawn from instead.
        emitted = leviathan_accept(p_rows, q_rows, drafted, tape.flip, lambda weights: -1)
        kept = len(emitted) - 1
        return [*emitted[:kept], tape.pick(p_rows[kept])]

    return one_round


def inverse_cdf_pick(tape: Tape, weights: np.ndarray, low: float, high: float) -> int:
    """A draw by inverse CDF with a uniform number known to lie in [low, high)."""
    edges = np.concatenate([[0.0], np.cumsum(weights) / np.sum(weights)])
    inside = np.minimum(edges[1:], high) - np.maximum(edges[:-1], low)
    return tape.pick(np.maximum(inside, 0.0))


def accept_coin_used_again_for_the_last_draw(p: Table, q: Table, steps: int = 2) -> Round:
    """One uniform number rejects a draft and then, by inverse CDF, draws the correction."""

    def one_round(tape, context):
        drafted = draw_chain(q, context, steps, tape.pick)
        p_rows, q_rows = rows_along(p, context, drafted), rows_along(q, context, drafted)
        for i, token in enumerate(drafted):
            ratio = min(1.0, p_rows[i][token] / q_rows[i][token])
            if not tape.flip(ratio):
                residual = np.maximum(p_rows[i] - q_rows[i], 0.0)
                return [*drafted[:i], inverse_cdf_pick(tape, residual, ratio, 1.0)]
        return [*drafted, tape.pick(p_rows[-1])]

    return one_round


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


# --- the wrong target, the wrong coin -------------------------------------------------------------


def penalised(logits: Table, penalty: float, counted: Callable[[tuple], tuple]) -> Table:
    """A target with a frequency penalty on the tokens of `counted(context)`."""

    def distribution(context):
        scores = np.array(logits(context))
        for token in counted(context):
            scores[token] -= penalty
        return np.exp(scores) / np.exp(scores).sum()

    return distribution


def penalties_counted_once_per_round(
    logits: Table, q: Table, penalty: float, steps: int = 2
) -> Round:
    """The target's penalties count the tokens before the round, not those on the branch."""

    def one_round(tape, context):
        p = penalised(logits, penalty, lambda longer: longer[: len(context)])
        drafted = draw_chain(q, context, steps, tape.pick)
        rows = rows_along(p, context, drafted), rows_along(q, context, drafted)[:-1]
        return block_accept(*rows, drafted, tape.flip, tape.pick)[0]

    return one_round


def block_with_coins_by_position(p: Table, q: Table, steps: int, length: int) -> Callable:
    """Whole runs of `length` tokens in which a position has one coin, whoever tests it.

    What is known of a coin is an interval, which every test narrows.
    """

    def run(tape: Tape) -> tuple[int, ...]:
        context: tuple[int, ...] = ()
        known: dict[int, tuple[float, float]] = {}
        while len(context) < length:
            positions = itertools.count(len(context))

            def flip(threshold, positions=positions):
                position = next(positions)
                low, high = known.get(position, (0.0, 1.0))
                inside = min(max((threshold - low) / (high - low), 0.0), 1.0)
                heads = tape.flip(inside)
                cut = low + inside * (high - low)
                known[position] = (low, cut) if heads else (cut, high)
                return heads

            drafted = draw_chain(q, context, steps, tape.pick)
            rows = rows_along(p, context, drafted), rows_along(q, context, drafted)[:-1]
            context = (*context, *block_accept(*rows, drafted, flip, tape.pick)[0])
        return context[:length]

    return run
