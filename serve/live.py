"""What the page shows: a minute of numbers, and the batch as it stands.

The thread that owns the engine counts what comes in, and leaves a picture of its slots while
somebody watches. The event loop reads the counters a few times a second and sends each watcher what
is new. Nobody asks a running engine, or its device, for anything.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from serve.metrics import Metrics
from specjax import LLM
from specjax.engine.engine import Engine
from specjax.engine.watch import News

TICK = 0.25  # seconds
KEPT = 240  # ticks
GAINS_EVERY = 0.5  # seconds between two questions to the controller


class Live:
    """Numbers of one server.

    Args:
      engines: replicas. metrics: whose snapshot says what runs.

    Attributes:
      viewers: event streams that are open.
      drains: whether the server is about to end and takes no requests; set by whoever runs it.
    """

    def __init__(self, llm: LLM, engines: Sequence[Engine], metrics: Metrics):
        self._metrics, self._about = metrics, about(llm, engines)
        self.viewers = 0
        self.drains: Callable[[], bool] = lambda: False
        self._began = time.monotonic()
        # The engine's thread writes these:
        deepest = max(plan.steps for plan in engines[0].runner.plans.values())
        self._sums = dict.fromkeys(("tokens", "rounds", "drafting", "drafting_tokens"), 0)
        self._tries, self._accepts = [0] * deepest, [0] * deepest
        self._by: Counter[str] = Counter()
        self._replicas: list[dict] = []
        self._gains: dict | None = None
        self._asked = 0.0
        # The event loop writes these:
        self._ticks: deque[dict] = deque(maxlen=KEPT)
        self._depths: deque[list[tuple[int, int]]] = deque(maxlen=KEPT)
        self._number, self._before = 0, self._totals()
        self._last = time.monotonic()

    # --- told by the engine's thread --------------------------------------------------------------

    def chunk(self, strategy: str, rounds: int) -> None:
        self._by[strategy] += rounds

    def news(self, news: News, fresh: int) -> None:
        """Counts a sample's rounds.

        Args:
          fresh: tokens that had not come before.
        """
        sums, count = self._sums, len(news.rounds)
        sums["tokens"] += fresh
        sums["rounds"] += count
        if not news.steps:
            return
        sums["drafting"] += count
        sums["drafting_tokens"] += sum(news.rounds)
        for depth in range(news.steps):
            self._tries[depth] += count
            self._accepts[depth] += sum(tokens > depth + 1 for tokens in news.rounds)

    def weights_changed(self) -> None:
        """What was measured of the old ones is not shown any more."""
        self._gains = None

    def look(self, engines: Sequence[Engine]) -> None:
        """Takes the picture: what each replica runs, and what its controller makes of it."""
        self._replicas = [_picture(engine) for engine in engines] if self.viewers else []
        now = time.monotonic()
        if now < self._asked + GAINS_EVERY:
            return
        self._asked = now
        for engine in engines:
            running = len(engine.scheduler.running)
            if running and (gains := engine.controller.gains(running)):
                self._gains = {"batch": running, "ratios": gains}
                break

    # --- the event loop's -------------------------------------------------------------------------

    async def run(self) -> None:
        """Counts ticks until it is cancelled."""
        while True:
            await asyncio.sleep(TICK)
            self.tick()

    def tick(self) -> None:
        """What came since the last."""
        now, totals, before = time.monotonic(), self._totals(), self._before
        seen = self._metrics.snapshot
        self._number += 1
        self._ticks.append(
            {
                "n": self._number,
                "seconds": round(now - self._last, 3),
                **{name: totals[name] - before[name] for name in self._sums},
                "by": totals["by"] - before["by"],
                "running": seen.running,
                "waiting": seen.waiting,
                "pages": seen.pages_used,
                "bucket": seen.bucket,
            }
        )
        self._depths.append(totals["depths"])
        self._before, self._last = totals, now

    def _totals(self) -> dict[str, Any]:
        depths = list(zip(self._tries, self._accepts, strict=True))
        return {**self._sums, "by": Counter(dict(self._by)), "depths": depths}

    async def events(self, state: Callable[[], dict]) -> AsyncIterator[str]:
        """Server-sent events, one per tick: all there is, then what is new.

        Args:
          state: of the server: `state`, `error`, and `outstanding`, samples that have not ended.
        """
        known, more = -1, {"about": self._about}
        while True:
            said = state()
            fresh = [tick for tick in self._ticks if tick["n"] > known]
            known = self._number
            yield f"data: {json.dumps({**more, **said, **self._now(), 'ticks': fresh})}\n\n"
            if said["state"] == "draining" and not said["outstanding"]:
                return  # the server waits for those who watch, too
            more = {}
            await asyncio.sleep(TICK)

    def _now(self) -> dict[str, Any]:
        seen, totals = self._metrics.snapshot, self._totals()
        depths = totals.pop("depths")
        earlier = self._depths[0] if self._depths else [(0, 0)] * len(depths)
        recent = [(a - c, b - d) for (a, b), (c, d) in zip(depths, earlier, strict=True)]
        return {
            "uptime": round(time.monotonic() - self._began, 1),
            "running": seen.running,
            "waiting": seen.waiting,
            "pages_used": seen.pages_used,
            "pages": seen.pages,
            "compilations": seen.compilations,
            "preemptions": seen.preemptions,
            "version": seen.version,
            "alarms": list(seen.alarms),
            "totals": totals,
            "depths": {"recent": recent, "all": depths},
            "gains": self._gains,
            "replicas": self._replicas if seen.running else [],
        }


def about(llm: LLM, engines: Sequence[Engine]) -> dict[str, Any]:
    """What does not change while the server runs."""
    first = engines[0]
    strategies = {
        name: {"steps": plan.steps, "drafted": tree.rows - 1 if (tree := plan.tree) else 0}
        for name, plan in first.runner.plans.items()
    }
    return {
        "strategies": strategies,
        "controller": None if first.control is None else first.controller.kind,
        "acceptance": None if first.spec is None else first.spec.acceptance,
        "slots": [engine.batch for engine in engines],
        "buckets": first.loop.buckets,
        "max_len": llm.max_len,
        "vocabulary": llm.cfg.vocab_size,
        "has_tokenizer": llm.tokenizer is not None,
    }


def _picture(engine: Engine) -> dict[str, Any]:
    """What runs on a replica. A lane: slot, ticket, tokens by origin (draft, bonus, plain), tokens
    at most, and whether it may be drafted for."""
    strategy, bucket = engine.loop.latest or ("", 0)
    lanes = [
        [slot, sequence.ticket, *sequence.origins, sequence.most, sequence.job.params.speculative]
        for slot, sequence in sorted(engine.scheduler.running.items())
    ]
    return {"strategy": strategy, "bucket": bucket, "lanes": lanes}
