"""Reads and checks the data of `train.rl`: problems, prompts and reward."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from specjax.command_line import ConfigError, given_in, typed_in
from specjax.config import ModelConfig
from specjax.settings import show
from specjax.tokenizer import check_ids, reads_date
from train import data
from train.answers.extract import each_gold
from train.data import Encoded
from train.draft_schema import DraftRunConfig
from train.schema import REASONING_GYM, SUMS, DataConfig, RLConfig, SFTConfig
from train.scoring import Scorer, check_gold, evenly, is_hopeless, row_name, unwinnable_message
from train.tasks.layout import Demonstration, Message, Problem, tools_of

# Number of prompts whose lengths are checked before a run: of a file, and of generated problems.
FILE_ROWS, GENERATED_ROWS = 20_000, 500

OVERLONG = "overlong"


def require_template(cfg: RLConfig | SFTConfig, prompt: str | Sequence[Message]) -> None:
    """Refuses arguments of a chat template that is applied to no prompt.

    Arguments in a configuration file are not refused, because the command line may override them.

    Args:
      cfg: settings of the run.
      prompt: the first prompt.

    Raises:
      ConfigError: there are such arguments, and the prompt stays text.
    """
    key, asked = "data.chat_template_kwargs", cfg.data.chat_template_kwargs
    if not asked or cfg.data.chat != "off" or not isinstance(prompt, str):
        return
    if key in typed_in(cfg) or "data.chat" not in typed_in(cfg):
        raise ConfigError(
            f"{key}={show(asked)} changes nothing: the prompts of {cfg.data.named} are text, and "
            "with data.chat=off no chat template is applied; leave out one of them"
        )


@contextlib.contextmanager
def _naming(name: str) -> Iterator[None]:
    """Adds the name of a row to the errors about it."""
    try:
        yield
    except ValueError as error:
        raise ConfigError(f"{name}: {error}") from error


def fit_lengths(cfg: RLConfig | DraftRunConfig, model: str, most: int) -> str | None:
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
    asked = {name: getattr(roll, name) for name in names}
    if sum(asked.values()) <= most:
        return None
    kept = {
        name: value
        for name, value in asked.items()
        if f"rollout.{name}" in given_in(cfg) or value != getattr(type(roll), name)
    }
    if len(kept) == 2 or sum(kept.values()) >= most or most < 2:
        raise ConfigError(
            "rollout.max_prompt_tokens + rollout.max_tokens must be at most "
            f"{most}, the longest sequence of {model}; got {sum(asked.values())}"
        )
    prompt_tokens = roll.max_prompt_tokens
    if "max_tokens" in kept:
        prompt_tokens = most - roll.max_tokens
    elif not kept:
        prompt_tokens = min(prompt_tokens, most // 2)
    tokens = min(roll.max_tokens, most - prompt_tokens)
    cfg.rollout = dataclasses.replace(roll, max_prompt_tokens=prompt_tokens, max_tokens=tokens)
    return (
        f"the longest sequence of {model} is {most} tokens: rollout.max_prompt_tokens="
        f"{prompt_tokens} and rollout.max_tokens={tokens} in place of "
        f"{asked['max_prompt_tokens']} and {asked['max_tokens']}"
    )


class Prompts:
    """Encodes problems and demonstrations, in the same way in all programs.

    Args:
      tokenizer: tokenizer of the model.
      cfg: settings of the data.
      longest: largest number of tokens of a prompt; None for no limit.
      model: config of the model, which must have all tokens of what is encoded; None: nothing is
        checked.

    Attributes:
      chat: whether prompts that are text become messages of a conversation.

    Raises:
      ValueError: the tokenizer cannot apply the chat template as the settings say.
    """

    def __init__(
        self,
        tokenizer,
        cfg: DataConfig,
        longest: int | None = None,
        model: ModelConfig | None = None,
    ):
        self.tokenizer, self.cfg, self.longest, self.model = tokenizer, cfg, longest, model
        self.chat = data.uses_chat(cfg, tokenizer)
        date = cfg.date or datetime.datetime.now(datetime.UTC).date().isoformat()
        self._options = {
            "chat": self.chat,
            "template_kwargs": cfg.chat_template_kwargs,
            "date": date,
        }
        self.date = date if reads_date(tokenizer) else None

    def text(self, problem: Problem) -> str:
        """A prompt with the chat template applied; the error of a template names the row."""
        with _naming(row_name(problem)):
            tools = tools_of(problem.row)
            return data.prompt_text(self.tokenizer, problem.prompt, tools=tools, **self._options)

    def whole(self, problem: Problem) -> list[int]:
        """All token ids of a prompt, without regard to its length."""
        with _naming(row_name(problem)):
            tools = tools_of(problem.row)
            ids = data.encode_prompt(self.tokenizer, problem.prompt, tools=tools, **self._options)
        return self.known(ids, row_name(problem))

    def demonstration(self, item: Demonstration) -> Encoded:
        """Encodes a demonstration, see `data.encode_demonstration`; errors name the row."""
        name = demonstration_name(item)
        with _naming(name):
            found = data.encode_demonstration(
                self.tokenizer, item, ends=self._ends, **self._options
            )
        self.known((*found.prompt, *found.response), name)
        return found

    @functools.cached_property
    def _ends(self) -> tuple[int, ...]:
        return data.end_tokens(self.tokenizer, self.model)

    def known(self, ids: Sequence[int], where: str) -> Sequence[int]:
        """Returns token ids of `where`, which the model must have; see `specjax.tokenizer`.

        Raises:
          ConfigError: the model has no such token.
        """
        if self.model is not None:
            try:
                check_ids(where, ids, self.model.vocab_size, self.tokenizer)
            except ValueError as error:
                raise ConfigError(str(error)) from error
        return ids

    def fit(self, problem: Problem) -> tuple[list[int] | None, str | None]:
        """Encodes a prompt, and drops or cuts it if it is too long (`data.overlong_prompts`).

        Returns:
          (token ids, None) if it fits, (last token ids, "overlong") if it was cut, and
          (None, "overlong") if it is dropped.

        Raises:
          ConfigError: it is too long, and `data.overlong_prompts` is `error`.
        """
        ids = self.whole(problem)
        if self.longest is None or len(ids) <= self.longest:
            return ids, None
        if self.cfg.overlong_prompts == "error":
            raise ConfigError(self._too_long(problem, len(ids)))
        return (ids[-self.longest :] if self.cfg.overlong_prompts == "truncate" else None), OVERLONG

    def ids(self, problem: Problem) -> list[int]:
        """The token ids of a problem that is not dropped."""
        found, _ = self.fit(problem)
        if found is None:
            raise ValueError(self._too_long(problem, len(self.whole(problem))))
        return found

    def _too_long(self, problem: Problem, size: int) -> str:
        return self._limit.exceeded(row_name(problem), size)

    @property
    def _limit(self) -> Limit:
        return Limit(self.longest, PROMPT_LIMIT)

    def overlong_warning(self, problems: Sequence[Problem], what: str = "prompts") -> str | None:
        """The warning about prompts that are too long, before a run; None if there are none.

        Args:
          problems: the problems, of which some thousand at most are checked.
          what: name of the prompts in messages.

        Raises:
          ValueError: some are too long and that is an error, or too many would be dropped, see
            `require_most`.
        """
        if self.longest is None:
            return None
        most = FILE_ROWS if problems[0].place else GENERATED_ROWS
        rows = [problems[i] for i in evenly(problems, most)]
        sizes = [len(self.whole(row)) for row in rows]
        over = sum(size > self.longest for size in sizes)
        done = f"cut to their last {self.longest}"
        if self.cfg.overlong_prompts != "truncate":
            require_most(self.cfg, sizes, [*map(row_name, rows)], self._limit, what)
            done = "dropped"
        if not over:
            return None
        return (
            f"{over} of {len(rows)} {what} checked have more tokens than "
            f"rollout.max_prompt_tokens={self.longest} (the longest {max(sizes)}) and are {done} "
            f"(data.overlong_prompts={self.cfg.overlong_prompts})"
        )


DEMONSTRATIONS = 2000  # number of demonstrations that are encoded before a run


def demonstration_name(item: Demonstration) -> str:
    """The name of a demonstration in messages."""
    return f"the row {item.place}" if item.place else "a generated demonstration"


def encode_some(
    prompts: Prompts, demonstrations: Sequence[Demonstration]
) -> tuple[list[str], list[Encoded]]:
    """Encodes some demonstrations before a run, evenly spaced.

    Returns:
      (their names in messages, what they are encoded to).

    Raises:
      ValueError: one cannot be encoded; the message names the row.
    """
    most = DEMONSTRATIONS if demonstrations[0].place else GENERATED_ROWS
    some = [demonstrations[i] for i in evenly(demonstrations, most)]
    return [*map(demonstration_name, some)], [*map(prompts.demonstration, some)]


def dropped_warning(dropped: Sequence[Sequence[str]]) -> str | None:
    """The warning about the keys of each demonstration that are not imitated, if there are any."""
    counts = Counter(name for keys in dropped for name in keys)
    if not counts:
        return None
    named = ", ".join(f"{name} of {count}" for name, count in counts.most_common())
    return (
        f"not all of {len(dropped)} demonstrations checked is imitated, because the chat template "
        f"does not write it: {named}; write it into the content, or delete these keys"
    )


MOST_DROPPED = 0.1  # share of the rows that a run may drop for their length without being asked to
PROMPT_LIMIT = "rollout.max_prompt_tokens"


class Limit(NamedTuple):
    """The largest number of tokens of a row that is kept.

    Attributes:
      tokens: the number.
      setting: key that decides it; None: the positions of the model do.
    """

    tokens: int
    setting: str | None

    @classmethod
    def of_rows(cls, row_length: int, model: ModelConfig | None) -> Limit:
        """The limit of rows of `packing.row_length` tokens, for a model that may have fewer."""
        if model is None or row_length <= model.max_position:
            return cls(row_length, "packing.row_length")
        return cls(model.max_position, None)

    def __str__(self) -> str:
        if self.setting is None:
            return f"the model's longest sequence of {self.tokens}"
        return f"{self.setting}={self.tokens}"

    @property
    def remedy(self) -> str:
        """What keeps rows that are longer."""
        return f"raise {self.setting}" if self.setting else "shorten the rows"

    def exceeded(self, name: str, size: int) -> str:
        """The error about one row that is longer."""
        other = " or truncate" if self.setting == PROMPT_LIMIT else ""
        return (
            f"{name} has {size} tokens, more than {self}; {self.remedy}, or set "
            f"data.overlong_prompts to drop{other}"
        )


def require_most(
    cfg: DataConfig, sizes: Sequence[int], names: Sequence[str], limit: Limit, what: str
) -> None:
    """Refuses data of which a large part would be dropped because of its length.

    Args:
      cfg: settings of the data.
      sizes: number of tokens of each row.
      names: name of each row in messages.
      limit: largest number of tokens of a row that is kept.
      what: name of the rows in messages.

    Raises:
      ValueError: no row would be left; or one would be dropped under `data.overlong_prompts=error`,
        or more than a tenth of them and it is not `drop`.
    """
    lost = [i for i, size in enumerate(sizes) if size > limit.tokens]
    if lost and cfg.overlong_prompts == "error":
        raise ValueError(limit.exceeded(names[lost[0]], sizes[lost[0]]))
    allowed = len(sizes) - 1 if cfg.overlong_prompts == "drop" else MOST_DROPPED * len(sizes)
    if len(lost) <= max(allowed, 0):
        return
    ordered = sorted(sizes)
    kept = {ordered[math.ceil(share * len(sizes)) - 1]: share for share in (0.9, 0.99, 1)}
    enough = ", ".join(f"{size} keeps {share:.0%}" for size, share in kept.items())
    drop = ""
    if len(lost) < len(sizes):
        drop = ", or set data.overlong_prompts=drop to leave them out"
    raise ValueError(
        f"{len(lost)} of {len(sizes)} {what} checked have more tokens than {limit} and would be "
        f"dropped; {limit.remedy} ({enough}){drop}"
    )


class DropWarning:
    """Warns once if a run drops a large part of its rows for their length as it goes on.

    Before a run only some rows are checked.

    Args:
      cfg: settings of the data.
    """

    def __init__(self, cfg: DataConfig):
        self._waits = cfg.overlong_prompts == "auto"

    def check(self, dropped: int, drawn: int) -> list[str]:
        """The warning, when it is due.

        Args:
          dropped: number of rows that were dropped, ten of which are too few to judge by.
          drawn: number of rows that were drawn, these included.
        """
        if not self._waits or dropped < max(10, MOST_DROPPED * drawn):
            return []
        self._waits = False
        return [
            f"{dropped} of the {drawn} rows drawn so far are left out for their length; "
            "data.overlong_prompts=drop says that this is meant"
        ]


@dataclasses.dataclass(frozen=True)
class Inputs:
    """The data of a run.

    Attributes:
      problems: problems of training.
      heldout: problems of evaluation; empty without evaluation.
      prompts: encoder of their prompts.
      scorer: reward.
      notes: lines to print at start.
    """

    problems: Sequence[Problem]
    heldout: Sequence[Problem]
    prompts: Prompts
    scorer: Scorer
    notes: list[str]


def read_inputs(cfg: RLConfig, tokenizer, model: str, target: ModelConfig | None = None) -> Inputs:
    """Reads the data, and checks prompts and gold answers.

    Args:
      cfg: settings of the run.
      tokenizer: tokenizer of the model.
      model: name of the model in messages, as the user typed it.
      target: its config; None: token ids are not checked.

    Raises:
      ValueError: there is a mistake in the settings or the rows.
      FileNotFoundError: a file does not exist.
      ModuleNotFoundError: the reward needs a library that is not installed.
    """
    prompts = Prompts(tokenizer, cfg.data, cfg.rollout.max_prompt_tokens, target)
    name = data.default_reward(cfg.data) if cfg.reward == "auto" else cfg.reward
    scorer = Scorer(name, options=cfg.rewards)
    problems = data.problems(cfg.data, "train", prompts.chat, held_out(cfg))
    require_template(cfg, problems[0].prompt)
    if "rewards.timeout" in typed_in(cfg) and not scorer.workers and not cfg.eval.sets:
        raise ConfigError(
            f"rewards.timeout={cfg.rewards.timeout:g} changes nothing: reward={scorer.name}, which "
            "suits the rows, needs no processes, and there is no time limit without; set "
            "rewards.workers, or leave it out"
        )
    scorer.check(problems[0])
    notes = [describe_data(cfg.data, prompts.chat, model, scorer.described, date=prompts.date)]
    if hidden := scorer.hidden(problems[0]):
        notes.append(f"WARNING: {hidden}")
    if over := prompts.overlong_warning(problems):
        notes.append(f"WARNING: {over}")
    heldout, about = read_heldout(cfg, prompts, scorer)
    notes += about
    found, checked = check_gold(scorer, problems)
    if found:
        said = unwinnable_message(scorer, found, checked)
        hopeless = len(found) == checked and all(is_hopeless(scorer, row) for row, _ in found)
        if cfg.data.unwinnable == "error" or hopeless:
            raise ValueError(
                f"{said}. Correct the rows, choose another reward, or set data.unwinnable=drop "
                "(such rows are skipped) or keep (they are trained on)"
            )
        notes.append(f"WARNING: {said} (data.unwinnable={cfg.data.unwinnable})")
    return Inputs(problems, heldout, prompts, scorer, notes)


def held_out(cfg: RLConfig) -> int:
    """The number of generated problems that the largest set of the same data set evaluates.

    It decides which problems are trained on. It is 0 if it is at most `data.heldout_size`, for so
    many are held out in any case. Arguments of the data set are not compared: one that is given may
    equal its default.
    """
    same = [each for each in cfg.eval.sets.values() if each.dataset == cfg.data.dataset is not None]
    most = max((each.problems or 0 for each in same), default=0)
    return most if most > cfg.data.heldout_size else 0


def read_heldout(
    cfg: RLConfig, prompts: Prompts, scorer: Scorer
) -> tuple[Sequence[Problem], list[str]]:
    """Reads the held-out problems of the data, if they are evaluated, and checks them.

    Where the data has none, `eval.problems` becomes 0.

    Args:
      cfg: settings of the run.
      prompts: encoder of their prompts.
      scorer: reward.

    Returns:
      the problems, and the warnings about them.

    Raises:
      ValueError: there is a mistake in the settings or the rows.
      FileNotFoundError: a file does not exist.
    """
    if not cfg.eval.problems:
        return [], []
    try:
        heldout = data.problems(cfg.data, "heldout", prompts.chat)[: cfg.eval.problems]
    except data.EmptySplitError as error:
        cfg.eval.problems = 0
        return [], [f"WARNING: no held-out problem of the data is evaluated: {error}"]
    return heldout, check_rows(prompts, scorer, heldout, "held-out prompts", "held out: ")


def check_rows(
    prompts: Prompts, scorer: Scorer, problems: Sequence[Problem], what: str, where: str
) -> list[str]:
    """Checks the problems of an evaluation, and returns the warnings about them.

    Args:
      prompts: encoder of their prompts.
      scorer: reward.
      problems: the problems.
      what: name of the prompts in messages.
      where: what warnings about rewards begin with.

    Raises:
      ValueError: a reward needs a column, or a gold answer, that the rows do not have, or prompts
        are too long and that is an error.
    """
    scorer.check(problems[0])
    found = []
    if hidden := scorer.hidden(problems[0]):
        found.append(f"{where}{hidden}")
    if over := prompts.overlong_warning(problems, what):
        found.append(over)
    lost, checked = check_gold(scorer, problems)
    if lost:
        said = f"{where}{unwinnable_message(scorer, lost, checked)}"
        if prompts.cfg.unwinnable == "error" and any(row.unread is not None for row, _ in lost):
            raise ValueError(f"{said}. Correct the rows, or choose another reward")
        found.append(said)
    return [f"WARNING: {each}" for each in found]


def describe_data(
    cfg: DataConfig,
    chat: bool,
    model: object,
    reward: str | None = None,
    trains: bool = True,
    date: str | None = None,
) -> str:
    """The line at start about the rows: their origin, layout, encoding and reward.

    Args:
      cfg: settings of the data.
      chat: whether prompts that are text become messages of a conversation.
      model: name of the model whose tokenizer reads them, as the user typed it; None for no name.
      reward: name of the reward; None for no name.
      trains: whether the rows are trained on.
      date: date that the chat template writes; None: it writes none.
    """
    task = data.find_task(cfg)
    if task is None:
        said = f"data: the embedded task {SUMS}"
        if cfg.task == REASONING_GYM:
            given = f" {dict(cfg.dataset_args)}" if cfg.dataset_args else ""
            said = f"data: {cfg.dataset}{given} of reasoning-gym, generated with seed {cfg.seed}"
    else:
        table = data.read_table(cfg.path, task, cfg.duplicates)
        said = f"data: {cfg.named}, {len(table.examples)} rows read as {task.name}"
        said += f" ({task.columns})"
        if table.duplicates:
            done = "dropped" if cfg.duplicates == "drop" else "kept"
            said += f", {table.duplicates} duplicates {done} (data.duplicates)"
        several = sum(len(each_gold(example.answer)) > 1 for _, example in table.examples)
        if several:
            said += f", {several} with several gold answers, of which any is right"
        conversations = not isinstance(table.examples[0][1].prompt, str)
    said += f", through the tokenizer of {model}" if model else ""
    templated = task is not None and conversations
    if templated:
        said += "; conversations through the chat template"
    elif chat:
        said += "; each prompt one message of the user, through the chat template"
    else:
        said += "; prompts as plain text"
    if date and (templated or chat):
        said += f", which writes the date {date} (data.date)"
    if trains and task is None and cfg.task != REASONING_GYM:
        said += "; data.path=FILE trains on rows of your own"
    return said + (f"; reward {reward}" if reward else "")
