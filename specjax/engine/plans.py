"""The static half of a round, for each strategy that an engine compiles."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from specjax.config import ModelConfig, SpecConfig, Strategy
from specjax.control import OFF
from specjax.decode.plan import Plan
from specjax.decode.tree import build_tree
from specjax.draft.source import DraftSource
from specjax.engine.sources import source_of


def make_plans(
    cfg: ModelConfig,
    spec: SpecConfig | None,
    source: DraftSource | None,
    strategies: Mapping[str, Strategy | None] | None = None,
) -> dict[str, Plan]:
    """The static half of a round, per strategy, before anybody asked for a feature.

    Raises:
      ValueError: a strategy is wider than the vocabulary, or not exact under `spec`'s rule.
    """
    if spec is None or spec.is_off:
        return {OFF: Plan(cfg)}
    source = source or source_of(cfg, spec)
    if strategies is None:
        own = spec.resolve()
        strategies = {own.name: own}
    return {name: _plan(cfg, spec, source, strategy) for name, strategy in strategies.items()}


def _plan(cfg: ModelConfig, spec: SpecConfig, source: DraftSource, strategy: Strategy | None):
    settings = dict(
        mode=spec.acceptance,
        aligned=spec.aligned,
        tau=spec.tau,
        adaptive_width=spec.adaptive_width,
        invariant=spec.invariant,
        telemetry=spec.telemetry_on,
    )
    if strategy is None:
        return Plan(cfg, None, source, **settings)
    dataclasses.replace(spec, strategy=strategy)  # refuses what is not exact
    widest = strategy.dynamic[1] if strategy.dynamic else 1 + max(map(max, strategy.paths))
    if widest > cfg.vocab_size:
        raise ValueError(
            f"strategy {strategy.name!r} has nodes with {widest} children, more than the "
            f"vocabulary's {cfg.vocab_size} tokens; use a narrower tree"
        )
    return Plan(cfg, build_tree(strategy), source, **settings)


def own_name(spec: SpecConfig | None, plans: Mapping[str, Plan]) -> str:
    """Which of the plans is the one that `spec` itself names; the first if it is not there."""
    if spec is not None and not spec.is_off:
        for name in (Strategy.parse(spec.strategy).name, spec.resolve().name):
            if name in plans:
                return name
    return next(iter(plans))
