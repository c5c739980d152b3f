"""What users write themselves and name in a setting as `module:attribute`."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from typing import Any


def require_name(kind: str, name: str, known: Iterable[str], example: str) -> None:
    """Refuses what is neither a known name nor a dotted path `module:attribute`; imports nothing.

    Args:
      kind: what it is, and `known` those of the kind that have a name. example: a path for
        messages.

    Raises:
      ValueError: it is neither.
    """
    module, _, attribute = name.partition(":")
    if name not in known and not (module and attribute):
        raise ValueError(
            f"unknown {kind} {name!r}; choose one of {', '.join(known)}, or give your own as "
            f"{example!r}"
        )


def load_own(kind: str, name: str, known: Iterable[str], example: str, expected: str) -> Any:
    """What lies at the dotted path `module:attribute`.

    Args:
      kind, known, example: see `require_name`. expected: what should lie there.

    Raises:
      ValueError: the name is no such path, or the path leads nowhere.
    """
    require_name(kind, name, known, example)
    module, _, attribute = name.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"cannot load {kind} {name!r}: {error}; expected an importable module (check the "
            f"working directory and PYTHONPATH) with {expected} of that name"
        ) from error
