"""Memory of programs, from the compiler's report or counted from shapes."""

from __future__ import annotations

import dataclasses
import logging
import re

import jax

from specjax.error_text import shortened
from specjax.parallel.sharding import device_bytes
from train.plan.programs import Program, Shapes

log = logging.getLogger(__name__)

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
      inputs: bytes of the inputs that stay.
      results: bytes of the results, where the program knows them.
      extra: bytes allocated only while it runs: inputs that do not stay, results that are not
        written over inputs, temporaries.
      temporaries: bytes of temporaries, included in `extra`.
      failed: why the compiler refused the program.
      needs: bytes that the program needs by the compiler's message, inputs included; None: the
        message has none, or those of temporaries only.
    """

    name: str
    part: str
    key: tuple
    inputs: float
    results: float
    extra: float = 0.0
    temporaries: float = 0.0
    failed: str | None = None
    needs: float | None = None

    @classmethod
    def of(cls, program: Program) -> Figures:
        sizes = device_bytes(program.inputs), device_bytes(program.results)
        return cls(program.name, program.part, program.key, *sizes)


def compiled(program: Program) -> Figures:
    """Compiles a program and reads the compiler's report, or the reason why it failed.

    Raises:
      TypeError, AttributeError, NameError, LookupError: the program's own code is wrong.
    """
    figures = Figures.of(program)
    figures.extra = device_bytes(program.passing)
    try:
        memory = program.lower().compile().memory_analysis()
    except _MISTAKES:
        raise
    except Exception as error:  # compilers of kernels have error types of their own
        log.debug("%s does not compile", program.name, exc_info=True)
        line = next(filter(None, map(str.strip, str(error).splitlines())), "")
        kind = "" if isinstance(error, jax.errors.JaxRuntimeError) else f"{type(error).__name__}: "
        figures.failed = shortened(kind + line).removesuffix(": ")
        figures.needs = _bytes_in(r"Used ([\d.]+)([KMGT]?)i?B? of", str(error))
        temporaries = r"temporaries \(([\d.]+)([KMGT]?)i?B?\) exceeds"
        figures.temporaries = _bytes_in(temporaries, str(error)) or 0.0
    else:
        if memory is not None:
            figures.temporaries = float(memory.temp_size_in_bytes)
            figures.extra += max(memory.output_size_in_bytes - memory.alias_size_in_bytes, 0)
    figures.extra += figures.temporaries
    return figures


def _bytes_in(pattern: str, text: str) -> float | None:
    """Reads a number of bytes from an out-of-memory message; None: it does not have that one."""
    match = re.search(pattern, text)
    return float(match[1]) * _UNITS[match[2]] if match else None


def counted(program: Program, shapes: Shapes) -> Figures:
    """Computes the figures of a program from its shapes, without a compiler.

    The temporaries of a micro-batch of the policy are the least there are: the logits that exist at
    once, and the inputs of every layer. Those of other programs are not counted.
    """
    figures = Figures.of(program)
    if program.key[0] == "accumulate":
        model = shapes.model
        head = shapes.built.policy.head(shapes.params, shapes.batch())
        width = 2 if model.run.compute_dtype in ("bfloat16", "float16") else 4
        inputs = head.tokens * width * model.num_layers * model.hidden_size
        figures.temporaries = 4 * head.most_logits + inputs
    figures.extra = device_bytes(program.passing) + figures.results + figures.temporaries
    return figures
