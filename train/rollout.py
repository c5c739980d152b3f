"""Rollouts: problems in, scored samples out. Which tokens come out is decided by seeds alone.

The seed of a group folds run seed, step and the group's place in the data; the request key folds
the prompt and the sample index on top. Neither slots, nor batch size, nor speculation enter.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Sequence

import numpy as np

from specjax.config import SamplingParams
from specjax.engine.engine import Engine
from specjax.engine.request import SampleOutput, Totals, make_jobs
from train.data import Problem
from train.grpo import group_advantages, zero_variance_groups
from train.packing import Sample

Reward = Callable[[str, str], float]


@dataclasses.dataclass
class Rollout:
    """P groups of G scored samples.

    Attributes:
      problems: [P]. prompts: their token ids. groups: [P][G]. rewards: [P G].
    """

    problems: list[Problem]
    prompts: list[list[int]]
    groups: list[list[SampleOutput]]
    rewards: np.ndarray

    def extend(self, other: Rollout) -> None:
        self.problems += other.problems
        self.prompts += other.prompts
        self.groups += other.groups
        self.rewards = np.concatenate([self.rewards, other.rewards])

    def select(self, keep: Sequence[int]) -> Rollout:
        """The groups with these indices."""
        return Rollout(
            [self.problems[i] for i in keep],
            [self.prompts[i] for i in keep],
            [self.groups[i] for i in keep],
            self.rewards[list(keep)],
        )


def group_seed(run_seed: int, step: int, place: int) -> int:
    """A 64-bit seed for one group: by its place in the order of draws, for a small data set may
    hand out one problem twice in a step, and the two groups must not share their noise."""
    text = f"{run_seed}:{step}:{place}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def generate(
    engine: Engine,
    tokenizer,
    problems: Sequence[Problem],
    prompts: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
    eos_ids: Sequence[int],
    reward: Reward,
) -> tuple[Rollout, Totals]:
    """Samples `params[i].n` responses to each prompt and scores them.

    Args:
      problems, prompts, params: one entry per group. reward: (response text, answer) -> float.
    """
    jobs = []
    for group, (prompt, sampling) in enumerate(zip(prompts, params, strict=True)):
        jobs += make_jobs(prompt, sampling, eos_ids, request=group)
    samples, totals = engine.generate(jobs)
    groups, rewards, at = [], [], 0
    for problem, sampling in zip(problems, params, strict=True):
        group = [
            dataclasses.replace(s, text=tokenizer.decode(s.token_ids, skip_special_tokens=True))
            for s in samples[at : at + sampling.n]
        ]
        at += sampling.n
        groups.append(group)
        rewards.append([float(reward(s.text, problem.answer)) for s in group])
    return Rollout(list(problems), [list(p) for p in prompts], groups, np.array(rewards)), totals


def to_samples(rollout: Rollout, normalize_std: bool, eps: float) -> list[Sample]:
    """Training samples in (prompt, sample) order, with group-relative advantages."""
    advantages = group_advantages(rollout.rewards, normalize_std, eps)
    per_group = rollout.rewards.shape[1]
    return [
        Sample(
            sample_id=p * per_group + g,
            prompt_ids=rollout.prompts[p],
            response_ids=sample.token_ids,
            behaviour_logprobs=sample.logprobs,
            advantage=float(advantages[p, g]),
        )
        for p, group in enumerate(rollout.groups)
        for g, sample in enumerate(group)
    ]


def informative_groups(rollout: Rollout) -> list[int]:
    """Groups whose rewards differ; the others have no advantage and teach nothing."""
    return np.flatnonzero(~zero_variance_groups(rollout.rewards)).tolist()


def tokens_digest(rollout: Rollout) -> str:
    """A digest of every sampled token in order: equal digests, equal rollouts."""
    digest = hashlib.blake2b(digest_size=8)
    for group in rollout.groups:
        for sample in group:
            digest.update(np.asarray([len(sample.token_ids), *sample.token_ids], "<i4").tobytes())
    return digest.hexdigest()


def rollout_metrics(rollout: Rollout, totals: Totals, devices: int) -> dict[str, float | str]:
    """What a rollout tells, under the names that users of other systems know."""
    samples = [s for group in rollout.groups for s in group]
    lengths = np.array([len(s.token_ids) for s in samples])
    rate = totals.tokens / max(totals.seconds, 1e-9)
    metrics = {
        "rollout/reward": float(rollout.rewards.mean()),
        "rollout/zero_std": float(zero_variance_groups(rollout.rewards).mean()),
        "rollout/response_length_mean": float(lengths.mean()),
        "rollout/response_length_max": float(lengths.max()),
        "rollout/truncated_ratio": float(np.mean([s.finish_reason == "length" for s in samples])),
        "rollout/tokens": float(totals.tokens),
        "rollout/tokens_sha": tokens_digest(rollout),
        "rollout/tokens_per_sec": rate,
        "rollout/tokens_per_gpu_per_sec": rate / devices,
        "rollout/longest_sample_tokens_per_sec": totals.longest / max(totals.seconds, 1e-9),
        "rollout/logprob_mean": float(np.mean(np.concatenate([s.logprobs for s in samples]))),
    }
    if totals.steps:
        metrics["rollout/spec_accept_length"] = totals.accept_length
        metrics["rollout/spec_accept_rate"] = totals.accept_rate
        for depth, rate in enumerate(totals.per_depth(), start=1):
            metrics[f"rollout/accept_rate_depth_{depth}"] = rate
    return metrics
