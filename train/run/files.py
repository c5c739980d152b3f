"""The files that a run keeps in its directory, and its JSON lines: read, cut, moved aside."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import yaml

from specjax.command_line import Yaml

METRICS_FILE = "metrics.jsonl"
SAMPLES_FILE = "samples.jsonl"
CONFIG_FILE = "config.yaml"
RUN_FILE = "run.json"
CHECKPOINTS = "checkpoints"  # subdirectory of a run


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
    """Reads the records of a .jsonl file, without a last line that is not complete.

    Raises:
        RunFileError: see `lines_of`.
    """
    return [record for _, record in lines_of(path)]


def read_metrics(run: str | Path) -> list[dict[str, Any]]:
    """Reads the records of a run directory (or of a .jsonl file), in order of steps.

    Raises:
        FileNotFoundError: there is no such file.
        RunFileError: see `lines_of`.
    """
    path = Path(run)
    path = path / METRICS_FILE if path.is_dir() else path
    return sorted(read_lines(path), key=lambda record: record["step"])


def read_starts(run: Path) -> list[dict[str, Any]]:
    """Reads the starts of a run (`train.run.describe`), in order; empty if there are none.

    Raises:
        RunFileError: the file is damaged.
    """

    def parse(text: str) -> list[dict[str, Any]]:
        starts = json.loads(text)
        if not isinstance(starts, list) or not all(start["time"] for start in starts):
            raise ValueError("no list of them")
        return starts

    return _content(run / RUN_FILE, parse, "a list of starts, each with its `time`", [])


def read_settings(run: Path) -> dict[str, Any]:
    """Reads the settings of a run, in sections; empty if they are not recorded.

    Raises:
        RunFileError: the file is damaged.
    """

    def parse(text: str) -> dict[str, Any]:
        return dict(yaml.load(text, Yaml))

    return _content(run / CONFIG_FILE, parse, "settings in sections, as YAML", {})


def _content(path: Path, parse: Callable[[str], Any], expected: str, absent: Any) -> Any:
    """Parses a file; returns `absent` if there is none.

    Raises:
        RunFileError: the file is damaged.
    """
    if not path.is_file():
        return absent
    try:
        return parse(path.read_text(encoding="utf-8"))
    except (ValueError, TypeError, KeyError, yaml.YAMLError) as error:
        raise RunFileError(
            f"{path}: expected {expected}, and it cannot be read ({error}); move it away: "
            "--resume writes it anew"
        ) from error


def first_date(run: Path) -> str | None:
    """Returns the date that a run's templates write, else that of its first start, else None.

    Raises:
        RunFileError: a file is damaged.
    """
    settings, starts = read_settings(run).get("data"), read_starts(run)
    date = settings.get("date") if isinstance(settings, dict) else None
    return date or (starts[0]["time"][:10] if starts else None)


def complete_steps(run: Path) -> list[int]:
    """Returns the steps of a run's checkpoints, without those whose save was killed."""
    return sorted(int(path.name) for path in (run / CHECKPOINTS).glob("*") if path.name.isdigit())


def keep_before(path: Path, step: int) -> None:
    """Keeps the records of a .jsonl file before a step, if there is one.

    The file is replaced as a whole, so that a run that is killed meanwhile has the old one. A last
    line that is not complete is dropped.

    Raises:
        RunFileError: see `lines_of`; the file is as it was.
    """
    if path.exists():
        replace(path, (line + b"\n" for line, record in lines_of(path) if record["step"] < step))


def replace(path: Path, pieces: Iterable[bytes]) -> None:
    """Writes a file whole or not at all."""
    partial = path.with_name(f"{path.name}.tmp")
    try:
        with partial.open("wb") as stream:
            stream.writelines(pieces)
            stream.flush()
            os.fsync(stream.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


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
