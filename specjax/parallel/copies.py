"""Copies weights from training to the replicas of all processes; checks that copies are intact."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax.interfaces import Axes, Params
from specjax.parallel import sharding
from specjax.parallel.reshard import Reshard, Unrelated, named

log = logging.getLogger(__name__)
_WORDS = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}


class ProcessGroup(NamedTuple):
    """The processes that run the same samples: one with replicas of its own, or all of one replica.

    Attributes:
      index: index of the group of this process; -1: the process has no part of a replica.
      count: number of groups.
      reports: whether this process sends the news of its group to the others.
    """

    index: int
    count: int
    reports: bool


class Copies:
    """Copies weights from the devices of training to the replicas of all processes.

    Weights go from device to device where training and the replicas have the same devices, and the
    `tp` of the replicas is a multiple or a divisor of training's. Else they go through the memory
    of the hosts, one weight at a time.

    Args:
      places: the mesh of every replica of the job, in the order of processes.

    Attributes:
      own: meshes of the replicas of this process; there may be none.
      before: number of replicas of the job that come before its own.
      group: group of this process.

    Raises:
      ValueError: a process has devices of a shared replica and of another one.
    """

    def __init__(self, places: Sequence[jax.sharding.Mesh]):
        grid = np.concatenate([place.devices for place in places])
        self.mesh = jax.sharding.Mesh(grid, places[0].axis_names)
        hosts = [sorted({d.process_index for d in place.devices.flat}) for place in places]
        for replica, here in enumerate(hosts):
            both = [h for h in here if len(here) > 1 and sum(h in other for other in hosts) > 1]
            if both:
                raise ValueError(
                    f"replica {replica} is in processes {here}, of which {both} have others, too; "
                    "make rollout.tp a multiple or a divisor of a process's devices"
                )
        process = jax.process_index()
        mine = [r for r, here in enumerate(hosts) if process in here]
        firsts = sorted({here[0] for here in hosts})
        self.own, self.before = [places[r] for r in mine], mine[0] if mine else 0
        self.group = ProcessGroup(-1, len(firsts), reports=False)
        if mine:
            first = hosts[mine[0]][0]
            self.group = ProcessGroup(firsts.index(first), len(firsts), reports=process == first)
        self._programs: dict[Any, Reshard | None] = {}

    def __call__(
        self, tree: Params, axes: Axes, convert: Callable[[Params], Params] | None = None
    ) -> list[Params]:
        """Copies weights to each replica of this process; all processes must call it.

        Args:
          tree: weights on any devices of the job.
          axes: logical axes of the weights, see `specjax.parallel.sharding`.
          convert: jitted function to apply to the weights before they are copied, see `Reshard`;
            None: the copies are as the weights.

        Returns:
          the copies, one for each of `own`.
        """
        leaves, structure = jax.tree.flatten(tree)
        if not leaves:
            return [tree for _ in self.own]
        key = structure, convert, tuple((x.shape, x.dtype, x.sharding) for x in leaves)
        if key not in self._programs:
            try:
                self._programs[key] = Reshard(tree, self.mesh, axes, convert)
            except Unrelated as error:
                log.info("weights reach the replicas through the memory of hosts: %s", error)
                self._programs[key] = None
        if self._programs[key] is None:
            return self._fetched(tree, axes, convert)
        everywhere = self._programs[key](tree)

        def part(array, place):
            return named(array, jax.NamedSharding(place, array.sharding.spec))

        return [jax.tree.map(lambda a, p=place: part(a, p), everywhere) for place in self.own]

    def _fetched(self, tree: Params, axes: Axes, convert) -> list[Params]:
        """Copies through the memory of hosts, which hold one weight at a time."""
        tree = tree if convert is None else convert(tree)
        leaves, structure = jax.tree.flatten(tree)
        targets = [sharding.param_shardings(place, tree, axes) for place in self.own]
        placed: list[list[jax.Array]] = [[] for _ in self.own]
        for leaf, *places in zip(leaves, *map(jax.tree.leaves, targets), strict=True):
            whole = sharding.fetch(leaf)
            for here, where in zip(placed, places, strict=True):
                here.append(sharding.put(whole, where))
        return [jax.tree.unflatten(structure, here) for here in placed]


# --- checksums ------------------------------------------------------------------------------------


class Checksum(int):
    """The sum of all weights' bit patterns modulo 2^32.

    Attributes:
      finite: whether all weights are finite.
    """

    finite: bool

    def __new__(cls, value: int, finite: bool):
        self = super().__new__(cls, value)
        self.finite = finite
        return self


def checksum(
    params: Params,
    dtype: str,
    tied: bool = False,
    fetch: Callable = jax.device_get,
    repeated: Collection[str] = (),
) -> Checksum:
    """The checksum of weights, in the stacked layout or a decode layout, on any devices.

    A sum does not depend on the order, so stacking, fusing and transposing do not change it.

    Args:
      params: the weights.
      dtype: dtype that decoding casts them to.
      tied: whether the language-model head is the embedding, which some layouts hold twice.
      fetch: function that copies results to the host; `sharding.fetch` for weights of all processes
        of a job, which must then all call this.
      repeated: names of arrays to leave out, because layouts hold them different numbers of times,
        see `repeated_names`.
    """
    left_out = {*repeated, "lm_head"} if tied else set(repeated)
    leaves = [
        (getattr(path[-1], "name", None), leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(params)
        if not {getattr(entry, "key", None) for entry in path} & left_out
    ]
    exponents = tuple(name == "scales" and leaf.dtype == jnp.uint8 for name, leaf in leaves)
    arrays = [leaf for _, leaf in leaves]
    # Processes that `fetch` together decide alike, whichever of them has the weights.
    is_local = fetch is jax.device_get and all(
        getattr(leaf, "is_fully_addressable", True) for leaf in arrays
    )
    if jax.default_backend() == "cpu" and is_local:  # where nothing need be compiled
        total, finite = _sums(np, map(np.asarray, arrays), dtype, exponents)
    else:
        total, finite = fetch(_compiled_sums(arrays, dtype, exponents))
    return Checksum(int(total), bool(finite))


def require_same(
    name: str, sent: Params, arrived: Params, dtype: str, tied: bool, repeated: Collection[str]
) -> Checksum:
    """The checksum of copied weights, after comparing it at both ends.

    Raises:
      RuntimeError: the weights that arrived differ from those that were sent.
    """
    was = now = checksum(sent, dtype, tied, repeated=repeated)
    if arrived is not sent:  # else nothing was copied
        now = checksum(arrived, dtype, tied, repeated=repeated)
    require_equal(name, was, now)
    return now


def require_equal(name: str, was: Checksum, now: Checksum) -> None:
    """Raises RuntimeError if the checksum of copied weights has changed."""
    if was != now:
        raise RuntimeError(
            f"the {name}'s weights have checksum {was:08x} where they come from, and {now:08x} "
            f"where they arrived, on process {jax.process_index()}: do not trust what is generated"
        )


def _sums(xp, leaves: Iterable, dtype: str, exponents: tuple[bool, ...]):
    """Sums leaves by numpy or jax.numpy.

    Args:
      xp: the module.
      exponents: which leaves are the scales of MXFP4, where 255 is not finite.
    """
    sums, finite = [xp.uint32(0)], [xp.bool_(True)]
    for leaf, is_exponent in zip(leaves, exponents, strict=True):
        cast = leaf.astype(jnp.dtype(dtype), copy=False)
        sums.append(cast.view(_WORDS[cast.dtype.itemsize]).sum(dtype=xp.uint32))
        finite.append(((leaf < 255) if is_exponent else xp.isfinite(cast)).all())
    return xp.stack(sums).sum(dtype=xp.uint32), xp.stack(finite).all()


@functools.partial(jax.jit, static_argnums=(1, 2))
def _compiled_sums(leaves: list, dtype: str, exponents: tuple[bool, ...]):
    return _sums(jnp, leaves, dtype, exponents)
