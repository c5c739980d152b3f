"""Losses of a draft head, by name, and the estimate of acceptance that is reported beside them.

At each token and recursive step a loss compares two distributions over the next token x:

    p   the policy's, as the rollout samples from it: after temperature, top-k, top-p and min-p
    q   the head's, as decoding uses it: after the same transforms, or after the temperature alone
        where the speculation does not apply them to the draft (`aligned` is off)
    q'  the head's after the temperature alone

Penalties, logit bias and masks of tokens are not applied to either. All logarithms are natural, and
p has no gradient, nor has the choice of the tokens that filters keep.

    alpha = sum_x min(p(x), q(x)) = 1 - TV(p, q)

is the probability that rejection sampling accepts a token drafted from q (Leviathan et al. 2023).
It is the most that any acceptance rule can reach, and the coupled rule reaches at least
alpha / (2 - alpha) (Daliri et al. 2024).

A head may have a vocabulary of its own, a part of the policy's: q is then 0 elsewhere, and p is
not normalised again, so that what p has elsewhere counts as rejected.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int

from specjax.config import SamplingParams
from specjax.config.sampling import SMALLEST_TEMPERATURE
from specjax.decode import sampling
from specjax.decode.options import Features, neutral


@dataclasses.dataclass(frozen=True)
class Sampling:
    """The transforms of a rollout under which policy and head are compared; static.

    Attributes:
      temperature: temperature; 0 (greedy) counts as 1, without filters.
      top_k, top_p, min_p: filters, see `SamplingParams`.
      aligned: whether decoding applies the filters to the head's logits, too.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    aligned: bool = True

    @classmethod
    def of(cls, rollout: Sampling | SamplingParams | float, aligned: bool = True) -> Sampling:
        """Makes the transforms of a rollout; a number is a temperature without filters."""
        if isinstance(rollout, Sampling):
            return rollout
        if isinstance(rollout, SamplingParams):
            names = ("temperature", "top_k", "top_p", "min_p")
            return cls(**{name: getattr(rollout, name) for name in names}, aligned=aligned)
        return cls(float(rollout), aligned=aligned)

    @property
    def features(self) -> Features:
        """The filters that have an effect."""
        on = self.temperature >= SMALLEST_TEMPERATURE
        return Features(
            top_k=on and self.top_k > 0, top_p=on and self.top_p < 1, min_p=on and self.min_p > 0
        )

    def tempered(self, logits: Float[Array, "R S C"]) -> Float[Array, "R S C"]:
        """Divides logits by the temperature, in float32."""
        on = self.temperature >= SMALLEST_TEMPERATURE
        return logits.astype(jnp.float32) / jnp.float32(self.temperature if on else 1.0)

    def filtered(self, scores: Float[Array, "R S C"]) -> Float[Array, "R S C"]:
        """Sets tempered scores to -inf where the filters of decoding do."""
        features = self.features
        if not (features.top_k or features.top_p or features.min_p):
            return scores
        rows, number, _ = scores.shape

        def each(value, dtype):
            return jnp.full(rows, value, dtype)

        options = neutral(rows, 1, 1)._replace(
            top_k=each(self.top_k, jnp.int32),
            top_p=each(self.top_p, jnp.float32),
            min_p=each(self.min_p, jnp.float32),
        )
        places = sampling.Rows(np.zeros(1, np.int32), jnp.zeros((rows, number, 0), jnp.int32))
        kept = jax.lax.stop_gradient(scores)
        # No filter reads the history.
        kept = sampling.transform(kept, options, features, None, places)
        return jnp.where(kept > -jnp.inf, scores, -jnp.inf)


class Target(NamedTuple):
    """The policy's distribution at tokens, without gradient.

    Attributes:
      p: probabilities of the tokens of the head's vocabulary, or of the k likeliest of these.
      columns: the columns of the head's logits that p belongs to; None: all, in order.
    """

    p: Float[Array, "R S C"]
    columns: Int[Array, "R S C"] | None = None

    @classmethod
    def of(
        cls,
        policy_logits: Float[Array, "R S V"],
        how: Sampling,
        ids: Int[Array, " C"] | None = None,
        top_k: int = 0,
    ) -> Target:
        """Makes the distribution that the rollout sampled from.

        Args:
          policy_logits: the policy's raw logits.
          how: transforms of the rollout.
          ids: the head's vocabulary, ascending; None: that of the policy.
          top_k: number of likeliest tokens that are kept, without normalising again; 0: all.
        """
        scores = how.filtered(how.tempered(jax.lax.stop_gradient(policy_logits)))
        p = jax.nn.softmax(scores)
        if ids is not None:
            p = jnp.take(p, ids, axis=-1)
        if not 0 < top_k < p.shape[-1]:
            return cls(p)
        return cls(*jax.lax.top_k(p, top_k))

    def gathered(self, x: Float[Array, "R S C"]) -> Array:
        """Picks values of the head's columns that p belongs to."""
        return x if self.columns is None else jnp.take_along_axis(x, self.columns, axis=-1)


class Step(NamedTuple):
    """What a loss reads of one recursive step, at each token.

    Attributes:
      logits: the head's logits, divided by the temperature: those of q'.
      labels: column of the token that the policy sampled.
      target: the policy's distribution p.
      alpha: sum of min(p, q) over the tokens of the target.
      reached: product of alpha over the earlier steps of the same row; 1 in the first step.
    """

    logits: Float[Array, "R S C"]
    labels: Int[Array, "R S"]
    target: Target
    alpha: Float[Array, "R S"]
    reached: Float[Array, "R S"] | float


def ce(step: Step) -> Float[Array, "R S"]:
    """Cross entropy of the token y that the policy sampled: -log q'(y).

    Its mean over the policy's samples is that of `kl`, but for a constant and for noise. A token
    that the head's vocabulary lacks has no loss.
    """
    labels = jnp.minimum(step.labels, step.logits.shape[-1] - 1)
    return optax.softmax_cross_entropy_with_integer_labels(step.logits, labels)


def kl(step: Step) -> Float[Array, "R S"]:
    """Divergence KL(p || q') = sum_x p(x) (log p(x) - log q'(x)), over the tokens of the target.

    q' has no filters: a q of 0 where p is not would make it infinite. With `loss_top_k` = k the sum
    has the terms of the policy's k likeliest tokens alone (SkyRL takes 256), and the target of a
    micro-batch of S tokens is S k numbers and ids in place of S V numbers. There, and for a head
    with its own vocabulary, terms without gradient are left out, and the sum may be below 0.
    """
    p, log_q = step.target.p, step.target.gathered(jax.nn.log_softmax(step.logits))
    return jax.scipy.special.xlogy(p, p).sum(-1) - (p * log_q).sum(-1)


def lk_alpha(step: Step) -> Float[Array, "R S"]:
    """Logarithm of the acceptance: -log alpha (LK losses, arXiv 2602.23881).

    Its gradient is that of `tv` divided by alpha. An alpha below 1e-8 counts as 1e-8, without
    gradient.
    """
    return -jnp.log(jnp.maximum(step.alpha, 1e-8))


def lk_lambda(step: Step) -> Float[Array, "R S"]:
    """Mixture lambda KL(p || q') + (1 - lambda) (1 - alpha), lambda = exp(-3 alpha) at each token.

    From arXiv 2602.23881; lambda has no gradient. Far from the policy it is `kl`, near it `tv`.
    """
    weight = jnp.exp(-3 * jax.lax.stop_gradient(step.alpha))
    return weight * kl(step) + (1 - weight) * (1 - step.alpha)


def tv(step: Step) -> Float[Array, "R S"]:
    """Total variation: TV(p, q) = 1 - alpha, the probability that a drafted token is rejected."""
    return 1 - step.alpha


def tv_e2e(step: Step) -> Float[Array, "R S"]:
    """Probability that not all tokens up to this step are accepted: 1 - alpha_0 .. alpha_k.

    alpha_0 .. alpha_k are those of the row's steps, so each step's acceptance is weighted by that
    of the others. The mean over K steps (`step_decay` = 1) is 1 - E / K, where

        E = sum_{k < K} alpha_0 .. alpha_k

    is the expected number of accepted tokens of a chain of K (Bebop, arXiv 2606.12370), given that
    the policy goes on as it did in the rollout.
    """
    return 1 - step.reached * step.alpha


# name -> loss of a step at each token. Those in JOINT also have a gradient for earlier steps.
DRAFT_LOSSES: dict[str, Callable[[Step], Float[Array, "R S"]]] = {
    "ce": ce, "kl": kl, "lk_alpha": lk_alpha, "lk_lambda": lk_lambda, "tv": tv, "tv_e2e": tv_e2e,
}  # fmt: skip
JOINT = frozenset({"tv_e2e"})


@dataclasses.dataclass(frozen=True)
class Objective:
    """A loss with all that decides it; static.

    Attributes:
      name: one of DRAFT_LOSSES.
      how: transforms of the rollout.
      top_k: number of the policy's likeliest tokens that `kl` sums over; 0: all.
    """

    name: str
    how: Sampling = Sampling()
    top_k: int = 0

    def __post_init__(self):
        if self.name not in DRAFT_LOSSES:
            known = ", ".join(DRAFT_LOSSES)
            raise ValueError(f"unknown draft loss {self.name!r}; choose one of {known}")

    def groups(self, steps: int) -> list[list[int]]:
        """The steps whose losses must be computed together."""
        together = self.name in JOINT
        return [list(range(steps))] if together else [[k] for k in range(steps)]

    def target(self, policy_logits: Array, ids: Array | None) -> Target:
        """The policy's distribution, see `Target.of`."""
        return Target.of(policy_logits, self.how, ids, self.top_k)

    def losses(
        self,
        logits: Sequence[Float[Array, "R S C"]],
        labels: Sequence[Int[Array, "R S"]],
        targets: Sequence[Target],
    ) -> tuple[list[Float[Array, "R S"]], list[dict[str, Float[Array, "R S"]]]]:
        """Computes the losses of a group of steps at each token.

        Args:
          logits: the head's raw logits of each step.
          labels: column of the token that the policy sampled; C where the head has none for it.
          targets: the policy's distributions of the same positions.

        Returns:
          (losses in nats or probabilities, aux), both per step. aux has, without gradient,
          `top1_matches` (whether the head's likeliest token is the label) and `overlap` (alpha).
        """
        values, aux, reached = [], [], 1.0
        for raw, label, target in zip(logits, labels, targets, strict=True):
            tempered = self.how.tempered(raw)
            used = self.how.filtered(tempered) if self.how.aligned else tempered
            q = target.gathered(jax.nn.softmax(used))
            alpha = jnp.minimum(target.p, q).sum(axis=-1)
            values.append(DRAFT_LOSSES[self.name](Step(tempered, label, target, alpha, reached)))
            matches = jnp.argmax(tempered, axis=-1) == label
            aux.append(jax.lax.stop_gradient({"top1_matches": matches, "overlap": alpha}))
            reached = reached * alpha
        return values, aux
