"""The routes. What they do is in `generation` and `admin`."""

from __future__ import annotations

import asyncio
import contextlib
import time

import jax
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.middleware.cors import CORSMiddleware

import specjax
from serve.admin import PATHS, Admin, weights_info
from serve.engine_thread import EngineDead, EngineThread
from serve.errors import ApiError, answer_errors
from serve.generation import Generation
from serve.guard import Guard
from serve.log import AccessLog
from serve.metrics import Metrics
from serve.page import add_page
from serve.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
    WeightsRequest,
)
from serve.schema import ERRORS, describe
from serve.settings import ServeConfig, public
from specjax import LLM


def create_app(cfg: ServeConfig, llm: LLM) -> FastAPI:
    """The application; its `state.thread` runs the engine while the application does.

    Args:
      llm: of `load_llm`; nobody else may use it from now on.
    """
    thread = EngineThread(llm, Metrics(cfg.name))
    admin = Admin(thread)

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI):
        thread.start()
        ticks = asyncio.create_task(thread.live.run())
        yield
        ticks.cancel()
        await thread.stop()

    version = specjax.__version__
    app = FastAPI(
        title="specjax",
        version=version,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        responses=ERRORS,
    )
    app.state.thread, app.state.live = thread, thread.live
    answer_errors(app)
    describe(app, cfg, llm)
    _add_generation(app, cfg, thread)
    _add_views(app, cfg, thread)
    add_page(app, cfg, thread)
    _add_admin(app, admin)
    app.add_middleware(
        Guard,
        api_key=cfg.api_key,
        admin_key=cfg.admin_key,
        admin=PATHS,
        body_bytes=cfg.limits.body_bytes,
    )
    if cfg.allowed_origins:  # before the guard: browsers ask without a key what they may send
        app.add_middleware(
            CORSMiddleware,
            allow_origins=cfg.allowed_origins,
            allow_methods=cfg.allowed_methods,
            allow_headers=cfg.allowed_headers,
            allow_credentials=cfg.allow_credentials,
        )
    paths = frozenset(route.path for route in app.routes if hasattr(route, "path"))
    app.add_middleware(AccessLog, metrics=thread.metrics, paths=paths, file=cfg.log_file)
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
        return await generation.answer(body, request)

    @app.post("/v1/chat/completions")
    async def chat_completions(body: ChatRequest, request: Request):
        return await generation.answer(body, request)

    @app.post("/tokenize")
    async def tokenize(body: TokenizeRequest):
        tokens = await generation.tokenize(body)
        answer = {"count": len(tokens), "max_model_len": thread.llm.max_len, "tokens": tokens}
        if body.return_token_strs:
            answer["token_strs"] = thread.llm.tokenizer.convert_ids_to_tokens(tokens)
        return answer

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
        status, state = 200, "asleep" if thread.asleep else "ok"
        if thread.error is not None:
            status, state = 503, "dead"
        said = {"status": state, "alarms": list(metrics.snapshot.alarms)}
        if thread.error is not None:
            said["error"] = f"{type(thread.error).__name__}: {thread.error}"
        return JSONResponse(said, status)

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


def _add_admin(app: FastAPI, admin: Admin) -> None:
    async def answered(work) -> dict:
        try:
            return await work
        except EngineDead as error:
            raise ApiError(500, str(error)) from error

    @app.post("/update_weights")
    async def update_weights(body: WeightsRequest):
        return await answered(admin.update(body))

    @app.post("/sleep")
    async def sleep():
        return await answered(admin.sleep())

    @app.post("/wake")
    async def wake():
        return await answered(admin.wake())
