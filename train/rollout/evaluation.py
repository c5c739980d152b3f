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

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from specjax.engine.base import BaseEngine
from specjax.engine.request import Job, SampleOutput, Totals, make_jobs, require_valid
from specjax.parallel import distributed
from train.rewards.answers.latex import clean, squeezed
from train.rewards.builtin import NUMBER, AnswerReward
from train.rewards.scoring import Score, Scorer
from train.rollout.groups import Group, Response
from train.rollout.rewards import GroupRewards, ResponseText
from train.rollout.sets import ProblemSet
from train.rollout.turns import Turns


class Evaluated(NamedTuple):
    """The result of an evaluation.

    Attributes:
      metrics: the metrics of all sets under their names in the log, `time/eval`, the seconds of all
        of it, and those in rewards.
      totals: sums over all samples.
      groups: the problems of each set with their samples, by the set's name; scored in the first
        process.
    """

    metrics: dict[str, float]
    totals: Totals
    groups: dict[str | None, list[Group]]


def evaluate(
    engine: BaseEngine,
    sets: Sequence[ProblemSet],
    eos_ids: Sequence[int],
    seed: int,
    on_progress: Callable[[int, Totals], None] | None = None,
    turns: Turns | None = None,
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
      turns: plays the turns of samples; None: they have one.
    """
    started = time.perf_counter()
    jobs: list[Job] = []
    places: list[tuple[GroupRewards, Group, int]] = []  # of each job
    groups: dict[str | None, list[Group]] = {}
    rewards, overlong = [], []
    for problem_set in sets:
        text = ResponseText(problem_set.prompts.tokenizer, problem_set.asked.params(), eos_ids)
        rewards.append(GroupRewards(problem_set.scorer, text))
        groups[problem_set.asked.name] = made = []
        overlong.append(0.0)
        for problem in problem_set.problems:
            ids, is_long = problem_set.prompts.fit(problem)
            overlong[-1] += is_long
            if ids is None:
                continue
            n, index = problem_set.asked.n, len(made)
            group = Group(index, index + 1, 0, problem, ids, [Response() for _ in range(n)])
            made.append(group)
            places += [(rewards[-1], group, place) for place in range(n)]
            params = problem_set.asked.params(seed + problem.index)
            where = f"{problem_set.asked.key}: prompt {problem.index}"
            jobs += make_jobs(ids, params, eos_ids, problem_set.prompts.tokenizer, len(jobs), where)

    def on_sample(index: int, sample: SampleOutput) -> None:
        scores, group, place = places[index]
        group.responses[place].update(sample, finished=True)
        if sample.finish_reason != "error":  # `require_valid` raises then
            scores.begin(group, place)

    metrics: dict[str, float] = {}
    try:
        if turns is not None:
            totals = turns.play(engine, jobs, [place[1:] for place in places], on_progress)
        else:
            outputs, totals = engine.generate(jobs, on_progress, on_sample)
            require_valid(outputs, lambda index: jobs[index].where)
        for problem_set, scores, dropped in zip(sets, rewards, overlong, strict=True):

            def judge(problem_set=problem_set, scores=scores) -> dict[str, float]:
                for group in groups[problem_set.asked.name]:
                    turns.read(group) if turns else scores.score(group)
                return _metrics(problem_set, groups[problem_set.asked.name])

            # Rewards may be random or take long: one process computes them, and all log the same.
            for name, value in distributed.of_first(judge, "evaluation").items():
                metrics[name] = metrics.get(name, 0.0) + value  # times are of all sets together
            metrics[f"{problem_set.prefix}prompts_overlong"] = dropped
    finally:
        for scores in rewards:
            scores.end()
    for problem_set in sets:  # which may share their rewards
        if problem_set.alone:
            problem_set.scorer.close()
    return Evaluated(metrics | {"time/eval": time.perf_counter() - started}, totals, groups)


# --- metrics -------------------------------------------------------------------------------------


def _metrics(problem_set: ProblemSet, groups: Sequence[Group]) -> dict[str, float]:
    """Computes the metrics of a set, and the seconds in its rewards."""
    responses = [response for group in groups for response in group.responses]
    prefix, n, scorer = problem_set.prefix, problem_set.asked.n, problem_set.scorer
    figures = scorer.metrics()
    reward = float(np.mean([response.reward for response in responses]))
    metrics = {
        "time/eval_reward": figures["time/reward"],
        "time/eval_reward_wait": figures["time/reward_wait"],
        f"{prefix}reward_timed_out": figures["reward/timed_out"],
        f"{prefix}problems": float(len(groups)),
        f"{prefix}reward_failed": float(sum(response.failed for response in responses)),
    }
    lengths = {
        f"{prefix}truncated_ratio": float(
            np.mean([r.finish_reason == "length" for r in responses])
        ),
        f"{prefix}response_length_mean": float(np.mean([len(r.token_ids) for r in responses])),
    }
    scores = [[Score(r.reward, r.failed, r.parts) for r in group.responses] for group in groups]
    if problem_set.asked.name is None:
        means = scorer.part_means([score for one in scores for score in one])
        metrics |= {f"eval/reward/{label}": mean for label, mean in means.items()}
        return metrics | {"eval/reward": reward} | lengths
    metrics[f"{prefix}avg@{n}"] = reward
    least = problem_set.pass_reward
    right = [sum(is_right(scorer, score, least) for score in one) for one in scores]
    for k in sorted({1 << i for i in range(n.bit_length())} | {n}):  # powers of two up to n, and n
        metrics[f"{prefix}pass@{k}"] = float(np.mean([pass_at_k(n, c, k) for c in right]))
    if scorer.built_in is not None:
        same, extract = same_answer(scorer.built_in), scorer.built_in.extract
        votes = [majority([extract(r.text) for r in g.responses], same) for g in groups]
        values = [g.responses[vote].reward for g, vote in zip(groups, votes, strict=True)]
        metrics[f"{prefix}maj@{n}"] = float(np.mean(values))
    return metrics | lengths


def is_right(scorer: Scorer, score: Score, least: float) -> bool:
    """Returns whether a sample counts as right.

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


def pass_at_k(n: int, right: int, k: int) -> float:
    """Estimates without bias the probability that one of k samples is right (arXiv 2107.03374).

    It is 1 - C(n - right, k) / C(n, k): the share of all choices of k of the n samples in which one
    is right.

    Args:
      n: number of samples.
      right: number of samples that are right.
      k: number of samples to choose, at most n.
    """
    return 1.0 - math.comb(n - right, k) / math.comb(n, k)


def majority(answers: Sequence[str | None], same: Callable[[str, str], bool]) -> int:
    """Returns the index of the first sample that gives the answer which most samples give.

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
    """Makes a function that says whether two answers to a problem are the same.

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


def described(metrics: Mapping[str, float]) -> str:
    """Writes the line about an evaluation for the user."""
    shown = [name for name in metrics if "@" in name or name == "eval/reward"]
    return ", ".join(f"{name.removeprefix('eval/')} {metrics[name]:.3f}" for name in shown)
