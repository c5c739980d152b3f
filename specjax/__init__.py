"""specjax: speculative rollouts for reinforcement learning, in JAX, without changing a token."""

from specjax.config import ModelConfig, SamplingParams, SpecConfig, Strategy
from specjax.control import ControlConfig

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "ControlConfig",
    "EngineConfig",
    "ModelConfig",
    "SamplingParams",
    "SpecConfig",
    "Strategy",
]


def __getattr__(name: str):
    # The engine imports the tokenizer library; configuration alone should not.
    if name == "LLM":
        from specjax.engine.llm import LLM

        return LLM
    if name == "EngineConfig":
        from specjax.engine.settings import EngineConfig

        return EngineConfig
    raise AttributeError(f"module 'specjax' has no attribute {name!r}")
