"""Rotary position embedding, in the half-rotation layout of Hugging Face checkpoints."""

from __future__ import annotations

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from specjax.spelling import checks_keywords


@checks_keywords
@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """The `llama3` frequency rescaling of RoPE (Llama 3.1); lengths in tokens."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int

    def rescale(self, freqs: np.ndarray) -> np.ndarray:
        """Divides low frequencies by `factor`, keeps high ones, and interpolates between the two
        (transformers `modeling_rope_utils._compute_llama3_parameters`)."""
        wavelength = 2 * math.pi / freqs
        turns = self.original_max_position / wavelength
        smooth = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        smooth = np.clip(smooth, 0.0, 1.0)
        return ((1 - smooth) * freqs / self.factor + smooth * freqs).astype(np.float32)


@checks_keywords
@dataclasses.dataclass(frozen=True)
class Rope:
    """The base of the frequencies, and how they are rescaled."""

    theta: float = 10_000.0
    scaling: RopeScaling | None = None

    def frequencies(self, head_dim: int) -> np.ndarray:
        """Computes the frequencies [H/2] in radians per token."""
        exponents = np.arange(0, head_dim, 2, dtype=np.float32) / head_dim
        freqs = (1.0 / self.theta**exponents).astype(np.float32)
        return freqs if self.scaling is None else self.scaling.rescale(freqs)


def rope_tables(
    rope: Rope, head_dim: int, positions: Int[Array, "B T"]
) -> tuple[Float[Array, "B T H"], Float[Array, "B T H"]]:
    """Computes cosines and sines at absolute positions, float32."""
    angles = positions[..., None].astype(jnp.float32) * rope.frequencies(head_dim)
    angles = jnp.concatenate([angles, angles], axis=-1)
    return jnp.cos(angles), jnp.sin(angles)


def apply_rope(
    x: Float[Array, "B heads T H"], cos: Float[Array, "B T H"], sin: Float[Array, "B T H"]
) -> Float[Array, "B heads T H"]:
    """Rotates head-major queries or keys."""
    half = x.shape[-1] // 2
    rotated = jnp.concatenate([-x[..., half:], x[..., :half]], axis=-1)
    out = x.astype(jnp.float32) * cos[:, None] + rotated.astype(jnp.float32) * sin[:, None]
    return out.astype(x.dtype)
