"""What a part of the queue is given, and the record that it leaves behind."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from bench.common import figure, now, result_of, write_json
from bench.gpu import records

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
    """One run of a part: its settings, its clock, and its record.

    Args:
      part: name. card: short name of the device. out: where records lie.
      seconds: that it has. attempt: how many times it was begun, this time included.
      small: sizes for a CPU. seed: of weights and prompts.

    Attributes:
      figures: as in a result file. failures: what went wrong, one line each.
      measured, left_over: how many measurements were made; and how many there was no time for.
      outcome: `running`; then `done` or `done in part` as far as there was time, or `no time`,
        `failed`, `out of memory`, or the word of an `Absent`.
    """

    def __init__(
        self, part: str, card: str, out: str, seconds: float, attempt=1, small=False, seed=0
    ):
        self.part, self.card, self.out = part, card, out
        self.path = records.path_of(out, part, card, running=True)
        self.seconds, self.began = seconds, time.monotonic()
        self.small, self.seed = small, seed
        self.figures: dict[str, dict] = {}
        self.failures: list[str] = []
        self.measured = self.left_over = 0
        self.outcome = records.RUNNING
        settings = {"part": part, "card": card, "attempt": attempt, "seconds": seconds}
        self._head = result_of(f"gpu/{part}", settings | {"small": small, "seed": seed}, {})
        # What somebody would call; this process was given more by the queue.
        self._head["command"] = f"python -m bench.gpu --again {part}" + " --small" * small
        self.write()

    @property
    def left(self) -> float:
        """Seconds in which something may still be begun."""
        return self.began + SOFT * self.seconds - time.monotonic()

    def tell(self, **settings: Any) -> None:
        """Adds to the record's settings: sizes, kernels, versions."""
        self._head["settings"] |= settings
        self.write()

    def add(self, figures: Mapping[str, Mapping]) -> None:
        self.figures |= figures
        self.write()

    def leave_out(self, name: str, why: str) -> None:
        """Says that something was not measured, and why."""
        self.add({name: figure(None, f"left out: {why}")})

    def fail(self, what: str) -> None:
        """Goes on, but the part has failed."""
        self.failures.append(what)
        print(f"FAILED {self.part}: {what}", flush=True)
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
                    self.leave_out(name, f"out of memory: {described(error)}")
                    continue
                traceback.print_exc()
                self.add({name: figure(None, f"failed: {described(error)}")})
                self.fail(f"{name}: {described(error)}")
            longest = max(longest, time.monotonic() - start)

    def run(self, part: Callable[[Job], None]) -> bool:
        """The whole part; nothing that it raises goes further.

        Returns:
          whether all went well, or what did not is nobody's fault.
        """
        try:
            part(self)
            self.outcome = "failed" if self.failures else self._how_far()
        except Absent as absent:
            self.outcome = absent.word
            self.failures.append(str(absent))
            print(f"{self.part}: {absent.word}: {absent}", flush=True)
        except Exception as error:
            traceback.print_exc()
            self.outcome = "out of memory" if OUT_OF_MEMORY in str(error) else "failed"
            self.fail(described(error))
        self._head["date"] = now()
        print(f"--- {self.part}: {self.outcome}", flush=True)
        records.finish(self.out, self.record())
        return self.outcome in (*records.MEASURED, *records.EXCUSED)

    def _how_far(self) -> str:
        if not self.left_over:
            return "done"
        return "done in part" if self.measured else "no time"

    def record(self) -> records.Record:
        spent = figure(time.monotonic() - self.began, "s, of the part's process")
        told = figure(self.outcome, "; ".join(self.failures))
        return {**self._head, "figures": {"outcome": told, "spent": spent, **self.figures}}

    def write(self) -> None:
        """The record of the part that runs; another one takes its place when the part has ended."""
        write_json(self.record(), self.path)


def described(error: BaseException) -> str:
    """One line of an error, which may have pages."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:400]}"
