"""The part of the vocabulary that is drafted from: the ids of a file.

The reference is FR-Spec (arXiv:2502.14856), and SGLang's `speculative_token_map`.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from specjax.config import ModelConfig, SpecConfig


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
