"""A runner whose slots all run, at one length: what the benches of single rounds time."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import numpy as np

from specjax.decode import rng
from specjax.decode.state import EMPTY, RUNNING, RowMap
from specjax.engine.pages import NOBODYS
from specjax.engine.runner import Runner


def fill(runner: Runner, context: int, options: Mapping[str, float] | None = None) -> None:
    """Every slot runs, at `context` tokens, and does not end before the runner's `max_len`.

    The caches hold zeros and the tokens are random: times do not depend on values. No noise has
    been drawn yet, so that each position's noise is part of what is timed.

    Args:
      options: what all slots ask for, by the names of `Options`.
    """
    runner.state = None  # its buffers may be gone
    runner.reset()
    slots, state = runner.slots, runner.state
    words = np.stack([rng.request_words(0, [0], sample) for sample in range(slots)])
    tokens = np.random.default_rng(0).integers(runner.cfg.vocab_size, size=state.tokens.shape)
    wanted = {name: np.full(slots, value, np.float32) for name, value in (options or {}).items()}
    wanted["prompt_len"] = np.full(slots, context // 2, np.int32)
    state = state._replace(
        tokens=tokens.astype(np.int32),
        length=np.full(slots, context, np.int32),
        limit=np.full(slots, runner.max_len, np.int32),
        finish=np.where(np.arange(slots) < runner.batch, RUNNING, EMPTY).astype(np.int32),
        keys=np.asarray(rng.request_keys(words)),
        options=state.options._replace(**wanted),
    )
    runner.state = jax.block_until_ready(jax.device_put(state))


def everyone(runner: Runner, count: int | None = None) -> RowMap:
    """The rows of a full bucket: of `count` slots, or of all.

    No two slots share a page, for what all of them read would be read from memory only once.
    """
    count, full = count or runner.batch, runner.table_width - 1
    table = np.full((count, runner.table_width), NOBODYS, np.int32)
    table[:, :full] = (NOBODYS + 1 + np.arange(count * full)).reshape(count, full)
    return RowMap(np.arange(count, dtype=np.int32), np.ones(count, bool), table)
