"""Reads the sets of problems that a run evaluates: held-out problems, and those of `eval.sets`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from specjax.command_line import ConfigError
from specjax.config.sampling import is_seed
from train.data import rows
from train.data.checks import Inputs, check_rows, describe_data
from train.data.prompts import Prompts
from train.data.tasks.layout import Problem
from train.eval_schema import Asked, EvalSet, asked_sets
from train.rewards.scoring import Scorer
from train.schema import DataConfig, RLConfig

_ALL = 1 << 62  # more rows than any file has


@dataclasses.dataclass(frozen=True)
class ProblemSet:
    """A set of problems with all that evaluating it needs.

    Attributes:
      asked: what it asks of the engine.
      problems: its problems.
      prompts: encoder of their prompts.
      scorer: reward.
      pass_reward: reward from which on a sample is right.
      alone: whether no rollout uses the reward, so that its processes end with each evaluation.
    """

    asked: Asked
    problems: Sequence[Problem]
    prompts: Prompts
    scorer: Scorer
    pass_reward: float = 1.0
    alone: bool = False

    @property
    def prefix(self) -> str:
        """The beginning of the names of the set's metrics."""
        return "eval/" if self.asked.name is None else f"eval/{self.asked.name}/"


def problem_sets(cfg: RLConfig, inputs: Inputs, model: str) -> tuple[list[ProblemSet], list[str]]:
    """Reads the sets that a run evaluates.

    Args:
      cfg: settings of the run.
      inputs: the data of the run, which was read before.
      model: name of the model in messages, as the user typed it.

    Returns:
      (the sets, lines about them to print at start).

    Raises:
      ConfigError: a set cannot be read, or its settings do not fit its rows; it names the set.
    """
    sets, notes, names = [], [], inputs.scorer.names
    scorers = {(names, tuple(cfg.rewards.weights or [1.0] * len(names))): inputs.scorer}
    # Generated problems take time to make, and are not compared.
    training = inputs.problems if isinstance(inputs.problems, list) else []
    questions = {rows.asked_by(problem) for problem in training}
    for asked in asked_sets(cfg.eval, cfg.rollout):
        if asked.name is None:
            sets.append(ProblemSet(asked, inputs.heldout, inputs.prompts, inputs.scorer))
            continue
        try:
            made, lines = _read_set(cfg, asked, inputs, model, scorers)
        except (ValueError, OSError, ModuleNotFoundError) as error:
            raise ConfigError(
                f"{asked.key}: {error} (what is called data.* here is a key of the set)"
            ) from error
        sets.append(made)
        notes += lines
        if trained := sum(rows.asked_by(problem) in questions for problem in made.problems):
            notes.append(
                f"WARNING: {asked.key}: {trained} of its {len(made.problems)} questions are "
                "trained on, too; data.heldout_path leaves them out of training"
            )
    return sets, notes


def _read_set(
    cfg: RLConfig, asked: Asked, run: Inputs, model: str, scorers: dict[Any, Scorer]
) -> tuple[ProblemSet, list[str]]:
    """Reads a named set.

    Args:
      cfg: settings of the run.
      asked: what the set asks of the engine.
      run: the data of the run.
      model: name of the model in messages.
      scorers: the rewards that sets share, by names and weights; a new one is added.

    Returns:
      (the set, the lines about it).
    """
    chosen = cfg.eval.sets[asked.name]
    data = _data_of(cfg, chosen)
    prompts = Prompts(run.prompts.tokenizer, data, asked.max_prompt_tokens, run.prompts.model)
    problems = rows.problems(data, "heldout", prompts.chat)
    reward = chosen.reward or (cfg.reward if cfg.reward != "auto" else rows.default_reward(data))
    names = (reward,) if isinstance(reward, str) else tuple(reward)
    weights = _weights_of(cfg, chosen, names, run.scorer.names)
    if (names, weights) not in scorers:
        options = dataclasses.replace(cfg.rewards, weights=[*weights])
        scorers[names, weights] = Scorer(names, options=options)
    scorer = scorers[names, weights]
    if not is_seed(cfg.eval.seed + len(problems)):
        raise ValueError(f"has {len(problems)} problems, too many for eval.seed={cfg.eval.seed}")
    asked.params(cfg.eval.seed)
    about = describe_data(prompts, model, scorer.described).removeprefix("data: ")
    lines = [f"{asked.key}: {about}"]
    for warning in check_rows(prompts, scorer, problems, "prompts", ""):
        lines.append(warning.replace("WARNING: ", f"WARNING: {asked.key}: "))
    if alone := scorer is not run.scorer:
        scorer.close()
    return ProblemSet(asked, problems, prompts, scorer, chosen.pass_reward, alone), lines


def _weights_of(
    cfg: RLConfig, chosen: EvalSet, names: tuple[str, ...], run_names: tuple[str, ...]
) -> tuple[float, ...]:
    """Returns the weight of each reward of a set: its own, or that of the run's of the same name.

    A single reward that the run adds to others has weight 1.

    Raises:
      ValueError: all are 0.
    """
    if chosen.weights is not None:
        return tuple(chosen.weights)
    if len(names) == 1 and names != run_names:
        return (1.0,)
    of_run = dict(zip(run_names, cfg.rewards.weights or [1.0] * len(run_names), strict=False))
    weights = tuple(of_run.get(name, 1.0) for name in names)
    if not any(weights):
        raise ValueError(
            f"rewards.weights={cfg.rewards.weights} gives each of reward={', '.join(names)} the "
            "weight 0, and the sum would always be 0; set weights of the set"
        )
    return weights


def _data_of(cfg: RLConfig, chosen: EvalSet) -> DataConfig:
    """Makes the settings of data that read a set: every row of its files is held out."""
    shared = ("chat", "chat_template_kwargs", "prompt_template")
    given = {name: getattr(chosen, name) for name in shared if getattr(chosen, name) is not None}
    most = chosen.problems
    if most is None:
        most = cfg.data.heldout_size if chosen.path is None else _ALL
    data = dataclasses.replace(
        cfg.data,
        task=chosen.task,
        path=chosen.path,
        heldout_path=chosen.path,
        heldout_size=most,
        prompt_key=chosen.prompt_key,
        answer_key=chosen.answer_key,
        dataset=chosen.dataset,
        dataset_args=chosen.dataset_args,
        **given,
    )
    if data.prompt_template is not None and chosen.prompt_template is None and data.path:
        first = rows.read_table(data.path, rows.find_task(data)).examples[0][1]
        if not isinstance(first.prompt, str):  # the run's template is for prompts that are text
            data = dataclasses.replace(data, prompt_template=None)
    return data
