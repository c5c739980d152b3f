"""Group relative policy optimisation: advantages, token log-probabilities, loss, metrics.

One update, in prose. Every prompt has G samples; the advantage of a sample is its reward minus the
group's mean, divided by the group's standard deviation if asked for. The trainer scores the sampled
tokens with the current policy (`token_logprobs`, at the rollout's temperature; or after all
sampling transforms, see `train.processed`) and compares them with `old_logprobs`, which the same
program computed before the first update of the step:

    ratio_t  = exp(logprob_t - old_logprob_t)
    policy_t = -min(ratio_t * A, clip(ratio_t, 1 - clip_ratio, 1 + clip_ratio_high) * A)
    kl_t     = exp(ref_t - logprob_t) - (ref_t - logprob_t) - 1
    loss     = sum_t weight_t * (tis_t * policy_t + kl_loss_coef * kl_t)
    tis_t    = min(exp(old_logprob_t - behaviour_logprob_t), tis_cap), or 1 when `tis` is off

`weight_t` sums to one over the whole update: 1 / (number of tokens) for `token`, 1 / (number of
samples * tokens of the sample) for `sequence`. Both numbers come in from outside (`Denominators`),
so that the gradients of micro-batches *add up* to the gradient of the batch, exactly.

Differences from the paper (DeepSeekMath, arXiv 2402.03300): the upper clip bound is a parameter of
its own and token-level aggregation is the default (both DAPO, arXiv 2503.14476); dropping the
standard deviation is Dr. GRPO's (arXiv 2503.20783); k3 is http://joschu.net/blog/kl-approx.html.
Entropy is logged, never part of the loss.

Partial rollouts bring tokens that older weights sampled. Their `old_logprobs` are what the same
program computed under *those* weights, in the step that sampled them. So the ratio of every token
is the one to the policy that it came from, and the clip bounds how far a stale token can push.
`tis` compares, as ever, two programs under one set of weights. (The engine's `behaviour_logprobs`
would do for the ratio, too, but for their last bits: these depend on the program that decoded the
token, and where a controller chooses it, on the clock.)
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from specjax.parallel.context import Context, shift

LOSS_AGGREGATIONS = ("token", "sequence")
LOGPROBS = ("temperature", "processed")

# exp() of a larger difference would overflow float32 and turn one stray token into a NaN update.
MAX_LOG_RATIO = 20.0

# Sums over loss tokens, to be divided by their number; the rest already carries the loss's weights.
_TOKEN_MEANS = (
    "ratio",
    "clip_fraction",
    "ppo_kl",
    "kl",
    "entropy",
    "train_rollout_logprob_abs_diff",
    "tis",
    "tis_truncated_fraction",
)


@dataclass
class GRPOConfig:
    """Options of the GRPO loss.

    Attributes:
      clip_ratio: how far below 1 the ratio may go before its gradient is cut.
      clip_ratio_high: how far above 1; larger than `clip_ratio` is DAPO's clip-higher.
      loss_aggregation: `token` (mean over all tokens of the update) or `sequence` (mean over the
        tokens of each sample, then over samples).
      kl_loss_coef: weight of the k3 estimate of KL(policy || reference); 0 needs no reference.
      tis: truncated importance sampling, weighs the policy term by pi_old / pi_behaviour.
      tis_cap: upper bound of that weight.
      normalize_std: divide advantages by the group's standard deviation.
      advantage_eps: added to that standard deviation.
    """

    clip_ratio: float = 0.2
    clip_ratio_high: float = 0.28
    loss_aggregation: str = "token"
    kl_loss_coef: float = 0.0
    tis: bool = False
    tis_cap: float = 2.0
    normalize_std: bool = True
    advantage_eps: float = 1e-6

    def __post_init__(self) -> None:
        if self.loss_aggregation not in LOSS_AGGREGATIONS:
            raise ValueError(
                f"loss_aggregation must be one of {', '.join(LOSS_AGGREGATIONS)}, "
                f"got {self.loss_aggregation!r}"
            )
        if not 0 <= self.clip_ratio < 1 or self.clip_ratio_high < 0:
            raise ValueError(
                "expected 0 <= clip_ratio < 1 and clip_ratio_high >= 0, "
                f"got {self.clip_ratio} and {self.clip_ratio_high}"
            )
        if self.kl_loss_coef < 0 or self.tis_cap <= 0 or self.advantage_eps < 0:
            raise ValueError(
                "expected kl_loss_coef >= 0, tis_cap > 0 and advantage_eps >= 0, "
                f"got {self.kl_loss_coef}, {self.tis_cap} and {self.advantage_eps}"
            )


class Denominators(NamedTuple):
    """What one update averages over: loss tokens and samples of *all* its micro-batches."""

    tokens: np.float32
    samples: np.float32


def zero_variance_groups(rewards: Float[np.ndarray, "P G"]) -> np.ndarray:
    """Marks groups whose samples all got the same reward, and so teach nothing.

    Args:
      rewards: one row per prompt.

    Returns:
      bool [P], for dynamic sampling and the `zero_std` metric.
    """
    rewards = _as_groups(rewards)
    return rewards.max(axis=1) == rewards.min(axis=1)


def group_advantages(
    rewards: Float[np.ndarray, "P G"], normalize_std: bool = True, eps: float = 1e-6
) -> Float[np.ndarray, "P G"]:
    """Rewards relative to their group: (r - mean) / (std + eps), or r - mean.

    The standard deviation is the population's (divided by G). Groups without variance get exactly
    zero, whatever the rounding of their mean.

    Args:
      rewards: one row per prompt, G >= 2 samples each.
      normalize_std: whether to divide by the standard deviation.
      eps: added to the standard deviation.

    Returns:
      float32 advantages in the same order.

    Raises:
      ValueError: not a [P G] array, G < 2, or a reward that is not finite.
    """
    rewards = _as_groups(rewards)
    if rewards.shape[1] < 2:
        raise ValueError(
            "group advantages need at least 2 samples per prompt, got 1: every advantage would be "
            "zero; raise rollout.n"
        )
    if not np.isfinite(rewards).all():
        raise ValueError(
            f"rewards must be finite, got {rewards[~np.isfinite(rewards)][0]}; check the reward"
        )
    advantages = rewards - rewards.mean(axis=1, keepdims=True)
    advantages[zero_variance_groups(rewards)] = 0.0
    if normalize_std:
        scale = rewards.std(axis=1, keepdims=True) + eps
        advantages = np.divide(advantages, scale, out=advantages, where=scale > 0)
    return advantages.astype(np.float32)


def _as_groups(rewards) -> np.ndarray:
    rewards = np.asarray(rewards, np.float64)
    if rewards.ndim != 2 or rewards.shape[1] == 0:
        raise ValueError(f"expected rewards [prompts, samples], got shape {rewards.shape}")
    return rewards


def token_logprobs(
    logits: Float[Array, "R S V"],
    tokens: Int[Array, "R S"],
    segment_ids: Int[Array, "R S"],
    temperature: float | Float[Array, ""] = 1.0,
    context: Context | None = None,
) -> tuple[Float[Array, "R S"], Float[Array, "R S"]]:
    """Log-probability of every token given those before it in its segment, and the entropy there.

    Index t describes tokens[t], which logits[t - 1] predicted. No array of probabilities [R S V]
    outlives the reductions: the backward pass keeps the logits alone and recomputes.

    Args:
      logits: untempered policy logits, any float type; arithmetic is float32.
      segment_ids: 0 is padding.
      temperature: the rollout's. Ratios scored at another temperature compare two different
        policies. 0 (greedy rollouts) is scored at 1.
      context: how rows are split over devices; what is scored stays where its logits are, and only
        the ends of chunks change devices.

    Returns:
      (logprobs, entropy in nats), float32, both 0 at segment starts and padding. The entropy
      carries no gradient.
    """
    temperature = jnp.asarray(temperature, jnp.float32)
    temperature = jnp.where(temperature > 0, temperature, 1.0)
    logprobs, entropy = _score_next(logits, shift(tokens, 1, context), temperature)
    return own_tokens(logprobs, entropy, segment_ids, context)


def own_tokens(
    logprobs: Float[Array, "R S"],
    entropy: Float[Array, "R S"],
    segment_ids: Int[Array, "R S"],
    context: Context | None = None,
    among: Bool[Array, "R S"] | None = None,
) -> tuple[Float[Array, "R S"], Float[Array, "R S"]]:
    """What each token says of the next one, moved to that one; 0 where nothing does.

    Args:
      among: the tokens that it is wanted of; None: all that have one before them in their segment.
    """
    predicted = (shift(segment_ids, 1, context) == segment_ids) & (segment_ids > 0)
    if among is not None:
        predicted &= shift(among, 1, context)

    def place(x):
        return shift(jnp.where(predicted, x, 0.0), -1, context)

    return place(logprobs), place(jax.lax.stop_gradient(entropy))


@jax.checkpoint
def _score_next(logits, next_tokens, temperature):
    return logprobs_and_entropy(logits.astype(jnp.float32) / temperature, next_tokens)


def logprobs_and_entropy(
    scaled: Float[Array, "*R V"], next_tokens: Int[Array, "*R"]
) -> tuple[Float[Array, "*R"], Float[Array, "*R"]]:
    """Of the softmax of scores, which may be -inf but for some; the entropy has no gradient."""
    log_z = jax.nn.logsumexp(scaled, axis=-1)
    picked = jnp.take_along_axis(scaled, next_tokens[..., None], axis=-1)[..., 0]
    fixed, fixed_z = jax.lax.stop_gradient((scaled, log_z))
    p = jnp.exp(fixed - fixed_z[..., None])
    # A masked logit is -inf and its probability 0: their product must be 0, not NaN.
    entropy = fixed_z - jnp.sum(jnp.where(p > 0, p * fixed, 0.0), axis=-1)
    return picked - log_z, entropy


def count_denominators(batches: Iterable[Mapping[str, np.ndarray]]) -> Denominators:
    """Counts loss tokens, and samples that have any, over all micro-batches of one update."""
    tokens = samples = 0
    for batch in batches:
        mask = np.asarray(batch["loss_mask"]) > 0
        segments = np.asarray(batch["segment_ids"])
        tokens += int(mask.sum())
        samples += sum(len(np.unique(row[on])) for row, on in zip(segments, mask, strict=True))
    return Denominators(np.float32(max(tokens, 1)), np.float32(max(samples, 1)))


def loss_weights(
    loss_mask: Float[Array, "R S"],
    segment_ids: Int[Array, "R S"],
    aggregation: str,
    denominators: Denominators,
) -> Float[Array, "R S"]:
    """Weight of every token in the loss; sums to 1 over all micro-batches of the update.

    A sample must lie in one row whole, as packing leaves it: `sequence` counts its tokens here.
    """
    if aggregation == "token":
        return loss_mask / denominators.tokens
    num_segments = segment_ids.shape[1] + 1

    def tokens_of_own_segment(mask, ids):
        return jax.ops.segment_sum(mask, ids, num_segments=num_segments)[ids]

    lengths = jax.vmap(tokens_of_own_segment)(loss_mask, segment_ids)
    return loss_mask / (jnp.maximum(lengths, 1.0) * denominators.samples)


def grpo_loss(
    logprobs: Float[Array, "R S"],
    batch: Mapping[str, Array],
    cfg: GRPOConfig,
    denominators: Denominators,
    ref_logprobs: Float[Array, "R S"] | None = None,
    entropy: Float[Array, "R S"] | None = None,
) -> tuple[Float[Array, ""], dict[str, Float[Array, ""]]]:
    """One micro-batch's share of the GRPO loss (see the module's docstring for the formula).

    Args:
      logprobs: of the current policy, from `token_logprobs`; the only input with a gradient.
      batch: packed arrays `loss_mask`, `segment_ids`, `advantages`, `old_logprobs` and
        `behaviour_logprobs`, all [R S].
      cfg: options, static under jit.
      denominators: of the whole update, see `count_denominators`.
      ref_logprobs: of the frozen reference; needed when `cfg.kl_loss_coef` > 0, logged if given.
      entropy: from `token_logprobs`, logged if given.

    Returns:
      (loss, sums). Sums of several micro-batches are added and go to `finalize_metrics`.

    Raises:
      ValueError: `kl_loss_coef` > 0 without reference log-probabilities.
    """
    if cfg.kl_loss_coef > 0 and ref_logprobs is None:
        raise ValueError(
            f"kl_loss_coef is {cfg.kl_loss_coef} but no ref_logprobs were given; score the batch "
            "with the reference policy or set kl_loss_coef=0"
        )
    mask = batch["loss_mask"]
    weights = loss_weights(mask, batch["segment_ids"], cfg.loss_aggregation, denominators)
    policy, per_token = _policy_terms(logprobs, batch, cfg)
    policy_loss = _masked_sum(policy, weights)
    loss, kl_loss = policy_loss, jnp.zeros_like(policy_loss)
    if ref_logprobs is not None:
        per_token["kl"] = kl = k3(logprobs, jax.lax.stop_gradient(ref_logprobs))
    if cfg.kl_loss_coef > 0:
        kl_loss = cfg.kl_loss_coef * _masked_sum(kl, weights)
        loss = policy_loss + kl_loss
    if entropy is not None:
        per_token["entropy"] = entropy

    sums = {name: _masked_sum(value, mask) for name, value in per_token.items()}
    sums |= {"loss": loss, "policy_loss": policy_loss, "kl_loss": kl_loss, "tokens": mask.sum()}
    return loss, jax.lax.stop_gradient(sums)


def _policy_terms(logprobs: Array, batch: Mapping[str, Array], cfg: GRPOConfig):
    """tis_t * policy_t of every token [R S], and what is logged of it by name."""
    advantages = batch["advantages"]
    old, behaviour = jax.lax.stop_gradient((batch["old_logprobs"], batch["behaviour_logprobs"]))
    ratio = _bounded_exp(logprobs - old)
    clipped = jnp.clip(ratio, 1.0 - cfg.clip_ratio, 1.0 + cfg.clip_ratio_high)
    policy = -jnp.minimum(ratio * advantages, clipped * advantages)
    logged = {
        "ratio": ratio,
        "clip_fraction": clipped * advantages < ratio * advantages,
        "ppo_kl": old - logprobs,
        "train_rollout_logprob_abs_diff": jnp.abs(old - behaviour),
    }
    if cfg.tis:
        uncapped = _bounded_exp(old - behaviour)
        tis = jnp.minimum(uncapped, cfg.tis_cap)
        policy = tis * policy
        logged |= {"tis": tis, "tis_truncated_fraction": uncapped > cfg.tis_cap}
    return policy, logged


def k3(logprobs: Float[Array, "R S"], ref_logprobs: Float[Array, "R S"]) -> Float[Array, "R S"]:
    """Schulman's k3 estimate of KL(policy || reference) from the policy's own samples: >= 0."""
    log_ratio = ref_logprobs - logprobs
    return _bounded_exp(log_ratio) - log_ratio - 1.0


def finalize_metrics(sums: Mapping[str, float]) -> dict[str, float]:
    """Turns sums added over all micro-batches of an update into figures to log.

    Args:
      sums: what `grpo_loss` returned, added up key by key.

    Returns:
      Means per loss token (`ratio`, `clip_fraction`, `ppo_kl`, `kl`, `entropy`,
      `train_rollout_logprob_abs_diff`, `tis`, `tis_truncated_fraction`; those whose option is on),
      `loss`, `policy_loss`, `kl_loss`, and the number of `tokens`.
    """
    tokens = max(float(sums["tokens"]), 1.0)
    return {
        name: float(value) / tokens if name in _TOKEN_MEANS else float(value)
        for name, value in sums.items()
    }


def _bounded_exp(log_ratio: Array) -> Array:
    return jnp.exp(jnp.clip(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO))


def _masked_sum(values: Array, weights: Array) -> Array:
    # `where` first: positions outside the loss may hold anything, infinities included.
    return jnp.sum(jnp.where(weights > 0, values, 0.0) * weights)
