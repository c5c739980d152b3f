"""The `eval` section of `train.rl`'s configuration: held-out problems, and named sets of others."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

from specjax.config import SamplingParams
from specjax.config.sampling import Sampling
from specjax.settings import option, part
from train.registry import REWARDS
from train.rollout_schema import RolloutSection, SamplingSection

# What a set takes from the rollouts unless it says otherwise.
SAMPLING = ("temperature", "max_tokens", "top_k", "top_p", "min_p", "stop")
_NAME = re.compile(r"[A-Za-z0-9_]+")
# Names under which the held-out problems of the data are logged, and theirs and that of rollouts in
# files of samples.
TAKEN = (
    "reward", "problems", "prompts_overlong", "reward_failed", "reward_timed_out",
    "response_length_mean", "truncated_ratio", "heldout", "train",
)  # fmt: skip


@dataclass
class EvalSet:
    """A named set of problems, sampled as the rollout samples unless it says otherwise.

    Attributes:
      path: rows of the set, as data.path; all of them are evaluated.
      problems: the first so many problems; null: all.
      n: samples of each problem.
      temperature: sampling temperature, 0 is greedy; null: the rollout's, as for the keys below.
      max_tokens: response tokens at most.
      max_prompt_tokens: prompt tokens at most.
      top_k: keep the k most likely tokens; 0 or -1: all.
      top_p: keep the fewest tokens with this share of the mass.
      min_p: keep tokens at least so many times as likely as the likeliest one.
      stop: strings that end a response.
      reward: reward of the set, as `reward`; null: the run's, or what suits these rows where that
        is auto.
      weights: weight of each of several rewards, as rewards.weights; null: that of the run's reward
        of the same name, 1 of others.
      pass_reward: a sample is right from this reward on, for pass@k: that of the reward that
        compares answers, or where there is none of all together.
      task: what rows mean, as data.task.
      prompt_key: column of the prompt, as data.prompt_key.
      answer_key: column of the gold answer, as data.answer_key.
      prompt_template: format string with {question}, as data.prompt_template; null: the run's.
      chat: auto, on or off, as data.chat; null: the run's.
      chat_template_kwargs: given to the chat template, as data.chat_template_kwargs; null: the
        run's.
      dataset: with task=reasoning_gym a data set of it, of which data.heldout_size are generated.
      dataset_args: further arguments of that data set.
    """

    path: Any = option(None, kind=str | list[str] | None)
    problems: int | None = option(None, least=1)
    n: int = option(1, least=1)
    temperature: float | None = None
    max_tokens: int | None = option(None, least=1)
    max_prompt_tokens: int | None = option(None, least=1)
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    stop: list[str] | None = None
    reward: Any = option(None, kind=str | list[str] | None)
    weights: list[float] | None = None
    pass_reward: float = 1.0
    task: str = "auto"
    prompt_key: str | None = None
    answer_key: str | None = None
    prompt_template: str | None = None
    chat: str | None = option(None, choices=(None, "auto", "on", "off"))
    chat_template_kwargs: dict[str, Any] | None = None
    dataset: str | None = None
    dataset_args: dict[str, Any] = option({})

    def __post_init__(self):
        generated = self.task in ("sums", "reasoning_gym")
        if not self.path and not generated:
            raise ValueError("has no rows; set its path, or task=reasoning_gym and its dataset")
        if self.path and generated:
            raise ValueError(f"path={self.path} has no effect: task={self.task} is generated")
        if (self.dataset or self.dataset_args) and self.task != "reasoning_gym":
            raise ValueError(
                f"dataset={self.dataset} and dataset_args={self.dataset_args} are of "
                f"task=reasoning_gym, got task={self.task}"
            )
        check_weights(self.weights)
        for name in [self.reward] if isinstance(self.reward, str) else self.reward or []:
            REWARDS.check(name)

    def sampling(self, rollout: SamplingSection) -> SamplingSection:
        """How its samples are drawn: as the rollout's, except for what the set says."""
        own = {name: getattr(self, name) for name in SAMPLING if getattr(self, name) is not None}
        return part(SamplingSection, rollout, **own)


def check_weights(weights: list[float] | None) -> None:
    """Raises ValueError unless weights of rewards are finite, and one of them is not 0."""
    if weights is not None and not (all(map(math.isfinite, weights)) and any(weights)):
        raise ValueError(
            f"weights: expected finite numbers of which one is not 0, got {weights}: the sum of "
            "rewards would always be 0"
        )


@dataclass
class EvalSection:
    """Held-out problems, sampled as the rollout samples, and further named sets.

    Attributes:
      problems: held-out problems of data; 0: they are not evaluated.
      sets: further sets of problems by name, such as {aime: {path: aime24.parquet, n: 16}}.
      every: steps between evaluations; 0: only at start and end.
      before: evaluate before the first step.
      max_batch: slots that run at once, on each replica; null: those of rollouts, whose compiled
        programs then serve here, too.
      seed: seed of the samples, the same at every evaluation.
    """

    problems: int = option(128, least=0)
    sets: dict[str, EvalSet] = option({})
    every: int = option(0, least=0, needs="any")
    before: bool = option(True, needs="any")
    max_batch: int | None = option(None, least=1, needs="any")
    seed: int = option(1234, needs="any")

    def __post_init__(self):
        for name in self.sets:
            if not _NAME.fullmatch(str(name)) or name in TAKEN:
                raise ValueError(
                    "sets: expected names of letters, digits and underscores, other than "
                    f"{', '.join(TAKEN)}; got {name!r}"
                )

    @property
    def any(self) -> bool:
        """Something to evaluate, by eval.problems or eval.sets."""
        return bool(self.problems or self.sets)


@dataclass(frozen=True)
class Asked:
    """What a set asks of the engine: its lengths, and how its samples are drawn.

    Attributes:
      name: name of the set; None: the held-out problems of the data.
      n: samples of each problem.
      max_prompt_tokens: prompt tokens at most.
      sampling: how samples are drawn.
    """

    name: str | None
    n: int
    max_prompt_tokens: int
    sampling: Sampling

    @property
    def key(self) -> str:
        """The settings of the set, for messages."""
        return "rollout" if self.name is None else f"eval.sets.{self.name}"

    @property
    def longest(self) -> int:
        """The most tokens of a prompt and its response."""
        return self.max_prompt_tokens + self.sampling.max_tokens

    def params(self, seed: int = 0) -> SamplingParams:
        """The sampling parameters of a problem with this seed."""
        return self.sampling.sampling_params(seed=seed, n=self.n)


def asked_sets(section: EvalSection, rollout: RolloutSection) -> list[Asked]:
    """What each evaluated set asks of the engine; the held-out problems of the data come first.

    Raises:
      ValueError: a value of sampling is not valid, or all samples of a problem would be equal.
    """
    held_out = Asked(None, 1, rollout.max_prompt_tokens, part(SamplingSection, rollout))
    sets = [held_out] if section.problems else []
    for name, chosen in section.sets.items():
        most = chosen.max_prompt_tokens or rollout.max_prompt_tokens
        try:
            sampling = chosen.sampling(rollout)
            if chosen.n > 1 and sampling.temperature == 0:
                raise ValueError(
                    f"n={chosen.n}: with a temperature of 0 all samples of a problem are equal; "
                    "set n=1, or a temperature"
                )
        except ValueError as error:
            raise ValueError(f"eval.sets.{name}.{error}") from error
        sets.append(Asked(name, chosen.n, most, sampling))
    return sets
