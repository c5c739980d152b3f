"""The acceptance rules and trees again, in plain Python and float64, written from the papers.

Randomness comes in through two callables, so that one implementation serves two purposes: on a
choice tape, where every outcome is enumerated with its probability, and on injected coins and
noise, against the jitted rules.
"""

from __future__ import annotations

import math
import operator
from collections import defaultdict
from collections.abc import Callable, Sequence

import numpy as np


class Tape:
    """Replays a list of choices, then takes the first open one; counts the probability."""

    def __init__(self, choices: Sequence[int]):
        self.choices = list(choices)
        self.used = 0
        self.probability = 1.0
        self.open: list[list[int]] = []

    def pick(self, weights: Sequence[float]) -> int:
        """An index drawn in proportion to `weights`; every index of positive weight is explored."""
        total = sum(weights)
        possible = [i for i, w in enumerate(weights) if w > 0]
        if self.used == len(self.choices):
            self.open += [self.choices + [i] for i in possible[1:]]
            self.choices.append(possible[0])
        choice = self.choices[self.used]
        self.used += 1
        self.probability *= weights[choice] / total
        return choice

    def flip(self, probability: float, row: int = 0) -> bool:
        """A coin of its own for every toss; `row` says whose it is."""
        return bool(self.pick([1.0 - probability, probability]))


def enumerate_outcomes(process: Callable[[Tape], object]) -> dict[object, float]:
    """Every outcome, with its probability, of a process that draws its randomness from a tape."""
    outcomes: dict[object, float] = defaultdict(float)
    todo: list[list[int]] = [[]]
    while todo:
        tape = Tape(todo.pop())
        outcome = process(tape)
        outcomes[outcome] += tape.probability
        todo += tape.open
    return dict(outcomes)


def block_accept(
    p: np.ndarray,
    q: np.ndarray,
    drafted: Sequence[int],
    flip: Callable[[float], bool],
    pick: Callable[[np.ndarray], int],
) -> tuple[list[int], list[float]]:
    """Block verification (Sun et al. 2024, algorithm 2) of one chain.

    Args:
      p: [K+1, V] target, row i after i drafts, or [K, V]: then no token follows K kept drafts.
      q: [K, V] draft, row i is what drafted[i] came from.
      flip: a coin that shows True with the given probability. pick: a draw from given weights.

    Returns:
      the emitted tokens and the thresholds that the coins were held against.
    """
    steps = len(drafted)
    weight, weights, thresholds, kept = 1.0, [1.0], [], 0
    for i, token in enumerate(drafted, start=1):
        mass = q[i - 1][token] if token >= 0 else 0.0
        weight = min(weight * p[i - 1][token] / mass, 1.0) if mass > 0 else 0.0
        weights.append(weight)
        if i == steps:
            threshold = weight
        else:
            surplus = float(np.maximum(weight * p[i] - q[i], 0.0).sum())
            rest = 1.0 - weight
            threshold = surplus / (surplus + rest) if surplus + rest > 0 else 1.0
        thresholds.append(threshold)
        if flip(threshold):
            kept = i
    if kept == steps:
        if len(p) == steps:
            return list(drafted), thresholds
        final = pick(p[steps])
    else:
        residual = np.maximum(weights[kept] * p[kept] - q[kept], 0.0)
        final = pick(residual if residual.sum() > 0 else p[kept])
    return [*drafted[:kept], final], thresholds


def leviathan_accept(
    p: np.ndarray,
    q: np.ndarray,
    drafted: Sequence[int],
    flip: Callable[[float, int], bool],
    pick: Callable[[np.ndarray], int],
) -> list[int]:
    """Token-wise rejection along a chain (Leviathan et al. 2023, algorithm 1); an oracle only.

    Args: as those of `block_accept`.
    """
    for i, token in enumerate(drafted):
        if not flip(min(1.0, p[i][token] / q[i][token]), i + 1):
            return [*drafted[:i], pick(np.maximum(p[i] - q[i], 0.0))]
    return [*drafted, *([pick(p[len(drafted)])] if len(p) > len(drafted) else [])]


def recursive_accept(
    parent: Sequence[int],
    tokens: Sequence[int],
    p: Sequence[np.ndarray],
    q: Sequence[np.ndarray],
    flip: Callable[[float, int], bool],
    pick: Callable[[np.ndarray], int],
) -> tuple[list[int], list[int]]:
    """Rejection among siblings that were drawn without replacement, node by node.

    Args:
      tokens: per row; a negative one is no draft. p, q: per row, what comes below it; q is not
        looked at where a row has no children. flip: the coin of a row.

    Returns:
      the emitted tokens and the row after which each was emitted.
    """
    row, emitted, path = 0, [], [0]
    left, rest = p[0], q[0]
    todo = children_of(parent, 0)
    while todo:
        child = todo.pop(0)
        token = tokens[child]
        if token < 0 or rest[token] == 0:
            continue  # cannot have been drawn from what is left of q
        if flip(min(1.0, left[token] / rest[token]), child):
            row = child
            emitted.append(token)
            path.append(row)
            left, rest = p[row], q[row]
            todo = children_of(parent, row)
            continue
        residual = np.maximum(left - rest, 0.0)
        left = residual / residual.sum() if residual.sum() > 0 else left
        rest = np.where(np.arange(len(rest)) == token, 0.0, rest)
        rest = rest / rest.sum() if rest.sum() > 0 else rest
    return [*emitted, pick(left)], path


def children_of(parent: Sequence[int], row: int) -> list[int]:
    """The rows below a row, in the order in which they were drawn; row 0 is the child of no row."""
    return [child for child in range(1, len(parent)) if parent[child] == row]


def path_tokens(parent: Sequence[int], tokens: Sequence[int], row: int) -> tuple[int, ...]:
    """Tokens from below the root down to a row, the row's own included."""
    return () if row == 0 else (*path_tokens(parent, tokens, parent[row]), tokens[row])


def draw_tree(
    parent: Sequence[int], q: Callable, context: tuple[int, ...], pick: Callable
) -> list[int]:
    """Tokens of every row (the root's is -1): siblings drawn from q without replacement.

    Once the support of q is used up there is no further draft, which is written -1.
    """
    tokens = [-1] * len(parent)
    for row in range(len(parent)):
        rest = np.array(q((*context, *path_tokens(parent, tokens, row))))
        for child in children_of(parent, row):
            if rest.sum() > 0:
                tokens[child] = pick(rest)
                rest[tokens[child]] = 0.0
    return tokens


def coupled_accept(
    parent: Sequence[int], tokens: Sequence[int], chosen: Sequence[int]
) -> tuple[list[int], list[int]]:
    """The walk: emitted tokens, and the tree row after which each was emitted."""
    row, emitted, path = 0, [], []
    while True:
        emitted.append(chosen[row])
        path.append(row)
        children = [c for c in range(1, len(parent)) if parent[c] == row]
        row = next((c for c in children if tokens[c] == chosen[row]), None)
        if row is None:
            return emitted, path


def random_table(rng: np.random.Generator, vocab: int, sharpness: float) -> Callable:
    """A random next-token distribution for every context, drawn when first asked for."""
    table: dict[tuple, np.ndarray] = {}

    def distribution(context: tuple[int, ...]) -> np.ndarray:
        if context not in table:
            logits = rng.normal(size=vocab) * sharpness
            table[context] = np.exp(logits) / np.exp(logits).sum()
        return table[context]

    return distribution


def random_distributions(generator: np.random.Generator, *shape: int) -> np.ndarray:
    """Some smooth, some peaked, some with zero masses and ties, some one-hot."""
    *lead, vocab = shape
    kind = generator.integers(0, 4, lead)[..., None]
    smooth = generator.dirichlet(np.ones(vocab), lead)
    peaked = generator.dirichlet(np.full(vocab, 0.1), lead)
    one_hot = np.eye(vocab)[generator.integers(0, vocab, lead)]
    counts = generator.integers(0, 3, shape) + one_hot
    tied = counts / counts.sum(-1, keepdims=True)
    return np.select([kind == 0, kind == 1, kind == 2], [smooth, peaked, tied], one_hot)


def autoregressive_joint(p: Callable, length: int, vocab: int) -> dict[tuple[int, ...], float]:
    """Probability of every sequence of `length` tokens under the target."""
    joint = {(): 1.0}
    for _ in range(length):
        joint = {
            (*context, token): mass * p(context)[token]
            for context, mass in joint.items()
            for token in range(vocab)
        }
    return joint


def speculative_joint(
    one_round: Callable[[Tape, tuple[int, ...]], Sequence[int]], length: int
) -> dict[tuple[int, ...], float]:
    """Probability of every sequence of the first `length` tokens when rounds follow one another.

    Args:
      one_round: the tokens that a round emits after the given context.
    """
    joint: dict[tuple[int, ...], float] = defaultdict(float)
    open_contexts = {(): 1.0}
    while open_contexts:
        context, mass = open_contexts.popitem()
        for emitted, probability in enumerate_outcomes(
            lambda tape, context=context: tuple(one_round(tape, context))
        ).items():
            sequence = (*context, *emitted)[:length]
            if len(sequence) == length:
                joint[sequence] += mass * probability
            else:
                open_contexts[sequence] = open_contexts.get(sequence, 0.0) + mass * probability
    return dict(joint)


def total_variation(a: dict, b: dict) -> float:
    keys = set(a) | set(b)
    return 0.5 * math.fsum(abs(a.get(k, 0.0) - b.get(k, 0.0)) for k in keys)


class Injected:
    """Coins and noise that were drawn beforehand, and by how much each decision was made."""

    def __init__(self, coins, noise):
        self.coins, self.noise, self.margins = list(coins), noise, []
        self.flips = 0

    def flip(self, threshold, row=None):
        """The coin of tree row `row`, or the next one."""
        self.flips += 1
        u = float(self.coins[(self.flips if row is None else row) - 1])
        self.margins.append(abs(u - threshold))
        return u < threshold

    def pick(self, weights):
        with np.errstate(divide="ignore"):
            scores = np.log(weights) + self.noise
        self.margins.append(operator.sub(*np.sort(scores)[:-3:-1]))
        return int(np.argmax(scores))
