"""A full batch of requests on random weights, on which the time of one round is measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import jax
import numpy as np

from specjax.decode.noise import request_keys, request_words
from specjax.decode.state import EMPTY, RUNNING, RowMap
from specjax.engine.pages import NULL_PAGE
from specjax.engine.runner import Runner
from specjax.models.families.dense import dense_config
from specjax.models.transformer import Params

SHAPES = {
    "vocab_1024": dense_config(
        vocab_size=1024,
        hidden_size=192,
        intermediate_size=640,
        num_layers=12,
        num_heads=6,
        num_kv_heads=2,
        head_dim=32,
        mtp_num_layers=1,
    ),
    "qwen3_0.6b": dense_config(
        vocab_size=151_936,
        hidden_size=1024,
        intermediate_size=3072,
        num_layers=28,
        num_heads=16,
        num_kv_heads=8,
        head_dim=128,
        rope_theta=1_000_000.0,
        tie_embeddings=True,
        mtp_num_layers=1,
    ),
}


def random_weights(init: Callable[[], Params], seed: int) -> Params:
    """Draws weights of the shapes that `init` makes, on the device and in their own dtype.

    `init` draws all layers of a weight at once, in float32: of an 8B model more than a device
    holds. Here one layer is drawn at a time. Scales are 1, all else is normal with deviation 0.02.
    """
    leaves, tree = jax.tree_util.tree_flatten_with_path(jax.eval_shape(init))
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    drawn = [
        _draw(key, leaf.shape, leaf.dtype.name, "norm" in str(path[-1]))
        for key, (path, leaf) in zip(keys, leaves, strict=True)
    ]
    return jax.tree.unflatten(tree, drawn)


def _draw(key, shape: tuple[int, ...], dtype: str, scale: bool) -> jax.Array:
    def normal(key, shape):
        return (0.02 * jax.random.normal(key, shape, dtype)).astype(dtype)

    def make(key):
        if scale:
            return jax.numpy.ones(shape, dtype)
        if len(shape) < 3:
            return normal(key, shape)
        return jax.lax.map(lambda key: normal(key, shape[1:]), jax.random.split(key, shape[0]))

    return jax.jit(make)(key)


def fill(runner: Runner, context: int, options: Mapping[str, float] | None = None) -> None:
    """Sets the state of a runner so that every slot runs, with `context` tokens.

    No slot ends before the runner's `max_len`. The caches hold zeros and the tokens are random:
    times do not depend on values. No noise has been drawn yet, so that drawing it is timed.

    Args:
      options: sampling options of all slots, by the names of `Options`.
    """
    runner.state = None  # its buffers may be gone
    runner.reset()
    slots, state = runner.slots, runner.state
    words = np.stack([request_words(0, [0], sample) for sample in range(slots)])
    tokens = np.random.default_rng(0).integers(runner.cfg.vocab_size, size=state.tokens.shape)
    wanted = {name: np.full(slots, value, np.float32) for name, value in (options or {}).items()}
    wanted["prompt_len"] = np.full(slots, context // 2, np.int32)
    state = state._replace(
        tokens=tokens.astype(np.int32),
        length=np.full(slots, context, np.int32),
        limit=np.full(slots, runner.max_len, np.int32),
        finish=np.where(np.arange(slots) < runner.batch, RUNNING, EMPTY).astype(np.int32),
        keys=np.asarray(request_keys(words)),
        options=state.options._replace(**wanted),
    )
    runner.state = jax.block_until_ready(jax.device_put(state))


def full_row_map(runner: Runner, count: int | None = None) -> RowMap:
    """Returns the row map of a full bucket: of the first `count` slots, or of all.

    No two slots share a page: a page that all of them read would be read from memory only once.
    """
    count, full = count or runner.batch, runner.table_width - 1
    table = np.full((count, runner.table_width), NULL_PAGE, np.int32)
    table[:, :full] = (NULL_PAGE + 1 + np.arange(count * full)).reshape(count, full)
    return RowMap(np.arange(count, dtype=np.int32), np.ones(count, bool), table)
