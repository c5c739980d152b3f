"""Tree attention for Hopper GPUs, in Pallas Mosaic GPU.

Flash-decoding (Dao et al. 2023): the blocks of a slot's prefix are split over several programs,
whose results are merged by their log-sum-exp. The tree rows of all heads that share a key/value
head are packed into the 64 rows of a WGMMA tile; one or two warpgroups compute a tile each and
share the keys, which another warpgroup copies from the pages, block by block, a few blocks ahead.
The first split of a slot also attends to the tree's own keys, under the ancestor words; the other
splits mask them, which costs one block each and saves a branch.

Values in a page after the end of a prefix must be finite, as for the reference; see
`specjax.memory.with_marked_keys`.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32

from specjax.config import ModelConfig
from specjax.interfaces import Device, Table
from specjax.kernels import library
from specjax.kernels.backend import Kernels, head_sizes
from specjax.kernels.reference import (
    NEG_INF,
    pack_heads,
    sink_of_rows,
    tree_depth,
    with_sink,
    within_window,
)

ROWS = 64  # rows of a WGMMA tile
KEYS = 64  # largest number of tree keys
WORDS = KEYS // 32
LOG2E = math.log2(math.e)
# `plgpu.load` of jax 0.10 requires an index beside the reference; later versions refuse one.
_IDX = inspect.signature(plgpu.load).parameters.get("idx")
_NO_INDEX = ((),) if _IDX is not None and _IDX.default is _IDX.empty else ()
MULTIPROCESSORS = 132  # multiprocessors of an H100 or H200
SHARED_BYTES = 227 * 1024  # shared memory that one program may use


@dataclasses.dataclass(frozen=True)
class Tuning:
    """How the work is divided for one head size.

    Attributes:
      block: positions that are copied at once.
      stages: copies in flight, where their buffers fit into shared memory.
    """

    block: int
    stages: int


HOPPER = ("H100", "H200", "H800", "H20")  # substrings of `jax.Device.device_kind`; GH200 matches

# By head size. 64 positions of 128 are 32 KiB of keys and values; by Little's law 4.8 TB/s with a
# latency of a microsecond need 36 KiB in flight per multiprocessor.
TUNING = {64: Tuning(64, 6), 128: Tuning(64, 4)}


@dataclasses.dataclass(frozen=True)
class Shape:
    """The static sizes of a call.

    Attributes:
      tiles: tiles of 64 rows per key/value head.
      warpgroups: warpgroups that compute, one tile each.
      head: size of a head.
      block, stages: see `Tuning`.
      per_page: blocks per page.
      splits: programs that share a prefix.
      window: see `reference.tree_attention`.
    """

    tiles: int
    warpgroups: int
    head: int
    block: int
    stages: int
    per_page: int
    splits: int
    window: int | None

    @property
    def programs(self) -> int:
        """Programs per key/value head, slot and split."""
        return self.tiles // self.warpgroups


def shape_of(
    batch: int, kv_heads: int, rows: int, head: int, page_size: int, longest: int, window=None
) -> Shape:
    """Returns the shape for `rows` packed rows per key/value head and prefixes up to `longest`.

    Raises:
      ValueError: the table has no tuning for the head size, or the page size does not fit it.
    """
    if head not in TUNING:
        raise ValueError(
            f"the GPU kernel has tunings for heads of {', '.join(map(str, TUNING))}, got {head}"
        )
    tuning = TUNING[head]
    if page_size % tuning.block:
        raise ValueError(
            f"pages must have a multiple of {tuning.block} positions on a GPU, got {page_size}"
        )
    tiles = -(-rows // ROWS)
    warpgroups = 1 if tiles == 1 else 2
    tiles += tiles % warpgroups
    work = batch * kv_heads * tiles // warpgroups
    most = max(longest // tuning.block // 4, 1)  # a split should be worth its tree block
    splits = min(max(-(-2 * MULTIPROCESSORS // work), 1), most)
    each = 2 * 2 * tuning.block * head
    fixed = 2 * 2 * KEYS * head + warpgroups * ROWS * (2 * head + 4 * head + 4) + 4096
    stages = min(tuning.stages, (SHARED_BYTES - fixed) // each)
    return Shape(
        tiles, warpgroups, head, tuning.block, stages, page_size // tuning.block, splits, window
    )


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
):
    """Computes `specjax.kernels.reference.tree_attention`; for over 64 tree keys, by cuDNN.

    Raises:
      ValueError: no tuning for the head size, or a page size that is not a multiple of a block.
    """
    b, n, t, h = q.shape
    kv_heads, size = k_pages.shape[1:3]
    if k_tree.shape[2] > KEYS:
        return library.tree_attention(
            q, k_tree, v_tree, k_pages, v_pages, prefix_len, visible_bits, table,
            window=window, sinks=sinks, with_lse=with_lse,
        )  # fmt: skip
    if table is None:
        table = jnp.arange(b, dtype=jnp.int32)[:, None]
    group = n // kv_heads
    shape = shape_of(b, kv_heads, group * t, h, size, size * table.shape[1], window)
    rows = _pad(pack_heads(q, kv_heads), shape.tiles * ROWS)
    words = _words(visible_bits, b, window, group, shape.tiles * ROWS)
    out, lse = _call(
        shape, rows, _pad(k_tree, KEYS), _pad(v_tree, KEYS), words, prefix_len.astype(jnp.int32),
        table.astype(jnp.int32), k_pages, v_pages,
    )  # fmt: skip
    out, lse = merge(out, lse)
    out, lse = out[:, :, : group * t], lse[:, :, : group * t]
    if sinks is not None:
        out, lse = with_sink(out, lse, sink_of_rows(sinks, kv_heads, t)[..., 0])
    out = out.reshape(b, n, t, h).astype(q.dtype)
    return (out, lse.reshape(b, n, t)) if with_lse else out


def _pad(x: Float[Array, "B K M H"], rows: int) -> Array:
    return jnp.pad(x, [(0, 0), (0, 0), (0, rows - x.shape[2]), (0, 0)])


def _words(visible_bits, batch: int, window, group: int, rows: int) -> Int[Array, "3 B M"]:
    """Returns two ancestor words and the depth of every packed row."""
    words = jnp.broadcast_to(visible_bits, (batch, *visible_bits.shape[-2:]))
    depth = tree_depth(words)
    if window is not None:
        words = within_window(words, window)
    words = jnp.pad(words, [(0, 0), (0, 0), (0, WORDS - words.shape[-1])])
    words = jax.lax.bitcast_convert_type(words.astype(jnp.uint32), jnp.int32)
    words = jnp.tile(jnp.concatenate([words, depth[..., None]], axis=-1), (1, group, 1))
    words = jnp.pad(words, [(0, 0), (0, rows - words.shape[1]), (0, 0)])
    return jnp.moveaxis(words, -1, 0)


def merge(
    out: Float[Array, "Z B K M H"], lse: Float[Array, "Z B K M"]
) -> tuple[Float[Array, "B K M H"], Float[Array, "B K M"]]:
    """Merges the softmaxes of Z splits; one over no visible key has a log-sum-exp near -1e30."""
    peak = lse.max(0)
    weights = jnp.exp(lse - peak)
    total = weights.sum(0)
    return (out * weights[..., None]).sum(0) / total[..., None], peak + jnp.log(total)


@functools.partial(jax.jit, static_argnums=0)  # equal layers are traced and lowered once
def _call(shape: Shape, rows, k_tree, v_tree, words, lens, table, k_pages, v_pages):
    """Runs the kernel; returns the outputs of all splits [Z B K M H] and their log-sum-exp."""
    b, kv_heads, m, h = rows.shape
    out = jax.ShapeDtypeStruct((shape.splits, b, kv_heads, m, h), jnp.float32)
    lse = jax.ShapeDtypeStruct((shape.splits, b, kv_heads, m), jnp.float32)

    def smem(*dims, dtype=rows.dtype):
        columns = 128 // jnp.dtype(dtype).itemsize
        transforms = (plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(128))
        return plgpu.SMEM(dims, dtype, transforms=transforms)

    groups, stages = shape.warpgroups, shape.stages
    scratch = dict(
        q=smem(groups, ROWS, h),
        tree=(smem(KEYS, h), smem(KEYS, h)),
        blocks=(smem(stages, shape.block, h), smem(stages, shape.block, h)),
        out=smem(groups, ROWS, h, dtype=jnp.float32),
        lse=plgpu.SMEM((groups, ROWS), jnp.float32),
        q_here=plgpu.Barrier(num_barriers=groups),
        tree_here=plgpu.Barrier(num_barriers=2),
        here=(plgpu.Barrier(num_barriers=stages), plgpu.Barrier(num_barriers=stages)),
        done=(plgpu.Barrier(num_arrivals=groups, num_barriers=stages),) * 2,
    )

    def kernel(*refs):
        pl.run_scoped(
            functools.partial(program, shape, *refs), **scratch, collective_axes="warpgroup"
        )

    return plgpu.kernel(
        kernel,
        out_type=[out, lse],
        grid=(kv_heads * shape.programs, shape.splits, b),
        grid_names=("work", "split", "slot"),
        num_threads=groups + 1,
        thread_name="warpgroup",
        # Warpgroup semantics are named because they are the default only since jax 0.11.
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Warpgroup
        ),
    )(rows, k_tree, v_tree, words, lens, table, k_pages, v_pages)


# --- arithmetic of the kernel, which a test runs on plain arrays ----------------------------------


def share(shape: Shape, length, split):
    """Returns the first block of a prefix that a split attends to, and the number of blocks."""
    count = jax.lax.div(length + (shape.block - 1), shape.block)
    first = 0
    if shape.window is not None:  # positions outside the root's window are in no row's
        first = jax.lax.div(jnp.maximum(length - shape.window + 1, 0), shape.block)
    each = jax.lax.div(count - first + (shape.splits - 1), shape.splits)
    begin = first + split * each
    return begin, jnp.maximum(jnp.minimum(each, count - begin), 0)


def tree_seen(low, high, column, split):
    """Returns the mask of tree keys from two words per row; all False after the first split."""
    word = jnp.where(column < 32, low, high)
    bit = jax.lax.shift_right_logical(word, column & 31)
    return (bit & jnp.where(split == 0, 1, 0)) != 0


def prefix_seen(shape: Shape, at, length, depth):
    """Returns the mask of prefix positions; `depth` is used only with a window."""
    seen = at < length
    if shape.window is not None:
        seen = seen & (at > depth + (length - shape.window))
    return seen


def absorb(running, scores, seen, spread, weigh):
    """Adds keys to a running softmax (peak in units of log 2, sum, weighted values).

    Args:
      spread: broadcasts one number per row over the row.
      weigh: adds the values by their weights.
    """
    peak, total, acc = running
    scores = jnp.where(seen, scores, NEG_INF)
    higher = jnp.maximum(peak, scores.max(axis=1))
    shrink = jnp.exp2(peak - higher)
    weights = jnp.exp2(scores - spread(higher, scores.shape))
    total = total * shrink + weights.sum(axis=1)
    return higher, total, weigh(acc * spread(shrink, acc.shape), weights)


# --- the program ----------------------------------------------------------------------------------


def program(
    shape, rows, k_tree, v_tree, words, lens, table, k_pages, v_pages, out_ref, lse_ref, **scratch
):
    """Computes one split of one slot, for one or two tiles of a key/value head."""
    warpgroup, work = jax.lax.axis_index("warpgroup"), jax.lax.axis_index("work")
    split, slot = jax.lax.axis_index("split"), jax.lax.axis_index("slot")
    head = jax.lax.div(work, shape.programs)
    tile = jax.lax.rem(work, shape.programs) * shape.warpgroups + warpgroup
    here = pl.ds(tile * ROWS, ROWS)
    length = lens[slot]
    begin, steps = share(shape, length, split)

    @pl.when(warpgroup == shape.warpgroups)
    def _():
        trees = k_tree.at[slot, head], v_tree.at[slot, head]
        pages = [(table, slot, head, ref) for ref in (k_pages, v_pages)]
        _copy(shape, trees, pages, begin, steps, scratch)

    @pl.when(warpgroup < shape.warpgroups)
    def _():
        q, out, lse = (scratch[name].at[warpgroup] for name in ("q", "out", "lse"))
        arrived = scratch["q_here"].at[warpgroup]
        plgpu.copy_gmem_to_smem(rows.at[slot, head, here], q, arrived)
        of_rows = [words.at[i, slot, here] for i in range(WORDS + 1)]
        plgpu.barrier_wait(arrived)
        _attend(shape, q, of_rows, length, split, begin, steps, scratch, out, lse)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(out, out_ref.at[split, slot, head, here])
        plgpu.copy_smem_to_gmem(lse, lse_ref.at[split, slot, head, here])
        plgpu.wait_smem_to_gmem(0)


def _copy(shape: Shape, trees, pages, begin, steps, scratch) -> None:
    """Runs the copying warpgroup: the tree, then each block once a stage is free."""
    for which in range(2):
        plgpu.copy_gmem_to_smem(
            trees[which], scratch["tree"][which], scratch["tree_here"].at[which]
        )

    def load(step, stage, which):
        table, slot, head, ref = pages[which]
        page = table[slot, jax.lax.div(begin + step, shape.per_page)]
        start = jax.lax.rem(begin + step, shape.per_page) * shape.block
        plgpu.copy_gmem_to_smem(
            ref.at[page, head, pl.ds(start, shape.block)],
            scratch["blocks"][which].at[stage],
            scratch["here"][which].at[stage],
        )

    for stage in range(shape.stages):

        @pl.when(stage < steps)
        def _(stage=stage):
            for which in range(2):
                load(stage, stage, which)

    @pl.loop(0, jnp.maximum(steps - shape.stages, 0))
    def _(step):
        stage = jax.lax.rem(step, shape.stages)
        for which in range(2):
            plgpu.barrier_wait(scratch["done"][which].at[stage])
            load(step + shape.stages, stage, which)


def _attend(shape, q, of_rows, length, split, begin, steps, scratch, out, lse) -> None:
    """Runs a computing warpgroup: its tile attends to the tree and to the split's blocks."""
    layout, per_row = plgpu.Layout.WGMMA, plgpu.Layout.WGMMA.reduce(1)
    scale = shape.head**-0.5 * LOG2E

    def spread(x, dims):
        return jax.lax.broadcast_in_dim(x, dims, [0])

    def full(value, dims, layout):
        return plgpu.layout_cast(jnp.full(dims, value, jnp.float32), layout)

    def columns(count):
        return plgpu.broadcasted_iota(jnp.int32, (ROWS, count), 1, layout=layout)

    def of_row(ref):
        return spread(plgpu.load(ref, *_NO_INDEX, layout=per_row, optimized=False), (ROWS, KEYS))

    def add(running, keys, values, seen, when_scored=lambda: None):
        def product(ref):
            plgpu.wgmma(ref, q, keys.T)
            return ref[...]

        scores = pl.run_scoped(product, plgpu.ACC((ROWS, keys.shape[0]), jnp.float32)) * scale
        when_scored()

        def weigh(acc, weights):
            weights = weights.astype(jnp.bfloat16)
            return pl.run_state(lambda ref: plgpu.wgmma(ref, weights, values))(plgpu.ACC.init(acc))

        return absorb(running, scores, seen, spread, weigh)

    running = (
        full(NEG_INF, (ROWS,), per_row),
        full(0, (ROWS,), per_row),
        full(0, (ROWS, shape.head), layout),
    )
    for which in range(2):
        plgpu.barrier_wait(scratch["tree_here"].at[which])
    seen = tree_seen(of_row(of_rows[0]), of_row(of_rows[1]), columns(KEYS), split)
    running = add(running, *scratch["tree"], seen)
    depth = None if shape.window is None else of_row(of_rows[WORDS])

    def one_block(step, running):
        stage = jax.lax.rem(step, shape.stages)
        for which in range(2):
            plgpu.barrier_wait(scratch["here"][which].at[stage])
        at = columns(shape.block) + (begin + step) * shape.block
        keys, values = (blocks.at[stage] for blocks in scratch["blocks"])
        running = add(
            running, keys, values, prefix_seen(shape, at, length, depth),
            lambda: plgpu.barrier_arrive(scratch["done"][0].at[stage]),
        )  # fmt: skip
        plgpu.barrier_arrive(scratch["done"][1].at[stage])
        return running

    peak, total, acc = jax.lax.fori_loop(0, steps, one_block, running)
    out[...] = acc / spread(total, acc.shape)
    lse[...] = peak * (1 / LOG2E) + jnp.log(total)


# --- the backend ----------------------------------------------------------------------------------


def _refuses(operation: str, device: Device | None, cfg: ModelConfig) -> str | None:
    if device is not None and device.platform not in ("gpu", "cuda"):
        return f"it is compiled for GPUs, and the device is {device.platform!r}"
    if device is not None and not any(name in device.kind for name in HOPPER):
        return f"it is written for Hopper ({', '.join(HOPPER)}), and the device is {device.kind!r}"
    sizes, dtype = head_sizes(cfg), cfg.run.compute_dtype
    if not TUNING.keys() >= set(sizes) or dtype != "bfloat16":
        return (
            f"it supports bfloat16 heads of {' or '.join(map(str, TUNING))}, got {dtype} heads of "
            f"{', '.join(map(str, sizes))}"
        )
    return None


BACKEND = Kernels(
    operations={"tree_attention": tree_attention},
    refuses=_refuses,
    rest="library:cudnn",
    line="Pallas Mosaic GPU tree attention; prompts and training by cuDNN",
    page_multiple=max(tuning.block for tuning in TUNING.values()),  # no block crosses pages
)
