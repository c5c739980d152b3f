"""The environments of a run: in worker processes, each sample's always in the same one."""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
import zlib
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from train.data.tasks.layout import Problem
from train.environments.calls import EnvironmentCall, Request, Turn
from train.registry import ENVIRONMENTS
from train.rewards.calls import Failed
from train.rewards.scoring import row_name
from train.rewards.workers import Setup, Workers

log = logging.getLogger(__name__)


class Environments:
    """Calls environments in processes with time limits, see `train.rewards.workers`.

    Args:
      name: name of the environment, or `module:attribute`.
      options: settings, a `RewardsSection`, of processes and time.
    """

    def __init__(self, name: str, options: Any):
        self.name, count = name, options.workers
        if count is None:
            count = max(1, min(8, (os.cpu_count() or 1) // 2))
        self._here = EnvironmentCall(name, ENVIRONMENTS.find(name)) if count == 0 else None
        setup = Setup((name,), "", options.timeout, "environment")
        self._workers = [Workers(setup, 1, lambda seconds: None) for _ in range(count)]
        self._described: set[str] = set()

    def ask(self, key: str, request: Request) -> Future:
        """Asks the environment of a sample.

        Returns:
          the future of a list with its answer: `Turn`, `Lost` or `Failed`.
        """
        if self._here is None:
            worker = self._workers[zlib.crc32(key.encode()) % len(self._workers)]
            return worker.submit(0, [key], [request])
        future: Future = Future()
        future.set_result(self._here([key], [request], None, 0.0))
        return future

    def opened(self, problem: Problem, chat: bool) -> Problem:
        """Returns a problem whose prompt is that of its environment.

        Args:
          chat: whether prompts are conversations; else the contents are joined.

        Raises:
          ValueError: the environment has none for this row.
        """
        [turn] = self.ask(str(problem.index), Request(row_of(problem))).result()
        if not isinstance(turn, Turn):
            raise ValueError(
                f"environment {self.name!r} {turn.what} for {row_name(problem)}: {turn.more}"
            )
        prompt = tuple(turn.messages) if chat else "".join(m["content"] for m in turn.messages)
        columns = {**problem.columns, "prompt_messages": turn.messages, "opened": problem}
        row = {**problem.row, **({"tools": list(turn.tools)} if turn.tools else {})}
        return dataclasses.replace(problem, prompt=prompt, columns=columns, row=row)

    def failed(self, problem: Problem, failed: Failed) -> None:
        """Logs a failure, unless one like it was logged before."""
        text = f"environment {self.name!r} {failed.what} for {row_name(problem)}: {failed.more}"
        if text not in self._described and len(self._described) < 5:
            self._described.add(text)
            log.warning("%s; the sample ends there, and reward/failed counts it", text)


def row_of(problem: Problem) -> dict[str, Any]:
    """The row that an environment sees: all columns, `prompt` and `answer` included."""
    problem = problem.columns.get("opened", problem)
    prompt = problem.prompt if isinstance(problem.prompt, str) else list(problem.prompt)
    return {"prompt": prompt, "answer": problem.answer, **problem.columns, **problem.row}


class Opened(Sequence):
    """Problems whose prompts are those of their environments, asked for when they are read."""

    def __init__(self, problems: Sequence[Problem], environments: Environments, chat: bool):
        self._problems = problems
        self._open = functools.lru_cache(1 << 12)(lambda i: environments.opened(problems[i], chat))

    def __len__(self) -> int:
        return len(self._problems)

    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return [self._open(i) for i in range(*index.indices(len(self)))]
        return self._open(range(len(self))[index])
