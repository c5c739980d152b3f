"""Engines of models with random weights, for parts that measure whole calls."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

from bench.gpu.chunks import shape_of
from bench.round.batch import random_weights
from specjax import LLM, ModelConfig, SpecConfig
from specjax.drafts.mtp import init_head_params
from specjax.models.transformer import Params, init_params

Model = tuple[ModelConfig, Params, Params]


def config_of(shape: str, layers: int | None, max_len: int) -> ModelConfig:
    """Makes a config.

    Args:
      shape: name of a model's shape, see `bench.gpu.chunks.shape_of`.
      layers: number of layers; None: all of the model's.
    """
    cfg = shape_of(shape)
    return cfg.replace(
        layers=cfg.layers if layers is None else cfg.layers[:1] * layers,
        mtp_num_layers=1,
        max_position=max(cfg.max_position, max_len),
    )


def model_of(shape: str, layers: int | None, max_len: int, seed: int) -> Model:
    """Makes the config of `config_of`, random policy parameters and a random head of one module."""
    cfg = config_of(shape, layers, max_len)
    policy = random_weights(functools.partial(init_params, cfg), seed)
    return cfg, policy, random_weights(functools.partial(init_head_params, cfg), seed + 1)


def engine_of(
    model: Model, spec: SpecConfig | None, batch: int, max_len: int, rule=None, **more
) -> LLM:
    """Makes an engine.

    Args:
      rule: acceptance rule that replaces the strategies' own, see `Plan.rule`.
      more: further arguments of `LLM`.
    """
    llm = LLM(model, spec, batch, max_len, **more)
    if rule is not None:
        runner = llm.engine.runner
        runner.strategies = {name: _by(rule, run) for name, run in runner.strategies.items()}
    return llm


def _by(rule: Callable, run):
    if run.plan.tree is None:  # plain decoding accepts nothing
        return run
    return run._replace(plan=dataclasses.replace(run.plan, rule=rule))
