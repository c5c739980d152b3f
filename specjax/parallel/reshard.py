"""Resharding of weights from the layout of training to that of rollouts, by one compiled program.

Training splits weights over all axes but `data`; rollouts over their own `tp` alone. Both
meshes have the same devices, and `sharding.rollout_mesh` orders the second so that the shard which
a device needs begins with the one that it has: nothing is sent twice, and no device ever holds a
whole weight that it does not keep. The steps for a weight [D N] that training splits over D and N
are:

    slice        keep a part of N where the device holds a copy (`data` became `tp`)
    all-to-all   exchange pieces of D for pieces of N (`fsdp`, `expert` and `cp` became `tp`)
    all-gather   gather the dimensions that rollouts do not split

Without these explicit steps XLA often gathers whole weights and slices them afterwards
("involuntary full rematerialization", seen with jax 0.10.2 where `tp` grows and does not absorb all
of `fsdp`).
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from specjax.interfaces import Axes, Params
from specjax.parallel import sharding

log = logging.getLogger(__name__)
MeshAxes = tuple[str, ...]


class Reshard:
    """Moves trees of weights to `target` by one compiled program, for fixed shapes.

    Args:
      tree: arrays, or shapes with shardings, split over a mesh of the same devices as `target`.
      target: mesh from `sharding.rollout_mesh`.
      axes: logical axes of the weights, see `specjax.parallel.sharding`.
      convert: function applied to the weights before they move: a cast, or one that lays them out
        in another way, such as layer by layer. It must need no communication.

    Attributes:
      made: shapes of the results.

    Raises:
      Unrelated: `target` is not a rollout mesh of the tree's mesh, or `convert` changes the layout
        of weights that are not split as `axes` say.
    """

    def __init__(
        self,
        tree: Params,
        target: jax.sharding.Mesh,
        axes: Axes,
        convert: Callable | None = None,
    ):
        common = _Common.of(mesh_of(tree), target)
        convert = convert or (lambda tree: tree)
        moved = jax.eval_shape(convert, tree)
        self._targets = sharding.param_shardings(target, moved, axes)
        routes = jax.tree.map(
            lambda leaf, old, new: common.route(len(leaf.shape), old.spec, new.spec),
            moved, _split_before(tree, moved, axes), self._targets,
        )  # fmt: skip

        def one(path, x, route):
            name = jax.tree_util.keystr(path, simple=True, separator=".")
            with jax.named_scope(f"weight.{name}"):
                return route.apply(common.mesh, x)

        def reshard(tree):
            return jax.tree_util.tree_map_with_path(one, convert(tree), routes)

        out = jax.tree.map(
            lambda route: jax.NamedSharding(common.mesh, jax.P(*route.new)),
            routes,
            is_leaf=lambda x: isinstance(x, _Route),
        )
        self._jitted = jax.jit(reshard, out_shardings=out)
        self._given = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree
        )
        self.made = sharding.shapes(moved, target, lambda *_: self._targets)

    def __call__(self, tree: Params) -> Params:
        return jax.tree.map(named, self.compiled(tree), self._targets)

    def lower(self) -> jax.stages.Lowered:
        """Returns the lowered program, not compiled yet."""
        return self._jitted.lower(self._given)

    @functools.cached_property
    def compiled(self) -> jax.stages.Compiled:
        return self.lower().compile()


class Mover:
    """Moves weights in any layout to one mesh, with a program for each layout.

    Args:
      target: mesh to move the weights to.
      axes: logical axes of the weights, see `specjax.parallel.sharding`.
    """

    def __init__(self, target: jax.sharding.Mesh, axes: Axes):
        self.target, self.axes = target, axes
        self._programs: dict[tuple, Reshard | None] = {}

    def __call__(self, tree: Params, convert: Callable | None = None) -> Params:
        """Moves weights to the target, by one program if their mesh has the same devices.

        Args:
          convert: jitted function to apply to the weights before they move, see `Reshard`.
        """
        tree = jax.tree.map(jnp.asarray, tree)
        if self.holds(tree):
            shardings = sharding.param_shardings(self.target, tree, self.axes)
            return self._copied(jax.tree.map(named, tree, shardings), convert)
        program = self.program(tree, convert)
        return self._copied(tree, convert) if program is None else program(tree)

    def program(self, tree: Params, convert: Callable | None = None) -> Reshard | None:
        """Returns the program for a tree of arrays or shapes; None: it is copied shard by shard."""
        leaves, structure = jax.tree.flatten(tree)
        key = structure, convert, tuple((x.shape, x.dtype, x.sharding) for x in leaves)
        if key not in self._programs:
            try:
                self._programs[key] = Reshard(tree, self.target, self.axes, convert)
            except Unrelated as error:
                log.info("weights are copied shard by shard: %s", error)
                self._programs[key] = None
        return self._programs[key]

    def holds(self, tree: Params) -> bool:
        """Returns whether each of the target's devices holds its shard already."""
        devices = set(self.target.devices.flat)
        shardings = sharding.param_shardings(self.target, tree, self.axes)
        for leaf, new in zip(jax.tree.leaves(tree), jax.tree.leaves(shardings), strict=True):
            held = leaf.sharding.devices_indices_map(leaf.shape)
            wanted = new.devices_indices_map(leaf.shape)
            if any(held.get(device) != wanted[device] for device in devices):
                return False
        return True

    def _copied(self, tree: Params, convert: Callable | None) -> Params:
        tree = tree if convert is None else convert(tree)
        shardings = sharding.param_shardings(self.target, tree, self.axes)
        return jax.device_put(tree, shardings)


class Unrelated(ValueError):
    """Two meshes between which weights cannot be moved by one program."""


def mesh_of(tree: Params) -> jax.sharding.Mesh:
    """Returns the mesh that a tree of weights is split over.

    Raises:
      Unrelated: the tree has no mesh, or more than one.
    """
    found = {getattr(getattr(x, "sharding", None), "mesh", None) for x in jax.tree.leaves(tree)}
    if len(found) != 1 or None in found:
        raise Unrelated("expected weights on one mesh, got " + ", ".join(map(str, found)))
    return found.pop()


def _split_before(tree: Params, moved: Params, axes: Axes):
    """Returns the shardings that converted weights have before they move.

    Args:
      tree: the weights as they are.
      moved: shapes of the converted ones.
      axes: logical axes of the weights.

    Raises:
      Unrelated: the conversion changes the layout, and the weights are not split as `axes` say.
    """
    if jax.tree.structure(tree) == jax.tree.structure(moved):
        return jax.tree.map(lambda leaf: leaf.sharding, tree)
    mesh = mesh_of(tree)
    expected = sharding.param_shardings(mesh, tree, axes)
    for leaf, rule in zip(jax.tree.leaves(tree), jax.tree.leaves(expected), strict=True):
        if not leaf.sharding.is_equivalent_to(rule, len(leaf.shape)):
            raise Unrelated(f"expected a weight split as {rule.spec}, got {leaf.sharding.spec}")
    return sharding.param_shardings(mesh, moved, axes)


def named(array: jax.Array, target: jax.NamedSharding) -> jax.Array:
    """Returns the shards of an array that lie on the target's devices; no data moves."""
    devices = target.addressable_devices
    pieces = [shard.data for shard in array.addressable_shards if shard.device in devices]
    return jax.make_array_from_single_device_arrays(array.shape, target, pieces, dtype=array.dtype)


# --- which way a weight goes ----------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Route:
    """The steps that reshard one weight.

    Attributes:
      old, new: axes of the common mesh that split each dimension, major first.
      slices: slices to take, as (dimension, axes).
      exchanges: all-to-alls, as (axes, dimension split, dimension joined).
      gathers: all-gathers, as (axes, dimension).
    """

    old: tuple[MeshAxes, ...]
    new: tuple[MeshAxes, ...]
    slices: tuple[tuple[int, MeshAxes], ...]
    exchanges: tuple[tuple[MeshAxes, int, int], ...]
    gathers: tuple[tuple[MeshAxes, int], ...]

    def apply(self, mesh: jax.sharding.Mesh, x: jax.Array) -> jax.Array:
        def local(x):
            for dimension, axes in self.slices:
                size = x.shape[dimension] // math.prod(mesh.shape[a] for a in axes)
                start = jax.lax.axis_index(axes) * size
                x = jax.lax.dynamic_slice_in_dim(x, start, size, dimension)
            for axes, split, joined in self.exchanges:
                x = jax.lax.all_to_all(x, axes, split, joined, tiled=True)
            for axes, dimension in self.gathers:
                x = jax.lax.all_gather(x, axes, axis=dimension, tiled=True)
            return x

        old, new = jax.P(*self.old), jax.P(*self.new)
        moving = jax.shard_map(local, mesh=mesh, in_specs=old, out_specs=new, check_vma=False)
        if x.dtype != jnp.bfloat16:
            return moving(x)
        # As integers, because the CPU would widen bfloat16 and send twice the bytes.
        words = jax.lax.bitcast_convert_type(x, jnp.uint16)
        return jax.lax.bitcast_convert_type(moving(words), x.dtype)


class _Common(NamedTuple):
    """A mesh, in the order of the old mesh's devices, whose axes refine those of both meshes.

    Attributes:
      mesh: the mesh.
      old, new: axis of the old or the new mesh -> axes of `mesh`, major first.
    """

    mesh: jax.sharding.Mesh
    old: dict[str, MeshAxes]
    new: dict[str, MeshAxes]

    @classmethod
    def of(cls, old: jax.sharding.Mesh, new: jax.sharding.Mesh) -> _Common:
        """Returns the common mesh of a training mesh and its `sharding.rollout_mesh`.

        Raises:
          Unrelated: the second mesh is not a rollout mesh of the first.
        """
        shape, tp = dict(old.shape), new.shape.get("tp", 1)
        same = set(old.devices.flat) == set(new.devices.flat)
        try:
            expected = sharding.rollout_mesh(old, tp) if same else None
        except ValueError:
            expected = None
        if expected is None or expected != new:
            raise Unrelated(f"{new} is not the rollout mesh of {old} with tp={tp}")
        kept = min(tp, shape["tp"])
        inner, wanted = {"tp": shape["tp"] // kept}, tp // kept
        for axis in ("cp", "expert", "fsdp", "data"):  # the innermost first
            inner[axis] = math.gcd(wanted, shape[axis])
            wanted //= inner[axis]
            if wanted > 1 and inner[axis] != shape[axis]:
                raise Unrelated(f"tp={tp} devices of {new} are no block of {old}")
        names = {axis: (f"{axis}_outer", f"{axis}_inner") for axis in sharding.MESH_AXES}
        sizes = [n for a in sharding.MESH_AXES for n in (shape[a] // inner[a], inner[a])]
        grid = old.devices.reshape(sizes)
        mesh = jax.sharding.Mesh(grid, [name for a in sharding.MESH_AXES for name in names[a]])
        grown = tuple(names[axis][1] for axis in ("data", "fsdp", "expert", "cp"))
        return cls(mesh, names, {"tp": (names["tp"][0], *grown)})

    def axes(self, dims: int, spec, names: dict[str, MeshAxes]) -> tuple[MeshAxes, ...]:
        """Translates a spec of the old or new mesh to axes of this one, without those of size 1."""
        entries = [(e,) if isinstance(e, str) else e or () for e in spec]
        entries += [()] * (dims - len(entries))
        split = [[name for axis in entry for name in names.get(axis, ())] for entry in entries]
        return tuple(tuple(n for n in entry if self.mesh.shape[n] > 1) for entry in split)

    def route(self, dims: int, old_spec, new_spec) -> _Route:
        """Returns the steps for a weight; axes that split a dimension in both specs stay."""
        old, new = self.axes(dims, old_spec, self.old), self.axes(dims, new_spec, self.new)
        left = [list(axes) for axes in old]
        slices, exchanges = [], []
        for dimension, axes in enumerate(new):
            kept = tuple(a for a in old[dimension] if a in axes)
            added = [a for a in axes if a not in old[dimension]]
            # What is exchanged into a dimension that is gathered afterwards would be interleaved.
            is_prefix = kept == old[dimension][: len(kept)] and kept == axes[: len(kept)]
            if not is_prefix or (added and len(kept) < len(old[dimension])):
                raise Unrelated(f"cannot reshard from {old_spec} to {new_spec}")
            copies = tuple(a for a in added if not any(a in here for here in old))
            if copies:
                slices.append((dimension, copies))
            moving = tuple(a for a in added if a not in copies)
            if moving:
                source = next(d for d, here in enumerate(left) if moving[0] in here)
                if tuple(left[source][-len(moving) :]) != moving:
                    raise Unrelated(f"cannot reshard from {old_spec} to {new_spec}")
                del left[source][-len(moving) :]
                exchanges.append((moving, dimension, source))
        gathers = [
            (tuple(a for a in here if a not in new[d]), d)
            for d, here in enumerate(left)
            if any(a not in new[d] for a in here)
        ]
        return _Route(old, new, tuple(slices), tuple(exchanges), tuple(gathers))
