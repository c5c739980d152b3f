"""One run of a part of the queue: its time, its settings, and the record that it writes."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from bench.gpu import records
from bench.record import figure, now, result_of, write_json

SOFT = 0.85  # of a part's time: afterwards it starts nothing new
LONGER = 1.2  # an item is started if this many times the longest one so far is left
OUT_OF_MEMORY = "RESOURCE_EXHAUSTED"


class Absent(Exception):
    """Raised by a part that this machine cannot run, which is no failure.

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
      measured, left_over, no_room: how many measurements were made, how many there was no time
        for, and how many there was no memory for.
      outcome: `running`; then `done` or `done in part` as far as there was time and memory, or
        `no time`, `out of memory`, `failed`, or the word of an `Absent`.
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
        self.measured = self.left_over = self.no_room = 0
        self.outcome = records.RUNNING
        settings = {"part": part, "card": card, "attempt": attempt, "seconds": seconds}
        self._head = result_of(f"gpu/{part}", settings | {"small": small, "seed": seed}, {})
        # The command of a user; this process was started by the queue.
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

    def fail(self, what: str) -> None:
        """Records a failure; the part goes on."""
        self.failures.append(what)
        print(f"FAILED {self.part}: {what}", flush=True)
        self.write()

    def refute(self, what: str) -> None:
        """Records a wrong result; the part goes on. It has failed, and its record counts as a whole
        measurement, see `records.weight`."""
        self._head["settings"].setdefault("wrong", []).append(what)
        self.fail(what)

    def time_for(self, seconds: float) -> bool:
        """Whether something may be begun that takes so long, as far as is known."""
        return self.left >= LONGER * seconds

    def each(
        self,
        items: Iterable[tuple[str | Sequence[str], Callable[[], Mapping[str, Mapping]]]],
    ) -> None:
        """Measures items in order while there is time; one that fails does not stop the others.

        Args:
          items: the names of the figures that are recorded as missing where an item is not
            measured (every figure that a target names), and what measures it.
        """
        items = [((names,) if isinstance(names, str) else names, run) for names, run in items]
        longest = 0.0
        # The record names what is missing, however the process ends.
        self._without(sum((tuple(names) for names, _ in items), ()), "the part ended before")
        for names, measure in items:
            if not self.time_for(longest):
                self.no_time(names)
                continue
            start = time.monotonic()
            try:
                self.add(measure())
                self.measured += 1
            except Exception as error:  # kernels, compilers and drivers raise many kinds
                self.not_measured(names, error)
            longest = max(longest, time.monotonic() - start)

    def not_measured(self, names: Sequence[str], error: Exception) -> None:
        """Records of these figures what was raised instead: a failure, or that memory was short."""
        if OUT_OF_MEMORY in str(error):
            self._without(names, f"out of memory: {described(error)}")
            self.no_room += 1
            return
        traceback.print_exception(error)
        self.add({name: figure(None, f"failed: {described(error)}") for name in names})
        self.fail(f"{names[0]}: {described(error)}")

    def no_time(self, names: Sequence[str]) -> None:
        """Records that there was no time for these figures of an item."""
        self._without(names, "no time left")
        self.left_over += 1

    def _without(self, names: Sequence[str], why: str) -> None:
        """Records that figures were not measured, and why."""
        self.add({name: figure(None, f"left out: {why}") for name in names})

    def run(self, part: Callable[[Job], None]) -> bool:
        """The whole part; nothing that it raises goes further.

        Returns:
          whether the part did what this machine has the means for.
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
        self._head["settings"] |= {"left_over": self.left_over, "no_room": self.no_room}
        print(f"--- {self.part}: {self.outcome}", flush=True)
        record = self.record()
        records.finish(self.out, record)
        return records.ok(record)

    def _how_far(self) -> str:
        """Adds the reasons where something is missing."""
        if self.left_over:
            self.failures.append(f"no time for {self.left_over} measurements")
        if self.no_room:
            self.failures.append(f"no memory for {self.no_room} measurements")
        if not self.left_over and not self.no_room:
            return "done"
        if self.measured:
            return "done in part"
        return "no time" if self.left_over else "out of memory"

    def record(self) -> records.Record:
        spent = figure(time.monotonic() - self.began, "s, of the part's process")
        outcome = figure(self.outcome, "; ".join(self.failures))
        return {**self._head, "figures": {"outcome": outcome, "spent": spent, **self.figures}}

    def write(self) -> None:
        """The record of the part that runs; another one takes its place when the part has ended."""
        write_json(self.record(), self.path)


def described(error: BaseException) -> str:
    """One line of an error, which may have pages."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:400]}"
