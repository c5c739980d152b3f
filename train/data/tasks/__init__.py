"""Layouts of rows of data: one file per task, see `specjax.interfaces.Task`.

A file of rows is recognised by the columns of its first row: the first task in the table
`train.registry.TASKS` that knows them reads all of its rows. To add one, write a file with a
`Layout` and put it into the table; users name their own as `module:attribute`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING

from train.registry import TASKS

if TYPE_CHECKING:
    from specjax.interfaces import Task


def recognise(columns: Collection[str]) -> Task | None:
    """The task whose rows have these columns; None if no task knows them."""
    return next((task for task in _all() if task.recognises(columns)), None)


def known_tasks() -> str:
    """All tasks with their columns, for messages."""
    return "; ".join(f"{task.name} ({task.columns})" for task in _all())


def find_task(name: str) -> Task:
    """A task by its name, or a user's own by dotted path `module:attribute`.

    Raises:
      ValueError: the name is unknown, or the path does not lead to a `Task`.
    """
    from specjax.interfaces import Task  # which imports jax: layouts alone need none

    task = TASKS.find(name)
    if not isinstance(task, Task):
        raise ValueError(
            f"task {name!r} is a {type(task).__name__}; expected {TASKS.expected}, or another "
            "object with the attributes and methods of specjax.interfaces.Task"
        )
    return task


def _all() -> Iterator[Task]:
    return map(TASKS.named, TASKS.names)
