"""Rollouts of training: problems become groups of scored samples, and these training samples.

`Rollouts` has what outlives a step: the position in the data, and the groups that are carried.
`StepRollout` is one step: it keeps an engine busy until the rule of `train.groups` has a final
selection. Which tokens come out is decided by seeds alone: the seed of a group folds run seed, step
and the group's position in the order of draws; the request key folds the prompt and the sample
index on top. How many slots the engine has, which samples it starts first and how it speculates
decides how long a step takes, and nothing else.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from specjax.command_line import ConfigError
from specjax.config import SamplingParams
from specjax.engine.engine import Engine
from specjax.engine.request import (
    Job,
    SampleOutput,
    Totals,
    make_jobs,
    require_valid,
    special_name,
)
from specjax.engine.sequence import Finished, Progress
from specjax.engine.sequence import Sequence as Added
from specjax.engine.stops import StopStrings
from specjax.parallel import distributed
from train.groups import (
    Group,
    Response,
    Rule,
    Selection,
    StepGroups,
    begin_step,
    end_step,
    select,
)
from train.inputs import Prompts
from train.objectives.shared import zero_variance_groups
from train.packing import PackedBatch, Sample, pack
from train.schema import RLConfig
from train.scoring import Score, Scorer, about_zero, unwinnable
from train.tasks.layout import Problem

# A step that goes on replacing groups warns after so many batches, and again after as many more.
WARN_EVERY = 10

log = logging.getLogger(__name__)


class Rollouts:
    """The rollouts of a run, step by step.

    Args:
      order: problems in the order of draws. prompts: their token ids.
      eos_ids: tokens that end a response. scorer: the reward.

    Attributes:
      position: the next place to draw from.
      carried: groups that the next step goes on with; checkpoints keep them.
      short: why the last step had fewer groups to learn from than it needs; None: it had enough.
      zero: the text of a response that scored 0, its problem, and whether it was cut off, while
        none has scored anything else; None from then on.
    """

    def __init__(
        self,
        cfg: RLConfig,
        order: Sequence[Problem],
        prompts: Prompts,
        eos_ids: Sequence[int],
        scorer: Scorer,
    ):
        roll, algo = cfg.rollout, cfg.algo
        self.cfg, self._order, self._prompts = cfg, order, prompts
        self._eos_ids, self._scorer = eos_ids, scorer
        self._text = ResponseText(prompts.tokenizer, roll.sampling_params())
        self.rule = Rule(
            roll.prompts, roll.in_flight, algo.dynamic_sampling, max(algo.max_num_gen_batches, 0)
        )
        self.position = 0
        self.carried: list[Group] = []
        self.zero: tuple[str, Problem, bool] | None = None
        self._any_reward = False
        self.short: str | None = None
        self._problems: dict[int, Problem] = {}  # of the groups of a step, by index
        self._kept: tuple[Group, ...] = ()  # of the last step: complete, or carried
        self._looked_at: dict[int, str | None] = {}  # by position: why it was passed over, or cut

    def collect(
        self, engine: Engine, step: int
    ) -> tuple[list[Group], list[Group], dict[str, float | str]]:
        """Runs a step's rollout.

        Returns:
          all groups that are complete and not carried, those of them to be trained on, metrics.
        """
        roll = self.cfg.rollout
        carried, stale = begin_step(self.carried, step, roll.max_staleness)
        start = self._at = self.position
        self._looked_at = {}
        run = StepRollout(
            engine,
            self.rule,
            roll.partial,
            carried,
            lambda: self._draw(step),
            self._jobs,
            self._score,
        )
        selection = run.run()
        ended = end_step(self.rule, run.groups, selection, step, roll.partial)
        drawn = run.groups[len(carried) : selection.candidates]
        self.position = drawn[-1].next_position if drawn else start
        self.carried = ended.carried
        self.short = self._about_short(len(ended.selected), selection.candidates)
        self._kept = (*ended.complete, *ended.carried)
        run.totals.tokens = sum(r.num_new for group in self._kept for r in group.responses)
        metrics = rollout_metrics(ended.complete, run.totals, self.cfg.rollout_devices)
        metrics |= selection_metrics(ended, stale, selection.budget, step)
        metrics |= self._reward_metrics(ended.complete) | self._prompt_metrics()
        if roll.partial:
            metrics["rollout/carried_sha"] = tokens_digest(ended.carried)
        return ended.complete, [ended.complete[i] for i in ended.selected], metrics

    def begun(self) -> list[tuple[Job, list[int]]]:
        """The samples of complete and carried groups that the last step began: each as a job, whose
        request is the position of its group, and its tokens. Those that the step cut end there."""
        found = []
        for group in self._kept:
            jobs = self._jobs_of(group, group.position)
            for response, job in zip(group.responses, jobs, strict=True):
                if response.num_carried == 0 and response.num_new:
                    if response.finish_reason is None:
                        limit = len(job.prompt) + len(response.token_ids)
                        job = dataclasses.replace(job, limit=limit)
                    found.append((job, response.token_ids))
        return found

    def state(self) -> dict[str, Any]:
        """For a checkpoint's metadata: JSON."""
        return {
            "position": self.position,
            "carried": [group.to_json() for group in self.carried],
            "any_reward": self._any_reward,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Takes over what `state` returned."""
        self.position = state["position"]
        # A checkpoint of an older version does not say it: then no such line is printed.
        self._any_reward, self.zero = state.get("any_reward", True), None
        self.carried = []
        for saved in state["carried"]:
            problem = self._order[saved["place"]]
            prompt = self._prompts.ids(problem)
            self.carried.append(Group.from_json(saved, problem, prompt))

    def _draw(self, step: int) -> Group:
        """The next problem in order whose prompt is short enough.

        Raises:
          ConfigError: there seems to be none.
        """
        passed = 100 * self.rule.prompts
        drop_unwinnable = self.cfg.data.unwinnable == "drop"
        for position in range(self._at, self._at + passed + 1):
            problem = self._order[position]
            ids, why = self._prompts.look(problem)
            self._looked_at[position] = why
            if ids is not None and not (drop_unwinnable and unwinnable(self._scorer, problem)):
                self._at = position + 1
                responses = [Response() for _ in range(self.cfg.rollout.n)]
                return Group(position, position + 1, step, problem, ids, responses)
            self._looked_at[position] = why or "unwinnable"
        raise ConfigError(
            f"{passed + 1} rows in a row cannot be used: their prompts are longer than "
            f"rollout.max_prompt_tokens = {self.cfg.rollout.max_prompt_tokens}, or the reward "
            f"{self._scorer.name} cannot be won; raise it, or look at them with `python -m "
            "train.data`"
        )

    def _prompt_metrics(self) -> dict[str, float]:
        """Of the problems that this step went past: `overlong` were dropped or cut, `unwinnable`
        dropped."""
        why = [why for at, why in self._looked_at.items() if at < self.position]
        names = {"overlong": "rollout/prompts_overlong", "unwinnable": "rollout/prompts_unwinnable"}
        return {name: float(why.count(key)) for key, name in names.items()}

    def about_zero(self) -> str | None:
        """An example, while every response of the run scored 0; None from then on."""
        return None if self.zero is None else about_zero(self._scorer, *self.zero)

    def _about_short(self, selected: int, candidates: int) -> str | None:
        if selected >= self.rule.prompts:
            return None
        return (
            f"{selected} groups of {candidates} have differing rewards, fewer than rollout.prompts="
            f"{self.rule.prompts}, and algo.max_num_gen_batches={self.rule.batches} lets a step "
            "look at no more: the policy learns from these alone. Raise it (0: no limit), or is "
            "the task too hard or too easy for the policy?"
        )

    def _reward_metrics(self, groups: Sequence[Group]) -> dict[str, float]:
        responses = [r for group in groups for r in group.responses]
        failed = sum(r.failed for r in responses)
        if any(r.reward for r in responses):
            self._any_reward, self.zero = True, None
        elif not self._any_reward and responses:
            pairs = [(r, group.problem) for group in groups for r in group.responses]
            response, problem = next((p for p in pairs if p[0].finish_reason != "length"), pairs[0])
            self.zero = response.text, problem, response.finish_reason == "length"
        return {
            "reward/failed": float(failed),
            "reward/failed_share": failed / max(len(responses), 1),
        }

    def _jobs(self, index: int, group: Group) -> list[Job]:
        self._problems[index] = group.problem
        return self._jobs_of(group, index)

    def _jobs_of(self, group: Group, request: int) -> list[Job]:
        params = group_params(self.cfg, group.step, group.position)
        return make_jobs(
            group.prompt, params, self._eos_ids, self._prompts.tokenizer, request=request
        )

    def score_sample(self, job: Job, sample: SampleOutput) -> Score:
        """Scores a sample of this step in the process that its engine belongs to."""
        return self._scorer(self._text(sample.token_ids), self._problems[job.request])

    def _score(self, group: Group) -> list[float]:
        for response in group.responses:
            response.text = self._text(response.token_ids)
            if response.reward is None:
                response.reward, response.failed = self._scorer(response.text, group.problem)
        return [response.reward for response in group.responses]


class StepRollout:
    """Runs the groups of one step through the engine.

    Args:
      engine: has no samples before and afterwards.
      partial: groups that are not complete in the end will be carried.
      carried: groups to go on with, see `begin_step`.
      draw: returns the next group. jobs: returns the samples of a group as jobs, in order.
      score: sets `text` of all responses of a complete group, and returns their rewards.

    Attributes:
      groups: the candidates in order, and those beyond them that were started, too.
      totals: rounds of all samples, and seconds; the caller sets `tokens`.
    """

    def __init__(
        self,
        engine: Engine,
        rule: Rule,
        partial: bool,
        carried: Iterable[Group],
        draw: Callable[[], Group],
        jobs: Callable[[int, Group], Sequence[Job]],
        score: Callable[[Group], list[float]],
    ):
        self.engine, self.rule, self.partial = engine, rule, partial
        self._draw, self._jobs, self._score = draw, jobs, score
        self._carried = list(carried)
        self.groups: list[Group] = []
        self._running: list[dict[Added, Response]] = []  # for each group
        self._group_of: dict[Added, int] = {}
        steps = engine.runner.steps
        self.totals = Totals(steps, np.zeros(steps + 2, np.int64))

    def run(self) -> Selection:
        """Runs until the selection is final and what will be carried is long enough.

        Raises:
          ValueError: a job does not fit the engine. RuntimeError: the engine's weights changed.
        """
        start = time.perf_counter()
        try:
            for group in self._carried:
                self._start(group)
            while not (selection := self._select()).final or self._must_go_on(selection):
                for event in self.engine.step():
                    self._finish(event)
            self._stop(range(len(self.groups)))
            while self.engine.has_work:
                self.engine.step()
        except BaseException:
            self.engine.clear()  # an interrupted step leaves nothing behind
            raise
        self.totals.seconds = time.perf_counter() - start
        return selection

    def _select(self) -> Selection:
        """Draws the groups that the selection needs, and stops samples that are too long for it."""
        selection = self._selection()
        while len(self.groups) < selection.candidates:
            if self.groups and len(self.groups) % (WARN_EVERY * self.rule.in_flight) == 0:
                if distributed.is_first():
                    log.warning("%s", about_long(self.rule, self.groups))
            self._start(self._draw())
        if selection.budget is not None:
            self._trim(selection.budget)
        return self._selection()

    def _selection(self) -> Selection:
        return select(self.rule, [group.status() for group in self.groups])

    def _start(self, group: Group) -> None:
        index, running = len(self.groups), {}
        self.groups.append(group)
        self._running.append(running)
        if group.is_complete:  # it was carried because others were selected before it
            group.rewards = self._score(group)
            return
        for response, job in zip(group.responses, self._jobs(index, group), strict=True):
            if response.finish_reason is not None:
                continue
            progress = None
            if response.token_ids:
                progress = Progress(
                    list(response.token_ids),
                    list(response.logprobs),
                    [],
                    response.transformed_logprobs,
                    response.records,
                )
            sequence = self.engine.add(job, progress)
            running[sequence], self._group_of[sequence] = response, index

    def _finish(self, event: Finished) -> None:
        index = self._group_of.pop(event.sequence)
        position = self.groups[index].position
        require_valid([event.sample], lambda _: f"the rollout of problem {position} in the data")
        response = self._running[index].pop(event.sequence)
        self._take(response, event.sample, finished=True)
        if event.verdict is not None:
            response.reward, response.failed = event.verdict
        group = self.groups[index]
        if group.is_complete:
            group.rewards = self._score(group)

    def _take(self, response: Response, sample: SampleOutput, finished: bool) -> None:
        versions = {version for _, version in sample.weight_versions}
        if versions - {self.engine.version}:
            raise RuntimeError(
                f"expected all tokens of a step from version {self.engine.version} of the weights, "
                f"got some of {sorted(versions)}; set_params() belongs between steps"
            )
        response.update(sample, finished)
        self.totals.count_rounds(sample.stats)
        self.totals.longest = max(self.totals.longest, response.num_new)

    def _trim(self, budget: int) -> None:
        """Stops samples that have as many tokens as the budget, which will not rise."""
        for index, running in enumerate(self._running):
            long_enough = []
            for sequence, response in running.items():
                new = max(0, len(sequence.tokens) - response.num_carried)
                response.emitted = max(response.emitted, new)
                if new >= budget:
                    long_enough.append(sequence)
            if not self.partial and self.groups[index].status().at_least > budget:
                self._stop([index])
            for sequence in long_enough:
                self._abort(index, sequence)

    def _must_go_on(self, selection: Selection) -> bool:
        """Stops what a final selection leaves out, and returns whether anything else runs."""
        first = selection.candidates if self.partial else 0
        self._stop(range(first, len(self.groups)))
        return any(self._running[:first])

    def _stop(self, indices: Iterable[int]) -> None:
        for index in indices:
            for sequence in list(self._running[index]):
                self._abort(index, sequence)

    def _abort(self, index: int, sequence: Added) -> None:
        response = self._running[index].pop(sequence, None)
        sample = response and self.engine.abort(sequence)
        if sample is not None:
            del self._group_of[sequence]
            self._take(response, sample, finished=False)


def about_long(rule: Rule, groups: Sequence[Group]) -> str:
    """The warning of a step that goes on replacing groups, with what it has found so far."""
    complete = [group for group in groups if group.rewards is not None]
    alike = Counter(g.rewards[0] for g in complete if not g.status().informative)
    values = ", ".join(f"{reward:g} in {count}" for reward, count in alike.most_common(3))
    more = ", ..." if len(alike) > 3 else ""
    limit = "algo.max_num_gen_batches=0 sets no limit"
    if rule.max_candidates is not None:
        limit = f"algo.max_num_gen_batches={rule.batches} lets it look at {rule.max_candidates}"
    return (
        f"step {groups[-1].step} has looked at {len(groups)} groups, of which {len(complete)} are "
        f"complete, and is not full: {len(complete) - alike.total()} have differing rewards, of "
        f"rollout.prompts={rule.prompts} that it needs; in {alike.total()} all rewards are equal "
        f"({values or 'none'}{more}) and give no gradient. It goes on, and {limit}. Is the task "
        "too hard or too easy for the policy, or does the reward not see the difference?"
    )


def group_seed(run_seed: int, step: int, position: int) -> int:
    """A 64-bit seed for one group.

    It depends on the group's position in the order of draws, and not on the problem, for a small
    data set may hand out one problem twice in a step, and the two groups must not share their
    noise.
    """
    text = f"{run_seed}:{step}:{position}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def group_params(cfg: RLConfig, step: int, position: int) -> SamplingParams:
    """How the samples of one group are drawn."""
    processed = cfg.algo.logprobs == "processed"
    return cfg.rollout.sampling_params(
        group_seed(cfg.seed, step, position), cfg.rollout.n, processed
    )


class ResponseText:
    """The text of a response, which rewards see: without special tokens, and cut where one of the
    rollout's stop strings ends it.

    Its tokens alone decide it, wherever and in how many pieces they were sampled.
    """

    def __init__(self, tokenizer, params: SamplingParams):
        self._tokenizer, self._params = tokenizer, params
        self._name = functools.cache(functools.partial(special_name, tokenizer))

    def __call__(self, tokens: Sequence[int]) -> str:
        params, cut = self._params, None
        if params.stop:
            include = params.include_stop_str_in_output
            cut = StopStrings(
                params.stop, self._decode, include, params.min_tokens, self._name
            ).feed(tokens)
        return self._decode(tokens) if cut is None else cut.text

    def _decode(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=True)


def evaluate(
    engine: Engine,
    prompts: Prompts,
    heldout: Sequence[Problem],
    eos_ids: Sequence[int],
    scorer: Scorer,
    cfg: RLConfig,
) -> dict[str, float]:
    """Scores a policy, which the engine has, on the first `eval.problems` held-out problems.

    One response to each is sampled as the rollout samples (temperature, filters, penalties, bias,
    stops), with seeds that are the same every time. Problems whose prompts are dropped for their
    length are left out.
    """
    problems = [heldout[i] for i in range(min(cfg.eval.problems, len(heldout)))]
    looked_at = [(problem, *prompts.look(problem)) for problem in problems]
    fitting = [(problem, ids) for problem, ids, _ in looked_at if ids is not None]
    jobs = []
    for problem, ids in fitting:
        params = cfg.rollout.sampling_params(cfg.eval.seed + problem.index)
        jobs += make_jobs(ids, params, eos_ids, prompts.tokenizer, request=len(jobs))
    samples, totals = engine.generate(jobs)
    require_valid(samples, lambda index: f"prompt {index}")
    text = ResponseText(prompts.tokenizer, cfg.rollout.sampling_params())
    scores = [
        scorer(text(sample.token_ids), problem)
        for (problem, _), sample in zip(fitting, samples, strict=True)
    ]
    return {
        "eval/reward": float(np.mean([score.value for score in scores])),
        "eval/problems": float(len(fitting)),
        "eval/prompts_overlong": float(sum(why is not None for _, _, why in looked_at)),
        "eval/reward_failed": float(sum(score.failed for score in scores)),
        "eval/response_length_mean": totals.tokens / max(len(fitting), 1),
        "time/eval": totals.seconds,
    }


def to_samples(
    groups: Sequence[Group], advantages: Float[np.ndarray, "P G"], step: int | None = None
) -> list[Sample]:
    """Training samples in (group, sample) order.

    Args:
      groups: P complete ones of G samples. advantages: see `specjax.interfaces.Objective`.
      step: that trains on them; tokens that earlier steps sampled are stale. None: none is.

    Raises:
      ValueError: advantages of another shape than the rewards.
    """
    shape = (len(groups), len(groups[0].responses))
    if np.shape(advantages) != shape:
        raise ValueError(
            f"algo.objective: expected advantages of the shape of the rewards, {shape}, got "
            f"{np.shape(advantages)}"
        )
    samples = []
    for p, group in enumerate(groups):
        for g, response in enumerate(group.responses):
            sample = Sample(
                sample_id=len(samples),
                prompt_ids=group.prompt,
                response_ids=response.token_ids,
                behaviour_logprobs=response.behaviour_logprobs,
                loss_mask=response.loss_mask,
                advantage=float(advantages[p, g]),
                records=response.records,
            )
            if step is not None:
                sample.staleness = response.staleness(step)
                sample.old_logprobs = np.zeros(len(response.token_ids), np.float32)
                sample.old_logprobs[: len(response.old_logprobs)] = response.old_logprobs
            samples.append(sample)
    return samples


def score_new_tokens(
    groups: Sequence[Group],
    logprobs: Callable[[PackedBatch], np.ndarray],
    row_length: int,
    rows: int,
) -> None:
    """Sets `old_logprobs` of carried responses for the tokens of this step, before the update.

    The engine's log-probabilities would do but for their last bits, which depend on the program
    that decoded the token, and so on time where a controller chooses it. The trainer's depend on
    tokens and weights alone.

    Args:
      logprobs: scores a packed micro-batch [R S] with the weights of the step.
    """
    responses = [r for group in groups for r in group.responses]
    prompts = [group.prompt for group in groups for _ in group.responses]
    samples = [
        Sample(i, prompt, response.token_ids, records=response.records)
        for i, (prompt, response) in enumerate(zip(prompts, responses, strict=True))
        if response.num_new
    ]
    if not samples:
        return
    for batch in pack(samples, row_length, rows):
        scored, generated = logprobs(batch), batch["loss_mask"] > 0
        for index in np.unique(batch["sample_ids"][generated]).tolist():
            response, carried = responses[index], responses[index].num_carried
            own = scored[generated & (batch["sample_ids"] == index)]
            response.old_logprobs = response.old_logprobs[:carried] + own[carried:].tolist()


# --- metrics ---------------------------------------------------------------------------------


def tokens_digest(groups: Iterable[Group]) -> str:
    """A digest of the token ids of all samples in order: equal digests, equal rollouts."""
    found = hashlib.blake2b(digest_size=8)
    for group in groups:
        for response in group.responses:
            ids = response.token_ids
            found.update(np.asarray([len(ids), *ids], "<i4").tobytes())
    return found.hexdigest()


def selection_metrics(
    ended: StepGroups, stale: Sequence[Group], budget: int | None, step: int
) -> dict[str, float | str]:
    """What became of the groups of a step, and by how much it preferred short ones.

    `rollout/length_bias` is the mean length in selected groups less the mean over all groups that
    were started, where samples that have not ended count as long as they are: they would have
    become longer, so the real bias is larger.

    Args:
      stale: groups that were dropped before it began. budget: of the step, if it had one.
    """
    selected = [ended.complete[i] for i in ended.selected]
    rest = [g for i, g in enumerate(ended.complete) if i not in ended.selected]
    rest += [*ended.carried, *ended.unfinished, *stale]
    metrics: dict[str, float | str] = {
        "rollout/groups_drawn": float(ended.drawn),
        "rollout/groups_selected": float(len(selected)),
        "rollout/groups_carried": float(len(ended.carried)),
        "rollout/groups_dropped": float(ended.dropped),
        "rollout/groups_dropped_stale": float(len(stale)),
        "rollout/tokens_cut": float(ended.cut),
    }
    if budget is not None:
        metrics["rollout/budget"] = float(budget)
    lengths = [
        np.array([len(r.token_ids) for group in groups for r in group.responses])
        for groups in (selected, rest)
    ]
    if len(lengths[1]):
        metrics["rollout/unselected_emitted_mean"] = float(lengths[1].mean())
    if not len(lengths[0]):
        return metrics
    metrics["rollout/selected_length_mean"] = mean = float(lengths[0].mean())
    metrics["rollout/length_bias"] = mean - float(np.concatenate(lengths).mean())
    staleness = np.concatenate([r.staleness(step) for group in selected for r in group.responses])
    metrics["rollout/stale_token_share"] = float((staleness > 0).mean())
    metrics["rollout/staleness_mean"] = float(staleness.mean())
    return metrics


def rollout_metrics(
    groups: Sequence[Group], totals: Totals, devices: int
) -> dict[str, float | str]:
    """Rewards, lengths, speed and acceptance of complete groups, under the usual names."""
    samples = [r for group in groups for r in group.responses]
    rewards = np.array([group.rewards for group in groups])
    lengths = np.array([len(s.token_ids) for s in samples])
    rate = totals.tokens / max(totals.seconds, 1e-9)
    metrics = {
        "rollout/reward": float(rewards.mean()),
        "rollout/zero_std": float(zero_variance_groups(rewards).mean()),
        "rollout/response_length_mean": float(lengths.mean()),
        "rollout/response_length_max": float(lengths.max()),
        "rollout/truncated_ratio": float(np.mean([s.finish_reason == "length" for s in samples])),
        "rollout/tokens": float(totals.tokens),
        "rollout/tokens_sha": tokens_digest(groups),
        "rollout/tokens_per_sec": rate,
        "rollout/tokens_per_gpu_per_sec": rate / devices,
        "rollout/longest_sample_tokens_per_sec": totals.longest / max(totals.seconds, 1e-9),
        "rollout/logprob_mean": float(
            np.mean(np.concatenate([s.behaviour_logprobs for s in samples]))
        ),
    }
    if totals.steps and totals.rounds:  # a step may live on what was carried alone
        metrics["rollout/spec_accept_length"] = totals.accept_length
        metrics["rollout/spec_accept_rate"] = totals.accept_rate
        metrics["rollout/drafted_share"] = totals.drafted_rounds / totals.rounds
        if totals.drafted_rounds:
            metrics["rollout/drafted_accept_length"] = totals.drafted_accept_length
        for depth, rate in enumerate(totals.per_depth(), start=1):
            if np.isfinite(rate):  # else no tree of this step was so deep
                metrics[f"rollout/accept_rate_depth_{depth}"] = rate
    return metrics
