"""Cycles of a TPU program by the compiler's own model, by the part of the round they belong to.

XLA's TPU compiler writes an estimate of cycles to every fusion (`estimated_cycles`). Here they are
added up, with the trip counts of loops, by the innermost `jax.named_scope` in the operation's name
that is one of `PARTS`. Pallas kernels, collectives and waits for copies have no estimate and count
as 0: so figures are good for ratios of one program to another, and are no times.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

from train.plan.hlo import COLLECTIVES, Module, Op

# Scopes of `specjax.decode`, `specjax.memory` and `specjax.models`; `rest` has none of them.
PARTS = ("layers", "draft", "lm_head", "noise", "sampling", "commit")
REST = "rest"

_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_NAME = re.compile(r'op_name="([^"]*)"')


def cycles(module: Module, computation: str | None = None) -> Counter[str]:
    """Adds up the estimated cycles of a computation by part; None: the costliest round.

    A loop of unknown length counts once, and of a conditional's branches the costliest.
    """
    if computation is None:
        computation = round_of(module)
    total: Counter[str] = Counter()
    for op in module.computations[computation].values():
        if op.opcode == "while":
            body = cycles(module, op.attribute("body").lstrip("%"))
            trips = module.trips(op) or 1
            total.update({part: trips * count for part, count in body.items()})
        elif op.opcode == "conditional":
            branches = [cycles(module, called) for called in op.called()]
            total.update(max(branches, key=Counter.total))
        elif op.opcode in ("call", "async-start"):
            for called in op.called():
                total.update(cycles(module, called))
        if found := _CYCLES.search(op.text):
            total[part_of(op)] += int(found[1])
    return total


def round_of(module: Module) -> str:
    """Returns the name of the body of a chunk's loop over rounds; without one the whole program's.

    It is the innermost loop of unknown length that computes logits: the loop over batches contains
    it, and loops inside of it, such as one that draws noise, compute none.
    """
    inner = [name for name in _open_loops(module, module.entry) if _heads(module, name)]
    return inner[-1] if inner else module.entry


def _open_loops(module: Module, name: str) -> Iterator[str]:
    """Yields the bodies of loops of unknown length in a computation, the outermost first."""
    for op in module.computations[name].values():
        if op.opcode == "while":
            body = op.attribute("body").lstrip("%")
            if module.trips(op) is None:
                yield body
            yield from _open_loops(module, body)
        elif op.opcode in ("call", "conditional"):
            for called in op.called():
                yield from _open_loops(module, called)


def _heads(module: Module, name: str) -> bool:
    """Whether a computation, or what it calls, has a matrix product of the language-model head."""
    return cycles(module, name)["lm_head"] > 0


def part_of(op: Op) -> str:
    """Returns the part that an operation belongs to."""
    found = _NAME.search(op.text)
    scopes = [s for s in re.split(r"[/()]", found[1]) if s in PARTS] if found else []
    if not scopes:
        return REST
    return "draft" if scopes[-1] == "layers" and "draft" in scopes else scopes[-1]


def counted(module: Module, computation: str) -> Counter[str]:
    """Counts the collectives of a computation by kind, with the trip counts of loops."""
    total: Counter[str] = Counter()
    for op in module.computations[computation].values():
        if op.opcode == "while":
            inside = counted(module, op.attribute("body").lstrip("%"))
            trips = module.trips(op) or 1
            total.update({kind: trips * count for kind, count in inside.items()})
        else:
            for called in op.called():
                if op.opcode in ("fusion", "call", "async-start", "conditional"):
                    total.update(counted(module, called))
        kind = op.opcode.removesuffix("-start")
        if kind in COLLECTIVES:
            total[kind] += 1
    return total
