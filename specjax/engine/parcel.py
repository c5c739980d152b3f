"""What a program tells the host, as one array instead of a dozen.

Every array that comes from a device costs the host a transfer, some calls of Python and a copy,
however small it is. A chunk tells a dozen small ones; in one they cost what one of them did.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

T = TypeVar("T")


class _Layout(NamedTuple):
    """What the words mean: the tree, and the shape and dtype of each of its leaves, in order."""

    structure: jax.tree_util.PyTreeDef
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[np.dtype, ...]


@dataclasses.dataclass(frozen=True)
class Parcel(Generic[T]):
    """A tree of arrays in one array. Programs give it back like any other tree; its layout belongs
    to the tree's structure.

    Attributes:
      words: uint32 [n] bits of all leaves, in order.
    """

    words: jax.Array
    layout: _Layout

    @classmethod
    def of(cls, tree: T) -> Parcel[T]:
        """Packs, inside a jitted function.

        Raises:
          TypeError: an array is neither of booleans nor of 32-bit numbers.
        """
        leaves, structure = jax.tree.flatten(tree)
        words = jnp.concatenate([_words(x).ravel() for x in leaves])
        shapes, dtypes = tuple(x.shape for x in leaves), tuple(np.dtype(x.dtype) for x in leaves)
        return cls(words, _Layout(structure, shapes, dtypes))

    @property
    def is_ready(self) -> bool:
        """Whether the program is done."""
        return self.words.is_ready()

    def send(self) -> None:
        """Starts the way to the host, once the program is done."""
        self.words.copy_to_host_async()

    def open(self) -> T:
        """The tree in numpy, read-only; waits until it is there."""
        words, leaves, begin = np.asarray(self.words), [], 0
        for shape, dtype in zip(self.layout.shapes, self.layout.dtypes, strict=True):
            size = math.prod(shape)
            part = words[begin : begin + size].reshape(shape)
            leaves.append(part.astype(bool) if dtype.kind == "b" else part.view(dtype))
            begin += size
        return jax.tree.unflatten(self.layout.structure, leaves)


jax.tree_util.register_dataclass(Parcel, data_fields=["words"], meta_fields=["layout"])


def _words(x: jax.Array) -> jax.Array:
    if x.dtype == jnp.bool_:
        return x.astype(jnp.uint32)
    if x.dtype.itemsize != 4:
        raise TypeError(f"expected an array of booleans or 32-bit numbers, got {x.dtype}")
    return jax.lax.bitcast_convert_type(x, jnp.uint32)
