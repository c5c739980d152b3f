"""Rows of the server."""

from __future__ import annotations

import functools
import json
import types
from unittest import mock

import uvicorn
from library_rows import other_kernel
from rows import PLACES, Reaches, Refused, Row, called_with, outcome, scratch
from starlette.testclient import TestClient
from train_rows import other_policy, speculation_rows

import serve.__main__ as program
from serve import settings
from serve.api import create_app
from serve.engine_thread import EngineThread
from serve.settings import ServeConfig, load_llm
from specjax import ControlConfig, EngineConfig, SpecConfig

# --- the model ------------------------------------------------------------------------------------


def told(cfg: ServeConfig, name: str):
    """What the model's engine is made with."""
    return called_with(settings, "LLM", lambda: load_llm(cfg)).arguments[name]


def spec(cfg: ServeConfig) -> SpecConfig:
    return told(cfg, "spec")


def engine(cfg: ServeConfig) -> EngineConfig:
    return told(cfg, "engine")


def control(cfg: ServeConfig) -> ControlConfig:
    return told(cfg, "control") or ControlConfig(controller="static")


def loaded(read):
    return lambda cfg: outcome(lambda: read(load_llm(cfg)))


def warmed(cfg: ServeConfig):
    """What is compiled before the server listens."""
    said = []
    llm = types.SimpleNamespace(
        notes=(), params={}, generation=(), max_len=8,
        warm_up=lambda requests, progress: said.append(requests),
        get_default_sampling_params=lambda: "its own",
        engine=types.SimpleNamespace(runner=types.SimpleNamespace(plans=["off"])),
    )  # fmt: skip
    scorer = types.SimpleNamespace(warm_up=lambda: said.append("prompts' logprobs"))
    with (
        mock.patch.object(program, "load_llm", lambda cfg: llm),
        mock.patch.object(program, "PromptScorer", lambda *_: scorer),
        mock.patch.object(program.gc, "freeze", lambda: None),
        mock.patch.object(program.sys, "setswitchinterval", lambda seconds: None),
    ):
        program._load(cfg)
    return said


def generation() -> str:
    path = scratch("generation")
    path.mkdir(exist_ok=True)
    (path / "generation_config.json").write_text(json.dumps({"temperature": 0.3}))
    return str(path)


# --- the application ------------------------------------------------------------------------------


@functools.cache
def llm():
    """Of default settings; nothing is compiled, and nothing runs."""
    return load_llm(ServeConfig(model=str(PLACES.policy)))


def asked(cfg: ServeConfig, path="/v1/models", method="GET", origin="http://a", **options):
    """Status, headers of CORS, and body of an answer; a request that is understood is `taken`."""
    headers = {"origin": origin, **options.pop("headers", {})}
    with mock.patch.object(EngineThread, "submit", mock.Mock(side_effect=ValueError("taken"))):
        client = TestClient(create_app(cfg, llm()), raise_server_exceptions=False)
        answer = client.request(method, path, headers=headers, **options)
    cors = {k: v for k, v in answer.headers.items() if k.startswith("access-control")}
    body = answer.json() if "json" in answer.headers.get("content-type", "") else answer.text
    if isinstance(body, dict):
        for model in body.get("data", ()):
            model.pop("created", None)
    return answer.status_code, cors, body


def completion(cfg: ServeConfig, **body):
    body = {"prompt": [3, 4, 5], "max_tokens": 4, **body}
    return asked(cfg, "/v1/completions", "POST", json=body)


def preflight(cfg: ServeConfig):
    wanted = {"access-control-request-method": "POST", "access-control-request-headers": "x-mine"}
    return asked(cfg, method="OPTIONS", headers=wanted)


def logged(cfg: ServeConfig):
    """Whether a request leaves a line in a file."""
    asked(cfg)
    return scratch("requests.jsonl").exists()


def listens(cfg: ServeConfig, name: str):
    """What the server that listens is told."""
    with (
        mock.patch.object(program, "_require_free", lambda cfg: None),
        mock.patch.object(program, "_load", lambda cfg: None),
        mock.patch("serve.api.create_app", lambda *_: None),
    ):
        bound = called_with(uvicorn, "Config", lambda: program.serve(cfg))
    return bound.arguments[name]


SERVE = {
    "model": Row(other_policy, loaded(lambda llm: llm.cfg)),
    "revision": Row("main", loaded(lambda llm: llm.cfg)),
    "family": Row("nowhere:FAMILY", loaded(lambda llm: llm.cfg)),
    "served_name": Row("mine", asked),
    "chat_template": Row("{{ 1 }}", loaded(lambda llm: llm.tokenizer.chat_template)),
    "generation_config": Row(generation, loaded(lambda llm: llm.generation)),
    "host": Row("0.0.0.0", lambda cfg: listens(cfg, "host")),
    "port": Row(8001, lambda cfg: listens(cfg, "port")),
    "drain_seconds": Row(5, lambda cfg: listens(cfg, "timeout_graceful_shutdown")),
    "api_key": Row("a key", asked),
    "admin_key": Row("a key", lambda cfg: asked(cfg, "/sleep", "POST")),
    "allowed_origins": Row(["http://b"], asked),
    "allowed_methods": Row(["GET"], preflight),
    "allowed_headers": Row(["x-other"], preflight),
    "allow_credentials": Row(True, asked),
    "log_file": Row(lambda: str(scratch("requests.jsonl")), logged),
    "engine.max_batch": Row(4, loaded(lambda llm: llm.engine.batch)),
    "engine.max_len": Row(40, loaded(lambda llm: llm.engine.max_len)),
    "engine.dtype": Row("bfloat16", loaded(lambda llm: llm.cfg.run.compute_dtype)),
    "engine.replicas": Row(2, loaded(lambda llm: len(getattr(llm.engine, "engines", [0])))),
    "engine.tp": Row(2, loaded(lambda llm: llm.engine.runner.mesh is None)),
    **{
        f"engine.{name}": Reaches(value, engine, EngineConfig, name)
        for name, value in {
            "chunk_tokens": 8,
            "page_size": 16,
            "cache_bytes": 2_000_000,
            "prefill_chunk": 32,
            "products": "xla",
            "attention": other_kernel,
            "enforce_eager": True,
        }.items()
    },
    "engine.max_stop_tokens": Row(9, loaded(lambda llm: llm.engine.limits)),
    "engine.warm_up": Row("sampled", warmed),
    **speculation_rows(
        "speculation",
        spec,
        control,
        telemetry=Reaches(False, spec, SpecConfig, "telemetry"),
        exact_mode=Refused(True, "use `specjax generate --exact-mode`"),
    ),
    "limits.body_bytes": Row(20, completion),
    "limits.prompt_tokens": Row(2, completion),
    "limits.prompts": Row(1, lambda cfg: completion(cfg, prompt=[[3], [4]])),
    "limits.n": Row(2, lambda cfg: completion(cfg, n=3)),
    "limits.max_tokens": Row(3, completion),
    "limits.queue": Row(0, lambda cfg: completion(cfg, n=20)),
}
BASE = {ServeConfig: {"model": lambda: str(PLACES.policy)}}
