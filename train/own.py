"""What users write themselves and name in a setting as `module:attribute`."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from typing import Any


def load_own(kind: str, name: str, known: Iterable[str], example: str, expected: str) -> Any:
    """What lies at the dotted path `module:attribute`.

    Args:
      kind: what it is, and `known` those of the kind that have a name. example: a path for
        messages. expected: what should lie there.

    Raises:
      ValueError: the name is no such path, or the path leads nowhere.
    """
    module, _, attribute = name.partition(":")
    if not module or not attribute:
        raise ValueError(
            f"unknown {kind} {name!r}; choose one of {', '.join(known)}, or give your own as "
            f"{example!r}"
        )
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"cannot load {kind} {name!r}: {error}; expected an importable module (check the "
            f"working directory and PYTHONPATH) with {expected} of that name"
        ) from error
