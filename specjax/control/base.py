"""What every controller shares: one observation per chunk in, one strategy name out.

A controller is plain host code without jax, so that it can be replayed, tested and saved alone. It
decides between chunks, never inside one, and may learn of a chunk after the next was enqueued; so
every observation carries the strategy that it was made under.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import logging
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from specjax.config.strategy import OFF_NAMES, Strategy

if TYPE_CHECKING:
    from specjax.control.costs import CostTable

log = logging.getLogger("specjax.control")

OFF = Strategy.OFF.name
LOG_EVERY = 100  # chunks between two lines with a strategy, or with an accept length


def canonical(name: str) -> str:
    """`off` for every name of plain decoding, other names unchanged."""
    return OFF if name.lower() in OFF_NAMES else name


def parse_arms(strategies: Sequence[str | Strategy]) -> dict[str, Strategy]:
    """The strategies by name, in order and once each.

    Raises:
      ValueError: there are none, or one is not understood.
    """
    if isinstance(strategies, (str, Strategy)):
        raise ValueError(f"strategies must be a list of strategies, got {strategies!r} alone")
    arms = {strategy.name: strategy for strategy in map(Strategy.parse, strategies)}
    if not arms:
        raise ValueError("a controller needs at least one strategy, got none; 'off' is one")
    return arms


@dataclasses.dataclass(frozen=True, eq=False)
class Observation:
    """What one chunk showed.

    Attributes:
      batch_size: slots that ran when the chunk was selected for.
      strategy: what the chunk ran, as `select` named it.
      accepted: int [R B], accepted drafts (bonus excluded) per round and slot; -1 where the slot
        did not run. Give them before stops and limits cut the path, if they are known: a cut is
        no rejection. Plain decoding accepts 0 in every round.
      seconds: of the whole chunk. Zero, negative or not finite: not known.
      tokens: emitted by the chunk, after cuts; by default accepted + 1 per slot and round.
      rounds: that ran; by default those in which a slot of `accepted` did.
      catch_up: rows that the draft had not read when the chunk began: tokens of plain decoding
        since it last did, of the slot that had most.
      opted_out: slots that draft nothing whatever is chosen; -1 in `accepted` of what drafts.
      ended: samples that ended in the chunk, by a stop or a limit.
    """

    batch_size: int
    strategy: str
    accepted: np.ndarray
    seconds: float
    tokens: int | None = None
    rounds: int | None = None
    catch_up: int = 0
    opted_out: int = 0
    ended: int = 0

    def __post_init__(self):
        accepted = np.asarray(self.accepted)
        if accepted.size == 0:
            accepted = np.zeros((0, 0), np.int64)
        if accepted.ndim != 2 or accepted.dtype.kind not in "iu" or accepted.min(initial=0) < -1:
            raise ValueError(
                "accepted must be integers >= -1 of shape [rounds, slots] (-1: the slot did not "
                f"run), got {accepted.dtype} of shape {accepted.shape}; use Observation.of_rounds "
                "for lists of unequal length"
            )
        object.__setattr__(self, "accepted", accepted)
        object.__setattr__(self, "strategy", canonical(self.strategy))
        if self.tokens is None:
            object.__setattr__(self, "tokens", int((accepted + 1).sum()))
        if self.rounds is None:
            object.__setattr__(self, "rounds", int((accepted >= 0).any(axis=1).sum()))

    @classmethod
    def of_rounds(
        cls,
        batch_size: int,
        strategy: str,
        per_round: Sequence[Sequence[int]],
        seconds: float,
        tokens: int | None = None,
    ) -> Observation:
        """From the accepted drafts of the running slots, one list per round."""
        width = max(map(len, per_round), default=0)
        accepted = np.full((len(per_round), width), -1, np.int64)
        for row, values in zip(accepted, per_round, strict=True):
            row[: len(values)] = values
        return cls(batch_size, strategy, accepted, seconds, tokens)

    @functools.cached_property
    def slot_rounds(self) -> int:
        return sum(self.histogram[1:])

    @functools.cached_property
    def histogram(self) -> list[int]:
        """[k]: in how many (slot, round) pairs k tokens were emitted (before cuts)."""
        return np.bincount(self.accepted.ravel() + 1, minlength=1).tolist()

    @functools.cached_property
    def accept_length(self) -> float | None:
        """Tokens per slot and round, bonus included; None where no slot ran."""
        count = self.slot_rounds
        emitted = sum(k * pairs for k, pairs in enumerate(self.histogram))
        return emitted / count if count else None

    @functools.cached_property
    def seconds_per_round(self) -> float | None:
        """None where no time is known."""
        seconds, rounds = float(self.seconds), self.rounds
        return seconds / rounds if rounds and math.isfinite(seconds) and seconds > 0 else None


class Controller(abc.ABC):
    """Chooses the strategy of the next chunk.

    Attributes:
      arms: names of the strategies that `select` may return.
      drafts: the strategies by these names.
      current: what `select` returned last, None before.
      rounds_hint: rounds that suffice for the chunk just selected; None: as many as a chunk has.
    """

    kind: str = ""

    def __init__(self, strategies: Sequence[str | Strategy]):
        self.drafts = parse_arms(strategies)
        self.arms = tuple(self.drafts)
        self.current: str | None = None
        self.rounds_hint: int | None = None
        self._accept_length: float | None = None
        self._tokens_per_sec: float | None = None
        self._chunks = 0
        self._log_level = logging.INFO  # a gate lowers that of the controller behind it
        self._said: str | None = None  # the strategy that the log named last
        self._unsaid = LOG_EVERY  # chunks selected since then

    def select(self, batch_size: int) -> str:
        """The strategy of the next chunk, for `batch_size` running slots."""
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        name = self._choose(int(batch_size))
        if name not in self.drafts:
            raise AssertionError(f"{self.kind} chose {name!r}, which is none of {self.arms}")
        self._say(name, batch_size)
        self.current = name
        return name

    def _say(self, name: str, batch_size: int) -> None:
        """Logs a strategy that is new; one that stays is named soon, and of those that change all
        the time one now and then."""
        self._unsaid += 1
        if name != self._said and self._unsaid >= LOG_EVERY:
            self._said, self._unsaid = name, 0
            log.log(
                self._log_level,
                "Using strategy: %s (batch size %d, %s)",
                name,
                batch_size,
                self.kind,
            )

    @property
    def active(self) -> str:
        """The strategy that was chosen last; before the first choice, the one that a batch of one
        would get, were nothing explored."""
        return self.current or self._first()

    def _first(self) -> str:
        return self.arms[0]

    def may_choose(self, strategy: str, batch_size: int) -> bool:
        """Whether a strategy may be chosen for batches of this size, or of some larger one."""
        return strategy in self.drafts

    def observe(self, seen: Observation) -> None:
        """Learns from a finished chunk.

        A chunk in which no slot ran, or of a strategy that is not among `arms` (a gate's `off`),
        teaches nothing.
        """
        if not seen.slot_rounds or seen.strategy not in self.drafts:
            return
        self._learn(seen)
        self._chunks += 1
        first = self._accept_length is None
        self._accept_length = seen.accept_length
        if seen.seconds_per_round is not None:
            self._tokens_per_sec = seen.tokens / float(seen.seconds)
        if first or self._chunks % LOG_EVERY == 0:
            log.log(
                self._log_level, "Acceptance length: %.2f (%s)", self._accept_length, seen.strategy
            )

    def weights_changed(self) -> None:  # noqa: B027  (most controllers need no hint)
        """The draft's or the policy's weights were swapped: what was learned may not hold."""

    def calibrated(self, costs: CostTable) -> None:  # noqa: B027  (most ask for no costs)
        """Costs were measured, while nothing ran; what else was learned still holds."""

    def gains(self, batch_size: int) -> dict[str, float]:
        """How many times as fast as plain decoding each strategy is, by what was measured.

        A strategy of which the cost or the acceptance is a guess is left out; most controllers
        measure no costs, and know none.
        """
        return {}

    def state(self) -> dict[str, Any]:
        """Everything that a restored controller needs to continue identically; JSON-able."""
        return {
            "kind": self.kind,
            "arms": list(self.arms),
            "current": self.current,
            "accept_length": self._accept_length,
            "tokens_per_sec": self._tokens_per_sec,
            "chunks": self._chunks,
            **self._state(),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Takes over what `state` returned.

        Raises:
          ValueError: it is of another kind of controller, or of other strategies.
        """
        got = (state.get("kind"), tuple(state.get("arms", ())))
        if got != (self.kind, self.arms):
            raise ValueError(
                f"expected the state of a {self.kind!r} controller over {', '.join(self.arms)}, "
                f"got one of {got[0]!r} over {', '.join(got[1])}; restore with the configuration "
                "it was saved under, or start without the state"
            )
        self.current = state["current"]
        self._accept_length = state["accept_length"]
        self._tokens_per_sec = state["tokens_per_sec"]
        self._chunks = state["chunks"]
        self.rounds_hint = None
        self._said, self._unsaid = None, LOG_EVERY  # another process has another log
        self._load(state)

    def log_fields(self) -> dict[str, float | str]:
        """For the metrics log, of the last chunk that was observed; numbers are finite."""
        fields: dict[str, float | str] = {"strategy": self.current or "", "controller": self.kind}
        if self._accept_length is not None:
            fields["accept_length"] = self._accept_length
        if self._tokens_per_sec is not None:
            fields["tokens_per_sec"] = self._tokens_per_sec
        return fields

    @abc.abstractmethod
    def _choose(self, batch_size: int) -> str: ...

    @abc.abstractmethod
    def _learn(self, seen: Observation) -> None: ...

    def _state(self) -> dict[str, Any]:
        return {}

    def _load(self, state: dict[str, Any]) -> None:  # noqa: B027  (nothing of its own to load)
        """Takes over what `_state` returned."""
