"""What a GPU program launches: kernels and bytes by part, gathers of pages, CUDA graphs.

A GPU runs a compiled program as a list of instructions. Each launches one kernel (a fusion, a
product, a call of a library, a copy), but for those that only name or route values. The host
launches them one by one, or many at once as a CUDA graph, which XLA calls a command buffer. For a
loop or a conditional outside of a command buffer the host waits for the device, to read whether
there is another iteration, or which branch it is.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections import Counter
from collections.abc import Iterator

from train.plan.cycles import part_of
from train.plan.hlo import Module, Op

_THUNK = re.compile(r"^(\s*)\d+: (k\w+)")
_DECISIONS = ("kWhile", "kConditional")
_BUFFER = "kCommandBuffer"


@dataclasses.dataclass
class Launches:
    """What one run of a computation launches.

    Attributes:
      kernels: number of kernels, by part of a round (`train.plan.cycles.PARTS`).
      bytes: bytes to and from memory, by part; pages that kernels read themselves are not counted.
      own: number of calls of Pallas kernels.
      library: number of calls of cuDNN and of cuBLAS.
      gathers: number of gathers that read pages of a cache, by part.
      gathered: bytes of pages that these gathers write.
      loops: number of loops, by part and how often they run (`?`: data decide).
      branches: number of conditionals, by part. Of the branches, the one with most kernels counts.
    """

    kernels: Counter = dataclasses.field(default_factory=Counter)
    bytes: Counter = dataclasses.field(default_factory=Counter)
    own: int = 0
    library: int = 0
    gathers: Counter = dataclasses.field(default_factory=Counter)
    gathered: float = 0.0
    loops: Counter = dataclasses.field(default_factory=Counter)
    branches: Counter = dataclasses.field(default_factory=Counter)

    def add(self, other: Launches, times: int = 1) -> None:
        for field in dataclasses.fields(self):
            count = getattr(other, field.name)
            if isinstance(count, Counter):
                mine = getattr(self, field.name)
                for key, value in count.items():
                    mine[key] += times * value
            else:
                setattr(self, field.name, getattr(self, field.name) + times * count)


def launches(module: Module, name: str) -> Launches:
    """Counts what a computation launches, with the loops and computations inside of it.

    A loop's body counts as often as it runs; once where data decide how often.
    """
    total, ops = Launches(), module.computations[name]
    for op in ops.values():
        if op.opcode == "while":
            trips = module.trips(op)
            for called in (op.body, op.attribute("condition").lstrip("%")):
                total.add(launches(module, called), 1 if trips is None else trips)
            total.loops[f"{part_of(op.text)} x {trips or '?'}"] += 1
        elif op.opcode == "conditional":
            branches = [launches(module, called) for called in op.called()]
            total.add(max(branches, key=lambda branch: branch.kernels.total()))
            total.branches[part_of(op.text)] += 1
        elif op.opcode in ("call", "async-start"):
            for called in op.called():
                total.add(launches(module, called))
        elif op.launches:
            part = part_of(op.text)
            total.kernels[part] += 1
            total.bytes[part] += module.traffic(op, ops)
            total.own += op.is_kernel
            total.library += op.is_library
            for size in _gathered(module, op, ops):
                total.gathers[part] += 1
                total.gathered += size
    return total


def _gathered(module: Module, op: Op, ops: dict[str, Op]) -> Iterator[float]:
    """Yields the bytes of every gather of pages in an operation, which may be a fusion."""
    if op.opcode == "fusion":
        inside = module.computations[next(op.called())]
        for inner in inside.values():
            yield from _gathered(module, inner, inside)
    elif op.opcode == "gather" and op.operands[0] in ops:
        source = ops[op.operands[0]].shapes[0]
        # A fusion may see the cache in other dimensions. Tables and tokens are integers.
        if source.kind[0] in "bf" and source.size in _cache_sizes(module):
            yield op.shapes[0].bytes


@functools.cache
def _cache_sizes(module: Module) -> frozenset[int]:
    return frozenset(math.prod(dims) for dims in module.pages)


@dataclasses.dataclass(frozen=True)
class Thunks:
    """What the host does to run a program.

    Attributes:
      buffers: number of command buffers.
      decisions: number of loops and conditionals whose predicate the host reads.
      outside: number of launches that are in no command buffer, those of loops once.
    """

    buffers: int
    decisions: int
    outside: int


def thunks(text: str) -> Thunks:
    """Reads the sequence of thunks that XLA writes next to a program's text (`xla_dump_to`).

    Raises:
      ValueError: it is no such text.
    """
    buffers = decisions = outside = 0
    above: list[tuple[int, str]] = []  # indentation and kind of the thunks that contain the next
    for line in text.splitlines():
        if not (found := _THUNK.match(line)):
            continue
        depth, kind = len(found[1]), found[2]
        above = [(indent, what) for indent, what in above if indent < depth]
        within = any(what == _BUFFER for _, what in above)
        buffers += kind == _BUFFER
        if not within and kind in _DECISIONS:
            decisions += 1
        elif not within and kind not in (_BUFFER, "kSequential"):
            outside += 1
        above.append((depth, kind))
    if not above:
        raise ValueError("expected the thunk sequence of a program, got a text without thunks")
    return Thunks(buffers, decisions, outside)
