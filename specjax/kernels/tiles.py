"""Products of the tiles that Pallas kernels hold on the chip."""

import jax
import jax.numpy as jnp

BYTE_ROWS = 32  # rows of packed bytes that are unpacked at once: those of a tile of TPUs


def dot(a, b, contract=((1,), (0,))):
    """Multiplies two tiles, and adds up in float32.

    Tiles of float32 are rounded to nothing first, neither to bfloat16 on a TPU nor to TF32 on a
    GPU. For bfloat16 Mosaic takes no precision but the default, whatever jax is set to.
    """
    precision = jax.lax.Precision
    exact = precision.HIGHEST if a.dtype == jnp.float32 else precision.DEFAULT
    return jax.lax.dot_general(
        a, b, (contract, ((), ())), precision=exact, preferred_element_type=jnp.float32
    )


def by_rows(a, b):
    """Multiplies the rows of one tile by those of another: a @ b^T."""
    return dot(a, b, ((1,), (1,)))
