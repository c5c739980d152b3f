"""Reads the rows of a file: JSON lines, a JSON array or parquet, each optionally gzipped.

The first bytes decide the format, not the name.
"""

from __future__ import annotations

import gzip
import io
import json
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from specjax.checked_json import pointer_problem

FORMATS = "JSON lines, a JSON array of objects, or parquet, each perhaps gzipped"
_GZIP, _PARQUET = b"\x1f\x8b", b"PAR1"


def read_rows(path: str | Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields (place for messages, row) for every row in order; blank lines are skipped.

    Raises:
      FileNotFoundError: the file does not exist.
      ValueError: the file has none of the formats, or a row is damaged.
    """
    path = Path(path)
    if path.is_dir():
        raise ValueError(
            f"{path}: expected a file of rows ({FORMATS}), got a directory; name one of its files"
        )
    if not path.is_file():
        raise FileNotFoundError(
            f"{path}: no such file; expected rows as {FORMATS} (set data.path and "
            "data.heldout_path)"
        )
    with path.open("rb") as file:
        start = file.read(len(_GZIP))
        file.seek(0)
        if problem := pointer_problem(path):
            raise ValueError(problem)
        if start.startswith(_GZIP):
            yield from _unzipped(file, path)
        else:
            yield from _rows(file, path)


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
        yield from _parquet(buffered, path)
    elif start.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"["):
        yield from _array(buffered, path)
    else:
        yield from _lines(buffered, path)


def _parquet(file, path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        # Parquet is read from its end, so a gzipped file has to be unpacked first.
        zipped = isinstance(file.raw, gzip.GzipFile)
        table = pyarrow.parquet.ParquetFile(io.BytesIO(file.read()) if zipped else file)
        for batch in table.iter_batches(batch_size=1024):  # the caller may need the first rows only
            for row in batch.to_pylist():
                number += 1
                yield f"{path}: row {number}", row
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"{path}: the parquet file is damaged ({_one_line(error)}); fetch it again"
        ) from error


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
