"""Collectives of a compiled program and their bytes, read from the text of its optimised HLO."""

from __future__ import annotations

import math
import re
from typing import NamedTuple


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
    result: int
    received: int


_OPERATION = re.compile(
    r"= (?P<type>.*?) (?P<kind>all-gather|all-to-all|all-reduce|reduce-scatter|collective-permute)"
    r"(?P<start>-start)?\("
)
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,]*)\]")
_HANDLE = ("u32", "")
_BITS = {"pred": 8, "bf16": 16}


def received(hlo: str) -> list[Collective]:
    """Returns the collectives in optimised HLO text, as the compiler prints it for one device."""
    found = []
    for line in hlo.splitlines():
        match = _OPERATION.search(line)
        if match is None:
            continue
        kind = match["kind"]
        group = group_size(kind, line)
        arrays = _ARRAY.findall(match["type"])
        if match["start"] and kind != "all-reduce":  # its result also holds the operand and handles
            arrays = [array for array in arrays if array != _HANDLE]
            arrays = arrays[len(arrays) // 2 :]
        result = sum(_bytes(*array) for array in arrays)
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


def _bytes(dtype: str, dims: str) -> int:
    bits = _BITS.get(dtype) or int(re.search(r"\d+", dtype)[0])
    return math.prod(int(n) for n in dims.split(",") if n) * bits // 8


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
