"""Tries of the goodput controller: which strategy is run for a moment to learn what it would bring.

A try is paid for from an account into which a fixed share of all seconds goes, by the time that it
may lose. New weights ask for one whatever the account says; where such tries keep failing they
become rare.

A try has two chunks. What runs after another strategy is slower at first, and a draft may have to
read what was emitted meanwhile, so the first chunk is one round, from which no costs are learned,
or what is tried would be thought to be dear for ever. The second one counts. It comes back a chunk
later, and where new weights asked for the try that chunk is short: all that ran before they were
judged is what they may beat.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from specjax.control.base import Observation
from specjax.control.costs import of_rounds

_FREE_EVERY = 128  # rounds between tries that swapped weights may ask for without paying
_FREE_RARELY = 32 * _FREE_EVERY  # the same after many that failed
_FREE_AGAIN = 2  # how often such a try is repeated because it told too little,
_FREE_CLOSE = 8  # and how often because what drafts may yet be better than plain decoding
_HICCUP = 2.0  # times as long as the first round: the machine's fault, and not a cost
_ARRIVES_WITHIN = 4  # choices after which the result of a try is taken for lost
_MIN_ROUNDS = 4
WAITING_ROUNDS = 8  # of a chunk until new weights were judged
_PAUSE = 32  # rounds between tries: short chunks cost the host time


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A strategy that would win if what is not known of it turned out well.

    Attributes:
      loss: seconds that a try of it is expected to lose. hope: its score if all turned out well.
      turn: candidates of the same one are tried in turn with the others as if they were one.
      drafts: it shows how good the head is.
    """

    loss: float
    hope: float
    turn: str
    drafts: bool


@dataclasses.dataclass
class Try:
    """Of a strategy.

    Attributes:
      rounds: of the second chunk. free: asked for by new weights. charged: seconds, in advance.
      lost: seconds, so far. asked: chunks that were asked for. came: those that came back.
      waits: choices since both were asked for. histogram: of the first chunk, see `Observation`.
      first: seconds of the first round, 0 if unknown.
    """

    arm: str
    rounds: int
    free: bool
    charged: float
    lost: float = 0.0
    asked: int = 0
    came: int = 0
    waits: int = 0
    histogram: list[int] = dataclasses.field(default_factory=list)
    first: float = 0.0

    @property
    def begins(self) -> bool:
        """None of its chunks came back yet."""
        return self.came == 0

    def seconds_per_round(self, seconds: float, rounds: int, beside: float) -> float:
        """Of the second chunk, without a hiccup of the machine: the first round told of those.

        Args:
          seconds: as it was. rounds: that it had.
          beside: seconds of a chunk beside its rounds; those of the first round are all in it.
        """
        usual = of_rounds(self.first, beside) + beside / rounds
        return usual if 0 < _HICCUP * self.first < seconds else seconds

    def with_first(self, histogram: Sequence[int]) -> list[int]:
        """Of both chunks: a try is judged as a whole, for few slots say little in one round."""
        both = itertools.zip_longest(self.histogram, histogram, fillvalue=0)
        return [a + b for a, b in both]


class Tries:
    """Who is tried and when, one at a time.

    Args:
      share: of all seconds, that tries may lose.
      slot_rounds: (slot, round) pairs that a try wants to see.

    Attributes:
      running: the try under way, or None.
      count: of tries so far.
      rounds: of all strategies, so far.
    """

    def __init__(self, share: float, slot_rounds: int):
        self.running: Try | None = None
        self.count = self.rounds = 0
        self._share, self._slot_rounds = share, slot_rounds
        self._credit = 0.0
        self._tried_at: dict[str, int] = {}  # by turn
        self._looked_at = 0
        self._free = True  # new weights ask for one
        self._free_at, self._free_gap = 0, _FREE_EVERY
        self._repeats, self._again = "", 0  # what is tried again, and how often it was

    @property
    def is_wanted(self) -> bool:
        """While one is under way, and while new weights are to be tried as soon as may be."""
        return self.running is not None or (self._free and self.rounds >= self._free_at)

    def weights_changed(self) -> None:
        self.running = None  # what it would tell is of the old ones
        self._free, self._repeats, self._again = True, "", 0

    def recalibrated(self) -> None:
        self.running = None

    def rounds_wanted(self, batch_size: int) -> int:
        """Of the second chunk."""
        return max(_MIN_ROUNDS, -(-self._slot_rounds // batch_size))

    def wait(self) -> bool:
        """Whether a try, both chunks of which were asked for, has to come back first.

        What does not come for long is lost.
        """
        if self.running is None or self.running.asked < 2:
            return False
        self.running.waits += 1
        if self.running.waits <= _ARRIVES_WITHIN:
            return True
        if self.running.free and self._again < _FREE_AGAIN:
            self._repeat(self.running.arm)  # new weights are to be judged all the same
        self.running = None
        return False

    @property
    def waiting_rounds(self) -> int | None:
        """Of a chunk until a try came back; None: a full one."""
        return WAITING_ROUNDS if self.running is not None and self.running.free else None

    def look(self) -> bool:
        """Whether to look for candidates now; not again for a while, then."""
        if not self._is_free() and self.rounds < self._looked_at + _PAUSE:
            return False
        self._looked_at = self.rounds
        return True

    def _is_free(self) -> bool:
        return self._free and bool(self._repeats or self.rounds >= self._free_at)

    def begin(
        self, candidates: Mapping[str, Candidate], batch_size: int, after_plain: bool, lost: float
    ) -> None:
        """Begins a try, if there is a candidate that can be paid for.

        Args:
          after_plain: plain decoding scores best, as far as is known.
          lost: seconds that what goes on after a try will lose by beginning.
        """
        if not candidates:
            return
        free = self._is_free() and any(c.drafts for c in candidates.values())
        if free:  # new weights are to be judged, and plain decoding tells nothing of them
            candidates = {name: c for name, c in candidates.items() if c.drafts}
        failed = free and self._free_at > 0 and after_plain  # as far as the last one told
        name = self._pick(candidates, free, failed)
        loss = candidates[name].loss
        self._credit = min(self._credit, 2 * loss)  # no hoarding for a spree of tries
        if not free and self._credit < loss:
            return
        if free:
            if not self._repeats:
                self._free_gap = min(2 * self._free_gap, _FREE_RARELY) if failed else _FREE_EVERY
                self._free_at = self.rounds + self._free_gap
            self._free, self._repeats = False, ""
        charged = 0.0 if free else loss
        self._credit -= charged
        self._tried_at[candidates[name].turn] = self.count
        self.count += 1
        self.running = Try(name, self.rounds_wanted(batch_size), free, charged, lost)

    def _pick(self, candidates: Mapping[str, Candidate], free: bool, failed: bool) -> str:
        if free and self._repeats in candidates:
            return self._repeats
        if failed and self._free_gap > _FREE_EVERY:  # and the one before: now at the least cost
            return min(candidates, key=lambda name: candidates[name].loss)
        if free:  # what may win most is drafted deepest, and tells of all shallower ones
            return max(candidates, key=lambda name: candidates[name].hope)

        def turn(name: str) -> tuple[int, float]:
            return self._tried_at.get(candidates[name].turn, -1), candidates[name].loss

        return min(candidates, key=turn)  # they take turns, or the cheapest would starve the others

    def ask(self) -> tuple[str, int]:
        """The next chunk is one of the try: its strategy and rounds."""
        rounds = self.running.rounds if self.running.asked else 1
        self.running.asked, self.running.waits = self.running.asked + 1, 0
        return self.running.arm, rounds

    def ask_again(self) -> None:
        """For the chunk that was asked for last: in what came back nothing ran."""
        self.running.asked -= 1

    def of(self, seen: Observation) -> Try | None:
        """The try under way, if a chunk is one of it."""
        running = self.running
        is_of_it = seen.is_try and running is not None and running.asked > 0
        if not is_of_it or running.arm != seen.strategy:
            return None
        return running if seen.rounds <= (1 if running.begins else running.rounds) else None

    def passed(self, rounds: int, seconds: float) -> None:
        """Of seconds that passed, 0 if not known, a share may be lost by tries."""
        self.rounds += rounds
        self._credit += self._share * seconds

    def came(self, seen: Observation, lost: float | None) -> None:
        """A chunk of the try came back, which lost so many seconds; None: as many as expected."""
        running = self.running
        if running.begins:
            running.histogram, running.first = seen.histogram, seen.seconds_per_round or 0.0
        running.lost += running.charged / 2 if lost is None else lost
        running.came += 1

    def end(self, told: int, is_close: bool) -> None:
        """Settles it; new weights ask for another one where it did not tell what they need.

        Args:
          told: (slot, round) pairs that it saw.
          is_close: what drafts seems worse than plain decoding, but the few rounds of a try do not
            tell it from better.
        """
        ended, self.running = self.running, None
        if not ended.free:  # a hiccup of the machine during a try is not the try's fault
            self._credit += ended.charged - min(ended.lost, 2 * ended.charged)
            return
        is_close = is_close and self._free_gap <= 2 * _FREE_EVERY  # else it failed often enough
        short = told < self._slot_rounds // 2  # samples ended, or chunks are short
        if self._again < (_FREE_CLOSE if is_close else _FREE_AGAIN if short else 0):
            self._repeat(ended.arm)

    def _repeat(self, arm: str) -> None:
        self._free, self._repeats, self._again = True, arm, self._again + 1

    def state(self) -> dict[str, Any]:
        running = dataclasses.asdict(self.running) if self.running else None
        return {
            "running": running,
            "tried_at": dict(self._tried_at),
            **{name: getattr(self, name) for name in _NUMBERS},
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Of an older version, which has other keys, nothing is taken."""
        running, new = state.get("running"), Tries(self._share, self._slot_rounds)
        self.running = Try(**running) if running else None
        self._tried_at = dict(state.get("tried_at", {}))
        for name in _NUMBERS:
            setattr(self, name, state.get(name, getattr(new, name)))


_NUMBERS = (
    "count", "rounds", "_credit", "_looked_at", "_free", "_free_at", "_free_gap", "_repeats",
    "_again",
)  # fmt: skip
