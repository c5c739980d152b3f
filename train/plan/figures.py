"""Memory of programs, from the compiler's report or counted from shapes."""

from __future__ import annotations

import dataclasses
import logging
import re
import time
from collections.abc import Mapping
from typing import Any

import jax

from specjax.error_text import shortened
from specjax.parallel.collectives import received
from specjax.parallel.sharding import device_bytes
from train.plan.programs import Program, Shapes

log = logging.getLogger(__name__)

_RESIDENT = ("parameters", "optimizer", "cache", "state")  # kinds of `Shapes.resident`
# Errors in the program's own code, rather than of the compiler.
_MISTAKES = (TypeError, AttributeError, NameError, LookupError)
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclasses.dataclass
class Figures:
    """Bytes of one program, per device.

    Attributes:
      name: name of the program.
      part: part of the run, see `Program`.
      key: key of the program, see `Program`.
      given: bytes of its inputs by kind.
      extra: bytes allocated only while it runs: inputs that do not stay, results that are not
        written over inputs, temporaries.
      temporaries: bytes of temporaries, included in `extra`.
      brought: bytes of weights that a device receives, if the program moves weights.
      kept: bytes of these weights that a device then holds.
      excess: names of weights of which a device receives more than its shard; None: unknown.
      seconds: seconds of compilation.
      failed: why the compiler refused the program.
      needs: bytes that the program needs by the compiler's message, inputs included; None: the
        message has none, or those of temporaries only.
    """

    name: str
    part: str
    key: tuple
    given: dict[str, float]
    extra: float = 0.0
    temporaries: float = 0.0
    brought: float = 0.0
    kept: float = 0.0
    excess: list[str] | None = None
    seconds: float = 0.0
    failed: str | None = None
    needs: float | None = None

    @property
    def is_chunk(self) -> bool:
        """Whether the program is a chunk of rounds of a rollout, which was compiled."""
        return self.part == "roll out" and self.key[0] == "chunk" and self.failed is None

    @classmethod
    def read(cls, program: Program, saved: Mapping[str, Any]) -> Figures:
        """Restores the figures of a program from a plan's JSON."""
        fields = {field.name: saved[field.name] for field in dataclasses.fields(cls)}
        return cls(**{**fields, "key": program.key})


def compiled(program: Program) -> Figures:
    """Compiles a program and reads the compiler's report, or the reason why it failed.

    Raises:
      TypeError, AttributeError, NameError, LookupError: the program's own code is wrong.
    """
    given = {kind: device_bytes(tree) for kind, tree in program.given.items()}
    passing = sum(size for kind, size in given.items() if kind not in (*_RESIDENT, "results"))
    figures, started = Figures(program.name, program.part, program.key, given), time.perf_counter()
    try:
        executable = program.lower().compile()
    except _MISTAKES:
        raise
    except Exception as error:  # compilers of kernels have error types of their own
        log.debug("%s does not compile", program.name, exc_info=True)
        figures.failed = _reason(error)
        figures.needs, figures.temporaries = _bytes_wanted(str(error))
        figures.extra = figures.temporaries + passing
        return figures
    finally:
        figures.seconds = time.perf_counter() - started
    memory = executable.memory_analysis()
    if memory is not None:
        results = max(memory.output_size_in_bytes - memory.alias_size_in_bytes, 0)
        figures.temporaries = float(memory.temp_size_in_bytes)
        figures.extra = figures.temporaries + results + passing
    if program.moves is not None:
        collectives = received(executable.as_text())
        figures.brought = float(sum(c.received for c in collectives))
        figures.kept = float(sum(program.moves.shards.values()))
        figures.excess = program.moves.excess(collectives)
    return figures


def _reason(error: Exception) -> str:
    """Returns one line of a compiler's message."""
    line = next(filter(None, map(str.strip, str(error).splitlines())), "")
    kind = "" if isinstance(error, jax.errors.JaxRuntimeError) else f"{type(error).__name__}: "
    return shortened(kind + line).removesuffix(": ")


def _bytes_wanted(text: str) -> tuple[float | None, float]:
    """Reads the bytes of a program and of its temporaries from an out-of-memory message.

    A message has one of the two; the bytes of the program are otherwise None, of temporaries 0.
    """

    def size(pattern: str) -> float | None:
        match = re.search(pattern, text)
        return float(match[1]) * _UNITS[match[2]] if match else None

    used = size(r"Used ([\d.]+)([KMGT]?)i?B? of")
    temporaries = size(r"temporaries \(([\d.]+)([KMGT]?)i?B?\) exceeds")
    return used, temporaries or 0.0


def counted(program: Program, shapes: Shapes) -> Figures:
    """Computes the figures of a program from its shapes, without a compiler.

    The temporaries of a micro-batch of the policy are the least there are: the logits that exist at
    once, and the inputs of every layer. Those of other programs are not counted.
    """
    given = {kind: device_bytes(tree) for kind, tree in program.given.items()}
    passing = sum(size for kind, size in given.items() if kind not in _RESIDENT)
    least = 0.0
    if program.key[0] == "accumulate":
        model = shapes.model
        head = shapes.built.policy.head(shapes.params, shapes.batch())
        width = 2 if model.run.compute_dtype in ("bfloat16", "float16") else 4
        least = 4 * head.most_logits + head.tokens * width * model.num_layers * model.hidden_size
    return Figures(program.name, program.part, program.key, given, passing + least, least)
