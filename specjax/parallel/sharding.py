"""Mesh axes, and one table from logical to physical axes.

Every weight has its logical axes in its `specjax.interfaces.Param`. Functions here take them by the
names of arrays; gradients and optimizer states have the same names, and stacked arrays have further
leading dimensions, which are never split. A dimension that its mesh axes do not divide is kept
whole and reported by `replicated_dims`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import os
from collections.abc import Callable, Sequence

import jax
import numpy as np
from jax.experimental import multihost_utils

from specjax.interfaces import Axes
from specjax.settings import option

# From the slowest links to the fastest: neighbours in the last axis are neighbours in the machine.
MESH_AXES = ("data", "fsdp", "expert", "cp", "tp")

PHYSICAL = {
    "batch": ("data", "fsdp", "expert"),
    "sequence": ("cp",),  # tokens of packed rows in training; rollouts have no such axis
    "rows": ("cp", "tp"),  # the same, of states between layers under `mesh.sequence_parallel`
    "vocab": ("tp",),
    # `cp` also splits weights, so devices that share a long row hold no copies of them.
    "embed": ("fsdp", "expert", "cp"),
    "heads": ("tp",),
    "mlp": ("tp",),
    # Whole experts are divided, and not their width: they are narrow.
    "expert": ("tp", "expert"),
    "expert_embed": ("fsdp", "cp"),
    None: (),
}


@dataclasses.dataclass
class MeshConfig:
    """Devices per mesh axis; the first `size` devices are used, and 1 everywhere is no mesh.

    Attributes:
      data: devices that the rows of a batch are split over.
      fsdp: devices that rows, weights and optimizer states are split over.
      expert: as fsdp, but experts of mixtures are divided among these devices, which gather rows in
        place of weights; see `specjax.models.mlps.moe`.
      tp: devices that heads, feed-forward width, experts and vocabulary are split over.
      cp: devices that the tokens of each packed row are split over in training.
      sequence_parallel: whether the tokens of states between the products of layers are split over
        `tp` in training, too.
    """

    data: int = option(1, least=1)
    fsdp: int = option(1, least=1)
    expert: int = option(1, least=1)
    tp: int = option(1, least=1)
    cp: int = option(1, least=1)
    sequence_parallel: bool = option(False, needs="splits_products")

    @property
    def splits_products(self) -> bool:
        """Products that are split, by mesh.tp above 1."""
        return self.tp > 1

    @property
    def size(self) -> int:
        return math.prod(getattr(self, name) for name in MESH_AXES)

    @property
    def row_devices(self) -> int:
        """The number of devices among which packed rows are divided."""
        return self.data * self.fsdp * self.expert

    @property
    def row_multiple(self) -> int:
        """The number that must divide the length of a packed row."""
        chunks = 2 if self.cp > 1 else 1
        return self.cp * math.lcm(chunks, self.tp if self.sequence_parallel else 1)


Devices = Sequence[jax.Device] | None  # None: the devices of this process's platform


def platform_of(mesh: jax.sharding.Mesh | None) -> str:
    """Returns the platform of a mesh's devices, as jax names it; None: of the first device."""
    return jax.default_backend() if mesh is None else mesh.devices.flat[0].platform


def make_mesh(config: MeshConfig, devices: Devices = None) -> jax.sharding.Mesh | None:
    """Returns a mesh over `config.size` devices, see `dealt`; None if the config has one device.

    Args:
      devices: devices to choose from, real ones or those of a topology to compile for.

    Raises:
      ValueError: there are fewer devices than the axes ask for.
    """
    if config.size == 1:
        return None
    axes = " ".join(f"{name}={getattr(config, name)}" for name in MESH_AXES)
    grid = _chosen(devices, config.size // config.tp, config.tp, axes)
    return jax.sharding.Mesh(grid.reshape([getattr(config, a) for a in MESH_AXES]), MESH_AXES)


def rollout_mesh(mesh: jax.sharding.Mesh, tp: int | None = None) -> jax.sharding.Mesh:
    """Returns the rollout mesh over the devices of a training mesh: weights split over `tp` alone.

    A device's shard begins with its shard in training, so that resharding only adds to it. Where
    `tp` is larger than in training, neighbours in `cp`, `expert`, `fsdp` and `data`, in this order,
    divide a shard.

    Args:
      tp: number of devices that split the weights; None: as in training.

    Raises:
      ValueError: the devices cannot be divided like that.
    """
    held = mesh.shape["tp"]
    tp = tp or held
    more, fewer = max(tp // held, 1), max(held // tp, 1)
    if mesh.size % tp or tp * fewer != held * more:
        raise ValueError(
            f"rollouts over tp={tp} do not fit training over {dict(mesh.shape)}: expected a "
            f"multiple or a divisor of its tp={held} that divides its {mesh.size} devices"
        )
    grid = mesh.devices.reshape(-1, more, held // fewer, fewer)
    return jax.sharding.Mesh(
        grid.transpose(0, 3, 2, 1).reshape(mesh.size // tp, 1, 1, 1, tp), MESH_AXES
    )


def replica_meshes(
    replicas: int,
    tp: int = 1,
    devices: Devices = None,
    training: jax.sharding.Mesh | None = None,
) -> list[jax.sharding.Mesh]:
    """Returns one mesh of `tp` devices per replica, over replicas * tp devices, see `dealt`.

    Args:
      training: the training mesh; replicas that use all of its devices are grouped by
        `rollout_mesh`.

    Raises:
      ValueError: there are too few devices.
    """
    if replicas < 1 or tp < 1:
        raise ValueError(f"replicas and tp must be at least 1, got {replicas} and {tp}")
    groups = _chosen(devices, replicas, tp, f"replicas={replicas} tp={tp}")
    if training is not None and training.size == replicas * tp:
        with contextlib.suppress(ValueError):  # one tp is no multiple of the other: any grouping
            groups = rollout_mesh(training, tp).devices
    groups = groups.reshape(replicas, 1, 1, 1, 1, tp)
    return [jax.sharding.Mesh(group, MESH_AXES) for group in groups]


def _chosen(devices: Devices, groups: int, unit: int, what: str) -> np.ndarray:
    """Returns the devices of `groups` groups of `unit` neighbours, see `dealt`."""
    count = groups * unit
    if devices is None:
        offer_cpu_devices(count)
        devices = dealt(groups, unit)
    if len(devices) < count:
        raise ValueError(
            f"{what} needs {count} devices, got {len(devices)}; use fewer, or JAX_PLATFORMS=cpu to "
            "try it on simulated devices"
        )
    return np.array(devices[:count])


def joined_mesh(meshes: Sequence[jax.sharding.Mesh | None]) -> jax.sharding.Mesh | None:
    """Joins the meshes of replicas into one, with a place on the data axis for each.

    Returns:
      the mesh; None if the meshes are not those of `replica_meshes`: some share a device, or have
      other axes than `tp`.
    """
    devices = [d for mesh in meshes if mesh is not None for d in mesh.devices.flat]
    apart = None not in meshes and len(set(devices)) == len(devices)
    if not apart or any(mesh.size != mesh.shape["tp"] for mesh in meshes):
        return None
    return jax.sharding.Mesh(np.array(devices).reshape(len(meshes), 1, 1, 1, -1), MESH_AXES)


# Simulated devices wait for each other in threads. XLA's concurrency-optimised scheduler may start
# two collectives of a program in different orders on two devices, which deadlocks.
_ONE_ORDER = "--xla_cpu_enable_concurrency_optimized_scheduler=false"


def offer_cpu_devices(count: int) -> None:
    """Makes the CPU simulate `count` devices, unless backends run or XLA_FLAGS sets a number."""
    flags = os.environ.get("XLA_FLAGS", "")
    if count > 1 and _ONE_ORDER.split("=")[0] not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {_ONE_ORDER}".strip()  # read when backends start
    if "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", ""):
        return
    if jax.distributed.is_initialized():  # `distributed.py` set each process's share
        return
    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:  # backends run already: their devices cannot change
        pass


def ambient(mesh: jax.sharding.Mesh | None):
    """Returns a context for tracing a program that will run on the mesh; kernels read the mesh."""
    if mesh is None:
        return contextlib.nullcontext()
    return jax.sharding.use_abstract_mesh(mesh.abstract_mesh)


def traced_on(mesh: jax.sharding.Mesh | None, program: Callable) -> Callable:
    """Wraps a program so that it is traced with the mesh as the `ambient` one."""

    @functools.wraps(program)
    def within(*args, **kwargs):
        with ambient(mesh):
            return program(*args, **kwargs)

    return within


def whole_rows(x: jax.Array) -> jax.Array:
    """Constrains rows [.. D], in a program traced on a mesh, to have all of D on every device."""
    if jax.sharding.get_abstract_mesh().empty:
        return x
    anyhow = (jax.P.UNCONSTRAINED,) * (x.ndim - 1)
    return jax.lax.with_sharding_constraint(x, jax.P(*anyhow, None))


def pin_gathered(mesh: jax.sharding.Mesh | None, params, axes: Axes):
    """Constrains weights inside a jitted function to be split over `tp` alone where they are used.

    Otherwise XLA may split an activation as its weight is split, over the axes that split the rows,
    and then gathers all rows on every device to get from the one layout to the other.
    """
    if mesh is None:
        return params

    def one(path, leaf):
        spec = gathered_spec(mesh, _leaf_axes(path, leaf.shape, axes), leaf.shape)
        return jax.lax.with_sharding_constraint(leaf, jax.NamedSharding(mesh, spec))

    return jax.tree_util.tree_map_with_path(one, params)


def gathered_spec(mesh: jax.sharding.Mesh, axes: tuple, shape: tuple[int, ...]) -> jax.P:
    """Returns the spec of a weight that is split over `tp` alone."""
    return spec_for(mesh, tuple(None if name == "embed" else name for name in axes), shape)


def is_gathered(mesh: jax.sharding.Mesh, axes: tuple, shape: tuple[int, ...]) -> bool:
    """Returns whether several of the devices that split rows split a weight: it is gathered."""

    def part(spec: jax.P) -> tuple[int, ...]:
        return jax.NamedSharding(mesh, spec).shard_shape(shape)

    return part(gathered_spec(mesh, axes, shape)) != part(spec_for(mesh, axes, shape))


def row_axes(mesh: jax.sharding.Mesh) -> tuple[str, ...]:
    """Returns the mesh axes that split packed rows and their tokens."""
    return tuple(a for a in (*PHYSICAL["batch"], *PHYSICAL["sequence"]) if a in mesh.shape)


def divides_rows(mesh: jax.sharding.Mesh, shape: tuple[int, ...]) -> bool:
    """Returns whether rows [R S ...] of a shape are split evenly by `rows_sharding`."""

    def ways(name: str) -> int:
        return math.prod(mesh.shape.get(axis, 1) for axis in PHYSICAL[name])

    return len(shape) > 1 and not (shape[0] % ways("batch") or shape[1] % ways("sequence"))


def spec_for(mesh: jax.sharding.Mesh, axes: tuple, shape: tuple[int, ...]) -> jax.P:
    """Returns the physical spec of an array from its logical axes; indivisible ones stay whole."""
    split = (split_over(mesh, name, size) for name, size in zip(axes, shape, strict=True))
    return jax.P(*(physical or None for physical in split))


def split_over(mesh: jax.sharding.Mesh, name: str | None, size: int) -> tuple[str, ...]:
    """Returns the mesh axes that split a dimension of a logical axis; none if it stays whole.

    Experts that do not divide by all of their axes are split over the largest that they divide by.
    """
    physical = tuple(a for a in PHYSICAL[name] if a in mesh.shape)
    ways = [physical]
    if name == "expert":
        ways += sorted(((a,) for a in physical), key=lambda axes: -mesh.shape[axes[0]])
    return next((w for w in ways if size % math.prod(mesh.shape[a] for a in w) == 0), ())


def shard_shape(axes: tuple, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the shape of a device's shard, in a program traced on a mesh, of an array."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return shape
    return jax.NamedSharding(mesh, spec_for(mesh, axes, shape)).shard_shape(shape)


def _leaf_axes(path, shape: tuple[int, ...], axes: Axes) -> tuple:
    return _behind_stacks(_named_axes(path, axes), shape)


def _named_axes(path, axes: Axes) -> tuple | None:
    """Returns the axes of the array at a path, or of one that contains the path; None: no axes."""
    names = [str(getattr(p, "key", getattr(p, "name", p))) for p in path]
    return next((axes[n] for n in reversed(names) if n in axes), None)


def _behind_stacks(own: tuple | None, shape: tuple[int, ...]) -> tuple:
    """Returns the axes of all dimensions; the leading ones, of stacked layers, are never split."""
    if own is None or len(shape) < len(own):
        return (None,) * len(shape)
    return (None,) * (len(shape) - len(own)) + own


def param_shardings(mesh: jax.sharding.Mesh, tree, axes: Axes):
    """Returns NamedShardings for parameters, gradients or optimizer states, of arrays or shapes.

    Args:
      axes: logical axes of the arrays that are split, by name; others are whole on every device. A
        `specjax.interfaces.Weight` in the place of an array gives the axes of its parts.
    """

    def one(path, leaf):
        return weight_shardings(mesh, leaf, _named_axes(path, axes))

    is_weight = lambda leaf: hasattr(leaf, "part_axes")  # noqa: E731
    return jax.tree_util.tree_map_with_path(one, tree, is_leaf=is_weight)


def weight_shardings(mesh: jax.sharding.Mesh, weight, axes: tuple | None):
    """Returns the NamedSharding of an array, or those of a weight's parts, from logical axes."""

    def place(leaf, axes):
        spec = spec_for(mesh, _behind_stacks(axes, leaf.shape), leaf.shape)
        return jax.NamedSharding(mesh, spec)

    if not hasattr(weight, "part_axes"):
        return place(weight, axes)
    parts = common_axes(mesh, weight, weight.part_axes(axes or (None, None)))
    return jax.tree.map(place, weight, parts)


def common_axes(mesh: jax.sharding.Mesh, weight, parts):
    """Returns the logical axes of a weight's parts that split all parts, so that no block is cut.

    Args:
      weight: a `specjax.interfaces.Weight`, of arrays or their shapes.
      parts: axes of its parts, see `Weight.part_axes`.
    """
    leaves, structure = jax.tree.flatten(weight)
    axes = structure.flatten_up_to(parts)
    whole = {
        name
        for leaf, names in zip(leaves, axes, strict=True)
        for name, size in zip(names, leaf.shape[-len(names) :], strict=True)
        if not split_over(mesh, name, size)
    }
    kept = [tuple(None if name in whole else name for name in names) for names in axes]
    return jax.tree.unflatten(structure, kept)


def rows_sharding(mesh: jax.sharding.Mesh) -> jax.NamedSharding:
    """Returns the sharding of packed rows [R S ...]: rows over the data axes, tokens over `cp`."""
    return jax.NamedSharding(mesh, jax.P(PHYSICAL["batch"], PHYSICAL["sequence"]))


def replicated(mesh: jax.sharding.Mesh) -> jax.NamedSharding:
    """Returns the sharding that puts a whole array on every device."""
    return jax.NamedSharding(mesh, jax.P())


def _map_stated(one: Callable, state):
    """Maps `one(array, axes)` over the arrays of a state.

    `axes` are the logical axes of the last dimensions, where the type of the tuple that holds the
    array declares them as `AXES` (a cache's heads), else None.
    """

    def is_stated(node) -> bool:
        return hasattr(type(node), "AXES")

    def mapped(node):
        if not is_stated(node):
            return one(node, None)
        ones = [functools.partial(one, axes=node.AXES.get(name)) for name in node._fields]
        return type(node)(*map(jax.tree.map, ones, node))

    return jax.tree.map(mapped, state, is_leaf=is_stated)


def state_shardings(mesh: jax.sharding.Mesh, state):
    """Returns the shardings of a decode state between chunks.

    Heads are split over `tp`; all other dimensions, slots included, are whole.
    """

    def one(leaf, axes):
        inside = tuple(None if name == "batch" else name for name in axes or ())
        whole = (None,) * (leaf.ndim - len(inside))
        return jax.NamedSharding(mesh, spec_for(mesh, whole + inside, leaf.shape))

    return _map_stated(one, state)


def pin_slots(mesh: jax.sharding.Mesh | None, state):
    """Constrains the slots of a running batch inside a jitted function to the data axes."""
    if mesh is None:
        return state

    def one(leaf, axes):
        if axes is not None and "batch" not in axes:  # pages, which belong to no fixed slot
            return leaf
        inside = (axes or ())[1:]  # where layers are scanned, their repeats stand behind the slots
        axes = ("batch", *(None,) * (leaf.ndim - 1 - len(inside)), *inside)
        spec = spec_for(mesh, axes, leaf.shape)
        return jax.lax.with_sharding_constraint(leaf, jax.NamedSharding(mesh, spec))

    return _map_stated(one, state)


def shapes(tree, mesh: jax.sharding.Mesh | None, shardings: Callable):
    """Returns the shapes of a tree, with the shardings of `shardings(mesh, tree)`."""
    if mesh is None:
        return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), tree)
    return jax.tree.map(
        lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), tree, shardings(mesh, tree)
    )


def without_data(tree, mesh: jax.sharding.Mesh | None):
    """Returns a tree whose arrays on devices are their shapes, with shardings if there is a mesh.

    A program that is lowered for them keeps no array, and is the one that the arrays would have.
    """

    def shape(x):
        if not isinstance(x, jax.Array):
            return x
        placed = x.sharding if mesh is not None or x.committed else None
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=placed, weak_type=x.weak_type)

    return jax.tree.map(shape, tree)


def device_bytes(tree) -> int:
    """Returns the bytes of a tree's shards on one device; of arrays or their shapes."""
    total = 0
    for leaf in jax.tree.leaves(tree):
        here = getattr(leaf, "sharding", None)
        shape = leaf.shape if here is None else here.shard_shape(leaf.shape)
        total += math.prod(shape) * np.dtype(leaf.dtype).itemsize
    return total


def replicated_dims(mesh: jax.sharding.Mesh | None, tree, axes: Axes) -> list[str]:
    """Returns a line for each weight dimension that the mesh should split and cannot."""
    lines = []
    if mesh is None:
        return lines
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        for name, size in zip(_leaf_axes(path, leaf.shape, axes), leaf.shape, strict=True):
            ways = math.prod(mesh.shape.get(a, 1) for a in PHYSICAL[name])
            if size % ways:
                where = jax.tree_util.keystr(path)
                lines.append(f"{where}: {name} of size {size} does not divide by {ways}")
    return lines


# --- several processes ----------------------------------------------------------------------------


def all_devices() -> list[jax.Device]:
    """Returns the devices of all processes, ordered by process."""
    return sorted(jax.devices(), key=lambda device: (device.process_index, device.id))


def dealt(groups: int, unit: int = 1) -> list[jax.Device]:
    """Returns the devices of `groups` groups of `unit` neighbours, spread evenly over processes.

    Where the groups cannot be spread evenly these are the first devices, or all if there are fewer.
    """
    devices = all_devices()
    processes = jax.process_count()
    here = len(devices) // processes
    counts = [groups // processes + (i < groups % processes) for i in range(processes)]
    if here * processes != len(devices) or max(counts) * unit > here:
        return devices[: groups * unit]
    return [d for i, n in enumerate(counts) for d in devices[i * here : i * here + n * unit]]


def put(tree, shardings):
    """Puts arrays that every process holds whole onto devices; each process fills its own."""
    if not jax.distributed.is_initialized():
        return jax.device_put(tree, shardings)

    def one(leaf, where):
        if isinstance(leaf, jax.Array) and leaf.sharding.device_set == where.device_set:
            return jax.device_put(leaf, where)  # changes the layout on the same devices
        whole = np.asarray(leaf)
        return jax.make_array_from_callback(
            whole.shape, where, lambda index: whole[index], dtype=whole.dtype
        )

    return jax.tree.map(one, tree, shardings)


def owners(array: jax.Array) -> list[int]:
    """Returns the processes whose devices hold a part of an array, in ascending order."""
    return sorted({device.process_index for device in array.sharding.device_set})


def fetch(tree):
    """Fetches arrays of the whole job to the host of every process; all processes must call it.

    A process that holds no part of an array receives it from one that does.
    """
    if not jax.distributed.is_initialized():
        return jax.device_get(tree)

    def one(leaf):
        if not isinstance(leaf, jax.Array):
            return jax.device_get(leaf)
        those, me = owners(leaf), jax.process_index()
        whole = leaf
        if me in those:
            here = leaf.is_fully_addressable or leaf.is_fully_replicated
            whole = jax.device_get(leaf) if here else _gathered(leaf)
        return whole if len(those) == jax.process_count() else spread(whole, those[0])

    return jax.tree.map(one, tree)


def over_all(where: jax.sharding.Sharding, shape: tuple[int, ...]) -> jax.sharding.Sharding:
    """Returns a sharding that has a device in every process: `where`, or one device per process."""
    processes = jax.process_count()
    if len({device.process_index for device in where.device_set}) == processes:
        return where
    devices = {d.process_index: d for d in reversed(all_devices())}
    mesh = jax.sharding.Mesh(np.array([devices[i] for i in range(processes)]), ("process",))
    axis = next((i for i, size in enumerate(shape) if size % processes == 0), None)
    return jax.NamedSharding(mesh, jax.P() if axis is None else jax.P(*[None] * axis, "process"))


# Bytes per message; few sizes are used, so that few programs are compiled.
_SPREAD_BYTES = (1 << 26, 1 << 22, 1 << 18, 1 << 14)


def spread(tree, source: int):
    """Sends the arrays of process `source` to the host of every process; all must call it.

    Args:
      tree: the arrays; in processes other than `source` only their shapes and dtypes are read.
    """
    is_source = jax.process_index() == source
    return jax.tree.map(lambda leaf: _spread(leaf, is_source), tree)


def _spread(leaf, is_source: bool) -> np.ndarray:
    dtype = np.dtype(leaf.dtype)
    out = np.zeros(math.prod(leaf.shape) * dtype.itemsize, np.uint8)
    if is_source:
        out[:] = np.ascontiguousarray(jax.device_get(leaf)).reshape(-1).view(np.uint8)
    begin = 0
    while begin < len(out):
        left = len(out) - begin
        size = next((n for n in _SPREAD_BYTES if n <= left), _SPREAD_BYTES[-1])
        block = np.zeros(size // 4, np.uint32)  # sums of integers are exact
        count = min(size, left)
        block.view(np.uint8)[:count] = out[begin : begin + count]
        told = multihost_utils.broadcast_one_to_all(block, is_source=is_source)
        out[begin : begin + count] = np.asarray(told).view(np.uint8)[:count]
        begin += count
    return out.view(dtype).reshape(leaf.shape)


def any_host(mesh: jax.sharding.Mesh | None, mine: bool) -> bool:
    """Returns whether any process of a mesh says so; all processes of the mesh must call it."""
    if mesh is None or len({device.process_index for device in mesh.devices.flat}) == 1:
        return mine
    split = jax.NamedSharding(mesh, jax.P(mesh.axis_names))
    said = np.full(1, mine)
    all_said = jax.make_array_from_callback((mesh.size,), split, lambda _: said)
    any_said = jax.jit(lambda said: said.any(), out_shardings=replicated(mesh))
    return bool(any_said(all_said))


GATHER_BYTES = 256 << 20  # largest piece of an array that is gathered at once


def _gathered(array: jax.Array) -> np.ndarray:
    """Gathers an array piece by piece, because each piece is briefly on every device."""
    if not array.ndim or array.nbytes <= GATHER_BYTES:
        return multihost_utils.process_allgather(array, tiled=True)
    step = max(1, len(array) * GATHER_BYTES // array.nbytes)
    pieces = [array[i : i + step] for i in range(0, len(array), step)]
    return np.concatenate([multihost_utils.process_allgather(p, tiled=True) for p in pieces])
