"""Evaluation: sets of problems, sampled with seeds that are the same every time, and their metrics.

The held-out problems of the data are one set, logged as `eval/reward` and so on; those of
`eval.sets` are logged as `eval/NAME/...`:

    avg@n        mean reward of all samples
    pass@k       estimated probability that one of k samples is right (`pass_at_k`)
    maj@n        mean reward of the answer that most samples of a problem give (`majority`)

Both have `truncated_ratio`, the share of samples that were cut off at their largest length, and
`response_length_mean`, the mean number of tokens, under the names that rollouts have for them.

All sets run in one engine of their own, and nothing that training reads is changed: not the
engine of the rollouts, nor its caches or controller, nor the figures of a step's rewards.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from specjax.command_line import ConfigError
from specjax.config.sampling import is_seed
from specjax.engine.base import BaseEngine
from specjax.engine.request import Job, SampleOutput, Totals, make_jobs, require_valid
from specjax.parallel import distributed
from specjax.settings import show
from train import data
from train.answers.latex import clean, squeezed
from train.collect import ResponseText
from train.eval_schema import Asked, EvalSet, asked_sets
from train.inputs import Inputs, Prompts, check_rows, describe_data
from train.rewards import NUMBER, AnswerReward
from train.schema import DataConfig, RLConfig
from train.scoring import SampleFacts, Score, Scorer, Scoring
from train.tasks.layout import Problem


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


def problem_sets(cfg: RLConfig, inputs: Inputs, model: str) -> tuple[list[ProblemSet], list[str]]:
    """The sets that a run evaluates, and lines about them to print at start.

    Args:
      cfg: settings of the run.
      inputs: the data of the run, which was read before.
      model: name of the model in messages, as the user typed it.

    Raises:
      ConfigError: a set cannot be read, or its settings do not fit its rows; it names the set.
    """
    found, notes, names = [], [], inputs.scorer.names
    scorers = {(names, tuple(cfg.rewards.weights or [1.0] * len(names))): inputs.scorer}
    from_files = isinstance(inputs.problems, list)
    # Generated problems take time to make, and are not compared with rows of files.
    compared = {name for name, each in cfg.eval.sets.items() if from_files or not each.path}
    training = _drawn(cfg, inputs.problems) if compared else []
    questions = {data.asked_by(problem) for problem in training}
    for asked in asked_sets(cfg.eval, cfg.rollout):
        if asked.name is None:
            found.append(ProblemSet(asked, inputs.heldout, inputs.prompts, inputs.scorer))
            continue
        try:
            each, lines = _read_set(cfg, asked, inputs.prompts, model, scorers, names)
        except (ValueError, OSError, ModuleNotFoundError) as error:
            raise ConfigError(f"{asked.key}: {_spelled(str(error), asked)}") from error
        each = dataclasses.replace(each, alone=each.scorer is not inputs.scorer)
        found.append(each)
        notes += lines
        trained = 0
        if questions and asked.name in compared:
            trained = sum(data.asked_by(problem) in questions for problem in _rows(each))
        if trained and from_files:
            notes.append(
                f"WARNING: {asked.key}: {trained} of its {len(each.problems)} questions are "
                "trained on, too; data.heldout_path leaves them out of training, a set does not"
            )
        elif trained:
            notes.append(
                f"WARNING: {asked.key}: {trained} of its {len(each.problems)} questions are among "
                f"the first {len(training)} that are trained on; choose other dataset_args, so "
                "that the data sets share fewer questions"
            )
    return found, notes


def _drawn(cfg: RLConfig, problems: Sequence[Problem]) -> list[Problem]:
    """Problems that training draws: all rows of files, and some thousand at most of generated ones.

    A generated problem takes time to make, and those that a run does not come to are not its data.
    """
    if isinstance(problems, list) or not len(problems):
        return [*problems]
    order = data.endless(problems, cfg.data.seed)
    return [order[i] for i in range(min(cfg.steps * cfg.rollout.prompts, _DRAWS, len(problems)))]


_DRAWS = 2000  # problems of training that are compared with those of sets


def _read_set(
    cfg: RLConfig,
    asked: Asked,
    run_prompts: Prompts,
    model: str,
    scorers: dict[Any, Scorer],
    run_names: tuple[str, ...],
) -> tuple[ProblemSet, list[str]]:
    """A named set, and the lines about it.

    Args:
      cfg: settings of the run.
      asked: what the set asks of the engine.
      run_prompts: encoder of the run's prompts.
      model: name of the model in messages.
      scorers: the rewards that sets share, by names and weights; a new one is added.
      run_names: names of the run's rewards.
    """
    chosen = cfg.eval.sets[asked.name]
    rows = _data_of(cfg, chosen)
    longest = asked.max_prompt_tokens
    prompts = Prompts(run_prompts.tokenizer, rows, longest, run_prompts.model)
    problems = data.problems(rows, "heldout", prompts.chat)
    text = isinstance(problems[0].prompt, str)
    if chosen.chat_template_kwargs and rows.chat == "off" and text:
        raise ValueError(
            f"chat_template_kwargs={show(chosen.chat_template_kwargs)} changes nothing: the "
            "prompts are text, and with chat=off no chat template is applied; leave out one of them"
        )
    reward = chosen.reward or (cfg.reward if cfg.reward != "auto" else data.default_reward(rows))
    names = (reward,) if isinstance(reward, str) else tuple(reward)
    weights = _weights_of(cfg, chosen, names, run_names)
    if (names, weights) not in scorers:
        options = dataclasses.replace(cfg.rewards, weights=[*weights])
        scorers[names, weights] = Scorer(names, options=options)
    scorer = scorers[names, weights]
    if not is_seed(cfg.eval.seed + len(problems)):
        raise ValueError(f"has {len(problems)} problems, too many for eval.seed={cfg.eval.seed}")
    asked.params(cfg.eval.seed)
    rewards = scorer.described
    said = describe_data(rows, prompts.chat, model, rewards, trains=False, date=prompts.date)
    lines = [f"{asked.key}: {said.removeprefix('data: ')}"]
    for warning in check_rows(prompts, scorer, problems, "prompts", ""):
        text = _spelled(warning.removeprefix("WARNING: "), asked)
        lines.append(f"WARNING: {asked.key}: {text}")
    return ProblemSet(asked, problems, prompts, scorer, chosen.pass_reward), lines


def _weights_of(
    cfg: RLConfig, chosen: EvalSet, names: tuple[str, ...], run_names: tuple[str, ...]
) -> tuple[float, ...]:
    """The weight of each reward of a set: its own, or that of the run's reward of the same name.

    A single reward that the run adds to others has weight 1.

    Raises:
      ValueError: all are 0, or there are not as many as rewards.
    """
    if chosen.weights is not None:
        if len(chosen.weights) != len(names):
            raise ValueError(
                f"weights: expected {len(names)} numbers, one for each of "
                f"reward={', '.join(names)}, got {chosen.weights}"
            )
        return tuple(chosen.weights)
    of_run = dict(zip(run_names, cfg.rewards.weights or [1.0] * len(run_names), strict=False))
    if len(names) == 1 and names != run_names:
        return (1.0,)
    weights = tuple(of_run.get(name, 1.0) for name in names)
    if not any(weights):
        raise ValueError(
            f"rewards.weights={cfg.rewards.weights} gives each of reward={', '.join(names)} the "
            "weight 0, and the sum would always be 0; set weights of the set"
        )
    return weights


def _spelled(text: str, asked: Asked) -> str:
    """A message about data with the set's own keys in the place of the run's."""
    text = text.replace("rollout.max_prompt_tokens", f"{asked.key}.max_prompt_tokens")
    text = text.replace("data.heldout_path", f"{asked.key}.path")
    names = "|".join(each.name for each in dataclasses.fields(EvalSet))
    return re.sub(rf"\bdata\.({names})\b", rf"{asked.key}.\1", text)


def _data_of(cfg: RLConfig, chosen: EvalSet) -> DataConfig:
    """The settings of data that read a set: every row of its files is held out."""
    shared = ("chat", "chat_template_kwargs", "prompt_template")
    own = {name: getattr(chosen, name) for name in shared if getattr(chosen, name) is not None}
    most = chosen.problems
    if most is None:
        most = cfg.data.heldout_size if chosen.path is None else _ALL
    rows = dataclasses.replace(
        cfg.data,
        task=chosen.task,
        path=chosen.path,
        heldout_path=chosen.path,
        heldout_size=most,
        prompt_key=chosen.prompt_key,
        answer_key=chosen.answer_key,
        dataset=chosen.dataset,
        dataset_args=chosen.dataset_args,
        **own,
    )
    if rows.prompt_template is not None and chosen.prompt_template is None and rows.path:
        first = data.read_table(rows.path, data.find_task(rows)).examples[0][1]
        if not isinstance(first.prompt, str):  # the run's template is for prompts that are text
            rows = dataclasses.replace(rows, prompt_template=None)
    return rows


_ALL = 1 << 62  # more rows than any file has


# --- sampling and scoring ------------------------------------------------------------------------


class Judged(NamedTuple):
    """A problem's samples.

    Attributes:
      problem: the problem.
      scores: the reward of each sample.
      texts: the text of each.
      samples: the samples.
    """

    problem: Problem
    scores: list[Score]
    texts: list[str]
    samples: Sequence[SampleOutput]


class Evaluated(NamedTuple):
    """What an evaluation found.

    Attributes:
      metrics: the metrics of all sets under their names in the log, `time/eval`, the seconds of all
        of it, and those in rewards.
      totals: sums over all samples.
      judged: the problems of each set with their samples, by the set's name; in the first process.
    """

    metrics: dict[str, float]
    totals: Totals
    judged: dict[str | None, list[Judged]]


def evaluate(
    engine: BaseEngine,
    sets: Sequence[ProblemSet],
    eos_ids: Sequence[int],
    seed: int,
    on_progress: Callable[[int, Totals], None] | None = None,
) -> Evaluated:
    """Samples all problems of some sets with an engine's policy, and scores them.

    The seed of a problem is `seed` plus its number. Problems whose prompts are dropped because of
    their length are left out.

    Args:
      engine: engine with the policy's weights.
      sets: the sets.
      eos_ids: tokens that end a response.
      seed: seed of the samples.
      on_progress: see `BaseEngine.generate`.
    """
    started = time.perf_counter()
    encoded = [[(row, *each.prompts.fit(row)) for row in _rows(each)] for each in sets]
    fitting = [[(row, ids) for row, ids, _ in rows if ids is not None] for rows in encoded]
    jobs: list[Job] = []
    for each, rows in zip(sets, fitting, strict=True):
        for row, ids in rows:
            where = f"{each.asked.key}: prompt {row.index}"
            params = each.asked.params(seed + row.index)
            jobs += make_jobs(ids, params, eos_ids, each.prompts.tokenizer, len(jobs), where)
    kept = [[row for row, _ in rows] for rows in fitting]
    judges = [_Judge(each, rows, eos_ids) for each, rows in zip(sets, kept, strict=True)]
    places = [(judge, place) for judge in judges for place in range(judge.count)]

    def begin_score(index: int, sample: SampleOutput) -> None:
        if sample.finish_reason != "error":  # `require_valid` raises then
            judge, place = places[index]
            judge.add(place, sample)

    metrics: dict[str, float] = {}
    judged: dict[str | None, list[Judged]] = {}
    try:
        if distributed.is_several():  # one process computes rewards, once it has all samples
            outputs, totals = engine.generate(jobs, on_progress)
        else:
            outputs, totals = engine.generate(jobs, on_progress, begin_score)
        require_valid(outputs, lambda index: jobs[index].where)
        for judge, known in zip(judges, encoded, strict=True):
            samples, outputs = outputs[: judge.count], outputs[judge.count :]
            # Rewards may be random or take long: one process computes them, and all log the same.
            run = functools.partial(judge.metrics, samples, judged)
            for name, value in distributed.of_first(run, "evaluation").items():
                metrics[name] = metrics.get(name, 0.0) + value if name in _TIMES else value
            overlong = sum(why is not None for _, _, why in known)
            metrics[f"{prefix_of(judge.each)}prompts_overlong"] = float(overlong)
    except BaseException:
        for judge in judges:
            judge.cancel()
        raise
    for each in sets:  # which may share their rewards
        if each.alone:
            each.scorer.close()
    return Evaluated(metrics | {"time/eval": time.perf_counter() - started}, totals, judged)


def _rows(each: ProblemSet) -> list[Problem]:
    return [each.problems[i] for i in range(len(each.problems))]


def prefix_of(each: ProblemSet) -> str:
    """What the names of a set's metrics begin with."""
    return "eval/" if each.asked.name is None else f"eval/{each.asked.name}/"


class _Judge:
    """Scores the samples of a set as they end, those of each problem together.

    Args:
      each: the set.
      problems: its problems that are sampled.
      eos_ids: tokens that end a response.

    Attributes:
      each: the set.
      count: number of samples of all problems.
    """

    def __init__(self, each: ProblemSet, problems: Sequence[Problem], eos_ids: Sequence[int]):
        self.each, self._problems = each, problems
        self.count = len(problems) * each.asked.n
        self._read = ResponseText(each.prompts.tokenizer, each.asked.params(), eos_ids)
        self._begun: dict[int, Scoring] = {}  # by the number of the problem
        self._texts: dict[int, str] = {}  # of samples, by their place

    def add(self, place: int, sample: SampleOutput) -> None:
        """Begins to score a sample; `place` is its number among those of the set."""
        number, g = divmod(place, self.each.asked.n)
        if number not in self._begun:
            self._begun[number] = self.each.scorer.begin(self._problems[number])
        scoring, text = self._begun[number], self._read(sample.token_ids)
        self._texts[place] = text
        scoring.add(g, text, SampleFacts(g, sample.token_ids, sample.finish_reason))
        first = number * self.each.asked.n
        if all(i in self._texts for i in range(first, first + self.each.asked.n)):
            scoring.finish()

    def cancel(self) -> None:
        """Gives up calls of rewards that no worker has begun."""
        for scoring in self._begun.values():
            scoring.cancel()

    def metrics(
        self, samples: Sequence[SampleOutput], judged: dict[str | None, list[Judged]]
    ) -> dict[str, float]:
        """The metrics of the set, and seconds in its rewards; scores samples that were not added.

        Args:
          samples: the samples, in the order of the problems.
          judged: gets the result under the set's name.
        """
        n, found = self.each.asked.n, []
        for place, sample in enumerate(samples):
            if place not in self._texts:
                self.add(place, sample)
        for number, problem in enumerate(self._problems):
            scores, own = self._begun[number].scores(), range(number * n, (number + 1) * n)
            texts = [self._texts[place] for place in own]
            outputs = [samples[place] for place in own]
            found.append(Judged(problem, [scores[g] for g in range(n)], texts, outputs))
        figures = self.each.scorer.metrics()  # those of a step are of its rollout alone
        judged[self.each.asked.name] = found
        return _metrics(self.each, found) | {
            "time/eval_reward": figures["time/reward"],
            "time/eval_reward_wait": figures["time/reward_wait"],
            f"{prefix_of(self.each)}reward_timed_out": figures["reward/timed_out"],
        }


_TIMES = ("time/eval_reward", "time/eval_reward_wait")  # of all sets together


# --- metrics -------------------------------------------------------------------------------------


def _metrics(each: ProblemSet, judged: Sequence[Judged]) -> dict[str, float]:
    scores = [score for one in judged for score in one.scores]
    samples = [sample for one in judged for sample in one.samples]
    reward = float(np.mean([score.value for score in scores]))
    length = float(np.mean([len(sample.token_ids) for sample in samples]))
    prefix, n = prefix_of(each), each.asked.n
    cut = [sample.finish_reason == "length" for sample in samples]
    found = {
        f"{prefix}problems": float(len(judged)),
        f"{prefix}reward_failed": float(sum(score.failed for score in scores)),
    }
    lengths = {
        f"{prefix}truncated_ratio": float(np.mean(cut)),
        f"{prefix}response_length_mean": length,
    }
    if each.asked.name is None:
        means = each.scorer.part_means(scores)
        found |= {f"eval/reward/{label}": mean for label, mean in means.items()}
        return found | {"eval/reward": reward} | lengths
    found[f"{prefix}avg@{n}"] = reward
    right = [sum(is_right(each.scorer, s, each.pass_reward) for s in one.scores) for one in judged]
    for k in sizes(n):
        found[f"{prefix}pass@{k}"] = float(np.mean([pass_at_k(n, c, k) for c in right]))
    if each.scorer.built_in is not None:
        same = same_answer(each.scorer.built_in)
        votes = [majority(_answers(each.scorer, one.texts), same) for one in judged]
        values = [one.scores[vote].value for one, vote in zip(judged, votes, strict=True)]
        found[f"{prefix}maj@{n}"] = float(np.mean(values))
    return found | lengths


def _answers(scorer: Scorer, texts: Sequence[str]) -> list[str | None]:
    return [scorer.built_in.extract(text) for text in texts]


def is_right(scorer: Scorer, score: Score, least: float) -> bool:
    """Whether a sample counts as right.

    Of several rewards the first one that compares answers decides; where there is none, their sum.

    Args:
      scorer: the rewards.
      score: those of the sample.
      least: reward from which on it is right.
    """
    value = score.value
    if score.parts and scorer.built_in is not None:
        value = score.parts[scorer.names.index(next(iter(scorer.checked)))]
    return value >= least


def sizes(n: int) -> list[int]:
    """The k for which pass@k of n samples is logged: the powers of two up to n, and n."""
    return sorted({1 << i for i in range(n.bit_length())} | {n})


def pass_at_k(n: int, right: int, k: int) -> float:
    """The unbiased estimate of the probability that one of k samples is right (arXiv 2107.03374).

    It is 1 - C(n - right, k) / C(n, k): the share of all choices of k of the n samples in which one
    is right.

    Args:
      n: number of samples.
      right: number of samples that are right.
      k: number of samples to choose, at most n.
    """
    return 1.0 - math.comb(n - right, k) / math.comb(n, k)


def majority(answers: Sequence[str | None], same: Callable[[str, str], bool]) -> int:
    """The index of the first sample that gives the answer which most samples give.

    Of answers that equally many samples give, the one that comes first counts. Samples without an
    answer do not vote; if there is no vote, the first sample counts.

    Args:
      answers: answer of each sample; None: it has none.
      same: whether two answers are the same.
    """
    votes: dict[int, int] = {}
    for index, answer in enumerate(answers):
        if answer is None:
            continue
        first = next((i for i in votes if same(answers[i], answer)), index)
        votes[first] = votes.get(first, 0) + 1
    return max(votes, key=lambda index: (votes[index], -index), default=0)


def same_answer(reward: AnswerReward) -> Callable[[str, str], bool]:
    """A function that says whether two answers to a problem are the same.

    They are if the reward takes one for the other. A reward that needs time for that
    (`math_verify`) is not asked: two numbers are the same by `number`, and formulas if they are
    written alike but for spaces and spellings such as `\\dfrac` for `\\frac`.
    """
    judge = reward if reward.quick else NUMBER

    def same(one: str, other: str) -> bool:
        if not reward.quick and squeezed(clean(one)) == squeezed(clean(other)):
            return True
        return judge(judge.write(one), other) == 1.0

    return same


def described(metrics: Mapping[str, float]) -> str | None:
    """The line about an evaluation for the user; None: nothing was evaluated."""
    sets: dict[str, list[str]] = {}
    if "eval/reward" in metrics:
        sets["held out"] = [f"reward {metrics['eval/reward']:.3f}"]
    for key, value in metrics.items():
        first, *inside = key.split("/")
        if first == "eval" and len(inside) == 2 and inside[0] != "reward" and inside[1] in _SHOWN:
            name, decimals = _SHOWN[inside[1]]
            sets.setdefault(inside[0], []).append(f"{name} {value:.{decimals}f}")
        elif first == "eval" and len(inside) == 2 and "@" in inside[1]:
            sets.setdefault(inside[0], []).append(f"{inside[1]} {value:.3f}")
    return "; ".join(f"{name}: {', '.join(said)}" for name, said in sets.items()) or None


# Metrics of a set without @: their names for the user, and their decimals.
_SHOWN = {"truncated_ratio": ("truncated", 3), "response_length_mean": ("length", 1)}
