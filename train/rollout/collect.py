"""Rollouts of training: problems become groups of scored samples, step by step.

`Rollouts` holds the state between steps, `Draws` gives it problems, `GroupRewards` scores, and
`StepRollout` runs one step through the engine.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from specjax.engine.engine import Engine
from specjax.engine.request import Job, Totals
from specjax.parallel import distributed
from train.data.prompts import Prompts
from train.data.tasks.layout import Problem
from train.loss.shared import zero_variance_groups
from train.rewards.scoring import Score, Scorer, zero_reward_example
from train.rollout.draws import Draws
from train.rollout.groups import Group, Response, Rule, StepGroups, begin_step, end_step
from train.rollout.rewards import GroupRewards, ResponseText
from train.rollout.step import StepRollout
from train.rollout.turns import Turns
from train.schema import RLConfig


class Rollouts:
    """The rollouts of a run, step by step.

    Args:
      cfg: settings of the run.
      order: problems in the order of draws.
      prompts: encoder of their prompts.
      eos_ids: tokens that end a response.
      scorer: reward.
      turns: plays the turns of samples; None: they have one.

    Attributes:
      rule: rule that selects the groups of a step.
      draws: problems in the order of draws, and the place of the next one.
      rewards: rewards of the step's groups.
      carried: groups that the next step continues; checkpoints keep them.
      short: warning that the last step had fewer groups to train on than it needs; None if it had
        enough.
      zero: example of a response for a warning while every response of the run scored 0, else None.
    """

    def __init__(
        self,
        cfg: RLConfig,
        order: Sequence[Problem],
        prompts: Prompts,
        eos_ids: Sequence[int],
        scorer: Scorer,
        turns: Turns | None = None,
    ):
        roll, algo = cfg.rollout, cfg.algo
        self.cfg, self._scorer, self._turns = cfg, scorer, turns
        batches = max(algo.max_num_gen_batches, 0)
        self.rule = Rule(roll.prompts, roll.in_flight, algo.dynamic_sampling, batches)
        self.draws = Draws(cfg, order, prompts, eos_ids)
        text = ResponseText(prompts.tokenizer, roll.sampling_params(), eos_ids)
        self.rewards = GroupRewards(scorer, text)
        self.carried: list[Group] = []
        self.zero: str | None = None
        self._any_reward = False
        self.short: str | None = None
        self._run: StepRollout | None = None  # the last step's, or the one in progress
        self._kept: tuple[Group, ...] = ()  # the last step's complete and carried groups

    def collect(
        self, engine: Engine, step: int
    ) -> tuple[list[Group], list[Group], dict[str, float | str]]:
        """Runs a step's rollout.

        Returns:
          (groups that are complete and not carried, those of them to train on, metrics).
        """
        roll, start = self.cfg.rollout, self.draws.position
        carried, stale = begin_step(self.carried, step, roll.max_staleness)
        self.draws.begin(step)
        run = StepRollout(engine, self.rule, roll.partial, self.draws, self.rewards, self._turns)
        self._run = run
        try:
            selection = run.run(carried)
        finally:
            self.rewards.end()
        ended = end_step(
            self.rule, run.groups, selection, step, roll.partial, self._scorer.is_batch
        )
        drawn = run.groups[len(carried) : selection.candidates]
        dropped = self.draws.end(drawn[-1].next_position if drawn else start)
        self.carried = ended.carried
        self.short = self._short_warning(len(ended.selected), selection.candidates)
        self._kept = (*ended.complete, *ended.carried)
        run.totals.tokens = sum(r.num_new for group in self._kept for r in group.responses)
        metrics = rollout_metrics(ended.complete, run.totals, self.cfg.rollout_devices)
        metrics |= selection_metrics(ended, stale, selection.budget, step)
        metrics |= self._reward_metrics(ended.complete) | dropped
        if roll.partial:
            metrics["rollout/carried_sha"] = tokens_digest(ended.carried)
        return ended.complete, [ended.complete[i] for i in ended.selected], metrics

    def progress(self) -> str:
        """Describes the rollout in progress; another thread may call it."""
        samples = [r for group in (self._run.groups if self._run else []) for r in group.responses]
        ended = sum(sample.finish_reason is not None for sample in samples)
        return f"rollout, {ended} of {len(samples)} samples have ended"

    def begun(self) -> list[tuple[Job, Response]]:
        """Returns the samples of complete and carried groups that the last step began.

        Each is (job, response). The job's request is the position of the group, and it ends where
        the step cut the sample.
        """
        samples = []
        for group in self._kept:
            jobs = self.draws.jobs(group.position, group)
            for response, job in zip(group.responses, jobs, strict=True):
                if response.num_carried == 0 and response.num_new and response.loss_mask is None:
                    if response.finish_reason is None:
                        limit = len(job.prompt) + len(response.token_ids)
                        job = dataclasses.replace(job, limit=limit)
                    samples.append((job, response))
        return samples

    def state(self) -> dict[str, Any]:
        """Returns the state between steps, as JSON for a checkpoint's metadata."""
        return {
            "position": self.draws.position,
            "carried": [group.to_json() for group in self.carried],
            "any_reward": self._any_reward,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restores the state from the return value of `state`."""
        self.draws.position, self._any_reward = state["position"], state["any_reward"]
        self.zero = None
        self.carried = [self.draws.restored(saved) for saved in state["carried"]]

    def _short_warning(self, selected: int, candidates: int) -> str | None:
        """Writes the warning that dynamic sampling did not fill the step; None if it did."""
        if selected >= self.rule.prompts:
            return None
        return (
            f"{selected} groups of {candidates} have differing rewards, fewer than "
            f"rollout.prompts={self.rule.prompts}, and algo.max_num_gen_batches="
            f"{self.rule.batches} allows no more groups: the policy is trained on these alone. "
            "Raise it (0: no limit), or is the task too hard or too easy for the policy?"
        )

    def _reward_metrics(self, groups: Sequence[Group]) -> dict[str, float]:
        pairs = [(r, group.problem) for group in groups for r in group.responses]
        failed = sum(r.failed for r, _ in pairs)
        if any(r.reward for r, _ in pairs):
            self._any_reward, self.zero = True, None
        elif not self._any_reward and pairs:
            response, problem = next((p for p in pairs if p[0].finish_reason != "length"), pairs[0])
            was_cut = response.finish_reason == "length"
            self.zero = zero_reward_example(self._scorer, response.text, problem, was_cut)
        scores = [Score(r.reward or 0.0, r.failed, r.parts) for r, _ in pairs]
        means = self._scorer.part_means(scores)
        # Of all processes: sums, and of the seconds waited the most.
        figures = distributed.gather(self._scorer.metrics(), "figures of rewards")
        totals = {name: sum(one[name] for one in figures) for name in figures[0]}
        return {
            "reward/failed": float(failed),
            "reward/failed_share": failed / max(len(pairs), 1),
            **{f"reward/{label}": mean for label, mean in means.items()},
            **totals,
            "time/reward_wait": max(one["time/reward_wait"] for one in figures),
        }


def tokens_digest(groups: Iterable[Group]) -> str:
    """Digests the token ids of all samples in order; it is equal for equal rollouts."""
    digest = hashlib.blake2b(digest_size=8)
    for group in groups:
        for response in group.responses:
            ids = response.token_ids
            digest.update(np.asarray([len(ids), *ids], "<i4").tobytes())
    return digest.hexdigest()


def selection_metrics(
    ended: StepGroups, stale: Sequence[Group], budget: int | None, step: int
) -> dict[str, float | str]:
    """Computes metrics of a step's selection of groups, and of its preference for short ones.

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
    """Computes metrics of complete groups: rewards, lengths, speed and acceptance."""
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
            np.mean(np.concatenate([np.array(s.behaviour_logprobs)[s.mask > 0] for s in samples]))
        ),
    }
    if any(sample.turns for sample in samples):
        metrics["rollout/turns_mean"] = float(np.mean([len(s.turns) for s in samples]))
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
