"""Scores of some tokens of the vocabulary: which column stands for which token.

A draft may propose from a part of the vocabulary (`Proposal.ids`). The sampling transforms, the
noise of a position and the rules of acceptance know the target's ids; `Columns` lies between. With
all of the vocabulary in order (ids None) every function here is the plain operation.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from specjax.decode import shards


class Columns(NamedTuple):
    """The tokens that the C columns of scores [B R C] belong to.

    Attributes:
      ids: [C], ascending, of all rows, or [B R C] of each row, in any order; None: all V tokens.
      vocab: V.
    """

    ids: Int[Array, " C"] | Int[Array, "B R C"] | None
    vocab: int

    def widened(self, scores: Float[Array, "B R C"], count: int) -> tuple[Columns, Array]:
        """Fills the columns up to at least `count` with some that stand for no token."""
        missing = count - scores.shape[-1]
        if self.ids is None or missing <= 0:
            return self, scores
        pad = [(0, 0)] * (self.ids.ndim - 1) + [(0, missing)]
        ids = jnp.pad(self.ids, pad, constant_values=self.vocab)
        scores = jnp.pad(scores, [(0, 0), (0, 0), (0, missing)], constant_values=-jnp.inf)
        return Columns(ids, self.vocab), scores

    def masked(self, scores: Float[Array, "B R C"]) -> Float[Array, "B R C"]:
        """Scores with -inf in columns that stand for no token, or for one with a column already.

        Two children of a node with one token would both be accepted, so that what a draft says of
        its ids is not taken on trust: of shared ones those that do not ascend count as none.
        """
        if self.ids is None:
            return scores
        ids = self.ids
        valid = (ids >= 0) & (ids < self.vocab)
        if ids.ndim == 1:
            before = jnp.pad(jnp.where(valid, ids, -1)[:-1], (1, 0), constant_values=-1)
            valid &= ids > jax.lax.cummax(before)
        else:
            same = ids[..., :, None] == ids[..., None, :]
            valid &= ~jnp.tril(same, -1).any(-1)
        return jnp.where(valid, scores, -jnp.inf)

    def at(self, x: Array) -> Array:
        """Numbers per token [B V] as numbers per column: [B 1 C] or [B R C]."""
        if self.ids is None:
            return x[:, None]
        x, safe = shards.pin(x), jnp.clip(self.ids, 0, self.vocab - 1)
        if self.ids.ndim == 1:
            return x[:, None, safe]
        flat = jnp.take_along_axis(x, safe.reshape(len(x), -1), axis=1)
        return flat.reshape(safe.shape)

    def at_rows(self, x: Float[Array, "B R V"]) -> Float[Array, "B R C"]:
        """Numbers per row and token as numbers per row and column."""
        if self.ids is None:
            return x
        x, safe = shards.pin(x), jnp.clip(self.ids, 0, self.vocab - 1)
        if self.ids.ndim == 1:
            return x[..., safe]
        return jnp.take_along_axis(x, safe, axis=-1)

    def of(self, tokens: Int[Array, "B R N"]) -> Int[Array, "B R N"]:
        """The column of each token; C, past the end, where it has none."""
        if self.ids is None:  # a negative index would wrap around
            return jnp.where(tokens < 0, self.vocab, tokens)
        size = self.ids.shape[-1]
        if self.ids.ndim == 1:
            column = jnp.minimum(jnp.searchsorted(self.ids, tokens), size - 1)
            found = self.ids[column] == tokens
        else:
            equal = self.ids[:, :, None] == tokens[..., None]
            column, found = jnp.argmax(equal, axis=-1), equal.any(-1)
        return jnp.where(found, column, size)

    def tokens(self, columns: Int[Array, "B R N"]) -> Int[Array, "B R N"]:
        """The token of each column."""
        if self.ids is None:
            return columns
        if self.ids.ndim == 1:
            return self.ids[columns]
        return jnp.take_along_axis(self.ids, columns, axis=-1)

    def spread(self, q: Float[Array, "B R C"]) -> Float[Array, "B R V"]:
        """Probabilities over the whole vocabulary, 0 for tokens without a column."""
        if self.ids is None:
            return q
        batch, rows, _ = q.shape
        wide = shards.pin(jnp.zeros((batch, rows, self.vocab), q.dtype))
        ids = jnp.where(self.ids < 0, self.vocab, self.ids)
        if ids.ndim == 1:
            return wide.at[:, :, ids].add(q, mode="drop")
        slot, row = jnp.ogrid[:batch, :rows]
        return wide.at[slot[..., None], row[..., None], ids].add(q, mode="drop")
