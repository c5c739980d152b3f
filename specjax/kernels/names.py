"""The names of kernel backends. Imports no jax, so that parsers start fast."""

from __future__ import annotations

from specjax.registry import BACKENDS, check_setting

# Platforms of GPUs, as jax names them, and those of them that NVIDIA's GPUs have.
GPUS = ("gpu", "cuda", "rocm")
NVIDIA = ("gpu", "cuda")
# Backends that `auto` tries on a platform, as jax names it: the first that has the operation and
# refuses neither device nor model; otherwise the reference.
OWN = {
    "cpu": ("cpu",),
    "tpu": ("tpu:v5e", "tpu:v5p", "tpu:v6e"),
    **dict.fromkeys(NVIDIA, ("gpu", "triton", "gpu:flash", "library:cudnn", "library:xla")),
    "rocm": ("gpu", "library:xla"),
}
ATTENTION = ("auto", *sorted(BACKENDS.names))


def check_attention(name: str) -> str:
    """Returns the name if it is one of `ATTENTION` or a path `module:attribute`; imports nothing.

    Raises:
      ValueError: the name is neither.
    """
    return check_setting("attention", name, ATTENTION)
