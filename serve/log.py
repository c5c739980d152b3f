"""One line per request: counted always, written where a file was named.

A full disk costs lines, not requests: what cannot be written is counted, and said when it begins.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve.metrics import Metrics

log = logging.getLogger(__name__)


class AccessLog:
    """Middleware that watches answers.

    Args:
      paths: known ones; all others are counted as one. file: appended to; None: nothing is.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics, paths: frozenset[str], file: str | None):
        self._app, self._metrics, self._paths = app, metrics, paths
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
        self._file = None if file is None else os.open(file, flags, 0o644)
        self._failed = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, status = time.perf_counter(), 0

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, watched)
        finally:
            path = scope["path"] if scope["path"] in self._paths else "other"
            self._metrics.answers.labels(path, status).inc()
            if self._file is not None:
                self._write(scope, status, time.perf_counter() - began)

    def _write(self, scope: Scope, status: int, seconds: float) -> None:
        line = {
            "time": round(time.time(), 3),
            "method": scope["method"],
            "path": scope["path"],
            "status": status,
            "seconds": round(seconds, 6),
        }
        text = (json.dumps(line) + "\n").encode()
        try:
            if os.write(self._file, text) < len(text):  # what was left of the disk
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self._failed = False  # the next time it fills up is said again
        except OSError as error:
            self._metrics.lost_lines.inc()
            if not self._failed:
                log.error("the log cannot be written, and requests go on without: %s", error)
            self._failed = True
