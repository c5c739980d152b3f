"""The settings of the server, and the loading of its model."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from specjax import LLM, EngineConfig, SamplingParams
from specjax.checked_json import UnsupportedModelError
from specjax.command_line import ConfigError
from specjax.config.dtype import AUTO, ENGINE_DTYPES
from specjax.engine.settings import strategies_of
from specjax.hub import ModelNotFoundError, find_model
from specjax.kernels.names import ATTENTION, ATTENTION_DOC
from specjax.parallel.sharding import offer_cpu_devices
from specjax.schema import REQUIRED, Needs, at_least, option
from specjax.shipped import find_shipped
from specjax.speculation import SpeculationSettings, sections_of, speculation_rules
from specjax.spelling import Spell, dotted, spelled
from specjax.weights.matrix import ASKED

WARM_UP = {
    "none": (),
    "sampled": (SamplingParams(),),
    "filters": (SamplingParams(), SamplingParams(top_p=0.9)),
    "all": (
        SamplingParams(),
        SamplingParams(top_p=0.9),
        SamplingParams(logprobs=1, presence_penalty=0.1),
    ),
}


@dataclass
class SpeculationSection(SpeculationSettings):
    """The draft, the acceptance mode and the controller; a request may turn speculation off."""

    telemetry: bool | None = option(True, "count the causes for which drafts are rejected")

    def __post_init__(self):
        super().__post_init__()
        if self.exact_mode:
            raise ValueError(
                "speculation.exact_mode compares whole samples with plain decoding, and a server "
                "sends them as they grow; send each request twice, once with speculative=false, or "
                "use `specjax generate --exact-mode`"
            )
        strategies_of(self.spec(), self.control_config())


@dataclass
class EngineSection:
    """How the engine uses its devices."""

    max_batch: int = option(16, "most samples that run at once on each replica")
    max_len: int | None = option(
        None,
        "most tokens of a prompt and a sample together; null: the model's limit, or what fits into "
        "cache_bytes",
    )
    dtype: str = option(
        AUTO,
        "dtype of weights and arithmetic; auto: the checkpoint's on GPU and TPU, float32 on CPU",
        choices=ENGINE_DTYPES,
    )
    replicas: int = option(1, "number of engines with devices of their own and one queue")
    tp: int = option(1, "number of devices of each replica")
    chunk_tokens: int = option(16, "most tokens of a sample per chunk: fewer stream more smoothly")
    page_size: int | None = option(None, "positions per cache page; null: the engine chooses")
    cache_bytes: int | None = option(
        None,
        "bytes of all cache pages; null: enough for all slots at full length, but at most a "
        "sixteenth of a computer's memory, or what the weights leave of 0.9 of an accelerator's",
    )
    prefill_chunk: int = option(512, "most prompt tokens of one prefill program")
    products: str = option(
        "auto",
        "number format in which weights are multiplied: panels is specjax's own kernel for one CPU "
        "device",
        choices=ASKED,
        own=True,
    )
    attention: str = option("auto", ATTENTION_DOC, choices=ATTENTION, own=True)
    enforce_eager: bool = option(False, "run GPUs without CUDA graphs")
    max_stop_tokens: int = option(8, "most stop tokens of a request, the model's own included")
    warm_up: str = option(
        "all",
        "compile ahead for requests with a temperature (sampled), with top-k, top-p and min-p as "
        "well (filters), with any option (all), or not at all (none); a request that needs another "
        "program compiles it when it arrives, and others wait",
        choices=tuple(WARM_UP),
    )

    def config(self) -> EngineConfig:
        return EngineConfig(
            chunk_tokens=self.chunk_tokens,
            stretch=1,  # pieces of a stream are as large with few streams as with many
            page_size=self.page_size,
            cache_bytes=self.cache_bytes,
            prefill_chunk=self.prefill_chunk,
            products=self.products,
            attention=self.attention,
            enforce_eager=self.enforce_eager,
        )


@dataclass
class LimitSection:
    """Limits of a request; a request beyond a limit gets a 4xx error."""

    body_bytes: int = option(1 << 20, "most bytes of a request's body (413)")
    prompt_tokens: int | None = option(
        None, "most tokens of a prompt; null: what the model takes (400)"
    )
    prompts: int = option(64, "most prompts of one request to /v1/completions (400)")
    n: int = option(32, "most samples of a prompt (400)")
    max_tokens: int | None = option(None, "most generated tokens; null: what the model takes (400)")
    queue: int = option(256, "most waiting samples, beside the running ones (429)")


# Spells a setting of the library in messages as the user types it.
SPELL = dotted(
    {field.name: "engine" for field in dataclasses.fields(EngineSection)}
    | sections_of(SpeculationSection)
)


@dataclass
class ServeConfig:
    """The settings of `python -m serve`."""

    spell: ClassVar[Spell] = staticmethod(SPELL)
    rules: ClassVar[tuple[Needs, ...]] = speculation_rules("speculation")
    # Earlier names of keys.
    aliases: ClassVar[dict[str, str]] = {
        "speculation.controller": "speculation.control.controller",
        "speculation.strategies": "speculation.control.strategies",
        "speculation.verify_tokens": "speculation.spec_verify_tokens",
    }

    model: str = option(REQUIRED, "Hugging Face directory or id (also --model MODEL)")
    revision: str | None = option(
        None, "branch, tag or commit of a Hugging Face id (also --revision REVISION)"
    )
    family: str | None = option(
        None,
        "your own model family as module:attribute, for checkpoints of its model_type",
    )
    served_name: str | None = option(
        None, "the model's name in requests and responses; null: the directory's name, or the id"
    )
    chat_template: str | None = option(
        None, "Jinja template, or a file with one; null: the tokenizer's own"
    )
    generation_config: str = option(
        "auto",
        "source of the default sampling options: auto, the model's own generation_config.json; "
        "none; or a directory with such a file",
    )
    host: str = option("127.0.0.1", "address to listen on; 0.0.0.0: all addresses of the machine")
    port: int = option(8000, "port to listen on; 0 takes a free one and prints it")
    api_key: str | None = option(
        None, "key that clients must send, better set as SPECJAX_API_KEY; null: no key"
    )
    admin_key: str | None = option(
        None,
        "key for /update_weights, /update_draft_vocab, /sleep and /wake, better set as "
        "SPECJAX_ADMIN_KEY; null: these requests are refused",
    )
    allowed_origins: list[str] = option(
        ["*"], "origins of web pages whose scripts may read responses (CORS); *: all; []: none"
    )
    allowed_methods: list[str] = option(["*"], "HTTP methods that these scripts may use; *: all")
    allowed_headers: list[str] = option(["*"], "HTTP headers that these scripts may send; *: all")
    allow_credentials: bool = option(False, "whether these scripts may send cookies")
    drain_seconds: int = option(60, "seconds that requests may take to finish after SIGTERM")
    log_file: str | None = option(
        None, "file to which one JSON line per request is appended; null: none"
    )
    engine: EngineSection = option(EngineSection, "batches, caches and devices")
    speculation: SpeculationSection = option(
        SpeculationSection, "draft source, strategy and controller"
    )
    limits: LimitSection = option(LimitSection, "limits of a request")

    def __post_init__(self):
        at_least("limits", self.limits, body_bytes=1, prompts=1, n=1, queue=0)
        at_least("engine", self.engine, max_batch=1, replicas=1, tp=1, max_stop_tokens=1)
        at_least("", self, drain_seconds=0, port=0)
        if self.port > 65535:
            raise ValueError(f"port: expected at most 65535, got {self.port}")
        for name in ("api_key", "admin_key"):
            key = getattr(self, name)
            if key is not None and not key.strip():
                raise ValueError(
                    f"{name}: expected a key, got an empty text, which anyone can guess; leave it "
                    "out (null) for no key"
                )
        for name in ("prompt_tokens", "max_tokens"):
            if getattr(self.limits, name) is not None:
                at_least("limits", self.limits, **{name: 1})
        self.engine.config()

    @property
    def name(self) -> str:
        """The model's name in requests and responses."""
        local = find_shipped(self.model).is_dir()
        return self.served_name or (Path(self.model).resolve().name if local else self.model)


def load_llm(cfg: ServeConfig, spell: Spell = SPELL) -> LLM:
    """Loads the model and makes its engine; nothing has been compiled yet.

    Args:
      cfg: the settings of the server.
      spell: function that names settings in messages as the user types them.

    Raises:
      ConfigError: there is no such model, or the settings do not fit it. Its `__cause__` is the
        library's error, for callers that spell settings differently.
      CheckpointError, UnsupportedModelError: the model cannot be used.
    """
    try:
        path = find_model(cfg.model, cfg.revision)
    except ModelNotFoundError as error:
        raise ConfigError(f"model: found no model at {cfg.model}: {error}") from error
    engine, speculation = cfg.engine, cfg.speculation
    if engine.replicas * engine.tp > 1:
        offer_cpu_devices(engine.replicas * engine.tp)
    try:
        llm = LLM(
            path,
            spec=speculation.spec(),
            max_batch=engine.max_batch,
            max_len=engine.max_len,
            dtype=engine.dtype,
            max_stop_tokens=engine.max_stop_tokens,
            engine=engine.config(),
            control=speculation.control_config(),
            replicas=engine.replicas,
            tp=engine.tp,
            spell=spell,
            generation_config=cfg.generation_config,
            family=cfg.family,
        )
    except UnsupportedModelError:
        raise
    except ValueError as error:
        raise ConfigError(spelled(error, spell)) from error
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
    settings = dataclasses.asdict(cfg)
    return {name: value for name, value in settings.items() if not name.endswith("_key")}
