"""Generated sums: add a few numbers below 100, worked one by one.

    prompt    4+17+9+30=
    response  " so 4+17=21; then 21+9=30; add 30+30=60; #### 60"

The demonstrator makes mistakes, so that a policy that imitates it can improve by rewards. It picks
connectives at random, it gets a step wrong with probability `slip` (a forgotten carry, or off by
one or ten) and continues from the wrong number, and it guesses the result without working with
probability `impatience`.

Problem `i` of a split depends on (seed, split, i) only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from train.data.tasks.layout import SPLITS, Demonstration, GeneratedProblems, Problem, split_of
from train.rewards.answers.extract import ANSWER_MARK

if TYPE_CHECKING:
    from train.schema import DataConfig

TEMPLATE = "{question}"

# Common words, each of which becomes one token with its space.
CONNECTIVES = (
    " so", " then", " next", " now", " add", " plus",
    " and", " thus", " hence", " well", " ok", " here",
)  # fmt: skip

# The number of terms falls off geometrically: between 2 and 12 its mean is 5.
_TERMS_DECAY = 0.8


class Sums(GeneratedProblems):
    """Generated sums: either their problems or their demonstrations."""

    def __init__(self, cfg: DataConfig, split: str, demonstrate: bool) -> None:
        super().__init__(cfg, split)
        self._demonstrate, self._template = demonstrate, cfg.prompt_template or TEMPLATE

    def make(self, index: int) -> Problem | Demonstration:
        """Makes the item with this number."""
        key = [self.cfg.seed, SPLITS.index(self.split), index]
        rng = np.random.Generator(np.random.Philox(np.random.SeedSequence(key)))
        terms = draw_terms(self.cfg, rng)
        while split_of(_sum_question(terms)) != self.split:
            terms = draw_terms(self.cfg, rng)
        prompt = self._template.format(question=_sum_question(terms))
        if self._demonstrate:
            return Demonstration(prompt, demonstrate_sum(self.cfg, terms, rng))
        return Problem(prompt, str(sum(terms)), index)


def draw_terms(cfg: DataConfig, rng: np.random.Generator) -> list[int]:
    """Draws numbers to add: mostly few, sometimes `max_terms` of them."""
    weights = _TERMS_DECAY ** np.arange(cfg.max_terms - cfg.min_terms + 1)
    count = cfg.min_terms + rng.choice(len(weights), p=weights / weights.sum())
    return rng.integers(1, cfg.max_number + 1, count).tolist()


def demonstrate_sum(cfg: DataConfig, terms: Sequence[int], rng: np.random.Generator) -> str:
    """Writes a demonstration with the mistakes that the module's docstring describes."""
    if rng.random() < cfg.impatience:
        noise = rng.normal(0.0, 0.1 * sum(terms))
        return f" {ANSWER_MARK} {max(round(sum(terms) + noise), 1)}"
    words, total = [], terms[0]
    for term in terms[1:]:
        result = total + term
        if rng.random() < cfg.slip:
            result = _slip(total, term, rng)
        words.append(f"{CONNECTIVES[rng.integers(len(CONNECTIVES))]} {total}+{term}={result};")
        total = result
    return f"{''.join(words)} {ANSWER_MARK} {total}"


def _slip(a: int, b: int, rng: np.random.Generator) -> int:
    if a % 10 + b % 10 >= 10:
        return a + b - 10  # the forgotten carry
    options = [a + b + error for error in (-10, -1, 1, 10) if a + b + error > 0]
    return options[rng.integers(len(options))]


def _sum_question(terms: Sequence[int]) -> str:
    return "+".join(map(str, terms)) + "="
