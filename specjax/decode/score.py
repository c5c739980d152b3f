"""Log-probabilities of tokens that were given, not generated: how likely the policy found a prompt.

They are those of the raw logits: a prompt was not sampled, and so has no temperature.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from specjax.config.sampling import MAX_TOP_LOGPROBS
from specjax.decode import shards
from specjax.models.transformer import Transformer

LOGIT_ROWS = 64  # whose logits exist at once; one takes 0.6 MB where there are 150,000 tokens


class Scores(NamedTuple):
    """What followed each position, and what else could have; N = min(20, V).

    Entry i is about the token at i + 1, given those up to i; entries from the last token of a
    prompt on mean nothing.

    Attributes:
      logprobs: of the token that followed. ranks: of it, 1 for the most likely token.
      top_ids, top_logprobs: of the most likely tokens, best first.
    """

    logprobs: Float[Array, "B S"]
    ranks: Int[Array, "B S"]
    top_ids: Int[Array, "B S N"]
    top_logprobs: Float[Array, "B S N"]


def score(model: Transformer, tokens: Int[Array, "B S"], lengths: Int[Array, " B"]) -> Scores:
    """Runs the model once over prompts that are padded on the right.

    Logits are made for some positions at a time: those of all would take B S V numbers.
    """
    batch, width = tokens.shape
    index = jnp.broadcast_to(jnp.arange(width), tokens.shape)
    hidden = model.hidden(tokens, index, (index < lengths[:, None]).astype(jnp.int32))
    following = jnp.roll(tokens, -1, axis=1)
    piece = math.gcd(width, max(1, LOGIT_ROWS // batch))

    def one(piece):
        states, token = piece
        logits = shards.pin(model.logits(states))
        total = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
        chosen = jnp.take_along_axis(logits, token[..., None], axis=-1)
        best, ids = shards.top_k(logits, min(MAX_TOP_LOGPROBS, logits.shape[-1]))
        ranks = 1 + (logits > chosen).sum(axis=-1, dtype=jnp.int32)
        return Scores((chosen - total)[..., 0], ranks, ids, best - total)

    def pieces(x):
        return jnp.moveaxis(x.reshape(batch, width // piece, piece, *x.shape[2:]), 1, 0)

    found = jax.lax.map(one, (pieces(hidden), pieces(following)))
    return jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1).reshape(batch, width, *x.shape[3:]), found)
