"""File formats of checkpoints, each a `specjax.interfaces.Reader`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from specjax.registry import READERS

AUTO = "auto"


def open_checkpoint(path: str | Path, load_format: str = AUTO) -> Any:
    """Opens a checkpoint with the `specjax.interfaces.Reader` of its format.

    Args:
      path: a file or a directory.
      load_format: a name in `READERS`, or a user's own `module:attribute`; `auto`: the first format
        that recognises the path.

    Raises:
      ValueError: the format is unknown.
      CheckpointError, UnsupportedModelError: the file cannot be read.
    """
    path = Path(path)
    if load_format != AUTO:
        return READERS.find(load_format)(path)
    *_, last = readers = READERS.all()
    return next((reader for reader in readers if reader.recognises(path)), last)(path)


def recognised(path: str | Path) -> bool:
    """Returns whether a path holds a policy's weights in one of the formats in `READERS`."""
    return any(reader.recognises(Path(path)) for reader in READERS.all())


def load_tokenizer(path: str | Path, required: bool = True, load_format: str = AUTO) -> Any:
    """Loads the tokenizer of a checkpoint in any format; None: there is no tokenizer.

    Args:
      path: a file or a directory.
      required: whether to raise an error if there is no tokenizer.
      load_format: see `open_checkpoint`.

    Raises:
      FileNotFoundError: there is no tokenizer and it is required.
      CheckpointError, UnsupportedModelError: the tokenizer is damaged, or its kind is not
        supported exactly.
    """
    found = open_checkpoint(path, load_format).tokenizer()
    if found is None and required:
        raise FileNotFoundError(
            f"{path} has no tokenizer.json; copy the model's tokenizer files there"
        )
    return found
