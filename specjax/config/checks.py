"""Checks that several configurations share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def choice(name: str, value: str, choices: Sequence[str]) -> None:
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}; got {value!r}")


def require(config: Any, name: str, is_right: bool, wanted: str) -> None:
    """Raises ValueError unless the value of a setting is right."""
    if not is_right:
        raise ValueError(f"{name} must be {wanted}, got {getattr(config, name)!r}")
