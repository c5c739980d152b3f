"""Errors in OpenAI's shape: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from specjax.spelling import nearest

_NO_OBJECT = "expected a JSON object, with the header Content-Type: application/json"
_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error",
          429: "rate_limit_error"}  # fmt: skip


class ApiError(Exception):
    """An error response.

    Args:
      status: HTTP status.
      message: text that says what was expected, what was got and what to do.
      param: name of the field that is wrong.
      code: OpenAI's code of the error, if it has one.
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
        # A client's text may hold half a surrogate pair, which cannot be encoded.
        message = str(self).encode("utf-8", "replace").decode()
        return {"error": {"message": message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        headers = {"Retry-After": "1"} if self.status in (429, 503) else None
        return JSONResponse(self.body(), self.status, headers)


def answer_errors(app: FastAPI) -> None:
    """Gives every error of the app, FastAPI's own included, OpenAI's shape."""

    @app.exception_handler(ApiError)
    async def known(request: Request, error: ApiError):
        return error.response()

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError):
        where, problem = _explain(error.errors())
        message = f"{'.'.join(where)}: {problem}" if where else _NO_OBJECT
        return ApiError(400, message, where[0] if where else None).response()

    @app.exception_handler(HTTPException)
    async def refused(request: Request, error: HTTPException):
        where = f"{request.method} {request.url.path}"
        return ApiError(error.status_code, f"{error.detail}: {where}").response()

    @app.exception_handler(Exception)
    async def failed(request: Request, error: Exception):
        return ApiError(500, f"{type(error).__name__} in the server; its log says more").response()


# Pydantic's names of errors for a wrong JSON type, and the expected type.
_KINDS = {
    "string_type": "a string", "int_type": "an integer", "int_from_float": "an integer",
    "float_type": "a number", "bool_type": "true or false", "list_type": "a list",
    "dict_type": "an object", "model_type": "an object", "model_attributes_type": "an object",
}  # fmt: skip

KNOWN_FIELDS: set[str] = set()  # the fields of all bodies, to suggest one for an unknown field
UNSUPPORTED_VALUE = "unsupported_value"  # the type of pydantic errors that `protocol` raises
_TOO_SHORT = {
    "string_too_short": "text of at least one character",
    "too_short": "a list of at least one entry",
}


def _explain(errors: Sequence[dict[str, Any]]) -> tuple[list[str], str]:
    """The path of the wrong field, and a text about the expected and the given value.

    If a field may have several types, pydantic has an error for each type. If the value has one of
    these types, the text is about the error inside the value; else it names all types.
    """
    first = errors[0]
    if first["type"] == "json_invalid":  # its location is a character, not a field
        return [], ""
    field = _fields(first["loc"])[:1]
    of_field = [error for error in errors if _fields(error["loc"])[:1] == field]
    outermost = min(len(_fields(error["loc"])) for error in of_field)
    inside = [e for e in of_field if e["type"] not in _KINDS or len(_fields(e["loc"])) > outermost]
    if len(of_field) > 1 and inside:
        # The first error of the type under which the most entries of a list are valid.
        first = max(inside, key=lambda error: (_indices(error), error["type"] not in _KINDS))
    elif len(of_field) > 1:
        kinds = dict.fromkeys(_KINDS[error["type"]] for error in of_field)
        return _fields(first["loc"]), f"expected {' or '.join(kinds)}, got {short(first['input'])}"
    where, got = _fields(first["loc"]), short(first["input"])
    if first["type"] in _KINDS:
        return where, f"expected {_KINDS[first['type']]}, got {got}"
    if first["type"] == "missing":
        return where, "is required, and missing"
    if first["type"] == "extra_forbidden":
        hint = nearest(str(first["loc"][-1]), KNOWN_FIELDS, 0.7)
        return where, f"there is no such field here, got {got}{hint}"
    if first["type"] == UNSUPPORTED_VALUE:
        return where, first["msg"]
    if first["type"] in _TOO_SHORT and first["ctx"]["min_length"] == 1:
        return where, f"expected {_TOO_SHORT[first['type']]}, got {got}"
    if first["type"] == "value_error":  # a validator of `protocol` wrote the message
        return where, str(first["ctx"]["error"])
    message = first["msg"].replace("Input should", "it should")
    for words in (" after validation", f", not {first.get('ctx', {}).get('actual_length')}"):
        message = message.replace(words, "")
    return where, f"{message}, got {got}"


def _fields(loc: Sequence[str | int]) -> list[str]:
    """The names and indices of a location, without the types that pydantic adds to it."""
    parts = [part for part in loc if part != "body"]
    return [str(part) for i, part in enumerate(parts) if not (i and _is_type(part))]


def _is_type(part: str | int) -> bool:
    types = r"str|bool|int|float|.*\[.*|(?:constrained|function)-.*"
    return isinstance(part, str) and re.fullmatch(types, part) is not None


def _indices(error: dict[str, Any]) -> list[int]:
    """The list indices of an error's location."""
    return [part for part in error["loc"] if isinstance(part, int)]


def short(value: Any) -> str:
    """A client's value as JSON, cut to 80 characters for a message."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 80 else f"{text[:77]}..."
