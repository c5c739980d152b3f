"""The rule of `train.groups` at work: keeps an engine busy until the choice of a step is certain.

`Collection` is one step; `Rollouts` has what outlives it: the place in the data, and the groups
that are carried. Whatever the engine does in between (how many slots it has, which samples it
starts first, how it speculates) decides how long that takes, and never what comes out.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from specjax.command_line import ConfigError
from specjax.engine.engine import Engine
from specjax.engine.request import Finished, Job, SampleOutput, Totals, make_jobs, require_valid
from specjax.engine.sequence import Progress
from specjax.parallel import distributed
from train.exact import up_to
from train.groups import Choice, Group, Response, Rule, decide, reopen, settle
from train.prompts import Prompts
from train.rollout import (
    ResponseText,
    Rollout,
    digest,
    group_params,
    rollout_metrics,
    selection_metrics,
)
from train.schema import RLConfig
from train.scoring import Score, Scorer, about_zero, unwinnable
from train.tasks.layout import Problem

# Batches of groups that a step looks at before it says that it is not full, and before it says so
# again.
_PATIENCE = 10

log = logging.getLogger(__name__)


class Collection:
    """The groups of one step, on their way through the engine.

    Args:
      engine: nothing waits or runs in it; nor does it afterwards.
      partial: groups that are not complete in the end will be carried.
      carried: groups to go on with, opened (see `reopen`).
      draw: gives the next group. jobs: gives the samples of a group as jobs, in order.
      score: sets `text` of all responses of a complete group, and gives their rewards.

    Attributes:
      groups: the candidates in order, those that may turn out not to count included.
      totals: rounds of all samples; `tokens` and `seconds` are left to the caller and to `run`.
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
        self._running: list[dict[int, Response]] = []  # by ticket, for each group
        self._group_of: dict[int, int] = {}
        steps = engine.runner.steps
        self.totals = Totals(steps, np.zeros(steps + 2, np.int64))

    def run(self) -> Choice:
        """Runs until the choice is certain and what will be carried is long enough.

        Raises:
          ValueError: a job does not fit the engine. RuntimeError: the engine's weights changed.
        """
        start = time.perf_counter()
        try:
            for group in self._carried:
                self._enter(group)
            while not (choice := self._choose()).certain or self._must_go_on(choice):
                for event in self.engine.step():
                    self._finish(event)
            self._stop(range(len(self.groups)))
            while self.engine.has_work:
                self.engine.step()
        except BaseException:
            self.engine.clear()  # an interrupted step leaves nothing behind
            raise
        self.totals.seconds = time.perf_counter() - start
        return choice

    def _choose(self) -> Choice:
        """What can be said by now; draws the groups that this asks for, stops what is too long."""
        choice = self._decide()
        while len(self.groups) < choice.places:
            if self.groups and len(self.groups) % (_PATIENCE * self.rule.in_air) == 0:
                if distributed.is_first():
                    log.warning("%s", about_long(self.rule, self.groups))
            self._enter(self._draw())
        if choice.budget is not None:
            self._trim(choice.budget)
        return self._decide()

    def _decide(self) -> Choice:
        return decide(self.rule, [group.seen() for group in self.groups])

    def _enter(self, group: Group) -> None:
        index, running = len(self.groups), {}
        self.groups.append(group)
        self._running.append(running)
        if group.is_complete:  # it was carried because others were shorter, or came first
            group.rewards = self._score(group)
            return
        for response, job in zip(group.responses, self._jobs(index, group), strict=True):
            if response.finish is not None:
                continue
            progress = None
            if response.tokens:
                progress = Progress(
                    list(response.tokens),
                    list(response.logprobs),
                    [],
                    response.transformed,
                    response.records,
                )
            ticket = self.engine.add(job, progress)
            running[ticket], self._group_of[ticket] = response, index

    def _finish(self, event: Finished) -> None:
        index = self._group_of[event.ticket]
        place = self.groups[index].place
        require_valid([event.sample], lambda _: f"the rollout of problem {place} in the data")
        response = self._running[index].pop(event.ticket)
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
        response.take(sample, finished)
        self.totals.count_rounds(sample.stats)
        self.totals.longest = max(self.totals.longest, response.new)

    def _trim(self, budget: int) -> None:
        """Stops what has all the tokens that can be of use: the step's budget will not rise."""
        for index, running in enumerate(self._running):
            long_enough = []
            for ticket, response in running.items():
                new = max(0, self.engine.emitted(ticket) - response.given)
                response.emitted = max(response.emitted, new)
                if new >= budget:
                    long_enough.append(ticket)
            if not self.partial and self.groups[index].seen().least > budget:
                self._stop([index])
            for ticket in long_enough:
                self._abort(index, ticket)

    def _must_go_on(self, choice: Choice) -> bool:
        """Stops what the choice leaves out; is there anything else that runs?"""
        first = choice.places if self.partial else 0
        self._stop(range(first, len(self.groups)))
        return any(self._running[:first])

    def _stop(self, indices: Iterable[int]) -> None:
        for index in indices:
            for ticket in list(self._running[index]):
                self._abort(index, ticket)

    def _abort(self, index: int, ticket: int) -> None:
        response = self._running[index].pop(ticket, None)
        sample = response and self.engine.abort(ticket)
        if sample is not None:
            self._take(response, sample, finished=False)


def about_long(rule: Rule, groups: Sequence[Group]) -> str:
    """What a step that goes on replacing groups has found so far."""
    complete = [group for group in groups if group.rewards is not None]
    alike = Counter(g.rewards[0] for g in complete if not g.seen().informative)
    values = ", ".join(f"{reward:g} in {count}" for reward, count in alike.most_common(3))
    more = ", ..." if len(alike) > 3 else ""
    limit = "algo.max_num_gen_batches=0 sets no limit"
    if rule.most is not None:
        limit = f"algo.max_num_gen_batches={rule.batches} lets it look at {rule.most}"
    return (
        f"step {groups[-1].step} has looked at {len(groups)} groups, of which {len(complete)} are "
        f"complete, and is not full: {len(complete) - alike.total()} have differing rewards, of "
        f"rollout.prompts={rule.prompts} that it wants; in {alike.total()} all rewards are equal "
        f"({values or 'none'}{more}) and teach nothing. It goes on, and {limit}. Is the task too "
        "hard or too easy for the policy, or does the reward not see the difference?"
    )


class Rollouts:
    """The rollouts of a run, step by step.

    Args:
      order: problems in the order of draws. prompts: their token ids.
      eos_ids: tokens that end a response. scorer: the reward.

    Attributes:
      position: the next place to draw from.
      carried: groups that the next step goes on with; checkpoints keep them.
      short: why the last step had fewer groups to learn from than it wants; None: it had enough.
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
            roll.prompts, roll.in_air, algo.dynamic_sampling, max(algo.max_num_gen_batches, 0)
        )
        self.position = 0
        self.carried: list[Group] = []
        self.zero: tuple[str, Problem, bool] | None = None
        self._any_reward = False
        self.short: str | None = None
        self._problems: dict[int, Problem] = {}  # of the groups of a step, by index
        self._kept: tuple[Group, ...] = ()  # of the last step: complete, or carried
        self._looked_at: dict[int, str | None] = {}  # by place: why it was passed over, or cut

    def collect(self, engine: Engine, step: int) -> tuple[Rollout, Rollout, dict[str, float | str]]:
        """Runs a step's rollout.

        Returns:
          all groups that are complete and go no further, those of them to be trained on, metrics.
        """
        roll = self.cfg.rollout
        carried, stale = reopen(self.carried, step, roll.max_staleness)
        start = self._at = self.position
        self._looked_at = {}
        run = Collection(
            engine,
            self.rule,
            roll.partial,
            carried,
            lambda: self._draw(step),
            self._jobs,
            self._score,
        )
        choice = run.run()
        settled = settle(self.rule, run.groups, choice, step, roll.partial)
        drawn = run.groups[len(carried) : choice.places]
        self.position = drawn[-1].after if drawn else start
        self.carried = settled.carried
        self.short = self._about_short(len(settled.selected), choice.places)
        done = Rollout.of(settled.complete)
        self._kept = (*settled.complete, *settled.carried)
        run.totals.tokens = sum(r.new for group in self._kept for r in group.responses)
        metrics = rollout_metrics(done, run.totals, self.cfg.rollout_devices)
        metrics |= selection_metrics(settled, stale, choice.budget, step)
        metrics |= self._reward_metrics(settled.complete) | self._prompt_metrics()
        if roll.partial:
            metrics["rollout/carried_sha"] = digest(
                r.tokens for group in settled.carried for r in group.responses
            )
        return done, done.select(settled.selected), metrics

    def begun(self) -> list[tuple[Job, list[int]]]:
        """The samples of complete and carried groups that the last step began: each as a job, whose
        request is the place of its problem, and its tokens. Those that the step cut end there."""
        found = []
        for group in self._kept:
            for response, job in zip(
                group.responses, self._jobs_of(group, group.place), strict=True
            ):
                if response.given == 0 and response.new:
                    cut = response.finish is None
                    found.append((up_to(job, response.tokens) if cut else job, response.tokens))
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
        # Where an older version did not write it, nobody knows, and nothing is said of it.
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
        for place in range(self._at, self._at + passed + 1):
            problem = self._order[place]
            ids, why = self._prompts.look(problem)
            self._looked_at[place] = why
            if ids is not None and self._is_winnable(problem):
                self._at = place + 1
                responses = [Response() for _ in range(self.cfg.rollout.n)]
                return Group(place, place + 1, step, problem, ids, responses)
            self._looked_at[place] = why or "unwinnable"
        raise ConfigError(
            f"{passed + 1} rows in a row cannot be used: their prompts are longer than "
            f"rollout.max_prompt_tokens = {self.cfg.rollout.max_prompt_tokens}, or the reward "
            f"{self._scorer.name} cannot be won; raise it, or look at them with `python -m "
            "train.data`"
        )

    def _is_winnable(self, problem: Problem) -> bool:
        """Whether to draw it: data.unwinnable=drop passes over what no answer can win."""
        return self.cfg.data.unwinnable != "drop" or unwinnable(self._scorer, problem) is None

    def _prompt_metrics(self) -> dict[str, float]:
        """Of the problems that this step went past: `overlong` were dropped or cut, `unwinnable`
        dropped."""
        why = [why for place, why in self._looked_at.items() if place < self.position]
        names = {"overlong": "rollout/prompts_overlong", "unwinnable": "rollout/prompts_unwinnable"}
        return {name: float(why.count(key)) for key, name in names.items()}

    def about_zero(self) -> str | None:
        """An example, while every response of the run scored 0; None from then on."""
        return None if self.zero is None else about_zero(self._scorer, *self.zero)

    def _about_short(self, selected: int, places: int) -> str | None:
        if selected >= self.rule.prompts:
            return None
        return (
            f"{selected} groups of {places} have differing rewards, fewer than rollout.prompts="
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
            response, problem = next((p for p in pairs if p[0].finish != "length"), pairs[0])
            self.zero = response.text, problem, response.finish == "length"
        return {
            "reward/failed": float(failed),
            "reward/failed_share": failed / max(len(responses), 1),
        }

    def _jobs(self, index: int, group: Group) -> list[Job]:
        self._problems[index] = group.problem
        return self._jobs_of(group, index)

    def _jobs_of(self, group: Group, request: int) -> list[Job]:
        params = group_params(self.cfg, group.step, group.place)
        return make_jobs(
            group.prompt, params, self._eos_ids, self._prompts.tokenizer, request=request
        )

    def judge(self, job: Job, sample: SampleOutput) -> Score:
        """The reward of a sample of this step, for engines that ask where it ran."""
        return self._scorer(self._text(sample.token_ids), self._problems[job.request])

    def _score(self, group: Group) -> list[float]:
        for response in group.responses:
            response.text = self._text(response.tokens)
            if response.reward is None:
                response.reward, response.failed = self._scorer(response.text, group.problem)
        return [response.reward for response in group.responses]
