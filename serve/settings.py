"""The settings of the server, and the loading of its model."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from serve.model import ModelSettings, Slots
from specjax import LLM, EngineConfig, SamplingParams
from specjax.checked_json import UnsupportedModelError
from specjax.command_line import ConfigError
from specjax.control.config import Speculation
from specjax.hub import ModelNotFoundError, find_model
from specjax.parallel.sharding import offer_cpu_devices
from specjax.settings import named_in, option, part, values_of
from specjax.shipped import find_shipped
from specjax.tool_calls import CALLS, REASONING

WARM_UP = {
    "none": (),
    "sampled": (SamplingParams(),),
    "filters": (SamplingParams(), SamplingParams(top_p=0.9)),
    "all": (SamplingParams(), SamplingParams(logprobs=1, presence_penalty=0.1)),
}


@dataclass(frozen=True)
class SpeculationSection(Speculation):
    """The draft, the acceptance mode and the controller; a request may turn speculation off.

    Attributes:
      telemetry: count the causes for which drafts are rejected.
    """

    telemetry: bool = option(True, needs="speculates")


@dataclass(frozen=True)
class EngineSection(Slots, EngineConfig):
    """How the engine uses its devices.

    Attributes:
      chunk_tokens: most tokens of a sample per chunk: fewer stream more smoothly.
      warm_up: compile ahead for requests with a temperature (sampled), with top-k, top-p and min-p
        as well (filters), with any option (all), or not at all (none); a request that needs another
        program compiles it when it arrives, and others wait.
    """

    max_batch: int = option(16, least=1)
    chunk_tokens: int = 16
    enable_prefix_caching: bool = True
    stretch: int = option(1, internal=True)  # pieces of a stream are as large with few streams
    order: str = option("fifo", internal=True)
    warm_up: str = option("all", choices=tuple(WARM_UP))


@dataclass
class LimitSection:
    """Limits of a request; a request beyond a limit gets a 4xx error.

    Attributes:
      body_bytes: most bytes of a request's body (413).
      prompt_tokens: most tokens of a prompt; null: what the model takes (400).
      prompts: most prompts of one request to /v1/completions (400).
      n: most samples of a prompt (400).
      max_tokens: most generated tokens; null: what the model takes (400).
      queue: most waiting samples, beside the running ones (429).
      queue_seconds: seconds that a request waits for a slot at most (503); null: any time.
    """

    body_bytes: int = option(1 << 20, least=1)
    prompt_tokens: int | None = option(None, least=1)
    prompts: int = option(64, least=1)
    n: int = option(32, least=1)
    max_tokens: int | None = option(None, least=1)
    queue: int = option(256, least=0)
    queue_seconds: float | None = option(None, least=0)


@dataclass(frozen=True)
class ServeConfig(ModelSettings):
    """The settings of `python -m serve`.

    Attributes:
      served_name: the model's name in requests and responses; null: the directory's name, or the
        id.
      host: address to listen on; 0.0.0.0: all addresses of the machine.
      port: port to listen on; 0 takes a free one and prints it.
      tool_call_parser: format in which the model calls tools, see `specjax.tool_calls`; null: that
        of the chat template.
      reasoning_parser: format of reasoning that is to be `reasoning_content`; null: it is text,
        but for gpt-oss.
      api_key: key that clients must send, better set as SPECJAX_API_KEY; null: no key.
      admin_key: key for requests that change weights or stop the server, better set as
        SPECJAX_ADMIN_KEY; null: these requests are refused.
      api_key_file, admin_key_file: files that hold these keys.
      ssl_keyfile, ssl_certfile: private key and certificate for HTTPS; null: HTTP.
      allowed_origins: origins of web pages whose scripts may read responses (CORS); *: all; []:
        none.
      allowed_methods: HTTP methods that these scripts may use; *: all.
      allowed_headers: HTTP headers that these scripts may send; *: all.
      allow_credentials: whether these scripts may send cookies.
      drain_seconds: seconds that requests may take to finish after SIGTERM.
      metrics_prefix: prefix of the names in /metrics; `vllm` adds vLLM's labels, too.
      log_file: file to which one JSON line per request is appended; null: none.
      engine: batches, caches and devices.
      speculation: draft source, strategy and controller.
      limits: limits of a request.
    """

    unread: ClassVar[Mapping[str, str]] = {
        "speculation.exact_mode": "it compares whole samples with plain decoding, and a server "
        "sends them as they grow; send each request twice, once with speculative=false, or use "
        "`specjax generate --exact-mode`",
    }

    served_name: str | None = None
    host: str = "127.0.0.1"
    port: int = option(8000, least=0, below=65536)
    tool_call_parser: str | None = option(None, choices=(*CALLS, None))
    reasoning_parser: str | None = option(None, choices=(*REASONING, None))
    api_key: str | None = None
    admin_key: str | None = None
    api_key_file: str | None = None
    admin_key_file: str | None = None
    ssl_keyfile: str | None = None
    ssl_certfile: str | None = None
    allowed_origins: list[str] = option(["*"])
    allowed_methods: list[str] = option(["*"])
    allowed_headers: list[str] = option(["*"])
    allow_credentials: bool = False
    drain_seconds: int = option(60, least=0)
    metrics_prefix: str = option("specjax", choices=("specjax", "vllm"))
    log_file: str | None = None
    engine: EngineSection = option(EngineSection)
    speculation: SpeculationSection = option(SpeculationSection)
    limits: LimitSection = option(LimitSection)

    def __post_init__(self):
        for name in ("api_key", "admin_key"):
            key = getattr(self, name)
            if key is not None and not key.strip():
                raise ValueError(
                    f"{name}: expected a key, got an empty text, which anyone can guess; leave it "
                    "out (null) for no key"
                )

    @property
    def name(self) -> str:
        """The model's name in requests and responses."""
        local = find_shipped(self.model).is_dir()
        return self.served_name or (Path(self.model).resolve().name if local else self.model)


SECTIONS = {"engine": EngineSection, "speculation": SpeculationSection}


def load_llm(cfg: ServeConfig, sections: Mapping[str, type] = SECTIONS) -> LLM:
    """Loads the model and makes its engine; nothing has been compiled yet.

    Args:
      cfg: the settings of the server.
      sections: sections of the user's keys, for messages.

    Raises:
      ConfigError: there is no such model, or the settings do not fit it.
      CheckpointError, UnsupportedModelError: the model cannot be used.
    """
    try:
        path = find_model(cfg.model, cfg.revision)
    except ModelNotFoundError as error:
        raise ConfigError(f"model: found no model at {cfg.model}: {error}") from error
    slots, speculation = dataclasses.asdict(part(Slots, cfg.engine)), cfg.speculation
    if cfg.engine.replicas * cfg.engine.tp > 1:
        offer_cpu_devices(cfg.engine.replicas * cfg.engine.tp)
    try:
        llm = LLM(
            path,
            spec=speculation.spec(),
            engine=part(EngineConfig, cfg.engine),
            control=speculation.control_config(),
            **slots,
            generation_config=cfg.generation_config,
            family=cfg.family,
        )
    except UnsupportedModelError:
        raise
    except ValueError as error:
        raise ConfigError(named_in(sections, error)) from error
    if cfg.chat_template is not None:
        if llm.tokenizer is None:
            raise ConfigError("chat_template: the model has no tokenizer, which would apply it")
        llm.tokenizer.chat_template = _template(cfg.chat_template)
    return llm


def _template(setting: str) -> str:
    """The template in the setting, or in the file that it names."""
    if "{" in setting:
        return setting
    file = find_shipped(setting)
    if not file.is_file():
        raise ConfigError(f"chat_template: expected a Jinja template or a file, got {setting!r}")
    return file.read_text(encoding="utf-8")


def public(cfg: ServeConfig) -> dict:
    """The settings without the keys of clients and administrators."""
    return {name: v for name, v in values_of(cfg).items() if not name.endswith("_key")}
