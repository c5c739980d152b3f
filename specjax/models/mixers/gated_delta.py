"""Gated DeltaNet (Yang et al. 2024, arXiv 2412.06464), the recurrent layers of Qwen3-Next."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from specjax.indexing import take_along
from specjax.interfaces import Fused, Memory, Param, Params, Room, Scratch, Stored, Where
from specjax.kernels import delta_rule
from specjax.models.layers import rms_norm
from specjax.weights.matrix import dot

_L2_EPS = 1e-6


class State(NamedTuple):
    """The state of one layer: the last inputs of the convolution, and the matrix of the rule.

    Attributes:
      q, k, v: inputs of the convolution at the positions before the next one, in their order.
      s: [B V dk dv] float32.
    """

    q: Float[Array, "B taps-1 K*dk"]
    k: Float[Array, "B taps-1 K*dk"]
    v: Float[Array, "B taps-1 V*dv"]
    s: Float[Array, "B V dk dv"]

    AXES = {name: ("batch", None, "heads") for name in "qkv"} | {
        "s": ("batch", "heads", None, None)
    }


class Rows(NamedTuple):
    """What rows of a forward pass keep: inputs of the convolution, and k, d and g of the rule."""

    inputs: tuple[Float[Array, "B T channels"], ...]
    k: Float[Array, "B T K dk"]
    d: Float[Array, "B T K R dv"]
    g: Float[Array, "B T K R"]


class RowsInOrder(Rows):
    """Rows of invariant mode: states advance over them one after the other."""


@dataclasses.dataclass(frozen=True)
class GatedDelta:
    """A causal convolution over positions, the gated delta rule, and a gated norm.

    A `specjax.interfaces.Mixer`. Each key head serves `num_v_heads // num_k_heads` consecutive
    value heads.

    Attributes:
      num_k_heads: number K of query and key heads.
      num_v_heads: number V of value heads.
      head_k_dim: size dk of a query or key.
      head_v_dim: size dv of a value.
      conv_kernel: number of positions that the convolution sees, the row's own included.
      norm_eps: epsilon of the gated norm.
    """

    kind: ClassVar[str] = "gated_delta"
    rotation: ClassVar[None] = None

    num_k_heads: int
    num_v_heads: int
    head_k_dim: int
    head_v_dim: int
    conv_kernel: int = 4
    norm_eps: float = 1e-6

    def __post_init__(self):
        if self.num_v_heads % self.num_k_heads:
            raise ValueError(
                f"linear_num_value_heads must be a multiple of linear_num_key_heads, got "
                f"{self.num_v_heads} and {self.num_k_heads}"
            )

    @property
    def group(self) -> int:
        """The number R of value heads that a key head serves."""
        return self.num_v_heads // self.num_k_heads

    @property
    def channels(self) -> dict[str, int]:
        """The width of the inputs of the convolution."""
        keys = self.num_k_heads * self.head_k_dim
        return {"q": keys, "k": keys, "v": self.num_v_heads * self.head_v_dim}

    def params(self, width: int) -> dict[str, Param]:
        """Returns the rows of its arrays, in the order of random initialisation.

        Families say where files hold projections and convolutions, which are parts of tensors.
        """
        heads = self.num_v_heads
        sizes = self.channels | {"z": heads * self.head_v_dim, "b": heads, "a": heads}
        rows = {
            f"delta_{name}": Param(
                (width, size), ("embed", "heads"), matrix=True, fused=Fused("delta_in", order)
            )
            for order, (name, size) in enumerate(sizes.items())
        }
        for name, size in self.channels.items():
            rows[f"conv_{name}"] = Param(
                (size, 1, self.conv_kernel), ("heads", None, None), init=0.5
            )
        per_head = (heads,), ("heads",)
        return rows | {
            "A_log": Param(*per_head, Stored("linear_attn.A_log"), init=0.02, dtype="float32"),
            "dt_bias": Param(*per_head, Stored("linear_attn.dt_bias"), init=None, dtype="float32"),
            "delta_norm": Param(
                (self.head_v_dim,), (None,), Stored("linear_attn.norm.weight"), init=None
            ),
            "delta_out": Param(
                (sizes["z"], width), ("heads", "embed"),
                Stored("linear_attn.out_proj.weight", True), matrix=True, residual=True,
            ),
        }  # fmt: skip

    def empty(self, run: Any, room: Room) -> Memory:
        """Makes states of zeros, and no pages."""
        before = {
            name: jnp.zeros((room.slots, self.conv_kernel - 1, size), jnp.dtype(run.compute_dtype))
            for name, size in self.channels.items()
        }
        shape = room.slots, self.num_v_heads, self.head_k_dim, self.head_v_dim
        return Memory(None, State(**before, s=jnp.zeros(shape, jnp.float32)))

    def run(
        self,
        w: Params,
        x: Float[Array, "B T D"],
        where: Where,
        memory: Memory | None,
        scratch: Scratch | None,
    ) -> tuple[Float[Array, "B T D"], Scratch]:
        """See `specjax.interfaces.Mixer.run`."""
        if where.context is not None:
            raise NotImplementedError(f"{self.kind} layers do not run with mesh.cp; use cp=1")
        if scratch is not None:
            raise NotImplementedError(f"{self.kind} layers cannot draft level by level")
        *inputs, z, b, a = self._project(w, x)
        state = None if memory is None else memory.slots
        rows = self._inputs(w, inputs, b, a, where, state)
        matrix = None if state is None else self._by_key_head(state.s)
        kept = Rows
        if where.form == "train":
            out, d = delta_rule.chunked(rows, segments=where.segments)
        elif where.path_rows is None:
            out, d = delta_rule.chunked(rows, matrix)
        elif where.form == "by_position":
            out, d = delta_rule.in_order(rows, matrix, where.path_rows, where.depth)
            kept = RowsInOrder
        else:
            out, d = delta_rule.at_once(rows, matrix, where.sees(x.shape[1]))
        out = self._output(w, out.astype(x.dtype), z)
        return out, Scratch(None, kept(tuple(inputs), rows.k, d, rows.g))

    def advance(self, slots: State, rows: Rows, count: Int[Array, " B"]) -> State:
        """See `specjax.interfaces.Mixer.advance`."""
        state, at = self._by_key_head(slots.s), count[:, None] + np.arange(self.conv_kernel - 1)

        def last(before, new):
            return take_along(jnp.concatenate([before, new], axis=1), at[..., None], axis=1)

        in_order = isinstance(rows, RowsInOrder)
        rule = delta_rule.advanced_in_order if in_order else delta_rule.advanced
        state = rule(state, rows.k, rows.d, rows.g, count)
        inputs = map(last, slots[:3], rows.inputs)
        return State(*inputs, s=state.reshape(slots.s.shape))

    def operations(self, length: int) -> int:
        """Counts the products of blocks of rows with each other, and with the state."""
        rows, k, v = delta_rule.CHUNK, self.head_k_dim, self.head_v_dim
        return 2 * length * self.num_v_heads * (rows * (2 * k + 2 * v) + 3 * k * v)

    def _by_key_head(self, s: Float[Array, "B V dk dv"]) -> Float[Array, "B K R dk dv"]:
        return s.reshape(s.shape[0], self.num_k_heads, self.group, *s.shape[2:])

    def _project(self, w: Params, x: Float[Array, "B T D"]) -> list[Array]:
        """Computes inputs of the convolution of queries, keys and values, and z, b and a."""
        if "delta_in" not in w:
            return [dot(x, w[f"delta_{name}"]) for name in "qkvzba"]
        sizes = [*self.channels.values(), self.channels["v"], self.num_v_heads]
        return jnp.split(dot(x, w["delta_in"]), np.cumsum(sizes), axis=-1)

    def _inputs(self, w: Params, inputs, b, a, where: Where, state: State | None):
        """Computes the inputs of the rule from what is projected."""

        def heads(x: Array, *shape: int) -> Array:
            return x.reshape(*x.shape[:2], self.num_k_heads, *shape)

        def normed(x: Array) -> Array:
            return x * jax.lax.rsqrt((x * x).sum(-1, keepdims=True) + _L2_EPS)

        before = (None,) * 3 if state is None else state[:3]
        weights = (w[f"conv_{name}"] for name in "qkv")
        q, k, v = (
            self._convolved(*arrays, where) for arrays in zip(inputs, before, weights, strict=True)
        )
        a, b = (heads(x.astype(jnp.float32), self.group) for x in (a, b))
        rate, bias = (
            w[name].astype(jnp.float32).reshape(self.num_k_heads, self.group)
            for name in ("A_log", "dt_bias")
        )
        return delta_rule.Inputs(
            q=normed(heads(q, self.head_k_dim)) * self.head_k_dim**-0.5,
            k=normed(heads(k, self.head_k_dim)),
            v=heads(v, self.group, self.head_v_dim),
            g=-jnp.exp(rate) * jax.nn.softplus(a + bias),
            beta=jax.nn.sigmoid(b),
        )

    def _convolved(
        self, x: Float[Array, "B T channels"], before: Array | None, weight: Array, where: Where
    ) -> Float[Array, "B T channels"]:
        """Convolves rows along their own past, each channel by itself; float32 after SiLU."""
        rows, taps = x.shape[1], self.conv_kernel
        if before is None:
            before = jnp.zeros((x.shape[0], taps - 1, x.shape[2]), x.dtype)
        whole = jnp.concatenate([before, x], axis=1)
        index = None if where.path_rows is None else _past(where.path_rows, where.depth, taps)

        def tap(number: int) -> Array:
            """Returns the input that each row has under one tap; the last tap is on the row."""
            if index is None:
                past = whole[:, number : number + rows]
            elif isinstance(index, np.ndarray):
                past = whole[:, index[:, number]]
            else:
                at = jnp.broadcast_to(index[..., number], x.shape[:2])
                past = take_along(whole, at[..., None], axis=1)
            if where.form == "train" and number < taps - 1:
                ids = jnp.pad(where.segments, ((0, 0), (taps - 1, 0)), constant_values=-1)
                same = ids[:, number : number + rows] == where.segments
                past = jnp.where(same[..., None], past, 0)
            return past.astype(jnp.float32) * weight[:, 0, number].astype(jnp.float32)

        return jax.nn.silu(sum(map(tap, range(taps))))

    def _output(
        self, w: Params, out: Float[Array, "B T K R dv"], z: Float[Array, "B T V*dv"]
    ) -> Float[Array, "B T D"]:
        """Norms each head, multiplies by the gate, and projects back to the model's width."""
        normed = rms_norm(out, w["delta_norm"], self.norm_eps).reshape(z.shape)
        gated = normed.astype(jnp.float32) * jax.nn.silu(z.astype(jnp.float32))
        return dot(gated.astype(z.dtype), w["delta_out"])


def _past(path_rows: Array, depth: Array, taps: int) -> Array:
    """Returns [*B T taps] where rows find their past in the state's inputs and the rows together.

    The state holds `taps - 1` inputs, and the rows of a tree stand behind them.
    """
    xp = np if isinstance(depth, np.ndarray) else jnp
    level = depth[..., None] - xp.arange(taps - 1, -1, -1)
    rows = xp.take_along_axis(path_rows, xp.maximum(level, 0), axis=-1)
    return taps - 1 + xp.where(level < 0, level, rows)
