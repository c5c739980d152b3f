"""The parts of a decoder layer; a `Block` holds the arrays of one, or of several, stacked."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from flax import nnx
from jax.experimental.layout import Layout, with_layout_constraint
from jaxtyping import Array, Float

from specjax.config import ModelConfig
from specjax.config.model import Layer
from specjax.interfaces import Memory, Param, Scratch, Where
from specjax.models.rows import fused_rows, layer_rows
from specjax.parallel.context import split_over_tp, whole_over_tp
from specjax.parallel.sharding import shard_shape
from specjax.weights.matrix import Matrix, is_array


def rms_norm(
    x: Float[Array, "... D"], scale: Float[Array, "... D"], eps: float, offset: bool = False
) -> Array:
    """Computes the root-mean-square norm over the last axis, in float32 (Zhang & Sennrich 2019).

    Args:
      offset: whether the factor is 1 + `scale`.
    """
    x32, scale = x.astype(jnp.float32), scale.astype(jnp.float32)
    normed = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, -1, keepdims=True) + eps)
    return (normed * (1 + scale if offset else scale)).astype(x.dtype)


def draw(row: Param, rngs: nnx.Rngs, dtype: str, lead: tuple[int, ...] = (), depth: int = 1):
    """Draws initial values of an array, with `lead` axes before its own.

    Args:
      row: description of the array.
      lead: sizes of the axes before the array's own.
      depth: number of layers of the model, see `Param.residual`.
    """
    shape, dtype = lead + row.shape, row.dtype or dtype
    if not row.init:
        return nnx.Param(jnp.full(shape, 1 if row.init is None else 0, jnp.dtype(dtype)))
    std = row.init / (2 * max(depth, 1)) ** 0.5 if row.residual else row.init
    values = std * jax.random.normal(rngs.params(), shape, jnp.float32)
    return nnx.Param(values.astype(jnp.dtype(dtype)))


def as_stored(
    normed: Float[Array, "... D"], head: Matrix, axes: tuple[str, str]
) -> tuple[Array, Matrix]:
    """Keeps TPU programs from reading a language-model head in another layout than arrays have.

    By default an array there has the layout that pads it least to lines of 128 numbers. A loop may
    prefer another, and then the program begins with a copy of the head.

    Args:
      normed: states that the head is multiplied by.
      head: the head, or the embedding that it is tied to.
      axes: the logical axes of `head`.

    Returns:
      the states, and the head.
    """
    if not is_array(head):
        return normed, head
    first, second = shard_shape(axes, head.shape)
    layout = Layout((1, 0) if second % 128 and not first % 128 else (0, 1))

    def pinned(normed, head):
        # Without the barrier the constraint would be moved out of the loop, to no effect.
        normed, head = jax.lax.optimization_barrier((normed, head))
        return normed, with_layout_constraint(head, layout)

    return jax.lax.platform_dependent(normed, head, tpu=pinned, default=lambda *both: both)


def block(
    layer: Layer,
    w: Mapping[str, Matrix],
    x: Float[Array, "B T D"],
    where: Where,
    cfg: ModelConfig,
    mix: Callable[[Mapping[str, Matrix], Array], tuple[Array, Scratch]],
    inputs: Float[Array, "B T inputs"] | None = None,
    given: Array | None = None,
) -> tuple[Array, Scratch, Array | None, Mapping[str, Array] | None]:
    """Runs a decoder layer: mixer and mlp, each with its norms and a residual.

    Args:
      layer: the layer, which says where norms are.
      w: its arrays by their names.
      x: states of the rows, which are the first residual.
      where: positions of the rows.
      cfg: config of the model or head: how its norms and its program compute.
      mix: runs the mixer over normed states, see `Mixer.run`.
      inputs: what the mixer takes in place of the normed states, in the first layer of some heads.
      given: see `Mlp.run`.

    Returns:
      states, what the mixer returns beside them, and what the mlp does.
    """
    whole = split = lambda x: x
    if cfg.run.sequence_parallel and where.form == "train":
        whole, split = whole_over_tp, split_over_tp

    def normed(x: Array, name: str) -> Array:
        return rms_norm(x, w[name], cfg.rms_norm_eps, layer.norm_offset) if name in w else x

    def added(x: Array, out: Array, name: str) -> Array:
        out, factor = normed(split(out), name), layer.residual_multiplier
        # bfloat16 would round the factor itself.
        return x + (out if factor == 1.0 else (out.astype(jnp.float32) * factor).astype(out.dtype))

    if inputs is None:
        inputs = normed(x, "input_norm")
    mixed, scratch = mix(w, whole(inputs))
    x = added(x, mixed, "mixed_norm")
    out, record, figures = layer.mlp.run(w, whole(normed(x, "post_norm")), where, given)
    return added(x, out, "mlp_norm"), scratch, record, figures


class Block(nnx.Module):
    """One layer, or several stacked ones; see `specjax.models.rows`.

    A `fused` block has arrays of several parameters side by side, see `rows.fuse`: at a few rows
    per step the number of operations, not their size, is what decoding costs.
    """

    def __init__(
        self,
        layer: Layer,
        cfg: ModelConfig,
        rngs: nnx.Rngs,
        stack: int | None = None,
        fused: bool = False,
    ):
        self.layer, self.cfg = layer, cfg
        rows = layer_rows(layer, cfg.hidden_size)
        if fused:
            rows = fused_rows(rows)
        self.names = tuple(rows)
        lead = () if stack is None else (stack,)
        for name, row in rows.items():
            setattr(self, name, draw(row, rngs, cfg.run.param_dtype, lead, cfg.num_layers))

    def arrays(self) -> dict[str, Matrix]:
        """Returns the layer's arrays and matrices by their names."""
        return {name: getattr(self, name).get_value() for name in self.names}

    def run(
        self,
        x: Float[Array, "B T D"],
        where: Where,
        memory: Memory | None,
        scratch: Scratch | None,
        given: Array | None = None,
    ) -> tuple[Array, Scratch, Array | None, Mapping[str, Array] | None]:
        """Runs the layer over rows, with norms and residuals; returns what `block` does.

        See `Mixer.run` and `Mlp.run` of `specjax.interfaces`.
        """
        return block(
            self.layer,
            self.arrays(),
            x,
            where,
            self.cfg,
            lambda w, x: self.layer.mixer.run(w, x, where, memory, scratch),
            given=given,
        )
