"""Problems that the package `reasoning-gym` generates, by the name of a data set and a seed.

Nothing is downloaded. Problem `i` of training is entry `i` of the data set; the held-out problems
are the entries after the last of training. A training problem whose question is held out gives way
to a later entry, so that the splits share no question.

Completions are scored by the data set's own `score_answer`, which gives parts of a point for some
tasks. It is given what `final_part` finds.
"""

from __future__ import annotations

import difflib
import functools
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from train.data.tasks.layout import Problem, check_split
from train.rewards.answers.extract import final_answer, tagged_answer

if TYPE_CHECKING:
    from train.schema import DataConfig

REWARD, TEMPLATE = "reasoning_gym", "{question}\nAnswer:"
_ATTEMPTS = 100  # entries that a training problem may be replaced by


class Generated(Sequence):
    """The problems of a data set of reasoning-gym.

    Args:
      cfg: settings of the data.
      split: name of the split.
      template: format string of prompts, with `{question}`.
      held_out: number of held-out problems, if that is more than the settings say: none of their
        questions is one of training.

    Raises:
      ModuleNotFoundError: reasoning-gym is not installed.
      ValueError: there is no such data set, or it does not take its arguments.
    """

    def __init__(self, cfg: DataConfig, split: str, template: str, held_out: int = 0):
        self._held_out = max(held_out, cfg.heldout_size)
        self._cfg, self._split, self._template = cfg, check_split(split), template
        self._arguments = json.dumps(dict(cfg.dataset_args), sort_keys=True)
        self._entries = _data_set(cfg.dataset, self._arguments, cfg.seed)

    def __len__(self) -> int:
        return self._cfg.train_size if self._split == "train" else self._cfg.heldout_size

    def __getitem__(self, index: int) -> Problem:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        index = index + len(self) if index < 0 else index
        if not 0 <= index < len(self):
            raise IndexError(f"problem {index} of a split of {len(self)}")
        entry = self._train_entry(index) if self._split == "train" else self._heldout_entry(index)
        prompt = self._template.format(question=entry["question"])
        answer = entry["answer"]
        columns = {
            "entry": entry,
            "dataset": self._cfg.dataset,
            "dataset_args": self._arguments,
        }
        return Problem(prompt, "" if answer is None else str(answer), index, "", columns)

    def _heldout_entry(self, index: int) -> dict[str, Any]:
        return self._entries[self._cfg.train_size + index]

    def _train_entry(self, index: int) -> dict[str, Any]:
        cfg = self._cfg
        held = _held_out(cfg.dataset, self._arguments, cfg.seed, cfg.train_size, self._held_out)
        entry = self._entries[index]
        for attempt in range(_ATTEMPTS):
            if entry["question"] not in held:
                return entry
            later = cfg.train_size * (attempt + 1) + self._held_out + index
            entry = self._entries[later]
        raise ValueError(
            f"data.dataset={cfg.dataset}: {_ATTEMPTS} questions in a row are held out, for the "
            f"data set has few; lower data.heldout_size={cfg.heldout_size}"
            + (
                ""
                if self._held_out == cfg.heldout_size
                else f", and the {self._held_out} problems of a set of it in eval.sets"
            )
        )


@functools.lru_cache(maxsize=4)
def _held_out(name: str, arguments: str, seed: int, first: int, count: int) -> frozenset[str]:
    """The questions that are held out."""
    entries = _data_set(name, arguments, seed)
    return frozenset(entries[first + i]["question"] for i in range(count))


@functools.lru_cache(maxsize=16)
def _data_set(name: str, arguments: str, seed: int):
    """A data set of reasoning-gym; `arguments` is JSON."""
    try:
        from reasoning_gym import create_dataset
        from reasoning_gym.factory import DATASETS
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "reasoning_gym":
            raise
        raise ModuleNotFoundError(
            "data.task=reasoning_gym needs the package reasoning-gym, which is not installed: "
            "pip install 'specjax[reasoning-gym]'"
        ) from error
    if name not in DATASETS:
        close = difflib.get_close_matches(name, DATASETS, n=5, cutoff=0.4)
        hint = f"; similar ones are {', '.join(close)}" if close else ""
        raise ValueError(
            f"data.dataset: reasoning-gym has no data set {name!r}{hint} (it has {len(DATASETS)})"
        )
    given = json.loads(arguments)
    for argument, setting in (("size", "data.train_size"), ("seed", "data.seed")):
        if argument in given:
            raise ValueError(
                f"data.dataset_args: {argument} is what {setting} sets; set that, and leave "
                f"{argument} out"
            )
    try:
        return create_dataset(name, **{**given, "seed": seed})
    except (TypeError, ValueError, AssertionError) as error:
        raise ValueError(
            f"data.dataset_args: {name} of reasoning-gym does not take {given}: {error}"
        ) from error


def final_part(completion: str) -> str | None:
    """What is scored of a completion; None for one without text.

    It is what `tagged_answer` of `train.rewards.answers.extract` finds, else what `final_answer`
    finds, else the last line that is not empty.
    """
    tagged = tagged_answer(completion)
    if tagged is not None:
        return tagged
    found = final_answer(completion)
    if found is not None:
        return found
    lines = [line.strip() for line in completion.splitlines() if line.strip()]
    return lines[-1] if lines else None


def score(
    completion: str, answer: str, entry: Mapping[str, Any], dataset: str, dataset_args: str
) -> float:
    """The reward `reasoning_gym`: the score that the data set gives to a completion's answer.

    Args:
      completion: the completion.
      answer: the gold answer, which the entry has as well.
      entry: entry of the data set: question, answer and metadata.
      dataset: name of the data set.
      dataset_args: its arguments, as JSON.
    """
    return float(_data_set(dataset, dataset_args, 0).score_answer(final_part(completion), entry))
