"""Weights from the layout of training to that of rollouts, by one compiled program.

Training splits weights over all of `fsdp`, `cp` and `tp`; rollouts over their own `tp` alone. Both
meshes lie over the same devices, and `sharding.rollout_mesh` arranges the second such that what a
device needs begins with what it has: nothing is sent twice and no device ever holds a whole weight
that it does not keep. For a weight [D N] that training splits over D and N, in this order:

    slice        of N, what this device keeps of copies that it holds (`data` became `tp`)
    all-to-all   pieces of D for pieces of N (`fsdp` and `cp` became `tp`)
    all-gather   of D and N, what rollouts do not split

Left to itself XLA often gathers whole weights and cuts them up afterwards ("involuntary full
rematerialization", seen with jax 0.10.2 wherever `tp` grows and `fsdp` does not vanish in it).
`received` reads from a compiled program what it really does.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
import re
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax import sharding
from specjax.models.transformer import Params

log = logging.getLogger(__name__)
Axes = tuple[str, ...]


class Reshard:
    """Moves trees of weights to `target`; compiled for the first one, refuses other shapes.

    Args:
      tree: arrays, or shapes with shardings, split over a mesh of the same devices as `target`.
      target: from `sharding.rollout_mesh`.
      convert: what happens to the weights before they move, elementwise; for instance a cast.

    Attributes:
      compiled: the program. collectives: what it moves between devices.

    Raises:
      Unrelated: the two meshes are not made for each other.
    """

    def __init__(self, tree: Params, target: jax.sharding.Mesh, convert: Callable | None = None):
        common = _Common.of(mesh_of(tree), target)
        convert = convert or (lambda tree: tree)
        moved = jax.eval_shape(convert, tree)
        self._targets = sharding.param_shardings(target, moved)
        specs = jax.tree.map(lambda leaf: leaf.sharding.spec, tree)
        routes = jax.tree.map(
            lambda leaf, old, new: common.route(len(leaf.shape), old, new.spec),
            moved, specs, self._targets,
        )  # fmt: skip

        def program(tree):
            return jax.tree.map(lambda x, route: route.apply(common.mesh, x), convert(tree), routes)

        out = jax.tree.map(
            lambda route: jax.NamedSharding(common.mesh, jax.P(*route.new)),
            routes,
            is_leaf=lambda x: isinstance(x, _Route),
        )
        self.compiled = jax.jit(program, out_shardings=out).lower(tree).compile()
        self.collectives = received(self.compiled.as_text())

    def __call__(self, tree: Params) -> Params:
        return jax.tree.map(_named, self.compiled(tree), self._targets)

    @property
    def bytes_per_device(self) -> int:
        """That a device receives from others."""
        return sum(c.received for c in self.collectives)


class Mover:
    """Brings whatever weights come to one mesh; keeps a program for each layout they come in.

    Attributes:
      received: bytes that a device received for the last tree, at most.
    """

    def __init__(self, target: jax.sharding.Mesh):
        self.target, self.received = target, 0
        self._programs: dict[tuple, Reshard | None] = {}

    def __call__(
        self, tree: Params, convert: Callable | None = None, elementwise: bool = True
    ) -> Params:
        """Weights on the target, by one program if they come from a training mesh of its devices.

        Args:
          convert: jitted; done where it costs least. elementwise: it leaves the tree as it is.
        """
        self.received, tree = 0, jax.tree.map(jnp.asarray, tree)
        if (renamed := self._renamed(tree)) is not None:
            return self._copied(renamed, convert)
        if not elementwise:
            return self._copied(tree, convert)
        key = jax.tree.structure(tree), tuple(x.sharding for x in jax.tree.leaves(tree))
        if key not in self._programs:
            try:
                self._programs[key] = Reshard(tree, self.target, convert)
            except Unrelated as error:
                log.info("weights are copied shard by shard: %s", error)
                self._programs[key] = None
        if (program := self._programs[key]) is None:
            return self._copied(tree, convert)
        self.received = program.bytes_per_device
        return program(tree)

    def _renamed(self, tree: Params) -> Params | None:
        """The tree under the target's name, if each of its devices holds its shard already."""
        devices = set(self.target.devices.flat)
        shardings = sharding.param_shardings(self.target, tree)
        for leaf, new in zip(jax.tree.leaves(tree), jax.tree.leaves(shardings), strict=True):
            held = leaf.sharding.devices_indices_map(leaf.shape)
            wanted = new.devices_indices_map(leaf.shape)
            if any(held.get(device) != wanted[device] for device in devices):
                return None
        return jax.tree.map(lambda leaf, new: _named(leaf, new), tree, shardings)

    def _copied(self, tree: Params, convert: Callable | None) -> Params:
        tree = tree if convert is None else convert(tree)
        shardings = sharding.param_shardings(self.target, tree)
        self.received = bytes_missing(tree, shardings)
        return jax.device_put(tree, shardings)


class Unrelated(ValueError):
    """Two meshes between which weights cannot be moved by one program."""


def mesh_of(tree: Params) -> jax.sharding.Mesh:
    """The mesh that a tree of weights is split over.

    Raises:
      Unrelated: there is none, or more than one.
    """
    found = {getattr(getattr(x, "sharding", None), "mesh", None) for x in jax.tree.leaves(tree)}
    if len(found) != 1 or None in found:
        raise Unrelated("expected weights on one mesh, got " + ", ".join(map(str, found)))
    return found.pop()


def bytes_missing(tree: Params, shardings) -> int:
    """Bytes of their shards that devices do not hold yet, on the device that lacks most.

    Args:
      tree: arrays. shardings: where they are to go.
    """
    missing: dict = {}
    for leaf, new in zip(jax.tree.leaves(tree), jax.tree.leaves(shardings), strict=True):
        held = leaf.sharding.devices_indices_map(leaf.shape)
        for device, wanted in new.devices_indices_map(leaf.shape).items():
            there = _shared(wanted, held[device], leaf.shape) if device in held else 0
            size = _shared(wanted, wanted, leaf.shape) - there
            missing[device] = missing.get(device, 0) + size * leaf.dtype.itemsize
    return max(missing.values(), default=0)


def _shared(one, other, shape) -> int:
    """Elements that two slices of an array have in common."""
    pairs = zip(one, other, shape, strict=True)
    bounds = [(*a.indices(n)[:2], *b.indices(n)[:2]) for a, b, n in pairs]
    return math.prod(max(0, min(b, d) - max(a, c)) for a, b, c, d in bounds)


def _named(array: jax.Array, target: jax.NamedSharding) -> jax.Array:
    """The same buffers, of the target's devices, under its mesh; no byte moves."""
    devices = target.addressable_devices
    pieces = [shard.data for shard in array.addressable_shards if shard.device in devices]
    return jax.make_array_from_single_device_arrays(array.shape, target, pieces)


# --- which way a weight goes ----------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Route:
    """One weight's way.

    Attributes:
      old, new: per dimension, the axes of the common mesh that split it, major first.
      slices: (dimension, axes). exchanges: (axes, dimension split, dimension joined).
      gathers: (axes, dimension).
    """

    old: tuple[Axes, ...]
    new: tuple[Axes, ...]
    slices: tuple[tuple[int, Axes], ...]
    exchanges: tuple[tuple[Axes, int, int], ...]
    gathers: tuple[tuple[Axes, int], ...]

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
        # As bits: the CPU would widen bfloat16 for the way, and twice the bytes would travel.
        words = jax.lax.bitcast_convert_type(x, jnp.uint16)
        return jax.lax.bitcast_convert_type(moving(words), x.dtype)


class _Common(NamedTuple):
    """One mesh, in the order of the old devices, that both meshes are coarser views of.

    Attributes:
      old, new: axis of either mesh -> axes of this one, major first.
    """

    mesh: jax.sharding.Mesh
    old: dict[str, Axes]
    new: dict[str, Axes]

    @classmethod
    def of(cls, old: jax.sharding.Mesh, new: jax.sharding.Mesh) -> _Common:
        """See `sharding.rollout_mesh`, which says how the two are related.

        Raises:
          Unrelated: they are not.
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
        for axis in ("cp", "fsdp", "data"):  # the innermost first
            inner[axis] = math.gcd(wanted, shape[axis])
            wanted //= inner[axis]
            if wanted > 1 and inner[axis] != shape[axis]:
                raise Unrelated(f"tp={tp} devices of {new} are no block of {old}")
        names = {axis: (f"{axis}_outer", f"{axis}_inner") for axis in sharding.MESH_AXES}
        sizes = [n for a in sharding.MESH_AXES for n in (shape[a] // inner[a], inner[a])]
        grid = old.devices.reshape(sizes)
        mesh = jax.sharding.Mesh(grid, [name for a in sharding.MESH_AXES for name in names[a]])
        grown = tuple(names[axis][1] for axis in ("data", "fsdp", "cp"))
        return cls(mesh, names, {"tp": (names["tp"][0], *grown)})

    def axes(self, dims: int, spec, names: dict[str, Axes]) -> tuple[Axes, ...]:
        """Of a spec over the old or new mesh, without those of a single device."""
        entries = [(e,) if isinstance(e, str) else e or () for e in spec]
        entries += [()] * (dims - len(entries))
        split = [[name for axis in entry for name in names.get(axis, ())] for entry in entries]
        return tuple(tuple(n for n in entry if self.mesh.shape[n] > 1) for entry in split)

    def route(self, dims: int, old_spec, new_spec) -> _Route:
        """The way of a weight; axes that both split a dimension by stay where they are."""
        old, new = self.axes(dims, old_spec, self.old), self.axes(dims, new_spec, self.new)
        left = [list(axes) for axes in old]
        slices, exchanges = [], []
        for dimension, axes in enumerate(new):
            added = [a for a in axes if a not in old[dimension]]
            copies = tuple(a for a in added if not any(a in here for here in old))
            if copies:
                slices.append((dimension, copies))
            moving = tuple(a for a in added if a not in copies)
            if moving:
                source = next(d for d, here in enumerate(left) if moving[0] in here)
                if tuple(left[source][-len(moving) :]) != moving:
                    raise Unrelated(f"no way from {old_spec} to {new_spec}")
                del left[source][-len(moving) :]
                exchanges.append((moving, dimension, source))
        gathers = [
            (tuple(a for a in here if a not in new[d]), d)
            for d, here in enumerate(left)
            if any(a not in new[d] for a in here)
        ]
        return _Route(old, new, tuple(slices), tuple(exchanges), tuple(gathers))


# --- what a compiled program does -----------------------------------------------------------------


class Collective(NamedTuple):
    """One collective operation of a compiled program.

    Attributes:
      kind: `all-gather`, `all-to-all`, ... group: devices that take part together.
      result: bytes that a device holds of its result. received: bytes that came from others.
    """

    kind: str
    group: int
    result: int
    received: int


_OPERATION = re.compile(
    r"= (?P<type>.*?) (?P<kind>all-gather|all-to-all|all-reduce|reduce-scatter|collective-permute)"
    r"(?P<start>-start)?\("
)
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,]*)\]")
_BITS = {"pred": 8, "bf16": 16}


def received(hlo: str) -> list[Collective]:
    """The collectives of optimised HLO text, as the compiler prints it for one device."""
    found = []
    for line in hlo.splitlines():
        match = _OPERATION.search(line)
        if match is None:
            continue
        kind = match["kind"]
        group = 2 if kind == "collective-permute" else _group_size(line)
        sizes = [_bytes(*array) for array in _ARRAY.findall(match["type"])]
        # A start returns what went in and what comes out (permutations: and two handles).
        result = sizes[len(sizes) // 2 if kind == "all-gather" else 1] if match["start"] else None
        result = sum(sizes) if result is None else result
        share = (group - 1) / group
        moved = {
            "all-gather": result * share,
            "all-to-all": result * share,
            "all-reduce": 2 * result * share,
            "reduce-scatter": result * (group - 1),
            "collective-permute": result,
        }[kind]
        found.append(Collective(kind, group, result, round(moved)))
    return found


def _bytes(dtype: str, dims: str) -> int:
    bits = _BITS.get(dtype) or int(re.search(r"\d+", dtype)[0])
    return math.prod(int(n) for n in dims.split(",") if n) * bits // 8


def _group_size(line: str) -> int:
    """From any of the ways in which HLO writes groups, see the patterns.

    Raises:
      ValueError: they are written in yet another way.
    """
    if found := re.search(r"replica_groups=\[\d+,(\d+)\]", line):  # [2,4]<=[8]
        return int(found[1])
    if found := re.search(r"replica_groups=\{\{([\d,]+)\}", line):  # {{0,1},{2,3}}
        return len(found[1].split(","))
    # mesh['a'=2,'b'=4] {'b'}, with 'b':(1)2 for a part of an axis
    if found := re.search(r"replica_groups=mesh\[([^\]]*)\].*?\{([^}]*)\}", line):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", found[1]))
        named = re.findall(r"'(\w+)'(?::\(\d+\)(\d+))?", found[2])
        return math.prod(int(part or sizes[name]) for name, part in named)
    raise ValueError(f"expected a collective with groups that can be read, got: {line.strip()}")


def report(shapes: Params, source: jax.sharding.Mesh, tp: int, dtype: str | None = None) -> dict:
    """What resharding each weight to the rollout mesh with `tp` would receive; needs no memory.

    Args:
      shapes: weights or their shapes, for instance `jax.eval_shape(init_params, cfg)`.
      dtype: that rollouts hold them in; None keeps it.

    Returns:
      name -> (collectives, bytes of a device's shard in the rollout layout).
    """
    target = sharding.rollout_mesh(source, tp)
    lines = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(shapes):
        name = jax.tree_util.keystr(path)
        tree = functools.reduce(lambda inner, key: {key.key: inner}, reversed(path), leaf)
        placed = jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
            tree,
            sharding.param_shardings(source, tree),
        )
        cast = functools.partial(jax.tree.map, lambda x: x if dtype is None else x.astype(dtype))
        program = Reshard(placed, target, cast)
        [new] = jax.tree.leaves(program._targets)
        size = math.prod(new.shard_shape(leaf.shape)) * np.dtype(dtype or leaf.dtype).itemsize
        lines[name] = program.collectives, size
    return lines
