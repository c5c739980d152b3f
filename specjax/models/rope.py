"""Rotary position embedding, in the half-rotation layout of Hugging Face checkpoints."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from specjax.config import ModelConfig


def inverse_frequencies(cfg: ModelConfig) -> np.ndarray:
    """Frequencies [H/2] in radians per token, rescaled as Llama 3.1 does when the config says so.

    Low frequencies are divided by `factor`, high ones kept, those between interpolated
    (transformers `modeling_rope_utils._compute_llama3_parameters`).
    """
    exponents = np.arange(0, cfg.head_dim, 2, dtype=np.float32) / cfg.head_dim
    freqs = (1.0 / cfg.rope_theta**exponents).astype(np.float32)
    scaling = cfg.rope_scaling
    if scaling is None:
        return freqs
    wavelength = 2 * math.pi / freqs
    turns = scaling.original_max_position / wavelength
    smooth = (turns - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    smooth = np.clip(smooth, 0.0, 1.0)
    return ((1 - smooth) * freqs / scaling.factor + smooth * freqs).astype(np.float32)


def rope_tables(
    cfg: ModelConfig, positions: Int[Array, "B T"]
) -> tuple[Float[Array, "B T H"], Float[Array, "B T H"]]:
    """Cosines and sines at the given absolute positions, float32, once per forward pass."""
    angles = positions[..., None].astype(jnp.float32) * inverse_frequencies(cfg)
    angles = jnp.concatenate([angles, angles], axis=-1)
    return jnp.cos(angles), jnp.sin(angles)


def apply_rope(
    x: Float[Array, "B M T H"], cos: Float[Array, "B T H"], sin: Float[Array, "B T H"]
) -> Float[Array, "B M T H"]:
    """Rotates head-major queries or keys."""
    half = x.shape[-1] // 2
    rotated = jnp.concatenate([-x[..., half:], x[..., :half]], axis=-1)
    out = x.astype(jnp.float32) * cos[:, None] + rotated.astype(jnp.float32) * sin[:, None]
    return out.astype(x.dtype)
