"""Reads the data of a run, and checks lengths, gold answers and columns before it begins.

What a check says is a line to print at start, or an error.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from specjax.command_line import ConfigError, given_in
from specjax.config import ModelConfig
from train.data import rows
from train.data.prompts import Pair, Prompts
from train.data.tasks.layout import Demonstration, Problem
from train.environments.pool import Environments, Opened
from train.rewards.answers.extract import each_gold
from train.rewards.scoring import (
    Scorer,
    check_gold,
    evenly,
    unwinnable_message,
)
from train.schema import REASONING_GYM, SUMS, DataConfig, RLConfig

# Number of prompts whose lengths are checked before a run: of a file, and of generated problems;
# and of demonstrations that are encoded.
FILE_ROWS, GENERATED_ROWS, DEMONSTRATIONS = 20_000, 500, 2000
MOST_DROPPED = 0.1  # share of the rows that a run may drop for their length without being asked to


# --- lengths --------------------------------------------------------------------------------------


def fit_lengths(cfg: Any, model: str, most: int) -> str | None:
    """Fits the default lengths of prompts and responses to a model of fewer positions.

    Prompts get half of the positions at most, and responses the rest; a length that is set stays.

    Args:
      cfg: settings of the run.
      model: name of the model in messages.
      most: number of its positions.

    Returns:
      A line for the user; None if nothing had to be changed.

    Raises:
      ConfigError: the user set lengths that the model has too few positions for.
    """
    roll, names = cfg.rollout, ("max_prompt_tokens", "max_tokens")
    wanted = [getattr(roll, name) for name in names]
    if sum(wanted) <= most:
        return None
    given = given_in(cfg)
    is_set = [f"rollout.{n}" in given or getattr(roll, n) != getattr(type(roll), n) for n in names]
    prompt_tokens = most - roll.max_tokens if is_set[1] else min(roll.max_prompt_tokens, most // 2)
    if is_set[0]:
        prompt_tokens = roll.max_prompt_tokens
    tokens = min(roll.max_tokens, most - prompt_tokens)
    if all(is_set) or min(prompt_tokens, tokens) < 1:
        raise ConfigError(
            "rollout.max_prompt_tokens + rollout.max_tokens must be at most "
            f"{most}, the longest sequence of {model}; got {sum(wanted)}"
        )
    cfg.rollout = dataclasses.replace(roll, max_prompt_tokens=prompt_tokens, max_tokens=tokens)
    return (
        f"the longest sequence of {model} is {most} tokens: rollout.max_prompt_tokens="
        f"{prompt_tokens} and rollout.max_tokens={tokens} in place of {wanted[0]} and {wanted[1]}"
    )


class Limit(NamedTuple):
    """The largest number of tokens of a row that is kept.

    Attributes:
      tokens: the number.
      name: its name in messages.
      remedy: what keeps rows that are longer.
    """

    tokens: int
    name: str
    remedy: str

    @classmethod
    def of_rows(cls, row_length: int, model: ModelConfig | None) -> Limit:
        """Makes the limit of rows of `packing.row_length` tokens; a model may have fewer."""
        if model is None or row_length <= model.max_position:
            return cls(row_length, f"packing.row_length={row_length}", "raise packing.row_length")
        most = model.max_position
        return cls(most, f"the model's longest sequence of {most}", "shorten the rows")

    def __str__(self) -> str:
        return self.name


def require_most(cfg: DataConfig, sizes: Sequence[int], limit: Limit, what: str) -> None:
    """Refuses data of which a large part would be dropped because of its length.

    Args:
      cfg: settings of the data.
      sizes: number of tokens of each row.
      limit: largest number of tokens of a row that is kept.
      what: name of the rows in messages.

    Raises:
      ValueError: no row would be left, or more than a tenth of them would be dropped and
        `data.overlong_prompts` is not `drop`.
    """
    lost = sum(size > limit.tokens for size in sizes)
    allowed = len(sizes) - 1 if cfg.overlong_prompts == "drop" else MOST_DROPPED * len(sizes)
    if lost <= max(allowed, 0):
        return
    ordered = sorted(sizes)
    kept = {ordered[math.ceil(share * len(sizes)) - 1]: share for share in (0.9, 0.99, 1)}
    enough = ", ".join(f"{size} keeps {share:.0%}" for size, share in kept.items())
    raise ValueError(
        f"{lost} of {len(sizes)} {what} checked have more tokens than {limit} and would be "
        f"dropped; {limit.remedy} ({enough}), or set data.overlong_prompts=drop to leave them out"
    )


def overlong_warnings(
    prompts: Prompts, problems: Sequence[Problem], what: str = "prompts"
) -> list[str]:
    """Returns the warning about prompts that are too long, before a run, if there are any.

    Args:
      prompts: encoder.
      problems: the problems, of which some thousand at most are checked.
      what: name of the prompts in messages.

    Raises:
      ValueError: too many would be dropped, see `require_most`.
    """
    made = isinstance(problems, Opened)  # whose rows take the time of an environment
    most = FILE_ROWS if problems[0].place and not made else GENERATED_ROWS
    checked = [problems[i] for i in evenly(problems, most)]
    sizes = [len(prompts.whole(row)) for row in checked]
    name = "rollout.max_prompt_tokens"
    limit = Limit(prompts.longest, f"{name}={prompts.longest}", f"raise {name}")
    over = sum(size > limit.tokens for size in sizes)
    done = f"cut to their last {limit.tokens}"
    if prompts.cfg.overlong_prompts != "truncate":
        require_most(prompts.cfg, sizes, limit, what)
        done = "dropped"
    if not over:
        return []
    return [
        f"{over} of {len(checked)} {what} checked have more tokens than {limit} (the longest "
        f"{max(sizes)}) and are {done} (data.overlong_prompts={prompts.cfg.overlong_prompts})"
    ]


# --- demonstrations -------------------------------------------------------------------------------


def encode_some(prompts: Prompts, demonstrations: Sequence[Demonstration]) -> list[Pair]:
    """Encodes some demonstrations before a run, evenly spaced.

    Raises:
      ValueError: one cannot be encoded; the message names the row.
    """
    most = DEMONSTRATIONS if demonstrations[0].place else GENERATED_ROWS
    return [prompts.demonstration(demonstrations[i]) for i in evenly(demonstrations, most)]


def dropped_warnings(pairs: Sequence[Pair]) -> list[str]:
    """Returns the warning about the keys of demonstrations that are not imitated, if there are."""
    counts = Counter(name for pair in pairs for name in pair.dropped)
    named = ", ".join(f"{name} of {count}" for name, count in counts.most_common())
    return [
        f"not all of {len(pairs)} demonstrations checked is imitated, because the chat template "
        f"does not write it: {named}; write it into the content, or delete these keys"
    ] * bool(counts)


# --- problems and rewards -------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Inputs:
    """The data of a run.

    Attributes:
      problems: problems of training.
      heldout: problems of evaluation; empty without evaluation.
      prompts: encoder of their prompts.
      scorer: reward.
      notes: lines to print at start.
      environments: what the policy talks to; None: samples have one turn.
    """

    problems: Sequence[Problem]
    heldout: Sequence[Problem]
    prompts: Prompts
    scorer: Scorer
    notes: list[str]
    environments: Environments | None = None


def read_inputs(
    cfg: RLConfig, tokenizer, model: str, target: ModelConfig | None = None, trains: bool = True
) -> Inputs:
    """Reads the data, and checks prompts and gold answers.

    Where the data has no problems to hold out, `eval.problems` becomes 0.

    Args:
      cfg: settings of the run.
      tokenizer: tokenizer of the model.
      model: name of the model in messages, as the user typed it.
      target: its config; None: token ids are not checked.
      trains: whether there is training; else no problem of training is read.

    Raises:
      ValueError: there is a mistake in the settings or the rows.
      FileNotFoundError: a file does not exist.
      ModuleNotFoundError: the reward needs a library that is not installed.
    """
    prompts = Prompts(tokenizer, cfg.data, cfg.rollout.max_prompt_tokens, target)
    name, environments = rows.default_reward(cfg.data) if cfg.reward == "auto" else cfg.reward, None
    if cfg.environment is None:
        scorer = Scorer(name, options=cfg.rewards)
    else:  # which gives rewards, too
        environments = Environments(cfg.environment, cfg.rewards)
        scorer = Scorer(cfg.environment, lambda completion: None)

    def opened(problems: Sequence[Problem]) -> Sequence[Problem]:
        return Opened(problems, environments, prompts.chat) if environments else problems

    problems, notes = [], []
    if trains:
        problems = opened(rows.problems(cfg.data, "train", prompts.chat, held_out(cfg)))
        notes += check_rows(prompts, scorer, problems, "prompts", trains=True)
    heldout: Sequence[Problem] = []
    if cfg.eval.problems:
        try:
            heldout = opened(rows.problems(cfg.data, "heldout", prompts.chat))[: cfg.eval.problems]
            notes += check_rows(prompts, scorer, heldout, "held-out prompts", "held out: ")
        except rows.EmptySplitError as error:
            cfg.eval.problems = 0
            notes.append(f"WARNING: no held-out problem of the data is evaluated: {error}")
    if trains or heldout:
        notes.insert(0, describe_data(prompts, model, scorer.described))
    return Inputs(problems, heldout, prompts, scorer, notes, environments)


def held_out(cfg: RLConfig) -> int:
    """Counts the generated problems that the largest set of the same data set evaluates.

    It decides which problems are trained on. It is 0 if it is at most `data.heldout_size`, for so
    many are held out in any case. Arguments of the data set are not compared: one that is given may
    equal its default.
    """
    sets = [one for one in cfg.eval.sets.values() if one.dataset == cfg.data.dataset is not None]
    most = max((one.problems or 0 for one in sets), default=0)
    return most if most > cfg.data.heldout_size else 0


def check_rows(
    prompts: Prompts,
    scorer: Scorer,
    problems: Sequence[Problem],
    what: str,
    where: str = "",
    trains: bool = False,
) -> list[str]:
    """Checks problems of training or of an evaluation, and returns the warnings about them.

    Args:
      prompts: encoder of their prompts.
      scorer: reward.
      problems: the problems.
      what: name of the prompts in messages.
      where: what warnings about rewards begin with.
      trains: whether they are trained on, so that each should be winnable.

    Raises:
      ValueError: a reward needs a column, or a gold answer, that the rows do not have; prompts are
        too long and that is an error; or training has gold answers that cannot be won.
    """
    scorer.check(problems[0])
    warnings = overlong_warnings(prompts, problems, what)
    lost, checked = check_gold(scorer, problems)
    if lost:
        text = f"{where}{unwinnable_message(scorer, lost, checked)}"
        is_wrong = trains or any(row.unread is not None for row, _ in lost)
        hopeless = trains and len(lost) == checked and len(scorer.names) == 1
        if hopeless or (is_wrong and prompts.cfg.unwinnable == "error"):
            keep = "; or set data.unwinnable=keep to train on them"
            remedy = keep if trains and not hopeless else ""
            raise ValueError(f"{text}. Correct the rows, or choose another reward{remedy}")
        warnings.append(f"{text} (data.unwinnable={prompts.cfg.unwinnable})")
    return [f"WARNING: {text}" for text in warnings]


def describe_data(prompts: Prompts, model: object, reward: str | None = None) -> str:
    """Writes the line at start about the rows: their origin, layout, encoding and reward.

    Args:
      prompts: encoder of their prompts.
      model: name of the model whose tokenizer reads them, as the user typed it; None for no name.
      reward: name of the reward; None for no name.
    """
    cfg, chat = prompts.cfg, prompts.chat
    task, conversations = rows.find_task(cfg), False
    if task is not None:
        table = rows.read_table(cfg.path, task, cfg.duplicates)
        text = f"data: {cfg.named}, {len(table.examples)} rows read as {task.name} ({task.columns})"
        if table.duplicates:
            done = "dropped" if cfg.duplicates == "drop" else "kept"
            text += f", {table.duplicates} duplicates {done} (data.duplicates)"
        if several := sum(len(each_gold(row.answer)) > 1 for _, row in table.examples):
            text += f", {several} with several gold answers, of which any is right"
        conversations = not isinstance(table.examples[0][1].prompt, str)
    elif cfg.task == REASONING_GYM:
        given = f" {dict(cfg.dataset_args)}" if cfg.dataset_args else ""
        text = f"data: {cfg.dataset}{given} of reasoning-gym, generated with seed {cfg.seed}"
    else:
        text = f"data: the embedded task {SUMS}"
    text += f", through the tokenizer of {model}" if model else ""
    if conversations:
        text += "; conversations through the chat template"
    elif chat:
        text += "; each prompt one message of the user, through the chat template"
    else:
        text += "; prompts as plain text"
    if prompts.date and (conversations or chat):
        text += f", which writes the date {prompts.date} (data.date)"
    return text + (f"; reward {reward}" if reward else "")
