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
first. So a try that drafts begins with one round in a chunk of its own, from which no costs are
learned, or what is tried would be thought to be dear for ever. New weights ask for a try whatever
the account says; where such tries keep failing they become rare.
Strategies that would lose even with perfect drafts are never tried.

What runs alone shows nothing of the others' costs either. Where it grows dearer, the table presumes
that all do, and its `slack` (see `costs`) says by how much that may be wrong, so the others come to
be worth a try as the presumption grows. Plain decoding is measured now and then even where it seems
hopeless: it is what no choice must lose against.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np

from specjax.config.strategy import Strategy
from specjax.control.acceptance import Acceptance
from specjax.control.base import OFF, Controller, Observation, log
from specjax.control.costs import CostTable

_FREE_EVERY = 128  # rounds between tries that swapped weights may ask for without paying
_FREE_AGAIN = 2  # how often such a try is repeated because it told too little,
_FREE_CLOSE = 8  # and how often because what it tried is about as good as what runs:
_CLOSE = 0.2  # worse by this share at most; the few rounds of a try do not tell it from better
_FREE_RARELY = 32 * _FREE_EVERY  # the same after many that failed
_CATCH_UP_ROWS = 128  # that a draft reads at most: the source remembers no more
_ENDS_WITHIN = 4096.0  # tokens after which an observed end of a sample counts half
_MEDIAN_OF = 5  # the last ones of what it takes to catch up, or to begin
_MOST_CATCH_UP = 64  # plain rounds: more is taken for a hiccup of the machine
_MOST_BEGIN = 4  # the same of a strategy that runs after another
_BOTH = 2  # what a try takes to begin, and what goes on after it likewise
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
        self._repeats, self._again = False, 0
        self._behind, self._drafting = 0, 1.0
        self._emitted, self._ended = 0.0, 0.0  # tokens and ends of samples, discounted
        self._catch_up: dict[int, list[float]] = {}  # seconds per row, by bucket
        self._begin: dict[int, list[float]] = {}  # seconds that a first round takes longer
        self._rounds = 0
        self._chunk_rounds = 16.0
        self._probe: dict[str, Any] | None = None
        self._tried_at: dict[str, int] = {}
        self._tried_round = 0

    def scores(self, batch_size: int) -> dict[str, float]:
        """Expected tokens per slot and second, by strategy."""
        return {
            arm: self._per_slot(self.acceptance.expected_tokens(arm, self._goes_on))
            / self.costs.seconds(arm, batch_size)
            for arm in self.arms
        }

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
        self._free_try, self._repeats, self._again = True, False, 0

    def calibrated(self, costs: CostTable) -> None:
        """Takes freshly measured costs for what was learned of them; acceptance is kept."""
        self.costs = CostTable.from_state(costs.state())
        self._best, self._probe, self._catch_up, self._begin = {}, None, {}, {}

    def _choose(self, batch_size: int) -> str:
        scores = self.scores(batch_size)
        at = self.costs.index(batch_size)
        best = max(self.arms, key=scores.__getitem__)
        current = self._best.get(at)
        if current is None or scores[best] > (1 + self.config.hysteresis) * scores[current]:
            self._best[at] = current = best
        log.debug("Goodput selected: %s, scores: %s", current, scores)
        self.rounds_hint = None
        if self._probe is not None:
            if rounds := self._probe.pop("then", None):
                self.rounds_hint = rounds
                return self._probe["arm"]
            self._probe["age"] += 1
            if self._probe["age"] <= _ARRIVES_WITHIN:
                return current
            self._probe = None
        return self._try_another(batch_size, current, scores) or current

    def _try_another(self, batch_size: int, current: str, scores: dict[str, float]) -> str | None:
        """The strategy to try in this chunk, if one is worth it and can be paid for."""
        free = self._free_try and (self._repeats or self._rounds >= self._free_at)
        if not free and self._rounds < self._tried_round + _PAUSE:
            return None
        least = (1 + self.config.hysteresis) * scores[current]
        wanted = max(_MIN_PROBE, -(-self.config.probe_slot_rounds // batch_size))
        rounds = min(float(wanted), max(self._chunk_rounds, 1.0))
        losses, turns, hopes = {}, {}, {}
        for arm, score in scores.items():
            seconds = self.costs.seconds(arm, batch_size)
            cheaper = 1 / (1 - self.costs.slack(arm, batch_size))
            hoped = self.acceptance.hoped_tokens(arm, self._goes_on)
            hope = self._per_slot(hoped) / seconds * cheaper
            overdue = arm == OFF and self.costs.age(arm, batch_size) > _OVERDUE
            if arm == current or (hope <= least and not overdue):
                continue
            hopes[arm] = hope
            worse = max(0.0, 1 - score / scores[current])
            drafts = arm != OFF
            losses[arm] = (rounds + drafts) * seconds * worse
            losses[arm] += drafts * self._begin_seconds(batch_size)
            # One try teaches the acceptance of a whole family, but the cost of one strategy only.
            turns[arm] = arm if score * cheaper > least else self.acceptance.family(arm) or arm
        if not losses:
            return None
        failed = free and self._free_at > 0 and current == OFF  # as far as the last one told
        if failed and self._free_gap > _FREE_EVERY:  # and the one before: now at the least cost
            name = min(losses, key=losses.__getitem__)
        elif free:  # what may win most is drafted deepest, and tells of all shallower ones
            name = max(hopes, key=hopes.__getitem__)
        else:  # they take turns, or the cheapest would starve the others
            name = min(losses, key=lambda arm: (self._tried_at.get(turns[arm], -1), losses[arm]))
        self._credit = min(self._credit, 2 * losses[name])  # no hoarding for a spree of tries
        if not free and self._credit < losses[name]:
            return None
        self._tried_round = self._rounds
        if free:
            if not self._repeats:
                self._free_gap = min(2 * self._free_gap, _FREE_RARELY) if failed else _FREE_EVERY
                self._free_at = self._rounds + self._free_gap
            self._free_try = self._repeats = False
        charged = 0.0 if free else losses[name]
        self._credit -= charged
        self._probe = {
            "arm": name, "age": 0, "charged": charged, "lost": 0.0, "free": free,
            "enters": name != OFF, "accepted": [],
        }  # fmt: skip
        self._tried_at[turns[name]] = self.probes
        self.rounds_hint = wanted
        if self._probe["enters"]:
            self.rounds_hint, self._probe["then"] = 1, wanted
        self.probes += 1
        return name

    def _begin_seconds(self, batch_size: int) -> float:
        """Expected seconds that the first round of a try takes longer; 0 if unknown."""
        if self._behind:
            return self.catch_up_seconds(batch_size, self._behind)
        seen = self._begin.get(self.costs.index(batch_size))
        return _BOTH * statistics.median(seen) if seen else 0.0

    def catch_up_seconds(self, batch_size: int, rows: int) -> float:
        """Expected seconds until a draft has read `rows` tokens of plain decoding; 0 if unknown."""
        seen = self._catch_up.get(self.costs.index(batch_size))
        return statistics.median(seen) * min(rows, _CATCH_UP_ROWS) if seen else 0.0

    def _learn(self, seen: Observation) -> None:
        rounds, known = seen.rounds, seen.seconds_per_round is not None
        self._rounds += rounds
        self._drafting = 1 - seen.opted_out / seen.batch_size
        kept = 2 ** (-seen.tokens / _ENDS_WITHIN)
        self._emitted = kept * self._emitted + seen.tokens
        self._ended = kept * self._ended + seen.ended
        probed = seen.is_try and self._probe is not None and self._probe["arm"] == seen.strategy
        entering = probed and self._probe["enters"]
        enters = seen.strategy != OFF and bool(seen.catch_up or entering)
        self._behind = seen.catch_up + rounds if seen.strategy == OFF else 0
        late = self._late(seen) if enters and known else 0.0
        # What a chunk took in which the draft caught up does not say which of the two took it.
        per_round = None if enters else seen.seconds_per_round
        self.costs.observe(seen.strategy, seen.batch_size, per_round, rounds)
        self.acceptance.age(rounds)
        accepted = seen.accepted.ravel()
        if entering:
            self._probe["accepted"] = accepted.tolist()
        else:  # a try is judged as a whole: few slots say little in one round
            before = self._probe["accepted"] if probed else []
            accepted = np.concatenate([np.array(before, accepted.dtype), accepted])
            self.acceptance.learn(seen.strategy, accepted, rounds)
        if not probed:
            self._chunk_rounds += 0.25 * (rounds - self._chunk_rounds)
        if known:
            self._account(seen, late, probed)
        if entering:
            self._probe["enters"] = False  # the try itself comes now
        elif probed:
            told = int((accepted >= 0).sum())
            if self._probe["free"]:
                self._try_again(told < self.config.probe_slot_rounds // 2, seen)
            self._probe = None

    def _try_again(self, short: bool, seen: Observation) -> None:
        """New weights ask for another try, at once, unless they have had several.

        Args:
          short: samples ended, or a chunk has few rounds.
        """
        scores = self.scores(seen.batch_size)
        best = max(scores.values())
        close = (1 - _CLOSE) * best < scores[seen.strategy] < best
        if self._again < (_FREE_CLOSE if close else _FREE_AGAIN if short else 0):
            self._free_try, self._repeats, self._again = True, True, self._again + 1

    def _late(self, seen: Observation) -> float:
        """Seconds lost as a strategy begins: those of the chunk that its rounds did not take."""
        at, plain = self.costs.index(seen.batch_size), self.costs.seconds(OFF, seen.batch_size)
        rounds = seen.rounds * self.costs.seconds(seen.strategy, seen.batch_size)
        most = (_MOST_CATCH_UP if seen.catch_up else _MOST_BEGIN) * plain
        spent = min(max(seen.seconds - rounds, 0.0), most)
        rows = min(seen.catch_up, _CATCH_UP_ROWS)
        kept = (self._catch_up if rows else self._begin).setdefault(at, [])
        kept.append(spent / (rows or 1))
        del kept[:-_MEDIAN_OF]
        return spent if rows else _BOTH * spent

    def _account(self, seen: Observation, late: float, probed: bool) -> None:
        scores, seconds = self.scores(seen.batch_size), float(seen.seconds)
        worse = max(0.0, 1 - scores[seen.strategy] / max(scores.values()))
        loss = max(seconds - late, 0.0) * worse + late
        self.seconds += seconds
        self.regret_seconds += loss
        self._credit += self.config.probe_fraction * seconds
        if probed and not self._probe["free"]:
            charged, self._probe["lost"] = self._probe["charged"], self._probe["lost"] + loss
            if not self._probe["enters"]:
                # A hiccup of the machine during a try is not the try's fault.
                self._credit += charged - min(self._probe["lost"], 2 * charged)

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
            "probe": dict(self._probe) if self._probe else None,
            "catch_up": {str(at): list(seen) for at, seen in self._catch_up.items()},
            "begin": {str(at): list(seen) for at, seen in self._begin.items()},
            **{name: getattr(self, name) for name in _NUMBERS},
        }

    def _load(self, state: dict[str, Any]) -> None:
        self.costs = CostTable.from_state(state["costs"])
        self.acceptance.load(state["acceptance"])
        self._best = {int(at): name for at, name in state["best"].items()}
        self._tried_at = dict(state["tried_at"])
        self._probe = dict(state["probe"]) if state["probe"] else None
        self._catch_up, self._begin = (
            {int(at): list(seen) for at, seen in state.get(name, {}).items()}
            for name in ("catch_up", "begin")
        )
        for name in _NUMBERS:  # an older state lacks some
            setattr(self, name, state.get(name, getattr(self, name)))


_NUMBERS = (
    "regret_seconds", "seconds", "probes", "_credit", "_free_try", "_free_at", "_free_gap",
    "_repeats", "_again", "_rounds", "_behind", "_drafting", "_chunk_rounds", "_tried_round",
    "_emitted", "_ended",
)  # fmt: skip
