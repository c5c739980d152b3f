"""Bytes that a round has to touch, and how many a second a copy on this machine touches.

Counted are weights, and keys and values; not activations, logits or noise, which are small beside
them at a few rows. So a bandwidth share is a lower bound. A share may exceed 1 where the weights
fit a cache that the array of the copy does not fit.

    plain round     all weights once (of the embedding a row per sample), the cache of every sample
    verification    the same: T rows share each read
    drafted token   the head's weights, the language-model head, the head's own cache
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from specjax.config import ModelConfig
from specjax.drafts.mtp import MTPSource
from specjax.memory import cost
from specjax.models.transformer import Params


def tree_bytes(params: Params) -> int:
    """Bytes of all arrays of parameters, or of one, which may be a `Weight`."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(params))


def forward_bytes(cfg: ModelConfig, params: Params, batch: int, rows: int, context: int) -> int:
    """Bytes of one pass of the policy over batch x rows tokens, with `context` cached per sample.

    Args:
      params: in the decode layout.
    """
    embed = tree_bytes(params["embed"])
    weights = tree_bytes(params) - (embed if "lm_head" in params else 0)
    embedded = batch * rows * embed // cfg.vocab_size
    return weights + embedded + batch * cost(cfg, context + rows).page


def draft_bytes(cfg: ModelConfig, params: Params, head: Params, batch: int, context: int) -> int:
    """Bytes of one drafted token per sample by an MTP head, of which one module runs."""
    lm_head = params["lm_head"] if "lm_head" in params else params["embed"]
    module = tree_bytes(head) // cfg.mtp_num_layers
    embedded = batch * tree_bytes(params["embed"]) // cfg.vocab_size
    page = MTPSource(cfg).cost(context + 1).page // cfg.mtp_num_layers
    return module + tree_bytes(lm_head) + embedded + batch * page


def round_bytes(
    cfg: ModelConfig,
    params: Params,
    head: Params | None,
    steps: int,
    rows: int,
    batch: int,
    context: int,
) -> int:
    """Bytes of one round that drafts `steps` tokens deep and verifies `rows`; 0 and 1 are plain."""
    total = forward_bytes(cfg, params, batch, rows, context)
    return total + (steps * draft_bytes(cfg, params, head, batch, context) if steps else 0)


def copy_of(size: int) -> tuple[Callable[[], None], int]:
    """A function that reads and writes an array of `size` bytes, and the bytes that it touches."""
    array = jnp.zeros(size // 4, jnp.float32)
    compiled = jax.jit(lambda x: x + 1).lower(array).compile()
    return (lambda: jax.block_until_ready(compiled(array))), 2 * array.nbytes
