"""The default kind of controller: it takes the strategy with the most expected tokens per second.

    score(strategy, batch, context) = expected tokens per slot and round / seconds per round

Seconds come from a `CostTable`, tokens from `Acceptance`. What the running strategy cannot show
(deeper drafts, the costs of other strategies and, under plain decoding, any draft) is learned from
probes. `docs/control.md` describes it.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from specjax.config.checks import require
from specjax.config.strategy import Strategy
from specjax.control.base import OFF, Controller, Observation
from specjax.control.costs import CostTable

CHAIN = "chain"
HALF_LIFE = 100.0  # rounds after which an observed acceptance counts half
PRIOR = 0.7  # acceptance of a first draft before anything was observed
PROBE_PAIRS = 16  # (slot, round) pairs that a probe measures

_BEST_RATE = 0.95  # acceptance that a draft which was not seen may have at best
_PRIOR_PAIRS = 4.0  # weight of the prior of a depth, in (slot, round) pairs
_KEPT = 2.0  # pairs that the counts of a depth are worth after a sudden change
_KEPT_FOR_NEW_WEIGHTS = 6.0  # pairs that those of first drafts are worth after new weights
_SUDDEN = 4.0  # standard errors by which a chunk contradicts the counts
_DRIFT = 0.1  # standard error of tokens per round from text to text
_MIN_PROBE_ROUNDS = 4
_PAUSE = 48  # rounds between probes
_WAIT = 2  # choices until both chunks of a probe have been observed
_SHORT = 8  # rounds below which a first chunk says too little of its rounds' seconds
_START_STEP = 4.0  # largest step of the average start, in plain rounds
_LONGEST_START = 64  # plain rounds; anything longer is taken for another process's doing
_ENDS_WITHIN = 4096.0  # tokens after which an observed end of a sample counts half


@dataclasses.dataclass(frozen=True)
class GoodputConfig:
    """Settings of the goodput controller.

    Attributes:
      hysteresis: share by which a score must beat that of the strategy in use at the batch size.
      probe_fraction: share of all seconds that probes may lose.
    """

    hysteresis: float = 0.01
    probe_fraction: float = 0.01

    def __post_init__(self):
        require(self, "hysteresis", 0 <= self.hysteresis < 1, "at least 0 and below 1")
        require(self, "probe_fraction", 0 <= self.probe_fraction < 1, "at least 0 and below 1")


class Acceptance:
    """Estimates how likely a draft is accepted at each depth, given that its parent was.

    All chains draft the same tokens, so they share one estimate: a round of any of them teaches
    about every shallower one, and a depth that was never drafted is taken to be like the one above
    it. Each tree has an estimate of its own, which begins with that of the chains.

    Args:
      strategies: the strategies by name.
      half_life: number of rounds after which an observation counts half.
      prior: acceptance of a first draft before anything was observed.

    Attributes:
      shared: key of the estimate that each drafting strategy uses, by name: "chain" for all chains,
        the name of a tree.
    """

    def __init__(self, strategies: Mapping[str, Strategy], half_life: float, prior: float):
        self._half_life, self._prior = half_life, prior
        drafting = {name: s for name, s in strategies.items() if not s.is_off}
        self.shared = {name: CHAIN if s.is_chain else name for name, s in drafting.items()}
        self._steps = {name: s.steps for name, s in drafting.items()}
        depths = dict.fromkeys(self.shared.values(), 0)
        for name, key in self.shared.items():
            depths[key] = max(depths[key], self._steps[name])
        # Discounted numbers by key and depth: drafts whose parent was accepted, and accepted ones.
        self._drafted = {key: [0.0] * depth for key, depth in depths.items()}
        self._accepted = {key: [0.0] * depth for key, depth in depths.items()}

    def learn(self, name: str, histogram: Sequence[int], rounds: int) -> None:
        """Takes in a chunk of `rounds`.

        Args:
          name: the strategy of the chunk.
          histogram: number of (slot, round) pairs that emitted k tokens, bonus included and before
            cuts, by k.
          rounds: number of rounds that ran.
        """
        if name not in self.shared:
            return
        key, steps = self.shared[name], self._steps[name]
        reached = [sum(histogram[1 + depth :]) for depth in range(steps + 1)]  # or deeper
        if self._contradicts(name, reached):
            self.forget(_KEPT)
        kept = 2 ** (-rounds / self._half_life)
        drafted, accepted = self._drafted[key], self._accepted[key]
        for depth in range(steps):
            if reached[depth]:
                drafted[depth] = kept * drafted[depth] + reached[depth]
                accepted[depth] = kept * accepted[depth] + reached[depth + 1]

    def forget(self, kept: float = _KEPT_FOR_NEW_WEIGHTS) -> None:
        """Scales the counts down to a weak prior, after the head or the text changed."""
        for key, drafted in self._drafted.items():
            most = [kept if depth == 0 else _KEPT for depth in range(len(drafted))]
            keep = [min(1.0, k / max(n, 1e-9)) for k, n in zip(most, drafted, strict=True)]
            for counts in (drafted, self._accepted[key]):
                counts[:] = [n * k for n, k in zip(counts, keep, strict=True)]

    def _contradicts(self, name: str, reached: Sequence[int]) -> bool:
        """Whether the tokens per round of a chunk are far from what is expected."""
        before, pairs = self._drafted[self.shared[name]][0], reached[0]
        if before < 4 or pairs < 4:
            return False
        chances, reach = [], 1.0  # by depth: that the draft is accepted and all above it
        for rate in self.rates(self.shared[name])[: self._steps[name]]:
            reach *= rate
            chances.append(reach)
        mean = sum(chances)
        square = sum((2 * depth + 1) * chance for depth, chance in enumerate(chances))
        variance = max(square - mean**2, 0.05) * (1 / pairs + 1 / before) + _DRIFT**2
        return abs(sum(reached[1:]) / pairs - mean) > _SUDDEN * math.sqrt(variance)

    def rates(self, key: str) -> list[float]:
        """Returns the acceptance per depth from 1, given that the parent was accepted."""
        rates, above, chains = [], self._prior, self._drafted.get(CHAIN, [])
        for depth, drafted in enumerate(self._drafted[key]):
            if key != CHAIN and depth < len(chains) and chains[depth] > _KEPT:
                above = self._accepted[CHAIN][depth] / chains[depth]
            accepted = self._accepted[key][depth]
            above = (accepted + _PRIOR_PAIRS * above) / (drafted + _PRIOR_PAIRS)
            rates.append(min(max(above, 0.0), 1.0))
        return rates

    def expected_tokens(self, name: str, goes_on: float = 1.0, errors: float = 0.0) -> float:
        """Returns the expected tokens per slot and round, bonus included.

        Args:
          name: the strategy.
          goes_on: share of tokens that are not the last of their sample; drafts behind the last
            one count for nothing.
          errors: number of standard errors that are added to the acceptance of each depth.
        """
        if name not in self.shared:
            return 1.0
        key, steps = self.shared[name], self._steps[name]
        counts = zip(self.rates(key)[:steps], self._drafted[key], strict=False)
        rates = [min(r + errors * math.sqrt(r * (1 - r) / (n + 1)), 1.0) for r, n in counts]
        return _tokens(rates, goes_on)

    def most_tokens(self, name: str, running: str, goes_on: float = 1.0) -> float:
        """Returns the tokens per slot and round if all that `running` does not show is best."""
        if name not in self.shared:
            return 1.0
        key = self.shared[name]
        shown = self._steps[running] if self.shared.get(running) == key else 0
        rates = self.rates(key)[: self._steps[name]]
        best = [max(rate, _BEST_RATE) if at >= shown else rate for at, rate in enumerate(rates)]
        return _tokens(best, goes_on)

    def is_measured(self, name: str) -> bool:
        """Whether drafts of the strategy were observed since the last new weights."""
        key = self.shared.get(name)
        return key is None or self._drafted[key][0] > _KEPT_FOR_NEW_WEIGHTS

    def first_rate(self) -> float | None:
        """Returns the acceptance of first drafts, of chains if any; None where nothing drafts."""
        keys = sorted(self._drafted, key=lambda key: key != CHAIN)
        return self.rates(keys[0])[0] if keys else None

    def state(self) -> dict[str, Any]:
        return copy.deepcopy({"drafted": self._drafted, "accepted": self._accepted})

    def load(self, state: Mapping[str, Any]) -> None:
        self._drafted, self._accepted = copy.deepcopy((state["drafted"], state["accepted"]))


def _tokens(rates: Sequence[float], goes_on: float) -> float:
    total = reach = 1.0
    for rate in rates:
        reach *= rate * goes_on
        total += reach
    return total


@dataclasses.dataclass
class Probe:
    """A strategy that is run for two chunks, of which the second is measured.

    The first chunk is one round. In it a strategy is slow, and after plain decoding the draft has
    to read what was emitted meanwhile.

    Attributes:
      strategy: name of the strategy.
      rounds: number of rounds of the second chunk.
      choices: number of choices since the probe began.
    """

    strategy: str
    rounds: int
    choices: int = 0


class Goodput(Controller):
    """Maximises tokens per second.

    Args:
      strategies: the strategies to choose from.
      costs: seconds per round, calibrated for every strategy, bucket and context; without it they
        are guessed until observed.
      config: settings of the controller.

    Attributes:
      regret_seconds: estimated seconds lost, by probes and late switches, against the strategy
        that scored best when each chunk was observed.
      seconds: duration of all chunks.
      drafting_seconds: duration of the chunks that drafted, where the cost of `off` was measured.
      plain_seconds: what plain decoding would have taken for the tokens of these chunks.
      probes: number of probes so far.
    """

    kind = "goodput"
    saved = (
        *Controller.saved, "regret_seconds", "seconds", "drafting_seconds", "plain_seconds",
        "probes", "_best", "_emitted", "_ended", "_length", "_chunk_tokens", "_last", "_probed",
        "_credit", "_pairs_to_judge", "_rounds", "_probed_at", "_starts",
    )  # fmt: skip

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
        self.acceptance = Acceptance(self.strategies, HALF_LIFE, PRIOR)
        self.regret_seconds = self.seconds = 0.0
        self.drafting_seconds = self.plain_seconds = 0.0
        self.probes = 0
        # The strategy in use, by bucket.
        self._best: list[str | None] = [None] * len(self.costs.buckets)
        self._emitted, self._ended = 0.0, 0.0  # tokens and ends of samples, discounted
        self._length: float | None = None  # tokens in the cache of a slot, the mean of the latest
        self._chunk_tokens = 32.0  # most tokens that a slot can emit in a full chunk
        self._last = ""  # the strategy of the latest chunk
        self._probe: Probe | None = None
        self._probed: list[str] = []  # strategies that had a probe in this turn
        self._credit = 0.0  # seconds that probes may lose
        # (slot, round) pairs that draft before new weights count as known.
        self._pairs_to_judge = 2 * PROBE_PAIRS
        self._rounds, self._probed_at = 0, -_PAUSE
        self._starts = {"plain": 0.0, "drafting": 0.0}  # average start, in plain rounds

    # --- scores ----------------------------------------------------------------------------------

    def scores(
        self, batch_size: int, errors: float = 0.0, context: float | None = None
    ) -> dict[str, float]:
        """Returns expected tokens per slot and second, by strategy.

        Args:
          batch_size: number of running slots.
          errors: number of standard errors that are added to the acceptance of each depth.
          context: number of tokens in the caches of these slots together; None: as many per slot as
            there were last.
        """
        return {
            arm: self.acceptance.expected_tokens(arm, self._goes_on, errors)
            / self.round_seconds(arm, batch_size, context)
            for arm in self.arms
        }

    def round_seconds(self, arm: str, batch_size: int, context: float | None = None) -> float:
        """Returns seconds per round of a full chunk, with a share of what every chunk takes.

        Args:
          arm: the strategy.
          batch_size: number of running slots.
          context: as in `scores`.
        """
        draft = self.strategies.get(arm)
        rounds = self._chunk_tokens / (1 + (draft.steps if draft else 0))
        return self._seconds(arm, batch_size, rounds, context)

    def _seconds(
        self,
        arm: str,
        batch_size: int,
        rounds: float = math.inf,
        context: float | None = None,
    ) -> float:
        """`CostTable.seconds`, where `context` None is as many tokens per slot as there were."""
        if context is None and self._length is not None:
            context = batch_size * self._length
        return self.costs.seconds(arm, batch_size, rounds, context)

    @property
    def _goes_on(self) -> float:
        """The share of tokens that are not the last of their sample."""
        return 1 - self._ended / max(self._emitted, self._ended, 1.0)

    def gains(self, batch_size: int) -> dict[str, float]:
        measured = {
            arm: score
            for arm, score in self.scores(batch_size).items()
            if self.costs.known(arm, batch_size) and self.acceptance.is_measured(arm)
        }
        plain = measured.get(OFF)
        return {} if plain is None else {arm: score / plain for arm, score in measured.items()}

    def preferred(self) -> str:
        scores = self.scores(1)
        return max(self.arms, key=scores.__getitem__)

    # --- choosing --------------------------------------------------------------------------------

    def choose(self, batch_size: int) -> str:
        if self.context is not None:
            self._length = self.context / batch_size
        scores, at = self.scores(batch_size), self.costs.index(batch_size)
        best = max(self.arms, key=scores.__getitem__)
        current = self._best[at]
        if current is None or scores[best] > (1 + self.config.hysteresis) * scores[current]:
            self._best[at] = current = best
        self.rounds_hint = None
        if self._probe is not None and self._probe.choices >= 2 + _WAIT:
            self._probe, self._probed_at = None, self._rounds
        if self._probe is None:
            self._probe = self._next_probe(batch_size, current, scores)
        if self._probe is None:
            return current
        self._probe.choices += 1
        if self._probe.choices > 2:
            return current
        self.rounds_hint = 1 if self._probe.choices == 1 else self._probe.rounds
        return self._probe.strategy

    def _next_probe(
        self, batch_size: int, current: str, scores: Mapping[str, float]
    ) -> Probe | None:
        """Returns a probe of the first candidate that can be paid for, or None.

        The candidates take turns. Under plain decoding, new weights are probed without a pause.
        """
        unknown = self._pairs_to_judge > 0 and current == OFF
        if self._rounds < self._probed_at + _PAUSE and not unknown:
            return None
        candidates = self._candidates(batch_size, current, scores)
        if not set(candidates) <= set(self._probed):
            candidates = [arm for arm in candidates if arm not in self._probed]
        else:
            self._probed.clear()
        rounds = max(_MIN_PROBE_ROUNDS, -(-PROBE_PAIRS // batch_size))
        starts = sum(self._starts.values()) * self._seconds(OFF, batch_size)
        starts += 2 * self.costs.beside(batch_size)
        for name in candidates:
            worse = max(1 - scores[name] / scores[current], 0.0)
            loss = (1 + rounds) * self._seconds(name, batch_size) * worse + starts
            self._credit = min(self._credit, 4 * loss)  # at most four probes in a row
            # Probes of new weights do not wait: they are paid for afterwards.
            if self._credit >= (-loss if unknown and name != OFF else loss):
                self._credit -= loss
                self._probed.append(name)
                self.probes += 1
                return Probe(name, rounds)
        return None

    def _candidates(self, batch_size: int, current: str, scores: Mapping[str, float]) -> list[str]:
        """Returns the strategies to probe: `off`, and those that win if all unknowns are best.

        The neighbours of the current strategy come first.
        """
        drafts = self.strategies
        order = sorted(self.arms, key=lambda arm: (drafts[arm].steps, drafts[arm].rows))
        here, seen, wanted = order.index(current), set(), []
        for arm in sorted(order, key=lambda arm: abs(order.index(arm) - here)):
            most = self.acceptance.most_tokens(arm, current, self._goes_on)
            cheapest = self.round_seconds(arm, batch_size) * (1 - self.costs.slack(arm, batch_size))
            least = (1 + self.config.hysteresis) * scores[current]
            if arm == current or (arm != OFF and most / cheapest <= least):
                continue
            key = self.acceptance.shared.get(arm)
            if current == OFF and key in seen:
                continue  # the shallowest chain shows the acceptance of all, and loses least
            seen.add(key)
            wanted.append(arm)
        return wanted

    # --- learning --------------------------------------------------------------------------------

    def weights_changed(self) -> None:
        self.acceptance.forget()
        self._pairs_to_judge, self._probe = 2 * PROBE_PAIRS, None

    def calibrated(self, costs: CostTable) -> None:
        """Replaces the learned costs by freshly measured ones; acceptance is kept."""
        self.costs = CostTable.from_state(costs.state())
        self._best, self._probe = [None] * len(self.costs.buckets), None

    def learn(self, seen: Observation) -> None:
        name, batch, rounds, per_round = (
            seen.strategy, seen.batch_size, seen.rounds, seen.seconds_per_round
        )  # fmt: skip
        drafts, known = name != OFF, per_round is not None
        self._rounds += rounds
        kept = 2 ** (-seen.tokens / _ENDS_WITHIN)
        self._emitted = kept * self._emitted + seen.tokens
        self._ended = kept * self._ended + seen.ended
        starts, self._last = name != self._last, name
        reads = drafts and seen.catch_up > 0
        late = self._start_seconds(seen) if known and (starts or reads) else 0.0
        # The first chunk after another strategy's does not say what its rounds took.
        if known and not reads and not (starts and rounds < _SHORT):
            self.costs.observe(name, batch, per_round, rounds, seen.context)
        self.acceptance.learn(name, seen.histogram, rounds)
        if drafts:
            self._judge(seen)
        if name == self._best[self.costs.index(batch)]:  # a probe is shorter
            room = rounds * (1 + self.strategies[name].steps)
            self._chunk_tokens += 0.25 * (room - self._chunk_tokens)
        if known:
            self._account(seen, late)

    def _judge(self, seen: Observation) -> None:
        """Counts the drafts of new weights until there are enough, or `off` is clearly best."""
        scores = self.scores(seen.batch_size, 1.0, seen.context)
        is_clear = OFF in scores and max(scores, key=scores.__getitem__) == OFF
        self._pairs_to_judge = 0 if is_clear else max(self._pairs_to_judge - seen.slot_rounds, 0)

    def _start_seconds(self, seen: Observation) -> float:
        """Returns seconds of a first chunk beyond those of its rounds, and averages them."""
        batch, context = seen.batch_size, seen.context
        plain = self._seconds(OFF, batch, context=context)
        usual = seen.rounds * self._seconds(seen.strategy, batch, seen.rounds, context)
        late = min(max(seen.seconds - usual, 0.0), _LONGEST_START * plain)
        of = "plain" if seen.strategy == OFF else "drafting"
        self._starts[of] += 0.3 * min(late / plain - self._starts[of], _START_STEP)
        return late

    def _account(self, seen: Observation, late: float) -> None:
        """Adds what the chunk lost against full chunks of the strategy that scores best."""
        scores = self.scores(seen.batch_size, context=seen.context)
        seconds = float(seen.seconds)
        worse = max(0.0, 1 - scores[seen.strategy] / max(scores.values()))
        late = min(late, seconds)
        lost = (seconds - late) * worse + late
        self.seconds += seconds
        self.regret_seconds += lost
        self._credit += self.config.probe_fraction * seconds
        if seen.strategy != OFF and OFF in self.arms and self.costs.known(OFF, seen.batch_size):
            rounds = seen.tokens / seen.batch_size
            self.drafting_seconds += seconds
            self.plain_seconds += rounds * self.round_seconds(OFF, seen.batch_size, seen.context)

    def seconds_of_drafting(self) -> tuple[float, float, float]:
        return self.drafting_seconds, self.plain_seconds, self.seconds

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
            "probe": dataclasses.asdict(self._probe) if self._probe else None,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        super().load_state(state)
        self.costs = CostTable.from_state(state["costs"])
        self.acceptance.load(state["acceptance"])
        self._probe = Probe(**state["probe"]) if state["probe"] else None
