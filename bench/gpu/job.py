"""One run of a part of the queue: its time limit, its settings, and the record that it writes."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from bench.gpu import records
from bench.record import figure, now, result_of, write_json

SOFT = 0.85  # share of a part's time after which it starts no further item
LONGER = 1.2  # an item starts if this many times the seconds of the longest one so far are left
OUT_OF_MEMORY = "RESOURCE_EXHAUSTED"
# Environment variables with a user's model and rows, from --model and --rows.
MODEL, ROWS = "SPECJAX_GPU_MODEL", "SPECJAX_GPU_ROWS"


class Absent(Exception):
    """Raised by a part that this machine cannot run; it does not count as a failure.

    Attributes:
      word: the part's outcome, such as `not installed`.
    """

    def __init__(self, word: str, reason: str):
        super().__init__(reason)
        self.word = word


class Job:
    """One run of a part: its settings, its clock, and its record.

    Args:
      part: name of the part.
      card: short name of the device.
      out: directory of the records.
      seconds: time limit.
      attempt: number of this run, from 1; a run that was interrupted is repeated.
      small: whether to use tiny sizes, for a CPU.
      seed: seed of weights and prompts.

    Attributes:
      figures: figures as in a result file.
      failures: errors, one line each.
      measured, left_over, no_room: numbers of items that were measured, that there was no time for,
        and that there was no memory for.
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
        # The command for a user to repeat; the queue started this process by another one.
        self._head["command"] = f"python -m bench.gpu --again {part}" + " --small" * small
        self.write()

    @property
    def left(self) -> float:
        """Seconds in which further items may start."""
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
        """Records a wrong result; the part goes on.

        The part has failed, and its record counts as a complete one, see `records.weight`.
        """
        self._head["settings"].setdefault("wrong", []).append(what)
        self.fail(what)

    def time_for(self, seconds: float) -> bool:
        """Returns whether an item that takes `seconds` may start."""
        return self.left >= LONGER * seconds

    def each(
        self,
        items: Iterable[tuple[str | Sequence[str], Callable[[], Mapping[str, Mapping]]]],
    ) -> None:
        """Measures items in order while there is time; one that fails does not stop the others.

        Args:
          items: for each item, the names of its figures that targets need, which are recorded as
            missing if it is not measured, and the function that measures it.
        """
        items = [((names,) if isinstance(names, str) else names, run) for names, run in items]
        longest = 0.0
        # First all figures are recorded as missing, so that the record is right if the process
        # dies.
        self._without(sum((tuple(names) for names, _ in items), ()), "the part ended before")
        for names, measure in items:
            if not self.time_for(longest):
                self.no_time(names)
                continue
            start = time.monotonic()
            try:
                self.add(measure())
                self.measured += 1
            except Exception as error:  # kernels, compilers and drivers raise many types
                self.not_measured(names, error)
            longest = max(longest, time.monotonic() - start)

    def not_measured(self, names: Sequence[str], error: Exception) -> None:
        """Records an error in place of some figures: a failure, or too little memory."""
        if OUT_OF_MEMORY in str(error):
            self._without(names, f"out of memory: {described(error)}")
            self.no_room += 1
            return
        traceback.print_exception(error)
        self.add({name: figure(None, f"failed: {described(error)}") for name in names})
        self.fail(f"{names[0]}: {described(error)}")

    def no_time(self, names: Sequence[str]) -> None:
        """Records that there was no time for an item with these figures."""
        self._without(names, "no time left")
        self.left_over += 1

    def _without(self, names: Sequence[str], why: str) -> None:
        """Records that figures were not measured, and why."""
        self.add({name: figure(None, f"left out: {why}") for name in names})

    def run(self, part: Callable[[Job], None]) -> bool:
        """Runs the part and records its errors.

        Returns:
          whether all that this machine can run succeeded.
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
        """Returns the outcome without failures; adds a reason for each kind of missing item."""
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
        """Writes the record of the running part; `run` replaces it when the part has ended."""
        write_json(self.record(), self.path)


def described(error: BaseException) -> str:
    """Returns an error as one line of limited length."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:400]}"
