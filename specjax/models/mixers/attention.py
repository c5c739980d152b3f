"""Attention with grouped queries, of which most families are settings."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from specjax.interfaces import Fused, Memory, Param, Params, Room, Scratch, Stored, Where
from specjax.kernels import dispatch
from specjax.memory import KVCache, append_rows, with_marked_keys
from specjax.models.layers import rms_norm
from specjax.models.rope import Rope, apply_rope, rope_tables
from specjax.weights.matrix import dot


class Projected(NamedTuple):
    """Queries, keys and values, head-major, normed and rotated, and gates, if there are any.

    Queries are multiplied by `scale`.
    """

    q: Float[Array, "B N T H"]
    k: Float[Array, "B K T H"]
    v: Float[Array, "B K T H"]
    gate: Float[Array, "B N T H"] | None = None


@dataclasses.dataclass(frozen=True)
class Attention:
    """Causal attention over keys and values, a `specjax.interfaces.Mixer`.

    Where decoding fuses projections, q, k and v are side by side in `qkv_proj`, and the scales of
    their heads, one row per head, in `qk_norm`.

    Attributes:
      num_heads: number N of query heads.
      num_kv_heads: number K of key and value heads.
      head_dim: size H of a head.
      rope: rotary embedding of queries and keys.
      qkv_bias: whether q, k and v have biases (Qwen2, MiMo).
      qk_norm: whether queries and keys have an RMSNorm before RoPE (Qwen3).
      norm_eps: epsilon of these norms.
      window: number of positions that a query sees, its own included; None: all up to its own.
      soft_cap: bound of the scaled scores, which become soft_cap * tanh(score / soft_cap) before
        the softmax; None: no bound.
      o_bias: whether the output projection has a bias.
      scale: factor of the scores; None: H ** -0.5.
      norm_offset: whether these norms multiply by 1 + w (Gemma 3).
      wide_norm: whether these norms are over all heads together (OLMo 2), instead of each head.
      gate: whether each head's output is multiplied by the sigmoid of a gate, which the query
        projection computes behind the head's query (Qwen3-Next).
      sinks: whether each query head has a logit of its own that takes part in its softmax, and has
        no value (gpt-oss).
    """

    kind: ClassVar[str] = "attention"

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: Rope = Rope()
    qkv_bias: bool = False
    qk_norm: bool = False
    norm_eps: float = 1e-6
    window: int | None = None
    soft_cap: float | None = None
    o_bias: bool = False
    scale: float | None = None
    norm_offset: bool = False
    wide_norm: bool = False
    gate: bool = False
    sinks: bool = False

    def __post_init__(self):
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads must be a multiple of num_kv_heads, got {self.num_heads} and "
                f"{self.num_kv_heads}"
            )
        if self.rope.width(self.head_dim) % 2:
            raise ValueError(
                f"RoPE must rotate an even number of head_dim, got {self.rope.width(self.head_dim)}"
            )
        if self.window is not None and self.window < 1:
            raise ValueError(f"window must be at least 1 or None, got {self.window}")
        if self.soft_cap is not None and not self.soft_cap > 0:
            raise ValueError(f"soft_cap must be above 0 or None, got {self.soft_cap}")

    def params(self, width: int) -> dict[str, Param]:
        """Returns the rows of its arrays, in the order of random initialisation."""
        n, k, h = self.num_heads, self.num_kv_heads, self.head_dim
        of_query = n * (2 if self.gate else 1)

        def project(name: str, heads: int, order: int) -> Param:
            stored = Stored(f"self_attn.{name}_proj.weight", transpose=True)
            fused = Fused("qkv_proj", order)
            return Param((width, heads * h), ("embed", "heads"), stored, matrix=True, fused=fused)

        def bias(name: str, heads: int, order: int) -> Param:
            stored, fused = Stored(f"self_attn.{name}_proj.bias"), Fused("qkv_bias", order)
            return Param((heads * h,), ("heads",), stored, init=0, fused=fused)

        def scale(name: str, heads: int, order: int) -> Param:
            stored, init = Stored(f"self_attn.{name}_norm.weight"), 0 if self.norm_offset else None
            if self.wide_norm:
                fused = Fused("qk_norm", order)
                return Param((heads * h,), ("heads",), stored, init=init, fused=fused)
            fused = Fused("qk_norm", order, heads)
            return Param((h,), (None,), stored, init=init, fused=fused)

        rows = {
            "o": Param(
                (n * h, width), ("heads", "embed"), Stored("self_attn.o_proj.weight", True),
                matrix=True, residual=True,
            ),
            "q": project("q", of_query, 0),
            "k": project("k", k, 1),
            "v": project("v", k, 2),
        }  # fmt: skip
        if self.qkv_bias:
            rows |= {"q_bias": bias("q", of_query, 0), "k_bias": bias("k", k, 1)}
            rows |= {"v_bias": bias("v", k, 2)}
        if self.o_bias:
            rows["o_bias"] = Param((width,), (None,), Stored("self_attn.o_proj.bias"), init=0)
        if self.qk_norm:
            rows |= {"q_norm": scale("q", n, 0), "k_norm": scale("k", k, 1)}
        if self.sinks:
            rows["sinks"] = Param((n,), ("heads",), Stored("self_attn.sinks"))
        return rows

    @property
    def rotation(self) -> tuple[Rope, int] | None:
        """Returns the rotary embedding, and the size of the heads that it rotates."""
        return (self.rope, self.head_dim) if self.rope.share else None

    def empty(self, run: Any, room: Room) -> Memory:
        """Makes pages of keys and values, all zero, and no slots."""
        shape = (room.pages, self.num_kv_heads, room.page_size, self.head_dim)
        k, v = (jnp.zeros(shape, jnp.dtype(run.compute_dtype)) for _ in range(2))
        return Memory(KVCache(k, v), None)

    def run(
        self,
        w: Params,
        x: Float[Array, "B T D"],
        where: Where,
        memory: Memory | None,
        scratch: Scratch | None,
    ) -> tuple[Float[Array, "B T D"], Scratch]:
        """See `specjax.interfaces.Mixer.run`."""
        decoding = where.form != "train"
        q, k, v, gate = self.project(w, x, where, decoding)
        sees = {"window": self.window, "soft_cap": self.soft_cap, "sinks": w.get("sinks")}
        if where.form == "train":
            attended = dispatch.causal_attention(
                q, k, v, where.segments, where.context, **sees, kernel=where.kernel
            )
            return self.output(w, attended, gate), Scratch(KVCache(k, v), None)
        k, v = kept = with_marked_keys(k, v)
        if scratch is not None:
            kept, (k, v) = append_rows(scratch.pages, where.held, kept)
        arrays = q, k, v, *memory.pages, where.prefix
        if where.form == "by_position":
            path = where.path_rows, where.depth
            attended = dispatch.tree_attention_by_position(*arrays, *path, where.table, **sees)
        else:
            attended = dispatch.tree_attention(
                *arrays, where.visible, where.table, **sees, kernel=where.kernel
            )
        return self.output(w, attended, gate), Scratch(KVCache(*kept), None)

    def run_again(
        self, w: Params, x: Float[Array, "B S D"], where: Where, earlier: Sequence[Scratch]
    ) -> tuple[Float[Array, "B S D"], Scratch]:
        """See `specjax.interfaces.Mixer.run_again`."""
        q, k, v, gate = self.project(w, x, where)
        base, *own = [rows.pages for rows in earlier]
        attended = dispatch.causal_attention_with_own(
            q, *base, [*map(tuple, own), (k, v)], where.segments, where.context,
            window=self.window, soft_cap=self.soft_cap, sinks=w.get("sinks"), kernel=where.kernel,
        )  # fmt: skip
        return self.output(w, attended, gate), Scratch(KVCache(k, v), None)

    def operations(self, length: int) -> int:
        """Counts the products of queries with keys, and of weights with values, within windows."""
        seen = length if self.window is None else min(self.window, length)
        pairs = seen * (seen + 1) // 2 + (length - seen) * seen
        return 4 * self.num_heads * self.head_dim * pairs

    def advance(self, slots: None, rows: None, count: Array) -> None:
        """Returns None, for there are no slots."""

    def angles(
        self, positions: Int[Array, "B T"]
    ) -> tuple[Float[Array, "B T H"], Float[Array, "B T H"]]:
        """Computes cosines and sines for `project`, see `rope_tables`."""
        return rope_tables(self.rope, self.head_dim, positions)

    def project(
        self,
        w: Params,
        x: Float[Array, "B T D"],
        where: Where,
        decoding: bool = False,
    ) -> Projected:
        """Computes queries, keys, values and gates of normed states, see `Projected`."""
        turn, scale = where.rotated_by(self.rotation) if self.rotation else None, 1.0
        if self.scale is not None:  # kernels multiply scores by H ** -0.5
            scale = self.scale * self.head_dim**0.5

        def product(weight: str, bias: str) -> Array:
            with jax.named_scope(weight):
                out = dot(x, w[weight])
            if decoding:  # else the product writes heads, for which TPU programs transpose weights
                out = jax.lax.platform_dependent(
                    out, tpu=jax.lax.optimization_barrier, default=lambda out: out
                )
            return out + w[bias].astype(x.dtype) if bias in w else out

        def heads(x: Array, norm: Array | None = None) -> Array:
            b, t, width = x.shape
            if norm is not None and self.wide_norm:
                x, norm = rms_norm(x, norm, self.norm_eps, self.norm_offset), None
            x = x.reshape(b, t, width // self.head_dim, self.head_dim)
            if norm is not None:
                x = rms_norm(x, norm, self.norm_eps, self.norm_offset)
            return x.transpose(0, 2, 1, 3)

        def rotated(x: Array, scale: float = 1.0) -> Array:
            if turn is not None:
                return apply_rope(x, *turn, self.rope.interleaved, scale)
            return x if scale == 1.0 else (x.astype(jnp.float32) * scale).astype(x.dtype)

        n, gate = self.num_heads, None
        if "qkv_proj" in w:
            out, norm = product("qkv_proj", "qkv_bias"), w.get("qk_norm")
            both = (n * (2 if self.gate else 1) + self.num_kv_heads) * self.head_dim
            qk, v = jnp.split(out, [both], axis=-1)
            if scale == 1.0 and not self.gate and not self.wide_norm:
                q, k = jnp.split(rotated(heads(qk, norm)), [n], axis=1)
                return Projected(q, k, heads(v))
            q, k = jnp.split(qk, [both - self.num_kv_heads * self.head_dim], axis=-1)
            if norm is not None:
                cut = n * self.head_dim if self.wide_norm else n
                norm = jnp.split(norm, [cut])
            q_norm, k_norm = norm or (None, None)
        else:
            q, k, v = (product(name, f"{name}_bias") for name in "qkv")
            q_norm, k_norm = w.get("q_norm"), w.get("k_norm")
        if self.gate:
            b, t, _ = q.shape
            q, gate = jnp.split(q.reshape(b, t, n, 2 * self.head_dim), 2, axis=-1)
            q, gate = q.reshape(b, t, -1), gate.transpose(0, 2, 1, 3)
        q, k = rotated(heads(q, q_norm), scale), rotated(heads(k, k_norm))
        return Projected(q, k, heads(v), gate)

    def output(
        self, w: Params, attended: Float[Array, "B N T H"], gate: Array | None = None
    ) -> Float[Array, "B T D"]:
        """Projects back to the model's width."""
        if gate is not None:
            attended = attended * jax.nn.sigmoid(gate)
        b, n, t, h = attended.shape
        merged = attended.transpose(0, 2, 1, 3).reshape(b, t, n * h)
        with jax.named_scope("o"):
            out = dot(merged, w["o"])
        return out + w["o_bias"].astype(out.dtype) if "o_bias" in w else out
