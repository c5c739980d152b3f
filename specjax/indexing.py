"""Reads and writes at indices that are known to be in bounds and not negative.

The operations that jax adds for other indices, and for signed division, were a quarter of a chunk's
operations. Each costs time to trace and compile, and on accelerators in every round.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array


def take(x: Array, index: Array) -> Array:
    """`x[index]` along the first axis."""
    return x.at[index].get(mode="promise_in_bounds", wrap_negative_indices=False)


def take_along(x: Array, index: Array, axis: int) -> Array:
    """`jnp.take_along_axis(x, index, axis)`."""
    return jnp.take_along_axis(x, index, axis=axis, mode="promise_in_bounds")


def put(x: Array, index: Array, values: Array) -> Array:
    """`x.at[index].set(values)` along the first axis."""
    return x.at[index].set(values, mode="promise_in_bounds", wrap_negative_indices=False)


def take_slice(x: Array, start: tuple, sizes: tuple[int, ...]) -> Array:
    """`jax.lax.dynamic_slice(x, start, sizes)`."""
    return jax.lax.dynamic_slice(x, start, sizes, allow_negative_indices=False)


def put_slice(x: Array, values: Array, start: tuple) -> Array:
    """`jax.lax.dynamic_update_slice(x, values, start)`."""
    return jax.lax.dynamic_update_slice(x, values, start, allow_negative_indices=False)


def expanded(x: Array, like: Array) -> Array:
    """Appends axes of size 1, so that x [..] broadcasts with `like` [.. further axes]."""
    return x.reshape(*x.shape, *(1,) * (like.ndim - x.ndim))


def divide(number: Array, size: int) -> tuple[Array, Array]:
    """Quotient and remainder of a division of numbers >= 0."""
    return jax.lax.div(number, size), jax.lax.rem(number, size)
