"""What has been generated so far, as the sampling transforms see it at a node of a tree.

A node's history is that of its slot (`Context`, the same for every row of a round) followed by the
tokens on the path from the root down to the node (`Rows`). Keeping the two apart is what makes
penalties aware of branches without a copy of the counts per row.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from specjax.decode import shards
from specjax.decode.options import BAD_WORD_LENGTH, Features


class Counts(NamedTuple):
    """Tokens up to and including the root.

    Attributes:
      prompt: [B V] the token occurs in the prompt. output: [B V] how often it was generated.
    """

    prompt: Bool[Array, "B V"]
    output: Int[Array, "B V"]


class Context(NamedTuple):
    """The history that all rows of a slot share; what no feature asks for is None.

    Attributes:
      root: [B] absolute position of the root, length - 1.
      suffix: [B, BAD_WORD_LENGTH - 1] the last tokens up to and including the root, -1 before the
        start of the sequence.
    """

    root: Int[Array, " B"]
    counts: Counts | None
    suffix: Int[Array, "B S"] | None


class Rows(NamedTuple):
    """Where the rows of a batch of logits stand in their trees.

    A row of depth d under a root at position P decides the token at absolute position P + 1 + d.

    Attributes:
      depth: [R] or [B R], the root's is 0.
      path: [B R D] tokens from below the root down to the row itself, then -1. D may be 0.
    """

    depth: Int[Array, "*B R"]
    path: Int[Array, "B R D"]


def root_rows(batch: int) -> Rows:
    """The root alone, as in plain decoding: R = 1, an empty path."""
    return Rows(np.zeros(1, np.int32), jnp.zeros((batch, 1, 0), jnp.int32))


def count_tokens(
    tokens: Int[Array, "B M"],
    length: Int[Array, " B"],
    prompt_len: Int[Array, " B"],
    vocab: int,
) -> Counts:
    """Counts of the first `length` tokens of each slot, of which `prompt_len` are its prompt.

    Reads the whole sequence: once per chunk. From round to round use `add_tokens`.
    """
    position = jnp.arange(tokens.shape[1])
    inside = position < length[:, None]
    generated = inside & (position >= prompt_len[:, None])
    empty = jnp.zeros((tokens.shape[0], vocab), jnp.int32)
    return Counts(
        prompt=_add(empty, tokens, inside & ~generated) > 0,
        output=_add(empty, tokens, generated),
    )


def add_tokens(counts: Counts, tokens: Int[Array, "B E"], count: Int[Array, " B"]) -> Counts:
    """Counts after the first `count` of `tokens` were emitted."""
    emitted = jnp.arange(tokens.shape[1]) < count[:, None]
    return counts._replace(output=_add(counts.output, tokens, emitted))


def _add(output: Int[Array, "B V"], tokens: Int[Array, "B E"], take: Bool[Array, "B E"]) -> Array:
    batch, vocab = output.shape
    # A negative index would wrap around, so what does not count goes past the end and is dropped.
    target = jnp.where(take & (tokens >= 0), tokens, vocab)
    return shards.pin(output.at[jnp.arange(batch)[:, None], target].add(1, mode="drop"))


def context_of(
    tokens: Int[Array, "B M"], length: Int[Array, " B"], features: Features, counts: Counts | None
) -> Context:
    """The context of slots whose first `length` tokens, the last one the root, are known.

    Args:
      counts: of these tokens; needed (and kept) only for penalties.

    Raises:
      ValueError: penalties without counts.
    """
    if features.penalties and counts is None:
        raise ValueError("features.penalties needs counts, got None: pass count_tokens(...)")
    suffix = None
    if features.bad_words:
        place = length[:, None] + jnp.arange(1 - BAD_WORD_LENGTH, 0)
        found = jnp.take_along_axis(tokens, jnp.maximum(place, 0), axis=1)
        suffix = jnp.where(place >= 0, found, -1)
    return Context(length - 1, counts if features.penalties else None, suffix)


def last_tokens(context: Context, rows: Rows) -> Int[Array, "B R S"]:
    """The last BAD_WORD_LENGTH - 1 tokens up to and including each row, -1 before the start."""
    batch, count, _ = rows.path.shape
    shared = jnp.broadcast_to(context.suffix[:, None], (batch, count, context.suffix.shape[1]))
    history = jnp.concatenate([shared, rows.path], axis=-1)
    depth = jnp.broadcast_to(jnp.asarray(rows.depth), (batch, count))
    place = depth[..., None] + jnp.arange(context.suffix.shape[1])
    return jnp.take_along_axis(history, place, axis=-1)
