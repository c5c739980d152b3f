"""`--dry`: compiles every program of the queue for cards that this machine does not have.

No program runs and none is tuned. Programs that do not compile, or need more memory than the card
has, are listed. The directory SPECJAX_DRY_KNOWN caches the sizes of a program under a hash of its
text, the compiler and its options, so that only new programs are compiled.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import jax

from bench.gpu.check import UNFINISHED
from bench.gpu.program import Ahead, Place, Program
from bench.gpu.table import Part
from bench.record import write_json

AT_ONCE = 2  # programs compiled at once; each compilation also has threads of its own


def run(
    parts: Sequence[Part], cards: Sequence[str], small: bool = False, minutes: float | None = None
) -> int:
    """Compiles the programs of some parts, and prints their sizes.

    Returns:
      1 if a program does not compile or does not fit; else `UNFINISHED` if there was too little
      time.

    Raises:
      ValueError: XLA's compiler for GPUs is not installed.
    """
    end = float("inf") if minutes is None else time.monotonic() + 60 * minutes
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_enable_compilation_cache", False)  # it cannot read such programs
    try:
        places = {card: Ahead(card) for card in cards}
    except Exception as error:  # jax raises several types, depending on the missing package
        raise ValueError(
            "--dry needs XLA's compiler for GPUs, which comes with jax-cuda13-plugin[with-cuda] "
            f"(`make gpu-check` makes an environment with it); got {type(error).__name__}: {error}"
        ) from None
    failed, skipped = [], []
    for card, place in places.items():
        for part in parts:
            if time.monotonic() > end:
                skipped.append(f"{part.name}, {card}")
                continue
            late, problems = _part(part, place, small, end)
            failed += [_say(f"{part.name}, {card}, {line}") for line in problems]
            skipped += [f"{part.name}, {card}, {name}" for name in late]
    for title, lines in (("failed", failed), ("not compiled, because there was no time", skipped)):
        if lines:
            print(f"{len(lines)} {title}:", *lines, sep="\n  ", flush=True)
    return 1 if failed else UNFINISHED if skipped else 0


def _part(part: Part, place: Place, small: bool, end: float) -> tuple[list[str], list[str]]:
    """Compiles a part; returns programs that there was no time for, and problems of others."""
    module = part.load()
    if reason := getattr(module, "NOT_AHEAD", None):
        print(f"{part.name}: not compiled ahead of time: {reason}", flush=True)
        return [], []
    print(f"{part.name}, {place.card.kind}:", flush=True)
    try:
        with place.seen():
            programs = module.programs(place, small, **part.settings)
    except Exception as error:
        return [], [f"not built: {_line(error)}"]
    late, failed = [], []
    with ThreadPoolExecutor(AT_ONCE) as pool:
        started: list[tuple[Program, Future]] = []
        for program in programs:
            began = time.monotonic()
            if began > end:
                late.append(program.name)
                continue
            try:
                with place.seen():
                    lowered = program.lower()  # one after the other
            except Exception as error:
                failed.append(f"{program.name}: is not traced: {_line(error)}")
                continue
            traced = time.monotonic() - began
            started.append((program, pool.submit(_compile, program, lowered, place, traced, end)))
        for program, future in started:
            found = future.result()
            if found is None:
                late.append(program.name)
            elif found:
                failed.append(f"{program.name}: {found}")
    jax.clear_caches()
    return late, failed


def _compile(
    program: Program, lowered: jax.stages.Lowered, place: Place, traced: float, end: float
) -> str | None:
    """Compiles a program; returns its problem, "" without one, None without time."""
    began, note = time.monotonic(), _note(program, lowered, place)
    if note is not None and note.exists():
        found, how = json.loads(note.read_text(encoding="utf-8")), "known"
    elif began > end:
        return None
    else:
        try:
            memory = lowered.compile(dict(program.options)).memory_analysis()
        except Exception as error:
            return f"does not compile: {_line(error)}"
        found = {
            "arguments": memory.argument_size_in_bytes,
            "results": memory.output_size_in_bytes - memory.alias_size_in_bytes,
            "temporaries": memory.temp_size_in_bytes,
        }
        how = f"compiled in {time.monotonic() - began:.0f} s"
        if note is not None:
            write_json(found, note)
    needs = sum(found.values()) + program.beside
    print(
        f"  {program.name}: {needs / 1e9:.2f} GB, {found['temporaries'] / 1e9:.2f} of them "
        f"temporaries; traced in {traced:.0f} s, {how}",
        flush=True,
    )
    if needs > place.card.usable:
        return f"needs {needs / 1e9:.1f} GB, and the card has {place.card.usable / 1e9:.1f}"
    return ""


def _note(program: Program, lowered: jax.stages.Lowered, place: Place) -> Path | None:
    """Returns the file with the sizes of a program; None: SPECJAX_DRY_KNOWN is not set."""
    directory = os.environ.get("SPECJAX_DRY_KNOWN")
    if not directory:
        return None
    flags = os.environ.get("XLA_FLAGS", "")
    options, text = sorted(program.options.items()), lowered.as_text()
    identity = repr((jax.__version__, flags, options, place.card, text))
    return Path(directory) / f"{hashlib.sha256(identity.encode()).hexdigest()[:32]}.json"


def _say(line: str) -> str:
    print(f"FAILED {line}", flush=True)
    return line


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
