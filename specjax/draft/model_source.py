"""A standalone smaller model as a draft source (Leviathan et al. 2023, arXiv 2211.17192).

The draft model reads tokens and nothing else of the target. It keeps a cache of its own, in which
the slot of a row is its absolute position, as in the target's. A round begins by running it over
the tokens that the last round emitted; the last of these, the root, gives the first prediction. The
nodes of the tree then run level by level against that cache and against the levels before.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from specjax import sharding
from specjax.cache import KVCache, commit_rows, empty_cache
from specjax.config import ModelConfig
from specjax.decode.state import take_positions
from specjax.decode.tree import chain_bits
from specjax.draft.source import Level
from specjax.models import hf
from specjax.models.transformer import Params, Transformer, graphdef, unroll_layers
from specjax.tokenizer import load_tokenizer


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
      cfg: of the draft model; `scan_layers` says which layout (`decode_layout`).
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
        layout = "stacked" if self.cfg.scan_layers else "unrolled"
        return nnx.merge(graphdef(self.cfg, layout), params)

    def _fit(self, logits: Float[Array, "B R U"]) -> Float[Array, "B R V"]:
        """The draft's logits over the target's ids; -inf where the draft has none."""
        missing = self.vocab - logits.shape[-1]
        if missing <= 0:
            return logits[..., : self.vocab]
        return jnp.pad(logits, [(0, 0)] * 2 + [(0, missing)], constant_values=-jnp.inf)


def decode_layout(params: Params, cfg: ModelConfig) -> Params:
    """Stacked parameters in the dtype and layout that decoding with `cfg` takes."""
    params = jax.tree.map(lambda a: a.astype(jnp.dtype(cfg.compute_dtype)), params)
    return params if cfg.scan_layers else unroll_layers(params, cfg)


def check_vocabulary(
    draft_cfg: ModelConfig,
    target_cfg: ModelConfig,
    draft_ids: dict[str, int] | None,
    target_ids: dict[str, int] | None,
) -> None:
    """Refuses a draft model whose token ids mean something else than the target's.

    Args:
      draft_ids, target_ids: id of each token as the tokenizers say, None without a tokenizer. The
        tables of models of one family are often padded to several sizes; only tokenizers can tell
        padding from tokens.

    Raises:
      ValueError: an id stands for two different tokens, or the sizes differ and a tokenizer is
        missing.
    """
    sizes = draft_cfg.vocab_size, target_cfg.vocab_size
    if draft_ids is None or target_ids is None:
        if sizes[0] != sizes[1]:
            raise ValueError(
                f"the draft model has a vocabulary of {sizes[0]}, the target of {sizes[1]}; "
                "expected the same, or a tokenizer beside each to show that the ids they share "
                "mean the same; use a draft model of the target's family"
            )
        return
    theirs = {index: token for token, index in draft_ids.items()}
    clashes = sorted(
        (index, token) for token, index in target_ids.items() if theirs.get(index, token) != token
    )
    if clashes:
        index, token = clashes[0]
        raise ValueError(
            f"the draft model's tokenizer differs from the target's in {len(clashes)} ids: id "
            f"{index} is {theirs[index]!r}, expected {token!r}; use a draft model of the target's "
            "family"
        )


def load_draft_model(
    path: str | Path,
    target_cfg: ModelConfig,
    target_tokenizer=None,
    dtype: str = "float32",
    mesh: jax.sharding.Mesh | None = None,
) -> tuple[ModelSource, Params]:
    """Reads a Hugging Face directory as a draft model; a draft head in it is ignored.

    Args:
      target_tokenizer: compared with the directory's; None compares the vocabulary sizes only.
      dtype: of parameters and arithmetic. mesh: shard over it, as the target.

    Returns:
      the source, and its parameters in their decode layout.

    Raises:
      ValueError: see `check_vocabulary`. CheckpointError and others: see `hf.load_checkpoint`.
    """

    draft_cfg = hf.read_config(Path(path))
    tokenizer = load_tokenizer(path, required=False)
    ids = [None if t is None else t.get_vocab() for t in (tokenizer, target_tokenizer)]
    check_vocabulary(draft_cfg, target_cfg, *ids)
    cfg, params, _ = hf.load_checkpoint(path, dtype, mesh)
    # Fused weights, as unrolled layers have them, cannot be split over a mesh.
    cfg = cfg.replace(scan_layers=cfg.scan_layers or mesh is not None)
    params = jax.jit(decode_layout, static_argnums=1)(params, cfg)
    if mesh is not None:
        params = jax.device_put(params, sharding.param_shardings(mesh, params))
    return ModelSource(cfg, target_cfg.vocab_size), params
