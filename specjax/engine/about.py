"""What is said once when an engine starts: whether it speculates, how, and on which kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from specjax.engine.engine import Engine


def start_lines(engine: Engine) -> list[str]:
    """Lines for the log or the console of a program that is about to generate.

    Later a controller names the strategy and the accept length in the log of `specjax.control`, at
    `LOG_EVERY` chunks or more between two lines of a kind.

    Args:
      engine: the one, or any of several replicas.
    """
    controller, plans = engine.controller, engine.runner.plans
    using = f"Using strategy: {controller.active}"
    if len(plans) > 1:
        kind = engine.control.controller
        using += f" at first; the controller {kind} chooses among {', '.join(plans)}"
        if engine.control.bs_threshold is not None:
            using += f", off for more than {engine.control.bs_threshold} samples at once"
    enabled = any(plan.tree is not None for plan in plans.values())
    kernel = engine.runner.cfg.run.attention
    return [f"Speculative decoding enabled: {enabled}", using, f"attention kernel: {kernel}"]
