"""A weight that training stores in parts: it is cast, gathered and used, and its gradient added up.

XLA would do the same from sharding constraints, with more bytes on the network: it gathers a weight
before it casts it unless all that reads the weight is the cast, and adds up whole gradients on all
devices, of which each then keeps its part. Inside of a loop it would do so at every turn.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
from jaxtyping import Array

from specjax.parallel import sharding


@dataclasses.dataclass(frozen=True)
class Stored:
    """Where the parts of a weight are; static under jit.

    Attributes:
      mesh: mesh of training; None for one device, which holds all.
      axes: logical axes of the weight; one of them is `embed`, over which it is gathered.
      shape, dtype: those of the stored weight.
    """

    mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh | None
    axes: tuple[str | None, ...]
    shape: tuple[int, ...]
    dtype: Any

    @property
    def spec(self) -> jax.P:
        """How the weight and its gradient are split."""
        return sharding.spec_for(self.mesh, self.axes, self.shape)

    @property
    def gathered_spec(self) -> jax.P:
        """How the weight is split where it is used."""
        return sharding.gathered_spec(self.mesh, self.axes, self.shape)

    def split(self, name: str) -> tuple[str, ...]:
        """Returns the mesh axes that split a logical axis of the weight."""
        if self.mesh is None:
            return ()
        return sharding.split_over(self.mesh, name, self.shape[self.axes.index(name)])

    def size(self, name: str) -> int:
        """Returns the size of a logical axis on one device where the weight is used."""
        whole = self.shape[self.axes.index(name)]
        if name == "embed":
            return whole
        return whole // math.prod(self.mesh.shape[axis] for axis in self.split(name))

    def first(self, name: str) -> Array | int:
        """Returns, inside `on_devices`, the index of a device's first element of a logical axis."""
        number = 0
        for axis in self.split(name):
            number = number * self.mesh.shape[axis] + jax.lax.axis_index(axis)
        return number * self.size(name)

    def gathered(self, weight: Array, dtype: Any) -> Array:
        """Casts the weight, and then gathers it over the devices that split packed rows.

        The gradient would be in that dtype: callers that sum in the weight's own define theirs.
        """
        weight = weight.astype(dtype)
        if self.mesh is None:
            return weight
        where = jax.NamedSharding(self.mesh, self.gathered_spec)
        return jax.lax.with_sharding_constraint(weight, where)

    def on_devices(self, local: Callable, given: tuple, made: Any) -> Callable:
        """Wraps a function of arrays to run on each device, over the parts that it holds.

        Args:
          given, made: specs of arguments and results.
        """
        if self.mesh is None:
            return local
        return jax.shard_map(local, mesh=self.mesh, in_specs=given, out_specs=made, check_vma=False)

    def add_up(self, part: Array) -> Array:
        """Adds up, inside `on_devices`, the gradients that devices have computed from their rows.

        Args:
          part: a device's gradient of the gathered weight.

        Returns:
          the sum, split as the weight is stored.
        """
        if self.mesh is None:
            return part
        split = self.split("embed")
        if split:
            dim = self.axes.index("embed")
            part = jax.lax.psum_scatter(part, split, scatter_dimension=dim, tiled=True)
        rest = tuple(axis for axis in sharding.row_axes(self.mesh) if axis not in split)
        return jax.lax.psum(part, rest)
