"""Attention that jax ships, under our signatures: splash attention on TPUs, cuDNN's on GPUs.

These functions take contiguous keys. So a paged prefix is gathered first, the tree's own keys are
appended to it, and the visibility of rows becomes a mask.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu import splash_attention as splash
from jaxtyping import Array, Bool, Float

from specjax import determinism
from specjax.config import ModelConfig
from specjax.config.model import ATTENTION_RESIDUALS
from specjax.interfaces import Backend, Device, Table
from specjax.kernels.backend import Declined, head_sizes
from specjax.kernels.names import NVIDIA
from specjax.kernels.reference import (
    causal_segment_mask,
    contiguous,
    own_in_window,
    tree_depth,
    unpack_bits,
    with_sink,
    within_window,
)

SPLASH_BLOCKS = (512, 256, 128)  # queries and keys at a time; the scores of 512 x 512 are 1 MiB

# --- GPU: jax.nn.dot_product_attention ---------------------------------------------------------


def tree_attention(
    q, k_tree, v_tree, k_pages, v_pages, prefix_len, visible_bits, table: Table = None, *,
    window: int | None = None, sinks=None, with_lse: bool = False, implementation: str = "cudnn",
):  # fmt: skip
    """Computes `specjax.kernels.reference.tree_attention` by `jax.nn.dot_product_attention`.

    It reads every slot's pages to the end of the table, however short the prefix is. jax rounds the
    log-sum-exp to the keys' dtype, so a call that needs it is computed in float32 by XLA.

    Args:
      implementation: `cudnn` or `xla`.
    """
    b, _, t, _ = q.shape
    k, v = contiguous(k_pages, table), contiguous(v_pages, table)
    visible_bits, at = jnp.asarray(visible_bits), jnp.arange(k.shape[2])
    depth = jnp.broadcast_to(tree_depth(visible_bits), (b, t))
    known = (at < prefix_len[:, None])[:, None]
    if window is not None:
        known = known & (at > (prefix_len[:, None] + depth - window)[..., None])
        visible_bits = within_window(visible_bits, window)
    own = unpack_bits(visible_bits, k_tree.shape[2])
    parts = [(b, t, k.shape[2]), (b, t, k_tree.shape[2])]
    mask = [jnp.broadcast_to(x, shape) for x, shape in zip((known, own), parts, strict=True)]
    # Masked values are multiplied by zero: they must be finite, and they are (`with_marked_keys`).
    mask = jnp.concatenate(mask, axis=-1)
    arrays = q, jnp.concatenate([k, k_tree], axis=2), jnp.concatenate([v, v_tree], axis=2)
    if not with_lse and sinks is None:
        return _with_finite_keys(*arrays, mask, implementation)
    arrays = (x.astype(jnp.float32) for x in arrays)
    out, lse = _dot_product(*arrays, mask, "xla", with_lse=True)
    if sinks is not None:
        out, lse = with_sink(out, lse, sinks[:, None].astype(jnp.float32))
    out = out.astype(q.dtype)
    return (out, lse) if with_lse else out


def _with_finite_keys(q, k, v, mask: Bool[Array, "B T S"], implementation: str):
    """Computes `_dot_product` of keys that may be marked as NaN in their first entry.

    cuDNN adds its mask to the scores, which leaves NaN in masked ones.
    """
    marked = jnp.isnan(k[..., 0])  # [B K S]
    sees = (mask & marked.any(axis=1)[:, None]).any(axis=-1)  # [B T]
    out = _dot_product(q, jnp.where(marked[..., None], 0, k), v, mask, implementation)
    return jnp.where(sees[:, None, :, None], jnp.nan, out)


def causal_attention(
    q, k, v, own, segment_ids, *,
    window: int | None = None, implementation: str = "cudnn",
) -> Float[Array, "B N S H"]:  # fmt: skip
    """Computes `reference.causal_attention_with_own`; without own rows, causal attention.

    The mask of a packed row takes S^2 booleans, because jax's public interface takes no segments.

    Raises:
      Declined: cuDNN has no kernel for the heads.
    """
    if implementation == "cudnn" and not _cudnn_takes(q.dtype, [q.shape[3]]):
        raise Declined(f"cuDNN supports no {q.dtype} heads of {q.shape[3]}")
    s = q.shape[2]
    own, window = own_in_window(own, window)
    q, k, v, own, segment_ids = padded(2, q, k, v, own, segment_ids)  # cuDNN refuses odd lengths
    causal = causal_segment_mask(segment_ids, window)
    same = jnp.broadcast_to(jnp.eye(causal.shape[-1], dtype=bool), causal.shape)
    mask = jnp.concatenate([causal] + [same] * len(own), axis=-1)
    return _dot_product(q, *_with_own(k, v, own), mask, implementation)[:, :, :s]


def _dot_product(q, k, v, mask: Bool[Array, "B T S"], implementation: str, with_lse=False):
    """Computes head-major attention under a mask: [B N T H], with `with_lse` also [B N T]."""
    q, k, v = (jnp.swapaxes(x, 1, 2) for x in (q, k, v))
    found = jax.nn.dot_product_attention(
        q, k, v, mask=mask[:, None], implementation=implementation, return_residual=with_lse
    )
    return jax.tree.map(lambda x: jnp.swapaxes(x, 1, 2), found)


def padded(multiple: int, q, k, v, own, segment_ids):
    """Pads all arrays at the end to a multiple of positions; no position sees the padding."""
    missing = -q.shape[2] % multiple
    pad = functools.partial(jnp.pad, pad_width=[(0, 0), (0, 0), (0, missing), (0, 0)])
    q, k, v, own = jax.tree.map(pad, (q, k, v, list(own)))
    return q, k, v, own, jnp.pad(segment_ids, [(0, 0), (0, missing)])


def _with_own(k, v, own) -> tuple[Array, Array]:
    """Appends those of later steps to keys and values: [B K S * (1 + steps) H]."""
    keys, values = [k, *(key for key, _ in own)], [v, *(value for _, value in own)]
    return jnp.concatenate(keys, axis=2), jnp.concatenate(values, axis=2)


# --- TPU: splash attention -----------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _CausalWithOwn(splash.Mask):
    """The mask of `causal_attention_with_own` as splash attention takes it.

    A query sees base keys up to its own position, and of each later step the key at its position.

    Attributes:
      length: positions of a row.
      steps: number of later steps.
      window: number of base keys that a query sees; 0: none, None: all.
    """

    length: int
    steps: int
    window: int | None

    @property
    def shape(self) -> tuple[int, int]:
        return self.length, self.length * (1 + self.steps)

    def __getitem__(self, index) -> np.ndarray:
        queries = np.arange(self.shape[0])[index[0]][:, None]
        keys = np.arange(self.shape[1])[index[1]][None]
        base = keys <= queries
        if self.window is not None:
            base &= keys > queries - self.window
        return np.where(keys < self.length, base, keys % self.length == queries)


def splash_attention(
    q, k, v, own, segment_ids, *,
    window: int | None = None, sinks: Array | None = None, interpret: bool = False,
) -> Float[Array, "B N S H"]:  # fmt: skip
    """Computes `reference.causal_attention_with_own` by splash attention; `own` may be empty.

    Args:
      sinks: see `reference.tree_attention`.
      interpret: whether to interpret the kernel on CPU, for tests.
    """
    _, n, s, h = q.shape
    own, window = own_in_window(own, window)
    q, k, v, own, segment_ids = padded(SPLASH_BLOCKS[-1], q, k, v, own, segment_ids)
    length = q.shape[2]
    if own:
        mask = _CausalWithOwn(length, len(own), window)
    elif window is not None:
        mask = splash.LocalMask((length, length), (window - 1, 0), 0)
    else:
        mask = splash.CausalMask((length, length))
    block = next(size for size in SPLASH_BLOCKS if length % size == 0)
    attend = splash.make_splash_mha_single_device(
        splash.MultiHeadMask([mask] * n),
        block_sizes=splash.BlockSizes(
            block_q=block, block_kv=block, block_q_dkv=block, block_kv_dkv=block,
            block_q_dq=block, block_kv_dq=block,
        ),
        residual_checkpoint_name=ATTENTION_RESIDUALS,
        interpret=interpret,
    )  # fmt: skip
    keys, values = _with_own(k, v, own)
    ids = splash.SegmentIds(segment_ids, jnp.tile(segment_ids, (1, 1 + len(own))))
    rows = jax.vmap(functools.partial(attend, sinks=sinks))
    return rows(q * h**-0.5, keys, values, ids)[:, :, :s].astype(q.dtype)


# --- backends -------------------------------------------------------------------------------------


def _cudnn_refuses(operation: str, device: Device | None, cfg: ModelConfig) -> str | None:
    """Returns why cuDNN's attention cannot be used, or None, see `Backend.refuses`."""
    if device is not None and device.platform not in NVIDIA:
        return f"cuDNN attends on GPUs, and the device is {device.platform!r}"
    if operation == "causal_attention" and determinism.is_set_up():
        return "its backward pass may add by atomics, and deterministic=true asks for equal bits"
    sizes = head_sizes(cfg)
    if not _cudnn_takes(cfg.run.compute_dtype, sizes):
        return f"cuDNN supports no {cfg.run.compute_dtype} heads of {', '.join(map(str, sizes))}"
    return None


def _cudnn_takes(dtype, sizes: Iterable[int]) -> bool:
    halves = dtype in ("bfloat16", "float16")
    return halves and all(size % 8 == 0 and size <= 128 for size in sizes)


def _operations(implementation: str) -> dict:
    return {
        "tree_attention": functools.partial(tree_attention, implementation=implementation),
        "causal_attention": functools.partial(causal_attention, implementation=implementation),
    }


TAKES = {"tree_attention": ("window", "sinks", "with_lse"), "causal_attention": ("window",)}
CUDNN = Backend(
    operations=_operations("cudnn"),
    takes=TAKES,
    refuses=_cudnn_refuses,
    rest="library:xla",
    line="jax.nn.dot_product_attention by cuDNN",
)
XLA = Backend(
    operations=_operations("xla"),
    takes=TAKES,
    line="jax.nn.dot_product_attention in XLA",
)
