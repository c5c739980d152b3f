"""The app's OpenAPI document says what this very server takes: limits, strategies and errors."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel

from serve.settings import ServeConfig
from specjax import LLM
from specjax.control import OFF

BODIES = ("CompletionRequest", "ChatRequest")


class Problem(BaseModel):
    """What `ApiError.body` says."""

    message: str
    type: str
    param: str | None
    code: str | None


class Failure(BaseModel):
    """The body of every answer that is no success, OpenAI's."""

    error: Problem


ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": Failure, "description": "the request cannot be served as it is"},
    "5XX": {"model": Failure, "description": "the server cannot serve it"},
}


def describe(app: FastAPI, cfg: ServeConfig, llm: LLM) -> None:
    """Puts the limits of a server into its app's document."""
    plain = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            bodies = plain()["components"]["schemas"]
            for name in BODIES:
                _narrow(bodies[name]["properties"], cfg, llm)
        return app.openapi_schema

    app.openapi = openapi


def _narrow(fields: dict[str, Any], cfg: ServeConfig, llm: LLM) -> None:
    most = llm.max_len - 1  # a prompt has one token at least
    tokens = min(most, cfg.limits.max_tokens or most)
    bounds = dict.fromkeys(("max_tokens", "max_completion_tokens", "min_tokens"), tokens)
    for name, value in {**bounds, "n": cfg.limits.n, "best_of": cfg.limits.n}.items():
        for kind in _kinds(fields.get(name, {}), "integer"):
            kind["maximum"] = value
    for field in fields.values():
        for kind in _kinds(field, "integer"):
            if kind.get("title") == "Token":
                kind.pop("exclusiveMaximum")
                kind["maximum"] = llm.cfg.vocab_size - 1
    room = llm.max_stop_tokens - len(llm.cfg.eos_token_ids)
    for kind in _kinds(fields["stop_token_ids"], "array"):
        kind["maxItems"] = max(room, 0)
    for kind in fields.get("prompt", {}).get("anyOf", ()):
        if kind.get("items", {}).get("type") in ("string", "array"):  # not the ids of one prompt
            kind["maxItems"] = cfg.limits.prompts
    for kind in _kinds(fields["model"], "string"):
        kind["enum"] = [cfg.name]
    for kind in _kinds(fields["speculative"], "string"):
        kind["enum"] = sorted({OFF, *llm.engine.runner.plans})


def _kinds(schema: dict[str, Any], kind: str) -> list[dict[str, Any]]:
    """All that a value, or a part of it, may be, of one JSON type."""
    found = [schema] if schema.get("type") == kind else []
    inside = [*schema.get("anyOf", ()), *filter(None, [schema.get("items")])]
    return found + [each for part in inside for each in _kinds(part, kind)]
