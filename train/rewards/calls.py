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
run at once, and all calls in a process run in one event loop (`train.rewards.loop`).

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
from train.rewards.loop import cancel_unwanted, run_in_loop

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
        self._form = form = _form_of(function)
        self.batch = form.completion == BATCH
        either = function, type(function).__call__
        self.is_async = any(map(inspect.iscoroutinefunction, either))
        self.together = self.batch or self.is_async

    def check(self, have: Collection[str]) -> None:
        """Checks that there is a column for every parameter without a default.

        Raises:
          ValueError: a parameter has no column; the message names both.
        """
        missing = [name for name in self._form.required if name not in have]
        if missing:
            raise ValueError(
                f"reward {self.name!r} asks for {', '.join(missing)}, and the columns that it can "
                f"have are {', '.join(have)}; name its parameters after columns, or give them "
                "defaults"
            )

    def wanted(self, columns: Columns) -> dict[str, Any]:
        """The columns that the function may have, and the answer."""
        form = self._form
        always = ("answer", "prompt") if self.batch else ("answer",)
        return {
            name: value
            for name, value in columns.items()
            if name in always or name in form.names or (form.takes_any and name != ROW)
        }

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
            from outside (`train.rewards.workers`).
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
        form, arguments, named = self._form, [], dict(columns)
        if form.completion is None:
            arguments.append(completion)
            named.pop(form.first, None)
        else:
            named[form.completion] = completion
        if form.completion == VERL:
            named.setdefault("ground_truth", columns["answer"])
        if form.second is not None:
            arguments.append(named.pop(form.second, columns["answer"]))
        return arguments, form.taken(named)

    def _lists(self, completions: Sequence[str], rows: Sequence[Columns]) -> dict[str, list]:
        """The arguments of batch form: every column as a list."""
        names = dict.fromkeys(name for row in rows for name in row)
        lists = {name: [row.get(name) for row in rows] for name in names}
        turns = [_turns(*pair) for pair in zip(completions, rows, strict=True)]
        return self._form.taken({**lists, BATCH: turns, "prompts": lists.get("prompt", [])})

    def _outcomes(self, values: Any, count: int) -> list[Outcome]:
        """The outcomes of batch form, one for each completion."""
        try:
            items = list(values)
        except TypeError:
            items = None
        if items is None or len(items) != count or isinstance(values, (str, Mapping)):
            what = "no list" if items is None else f"{len(items)} values"
            more = f"expected a list of {count} numbers, one for each completion"
            return [Failed(f"returned {what} ({type(values).__name__})", more)] * count
        return [self._outcome(value) for value in items]

    def _outcome(self, value: Any) -> Outcome:
        """The outcome of a returned value."""
        if self._form.completion == VERL and isinstance(value, Mapping):
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
        outcomes: list[Outcome] = []
        of_task = count if self.batch else 1
        for task in tasks:
            if task in late:
                outcomes += [took_too_long(seconds)] * of_task
            elif task.cancelled():  # by itself
                outcomes += [Failed("was cancelled", "expected a finite number")] * of_task
            elif isinstance(error := task.exception(), Exception):
                outcomes += [self._raised(error)] * of_task
            elif error is not None:
                raise error
            else:
                value = task.result()
                outcomes += self._outcomes(value, count) if self.batch else [self._outcome(value)]
        return outcomes

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
    number = as_number(value)
    if number is not None:
        return number
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
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


class _Form(NamedTuple):
    """How a function takes its arguments.

    Attributes:
      completion: the name by which it gets completions; None: the first argument is the text.
      first: the name of its first parameter.
      second: the name of its second parameter, which gets the answer if no column has that name;
        None for a function that has none, or takes all arguments by name.
      named: the names of the parameters that are given by name.
      takes_any: whether it takes columns of any further name.
      required: those of them without a default, for which there must be a column.
    """

    completion: str | None
    first: str | None
    second: str | None
    named: list[str]
    takes_any: bool
    required: list[str]

    @property
    def names(self) -> list[str | None]:
        """The names of all parameters that may get a column."""
        return [self.second, *self.named]

    def taken(self, columns: Columns) -> dict[str, Any]:
        """The columns that are given by name."""
        return {n: x for n, x in columns.items() if self.takes_any or n in self.named}


def _form_of(function: Callable[..., Any]) -> _Form:
    kinds = inspect.Parameter
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # written in C: called by position
        return _Form(None, None, "answer", [], False, [])
    names = [p.name for p in parameters]
    by_name = ONE in names[1:] and ONE
    completion = BATCH if BATCH in names else VERL if VERL in names else by_name or None
    first = second = None
    if completion is None and parameters:
        first = names[0]
        if parameters[0].kind is not kinds.VAR_POSITIONAL:
            parameters = parameters[1:]
        if parameters and parameters[0].kind is kinds.VAR_POSITIONAL:
            second = "answer"
        elif parameters and parameters[0].kind in (
            kinds.POSITIONAL_ONLY,
            kinds.POSITIONAL_OR_KEYWORD,
        ):
            second, parameters = parameters[0].name, parameters[1:]
    given = {ONE: (ONE,), None: ()}.get(completion, (BATCH, "prompts", VERL))
    given = (*given, "ground_truth") if completion == VERL else given
    named = [p for p in parameters if p.kind in (kinds.POSITIONAL_OR_KEYWORD, kinds.KEYWORD_ONLY)]
    required = [p.name for p in named if p.default is p.empty and p.name not in given]
    takes_any = any(p.kind is kinds.VAR_KEYWORD for p in parameters)
    return _Form(completion, first, second, [p.name for p in named], takes_any, required)


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
