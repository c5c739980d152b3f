"""Operations, memory traffic and collectives of a compiled program, counted in its optimised HLO.

`Compiled.cost_analysis()` counts the body of a loop once, and a scan over layers is a loop. Here a
loop's body is counted once per iteration where the number of iterations is known
(`known_trip_count`, or a counter that is compared with a constant). For a loop whose end depends on
data, such as that over rounds, one iteration is counted. The cost of one round is also returned
separately.

The counts are operations of matrix products, bytes to and from memory (operands and results of
unfused operations; for arrays that are only sliced or updated in place, the slice), and bytes that
a device receives by collectives (as rings).
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Iterator

import numpy as np

from specjax.parallel.collectives import group_size
from train.plan.cycles import estimated, name_of, part_of

_WIDTHS = {"pred": 1, "s4": 0.5, "u4": 0.5, "c64": 8, "c128": 16, "bf16": 2, "token": 0}
_SHAPE = re.compile(r"([a-z]+\d*[a-z0-9]*)\[([\d,]*)\](\{[^}]*\})?")
_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\) -> .*\{$")
_NAME = re.compile(r"%([\w.\-]+)")
COLLECTIVES = (
    "all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute",
)  # fmt: skip
CACHE = re.compile(r"\.pages\b")  # in the path of an argument that is a cache
_KERNELS = ("tpu_custom_call", "mosaic_gpu_v2", "__gpu$xla.gpu.triton")
_LIBRARIES = re.compile(r'custom_call_target="__cu(dnn|blas)')
# Operations that move no data, or whose contents are counted separately.
_FREE = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id",
    "replica-id", "iota", "opt-barrier", "while", "conditional", "call", "domain", "async-start",
    "async-update",
}  # fmt: skip
_MOVES = {"gather", "scatter", "sort"}  # TPU's compiler estimates no cycles of most of these
# Operations that update their first operand in place, and which operand is the update.
_UPDATES = {"dynamic-update-slice": 1, "scatter": 2}


@dataclasses.dataclass(frozen=True)
class Shape:
    """One array: the name of its type, its dimensions, and whether it is in HBM."""

    kind: str
    dims: tuple[int, ...]
    in_hbm: bool

    @property
    def size(self) -> int:
        return math.prod(self.dims)

    @property
    def bytes(self) -> float:
        width = _WIDTHS.get(self.kind)
        if width is None:  # f32, s8, f8e4m3fn
            width = int(re.search(r"\d+", self.kind)[0]) / 8
        return self.size * width

    @property
    def traffic(self) -> float:
        return self.bytes if self.in_hbm else 0.0


def _shapes(text: str) -> list[Shape]:
    found = []
    for kind, dims, layout in _SHAPE.findall(text):
        space = re.search(r"S\((\d+)\)", layout or "")
        sizes = tuple(int(d) for d in dims.split(",") if d)
        found.append(Shape(kind, sizes, space is None or space[1] == "0"))
    return found


@dataclasses.dataclass
class Op:
    """One instruction: `name = shapes opcode(operands), attributes`."""

    name: str
    shapes: list[Shape]
    opcode: str
    operands: list[str]
    text: str
    root: bool

    def attribute(self, name: str) -> str | None:
        found = re.search(rf"{name}=(\{{[^}}]*\}}|%?[\w.\-]+)", self.text)
        return found[1] if found else None

    def called(self) -> Iterator[str]:
        """Yields the computations that the instruction calls once, outside of loops."""
        for name in ("calls", "to_apply", "true_computation", "false_computation"):
            if found := re.search(rf"\b{name}=%?([\w.\-]+)", self.text):
                yield found[1]
        if found := re.search(r"branch_computations=\{([^}]*)\}", self.text):
            yield from (name.strip().lstrip("%") for name in found[1].split(","))

    @property
    def body(self) -> str:
        """The computation that a loop repeats."""
        return self.attribute("body").lstrip("%")

    @property
    def launches(self) -> bool:
        """Whether a GPU runs something for it: it neither only names nor only routes values."""
        return self.opcode not in _FREE and not self.opcode.endswith("-done")

    @property
    def is_kernel(self) -> bool:
        return any(f'custom_call_target="{target}"' in self.text for target in _KERNELS)

    @property
    def is_library(self) -> bool:
        """Whether it calls cuDNN or cuBLAS."""
        return _LIBRARIES.search(self.text) is not None

    def numbers(self, name: str) -> list[int]:
        return [int(x) for x in re.findall(r"\d+", self.attribute(name) or "")]


@dataclasses.dataclass
class Cost:
    """The cost of a program per device.

    Attributes:
      flops: operations of matrix products.
      bytes: bytes to and from HBM.
      received: bytes received, by kind of collective.
      kernels: number of calls of Pallas kernels, whose operations are not counted.
      calls: number of collectives by kind, those of one device left out.
      cycles: the compiler's estimate of cycles by part, see `train.plan.cycles`.
      unknown: number of gathers, scatters and sorts without an estimate, by kind; their cycles are
        not in `cycles`.
      once: parts that have cycles in a loop whose end depends on data, of which one iteration is
        counted.
      launched, moved: number of operations that a GPU launches, and their bytes to and from memory,
        by part.
      branches: number of conditionals, by part. Of the branches, the costliest counts.
      library: number of calls of cuDNN and of cuBLAS.
      gathers, gathered: number of gathers that read pages of a cache, and bytes that they write.
      chains: kind and bytes, by name, of collectives that TPUs spread over several fusions. Each
        of these fusions contains the whole collective, which must be counted once.
    """

    flops: float = 0.0
    bytes: float = 0.0
    received: dict[str, float] = dataclasses.field(default_factory=dict)
    kernels: float = 0.0
    calls: dict[str, float] = dataclasses.field(default_factory=dict)
    cycles: dict[str, float] = dataclasses.field(default_factory=dict)
    unknown: dict[str, float] = dataclasses.field(default_factory=dict)
    once: frozenset[str] = frozenset()
    launched: dict[str, float] = dataclasses.field(default_factory=dict)
    moved: dict[str, float] = dataclasses.field(default_factory=dict)
    branches: dict[str, float] = dataclasses.field(default_factory=dict)
    library: float = 0.0
    gathers: float = 0.0
    gathered: float = 0.0
    chains: dict[tuple, tuple[str, float]] = dataclasses.field(default_factory=dict)

    def receive(self, kind: str, count: float) -> None:
        """Counts a collective that brings this many bytes."""
        _increase(self.received, kind, count)
        _increase(self.calls, kind, 1)

    def close_chains(self) -> None:
        """Counts the chains once all of their fusions were seen."""
        for kind, count in self.chains.values():
            self.receive(kind, count)
        self.chains = {}

    def add(self, other: Cost, times: float = 1.0) -> None:
        self.chains |= other.chains
        self.once |= other.once
        for name in ("flops", "bytes", "kernels", "library", "gathers", "gathered"):
            setattr(self, name, getattr(self, name) + times * getattr(other, name))
        for name in ("received", "calls", "cycles", "unknown", "launched", "moved", "branches"):
            for key, count in getattr(other, name).items():
                _increase(getattr(self, name), key, times * count)

    @property
    def network(self) -> float:
        return sum(self.received.values())

    @property
    def size(self) -> tuple[float, ...]:
        """What decides which of two computations costs more."""
        return self.flops, self.bytes, self.network, sum(self.cycles.values())


def _increase(counts: dict[str, float], key: str, count: float) -> None:
    counts[key] = counts.get(key, 0.0) + count


class Module:
    """The computations of an HLO module.

    Args:
      text: text of `Compiled.as_text()`.

    Attributes:
      computations: instructions by name, of each computation by name.
      entry: name of the computation that the program begins with.
    """

    def __init__(self, text: str):
        self.computations: dict[str, dict[str, Op]] = {}
        self.entry = ""
        for line in text.splitlines():
            if header := _HEADER.match(line):
                here = self.computations.setdefault(header[2], {})
                if header[1]:
                    self.entry = header[2]
            elif " = " in line and line.startswith(" "):
                op = _parse(line)
                here[op.name] = op

    @functools.cached_property
    def cost(self) -> Cost:
        """Returns the cost of the whole program."""
        return self.cost_of(self.entry)

    @functools.cached_property
    def pages(self) -> frozenset[tuple[int, ...]]:
        """Returns the shapes that a cache may have: an argument's, or layers and pages joined.

        Kernels read caches only in part, so that their bytes are not counted for a kernel.
        """
        found = set()
        for op in self.computations[self.entry].values():
            if op.opcode == "parameter" and CACHE.search(name_of(op.text)):
                dims = op.shapes[0].dims
                found |= {dims, (math.prod(dims[:-3]), *dims[-3:])}
        return frozenset(found)

    @functools.cached_property
    def turn(self) -> Cost | None:
        """Returns the cost of one iteration of `round`; None: there is no such loop."""
        return None if self.round is None else self.cost_of(self.round)

    @functools.cached_property
    def round(self) -> str | None:
        """Returns the name of the body of the loop over rounds; None: no loop has an unknown end.

        It is the innermost loop of unknown length that computes logits: the loop over batches
        contains it, and loops inside of it, such as one that draws noise, compute none. Where no
        loop computes logits it is the costliest.
        """
        loops = list(self.open_loops(self.entry))
        heads = [body for body in loops if "lm_head" in self._parts(body)]
        outer = [body for body in heads if any(x in heads for x in self.open_loops(body))]
        found = [body for body in heads if body not in outer] or loops
        # The outer of two loops that cost the same.
        return max(reversed(found), key=lambda body: self.cost_of(body).size, default=None)

    def open_loops(self, name: str) -> Iterator[str]:
        """Yields the bodies of loops of unknown length in a computation, inner ones first."""
        return (op.body for op in self.loops(name) if self.trips(op) is None)

    def loops(self, name: str) -> Iterator[Op]:
        """Yields the loops in a computation, inner ones first."""
        for op in self.computations[name].values():
            if op.opcode == "while":
                yield from self.loops(op.body)
                yield op
            elif op.opcode in ("call", "conditional"):
                for called in op.called():
                    yield from self.loops(called)

    @functools.cache  # noqa: B019 (a module lives as long as its plan)
    def _parts(self, name: str) -> frozenset[str]:
        """Returns the parts that operations of a computation, and of those it calls, belong to."""
        ops = self.computations[name].values()
        found = {part_of(op.text) for op in ops}
        for op in ops:
            for called in (op.body,) if op.opcode == "while" else op.called():
                found |= self._parts(called)
        return frozenset(found)

    @functools.cache  # noqa: B019
    def cost_of(self, name: str, fused: bool = False) -> Cost:
        """Returns the cost of one run of a computation.

        Args:
          fused: whether it belongs to a fusion, which accounts for its bytes and cycles.
        """
        total, ops = Cost(), self.computations[name]
        for op in ops.values():
            if op.opcode == "while":
                self._add_loop(total, op)
            elif op.opcode == "conditional":
                branches = [self.cost_of(called, fused) for called in op.called()]
                total.add(max(branches, key=lambda cost: cost.size))
                _increase(total.branches, part_of(op.text), 1)
            elif op.opcode in ("fusion", "call", "async-start"):
                inside = op.opcode == "fusion" or fused
                for called in op.called():
                    total.add(self.cost_of(called, inside))
            total.flops += self._flops(op, ops)
            self._add_collective(total, op, ops)
            if op.is_kernel:
                total.kernels += 1
            if not fused:
                moved = self.traffic(op, ops)
                total.bytes += moved
                if op.launches:
                    _increase(total.launched, part_of(op.text), 1)
                    _increase(total.moved, part_of(op.text), moved)
                    total.library += op.is_library
                    for size in self._gathered(op, ops):
                        total.gathers += 1
                        total.gathered += size
                if found := estimated(op.text):
                    _increase(total.cycles, part_of(op.text), found)
                elif (kind := self._kind(op)) in _MOVES:
                    _increase(total.unknown, kind, 1)
        if not fused:
            total.close_chains()
        elif name.startswith("all-reduce-scatter"):  # the TPU's form: reduce all, keep a part
            total.calls.pop("all-reduce", None)
            total.receive("reduce-scatter", total.received.pop("all-reduce", 0.0) / 2)
        return total

    def _gathered(self, op: Op, ops: dict[str, Op]) -> Iterator[float]:
        """Yields the bytes of every gather of pages in an operation, which may be a fusion."""
        if op.opcode == "fusion":
            inside = self.computations[next(op.called())]
            for inner in inside.values():
                yield from self._gathered(inner, inside)
        elif op.opcode == "gather" and op.operands[0] in ops:
            source = ops[op.operands[0]].shapes[0]
            # A fusion may see the cache in other dimensions. Tables and tokens are integers.
            sizes = {math.prod(dims) for dims in self.pages}
            if source.kind[0] in "bf" and source.size in sizes:
                yield op.shapes[0].bytes

    def _kind(self, op: Op) -> str:
        """Returns an operation's code; of a fusion that of its last operation."""
        if op.opcode != "fusion":
            return op.opcode
        ops = self.computations[next(op.called())]
        root = next(o for o in ops.values() if o.root)
        while root.opcode in ("bitcast", "reshape", "transpose"):
            root = ops[root.operands[0]]
        return root.opcode

    def _add_loop(self, total: Cost, op: Op) -> None:
        body, trips = self.cost_of(op.body), self.trips(op)
        total.add(body, 1 if trips is None else trips)
        if trips is None:
            total.once |= {part for part, count in body.cycles.items() if count}

    def trips(self, op: Op) -> int | None:
        if known := re.search(r'"known_trip_count":\{"n":"(\d+)"\}', op.text):
            return int(known[1])
        ops = self.computations[op.attribute("condition").lstrip("%")]
        root = next(o for o in ops.values() if o.root)
        if root.opcode == "fusion":
            called = self.computations[next(root.called())]
            given = [ops[name] for name in root.operands]
            root = next(o for o in called.values() if o.root)
            ops = called | {
                o.name: given[int(re.search(r"parameter\((\d+)\)", o.text)[1])]
                for o in called.values()
                if o.opcode == "parameter"
            }
        if root.opcode != "compare" or root.attribute("direction") != "LT":
            return None
        counter, limit = (ops[name] for name in root.operands)
        if counter.opcode != "get-tuple-element" or counter.shapes[0].kind not in ("s32", "u32"):
            return None
        found = re.search(r"constant\((\d+)\)", limit.text)
        return int(found[1]) if found else None

    # --- operations ------------------------------------------------------------------------------

    def _flops(self, op: Op, ops: dict[str, Op]) -> float:
        if op.opcode == "dot":
            left = ops[op.operands[0]].shapes[0].dims
            depth = math.prod(left[i] for i in op.numbers("lhs_contracting_dims"))
            return 2.0 * op.shapes[0].size * depth
        if op.opcode == "convolution":
            return _convolution_flops(op, ops)
        return 0.0

    # --- bytes -----------------------------------------------------------------------------------

    def traffic(self, op: Op, ops: dict[str, Op]) -> float:
        """Returns the bytes that an operation of the computation `ops` reads and writes."""
        code = op.opcode
        if code in _FREE or code.endswith("-done") or code.startswith(COLLECTIVES):
            return 0.0
        given = [ops[name].shapes[0] for name in op.operands if name in ops and ops[name].shapes]
        out = sum(s.traffic for s in op.shapes)
        if code == "fusion":
            return self._fusion_bytes(op, given)
        if code in ("dynamic-slice", "slice", "gather"):
            return out + sum(s.bytes for s in op.shapes) * given[0].in_hbm
        if code in ("dynamic-update-slice", "dynamic-update-slice-start"):
            # The update is read and written; prefetched, it is read on the chip.
            return given[1].traffic + given[1].bytes * given[0].in_hbm
        if code == "scatter":
            return 2.0 * given[-1].traffic
        if code == "copy-start":  # (copy, operand, context)
            return op.shapes[0].traffic + given[0].traffic
        if code in ("slice-start", "dynamic-slice-start"):  # ((operands), piece, context)
            piece = op.shapes[len(op.operands)]
            return piece.traffic + piece.bytes * given[0].in_hbm
        if code == "custom-call":
            if not (op.is_kernel or op.is_library):
                return 0.0  # the compiler's own data: buffers, indices
            given = [s for s in given if s.dims not in self.pages]
            out = sum(s.traffic for s in op.shapes if s.dims not in self.pages)
        return out + sum(s.traffic for s in given)

    def _fusion_bytes(self, op: Op, given: list[Shape]) -> float:
        """Counts operands and results; of those sliced or updated in place, only the slices."""
        ops = self.computations[next(op.called())]
        total = 0.0
        for inner in ops.values():
            if inner.opcode == "parameter":
                number = int(re.search(r"parameter\((\d+)\)", inner.text)[1])
                outer = given[number] if number < len(given) else inner.shapes[0]
                if outer.in_hbm:
                    total += min(self._read(inner, ops), inner.shapes[0].bytes)
        root = next(o for o in ops.values() if o.root)
        parts = [ops[n] for n in root.operands] if root.opcode == "tuple" else [root]
        for part, shape in zip(parts, op.shapes, strict=False):
            while part.opcode == "bitcast":
                part = ops[part.operands[0]]
            written = shape.bytes
            if part.opcode in _UPDATES:
                written = ops[part.operands[_UPDATES[part.opcode]]].shapes[0].bytes
            total += written * shape.in_hbm
        return total

    def _read(
        self, value: Op, ops: dict[str, Op], returned: Callable[[], float] | None = None
    ) -> float:
        """Counts the bytes of a value of a fused computation that are read.

        Args:
          value: a parameter, or a view of one.
          ops: the computation.
          returned: counts what is read of the computation's result; None: all of it.
        """
        total = 0.0
        if value.root:
            total += value.shapes[0].bytes if returned is None else returned()
        for user in ops.values():
            if value.name not in user.operands:
                continue
            at = user.operands.index(value.name)
            if user.opcode in ("dynamic-slice", "slice", "gather") and at == 0:
                total += user.shapes[0].bytes
            elif user.opcode in _UPDATES and at == 0:
                total += ops[user.operands[_UPDATES[user.opcode]]].shapes[0].bytes
            elif user.opcode in ("bitcast", "reshape"):
                total += self._read(user, ops, returned)
            elif user.opcode == "fusion":
                inside = self.computations[next(user.called())]
                given = next(o for o in inside.values() if f"parameter({at})" in o.text)
                further = functools.partial(self._read, user, ops, returned)
                total += self._read(given, inside, further)
            else:
                return value.shapes[0].bytes
        return total

    # --- collectives -----------------------------------------------------------------------------

    def _add_collective(self, total: Cost, op: Op, ops: dict[str, Op]) -> None:
        kind = op.opcode.removesuffix("-start")
        if kind not in COLLECTIVES:
            return
        group = group_size(kind, op.text)
        sent = sum(ops[n].shapes[0].bytes for n in op.operands if n in ops and ops[n].shapes)
        share = (group - 1) / group
        received = {
            "all-gather": sent * (group - 1),
            "all-reduce": 2 * sent * share,
            "reduce-scatter": sent * share,
            "all-to-all": sent * share,
            "collective-permute": sent,
        }[kind]
        chain = re.search(r'chain_id="(\d+)"', op.text), re.search(r"channel_id=(\d+)", op.text)
        if chain[0]:
            total.chains[chain[0][1], chain[1] and chain[1][1]] = kind, received
        elif received:
            total.receive(kind, received)


def _parse(line: str) -> Op:
    left, _, right = line.strip().partition(" = ")
    if right.startswith("("):
        end = _closing(right, 0) + 1
    else:
        end = right.index(" ")
    start = right.index("(", end)
    close = _closing(right, start)
    return Op(
        name=left.removeprefix("ROOT ").lstrip("%"),
        shapes=_shapes(right[:end]),
        opcode=right[end:start].strip(),
        operands=_NAME.findall(right[start:close]),
        text=right,
        root=left.startswith("ROOT "),
    )


def _closing(text: str, start: int) -> int:
    """Returns the index of the parenthesis that closes the one at `start`."""
    depth = 0
    for i in range(start, len(text)):
        depth += (text[i] == "(") - (text[i] == ")")
        if not depth:
            return i
    raise ValueError(f"expected balanced parentheses in HLO, got {text[start : start + 80]!r}")


def _convolution_flops(op: Op, ops: dict[str, Op]) -> float:
    """Counts a convolution, the TPU's form of matrix products; padding is not counted."""
    left, right = (ops[name].shapes[0].dims for name in op.operands[:2])
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", op.text)
    lhs, rhs, out = labels[1], labels[2], labels[3]
    result = op.shapes[0].dims
    window = re.search(r"window=\{([^}]*)\}", op.text)
    fields = dict(re.findall(r"(\w+)=([\dx_\-]+)", window[1])) if window else {}
    spatial = sorted(set(re.findall(r"\d", rhs)))
    products = 1.0
    for i, label in enumerate(spatial):

        def field(name, default, i=i):
            return fields[name].split("x")[i] if name in fields else default

        kernel, base = right[rhs.index(label)], left[lhs.index(label)]
        low = int(field("pad", "0_0").split("_")[0])
        at = np.arange(result[out.index(label)])[:, None] * int(field("stride", "1")) - low
        at = at + np.arange(kernel)[None] * int(field("rhs_dilate", "1"))
        spread = int(field("lhs_dilate", "1"))
        hits = (at >= 0) & (at % spread == 0) & (at // spread < base)
        products *= hits.sum()
    depth = right[rhs.index("i")]  # per group, if there are several
    outer = result[out.index("b")] * result[out.index("f")]
    return 2.0 * outer * depth * products
