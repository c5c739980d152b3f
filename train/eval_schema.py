"""The `eval` section of `train.rl`'s configuration: held-out problems, and named sets of others."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, fields
from typing import Any

from specjax.config import SamplingParams
from specjax.schema import at_least, option
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
    """A named set of problems, sampled as the rollout samples unless it says otherwise."""

    path: Any = option(
        None,
        "rows of the set, as data.path; all of them are evaluated",
        kind=str | list[str] | None,
    )
    problems: int | None = option(None, "the first so many problems; null: all", least=1)
    n: int = option(1, "samples of each problem", least=1)
    temperature: float | None = option(
        None, "sampling temperature, 0 is greedy; null: the rollout's, as for the keys below"
    )
    max_tokens: int | None = option(None, "response tokens at most", least=1)
    max_prompt_tokens: int | None = option(None, "prompt tokens at most", least=1)
    top_k: int | None = option(None, "keep the k most likely tokens; 0 or -1: all")
    top_p: float | None = option(None, "keep the fewest tokens with this share of the mass")
    min_p: float | None = option(
        None, "keep tokens at least so many times as likely as the likeliest one"
    )
    stop: list[str] | None = option(None, "strings that end a response")
    reward: Any = option(
        None,
        "reward of the set, as `reward`; null: the run's, or what suits these rows where that is "
        "auto",
        kind=str | list[str] | None,
    )
    weights: list[float] | None = option(
        None,
        "weight of each of several rewards, as rewards.weights; null: that of the run's reward of "
        "the same name, 1 of others",
    )
    pass_reward: float = option(
        1.0,
        "a sample is right from this reward on, for pass@k: that of the reward that compares "
        "answers, or where there is none of all together",
    )
    task: str = option("auto", "what rows mean, as data.task")
    prompt_key: str | None = option(None, "column of the prompt, as data.prompt_key")
    answer_key: str | None = option(None, "column of the gold answer, as data.answer_key")
    prompt_template: str | None = option(
        None, "format string with {question}, as data.prompt_template; null: the run's"
    )
    chat: str | None = option(
        None, "auto, on or off, as data.chat; null: the run's", choices=(None, "auto", "on", "off")
    )
    chat_template_kwargs: dict[str, Any] | None = option(
        None, "given to the chat template, as data.chat_template_kwargs; null: the run's"
    )
    dataset: str | None = option(
        None, "with task=reasoning_gym a data set of it, of which data.heldout_size are generated"
    )
    dataset_args: dict[str, Any] = option({}, "further arguments of that data set")

    def check(self) -> None:
        """Raises ValueError if its settings do not fit together."""
        generated = self.task in ("sums", "reasoning_gym")
        if not self.path and not generated:
            raise ValueError("has no rows; set its path, or task=reasoning_gym and its dataset")
        if self.dataset and self.task != "reasoning_gym":
            raise ValueError(f"dataset={self.dataset} is of task=reasoning_gym, got {self.task}")
        if self.path and generated:
            raise ValueError(
                f"path={self.path} changes nothing: the problems of task={self.task} are "
                "generated; leave out one of them"
            )
        if self.dataset_args and self.task != "reasoning_gym":
            raise ValueError(
                f"dataset_args={self.dataset_args} is of task=reasoning_gym, got {self.task}; "
                "leave it out"
            )
        if self.weights is not None:
            if not all(map(math.isfinite, self.weights)) or not any(self.weights):
                raise ValueError(
                    f"weights: expected finite numbers of which one is not 0, got {self.weights}"
                )
        names = [self.reward] if isinstance(self.reward, str) else self.reward or []
        for name in names:
            REWARDS.check(name)

    def sampling(self, rollout: SamplingSection) -> SamplingSection:
        """How its samples are drawn: as the rollout's, except for what the set says."""
        every = {each.name: getattr(rollout, each.name) for each in fields(SamplingSection)}
        own = {name: getattr(self, name) for name in SAMPLING}
        return SamplingSection(**every | {k: v for k, v in own.items() if v is not None})


@dataclass
class EvalSection:
    """Held-out problems, sampled as the rollout samples, and further named sets."""

    problems: int = option(128, "held-out problems of data; 0: they are not evaluated")
    sets: dict[str, EvalSet] = option(
        {}, "further sets of problems by name, such as {aime: {path: aime24.parquet, n: 16}}"
    )
    every: int = option(0, "steps between evaluations; 0: only at start and end")
    before: bool = option(True, "evaluate before the first step")
    max_batch: int | None = option(
        None,
        "slots that run at once, on each replica; null: those of rollouts, whose compiled programs "
        "then serve here, too",
        least=1,
    )
    seed: int = option(1234, "seed of the samples, the same at every evaluation")

    def __post_init__(self):
        at_least("eval", self, problems=0, every=0)
        found = {}
        for name, each in self.sets.items():
            if not _NAME.fullmatch(str(name)) or name in TAKEN:
                raise ValueError(
                    "eval.sets: expected names of letters, digits and underscores, other than "
                    f"{', '.join(TAKEN)}; got {name!r}"
                )
            try:
                found[name] = each if isinstance(each, EvalSet) else EvalSet(**each)
                found[name].check()
            except ValueError as error:
                raise ValueError(f"eval.sets.{name}: {error}") from error
        self.sets = found

    @property
    def any(self) -> bool:
        """Whether anything is evaluated."""
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
    sampling: SamplingSection

    @property
    def key(self) -> str:
        """The settings of the set, for messages."""
        return "rollout" if self.name is None else f"eval.sets.{self.name}"

    @property
    def longest(self) -> int:
        """The most tokens of a prompt and its response."""
        return self.max_prompt_tokens + self.sampling.max_tokens

    def check(self) -> None:
        """Raises ValueError if a value of sampling is not valid, or all samples would be equal."""
        self.params()
        if self.n > 1 and self.sampling.temperature == 0:
            raise ValueError(
                f"{self.key}.n={self.n}: with a temperature of 0 all samples of a problem are "
                "equal; set n=1, or a temperature"
            )

    def params(self, seed: int = 0) -> SamplingParams:
        """The sampling parameters of a problem with this seed.

        Raises:
          ValueError: a value is not valid.
        """
        try:
            return self.sampling.sampling_params(seed, self.n)
        except ValueError as error:
            said = str(error).removeprefix("rollout.")
            raise ValueError(f"{self.key}.{said}") from error


def asked_sets(section: EvalSection, rollout: RolloutSection) -> list[Asked]:
    """What each evaluated set asks of the engine; the held-out problems of the data come first."""
    found = []
    if section.problems:
        found.append(Asked(None, 1, rollout.max_prompt_tokens, rollout))
    for name, each in section.sets.items():
        most = each.max_prompt_tokens or rollout.max_prompt_tokens
        found.append(Asked(name, each.n, most, each.sampling(rollout)))
    return found
