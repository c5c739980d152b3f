"""What a request must get past before anything of it is read: its key and its size."""

from __future__ import annotations

import secrets

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve.errors import ApiError

OPEN = ("/health", "/ping", "/version", "/metrics", "/")  # what looks after a server has no key


class Guard:
    """Middleware that answers 401, 403 and 413.

    Args:
      api_key: that clients must send; None: they need none.
      admin_key: for the paths of `admin`; None: nobody may use them.
      body_bytes: of a body at most.
    """

    def __init__(
        self,
        app: ASGIApp,
        api_key: str | None,
        admin_key: str | None,
        admin: tuple[str, ...],
        body_bytes: int,
    ):
        self._app, self._body_bytes = app, body_bytes
        self._api_key, self._admin_key, self._admin = api_key, admin_key, admin

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {name.lower(): value for name, value in scope["headers"]}
        error = self._refuses(scope["path"], headers) or self._too_long(headers)
        if error is None:
            body = await self._read(receive)
            error = self._error() if body is None else None
        if error is not None:
            await error.response()(scope, receive, send)
            return
        await self._app(scope, _again(body, receive), send)

    def _refuses(self, path: str, headers: dict[bytes, bytes]) -> ApiError | None:
        sent = _key_of(headers.get(b"authorization", b""))
        if path in self._admin:
            if self._admin_key is None:
                return ApiError(
                    403, f"{path} needs an admin key, and the server was started without one"
                )
            if not _same(sent, self._admin_key):
                return ApiError(401, _no_key("admin key", sent), code="invalid_api_key")
        elif self._api_key is not None and path not in OPEN:
            keys = [key for key in (self._api_key, self._admin_key) if key is not None]
            if not any([_same(sent, key) for key in keys]):  # all of them, whichever is right
                return ApiError(401, _no_key("API key", sent), code="invalid_api_key")
        return None

    def _too_long(self, headers: dict[bytes, bytes]) -> ApiError | None:
        said = headers.get(b"content-length", b"")
        return self._error() if said.isdigit() and int(said) > self._body_bytes else None

    def _error(self) -> ApiError:
        return ApiError(413, f"the body is longer than {self._body_bytes} bytes; send less")

    async def _read(self, receive: Receive) -> list[Message] | None:
        """The body, which need not say how long it is; None: it is too long."""
        messages, seen = [], 0
        while True:
            message = await receive()
            messages.append(message)
            seen += len(message.get("body", b""))
            if seen > self._body_bytes:
                return None
            if not message.get("more_body", False):
                return messages


def _again(messages: list[Message], receive: Receive) -> Receive:
    """Receives what has been read, then goes on."""
    waiting = iter(messages)

    async def again() -> Message:
        message = next(waiting, None)
        return await receive() if message is None else message

    return again


def _key_of(authorization: bytes) -> bytes:
    """What follows `Bearer`, which may be written in any case; or the bare key."""
    scheme, space, key = authorization.strip().partition(b" ")
    return key.strip() if space and scheme.lower() == b"bearer" else authorization.strip()


def _no_key(what: str, sent: bytes) -> str:
    got = f"a wrong {what}" if sent else f"no {what}"
    return f"expected the header Authorization: Bearer KEY, got {got}"


def _same(sent: bytes, key: str) -> bool:
    return secrets.compare_digest(sent, key.encode())
