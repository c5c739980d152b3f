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
from train.rewards.loop import MOST_ABANDONED, abandoned_threads
from train.rewards.workers import Answer, Setup, Workers

# Number of rows, evenly spaced, whose gold answers are checked before a run.
ROWS_CHECKED = 300
# Number of failures that are logged; all are counted.
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


_NONE = Failed("returned None (NoneType)", "expected a finite number (return float(...))")
_ALL_NONE = Failed("all returned None", "no reward applies to the row")


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
      failures: number of calls that failed so far.
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
            quick = all(map(_is_quick, self.names, functions))
            self.workers = 0 if quick else default_workers()
        self._workers: Workers | None = None
        self.failures = 0
        self._described: set[tuple[str, str]] = set()  # (row, what went wrong)
        self._seconds = self._waited = 0.0
        self._timed_out = 0
        self._warned_of_threads = False

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
        scoring = self.begin(problem)
        scoring.add(0, completion, sample)
        scoring.finish()
        return scoring

    @property
    def described(self) -> str:
        """The rewards with their weights, and where they run."""
        weights = zip(self._weights, self.names, strict=True)
        text = " + ".join(f"{w:g} {name}" if w != 1.0 else name for w, name in weights)
        if self.workers:
            processes = "1 process" if self.workers == 1 else f"{self.workers} processes"
            text += f" in {processes}, at most {self._timeout:g} s per completion"
        return text

    def begin(self, problem: Problem) -> Scoring:
        """Begins to score the completions of one problem."""
        return Scoring(self, problem)

    @property
    def is_batch(self) -> bool:
        """Whether a reward is of batch form, and so depends on completions beside its own."""
        return any(call.batch for call in self._calls)

    def metrics(self) -> dict[str, float]:
        """Figures since the last call: seconds in rewards, seconds waited, time limits passed."""
        figures = {
            "time/reward": self._seconds,
            "time/reward_wait": self._waited,
            "reward/timed_out": float(self._timed_out),
        }
        self._seconds, self._waited, self._timed_out = 0.0, 0.0, 0
        return figures

    def part_means(self, scores: Sequence[Score]) -> dict[str, float]:
        """The mean of each reward, without its weight, by its label, where it applies to any."""
        rows = [score.parts or (score.value,) for score in scores]
        rows = [row for row in rows if len(row) == len(self.labels)]  # older checkpoints' have none
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
        self,
        index: int,
        completions: Sequence[str],
        rows: Sequence[Mapping[str, Any]],
        here: bool = False,
    ) -> Future[Answer]:
        """Calls the reward of that number: now in this process, or later in a worker.

        Args:
          index: number of the reward.
          completions: texts to score.
          rows: columns of the row of each completion.
          here: whether it is called in this process although there are workers.
        """
        call = self._calls[index]
        rows = [call.wanted(columns) for columns in rows]
        if self.workers and not here:
            if self._workers is None:
                setup = Setup(self.names, self._pattern, self._timeout)
                self._workers = Workers(setup, self.workers)
            return self._workers.submit(index, completions, rows, call.is_async)
        started, future = time.perf_counter(), Future()
        outcomes = call(completions, rows)
        self._waited += time.perf_counter() - started
        if abandoned_threads() >= MOST_ABANDONED and not self._warned_of_threads:
            self._warned_of_threads = True
            log.warning(
                "%d calls of asyncio.to_thread that reward %r gave up still run in this process; "
                "let the functions that they call end by themselves, or set rewards.workers to a "
                "number above 0: a worker process is replaced when it has as many",
                abandoned_threads(),
                call.name,
            )
        future.set_result(Answer(outcomes, time.perf_counter() - started))
        return future

    def waited(self, seconds: float) -> None:
        """Counts seconds in which nothing was done but to wait for rewards."""
        self._waited += seconds

    def wait_for(self, futures: Collection[Future[Answer]]) -> None:
        """Waits until these calls of rewards have ended, and counts that as waiting."""
        started = time.perf_counter()
        concurrent.futures.wait(futures)
        self.waited(time.perf_counter() - started)

    def took(self, seconds: float) -> None:
        """Counts seconds that a call of a reward took."""
        self._seconds += seconds

    def joined(self, outcomes: Sequence[Outcome], problem: Problem) -> Score:
        """The score of a completion with these outcomes of its rewards; failures are logged."""
        if list(outcomes) == [None]:
            outcomes = [_NONE]
        elif all(outcome is None for outcome in outcomes):
            self._fail(", ".join(self.names), problem, _ALL_NONE)
            return Score(0.0, True, tuple(outcomes))
        failed = [isinstance(outcome, Failed) for outcome in outcomes]
        for call, outcome in zip(self._calls, outcomes, strict=True):
            if isinstance(outcome, Failed):
                self._fail(call.name, problem, outcome)
        values = [0.0 if isinstance(outcome, Failed) else outcome for outcome in outcomes]
        if self._weights == [1.0]:
            return Score(values[0], any(failed))
        pairs = zip(self._weights, values, strict=True)
        value = sum((w * v for w, v in pairs if v is not None), 0.0)
        return Score(value, any(failed), tuple(values))

    def _fail(self, name: str, problem: Problem, failed: Failed) -> None:
        """Counts a failure, and logs it unless the row has failed in the same way before."""
        self.failures += 1
        self._timed_out += failed.timed_out
        key = row_name(problem), f"{name} {failed.what}: {failed.more}"
        if key in self._described or len(self._described) >= _DESCRIBED:
            return
        self._described.add(key)
        last = len(self._described) == _DESCRIBED
        log.warning(
            "reward %r %s for %s: %s; scored as 0%s",
            name,
            failed.what,
            row_name(problem),
            failed.more,
            ". Further failures are only counted, in reward/failed" if last else "",
        )


class Scoring:
    """Completions whose rewards are computed while others are sampled.

    With one completion, number 0, it is a judgement of `specjax.engine.hosts.Hosts`.

    Args:
      scorer: the rewards.
      problem: the problem of the completions that name none.
    """

    def __init__(self, scorer: Scorer, problem: Problem | None = None):
        self._scorer, self._problem = scorer, problem
        self._texts: dict[int, tuple[str, Problem, dict[str, Any]]] = {}
        # (number of the reward, place of the completion) -> where its outcome will be
        self._asked: dict[tuple[int, int], tuple[Future[Answer], int]] = {}
        self._finished = False

    def __contains__(self, place: int) -> bool:
        return place in self._texts

    def add(
        self,
        place: int,
        completion: str,
        sample: SampleFacts | None,
        problem: Problem | None = None,
    ) -> None:
        """Begins to score a completion; `place` is its number, each has another one."""
        problem = problem or self._problem
        columns = _columns(problem, sample)
        self._texts[place] = completion, problem, columns
        for index, call in enumerate(self._scorer._calls):
            if not call.together:
                future = self._scorer.ask(index, [completion], [columns])
                self._asked[index, place] = future, 0

    def finish(self) -> None:
        """Says that all completions were added, so that they are scored together, too."""
        if self._finished:
            return
        self._finished = True
        places = sorted(self._texts)
        for index, call in enumerate(self._scorer._calls):
            if call.together and places:
                texts = [self._texts[place][0] for place in places]
                rows = [self._texts[place][2] for place in places]
                future = self._scorer.ask(index, texts, rows)
                self._asked |= {(index, place): (future, i) for i, place in enumerate(places)}

    def done(self) -> bool:
        """Whether `result` returns without waiting."""
        return not self.futures()

    def result(self) -> Score:
        """The score of completion 0; waits for it."""
        return self.scores()[0]

    def futures(self) -> set[Future[Answer]]:
        """The calls whose results are not there yet."""
        return {future for future, _ in self._asked.values() if not future.done()}

    def wait(self, seconds: float) -> None:
        """Waits until a call of a reward has ended, at most so long, and counts that as waiting."""
        started = time.perf_counter()
        if waiting := self.futures():
            first = concurrent.futures.FIRST_COMPLETED
            concurrent.futures.wait(waiting, seconds, first)
        self._scorer.waited(time.perf_counter() - started)

    def scores(self) -> dict[int, Score]:
        """The score of each completion by its place; waits for them.

        Raises:
          train.rewards.workers.WorkerError: a worker process cannot be started.
        """
        self.finish()
        self._scorer.wait_for(self.futures())
        for future in {id(future): future for future, _ in self._asked.values()}.values():
            self._scorer.took(future.result().seconds)
        scores = {}
        for place, (_, problem, _) in self._texts.items():
            calls = [self._asked[index, place] for index in range(len(self._scorer.names))]
            outcomes = [future.result().outcomes[i] for future, i in calls]
            scores[place] = self._scorer.joined(outcomes, problem)
        return scores

    def cancel(self) -> None:
        """Gives up calls that no worker has begun."""
        for future, _ in self._asked.values():
            future.cancel()


def _is_quick(name: str, function: Callable[..., Any]) -> bool:
    """Whether a reward needs no worker process; a function of the user's may need one."""
    return getattr(function, "quick", False) and ":" not in name


def default_workers() -> int:
    """The number of worker processes by default: half of the processors, 8 at most."""
    usable = getattr(os, "sched_getaffinity", None)
    count = len(usable(0)) if usable else os.cpu_count() or 1
    return max(1, min(8, count // 2))


def labels_of(names: Sequence[str]) -> tuple[str, ...]:
    """The name of each reward in metrics: of a path the function, unless that is ambiguous."""
    short = [name.rpartition(":")[2] for name in names]
    taken = ("failed", "failed_share", "timed_out")
    taken += ("reward",) if len(names) > 1 else ()  # algo.filter_groups.metric calls the sum so
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
    """The reason why a reward cannot be 1 for a row; None if each can, or if it is unknown.

    It is unknown for a reward of the user's own. Of several rewards that compare answers, the
    reason names those that cannot.
    """
    lost = _lost(scorer, problem)
    if not lost:
        return None
    if problem.unread is not None:
        return problem.unread.why
    if not _has_gold(problem):
        return "the row has no answer"
    by = f" by {', '.join(lost)}" if len(scorer.checked) > 1 else ""
    return shown_gold(problem) + by


class GoldAnswers:
    """Which rows are `unwinnable`, decided once for each.

    Comparisons that may take long run in the workers, if there are any. One that fails, as a worker
    does that is ended at its time limit or for its memory, says nothing about the gold answer. It
    is done once more, and if it fails again, the row is kept.

    Args:
      scorer: the rewards.

    Attributes:
      undecided: indices of the rows that are kept because comparisons failed. A checkpoint has
        them, so that a run that is resumed draws the same rows.
    """

    def __init__(self, scorer: Scorer):
        self._scorer = scorer
        # By the row's index: of each reward that compares answers, those of the gold answers.
        self._asked: dict[int, list[list[Future[Answer]]]] = {}
        self._lost: dict[int, bool] = {}
        self.undecided: set[int] = set()

    def begin(self, problem: Problem) -> None:
        """Has workers check a row of which `are_lost` will be asked; returns at once."""
        if self._scorer.workers and problem.index not in self._lost:
            self._ask(problem)

    def keep(self, rows: Collection[int]) -> None:
        """Keeps the rows of these indices, which were `undecided` in a checkpoint."""
        self.undecided |= set(rows)
        self._lost |= dict.fromkeys(rows, False)

    def are_lost(self, problem: Problem) -> bool:
        """Whether there is a reward that cannot be 1 for a row; waits for workers.

        Raises:
          train.rewards.workers.WorkerError: a worker process cannot be started.
        """
        index = problem.index
        if index not in self._lost:
            is_lost = self._check(problem)
            if isinstance(is_lost, Failed):
                is_lost = self._check(problem)
            if isinstance(is_lost, Failed):
                self.undecided.add(index)
                self._warn(problem, is_lost)
            self._lost[index] = is_lost is True
        return self._lost[index]

    def _check(self, problem: Problem) -> bool | Failed:
        """Whether a reward cannot be 1 for a row; a failure if that is not known."""
        calls = self._ask(problem)
        self._scorer.wait_for({future for futures in calls for future in futures})
        del self._asked[problem.index]
        is_lost, failed = False, None
        for futures in calls:
            answers = [future.result() for future in futures]
            self._scorer.took(sum(answer.seconds for answer in answers))
            outcomes = [outcome for answer in answers for outcome in answer.outcomes]
            if 1.0 in outcomes:
                continue
            failures = [outcome for outcome in outcomes if isinstance(outcome, Failed)]
            failed = next(iter(failures), failed)
            is_lost |= not failures
        return is_lost or failed or False

    def _ask(self, problem: Problem) -> list[list[Future[Answer]]]:
        if problem.index not in self._asked:
            golds = each_gold(problem.answer) if _has_gold(problem) else ()
            self._asked[problem.index] = [
                [
                    self._scorer.ask(
                        self._scorer.names.index(name),
                        [reward.write(gold)],
                        [{"answer": gold}],
                        here=_is_quick(name, reward),
                    )
                    for gold in golds
                ]
                for name, reward in self._scorer.checked.items()
            ]
        return self._asked[problem.index]

    def _warn(self, problem: Problem, failed: Failed) -> None:
        if len(self.undecided) > _DESCRIBED:
            return
        last = len(self.undecided) == _DESCRIBED
        log.warning(
            "the comparison of the %s of %s with itself %s twice: %s; the row is kept%s",
            shown_gold(problem),
            row_name(problem),
            failed.what,
            failed.more,
            ". Further such rows are kept without a warning" if last else "",
        )


def is_hopeless(scorer: Scorer, problem: Problem) -> bool:
    """Whether none of the rewards that compare answers can be 1 for a row."""
    return len(_lost(scorer, problem)) == len(scorer.checked) > 0


def _lost(scorer: Scorer, problem: Problem) -> list[str]:
    """The names of the checked rewards that cannot be 1 for a row."""
    has_gold = _has_gold(problem)
    return [
        name
        for name, reward in scorer.checked.items()
        if not (has_gold and reward.can_win(problem.answer))
    ]


def _has_gold(problem: Problem) -> bool:
    return any(gold.strip() for gold in each_gold(problem.answer))


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
    return [(row, reason) for row, reason in reasons if reason], len(rows)


def described_gold(scorer: Scorer) -> str:
    """The kinds of gold answers that the checked rewards read, for messages."""
    if len(scorer.checked) == 1:
        return scorer.built_in.gold
    return "; ".join(f"{reward.gold} ({name})" for name, reward in scorer.checked.items())


def unwinnable_message(
    scorer: Scorer, lost: Sequence[tuple[Problem, str]], checked: int, most: int = 5
) -> str:
    """A line that names unwinnable rows, `most` of them at most, those without an answer first."""
    lost = sorted(lost, key=lambda pair: pair[0].unread is None)
    named = "; ".join(f"{row_name(row)}: {reason}" for row, reason in lost[:most])
    more = f"; and {len(lost) - most} more" if len(lost) > most else ""
    if any(row.unread is not None for row, _ in lost):
        more += "; data.answer_key=COLUMN names another column of the answer"
    return (
        f"{len(lost)} of {checked} gold answers checked cannot be won with "
        f"reward={scorer.name}, which reads {described_gold(scorer)}: {named}{more}"
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
