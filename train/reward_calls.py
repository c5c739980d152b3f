"""How a reward function is called, and what it returned, in this process or in a worker's.

A function has one of these forms, told apart by the names of its parameters:

    reward(completion, answer) -> float             one completion at a time, its text first
    reward(completion, **columns) -> float
    reward(prompt, completion) -> float             or by the name `completion`, if it is not first
    reward(completions, **columns) -> [float]       batch form, as in TRL: every column is a list
    compute_score(data_source, solution_str, ...)   verl's: the completion by the name solution_str,
                                                    and a number or {"score": number} returned

A parameter named `completions`, in any place, makes a function one of batch form. Where the prompt
is a conversation it gets a completion as TRL gives it, [{"role": "assistant", "content": text}];
the other forms always get text. verl's parameter `ground_truth` gets the gold answer if the row has
no column of that name. Each form may be `async def`; then the completions that are scored together
run at once, and all calls in a process run in one event loop (`train.reward_loop`).

A number is an integer, a float, a fraction, or a bool, of Python, numpy or jax. None instead of a
number says that the reward does not apply to the row. This module imports nothing that takes time,
for every worker imports it.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import numbers
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

from specjax.error_text import shortened
from train.reward_loop import cancel_unwanted, run_in_loop

ONE = "completion"  # the parameter that gets the completion's text if it is not the first
BATCH = "completions"  # the parameter that makes a function one of batch form
VERL = "solution_str"  # the parameter that verl's functions have for the completion
ROW = "row"  # the parameter that gets the row as it is; `**columns` does not have it
Columns = Mapping[str, Any]


class Failed(NamedTuple):
    """What a reward did instead of returning a finite number.

    Attributes:
      what: what it did.
      more: the error, or what was expected.
      timed_out: whether it took longer than its time limit.
    """

    what: str
    more: str
    timed_out: bool = False


Outcome = float | Failed | None  # None: the reward does not apply to the row


def took_too_long(seconds: float) -> Failed:
    """The outcome of a reward that was ended at its time limit."""
    return Failed(
        f"took longer than {seconds:g} s per completion",
        "it was ended (rewards.timeout raises the limit)",
        timed_out=True,
    )


class RewardCall:
    """A reward function with the form in which it is called.

    Args:
      name: name of the reward in messages.
      function: the function.

    Attributes:
      batch: whether it is given lists.
      together: whether completions of a group are better scored by one call: it is of batch form,
        or asynchronous.
    """

    def __init__(self, name: str, function: Callable[..., Any]):
        self.name, self.function = name, function
        self._second, self._required, self._takes = _parameters(function)
        self._names = names = _names(function)
        self.batch, self._is_verls = BATCH in names, VERL in names
        # The name that the completion is given by; None: it is given by position.
        self._as = VERL if self._is_verls else ONE if ONE in names[1:] else None
        either = function, type(function).__call__
        self.is_async = any(map(inspect.iscoroutinefunction, either))
        self.together = self.batch or self.is_async
        if self.batch or self._as:
            self._second, self._required, self._takes = _by_name(function)

    def check(self, have: Collection[str]) -> None:
        """Checks that there is a column for every parameter without a default.

        Raises:
          ValueError: a parameter has no column; the message names both.
        """
        missing = [name for name in self._required if name not in have]
        if missing:
            raise ValueError(
                f"reward {self.name!r} asks for {', '.join(missing)}, and the columns that it can "
                f"have are {', '.join(have)}; name its parameters after columns, or give them "
                "defaults"
            )

    def asks_for(self, column: str) -> bool:
        """Whether the function gets a column of this name, if there is one."""
        if column == ROW:
            return ROW in self._names[not (self.batch or self._as) :]
        return self._takes is None or column == self._second or column in self._takes

    @property
    def takes_all(self) -> bool:
        """Whether the function takes columns of any name."""
        return self._takes is None

    @property
    def of_completion(self) -> tuple[str, ...]:
        """The names of parameters that get completions or prompts, and never a column."""
        if self.batch:
            return BATCH, "prompts"
        return (self._as,) if self._as else tuple(self._names[:1])

    def wanted(self, columns: Columns) -> dict[str, Any]:
        """The columns that the function may have, and the answer."""
        own = {name: value for name, value in columns.items() if self.asks_for(name)}
        always = ("answer", "prompt") if self.batch else ("answer",)
        return {**own, **{name: columns[name] for name in always}}

    def __call__(
        self,
        completions: Sequence[str],
        rows: Sequence[Columns],
        seconds: float | None = None,
        extra: float = 0.0,
    ) -> list[Outcome]:
        """Calls the function for completions, each with the columns of its row.

        Args:
          seconds: time limit of a completion, for an asynchronous function alone; others are ended
            from outside (`train.reward_workers`).
          extra: further seconds that this call may take, since it is the first one.
        """
        if self.is_async:
            return run_in_loop(self._gather(completions, rows, seconds, extra))
        if self.batch:
            try:
                values = self.function(**self._lists(completions, rows))
            except Exception as error:  # a user's function may raise anything; the run goes on
                return [self._raised(error)] * len(completions)
            return self._outcomes(values, len(completions))
        return [self._one(*pair) for pair in zip(completions, rows, strict=True)]

    def _one(self, completion: str, columns: Columns) -> Outcome:
        try:
            args, named = self._arguments(completion, columns)
            return self._outcome(self.function(*args, **named))
        except Exception as error:  # a user's function may raise anything; the run goes on
            return self._raised(error)

    def _arguments(self, completion: str, columns: Columns) -> tuple[list[Any], dict[str, Any]]:
        args = [completion]
        named = {name: value for name, value in columns.items() if name not in self._names[:1]}
        if self._as:
            args, named = [], {**columns, self._as: completion}
        if self._is_verls:
            named.setdefault("ground_truth", columns["answer"])
        if self._second is not None:
            args.append(named.pop(self._second, columns["answer"]))
        if self._takes is not None:
            named = {name: named[name] for name in self._takes if name in named}
        return args, named

    def _lists(self, completions: Sequence[str], rows: Sequence[Columns]) -> dict[str, list]:
        """The arguments of batch form: every column as a list."""
        every = dict.fromkeys(name for row in rows for name in row)
        found = {name: [row.get(name) for row in rows] for name in every}
        given = [_turns(*pair) for pair in zip(completions, rows, strict=True)]
        found |= {BATCH: given, "prompts": found.get("prompt", [])}
        if self._takes is not None:
            found = {name: found[name] for name in self._takes if name in found}
        return found

    def _outcomes(self, values: Any, count: int) -> list[Outcome]:
        """The outcomes of batch form, one for each completion."""
        try:
            found = list(values)
        except TypeError:
            found = None
        if found is None or len(found) != count or isinstance(values, (str, Mapping)):
            what = "no list" if found is None else f"{len(found)} values"
            more = f"expected a list of {count} numbers, one for each completion"
            return [Failed(f"returned {what} ({type(values).__name__})", more)] * count
        return [self._outcome(value) for value in found]

    def _outcome(self, value: Any) -> Outcome:
        """The outcome of a returned value."""
        if self._is_verls and isinstance(value, Mapping):
            value = value.get("score", value)
        return _outcome(value)

    async def _gather(
        self,
        completions: Sequence[str],
        rows: Sequence[Columns],
        seconds: float | None,
        extra: float = 0.0,
    ) -> list[Outcome]:
        count = len(completions)
        if self.batch:
            arguments = [((), self._lists(completions, rows))]
        else:
            arguments = map(self._arguments, completions, rows)
        tasks = [asyncio.ensure_future(self._awaited(*pair)) for pair in arguments]
        limit = None if seconds is None else seconds * (count if self.batch else 1) + extra
        late: set[asyncio.Future] = set(tasks)
        try:
            _, late = await asyncio.wait(tasks, timeout=limit)
        finally:
            for task in late:
                cancel_unwanted(task)
        found: list[Outcome] = []
        for task in tasks:
            each = count if self.batch else 1
            if task in late:
                found += [took_too_long(seconds)] * each
            elif task.cancelled():  # by itself
                found += [Failed("was cancelled", "expected a finite number")] * each
            elif isinstance(error := task.exception(), Exception):
                found += [self._raised(error)] * each
            elif error is not None:
                raise error
            else:
                value = task.result()
                found += self._outcomes(value, count) if self.batch else [self._outcome(value)]
        return found

    async def _awaited(self, args: Sequence[Any], named: Mapping[str, Any]) -> Any:
        """Calls the function as a task of its own, for it may raise before it is awaited."""
        return await self.function(*args, **named)

    def _raised(self, error: BaseException) -> Failed:
        where = _line_of(error, self.function)
        more = shortened(" ".join(str(error).split()))
        return Failed(f"raised {type(error).__name__}{where}", more)


def _turns(completion: str, columns: Columns) -> str | list[dict[str, str]]:
    """A completion as batch form gets it: a message where the prompt is a conversation."""
    if isinstance(columns.get("prompt"), str):
        return completion
    return [{"role": "assistant", "content": completion}]


def _outcome(value: Any) -> Outcome:
    if value is None:
        return None
    found = as_number(value)
    if found is not None:
        return found
    text = repr(value)
    text = text if len(text) <= 80 else f"{text[:77]}..."
    what = f"returned {text} ({type(value).__name__})"
    return Failed(what, "expected a finite number (return float(...))")


def as_number(value: Any) -> float | None:
    """A finite number, or a bool, of Python, numpy or jax as float; None for anything else."""
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        value = value.item()
    if not isinstance(value, (numbers.Real, Decimal)):
        return None
    try:
        found = float(value)
    except OverflowError:
        return None
    return found if math.isfinite(found) else None


def _names(function: Callable[..., Any]) -> list[str]:
    """The names of all parameters; none of a function that is written in C."""
    try:
        return list(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return []


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
    named, takes_any = _named(rest)
    required = [p.name for p in named if p.default is kinds.empty]
    return second, required, None if takes_any else [p.name for p in named]


def _by_name(reward: Callable[..., Any]) -> tuple[None, list[str], list[str] | None]:
    """As `_parameters`, of a function whose arguments, the completion too, are given by name."""
    named, takes_any = _named(list(inspect.signature(reward).parameters.values()))
    names = [p.name for p in named]
    always = (BATCH, "prompts", VERL) if BATCH in names or VERL in names else (ONE,)
    if VERL in names:
        always = (*always, "ground_truth")
    required = [p.name for p in named if p.default is p.empty and p.name not in always]
    return None, required, None if takes_any else [p.name for p in named]


def _named(parameters: Sequence[inspect.Parameter]) -> tuple[list[inspect.Parameter], bool]:
    """The parameters that can be given by name, and whether any other name is taken, too."""
    kinds = inspect.Parameter
    by_name = (kinds.POSITIONAL_OR_KEYWORD, kinds.KEYWORD_ONLY)
    any_name = any(p.kind is kinds.VAR_KEYWORD for p in parameters)
    return [p for p in parameters if p.kind in by_name], any_name


def _line_of(error: BaseException, reward: Callable[..., Any]) -> str:
    """The place where a reward raised, as ` at module.py:LINE`; "" if unknown.

    It is the innermost frame of the user's own code, in or below the directory of the reward.
    """
    inner = inspect.unwrap(reward)
    code = getattr(inner, "__code__", None) or getattr(type(inner).__call__, "__code__", None)
    folder = Path(code.co_filename).parent if code is not None else None
    packages = {"site-packages", "dist-packages"}
    own = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if folder is not None
        and frame.filename != __file__
        and folder in Path(frame.filename).parents
        and not packages & set(Path(frame.filename).relative_to(folder).parts)
    ]
    return f" at {Path(own[-1].filename).name}:{own[-1].lineno}" if own else ""
