"""Scores completions, and finds gold answers for which the reward cannot give 1 ("unwinnable").

A run has one reward or several, whose values are added with weights. They run in this process or in
workers (`train.rewards.workers`). One that fails is logged, counted and scored as 0.
"""

from __future__ import annotations

import concurrent.futures
import logging
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

from specjax.error_text import shortened
from train.data.tasks.layout import Problem, shown
from train.rewards.answers.extract import each_gold
from train.rewards.builtin import THINKS_FIRST, AnswerReward, get_reward
from train.rewards.calls import ROW, Failed, Outcome, RewardCall
from train.rewards.workers import Outcomes, Setup, Workers

# Number of rows, evenly spaced, whose gold answers are checked before a run.
ROWS_CHECKED = 300
# Number of failures that are logged.
_DESCRIBED = 5

log = logging.getLogger(__name__)


class RewardsFailedError(RuntimeError):
    """More rewards failed than the run may go on with."""


class Score(NamedTuple):
    """The reward of a completion.

    Attributes:
      value: the weighted sum of its rewards; one that failed to return a number counts as 0, and
        one that does not apply to the row is left out.
      failed: whether one failed, or none of them applies.
      parts: value of each reward without its weight, if there are several; None of one that does
        not apply.
    """

    value: float
    failed: bool = False
    parts: tuple[float | None, ...] = ()


class SampleFacts(NamedTuple):
    """What a reward may know of a sample: the value of its parameter `sample`.

    Attributes:
      index: number of the sample among those of its prompt.
      token_ids: tokens of the completion, the stop token included.
      finish_reason: "stop", or "length" for a completion that was cut off.
    """

    index: int
    token_ids: Sequence[int]
    finish_reason: str | None


_NONE = Failed("returned None", "expected a finite number (return float(...))")


class Scorer:
    """The rewards of a run, called with the columns that their parameters name.

    Args:
      names: name of a reward, or `module:function`, or several of these.
      reward: the function of a single reward, which runs in this process; None to find it by its
        name.
      options: settings, a `RewardsSection`; None for equal weights and no workers.

    Attributes:
      name: the rewards in messages.
      labels: a short name of each reward, for metrics.
      checked: the rewards that compare answers and have a weight above 0, by their names.
      built_in: the first of these; None if there is none.
      workers: number of worker processes.

    Raises:
      ValueError: there is no such reward, or there are not as many weights as rewards.
    """

    def __init__(
        self,
        names: str | Sequence[str],
        reward: Callable[..., Any] | None = None,
        options: Any = None,
    ):
        self.names = (names,) if isinstance(names, str) else tuple(names)
        self.name = ", ".join(self.names)
        self._pattern = options.pattern if options else THINKS_FIRST
        functions = [reward or get_reward(name, self._pattern) for name in self.names]
        self._calls = [RewardCall(*pair) for pair in zip(self.names, functions, strict=True)]
        self._weights = [1.0] * len(self.names)
        if options is not None and options.weights is not None:
            if len(options.weights) != len(self.names):
                raise ValueError(
                    f"rewards.weights: expected {len(self.names)} numbers, one for each of "
                    f"reward={self.name}, got {options.weights}"
                )
            self._weights = list(options.weights)
        self.labels = labels_of(self.names)
        self.checked = {
            name: function
            for name, function, weight in zip(self.names, functions, self._weights, strict=True)
            if isinstance(function, AnswerReward) and weight > 0
        }
        self.built_in = next(iter(self.checked.values()), None)
        self._timeout = options.timeout if options else 0.0
        self.workers = 0 if options is None or reward else options.workers
        if self.workers is None:
            quick = all(getattr(function, "quick", False) for function in functions)
            usable = getattr(os, "sched_getaffinity", lambda _: range(os.cpu_count() or 1))
            self.workers = 0 if quick else max(1, min(8, len(usable(0)) // 2))
        self._workers: Workers | None = None
        self._described: set[str] = set()  # failures
        self._seconds: list[float] = []  # of calls since the last figures
        self._waited, self._timed_out = 0.0, 0

    def check(self, problem: Problem) -> None:
        """Checks that a row has all columns that the rewards have as parameters.

        Raises:
          ValueError: a parameter has no column; the message names both.
        """
        have = _columns(problem, None)
        for call in self._calls:
            call.check(have)

    def __call__(
        self, completion: str, problem: Problem, sample: SampleFacts | None = None
    ) -> Score:
        """Scores one completion, and waits for the result."""
        return self.begin_one(completion, problem, sample).result()

    def begin_one(
        self, completion: str, problem: Problem, sample: SampleFacts | None = None
    ) -> Scoring:
        """Begins to score one completion, as number 0."""
        scoring = Scoring(self, problem)
        scoring.add(0, completion, sample)
        scoring.finish()
        return scoring

    @property
    def described(self) -> str:
        """The rewards with their weights, and where they run."""
        weights = zip(self._weights, self.names, strict=True)
        text = " + ".join(f"{w:g} {name}" if w != 1.0 else name for w, name in weights)
        if self.workers:
            text += f", worker processes: {self.workers}, {self._timeout:g} s per completion"
        return text

    @property
    def is_batch(self) -> bool:
        """Whether a reward is of batch form, and so depends on completions beside its own."""
        return any(call.batch for call in self._calls)

    def metrics(self) -> dict[str, float]:
        """Returns figures since the last call: seconds in rewards and waited, limits passed."""
        seconds = self._seconds[:]
        del self._seconds[: len(seconds)]  # threads of workers may have added more
        figures = {
            "time/reward": sum(seconds),
            "time/reward_wait": self._waited,
            "reward/timed_out": float(self._timed_out),
        }
        self._waited, self._timed_out = 0.0, 0
        return figures

    def part_means(self, scores: Sequence[Score]) -> dict[str, float]:
        """The mean of each reward, without its weight, by its label, where it applies to any."""
        rows = [score.parts or (score.value,) for score in scores]
        means = {}
        for label, column in zip(self.labels, zip(*rows, strict=True), strict=False):
            if known := [value for value in column if value is not None]:
                means[label] = sum(known) / len(known)
        return means

    def close(self) -> None:
        """Ends the worker processes; the next call starts them again."""
        if self._workers is not None:
            self._workers.close()
            self._workers = None

    def ask(
        self, index: int, completions: Sequence[str], rows: Sequence[Mapping[str, Any]]
    ) -> Future[Outcomes]:
        """Calls the reward of that number: now in this process, or later in a worker.

        Args:
          index: number of the reward.
          completions: texts to score.
          rows: columns of the row of each completion.
        """
        call = self._calls[index]
        rows = [call.wanted(columns) for columns in rows]
        if self.workers:
            if self._workers is None:
                setup = Setup(self.names, self._pattern, self._timeout)
                self._workers = Workers(setup, self.workers, self._seconds.append)
            return self._workers.submit(index, completions, rows)
        started, future = time.perf_counter(), Future()
        future.set_result(call(completions, rows))
        self._seconds.append(time.perf_counter() - started)
        self._waited += self._seconds[-1]
        return future

    def wait_for(
        self, futures: Collection[Future], seconds: float | None = None, first: bool = False
    ) -> None:
        """Waits until calls of rewards have ended, and counts that as waiting.

        Args:
          futures: the calls.
          seconds: how long to wait at most.
          first: whether to wait for the first of them only.
        """
        started = time.perf_counter()
        until = concurrent.futures.FIRST_COMPLETED if first else concurrent.futures.ALL_COMPLETED
        if futures:
            concurrent.futures.wait(futures, seconds, until)
        self._waited += time.perf_counter() - started

    def joined(self, outcomes: Sequence[Outcome], problem: Problem) -> Score:
        """The score of a completion with these outcomes of its rewards; failures are logged."""
        named = zip(self.names, outcomes, strict=True)
        failed = [(name, outcome) for name, outcome in named if isinstance(outcome, Failed)]
        if all(outcome is None for outcome in outcomes):
            failed = [(self.name, _NONE)]
        for name, outcome in failed:
            self._fail(name, problem, outcome)
        parts = tuple(0.0 if isinstance(outcome, Failed) else outcome for outcome in outcomes)
        pairs = zip(self._weights, parts, strict=True)
        value = sum((w * v for w, v in pairs if v is not None), 0.0)
        return Score(value, bool(failed), () if self._weights == [1.0] else parts)

    def _fail(self, name: str, problem: Problem, failed: Failed) -> None:
        """Logs a failure, unless the row has failed in the same way before."""
        self._timed_out += failed.timed_out
        text = f"reward {name!r} {failed.what} for {row_name(problem)}: {failed.more}"
        if text not in self._described and len(self._described) < _DESCRIBED:
            self._described.add(text)
            log.warning("%s; scored as 0, as all are that reward/failed counts", text)


class Scoring:
    """Completions of a problem whose rewards are computed while others are sampled.

    With one completion, number 0, it is a judgement of `specjax.engine.hosts.Hosts`.
    """

    def __init__(self, scorer: Scorer, problem: Problem):
        self._scorer, self._problem = scorer, problem
        self._completions: dict[int, tuple[str, dict[str, Any]]] = {}  # with their columns
        # (number of the reward, place of the completion) -> where its outcome will be
        self._calls: dict[tuple[int, int], tuple[Future[Outcomes], int]] = {}

    def __contains__(self, place: int) -> bool:
        return place in self._completions

    def add(self, place: int, completion: str, sample: SampleFacts | None) -> None:
        """Begins to score a completion; `place` is its number, each has another one."""
        self._completions[place] = completion, _columns(self._problem, sample)
        for index, call in enumerate(self._scorer._calls):
            if not call.together:
                self._ask(index, [place])

    def finish(self) -> None:
        """Says that all completions were added, so that they are scored together, too."""
        places = sorted(self._completions)
        for index, call in enumerate(self._scorer._calls):
            if call.together and places and (index, places[0]) not in self._calls:
                self._ask(index, places)

    def _ask(self, index: int, places: Sequence[int]) -> None:
        texts, rows = zip(*(self._completions[place] for place in places), strict=True)
        future = self._scorer.ask(index, texts, rows)
        self._calls |= {(index, place): (future, i) for i, place in enumerate(places)}

    def done(self) -> bool:
        """Whether `result` returns without waiting."""
        return not self.futures()

    def result(self) -> Score:
        """Returns the score of completion 0; waits for it."""
        return self.scores()[0]

    def futures(self) -> set[Future[Outcomes]]:
        """Returns the calls whose results are not there yet."""
        return {future for future, _ in self._calls.values() if not future.done()}

    def wait(self, seconds: float) -> None:
        """Waits until a call of a reward has ended, at most so long."""
        self._scorer.wait_for(self.futures(), seconds, first=True)

    def scores(self) -> dict[int, Score]:
        """Returns the score of each completion by its place; waits for them.

        Raises:
          train.rewards.workers.WorkerError: a worker process cannot be started.
        """
        self.finish()
        self._scorer.wait_for(self.futures())
        scores = {}
        for place in self._completions:
            calls = [self._calls[index, place] for index in range(len(self._scorer.names))]
            outcomes = [future.result()[i] for future, i in calls]
            scores[place] = self._scorer.joined(outcomes, self._problem)
        return scores

    def cancel(self) -> None:
        """Gives up calls that no worker has begun."""
        for future, _ in self._calls.values():
            future.cancel()


def labels_of(names: Sequence[str]) -> tuple[str, ...]:
    """The name of each reward in metrics: of a path the function, unless that is ambiguous."""
    short = [name.rpartition(":")[2] for name in names]
    taken = ("failed", "failed_share", "timed_out")
    return tuple(
        name.replace(":", ".") if short.count(label) > 1 or label in taken else label
        for name, label in zip(names, short, strict=True)
    )


def row_name(problem: Problem) -> str:
    """The name of a problem's row in messages."""
    return f"the row {problem.place}" if problem.place else f"problem {problem.index}"


def _columns(problem: Problem, sample: SampleFacts | None) -> dict[str, Any]:
    """The columns that a reward may have as parameters, by name."""
    text = isinstance(problem.prompt, str)
    columns = {"answer": problem.answer, "prompt": problem.prompt if text else list(problem.prompt)}
    if problem.unread is not None:
        columns["answer"] = problem.unread.value
    elif not isinstance(problem.answer, str):
        columns["answer"] = list(problem.answer)
    if not text:
        columns["messages"] = list(problem.prompt)
    columns |= {"sample": sample, "completion_ids": list(sample.token_ids) if sample else []}
    return {**problem.columns, **columns, ROW: dict(problem.row or problem.columns)}


# --- gold answers --------------------------------------------------------------------------------


def unwinnable(scorer: Scorer, problem: Problem) -> str | None:
    """Returns the reason why a reward cannot be 1 for a row; None if each can, or if it is unknown.

    It is unknown for a reward of the user's own, and where a comparison was late.
    """
    golds, lost = [gold for gold in each_gold(problem.answer) if gold.strip()], []
    for index, name in enumerate(scorer.names):
        if (reward := scorer.checked.get(name)) is None:
            continue
        texts, rows = [*map(reward.write, golds)], [{"answer": gold} for gold in golds]
        outcomes = scorer.ask(index, texts, rows).result()
        if 1.0 not in outcomes and any(isinstance(outcome, Failed) for outcome in outcomes):
            return None
        lost += [] if 1.0 in outcomes else [name]
    if not lost:
        return None
    if problem.unread is not None:
        return problem.unread.why
    if not golds:
        return "the row has no answer"
    by = f" by {', '.join(lost)}" if len(scorer.checked) > 1 else ""
    return shown_gold(problem) + by


def _has_gold(problem: Problem) -> bool:
    return any(gold.strip() for gold in each_gold(problem.answer))


def shown_gold(problem: Problem) -> str:
    """The gold answer, or answers, for a message."""
    golds = [*map(shown, each_gold(problem.answer))]
    several = "s (any is right)" if len(golds) > 1 else ""
    return f"gold answer{several} {', '.join(golds)}"


def evenly(source: Sequence, count: int) -> list[int]:
    """At most `count` indices of a sequence, evenly spaced, the first one included."""
    count = min(count, len(source))
    return [i * len(source) // count for i in range(count)]


def check_gold(
    scorer: Scorer, problems: Sequence[Problem], count: int = ROWS_CHECKED
) -> tuple[list[tuple[Problem, str]], int]:
    """Checks up to `count` rows, and all rows of files that have no gold answer.

    Returns:
      unwinnable rows with their reasons, and the number of rows checked.
    """
    if not scorer.checked:
        return [], 0
    chosen = set(evenly(problems, count))
    if isinstance(problems, list):  # and not generated one by one
        chosen |= {i for i, problem in enumerate(problems) if not _has_gold(problem)}
    rows = [problems[i] for i in sorted(chosen)]
    reasons = [(row, unwinnable(scorer, row)) for row in rows]
    scorer.metrics()  # are of steps
    return [(row, reason) for row, reason in reasons if reason], len(rows)


def unwinnable_message(scorer: Scorer, lost: Sequence[tuple[Problem, str]], checked: int) -> str:
    """A line that names unwinnable rows, five at most."""
    text = "; ".join(f"{row_name(row)}: {reason}" for row, reason in lost[:5])
    if len(lost) > 5:
        text += f"; and {len(lost) - 5} more"
    if any(row.unread is not None for row, _ in lost):
        text += "; data.answer_key=COLUMN names another column of the answer"
    return (
        f"{len(lost)} of {checked} gold answers checked cannot be won with "
        f"reward={scorer.name}: {text}"
    )


def zero_reward_example(scorer: Scorer, completion: str, problem: Problem, was_cut: bool) -> str:
    """A completion that scored 0, with its answer and the gold answer, for a warning.

    Args:
      scorer: the reward.
      completion: text of the completion.
      problem: problem that it answers.
      was_cut: whether it reached rollout.max_tokens.
    """
    cut = " (cut off at rollout.max_tokens)" if was_cut else ""
    text = f"a completion{cut}: {shortened(completion, 600)!r}; the {shown_gold(problem)}"
    if scorer.built_in is None:
        return text
    answer, where = scorer.built_in.extract(completion), scorer.built_in.wants
    return f"{text}; reward={scorer.name} read the answer {answer!r}: it reads {where}"
