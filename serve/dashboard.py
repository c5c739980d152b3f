"""What the page at `/` shows: the last minute in numbers, and the batch that runs.

The thread that owns the engine counts what comes in, and copies the state of its slots while a page
is open. The event loop reads these a few times a second and sends every page what is new. No
request reads a running engine, or its device.

The page is plain HTML, CSS and JavaScript in `serve/page/`, sent as one document. It loads nothing
from anywhere else, and its Content-Security-Policy forbids it.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Sequence
from importlib import resources
from typing import Any

from serve.metrics import Metrics, Snapshot
from specjax import LLM
from specjax.control import OFF, Controller, Goodput
from specjax.engine.engine import Engine
from specjax.engine.sequence import News

# Of the page; joined in this order.
SCRIPTS = ("base.js", "words.js", "draw.js", "live.js", "prompt.js")  # in order
_STYLE, _SCRIPT, _KEY = "/* style.css */", "/* scripts */", "data-key=no"
TICK = 0.25  # seconds
KEPT = 240  # ticks
GAINS_EVERY = 0.5  # seconds between two estimates of the controller for one bucket


class Dashboard:
    """Collects the numbers that the page shows.

    Args:
      engines: replicas. metrics: its snapshot has the numbers of running samples.

    Attributes:
      viewers: number of open event streams.
      is_draining: whether the server is ending and takes no requests; set by `serve.__main__`.
    """

    def __init__(self, llm: LLM, engines: Sequence[Engine], metrics: Metrics):
        self._metrics, self._about = metrics, about(llm, engines)
        self.viewers = 0
        self.is_draining: Callable[[], bool] = lambda: False
        self._began = time.monotonic()
        # The engine's thread writes these:
        deepest = max(plan.steps for plan in engines[0].runner.plans.values())
        self._sums = dict.fromkeys(("tokens", "rounds", "drafting", "drafting_tokens"), 0)
        self._drafted_at, self._accepted_at = [0] * deepest, [0] * deepest
        self._by: Counter[str] = Counter()
        self._seen: tuple[Snapshot, list[dict]] = (metrics.snapshot, [])
        # Estimates, when they were made, and when plain decoding was last measured:
        self._gains: tuple[dict, float, float | None] | None = None
        self._asked, self._asked_of = 0.0, 0
        self._lanes: dict[int, dict[int, int]] = {}  # by replica and number of the sequence
        # (replica, size): chunks of plain decoding that were measured, and when the last one was.
        self._plain: dict[tuple[int, int], tuple[int, float]] = {}
        # The event loop writes these:
        self._ticks: deque[dict] = deque(maxlen=KEPT)
        self._depths: deque[list[tuple[int, int]]] = deque(maxlen=KEPT)
        self._number, self._before = 0, self._totals()
        self._last, self._ticked = time.monotonic(), asyncio.Event()
        self._now: dict[str, Any] = {}

    # --- called in the engine's thread ------------------------------------------------------------

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
            self._drafted_at[depth] += count
            self._accepted_at[depth] += sum(tokens > depth + 1 for tokens in news.rounds)

    def weights_changed(self) -> None:
        """Drops the estimates, which are of the old weights."""
        self._gains = None

    def look(self, engines: Sequence[Engine]) -> None:
        """Copies what each replica runs, and the estimates of its controller."""
        replicas = []
        if self.viewers:
            replicas = [self._picture(index, engine) for index, engine in enumerate(engines)]
        self._seen = self._metrics.snapshot, replicas
        now, asked = time.monotonic(), False
        for index, engine in enumerate(engines):
            size = engine.latest[1] if engine.latest else 0
            plain = self._plain_measured(index, size, engine.controller, now)
            if asked or not size or not engine.scheduler.running:
                continue
            asked = True  # the page shows the estimates of one replica
            if now < self._asked + GAINS_EVERY and size == self._asked_of:
                continue
            self._asked, self._asked_of = now, size
            if found := _estimate(engine, size):
                self._gains = found, now, plain

    def _picture(self, replica: int, engine: Engine) -> dict[str, Any]:
        """What runs on a replica.

        A sample keeps its lane, a row of the page. An entry of `lanes` is [lane, number of the
        sequence, tokens by origin (draft, bonus, plain), most tokens, whether it may be drafted
        for].
        """
        strategy, bucket = engine.latest or ("", 0)
        running, before = engine.running, self._lanes.get(replica, {})
        mine = {s.number: before[s.number] for s in running if s.number in before}
        free = iter(sorted(set(range(engine.batch)) - set(mine.values())))
        for number in (s.number for s in running if s.number not in mine):
            mine[number] = next(free)
        self._lanes[replica] = mine
        lanes = [
            [mine[s.number], s.number, *s.origins, s.most, s.job.params.speculative]
            for s in running
        ]
        return {"strategy": strategy, "bucket": bucket, "lanes": sorted(lanes)}

    def _plain_measured(
        self, replica: int, size: int, controller: Controller, now: float
    ) -> float | None:
        """The time at which plain decoding last ran at a size; None: not since the start."""
        at, goodput = 0, _goodput(controller)
        if goodput is not None:
            at = goodput.costs.chunks(OFF, size)
        seen = self._plain.get((replica, size), (0, None))
        if at and at != seen[0]:
            self._plain[replica, size] = seen = at, now
        return seen[1]

    # --- called in the event loop -----------------------------------------------------------------

    async def run(self) -> None:
        """Calls `tick` at regular intervals until it is cancelled."""
        while True:
            await asyncio.sleep(TICK)
            self.tick()

    def tick(self) -> None:
        """Adds an entry for the time since the last tick, and takes the present state."""
        now, totals, before = time.monotonic(), self._totals(), self._before
        seen, replicas = self._seen
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
        self._now = self._state(now, seen, replicas if seen.running else [], totals)
        self._ticked.set()
        self._ticked = asyncio.Event()

    def _totals(self) -> dict[str, Any]:
        depths = list(zip(self._drafted_at, self._accepted_at, strict=True))
        return {**self._sums, "by": Counter(dict(self._by)), "depths": depths}

    async def events(self, server_state: Callable[[], dict]) -> AsyncIterator[str]:
        """Server-sent events, one per tick: first all ticks that are kept, then the new ones.

        Args:
          server_state: gives `state`, `error`, and `outstanding`, the samples that have not ended.
        """
        known, more = -1, {"about": self._about}
        if not self._now:
            self.tick()
        while True:
            said, ticked = server_state(), self._ticked
            fresh = [tick for tick in self._ticks if tick["n"] > known]
            known = self._number
            yield f"data: {json.dumps({**more, **said, **self._now, 'ticks': fresh})}\n\n"
            if said["state"] == "draining" and not said["outstanding"]:
                return  # the server waits for open streams before it ends
            more = {}
            await ticked.wait()

    def _state(
        self, now: float, seen: Snapshot, replicas: list[dict], totals: dict[str, Any]
    ) -> dict[str, Any]:
        depths, gains = totals["depths"], None
        recent = [(a - c, b - d) for (a, b), (c, d) in zip(depths, self._depths[0], strict=True)]
        if self._gains is not None:
            found, asked, plain = self._gains
            ago = None if plain is None else round(now - plain, 1)
            gains = {**found, "age": round(now - asked, 1), "plain_age": ago}
        return {
            "uptime": round(now - self._began, 1),
            "running": seen.running,
            "waiting": seen.waiting,
            "pages_used": seen.pages_used,
            "pages": seen.pages,
            "compilations": seen.compilations,
            "preemptions": seen.preemptions,
            "version": seen.version,
            "alarms": list(seen.alarms),
            "totals": {name: value for name, value in totals.items() if name != "depths"},
            "depths": {"recent": recent, "all": depths},
            "gains": gains,
            "replicas": replicas,
        }


def about(llm: LLM, engines: Sequence[Engine]) -> dict[str, Any]:
    """Facts that do not change while the server runs."""
    first = engines[0]
    strategies = {
        name: {"steps": plan.steps, "drafted": plan.strategy.rows - 1}
        for name, plan in first.runner.plans.items()
    }
    return {
        "strategies": strategies,
        "controller": None if first.control is None else first.controller.kind,
        "acceptance": None if first.spec is None else first.spec.acceptance,
        "slots": [engine.batch for engine in engines],
        "buckets": first.buckets,
        "max_len": llm.max_len,
        "vocabulary": llm.cfg.vocab_size,
        "has_tokenizer": llm.tokenizer is not None,
    }


def _goodput(controller: Controller) -> Goodput | None:
    """The goodput controller, also within a gate; None: the controller measures no costs."""
    inner = getattr(controller, "inner", controller)
    return inner if isinstance(inner, Goodput) else None


def _estimate(engine: Engine, size: int) -> dict[str, Any] | None:
    """The controller's estimates for batches of a compiled size; None: it has none.

    Returns:
      `size`, and of each strategy that was measured there:
      ratios: its speed over plain decoding's. costs: seconds of a round over those of a plain one,
        each with its share of what a full chunk takes beside its rounds.
      chunks: that it had; 0: it was calibrated at the start and has not run since.
      slack: by what share plain decoding, beside it, may well be cheaper than it is taken to be.
    """
    ratios, goodput = engine.controller.gains(size), _goodput(engine.controller)
    if goodput is None or not ratios.keys() - {OFF}:
        return None
    plain = goodput.round_seconds(OFF, size)
    return {
        "size": size,
        "ratios": ratios,
        "costs": {name: goodput.round_seconds(name, size) / plain for name in ratios},
        "chunks": {name: goodput.costs.chunks(name, size) for name in ratios},
        "slack": {name: goodput.costs.slack(OFF, size) for name in ratios},
    }


# --- the page ------------------------------------------------------------------------------------


def document(needs_key: bool) -> tuple[str, str]:
    """The page, and its Content-Security-Policy.

    Args:
      needs_key: the page first asks for the API key.
    """
    html, style = _text("index.html"), _text("style.css")
    script = "\n".join(map(_text, SCRIPTS))
    policy = (
        f"default-src 'none'; style-src {_hash(style)}; script-src {_hash(script)}; img-src data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    key = f"data-key={'yes' if needs_key else 'no'}"
    for mark, text in ((_STYLE, style), (_SCRIPT, script), (_KEY, key)):
        if html.count(mark) != 1:
            raise ValueError(f"index.html has {mark!r} {html.count(mark)} times, expected once")
        html = html.replace(mark, text)
    return html, policy


def _text(name: str) -> str:
    return (resources.files("serve.page") / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    """The source of an inline element in a Content-Security-Policy."""
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"
