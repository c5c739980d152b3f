"""The data of the page at `/`: numbers of the last minute, and the running batch.

The engine's thread copies the state of its slots while a page is open. The event loop reads these a
few times a second and sends the changes to every page. No request reads a running engine or its
device.

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
from specjax.control import OFF, Goodput
from specjax.engine.engine import Engine
from specjax.tokenizer import has_chat_template

# Scripts of the page, in the order in which they are joined.
SCRIPTS = ("base.js", "words.js", "draw.js", "live.js", "prompt.js")
_STYLE, _SCRIPT, _KEY = "/* style.css */", "/* scripts */", "data-key=no"
TICK = 0.25  # seconds
KEPT = 240  # number of ticks that a new page gets
GAINS_EVERY = 0.5  # seconds between two estimates of the controller for one bucket


class Dashboard:
    """Collects the numbers that the page shows.

    Args:
      llm: the model.
      engines: the engine of each replica.
      metrics: the server's metrics.

    Attributes:
      viewers: number of open event streams.
      is_draining: function that says whether the server is about to end and takes no requests; set
        by `serve.__main__`.
    """

    def __init__(self, llm: LLM, engines: Sequence[Engine], metrics: Metrics):
        self._metrics, self._about = metrics, about(llm, engines)
        self.viewers = 0
        self.is_draining: Callable[[], bool] = lambda: False
        self._began = time.monotonic()
        # The engine's thread writes these:
        self._seen: tuple[Snapshot, list[dict]] = (metrics.snapshot, [])
        self._gains: tuple[dict, float] | None = None  # the estimates and their time
        # Time and bucket of the last call of `_estimate`.
        self._estimated_at, self._estimated_size = 0.0, 0
        self._lanes: dict[int, dict[int, int]] = {}  # by replica and number of the sequence
        # The event loop writes these:
        self._ticks: deque[dict] = deque(maxlen=KEPT)
        self._depths: deque[list[tuple[int, int]]] = deque(maxlen=KEPT)
        self._number, self._before = 0, self._totals()
        self._last, self._ticked = time.monotonic(), asyncio.Event()
        self._now: dict[str, Any] = {}

    # --- called in the engine's thread ------------------------------------------------------------

    def weights_changed(self) -> None:
        """Drops the estimates, which were made with the old weights."""
        self._gains = None

    def copy_state(self, engines: Sequence[Engine]) -> None:
        """Copies the running samples of each replica, and the estimates of a controller."""
        replicas = []
        if self.viewers:
            replicas = [self._replica_state(index, engine) for index, engine in enumerate(engines)]
        self._seen = self._metrics.snapshot, replicas
        now = time.monotonic()
        busy = [one for one in engines if one.latest and one.latest[1] and one.scheduler.running]
        for engine in busy[:1]:  # the page shows the estimates of one replica
            size = engine.latest[1]
            if now < self._estimated_at + GAINS_EVERY and size == self._estimated_size:
                continue
            self._estimated_at, self._estimated_size = now, size
            if found := _estimate(engine, size):
                self._gains = found, now

    def _replica_state(self, replica: int, engine: Engine) -> dict[str, Any]:
        """The samples that run on a replica.

        A sample keeps its lane, a row of the page. An entry of `lanes` is [lane, number of the
        sequence, number of tokens by origin (draft, bonus, plain), limit of tokens, whether it may
        be drafted for].
        """
        strategy, bucket = engine.latest or ("", 0)
        running, before = engine.running, self._lanes.get(replica, {})
        lane_of = {s.number: before[s.number] for s in running if s.number in before}
        free = iter(sorted(set(range(engine.batch)) - set(lane_of.values())))
        for number in (s.number for s in running if s.number not in lane_of):
            lane_of[number] = next(free)
        self._lanes[replica] = lane_of
        lanes = [
            [lane_of[s.number], s.number, *s.origin_counts, s.most, s.job.params.speculative]
            for s in running
        ]
        return {"strategy": strategy, "bucket": bucket, "lanes": sorted(lanes)}

    # --- called in the event loop -----------------------------------------------------------------

    async def run(self) -> None:
        """Calls `tick` at regular intervals until it is cancelled."""
        while True:
            await asyncio.sleep(TICK)
            self.tick()

    def tick(self) -> None:
        """Adds an entry for the time since the last tick, and updates the present state."""
        now, totals, before = time.monotonic(), self._totals(), self._before
        seen, replicas = self._seen
        self._number += 1
        self._ticks.append(
            {
                "n": self._number,
                "seconds": round(now - self._last, 3),
                **{name: totals[name] - before[name] for name in self._metrics.sums},
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
        metrics = self._metrics
        depths = list(zip(metrics.drafted_at, metrics.accepted_at, strict=True))
        return {**metrics.sums, "by": Counter(dict(metrics.by_strategy)), "depths": depths}

    async def events(self, server_state: Callable[[], dict]) -> AsyncIterator[str]:
        """Server-sent events, one per tick; the first has all ticks that are kept.

        Args:
          server_state: function that returns `state`, `error`, and `outstanding`, the number of
            samples that have not ended.
        """
        known, constants = -1, {"about": self._about}
        if not self._now:
            self.tick()
        while True:
            server, ticked = server_state(), self._ticked
            fresh = [tick for tick in self._ticks if tick["n"] > known]
            known = self._number
            yield f"data: {json.dumps({**constants, **server, **self._now, 'ticks': fresh})}\n\n"
            if server["state"] == "draining" and not server["outstanding"]:
                return  # the server waits for open streams before it ends
            constants = {}
            await ticked.wait()

    def _state(
        self, now: float, seen: Snapshot, replicas: list[dict], totals: dict[str, Any]
    ) -> dict[str, Any]:
        depths, gains = totals["depths"], None
        recent = [(a - c, b - d) for (a, b), (c, d) in zip(depths, self._depths[0], strict=True)]
        if self._gains is not None:
            found, estimated = self._gains
            gains = {**found, "age": round(now - estimated, 1)}
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
    """The facts about a server that do not change while it runs."""
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
        "has_chat_template": llm.tokenizer is not None and has_chat_template(llm.tokenizer),
        "example": _example(llm),
    }


def _example(llm: LLM) -> str:
    """A prompt to begin with; of a small vocabulary, sums, as the embedded policy takes them."""
    if llm.tokenizer is None:
        return "1 2 3"
    few_words = llm.cfg.vocab_size < 4096
    return "17+25+8+61+93+4+55+12=" if few_words else "Explain in one sentence why the sky is blue."


def _estimate(engine: Engine, size: int) -> dict[str, Any] | None:
    """The controller's estimates for batches of a compiled size; None: it has none.

    Returns:
      `size`, and for each strategy that was measured at that size:
      ratios: estimated speed relative to plain decoding.
      costs: seconds per round relative to a plain round, each with its share of the fixed time of a
        full chunk.
      chunks: number of measured chunks; 0: only the calibration at the start.
      slack: share by which plain decoding may be cheaper than its estimated cost.
    """
    ratios = engine.controller.gains(size)
    goodput = engine.controller
    if not isinstance(goodput, Goodput) or not ratios.keys() - {OFF}:
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
      needs_key: whether the page first asks for the API key.
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
    """The hash source of an inline element for a Content-Security-Policy."""
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"
