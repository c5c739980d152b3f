"""A standalone smaller model as a draft source (Leviathan et al. 2023, arXiv 2211.17192).

The draft model reads tokens and nothing else of the target. It keeps a cache of its own, in which
the slot of a row is its absolute position, as in the target's. A round begins by running it over
the tokens that the last round emitted; the last of these, the root, gives the first prediction. The
nodes of the tree then run level by level against that cache and against the levels before.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from specjax.cache import KVCache, commit_rows, empty_cache
from specjax.config import ModelConfig
from specjax.decode.state import take_positions
from specjax.decode.tree import chain_bits
from specjax.draft.source import Level
from specjax.models.transformer import Params, Transformer, graphdef


class ModelMemory(NamedTuple):
    """What the draft model remembers between rounds.

    Attributes:
      cache: its keys and values; rows below length - pending are valid.
      pending: [B] the last tokens, root included, whose rows are not in the cache yet: those that
        the last round emitted, at least 1 and at most steps + 1.
    """

    cache: KVCache
    pending: Int[Array, " B"]


class _Work(NamedTuple):
    """Between the steps of a round.

    Attributes:
      cache: with the rows up to the root committed. root: [B] its position.
      scratch: keys and values [.. B K total H] of the tree rows run so far.
    """

    cache: KVCache
    root: Int[Array, " B"]
    scratch: KVCache


@dataclasses.dataclass(frozen=True)
class ModelSource:
    """See `specjax.draft.source.DraftSource`; parameters are in the model's decode layout.

    Attributes:
      cfg: of the draft model; `scan_layers` says which layout (`to_decode_layout`).
      vocab: the target's vocabulary size. Ids past it are padding of the draft's tables and are
        cut off; ids that the draft does not have are never proposed.
    """

    cfg: ModelConfig
    vocab: int

    def margin(self, steps: int) -> int:
        return steps + 1

    def empty(self, batch: int, slots: int, steps: int) -> ModelMemory:
        cache = empty_cache(self.cfg, batch, slots, self.cfg.num_layers, self.cfg.scan_layers)
        return ModelMemory(cache, jnp.ones((batch,), jnp.int32))

    def prefill(self, model, params, steps, tokens, lengths, hidden) -> ModelMemory:
        """The root's row is computed here as well, and again by the first round."""
        _, cache = self._draft(params).prefill(tokens, lengths)
        return ModelMemory(cache, jnp.ones_like(lengths))

    def extend(self, model, params, state, steps: int, total: int):
        """Runs a window of steps + 1 tokens; rows past the pending ones are seen by nobody."""
        draft, memory = self._draft(params), state.draft
        window, start = steps + 1, state.length - memory.pending
        x, rows = draft.decode(
            take_positions(state.tokens, start, window),
            start[:, None] + jnp.arange(window),
            memory.cache,
            start,
            chain_bits(window),
        )
        x = jnp.take_along_axis(x, (memory.pending - 1)[:, None, None], axis=1)
        cache = commit_rows(memory.cache, rows, start, after=jnp.argmax(x[:, 0], axis=-1))
        scratch = jax.tree.map(
            lambda r: jnp.zeros((*r.shape[:-2], total, r.shape[-1]), r.dtype), rows
        )
        return self._fit(draft.logits(x)), _Work(cache, state.length - 1, scratch)

    def step(self, model, params, work: _Work, level: Level):
        """One level against the cache, the root included, and the levels before."""
        draft = self._draft(params)
        positions = jnp.broadcast_to((work.root + level.step)[:, None], level.tokens.shape)
        x, scratch = draft.decode(
            level.tokens,
            positions,
            work.cache,
            work.root + 1,
            level.visible,
            scratch=(work.scratch, level.offset),
        )
        return self._fit(draft.logits(x)), work._replace(scratch=scratch)

    def commit(self, memory: ModelMemory, work: _Work, hidden, count) -> ModelMemory:
        return ModelMemory(work.cache, jnp.where(count > 0, count, memory.pending))

    def _draft(self, params: Params) -> Transformer:
        return nnx.merge(graphdef(self.cfg, self.cfg.decode_layout), params)

    def _fit(self, logits: Float[Array, "B R U"]) -> Float[Array, "B R V"]:
        """The draft's logits over the target's ids; -inf where the draft has none."""
        missing = self.vocab - logits.shape[-1]
        if missing <= 0:
            return logits[..., : self.vocab]
        return jnp.pad(logits, [(0, 0)] * 2 + [(0, missing)], constant_values=-jnp.inf)
