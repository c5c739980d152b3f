"""Prefilled prompts: each distinct prompt of the jobs at hand runs once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specjax.decode.admit import Prefilled
from specjax.engine.request import Job
from specjax.engine.runner import Runner


class Prompts:
    """Runs each distinct prompt once, ahead of its use.

    Prefills always have the same number of rows, so that a prompt's keys and values do not depend,
    not even in their last bits, on what runs beside it.
    """

    def __init__(self, runner: Runner, jobs: Sequence[Job], rows: int, widths: Sequence[int]):
        self._runner, self._jobs, self._rows, self._widths = runner, jobs, rows, widths
        self._keys = [tuple(job.prompt) for job in jobs]
        self._ready: dict[tuple, tuple[Prefilled, int]] = {}

    def get(self, index: int) -> tuple[Prefilled, int]:
        """The prefill that holds job `index`'s prompt, and its row there."""
        key = self._keys[index]
        if key not in self._ready:
            self._ready = self._run(index)  # jobs come in order: the last prefill is done with
        return self._ready[key]

    def _run(self, index: int) -> dict[tuple, tuple[Prefilled, int]]:
        """Prefills the next distinct prompts of the first one's width."""
        width = self._width(len(self._keys[index]))
        chosen: dict[tuple, Job] = {}
        for key, job in zip(self._keys[index:], self._jobs[index:], strict=True):
            if key not in chosen and (len(chosen) == self._rows or self._width(len(key)) != width):
                break
            chosen[key] = job
        jobs = list(chosen.values())
        jobs += [jobs[0]] * (self._rows - len(jobs))
        prefilled = self._runner.prefill(*pad_prompts(jobs, width))
        return {key: (prefilled, row) for row, key in enumerate(chosen)}

    def _width(self, length: int) -> int:
        return next(w for w in self._widths if w >= length)


def pad_prompts(jobs: Sequence[Job], width: int) -> tuple[np.ndarray, np.ndarray]:
    """Prompts right-padded to [jobs, width], and their lengths."""
    tokens = np.zeros((len(jobs), width), np.int32)
    for r, job in enumerate(jobs):
        tokens[r, : len(job.prompt)] = job.prompt
    return tokens, np.array([len(job.prompt) for job in jobs], np.int32)


def padded_widths(max_len: int) -> list[int]:
    """16, 32, 64, .. and `max_len`."""
    widths = [min(16, max_len)]
    while widths[-1] < max_len:
        widths.append(min(widths[-1] * 2, max_len))
    return widths
