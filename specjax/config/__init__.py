"""Frozen configuration: models and how they are computed, drafts, speculation, sampling.

Everything here is hashable, so that it can be a static argument of a jitted function.
"""

from specjax.config.model import Layer, ModelConfig, RunConfig
from specjax.config.sampling import SamplingParams
from specjax.config.spec import ACCEPTANCE_MODES, SpecConfig
from specjax.config.strategy import DEFAULT_TREE_PATHS, OFF_NAMES, Strategy

__all__ = [
    "ACCEPTANCE_MODES",
    "DEFAULT_TREE_PATHS",
    "OFF_NAMES",
    "Layer",
    "ModelConfig",
    "RunConfig",
    "SamplingParams",
    "SpecConfig",
    "Strategy",
]
