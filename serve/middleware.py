"""ASGI middleware: API keys, the size of bodies, the access log."""

from __future__ import annotations

import errno
import json
import logging
import os
import secrets
import time

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve.errors import ApiError
from serve.metrics import Metrics

# Health checks and Prometheus send no key, and the page asks for one itself.
PUBLIC_PATHS = ("/health", "/ping", "/version", "/metrics", "/")

log = logging.getLogger(__name__)


class AuthenticationMiddleware:
    """Answers 401 to a request without the right key, and 403 if no key is accepted.

    Args:
      api_key: key that clients must send; None: clients need no key.
      admin_key: key for `admin_paths`; None: requests to these paths are refused.
      admin_paths: paths of administrators.
    """

    def __init__(
        self,
        app: ASGIApp,
        api_key: str | None,
        admin_key: str | None,
        admin_paths: tuple[str, ...],
    ):
        self._app, self._admin_paths = app, admin_paths
        self._api_key, self._admin_key = api_key, admin_key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = None
        if scope["type"] == "http":
            headers = {name.lower(): value for name, value in scope["headers"]}
            error = self._error(scope["path"], headers)
        await (self._app if error is None else error.response())(scope, receive, send)

    def _error(self, path: str, headers: dict[bytes, bytes]) -> ApiError | None:
        keys, what = [self._api_key, self._admin_key], "API key"
        if path in self._admin_paths:
            if self._admin_key is None:
                message = f"{path} needs an admin key, and the server was started without one"
                return ApiError(403, message)
            keys, what = [self._admin_key], "admin key"
        elif self._api_key is None or path in PUBLIC_PATHS:
            return None
        value = headers.get(b"authorization", b"").strip()
        scheme, space, key = value.partition(b" ")
        sent = key.strip() if space and scheme.lower() == b"bearer" else value
        # All of them are compared, whichever is right.
        if any([secrets.compare_digest(sent, key.encode()) for key in keys if key is not None]):
            return None
        got = f"a wrong {what}" if sent else f"no {what}"
        message = f"expected the header Authorization: Bearer KEY, got {got}"
        return ApiError(401, message, code="invalid_api_key")


class BodyLimitMiddleware:
    """Answers 413 to a request whose body turns out to be longer than `body_bytes`."""

    def __init__(self, app: ASGIApp, body_bytes: int):
        self._app, self._body_bytes = app, body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        seen = 0

        async def limited() -> Message:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > self._body_bytes:
                raise HTTPException(
                    413, f"the body is longer than {self._body_bytes} bytes; send less"
                )
            return message

        await self._app(scope, limited, send)


class AccessLogMiddleware:
    """Counts every response by path and status, and writes a JSON line for each to a file.

    A line that cannot be written, as on a full disk, is counted, and the first such line is an
    error in the server's log. Requests are served all the same.

    Args:
      metrics: counters of the server.
      paths: the routes; all other paths are counted together.
      file: name of the file to append to; None: no file.
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

        async def keep_status(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, keep_status)
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
            if os.write(self._file, text) < len(text):  # the disk took a part of the line
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self._failed = False
        except OSError as error:
            self._metrics.lost_lines.inc()
            if not self._failed:
                log.error("log_file cannot be written; requests are served all the same: %s", error)
            self._failed = True
