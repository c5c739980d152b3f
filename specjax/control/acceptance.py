"""How likely a draft is accepted at each depth, given that its parent was.

All chains draft the same tokens at the same depth, so they share one estimate: a round of any of
them teaches all. A tree has its own, and where it has not run lately it borrows from the others:
with w times as many children, about (1 - a)^w is left over of the rejections 1 - a.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from scipy.special import rel_entr  # jax itself depends on scipy

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

    Args:
      drafts: the strategies by name; None drafts nothing.
      half_life: rounds after which an observation counts half.
      prior: conditional acceptance of a chain at the first depth before anything was seen.
    """

    def __init__(self, drafts: Mapping[str, Strategy | None], half_life: float, prior: float):
        self._half_life = half_life
        self._prior = prior
        self._family: dict[str, str] = {}
        self._steps: dict[str, int] = {}
        self._width: dict[str, tuple[float, ...]] = {}
        for name, strategy in drafts.items():
            if strategy is None:
                continue
            family = CHAIN if strategy.is_chain else name
            self._family[name], self._steps[name] = family, strategy.steps
            if strategy.steps > len(self._width.get(family, ())):
                self._width[family] = effective_widths(strategy)
        self._accepts, self._tries, self._fresh = (
            {f: np.zeros(len(w)) for f, w in self._width.items()} for _ in range(3)
        )
        self._rates: dict[str, list[float]] = {}

    def family(self, name: str) -> str | None:
        """Of those that share estimates; None for plain decoding."""
        return self._family.get(name)

    def age(self, rounds: int) -> None:
        """Rounds went by: what was not observed in them grows stale."""
        for fresh in self._fresh.values():
            fresh *= 2 ** (-rounds / _FRESH_HALF_LIFE)

    def forget(self, kept: float = _KEPT_BLIND) -> None:
        """The head or the text changed: old counts become weak opinions."""
        for family, tries in self._tries.items():
            keep = np.minimum(1.0, kept / np.maximum(tries, 1e-9))
            tries *= keep
            self._accepts[family] *= keep
            self._fresh[family] *= 0
        self._rates = {}

    def learn(self, name: str, accepted: np.ndarray, rounds: int) -> None:
        """Takes in accepted drafts [R B] or [RB], -1 where the slot did not run."""
        if name not in self._family:
            return
        family, steps = self._family[name], self._steps[name]
        counts = np.bincount(np.minimum(accepted[accepted >= 0], steps), minlength=steps + 1)
        reached = np.cumsum(counts[::-1])[::-1]  # [k]: pairs with at least k accepted
        tries, accepts = reached[:-1].astype(float), reached[1:].astype(float)
        if self._sudden(family, tries, accepts):
            self.forget(_KEPT)
        self._discount(family, tries, rounds)
        self._tries[family][:steps] += tries
        self._accepts[family][:steps] += accepts
        self._fresh[family][:steps] += tries
        np.minimum(self._fresh[family], _FRESH_MOST, out=self._fresh[family])
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
        fresh = self._fresh[family]
        trust = fresh / (fresh + _FRESH)
        rates = np.asarray(self.rates(family))
        hoped = trust * rates + (1 - trust) * np.maximum(rates, CEILING)
        return _tokens(hoped[: self._steps[name]].tolist(), goes_on)

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
                borrowed = min(float(tries[depth]), _BORROWED)
                weight += borrowed
                total += borrowed * _widen(float(seen), width / self._width[other][depth])
            own = float(self._tries[family][depth])
            rate = (float(self._accepts[family][depth]) + _OWN * total / weight) / (own + _OWN)
            result.append(min(max(rate, 0.0), 1.0))
        return result

    def _sudden(self, family: str, tries: np.ndarray, accepts: np.ndarray) -> bool:
        """Whether the chunk contradicts what was counted before, at any depth.

        By the likelihood ratio of two rates against one: of a few drafts, most of which are usually
        accepted, several rejections are far more common than a normal distribution has them.
        """
        n = self._tries[family][: len(tries)]
        enough = (n >= 4) & (tries >= 4)
        if not enough.any():
            return False
        n, tries, accepts = n[enough], tries[enough], accepts[enough]
        before = self._accepts[family][: len(enough)][enough]
        pooled = (before + accepts) / (n + tries)
        ratio = n * _divergence(before / n, pooled) + tries * _divergence(accepts / tries, pooled)
        noise = np.maximum(pooled * (1 - pooled), 0.01) * (1 / n + 1 / tries)
        return bool((ratio > _SUDDEN**2 / 2 * (1 + _DRIFT**2 / noise)).any())

    def _discount(self, observed: str, tries: np.ndarray, rounds: int) -> None:
        full = 2 ** (-rounds / self._half_life)
        idle = 2 ** (-rounds / (self._half_life * _IDLE_FACTOR))
        for family, counted in self._tries.items():
            factor = np.full(len(counted), idle)
            if family == observed:
                factor[: len(tries)][tries > 0] = full
            counted *= factor
            self._accepts[family] *= factor

    def state(self) -> dict[str, Any]:
        named = {"accepts": self._accepts, "tries": self._tries, "fresh": self._fresh}
        return {key: {f: v.tolist() for f, v in value.items()} for key, value in named.items()}

    def load(self, state: Mapping[str, Any]) -> None:
        self._accepts, self._tries, self._fresh = (
            {f: np.array(v, float) for f, v in state[key].items()}
            for key in ("accepts", "tries", "fresh")
        )
        self._rates = {}


def _divergence(rate: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Of one coin from another, in nats."""
    other = np.clip(other, 1e-6, 1 - 1e-6)  # rounding must not make the impossible of the rare
    return rel_entr(rate, other) + rel_entr(1 - rate, 1 - other)


def _widen(rate: float, width: float) -> float:
    """Acceptance with `width` times as many independent tries."""
    return 1 - (1 - min(rate, 0.999)) ** width


def _tokens(rates: list[float], goes_on: float) -> float:
    total = reach = 1.0
    for rate in rates:
        reach *= rate * goes_on
        total += reach
    return total
