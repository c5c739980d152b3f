"""Training samples of a step: rewards are shaped, and the objective makes advantages of them.

    reward_i  = the reward of sample i
                - overlong_penalty_factor * min(excess_i / buffer, 1)     (`overlong_penalties`)
                - kl_coef * sum_t kl_t                                    (`kl_coef` > 0)
    excess_i  = max(tokens of the response - (rollout.max_tokens - buffer), 0)

The objective's `advantages` get these rewards. One that has the method

    token_advantages(rewards [P G], masks, penalties) -> an array of advantages for each sample

gets rewards without KL, the loss mask of each response [tokens], and kl_coef * kl_t [tokens], zero
outside of the loss: so REINFORCE++ has an advantage per token. With `mask_truncated` samples that
reached `rollout.max_tokens` are in none of the micro-batches; their rewards, less their KL, still
count for the others of their group, and they count among the samples that the loss is divided by.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Float, Int

from specjax.interfaces import Objective
from train.loss.algo import AlgoSection
from train.loss.packing import PackedBatch, Sample, pack
from train.rollout.groups import Group

KLOf = Callable[[Sequence[Sample]], list[Float[np.ndarray, " tokens"]]]


def training_samples(
    algo: AlgoSection, groups: Sequence[Group], max_tokens: int, step: int | None, kl_of: KLOf
) -> tuple[list[Sample], dict[str, float]]:
    """Makes the samples that a step is trained on, and metrics of what shaped their rewards.

    Args:
      algo: settings of the loss.
      groups: P complete groups of G samples.
      max_tokens: largest number of tokens of a response.
      step: step that trains on them if tokens may be of earlier steps; else None.
      kl_of: function that estimates KL(policy || reference) at each token of the responses of
        samples; called if `algo.kl_coef` > 0.

    Raises:
      ValueError: the objective refuses the rewards, or returns advantages of another shape.
    """
    rewards = np.array([group.rewards for group in groups], np.float64)
    responses = [response for group in groups for response in group.responses]
    kept = [not algo.mask_truncated or r.finish_reason != "length" for r in responses]
    metrics, penalties = {}, None
    if algo.overlong_buffer_len:
        lengths = np.reshape([len(r.token_ids) for r in responses], rewards.shape)
        buffer, factor = algo.overlong_tokens(max_tokens), algo.overlong_penalty_factor
        overlong = overlong_penalties(lengths, max_tokens, buffer, factor)
        rewards = rewards - overlong
        metrics["rollout/overlong_penalty"] = float(overlong.mean())
    masks = [response.mask for response in responses]
    if algo.kl_coef:
        kl = kl_of(to_samples(groups, np.zeros(rewards.shape), step))
        kl = [k * (m > 0) for k, m in zip(kl, masks, strict=True)]
        penalties = [algo.kl_coef * k for k in kl]
        count = max(sum(m.sum() for m in masks), 1.0)
        metrics["train/reward_kl_penalty"] = float(sum(k.sum() for k in kl) / count)
    trained = [mask * one for mask, one in zip(masks, kept, strict=True)]
    samples = to_samples(groups, _advantages(algo, rewards, trained, penalties), step)
    if algo.mask_truncated:
        samples = [sample for sample, one in zip(samples, kept, strict=True) if one]
        metrics["train/truncated_masked"] = float(len(kept) - len(samples))
    return samples, metrics


def to_samples(
    groups: Sequence[Group], advantages: Float[np.ndarray, "P G"], step: int | None = None
) -> list[Sample]:
    """Makes training samples of groups, in (group, sample) order.

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


def overlong_penalties(
    lengths: Int[np.ndarray, "P G"], max_tokens: int, buffer: int, factor: float
) -> Float[np.ndarray, "P G"]:
    """DAPO's soft penalty (arXiv 2503.14476): 0 up to max_tokens - buffer, then linear to factor.

    Args:
      lengths: tokens of each response.
      max_tokens: largest number of tokens of a response.
      buffer: number of tokens over which the penalty rises.
      factor: penalty of a response of `max_tokens`.
    """
    excess = np.maximum(lengths - (max_tokens - buffer), 0)
    return factor * np.minimum(excess / buffer, 1.0)


def _advantages(
    objective: Objective, rewards: Float[np.ndarray, "P G"], masks, penalties
) -> np.ndarray:
    """Advantages [P G], each a number, or an array of the tokens of the response."""
    by_token = getattr(objective, "token_advantages", None)
    if by_token is None:
        if penalties is not None:
            rewards = rewards - np.reshape([p.sum() for p in penalties], rewards.shape)
        return objective.advantages(rewards)
    penalties = [np.zeros(len(mask)) for mask in masks] if penalties is None else penalties
    advantages = np.empty(len(masks), object)
    for i, of_sample in enumerate(by_token(rewards, masks, penalties)):
        advantages[i] = of_sample
    return advantages.reshape(rewards.shape)


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
            values = scored[generated & (batch["sample_ids"] == index)]
            response.old_logprobs = response.old_logprobs[:carried] + values[carried:].tolist()
