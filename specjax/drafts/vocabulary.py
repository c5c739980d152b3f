"""A part of the target's vocabulary to draft from (FR-Spec, arXiv 2502.14856).

Below each row a head or model multiplies by C columns of its language-model head instead of V. The
tokens are data, an entry of its parameters, so that changing them compiles nothing. Tokens that are
left out are never drafted; they are still emitted where the target chooses them.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from specjax.config import ModelConfig
from specjax.interfaces import Param, Proposal
from specjax.models.transformer import Params, lm_logits
from specjax.weights.matrix import pack, unpack

ENTRY = "vocabulary"  # the entry of a draft's parameters, see `Draft.columns`


def head_of(params: Params) -> Float[Array, "D V"]:
    """Returns the language-model head of a model in its decode layout."""
    head = params.get("lm_head")
    return unpack(params["embed"]).T if head is None else unpack(head)


def columns(head: Float[Array, "D V"], ids: Int[Array, " C"], cfg: ModelConfig) -> Params:
    """Makes the entry `vocabulary` of parameters: ids, and their columns of a head.

    Args:
      head: language-model head.
      ids: token ids that are drafted from, ascending.
      cfg: config whose `run.products` says the number format of the columns.
    """
    some = jnp.take(head, ids, axis=1, mode="clip")
    row = Param(some.shape, (None, None), matrix=True)
    return {"ids": ids, **pack({"lm_head": some}, {"lm_head": row}, cfg)}


def network(params: Params) -> Params:
    """Returns the parameters without that entry."""
    return {name: value for name, value in params.items() if name != ENTRY}


def proposal(params: Params, normed: Float[Array, "B R D"]) -> Proposal | None:
    """Proposes what follows normed states by the chosen columns; None: all columns are used."""
    some = params.get(ENTRY)
    return some and Proposal(lm_logits(normed, some["lm_head"]), some["ids"])
