"""From logits to the distribution that is sampled: one implementation for plain decoding, drafting
and verification alike. A temperature of 0 is greedy and takes its own branch, for dividing by it
would not.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def sanitise(logits: Float[Array, "... V"]) -> Float[Array, "... V"]:
    """Draft logits with NaN and infinities made harmless; a broken draft may only cost time.

    NaN sorts first in `top_k`; a head that went to NaN must look like a head that knows nothing.
    The best logit becomes 0: added to 1e30 the noise would be lost, and the token drawn would no
    longer follow the q that `block` divides by.
    """
    finite = jnp.nan_to_num(logits, nan=-1e30, posinf=1e30, neginf=-1e30)
    return finite - finite.max(axis=-1, keepdims=True)


def _broadcast(temperature: Float[Array, " B"], rank: int) -> Array:
    return temperature.reshape(temperature.shape + (1,) * (rank - 1))


def tempered(logits: Float[Array, "B ... V"], temperature: Float[Array, " B"]) -> Array:
    """Logits divided by the temperature; untouched where it is 0."""
    t = _broadcast(temperature, logits.ndim)
    return logits / jnp.where(t > 0, t, 1.0)


def perturbed(
    logits: Float[Array, "B ... V"], temperature: Float[Array, " B"], noise: Array
) -> Float[Array, "B ... V"]:
    """Scores whose argmax is a sample (Gumbel-max): transformed logits + noise, none at T = 0."""
    t = _broadcast(temperature, logits.ndim)
    return tempered(logits, temperature) + jnp.where(t > 0, noise, 0.0)


def probabilities(logits: Float[Array, "B ... V"], temperature: Float[Array, " B"]) -> Array:
    """The distribution that is sampled; one-hot on the argmax at T = 0."""
    t = _broadcast(temperature, logits.ndim)
    greedy = jax.nn.one_hot(jnp.argmax(logits, -1), logits.shape[-1], dtype=jnp.float32)
    return jnp.where(t > 0, jax.nn.softmax(tempered(logits, temperature), -1), greedy)


def chosen_logprobs(
    logits: Float[Array, "B R V"], temperature: Float[Array, " B"], tokens: Array
) -> Float[Array, "B R"]:
    """Log-probability of `tokens` under the temperature-scaled target (T = 0 scored at T = 1)."""
    scaled = tempered(logits, temperature)
    picked = jnp.take_along_axis(scaled, tokens[..., None], axis=-1)[..., 0]
    return picked - jax.nn.logsumexp(scaled, axis=-1)
