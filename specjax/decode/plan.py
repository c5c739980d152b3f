"""What is static about a round: everything that a compiled program is made for."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from specjax.config import ModelConfig, Strategy
from specjax.decode.options import Features
from specjax.decode.tree import DynamicTree, Tree
from specjax.interfaces import Draft


@dataclasses.dataclass(frozen=True)
class Plan:
    """One strategy with its rule and its draft source; `tree` None is plain decoding.

    Attributes:
      mode: acceptance mode. telemetry: record rejections. The rest is as in `SpecConfig`.
      rule: `(plan, state, draft, transformed) -> Acceptance` in place of the mode's own rule, for
        benches that decide what is accepted.
    """

    cfg: ModelConfig
    tree: Tree | DynamicTree | None = None
    source: Draft | None = None
    mode: str = "coupled"
    features: Features = Features()
    aligned: bool = True
    tau: float = 0.6
    adaptive_width: bool = False
    invariant: bool = False
    telemetry: bool = False
    rule: Callable | None = None

    @property
    def strategy(self) -> Strategy:
        return self.tree.strategy if self.tree else Strategy.OFF

    @property
    def steps(self) -> int:
        return self.strategy.steps

    @property
    def taps(self) -> tuple[int | str, ...]:
        """Hidden states of the target that the draft source is given."""
        return self.source.needs.taps if self.source else ()

    @property
    def needs_q(self) -> bool:
        """Whether the rule divides by the draft's probabilities."""
        return self.mode in ("block", "recursive")

    @property
    def draws_noise(self) -> bool:
        """Whether rounds need the ring of position-keyed noise."""
        return self.tree is not None and self.mode == "coupled" and self.features.sampled
