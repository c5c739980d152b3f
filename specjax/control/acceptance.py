"""How likely a draft is accepted at each depth, given that its parent was.

All chains draft the same tokens at the same depth, so they share one estimate: a round of any of
them teaches all. A tree has its own, and where it has not run lately it borrows from the others:
with w times as many children, about (1 - a)^w is left over of the rejections 1 - a.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from specjax.config.strategy import Strategy

CHAIN = "chain"
CEILING = 0.95  # a draft as good as one may hope for

_OWN = 4.0  # rounds of evidence that the prior of a depth is worth
_CASCADE = 2.0  # weight, in that prior, of the depth above
_BORROWED = 16.0  # most weight in it of another tree's evidence
_KEPT = 2.0  # evidence left after a sudden change, which comes with evidence of its own
_KEPT_BLIND = 6.0  # evidence left when a change is announced: enough to outweigh the prior
_FRESH = 8.0  # recent rounds that make an estimate as good as the ceiling is optimistic
_FRESH_MOST = 16.0  # counts no higher: in a large batch, too, the head can change unseen
_FRESH_HALF_LIFE = 64.0  # rounds
_IDLE_FACTOR = 8.0  # what is not observed ages so much more slowly than what is
_SUDDEN = 3.5  # standard deviations
_DRIFT = 0.03  # acceptance wanders by so much from text to text


def effective_widths(strategy: Strategy) -> tuple[float, ...]:
    """Per depth, how many independent tries a node's children are worth: their number's root."""
    if strategy.dynamic:
        steps, topk, rows = strategy.dynamic
        return (math.sqrt(min(topk, max(1.0, (rows - 1) / steps))),) * steps
    best = [sum(p[:-1] == (0,) * d for p in strategy.paths if len(p) == d + 1)
            for d in range(strategy.steps)]  # fmt: skip
    return tuple(math.sqrt(max(1, n)) for n in best)


class Acceptance:
    """Discounted counts per family (all chains, or one tree) and depth.

    In plain Python: of a handful of numbers, lists are several times as quick as arrays, and a
    chunk of a small batch takes few milliseconds.

    Args:
      drafts: the strategies by name.
      half_life: rounds after which an observation counts half.
      prior: conditional acceptance of a chain at the first depth before anything was seen.
    """

    def __init__(self, drafts: Mapping[str, Strategy], half_life: float, prior: float):
        self._half_life = half_life
        self._prior = prior
        self._family: dict[str, str] = {}
        self._steps: dict[str, int] = {}
        self._width: dict[str, tuple[float, ...]] = {}
        for name, strategy in drafts.items():
            if strategy.is_off:
                continue
            family = CHAIN if strategy.is_chain else name
            self._family[name], self._steps[name] = family, strategy.steps
            if strategy.steps > len(self._width.get(family, ())):
                self._width[family] = effective_widths(strategy)
        self._accepts, self._tries, self._fresh = (
            {f: [0.0] * len(w) for f, w in self._width.items()} for _ in range(3)
        )
        self._rates: dict[str, list[float]] = {}

    def family(self, name: str) -> str | None:
        """Of those that share estimates; None for plain decoding."""
        return self._family.get(name)

    def age(self, rounds: int) -> None:
        """Rounds went by: what was not observed in them grows stale."""
        kept = 2 ** (-rounds / _FRESH_HALF_LIFE)
        for family, fresh in self._fresh.items():
            self._fresh[family] = [x * kept for x in fresh]

    def forget(self, kept: float = _KEPT_BLIND) -> None:
        """The head or the text changed: old counts become weak opinions."""
        for family, tries in self._tries.items():
            keep = [min(1.0, kept / max(n, 1e-9)) for n in tries]
            self._tries[family] = [n * k for n, k in zip(tries, keep, strict=True)]
            accepts = zip(self._accepts[family], keep, strict=True)
            self._accepts[family] = [n * k for n, k in accepts]
            self._fresh[family] = [0.0] * len(tries)
        self._rates = {}

    def learn(self, name: str, histogram: Sequence[int], rounds: int) -> None:
        """Takes in a chunk.

        Args:
          histogram: [k]: (slot, round) pairs that emitted k tokens, bonus included and before cuts.
        """
        if name not in self._family:
            return
        family, steps = self._family[name], self._steps[name]
        reached = [sum(histogram[1 + depth :]) for depth in range(steps + 1)]  # or deeper
        tries, accepts = reached[:-1], reached[1:]
        if self._sudden(family, tries, accepts):
            self.forget(_KEPT)
        self._discount(family, tries, rounds)
        for counted, new in ((self._tries, tries), (self._accepts, accepts), (self._fresh, tries)):
            mine = counted[family]
            mine[:steps] = [x + n for x, n in zip(mine, new, strict=False)]
        self._fresh[family] = [min(x, _FRESH_MOST) for x in self._fresh[family]]
        self._rates = {}

    def expected_tokens(self, name: str, goes_on: float = 1.0) -> float:
        """Tokens per slot and round, bonus included.

        Args:
          goes_on: the share of tokens that are not the last of their sample. What was drafted
            behind the last one is accepted for nothing, and the deeper a strategy drafts the more.
        """
        if name not in self._family:
            return 1.0
        return _tokens(self.rates(self._family[name])[: self._steps[name]], goes_on)

    def hoped_tokens(self, name: str, goes_on: float = 1.0) -> float:
        """The same if every depth that was not seen lately turned out as good as can be."""
        if name not in self._family:
            return 1.0
        family = self._family[name]
        hoped = []
        for fresh, rate in zip(self._fresh[family], self.rates(family), strict=True):
            trust = fresh / (fresh + _FRESH)
            hoped.append(trust * rate + (1 - trust) * max(rate, CEILING))
        return _tokens(hoped[: self._steps[name]], goes_on)

    def likely_tokens(self, name: str, goes_on: float = 1.0) -> float:
        """The same if every depth were a standard error better than what was seen says."""
        if name not in self._family:
            return 1.0
        family = self._family[name]
        likely = [
            min(rate + math.sqrt(rate * (1 - rate) / (seen + 1)), 1.0)
            for rate, seen in zip(self.rates(family), self._tries[family], strict=True)
        ]
        return _tokens(likely[: self._steps[name]], goes_on)

    def is_measured(self, name: str) -> bool:
        """Whether more drafts of its family were seen than what is kept of them after a change."""
        family = self._family.get(name)
        return family is None or self._tries[family][0] > _KEPT_BLIND

    def first_rate(self) -> float | None:
        """Acceptance of the first draft, of chains if there are any; None where nothing drafts."""
        families = sorted(self._width, key=lambda f: f != CHAIN)
        return self.rates(families[0])[0] if families else None

    def rates(self, family: str) -> list[float]:
        """Acceptance per depth from 1, given that the parent was accepted."""
        if family not in self._rates:
            self._rates[family] = self._estimate(family)
        return self._rates[family]

    def _estimate(self, family: str) -> list[float]:
        widths = self._width[family]
        rate, result = _widen(self._prior, widths[0]), []
        for depth, width in enumerate(widths):
            weight, total = _CASCADE, _CASCADE * rate
            for other, tries in self._tries.items():
                if other == family or depth >= len(tries) or tries[depth] <= 0:
                    continue
                seen = (self._accepts[other][depth] + 0.5 * rate) / (tries[depth] + 0.5)
                borrowed = min(tries[depth], _BORROWED)
                weight += borrowed
                total += borrowed * _widen(seen, width / self._width[other][depth])
            own = self._tries[family][depth]
            rate = (self._accepts[family][depth] + _OWN * total / weight) / (own + _OWN)
            result.append(min(max(rate, 0.0), 1.0))
        return result

    def _sudden(self, family: str, tries: Sequence[int], accepts: Sequence[int]) -> bool:
        """Whether the chunk contradicts what was counted before, at any depth.

        By the likelihood ratio of two rates against one: of a few drafts, most of which are usually
        accepted, several rejections are far more common than a normal distribution has them.
        """
        before = zip(self._tries[family], self._accepts[family], strict=True)
        for (n, known), tried, accepted in zip(before, tries, accepts, strict=False):
            if n < 4 or tried < 4:
                continue
            pooled = (known + accepted) / (n + tried)
            ratio = n * _divergence(known / n, pooled)
            ratio += tried * _divergence(accepted / tried, pooled)
            noise = max(pooled * (1 - pooled), 0.01) * (1 / n + 1 / tried)
            if ratio > _SUDDEN**2 / 2 * (1 + _DRIFT**2 / noise):
                return True
        return False

    def _discount(self, observed: str, tries: Sequence[int], rounds: int) -> None:
        full = 2 ** (-rounds / self._half_life)
        idle = 2 ** (-rounds / (self._half_life * _IDLE_FACTOR))
        for family, counted in self._tries.items():
            kept = [idle] * len(counted)
            if family == observed:
                kept[: len(tries)] = [full if tried else idle for tried in tries]
            self._tries[family] = [n * k for n, k in zip(counted, kept, strict=True)]
            self._accepts[family] = [
                n * k for n, k in zip(self._accepts[family], kept, strict=True)
            ]

    def state(self) -> dict[str, Any]:
        named = {"accepts": self._accepts, "tries": self._tries, "fresh": self._fresh}
        return {key: {f: list(v) for f, v in value.items()} for key, value in named.items()}

    def load(self, state: Mapping[str, Any]) -> None:
        self._accepts, self._tries, self._fresh = (
            {f: [float(x) for x in v] for f, v in state[key].items()}
            for key in ("accepts", "tries", "fresh")
        )
        self._rates = {}


def _divergence(rate: float, other: float) -> float:
    """Of one coin from another, in nats."""
    other = min(max(other, 1e-6), 1 - 1e-6)  # rounding must not make the impossible of the rare
    rate = min(max(rate, 0.0), 1.0)
    heads = rate * math.log(rate / other) if rate else 0.0
    return heads + ((1 - rate) * math.log((1 - rate) / (1 - other)) if rate < 1 else 0.0)


def _widen(rate: float, width: float) -> float:
    """Acceptance with `width` times as many independent tries."""
    return 1 - (1 - min(rate, 0.999)) ** width


def _tokens(rates: list[float], goes_on: float) -> float:
    total = reach = 1.0
    for rate in rates:
        reach *= rate * goes_on
        total += reach
    return total
