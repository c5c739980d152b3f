"""`--dry`: every program of the queue is compiled for cards that are not there.

Nothing runs and nothing is tuned, so that times mean nothing. What does not compile, or needs more
memory than the card has for it, is named.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import jax

from bench.gpu.program import Ahead, Place, Program
from bench.gpu.table import Part


def run(parts: Sequence[Part], cards: Sequence[str], small: bool = False) -> int:
    """Compiles and prints; 1 if a program does not compile or does not fit.

    Raises:
      ValueError: there is no compiler for GPUs here.
    """
    jax.config.update("jax_platforms", "cpu")
    try:
        places = {card: Ahead(card) for card in cards}
    except Exception as error:  # jax raises several kinds, by what is missing of the plugin
        raise ValueError(
            "--dry needs XLA's compiler for GPUs, which comes with jax-cuda13-plugin[with-cuda] "
            f"(`make gpu-check` makes an environment with it); got {type(error).__name__}: {error}"
        ) from None
    failed = []
    for part in parts:
        module = part.load()
        if reason := getattr(module, "NOT_AHEAD", None):
            print(f"{part.name}: not compiled ahead of time: {reason}", flush=True)
            continue
        for card, place in places.items():
            try:
                with place.seen():
                    programs = module.programs(place, small, **part.settings)
            except Exception as error:
                failed.append(_say(f"{part.name}, {card}", f"not built: {_line(error)}"))
                continue
            for program in programs:
                if said := _compile(program, place):
                    failed.append(_say(f"{part.name}, {card}, {program.name}", said))
            jax.clear_caches()
    if failed:
        print(f"{len(failed)} programs failed:", *failed, sep="\n  ", flush=True)
    return int(bool(failed))


def _compile(program: Program, place: Place) -> str:
    """What is wrong with a program, or nothing."""
    began = time.monotonic()
    try:
        with place.seen():
            program.lower()
        traced = time.monotonic() - began
        memory = program.compile().memory_analysis()
    except Exception as error:
        return f"does not compile: {_line(error)}"
    inputs = memory.argument_size_in_bytes
    others = memory.output_size_in_bytes - memory.alias_size_in_bytes
    needs = inputs + others + memory.temp_size_in_bytes + program.beside
    print(
        f"  {program.name}: {needs / 1e9:.2f} GB, {memory.temp_size_in_bytes / 1e9:.2f} of them "
        f"temporaries; traced in {traced:.0f} s, compiled in "
        f"{time.monotonic() - began - traced:.0f} s",
        flush=True,
    )
    if needs > place.card.usable:
        return f"needs {needs / 1e9:.1f} GB, and the card has {place.card.usable / 1e9:.1f}"
    return ""


def _say(what: str, why: str) -> str:
    print(f"FAILED {what}: {why}", flush=True)
    return f"{what}: {why}"


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
