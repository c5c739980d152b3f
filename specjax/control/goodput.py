"""The default controller: the strategy with the most expected tokens per second.

    score(strategy, batch) = expected tokens per slot and round / seconds per round

Seconds come from a `CostTable`, tokens from `Acceptance`, less those that come to lie behind the
end of their sample. Acceptance alone misleads: the same
drafts that gain a quarter in a batch of one may lose in a batch of 32, where rows are not free.

Plain decoding shows nothing of the head, and a shallow chain nothing of deeper drafts. So
strategies that would win if what is not known turned out well are tried now and then, see `tries`.
Part of what a try loses is the draft's catching up: after plain decoding it has to read what was
emitted meanwhile, which may take as long as many rounds. Strategies that would lose even with
perfect drafts are never tried.

What runs alone shows nothing of the others' costs either. Where it grows dearer, the table presumes
that all do, and its `slack` (see `costs`) says by how much that may be wrong, so the others come to
be worth a try as the presumption grows. Plain decoding is measured soon and then now and then even
where it seems hopeless: it is what no choice must lose against.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from specjax.config.strategy import Strategy
from specjax.control.acceptance import Acceptance
from specjax.control.base import OFF, Controller, Observation, log
from specjax.control.beginnings import Beginnings
from specjax.control.costs import CostTable
from specjax.control.tries import WAITING_ROUNDS, Candidate, Tries
from specjax.spelling import checks_keywords

_ENDS_WITHIN = 4096.0  # tokens after which an observed end of a sample counts half
_BOTH = 2  # what a try takes to begin, and what goes on after it likewise
_SHORT = 8  # rounds of a chunk: it tells little of costs where another strategy ran before
_OVERDUE = 4000  # rounds after which plain decoding is measured again, however dear it seems


@checks_keywords
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


class Goodput(Controller):
    """Maximises tokens per second.

    Args:
      costs: seconds per round, best calibrated for every strategy and bucket; without it they are
        guessed until observed.

    Attributes:
      regret_seconds: estimated time lost, by tries and late switches, against the strategy that
        scored best when each chunk arrived.
      tries: who is tried, and when.
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
        self.tries = Tries(self.config.probe_fraction, self.config.probe_slot_rounds)
        self._best: dict[int, str] = {}
        self._behind, self._drafting = 0, 1.0
        self._emitted, self._ended = 0.0, 0.0  # tokens and ends of samples, discounted
        self._beginnings = Beginnings()
        self._last = ""  # the strategy of the latest chunk
        self._chunk_tokens = 32.0  # that a slot can emit in one
        self._chunk_rounds: dict[str, float] = {}  # by strategy; of tries, the most

    def scores(self, batch_size: int) -> dict[str, float]:
        """Expected tokens per slot and second, by strategy."""
        goes_on, expected = self._goes_on, self.acceptance.expected_tokens
        return {arm: self._score(arm, expected(arm, goes_on), batch_size) for arm in self.arms}

    def _score(self, arm: str, tokens: float, batch_size: int) -> float:
        """Tokens per slot and second where those that draft bring so many per round."""
        return self._per_slot(tokens) / self.round_seconds(arm, batch_size)

    def round_seconds(self, arm: str, batch_size: int) -> float:
        """Of a round, with its share of what lies beside the rounds of a full chunk."""
        return self.costs.seconds(arm, batch_size, self._full_rounds(arm))

    def slack(self, arm: str, batch_size: int, than: str | None = None) -> float:
        """By what share `round_seconds`, beside another's, may well be less.

        Args:
          than: the other one; see `CostTable.slack`.
        """
        alone = self.costs.seconds(arm, batch_size) / self.round_seconds(arm, batch_size)
        return alone * self.costs.slack(arm, batch_size, than)

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
        self.tries.weights_changed()

    def _first(self) -> str:
        scores = self.scores(1)
        return max(self.arms, key=scores.__getitem__)

    @property
    def is_curious(self) -> bool:
        return self.tries.is_wanted

    def calibrated(self, costs: CostTable) -> None:
        """Takes freshly measured costs for what was learned of them; acceptance is kept."""
        self.costs = CostTable.from_state(costs.state())
        self._best, self._beginnings = {}, Beginnings()
        self.tries.recalibrated()

    def _choose(self, batch_size: int) -> str:
        scores = self.scores(batch_size)
        at = self.costs.index(batch_size)
        best = max(self.arms, key=scores.__getitem__)
        current = self._best.get(at)
        if current is None or scores[best] > (1 + self.config.hysteresis) * scores[current]:
            self._best[at] = current = best
        log.debug("Goodput selected: %s, scores: %s", current, scores)
        waits = self.tries.wait()
        if not waits and self.tries.running is None and self.tries.look():
            first = self._beginnings.first_seconds(at)
            candidates = self._candidates(batch_size, current, scores)
            self.tries.begin(candidates, batch_size, current == OFF, first)
        if waits or self.tries.running is None:
            self.rounds_hint = self.tries.waiting_rounds
            return current
        name, self.rounds_hint = self.tries.ask()
        return name

    def _candidates(
        self, batch_size: int, current: str, scores: dict[str, float]
    ) -> dict[str, Candidate]:
        """What would win if all that is not known turned out well, and what was not seen for long.

        One try teaches the acceptance of a whole family, but the cost of one strategy only: so
        those whose acceptance has to be better share their turns.
        """
        least = (1 + self.config.hysteresis) * scores[current]
        wanted = self.tries.rounds_wanted(batch_size)
        candidates = {}
        for arm, score in scores.items():
            seconds = self.round_seconds(arm, batch_size)
            cheaper = 1 / (1 - self.slack(arm, batch_size, current))
            hoped = self.acceptance.hoped_tokens(arm, self._goes_on)
            hope = self._per_slot(hoped) / seconds * cheaper
            overdue = arm == OFF and self._is_overdue(batch_size)
            if arm == current or (hope <= least and not overdue):
                continue
            most = self._chunk_rounds.get(arm, self._full_rounds(arm))
            rounds = 1 + min(wanted, max(most, 1.0))
            loss = rounds * seconds * max(0.0, 1 - score / scores[current])
            loss += self._begin_seconds(arm, batch_size)
            loss += sum(self._short_seconds(arm, batch_size, n) for n in (1, rounds - 1))
            turn = arm if score * cheaper > least else self.acceptance.family(arm) or arm
            candidates[arm] = Candidate(loss, hope, turn, drafts=arm != OFF)
        return candidates

    def _is_overdue(self, batch_size: int) -> bool:
        """Whether plain decoding is to be measured, however dear it seems."""
        age, ran = self.costs.age(OFF, batch_size), self.costs.chunks(OFF, batch_size) > 0
        return not ran or age > _OVERDUE

    def _steps(self, arm: str) -> int:
        draft = self.drafts.get(arm)
        return draft.steps if draft else 0

    def _begin_seconds(self, arm: str, batch_size: int) -> float:
        """Expected seconds that a try takes to begin, catching up included; 0 if unknown."""
        rows = 0 if arm == OFF else self._behind
        first = self._beginnings.first_seconds(self.costs.index(batch_size))
        return _BOTH * first + self.catch_up_seconds(batch_size, rows)

    def _short_seconds(self, arm: str, batch_size: int, rounds: float) -> float:
        """That a chunk of a try takes for being short: it is enqueued and read like a full one."""
        return self.costs.beside(batch_size) * max(1 - rounds / self._full_rounds(arm), 0.0)

    def catch_up_seconds(self, batch_size: int, rows: int) -> float:
        """Expected seconds until a draft has read `rows` tokens of plain decoding; 0 if unknown."""
        return self._beginnings.reading_seconds(self.costs.index(batch_size), rows)

    def observe(self, seen: Observation) -> None:
        super().observe(seen)
        if not seen.slot_rounds and self.tries.of(seen):
            self.tries.ask_again()  # its slots had all ended

    def _learn(self, seen: Observation) -> None:
        rounds, known = seen.rounds, seen.seconds_per_round is not None
        drafts = seen.strategy != OFF
        self._drafting = 1 - seen.opted_out / seen.batch_size
        kept = 2 ** (-seen.tokens / _ENDS_WITHIN)
        self._emitted = kept * self._emitted + seen.tokens
        self._ended = kept * self._ended + seen.ended
        probe = self.tries.of(seen)
        begins = probe is not None and probe.begins
        late = self._late(seen) if known and (begins or (drafts and seen.catch_up)) else 0.0
        self._behind = 0 if drafts else seen.catch_up + rounds
        # What a chunk took in which the draft caught up does not say which of the two took it.
        after_another = seen.strategy != self._last and rounds < _SHORT
        self._last = seen.strategy
        unclear = begins or after_another or (drafts and seen.catch_up > 0)
        per_round = None if unclear else seen.seconds_per_round
        if per_round and probe:
            beside = self.costs.beside(seen.batch_size)
            per_round = probe.seconds_per_round(per_round, rounds, beside)
        self.costs.observe(seen.strategy, seen.batch_size, per_round, rounds)
        self.acceptance.age(rounds)
        histogram = probe.with_first(seen.histogram) if probe else seen.histogram
        if not begins:  # a try is judged as a whole
            self.acceptance.learn(seen.strategy, histogram, rounds)
            wanted = probe.rounds if probe else WAITING_ROUNDS
            self._count_rounds(seen.strategy, rounds, cut=seen.is_try and rounds >= wanted)
        seconds = float(seen.seconds) if known else 0.0
        lost = self._lost(seen, late, probe is not None) if known else None
        self.tries.passed(rounds, seconds)
        self.seconds += seconds
        self.regret_seconds += lost or 0.0
        if probe:
            self.tries.came(seen, lost)
        if probe and not begins:
            is_close = probe.free and self._is_close(seen.batch_size)
            self.tries.end(sum(histogram[1:]), is_close)

    def _count_rounds(self, arm: str, rounds: int, cut: bool) -> None:
        """A chunk had so many; if it was cut it could have had more."""
        before = self._chunk_rounds.get(arm, rounds)
        self._chunk_rounds[arm] = max(before, rounds) if cut else 0.75 * before + 0.25 * rounds
        if not cut:
            emits = rounds * (1 + self._steps(arm))
            self._chunk_tokens += 0.25 * (emits - self._chunk_tokens)

    def _is_close(self, batch_size: int) -> bool:
        """Whether plain decoding scores best, but what drafts may well be better.

        Whatever drafts tells of the head as it runs; plain decoding tells nothing.
        """
        scores = self.scores(batch_size)
        if max(self.arms, key=scores.__getitem__) != OFF:
            return False
        goes_on, likely = self._goes_on, self.acceptance.likely_tokens
        return any(
            self._score(arm, likely(arm, goes_on), batch_size) > scores[OFF] for arm in self.arms
        )

    def _late(self, seen: Observation) -> float:
        """Seconds of the chunk that its rounds did not take; remembers what for."""
        plain = self.round_seconds(OFF, seen.batch_size)
        usual = seen.rounds * self.costs.seconds(seen.strategy, seen.batch_size, seen.rounds)
        rows = 0 if seen.strategy == OFF else seen.catch_up
        late = max(seen.seconds - usual, 0.0)
        return self._beginnings.learn(self.costs.index(seen.batch_size), rows, late, plain)

    def _lost(self, seen: Observation, late: float, is_of_try: bool) -> float:
        """Seconds, against full chunks of the strategy that scores best now."""
        scores = self.scores(seen.batch_size)
        worse = max(0.0, 1 - scores[seen.strategy] / max(scores.values()))
        if is_of_try:
            late += self._short_seconds(seen.strategy, seen.batch_size, seen.rounds)
        late = min(late, float(seen.seconds))
        return (float(seen.seconds) - late) * worse + late

    def log_fields(self) -> dict[str, float | str]:
        fields = {
            **super().log_fields(),
            "regret_seconds": self.regret_seconds,
            "regret_share": self.regret_seconds / self.seconds if self.seconds else 0.0,
            "probes": float(self.tries.count),
        }
        chains = self.acceptance.first_rate()
        return fields if chains is None else {**fields, "acceptance_depth_1": chains}

    def _state(self) -> dict[str, Any]:
        return {
            "costs": self.costs.state(),
            "acceptance": self.acceptance.state(),
            "best": {str(at): name for at, name in self._best.items()},
            "chunk_rounds": dict(self._chunk_rounds),
            "tries": self.tries.state(),
            "beginnings": self._beginnings.state(),
            **{name: getattr(self, name) for name in _NUMBERS},
        }

    def _load(self, state: dict[str, Any]) -> None:
        self.costs = CostTable.from_state(state["costs"])
        self.acceptance.load(state["acceptance"])
        self._best = {int(at): name for at, name in state["best"].items()}
        self._chunk_rounds = dict(state.get("chunk_rounds", {}))
        self.tries.load(state.get("tries", {}))
        self._beginnings.load(state.get("beginnings", {}))
        for name in _NUMBERS:  # an older state lacks some
            setattr(self, name, state.get(name, getattr(self, name)))


_NUMBERS = (
    "regret_seconds", "seconds", "_behind", "_drafting", "_chunk_tokens", "_emitted", "_ended",
    "_last",
)  # fmt: skip
