"""How many kernels one round launches, counted in the compiled program's text.

XLA runs a compiled program as a list of instructions. Each is a kernel (fusion, matrix product,
library call, sort, copy, ..) but for those that only name or route values (parameter, constant,
tuple, bitcast, ..). The rounds of a chunk are the body of the program's main `while`; what is
counted is the kernels of that body:

    - a fusion, a library call or a reduction is one, whatever it holds;
    - a `call` is what it calls, but for the CPU's small calls, which are compiled into one kernel;
    - a loop inside counts as often as it is known to run (`known_trip_count`), and once where that
      is decided at run time (attention's loop over a prefix, by blocks of 128 positions);
    - of a conditional the branch with most kernels counts.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

# Instructions that launch nothing.
FREE = frozenset(
    """parameter constant tuple get-tuple-element bitcast after-all add-dependency opt-barrier
    partition-id replica-id domain async-update async-done copy-done""".split()
)
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?[\w.\-]+ = .*?[\s)}\]]([a-z][a-z0-9\-]*)\((.*)$")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_SMALL_CALL = 'xla_cpu_small_call="true"'


class Instruction(NamedTuple):
    """Opcode, and operands with attributes as they stand."""

    opcode: str
    rest: str

    def called(self, *attributes: str) -> list[str]:
        """Computations that these attributes name."""
        found = []
        for attribute in attributes:
            match = re.search(rf"\b{attribute}=(\{{[^}}]*\}}|%?[\w.\-]+)", self.rest)
            if match:
                found += re.findall(r"[\w.\-]+", match[1])
        return found


class Program(NamedTuple):
    """Computations by name, and which one is the program's entry."""

    computations: dict[str, list[Instruction]]
    entry: str


def parse(text: str) -> Program:
    """Reads `compiled.as_text()`.

    Raises:
      ValueError: there is no entry computation.
    """
    computations: dict[str, list[Instruction]] = {}
    entry = current = None
    for line in text.splitlines():
        if match := _COMPUTATION.match(line):
            current = match[2]
            computations[current] = []
            entry = current if match[1] else entry
        elif current is not None and (match := _INSTRUCTION.match(line)):
            computations[current].append(Instruction(*match.groups()))
    if entry is None:
        raise ValueError(
            "expected the text of a compiled program with an ENTRY computation, got "
            f"{text[:60]!r}; pass compiled.as_text()"
        )
    return Program(computations, entry)


def kernels(program: Program, name: str) -> Counter:
    """Kernels of one computation by opcode, those of what it calls included."""
    total: Counter = Counter()
    for instruction in program.computations[name]:
        opcode = instruction.opcode
        if opcode == "while":
            inside = Counter()
            for called in instruction.called("body", "condition"):
                inside += kernels(program, called)
            known = _TRIPS.search(instruction.rest)
            total += Counter({k: n * (int(known[1]) if known else 1) for k, n in inside.items()})
        elif opcode == "conditional":
            names = ("branch_computations", "true_computation", "false_computation")
            branches = [kernels(program, called) for called in instruction.called(*names)]
            total += max(branches, key=Counter.total)
        elif opcode in ("call", "async-start") and _SMALL_CALL not in instruction.rest:
            for called in instruction.called("to_apply", "calls", "called_computations"):
                total += kernels(program, called)
        elif opcode not in FREE:
            total[opcode] += 1
    return total


def _loops(program: Program, name: str) -> Iterator[Instruction]:
    """Loops of a computation, and of what it calls: on GPUs what goes into one graph is called."""
    for instruction in program.computations[name]:
        if instruction.opcode == "while":
            yield instruction
        elif instruction.opcode == "call":
            for called in instruction.called("to_apply"):
                yield from _loops(program, called)


def round_kernels(text: str) -> Counter:
    """Kernels of one round of a chunk's program, by opcode.

    Raises:
      ValueError: the program has no `while`: it is not a chunk's.
    """
    program = parse(text)
    loops = list(_loops(program, program.entry))
    bodies = [kernels(program, i.called("body")[0]) for i in loops]
    if not bodies:
        raise ValueError(
            "expected a chunk's program, whose rounds are a `while` of its entry computation, got "
            "a program without one"
        )
    return max(bodies, key=Counter.total)
