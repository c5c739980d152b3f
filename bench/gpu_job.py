"""What a part of `bench.gpu` is given, and the file that it leaves behind.

A part writes down what it finds as it goes, so that a part which crashes, hangs or runs out of time
loses nothing that it had measured.
"""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from bench.common import figure
from specjax.models.transformer import Params

SOFT = 0.85  # of a part's time: afterwards it begins nothing new
LONGER = 1.2  # times the longest item so far: less than that is too little time for another
OUT_OF_MEMORY = "RESOURCE_EXHAUSTED"


class Absent(Exception):
    """A part that cannot be there, and that is nobody's fault.

    Attributes:
      word: the part's outcome, such as `not installed`.
    """

    def __init__(self, word: str, reason: str):
        super().__init__(reason)
        self.word = word


class Job:
    """One part: its settings, its clock, and its record.

    Args:
      name: of the part. directory: where its record is written.
      seconds: that it has. small: sizes for a CPU. seed: of weights and prompts.
      attention: the kernel of rounds, see `specjax.kernels.dispatch.settle`.

    Attributes:
      figures: as in a result file. failures: what went wrong, one line each.
      measured, left_over: how many measurements were made; and how many there was no time for.
      outcome: `running`; then `done`, `done in part` or `no time` as far as there was time, or
        `failed`, or the word of an `Absent`.
    """

    def __init__(self, name: str, directory: Path, seconds: float, small, seed, attention="auto"):
        self.name, self.path = name, record_path(directory, name)
        self.seconds, self.began = seconds, time.monotonic()
        self.small, self.seed, self.attention = small, seed, attention
        self.figures: dict[str, dict] = {}
        self.failures: list[str] = []
        self.measured = self.left_over = 0
        self.outcome = "running"
        self.write()

    @property
    def left(self) -> float:
        """Seconds in which something may still be begun."""
        return self.began + SOFT * self.seconds - time.monotonic()

    def add(self, figures: Mapping[str, Mapping]) -> None:
        self.figures |= figures
        self.write()

    def leave_out(self, name: str, why: str) -> None:
        """Says that something was not measured, and why."""
        self.add({name: figure(None, f"left out: {why}")})

    def fail(self, what: str) -> None:
        """Goes on, but the part has failed."""
        self.failures.append(what)
        print(f"FAILED {self.name}: {what}", flush=True)
        self.write()

    def each(self, items: Iterable[tuple[str, Callable[[], Mapping[str, Mapping]]]]) -> None:
        """Measures items in order while there is time; one that fails does not stop the others.

        Args:
          items: name of the figure that stands for each, and what measures it.
        """
        items, longest = list(items), 0.0
        # Whatever ends the process, it is known what is missing.
        self.add({name: figure(None, "left out: the part ended before") for name, _ in items})
        for name, measure in items:
            if self.left < LONGER * longest:
                self.leave_out(name, "no time left")
                self.left_over += 1
                continue
            start = time.monotonic()
            try:
                self.add(measure())
                self.measured += 1
            except Exception as error:  # whatever a kernel, compiler or driver comes up with
                if OUT_OF_MEMORY in str(error):
                    self.leave_out(name, "it does not fit in the device's memory")
                    continue
                traceback.print_exc()
                self.add({name: figure(None, f"failed: {described(error)}")})
                self.fail(f"{name}: {described(error)}")
            longest = max(longest, time.monotonic() - start)

    def run(self, part: Callable[[Job], None]) -> None:
        """The whole part; nothing that it raises goes further."""
        try:
            part(self)
            self.outcome = "failed" if self.failures else self._how_far()
        except Absent as absent:
            self.outcome = absent.word
            self.failures.append(str(absent))
            print(f"{self.name}: {absent.word}: {absent}", flush=True)
        except Exception as error:
            traceback.print_exc()
            self.outcome = "failed"
            self.fail(described(error))
        self.write()

    def _how_far(self) -> str:
        if not self.left_over:
            return "done"
        return "done in part" if self.measured else "no time"

    def write(self) -> None:
        record = {
            "outcome": self.outcome,
            "seconds": time.monotonic() - self.began,
            "failures": self.failures,
            "figures": self.figures,
        }
        beside = self.path.with_suffix(".new")
        beside.write_text(json.dumps(record, default=_number), encoding="utf-8")
        beside.replace(self.path)  # a part that is killed leaves the whole of an older record


def _number(value: Any):
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"expected what JSON knows, or a number of numpy; got {type(value).__name__}")


def record_path(directory: Path, name: str) -> Path:
    return directory / f"{name.replace('/', '.')}.json"


def described(error: BaseException) -> str:
    """One line of an error, which may have pages."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:400]}"


def random_weights(init: Callable[[], Params], seed: int) -> Params:
    """Weights of the shapes that `init` makes, drawn on the device in their own dtype.

    `init` draws in float32, all layers of a weight at once: of an 8B model more than a device
    holds. Here a layer is drawn at a time. Scales are 1, all else is normal with deviation 0.02.
    """
    leaves, tree = jax.tree_util.tree_flatten_with_path(jax.eval_shape(init))
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    drawn = [
        _draw(key, leaf.shape, leaf.dtype.name, "norm" in str(path[-1]))
        for key, (path, leaf) in zip(keys, leaves, strict=True)
    ]
    return jax.tree.unflatten(tree, drawn)


def _draw(key, shape: tuple[int, ...], dtype: str, scale: bool) -> jax.Array:
    def normal(key, shape):
        return (0.02 * jax.random.normal(key, shape, dtype)).astype(dtype)

    def make(key):
        if scale:
            return jax.numpy.ones(shape, dtype)
        if len(shape) < 3:
            return normal(key, shape)
        return jax.lax.map(lambda key: normal(key, shape[1:]), jax.random.split(key, shape[0]))

    return jax.jit(make)(key)
