"""Rotary position embedding, in the two layouts of Hugging Face checkpoints."""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """The `llama3` frequency rescaling of RoPE (Llama 3.1); lengths in tokens."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int

    magnitude: ClassVar[float] = 1.0

    def rescale(self, freqs: np.ndarray, theta: float) -> np.ndarray:
        """Divides low frequencies by `factor`, keeps high ones, and interpolates between the two
        (transformers `modeling_rope_utils._compute_llama3_parameters`)."""
        wavelength = 2 * math.pi / freqs
        turns = self.original_max_position / wavelength
        smooth = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        smooth = np.clip(smooth, 0.0, 1.0)
        return ((1 - smooth) * freqs / self.factor + smooth * freqs).astype(np.float32)


@dataclasses.dataclass(frozen=True)
class LinearScaling:
    """RoPE of positions that are divided by `factor` (Chen et al. 2023, arXiv 2306.15595)."""

    factor: float

    magnitude: ClassVar[float] = 1.0

    def rescale(self, freqs: np.ndarray, theta: float) -> np.ndarray:
        """Divides all frequencies by `factor`."""
        return (freqs / self.factor).astype(np.float32)


@dataclasses.dataclass(frozen=True)
class YarnScaling:
    """YaRN's frequency rescaling of RoPE (Peng et al. 2023, arXiv 2309.00071).

    Attributes:
      factor: by which low frequencies are divided.
      original_max_position: number of tokens that the model was trained on before.
      magnitude: factor of cosines and sines, so that scores have its square.
      beta_fast: turns within these tokens from which on frequencies are kept.
      beta_slow: turns up to which they are divided; between the two they are interpolated.
      truncate: whether the two bounds are rounded outwards to whole frequencies.
    """

    factor: float
    original_max_position: int
    magnitude: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True

    def rescale(self, freqs: np.ndarray, theta: float) -> np.ndarray:
        """Computes transformers' `modeling_rope_utils._compute_yarn_parameters`."""
        size = 2 * len(freqs)

        def place(turns: float) -> float:
            """The number of the frequency that turns so often, counted in elements of a head."""
            length = self.original_max_position / (turns * 2 * math.pi)
            return size * math.log(length) / (2 * math.log(theta))

        low, high = place(self.beta_fast), place(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, size - 1)
        width = 0.001 if low == high else high - low
        divided = np.clip((np.arange(len(freqs)) - low) / width, 0.0, 1.0)
        return (freqs / self.factor * divided + freqs * (1 - divided)).astype(np.float32)


@dataclasses.dataclass(frozen=True)
class LongScaling:
    """LongRoPE's frequency rescaling, a factor per frequency (Ding et al. 2024, arXiv 2402.13753).

    transformers changes from the short factors to the long ones when a sequence grows past
    `original_max_position`, so that a token depends on how long the batch is. Here the longest
    sequence that a program runs decides, before the first token, as in vLLM.

    Attributes:
      short: factors for sequences of at most `original_max_position` tokens.
      long: factors for longer ones.
      original_max_position: number of tokens that the model was trained on before.
      magnitude: factor of cosines and sines.
      longest: number of tokens of the longest sequence, see `ModelConfig.for_length`.
    """

    short: tuple[float, ...]
    long: tuple[float, ...]
    original_max_position: int
    magnitude: float
    longest: int

    def rescale(self, freqs: np.ndarray, theta: float) -> np.ndarray:
        """Computes transformers' `modeling_rope_utils._compute_longrope_parameters`."""
        factors = self.long if self.longest > self.original_max_position else self.short
        return (freqs / np.asarray(factors, np.float32)).astype(np.float32)


Scaling = RopeScaling | LinearScaling | YarnScaling | LongScaling


@dataclasses.dataclass(frozen=True)
class Rope:
    """The base of the frequencies, how they are rescaled, and what of a head they rotate.

    Attributes:
      theta: the base.
      scaling: how frequencies are rescaled; None: not at all.
      share: share of a head, from its beginning, that is rotated; 0: there is no rotary embedding.
      interleaved: whether numbers 2i and 2i + 1 are rotated together, instead of i and i + H/2.
    """

    theta: float = 10_000.0
    scaling: Scaling | None = None
    share: float = 1.0
    interleaved: bool = False

    def width(self, head_dim: int) -> int:
        """Returns how many numbers of a head are rotated."""
        return int(head_dim * self.share)

    def frequencies(self, head_dim: int) -> np.ndarray:
        """Computes the frequencies [width/2] in radians per token."""
        width = self.width(head_dim)
        exponents = np.arange(0, width, 2, dtype=np.float32) / width
        freqs = (1.0 / self.theta**exponents).astype(np.float32)
        return freqs if self.scaling is None else self.scaling.rescale(freqs, self.theta)

    @property
    def magnitude(self) -> float:
        """The factor of cosines and sines."""
        return 1.0 if self.scaling is None else self.scaling.magnitude


def rope_tables(
    rope: Rope, head_dim: int, positions: Int[Array, "B T"]
) -> tuple[Float[Array, "B T H"], Float[Array, "B T H"]]:
    """Computes cosines and sines at absolute positions, float32."""
    angles = positions[..., None].astype(jnp.float32) * rope.frequencies(head_dim)
    if rope.interleaved:
        angles = jnp.repeat(angles, 2, axis=-1)
    else:
        angles = jnp.concatenate([angles, angles], axis=-1)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    if rope.magnitude != 1.0:
        cos, sin = cos * rope.magnitude, sin * rope.magnitude
    return cos, sin


def apply_rope(
    x: Float[Array, "B heads T H"],
    cos: Float[Array, "B T width"],
    sin: Float[Array, "B T width"],
    interleaved: bool = False,
    scale: float = 1.0,
) -> Float[Array, "B heads T H"]:
    """Rotates the first numbers of head-major queries or keys, and multiplies all by `scale`."""
    x32, width = x.astype(jnp.float32), cos.shape[-1]
    turned, rest = x32[..., :width], x32[..., width:]
    if interleaved:
        beside = jnp.stack([-turned[..., 1::2], turned[..., ::2]], axis=-1).reshape(turned.shape)
    else:
        beside = jnp.concatenate([-turned[..., width // 2 :], turned[..., : width // 2]], axis=-1)
    out = turned * cos[:, None] + beside * sin[:, None]
    out = out if width == x.shape[-1] else jnp.concatenate([out, rest], axis=-1)
    return (out if scale == 1.0 else out * scale).astype(x.dtype)
