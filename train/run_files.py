"""The files that a run keeps in its directory, and its JSON lines: read, cut, moved aside.

It imports nothing that takes time.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

METRICS_FILE = "metrics.jsonl"
SAMPLES_FILE = "samples.jsonl"
CONFIG_FILE = "config.yaml"
RUN_FILE = "run.json"
_AWAY = "move it away: it is written anew, and --resume takes settings from the command line"


class RunFileError(ValueError):
    """A file of a run is damaged; the message names file and line, and says what to do."""


def lines_of(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Yields each line of a .jsonl file, without its end, and its record.

    Lines end with a line feed and nothing else. A last line that is not complete, left by a killed
    run or a full disk, is left out, even where it ends within a character.

    Raises:
        RunFileError: a line before the last one is no object with a number `step`; the message has
            the number of the line.
    """
    damaged = None
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if damaged is not None:
                raise RunFileError(damaged)
            try:
                record = json.loads(line.decode())
            except ValueError as error:
                damaged = f"{path}, line {number}: not JSON ({error}); correct or remove it"
                continue
            if not isinstance(record, dict) or not isinstance(record.get("step"), int):
                raise RunFileError(
                    f"{path}, line {number}: expected an object with a number `step`, got "
                    f"{line[:60]!r}; correct or remove the line"
                )
            yield line.rstrip(b"\n"), record


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The records of a .jsonl file, without a last line that is not complete.

    Raises:
        RunFileError: see `lines_of`.
    """
    return [record for _, record in lines_of(path)]


def read_starts(run: Path) -> list[dict[str, Any]]:
    """The starts of a run (see `train.describe`), the first one first; empty if none is recorded.

    Raises:
        RunFileError: the file is damaged.
    """
    path = run / RUN_FILE
    if not path.is_file():
        return []
    try:
        starts = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise RunFileError(
            f"{path}: expected what a run writes of its starts, got no JSON ({error}); move it away"
        ) from error
    if not isinstance(starts, list) or not all(
        isinstance(start, dict) and isinstance(start.get("time"), str) for start in starts
    ):
        raise RunFileError(
            f"{path}: expected a list of starts, each with its `time`, got {str(starts)[:60]}; "
            "move it away"
        )
    return starts


def read_config(run: Path) -> dict[str, Any]:
    """The settings of a run, in sections; empty if they are not recorded.

    Raises:
        RunFileError: the file is damaged.
    """
    path = run / CONFIG_FILE
    if not path.is_file():
        return {}
    import yaml

    from specjax.command_line import Yaml

    try:
        settings = yaml.load(path.read_text(encoding="utf-8"), Yaml)
    except (yaml.YAMLError, ValueError) as error:
        raise RunFileError(f"{path}: expected settings, got no YAML ({error}); {_AWAY}") from error
    if not isinstance(settings, dict):
        raise RunFileError(
            f"{path}: expected settings in sections, got {type(settings).__name__}; {_AWAY}"
        )
    return settings


def first_date(run: Path) -> str | None:
    """The date that a run's templates write, else that of its first start; None: not recorded.

    Raises:
        RunFileError: a file is damaged.
    """
    settings, starts = read_config(run).get("data"), read_starts(run)
    date = settings.get("date") if isinstance(settings, dict) else None
    return date or (starts[0]["time"][:10] if starts else None)


def check_files(run: Path) -> None:
    """Reads what `--resume` will need of a run's files, so that damage is found at start.

    Samples are not read: where they are damaged, a resumed run goes on without them.

    Raises:
        RunFileError: a file is damaged.
    """
    read_starts(run)
    read_config(run)
    if (run / METRICS_FILE).exists():
        read_lines(run / METRICS_FILE)


def keep_before(path: Path, step: int) -> None:
    """Keeps the records of a .jsonl file before a step, if there is one.

    The file is replaced as a whole, so that a run that is killed meanwhile has the old one. A last
    line that is not complete is dropped.

    Raises:
        RunFileError: see `lines_of`; the file is as it was.
    """
    if not path.exists():
        return
    partial = path.with_suffix(".tmp")
    try:
        with partial.open("wb") as stream:
            for line, record in lines_of(path):
                if record["step"] < step:
                    stream.write(line + b"\n")
            stream.flush()
            os.fsync(stream.fileno())
    except RunFileError:
        partial.unlink()
        raise
    partial.replace(path)


def move_aside(path: Path, why: str | None = None) -> None:
    """Renames a file to the first free of `NAME.1.jsonl`, `NAME.2.jsonl`, .., and says so.

    Args:
        path: the file.
        why: the reason; None: it is of an earlier run.
    """
    number = 1
    while (aside := path.with_suffix(f".{number}.jsonl")).exists():
        number += 1
    path.rename(aside)
    print(f"{why or f'{path} is from an earlier run'}: moved to {aside.name}", file=sys.stderr)
