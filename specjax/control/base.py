"""What every controller shares: one observation per chunk in, one strategy name out.

A controller is plain host code without jax, so that it can be replayed, tested and saved alone. It
decides between chunks, never inside one, and may learn of a chunk after the next was enqueued; so
every observation carries the strategy that it was made under.
"""

from __future__ import annotations

import abc
import copy
import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from specjax.config.strategy import Strategy

if TYPE_CHECKING:
    from specjax.control.costs import CostTable

OFF = Strategy.OFF.name
SLOWER = 0.02  # share of all seconds; what drafting loses beyond it is worth a line


def parse_arms(strategies: Sequence[str | Strategy]) -> dict[str, Strategy]:
    """Returns the strategies by name, in order and once each."""
    return {strategy.name: strategy for strategy in map(Strategy.parse, strategies)}


@dataclasses.dataclass(frozen=True, eq=False)
class Observation:
    """What a controller learns of one finished chunk.

    Attributes:
      batch_size: number of slots that ran when the strategy was selected.
      strategy: name of the strategy that the chunk ran, as `select` returned it.
      accepted: int [R B], accepted drafts (bonus excluded) per round and slot; -1 where the slot
        did not run or its request drafts nothing. Counted before stops and limits cut the path, if
        known, because a cut is no rejection. Plain decoding accepts 0 in every round.
      seconds: duration of the whole chunk; zero, negative or not finite where it is not known.
      tokens: number of tokens that the chunk emitted, after cuts.
      rounds: number of rounds that ran.
      catch_up: number of tokens that plain decoding emitted since the draft last read, of the slot
        with the most; the draft reads them at the start of the chunk.
      ended: number of samples that ended in the chunk, by a stop or a limit.
      context: number of tokens in the caches of the running slots together, on average over the
        rounds; None where it is not known.
    """

    batch_size: int
    strategy: str
    accepted: np.ndarray
    seconds: float
    tokens: int
    rounds: int
    catch_up: int = 0
    ended: int = 0
    context: float | None = None

    @functools.cached_property
    def slot_rounds(self) -> int:
        """Number of (slot, round) pairs that ran."""
        return sum(self.histogram[1:])

    @functools.cached_property
    def histogram(self) -> list[int]:
        """Number of (slot, round) pairs that emitted k tokens, before cuts, by k."""
        return np.bincount(self.accepted.ravel() + 1, minlength=1).tolist()

    @functools.cached_property
    def accept_length(self) -> float | None:
        """Tokens per slot and round, bonus included; None where no slot ran."""
        count = self.slot_rounds
        emitted = sum(k * pairs for k, pairs in enumerate(self.histogram))
        return emitted / count if count else None

    @functools.cached_property
    def seconds_per_round(self) -> float | None:
        """Seconds per round; None where the duration is not known."""
        seconds, rounds = float(self.seconds), self.rounds
        return seconds / rounds if rounds and math.isfinite(seconds) and seconds > 0 else None


def slower_than_plain(controllers: Sequence[Controller]) -> str | None:
    """Says that drafting took longer than plain decoding would have; None: it did not.

    Args:
      controllers: the controllers of all replicas, whose seconds are summed.
    """
    times = [controller.seconds_of_drafting() for controller in controllers]
    drafting, plain, total = map(sum, zip(*times, strict=True)) if times else (0.0, 0.0, 0.0)
    if drafting - plain <= SLOWER * total:
        return None
    return (
        f"drafting took {drafting:.1f} s, and plain decoding of the same tokens would have taken "
        f"{plain:.1f} s, by the costs that the controller measured"
    )


class Controller(abc.ABC):
    """Chooses the strategy of the next chunk.

    A subclass defines `choose` and `learn`, and lists in `saved` what it learned. The engine calls
    `select` and `observe`.

    Attributes:
      saved: names of the attributes that `state` has, whose values are fit for JSON.
      arms: names of the strategies to choose from.
      strategies: the same strategies by name.
      bs_threshold: the largest number of running slots for which to speculate (FastRL's setting);
        above it the strategy is `off`, and `choose` is not asked. None: there is no limit.
      gated: whether the strategy is `off` because of `bs_threshold`.
      current: name that `select` returned last; None before the first call.
      rounds_hint: number of rounds after which the chunk just selected may end; None for the
        length that the engine gives a chunk.
      context: number of tokens in the caches of the running slots together when `select` was
        called last; None where the caller does not say.
    """

    saved: ClassVar[tuple[str, ...]] = ("current", "gated", "_accept_length", "_tokens_per_sec")
    kind: str = ""

    def __init__(self, strategies: Sequence[str | Strategy]):
        self.strategies = parse_arms(strategies)
        self.arms = tuple(self.strategies)
        self.bs_threshold: int | None = None
        self.gated = False
        self.current: str | None = None
        self.rounds_hint: int | None = None
        self.context: float | None = None
        self._accept_length: float | None = None
        self._tokens_per_sec: float | None = None

    @abc.abstractmethod
    def choose(self, batch_size: int) -> str:
        """Returns the name of the strategy for the next chunk, of `batch_size` running slots."""

    @abc.abstractmethod
    def learn(self, seen: Observation) -> None:
        """Takes in a finished chunk, of a strategy of its own, in which at least one slot ran."""

    def select(self, batch_size: int, context: float | None = None) -> str:
        """Returns what `choose` chose, or `off` above `bs_threshold`.

        Args:
          batch_size: number of running slots.
          context: see the class.
        """
        self.context = context
        self.gated = self.bs_threshold is not None and batch_size > self.bs_threshold
        if self.gated:
            self.current, self.rounds_hint = OFF, None
        else:
            self.current = self.choose(int(batch_size))
        return self.current

    @property
    def active(self) -> str:
        """The strategy that was chosen last; before the first choice, the one that scores best."""
        return self.current or (OFF if self.bs_threshold == 0 else self.preferred())

    def preferred(self) -> str:
        """Returns the strategy that scores best for one slot."""
        return self.arms[0]

    def may_choose(self, strategy: str, batch_size: int) -> bool:
        """Whether a strategy may be chosen for batches of this size, or of some larger one."""
        if self.bs_threshold is not None and (strategy == OFF or batch_size > self.bs_threshold):
            return strategy == OFF
        return strategy in self.strategies

    def observe(self, seen: Observation) -> None:
        """Passes a finished chunk to `learn`, and keeps its figures for `log_fields`.

        A chunk in which no slot ran, or of a strategy that is not among `arms`, is ignored.
        """
        if not seen.slot_rounds or seen.strategy not in self.strategies:
            return
        self.learn(seen)
        self._accept_length = seen.accept_length
        if seen.seconds_per_round is not None:
            self._tokens_per_sec = seen.tokens / float(seen.seconds)

    def weights_changed(self) -> None:  # noqa: B027  (most controllers need no hint)
        """Called after the draft's or the policy's weights were swapped."""

    def calibrated(self, costs: CostTable) -> None:  # noqa: B027  (most ask for no costs)
        """Called with costs that were measured anew while no chunk ran."""

    def gains(self, batch_size: int) -> dict[str, float]:
        """Returns by strategy how many times as fast as plain decoding it is, as measured.

        A strategy whose cost or acceptance was not measured is left out. Controllers that measure
        no costs return {}.
        """
        return {}

    def seconds_of_drafting(self) -> tuple[float, float, float]:
        """Returns the seconds of chunks that drafted, of plain decoding instead, and of all chunks.

        The second is what the tokens of the first would have taken by measured costs; chunks
        without such a cost are left out of both.
        """
        return 0.0, 0.0, 0.0

    def identity(self) -> dict[str, Any]:
        """Returns what a state must have been saved under."""
        return {"kind": self.kind, "arms": list(self.arms)}

    def state(self) -> dict[str, Any]:
        """Returns, for JSON, all that a restored controller needs to continue identically."""
        values = {name: getattr(self, name) for name in self.saved}
        return {**self.identity(), **copy.deepcopy(values)}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restores what `state` returned.

        Raises:
          ValueError: the state is of another kind of controller, or of other strategies.
        """
        wanted = self.identity()
        got = {name: state.get(name) for name in wanted}
        if got != wanted:
            raise ValueError(
                f"expected the state of the controller {wanted}, got that of {got}; restore with "
                "the configuration it was saved under, or start without the state"
            )
        for name in self.saved:
            setattr(self, name, copy.deepcopy(state[name]))
        self.rounds_hint = None

    def log_fields(self) -> dict[str, float | str]:
        """Returns metrics of the last chunk that was observed; all numbers are finite."""
        fields: dict[str, float | str] = {"strategy": self.current or "", "controller": self.kind}
        if self._accept_length is not None:
            fields["accept_length"] = self._accept_length
        if self._tokens_per_sec is not None:
            fields["tokens_per_sec"] = self._tokens_per_sec
        return fields if self.bs_threshold is None else {**fields, "gated": float(self.gated)}


class Static(Controller):
    """Always chooses the same strategy."""

    kind = "static"

    def __init__(self, strategy: str | Strategy):
        super().__init__([strategy])

    def choose(self, batch_size: int) -> str:
        return self.arms[0]

    def learn(self, seen: Observation) -> None:
        pass
