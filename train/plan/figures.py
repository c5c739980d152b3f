"""Memory of programs: from the compiler's report or counted from shapes."""

from __future__ import annotations

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


def compiled(program: Program) -> Program:
    """Compiles a program; returns it with the compiler's report, or the reason why it failed.

    Raises:
      TypeError, AttributeError, NameError, LookupError: the program's own code is wrong.
    """
    program.extra = device_bytes(program.passing)
    try:
        memory = program.lower().compile().memory_analysis()
    except _MISTAKES:
        raise
    except Exception as error:  # compilers of kernels have error types of their own
        log.debug("%s does not compile", program.name, exc_info=True)
        line = next(filter(None, map(str.strip, str(error).splitlines())), "")
        kind = "" if isinstance(error, jax.errors.JaxRuntimeError) else f"{type(error).__name__}: "
        program.failed = shortened(kind + line).removesuffix(": ")
        program.needs = _bytes_in(r"Used ([\d.]+)([KMGT]?)i?B? of", str(error))
        temporaries = r"temporaries \(([\d.]+)([KMGT]?)i?B?\) exceeds"
        program.temporaries = _bytes_in(temporaries, str(error)) or 0.0
    else:
        if memory is not None:
            program.temporaries = float(memory.temp_size_in_bytes)
            program.extra += max(memory.output_size_in_bytes - memory.alias_size_in_bytes, 0)
    program.extra += program.temporaries
    return program


def _bytes_in(pattern: str, text: str) -> float | None:
    """Reads a number of bytes from an out-of-memory message; None: it does not have that one."""
    match = re.search(pattern, text)
    return float(match[1]) * _UNITS[match[2]] if match else None


def counted(program: Program, shapes: Shapes) -> Program:
    """Returns a program with figures that are computed from its shapes, without a compiler.

    The temporaries of a micro-batch of the policy are the least there are: the logits that exist at
    once, and the inputs of every layer. Those of other programs are not counted.
    """
    if program.key[0] == "accumulate":
        model = shapes.model
        head = shapes.built.policy.head(shapes.params, shapes.batch())
        width = 2 if model.run.compute_dtype in ("bfloat16", "float16") else 4
        inputs = head.tokens * width * model.num_layers * model.hidden_size
        program.temporaries = 4 * head.most_logits + inputs
    sizes = device_bytes(program.passing), device_bytes(program.results)
    program.extra = sum(sizes) + program.temporaries
    return program
