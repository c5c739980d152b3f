"""A draft of one's own that is fed: what followed each token last in the samples that have ended.

No part of the package knows it; `test_every_source` names it by its path.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np

from specjax.interfaces import Draft, DraftNeeds, Proposal


@dataclasses.dataclass(frozen=True)
class Bigrams(Draft):
    """Proposes what followed each token last.

    Attributes:
      vocab: the size of the vocabulary, which stands for no token.
    """

    vocab: int
    needs = DraftNeeds(history=True)

    @classmethod
    def of(cls, target, spec):
        return cls(target.vocab_size)

    def store(self):
        return np.full(self.vocab, self.vocab, np.int32)

    def feed(self, store, samples):
        for sample in samples:
            sequence = [*sample.prompt, *sample.tokens]
            for token, following in zip(sequence, sequence[1:], strict=False):
                store[token] = following
        return store

    def begin(self, model, params, state, steps, total):
        root = jnp.take_along_axis(state.tokens, state.length[:, None] - 1, axis=1)
        return self._after(params, root), None

    def step(self, model, params, work, level):
        return self._after(params, level.tokens), work

    def _after(self, params, tokens):
        ids = params["history"][jnp.maximum(tokens, 0)][..., None]
        return Proposal(jnp.zeros(ids.shape, jnp.float32), ids)
