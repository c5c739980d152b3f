"""Environments: what the policy talks to over several turns, called in a worker or in this process.

An environment is a class, one object per sample, with the methods

    reset(row) -> messages                      the prompt; it depends on the row alone
    step(messages) -> (messages, reward, done)  answers the conversation so far, whose last message
                                                is the assistant's; the reward of a sample is the
                                                sum over its turns

Either may be `async def`; a process asks one environment at a time. Messages are
{"role": .., "content": text}. It may have an attribute `tools`, JSON schemas that the chat template
describes, and a method `restore(messages)`, which brings a new object, after `reset`, to where the
conversation stands: without it a sample begins again where its environment was lost with a process,
or its last turns were cut off.
"""

from __future__ import annotations

import asyncio
import inspect
import json
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from train.registry import ENVIRONMENTS
from train.rewards.calls import Failed, as_number, event_loop, raised, took_too_long
from train.rewards.workers import Setup

Messages = list[dict[str, Any]]


class Turn(NamedTuple):
    """What an environment answered.

    Attributes:
      messages: its messages; the prompt after `reset`.
      reward: reward of the turn.
      done: whether the sample has ended.
      tools: JSON schemas, after `reset`.
    """

    messages: Messages
    reward: float = 0.0
    done: bool = False
    tools: Sequence[Mapping[str, Any]] = ()


class Lost(NamedTuple):
    """There is no environment that stands where the conversation does."""


class Request(NamedTuple):
    """A call of an environment.

    Attributes:
      row: the row of the problem.
      prompt: messages of the prompt; None: `reset` is asked for alone.
      messages: the messages since, the assistant's last.
    """

    row: Mapping[str, Any]
    prompt: Messages | None = None
    messages: Messages = ()


class _LateError(Exception):
    """An environment did not answer in its time."""


class EnvironmentCall:
    """Calls the environments of samples; has the interface of `RewardCall` in a worker.

    Args:
      name: name in messages.
      factory: function that makes an environment.
    """

    def __init__(self, name: str, factory: Callable[[], Any]):
        self.name, self._factory = name, factory
        # Environment of each sample, and how many messages since the prompt it has seen.
        self._open: OrderedDict[str, tuple[Any, int]] = OrderedDict()

    def __call__(
        self, keys: Sequence[str], requests: Sequence[Request], seconds: float | None, extra: float
    ) -> list[Turn | Lost | Failed]:
        """Answers requests, each of the sample with a key.

        Args:
          seconds: time limit of an asynchronous answer; others are ended from outside.
          extra: further seconds of the first call.
        """
        limit = None if seconds is None else seconds + extra
        return [self._answer(*pair, limit) for pair in zip(keys, requests, strict=True)]

    def _answer(self, key: str, request: Request, limit: float | None) -> Turn | Lost | Failed:
        try:
            if request.prompt is None:
                environment = self._factory()
                messages = _checked(_result(environment.reset(dict(request.row)), limit))
                return Turn(messages, tools=list(getattr(environment, "tools", ())))
            environment = self._at(key, request, limit)
            if isinstance(environment, Lost | Failed):
                return environment
            answer = _result(environment.step([*request.prompt, *request.messages]), limit)
            turn = _turn(answer)
            if not turn.done:
                self._open[key] = environment, len(request.messages) + len(turn.messages)
                while len(self._open) > 4096:  # objects that a process keeps
                    self._open.popitem(last=False)
            return turn
        except _LateError:
            return took_too_long(limit, "turn")
        except Exception as error:  # a user's class may raise anything; the run goes on
            return raised(error)

    def _at(self, key: str, request: Request, limit: float | None) -> Any:
        """The environment of a sample, or why there is none."""
        before = list(request.messages[:-1])
        environment, seen = self._open.pop(key, (None, -1))
        if seen == len(before):
            return environment
        environment = self._factory()
        prompt = _checked(_result(environment.reset(dict(request.row)), limit))
        if prompt != list(request.prompt):
            return Failed("gave another prompt for the same row", "reset() must depend on it alone")
        if before:
            if not hasattr(environment, "restore"):
                return Lost()
            _result(environment.restore([*prompt, *before]), limit)
        return environment


def load(setup: Setup) -> list[EnvironmentCall]:
    """Imports the environments of a worker."""
    return [EnvironmentCall(name, ENVIRONMENTS.find(name)) for name in setup.names]


def _result(value: Any, limit: float | None) -> Any:
    """A value, awaited where it is to be."""
    if not inspect.isawaitable(value):
        return value

    async def awaited():
        try:
            return await value
        except SystemExit as error:  # which would end the event loop
            raise RuntimeError(f"it ended the process: {error}") from error

    future = asyncio.run_coroutine_threadsafe(awaited(), event_loop())
    try:
        return future.result(limit)
    except TimeoutError as error:
        if future.done():  # the environment raised it, or has just answered
            return future.result()
        future.cancel()
        raise _LateError from error


def _checked(messages: Any) -> Messages:
    """Messages as JSON has them, for checkpoints keep them.

    Raises:
      TypeError: they are no messages, or hold what JSON cannot say.
    """
    found = json.loads(json.dumps([dict(message) for message in messages]))
    for message in found:
        if not (isinstance(message.get("role"), str) and isinstance(message.get("content"), str)):
            raise TypeError(f"expected messages with the texts role and content, got {message!r}")
        # Half a surrogate pair has no bytes, and no tokenizer takes it.
        message["content"] = message["content"].encode("utf-8", "replace").decode()
    return found


def _turn(answer: Any) -> Turn:
    messages, reward, done = answer
    number = as_number(reward)
    if number is None:
        raise TypeError(f"expected a finite number as reward, got {reward!r}")
    return Turn(_checked(messages), number, bool(done))
