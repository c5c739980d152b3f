"""Lengths that prompts are padded to."""

from __future__ import annotations


def padded_widths(max_len: int) -> list[int]:
    """16, 32, 64, .. and `max_len`."""
    widths = [min(16, max_len)]
    while widths[-1] < max_len:
        widths.append(min(widths[-1] * 2, max_len))
    return widths
