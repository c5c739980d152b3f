"""The plans of an engine: for each strategy, what its rounds are compiled for, see `Plan`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from specjax.config import ModelConfig, SpecConfig, Strategy
from specjax.control import OFF
from specjax.decode.state import Plan
from specjax.decode.tree import TreePart, build_tree, common_strategy, tree_part
from specjax.engine.sources import source_of
from specjax.interfaces import Device, Draft
from specjax.kernels.names import NVIDIA
from specjax.models.mixers.attention import Attention
from specjax.models.mlps.dense import Dense
from specjax.spelling import SettingError


def make_plans(
    cfg: ModelConfig,
    spec: SpecConfig | None,
    source: Draft | None,
    strategies: Sequence[Strategy] | None = None,
) -> dict[str, Plan]:
    """A plan for each strategy, by the strategy's name; features are set when chunks are compiled.

    Args:
      strategies: the strategies, named as the user named them; None: `spec`'s own alone.

    Raises:
      ValueError: a strategy is wider than the vocabulary, or not exact in `spec`'s acceptance mode;
        or the width is to be adaptive, and no strategy is a dynamic tree.
    """
    if spec is None or spec.is_off:
        return {OFF: Plan(cfg, invariant=spec is not None and spec.invariant)}
    source = source or source_of(cfg, spec)
    if strategies is None:
        strategies = (spec.resolve(),)
    if spec.adaptive_width and not any(strategy.is_dynamic for strategy in strategies):
        raise SettingError(
            lambda spell: (
                f"{spell('adaptive_width')} changes the width of dynamic trees, got strategies "
                f"{', '.join(map(str, strategies))}; use one such as '6_4_16', or "
                f"{spell('adaptive_width', False)}"
            )
        )
    return {strategy.name: _plan(cfg, spec, source, strategy) for strategy in strategies}


def _plan(cfg: ModelConfig, spec: SpecConfig, source: Draft, strategy: Strategy) -> Plan:
    settings = dict(
        mode=spec.acceptance,
        aligned=spec.aligned,
        tau=spec.tau,
        adaptive_width=spec.adaptive_width and strategy.is_dynamic,
        invariant=spec.invariant,
        telemetry=spec.telemetry_on,
    )
    if strategy.is_off:
        return Plan(cfg, None, source, **settings)
    dataclasses.replace(spec, strategy=strategy)  # refuses a strategy that is not exact
    if reason := source.refuses(strategy):
        raise ValueError(f"strategy {strategy.name!r}: {reason}")
    widest = strategy.dynamic[1] if strategy.dynamic else 1 + max(map(max, strategy.paths))
    if widest > cfg.vocab_size:
        raise ValueError(
            f"strategy {strategy.name!r} has nodes with {widest} children, more than the "
            f"vocabulary's {cfg.vocab_size} tokens; use a narrower tree"
        )
    return Plan(cfg, build_tree(strategy), source, **settings)


class StrategyProgram(NamedTuple):
    """The program that chunks of a strategy run.

    Attributes:
      program: name of the program.
      plan: the plan that it is compiled for.
      part: the part of the plan's tree that the strategy drafts; None: all of it.
    """

    program: str
    plan: Plan
    part: TreePart | None = None


def programs_of(plans: Mapping[str, Plan], most_rows: int) -> dict[str, StrategyProgram]:
    """The program of each strategy, by the strategy's name.

    Each strategy has a program of its own; in `invariant` mode all of them share one.

    Args:
      plans: the plans of `make_plans`.
      most_rows: the most rows that a tree may have.

    Raises:
      ValueError: in `invariant` mode the tree that holds those of all strategies has too many
        rows.
    """
    if len(plans) == 1 or not all(plan.invariant for plan in plans.values()):
        return {name: StrategyProgram(name, plan) for name, plan in plans.items()}
    strategies = [plan.strategy for plan in plans.values() if plan.tree]
    common = common_strategy(strategies)
    if common.rows > most_rows:
        raise SettingError(
            lambda spell: (
                f"with {spell('invariant', True)} all strategies run one program, whose tree holds "
                f"those of {', '.join(s.name for s in strategies)}: it has {common.rows} rows, "
                f"more than {spell('spec_verify_tokens')} = {most_rows}; raise it, or use smaller "
                "trees or fewer of them"
            )
        )
    tree = build_tree(common)
    drafting = next(plan for plan in plans.values() if plan.tree)
    # A strategy that is a chain drafts a part that is one node wide, which cannot become narrower.
    adaptive = any(plan.adaptive_width for plan in plans.values())
    shared = dataclasses.replace(drafting, tree=tree, adaptive_width=adaptive)
    return {
        name: StrategyProgram(common.name, shared, tree_part(tree, plan.strategy))
        for name, plan in plans.items()
    }


BLOCK = 64  # rows of a tile of the matrix units of GPUs
# With more rows than this a product takes longer than reading its weights.
MOST_ROWS = 256


def row_block(device: Device, batch: int, strategies: Mapping[str, StrategyProgram]) -> int | None:
    """The number of rows that an engine in `invariant` mode multiplies at once, see `RunConfig`.

    With it plain decoding has a program of its own, whose products have the shapes that those of
    the common tree have. On one GPU that is faster: a product of few rows takes as long as reading
    its weights, and a plain round attends once where a tree does for each of its rows. On CPU a
    product takes as long as it has rows, and a block would be slower than the tree.

    Returns:
      multiples of `BLOCK`; None: all strategies run one program.
    """
    if OFF not in strategies or len(strategies) == 1:
        return None
    if device.platform not in NVIDIA or device.count > 1:
        return None
    shared = strategies[OFF].plan
    kinds = {type(part) for layer in shared.cfg.layers for part in (layer.mixer, layer.mlp)}
    if kinds - {Attention, Dense}:
        return None  # of others nothing says that they take blocks
    return min(-(-batch * shared.tree.rows // BLOCK) * BLOCK, MOST_ROWS)


def own_name(spec: SpecConfig | None, plans: Mapping[str, Plan]) -> str:
    """The name of the plan for `spec`'s own strategy; the first name if it has none."""
    if spec is not None and not spec.is_off:
        for name in (spec.own_strategy.name, spec.resolve().name):
            if name in plans:
                return name
    return next(iter(plans))
