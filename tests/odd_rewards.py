"""Rewards as users may write them, with what may go wrong."""

import zlib

import numpy as np
from tiny_run import coin

NO_NUMBERS = [None, float("nan"), float("inf"), (1.0, 2.0), "1", [1.0], 1j, np.str_("1")]
broken = False  # a test breaks `breaks` in the middle of a run


def breaks(completion: str, answer: str) -> float:
    if broken:
        raise OSError("the sandbox is gone")
    return coin(completion, answer)


def sometimes(completion: str, answer: str):
    """Fails for about one completion in five, in every way there is."""
    place = zlib.crc32(completion.encode())
    if place % 5:
        return coin(completion, answer)
    value = [*NO_NUMBERS, ZeroDivisionError("by zero")][place // 5 % (len(NO_NUMBERS) + 1)]
    if isinstance(value, Exception):
        raise value
    return value


def asks_for_too_much(completion: str, answer: str, difficulty: int) -> float:
    return 0.0


KEPT: list[dict] = []  # what `keeps` got


def keeps(completion: str, answer, **columns) -> float:
    KEPT.append({"answer": answer, **columns})
    return 1.0
