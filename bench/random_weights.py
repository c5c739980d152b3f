"""Random weights of a model, for benches whose times do not depend on them."""

from __future__ import annotations

from collections.abc import Callable

import jax

from specjax.models.transformer import Params


def random_weights(init: Callable[[], Params], seed: int) -> Params:
    """Weights of the shapes that `init` makes, drawn on the device in their own dtype.

    `init` draws in float32, all layers of a weight at once: of an 8B model more than a device
    holds. Here a layer is drawn at a time. Scales are 1, all else is normal with deviation 0.02.
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
