"""Scores completions, and finds gold answers for which the reward cannot give 1 ("unwinnable").

A reward that fails is logged, counted and scored as 0.
"""

from __future__ import annotations

import inspect
import logging
import math
import numbers
import traceback
from collections.abc import Callable, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

from specjax.error_text import shortened
from train.answers.extract import each_gold
from train.rewards import AnswerReward, get_reward
from train.tasks.layout import Problem, shown

# Number of rows, evenly spaced, whose gold answers are checked before a run.
ROWS_CHECKED = 300
# Number of failures that are logged; all are counted.
_DESCRIBED = 5

log = logging.getLogger(__name__)


class RewardsFailedError(RuntimeError):
    """More rewards failed than the run may go on with."""


class Score(NamedTuple):
    """The reward of a completion; if the reward `failed` to return a number, `value` is 0."""

    value: float
    failed: bool = False


class Scorer:
    """A reward function, called with the columns that its parameters name.

    Args:
      name: name of a reward, or `module:function`.
      reward: the function; None to find it by its name.

    Attributes:
      built_in: the reward if it compares answers; None for any other function.
      failures: number of calls that failed so far.

    Raises:
      ValueError: there is no such reward.
    """

    def __init__(self, name: str, reward: Callable[..., Any] | None = None):
        self.name, self._reward = name, reward or get_reward(name)
        self.built_in = self._reward if isinstance(self._reward, AnswerReward) else None
        self._second, self._required, self._takes = _parameters(self._reward)
        self.failures = 0
        self._described: set[tuple[str, str]] = set()  # (row, what went wrong)

    def check(self, problem: Problem) -> None:
        """Checks that a row has all columns that the reward has as parameters.

        Raises:
          ValueError: a parameter has no column; the message names both.
        """
        have = _columns(problem)
        missing = [name for name in self._required if name not in have]
        if missing:
            raise ValueError(
                f"reward {self.name!r} asks for {', '.join(missing)}, and the columns that it can "
                f"have are {', '.join(have)}; name its parameters after columns, or give them "
                "defaults"
            )

    def __call__(self, completion: str, problem: Problem) -> Score:
        try:
            value = self._call(completion, problem)
        except Exception as error:  # a user's function may raise anything; the run goes on
            where = _line_of(error, self._reward)
            return self._failed(problem, f"raised {type(error).__name__}{where}", _one_line(error))
        found = as_number(value)
        if found is None:
            what = f"returned {shown(value)} ({type(value).__name__})"
            return self._failed(problem, what, "expected a finite number (return float(...))")
        return Score(found)

    def _call(self, completion: str, problem: Problem) -> Any:
        columns = _columns(problem)
        args = [completion]
        if self._second is not None:
            args.append(columns.pop(self._second, columns["answer"]))
        if self._takes is not None:
            columns = {name: columns[name] for name in self._takes if name in columns}
        return self._reward(*args, **columns)

    def _failed(self, problem: Problem, what: str, more: str) -> Score:
        """Counts a failure, and logs it unless the row has failed in the same way before."""
        self.failures += 1
        key = row_name(problem), f"{what}: {more}"
        if key in self._described or len(self._described) >= _DESCRIBED:
            return Score(0.0, failed=True)
        self._described.add(key)
        last = len(self._described) == _DESCRIBED
        log.warning(
            "reward %r %s for %s: %s; scored as 0%s",
            self.name,
            what,
            row_name(problem),
            more,
            ". Further failures are only counted, in reward/failed" if last else "",
        )
        return Score(0.0, failed=True)


def row_name(problem: Problem) -> str:
    """The name of a problem's row in messages."""
    return f"the row {problem.place}" if problem.place else f"problem {problem.index}"


def as_number(value: Any) -> float | None:
    """A finite number of Python, numpy or jax as float; None for anything else, also for a bool."""
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, (numbers.Real, Decimal)):
        return None
    try:
        found = float(value)
    except OverflowError:
        return None
    return found if math.isfinite(found) else None


def _parameters(reward: Callable[..., Any]) -> tuple[str | None, list[str], list[str] | None]:
    """The parameters of a reward after the completion.

    Returns:
      (second, required, all). second is the name of the second parameter, which gets the answer if
      no column has that name; None without one. required has the names of further parameters
      without a default. all has the names of all further parameters; None if it takes any.
    """
    kinds = inspect.Parameter
    try:
        rest = list(inspect.signature(reward).parameters.values())
    except (TypeError, ValueError):  # written in C: called by position
        return "answer", [], []
    if rest and rest[0].kind is not kinds.VAR_POSITIONAL:
        rest = rest[1:]
    second = None
    if rest and rest[0].kind in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD):
        second, *rest = (rest[0].name, *rest[1:])
    elif rest and rest[0].kind is kinds.VAR_POSITIONAL:
        second = "answer"
    named = [p for p in rest if p.kind in (kinds.POSITIONAL_OR_KEYWORD, kinds.KEYWORD_ONLY)]
    required = [p.name for p in named if p.default is kinds.empty]
    takes_any = any(p.kind is kinds.VAR_KEYWORD for p in rest)
    return second, required, None if takes_any else [p.name for p in named]


def _columns(problem: Problem) -> dict[str, Any]:
    """The columns that a reward may have as parameters, by name."""
    text = isinstance(problem.prompt, str)
    own = {"answer": problem.answer, "prompt": problem.prompt if text else list(problem.prompt)}
    if not isinstance(problem.answer, str):
        own["answer"] = list(problem.answer)
    if not text:
        own["messages"] = list(problem.prompt)
    return {**problem.columns, **own}


def _line_of(error: BaseException, reward: Callable[..., Any]) -> str:
    """The place where a reward raised, as ` at module.py:LINE`; "" if unknown.

    It is the innermost frame of the user's own code, in or below the directory of the reward.
    """
    frames = traceback.extract_tb(error.__traceback__)[2:]  # after the frames of this module
    inner = inspect.unwrap(reward)
    code = getattr(inner, "__code__", None) or getattr(type(inner).__call__, "__code__", None)
    folder = Path(code.co_filename).parent if code is not None else None
    packages = {"site-packages", "dist-packages"}
    own = [
        frame
        for frame in frames
        if folder is not None
        and folder in Path(frame.filename).parents
        and not packages & set(Path(frame.filename).relative_to(folder).parts)
    ]
    return f" at {Path(own[-1].filename).name}:{own[-1].lineno}" if own else ""


def _one_line(error: BaseException) -> str:
    return shortened(" ".join(str(error).split()))


# --- gold answers --------------------------------------------------------------------------------


def unwinnable(scorer: Scorer, problem: Problem) -> str | None:
    """The reason why no completion can score 1 for a row; None if one can, or if it is unknown.

    It is unknown for a reward of the user's own.
    """
    known = scorer.built_in
    if known is None:
        return None
    if not any(gold.strip() for gold in each_gold(problem.answer)):
        return "the row has no answer"
    if known.can_win(problem.answer):
        return None
    return shown_gold(problem)


def shown_gold(problem: Problem) -> str:
    """The gold answer, or answers, for a message."""
    golds = each_gold(problem.answer)
    if len(golds) == 1:
        return f"gold answer {shown(golds[0])}"
    return f"gold answers (any is right) {', '.join(map(shown, golds))}"


def evenly(source: Sequence, count: int) -> list[int]:
    """At most `count` indices of a sequence, evenly spaced, the first one included."""
    if len(source) <= count:
        return list(range(len(source)))
    return [i * len(source) // count for i in range(count)]


def check_gold(
    scorer: Scorer, problems: Sequence[Problem], count: int = ROWS_CHECKED
) -> tuple[list[tuple[Problem, str]], int]:
    """Checks up to `count` rows: (unwinnable rows with their reasons, number of rows checked)."""
    if scorer.built_in is None:
        return [], 0
    rows = [problems[i] for i in evenly(problems, count)]
    found = [(row, unwinnable(scorer, row)) for row in rows]
    return [(row, reason) for row, reason in found if reason], len(rows)


def unwinnable_message(
    scorer: Scorer, found: Sequence[tuple[Problem, str]], checked: int, most: int = 5
) -> str:
    """A line that names unwinnable rows, `most` of them at most."""
    named = "; ".join(f"{row_name(row)}: {reason}" for row, reason in found[:most])
    more = f"; and {len(found) - most} more" if len(found) > most else ""
    return (
        f"{len(found)} of {checked} gold answers checked cannot be won with "
        f"reward={scorer.name}, which reads {scorer.built_in.gold}: {named}{more}"
    )


def zero_reward_example(scorer: Scorer, completion: str, problem: Problem, was_cut: bool) -> str:
    """A completion that scored 0, with its answer and the gold answer, for a warning.

    Args:
      scorer: the reward.
      completion: text of the completion.
      problem: problem that it answers.
      was_cut: whether it reached rollout.max_tokens.
    """
    text = shortened(completion, 600)
    cut = " (cut off at rollout.max_tokens)" if was_cut else ""
    lines = [f"a completion{cut}: {text!r}"]
    if scorer.built_in is not None:
        answer = scorer.built_in.extract(completion)
        read = "none" if answer is None else repr(answer)
        lines.append(f"the answer that reward={scorer.name} read in it: {read}")
        if answer is None:
            where = "data.prompt_template" if isinstance(problem.prompt, str) else "the prompts"
            lines.append(f"it reads {scorer.built_in.wants}: ask for that in {where}")
    lines.append(f"the {shown_gold(problem)}")
    return "; ".join(lines)
