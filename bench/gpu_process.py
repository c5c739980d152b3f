"""The process of one part of the GPU queue: its clock, its record, and `--dry` in its place.

    <out>/gpu/<part>.<card>.json            figures of a part that has ended, or why there are none
    <out>/gpu/<part>.<card>.running.json    figures of a part that runs, or was interrupted

Both are result files, see `bench.record`; `settings` has part, card and attempts, and the figure
`outcome` says how the part ended, and why. A running part writes each figure at once, so that none
is lost if its process dies. The queue starts `python -m bench.gpu_process '<task as JSON>'`.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import jax

from bench.programs import Ahead, Place, Program
from bench.record import figure, now, result_of, write_json

SOFT = 0.85  # share of a part's time after which it starts no further item
LONGER = 1.2  # an item starts if this many times the seconds of the longest one so far are left
OUT_OF_MEMORY = "RESOURCE_EXHAUSTED"
UNFINISHED = 75  # exit status if something was left out for lack of time (EX_TEMPFAIL)
AT_ONCE = 2  # programs that --dry compiles at once; each compilation also has threads of its own
# Environment variables with a user's model and rows, from --model and --rows.
MODEL, ROWS = "SPECJAX_GPU_MODEL", "SPECJAX_GPU_ROWS"

# --- records -------------------------------------------------------------------------------------

Record = dict[str, Any]
RUNNING = "running"
MEASURED = ("done", "done in part")  # outcomes of parts that time and memory allowed
EXCUSED = ("not on this device", "not given")  # of parts that this machine cannot run: no failures


def directory(out: str | Path) -> Path:
    return Path(out) / "gpu"


def path_of(out: str | Path, part: str, card: str, running: bool = False) -> Path:
    suffix = ".running.json" if running else ".json"
    return directory(out) / f"{part.replace('/', '.')}.{card}{suffix}"


def read(path: Path) -> Record | None:
    """Reads a record; None: there is none."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None


def every(out: str | Path) -> Iterator[tuple[Path, Record]]:
    """Yields all records below a directory in order of their names, those of running parts too."""
    for path in sorted(directory(out).glob("*.json")):
        if not path.name.startswith("."):
            yield path, read(path)


def outcome(record: Mapping) -> str:
    return record["figures"]["outcome"]["value"]


def reason(record: Mapping) -> str:
    return record["figures"]["outcome"]["unit"]


def ok(record: Mapping) -> bool:
    """Returns whether a part did not fail."""
    return outcome(record) in (*MEASURED, *EXCUSED)


def wants_time(record: Mapping) -> bool:
    """Returns whether another run of a part would measure more, because its time was short."""
    short = outcome(record) in ("done in part", "no time")
    return short and record["settings"].get("left_over", 0) > 0


def weight(record: Mapping) -> int:
    """Returns the rank of a record among those of one part and card; of equals the newer is kept.

    A record of wrong results ranks as a complete one, however its run ended, so that it replaces an
    older record of right results.
    """
    if record["settings"].get("wrong") or outcome(record) == "done":
        return 3
    if outcome(record) == "done in part":
        return 2
    names = record["figures"].keys() - {"outcome", "spent"}
    return int(any(record["figures"][name]["value"] is not None for name in names))


def finish(out: str | Path, record: Record) -> None:
    """Writes the record of a part that has ended, and deletes its `.running.json`.

    An older record that has a higher `weight` is kept.
    """
    part, card = record["settings"]["part"], record["settings"]["card"]
    path = path_of(out, part, card)
    before = read(path)
    if before is None or weight(record) >= weight(before):
        write_json(record, path)
    else:
        print(f"{part}: {outcome(record)}; the older record is kept", flush=True)
    path_of(out, part, card, running=True).unlink(missing_ok=True)


def ended(record: Mapping, word: str, why: str) -> Record:
    """Returns the record of a run that was killed, with the figures so far."""
    entry = figure(word, "; ".join(filter(None, [reason(record), why])))
    return {**record, "date": now(), "figures": {**record["figures"], "outcome": entry}}


# --- parts and their runs ------------------------------------------------------------------------


class Part(NamedTuple):
    """One part of the queue.

    Attributes:
      name: name of the part.
      decides: purpose of its figures.
      function: "module:function" that takes a `Job` and the settings.
      seconds: time limit, compilation included; the part is killed after it.
      ahead: whether --dry compiles it; other parts run engines, whose chunks are those of others.
      shares_memory: whether the device's memory is shared with another process.
    """

    name: str
    decides: str
    function: str
    settings: Mapping[str, Any] = MappingProxyType({})
    seconds: float = 180.0
    ahead: bool = True
    shares_memory: bool = False

    def measure(self, job: Job) -> None:
        module, _, name = self.function.partition(":")
        getattr(importlib.import_module(module), name)(job, **self.settings)


class Absent(Exception):
    """Raised by a part that this machine cannot run; `word` is one of `EXCUSED`."""

    def __init__(self, word: str, reason: str):
        super().__init__(reason)
        self.word = word


class Built(dict):
    """Compiled programs by name; one that did not compile raises its error when it is asked for."""

    def __getitem__(self, name: str) -> jax.stages.Compiled:
        compiled = super().__getitem__(name)
        if isinstance(compiled, Exception):
            raise compiled
        return compiled


Items = Iterable[tuple[str | Sequence[str], Callable[[], Mapping[str, Mapping]]]]


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
      place: what programs are built for.
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
        self.path = path_of(out, part, card, running=True)
        self.seconds, self.began = seconds, time.monotonic()
        self.small, self.seed, self.place = small, seed, Place()
        self.figures: dict[str, dict] = {}
        self.failures: list[str] = []
        self.measured = self.left_over = self.no_room = 0
        self.outcome = RUNNING
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
        """Records a wrong result, which counts as a complete one, see `weight`."""
        self._head["settings"].setdefault("wrong", []).append(what)
        self.fail(what)

    def build(self, programs: Sequence[Program]) -> Built:
        """Compiles, several at once where that helps: one for CPUs, whose compiler has threads.

        Tracing is one after the other; each program is compiled as soon as it is traced.
        """
        threads = 1 if jax.default_backend() == "cpu" else os.cpu_count()
        found = Built.fromkeys(program.name for program in programs)
        with ThreadPoolExecutor(threads, "compile") as pool:
            waiting = {}
            for program in programs:
                try:
                    program.lower()
                    waiting[program.name] = pool.submit(program.compile)
                except Exception as error:  # of this program; the others may be measured
                    found[program.name] = error
            for name, started in waiting.items():
                found[name] = started.exception() or started.result()
        for name, entry in found.items():
            if isinstance(entry, Exception):
                print(f"{name} did not compile: {described(entry)}", flush=True)
        return found

    def each(self, items: Items) -> None:
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
            if self.left < LONGER * longest:
                self._without(names, "no time left")
                self.left_over += 1
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

    def _without(self, names: Sequence[str], why: str) -> None:
        """Records that figures were not measured, and why."""
        self.add({name: figure(None, f"left out: {why}") for name in names})

    def run(self, measure: Callable[[Job], None]) -> bool:
        """Runs a part's function, records its errors, and returns whether it succeeded."""
        try:
            measure(self)
            self.outcome = "failed" if self.failures else self._how_far()
        except Absent as absent:
            self.outcome = absent.word
            self.failures.append(str(absent))
        except Exception as error:
            traceback.print_exc()
            self.outcome = "out of memory" if OUT_OF_MEMORY in str(error) else "failed"
            self.fail(described(error))
        self._head["date"] = now()
        self._head["settings"] |= {"left_over": self.left_over, "no_room": self.no_room}
        print(f"--- {self.part}: {self.outcome}: {'; '.join(self.failures)}", flush=True)
        record = self.record()
        finish(self.out, record)
        return ok(record)

    def _how_far(self) -> str:
        """Returns the outcome without failures; adds a reason for each kind of missing item."""
        if self.left_over:
            self.failures.append(f"no time for {self.left_over} measurements")
        if self.no_room:
            self.failures.append(f"no memory for {self.no_room} measurements")
        if not self.failures:
            return "done"
        if self.measured:
            return "done in part"
        return "no time" if self.left_over else "out of memory"

    def record(self) -> Record:
        spent = figure(time.monotonic() - self.began, "s, of the part's process")
        entry = figure(self.outcome, "; ".join(self.failures))
        return {**self._head, "figures": {"outcome": entry, "spent": spent, **self.figures}}

    def write(self) -> None:
        """Writes the record of the running part; `run` replaces it when the part has ended."""
        write_json(self.record(), self.path)


def described(error: BaseException) -> str:
    """Returns an error as one line of limited length."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:400]}"


# --- ahead of time -------------------------------------------------------------------------------


class Traced(Exception):
    """Ends a part, or an item of it, whose programs were traced."""


class DryJob:
    """Stands for a `Job` where nothing is run: it keeps the programs that a part builds."""

    seed, left = 0, float("inf")

    def __init__(self, place: Place, small: bool):
        self.place, self.small = place, small
        self.lowered: dict[str, tuple[Program, jax.stages.Lowered]] = {}
        self.failed: list[str] = []

    def tell(self, **settings: Any) -> None:
        pass

    def build(self, programs: Sequence[Program]) -> Built:
        for program in programs:
            if program.name in self.lowered:
                continue
            try:
                self.lowered[program.name] = program, program.lower()
            except Exception as error:
                self.failed.append(f"{program.name}: is not traced: {described(error)}")
        raise Traced

    def each(self, items: Items) -> None:
        for _, measure in items:
            with contextlib.suppress(Traced):
                measure()


def dry(parts: Sequence[Part], cards: Sequence[str], small: bool, minutes: float | None) -> int:
    """Compiles the programs of parts for cards that are not there, and prints their sizes.

    Returns:
      1 if a program does not compile or does not fit; else `UNFINISHED` if there was too little
      time.
    """
    end = float("inf") if minutes is None else time.monotonic() + 60 * minutes
    failed, late = [], []
    for card in cards:
        place = Ahead(card)
        for part in parts:
            about = f"{part.name}, {card}"
            if not part.ahead:
                print(f"{about}: its chunks are those of other parts", flush=True)
                continue
            job = DryJob(place, small)
            try:
                with place.seen(), contextlib.suppress(Traced):
                    if time.monotonic() < end:
                        part.measure(job)
                    else:
                        late.append(about)
            except Exception as error:
                job.failed.append(f"not built: {described(error)}")
            with ThreadPoolExecutor(AT_ONCE) as pool:
                found = {
                    name: pool.submit(_compile, *pair, place, end)
                    for name, pair in job.lowered.items()
                }
                for name, compiling in found.items():
                    problem = compiling.result()
                    if problem is None:
                        late.append(f"{about}, {name}")
                    elif problem:
                        job.failed.append(f"{name}: {problem}")
            failed += [f"{about}, {line}" for line in job.failed]
            jax.clear_caches()
    for title, lines in (("failed", failed), ("not compiled, because there was no time", late)):
        if lines:
            print(f"{len(lines)} {title}:", *lines, sep="\n  ", flush=True)
    return 1 if failed else UNFINISHED if late else 0


def _compile(program: Program, lowered: jax.stages.Lowered, place: Place, end: float) -> str | None:
    """Compiles a program; returns its problem, "" without one, None without time."""
    began = time.monotonic()
    if began > end:
        return None
    try:
        memory = lowered.compile(dict(program.options)).memory_analysis()
    except Exception as error:
        return f"does not compile: {described(error)}"
    results = memory.output_size_in_bytes - memory.alias_size_in_bytes
    needs = memory.argument_size_in_bytes + results + memory.temp_size_in_bytes + program.beside
    seconds, usable = time.monotonic() - began, place.card.usable
    print(f"  {program.name}: {needs / 1e9:.2f} GB, compiled in {seconds:.0f} s", flush=True)
    if needs > usable:
        return f"needs {needs / 1e9:.1f} GB, and the card has {usable / 1e9:.1f}"
    return ""


# --- the process ---------------------------------------------------------------------------------


def _end_with_parent() -> None:
    """Ends this process and its children when its parent, which holds the other end of its standard
    input, has ended: a part must not run beside one of the next call."""

    def watch() -> None:
        # Not `sys.stdin`: Python could not close it while this thread waits.
        while os.read(0, 4096):
            pass
        os.killpg(os.getpgrp(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def main() -> None:
    _end_with_parent()
    task = json.loads(sys.argv[1])
    part = Part(task["part"], "", task.pop("function"), task.pop("settings"))
    sys.exit(0 if Job(**task).run(part.measure) else 3)  # errors of the import count too


if __name__ == "__main__":
    from bench import gpu_process  # whose classes the parts know

    gpu_process.main()
