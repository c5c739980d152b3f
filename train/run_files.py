"""The files that a run keeps in its directory, and its JSON lines: read, cut, moved aside.

It imports nothing that takes time.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

METRICS_FILE = "metrics.jsonl"
SAMPLES_FILE = "samples.jsonl"
CONFIG_FILE = "config.yaml"
RUN_FILE = "run.json"


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The records of a .jsonl file; an unfinished last line, left by a killed run, is ignored.

    Raises:
        ValueError: a line before the last one is not JSON; the message has its number.
    """
    records, lines = [], path.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, start=1):
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError as error:
            if number == len(lines):
                break
            raise ValueError(f"{path}, line {number}: not JSON ({error})") from error
    return records


def read_starts(run: Path) -> list[dict[str, Any]]:
    """The starts of a run (see `train.describe`), the first one first; empty if none is recorded.

    Raises:
        ValueError: the file is damaged.
    """
    path = run / RUN_FILE
    if not path.is_file():
        return []
    try:
        starts = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(
            f"{path}: expected what a run writes of its starts, got no JSON ({error}); move it away"
        ) from error
    if not isinstance(starts, list):
        raise ValueError(f"{path}: expected a list of starts, got {type(starts).__name__}")
    return starts


def keep_before(path: Path, step: int) -> None:
    """Keeps the records of a .jsonl file before a step, if there is one.

    It is atomic, so that a kill here loses nothing. An unfinished last line is dropped.

    Raises:
        ValueError: a line before the last one is not JSON; the message has its number.
    """
    if not path.exists():
        return
    partial, damaged = path.with_suffix(".tmp"), None
    with path.open(encoding="utf-8") as lines, partial.open("w", encoding="utf-8") as stream:
        for number, line in enumerate(lines, start=1):
            if damaged is not None:
                raise ValueError(damaged)
            try:
                if json.loads(line)["step"] < step:
                    stream.write(line.rstrip("\n") + "\n")
            except json.JSONDecodeError as error:
                damaged = f"{path}, line {number}: not JSON ({error})"
        stream.flush()
        os.fsync(stream.fileno())
    partial.replace(path)


def move_aside(path: Path) -> None:
    """Renames a file of an earlier run to the first free of `NAME.1.jsonl`, `NAME.2.jsonl`, .."""
    number = 1
    while (aside := path.with_suffix(f".{number}.jsonl")).exists():
        number += 1
    path.rename(aside)
    print(f"{path} is from an earlier run: moved to {aside.name}", file=sys.stderr)
