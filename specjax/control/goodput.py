"""The default controller: the strategy with the most expected tokens per second.

    score(strategy, batch) = expected tokens per slot and round / seconds per round

Seconds come from a `CostTable`, tokens from `Acceptance`. Acceptance alone misleads: the same
drafts that gain a quarter in a batch of one may lose in a batch of 32, where rows are not free.
What the running strategy cannot show (deeper drafts, the costs of others, and while it is plain
decoding any drafts) is learned from probes. `docs/control.md` describes all of it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from specjax.config.strategy import Strategy
from specjax.control.base import OFF, Controller, Observation, log
from specjax.control.costs import CostTable
from specjax.spelling import checks_keywords

CHAIN = "chain"

_CEILING = 0.95  # acceptance of drafts as good as one may hope for
_PRIOR_ROUNDS = 4.0  # (slot, round) pairs of evidence that the prior of a depth is worth
_KEPT = 2.0  # evidence that is kept after a sudden change, which brings evidence of its own
_KEPT_FOR_NEW_WEIGHTS = 6.0  # the same of first drafts after an announced one
_SUDDEN = 4.0  # standard errors by which a chunk contradicts what was counted
_DRIFT = 0.1  # standard error of tokens per round from text to text
_MIN_PROBE_ROUNDS = 4
_PAUSE = 48  # rounds between probes
_LOST_AFTER = 4  # choices after which a probe that did not come back is given up
_SHORT = 8  # rounds of a chunk in which the start after another strategy counts for much
_LATE_STEP = 4.0  # plain rounds: what is later than usual by more may be the machine's fault
_MOST_LATE = 64  # plain rounds that a start can take; more is the machine's fault
_ENDS_WITHIN = 4096.0  # tokens after which an observed end of a sample counts half


@checks_keywords
@dataclasses.dataclass(frozen=True)
class GoodputConfig:
    """Settings of the goodput controller.

    Attributes:
      hysteresis: by what share a score must beat the current strategy's.
      probe_fraction: share of all seconds that probes may lose.
      probe_slot_rounds: (slot, round) pairs that a probe wants to see.
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
        if not 0 < self.half_life < math.inf:
            raise ValueError(f"half_life must be a finite number above 0, got {self.half_life}")
        if not 0 <= self.prior <= 1:
            raise ValueError(f"prior must be between 0 and 1, got {self.prior}")


class Acceptance:
    """How likely a draft is accepted at each depth, given that its parent was.

    All chains draft the same tokens, so they share one estimate: a round of any of them teaches
    about every shallower one, and a depth that was never drafted is taken to be like the one above
    it. A tree has an estimate of its own. Before a tree ran, it is taken for a chain with several
    independent drafts at each depth.

    Args:
      drafts: the strategies by name.
      half_life: rounds after which an observation counts half.
      prior: acceptance of a chain's first draft before anything was seen.
    """

    def __init__(self, drafts: Mapping[str, Strategy], half_life: float, prior: float):
        self._half_life, self._prior = half_life, prior
        drafting = {name: s for name, s in drafts.items() if not s.is_off}
        self.family = {name: CHAIN if s.is_chain else name for name, s in drafting.items()}
        self._steps = {name: s.steps for name, s in drafting.items()}
        self._widths: dict[str, tuple[float, ...]] = {}  # per depth
        for name, family in self.family.items():
            if self._steps[name] > len(self._widths.get(family, ())):
                self._widths[family] = effective_widths(drafting[name])
        # Per family and depth, discounted: drafts whose parent was accepted, and accepted ones.
        self._drafted = {f: [0.0] * len(w) for f, w in self._widths.items()}
        self._accepted = {f: [0.0] * len(w) for f, w in self._widths.items()}

    def learn(self, name: str, histogram: Sequence[int], rounds: int) -> None:
        """Takes in a chunk.

        Args:
          histogram: [k]: (slot, round) pairs that emitted k tokens, bonus included and before cuts.
        """
        if name not in self.family:
            return
        family, steps = self.family[name], self._steps[name]
        reached = [sum(histogram[1 + depth :]) for depth in range(steps + 1)]  # or deeper
        if self._contradicts(name, reached):
            self.forget(_KEPT)
        kept = 2 ** (-rounds / self._half_life)
        drafted, accepted = self._drafted[family], self._accepted[family]
        for depth in range(steps):
            if reached[depth]:
                drafted[depth] = kept * drafted[depth] + reached[depth]
                accepted[depth] = kept * accepted[depth] + reached[depth + 1]

    def forget(self, kept: float = _KEPT_FOR_NEW_WEIGHTS) -> None:
        """The head or the text changed: what was counted becomes a weak prior."""
        for family, drafted in self._drafted.items():
            most = [kept if depth == 0 else _KEPT for depth in range(len(drafted))]
            keep = [min(1.0, k / max(n, 1e-9)) for k, n in zip(most, drafted, strict=True)]
            for counts in (drafted, self._accepted[family]):
                counts[:] = [n * k for n, k in zip(counts, keep, strict=True)]

    def _contradicts(self, name: str, reached: Sequence[int]) -> bool:
        """Whether the tokens per round of a chunk are far from what is expected."""
        before, pairs = self._drafted[self.family[name]][0], reached[0]
        if before < 4 or pairs < 4:
            return False
        chances, reach = [], 1.0  # that so many drafts are accepted, or more
        for rate in self.rates(self.family[name])[: self._steps[name]]:
            reach *= rate
            chances.append(reach)
        mean = sum(chances)
        square = sum((2 * depth + 1) * chance for depth, chance in enumerate(chances))
        variance = max(square - mean**2, 0.05) * (1 / pairs + 1 / before) + _DRIFT**2
        return abs(sum(reached[1:]) / pairs - mean) > _SUDDEN * math.sqrt(variance)

    def rates(self, family: str) -> list[float]:
        """Acceptance per depth from 1, given that the parent was accepted."""
        rates, prior = [], self._prior
        for depth, width in enumerate(self._widths[family]):
            if family != CHAIN:
                prior = self._of_chains(depth, width, prior)
            drafted = self._drafted[family][depth] + _PRIOR_ROUNDS
            prior = (self._accepted[family][depth] + _PRIOR_ROUNDS * prior) / drafted
            rates.append(min(max(prior, 0.0), 1.0))
        return rates

    def _of_chains(self, depth: int, width: float, above: float) -> float:
        """The prior of a tree's depth, given the rate of the depth above."""
        drafted = self._drafted.get(CHAIN, [])
        if depth < len(drafted) and drafted[depth] > _KEPT:
            rate = self._accepted[CHAIN][depth] / drafted[depth]
        elif depth > 0:
            return above
        else:
            rate = self._prior
        return 1 - (1 - rate) ** width

    def expected_tokens(self, name: str, goes_on: float = 1.0, errors: float = 0.0) -> float:
        """Tokens per slot and round, bonus included.

        Args:
          goes_on: the share of tokens that are not the last of their sample. What was drafted
            behind the last one is accepted for nothing, and the deeper a strategy drafts the more.
          errors: by how many standard errors each rate is taken to be better than was seen.
        """
        if name not in self.family:
            return 1.0
        family, steps = self.family[name], self._steps[name]
        counts = zip(self.rates(family)[:steps], self._drafted[family], strict=False)
        rates = [min(r + errors * math.sqrt(r * (1 - r) / (n + 1)), 1.0) for r, n in counts]
        return _tokens(rates, goes_on)

    def hoped_tokens(self, name: str, running: str, goes_on: float = 1.0) -> float:
        """The same if every depth that `running` does not show were as good as can be."""
        if name not in self.family:
            return 1.0
        family = self.family[name]
        shown = self._steps[running] if self.family.get(running) == family else 0
        rates = self.rates(family)[: self._steps[name]]
        hoped = [max(rate, _CEILING) if at >= shown else rate for at, rate in enumerate(rates)]
        return _tokens(hoped, goes_on)

    def is_measured(self, name: str) -> bool:
        """Whether more drafts of its family were seen than what is kept of them after a change."""
        family = self.family.get(name)
        return family is None or self._drafted[family][0] > _KEPT_FOR_NEW_WEIGHTS

    def first_rate(self) -> float | None:
        """Acceptance of the first draft, of chains if there are any; None where nothing drafts."""
        families = sorted(self._widths, key=lambda f: f != CHAIN)
        return self.rates(families[0])[0] if families else None

    def state(self) -> dict[str, Any]:
        named = {"drafted": self._drafted, "accepted": self._accepted}
        return {key: {f: list(v) for f, v in value.items()} for key, value in named.items()}

    def load(self, state: Mapping[str, Any]) -> None:
        self._drafted, self._accepted = (
            {f: [float(x) for x in v] for f, v in state[key].items()}
            for key in ("drafted", "accepted")
        )


def effective_widths(strategy: Strategy) -> tuple[float, ...]:
    """Per depth, how many independent drafts a node's children are worth: their number's root."""
    if strategy.dynamic:
        steps, topk, rows = strategy.dynamic
        return (math.sqrt(min(topk, max(1.0, (rows - 1) / steps))),) * steps
    best = [sum(p[:-1] == (0,) * d for p in strategy.paths if len(p) == d + 1)
            for d in range(strategy.steps)]  # fmt: skip
    return tuple(math.sqrt(max(1, n)) for n in best)


def _tokens(rates: Sequence[float], goes_on: float) -> float:
    total = reach = 1.0
    for rate in rates:
        reach *= rate * goes_on
        total += reach
    return total


@dataclasses.dataclass
class Probe:
    """A strategy that is run for two chunks.

    The first chunk is one round: a strategy is slow at first, and after plain decoding a draft has
    to read what was emitted meanwhile. The second one is measured.

    Attributes:
      rounds: of the second chunk. asked: chunks that were asked for. seen: those that came back.
      waited: choices since both were asked for.
    """

    strategy: str
    rounds: int
    asked: int = 0
    seen: int = 0
    waited: int = 0


class Goodput(Controller):
    """Maximises tokens per second.

    Args:
      costs: seconds per round, best calibrated for every strategy and bucket; without it they are
        guessed until observed.

    Attributes:
      regret_seconds: estimated time lost, by probes and late switches, against the strategy that
        scored best when each chunk arrived. seconds: of all chunks. probes: so far.
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
        self.acceptance = Acceptance(self.strategies, self.config.half_life, self.config.prior)
        self.regret_seconds = self.seconds = 0.0
        self.probes = 0
        self._best: dict[int, str] = {}  # by bucket
        self._drafting = 1.0  # share of slots that are drafted for
        self._emitted, self._ended = 0.0, 0.0  # tokens and ends of samples, discounted
        self._chunk_tokens = 32.0  # that a slot can emit in a full chunk
        self._last = ""  # the strategy of the latest chunk
        self._probe: Probe | None = None
        self._probed: set[str] = set()  # since all candidates had a turn
        self._credit = 0.0  # seconds that probes may lose
        self._unjudged = 2 * self.config.probe_slot_rounds  # pairs wanted of new weights
        self._rounds, self._probed_at = 0, -_PAUSE
        self._late = {"plain": 0.0, "drafting": 0.0}  # of a start, in plain rounds

    # --- scores ----------------------------------------------------------------------------------

    def scores(self, batch_size: int, errors: float = 0.0) -> dict[str, float]:
        """Expected tokens per slot and second, by strategy.

        Args:
          errors: see `Acceptance.expected_tokens`.
        """
        return {
            arm: self._per_slot(self.acceptance.expected_tokens(arm, self._goes_on, errors))
            / self.round_seconds(arm, batch_size)
            for arm in self.arms
        }

    def round_seconds(self, arm: str, batch_size: int) -> float:
        """Of a round, with its share of what a full chunk takes beside its rounds."""
        return self.costs.seconds(arm, batch_size, self._full_rounds(arm))

    def _full_rounds(self, arm: str) -> float:
        draft = self.strategies.get(arm)
        return self._chunk_tokens / (1 + (draft.steps if draft else 0))

    @property
    def _goes_on(self) -> float:
        """The share of tokens after which a sample goes on."""
        return 1 - self._ended / max(self._emitted, self._ended, 1.0)

    def _per_slot(self, tokens: float) -> float:
        """Tokens of all slots, on average, where those that draft bring so many."""
        return 1 + self._drafting * (tokens - 1)

    def gains(self, batch_size: int) -> dict[str, float]:
        measured = {
            arm: score
            for arm, score in self.scores(batch_size).items()
            if self.costs.known(arm, batch_size) and self.acceptance.is_measured(arm)
        }
        plain = measured.get(OFF)
        return {} if plain is None else {arm: score / plain for arm, score in measured.items()}

    @property
    def active(self) -> str:
        scores = self.scores(1)
        return self.current or max(self.arms, key=scores.__getitem__)

    # --- choosing --------------------------------------------------------------------------------

    def choose(self, batch_size: int) -> str:
        scores, at = self.scores(batch_size), self.costs.index(batch_size)
        best = max(self.arms, key=scores.__getitem__)
        current = self._best.get(at)
        if current is None or scores[best] > (1 + self.config.hysteresis) * scores[current]:
            self._best[at] = current = best
        log.debug("Goodput selected: %s, scores: %s", current, scores)
        self.rounds_hint = None
        if self._probe is not None and self._probe.asked == 2:
            self._probe.waited += 1
            if self._probe.waited <= _LOST_AFTER:
                return current
            self._probe = None
        if self._probe is None:
            self._probe = self._next_probe(batch_size, current, scores)
        if self._probe is None:
            return current
        self.rounds_hint = self._probe.rounds if self._probe.asked else 1
        self._probe.asked += 1
        return self._probe.strategy

    def _next_probe(
        self, batch_size: int, current: str, scores: Mapping[str, float]
    ) -> Probe | None:
        """A probe of the nearest candidate that can be paid for; each has one turn, then all again.
        """
        unknown = self._unjudged > 0 and current == OFF  # which shows nothing of new weights
        if self._rounds < self._probed_at + _PAUSE and not unknown:
            return None
        candidates = self._candidates(batch_size, current, scores)
        if not self._probed.issuperset(candidates):
            candidates = [arm for arm in candidates if arm not in self._probed]
        else:
            self._probed.clear()
        rounds = max(_MIN_PROBE_ROUNDS, -(-self.config.probe_slot_rounds // batch_size))
        starts = sum(self._late.values()) * self.costs.seconds(OFF, batch_size)
        starts += 2 * self.costs.beside(batch_size)
        for name in candidates:
            worse = max(1 - scores[name] / scores[current], 0.0)
            loss = (1 + rounds) * self.costs.seconds(name, batch_size) * worse + starts
            self._credit = min(self._credit, 4 * loss)  # no hoarding for many probes in a row
            # New weights may overdraw the account: their probes must not wait.
            if self._credit >= (-loss if unknown and name != OFF else loss):
                self._credit -= loss
                self._probed.add(name)
                self.probes += 1
                return Probe(name, rounds)
        return None

    def _candidates(
        self, batch_size: int, current: str, scores: Mapping[str, float]
    ) -> list[str]:
        """What would win if all that is not known turned out well, and plain decoding; the
        neighbours of what runs come first."""
        drafts = self.strategies
        order = sorted(self.arms, key=lambda arm: (drafts[arm].steps, drafts[arm].rows))
        here, seen, wanted = order.index(current), set(), []
        for arm in sorted(order, key=lambda arm: abs(order.index(arm) - here)):
            hoped = self.acceptance.hoped_tokens(arm, current, self._goes_on)
            cheapest = self.round_seconds(arm, batch_size) * (1 - self.costs.slack(arm, batch_size))
            least = (1 + self.config.hysteresis) * scores[current]
            if arm == current or (arm != OFF and self._per_slot(hoped) / cheapest <= least):
                continue
            family = self.acceptance.family.get(arm)
            if current == OFF and family in seen:
                continue  # the nearest chain shows what others are worth, and loses least
            seen.add(family)
            wanted.append(arm)
        return wanted

    # --- learning --------------------------------------------------------------------------------

    def weights_changed(self) -> None:
        self.acceptance.forget()
        self._unjudged, self._probe = 2 * self.config.probe_slot_rounds, None

    def calibrated(self, costs: CostTable) -> None:
        """Takes freshly measured costs for what was learned of them; acceptance is kept."""
        self.costs = CostTable.from_state(costs.state())
        self._best, self._probe = {}, None

    def learn(self, seen: Observation) -> None:
        name, batch, rounds, per_round = (
            seen.strategy, seen.batch_size, seen.rounds, seen.seconds_per_round
        )  # fmt: skip
        drafts, known = name != OFF, per_round is not None
        self._rounds += rounds
        self._drafting = 1 - seen.opted_out / batch
        kept = 2 ** (-seen.tokens / _ENDS_WITHIN)
        self._emitted = kept * self._emitted + seen.tokens
        self._ended = kept * self._ended + seen.ended
        starts, self._last = name != self._last, name
        reads = drafts and seen.catch_up > 0
        late = self._late_seconds(seen) if known and (starts or reads) else 0.0
        # The first chunk after another strategy's does not say what its rounds took.
        if known and not reads and not (starts and rounds < _SHORT):
            self.costs.observe(name, batch, per_round, rounds)
        self.acceptance.learn(name, seen.histogram, rounds)
        is_probe = self._probe is not None and self._probe.asked and name == self._probe.strategy
        if drafts:
            self._judge(seen)
        if not is_probe:
            room = rounds * (1 + self.strategies[name].steps)
            self._chunk_tokens += 0.25 * (room - self._chunk_tokens)
        if known:
            self._account(seen, late)
        if is_probe:
            self._probe.seen += 1
            if self._probe.seen == 2:
                self._probe, self._probed_at = None, self._rounds

    def _judge(self, seen: Observation) -> None:
        """New weights are judged once enough was seen, or what drafts is clearly worse than `off`.
        """
        scores = self.scores(seen.batch_size, errors=1.0)
        is_clear = OFF in scores and max(scores, key=scores.__getitem__) == OFF
        self._unjudged = 0 if is_clear else max(self._unjudged - seen.slot_rounds, 0)

    def _late_seconds(self, seen: Observation) -> float:
        """Seconds of a first chunk that its rounds did not take; remembers what is usual."""
        plain = self.costs.seconds(OFF, seen.batch_size)
        usual = seen.rounds * self.costs.seconds(seen.strategy, seen.batch_size, seen.rounds)
        late = min(max(seen.seconds - usual, 0.0), _MOST_LATE * plain)
        of = "plain" if seen.strategy == OFF else "drafting"
        self._late[of] += 0.3 * min(late / plain - self._late[of], _LATE_STEP)
        return late

    def _account(self, seen: Observation, late: float) -> None:
        """Counts what the chunk lost against full chunks of the strategy that scores best."""
        scores, seconds = self.scores(seen.batch_size), float(seen.seconds)
        worse = max(0.0, 1 - scores[seen.strategy] / max(scores.values()))
        late = min(late, seconds)
        lost = (seconds - late) * worse + late
        self.seconds += seconds
        self.regret_seconds += lost
        self._credit += self.config.probe_fraction * seconds

    def log_fields(self) -> dict[str, float | str]:
        fields = {
            **super().log_fields(),
            "regret_seconds": self.regret_seconds,
            "regret_share": self.regret_seconds / self.seconds if self.seconds else 0.0,
            "probes": float(self.probes),
        }
        first = self.acceptance.first_rate()
        return fields if first is None else {**fields, "acceptance_depth_1": first}

    # --- state -----------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        return {
            **super().state(),
            "costs": self.costs.state(),
            "acceptance": self.acceptance.state(),
            "best": {str(at): name for at, name in self._best.items()},
            "probe": dataclasses.asdict(self._probe) if self._probe else None,
            "probed": sorted(self._probed),
            "late": dict(self._late),
            **{name: getattr(self, name) for name in _NUMBERS},
        }

    def load_state(self, state: dict[str, Any]) -> None:
        super().load_state(state)
        if "probed" not in state:
            log.warning(
                "the state of the goodput controller was saved by an earlier version, which kept "
                "other figures: it is not used, and this one starts from its calibration"
            )
            return
        self.costs = CostTable.from_state(state["costs"])
        self.acceptance.load(state["acceptance"])
        self._best = {int(at): name for at, name in state["best"].items()}
        self._probe = Probe(**state["probe"]) if state["probe"] else None
        self._probed, self._late = set(state["probed"]), dict(state["late"])
        for name in _NUMBERS:
            setattr(self, name, state[name])


_NUMBERS = (
    "regret_seconds", "seconds", "probes", "_drafting", "_emitted", "_ended", "_chunk_tokens",
    "_last", "_credit", "_unjudged", "_rounds", "_probed_at",
)  # fmt: skip
