"""Reads and writes at indices that are sure to lie within an array.

What jax adds by itself for indices that may be negative, or lie beyond an end, and for signed
division, was a quarter of the operations of a chunk of rounds; each costs time to trace and to
compile, and on accelerators some in every round.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array


def take(x: Array, index: Array) -> Array:
    """`x[index]` along the first axis."""
    return x.at[index].get(mode="promise_in_bounds", wrap_negative_indices=False)


def take_along(x: Array, index: Array, axis: int) -> Array:
    """`jnp.take_along_axis`."""
    return jnp.take_along_axis(x, index, axis=axis, mode="promise_in_bounds")


def put(x: Array, index: Array, values: Array) -> Array:
    """`x.at[index].set(values)` along the first axis."""
    return x.at[index].set(values, mode="promise_in_bounds", wrap_negative_indices=False)


def take_slice(x: Array, start: tuple, sizes: tuple[int, ...]) -> Array:
    """`jax.lax.dynamic_slice`."""
    return jax.lax.dynamic_slice(x, start, sizes, allow_negative_indices=False)


def put_slice(x: Array, values: Array, start: tuple) -> Array:
    """`jax.lax.dynamic_update_slice`."""
    return jax.lax.dynamic_update_slice(x, values, start, allow_negative_indices=False)


def divide(number: Array, size: int) -> tuple[Array, Array]:
    """Quotient and remainder of numbers >= 0."""
    return jax.lax.div(number, size), jax.lax.rem(number, size)
