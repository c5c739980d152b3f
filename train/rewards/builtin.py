"""Verifiable rewards, found by name in `train.registry.REWARDS`, or as `module:function`.

A reward is a function of a completion's text and the row of data that it answers, such as

    reward(completion, answer) -> float

`train.rewards.calls` has the other forms: of batch form, asynchronous, and verl's. The first
parameter is the completion; every other one is passed by its name:

    answer          the gold answer as text; a list of texts where the row has several
    prompt          the prompt as text, or as a list of {role, content}
    messages        the prompt, where it is a list of {role, content}
    sample          a `train.rewards.scoring.SampleFacts`
    completion_ids  the tokens of the completion, the stop token included (TRL's name)
    row             all columns of the row as they are, by name
    any other name  the column of that name

A second parameter of a name that no column has is the answer.

`NUMBER` and `MATH_VERIFY` find the answer of a completion as `train.rewards.answers.extract` says;
`EXACT` takes the line after the last `####`, `CHOICE` the letter of a multiple-choice answer, and
`format` reads no answer. Of several gold answers any is right.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from train.registry import REWARDS
from train.rewards.answers.extract import (
    chosen_letter,
    each_gold,
    final_answer,
    last_line_answer,
    letter_of,
    stated_gold,
)
from train.rewards.answers.quantity import read_quantity
from train.rewards.calls import RewardCall
from train.rewards.workers import Setup

Reward = Callable[..., Any]


@dataclass(frozen=True)
class AnswerReward:
    """A reward that compares answers, and can check gold answers before a run.

    Attributes:
      compare: whether an answer is the gold answer in a row's text, (given, text) -> bool.
      extract: finds the answer in a completion; returns None if there is none.
      write: makes a completion that states the given answer and nothing else.
      wants: place of the answer in a completion, for messages.
      quick: whether it takes microseconds, whatever the completion is, and needs no process of its
        own.
    """

    compare: Callable[[str, str], bool]
    extract: Callable[[str], str | None]
    write: Callable[[str], str]
    wants: str
    quick: bool = True

    def __call__(self, completion: str, answer: str | Sequence[str]) -> float:
        """Returns 1.0 if the completion's answer is one of the row's, else 0.0."""
        given = self.extract(completion)
        golds = (gold for gold in each_gold(answer) if gold.strip())
        return float(bool(given) and any(self.compare(given, gold) for gold in golds))


def _same_line(given: str, gold: str) -> bool:
    """Compares character for character."""
    line = last_line_answer(gold)
    return given == (gold.strip() if line is None else line)


def _same_number(given: str, gold: str) -> bool:
    """Compares numbers.

    Thousands separators, spaces and a trailing period do not count; `$`, `%` and units count where
    both have one. Fractions and mixed numbers are numbers (`train.rewards.answers.quantity`), a
    decimal may be rounded to six significant digits or cut off after seven, and `x = 5` is 5.
    """
    wanted, got = (read_quantity(_NAMED.sub("", text)) for text in (stated_gold(gold), given))
    return wanted is not None and got is not None and wanted.equals(got)


_NAMED = re.compile(r"^[\s$]*\\?[a-zA-Z][\w ]*=")  # `x = 5`


def _same_letter(given: str, gold: str) -> bool:
    """Compares the letters of a multiple-choice answer: `B`, `(b)`, `B. Paris`."""
    return given == letter_of(stated_gold(gold))


def same_formula(given: str, gold: str) -> bool:
    """Compares by `train.rewards.answers.equivalence`; two numbers without sympy.

    Answers that cannot be parsed are not the same; no answer raises an error. sympy may run forever
    on a policy's text (`9^{9^{9^9}}`), in one call that no signal interrupts: worker processes
    (`train.rewards.workers`) are ended then.
    """
    text = stated_gold(gold)
    wanted, got = read_quantity(text), read_quantity(given)
    if wanted and got:
        return wanted.equals(got)
    from train.rewards.answers.equivalence import same_answer  # which imports sympy

    try:
        return same_answer(text, given)
    except Exception:  # no text of a policy is an error of the reward
        return False


# A completion that thinks once, and says something afterwards. Chat templates may write the first
# tag, so that it is part of the prompt. The time is linear in the length of the completion: each
# repetition ends where the part after it can begin, and nowhere else, so that the text is read
# twice at most, with the first tag and without it.
THINKS_FIRST = r"\A(?:\s*<think>)?(?:(?!</?think>).)+</think>(?=\s*\S)(?:(?!</?think>).)+\Z"


@dataclass(frozen=True)
class FormatReward:
    """1.0 if a regular expression is found in the completion, else 0.0; `.` is any character.

    Attributes:
      pattern: the regular expression.
    """

    pattern: str = THINKS_FIRST

    @property
    def quick(self) -> bool:
        """Whether its time is linear in the completion, as far as is known."""
        return self.pattern == THINKS_FIRST

    def __call__(self, completion: str) -> float:
        return float(re.search(self.pattern, completion, re.DOTALL) is not None)


def _box(answer: str) -> str:
    return f"\\boxed{{{stated_gold(answer)}}}"


def _mark(answer: str) -> str:
    line = last_line_answer(answer)
    return f"#### {answer.strip() if line is None else line}"


_PLACES = "\\boxed{...}, a last line '#### ...', or 'answer is ...'"
_LETTER_PLACES = f"{_PLACES}, <answer>...</answer>, or a last line that begins with a letter"
FORMAT = FormatReward()
EXACT = AnswerReward(_same_line, last_line_answer, _mark, "a line '#### ...'")
NUMBER = AnswerReward(_same_number, final_answer, _box, _PLACES)
CHOICE = AnswerReward(_same_letter, chosen_letter, _box, _LETTER_PLACES)
MATH_VERIFY = AnswerReward(same_formula, final_answer, _box, _PLACES, quick=False)


def get_reward(name: str, pattern: str = THINKS_FIRST) -> Reward:
    """Finds a reward by its name or by dotted path `module:function`.

    Args:
      name: the name, or the path.
      pattern: regular expression of the reward `format`.

    Raises:
      ValueError: the name is unknown, or the path does not lead to a function.
    """
    reward = REWARDS.find(name)
    if reward == FORMAT:
        return FormatReward(pattern)
    if not callable(reward):
        raise ValueError(
            f"reward {name!r} is a {type(reward).__name__}; expected a function "
            "(completion: str, answer: str) -> float"
        )
    return reward


def load(setup: Setup) -> list[RewardCall]:
    """Imports the rewards; of those that come with specjax also what their first call imports."""
    calls = [RewardCall(name, get_reward(name, setup.pattern)) for name in setup.names]
    if "math_verify" in setup.names:
        MATH_VERIFY("\\boxed{x+1}", "1+x")
    if "reasoning_gym" in setup.names:
        importlib.import_module("reasoning_gym")
    return calls
