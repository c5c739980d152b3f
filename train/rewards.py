"""Verifiable rewards, found by name in `train.registry.REWARDS`, or as `module:function`.

A reward is a function of a completion's text and the row of data that it answers:

    reward(completion, answer) -> float
    reward(completion, **columns) -> float

The first parameter is the completion; every other one is passed by its name, which is `answer`
(the gold answer as text; a list of texts where the row has several), `prompt` (as text), `messages`
(a list of {role, content}, where the prompt is one) or a further column of the row. A second
parameter of any other name is the answer.

What counts as the answer of a completion for `number` and `math_verify` says `train.answers`;
`exact` takes the line after the last `####`. Of several gold answers any is right.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from train.answers import (
    each_gold,
    final_answer,
    last_line_answer,
    read_quantity,
    stated_gold,
)
from train.math_worker import WORKER
from train.registry import REWARDS

Reward = Callable[..., Any]


def _of_any(reward: Callable[[str, str], float]) -> Reward:
    """The same reward for an answer that may be several: the most that one of them earns."""

    @functools.wraps(reward)
    def scored(response_text: str, answer: str | Sequence[str]) -> float:
        return max((reward(response_text, gold) for gold in each_gold(answer)), default=0.0)

    return scored


@_of_any
def exact(response_text: str, answer: str) -> float:
    """1.0 if the text after the last `####` is the answer, character for character."""
    found, gold = last_line_answer(response_text), last_line_answer(answer)
    return float(found is not None and found == (answer.strip() if gold is None else gold))


@_of_any
def number(response_text: str, answer: str) -> float:
    """1.0 if the completion's answer is a number equal to the row's.

    Thousands separators, spaces and a trailing period do not count; `$`, `%` and units count where
    both have one. Fractions and mixed numbers are numbers (`train.answers.read_quantity`), a
    decimal may be rounded to six significant digits or cut off after seven, and `x = 5` is 5.
    """
    found, gold = _as_number(final_answer(response_text)), _as_number(stated_gold(answer))
    return float(found is not None and gold is not None and gold.equals(found))


def _as_number(text: str | None):
    return None if text is None else read_quantity(_NAMED.sub("", text))


_NAMED = re.compile(r"^[\s$]*\\?[a-zA-Z][\w ]*=")  # `x = 5`


@_of_any
def math_verify(response_text: str, answer: str) -> float:
    """1.0 if the completion's answer is mathematically equivalent to the row's, which may be bare
    LaTeX (`train.equivalence` has the rules). Equal numbers need no library.

    What cannot be parsed or takes too long earns 0.0; nothing is raised for the response's sake.

    Raises:
      ModuleNotFoundError: the math-verify library is not installed.
    """
    found, gold = final_answer(response_text), stated_gold(answer)
    if found is None or not gold:
        return 0.0
    numbers = read_quantity(gold), read_quantity(found)
    if numbers[0] and numbers[1]:
        return float(numbers[0].equals(numbers[1]))
    return float(WORKER.same(gold, found))


@dataclass(frozen=True)
class AnswerReward:
    """A reward that compares answers, and knows which gold answers it can give 1 for.

    Attributes:
      function: (completion, answer) -> 0.0 or 1.0. extract: the answer that it reads in a
        completion; None: there is none. write: a completion that gives this answer and no more.
      wants: where it looks for the answer. gold: what an answer has to be. Both for messages.
    """

    function: Reward
    extract: Callable[[str], str | None]
    write: Callable[[str], str]
    wants: str
    gold: str

    def __call__(self, completion: str, answer: str | Sequence[str]) -> float:
        return self.function(completion, answer)

    def can_win(self, answer: str | Sequence[str]) -> bool:
        """Whether a completion with the row's own answer, or one of them, scores 1."""
        return any(self.function(self.write(gold), gold) == 1.0 for gold in each_gold(answer))


def _box(answer: str) -> str:
    return f"\\boxed{{{stated_gold(answer)}}}"


def _mark(answer: str) -> str:
    found = last_line_answer(answer)
    return f"#### {answer.strip() if found is None else found}"


_ANSWER_PLACES = "\\boxed{...}, a last line '#### ...', or 'answer is ...'"
EXACT = AnswerReward(exact, last_line_answer, _mark, "a line '#### ...'", "one line of text")
NUMBER = AnswerReward(
    number, final_answer, _box, _ANSWER_PLACES, "a number, a fraction or a quantity"
)
MATH_VERIFY = AnswerReward(
    math_verify, final_answer, _box, _ANSWER_PLACES, "formulas that parse, and words"
)


def get_reward(name: str) -> Reward:
    """Finds a reward by its name or by dotted path `module:function`.

    Raises:
      ValueError: unknown name, or a path that leads to nothing callable.
    """
    reward = REWARDS.find(name)
    if not callable(reward):
        raise ValueError(
            f"reward {name!r} is a {type(reward).__name__}; expected a function "
            "(completion: str, answer: str) -> float"
        )
    return reward
