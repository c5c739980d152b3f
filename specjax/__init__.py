"""specjax: speculative rollouts for reinforcement learning, in JAX, without changing a token."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from specjax.config import ModelConfig, RunConfig, SamplingParams, SpecConfig, Strategy
    from specjax.control import ControlConfig
    from specjax.engine.llm import LLM
    from specjax.engine.settings import EngineConfig

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "ControlConfig",
    "EngineConfig",
    "ModelConfig",
    "RunConfig",
    "SamplingParams",
    "SpecConfig",
    "Strategy",
]
# Each is imported when it is asked for: the engine needs jax and the tokenizer library, which
# configuration alone should not, and a program can import `specjax.interrupts` before all of it.
_HOMES = dict.fromkeys(__all__, "specjax.config") | {
    "LLM": "specjax.engine.llm",
    "ControlConfig": "specjax.control",
    "EngineConfig": "specjax.engine.settings",
}


def __getattr__(name: str):
    if name not in _HOMES:
        raise AttributeError(f"module 'specjax' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
