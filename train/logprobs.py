"""Log-probabilities of the tokens of packed rows, and the entropy where they were drawn.

Here they are those of the logits over a temperature; `train.processed` has those after all
transforms of sampling.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from specjax.parallel.context import Context, shift

LOGPROBS = ("temperature", "processed")


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
