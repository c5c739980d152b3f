"""The loss of the policy: an objective, and the terms that all objectives share.

Every prompt has G samples, and the objective (`train.loss.objectives`) computes advantages from
their rewards. The trainer scores the sampled tokens with the current policy (`train.loss.logprobs`,
at the rollout's temperature or after all transforms of sampling) and compares them with
`old_logprobs`, which the same program computed before the first update of the step:

    loss  = sum_t weight_t * (tis_t * policy_t + kl_loss_coef * kl_t - entropy_coeff * entropy_t)
    tis_t = min(exp(old_logprob_t - behaviour_logprob_t), tis_cap), or 1 when `tis` is off; with
            `tis_level=sequence` of the sum of these differences over the tokens of the sample
    kl_t  = d,  d^2 / 2,  or  exp(-d) + d - 1            d = logprob_t - ref_t; `kl_loss_type`

policy_t and weight_t are the objective's. The numbers of tokens and samples in the weights are
those of the update (`Denominators`), so that the gradients of micro-batches add up exactly to the
gradient of the batch.

The kl_t are k1, k2 and k3 of http://joschu.net/blog/kl-approx.html. The gradient of k1 is that of
the log-probability, and so zero on average over the policy's own samples; that of k2 is the
gradient of the KL divergence itself. Entropy has a gradient only with `entropy_coeff`.

With partial rollouts older weights sampled some of the tokens. The same program computed their
`old_logprobs` under those weights, in the step that sampled them. So the ratio of every token is to
the policy that sampled it, and the clip bounds the effect of a stale token. `tis` compares two
programs under one set of weights, as without partial rollouts. (The last bits of the engine's
`behaviour_logprobs` depend on the program that decoded the token, and so on time if a controller
chooses it. Hence they are not used for the ratio.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from specjax.interfaces import Denominators, Logprobs
from train.loss.algo import AlgoSection
from train.loss.shared import bounded_exp, sample_sums

Batch = Mapping[str, Array]
LossFn = Callable[[Array, Array, Batch, Denominators], tuple[Array, dict]]

# Sums that have the loss's weights already, and the number of tokens. All other sums are over loss
# tokens, and are divided by their number.
_WHOLE = ("loss", "policy_loss", "kl_loss", "entropy_loss", "tokens")
_COMMON = (
    *_WHOLE, "ppo_kl", "train_rollout_logprob_abs_diff", "train_rollout_kl", "tis",
    "tis_truncated_fraction", "kl", "entropy",
)  # fmt: skip


def count_denominators(
    batches: Iterable[Mapping[str, np.ndarray]], samples: int | None = None
) -> Denominators:
    """Counts loss tokens and samples over all micro-batches of one update.

    Args:
      batches: packed arrays `loss_mask` and `segment_ids`.
      samples: number of samples of the update, for some may be in no micro-batch; None counts those
        that have loss tokens.
    """
    tokens = counted = 0
    for batch in batches:
        mask = np.asarray(batch["loss_mask"]) > 0
        segments = np.asarray(batch["segment_ids"])
        tokens += int(mask.sum())
        counted += sum(len(np.unique(row[on])) for row, on in zip(segments, mask, strict=True))
    samples = counted if samples is None else samples
    return Denominators(np.float32(max(tokens, 1)), np.float32(max(samples, 1)))


def sft_loss(logprobs, entropy, batch: Batch, denominators: Denominators):
    """Cross entropy of the tokens under the loss mask, averaged over tokens."""
    mask = batch["loss_mask"]
    loss = -jnp.sum(logprobs * mask) / denominators.tokens
    sums = {"loss": loss, "tokens": mask.sum(), "entropy": jnp.sum(entropy * mask)}
    return loss, jax.lax.stop_gradient(sums)


def rl_loss(cfg: AlgoSection, on_policy: bool = False, stale: bool = False) -> LossFn:
    """Makes the loss of RL; the reference's log-probabilities are used when the batch has them.

    Args:
      cfg: settings of the loss.
      on_policy: whether a rollout has one update, so that the differentiated policy is the old one,
        which is not scored beforehand; the batch's `old_logprobs` are ignored.
      stale: whether older weights may have sampled tokens of the batch (`staleness` > 0). The
        `old_logprobs` of these tokens are used. For all others the batch's `fresh_logprobs` are
        used, or, on policy, the policy's own.
    """

    def loss(logprobs, entropy, batch, denominators):
        if on_policy or stale:
            old = jax.lax.stop_gradient(logprobs) if on_policy else batch["fresh_logprobs"]
            if stale:
                old = jnp.where(batch["staleness"] > 0, batch["old_logprobs"], old)
            batch = {**batch, "old_logprobs": old}
        return policy_loss(logprobs, batch, cfg, denominators, batch.get("ref_logprobs"), entropy)

    return loss


def policy_loss(
    logprobs: Float[Array, "R S"],
    batch: Mapping[str, Array],
    cfg: AlgoSection,
    denominators: Denominators,
    ref_logprobs: Float[Array, "R S"] | None = None,
    entropy: Float[Array, "R S"] | None = None,
) -> tuple[Float[Array, ""], dict[str, Float[Array, ""]]]:
    """One micro-batch's share of the loss (see the module's docstring for the formula).

    Args:
      logprobs: log-probabilities under the current policy; they have a gradient.
      batch: packed arrays `loss_mask`, `segment_ids`, `advantages`, `old_logprobs` and
        `behaviour_logprobs`, all [R S].
      cfg: settings of the loss, static under jit.
      denominators: counts over the whole update, see `count_denominators`.
      ref_logprobs: log-probabilities under the reference; required if `cfg.kl_loss_coef` > 0,
        logged if given.
      entropy: entropy of the distribution of each token, with its gradient if `cfg.entropy_coeff`
        > 0, which requires it; logged if given.

    Returns:
      (loss, sums). Sums of several micro-batches are added and go to `finalize_metrics`.

    Raises:
      ValueError: an objective returns arrays of another shape, or logs a reserved name.
    """
    mask, segments = batch["loss_mask"], batch["segment_ids"]
    # Outside of the loss values may be infinite, of which an objective could make NaN, and 0 times
    # NaN is NaN in the gradient. So they are set to 0.
    logprobs, old, behaviour, ref_logprobs = jax.tree.map(
        lambda x: jnp.where(mask > 0, x, 0.0),
        (logprobs, batch["old_logprobs"], batch["behaviour_logprobs"], ref_logprobs),
    )
    old, behaviour, ref_logprobs = jax.lax.stop_gradient((old, behaviour, ref_logprobs))
    weights = cfg.weights(mask, segments, denominators)
    policy, per_token = cfg.per_token(
        Logprobs(logprobs, old, behaviour, ref_logprobs), batch["advantages"], segments, mask
    )
    _check(policy, weights, per_token, mask.shape)
    per_token = {
        **per_token,
        "ppo_kl": old - logprobs,
        "train_rollout_logprob_abs_diff": jnp.abs(old - behaviour),
        "train_rollout_kl": k3(behaviour, old),
    }
    if cfg.tis:
        off = old - behaviour  # 0 outside of the loss
        uncapped = bounded_exp(sample_sums(off, segments) if cfg.tis_level == "sequence" else off)
        tis = jnp.minimum(uncapped, cfg.tis_cap)
        policy = tis * policy
        per_token |= {"tis": tis, "tis_truncated_fraction": uncapped > cfg.tis_cap}
    policy_loss = _masked_sum(policy, weights)
    loss, kl_loss = policy_loss, jnp.zeros_like(policy_loss)
    if ref_logprobs is not None:
        per_token["kl"] = k3(logprobs, ref_logprobs)
    if cfg.kl_loss_coef > 0:
        kl = KL[cfg.kl_loss_type](logprobs, ref_logprobs)
        kl_loss = cfg.kl_loss_coef * _masked_sum(kl, weights)
        loss = policy_loss + kl_loss
    if entropy is not None:
        per_token["entropy"] = entropy

    sums = {name: _masked_sum(value, mask) for name, value in per_token.items()}
    sums |= {"policy_loss": policy_loss, "kl_loss": kl_loss, "tokens": mask.sum()}
    if cfg.entropy_coeff > 0:
        sums["entropy_loss"] = entropy_loss = -cfg.entropy_coeff * _masked_sum(entropy, weights)
        loss = loss + entropy_loss
    sums["loss"] = loss
    return loss, jax.lax.stop_gradient(sums)


def k1(logprobs: Float[Array, "..."], ref_logprobs: Float[Array, "..."]) -> Float[Array, "..."]:
    """The log-ratio: an unbiased estimate of KL(policy || reference) that may be negative."""
    return logprobs - ref_logprobs


def k2(logprobs: Float[Array, "..."], ref_logprobs: Float[Array, "..."]) -> Float[Array, "..."]:
    """Half of the squared log-ratio: a biased estimate of KL(policy || reference), >= 0."""
    return 0.5 * (logprobs - ref_logprobs) ** 2


def k3(logprobs: Float[Array, "..."], ref_logprobs: Float[Array, "..."]) -> Float[Array, "..."]:
    """Schulman's k3 estimate of KL(policy || reference) from the policy's own samples: >= 0."""
    log_ratio = ref_logprobs - logprobs
    return bounded_exp(log_ratio) - log_ratio - 1.0


KL = {"k1": k1, "k2": k2, "k3": k3}


def finalize_metrics(sums: Mapping[str, float]) -> dict[str, float]:
    """Turns sums added over all micro-batches of an update into figures to log.

    Args:
      sums: sums of `policy_loss`, added up key by key.

    Returns:
      Means per loss token (`ppo_kl`, `kl`, `entropy`, `train_rollout_logprob_abs_diff`,
      `train_rollout_kl`, `tis`, `tis_truncated_fraction`; those whose option is on; and what the
      objective logs, as `ratio` and `clip_fraction`), `loss`, its parts `policy_loss`, `kl_loss`
      and `entropy_loss`, and the number of `tokens`.
    """
    tokens = max(float(sums["tokens"]), 1.0)
    return {
        name: float(value) if name in _WHOLE else float(value) / tokens
        for name, value in sums.items()
    }


def _check(policy: Array, weights: Array, logged: Mapping[str, Array], shape: tuple) -> None:
    """Refuses an objective that returns other than a value per token, or logs a reserved name."""
    for name, value in {"loss": policy, "weights": weights, **logged}.items():
        if jnp.shape(value) != shape or (name in logged and name in _COMMON):
            raise ValueError(
                f"algo.objective: expected one value per token, of shape {shape}, under a name "
                f"that is not logged of every objective; got {name} of shape {jnp.shape(value)}"
            )


def _masked_sum(values: Array, weights: Array) -> Array:
    # `where` first: positions outside the loss may hold anything, infinities included.
    return jnp.sum(jnp.where(weights > 0, values, 0.0) * weights)
