"""Calls reward functions, and reads what they returned, in this process or in a worker's.

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
run at once.

A number is an integer, a float, a fraction, or a bool, of Python, numpy or jax. None instead of a
number says that the reward does not apply to the row. This module imports nothing that takes time,
for every worker imports it.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import math
import numbers
import threading
import traceback
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

from specjax.error_text import shortened

ONE = "completion"  # the parameter that gets the completion's text if it is not the first
BATCH = "completions"  # the parameter that makes a function one of batch form
VERL = "solution_str"  # the parameter that verl's functions have for the completion
_THREADS = 128  # in which asynchronous rewards may call what blocks
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


def took_too_long(seconds: float, what: str = "completion") -> Failed:
    """Returns the outcome of a reward that was ended at its time limit."""
    return Failed(
        f"took longer than {seconds:g} s per {what}",
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
      is_async: whether it is awaited.
      together: whether completions of a group are better scored by one call: it is of batch form,
        or asynchronous.
    """

    def __init__(self, name: str, function: Callable[..., Any]):
        self.name, self.function = name, function
        self._signature = inspect.signature(function)
        self._parameters = list(self._signature.parameters.values())
        names = list(self._signature.parameters)
        self.batch = BATCH in names
        marked = [name for name in (BATCH, VERL, ONE) if name in names]
        first = self._parameters[0] if self._parameters else None
        if first is not None and first.kind is not first.VAR_KEYWORD:
            marked.append(first.name)
        self._completion = marked[0] if marked else ONE
        # After a completion that is the first argument, the second one is the answer if no column
        # has its name.
        by_place = names[:1] == [self._completion] and self._completion not in (BATCH, VERL)
        kinds = inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD
        second = (p.name for p in self._parameters[1:2] if by_place and p.kind not in kinds)
        self._second = next(second, None)
        self.is_async = any(map(inspect.iscoroutinefunction, (function, type(function).__call__)))
        self.together = self.batch or self.is_async

    def check(self, have: Collection[str]) -> None:
        """Checks that there is a column for every parameter without a default.

        Raises:
          ValueError: a parameter has no column; the message names both.
        """
        given = {*have, self._completion, self._second}
        given |= {"prompts"} if self.batch else set()
        given |= {"ground_truth"} if self._completion == VERL else set()
        named = (p for p in self._parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD))
        missing = [p.name for p in named if p.default is p.empty and p.name not in given]
        if missing:
            raise ValueError(
                f"reward {self.name!r} asks for {', '.join(missing)}, and the columns are "
                f"{', '.join(have)}; name its parameters after columns, or give them defaults"
            )

    def wanted(self, columns: Columns) -> dict[str, Any]:
        """Returns the columns that the function may have, and the answer."""
        names = {"answer", *self._signature.parameters} | ({"prompt"} if self.batch else set())
        takes_any = any(p.kind is p.VAR_KEYWORD for p in self._parameters)
        return {n: x for n, x in columns.items() if n in names or (takes_any and n != ROW)}

    def __call__(
        self,
        completions: Sequence[str],
        rows: Sequence[Columns],
        seconds: float | None = None,
        extra: float = 0.0,
    ) -> list[Outcome]:
        """Calls the function for completions, each with the columns of its row.

        Args:
          completions: their texts.
          rows: columns of each.
          seconds: time limit of a completion, for an asynchronous function alone; others are ended
            from outside (`train.rewards.workers`).
          extra: further seconds that this call may take, since it is the first one.
        """
        if self.batch:
            names = dict.fromkeys(name for row in rows for name in row)
            lists = {name: [row.get(name) for row in rows] for name in names}
            lists["prompts"] = lists.get("prompt", [])
            calls = [(self._bound(list(map(_turns, completions, rows)), lists), len(rows))]
        else:
            pairs = zip(completions, rows, strict=True)
            calls = [(self._bound(text, row), 1) for text, row in pairs]
        if self.is_async:
            gathered = self._gather(calls, seconds, extra)
            future = asyncio.run_coroutine_threadsafe(gathered, event_loop())
            try:
                return future.result()
            finally:  # if the wait is interrupted, as by Ctrl-C
                future.cancel()
        outcomes: list[Outcome] = []
        for bound, count in calls:
            try:
                outcomes += self._outcomes(self.function(*bound.args, **bound.kwargs), count)
            except Exception as error:  # a user's function may raise anything; the run goes on
                outcomes += [raised(error)] * count
        return outcomes

    def _bound(self, completion: Any, columns: Columns) -> inspect.BoundArguments:
        columns = {**columns, self._completion: completion}
        if self._second is not None:
            columns.setdefault(self._second, columns["answer"])
        if self._completion == VERL:
            columns.setdefault("ground_truth", columns["answer"])
        arguments: dict[str, Any] = {}
        known = set(self._signature.parameters)
        for place, parameter in enumerate(self._parameters):
            name = parameter.name
            if parameter.kind is parameter.VAR_KEYWORD:
                arguments[name] = {n: x for n, x in columns.items() if n not in known}
            elif parameter.kind is parameter.VAR_POSITIONAL:
                if name in (self._completion, self._second):
                    arguments[name] = (completion, columns["answer"])[place:]
                    known.add("answer")  # given once
            elif name in columns:
                arguments[name] = columns[name]
        return inspect.BoundArguments(self._signature, arguments)

    def _outcomes(self, value: Any, count: int) -> list[Outcome]:
        """Returns the outcomes of a returned value, one for each completion."""
        if not self.batch:
            if self._completion == VERL and isinstance(value, Mapping):
                value = value.get("score", value)
            return [_outcome(value)]
        is_list = isinstance(value, Iterable) and not isinstance(value, (str, Mapping))
        items = list(value) if is_list else []
        if len(items) != count:
            what = f"returned {len(items)} values ({type(value).__name__})"
            more = f"expected a list of {count} numbers, one for each completion"
            return [Failed(what, more)] * count
        return list(map(_outcome, items))

    async def _gather(self, calls: Sequence, seconds: float | None, extra: float) -> list[Outcome]:
        limit = None if seconds is None else seconds * calls[0][1] + extra
        tasks = [asyncio.ensure_future(self._awaited(*call)) for call in calls]
        try:
            await asyncio.wait(tasks, timeout=limit)
        finally:
            late = [task for task in tasks if task.cancel()]  # which may end later, or never
        outcomes: list[Outcome] = []
        for task, (_, count) in zip(tasks, calls, strict=True):
            outcomes += [took_too_long(seconds)] * count if task in late else task.result()
        return outcomes

    async def _awaited(self, bound: inspect.BoundArguments, count: int) -> list[Outcome]:
        try:
            return self._outcomes(await self.function(*bound.args, **bound.kwargs), count)
        except BaseException as error:  # SystemExit would end the event loop of all calls
            return [raised(error)] * count


@functools.cache
def event_loop() -> asyncio.AbstractEventLoop:
    """The event loop in which the process runs its asynchronous rewards.

    Clients of HTTP, locks and semaphores belong to the event loop in which they were first used,
    and functions keep them from call to call.
    """
    loop = asyncio.new_event_loop()
    # Calls of `asyncio.to_thread` that hang keep no others waiting, until the process is replaced.
    loop.set_default_executor(ThreadPoolExecutor(_THREADS))
    threading.Thread(target=loop.run_forever, daemon=True, name="rewards").start()
    return loop


def _turns(completion: str, columns: Columns) -> str | list[dict[str, str]]:
    """Returns a completion as batch form gets it: a message where the prompt is a conversation."""
    if isinstance(columns.get("prompt"), str):
        return completion
    return [{"role": "assistant", "content": completion}]


def _outcome(value: Any) -> Outcome:
    if value is None:
        return None
    number = as_number(value)
    if number is not None:
        return number
    what = f"returned {shortened(repr(value), 80)} ({type(value).__name__})"
    return Failed(what, "expected a finite number (return float(...))")


def as_number(value: Any) -> float | None:
    """Reads a finite number, or a bool, of Python, numpy or jax; None for anything else."""
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        value = value.item()
    if not isinstance(value, (numbers.Real, Decimal)):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def raised(error: BaseException) -> Failed:
    """Returns the outcome of a reward that raised, with the line of its function that did."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename != __file__]
    where = f" at {Path(frames[0].filename).name}:{frames[0].lineno}" if frames else ""
    more = shortened(" ".join(str(error).split()))
    return Failed(f"raised {type(error).__name__}{where}", more)
