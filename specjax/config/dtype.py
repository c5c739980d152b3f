"""The dtype that an engine computes in: one rule for all programs that load a model."""

from __future__ import annotations

AUTO = "auto"
DTYPES = ("float32", "bfloat16", "float16")
ENGINE_DTYPES = (AUTO, *DTYPES)  # values of the setting


def resolve_dtype(dtype: str, stored: str, platform: str) -> str:
    """Chooses the dtype of weights and arithmetic.

    Args:
      dtype: a dtype, or `auto`: the checkpoint's on GPU and TPU, float32 on CPU, where arithmetic
        in half precision saves nothing.
      stored: the checkpoint's dtype.
      platform: jax's name for the platform of the devices, such as `cpu`.

    Raises:
      ValueError: `dtype` is not one of `ENGINE_DTYPES`.
    """
    if dtype not in ENGINE_DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(ENGINE_DTYPES)}, got {dtype!r}")
    if dtype != AUTO:
        return dtype
    return "float32" if platform == "cpu" else stored


def about_dtype(dtype: str, chosen: str, stored: str) -> str:
    """One line that says which dtype was chosen, and why."""
    why = "as asked" if dtype != AUTO else "the checkpoint's"
    if dtype == AUTO and chosen != stored:
        why = "as always on CPU unless asked otherwise"
    return f"arithmetic in {chosen}, {why} (the checkpoint is in {stored})"
