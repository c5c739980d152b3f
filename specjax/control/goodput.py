"""The default controller: the strategy with the most expected tokens per second.

    score(strategy, batch) = expected tokens per slot and round / seconds per round

Seconds come from a `CostTable`, tokens from `Acceptance`, less those that come to lie behind the
end of their sample. Acceptance alone misleads: the same
drafts that gain a quarter in a batch of one may lose in a batch of 32, where rows are not free.

Plain decoding shows nothing of the head, and a shallow chain nothing of deeper drafts. So
strategies that would win if what is not known turned out well are tried now and then: a try is
paid for from an account into which a fixed share of all seconds goes, by the time it may lose.
Part of that time is the draft's catching up: after plain decoding it has to read what was emitted
meanwhile, which may take as long as many rounds. What runs after another strategy is also slower at
first. So a try begins with one round in a chunk of its own, from which no costs are learned, or
what is tried would be thought to be dear for ever. New weights ask for a try whatever the account
says; where such tries keep failing they become rare. Strategies that would lose even with perfect
drafts are never tried.

What runs alone shows nothing of the others' costs either. Where it grows dearer, the table presumes
that all do, and its `slack` (see `costs`) says by how much that may be wrong, so the others come to
be worth a try as the presumption grows. Plain decoding is measured now and then even where it seems
hopeless: it is what no choice must lose against.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

from specjax.config.strategy import Strategy
from specjax.control.acceptance import Acceptance
from specjax.control.base import OFF, Controller, Observation, log
from specjax.control.beginnings import Beginnings
from specjax.control.costs import CostTable

_FREE_EVERY = 128  # rounds between tries that swapped weights may ask for without paying
_FREE_RARELY = 32 * _FREE_EVERY  # the same after many that failed
_FREE_AGAIN = 2  # how often such a try is repeated because it told too little,
_FREE_CLOSE = 8  # and how often because what it tried is about as good as plain decoding:
_CLOSE = 0.2  # worse by this share at most; the few rounds of a try do not tell it from better
_ENDS_WITHIN = 4096.0  # tokens after which an observed end of a sample counts half
_BOTH = 2  # what a try takes to begin, and what goes on after it likewise
_HICCUP = 2.0  # times as long as the first round: the machine's fault, and not a cost
_SHORT = 8  # rounds of a chunk: it tells little of costs where another strategy ran before
_ARRIVES_WITHIN = 4  # choices after which the result of a try is taken for lost
_MIN_PROBE = 4  # rounds
_PAUSE = 32  # rounds between tries: short chunks cost the host time
_OVERDUE = 4000  # rounds after which plain decoding is measured again, however dear it seems


@dataclasses.dataclass(frozen=True)
class GoodputConfig:
    """Settings of the goodput controller.

    Attributes:
      hysteresis: by what share a score must beat the current strategy's.
      probe_fraction: share of all seconds that tries may lose.
      probe_slot_rounds: (slot, round) pairs that a try wants to see.
      half_life: rounds after which an observed acceptance counts half.
      prior: acceptance of a first draft before anything was seen.
    """

    hysteresis: float = 0.01
    probe_fraction: float = 0.01
    probe_slot_rounds: int = 16
    half_life: float = 100.0
    prior: float = 0.7

    def __post_init__(self):
        if not 0 <= self.hysteresis < 1:
            raise ValueError(f"hysteresis must be at least 0 and below 1, got {self.hysteresis}")
        if not 0 <= self.probe_fraction < 1:
            raise ValueError(
                f"probe_fraction must be at least 0 and below 1, got {self.probe_fraction}"
            )
        if self.probe_slot_rounds < 1:
            raise ValueError(f"probe_slot_rounds must be at least 1, got {self.probe_slot_rounds}")
        if not 0 < self.half_life < float("inf"):
            raise ValueError(f"half_life must be a finite number above 0, got {self.half_life}")
        if not 0 <= self.prior <= 1:
            raise ValueError(f"prior must be between 0 and 1, got {self.prior}")


@dataclasses.dataclass
class _Try:
    """Of a strategy: a round in a chunk of its own, and then what counts.

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


class Goodput(Controller):
    """Maximises tokens per second.

    Args:
      costs: seconds per round, best calibrated for every strategy and bucket; without it they are
        guessed until observed.

    Attributes:
      regret_seconds: estimated time lost, by tries and late switches, against the strategy that
        scored best when each chunk arrived.
      probes: tries so far.
    """

    kind = "goodput"

    def __init__(
        self,
        strategies: Sequence[str | Strategy],
        costs: CostTable | None = None,
        config: GoodputConfig | None = None,
    ):
        super().__init__(strategies)
        self.config = config or GoodputConfig()
        # A copy: two controllers over one calibration must not learn from each other.
        self.costs = CostTable.from_state((costs or CostTable()).state())
        self.acceptance = Acceptance(self.drafts, self.config.half_life, self.config.prior)
        self.regret_seconds = 0.0
        self.seconds = 0.0
        self.probes = 0
        self._best: dict[int, str] = {}
        self._credit = 0.0
        self._free_try = True
        self._free_at, self._free_gap = 0, _FREE_EVERY
        self._repeats, self._again = "", 0  # what is tried again, and how often it was
        self._behind, self._drafting = 0, 1.0
        self._emitted, self._ended = 0.0, 0.0  # tokens and ends of samples, discounted
        self._beginnings = Beginnings()
        self._last = ""  # the strategy of the latest chunk
        self._rounds = 0
        self._chunk_tokens = 32.0  # that a slot can emit in one
        self._chunk_rounds: dict[str, float] = {}  # by strategy; of tries, the most
        self._probe: _Try | None = None
        self._tried_at: dict[str, int] = {}
        self._looked_round = 0

    def scores(self, batch_size: int) -> dict[str, float]:
        """Expected tokens per slot and second, by strategy."""
        goes_on = self._goes_on
        return {
            arm: self._per_slot(self.acceptance.expected_tokens(arm, goes_on))
            / self._seconds(arm, batch_size)
            for arm in self.arms
        }

    def _seconds(self, arm: str, batch_size: int) -> float:
        """Of a round, with its share of what lies beside the rounds of a chunk."""
        return self.costs.seconds(arm, batch_size, self._full_rounds(arm))

    def _full_rounds(self, arm: str) -> float:
        """Of a chunk that is used up, whatever the strategy."""
        return self._chunk_tokens / (1 + self._steps(arm))

    @property
    def _goes_on(self) -> float:
        """The share of tokens after which a sample goes on."""
        return 1 - self._ended / max(self._emitted, self._ended, 1.0)

    def _per_slot(self, tokens: float) -> float:
        """Of all slots, where those that draft bring so many."""
        return 1 + self._drafting * (tokens - 1)

    def gains(self, batch_size: int) -> dict[str, float]:
        """Scores over plain decoding's, where no guess is in either."""
        measured = {
            arm: score
            for arm, score in self.scores(batch_size).items()
            if self.costs.known(arm, batch_size) and self.acceptance.is_measured(arm)
        }
        plain = measured.get(OFF)
        return {} if plain is None else {arm: score / plain for arm, score in measured.items()}

    def weights_changed(self) -> None:
        """Keeps only a weak opinion of the head, and tries it soon, whatever the account says."""
        self.acceptance.forget()
        self._probe = None  # what it would tell is of the old ones
        self._free_try, self._repeats, self._again = True, "", 0

    @property
    def is_curious(self) -> bool:
        """While a try is under way, and while new weights are to be tried as soon as may be."""
        return self._probe is not None or (self._free_try and self._rounds >= self._free_at)

    def calibrated(self, costs: CostTable) -> None:
        """Takes freshly measured costs for what was learned of them; acceptance is kept."""
        self.costs = CostTable.from_state(costs.state())
        self._best, self._probe, self._beginnings = {}, None, Beginnings()

    def _choose(self, batch_size: int) -> str:
        scores = self.scores(batch_size)
        at = self.costs.index(batch_size)
        best = max(self.arms, key=scores.__getitem__)
        current = self._best.get(at)
        if current is None or scores[best] > (1 + self.config.hysteresis) * scores[current]:
            self._best[at] = current = best
        log.debug("Goodput selected: %s, scores: %s", current, scores)
        self.rounds_hint = None
        if self._probe is not None and self._probe.asked == 2:
            self._probe.waits += 1
            if self._probe.waits <= _ARRIVES_WITHIN:
                return current
            self._lose_try()
        if self._probe is None:
            self._probe = self._try_another(batch_size, current, scores)
        return current if self._probe is None else self._ask(self._probe)

    def _ask(self, probe: _Try) -> str:
        """The next chunk is one of the try."""
        self.rounds_hint = probe.rounds if probe.asked else 1
        probe.asked, probe.waits = probe.asked + 1, 0
        return probe.arm

    def _lose_try(self) -> None:
        """What it would have told never came; new weights are to be judged all the same."""
        if self._probe.free and self._again < _FREE_AGAIN:
            self._repeat_try(self._probe.arm)
        self._probe = None

    def _repeat_try(self, arm: str) -> None:
        self._free_try, self._repeats, self._again = True, arm, self._again + 1

    def _try_another(self, batch_size: int, current: str, scores: dict[str, float]) -> _Try | None:
        """Of the strategy that is worth it now, if one is and it can be paid for."""
        free = self._free_try and bool(self._repeats or self._rounds >= self._free_at)
        if not free and self._rounds < self._looked_round + _PAUSE:
            return None
        self._looked_round = self._rounds
        least = (1 + self.config.hysteresis) * scores[current]
        wanted = max(_MIN_PROBE, -(-self.config.probe_slot_rounds // batch_size))
        losses, turns, hopes = {}, {}, {}
        for arm, score in scores.items():
            seconds = self._seconds(arm, batch_size)
            cheaper = 1 / (1 - self.costs.slack(arm, batch_size))
            hoped = self.acceptance.hoped_tokens(arm, self._goes_on)
            hope = self._per_slot(hoped) / seconds * cheaper
            overdue = arm == OFF and self.costs.age(arm, batch_size) > _OVERDUE
            if arm == current or (hope <= least and not overdue):
                continue
            hopes[arm] = hope
            most = self._chunk_rounds.get(arm, self._full_rounds(arm))
            rounds = 1 + min(wanted, max(most, 1.0))
            losses[arm] = rounds * seconds * max(0.0, 1 - score / scores[current])
            losses[arm] += self._begin_seconds(arm, batch_size)
            # One try teaches the acceptance of a whole family, but the cost of one strategy only.
            turns[arm] = arm if score * cheaper > least else self.acceptance.family(arm) or arm
        if not losses:
            return None
        failed = free and self._free_at > 0 and current == OFF  # as far as the last one told
        if free and self._repeats in losses:
            name = self._repeats
        elif failed and self._free_gap > _FREE_EVERY:  # and the one before: now at the least cost
            name = min(losses, key=losses.__getitem__)
        elif free:  # what may win most is drafted deepest, and tells of all shallower ones
            name = max(hopes, key=hopes.__getitem__)
        else:  # they take turns, or the cheapest would starve the others
            name = min(losses, key=lambda arm: (self._tried_at.get(turns[arm], -1), losses[arm]))
        self._credit = min(self._credit, 2 * losses[name])  # no hoarding for a spree of tries
        if not free and self._credit < losses[name]:
            return None
        if free:
            if not self._repeats:
                self._free_gap = min(2 * self._free_gap, _FREE_RARELY) if failed else _FREE_EVERY
                self._free_at = self._rounds + self._free_gap
            self._free_try, self._repeats = False, ""
        charged = 0.0 if free else losses[name]
        self._credit -= charged
        self._tried_at[turns[name]] = self.probes
        self.probes += 1
        lost = self._beginnings.first_seconds(self.costs.index(batch_size))
        return _Try(name, wanted, free, charged, lost)

    def _steps(self, arm: str) -> int:
        draft = self.drafts[arm]
        return draft.steps if draft else 0

    def _begin_seconds(self, arm: str, batch_size: int) -> float:
        """Expected seconds that a try takes beside its rounds; 0 if unknown."""
        rows = 0 if arm == OFF else self._behind
        first = self._beginnings.first_seconds(self.costs.index(batch_size))
        first += self.costs.beside(batch_size)  # there would have been fewer chunks
        return _BOTH * first + self.catch_up_seconds(batch_size, rows)

    def catch_up_seconds(self, batch_size: int, rows: int) -> float:
        """Expected seconds until a draft has read `rows` tokens of plain decoding; 0 if unknown."""
        return self._beginnings.reading_seconds(self.costs.index(batch_size), rows)

    def observe(self, seen: Observation) -> None:
        super().observe(seen)
        if not seen.slot_rounds and self._is_of_try(seen):
            self._probe.asked -= 1  # its slots had all ended: it is asked for again

    def _is_of_try(self, seen: Observation) -> bool:
        probe = self._probe
        return seen.is_try and probe is not None and 0 < probe.asked and probe.arm == seen.strategy

    def _learn(self, seen: Observation) -> None:
        rounds, known = seen.rounds, seen.seconds_per_round is not None
        drafts = seen.strategy != OFF
        self._rounds += rounds
        self._drafting = 1 - seen.opted_out / seen.batch_size
        kept = 2 ** (-seen.tokens / _ENDS_WITHIN)
        self._emitted = kept * self._emitted + seen.tokens
        self._ended = kept * self._ended + seen.ended
        probed = self._is_of_try(seen)
        begins = probed and self._probe.came == 0
        late = self._late(seen) if known and (begins or (drafts and seen.catch_up)) else 0.0
        self._behind = 0 if drafts else seen.catch_up + rounds
        # What a chunk took in which the draft caught up does not say which of the two took it.
        after_another = seen.strategy != self._last and rounds < _SHORT
        self._last = seen.strategy
        unclear = begins or after_another or (drafts and seen.catch_up > 0)
        per_round = None if unclear else seen.seconds_per_round
        if per_round and probed and 0 < _HICCUP * self._probe.first < per_round:
            per_round = self._probe.first
        self.costs.observe(seen.strategy, seen.batch_size, per_round, rounds)
        self.acceptance.age(rounds)
        histogram = seen.histogram
        if begins:
            self._probe.histogram, self._probe.first = histogram, seen.seconds_per_round or 0.0
        else:  # a try is judged as a whole: few slots say little in one round
            if probed:
                both = itertools.zip_longest(self._probe.histogram, histogram, fillvalue=0)
                histogram = [a + b for a, b in both]
            self.acceptance.learn(seen.strategy, histogram, rounds)
        if not begins:
            self._count_rounds(seen.strategy, rounds, probed and rounds >= self._probe.rounds)
        if known:
            lost = self._lost(seen, late)
            self.seconds += float(seen.seconds)
            self.regret_seconds += lost
            self._credit += self.config.probe_fraction * float(seen.seconds)
            if probed:
                self._probe.lost += lost
        if probed:
            self._probe.came += 1
        if probed and not begins:
            self._end_try(seen.batch_size, sum(histogram[1:]))

    def _count_rounds(self, arm: str, rounds: int, cut: bool) -> None:
        """A chunk had so many; if it was cut it could have had more."""
        before = self._chunk_rounds.get(arm, rounds)
        self._chunk_rounds[arm] = max(before, rounds) if cut else 0.75 * before + 0.25 * rounds
        if not cut:
            emits = rounds * (1 + self._steps(arm))
            self._chunk_tokens += 0.25 * (emits - self._chunk_tokens)

    def _end_try(self, batch_size: int, told: int) -> None:
        """Settles it; new weights ask for another one where it did not tell what they need."""
        probe, self._probe = self._probe, None
        if not probe.free:  # a hiccup of the machine during a try is not the try's fault
            self._credit += probe.charged - min(probe.lost, 2 * probe.charged)
            return
        scores = self.scores(batch_size)
        best = max(self.arms, key=scores.__getitem__)
        # Whatever drafts tells of the head as it runs; plain decoding tells nothing.
        drafting = max((score for arm, score in scores.items() if arm != OFF), default=0.0)
        close = best == OFF and drafting > (1 - _CLOSE) * scores[OFF]
        close = close and self._free_gap <= 2 * _FREE_EVERY  # else it failed often enough
        short = told < self.config.probe_slot_rounds // 2  # samples ended, or chunks are short
        if self._again < (_FREE_CLOSE if close else _FREE_AGAIN if short else 0):
            self._repeat_try(probe.arm)

    def _late(self, seen: Observation) -> float:
        """Seconds of the chunk that its rounds did not take; remembers what for."""
        plain = self.costs.seconds(OFF, seen.batch_size)
        usual = seen.rounds * self.costs.seconds(seen.strategy, seen.batch_size, seen.rounds)
        rows = 0 if seen.strategy == OFF else seen.catch_up
        beside = max(seen.seconds - usual, 0.0)
        return self._beginnings.learn(self.costs.index(seen.batch_size), rows, beside, plain)

    def _lost(self, seen: Observation, late: float) -> float:
        """Seconds, against the strategy that scores best now."""
        scores = self.scores(seen.batch_size)
        worse = max(0.0, 1 - scores[seen.strategy] / max(scores.values()))
        return (float(seen.seconds) - late) * worse + late

    def log_fields(self) -> dict[str, float | str]:
        fields = {
            **super().log_fields(),
            "regret_seconds": self.regret_seconds,
            "regret_share": self.regret_seconds / self.seconds if self.seconds else 0.0,
            "probes": float(self.probes),
        }
        chains = self.acceptance.first_rate()
        return fields if chains is None else {**fields, "acceptance_depth_1": chains}

    def _state(self) -> dict[str, Any]:
        return {
            "costs": self.costs.state(),
            "acceptance": self.acceptance.state(),
            "best": {str(at): name for at, name in self._best.items()},
            "tried_at": dict(self._tried_at),
            "chunk_rounds": dict(self._chunk_rounds),
            "probe": dataclasses.asdict(self._probe) if self._probe else None,
            "beginnings": self._beginnings.state(),
            **{name: getattr(self, name) for name in _NUMBERS},
        }

    def _load(self, state: dict[str, Any]) -> None:
        self.costs = CostTable.from_state(state["costs"])
        self.acceptance.load(state["acceptance"])
        self._best = {int(at): name for at, name in state["best"].items()}
        self._tried_at = dict(state["tried_at"])
        self._chunk_rounds = dict(state.get("chunk_rounds", {}))
        probe = state["probe"] or {}  # of an older state it has other fields, and is given up
        self._probe = _Try(**probe) if "histogram" in probe else None
        self._beginnings.load(state.get("beginnings", {}))
        for name in _NUMBERS:  # an older state lacks some
            setattr(self, name, state.get(name, getattr(self, name)))


_NUMBERS = (
    "regret_seconds", "seconds", "probes", "_credit", "_free_try", "_free_at", "_free_gap",
    "_repeats", "_again", "_rounds", "_behind", "_drafting", "_chunk_tokens", "_looked_round",
    "_emitted", "_ended", "_last",
)  # fmt: skip
