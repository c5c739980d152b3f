"""A fixed strategy, and the batch size above which any controller stops speculating."""

from __future__ import annotations

import logging
from typing import Any

from specjax.config.strategy import Strategy
from specjax.control.base import OFF, Controller, Observation
from specjax.control.costs import CostTable


class Static(Controller):
    """Always chooses the same strategy."""

    kind = "static"

    def __init__(self, strategy: str | Strategy):
        super().__init__([strategy])

    def choose(self, batch_size: int) -> str:
        return self.arms[0]

    def learn(self, seen: Observation) -> None:
        pass


class Gate(Controller):
    """Speculates only while the running batch is at most `bs_threshold` (FastRL's setting).

    Above it the choice is `off`, and the inner controller is not asked. It does observe every
    chunk, because it compares the cost of `off` with those of other strategies.

    Args:
      inner: the controller that chooses up to `bs_threshold`.
      bs_threshold: the largest number of running slots for which to speculate.
    """

    kind = "gate"

    def __init__(self, inner: Controller, bs_threshold: int):
        if bs_threshold < 0:
            raise ValueError(f"bs_threshold must be at least 0, got {bs_threshold}")
        super().__init__([*inner.strategies.values(), Strategy.OFF])
        self.inner = inner
        inner._log_level = logging.DEBUG  # one line per choice is enough
        self.bs_threshold = bs_threshold
        self._closed = False

    def choose(self, batch_size: int) -> str:
        self._closed = batch_size > self.bs_threshold
        if self._closed:
            self.rounds_hint = None
            return OFF
        name = self.inner.select(batch_size, self.context)
        self.rounds_hint = self.inner.rounds_hint
        return name

    def learn(self, seen: Observation) -> None:
        self.inner.observe(seen)

    @property
    def active(self) -> str:
        return OFF if self._closed or not self.bs_threshold else self.inner.active

    def may_choose(self, strategy: str, batch_size: int) -> bool:
        if strategy == OFF:  # larger ones close the gate
            return True
        return batch_size <= self.bs_threshold and self.inner.may_choose(strategy, batch_size)

    def gains(self, batch_size: int) -> dict[str, float]:
        return self.inner.gains(batch_size)

    def seconds_of_drafting(self) -> tuple[float, float, float]:
        return self.inner.seconds_of_drafting()

    def weights_changed(self) -> None:
        self.inner.weights_changed()

    def calibrated(self, costs: CostTable) -> None:
        self.inner.calibrated(costs)

    def log_fields(self) -> dict[str, float | str]:
        return {**self.inner.log_fields(), **super().log_fields(), "gated": float(self._closed)}

    def state(self) -> dict[str, Any]:
        return {**super().state(), "closed": self._closed, "inner": self.inner.state()}

    def load_state(self, state: dict[str, Any]) -> None:
        super().load_state(state)
        self._closed = state["closed"]
        self.inner.load_state(state["inner"])
