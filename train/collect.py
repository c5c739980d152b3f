"""The rule of `train.groups` at work: keeps an engine busy until the choice of a step is certain.

`Collection` is one step; `Rollouts` has what outlives it: the place in the data, and the groups
that are carried. Whatever the engine does in between (how many slots it has, which samples it
starts first, how it speculates) decides how long that takes, and never what comes out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from specjax.command_line import ConfigError
from specjax.config import SamplingParams
from specjax.engine.engine import Engine
from specjax.engine.request import Finished, Job, SampleOutput, Totals, make_jobs, require_valid
from specjax.engine.sequence import Progress
from train import data
from train.groups import Choice, Group, Response, Rule, decide, reopen, settle
from train.rewards import Reward
from train.rollout import Rollout, digest, group_seed, rollout_metrics, selection_metrics
from train.schema import RLConfig


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
                progress = Progress(list(response.tokens), list(response.logprobs), [])
            ticket = self.engine.add(job, progress)
            running[ticket], self._group_of[ticket] = response, index

    def _finish(self, event: Finished) -> None:
        index = self._group_of[event.ticket]
        place = self.groups[index].place
        require_valid([event.sample], lambda _: f"the rollout of problem {place} in the data")
        response = self._running[index].pop(event.ticket)
        self._take(response, event.sample, finished=True)
        response.reward = event.verdict
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


class Rollouts:
    """The rollouts of a run, step by step.

    Args:
      order: problems in the order of draws. eos_ids: tokens that end a response.
      reward: (response text, answer) -> float.

    Attributes:
      position: the next place to draw from.
      carried: groups that the next step goes on with; checkpoints keep them.
    """

    def __init__(
        self,
        cfg: RLConfig,
        order: Sequence[data.Problem],
        tokenizer,
        eos_ids: Sequence[int],
        reward: Reward,
    ):
        roll, algo = cfg.rollout, cfg.algo
        self.cfg, self._order, self._tokenizer = cfg, order, tokenizer
        self._eos_ids, self._reward = eos_ids, reward
        self.rule = Rule(roll.prompts, roll.in_air, algo.dynamic_sampling, algo.max_resample)
        self.position = 0
        self.carried: list[Group] = []
        self._answers: dict[int, str] = {}  # of the groups of a step, by index

    def collect(self, engine: Engine, step: int) -> tuple[Rollout, Rollout, dict[str, float | str]]:
        """Runs a step's rollout.

        Returns:
          all groups that are complete and go no further, those of them to be trained on, metrics.
        """
        roll = self.cfg.rollout
        carried, stale = reopen(self.carried, step, roll.max_staleness)
        start = self._at = self.position
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
        done = Rollout.of(settled.complete)
        kept = (*settled.complete, *settled.carried)
        run.totals.tokens = sum(r.new for group in kept for r in group.responses)
        metrics = rollout_metrics(done, run.totals, self.cfg.rollout_devices)
        metrics |= selection_metrics(settled, stale, choice.budget, step)
        if roll.partial:
            metrics["rollout/carried_sha"] = digest(
                r.tokens for group in settled.carried for r in group.responses
            )
        return done, done.select(settled.selected), metrics

    def state(self) -> dict[str, Any]:
        """For a checkpoint's metadata: JSON."""
        return {
            "position": self.position,
            "carried": [group.to_json() for group in self.carried],
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Takes over what `state` returned."""
        self.position = state["position"]
        self.carried = []
        for saved in state["carried"]:
            problem = self._order[saved["place"]]
            prompt = data.encode_prompt(self._tokenizer, problem.prompt)
            self.carried.append(Group.from_json(saved, problem, prompt))

    def _draw(self, step: int) -> Group:
        """The next problem in order whose prompt is short enough.

        Raises:
          ConfigError: there seems to be none.
        """
        most, passed = self.cfg.rollout.max_prompt_tokens, 100 * self.rule.prompts
        for place in range(self._at, self._at + passed + 1):
            problem = self._order[place]
            prompt = data.encode_prompt(self._tokenizer, problem.prompt)
            if len(prompt) <= most:
                self._at = place + 1
                responses = [Response() for _ in range(self.cfg.rollout.n)]
                return Group(place, place + 1, step, problem, prompt, responses)
        raise ConfigError(
            f"{passed + 1} prompts in a row are longer than rollout.max_prompt_tokens = {most}; "
            "raise it"
        )

    def _jobs(self, index: int, group: Group) -> list[Job]:
        roll = self.cfg.rollout
        self._answers[index] = group.problem.answer
        params = SamplingParams(
            temperature=roll.temperature,
            max_tokens=roll.max_tokens,
            seed=group_seed(self.cfg.seed, group.step, group.place),
            n=roll.n,
        )
        return make_jobs(group.prompt, params, self._eos_ids, request=index)

    def judge(self, job: Job, sample: SampleOutput) -> float:
        """The reward of a sample of this step, for engines that ask where it ran."""
        return float(self._reward(self._text(sample.token_ids), self._answers[job.request]))

    def _text(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=True)

    def _score(self, group: Group) -> list[float]:
        for response in group.responses:
            response.text = self._text(response.tokens)
            if response.reward is None:
                response.reward = float(self._reward(response.text, group.problem.answer))
        return [response.reward for response in group.responses]
