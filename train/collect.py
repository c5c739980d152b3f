"""Rollouts of training: problems become groups of scored samples, and these training samples.

`Rollouts` holds the state between steps: the position in the data, and the carried groups.
`StepRollout` runs one step: it adds samples to an engine until the rule of `train.groups` has a
final selection. Seeds alone decide the tokens: the seed of a group is made of run seed, step and
the group's position in the order of draws, and the request key of that seed, the prompt and the
sample index. The number of slots, the order of samples and speculation decide only the duration of
a step.
"""

from __future__ import annotations

import concurrent.futures
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
from specjax.engine.sequence import Sample as Added
from specjax.engine.text import StopStrings
from specjax.parallel import distributed
from specjax.tokenizer import decode
from train.algo import REWARD, FilterGroups
from train.groups import (
    Filter,
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
from train.scoring import (
    GoldAnswers,
    SampleFacts,
    Score,
    ScoreOfOne,
    Scorer,
    Scoring,
    zero_reward_example,
)
from train.tasks.layout import Problem

# A step that keeps replacing groups warns each time it has started this many batches of groups.
WARN_EVERY = 10

log = logging.getLogger(__name__)


class Rollouts:
    """The rollouts of a run, step by step.

    Args:
      cfg: settings of the run.
      order: problems in the order of draws.
      prompts: encoder of their prompts.
      eos_ids: tokens that end a response.
      scorer: reward.

    Attributes:
      rule: rule that selects the groups of a step.
      position: place in the order of draws from which the next problem is drawn.
      carried: groups that the next step continues; checkpoints keep them.
      short: warning that the last step had fewer groups to train on than it needs; None if it had
        enough.
      zero: example of a response that scored 0, as (text, problem, whether it was cut off); None
        once a response has scored anything else.
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
        self._text = ResponseText(prompts.tokenizer, roll.sampling_params(), eos_ids)
        self.rule = Rule(
            roll.prompts,
            roll.in_flight,
            algo.dynamic_sampling,
            max(algo.max_num_gen_batches, 0),
            group_filter(algo.filter_groups, scorer),
        )
        self._golds = GoldAnswers(scorer) if cfg.data.unwinnable == "drop" else None
        self._ahead = 0  # the place before which all gold answers are checked, or being checked
        self.position = 0
        self.carried: list[Group] = []
        self.zero: tuple[str, Problem, bool] | None = None
        self._any_reward = False
        self.short: str | None = None
        self._problems: dict[int, Problem] = {}  # the step's problems, by index of the group
        self._scoring: dict[int, Scoring] = {}  # rewards of the step's groups, by their positions
        self._begun: list[ScoreOfOne] = []  # those of the step's single samples
        self._kept: tuple[Group, ...] = ()  # the last step's complete and carried groups
        # Why the problem at a position of the step was dropped or cut; None if it was not.
        self._dropped: dict[int, str | None] = {}

    def collect(
        self, engine: Engine, step: int
    ) -> tuple[list[Group], list[Group], dict[str, float | str]]:
        """Runs a step's rollout.

        Returns:
          (groups that are complete and not carried, those of them to train on, metrics).
        """
        roll = self.cfg.rollout
        carried, stale = begin_step(self.carried, step, roll.max_staleness)
        start = self._at = self.position
        self._dropped = {}
        run = StepRollout(
            engine,
            self.rule,
            roll.partial,
            carried,
            lambda: self._draw(step),
            self._start_jobs,
            self._score,
            self._begin_score,
            self._wait_for_score,
        )
        try:
            selection = run.run()
        finally:
            for scoring in (*self._scoring.values(), *self._begun):
                scoring.cancel()
            self._scoring, self._begun = {}, []
        ended = end_step(
            self.rule, run.groups, selection, step, roll.partial, self._scorer.is_batch
        )
        drawn = run.groups[len(carried) : selection.candidates]
        self.position = drawn[-1].next_position if drawn else start
        self.carried = ended.carried
        self.short = self._short_warning(len(ended.selected), selection.candidates)
        self._kept = (*ended.complete, *ended.carried)
        run.totals.tokens = sum(r.num_new for group in self._kept for r in group.responses)
        metrics = rollout_metrics(ended.complete, run.totals, self.cfg.rollout_devices)
        metrics |= selection_metrics(ended, stale, selection.budget, step)
        metrics |= self._reward_metrics(ended.complete) | self._prompt_metrics()
        if roll.partial:
            metrics["rollout/carried_sha"] = tokens_digest(ended.carried)
        return ended.complete, [ended.complete[i] for i in ended.selected], metrics

    def begun(self) -> list[tuple[Job, list[int]]]:
        """The samples of complete and carried groups that the last step began, as (job, tokens).

        The job's request is the position of the group, and it ends where the step cut the sample.
        """
        found = []
        for group in self._kept:
            jobs = self._jobs(group.position, group)
            for response, job in zip(group.responses, jobs, strict=True):
                if response.num_carried == 0 and response.num_new:
                    if response.finish_reason is None:
                        limit = len(job.prompt) + len(response.token_ids)
                        job = dataclasses.replace(job, limit=limit)
                    found.append((job, response.token_ids))
        return found

    def state(self) -> dict[str, Any]:
        """The state between steps, as JSON for a checkpoint's metadata."""
        return {
            "position": self.position,
            "carried": [group.to_json() for group in self.carried],
            "any_reward": self._any_reward,
            "undecided": sorted(self._golds.undecided) if self._golds else [],
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restores the state from the return value of `state`."""
        self.position = state["position"]
        # Checkpoints of an older version do not have it; then no such warning is printed.
        self._any_reward, self.zero = state.get("any_reward", True), None
        if self._golds is not None:  # nor these
            self._golds.keep(state.get("undecided", ()))
        self.carried = []
        for saved in state["carried"]:
            problem = self._order[saved["place"]]
            prompt = self._prompts.ids(problem)
            self.carried.append(Group.from_json(saved, problem, prompt))

    def _draw(self, step: int) -> Group:
        """Draws the next problem that can be used, as a group without samples.

        Raises:
          ConfigError: many problems in a row cannot be used.
        """
        passed = 100 * self.rule.prompts
        for position in range(self._at, self._at + passed + 1):
            problem = self._order[position]
            ids, why = self._prompts.fit(problem)
            self._dropped[position] = why
            if ids is not None and not self._is_dropped(position):
                self._at = position + 1
                responses = [Response() for _ in range(self.cfg.rollout.n)]
                return Group(position, position + 1, step, problem, ids, responses)
            self._dropped[position] = why or "unwinnable"
        raise ConfigError(
            f"{passed + 1} rows in a row cannot be used: their prompts are longer than "
            f"rollout.max_prompt_tokens = {self.cfg.rollout.max_prompt_tokens}, or the reward "
            f"{self._scorer.name} cannot be won; raise it, or see `python -m "
            "train.data`"
        )

    def _is_dropped(self, position: int) -> bool:
        """Whether the problem at this place is left out because its reward cannot be 1.

        Rows after it, as many as two steps begin with, are checked in workers meanwhile.
        """
        if self._golds is None:
            return False
        if distributed.is_first():
            end = min(position + 1 + 2 * self.rule.in_flight, len(self._order))
            for place in range(max(position, self._ahead), end):
                if self._fits(self._order[place]):
                    self._golds.begin(self._order[place])
            self._ahead = max(end, self._ahead)
        # A comparison may be late in one process alone, and all have to draw the same rows.
        lost = functools.partial(self._golds.are_lost, self._order[position])
        return distributed.of_first(lost, "gold answers")

    def _fits(self, problem: Problem) -> bool:
        """Whether a problem is not left out because of its prompt; errors are for its draw."""
        try:
            return self._prompts.fit(problem)[0] is not None
        except ValueError:
            return False

    def _prompt_metrics(self) -> dict[str, float]:
        """The numbers of problems that this step dropped, or cut because of their length."""
        why = [why for at, why in self._dropped.items() if at < self.position]
        names = {"overlong": "rollout/prompts_overlong", "unwinnable": "rollout/prompts_unwinnable"}
        return {name: float(why.count(key)) for key, name in names.items()}

    def zero_reward_example(self) -> str | None:
        """An example for a warning while every response of the run scored 0; None afterwards."""
        return None if self.zero is None else zero_reward_example(self._scorer, *self.zero)

    def _short_warning(self, selected: int, candidates: int) -> str | None:
        """The warning that dynamic sampling did not fill the step; None if it did."""
        if selected >= self.rule.prompts:
            return None
        kept = "" if self.rule.filter == Filter() else " and pass algo.filter_groups"
        return (
            f"{selected} groups of {candidates} have differing rewards{kept}, fewer than "
            f"rollout.prompts={self.rule.prompts}, and algo.max_num_gen_batches="
            f"{self.rule.batches} allows no more groups: the policy is trained on these alone. "
            "Raise it (0: no limit), or is the task too hard or too easy for the policy?"
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
        scores = [Score(r.reward or 0.0, r.failed, r.parts) for r in responses]
        means = self._scorer.part_means(scores)
        return {
            "reward/failed": float(failed),
            "reward/failed_share": failed / max(len(responses), 1),
            **{f"reward/{label}": mean for label, mean in means.items()},
            **self._reward_figures(),
        }

    def _reward_figures(self) -> dict[str, float]:
        """`Scorer.metrics` of all processes: sums, and of the seconds waited the most."""
        every = distributed.gather(self._scorer.metrics(), "figures of rewards")
        found = {name: sum(figures[name] for figures in every) for name in every[0]}
        found["time/reward_wait"] = max(figures["time/reward_wait"] for figures in every)
        return found

    def _jobs(self, request: int, group: Group) -> list[Job]:
        """The samples of a group as jobs, in order, with the number of their request."""
        params = group_params(self.cfg, group.step, group.position)
        return make_jobs(
            group.prompt, params, self._eos_ids, self._prompts.tokenizer, request=request
        )

    def _start_jobs(self, index: int, group: Group) -> list[Job]:
        """`_jobs` of a group of the running step, whose samples `score_sample` will score."""
        self._problems[index] = group.problem
        return self._jobs(index, group)

    def score_sample(self, job: Job, sample: SampleOutput) -> ScoreOfOne | None:
        """Begins to score a sample of this step in the process that its engine belongs to.

        Returns:
          The score, perhaps not known yet; None if a reward needs all samples of the group.
        """
        if self._scorer.is_batch:
            return None
        facts = SampleFacts(job.sample, sample.token_ids, sample.finish_reason)
        text = self._text(sample.token_ids)
        self._begun.append(self._scorer.begin_one(text, self._problems[job.request], facts))
        return self._begun[-1]

    def _begin_score(self, group: Group, place: int) -> None:
        """Begins to score a response that has ended, while others of its group are sampled."""
        response = group.responses[place]
        response.text = self._text(response.token_ids)
        if response.reward is None and not distributed.is_several():
            self._scoring_of(group).add(place, response.text, _facts(group, place))

    def _scoring_of(self, group: Group) -> Scoring:
        if group.position not in self._scoring:
            self._scoring[group.position] = self._scorer.begin(group.problem)
        return self._scoring[group.position]

    def _score(self, group: Group) -> list[float] | None:
        """Sets text and reward of all responses of a complete group, and returns the rewards.

        Returns:
          The rewards; None while they are computed in workers.
        """
        scoring = self._scoring_of(group)
        for place, response in enumerate(group.responses):
            if place not in scoring:
                response.text = self._text(response.token_ids)
        left = [i for i, r in enumerate(group.responses) if r.reward is None and i not in scoring]

        def computed() -> dict[int, Score] | None:
            for place in left:
                scoring.add(place, group.responses[place].text, _facts(group, place))
            scoring.finish()
            return None if scoring.futures() else scoring.scores()

        if not distributed.is_several():
            scores = computed()
        elif any(response.reward is None for response in group.responses):
            # Engines of all processes go on with equal rewards: those that the first one computes.
            scores = distributed.of_first(computed, "rewards")
        else:  # each was scored where it was sampled
            scores = {}
        if scores is None:
            return None
        self._set_scores(group, scores)
        return [response.reward for response in group.responses]

    def _set_scores(self, group: Group, scores: Mapping[int, Score]) -> None:
        for place, score in scores.items():
            response = group.responses[place]
            response.reward, response.failed, response.parts = score

    def _wait_for_score(self, groups: Sequence[Group]) -> None:
        """Waits until a call of a reward for one of these groups has ended."""
        started = time.perf_counter()
        futures = set().union(*(self._scoring_of(group).futures() for group in groups))
        if futures:
            concurrent.futures.wait(futures, return_when=concurrent.futures.FIRST_COMPLETED)
        self._scorer.waited(time.perf_counter() - started)


def _facts(group: Group, place: int) -> SampleFacts:
    response = group.responses[place]
    return SampleFacts(place, response.token_ids, response.finish_reason)


class StepRollout:
    """Runs the groups of one step through the engine.

    Args:
      engine: engine without samples.
      rule: rule that selects groups.
      partial: whether incomplete groups will be carried to the next step.
      carried: groups to continue, see `begin_step`.
      draw: function that returns the next group.
      jobs: function that returns the samples of a group, with its index, as jobs in order.
      score: function that scores all responses of a complete group, and returns their rewards;
        None while they are not known yet.
      begin_score: function of a group and the place of its response that has ended, which may begin
        to score it; None if nothing is to be done.
      wait: function that waits until more is known of groups whose rewards are not known; None if
        `score` always returns rewards.

    Attributes:
      groups: the candidates in order, and groups beyond them that were started.
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
        score: Callable[[Group], list[float] | None],
        begin_score: Callable[[Group, int], None] | None = None,
        wait: Callable[[Sequence[Group]], None] | None = None,
    ):
        self.engine, self.rule, self.partial = engine, rule, partial
        self._draw, self._jobs, self._score = draw, jobs, score
        self._begin_score, self._wait = begin_score, wait
        self._unscored: list[Group] = []  # complete groups whose rewards are not known yet
        self._carried = list(carried)
        self.groups: list[Group] = []
        self._running: list[dict[Added, Response]] = []  # running samples of each group
        self._group_of: dict[Added, int] = {}
        steps = engine.runner.steps
        self.totals = Totals(steps, np.zeros(steps + 2, np.int64))

    def run(self) -> Selection:
        """Runs until the selection is final and carried samples have reached the step's budget.

        Raises:
          ValueError: a job does not fit the engine.
          RuntimeError: the engine's weights changed.
        """
        start = time.perf_counter()
        try:
            for group in self._carried:
                self._start(group)
            while not (selection := self._select()).final or self._must_go_on(selection):
                for event in self.engine.step():
                    self._finish(event)
                self._take_scores()
            self._stop(range(len(self.groups)))
            while self.engine.has_work:
                self.engine.step()
        except BaseException:
            self.engine.clear()  # an interrupted step leaves nothing behind
            raise
        self.totals.seconds = time.perf_counter() - start
        return selection

    def _select(self) -> Selection:
        """Starts the groups that the selection needs, and stops samples beyond its budget."""
        selection = self._selection()
        while len(self.groups) < selection.candidates:
            if self.groups and len(self.groups) % (WARN_EVERY * self.rule.in_flight) == 0:
                if distributed.is_first():
                    log.warning("%s", long_step_warning(self.rule, self.groups))
            self._start(self._draw())
        if selection.budget is not None:
            self._trim(selection.budget)
        return self._selection()

    def _selection(self) -> Selection:
        return select(self.rule, [group.status(self.rule.filter) for group in self.groups])

    def _start(self, group: Group) -> None:
        """Adds the samples of a group to the engine."""
        index, running = len(self.groups), {}
        self.groups.append(group)
        self._running.append(running)
        if group.is_complete:  # carried complete, because others were selected before it
            self._complete(group)
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
                    response.origins,
                )
            sequence = self.engine.add(job, progress)
            running[sequence], self._group_of[sequence] = response, index

    def _finish(self, event: Finished) -> None:
        """Records a sample that has ended, and scores its group when it is complete."""
        index = self._group_of.pop(event.sequence)
        position = self.groups[index].position
        require_valid([event.sample], lambda _: f"the rollout of problem {position} in the data")
        response = self._running[index].pop(event.sequence)
        self._record(response, event.sample, finished=True)
        group = self.groups[index]
        if event.verdict is not None:
            response.reward, response.failed, response.parts = event.verdict
        elif self._begin_score is not None:
            place = next(i for i, other in enumerate(group.responses) if other is response)
            self._begin_score(group, place)
        if group.is_complete:
            self._complete(group)

    def _complete(self, group: Group) -> None:
        """Scores a complete group, or notes that its rewards are not known yet."""
        group.rewards = self._score(group)
        if group.rewards is None:
            self._unscored.append(group)

    def _take_scores(self) -> None:
        """Takes the rewards that have become known; waits for one if no sample runs."""
        waiting, self._unscored = self._unscored, []
        for group in waiting:
            self._complete(group)
        if self._unscored and not self.engine.has_work:
            self._wait(self._unscored)

    def _record(self, response: Response, sample: SampleOutput, finished: bool) -> None:
        """Copies an engine's output to the response."""
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
        """Stops samples that have as many tokens as the budget, which can only fall."""
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
        """Stops groups outside of a final selection, and returns whether others run."""
        first = selection.candidates if self.partial else 0
        self._stop(range(first, len(self.groups)))
        return any(self._running[:first])

    def _stop(self, indices: Iterable[int]) -> None:
        """Stops all samples of groups."""
        for index in indices:
            for sequence in list(self._running[index]):
                self._abort(index, sequence)

    def _abort(self, index: int, sequence: Added) -> None:
        response = self._running[index].pop(sequence, None)
        sample = response and self.engine.abort(sequence)
        if sample is not None:
            del self._group_of[sequence]
            self._record(response, sample, finished=False)


def long_step_warning(rule: Rule, groups: Sequence[Group]) -> str:
    """The warning that a step keeps replacing groups, with its rewards so far."""
    complete = [group for group in groups if group.rewards is not None]
    useless = [group for group in complete if not group.status(rule.filter).informative]
    alike = Counter(g.rewards[0] for g in useless if not g.status().informative)
    values = ", ".join(f"{reward:g} in {count}" for reward, count in alike.most_common(3))
    more = ", ..." if len(alike) > 3 else ""
    filtered = len(useless) - alike.total()
    others = f", and algo.filter_groups leaves out {filtered} more" if filtered else ""
    limit = "algo.max_num_gen_batches=0 sets no limit"
    if rule.max_candidates is not None:
        limit = f"algo.max_num_gen_batches={rule.batches} allows {rule.max_candidates} groups"
    return (
        f"step {groups[-1].step} has started {len(groups)} groups, of which {len(complete)} are "
        f"complete, and is not full: {len(complete) - alike.total()} have differing rewards, of "
        f"rollout.prompts={rule.prompts} that it needs; in {alike.total()} all rewards are equal "
        f"({values or 'none'}{more}) and give no gradient{others}. It goes on, and {limit}. Is the "
        "task too hard or too easy for the policy, or does the reward not see the difference?"
    )


def group_filter(cfg: FilterGroups, scorer: Scorer) -> Filter:
    """The filter of a step's groups, which are scored by `scorer`."""
    if cfg.metric == REWARD or len(scorer.labels) == 1:
        return Filter(None, cfg.min, cfg.max)
    return Filter(scorer.labels.index(cfg.metric), cfg.min, cfg.max)


def group_seed(run_seed: int, step: int, position: int) -> int:
    """A 64-bit seed for one group.

    It depends on the group's position in the order of draws, and not on the problem: a small data
    set may give one problem twice in a step, and the two groups must not share their noise.
    """
    text = f"{run_seed}:{step}:{position}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def group_params(cfg: RLConfig, step: int, position: int) -> SamplingParams:
    """The sampling parameters of one group."""
    processed = cfg.algo.logprobs == "processed"
    return cfg.rollout.sampling_params(
        group_seed(cfg.seed, step, position), cfg.rollout.n, processed
    )


class ResponseText:
    """Decodes a response to the text that rewards see.

    The text has special tokens, such as `<think>` where that is one, but not those that begin or
    end a sample or pad it. It ends at one of the rollout's stop strings, if any. It depends on the
    tokens alone.

    Args:
      tokenizer: tokenizer of the policy.
      params: how responses are sampled.
      eos_ids: end-of-sequence tokens of the policy.
    """

    def __init__(self, tokenizer, params: SamplingParams, eos_ids: Sequence[int] = ()):
        self._tokenizer, self._params = tokenizer, params
        named = (getattr(tokenizer, f"{name}_token_id", None) for name in ("bos", "eos", "pad"))
        self._hidden = frozenset((*named, *eos_ids, *params.stop_token_ids))
        self._name = functools.cache(self._name_of)

    def __call__(self, tokens: Sequence[int]) -> str:
        params = self._params
        if params.stop:
            include = params.include_stop_str_in_output
            plain = functools.partial(decode, self._tokenizer)
            stops = StopStrings(params.stop, plain, include, params.min_tokens, self._name)
            if stops.feed(tokens) is not None:
                return stops.named
        shown = [token for token in tokens if token not in self._hidden]
        return decode(self._tokenizer, shown, skip_special_tokens=False)

    def _name_of(self, token: int) -> str:
        return "" if token in self._hidden else special_name(self._tokenizer, token)


def to_samples(
    groups: Sequence[Group], advantages: Float[np.ndarray, "P G"], step: int | None = None
) -> list[Sample]:
    """Makes training samples, in (group, sample) order.

    Args:
      groups: P complete groups of G samples.
      advantages: advantages of the objective, see `specjax.interfaces.Objective`; each is a number,
        or an array of the response's tokens.
      step: step that trains on them, so that tokens of earlier steps are stale; None if no token is
        stale.

    Raises:
      ValueError: the advantages have another shape than the rewards.
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
                advantage=advantages[p, g],
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
    rows: Sequence[int],
) -> None:
    """Sets `old_logprobs` of carried responses for the tokens of this step, before the update.

    The last bits of the engine's log-probabilities depend on the program that decoded the token,
    and so on time if a controller chooses it. The trainer's depend on tokens and weights alone.

    Args:
      groups: groups that are carried.
      logprobs: function that scores a packed micro-batch [R S] with the weights of the step.
      row_length: number of tokens per row.
      rows: numbers of rows that a micro-batch may have.
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
    """A digest of the token ids of all samples in order; it is equal for equal rollouts."""
    found = hashlib.blake2b(digest_size=8)
    for group in groups:
        for response in group.responses:
            ids = response.token_ids
            found.update(np.asarray([len(ids), *ids], "<i4").tobytes())
    return found.hexdigest()


def selection_metrics(
    ended: StepGroups, stale: Sequence[Group], budget: int | None, step: int
) -> dict[str, float | str]:
    """Metrics of a step's selection of groups, and of its preference for short ones.

    `rollout/length_bias` is the mean length in selected groups minus the mean over all started
    groups. Samples that have not ended count with their length so far, so the real bias is larger.

    Args:
      ended: groups of the step.
      stale: groups that were dropped before the step began.
      budget: budget of the step, if it had one.
      step: number of the step.
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
    """Metrics of complete groups: rewards, lengths, speed and acceptance."""
    samples = [r for group in groups for r in group.responses]
    rewards = np.array([group.rewards for group in groups])
    lengths = np.array([len(s.token_ids) for s in samples])
    rate = totals.tokens / max(totals.seconds, 1e-9)
    metrics = {
        "rollout/reward": float(rewards.mean()),
        # One sample has no other that it could be equal to.
        "rollout/zero_std": float(zero_variance_groups(rewards).mean()) * (rewards.shape[1] > 1),
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
    if totals.steps and totals.rounds:  # 0 if the step only has carried samples
        metrics["rollout/spec_accept_length"] = totals.accept_length
        metrics["rollout/spec_accept_rate"] = totals.accept_rate
        metrics["rollout/drafted_share"] = totals.drafted_rounds / totals.rounds
        if totals.drafted_rounds:
            metrics["rollout/drafted_accept_length"] = totals.drafted_accept_length
        for depth, rate in enumerate(totals.per_depth(), start=1):
            if np.isfinite(rate):  # not finite if no tree of the step was so deep
                metrics[f"rollout/accept_rate_depth_{depth}"] = rate
    return metrics
