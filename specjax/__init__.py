"""specjax: speculative rollouts for reinforcement learning, in JAX, without changing a token."""

from specjax.config import ModelConfig, SamplingParams, SpecConfig, Strategy

__version__ = "0.1.0"
__all__ = ["LLM", "ModelConfig", "SamplingParams", "SpecConfig", "Strategy"]


def __getattr__(name: str):
    if name == "LLM":  # the engine imports the tokenizer library; configuration alone should not
        from specjax.engine.llm import LLM

        return LLM
    raise AttributeError(f"module 'specjax' has no attribute {name!r}")
