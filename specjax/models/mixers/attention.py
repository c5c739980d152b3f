"""Attention with grouped queries: Llama, Qwen2, Qwen3, MiMo and Mistral are settings of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from specjax.interfaces import Fused, Memory, Param, Params, Room, Scratch, Stored, Where
from specjax.kernels import dispatch
from specjax.memory import KVCache, append_rows, with_marked_keys
from specjax.models.layers import rms_norm
from specjax.models.rope import Rope, apply_rope, rope_tables
from specjax.weights.matrix import dot


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
      qk_norm: whether queries and keys have an RMSNorm per head before RoPE (Qwen3).
      norm_eps: epsilon of these norms.
      window: number of positions that a query sees, its own included; None: all up to its own.
      soft_cap: bound of the scaled scores, which become soft_cap * tanh(score / soft_cap) before
        the softmax; None: no bound. No family of `specjax.models.families` has one.
      o_bias: whether the output projection has a bias; heads of drafts may have one.
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

    def __post_init__(self):
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads must be a multiple of num_kv_heads, got {self.num_heads} and "
                f"{self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even for RoPE, got {self.head_dim}")
        if self.window is not None and self.window < 1:
            raise ValueError(f"window must be at least 1 or None, got {self.window}")
        if self.soft_cap is not None and not self.soft_cap > 0:
            raise ValueError(f"soft_cap must be above 0 or None, got {self.soft_cap}")

    def params(self, width: int) -> dict[str, Param]:
        """Returns the rows of its arrays, in the order of random initialisation."""
        n, k, h = self.num_heads, self.num_kv_heads, self.head_dim

        def project(name: str, heads: int, order: int) -> Param:
            stored = Stored(f"self_attn.{name}_proj.weight", transpose=True)
            fused = Fused("qkv_proj", order)
            return Param((width, heads * h), ("embed", "heads"), stored, matrix=True, fused=fused)

        def bias(name: str, heads: int, order: int) -> Param:
            stored, fused = Stored(f"self_attn.{name}_proj.bias"), Fused("qkv_bias", order)
            return Param((heads * h,), ("heads",), stored, init=0, fused=fused)

        def scale(name: str, heads: int, order: int) -> Param:
            stored, fused = Stored(f"self_attn.{name}_norm.weight"), Fused("qk_norm", order, heads)
            return Param((h,), (None,), stored, init=None, fused=fused)

        rows = {
            "o": Param(
                (n * h, width), ("heads", "embed"), Stored("self_attn.o_proj.weight", True),
                matrix=True, residual=True,
            ),
            "q": project("q", n, 0),
            "k": project("k", k, 1),
            "v": project("v", k, 2),
        }  # fmt: skip
        if self.qkv_bias:
            rows |= {"q_bias": bias("q", n, 0), "k_bias": bias("k", k, 1)}
            rows |= {"v_bias": bias("v", k, 2)}
        if self.o_bias:
            rows["o_bias"] = Param((width,), (None,), Stored("self_attn.o_proj.bias"), init=0)
        if self.qk_norm:
            rows |= {"q_norm": scale("q", n, 0), "k_norm": scale("k", k, 1)}
        return rows

    @property
    def rotation(self) -> tuple[Rope, int]:
        """Returns the rotary embedding, and the size of the heads that it rotates."""
        return self.rope, self.head_dim

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
        q, k, v = self.project(w, x, *where.rotated_by(self.rotation), decoding)
        sees = {"window": self.window, "soft_cap": self.soft_cap}
        if where.form == "train":
            attended = dispatch.causal_attention(
                q, k, v, where.segments, where.context, **sees, kernel=where.kernel
            )
            return self.output(w, attended), Scratch(KVCache(k, v), None)
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
        return self.output(w, attended), Scratch(KVCache(*kept), None)

    def run_again(
        self, w: Params, x: Float[Array, "B S D"], where: Where, earlier: Sequence[Scratch]
    ) -> tuple[Float[Array, "B S D"], Scratch]:
        """See `specjax.interfaces.Mixer.run_again`."""
        q, k, v = self.project(w, x, *where.rotated_by(self.rotation))
        base, *own = [rows.pages for rows in earlier]
        attended = dispatch.causal_attention_with_own(
            q, *base, [*map(tuple, own), (k, v)], where.segments, where.context,
            window=self.window, soft_cap=self.soft_cap, kernel=where.kernel,
        )  # fmt: skip
        return self.output(w, attended), Scratch(KVCache(k, v), None)

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
        cos: Float[Array, "B T H"],
        sin: Float[Array, "B T H"],
        decoding: bool = False,
    ) -> tuple[Float[Array, "B N T H"], Float[Array, "B K T H"], Float[Array, "B K T H"]]:
        """Computes queries, keys and values of normed states, head-major, normed and rotated."""

        def product(weight: str, bias: str) -> Array:
            with jax.named_scope(weight):
                out = dot(x, w[weight])
            if decoding:  # else the product writes heads, for which TPU programs transpose weights
                out = jax.lax.platform_dependent(
                    out, tpu=jax.lax.optimization_barrier, default=lambda out: out
                )
            return out + w[bias].astype(x.dtype) if bias in w else out

        def heads(x: Array, norm: str | None = None) -> Array:
            b, t, width = x.shape
            x = x.reshape(b, t, width // self.head_dim, self.head_dim)
            if norm in w:
                x = rms_norm(x, w[norm], self.norm_eps)
            return x.transpose(0, 2, 1, 3)

        if "qkv_proj" in w:
            out = product("qkv_proj", "qkv_bias")
            both = (self.num_heads + self.num_kv_heads) * self.head_dim
            qk, v = jnp.split(out, [both], axis=-1)
            qk = apply_rope(heads(qk, "qk_norm"), cos, sin)
            q, k = jnp.split(qk, [self.num_heads], axis=1)
            return q, k, heads(v)
        q, k, v = (product(name, f"{name}_bias") for name in "qkv")
        q, k = heads(q, "q_norm"), heads(k, "k_norm")
        return apply_rope(q, cos, sin), apply_rope(k, cos, sin), heads(v)

    def output(self, w: Params, attended: Float[Array, "B N T H"]) -> Float[Array, "B T D"]:
        """Projects back to the model's width."""
        b, n, t, h = attended.shape
        merged = attended.transpose(0, 2, 1, 3).reshape(b, t, n * h)
        with jax.named_scope("o"):
            out = dot(merged, w["o"])
        return out + w["o_bias"].astype(out.dtype) if "o_bias" in w else out
