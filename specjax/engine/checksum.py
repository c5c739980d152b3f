"""A checksum of weights, the same in every layout, to check that copies arrived intact."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection

import jax
import jax.numpy as jnp

from specjax.models.transformer import Params

_WORDS = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}


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
    leaves = [
        leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(params)
        if not (names := {getattr(p, "key", None) for p in path}) & set(repeated)
        and not (tied and "lm_head" in names)
    ]
    total, finite = fetch(_sums(leaves, dtype))
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
    if was != now:
        raise RuntimeError(
            f"the {name}'s weights have checksum {was:08x} where they come from, and "
            f"{now:08x} where they arrived; expected the same. The copy between layouts or "
            "devices is broken: do not trust what is generated"
        )
    return now


@functools.partial(jax.jit, static_argnums=1)
def _sums(leaves: list, dtype: str):
    total, finite = jnp.uint32(0), jnp.bool_(True)
    for leaf in leaves:
        cast = leaf.astype(jnp.dtype(dtype))
        bits = jax.lax.bitcast_convert_type(cast, _WORDS[cast.dtype.itemsize])
        total += bits.astype(jnp.uint32).sum(dtype=jnp.uint32)
        finite &= jnp.isfinite(cast).all()
    return total, finite
