"""What one round launches and reads: kernels of its compiled program, and bytes of memory.

Kernels: XLA runs a compiled program as a list of instructions. Each is a kernel (fusion, product,
library call, sort, copy, ..) but for those that only name or route values (parameter, constant,
tuple, bitcast, ..). The rounds of a chunk are the body of the program's main `while`; what is
counted is the kernels of that body:

    - a fusion, a library call or a reduction is one, whatever it holds;
    - a `call` is what it calls, but for the CPU's small calls, which are compiled into one kernel;
    - a loop inside counts as often as it is known to run (`known_trip_count`), and once where that
      is decided at run time (attention's loop over a prefix, by blocks of 128 positions);
    - of a conditional the branch with most kernels counts.

Bytes: counted are weights, keys and values; not activations, logits or noise, which are small
beside them at a few rows. A share of a copy's bandwidth is therefore a lower bound. It may exceed 1
where the weights fit a cache that the copied array does not fit.

    plain round     all weights once (of the embedding one row per sample), the cache of each sample
    verification    the same: T rows share each read
    drafted token   the head's weights, the language-model head, the head's own cache
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp

from specjax.config import ModelConfig
from specjax.drafts.mtp import MTPSource
from specjax.memory import cost
from specjax.models.transformer import Params

# Instructions that launch no kernel.
FREE = frozenset(
    """parameter constant tuple get-tuple-element bitcast after-all add-dependency opt-barrier
    partition-id replica-id domain async-update async-done copy-done""".split()
)
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?[\w.\-]+ = .*?[\s)}\]]([a-z][a-z0-9\-]*)\((.*)$")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_SMALL_CALL = 'xla_cpu_small_call="true"'


class Instruction(NamedTuple):
    """One instruction: its opcode, and the text of its operands and attributes."""

    opcode: str
    rest: str

    def called(self, *attributes: str) -> list[str]:
        """Returns the names of the computations that these attributes refer to."""
        found = []
        for attribute in attributes:
            match = re.search(rf"\b{attribute}=(\{{[^}}]*\}}|%?[\w.\-]+)", self.rest)
            if match:
                found += re.findall(r"[\w.\-]+", match[1])
        return found


class Program(NamedTuple):
    """A compiled program: its computations by name, and the name of its entry."""

    computations: dict[str, list[Instruction]]
    entry: str


def parse(text: str) -> Program:
    """Parses `compiled.as_text()`.

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
    """Counts the kernels of one computation and of what it calls, by opcode."""
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
    """Yields the loops of a computation and of what it calls (on GPUs one graph is one call)."""
    for instruction in program.computations[name]:
        if instruction.opcode == "while":
            yield instruction
        elif instruction.opcode == "call":
            for called in instruction.called("to_apply"):
                yield from _loops(program, called)


def round_kernels(text: str) -> Counter:
    """Counts the kernels of one round of a chunk's program, by opcode.

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


# --- bytes -----------------------------------------------------------------------------------


def tree_bytes(params: Params) -> int:
    """Returns the bytes of all arrays of a parameter tree or of one `Weight`."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(params))


def forward_bytes(cfg: ModelConfig, params: Params, batch: int, rows: int, context: int) -> int:
    """Returns the bytes of a policy forward over batch x rows tokens, `context` cached per sample.

    Args:
      params: parameters in the decode layout.
    """
    embed = tree_bytes(params["embed"])
    weights = tree_bytes(params) - (embed if "lm_head" in params else 0)
    embedded = batch * rows * embed // cfg.vocab_size
    return weights + embedded + batch * cost(cfg, context + rows).page


def draft_bytes(cfg: ModelConfig, params: Params, head: Params, batch: int, context: int) -> int:
    """Returns the bytes of one drafted token per sample; one module of an MTP head runs."""
    lm_head = params["lm_head"] if "lm_head" in params else params["embed"]
    module = tree_bytes(head) // cfg.mtp_num_layers
    embedded = batch * tree_bytes(params["embed"]) // cfg.vocab_size
    page = MTPSource(cfg).cost(context + 1).page // cfg.mtp_num_layers
    return module + tree_bytes(lm_head) + embedded + batch * page


def round_bytes(
    cfg: ModelConfig,
    params: Params,
    head: Params | None,
    steps: int,
    rows: int,
    batch: int,
    context: int,
) -> int:
    """Returns the bytes of a round that drafts `steps` deep and verifies `rows` (plain: 0, 1)."""
    total = forward_bytes(cfg, params, batch, rows, context)
    return total + (steps * draft_bytes(cfg, params, head, batch, context) if steps else 0)


def copy_of(size: int) -> tuple[Callable[[], None], int]:
    """Returns a function that copies an array of `size` bytes, and the bytes read and written."""
    array = jnp.zeros(size // 4, jnp.float32)
    compiled = jax.jit(lambda x: x + 1).lower(array).compile()
    return (lambda: jax.block_until_ready(compiled(array))), 2 * array.nbytes
