"""Every setting of the server, and the model that they describe."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from specjax import LLM, ControlConfig, EngineConfig, SamplingParams, SpecConfig
from specjax.command_line import ConfigError, find_shipped
from specjax.config.dtype import AUTO, ENGINE_DTYPES
from specjax.config.spec import ACCEPTANCE_MODES, DRAFT_SOURCES
from specjax.config.strategy import OFF_NAMES
from specjax.control.config import CONTROLLERS
from specjax.hub import ModelNotFoundError, find_model
from specjax.kernels import panels
from specjax.models.hf import UnsupportedModelError
from specjax.schema import REQUIRED, Needs, at_least, option
from specjax.sharding import offer_cpu_devices
from specjax.spelling import Say, dotted, spelled

WARM_UP = {
    "none": (),
    "sampled": (SamplingParams(),),
    "filters": (SamplingParams(), SamplingParams(top_p=0.9)),
    "all": (
        SamplingParams(),
        SamplingParams(top_p=0.9),
        SamplingParams(top_logprobs=1, presence_penalty=0.1),
    ),
}


@dataclass
class SpeculationSection:
    """How to speculate; requests may opt out."""

    strategy: str = option("4_1_5", "what a round drafts; off: no speculation")
    acceptance: str = option("coupled", "acceptance mode", choices=ACCEPTANCE_MODES)
    source: str = option(
        "auto",
        "what drafts; auto: the head that the checkpoint holds, else n-grams under a controller "
        "that may choose off",
        choices=DRAFT_SOURCES,
    )
    head: str = option(
        "checkpoint",
        "the model's own head, or a random one, to be updated; random: source=auto is head",
        choices=("checkpoint", "random"),
    )
    draft_model: str | None = option(
        None, "Hugging Face directory or id of a draft model; with it source=auto is model"
    )
    verify_tokens: int = option(48, "tree rows at most; a larger dynamic tree is cut")
    invariant: bool = option(False, "bits equal with and without speculation; slower")
    controller: str | None = option(
        None,
        "who chooses the strategy while running; null: always `strategy`, but goodput where "
        "source=auto takes n-grams",
        choices=(None, *CONTROLLERS),
    )
    strategies: list[str] = option(
        [], "for the controller to choose from; none: `off` and `strategy`"
    )
    telemetry: bool = option(True, "count why drafts are rejected")

    def spec(self) -> SpecConfig:
        return SpecConfig(
            strategy=self.strategy,
            acceptance=self.acceptance,
            source=self.source,
            head=self.head,
            draft_model=self.draft_model,
            spec_verify_tokens=self.verify_tokens,
            invariant=self.invariant,
            telemetry=self.telemetry,
        )

    def control(self) -> ControlConfig | None:
        if self.controller is None:
            return None
        return ControlConfig(
            controller=self.controller,
            strategies=tuple(self.strategies) or ("off", self.strategy),
            initial=self.strategy if self.controller == "static" else None,
        )


@dataclass
class EngineSection:
    """How the engine uses its devices."""

    max_batch: int = option(16, "samples that run at once, on each replica")
    max_len: int | None = option(
        None, "prompt and generated tokens of a sample at most; null: the model's limit, up to 2048"
    )
    dtype: str = option(
        AUTO,
        "of weights and arithmetic; auto: the checkpoint's on GPU and TPU, float32 on CPU",
        choices=ENGINE_DTYPES,
    )
    replicas: int = option(1, "engines with devices of their own, fed from one queue")
    tp: int = option(1, "devices of each replica")
    chunk_tokens: int = option(
        16, "tokens per sample between two looks of the host at most: fewer stream more smoothly"
    )
    page_size: int | None = option(None, "positions per cache page; null: the engine chooses")
    cache_bytes: int | None = option(
        None, "memory for all cache pages; null: what all slots need at full length"
    )
    prefill_chunk: int = option(512, "prompt tokens that are read at a time")
    products: str = option(
        "auto",
        "by what weights are multiplied: panels, specjax's own kernel on one CPU device; xla",
        choices=panels.ASKED,
    )
    max_stop_tokens: int = option(8, "stop tokens of a request at most, the model's own included")
    warm_up: str = option(
        "all",
        "compile ahead for requests with a temperature (sampled), with top-k, top-p and min-p as "
        "well (filters), with any option (all), or nothing (none); a request that asks for more "
        "compiles when it comes, and others wait",
        choices=tuple(WARM_UP),
    )

    def config(self) -> EngineConfig:
        return EngineConfig(
            chunk_tokens=self.chunk_tokens,
            stretch=1,  # or few streams would come in larger pieces than many
            page_size=self.page_size,
            cache_bytes=self.cache_bytes,
            prefill_chunk=self.prefill_chunk,
            products=self.products,
        )


@dataclass
class LimitSection:
    """What a request may ask for; beyond it is a 4xx."""

    body_bytes: int = option(1 << 20, "of a request's body (413)")
    prompt_tokens: int | None = option(None, "of a prompt; null: what the model takes (400)")
    prompts: int = option(64, "prompts of one request to /v1/completions (400)")
    n: int = option(32, "samples of a prompt (400)")
    max_tokens: int | None = option(None, "generated tokens; null: what the model takes (400)")
    queue: int = option(256, "samples that wait beside those that run (429)")


# How a client's or an operator's setting is typed here.
SAY = dotted(
    {
        **dict.fromkeys(
            ("strategy", "acceptance", "source", "head", "draft_model", "spec_verify_tokens",
             "invariant", "controller", "strategies"),
            "speculation",
        ),
        **{field.name: "engine" for field in dataclasses.fields(EngineSection)},
    },
    {"spec_verify_tokens": "verify_tokens"},
)  # fmt: skip


@dataclass
class ServeConfig:
    """What `python -m serve` is told."""

    say: ClassVar[Say] = staticmethod(SAY)
    rules: ClassVar[tuple[Needs, ...]] = (
        Needs(
            ("speculation.*", "!speculation.strategy", "!speculation.telemetry"),
            lambda v: str(v["speculation.strategy"]).lower() not in OFF_NAMES,
            "speculation.strategy=off decodes plainly; leave out one of them",
        ),
        Needs(
            ("speculation.strategies",),
            lambda v: v["speculation.controller"] is not None,
            "no controller chooses among them; set speculation.controller=goodput, or leave it out",
        ),
        Needs(
            ("speculation.strategy",),
            lambda v: (
                v["speculation.controller"] in (None, "static")
                or not v["speculation.strategies"]
                or v["speculation.strategy"] in v["speculation.strategies"]
            ),
            "[speculation.controller] chooses among [speculation.strategies]; list it there, or "
            "leave it out",
            unless="off",
        ),
        Needs(
            ("speculation.strategies",),
            lambda v: v["speculation.controller"] not in ("static", "ema"),
            "[speculation.controller] does not choose among them; leave it out",
        ),
        Needs(
            ("speculation.head",),
            lambda v: (
                v["speculation.source"] in ("auto", "head") and v["speculation.draft_model"] is None
            ),
            "[speculation.source] with [speculation.draft_model] drafts without a head; leave out "
            "one of them",
        ),
    )

    model: str = option(REQUIRED, "Hugging Face directory or id (also --model MODEL)")
    revision: str | None = option(
        None, "branch, tag or commit of a Hugging Face id (also --revision REVISION)"
    )
    served_name: str | None = option(
        None, "the model's name in requests and answers; null: that of the directory, or the id"
    )
    chat_template: str | None = option(
        None, "Jinja template, or a file with one; null: the tokenizer's own"
    )
    generation_config: str = option(
        "auto",
        "whose sampling keys are the defaults of requests: auto, the model's own "
        "generation_config.json; none; or a directory with one",
    )
    host: str = option("127.0.0.1", "address to listen on; 0.0.0.0 is all of the machine's")
    port: int = option(8000, "port to listen on; 0 takes a free one and prints it")
    api_key: str | None = option(
        None, "that clients must send; better in the environment: SPECJAX_API_KEY; null: none"
    )
    admin_key: str | None = option(
        None,
        "for /update_weights, /sleep and /wake; better in the environment: SPECJAX_ADMIN_KEY; "
        "null: they are refused",
    )
    allowed_origins: list[str] = option(
        ["*"], "web pages' origins whose scripts may read answers (CORS); *: all; []: none"
    )
    allowed_methods: list[str] = option(["*"], "of HTTP, that these scripts may use; *: all")
    allowed_headers: list[str] = option(["*"], "that these scripts may send; *: all")
    allow_credentials: bool = option(False, "whether these scripts may send cookies")
    drain_seconds: int = option(60, "that requests may take to finish after SIGTERM")
    log_file: str | None = option(None, "append one JSON line per request; null: none")
    engine: EngineSection = option(EngineSection, "batches, caches and devices")
    speculation: SpeculationSection = option(SpeculationSection, "what drafts and how")
    limits: LimitSection = option(LimitSection, "of requests")

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
                    f"{name}: expected a key, got an empty text, which everybody would know; leave "
                    "it out (null) if there is to be none"
                )
        for name in ("prompt_tokens", "max_tokens"):
            if getattr(self.limits, name) is not None:
                at_least("limits", self.limits, **{name: 1})
        self.engine.config()
        if self.speculation.spec().is_off and self.speculation.controller is not None:
            raise ValueError(
                "speculation.controller chooses between strategies, and speculation.strategy=off "
                "says that there is no speculation; leave one of them out"
            )
        self.speculation.control()

    @property
    def name(self) -> str:
        """Of the model, in requests and answers."""
        local = find_shipped(self.model).is_dir()
        return self.served_name or (Path(self.model).resolve().name if local else self.model)


def load_llm(cfg: ServeConfig, say: Say = SAY) -> LLM:
    """The model with its engine; nothing has been compiled yet.

    Args:
      say: names settings where they are typed.

    Raises:
      ConfigError: there is no such model, or the settings do not fit it. Its cause is what the
        library raised, for those who have the settings from somewhere else.
      CheckpointError, UnsupportedModelError: it cannot be used.
    """
    try:
        path = find_model(cfg.model, cfg.revision)
    except ModelNotFoundError as error:
        raise ConfigError(f"model: found none at {cfg.model}: {error}") from error
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
            control=speculation.control(),
            replicas=engine.replicas,
            tp=engine.tp,
            say=say,
            generation_config=cfg.generation_config,
        )
    except UnsupportedModelError:
        raise
    except ValueError as error:
        raise ConfigError(spelled(error, say)) from error
    if cfg.chat_template is not None:
        if llm.tokenizer is None:
            raise ConfigError("chat_template: the model has no tokenizer to give it to")
        llm.tokenizer.chat_template = _template(cfg.chat_template)
    return llm


def _template(said: str) -> str:
    """The template itself, or the content of the file."""
    if "{" in said:
        return said
    file = find_shipped(said)
    if not file.is_file():
        raise ConfigError(f"chat_template: expected a Jinja template or a file, got {said!r}")
    return file.read_text(encoding="utf-8")


def public(cfg: ServeConfig) -> dict:
    """The settings without what is secret."""
    settings = dataclasses.asdict(cfg)
    return {name: value for name, value in settings.items() if not name.endswith("_key")}
