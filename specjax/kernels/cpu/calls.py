"""The calls that the kernels for CPUs take, each an operation of a `specjax.interfaces.Backend`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt32

from specjax.config import ModelConfig
from specjax.interfaces import Table
from specjax.kernels.backend import Declined
from specjax.kernels.cpu import native
from specjax.kernels.reference import PANEL_WIDTH


def tree_attention(
    q: Float[Array, "B N T H"],
    k_tree: Float[Array, "B K T2 H"],
    v_tree: Float[Array, "B K T2 H"],
    k_pages: Float[Array, "P K S H"],
    v_pages: Float[Array, "P K S H"],
    prefix_len: Int[Array, " B"],
    visible_bits: UInt32[Array, "*B T W"],
    table: Table = None,
    *,
    window: int | None = None,
    sinks: Float[Array, " N"] | None = None,
    with_lse: bool = False,
) -> Float[Array, "B N T H"]:
    """See `specjax.kernels.reference.tree_attention`; all in float32, H a multiple of 16.

    Raises:
      Declined: there is a window, sinks, or log-sum-exps are asked for.
      TypeError: an array is not float32.
    """
    if window is not None or sinks is not None or with_lse:
        raise Declined("it has no windows, no sinks and no log-sum-exps")
    floats = q, k_tree, v_tree, k_pages, v_pages
    if any(x.dtype != jnp.float32 for x in floats):
        raise TypeError(f"expected float32 throughout, got {[str(x.dtype) for x in floats]}")
    bits = jnp.asarray(visible_bits)
    bits = bits if bits.ndim == 3 else bits[None]
    if table is None:
        table = jnp.arange(q.shape[0], dtype=jnp.int32)[:, None]
    native.load()
    call = jax.ffi.ffi_call(native.ATTENTION, jax.ShapeDtypeStruct(q.shape, q.dtype))
    return call(*floats, prefix_len, bits, table)


def layers(
    cfg: ModelConfig,
    weights: Sequence[Mapping[str, Array]],
    x: Float[Array, "B T D"],
    cos: Float[Array, "B T H"],
    sin: Float[Array, "B T H"],
    pages: Sequence[tuple[Array, Array]],
    prefix_len: Int[Array, " B"],
    visible_bits: UInt32[Array, "*B T W"],
    before: Sequence[tuple[Array, Array]] | None = None,
    table: Table = None,
) -> tuple[Float[Array, "B T D"], list[tuple[Array, Array]]]:
    """See `specjax.kernels.dispatch.layers`; all in float32.

    Raises:
      TypeError: an array is not float32.
    """
    mixer, mlp = cfg.layers[0].mixer, cfg.layers[0].mlp
    names = ["input_norm", "qkv_proj", "qkv_bias", "qk_norm", "o", "post_norm", "gate_up", "down"]
    names = [name for name in names if name in weights[0]]
    arrays = []
    for i, of in enumerate(weights):
        arrays += [*pages[i], *(before[i] if before else ()), *(of[name] for name in names)]
    if any(a.dtype != jnp.float32 for a in (x, *arrays)):
        raise TypeError(f"layers run in float32, got {sorted({str(a.dtype) for a in arrays})}")
    bits = jnp.asarray(visible_bits)
    bits = bits if bits.ndim == 3 else bits[None]
    if table is None:
        table = jnp.arange(x.shape[0], dtype=jnp.int32)[:, None]
    rows = jax.ShapeDtypeStruct(
        (x.shape[0], mixer.num_kv_heads, x.shape[1], mixer.head_dim), jnp.float32
    )
    native.load()
    call = jax.ffi.ffi_call(
        native.LAYERS, [jax.ShapeDtypeStruct(x.shape, x.dtype), *[rows] * (2 * len(weights))]
    )
    out, *kv = call(
        x, cos, sin, prefix_len, bits, table, *arrays,
        layers=np.int64(len(weights)),
        heads=np.int64(mixer.num_heads),
        kv_heads=np.int64(mixer.num_kv_heads),
        hidden=np.int64(mlp.intermediate_size),
        pages=np.int64(pages[0][0].shape[0]),
        size=np.int64(pages[0][0].shape[2]),
        before=np.int64(before[0][0].shape[2] if before else 0),
        eps=np.float32(cfg.rms_norm_eps),
        bias="qkv_bias" in names,
        qk_norm="qk_norm" in names,
    )  # fmt: skip
    return out, list(zip(kv[::2], kv[1::2], strict=True))


def commit(
    arrays: Sequence[Float[Array, "P K S H"]],
    rows: Sequence[Float[Array, "B K R H"]],
    start: Int[Array, " B"],
    table: Table = None,
    *,
    run: int = 1,
) -> list[Array]:
    """See `specjax.kernels.dispatch.commit`; what has no page is not written, whatever `run` is.

    Raises:
      Declined: an array is not float32, or holds several layers.
    """
    if any(x.dtype != jnp.float32 for x in (*arrays, *rows)):
        raise Declined("it writes float32")
    if any(x.ndim != 4 for x in arrays):
        raise Declined("it writes to arrays of one layer each")
    if table is None:
        table = jnp.arange(start.shape[0], dtype=jnp.int32)[:, None]
    native.load()
    call = jax.ffi.ffi_call(
        native.COMMIT,
        [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in arrays],
        input_output_aliases={2 + i: i for i in range(len(arrays))},
    )
    return call(start, table, *arrays, *rows)


def product(x: Float[Array, "... K"], panels: Float[Array, "P K W"]) -> Float[Array, "... N"]:
    """See `specjax.kernels.dispatch.product`; in float32, each sum in the order of K.

    Raises:
      TypeError: an array is not float32.
    """
    if x.dtype != jnp.float32 or panels.dtype != jnp.float32:
        raise TypeError(f"panels are multiplied in float32, got {x.dtype} and {panels.dtype}")
    out = jax.ShapeDtypeStruct((*x.shape[:-1], panels.shape[0] * PANEL_WIDTH), jnp.float32)
    native.load()
    return jax.ffi.ffi_call(native.PANELS, out)(x, panels)
