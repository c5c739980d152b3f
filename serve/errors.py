"""Errors in OpenAI's shape: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

_NO_OBJECT = "expected a JSON object, with the header Content-Type: application/json"
_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error",
          429: "rate_limit_error"}  # fmt: skip


class ApiError(Exception):
    """An answer that is no success.

    Args:
      message: what was expected, what was got, what to do.
      param: the field that is wrong. code: OpenAI's word for it, where there is one.
    """

    def __init__(
        self, status: int, message: str, param: str | None = None, code: str | None = None
    ):
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    def body(self) -> dict:
        kind = _TYPES.get(self.status, "invalid_request_error")
        if self.status >= 500:
            kind = "server_error"
        # What a client sent may hold half a surrogate pair, which no answer can.
        message = str(self).encode("utf-8", "replace").decode()
        return {"error": {"message": message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        headers = {"Retry-After": "1"} if self.status in (429, 503) else None
        return JSONResponse(self.body(), self.status, headers)


def answer_errors(app: FastAPI) -> None:
    """Makes every error of the app, FastAPI's own included, one of OpenAI's shape."""

    @app.exception_handler(ApiError)
    async def known(request: Request, error: ApiError):
        return error.response()

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError):
        first = error.errors()[0]
        where = [str(part) for part in first["loc"] if part != "body"]
        # Where a value may be of several types, pydantic says which it tried: `list[str]`.
        where = where[:1] + [part for part in where[1:] if "[" not in part]
        if first["type"] == "json_invalid":  # it has a place in the text, and no field
            where = []
        message = f"{'.'.join(where)}: {first['msg']}" if where else _NO_OBJECT
        return ApiError(400, message, where[0] if where else None).response()

    @app.exception_handler(HTTPException)
    async def refused(request: Request, error: HTTPException):
        where = f"{request.method} {request.url.path}"
        return ApiError(error.status_code, f"{error.detail}: {where}").response()

    @app.exception_handler(Exception)
    async def failed(request: Request, error: Exception):
        return ApiError(500, f"{type(error).__name__} in the server; its log says more").response()
