"""Problems that the package `reasoning-gym` generates, by the name of a data set and a seed.

Nothing is downloaded. Problem `i` of training is entry `i` of the data set; the held-out problems
are the entries after the last of training. A training problem whose question is held out gives way
to a later entry, so that the splits share no question.

Completions are scored by the data set's own `score_answer`, which gives parts of a point for some
tasks. It is given what `last_part` finds.
"""

from __future__ import annotations

import difflib
import functools
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from train.data.tasks.layout import GeneratedProblems, Problem
from train.rewards.answers.extract import last_part

if TYPE_CHECKING:
    from train.schema import DataConfig

REWARD, TEMPLATE = "reasoning_gym", "{question}\nAnswer:"
_ATTEMPTS = 100  # entries that a training problem may be replaced by


class Generated(GeneratedProblems):
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
        super().__init__(cfg, split)
        self._held_out, self._template = max(held_out, cfg.heldout_size), template
        self._arguments = json.dumps(dict(cfg.dataset_args), sort_keys=True)
        self._entries = _data_set(cfg.dataset, self._arguments, cfg.seed)

    def make(self, index: int) -> Problem:
        """Makes the problem with this number."""
        later = self.cfg.train_size + index
        entry = self._train_entry(index) if self.split == "train" else self._entries[later]
        prompt = self._template.format(question=entry["question"])
        columns = {"entry": entry, "dataset": self.cfg.dataset, "dataset_args": self._arguments}
        answer = "" if entry["answer"] is None else str(entry["answer"])
        return Problem(prompt, answer, index, "", columns)

    def _train_entry(self, index: int) -> dict[str, Any]:
        cfg = self.cfg
        held = _held_out(cfg.dataset, self._arguments, cfg.seed, cfg.train_size, self._held_out)
        place = index
        for attempt in range(1, _ATTEMPTS + 1):
            entry = self._entries[place]
            if entry["question"] not in held:
                return entry
            place = cfg.train_size * attempt + self._held_out + index
        raise ValueError(
            f"data.dataset={cfg.dataset}: {_ATTEMPTS} questions in a row are held out; lower "
            f"data.heldout_size={cfg.heldout_size}, or problems in eval.sets"
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
        raise ValueError(
            f"data.dataset: reasoning-gym has no data set {name!r} of {len(DATASETS)}; similar "
            f"ones are {', '.join(close) or 'none'}"
        )
    given = json.loads(arguments)
    if set_elsewhere := given.keys() & {"size", "seed"}:
        raise ValueError(
            f"data.dataset_args: leave out {', '.join(set_elsewhere)}; data.train_size and "
            "data.seed say it"
        )
    try:
        return create_dataset(name, **{**given, "seed": seed})
    except (TypeError, ValueError, AssertionError) as error:
        raise ValueError(
            f"data.dataset_args: {name} of reasoning-gym does not take {given}: {error}"
        ) from error


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
    return float(_data_set(dataset, dataset_args, 0).score_answer(last_part(completion), entry))
