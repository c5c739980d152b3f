"""Drafts of one's own, which tests name by their paths."""

import dataclasses

import jax.numpy as jnp
import numpy as np

from specjax.interfaces import Draft, Proposal


@dataclasses.dataclass(frozen=True)
class Successors(Draft):
    """Proposes by the last token alone: its weights are logits [V V] of what follows each token.

    Attributes:
      vocab: vocabulary size of the target.
    """

    vocab: int

    @classmethod
    def of(cls, target, spec):
        return cls(target.vocab_size)

    def load(self, reader):
        logits = np.random.default_rng(5).normal(0, 2, (self.vocab, self.vocab))
        return {"logits": jnp.asarray(logits, jnp.float32)}

    def begin(self, model, params, state, steps, total):
        root = jnp.take_along_axis(state.tokens, state.length[:, None] - 1, axis=1)
        return self._after(params, root), None

    def step(self, model, params, work, level):
        return self._after(params, level.tokens), work

    def _after(self, params, tokens):
        return Proposal(params["logits"][jnp.maximum(tokens, 0)])
