"""The parts of a decoder layer; a `Block` holds one layer's arrays, or all layers' stacked."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from specjax.config import ModelConfig
from specjax.kernels import panels
from specjax.models.rope import apply_rope

INIT_STD = 0.02


def rms_norm(x: Float[Array, "... D"], scale: Float[Array, "... D"], eps: float) -> Array:
    """Root-mean-square norm over the last axis, in float32 (Zhang & Sennrich 2019)."""
    x32 = x.astype(jnp.float32)
    normed = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, -1, keepdims=True) + eps)
    return (normed * scale.astype(jnp.float32)).astype(x.dtype)


def dense(x: Float[Array, "... I"], weight: Float[Array, "..."]) -> Float[Array, "... O"]:
    """`x @ weight`, of a weight [I O] or, where nobody asks for gradients, of one in panels."""
    return panels.product(x, weight) if weight.ndim == 3 else _dense(x, weight)


@jax.custom_vjp
def _dense(x: Float[Array, "... I"], weight: Float[Array, "I O"]) -> Float[Array, "... O"]:
    """`x @ weight`, with a backward pass whose products are plain matrix products on CPU.

    There XLA contracts the two leading axes of the weight gradient in a slow loop; flattening them
    first makes a training step of a small model about 1.6 times faster. Elsewhere they stay apart:
    where both are split over devices, an axis made of the two would have to be gathered.
    """
    return x @ weight


def _dense_bwd(residuals, d_out):
    x, weight = residuals

    def flat(x, d_out):
        flat_out = d_out.reshape(-1, d_out.shape[-1])
        return (flat_out @ weight.T).reshape(x.shape), x.reshape(-1, x.shape[-1]).T @ flat_out

    def apart(x, d_out):
        return d_out @ weight.T, jnp.einsum("...i,...o->io", x, d_out)

    return jax.lax.platform_dependent(x, d_out, cpu=flat, default=apart)


_dense.defvjp(lambda x, weight: (x @ weight, (x, weight)), _dense_bwd)


class Block(nnx.Module):
    """Attention and gated feed-forward with pre-norms; stacked when `stack` is a number of layers.

    Projections are stored `[in, out]`, transposed from Hugging Face's `[out, in]`. A `fused` block
    keeps q, k, v side by side in one weight, and gate and up in another: at a few rows per step
    the number of operations, not their size, is what decoding costs. See `fuse_block`.
    """

    def __init__(
        self, cfg: ModelConfig, rngs: nnx.Rngs, stack: int | None = None, fused: bool = False
    ):
        self.cfg, self.fused = cfg, fused
        lead = () if stack is None else (stack,)
        dtype = jnp.dtype(cfg.param_dtype)
        d, f = cfg.hidden_size, cfg.intermediate_size
        q_width, kv_width = cfg.num_heads * cfg.head_dim, cfg.num_kv_heads * cfg.head_dim

        def normal(*shape, std=INIT_STD):
            draw = jax.random.normal(rngs.params(), lead + shape, jnp.float32)
            return nnx.Param((std * draw).astype(dtype))

        def constant(value, *shape):
            return nnx.Param(jnp.full(lead + shape, value, dtype))

        residual_std = INIT_STD / (2 * max(cfg.num_layers, 1)) ** 0.5  # GPT-2's depth scaling
        self.input_norm, self.post_norm = constant(1, d), constant(1, d)
        self.o = normal(q_width, d, std=residual_std)
        if fused:
            self.qkv_proj = normal(d, q_width + 2 * kv_width)
            self.gate_up = normal(d, 2 * f)
        else:
            self.q, self.k, self.v = normal(d, q_width), normal(d, kv_width), normal(d, kv_width)
            self.gate, self.up = normal(d, f), normal(d, f)
        if cfg.qkv_bias and fused:
            self.qkv_bias = constant(0, q_width + 2 * kv_width)
        elif cfg.qkv_bias:
            self.q_bias, self.k_bias = constant(0, q_width), constant(0, kv_width)
            self.v_bias = constant(0, kv_width)
        if cfg.qk_norm and fused:  # one scale per head
            self.qk_norm = constant(1, cfg.num_heads + cfg.num_kv_heads, cfg.head_dim)
        elif cfg.qk_norm:
            self.q_norm, self.k_norm = constant(1, cfg.head_dim), constant(1, cfg.head_dim)
        self.down = normal(f, d, std=residual_std)

    def arrays(self) -> dict[str, Array]:
        """The layer's arrays by their names."""
        return {path[-1]: x[...] for path, x in nnx.to_flat_state(nnx.state(self, nnx.Param))}

    def _project(self, x, weight: str, bias: str | None = None):
        out = dense(x, getattr(self, weight)[...].astype(x.dtype))
        return out if bias is None else out + getattr(self, bias)[...].astype(x.dtype)

    def _heads(self, x, norm: str | None = None):
        """[B T M*H] to head-major [B M T H], normed per head."""
        b, t, width = x.shape
        x = x.reshape(b, t, width // self.cfg.head_dim, self.cfg.head_dim)
        if norm is not None:
            x = rms_norm(x, getattr(self, norm)[...], self.cfg.rms_norm_eps)
        return x.transpose(0, 2, 1, 3)

    def qkv(self, x: Float[Array, "B T D"], cos, sin) -> tuple[Array, Array, Array]:
        """Normed and rotated queries [B N T H], keys and values [B K T H]."""
        cfg = self.cfg
        x = rms_norm(x, self.input_norm[...], cfg.rms_norm_eps)
        if self.fused:
            out = self._project(x, "qkv_proj", "qkv_bias" if cfg.qkv_bias else None)
            qk, v = jnp.split(out, [(cfg.num_heads + cfg.num_kv_heads) * cfg.head_dim], axis=-1)
            qk = apply_rope(self._heads(qk, "qk_norm" if cfg.qk_norm else None), cos, sin)
            q, k = jnp.split(qk, [cfg.num_heads], axis=1)
            return q, k, self._heads(v)
        q, k, v = (
            self._project(x, name, f"{name}_bias" if cfg.qkv_bias else None) for name in "qkv"
        )
        q = self._heads(q, "q_norm" if cfg.qk_norm else None)
        k = self._heads(k, "k_norm" if cfg.qk_norm else None)
        return apply_rope(q, cos, sin), apply_rope(k, cos, sin), self._heads(v)

    def finish(self, x: Float[Array, "B T D"], attended: Float[Array, "B N T H"]) -> Array:
        """Output projection, residual, and the gated feed-forward."""
        b, n, t, h = attended.shape
        merged = attended.transpose(0, 2, 1, 3).reshape(b, t, n * h)
        x = x + self._project(merged, "o")
        y = rms_norm(x, self.post_norm[...], self.cfg.rms_norm_eps)
        if self.fused:
            gate, up = jnp.split(self._project(y, "gate_up"), 2, axis=-1)
        else:
            gate, up = self._project(y, "gate"), self._project(y, "up")
        return x + self._project(jax.nn.silu(gate) * up, "down")


def fuse_block(params: dict, cfg: ModelConfig) -> dict:
    """Parameters of a plain block to those of a fused one; works on stacked ones as well."""

    def join(*names):
        return jnp.concatenate([params[n] for n in names], axis=-1)

    gone = {"q", "k", "v", "gate", "up", "q_bias", "k_bias", "v_bias", "q_norm", "k_norm"}
    fused = {name: value for name, value in params.items() if name not in gone}
    fused |= {"qkv_proj": join("q", "k", "v"), "gate_up": join("gate", "up")}
    if "q_bias" in params:
        fused["qkv_bias"] = join("q_bias", "k_bias", "v_bias")
    if "q_norm" in params:
        heads = [("q_norm", cfg.num_heads), ("k_norm", cfg.num_kv_heads)]
        scales = [jnp.repeat(params[n][..., None, :], count, axis=-2) for n, count in heads]
        fused["qk_norm"] = jnp.concatenate(scales, axis=-2)
    return fused
