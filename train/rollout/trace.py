"""Records what each replica does while others roll out: `replicas.jsonl` in the run's directory."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specjax.engine.engine import Engine
from specjax.parallel import distributed
from train.run.files import keep_before

TRACE_FILE = "replicas.jsonl"


class Trace:
    """Records the times in which each replica was busy, idle or training, as JSON lines.

        {"step": 3, "replica": 1, "event": "busy", "start": 0.0, "end": 1.25}

    `event` is `busy` (the replica has samples), `idle` (it has none), `draft_gap` (it trained the
    draft head in a gap of the rollout), `draft_after` (it trained the head after the rollout), or
    `rollout` (the whole rollout; `replica` is null). Times are in seconds since the rollout began.
    An update of the draft head ends when the host notices that it is done.

    Args:
      replicas: number of replicas of this process.
      first: number of the first of them in the job.

    Attributes:
      events: events of the current or last step.
    """

    def __init__(self, replicas: int, first: int = 0):
        self.replicas, self._first = replicas, first
        self.events: list[dict[str, Any]] = []
        self._truncated = False
        self.begin(0)

    def begin(self, step: int) -> None:
        """Starts the record of a rollout."""
        self._step, self._zero, self.events = step, time.perf_counter(), []
        self._since = [0.0] * self.replicas
        self._busy = [True] * self.replicas  # until `record_idle` is called

    def record_idle(self, replicas: Sequence[int]) -> None:
        """Records which replicas are idle now; the others are busy."""
        now = time.perf_counter() - self._zero
        for replica in range(self.replicas):
            busy = replica not in replicas
            if busy != self._busy[replica]:
                self._close(replica, now)
                self._busy[replica] = busy

    def draft(self, replica: int, started: float, in_gap: bool) -> None:
        """Records an update of the draft head that began at `started` and is done by now."""
        event = "draft_gap" if in_gap else "draft_after"
        self._add(replica, event, started - self._zero, time.perf_counter() - self._zero)

    def end(self) -> None:
        """Ends the record of the rollout; updates of the head may follow."""
        now = time.perf_counter() - self._zero
        for replica in range(self.replicas):
            self._close(replica, now)
        self._add(None, "rollout", 0.0, now)

    def write(self, path: Path, own: Sequence[Engine]) -> None:
        """Appends the events of the step, those of all processes, to a file of JSON lines.

        The first call drops this and later steps from the file, which a resumed run repeats.

        Args:
          path: the file.
          own: replicas of this process.
        """
        events = self.events if own and own[0].runner.agreement.is_first else []
        if not distributed.is_first():  # which records the whole rollout
            events = [event for event in events if event["replica"] is not None]
        events = [*itertools.chain(*distributed.gather(events, "trace"))]
        if not distributed.is_first():
            return
        if not self._truncated:
            path.parent.mkdir(parents=True, exist_ok=True)
            keep_before(path, self._step)
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
