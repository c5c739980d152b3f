"""Kernels for CPUs, in C++: products, attention and cache writes of a round.

`layers.cc` runs whole layers, `panels.cc` multiplies by weights, `attention.cc` attends,
`commit.cc` writes keys and values to their pages. `native.py` builds them and registers them with
XLA; this file makes the calls.

All compute a row in one order, so a row has the same bits in a batch of any size, in a tree of any
shape, as a draft that is verified and as the next token of plain decoding. XLA, which computes the
operations between them, does not guarantee that. The bits depend neither on the compiler nor on its
tuning, only on the width of the target's vectors and on whether it has fused multiply-add
(`common.h`).
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from specjax.config import ModelConfig
from specjax.interfaces import Backend, Device, Table
from specjax.kernels.backend import Declined, Unsuited, head_sizes
from specjax.kernels.cpu import native
from specjax.kernels.reference import PANEL_WIDTH


def tree_attention(
    q, k_tree, v_tree, k_pages, v_pages, prefix_len, visible_bits, table: Table = None
) -> Float[Array, "B N T H"]:
    """Computes `specjax.kernels.reference.tree_attention` in float32, for H a multiple of 16.

    Raises:
      TypeError: an array is not float32.
    """
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
    cfg: ModelConfig, weights, x, cos, sin, pages, prefix_len, visible_bits, before=None, table=None
) -> tuple[Float[Array, "B T D"], list[tuple[Array, Array]]]:
    """Computes `specjax.kernels.dispatch.layers` in float32.

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
) -> list[Array]:
    """Computes `specjax.kernels.dispatch.commit`; drops rows without a page.

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
    """Computes `specjax.kernels.dispatch.product` in float32, each sum in the order of K.

    Raises:
      TypeError: an array is not float32.
    """
    if x.dtype != jnp.float32 or panels.dtype != jnp.float32:
        raise TypeError(f"panels are multiplied in float32, got {x.dtype} and {panels.dtype}")
    out = jax.ShapeDtypeStruct((*x.shape[:-1], panels.shape[0] * PANEL_WIDTH), jnp.float32)
    native.load()
    return jax.ffi.ffi_call(native.PANELS, out)(x, panels)


# --- the backend ----------------------------------------------------------------------------------


def _refuses(operation: str, device: Device | None, cfg: ModelConfig) -> str | None:
    if device is not None and device.platform != "cpu":
        return Unsuited(f"it is compiled for CPUs, and the device is {device.platform!r}")
    if device is not None and device.count > 1:
        return Unsuited(f"it runs on one device, and the mesh has {device.count}")
    if cfg.run.compute_dtype != "float32":
        return Unsuited(f"it computes in float32, and decoding in {cfg.run.compute_dtype}")
    heads = () if operation == "product" else head_sizes(cfg)
    if odd := [size for size in heads if size % PANEL_WIDTH]:
        return Unsuited(f"head_dim must be a multiple of {PANEL_WIDTH}, got {odd[0]}")
    if operation == "layers" and (reason := _refuses_layers(cfg)):
        return reason
    try:
        native.load()
    except native.NoKernelError as error:
        return str(error)
    return None


def _refuses_layers(cfg: ModelConfig) -> str | None:
    if cfg.run.products != "panels":
        return Unsuited("it needs layers whose weights are stored in panels")
    if len(set(cfg.layers)) != 1:
        return Unsuited("it needs layers that are all of one kind and size")
    mixer, mlp = cfg.layers[0].mixer, cfg.layers[0].mlp
    if mixer.qk_norm and mixer.norm_eps != cfg.rms_norm_eps:
        return Unsuited(
            f"it supports one epsilon for all norms, got {mixer.norm_eps} for queries and keys and "
            f"{cfg.rms_norm_eps}"
        )
    widths = {"hidden_size": cfg.hidden_size, "intermediate_size": mlp.intermediate_size}
    for name, width in widths.items():
        if width % PANEL_WIDTH:
            return Unsuited(f"{name} must be a multiple of {PANEL_WIDTH}, got {width}")
    return None


# Fields of the config that `layers` computes with, or that are about what surrounds the layers.
_FIELDS = frozenset(
    f"{part}.{name}"
    for part, names in {
        "ModelConfig": "vocab_size hidden_size layers model_type rms_norm_eps tie_embeddings "
        "max_position eos_token_ids bos_token_id pad_token_id mtp_num_layers mtp_concat "
        "mtp_target_hidden mtp_recycle generation run norm_offset embedding_multiplier logits",
        "Layer": "mixer mlp",
        "Attention": "num_heads num_kv_heads head_dim rope qkv_bias qk_norm norm_eps",
        "Rope": "theta scaling",
        "Dense": "intermediate_size",
    }.items()
    for name in names.split()
)
BACKEND = Backend(
    operations={
        "tree_attention": tree_attention,
        "commit": commit,
        "product": product,
        "layers": layers,
    },
    takes={"layers": _FIELDS},
    refuses=_refuses,
    line="specjax's kernel for CPUs; prompts too, training in XLA",
    prompts_alone=False,
    by_device=False,
)
