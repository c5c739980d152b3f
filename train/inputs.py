"""What `train.rl` learns: problems, their prompts, the reward, and what is to be said of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from train import data
from train.answers import each_gold
from train.data_config import SUMS, DataConfig
from train.prompts import Prompts, require_template
from train.schema import RLConfig
from train.scoring import Scorer, about_gold, check_gold
from train.tasks.layout import Problem


@dataclasses.dataclass(frozen=True)
class Inputs:
    """Attributes:
    problems, heldout: of training and evaluation (empty without evaluation).
    prompts: makes token ids of them. scorer: the reward. notes: lines to be said at start.
    """

    problems: Sequence[Problem]
    heldout: Sequence[Problem]
    prompts: Prompts
    scorer: Scorer
    notes: list[str]


def read_inputs(cfg: RLConfig, tokenizer, model: str) -> Inputs:
    """Reads the data, and looks for what would make it useless.

    Args:
      model: whose tokenizer it is, as the user named it.

    Raises:
      ValueError: a mistake in the settings or the rows, with one message.
      FileNotFoundError: no such file. ModuleNotFoundError: the reward needs a library.
    """
    prompts = Prompts(tokenizer, cfg.data, cfg.rollout.max_prompt_tokens)
    name = data.default_reward(cfg.data) if cfg.reward == "auto" else cfg.reward
    scorer = Scorer(name)
    problems = data.problems(cfg.data, "train", prompts.chat)
    require_template(cfg, problems[0].prompt)
    scorer.check(problems[0])
    notes = [about_data(cfg.data, prompts.chat, model, name)]
    heldout = []
    if cfg.eval.problems:
        try:
            heldout = data.problems(cfg.data, "heldout", prompts.chat)[: cfg.eval.problems]
        except data.EmptySplitError as error:
            notes.append(f"WARNING: nothing is evaluated: {error}")
            cfg.eval.problems = 0
    for rows, what in ((problems, "prompts"), (heldout, "held-out prompts")):
        if rows and (over := prompts.about_lengths(rows, what)):
            notes.append(f"WARNING: {over}")
    held, of = check_gold(scorer, heldout)
    if held:
        notes.append(f"WARNING: held out: {about_gold(scorer, held, of)}")
    found, looked_at = check_gold(scorer, problems)
    if found:
        said = about_gold(scorer, found, looked_at)
        if cfg.data.unwinnable == "error" or len(found) == looked_at:
            raise ValueError(
                f"{said}. Mend the rows, choose another reward, or set data.unwinnable=drop (such "
                "rows are passed over) or keep (they are trained on all the same)"
            )
        notes.append(f"WARNING: {said} (data.unwinnable={cfg.data.unwinnable})")
    return Inputs(problems, heldout, prompts, scorer, notes)


def about_data(cfg: DataConfig, chat: bool, model: object, reward: str | None = None) -> str:
    """One line: where the rows come from, how they are read, and what is made of them.

    Args:
      model: whose tokenizer reads them, as the user named it; None: unnamed.
    """
    task = data.find_task(cfg)
    if task is None:
        said = f"data: the embedded task {SUMS}"
    else:
        table = data.read_table(cfg.path, task, cfg.duplicates)
        said = f"data: {cfg.path}, {len(table.examples)} rows read as {task.name}"
        said += f" ({task.columns})"
        if table.duplicates:
            done = "dropped" if cfg.duplicates == "drop" else "kept"
            said += f", {table.duplicates} duplicates {done} (data.duplicates)"
        several = sum(len(each_gold(example.answer)) > 1 for _, example in table.examples)
        if several:
            said += f", {several} with several gold answers, of which any is right"
        conversations = not isinstance(table.examples[0][1].prompt, str)
    said += f", through the tokenizer of {model}" if model else ""
    if task is not None and conversations:
        said += "; conversations through the chat template"
    elif chat:
        said += "; each prompt one message of the user, through the chat template"
    else:
        said += "; prompts as plain text"
    if task is None:
        said += "; data.path=FILE trains on rows of your own"
    return said + (f"; reward {reward}" if reward else "")
