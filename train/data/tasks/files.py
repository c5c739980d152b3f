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
import stat
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from specjax.checked_json import pointer_problem

FORMATS = "JSON lines, a JSON array of objects, parquet or Arrow, each perhaps gzipped"
_GZIP, _PARQUET = b"\x1f\x8b", b"PAR1"
_ARROW_FILE, _ARROW_STREAM = b"ARROW1", b"\xff\xff\xff\xff"
# What the names of data files end in, in a directory.
_NAME = re.compile(r"[^.].*\.(jsonl|json|parquet|arrow)(\.gz)?", re.IGNORECASE)
_NO_ROWS = {"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"}
_SPLIT = re.compile(r"(?:^|[^a-z])(train|test|valid|validation|dev|eval)(?![a-z])", re.IGNORECASE)


class InputFileError(ValueError):
    """A file or directory that settings name cannot be read; the message says which, and why."""


def find_files(paths: str | Sequence[str]) -> list[Path]:
    """The files of rows that a path, or several, stand for, in order.

    Each path is a file, a pattern such as `data/train-*.parquet`, a directory whose files are taken
    in the order of their names (not those of its subdirectories), or a folder of
    `datasets.save_to_disk`. A file that does not exist is returned as it is.

    Raises:
      InputFileError: a directory cannot be read.
      ValueError: a directory has no files of rows, or those of several splits; a pattern matches
        nothing; or a file is named twice.
    """
    found: list[Path] = []
    for path in [paths] if isinstance(paths, str) else paths:
        try:
            found += _files_of(str(path))
        except OSError as error:
            raise _unreadable(path, error) from error
    places = [os.path.abspath(path) for path in found]
    twice = next((p for p, at in zip(found, places, strict=True) if places.count(at) > 1), None)
    if twice is not None:
        raise ValueError(f"{twice}: the file is named twice among {paths}; name it once")
    return found


def _files_of(text: str) -> list[Path]:
    path = Path(text)
    if os.path.isdir(path):  # as those of pathlib, except that they raise nothing
        return _files_in(path)
    if os.path.lexists(path) or not glob.has_magic(text):
        return [path]
    matches = sorted(Path(match) for match in glob.glob(text))
    if not matches:
        raise ValueError(f"{text}: no file matches the pattern; expected rows as {FORMATS}")
    return [file for match in matches for file in (_files_in(match) if match.is_dir() else [match])]


def _files_in(folder: Path) -> list[Path]:
    """The files of rows of a directory."""
    if (folder / "dataset_dict.json").is_file():
        splits = _saved_list(folder / "dataset_dict.json", "splits")
        raise ValueError(
            f"{folder}: datasets.save_to_disk wrote several splits ({', '.join(splits)}); name one "
            f"of them, such as {folder / (splits[0] if splits else 'train')}"
        )
    if (folder / "state.json").is_file():
        return _saved_to_disk(folder)
    files = sorted(
        path
        for path in folder.iterdir()
        if path.is_file() and _NAME.fullmatch(path.name) and path.name not in _NO_ROWS
    )
    if not files:
        inside = sorted(path.name for path in folder.iterdir() if path.is_dir())
        hint = f"; its subdirectories are {', '.join(inside)}: name one" if inside else ""
        raise ValueError(
            f"{folder}: expected a directory with files of rows (.jsonl, .json, .parquet or "
            f".arrow, each perhaps .gz), got none{hint}"
        )
    splits = {m[1].lower() for m in (_SPLIT.search(path.name) for path in files) if m}
    if len(splits) > 1:
        one = "train" if "train" in splits else min(splits)
        raise ValueError(
            f"{folder}: its files are those of several splits ({', '.join(sorted(splits))}); name "
            f"one, such as {folder / f'*{one}*'}, and another as "
            "data.heldout_path"
        )
    return files


def _saved_to_disk(folder: Path) -> list[Path]:
    """The Arrow files of a folder of `datasets.save_to_disk`, in the order of its rows."""
    names = _saved_list(folder / "state.json", "_data_files", "filename")
    if not names:
        raise ValueError(f"{folder}: datasets.save_to_disk wrote no rows to it; save it again")
    state = json.loads((folder / "state.json").read_text())
    if state.get("_indices_data_files") or state.get("_indices_files"):
        raise ValueError(
            f"{folder}: it was saved with an order of rows in files of its own, as old versions of "
            "datasets did; load it, and save it again after flatten_indices()"
        )
    return [folder / name for name in names]


def _saved_list(path: Path, key: str, entry: str | None = None) -> list[str]:
    """The texts in a list of a JSON file of `datasets.save_to_disk`, or in an entry of each item.

    Raises:
      ValueError: the file holds something else.
    """
    try:
        items = json.loads(path.read_text())[key]
        found = [item if entry is None else item[entry] for item in items]
        if not (isinstance(items, list) and all(isinstance(item, str) for item in found)):
            raise TypeError(f"{key} is {items!r}")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path}: expected what datasets.save_to_disk writes, with a list {key}, got "
            f"something else ({type(error).__name__}: {_one_line(error)}); save it again"
        ) from error
    return found


def read_rows(paths: str | Path | Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields (place for messages, row) for every row in order; blank lines are skipped.

    Args:
      paths: one path or several, see `find_files`.

    Raises:
      FileNotFoundError: a file does not exist.
      InputFileError: a file cannot be read.
      ValueError: a file has none of the formats, or a row is damaged; and as in `find_files`.
    """
    for path in find_files(str(paths) if isinstance(paths, Path) else paths):
        yield from _read_file(path)


def open_file(path: Path) -> BinaryIO:
    """Opens a file of rows.

    Raises:
      FileNotFoundError: it does not exist.
      InputFileError: it is no regular file, or the system does not let this process read it.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise InputFileError(
                f"{path}: expected a file, which is read more than once, got "
                f"{'a directory' if path.is_dir() else 'a pipe or a device'}; write it to a file"
            )
        return path.open("rb")
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"{path}: no such file; expected rows as {FORMATS} (set data.path and "
            "data.heldout_path)"
        ) from error
    except OSError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: str | Path, error: OSError) -> InputFileError:
    return InputFileError(
        f"{path}: cannot be read ({error.strerror or _one_line(error)}); expected rows as "
        f"{FORMATS}: name another file, or give this user access to it"
    )


def _read_file(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    with open_file(path) as file:
        try:
            start = file.read(len(_GZIP))
            file.seek(0)
            if problem := pointer_problem(path):
                raise ValueError(problem)
            if start.startswith(_GZIP):
                yield from _unzipped(file, path)
            else:
                yield from _rows(file, path)
        except OSError as error:  # of a device, or of a file system in a network
            raise _unreadable(path, error) from error


def _unzipped(file, path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        with gzip.open(file) as inside:
            yield from _rows(inside, path)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f"{path}: the gzip file is damaged ({error}); fetch it again") from error


def _rows(file, path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    buffered = io.BufferedReader(file)
    start = buffered.peek(64)[:64]
    if start.startswith(_PARQUET):
        yield from _tables(buffered, path, "parquet")
    elif start.startswith((_ARROW_FILE, _ARROW_STREAM)):
        yield from _tables(buffered, path, "Arrow")
    elif start.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"["):
        yield from _array(buffered, path)
    else:
        yield from _lines(buffered, path)


def _tables(file, path: Path, kind: str) -> Iterator[tuple[str, dict[str, Any]]]:
    import pyarrow

    number = 0
    try:
        # Parquet is read from its end, so a gzipped file has to be unpacked first.
        zipped = isinstance(file.raw, gzip.GzipFile)
        for batch in _batches(io.BytesIO(file.read()) if zipped else file, kind):
            for row in batch.to_pylist():
                number += 1
                yield f"{path}: row {number}", row
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"{path}: the {kind} file is damaged ({_one_line(error)}); fetch it again"
        ) from error


def _batches(file, kind: str) -> Iterator[Any]:
    """The record batches of a table, one at a time: the caller may need the first rows only."""
    import pyarrow.ipc
    import pyarrow.parquet

    if kind == "parquet":
        yield from pyarrow.parquet.ParquetFile(file).iter_batches(batch_size=1024)
        return
    start = file.read(len(_ARROW_FILE))
    file.seek(0)
    if start == _ARROW_FILE:
        table = pyarrow.ipc.open_file(file)
        yield from (table.get_batch(i) for i in range(table.num_record_batches))
    else:
        yield from pyarrow.ipc.open_stream(file)


def _array(file, path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        text = file.read().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path}: not JSON ({_one_line(error)}); expected an array of objects in UTF-8"
        ) from error
    number, at = 0, _SPACE.match(text, text.index("[") + 1).end()
    closed = text.startswith("]", at)
    if closed:
        at = _SPACE.match(text, at + 1).end()
    while not closed:
        number += 1
        place = f"{path}: row {number}"
        try:
            row, at = _DECODER.raw_decode(text, at)
            at = _SPACE.match(text, at).end()
            closed = text.startswith("]", at)
            if not closed and not text.startswith(",", at):
                raise json.JSONDecodeError("Expecting ',' or ']' after the row", text, at)
        except (ValueError, RecursionError) as error:
            raise ValueError(
                f"{place}: not JSON ({_reason(error)}); expected an array of objects"
            ) from error
        yield place, _object(row, place)
        at = _SPACE.match(text, at + 1).end()
    if at < len(text):
        raise ValueError(
            f"{path}: not JSON (more text after the array, got {text[at : at + 40]!r}); expected "
            "one array of objects"
        )


_DECODER = json.JSONDecoder()
_SPACE = re.compile(r"[ \t\n\r]*")


def _lines(file, path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    for number, line in enumerate(file, start=1):
        if number == 1:
            line = line.removeprefix(b"\xef\xbb\xbf")
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(
                f"{path}:{number}: not JSON ({_reason(error)}), got {line[:80]!r}; expected "
                f"{FORMATS}; fix or delete the line"
            ) from error
        yield f"{path}:{number}", _object(row, f"{path}:{number}")


def _reason(error: BaseException) -> str:
    if isinstance(error, RecursionError):
        return "objects or arrays are nested too deeply"
    return _one_line(error)


def _object(row: Any, place: str) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise ValueError(
            f"{place}: expected a JSON object, one per row, got {str(row)[:80]!r}; fix or delete it"
        )
    if (damaged := _unencodable(row)) is not None:
        raise ValueError(
            f"{place}: column {damaged!r} holds half of a character (a lone surrogate such as "
            "\\ud800), which no tokenizer takes; expected text; fix or delete the row"
        )
    return row


def _unencodable(row: dict[str, Any]) -> str | None:
    """The first column with text, at any depth, that UTF-8 cannot encode; None without one."""
    for column, value in row.items():
        left = [column, value]
        while left:
            item = left.pop()
            if isinstance(item, str) and not item.isascii() and _SURROGATE.search(item):
                return column
            if isinstance(item, dict):
                left += [*item.keys(), *item.values()]
            elif isinstance(item, list):
                left += item
    return None


_SURROGATE = re.compile(r"[\ud800-\udfff]")


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())
