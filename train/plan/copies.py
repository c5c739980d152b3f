"""Copies of large arrays in a compiled program: of weights, of the cache, of states.

A program should use weights and cache where they lie. The compiler copies them if a program wants
another layout than its inputs have (a transpose, padding), or if it cannot prove that an update may
be made in place.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator

from train.plan.cycles import name_of, part_of
from train.plan.hlo import CACHE, Module, Op

LARGE = 2**20  # bytes from which a copy is named
ROUND, ENTRY = "round", "entry"  # in each round, or outside of rounds: at a chunk's begin and end
# The kind of what is copied, by the path of the argument. What is computed is `other`.
_KINDS = (
    ("cache", CACHE),
    ("weights", re.compile(r"^(params|head|vocabulary|draft_params|policy)\b")),
    ("state", re.compile(r"^(state|kept)\b")),
)
OTHER = "other"
# Operations whose result is their first operand, or lies in it.
_VIEWS = {
    "bitcast", "reshape", "copy", "copy-start", "copy-done", "transpose", "slice", "dynamic-slice",
    "slice-start", "slice-done", "dynamic-slice-start", "dynamic-slice-done",
    "dynamic-update-slice", "scatter", "convert", "opt-barrier",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Copy:
    """Copies of one array in one place of a program.

    Attributes:
      place: `round` or `entry`; a program without rounds has `entry` only.
      what: the path of the argument that is copied; of a computed array its part of a round.
      kind: `weights`, `cache`, `state`, or `other` for what is computed.
      shape: type and dimensions on a device.
      count: how often it is copied; of a loop that data end, once.
      bytes: bytes of the array.
    """

    place: str
    what: str
    kind: str
    shape: str
    count: int
    bytes: float

    @property
    def total(self) -> float:
        return self.count * self.bytes


def copies(module: Module, least: float = LARGE) -> list[Copy]:
    """Returns the copies of a program's arrays of at least so many bytes, the largest first."""
    return sorted(_Copies(module, least).found(), key=lambda copy: (-copy.total, copy.what))


class _Copies:
    """What copies arrays in a module, and which argument an array is."""

    def __init__(self, module: Module, least: float):
        self.module, self.least = module, least
        self.callers: dict[str, tuple[str, Op]] = {}
        for name, ops in module.computations.items():
            for op in ops.values():
                if op.opcode == "while":
                    self.callers[op.body] = name, op

    def found(self) -> Iterator[Copy]:
        counts: dict[tuple, int] = {}
        for place, op, where, times in self._walk(self.module.entry, ENTRY, 1):
            shape = op.shapes[0]
            name = self._argument(op, where)
            kind = next((kind for kind, path in _KINDS if name and path.search(name)), OTHER)
            text = f"{shape.kind}[{','.join(map(str, shape.dims))}]"
            key = place, name or part_of(op.text), kind, text, shape.bytes
            counts[key] = counts.get(key, 0) + times
        for (place, what, kind, text, size), count in counts.items():
            yield Copy(place, what, kind, text, count, size)

    def _walk(self, name: str, place: str, times: int) -> Iterator[tuple[str, Op, str, int]]:
        """Yields the copies in a computation: place, operation, its computation, how often."""
        for op in self.module.computations[name].values():
            if op.opcode == "while":
                inside = ROUND if op.body == self.module.round else place
                yield from self._walk(op.body, inside, times * (self.module.trips(op) or 1))
            elif op.opcode in ("call", "conditional", "async-start"):
                for called in op.called():
                    yield from self._walk(called, place, times)
            elif op.shapes and op.shapes[0].bytes >= self.least and self._copies(op, name):
                yield place, op, name, times

    def _copies(self, op: Op, name: str) -> bool:
        """Whether an operation only copies or transposes; to prefetch is not to copy."""
        if op.opcode == "fusion" and self._viewed(op) is not None:
            ops = self.module.computations[next(op.called())]
            root = next(o for o in ops.values() if o.root)
            while root.opcode == "bitcast":
                root = ops[root.operands[0]]
            return root.opcode in ("copy", "transpose")
        if op.opcode == "copy-start":
            source = self.module.computations[name][op.operands[0]].shapes[0]
            return source.in_hbm == op.shapes[0].in_hbm
        return op.opcode in ("copy", "transpose")

    def _argument(self, op: Op, name: str) -> str | None:
        """Returns the path of the argument that an operation's array is; None: it is computed."""
        index: int | None = None  # of the tuple that holds the array
        while True:
            ops = self.module.computations[name]
            if op.opcode == "parameter":
                if name == self.module.entry:
                    return name_of(op.text) or None
                if name not in self.callers:
                    return None
                name, op = self.callers[name]
            elif op.opcode == "get-tuple-element":
                index = int(re.search(r"index=(\d+)", op.text)[1])
                op = ops[op.operands[0]]
            elif op.opcode == "tuple" and index is not None:
                op, index = ops[op.operands[index]], None
            elif op.opcode == "while" or op.opcode in _VIEWS:
                op = ops[op.operands[0]]
            elif (at := self._viewed(op)) is not None:
                op = ops[op.operands[at]]
            else:
                return None

    def _viewed(self, op: Op) -> int | None:
        """Returns the operand of which an operation's result is a view; None: it computes."""
        if op.opcode == "custom-call" and not op.is_kernel and op.operands:
            return 0  # the compiler's own: pieces of one array are joined again
        if op.opcode != "fusion":
            return None
        ops = self.module.computations[next(op.called())]
        inner = next(o for o in ops.values() if o.root)
        while inner.opcode in _VIEWS:
            inner = ops[inner.operands[0]]
        if inner.opcode != "parameter":
            return None
        return int(re.search(r"parameter\((\d+)\)", inner.text)[1])
