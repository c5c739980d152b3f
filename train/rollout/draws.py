"""The problems of a run in the order of draws, as groups whose samples are jobs of an engine.

Seeds alone decide the tokens: the seed of a group is made of run seed, step and the group's
position in the order of draws, and the request key of that seed, the prompt and the sample index.
"""

from __future__ import annotations

from collections.abc import Sequence

from specjax.command_line import ConfigError
from specjax.config import SamplingParams
from specjax.engine.request import Job, make_jobs
from specjax.parallel import distributed
from train.data.prompts import Prompts
from train.data.rows import group_seed
from train.data.tasks.layout import Problem
from train.rewards.scoring import GoldAnswers, Scorer
from train.rollout.groups import Group, Response
from train.schema import RLConfig


class Draws:
    """Draws the groups of each step.

    Args:
      cfg: settings of the run.
      order: problems in the order of draws.
      prompts: encoder of their prompts.
      eos_ids: tokens that end a response.
      scorer: reward.

    Attributes:
      position: place from which the next problem is drawn.
      golds: which rows cannot be won; None where they are trained on all the same.
    """

    def __init__(
        self,
        cfg: RLConfig,
        order: Sequence[Problem],
        prompts: Prompts,
        eos_ids: Sequence[int],
        scorer: Scorer,
    ):
        self._cfg, self._order, self._prompts = cfg, order, prompts
        self._eos_ids, self._reward = eos_ids, scorer.name
        self.golds = GoldAnswers(scorer) if cfg.data.unwinnable == "drop" else None
        self._ahead = 0  # the place before which all gold answers are checked, or being checked
        self._passed: dict[int, str | None] = {}  # position of the step -> why it was left out
        self.position = 0

    def begin(self, step: int) -> None:
        """Begins the draws of a step."""
        self._step, self._passed = step, {}

    def draw(self) -> Group:
        """Draws the next problem that can be used, as a group without samples.

        Raises:
          ConfigError: many problems in a row cannot be used.
        """
        roll = self._cfg.rollout
        most = 100 * roll.prompts
        for position in range(self.position, self.position + most + 1):
            problem = self._order[position]
            ids, why = self._prompts.fit(problem)
            self._passed[position] = why
            if ids is not None and not self._is_lost(position):
                self.position = position + 1
                responses = [Response() for _ in range(roll.n)]
                return Group(position, position + 1, self._step, problem, ids, responses)
            self._passed[position] = why or "unwinnable"
        raise ConfigError(
            f"{most + 1} rows in a row cannot be used: their prompts are longer than "
            f"rollout.max_prompt_tokens = {roll.max_prompt_tokens}, or the reward {self._reward} "
            "cannot be won; raise it, or see `python -m train.data`"
        )

    def end(self, position: int) -> dict[str, float]:
        """Goes on from a position: groups that were drawn beyond it will be drawn again.

        Returns:
          the numbers of problems that the step dropped, or cut because of their length.
        """
        self.position = position
        why = [why for place, why in self._passed.items() if place < position]
        names = {"overlong": "rollout/prompts_overlong", "unwinnable": "rollout/prompts_unwinnable"}
        return {name: float(why.count(key)) for key, name in names.items()}

    def jobs(self, request: int, group: Group) -> list[Job]:
        """Makes the samples of a group, in order, with the number of their request."""
        params = group_params(self._cfg, group.step, group.position)
        tokenizer = self._prompts.tokenizer
        return make_jobs(group.prompt, params, self._eos_ids, tokenizer, request=request)

    def restored(self, saved: dict) -> Group:
        """Makes a carried group of a checkpoint."""
        problem = self._order[saved["place"]]
        return Group.from_json(saved, problem, self._prompts.fit(problem)[0])

    def _is_lost(self, position: int) -> bool:
        """Returns whether the problem at this place is left out because it cannot be won.

        Rows after it, as many as two steps begin with, are checked in workers meanwhile.
        """
        if self.golds is None:
            return False
        if distributed.is_first():
            end = min(position + 1 + 2 * self._cfg.rollout.in_flight, len(self._order))
            for place in range(max(position, self._ahead), end):
                if self._fits(self._order[place]):
                    self.golds.begin(self._order[place])
            self._ahead = max(end, self._ahead)
        # A comparison may be late in one process alone, and all have to draw the same rows.
        problem = self._order[position]
        return distributed.of_first(lambda: self.golds.are_lost(problem), "gold answers")

    def _fits(self, problem: Problem) -> bool:
        """Returns whether a problem's prompt is not left out; errors are for its draw."""
        try:
            return self._prompts.fit(problem)[0] is not None
        except ValueError:
            return False


def group_params(cfg: RLConfig, step: int, position: int) -> SamplingParams:
    """Makes the sampling parameters of one group."""
    processed = cfg.algo.logprobs == "processed"
    return cfg.rollout.sampling_params(
        group_seed(cfg.seed, step, position), cfg.rollout.n, processed
    )
