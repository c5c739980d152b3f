"""Context parallelism: the tokens of packed rows [R S] split over the devices of axis `cp`.

A row is cut into 2n chunks, and device i of n holds chunks i and 2n - 1 - i (zigzag order). With a
causal mask the work of a token grows with its position in the row; so all devices have the same
work. The host permutes batches into the order of the devices (`permute`), and all values per token
are in that order afterwards. Only two operations depend on the order: attention
(`specjax.kernels.context_parallel`), and shifts along the row (`shift`), in which only the ends of
chunks change devices.
"""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Shaped

from specjax.parallel.sharding import PHYSICAL, MeshConfig, rows_sharding, spec_for

AXIS = "cp"


@dataclasses.dataclass(frozen=True)
class Context:
    """How rows are split; static under jit.

    Attributes:
      mesh: mesh with more than one device on axis `cp`.
      chunks: number of chunks of each row that a device holds.
    """

    mesh: jax.sharding.Mesh

    chunks: ClassVar[int] = 2

    @property
    def ways(self) -> int:
        return self.mesh.shape[AXIS]

    def chunks_of(self, device) -> tuple:
        """Returns the numbers of the chunks that a device holds, in its order."""
        return device, 2 * self.ways - 1 - device

    def places(self, length: int) -> np.ndarray:
        """Returns the position in the row of each token [S], in the order of the devices.

        Raises:
          ValueError: the row cannot be cut into chunks of one size.
        """
        count = self.chunks * self.ways
        if length % count:
            raise ValueError(
                f"rows of {length} tokens cannot be cut into the {count} chunks of cp={self.ways}; "
                f"make packing.row_length a multiple of {count}"
            )
        chunks = np.arange(length).reshape(count, -1)
        held = [chunk for device in range(self.ways) for chunk in self.chunks_of(device)]
        return chunks[held].reshape(-1)

    def permute(self, rows: Shaped[np.ndarray, "R S *rest"]) -> np.ndarray:
        """Permutes rows on the host into the order of the devices."""
        return np.asarray(rows)[:, self.places(rows.shape[1])]

    def restore(self, rows: Shaped[np.ndarray, "R S *rest"]) -> np.ndarray:
        """Permutes rows on the host back into their own order."""
        return np.asarray(rows)[:, np.argsort(self.places(rows.shape[1]))]


def context_of(config: MeshConfig, mesh: jax.sharding.Mesh | None) -> Context | None:
    """Returns how the mesh of a configuration splits rows; None: it does not split them."""
    if mesh is None or config.cp == 1:
        return None
    return Context(mesh)


def shift(
    x: Shaped[Array, "R S *rest"], by: int, context: Context | None = None
) -> Shaped[Array, "R S *rest"]:
    """Returns out[t] = x[t + by], 0 outside the row; `by` is static, of either sign."""
    length = x.shape[1]
    by = max(-length, min(by, length))
    if context is None:
        before, after = max(-by, 0), max(by, 0)
        padded = jnp.pad(x, [(0, 0), (before, after)] + [(0, 0)] * (x.ndim - 2))
        return padded[:, after : after + length]
    chunk = length // (context.ways * context.chunks)
    while by:  # one step moves tokens at most into the next chunk
        step = max(-chunk, min(by, chunk))
        x = _shift_chunks(x, step, context)
        by -= step
    return x


def _shift_chunks(x, by: int, context: Context):
    """Shifts by at most one chunk: each chunk receives its end from its neighbour in the row.

    The low chunks ascend with their devices and the high ones descend, and the last device holds
    the two in the middle: the scheme of Megatron's `roll_tensor` under context parallelism.
    """
    last = context.ways - 1
    down = [(i, i - 1) for i in range(1, last + 1)]  # to the previous device
    up = [(i - 1, i) for i in range(1, last + 1)]

    def ends(chunk):
        return chunk[:, :by] if by > 0 else chunk[:, by:]

    def joined(chunk, received):
        pieces = [chunk[:, by:], received] if by > 0 else [received, chunk[:, :by]]
        return jnp.concatenate(pieces, axis=1)

    def local(x, device):
        low, high = jnp.split(x, 2, axis=1)
        to_low = jax.lax.ppermute(ends(low), AXIS, down if by > 0 else up)
        to_high = jax.lax.ppermute(ends(high), AXIS, up if by > 0 else down)
        in_the_middle = device == last
        if by > 0:
            to_low = jnp.where(in_the_middle, ends(high), to_low)
        else:
            to_high = jnp.where(in_the_middle, ends(low), to_high)
        return jnp.concatenate([joined(low, to_low), joined(high, to_high)], axis=1)

    spec = jax.P(None, AXIS)  # other axes keep their sharding
    split = jax.shard_map(
        local, mesh=context.mesh, in_specs=(spec, jax.P(AXIS)), out_specs=spec, axis_names={AXIS}
    )
    # The number of the device is an input: XLA does not partition every program that asks for it
    # where other axes of the mesh are not manual.
    return split(x, jnp.arange(context.ways))


def pin_rows(x: Shaped[Array, "R S *rest"], context: Context | None) -> Array:
    """Constrains rows inside a jitted function to stay split over the devices."""
    if context is None:
        return x
    return jax.lax.with_sharding_constraint(x, rows_sharding(context.mesh))


# --- sequence parallelism -------------------------------------------------------------------------


@jax.custom_vjp
def split_over_tp(x: Shaped[Array, "R S D"]) -> Array:
    """Splits the tokens of states over `tp` on the ambient mesh, of results of a layer's products.

    Sums over `tp` then become reduce-scatters. Gradients are gathered, for they enter products that
    are split otherwise (Korthikanti et al. 2022, arXiv 2205.05198, g and its conjugate).
    """
    return _pin(x, "rows")


@jax.custom_vjp
def whole_over_tp(x: Shaped[Array, "R S D"]) -> Array:
    """Gathers the tokens of states over `tp`, for a layer's products; the inverse of the other."""
    return _pin(x, "sequence")


split_over_tp.defvjp(lambda x: (_pin(x, "rows"), None), lambda _, d: (_pin(d, "sequence"),))
whole_over_tp.defvjp(lambda x: (_pin(x, "sequence"), None), lambda _, d: (_pin(d, "rows"),))


def _pin(x, axis: str):
    """Constrains the tokens of states [R S D] to the axes of one row of `sharding.PHYSICAL`.

    Raises:
      ValueError: the tokens do not divide over the devices; whole rows would be on all of them.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return x
    ways = math.prod(mesh.shape.get(name, 1) for name in PHYSICAL[axis])
    if x.shape[1] % ways:
        raise ValueError(
            f"rows of {x.shape[1]} tokens do not divide over {ways} devices; make "
            f"packing.row_length a multiple of {ways}, or set mesh.sequence_parallel=false"
        )
    return jax.lax.with_sharding_constraint(x, spec_for(mesh, ("batch", axis, None), x.shape))
