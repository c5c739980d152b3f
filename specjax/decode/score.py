"""Log-probabilities of tokens that were given, not generated: how likely the policy found a prompt.

They are those of the raw logits: a prompt was not sampled, and so has no temperature.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from specjax.config.sampling import MAX_TOP_LOGPROBS
from specjax.decode import shards
from specjax.decode.sampling import normaliser
from specjax.decode.tree import chain_bits
from specjax.interfaces import Memory, Where
from specjax.memory import Commit, after_of, choose_slots, commit, empty_slots, page_size
from specjax.models.transformer import Transformer

LOGIT_ROWS = 64  # whose logits exist at once; one takes 0.6 MB where there are 150,000 tokens


class Scratch(NamedTuple):
    """What was read of some prompts so far.

    Attributes:
      memory: pages of these prompts alone, the first of which belongs to none, and a slot each.
    """

    memory: Memory


class Scores(NamedTuple):
    """What followed each position, and what else could have; N = min(20, V).

    Attributes:
      logprobs: of the token that followed. ranks: of it, 1 for the most likely token.
      top_ids, top_logprobs: of the most likely tokens, best first.
      valid: the logits are a distribution, see `normaliser`; else the rest is arbitrary.
    """

    logprobs: Float[Array, "B S"]
    ranks: Int[Array, "B S"]
    top_ids: Int[Array, "B S N"]
    top_logprobs: Float[Array, "B S N"]
    valid: Bool[Array, "B S"]


def score(
    model: Transformer,
    scratch: Scratch,
    tokens: Int[Array, "B N"],
    start: Int[Array, " B"],
    table: Int[Array, "B X"],
) -> tuple[Scratch, Scores]:
    """Reads S = N - 1 positions of each prompt, as `admit.prefill` does, and scores what follows.

    Logits are made for some positions at a time: those of all would take B S V numbers.

    Args:
      tokens: from `start` on, and the one after; what is beyond a prompt is arbitrary, and so are
        its scores.
      start: a multiple of S. table: the pages of each prompt.
    """
    batch, width = tokens.shape[0], tokens.shape[1] - 1
    positions = start[:, None] + jnp.arange(width)
    where = Where("tree", positions, prefix=start, visible=chain_bits(width), table=table)
    fresh = empty_slots(model.cfg, batch)
    slots = choose_slots(start == 0, fresh, scratch.memory.slots)
    memory = Memory(scratch.memory.pages, slots)
    found = model.decode(tokens[:, :-1], where, memory)
    hidden = found.x
    run = math.gcd(width, page_size(memory.pages))  # within a page
    to = Commit(start, table, after_of(hidden), run)
    # Slots take in what is beyond a prompt as well: nothing is read after it.
    count = jnp.full_like(start, width)
    memory = commit(model.cfg, memory, found.scratch, None, count, to)
    piece = math.gcd(width, max(1, LOGIT_ROWS // batch))
    untempered = jnp.ones(batch, jnp.float32)

    def one(piece):
        states, token = piece
        logits = shards.pin(model.logits(states))
        log_sum, valid = normaliser(logits, untempered)
        total = log_sum[..., None]
        chosen = jnp.take_along_axis(logits, token[..., None], axis=-1)
        best, ids = shards.top_k(logits, min(MAX_TOP_LOGPROBS, logits.shape[-1]))
        ranks = 1 + (logits > chosen).sum(axis=-1, dtype=jnp.int32)
        return Scores((chosen - total)[..., 0], ranks, ids, best - total, valid)

    def pieces(x):
        return jnp.moveaxis(x.reshape(batch, width // piece, piece, *x.shape[2:]), 1, 0)

    scores = jax.lax.map(one, (pieces(hidden), pieces(tokens[:, 1:])))
    scores = jax.tree.map(
        lambda x: jnp.moveaxis(x, 0, 1).reshape(batch, width, *x.shape[3:]), scores
    )
    return Scratch(memory), scores
