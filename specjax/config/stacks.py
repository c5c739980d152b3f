"""Divides the layers of a model into stacks of equal layers, for `lax.scan`.

A model's layers are divided into segments, in each of which a pattern of layers repeats: 3 dense
layers and then 58 with experts are two segments, four times (5 sliding and 1 full) and then 2
sliding ones as well. A forward pass scans over the repeats of each segment. The layers at one
position of a pattern are alike, and their parameters are stacked, repeats in front:

    layers/q [L ..]         if all layers are alike
    layers/0_5/q [4 ..]     else; this one is position 5 of the pattern of segment 0
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

from specjax.config.model import Layer

_LONGEST = 32  # layers of the longest pattern that is looked for


class Segment(NamedTuple):
    """Consecutive layers, in which a pattern repeats."""

    pattern: tuple[Layer, ...]
    repeats: int


class Stack(NamedTuple):
    """Equal layers, whose parameters are stacked.

    Attributes:
      key: key of the stack's parameters under `layers`; None: the model has one stack only.
      layer: the configuration that all layers of the stack have.
      numbers: number of each layer in the model, from 0, in the order of the stacked parameters.
    """

    key: str | None
    layer: Layer
    numbers: tuple[int, ...]


@functools.lru_cache(maxsize=256)
def segments(layers: tuple[Layer, ...]) -> tuple[Segment, ...]:
    """Divides layers so that the patterns have as few layers together as possible.

    That many layers are traced and compiled. Of equally good divisions it takes one with the fewest
    segments. Patterns of up to 32 layers are looked for.
    """
    if len(set(layers)) == 1:
        return (Segment(layers[:1], len(layers)),)
    count = len(layers)
    kinds = {layer: i for i, layer in enumerate(dict.fromkeys(layers))}
    ids = [kinds[layer] for layer in layers]
    best: list[tuple[int, int, int, int]] = [(0, 0, 0, 0)] * (count + 1)
    alike = [[0] * (count + 1) for _ in range(_LONGEST + 1)]  # [p][i]: layers from i on, p apart
    for start in reversed(range(count)):
        options = []
        for length in range(1, min(_LONGEST, count - start) + 1):
            if start + length < count and ids[start] == ids[start + length]:
                alike[length][start] = alike[length][start + 1] + 1
            most = alike[length][start] // length + 1
            # The last repeat may better begin the next pattern.
            for repeats in {1, max(most - 1, 1), most}:
                rest = best[start + length * repeats]
                options.append((rest[0] + length, rest[1] + 1, length, -repeats))
        best[start] = min(options)
    out, start = [], 0
    while start < count:
        _, _, length, repeats = best[start]
        out.append(Segment(layers[start : start + length], -repeats))
        start += length * -repeats
    return tuple(out)


def stacks(layers: tuple[Layer, ...]) -> list[Stack]:
    """The stacks of a model, segment by segment, and in each by the position in the pattern."""
    divided, out, first = segments(layers), [], 0
    alone = len(divided) == 1 and len(divided[0].pattern) == 1
    for number, (pattern, repeats) in enumerate(divided):
        end = first + len(pattern) * repeats
        for position, layer in enumerate(pattern):
            numbers = tuple(range(first + position, end, len(pattern)))
            out.append(Stack(None if alone else f"{number}_{position}", layer, numbers))
        first = end
    return out


def part_of(tree: Any, stack: Stack) -> Any:
    """The entry of one stack in a tree that has an entry per stack, such as the parameters."""
    return tree if stack.key is None else tree[stack.key]


def tree_of(layers: tuple[Layer, ...], make: Callable[[Stack], Any]) -> Any:
    """Makes a tree with the entry `make(stack)` per stack, for `part_of`."""
    every = stacks(layers)
    if every[0].key is None:
        return make(every[0])
    return {stack.key: make(stack) for stack in every}
