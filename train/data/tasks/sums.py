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

from train.data.tasks.layout import SPLITS, Demonstration, Problem, check_split, split_of
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


class Sums(Sequence):
    """Generated sums: either their problems or their demonstrations."""

    def __init__(self, cfg: DataConfig, split: str, demonstrate: bool) -> None:
        self._cfg, self._split, self._demonstrate = cfg, check_split(split), demonstrate
        self._template = cfg.prompt_template or TEMPLATE

    def __len__(self) -> int:
        return self._cfg.train_size if self._split == "train" else self._cfg.heldout_size

    def __getitem__(self, index: int) -> Problem | Demonstration:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        index = index + len(self) if index < 0 else index
        if not 0 <= index < len(self):
            raise IndexError(f"problem {index} of a split of {len(self)}")
        key = [self._cfg.seed, SPLITS.index(self._split), index]
        rng = np.random.Generator(np.random.Philox(np.random.SeedSequence(key)))
        terms = draw_terms(self._cfg, rng)
        while split_of(_sum_question(terms)) != self._split:
            terms = draw_terms(self._cfg, rng)
        prompt = self._template.format(question=_sum_question(terms))
        if self._demonstrate:
            return Demonstration(prompt, demonstrate_sum(self._cfg, terms, rng))
        return Problem(prompt, str(sum(terms)), index)


def draw_terms(cfg: DataConfig, rng: np.random.Generator) -> list[int]:
    """Numbers to add: mostly few, sometimes `max_terms` of them."""
    weights = _TERMS_DECAY ** np.arange(cfg.max_terms - cfg.min_terms + 1)
    count = cfg.min_terms + rng.choice(len(weights), p=weights / weights.sum())
    return rng.integers(1, cfg.max_number + 1, count).tolist()


def demonstrate_sum(cfg: DataConfig, terms: Sequence[int], rng: np.random.Generator) -> str:
    """A demonstration with the mistakes that the module's docstring describes."""
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
