"""A part of the target's vocabulary to draft from (FR-Spec, arXiv 2502.14856).

A file lists the tokens, as SGLang's `speculative_token_map` does.
Below each row a head or model multiplies by C columns of its language-model head instead of V. The
tokens are data, an entry of its parameters, so that changing them compiles nothing. Tokens that are
left out are never drafted; they are still emitted where the target chooses them.
"""

from __future__ import annotations

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from specjax.config import ModelConfig, SpecConfig
from specjax.config.model import LogitForm
from specjax.interfaces import Param, Proposal
from specjax.models.transformer import Params, lm_logits
from specjax.weights.matrix import pack, unpack

ENTRY = "vocabulary"  # the entry of a draft's parameters, see `Draft.columns`


def draft_ids(cfg: ModelConfig, spec: SpecConfig) -> np.ndarray | None:
    """The ids, ascending, that are drafted from; None: all.

    Raises:
      ValueError: the file cannot be read (see `read_token_map`), or has fewer ids than
        `draft_vocab`.
    """
    name, size = spec.token_map, spec.draft_vocab
    if name is None:
        return None
    listed = read_token_map(name, cfg.vocab_size)
    if size is not None and size > len(listed):
        raise ValueError(f"draft_vocab: expected at most {len(listed)}, as in {name}, got {size}")
    return np.sort(listed[:size])


def read_token_map(name: str, vocab: int) -> np.ndarray:
    """The token ids in a file, a JSON list with the most frequent first.

    Raises:
      ValueError: the file cannot be read, or holds something else.
    """
    try:
        listed, got = json.loads(Path(name).read_text(encoding="utf-8")), "something else"
    except (OSError, ValueError) as error:  # it is absent, not UTF-8, or not JSON
        listed, got = None, str(error)
    is_list = isinstance(listed, list) and listed and all(type(token) is int for token in listed)
    if not is_list or min(listed) < 0 or max(listed) >= vocab or len({*listed}) < len(listed):
        raise ValueError(
            f"token_map: expected a file with a JSON list of different token ids "
            f"below {vocab}, the most frequent first, got {name}: {got}"
        )
    return np.array(listed, np.int32)


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


def proposal(params: Params, normed: Float[Array, "B R D"], form: LogitForm) -> Proposal | None:
    """Proposes what follows normed states by the chosen columns; None: all columns are used.

    Args:
      form: how logits follow from the products of the head's matrix.
    """
    some = params.get(ENTRY)
    return some and Proposal(lm_logits(normed, some["lm_head"], form), some["ids"])
