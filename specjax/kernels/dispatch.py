"""One signature for attention, whatever the platform, and who serves it.

Models and the decode loop never name a kernel: `RunConfig.attention` does, which `settle` fills
in once, where engines and trainers are built and their devices are known.

    name              tree attention (decoding, prefill)     causal attention (training)
    reference         XLA, `reference.py`                    XLA, `reference.py`
    cpu               `cpu_attend.h`; with a window,         XLA, `reference.py`
                      sinks or log-sum-exps `reference.py`
    tpu:v5e, ..       Pallas, `tpu.py`                       jax's splash attention
    tpu:interpret     the same in interpret mode: tests on CPU
    library:cudnn     jax.nn.dot_product_attention, cuDNN    the same
    library:xla       jax.nn.dot_product_attention, XLA      the same
    gpu               Pallas Mosaic GPU, `gpu.py`            as library:cudnn

Under a mesh (`sharding.ambient`) every device attends to its own heads and rows of the batch.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32

from specjax.config import ModelConfig
from specjax.interfaces import Table
from specjax.kernels import commit as writes
from specjax.kernels import context as over_devices
from specjax.kernels import cpu, gpu, library, reference, tpu
from specjax.kernels.choice import choose
from specjax.kernels.reference import tree_attention_by_position
from specjax.parallel import sharding
from specjax.parallel.context import Context

__all__ = [
    "causal_attention",
    "causal_attention_with_own",
    "commit",
    "page_multiple",
    "settle",
    "tree_attention",
    "tree_attention_by_position",
]

log = logging.getLogger(__name__)


def settle(
    cfg: ModelConfig,
    mesh: jax.sharding.Mesh | None,
    asked: str = "auto",
    invariant: bool = False,
    whose: str = "attention",
    decoding: bool = True,
) -> ModelConfig:
    """The config with the kernel that its programs will run; logs a line that says which.

    Args:
      mesh: whose devices decide; they need not be there (a topology). None: the default device.
      asked: `auto`, or a name (see `specjax.kernels.choice`).
      invariant: rounds attend by position. whose: begins the line. decoding: and not training.

    Raises:
      ValueError: the kernel that is asked for cannot be used.
    """
    device = jax.devices()[0] if mesh is None else mesh.devices.flat[0]
    devices = 1 if mesh is None else mesh.size
    kind = device.device_kind
    choice = choose(device.platform, kind, cfg, asked, invariant, devices, decoding)
    log.log(logging.WARNING if choice.loud else logging.INFO, "%s: %s", whose, choice.line)
    return cfg.running(attention=choice.name)


def page_multiple(kernel: str) -> int:
    """Of how many positions the pages that a kernel reads must be a multiple."""
    return gpu.PAGE_MULTIPLE if kernel == "gpu" else 16


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
    kernel: str = "reference",
) -> Float[Array, "B N T H"] | tuple[Float[Array, "B N T H"], Float[Array, "B N T"]]:
    """See `specjax.kernels.reference.tree_attention`.

    Args:
      kernel: a name of the table above.
    """
    options = {"window": window, "with_lse": with_lse}
    arrays = q, k_tree, v_tree, k_pages, v_pages, prefix_len, visible_bits, table
    plain = window is None and sinks is None and not with_lse
    if kernel == "cpu" and plain:
        return cpu.tree_attention(*arrays)
    if kernel in ("reference", "cpu"):
        return reference.tree_attention(*arrays, sinks=sinks, **options)
    attend = functools.partial(_tree_kernel(kernel), **options)
    batch, heads = ("batch", "heads", None, None), (None, "heads", None, None)
    bits = jnp.asarray(visible_bits)
    named = {
        "q": (q, batch),
        "k_tree": (k_tree, batch),
        "v_tree": (v_tree, batch),
        # Without a table page b is slot b's.
        "k_pages": (k_pages, batch if table is None else heads),
        "v_pages": (v_pages, batch if table is None else heads),
        "prefix_len": (jnp.asarray(prefix_len), ("batch",)),
        "visible_bits": (bits, ("batch", None, None) if bits.ndim == 3 else (None, None)),
    }
    if table is not None:
        named["table"] = (table, ("batch", None))
    if sinks is not None:
        named["sinks"] = (sinks, ("heads",))
    out = (batch, batch[:-1]) if with_lse else batch
    return _on_each_device(attend, named, out, q.shape[0], k_tree.shape[1])


def _tree_kernel(kernel: str) -> Callable:
    family, _, variant = kernel.partition(":")
    if kernel == "tpu:interpret":
        return functools.partial(tpu.tree_attention, tuning=tpu.INTERPRETED, interpret=True)
    if family == "tpu":
        return functools.partial(tpu.tree_attention, tuning=tpu.TUNING[variant])
    if kernel == "gpu":
        return gpu.tree_attention
    return functools.partial(library.tree_attention, implementation=variant)


def commit(
    arrays: Sequence[Float[Array, "*L P K S H"]],
    rows: Sequence[Float[Array, "*L B K R H"]],
    start: Int[Array, " B"],
    table: Table = None,
    *,
    run: int = 1,
    kernel: str = "reference",
) -> list[Array]:
    """Pages after R consecutive rows of each sequence are written to them.

    Args:
      arrays, rows: of each layer's keys and values, or of all layers' stacked.
      start: where each sequence's first row goes.
      run: every `run` rows, counted from `start`, are sure to lie in one page.
      kernel: a name of the table above.
    """
    floats = all(x.dtype == jnp.float32 for x in (*arrays, *rows))
    if kernel == "cpu" and floats and arrays[0].ndim == 4:
        return cpu.commit(arrays, rows, start, table)
    if kernel == "gpu" or kernel.startswith("library"):
        return writes.by_scatter(arrays, rows, start, table, run=run)
    return writes.by_slices(arrays, rows, start, table, run=run)


def causal_attention(
    q: Float[Array, "B N S H"],
    k: Float[Array, "B K S H"],
    v: Float[Array, "B K S H"],
    segment_ids: Int[Array, "B S"],
    context: Context | None = None,
    *,
    kernel: str = "reference",
) -> Float[Array, "B N S H"]:
    """See `specjax.kernels.reference.causal_attention`.

    Args:
      context: how rows are split over devices; these attend in XLA, whatever the kernel.
      kernel: a name of the table above.
    """
    if context is not None:
        return over_devices.causal_attention(q, k, v, segment_ids, context)
    if kernel in ("reference", "cpu"):
        return reference.causal_attention(q, k, v, segment_ids)
    return causal_attention_with_own(q, k, v, [], segment_ids, kernel=kernel)


def causal_attention_with_own(
    q: Float[Array, "B N S H"],
    k: Float[Array, "B K S H"],
    v: Float[Array, "B K S H"],
    own: list[tuple[Array, Array]],
    segment_ids: Int[Array, "B S"],
    context: Context | None = None,
    *,
    kernel: str = "reference",
) -> Float[Array, "B N S H"]:
    """See `specjax.kernels.reference.causal_attention_with_own`; the rest as above."""
    if context is not None:
        return over_devices.causal_attention_with_own(q, k, v, own, segment_ids, context)
    if kernel in ("reference", "cpu"):
        return reference.causal_attention_with_own(q, k, v, own, segment_ids)
    family, _, variant = kernel.partition(":")
    if family == "tpu":
        attend = functools.partial(library.splash_attention, interpret=variant == "interpret")
    else:
        implementation = "cudnn" if kernel == "gpu" else variant
        attend = functools.partial(library.causal_attention, implementation=implementation)
    batch = ("batch", "heads", None, None)
    named = {name: (x, batch) for name, x in (("q", q), ("k", k), ("v", v))}
    named["own"] = (own, batch)
    named["segment_ids"] = (segment_ids, ("batch", None))
    return _on_each_device(attend, named, batch, q.shape[0], k.shape[1])


def _on_each_device(attend: Callable, named: dict, out, batch: int, kv_heads: int):
    """Calls `attend` on each device's share; the compiler cannot split a kernel by itself.

    Args:
      named: name -> (array or tree of arrays, its logical axes). out: logical axes of the result.
      batch, kv_heads: where these do not divide by the mesh, every device does the whole.
    """
    arrays = {name: x for name, (x, _) in named.items()}
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return attend(**arrays)
    sizes = {"batch": batch, "heads": kv_heads}
    split = {axis: sharding.spec_for(mesh, (axis,), (size,))[0] for axis, size in sizes.items()}

    def spec(axes):
        return jax.P(*(split.get(axis) for axis in axes))

    return jax.shard_map(
        lambda arrays: attend(**arrays),
        in_specs=({name: spec(axes) for name, (_, axes) in named.items()},),
        out_specs=tuple(map(spec, out)) if isinstance(out[0], tuple) else spec(out),
        check_vma=False,  # a kernel's outputs do not say over which axes they vary
    )(arrays)
