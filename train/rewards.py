"""Verifiable rewards, found by name in `train.registry.REWARDS`, or as `module:function`.

A reward is a function of a completion's text and the row of data that it answers, such as

    reward(completion, answer) -> float

`train.reward_calls` has the other forms: of batch form, asynchronous, and verl's. The first
parameter is the completion; every other one is passed by its name:

    answer          the gold answer as text; a list of texts where the row has several
    prompt          the prompt as text, or as a list of {role, content}
    messages        the prompt, where it is a list of {role, content}
    sample          a `train.scoring.SampleFacts`
    completion_ids  the tokens of the completion, the stop token included (TRL's name)
    row             all columns of the row as they are, by name
    any other name  the column of that name

A second parameter of a name that no column has is the answer.

`number` and `math_verify` find the answer of a completion as `train.answers.extract` says; `exact`
takes the line after the last `####`, `choice` the letter of a multiple-choice answer, and `format`
reads no answer. Of several gold answers any is right.
"""

from __future__ import annotations

import atexit
import functools
import importlib.util
import json
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from train.answers.choice import chosen_letter, letter_of
from train.answers.extract import each_gold, final_answer, last_line_answer, stated_gold
from train.answers.quantity import read_quantity
from train.children import start_child
from train.registry import REWARDS

Reward = Callable[..., Any]

SECONDS = 10.0  # time limit of one comparison
_START_SECONDS = 120.0


class MathWorker:
    """Compares answers in a child process, which is started on first use and after a kill.

    sympy may run forever on a policy's text (`9**9**9**9`), in one call that no signal interrupts,
    and the timeout of math-verify works in the main thread alone. So `train.answers.equivalence`
    runs in a child process, which is killed when the time is up. It reads and writes one line of
    JSON per request.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen | None = None

    def same(self, gold: str, found: str) -> bool:
        """Whether two answers are the same; False if that takes longer than `SECONDS`.

        A child that was found dead is replaced, and asked once more.

        Raises:
          ModuleNotFoundError: math-verify is not installed.
          RuntimeError: the child cannot be started.
        """
        request = {"gold": gold, "found": found}
        with self._lock:
            for _ in range(2):
                if self._process is None:
                    self._start()
                reply = self._ask(request, SECONDS)
                if reply:
                    return reply == "true"
                self.close()
                if reply is None:  # it was late, and would be late again
                    break
            return False

    def _start(self) -> None:
        _require_library()
        self._process = start_child(
            [sys.executable, "-m", "train.answers.equivalence"],
            cwd=Path(__file__).resolve().parent.parent,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        # Imports take seconds on a busy machine and must not be charged to the first answer.
        if self._ask({"gold": "x+1", "found": "1+x"}, _START_SECONDS) != "true":
            self.close()
            raise RuntimeError(
                f"the math-verify process gave no answer within {_START_SECONDS:.0f} s of its "
                f"start; run `{sys.executable} -m train.answers.equivalence` to see why"
            )

    def _ask(self, request: dict[str, str], seconds: float) -> str | None:
        """The child's answer; "" if it is dead, and None if it was late and was killed."""
        process, expired = self._process, threading.Event()

        def expire():
            expired.set()
            process.kill()

        alarm = threading.Timer(seconds, expire)
        alarm.start()
        try:
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
            reply = process.stdout.readline().strip()
        except OSError:  # the pipe breaks when the process was killed or died
            reply = ""
        alarm.cancel()
        alarm.join()
        return None if expired.is_set() else reply

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


class _InThisProcess:
    """Compares answers without a child process, and without a time limit."""

    def __init__(self) -> None:
        self._lock, self._is_there = threading.Lock(), False

    def same(self, gold: str, found: str) -> bool:
        """Whether two answers are the same.

        Raises:
          ModuleNotFoundError: math-verify is not installed.
        """
        with self._lock:
            if not self._is_there:
                _require_library()
                self._is_there = True
            from train.answers.equivalence import same_answer

            try:
                return same_answer(gold, found)
            except Exception:  # no text of a policy is an error of the reward
                return False


def _require_library() -> None:
    """Raises ModuleNotFoundError if math-verify is not installed."""
    if importlib.util.find_spec("math_verify") is None:
        raise ModuleNotFoundError(
            "reward 'math_verify' needs the math-verify package; install it, or use the "
            "reward 'number'"
        )


WORKER: MathWorker | _InThisProcess = MathWorker()
atexit.register(WORKER.close)


def compare_in_this_process(at_once: bool = True) -> None:
    """Has `math_verify` start no child process: for a process that is itself ended when late.

    Args:
      at_once: whether to import the library now, and not within the first comparison.
    """
    global WORKER
    WORKER = _InThisProcess()
    if at_once:
        WORKER.same("x+1", "1+x")


def _of_any(reward: Callable[[str, str], float]) -> Reward:
    """Makes a reward take several gold answers, and return the largest of their rewards."""

    @functools.wraps(reward)
    def scored(response_text: str, answer: str | Sequence[str]) -> float:
        golds = [gold for gold in each_gold(answer) if gold.strip()]
        return max((reward(response_text, gold) for gold in golds), default=0.0)

    return scored


@_of_any
def exact(response_text: str, answer: str) -> float:
    """1.0 if the text after the last `####` is the answer, character for character."""
    found, gold = last_line_answer(response_text), last_line_answer(answer)
    return float(bool(found) and found == (answer.strip() if gold is None else gold))


@_of_any
def number(response_text: str, answer: str) -> float:
    """1.0 if the completion's answer is a number equal to the row's.

    Thousands separators, spaces and a trailing period do not count; `$`, `%` and units count where
    both have one. Fractions and mixed numbers are numbers (`train.answers.quantity`), a
    decimal may be rounded to six significant digits or cut off after seven, and `x = 5` is 5.
    """
    found, gold = _as_number(final_answer(response_text)), _as_number(stated_gold(answer))
    return float(found is not None and gold is not None and gold.equals(found))


def _as_number(text: str | None):
    return None if text is None else read_quantity(_NAMED.sub("", text))


_NAMED = re.compile(r"^[\s$]*\\?[a-zA-Z][\w ]*=")  # `x = 5`


@_of_any
def math_verify(response_text: str, answer: str) -> float:
    """1.0 if the completion's answer is mathematically equivalent to the row's.

    Both may be bare LaTeX; `train.answers.equivalence` has the rules. Answers that cannot be parsed
    score 0.0; no response raises an error. Two numbers are compared without the library. In a
    worker process (`train.reward_workers`) a comparison that is late is ended by `rewards.timeout`,
    and counts as failed; in any other process it is ended after `SECONDS`, and scores 0.0.

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


@_of_any
def choice(response_text: str, answer: str) -> float:
    """1.0 if the completion's answer is the letter of the row's: `B`, `(b)`, `B. Paris`.

    `train.answers.choice` says where the letter is looked for.
    """
    gold = letter_of(stated_gold(answer))
    return float(gold is not None and chosen_letter(response_text) == gold)


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


FORMAT = FormatReward()


@dataclass(frozen=True)
class AnswerReward:
    """A reward that compares answers, and can check gold answers before a run.

    Attributes:
      function: the reward, (completion, answer) -> 0.0 or 1.0.
      extract: finds the answer in a completion; returns None if there is none.
      write: makes a completion that states the given answer and nothing else.
      wants: place of the answer in a completion, for messages.
      gold: kind of gold answer that it compares, for messages.
      quick: whether it takes microseconds, whatever the completion is, and needs no process of its
        own.
    """

    function: Reward
    extract: Callable[[str], str | None]
    write: Callable[[str], str]
    wants: str
    gold: str
    quick: bool = False

    def __call__(self, completion: str, answer: str | Sequence[str]) -> float:
        return self.function(completion, answer)

    def can_win(self, answer: str | Sequence[str]) -> bool:
        """Whether a completion that states one of the row's own answers scores 1."""
        return any(self.function(self.write(gold), gold) == 1.0 for gold in each_gold(answer))


def _box(answer: str) -> str:
    return f"\\boxed{{{stated_gold(answer)}}}"


def _mark(answer: str) -> str:
    found = last_line_answer(answer)
    return f"#### {answer.strip() if found is None else found}"


_ANSWER_PLACES = "\\boxed{...}, a last line '#### ...', or 'answer is ...'"
EXACT = AnswerReward(exact, last_line_answer, _mark, "a line '#### ...'", "one line of text", True)
NUMBER = AnswerReward(
    number, final_answer, _box, _ANSWER_PLACES, "a number, a fraction or a quantity", True
)
CHOICE = AnswerReward(
    choice,
    chosen_letter,
    _box,
    f"{_ANSWER_PLACES}, <answer>...</answer>, or a last line that begins with a letter",
    "a letter, such as B or (B)",
    True,
)
MATH_VERIFY = AnswerReward(
    math_verify, final_answer, _box, _ANSWER_PLACES, "formulas that parse, and words"
)


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
