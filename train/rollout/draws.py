"""The problems of a run in the order of draws, as groups whose samples are jobs of an engine.

Seeds alone decide the tokens: the seed of a group is made of run seed, step and the group's
position in the order of draws, and the request key of that seed, the prompt and the sample index.
"""

from __future__ import annotations

from collections.abc import Sequence

from specjax.command_line import ConfigError
from specjax.config import SamplingParams
from specjax.engine.request import Job, make_jobs
from train.data.prompts import Prompts
from train.data.rows import group_seed
from train.data.tasks.layout import Problem
from train.rollout.groups import Group, Response
from train.schema import RLConfig


class Draws:
    """Draws the groups of each step.

    Args:
      cfg: settings of the run.
      order: problems in the order of draws.
      prompts: encoder of their prompts.
      eos_ids: tokens that end a response.

    Attributes:
      position: place from which the next problem is drawn.
    """

    def __init__(
        self,
        cfg: RLConfig,
        order: Sequence[Problem],
        prompts: Prompts,
        eos_ids: Sequence[int],
    ):
        self._cfg, self._order, self._prompts, self._eos_ids = cfg, order, prompts, eos_ids
        self._overlong: list[int] = []  # positions of the step whose prompts were dropped or cut
        self.position = 0

    def begin(self, step: int) -> None:
        """Begins the draws of a step."""
        self._step, self._overlong = step, []

    def draw(self) -> Group:
        """Draws the next problem that can be used, as a group without samples.

        Raises:
          ConfigError: many problems in a row cannot be used.
        """
        roll = self._cfg.rollout
        most = 100 * roll.prompts
        for position in range(self.position, self.position + most + 1):
            problem = self._order[position]
            ids, is_long = self._prompts.fit(problem)
            self._overlong += [position] * is_long
            if ids is not None:
                self.position = position + 1
                responses = [Response() for _ in range(roll.n)]
                return Group(position, position + 1, self._step, problem, ids, responses)
        raise ConfigError(
            f"{most + 1} rows in a row have prompts longer than rollout.max_prompt_tokens="
            f"{roll.max_prompt_tokens}; raise it, or see `python -m train.data`"
        )

    def end(self, position: int) -> dict[str, float]:
        """Goes on from a position: groups that were drawn beyond it will be drawn again.

        Returns:
          the number of problems that the step dropped, or cut because of their length.
        """
        self.position = position
        count = sum(place < position for place in self._overlong)
        return {"rollout/prompts_overlong": float(count)}

    def jobs(self, request: int, group: Group) -> list[Job]:
        """Makes the samples of a group, in order, with the number of their request."""
        params = group_params(self._cfg, group.step, group.position)
        tokenizer = self._prompts.tokenizer
        return make_jobs(group.prompt, params, self._eos_ids, tokenizer, request=request)

    def restored(self, saved: dict) -> Group:
        """Makes a carried group of a checkpoint."""
        problem = self._order[saved["place"]]
        return Group.from_json(saved, problem, self._prompts.fit(problem)[0])


def group_params(cfg: RLConfig, step: int, position: int) -> SamplingParams:
    """Makes the sampling parameters of one group."""
    processed = cfg.algo.logprobs == "processed"
    return cfg.rollout.sampling_params(
        group_seed(cfg.seed, step, position), cfg.rollout.n, processed
    )
