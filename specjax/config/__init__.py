"""Frozen configuration: what a model is, what to draft, how to speculate, how to sample.

Everything here is hashable, so that it can be a static argument of a jitted function.
"""

from specjax.config.model import Layer, ModelConfig
from specjax.config.sampling import SamplingParams
from specjax.config.spec import ACCEPTANCE_MODES, SpecConfig
from specjax.config.strategy import DEFAULT_TREE_PATHS, OFF_NAMES, Strategy

__all__ = [
    "ACCEPTANCE_MODES",
    "DEFAULT_TREE_PATHS",
    "OFF_NAMES",
    "Layer",
    "ModelConfig",
    "SamplingParams",
    "SpecConfig",
    "Strategy",
]
