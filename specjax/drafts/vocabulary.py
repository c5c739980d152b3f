"""A part of the target's vocabulary to draft from (FR-Spec, arXiv 2502.14856).

Below each row a head or model multiplies by C columns of its language-model head instead of V. The
tokens are data, an entry among its parameters, so that other ones compile nothing. Those that are
left out are never drafted, and are emitted as ever.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from specjax.interfaces import Proposal
from specjax.kernels import panels
from specjax.models.transformer import Params, lm_logits

ENTRY = "vocabulary"  # of a draft's parameters, see `Draft.columns`


def head_of(params: Params) -> Float[Array, "D V"]:
    """The language-model head of a model in its decode layout."""
    head = params.get("lm_head")
    if head is None:
        return params["embed"].T
    return panels.unpack(head) if head.ndim == 3 else head


def columns(head: Float[Array, "D V"], ids: Int[Array, " C"], packed: bool) -> Params:
    """The entry: ids, and their columns of a head.

    Args:
      ids: ascending. packed: the columns are to lie in panels, if they fill any.
    """
    some = {"lm_head": jnp.take(head, ids, axis=1, mode="clip")}
    return {"ids": ids, **(panels.pack(some, some, head.dtype) if packed else some)}


def network(params: Params) -> Params:
    """Parameters of the network alone."""
    return {name: value for name, value in params.items() if name != ENTRY}


def proposal(params: Params, normed: Float[Array, "B R D"]) -> Proposal | None:
    """What follows normed states, by the columns among the parameters; None: there are none."""
    some = params.get(ENTRY)
    return some and Proposal(lm_logits(normed, some["lm_head"]), some["ids"])
