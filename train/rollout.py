"""Rollouts: scored samples, what training takes of them, and what is reported.

Which tokens come out is decided by seeds alone: the seed of a group folds run seed, step and the
group's place in the data; the request key folds the prompt and the sample index on top. Neither
slots, nor batch size, nor speculation enter. Which groups a step takes is decided in
`train.groups`. Taking those that are complete first prefers short ones; `rollout/length_bias` says
by how many tokens: the mean length in selected groups less the mean over all groups started, where
unfinished samples count as far as they came. They would have become longer yet, so the real bias is
larger.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from jaxtyping import Float

from specjax.config import SamplingParams
from specjax.engine.engine import Engine
from specjax.engine.request import SampleOutput, Totals, make_jobs, require_valid, special_name
from specjax.engine.stops import StopStrings
from train.groups import Group, Settled, token_versions
from train.objectives.shared import zero_variance_groups
from train.packing import PackedBatch, Sample, pack
from train.schema import RLConfig
from train.scoring import Scorer
from train.tasks.layout import Problem


@dataclasses.dataclass
class Rollout:
    """P groups of G scored samples.

    Attributes:
      problems: [P]. prompts: their token ids. groups: [P][G]. rewards: [P G].
      old: [P][G], the trainer's log-probabilities of a sample's first tokens, which earlier steps
        sampled, each under the weights of its step.
      loss_masks: [P][G], of each token of a sample whether the policy sampled it (1) or not (0),
        see `train.groups.Response`; None, of one sample or of all: it sampled every one.
    """

    problems: list[Problem]
    prompts: list[list[int]]
    groups: list[list[SampleOutput]]
    rewards: np.ndarray
    old: list[list[list[float]]] | None = None
    loss_masks: list[list[list[int] | None]] | None = None

    @classmethod
    def of(cls, groups: Sequence[Group]) -> Rollout:
        """Of groups that are complete; there versions are steps."""
        return cls(
            [group.problem for group in groups],
            [group.prompt for group in groups],
            [[r.output() for r in group.responses] for group in groups],
            np.array([group.rewards for group in groups]),
            [[r.old for r in group.responses] for group in groups],
            [[r.loss_mask for r in group.responses] for group in groups],
        )

    def select(self, keep: Sequence[int]) -> Rollout:
        """The groups with these indices."""
        return Rollout(
            [self.problems[i] for i in keep],
            [self.prompts[i] for i in keep],
            [self.groups[i] for i in keep],
            self.rewards[list(keep)],
            None if self.old is None else [self.old[i] for i in keep],
            None if self.loss_masks is None else [self.loss_masks[i] for i in keep],
        )


def group_seed(run_seed: int, step: int, place: int) -> int:
    """A 64-bit seed for one group: by its place in the order of draws, for a small data set may
    hand out one problem twice in a step, and the two groups must not share their noise."""
    text = f"{run_seed}:{step}:{place}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def group_params(cfg: RLConfig, step: int, place: int) -> SamplingParams:
    """How the samples of one group are drawn."""
    processed = cfg.algo.logprobs == "processed"
    return cfg.rollout.sampling_params(group_seed(cfg.seed, step, place), cfg.rollout.n, processed)


def behaviour_logprobs(sample: SampleOutput) -> list[float]:
    """The engine's log-probabilities of a sample's tokens, of the kind that `algo.logprobs` says:
    whoever trains with processed ones asks the engine for them, and nobody else does."""
    processed = sample.transformed_logprobs
    return sample.logprobs if processed is None else processed


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


def generate(
    engine: Engine,
    tokenizer,
    problems: Sequence[Problem],
    prompts: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
    eos_ids: Sequence[int],
    scorer: Scorer,
) -> tuple[Rollout, Totals]:
    """Samples `params[i].n` responses to each prompt and scores them.

    Args:
      problems, prompts, params: one entry per group.
    """
    jobs = []
    for group, (prompt, sampling) in enumerate(zip(prompts, params, strict=True)):
        jobs += make_jobs(prompt, sampling, eos_ids, tokenizer, request=group)
    samples, totals = engine.generate(jobs)
    require_valid(samples, lambda index: f"prompt {jobs[index].request}")
    groups, rewards, at = [], [], 0
    for problem, sampling in zip(problems, params, strict=True):
        text = ResponseText(tokenizer, sampling)
        group = [
            dataclasses.replace(s, text=text(s.token_ids)) for s in samples[at : at + sampling.n]
        ]
        at += sampling.n
        groups.append(group)
        rewards.append([scorer(s.text, problem).value for s in group])
    return Rollout(list(problems), [list(p) for p in prompts], groups, np.array(rewards)), totals


def to_samples(
    rollout: Rollout, advantages: Float[np.ndarray, "P G"], step: int | None = None
) -> list[Sample]:
    """Training samples in (prompt, sample) order.

    Args:
      advantages: of each, see `specjax.interfaces.Objective`.
      step: that trains on them; versions older than that are stale. None: nothing is.

    Raises:
      ValueError: advantages of another shape than the rewards.
    """
    if np.shape(advantages) != rollout.rewards.shape:
        raise ValueError(
            "algo.objective: expected advantages of the shape of the rewards, "
            f"{rollout.rewards.shape}, got {np.shape(advantages)}"
        )
    per_group = rollout.rewards.shape[1]
    samples = []
    for p, group in enumerate(rollout.groups):
        for g, sample in enumerate(group):
            old, staleness = None, None
            if step is not None and rollout.old is not None:
                staleness = token_staleness(sample, step)
                old = np.zeros(len(sample.token_ids), np.float32)
                old[: len(rollout.old[p][g])] = rollout.old[p][g]
            samples.append(
                Sample(
                    sample_id=p * per_group + g,
                    prompt_ids=rollout.prompts[p],
                    response_ids=sample.token_ids,
                    behaviour_logprobs=behaviour_logprobs(sample),
                    old_logprobs=old,
                    staleness=staleness,
                    loss_mask=None if rollout.loss_masks is None else rollout.loss_masks[p][g],
                    advantage=float(advantages[p, g]),
                    records=sample.records,
                )
            )
    return samples


def token_staleness(sample: SampleOutput, step: int) -> np.ndarray:
    """[tokens]: how many versions of the weights lie between sampling and `step`'s update."""
    return step - token_versions(sample.weight_versions, len(sample.token_ids))


def score_new_tokens(
    groups: Sequence[Group],
    logprobs: Callable[[PackedBatch], np.ndarray],
    row_length: int,
    rows: int,
) -> None:
    """Notes the trainer's log-probabilities of a step's tokens in the groups that are carried.

    It has to be done before the update. The engine's own would do but for their last bits, which
    depend on the program that decoded them, and so on the clock where a controller chooses it; the
    trainer's depend on tokens and weights alone.

    Args:
      logprobs: scores a packed micro-batch [R S] with the weights of the step.
    """
    responses = [r for group in groups for r in group.responses]
    prompts = [group.prompt for group in groups for _ in group.responses]
    samples = [
        Sample(i, prompt, response.tokens, records=response.records)
        for i, (prompt, response) in enumerate(zip(prompts, responses, strict=True))
        if response.new
    ]
    if not samples:
        return
    for batch in pack(samples, row_length, rows):
        scored, generated = logprobs(batch), batch["loss_mask"] > 0
        for index in np.unique(batch["sample_ids"][generated]).tolist():
            response = responses[index]
            own = scored[generated & (batch["sample_ids"] == index)]
            response.old = response.old[: response.given] + own[response.given :].tolist()


def tokens_digest(rollout: Rollout) -> str:
    """A digest of every sampled token in order: equal digests, equal rollouts."""
    return digest(sample.token_ids for group in rollout.groups for sample in group)


def digest(samples: Iterable[Sequence[int]]) -> str:
    """Of token ids, and of where one sample ends and the next begins."""
    found = hashlib.blake2b(digest_size=8)
    for ids in samples:
        found.update(np.asarray([len(ids), *ids], "<i4").tobytes())
    return found.hexdigest()


def selection_metrics(
    settled: Settled, stale: Sequence[Group], budget: int | None, step: int
) -> dict[str, float | str]:
    """What became of the groups of a step, and whom its early end preferred.

    Args:
      stale: groups that were dropped before it began. budget: of the step, if it had one.
    """
    selected = [settled.complete[i] for i in settled.selected]
    rest = [g for i, g in enumerate(settled.complete) if i not in settled.selected]
    rest += [*settled.carried, *settled.unfinished, *stale]
    metrics: dict[str, float | str] = {
        "rollout/groups_drawn": float(settled.drawn),
        "rollout/groups_selected": float(len(selected)),
        "rollout/groups_carried": float(len(settled.carried)),
        "rollout/groups_dropped": float(settled.dropped),
        "rollout/groups_dropped_stale": float(len(stale)),
        "rollout/tokens_cut": float(settled.cut),
    }
    if budget is not None:
        metrics["rollout/budget"] = float(budget)
    lengths = [_lengths(selected), _lengths(rest)]
    if len(lengths[1]):
        metrics["rollout/unselected_emitted_mean"] = float(lengths[1].mean())
    if not len(lengths[0]):
        return metrics
    metrics["rollout/selected_length_mean"] = mean = float(lengths[0].mean())
    metrics["rollout/length_bias"] = mean - float(np.concatenate(lengths).mean())
    ages = [token_staleness(r.output(), step) for group in selected for r in group.responses]
    ages = np.concatenate(ages)
    metrics["rollout/stale_token_share"] = float((ages > 0).mean())
    metrics["rollout/staleness_mean"] = float(ages.mean())
    return metrics


def _lengths(groups: Sequence[Group]) -> np.ndarray:
    return np.array([len(r.tokens) for group in groups for r in group.responses])


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
        "rollout/logprob_mean": float(
            np.mean(np.concatenate([behaviour_logprobs(s) for s in samples]))
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
