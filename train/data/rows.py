"""Problems for RL and demonstrations for SFT, their order and their token ids.

They are generated (`train.data.tasks.sums`), or rows of files (`train.data.tasks.files`). The
columns of a row decide its task (`train.data.tasks`). The hash of a question decides its split, so
the splits cannot overlap.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import logging
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from specjax.interfaces import Task
from train.data import tasks
from train.data.tasks import layout, reasoning_gym, sums
from train.data.tasks.files import find_files, read_rows
from train.data.tasks.prompt import keyed
from train.registry import SUMS_REWARD
from train.rewards.answers.extract import each_gold
from train.schema import GENERATED, REASONING_GYM, DataConfig, fill_template

_CALCULATOR = re.compile(r"<<[^<>]*>>")

log = logging.getLogger(__name__)


class EmptySplitError(ValueError):
    """A split has no rows."""


def problems(
    cfg: DataConfig, split: str, chat: bool = False, held_out: int = 0
) -> Sequence[layout.Problem]:
    """Returns the problems of a split, `train` or `heldout`, by random access.

    Args:
      cfg: settings of the data.
      split: name of the split.
      chat: whether prompts will be messages of a conversation; the question alone is then the
        message, unless the settings have a template.
      held_out: number of generated problems that are held out, if more than `cfg.heldout_size`.

    Raises:
      ValueError: the path is missing, no task knows the rows, or a row cannot be read.
      FileNotFoundError: the file does not exist.
    """
    task = find_task(cfg)
    if cfg.task == REASONING_GYM:
        given = cfg.prompt_template or ("{question}" if chat else reasoning_gym.TEMPLATE)
        return reasoning_gym.Generated(cfg, split, given, held_out)
    if task is None:
        return sums.Sums(cfg, split, False)
    rows = []
    for i, (place, example) in enumerate(_examples(cfg, task, split)):
        unread = example.answer if isinstance(example.answer, layout.Unread) else None
        answer, prompt = "" if unread else example.answer, prompt_of(cfg, task, example, chat)
        rows.append(layout.Problem(prompt, answer, i, place, example.columns, example.row, unread))
    return rows


def demonstrations(
    cfg: DataConfig, split: str, chat: bool = False
) -> Sequence[layout.Demonstration]:
    """Returns the demonstrations of a split's problems, in the order of `problems`.

    Raises:
      ValueError: a row has no demonstration, and as in `problems`.
      FileNotFoundError: the file does not exist.
    """
    task = find_task(cfg)
    if cfg.task == REASONING_GYM:
        raise ValueError("data.task=reasoning_gym has no worked answers to imitate")
    if task is None:
        return sums.Sums(cfg, split, True)
    rows = []
    for place, example in _examples(cfg, task, split):
        response = response_of(example, task, place, "there is nothing to imitate")
        if task.name == "gsm8k":
            response = _CALCULATOR.sub("", response)
        prompt = prompt_of(cfg, task, example, chat)
        rows.append(layout.Demonstration(prompt, response, layout.tools_of(example.row), place))
    return rows


def response_of(example: layout.Example, task: Task, place: str, otherwise: str) -> layout.Response:
    """Returns the demonstration of a row.

    Args:
      example: the row.
      task: task that read it.
      place: place of the row, for messages.
      otherwise: what to do without one, for messages.

    Raises:
      ValueError: the row has none, an empty one, or one that cannot be read.
    """
    response = example.response
    if isinstance(response, layout.Unread):
        raise ValueError(f"{place}: {response.why}; fix or delete the row")
    if response is None:
        raise ValueError(
            f"{place}: a row of task {task.name} without a demonstration (a worked answer, a "
            f"completion, or a last message of the assistant); {otherwise}"
        )
    if not layout.text_of_response(response).strip() and not {*layout.PARTS} & {*response}:
        raise ValueError(f"{place}: the demonstration is empty; delete the row")
    return response


def find_task(cfg: DataConfig) -> Task | None:
    """Returns the task of the rows of `cfg.path`; None if problems are generated.

    Raises:
      ValueError: no task has the columns of the first row, or a path is missing.
      FileNotFoundError: a file does not exist.
    """
    if cfg.task in GENERATED or (cfg.task == "auto" and not cfg.path):
        return None
    cfg.require_path()
    return _task_of(cfg, cfg.path)


def _task_of(cfg: DataConfig, path: str | Sequence[str]) -> Task:
    _, row = next(read_rows(path), (None, None))
    if row is None:
        raise ValueError(f"{path}: the file is empty; expected one row per problem")
    return task_of(cfg, row, str(path))


def task_of(cfg: DataConfig, row: layout.Row, where: str) -> Task:
    """Returns the task of rows, by the settings or the columns of one of them.

    Raises:
      ValueError: no task knows these columns; the message begins with `where`.
    """
    if cfg.prompt_key or cfg.answer_key:
        return keyed(cfg.prompt_key, cfg.answer_key)
    if cfg.task != "auto":
        return tasks.find_task(cfg.task)
    if (task := tasks.recognise(row)) is None:
        raise ValueError(
            f"{where}: cannot tell what its rows mean: the columns are {', '.join(row)}, and the "
            f"tasks known are {tasks.known_tasks()}; set data.prompt_key and data.answer_key to "
            "two of the columns, or data.task to module:attribute, a task of your own"
        )
    return task


def default_reward(cfg: DataConfig) -> str:
    """Returns the name of the reward that suits the answers."""
    task = find_task(cfg)
    if cfg.task == REASONING_GYM:
        return reasoning_gym.REWARD
    return SUMS_REWARD if task is None else task.reward


class Table(NamedTuple):
    """The rows of a file, or of several.

    Attributes:
      examples: the rows, each with its place in its file for messages.
      duplicates: number of rows whose prompt and answer an earlier row has; they are among the
        examples unless they were dropped.
    """

    examples: list[tuple[str, layout.Example]]
    duplicates: int


def read_table(path: str | Path | Sequence[str], task: Task, duplicates: str = "keep") -> Table:
    """Reads all rows of a file, or of all files that paths stand for (`train.data.tasks.files`).

    Raises:
      FileNotFoundError: a file does not exist.
      ValueError: there are no rows, or the task cannot read one; the message names it.
    """
    files = find_files(str(path) if isinstance(path, Path) else path)
    # Reading a file that does not exist will say what is wrong.
    stamps = tuple(file.stat().st_mtime_ns if file.exists() else 0 for file in files)
    return _read_table(tuple(map(str, files)), stamps, task, duplicates)


def read_row(task: Task, row: layout.Row, place: str) -> layout.Example:
    """Reads a row, whose place is for messages.

    Raises:
      ValueError: the task cannot read it, or the column `tools` cannot be read.
    """
    try:
        layout.tools_of(row)
        return task.read(row)
    except layout.RowError as error:
        raise ValueError(
            f"{place}: {error}; read as task {task.name} ({task.columns}), the row has the columns "
            f"{', '.join(row)}; set data.task to one of {tasks.known_tasks()}, or fix or delete it"
        ) from error


@functools.lru_cache(maxsize=2)  # for both splits of a file, or two files
def _read_table(paths: tuple[str, ...], stamps: Any, task: Task, duplicates: str) -> Table:
    examples, seen, repeated = [], {}, 0
    for place, row in read_rows(paths):
        example = dataclasses.replace(read_row(task, row, place), row=row)
        answer = example.answer
        gold = repr(answer.value) if isinstance(answer, layout.Unread) else each_gold(answer)
        key = (question_of(example.prompt), gold)
        known = seen.setdefault(key, example)
        if known is not example:
            repeated += 1
            if duplicates == "drop":
                continue
            # What is equal is stored once in memory: DAPO's file has every row a hundred times.
            stored = {name: value for name, value in known.row.items() if row.get(name) == value}
            example = dataclasses.replace(example, prompt=known.prompt, row={**row, **stored})
        examples.append((place, example))
    return Table(examples, repeated)


def question_of(prompt: str | Sequence[layout.Message]) -> str:
    """Returns the text of a prompt, which identifies duplicates and decides the split."""
    if isinstance(prompt, str):
        return prompt

    def text(message: layout.Message) -> str:
        calls = message.get("tool_calls")
        return message.get("content") or (json.dumps(calls, sort_keys=True) if calls else "")

    return "\n".join(f"{message['role']}: {text(message)}" for message in prompt)


def asked_by(problem: layout.Problem) -> str:
    """Returns the question of a generated problem, without a template; else its prompt's text."""
    entry = problem.columns.get("entry") if not problem.place else None
    return entry["question"] if entry else question_of(problem.prompt)


def _examples(cfg: DataConfig, task: Task, split: str) -> list[tuple[str, layout.Example]]:
    """Returns the rows of a split, in the order of the file."""
    every = read_table(cfg.path, task, cfg.duplicates).examples
    if cfg.heldout_path:
        heldout_task = _task_of(cfg, cfg.heldout_path)
        rows = read_table(cfg.heldout_path, heldout_task, cfg.duplicates).examples
        if split == "train":
            heldout = {question_of(example.prompt) for _, example in rows}
            rows = [row for row in every if question_of(row[1].prompt) not in heldout]
            if len(rows) < len(every):
                log.warning(
                    "left out %d questions of %s that %s holds out",
                    len(every) - len(rows), cfg.named, cfg.heldout_path,
                )  # fmt: skip
    else:
        rows = [row for row in every if layout.split_of(question_of(row[1].prompt)) == split]
    if split == "heldout":
        rows = rows[: cfg.heldout_size]
    if not rows:
        raise EmptySplitError(
            f"{cfg.named}: no question is left for the split {split!r}; add more rows, or set "
            "data.heldout_path"
        )
    return rows


def prompt_of(
    cfg: DataConfig, task: Task, example: layout.Example, chat: bool
) -> str | tuple[layout.Message, ...]:
    """Returns the prompt of a row: its question in the template, or its conversation.

    Raises:
      ValueError: there is a template, and the prompt is a conversation.
    """
    if not isinstance(example.prompt, str):
        if cfg.prompt_template is not None:
            raise ValueError("data.prompt_template is for prompts that are text; leave it out")
        return example.prompt
    template = cfg.prompt_template
    if template is None:
        template = "{question}" if chat else task.template
    return fill_template(template, example.prompt)


def endless(source: Sequence, seed: int):
    """Shuffles a source into an order that never ends, reshuffled after every pass.

    Returns:
      A `grain.MapDataset`. Item `i` costs the same for every `i`, so a checkpoint needs only the
      number of items taken.
    """
    import grain  # takes more than a second

    if not len(source):
        raise ValueError("expected at least one example to draw from, got an empty source")
    return grain.MapDataset.source(source).shuffle(seed=seed % 2**32).repeat()


def group_seed(run_seed: int, step: int, position: int) -> int:
    """Makes a 64-bit seed for one group of samples.

    It depends on the group's position in the order of draws, and not on the problem: a small data
    set may give one problem twice in a step, and the two groups must not share their noise.
    """
    text = f"{run_seed}:{step}:{position}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
