"""What every replica did during a rollout, as JSON lines: one event per line.

    {"step": 3, "replica": 1, "event": "busy", "start": 0.0, "end": 1.25}

`event` is `busy` (samples wait or run there), `idle` (none do), `draft_gap` (it trained the draft
head meanwhile), `draft_after` (the same, after the rollout), or `rollout` (all of it; `replica` is
null). Times are in seconds since the rollout began. A piece of draft training ends when the host
has seen that it is done.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from train.log import read_lines

TRACE_FILE = "replicas.jsonl"


class Trace:
    """The events of one step after the other.

    Args:
      replicas: how many this process has. first: number of the first of them, in the job.

    Attributes:
      events: of the step that runs, or ran last.
    """

    def __init__(self, replicas: int, first: int = 0):
        self.replicas, self._first = replicas, first
        self.events: list[dict[str, Any]] = []
        self._truncated = False
        self.begin(0)

    def begin(self, step: int) -> None:
        """A rollout begins."""
        self._step, self._zero, self.events = step, time.perf_counter(), []
        self._since = [0.0] * self.replicas
        self._busy = [True] * self.replicas  # until a look says otherwise

    def look(self, drained: Sequence[int]) -> None:
        """Notes who has nothing to do by now."""
        now = time.perf_counter() - self._zero
        for replica in range(self.replicas):
            busy = replica not in drained
            if busy != self._busy[replica]:
                self._close(replica, now)
                self._busy[replica] = busy

    def draft(self, replica: int, started: float, in_gap: bool) -> None:
        """Notes a piece of draft training that began at `started` and is done by now."""
        event = "draft_gap" if in_gap else "draft_after"
        self._add(replica, event, started - self._zero, time.perf_counter() - self._zero)

    def end(self) -> None:
        """The rollout is over; draft training may go on."""
        now = time.perf_counter() - self._zero
        for replica in range(self.replicas):
            self._close(replica, now)
        self._add(None, "rollout", 0.0, now)

    def write(self, path: Path, events: Sequence[dict[str, Any]] | None = None) -> None:
        """Appends the step; of a run that is gone back, later steps are dropped first.

        Args:
          events: of all processes; None: those of this one.
        """
        events = self.events if events is None else events
        if not self._truncated:
            kept = [e for e in read_lines(path) if e["step"] < self._step] if path.exists() else []
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("".join(json.dumps(e) + "\n" for e in kept), encoding="utf-8")
            self._truncated = True
        with path.open("a", encoding="utf-8") as stream:
            stream.writelines(json.dumps(event) + "\n" for event in events)

    def _close(self, replica: int, now: float) -> None:
        if now > self._since[replica]:
            event = "busy" if self._busy[replica] else "idle"
            self._add(replica, event, self._since[replica], now)
        self._since[replica] = now

    def _add(self, replica: int | None, event: str, start: float, end: float) -> None:
        self.events.append(
            {
                "step": self._step,
                "replica": None if replica is None else self._first + replica,
                "event": event,
                "start": round(start, 6),
                "end": round(end, 6),
            }
        )
