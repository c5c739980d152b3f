"""The FastAPI application and its routes."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Any

import jax
from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel
from starlette.middleware.cors import CORSMiddleware

import specjax
from serve.admin import ADMIN_PATHS, Admin, weights_info
from serve.dashboard import document
from serve.engine_thread import EngineThread
from serve.errors import ApiError, answer_errors
from serve.generation import Generation, refused
from serve.metrics import Metrics
from serve.middleware import AccessLogMiddleware, AuthenticationMiddleware, BodyLimitMiddleware
from serve.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    DiskWeightsRequest,
    PauseRequest,
    TokenizeRequest,
    WeightsRequest,
)
from serve.responses import EventStream
from serve.settings import ServeConfig, public
from specjax import LLM


class Problem(BaseModel):
    """The object `error` of an error response."""

    message: str
    type: str
    param: str | None
    code: str | None


class Failure(BaseModel):
    """The body of every error response, in OpenAI's shape."""

    error: Problem


ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": Failure, "description": "the request cannot be served as it is"},
    "5XX": {"model": Failure, "description": "the server cannot serve it"},
}


def create_app(cfg: ServeConfig, llm: LLM) -> FastAPI:
    """Makes the application; its `state.thread` runs the engine as long as the application runs.

    Args:
      cfg: the settings of the server.
      llm: the model, from `load_llm`; no other code may use it afterwards.
    """
    deepest = max(plan.steps for plan in llm.engine.runner.plans.values())
    thread = EngineThread(llm, Metrics(cfg.name, deepest, cfg.metrics_prefix))
    thread.queue_seconds = cfg.limits.queue_seconds
    admin = Admin(thread)

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI):
        thread.start()
        ticks = asyncio.create_task(thread.dashboard.run())
        yield
        ticks.cancel()
        await thread.stop()

    app = FastAPI(
        title="specjax",
        version=specjax.__version__,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        responses=ERRORS,
    )
    app.state.thread, app.state.dashboard = thread, thread.dashboard
    answer_errors(app)
    _add_generation(app, cfg, thread)
    _add_views(app, cfg, thread)
    _add_page(app, cfg, thread)
    _add_admin(app, admin)
    # The middleware that is added last runs first.
    app.add_middleware(BodyLimitMiddleware, body_bytes=cfg.limits.body_bytes)
    app.add_middleware(
        AuthenticationMiddleware,
        api_key=cfg.api_key,
        admin_key=cfg.admin_key,
        admin_paths=ADMIN_PATHS,
    )
    if cfg.allowed_origins:  # before authentication: preflight requests of browsers have no key
        app.add_middleware(
            CORSMiddleware,
            allow_origins=cfg.allowed_origins,
            allow_methods=cfg.allowed_methods,
            allow_headers=cfg.allowed_headers,
            allow_credentials=cfg.allow_credentials,
        )
    paths = frozenset(route.path for route in app.routes if hasattr(route, "path"))
    app.add_middleware(AccessLogMiddleware, metrics=thread.metrics, paths=paths, file=cfg.log_file)
    return app


def _add_generation(app: FastAPI, cfg: ServeConfig, thread: EngineThread) -> None:
    generation, began = Generation(cfg, thread), int(time.time())
    model = {
        "id": cfg.name,
        "object": "model",
        "created": began,
        "owned_by": "specjax",
        "root": cfg.model,
        "max_model_len": thread.llm.max_len,
    }

    @app.post("/v1/completions")
    async def completions(body: CompletionRequest, request: Request):
        return await generation.create(body, request)

    @app.post("/v1/chat/completions")
    async def chat_completions(body: ChatRequest, request: Request):
        return await generation.create(body, request)

    @app.post("/tokenize")
    async def tokenize(body: TokenizeRequest):
        tokens = await generation.tokenize(body)
        response = {"count": len(tokens), "max_model_len": thread.llm.max_len, "tokens": tokens}
        if body.return_token_strs:
            response["token_strs"] = thread.llm.tokenizer.convert_ids_to_tokens(tokens)
        return response

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeRequest):
        generation.require_model(body.model)
        return {"prompt": generation.detokenize(body.tokens)}

    @app.get("/tokenizer_info")
    async def tokenizer_info():
        tokenizer = thread.llm.tokenizer
        if tokenizer is None:
            raise ApiError(404, "the model has no tokenizer; prompts are token ids")
        names = ("bos_token", "eos_token", "pad_token", "unk_token")
        return {
            "tokenizer_class": type(tokenizer).__name__,
            "model_max_length": thread.llm.max_len,
            "vocab_size": len(tokenizer),
            **{name: getattr(tokenizer, name, None) for name in names},
            "chat_template": getattr(tokenizer, "chat_template", None),
        }

    @app.get("/v1/models")
    async def models():
        return {"object": "list", "data": [model]}

    @app.get("/v1/models/{name:path}")
    async def one_model(name: str):
        generation.require_model(name)
        return model


def _add_views(app: FastAPI, cfg: ServeConfig, thread: EngineThread) -> None:
    metrics = thread.metrics

    @app.get("/health")
    async def health():
        now = metrics.snapshot
        body = {"status": thread.state, "alarms": list(now.alarms), "programs": now.programs}
        if thread.failure is None:
            return body
        return JSONResponse({**body, "error": thread.failure}, 503)

    @app.get("/ping")
    @app.post("/ping", operation_id="post_ping")
    async def ping():
        return await health()

    @app.get("/version")
    async def version():
        return {"version": specjax.__version__}

    @app.get("/metrics")
    async def read_metrics():
        return Response(metrics.text(), media_type=CONTENT_TYPE_LATEST)

    @app.get("/server_info")
    async def server_info():
        now, plans = metrics.snapshot, thread.llm.engine.runner.plans
        return {
            "version": specjax.__version__,
            "jax": jax.__version__,
            "model": cfg.name,
            "max_model_len": thread.llm.max_len,
            "settings": public(cfg),
            "strategies": list(plans),
            "programs": now.programs,
            "weights": weights_info(thread.llm),
            "num_queued_reqs": now.waiting - sum(replica.waiting for replica in now.replicas),
            # One entry per replica, with SGLang's names.
            "internal_states": [
                {
                    "speculative_num_steps": plans[replica.strategy].steps,
                    "avg_spec_accept_length": metrics.accept_length(index),
                    "strategy": replica.strategy,
                    "num_running_reqs": replica.running,
                    "num_waiting_reqs": replica.waiting,
                    "asleep": thread.asleep,
                }
                for index, replica in enumerate(now.replicas)
            ],
        }


def _add_page(app: FastAPI, cfg: ServeConfig, thread: EngineThread) -> None:
    """Adds the page at `/`, and its data as server-sent events at `/live`."""
    html, policy = document(cfg.api_key is not None)
    headers = {
        "Content-Security-Policy": policy,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }
    dashboard = thread.dashboard

    def server_state() -> dict:
        is_draining = dashboard.is_draining() and thread.failure is None
        return {
            "model": cfg.name,
            "state": "draining" if is_draining else thread.state,
            "error": thread.failure,
            "outstanding": thread.outstanding,
        }

    def close() -> None:
        dashboard.viewers -= 1

    @app.get("/", include_in_schema=False)
    async def page():
        return HTMLResponse(html, headers=headers)

    @app.get("/live", include_in_schema=False)
    async def events():
        dashboard.viewers += 1
        return EventStream(dashboard.events(server_state), close)


def _add_admin(app: FastAPI, admin: Admin) -> None:
    @app.post("/update_weights")
    async def update_weights(body: WeightsRequest):
        with refused():
            return await admin.update(body)

    @app.post("/update_weights_from_disk")
    async def update_weights_from_disk(body: DiskWeightsRequest):
        try:
            with refused():
                return await admin.update_from_disk(body)
        except ApiError as error:
            failed = {"success": False, "message": str(error), "num_paused_requests": 0}
            return JSONResponse({**failed, **error.body()}, error.status)

    @app.post("/pause_generation")
    async def pause_generation(body: PauseRequest | None = None):
        with refused():
            return await admin.pause(body or PauseRequest())

    @app.post("/continue_generation")
    async def continue_generation():
        with refused():
            return await admin.resume()

    @app.get("/flush_cache")
    @app.post("/flush_cache", operation_id="post_flush_cache")
    async def flush_cache():
        with refused():
            return await admin.flush_cache()

    @app.post("/sleep")
    async def sleep(level: int = 1):
        if level != 1:
            message = f"level: expected 1, which keeps the weights in host memory, got {level}"
            raise ApiError(400, message, "level")
        with refused():
            return await admin.sleep()

    @app.post("/wake")
    @app.post("/wake_up", operation_id="wake_up")
    async def wake():
        with refused():
            return await admin.wake()

    @app.get("/is_sleeping")
    async def is_sleeping():
        return {"is_sleeping": admin.is_asleep}
