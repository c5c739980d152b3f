"""A few samples of each step, for people to read: `samples.jsonl` in the directory of a run.

A line is one sample:

    step           step that sampled it; 0 is the evaluation before the first one
    set            `train`, `heldout`, or the name of the evaluation set
    problem        number of the problem in its set
    row            place of its row in a file; "" if problems are generated
    sample         number of the sample among those of its prompt in this step
    followed       whether it is written because its problem is followed over the steps
    prompt         the prompt as the policy reads it, special tokens included
    completion     text that the rewards saw
    token_ids      tokens of the completion
    tokens         text that each of them adds; "" where a character takes several tokens
    origins        origin of each token, one letter for each: `d` an accepted draft, `b` the last
                   token of a round that drafted (its bonus token, or the one at which the end of
                   the sample cuts the round), `p` of a round without drafts, `?` not known
    reward         reward that the objective was given, without penalties; null if it is not finite
    rewards        value of each reward without its weight, by its name; null of one that does not
                   apply to the row, or is not finite
    reward_failed  whether a reward returned no number, and counts as 0
    advantage      mean advantage of its tokens; null if it was not trained on
    finish_reason  `stop` or `length`
    answer         the gold answer, or a list of several

Which samples are written depends on seed and step alone, so that runs with equal tokens have equal
files, but for `origins` where a controller chooses strategies by the clock. One problem is
followed, that of the first group of the first step: whenever it is drawn again, its first sample is
written, too. The problems of an evaluation are the same every time, so that its first ones are
followed as well.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TextIO

from specjax.engine.request import UNKNOWN
from specjax.engine.text import TextStream
from specjax.parallel import distributed
from specjax.tokenizer import decode
from train.rollout.groups import Group
from train.run.files import SAMPLES_FILE, RunFileError, keep_before, lines_of, move_aside

TRAIN = "train"  # the set of the samples of rollouts
HELD_OUT = "heldout"  # the set of the held-out problems of the data

Decode = Callable[[Sequence[int]], str]


class SampleLog:
    """Writes samples of each step; on every process but the first it does nothing.

    Args:
      out_dir: directory of the run, created when absent.
      count: number of samples of a step; 0 writes none, None all of an evaluation.
      seed: seed of the run, which decides the choice.
      tokenizer: tokenizer of the policy.
      labels: names of the rewards.
      resume_step: first step that will be written; samples of it and of later steps are removed.
        None starts a new file and moves an existing one aside. So is one that is damaged.
    """

    def __init__(
        self,
        out_dir: str | Path,
        count: int | None,
        seed: int,
        tokenizer,
        labels: Sequence[str],
        resume_step: int | None = None,
    ):
        path = Path(out_dir) / SAMPLES_FILE
        self._count, self._seed, self._labels = count, seed, tuple(labels)
        self._decode: Decode = lambda ids: decode(tokenizer, ids, skip_special_tokens=False)
        self._followed: int | None = None
        self._file: TextIO | None = None
        if not distributed.is_first():
            return
        if resume_step is None and path.exists():
            move_aside(path)
        elif path.exists():
            try:
                keep_before(path, resume_step)
                self._followed = _followed_in(path)
            except RunFileError as error:  # training needs no samples
                move_aside(path, f"WARNING: {error}; the run goes on without its samples")
        if count != 0:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a", encoding="utf-8")

    def log(self, step: int, groups: Sequence[Group]) -> None:
        """Writes some samples of a step; each step is written once.

        Args:
          step: the step.
          groups: complete groups of the step with their rewards.
        """
        if self._file is None or not groups:
            return
        if self._followed is None:
            self._followed = min(groups, key=lambda group: group.position).problem.index
        chosen = choose(groups, self._count, self._seed, step)
        again = next((g for g in groups if g.problem.index == self._followed), None)
        if again is not None and not any(g is again and place == 0 for g, place in chosen):
            chosen.append((again, 0))
        for group, place in chosen:
            self._write(step, TRAIN, group, place, group is again and place == 0, self._labels)

    def log_evaluation(
        self, step: int, name: str | None, labels: Sequence[str], groups: Sequence[Group]
    ) -> None:
        """Writes the first sample of the first problems of a set, or all samples of all problems.

        Args:
          step: step after which the set was evaluated.
          name: name of the set; None: the held-out problems of the data.
          labels: names of its rewards.
          groups: its problems with their samples.
        """
        for group in groups[: self._count] if self._file else ():
            for place in range(1 if self._count is not None else len(group.responses)):
                self._write(step, name or HELD_OUT, group, place, place == 0, labels)

    def __enter__(self) -> SampleLog:
        return self

    def __exit__(self, *unused: object) -> None:
        if self._file is not None:
            self._file.close()

    def _write(
        self, step: int, name: str, group: Group, place: int, followed: bool, labels: Sequence[str]
    ) -> None:
        response, problem, answer = group.responses[place], group.problem, group.problem.answer
        values, count = response.parts or (response.reward,), len(response.token_ids)
        row = {
            "step": int(step),
            "set": name,
            "problem": problem.index,
            "row": problem.place,
            "sample": place,
            "followed": followed,
            "prompt": self._decode(group.prompt),
            "completion": response.text,
            "token_ids": list(response.token_ids),
            "tokens": token_texts(self._decode, response.token_ids),
            "origins": response.origins[:count].ljust(count, UNKNOWN),
            "reward": _finite(response.reward),
            "rewards": dict(zip(labels, map(_finite, values), strict=True)),
            "reward_failed": response.failed,
            "advantage": _finite(response.advantage),
            "finish_reason": response.finish_reason,
            "answer": answer if isinstance(answer, str) else list(answer),
        }
        self._file.write(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n")
        self._file.flush()


def choose(groups: Sequence[Group], count: int, seed: int, step: int) -> list[tuple[Group, int]]:
    """Chooses samples of a step, of as many groups as there are, by a hash of seed and step.

    Args:
      groups: complete groups.
      count: number of samples.
      seed: seed of the run.
      step: the step.

    Returns:
      (group, index of the sample in it) of each sample, at most `count`.
    """

    def rank(*place: int) -> bytes:
        text = ":".join(map(str, (seed, step, *place)))
        return hashlib.blake2b(text.encode(), digest_size=8).digest()

    ranked = []
    for group in groups:
        places = sorted(range(len(group.responses)), key=lambda i: rank(group.position, i))
        for turn, place in enumerate(places):
            ranked.append((turn, rank(group.position), group.position, group, place))
    ranked.sort(key=lambda one: one[:3])
    return [(group, place) for *_, group, place in ranked[:count]]


def token_texts(decode: Decode, token_ids: Sequence[int]) -> list[str]:
    """Returns the text that each token adds to those before it; joined they are the decoded text.

    A token within a character adds "", and the last token of the character adds the character.
    """
    stream, texts = TextStream(decode), []
    known = 0
    for token in token_ids:
        stream.extend((token,))
        texts.append(stream.text[known:])
        known = len(stream.text)
    if texts:
        texts[-1] += stream.rest
    return texts


def _finite(value: float | None) -> float | None:
    """Returns the number; None, which is null in JSON, if it is not finite."""
    return value if value is not None and math.isfinite(value) else None


def _followed_in(path: Path) -> int | None:
    """Returns the problem that the samples of an earlier start follow; None if there are none."""
    for _, row in lines_of(path):
        if row.get("set") == TRAIN and row.get("followed"):
            return row.get("problem")
    return None
