"""Operations, cycles, collectives and copies of a compiled program, by its optimised HLO.

`Compiled.cost_analysis()` counts the body of a loop once, and a scan over layers is a loop. Here a
loop's body is counted once per iteration where the number of iterations is known
(`known_trip_count`, or a counter that is compared with a constant). For a loop whose end depends on
data, such as that over rounds, one iteration is counted.

XLA's TPU compiler writes an estimate of cycles (`estimated_cycles`) to every fusion and to every
operation that it did not fuse. Pallas kernels, collectives, waits for asynchronous copies, and most
gathers, scatters and sorts have none and count as 0. Hence sums of estimates compare one program
with another, and are no times.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

# Scopes of `specjax.decode`, `specjax.memory` and `specjax.models`; `rest` has none of them.
PARTS = ("layers", "draft", "lm_head", "noise", "sampling", "commit")
REST = "rest"

_BITS = {"pred": 8, "token": 0}  # of types without a number in their names
_SHAPE = re.compile(r"([a-z]+\d*[a-z0-9]*)\[([\d,]*)\](\{[^}]*\})?")
_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\) -> .*\{$")
# `name = shapes opcode(operands), attributes`; shapes have parentheses, but none behind a word.
_INSTRUCTION = re.compile(
    r"(?P<root>ROOT )?%?(?P<name>\S+) = (?P<text>(?P<shapes>.*?) (?P<opcode>[a-z][\w\-]*)"
    r"\((?P<operands>.*?)\)(?:, .*)?)"
)
_NAME = re.compile(r"%([\w.\-]+)")
_KERNELS = ("tpu_custom_call", "mosaic_gpu_v2", "__gpu$xla.gpu.triton")
# Operations that move no data, or whose contents are counted separately.
_FREE = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id",
    "replica-id", "iota", "opt-barrier", "while", "conditional", "call", "domain", "async-start",
    "async-update",
}  # fmt: skip
_CALLS = ("call", "conditional", "async-start")
_MOVES = {"gather", "scatter", "sort"}  # TPU's compiler estimates no cycles of most of these
# Operations whose result is their first operand, or lies in it.
_VIEWS = {
    "bitcast", "reshape", "copy", "copy-start", "copy-done", "transpose", "slice", "dynamic-slice",
    "slice-start", "slice-done", "dynamic-slice-start", "dynamic-slice-done",
    "dynamic-update-slice", "scatter", "convert", "opt-barrier",
}  # fmt: skip

LARGE = 2**20  # bytes from which a copy is named
ROUND, ENTRY = "round", "entry"  # in each round, or outside of rounds: at a chunk's begin and end
# The kind of what is copied, by the path of the argument. What is computed is `other`.
_CACHE = re.compile(r"\.pages\b")
_WEIGHTS = re.compile(r"^(params|head|vocabulary|draft_params|policy)\b")


class Shape(NamedTuple):
    """One array: the name of its type, its dimensions, and whether it is in HBM."""

    kind: str
    dims: tuple[int, ...]
    in_hbm: bool

    @property
    def size(self) -> int:
        return math.prod(self.dims)

    @property
    def bytes(self) -> float:
        bits = re.search(r"\d+", self.kind)  # f32, s8, f8e4m3fn
        return self.size * (int(bits[0]) if bits else _BITS[self.kind]) / 8


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

    @classmethod
    def parse(cls, line: str) -> Op:
        match = _INSTRUCTION.fullmatch(line.strip())
        return cls(
            name=match["name"],
            shapes=_shapes(match["shapes"]),
            opcode=match["opcode"],
            operands=_NAME.findall(match["operands"]),
            text=match["text"],
            root=match["root"] is not None,
        )

    def attribute(self, name: str) -> str | None:
        found = re.search(rf"\b{name}=(\{{[^}}]*\}}|%?[\w.\-]+)", self.text)
        return found and found[1].lstrip("%")

    def called(self) -> Iterator[str]:
        """Yields the computations that the instruction calls once, outside of loops."""
        for name in ("calls", "to_apply", "true_computation", "false_computation"):
            if found := self.attribute(name):
                yield found
        yield from _NAME.findall(self.attribute("branch_computations") or "")

    @property
    def body(self) -> str:
        """The computation that a loop repeats."""
        return self.attribute("body")

    @property
    def number(self) -> int:
        """The place of a parameter among those of its computation."""
        return int(re.search(r"parameter\((\d+)\)", self.text)[1])

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
        return re.search(r'custom_call_target="__cu(dnn|blas)', self.text) is not None

    @property
    def traced_name(self) -> str:
        """The name that the traced program gave to it; "" if it has none.

        The name of an operation holds its scopes, that of an input the path of the argument.
        """
        found = re.search(r'op_name="([^"]*)"', self.text)
        return found[1].replace("\\'", "'") if found else ""

    @property
    def part(self) -> str:
        """The part of a round that it belongs to.

        It is the innermost `jax.named_scope` of its name that is one of `PARTS`. Layers of the
        draft, and what it writes, belong to the draft.
        """
        scopes = [scope for scope in re.split(r"[/()]", self.traced_name) if scope in PARTS]
        if not scopes:
            return REST
        return "draft" if scopes[-1] == "layers" and "draft" in scopes else scopes[-1]


Ops = Mapping[str, Op]


def _root(ops: Ops) -> Op:
    return next(op for op in ops.values() if op.root)


def _beneath(op: Op, ops: Ops, views: Collection[str]) -> Op:
    """Returns the operation whose result an operation shows in another form."""
    while op.opcode in views:
        op = ops[op.operands[0]]
    return op


class Cost(collections.defaultdict[str, Counter]):
    """The cost of a program per device: counts by part of a round, or by kind, of each figure.

        launched    operations that a GPU launches, by part
        cycles      the compiler's estimate, by part
        unknown     gathers, scatters and sorts without an estimate, by kind
        received    bytes received (as rings), by kind of collective
        calls       collectives, by kind; those of one device are left out
        kernels     calls of Pallas kernels
        library     calls of cuDNN and of cuBLAS
        gathers, gathered    gathers that read pages of a cache, and bytes that they write

    Attributes:
      once: parts that have cycles in a loop whose end depends on data, of which one iteration is
        counted.
      chains: kind and bytes, by name, of collectives that TPUs spread over several fusions. Each
        of these fusions contains the whole collective, which must be counted once.
    """

    def __init__(self) -> None:
        super().__init__(Counter)
        self.once: frozenset[str] = frozenset()
        self.chains: dict[tuple, tuple[str, float]] = {}

    def receive(self, kind: str, size: float) -> None:
        """Counts a collective that brings this many bytes."""
        self["received"][kind] += size
        self["calls"][kind] += 1

    def close_chains(self) -> None:
        """Counts the chains once all of their fusions were seen."""
        for kind, size in self.chains.values():
            self.receive(kind, size)
        self.chains = {}

    def add(self, other: Cost, times: float = 1.0) -> None:
        self.chains |= other.chains
        self.once |= other.once
        for figure, counts in other.items():
            for key, count in counts.items():
                self[figure][key] += times * count

    @property
    def size(self) -> tuple[float, ...]:
        """Decides which of two computations costs more."""
        return tuple(self[figure].total() for figure in ("launched", "received", "cycles"))


class Copy(NamedTuple):
    """Copies of one array in one place of a program.

    A program should use weights and cache where they lie. The compiler copies them if a program
    wants another layout than its inputs have (a transpose, padding), or if it cannot prove that an
    update may be made in place.

    Attributes:
      place: `round` or `entry`; a program without rounds has `entry` only.
      what: the path of the argument that is copied; of a computed array its part of a round.
      kind: `weights`, `cache`, or `other`.
      bytes: bytes of all copies; of a loop that data end, those of one iteration.
    """

    place: str
    what: str
    kind: str
    bytes: float


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
                ops = self.computations.setdefault(header[2], {})
                if header[1]:
                    self.entry = header[2]
            elif " = " in line and line.startswith(" "):
                op = Op.parse(line)
                ops[op.name] = op

    def inside(self, op: Op) -> Ops:
        """Returns the computation of a fusion."""
        return self.computations[next(op.called())]

    @functools.cached_property
    def cost(self) -> Cost:
        """The cost of the whole program."""
        return self.cost_of(self.entry)

    @functools.cached_property
    def page_counts(self) -> frozenset[int]:
        """The numbers of elements that a cache may have; an operation may see other dimensions."""
        ops = self.computations[self.entry].values()
        caches = (op for op in ops if op.opcode == "parameter" and _CACHE.search(op.traced_name))
        return frozenset(op.shapes[0].size for op in caches)

    # --- loops -----------------------------------------------------------------------------------

    @functools.cached_property
    def round(self) -> str | None:
        """The name of the body of the loop over rounds; None: no loop has an unknown end.

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
            elif op.opcode in _CALLS:
                for called in op.called():
                    yield from self.loops(called)

    @functools.cache  # noqa: B019 (a module lives as long as its plan)
    def _parts(self, name: str) -> frozenset[str]:
        """Returns the parts that operations of a computation, and of those it calls, belong to."""
        ops = self.computations[name].values()
        found = {op.part for op in ops}
        for op in ops:
            for called in (op.body,) if op.opcode == "while" else op.called():
                found |= self._parts(called)
        return frozenset(found)

    def trips(self, op: Op) -> int | None:
        """Returns how often a loop runs; None if that depends on data."""
        if known := re.search(r'"known_trip_count":\{"n":"(\d+)"\}', op.text):
            return int(known[1])
        ops = self.computations[op.attribute("condition")]
        root = _root(ops)
        if root.opcode == "fusion":
            given, inside = [ops[name] for name in root.operands], self.inside(root)
            root = _root(inside)
            parameters = (o for o in inside.values() if o.opcode == "parameter")
            ops = {**inside, **{o.name: given[o.number] for o in parameters}}
        if root.opcode != "compare" or root.attribute("direction") != "LT":
            return None
        counter, limit = (ops[name] for name in root.operands)
        if counter.opcode != "get-tuple-element" or counter.shapes[0].kind not in ("s32", "u32"):
            return None
        found = re.search(r"constant\((\d+)\)", limit.text)
        return int(found[1]) if found else None

    # --- cost ------------------------------------------------------------------------------------

    @functools.cache  # noqa: B019
    def cost_of(self, name: str, fused: bool = False) -> Cost:
        """Returns the cost of one run of a computation.

        Args:
          name: the computation.
          fused: whether it belongs to a fusion, which accounts for its bytes and cycles.
        """
        total, ops = Cost(), self.computations[name]
        for op in ops.values():
            if op.opcode == "while":
                body, trips = self.cost_of(op.body), self.trips(op)
                total.add(body, 1 if trips is None else trips)
                if trips is None:
                    total.once |= {part for part, count in body["cycles"].items() if count}
            elif op.opcode == "conditional":
                branches = [self.cost_of(called, fused) for called in op.called()]
                total.add(max(branches, key=lambda cost: cost.size))
            elif op.opcode in ("fusion", "call", "async-start"):
                for called in op.called():
                    total.add(self.cost_of(called, op.opcode == "fusion" or fused))
            self._add_collective(total, op)
            total["kernels"][op.part] += op.is_kernel
            if not fused:
                self._add_unfused(total, op, ops)
        if not fused:
            total.close_chains()
        elif name.startswith("all-reduce-scatter"):  # the TPU's form: reduce all, keep a part
            total["calls"].pop("all-reduce", None)
            total.receive("reduce-scatter", total["received"].pop("all-reduce", 0.0) / 2)
        return total

    def _add_unfused(self, total: Cost, op: Op, ops: Ops) -> None:
        if op.launches:
            total["launched"][op.part] += 1
            total["library"][op.part] += op.is_library
            for size in self._gathered(op, ops):
                total["gathers"][op.part] += 1
                total["gathered"][op.part] += size
        kind = op.opcode
        if kind == "fusion":
            inside = self.inside(op)
            kind = _beneath(_root(inside), inside, ("bitcast", "reshape", "transpose")).opcode
        if cycles := re.search(r'"estimated_cycles":"(\d+)"', op.text):
            total["cycles"][op.part] += int(cycles[1])
        elif kind in _MOVES:
            total["unknown"][kind] += 1

    def _add_collective(self, total: Cost, op: Op) -> None:
        if not op.opcode.startswith(("all-", "reduce-scatter", "collective-permute")):
            return
        for collective in received(f"= {op.text}"):
            cost = collective.kind, collective.received
            chain = re.search(r'chain_id="(\d+)"', op.text)
            if chain:
                total.chains[chain[1], op.attribute("channel_id")] = cost
            elif collective.received:
                total.receive(*cost)

    def _gathered(self, op: Op, ops: Ops) -> Iterator[float]:
        """Yields the bytes of every gather of pages in an operation, which may be a fusion."""
        if op.opcode == "fusion":
            inside = self.inside(op)
            for inner in inside.values():
                yield from self._gathered(inner, inside)
        elif op.opcode == "gather" and op.operands[0] in ops:
            source = ops[op.operands[0]].shapes[0]
            # Tables and tokens are integers.
            if source.kind[0] in "bf" and source.size in self.page_counts:
                yield op.shapes[0].bytes

    # --- copies ----------------------------------------------------------------------------------

    def copies(self) -> list[Copy]:
        """Returns the copies of arrays of at least `LARGE` bytes, the largest first."""
        sizes: Counter[tuple[str, str, str]] = Counter()
        for place, op, where, times in self._copying(self.entry, ENTRY, 1):
            path, kind = self._argument(op, where), "other"
            if path is not None:
                kind = "cache" if _CACHE.search(path) else kind
                kind = "weights" if _WEIGHTS.search(path) else kind
            sizes[place, path or op.part, kind] += times * op.shapes[0].bytes
        found = [Copy(*key, size) for key, size in sizes.items()]
        return sorted(found, key=lambda copy: (-copy.bytes, copy.what))

    def _copying(self, name: str, place: str, times: int) -> Iterator[tuple[str, Op, str, int]]:
        """Yields the copies in a computation: place, operation, its computation, how often."""
        for op in self.computations[name].values():
            if op.opcode == "while":
                inside = ROUND if op.body == self.round else place
                yield from self._copying(op.body, inside, times * (self.trips(op) or 1))
            elif op.opcode in _CALLS:
                for called in op.called():
                    yield from self._copying(called, place, times)
            elif op.shapes and op.shapes[0].bytes >= LARGE and self._only_copies(op, name):
                yield place, op, name, times

    def _only_copies(self, op: Op, name: str) -> bool:
        """Whether an operation only copies or transposes; to prefetch is not to copy."""
        if op.opcode == "fusion" and self._viewed(op) is not None:
            ops = self.inside(op)
            op = _beneath(_root(ops), ops, ("bitcast",))
        if op.opcode == "copy-start":
            source = self.computations[name][op.operands[0]].shapes[0]
            return source.in_hbm == op.shapes[0].in_hbm
        return op.opcode in ("copy", "transpose")

    def _argument(self, op: Op, name: str) -> str | None:
        """Returns the path of the argument that an operation's array is; None: it is computed."""
        index: int | None = None  # of the tuple that holds the array
        while True:
            ops = self.computations[name]
            if op.opcode == "parameter":
                if name == self.entry:
                    return op.traced_name or None
                if name not in self._callers:
                    return None
                name, op = self._callers[name]
            elif op.opcode == "get-tuple-element":
                index = int(op.attribute("index"))
                op = ops[op.operands[0]]
            elif op.opcode == "tuple" and index is not None:
                op, index = ops[op.operands[index]], None
            elif op.opcode == "while" or op.opcode in _VIEWS:
                op = ops[op.operands[0]]
            elif (at := self._viewed(op)) is not None:
                op = ops[op.operands[at]]
            else:
                return None

    @functools.cached_property
    def _callers(self) -> dict[str, tuple[str, Op]]:
        """The loop of each body, with the computation that the loop is in."""
        return {
            op.body: (name, op)
            for name, ops in self.computations.items()
            for op in ops.values()
            if op.opcode == "while"
        }

    def _viewed(self, op: Op) -> int | None:
        """Returns the operand of which an operation's result is a view; None: it computes."""
        if op.opcode == "custom-call" and not op.is_kernel and op.operands:
            return 0  # the compiler's own: pieces of one array are joined again
        if op.opcode != "fusion":
            return None
        ops = self.inside(op)
        inner = _beneath(_root(ops), ops, _VIEWS)
        return inner.number if inner.opcode == "parameter" else None


# --- collectives ---------------------------------------------------------------------------------


class Collective(NamedTuple):
    """One collective operation of a compiled program.

    Attributes:
      kind: `all-gather`, `all-to-all`, ...
      group: number of devices that communicate with each other.
      result: bytes of the result on one device.
      received: bytes that one device receives from others.
    """

    kind: str
    group: int
    result: float
    received: int


_COLLECTIVE = re.compile(
    r"= (?P<type>.*?) (?P<kind>all-gather|all-to-all|all-reduce|reduce-scatter|collective-permute)"
    r"(?P<start>-start)?\("
)


def received(hlo: str) -> list[Collective]:
    """Returns the collectives in optimised HLO text, as the compiler prints it for one device."""
    found = []
    for line in hlo.splitlines():
        match = _COLLECTIVE.search(line)
        if match is None:
            continue
        kind = match["kind"]
        group = group_size(kind, line)
        arrays = _shapes(match["type"])
        if match["start"] and kind != "all-reduce":  # its result also holds the operand and handles
            arrays = [array for array in arrays if (array.kind, array.dims) != ("u32", ())]
            arrays = arrays[len(arrays) // 2 :]
        result = sum(array.bytes for array in arrays)
        share = (group - 1) / group
        moved = {
            "all-gather": result * share,
            "all-to-all": result * share,
            "all-reduce": 2 * result * share,
            "reduce-scatter": result * (group - 1),
            "collective-permute": result,
        }[kind]
        found.append(Collective(kind, group, result, round(moved)))
    return found


def group_size(kind: str, line: str) -> int:
    """Returns the number of devices in one group of a collective.

    HLO has several notations for groups, see the patterns; permutations have pairs instead.

    Raises:
      ValueError: the notation is unknown.
    """
    if kind == "collective-permute":
        return 2
    if found := re.search(r"replica_groups=\[\d+,(\d+)\]", line):  # [2,4]<=[8]
        return int(found[1])
    if found := re.search(r"replica_groups=\{\{([\d,]+)\}", line):  # {{0,1},{2,3}}
        return len(found[1].split(","))
    # mesh['a'=2,'b'=4] {'b'}, with 'b':(1)2 for a part of an axis
    if found := re.search(r"replica_groups=mesh\[([^\]]*)\].*?\{([^}]*)\}", line):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", found[1]))
        named = re.findall(r"'(\w+)'(?::\(\d+\)(\d+))?", found[2])
        return math.prod(int(part or sizes[name]) for name, part in named)
    raise ValueError(f"expected a collective with groups that can be read, got: {line.strip()}")
