"""Checks that several configurations share."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any


def choice(name: str, value: str, choices: Sequence[str]) -> None:
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}; got {value!r}")


def from_known_keys(
    section: type, settings: Mapping[str, Any], kind: str = "setting", where: str = ""
) -> Any:
    """Makes the dataclass `section` from `settings`.

    Args:
      kind: word for a key, in messages.
      where: the section that the keys belong to, in messages, such as " of `control`".

    Raises:
      ValueError: a key is no field of the dataclass.
    """
    known = [field.name for field in dataclasses.fields(section)]
    unknown = sorted(set(settings) - set(known))
    if unknown:
        raise ValueError(
            f"unknown {kind} {', '.join(map(repr, unknown))}{where}; the keys are "
            f"{', '.join(known)}"
        )
    return section(**settings)
