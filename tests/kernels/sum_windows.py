"""In which order a TPU program sums the products of its matrices, as far as the compiler says it.

The TPU compiler cuts the contracted dimension K of a matrix product into windows and adds up one
after the other. It chooses the windows by the number of rows, so that two programs may give a row
other bits, and in bfloat16 about one token in 500 another value. The text of a compiled program
has the windows (`window_config`). Equal ones are evidence that a row's bits are equal, no proof:
the text does not have the order within a window, and of attention, a kernel, it has nothing.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping

from hlo import Module, Op

TARGET = ("layers", "lm_head")  # parts that compute the target's logits
SUM = "a sum of one row"  # a product that the compiler does not compute in the matrix unit
INSIDE = "inside another"  # a product whose result is a factor of another one in one fusion
# Components of an operation's name that jax adds to those of `jax.named_scope`.
_ADDED = re.compile(r"dot_general|while|body|cond|branch_\d+_fun|closed_call|checkpoint|\W*|.*\(.*")

Windows = dict[str, dict[str, int]]  # by product: how often it is computed with which windows


def products(module: Module) -> Windows:
    """Returns the windows of the target's products in a round, by the products' names.

    Windows are written `2x2048`, two of 2048 terms each; of an unknown size `2x?`; where there are
    none, `SUM` or `INSIDE`. The name of a product is that of its innermost scope, such as `q` or
    `lm_head`; without one it is the shape of the matrix. A layer's product counts once for each
    layer.
    """
    found: Windows = {}
    for product, ops, outer, times in _products(module, module.round or module.entry, 1):
        scopes = re.split(r"/", product.traced_name)
        ours = product.part in TARGET and "draft" not in scopes
        if not ours or outer and "window_config" not in outer.text:
            continue
        name, windows = _described(product, ops, outer)
        own = [scope for scope in scopes if not _ADDED.fullmatch(scope)]
        name = own[-1] if own[-1] != "layers" else name
        counts = found.setdefault(name, {})
        counts[windows] = counts.get(windows, 0) + times
    return found


def _products(module: Module, computation: str, times: int) -> Iterator[tuple]:
    """Yields the products of a computation and of those it calls.

    Yields:
      the product, the operations of its computation, the operation that has its windows (None: the
      windows are those of another product), and how often it is computed.
    """
    ops = module.computations[computation]
    for op in ops.values():
        if op.opcode == "while":
            yield from _products(module, op.body, times * (module.trips(op) or 1))
        elif op.opcode == "fusion":
            inside = [found for called in op.called() for found in _products(module, called, times)]
            for product, beside, *_ in inside[:-1]:
                yield product, beside, None, times
            for product, beside, *_ in inside[-1:]:
                yield product, beside, op, times
        elif op.opcode in ("call", "conditional", "async-start"):
            for called in op.called():
                yield from _products(module, called, times)
        elif op.opcode == "convolution" or _is_sum(op):
            yield op, ops, op, times


def _is_sum(op: Op) -> bool:
    return op.opcode == "reduce" and op.traced_name.endswith("/dot_general")


def _described(product: Op, ops: Mapping[str, Op], outer: Op | None) -> tuple[str, str]:
    """Returns the shape of a product's matrix, and its windows."""
    if product.opcode == "reduce":
        return "x".join(map(str, ops[product.operands[0]].shapes[0].dims)), SUM
    matrix = ops[product.operands[1]]
    labels = product.attribute("dim_labels").split("_")[1].split("->")[0]
    shape = "x".join(str(size) for size in matrix.shapes[0].dims if size > 1)
    return shape, INSIDE if outer is None else _windows(outer, matrix, labels.index("i"))


def _windows(op: Op, matrix: Op, contracted: int) -> str:
    """Returns the windows of the contracted dimension, by its place in the matrix.

    The last bound of the iteration counts them. `kernel_window_bounds` are the sizes of a window in
    tiles, in the order of the matrix's layout: the last in 128 numbers, the one before in 8.
    """
    loops, bounds = _bounds("iteration_bounds", op), _bounds("kernel_window_bounds", op)
    dims, layout = matrix.shapes[0].dims, re.search(r"\{([\d,]+)", matrix.text)
    depth, order = dims[contracted], [int(x) for x in layout[1].split(",")][::-1] if layout else []
    if not loops:
        return "?"
    if loops[-1] == 1:
        return f"1x{depth}"
    if len(bounds) == len(dims) == len(order):
        at = order.index(contracted)
        size = bounds[at] * ((1,) * len(dims) + (8, 128))[at - len(dims)]
        if math.ceil(depth / size) == loops[-1]:
            return f"{loops[-1]}x{size}"
    return f"{loops[-1]}x?"


def _bounds(name: str, op: Op) -> list[int]:
    found = re.search(rf'"{name}":\[([^\]]*)\]', op.text)
    return [int(bound) for bound in re.findall(r"\d+", found[1])] if found else []
