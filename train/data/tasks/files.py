"""Reads rows of data: files, directories of files, and folders of `datasets.save_to_disk`.

A file is JSON lines, a JSON array, parquet or Arrow, each optionally gzipped. Its first bytes
decide the format, not its name.
"""

from __future__ import annotations

import glob
import gzip
import io
import json
import os
import re
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from specjax.checked_json import pointer_problem

FORMATS = "JSON lines, a JSON array of objects, parquet or Arrow, each perhaps gzipped"
# What the names of data files end in, in a directory.
_NAME = re.compile(r"[^.].*\.(jsonl|json|parquet|arrow)(\.gz)?", re.IGNORECASE)
_NO_ROWS = {"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"}
_SPLIT = re.compile(r"(?:^|[^a-z])(train|test|valid|validation|dev|eval)(?![a-z])", re.IGNORECASE)


class InputFileError(ValueError):
    """A file or directory that settings name cannot be read; the message says which, and why."""


def find_files(paths: str | Sequence[str]) -> list[Path]:
    """Returns the files of rows that a path, or several, stand for, in order.

    Each path is a file, a pattern such as `data/train-*.parquet`, a directory whose files are taken
    in the order of their names (not those of its subdirectories), or a folder of
    `datasets.save_to_disk`. A file that does not exist is returned as it is.

    Raises:
      InputFileError: a directory cannot be read.
      ValueError: a directory has no files of rows, or those of several splits; a pattern matches
        nothing; or a file is named twice.
    """
    files: list[Path] = []
    for text in [paths] if isinstance(paths, str) else paths:
        matches = [Path(text)]
        if not os.path.lexists(text) and glob.has_magic(text):
            matches = sorted(map(Path, glob.glob(text)))
            if not matches:
                raise ValueError(f"{text}: no file matches the pattern")
        for path in matches:
            try:
                files += _files_in(path) if os.path.isdir(path) else [path]
            except OSError as error:
                raise InputFileError(f"{path}: cannot be read ({error.strerror})") from error
    places = [os.path.abspath(path) for path in files]
    if twice := next((path for path in places if places.count(path) > 1), None):
        raise ValueError(f"{twice}: the file is named twice among {paths}; name it once")
    return files


def _files_in(folder: Path) -> list[Path]:
    """Returns the files of rows of a directory."""
    if (folder / "dataset_dict.json").is_file():
        raise ValueError(f"{folder}: datasets.save_to_disk wrote several splits; name one of them")
    if (folder / "state.json").is_file():
        state = json.loads((folder / "state.json").read_text())
        if state.get("_indices_data_files") or state.get("_indices_files"):
            raise ValueError(f"{folder}: it has an order of rows; use flatten_indices()")
        return [folder / file["filename"] for file in state["_data_files"]]
    files = sorted(
        path
        for path in folder.iterdir()
        if path.is_file() and _NAME.fullmatch(path.name) and path.name not in _NO_ROWS
    )
    splits = {m[1].lower() for m in (_SPLIT.search(path.name) for path in files) if m}
    if not files or len(splits) > 1:
        inside = ", ".join(sorted(splits or (path.name for path in folder.iterdir())))
        raise ValueError(
            f"{folder}: expected .jsonl, .json, .parquet or .arrow files, each perhaps .gz, of one "
            f"split, got {inside or 'none'}; name one, by a pattern such as DIR/*train*"
        )
    return files


def read_rows(paths: str | Path | Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields (place for messages, row) for every row in order; blank lines are skipped.

    Args:
      paths: one path or several, see `find_files`.

    Raises:
      FileNotFoundError: a file does not exist.
      InputFileError: a file cannot be read.
      ValueError: a file has none of the formats, or a row is damaged; and as in `find_files`.
    """
    import pyarrow

    for path in find_files(str(paths) if isinstance(paths, Path) else paths):
        with open_file(path) as file:
            try:
                if problem := pointer_problem(path):
                    raise ValueError(problem)
                zipped = file.read(2) == b"\x1f\x8b"
                file.seek(0)
                for place, row in _rows(gzip.open(file) if zipped else file, path):
                    if not isinstance(row, dict):
                        raise ValueError(
                            f"{place}: expected a JSON object, one per row, got {str(row)[:80]!r}; "
                            "fix or delete it"
                        )
                    yield place, row
            except (OSError, EOFError, zlib.error, pyarrow.ArrowException) as error:
                raise InputFileError(
                    f"{path}: the file is damaged or cannot be read "
                    f"({type(error).__name__}: {error}); fetch it again"
                ) from error


def open_file(path: Path) -> BinaryIO:
    """Opens a file of rows.

    Raises:
      FileNotFoundError: it does not exist.
      InputFileError: it is no file, or the system does not let this process read it.
    """
    if not path.exists():
        raise FileNotFoundError(
            f"{path}: no such file; expected rows as {FORMATS} (data.path, data.heldout_path)"
        )
    if not path.is_file():
        raise InputFileError(f"{path}: expected a file, which is read more than once, got none")
    try:
        return path.open("rb")
    except OSError as error:
        raise InputFileError(f"{path}: cannot be read ({error.strerror})") from error


def _rows(file: Any, path: Path) -> Iterator[tuple[str, Any]]:
    """Yields places and rows of an open file, whatever its format is."""
    buffered = io.BufferedReader(file)
    begin = buffered.peek(64)[:64]
    if begin.startswith((b"PAR1", b"ARROW1", b"\xff\xff\xff\xff")):
        number = 0
        for batch in _tables(buffered, begin):
            for row in batch.to_pylist():
                number += 1
                yield f"{path}: row {number}", row
    elif begin.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"["):
        for number, row in enumerate(_json(buffered.read(), str(path)), start=1):
            yield f"{path}: row {number}", row
    else:
        for number, line in enumerate(buffered, start=1):
            if line.strip():
                yield f"{path}:{number}", _json(line, f"{path}:{number}")


def _tables(file: BinaryIO, begin: bytes) -> Iterator[Any]:
    """Yields record batches one at a time: the caller may need the first rows only."""
    import pyarrow.ipc
    import pyarrow.parquet

    if begin.startswith(b"PAR1"):
        # Parquet is read from its end, so a gzipped file has to be unpacked first.
        zipped = isinstance(file.raw, gzip.GzipFile)
        whole = io.BytesIO(file.read()) if zipped else file
        yield from pyarrow.parquet.ParquetFile(whole).iter_batches(batch_size=1024)
    elif begin.startswith(b"ARROW1"):
        table = pyarrow.ipc.open_file(file)
        yield from (table.get_batch(i) for i in range(table.num_record_batches))
    else:
        yield from pyarrow.ipc.open_stream(file)


def _json(text: bytes, place: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{place}: not JSON ({error}), got {text[:80]!r}; expected {FORMATS}; correct it"
        ) from error
