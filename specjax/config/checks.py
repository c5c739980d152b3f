"""Checks that several configurations share."""

from __future__ import annotations

from collections.abc import Sequence


def choice(name: str, value: str, choices: Sequence[str]) -> None:
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}; got {value!r}")
