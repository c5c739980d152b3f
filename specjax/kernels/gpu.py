"""Tree attention for Hopper GPUs: a Pallas Mosaic GPU kernel, and one in Triton that merges.

Flash-decoding (Dao et al. 2023). The keys that a slot attends to, those of its tree first and then
its prefix, are cut into chunks, whose number depends on the slot's own length. A chunk of one tile
of query rows is an item. There are as many programs as multiprocessors; each takes consecutive
items from a list that balances blocks of keys, and one warpgroup of it copies the blocks of item
after item, a few blocks ahead, so that copies do not stop between items. The rows of all heads that
share a key/value head are packed into the 64 rows of a WGMMA tile; one or two warpgroups compute a
tile each and share the keys. A second kernel merges the chunks of a slot by their log-sum-exp.

How many chunks a slot has depends on its length and on the shapes of the call only, so that its
result does not depend, to the last bit, on the lengths of other slots.

Values in a page after the end of a prefix must be finite, as for the reference; see
`specjax.memory.with_marked_keys`.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.experimental.pallas.triton as pltriton
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from specjax.config import ModelConfig
from specjax.interfaces import Backend, Device, Table
from specjax.kernels.backend import Unsuited, head_sizes
from specjax.kernels.names import NVIDIA
from specjax.kernels.reference import NEG_INF, pack_heads, tree_depth, within_window
from specjax.kernels.triton_lowering import LOG2E, as_on_a_gpu

ROWS = 64  # rows of a WGMMA tile
# `plgpu.load` of jax 0.10 requires an index beside the reference; later versions refuse one.
_IDX = inspect.signature(plgpu.load).parameters.get("idx")
_NO_INDEX = ((),) if _IDX is not None and _IDX.default is _IDX.empty else ()
MULTIPROCESSORS = 132  # multiprocessors of an H100 or H200
SHARED_BYTES = 227 * 1024  # shared memory that one program may use
EPILOGUE = 1  # cost of an item besides its blocks, in blocks
MERGED = 8192  # numbers that a program of the merging kernel holds at once
LISTED = 32  # programs whose items one program of the listing kernel finds


@dataclasses.dataclass(frozen=True)
class Tuning:
    """How the work is divided for one head size.

    Attributes:
      block: positions that are copied at once, 32 or 64.
      stages: copies in flight, where their buffers fit into shared memory.
      warpgroups: most warpgroups that compute; two hold 168 registers a thread each, one 255.
    """

    block: int
    stages: int
    warpgroups: int


HOPPER = ("H100", "H200", "H800", "H20")  # substrings of `jax.Device.device_kind`; GH200 matches

# By head size. 64 positions of 128 are 32 KiB of keys and values; by Little's law 4.8 TB/s with a
# latency of a microsecond need 36 KiB in flight per multiprocessor.
TUNING = {
    64: Tuning(64, 8, 2),
    96: Tuning(64, 6, 2),
    128: Tuning(64, 5, 2),
    256: Tuning(32, 4, 1),
}


@dataclasses.dataclass(frozen=True)
class Shape:
    """The static sizes of a call.

    Attributes:
      slots: number of slots.
      kv_heads: number of key/value heads.
      packed: packed query rows per key/value head.
      tiles: tiles of 64 rows per key/value head.
      warpgroups: warpgroups that compute, one tile each.
      head: size of a head.
      block, stages: see `Tuning`.
      per_page: blocks per page.
      tree: number of tree keys.
      longest: positions of the page table.
      window, soft_cap: see `reference.tree_attention`.
      processors: multiprocessors of the device.
    """

    slots: int
    kv_heads: int
    packed: int
    tiles: int
    warpgroups: int
    head: int
    block: int
    stages: int
    per_page: int
    tree: int
    longest: int
    window: int | None
    soft_cap: float | None
    processors: int

    @property
    def units(self) -> int:
        """Items of a slot that has one chunk: tiles of all heads, by warpgroups that share keys."""
        return self.kv_heads * self.tiles // self.warpgroups

    @property
    def words(self) -> int:
        """Ancestor words that cover a block of tree keys."""
        return self.block // 32

    @property
    def tree_blocks(self) -> int:
        """Blocks of tree keys."""
        return -(-self.tree // self.block)

    @property
    def tree_rows(self) -> tuple[int, int]:
        """First of the tree's keys and of its values in the array of rows, which queries begin."""
        keys = -(-self.packed // 8) * 8
        return keys, keys + -(-self.tree // 8) * 8

    @property
    def kept(self) -> int:
        """Rows of a tile that are written, a multiple of 8."""
        return ROWS if self.tiles > 1 else -(-self.packed // 8) * 8

    @property
    def most(self) -> int:
        """Chunks of a slot that fills its pages."""
        blocks = self.tree_blocks + -(-self.longest // self.block)
        return int(chunks_of(self, np.int64(blocks), np))

    @property
    def items(self) -> int:
        """Bound on the number of items."""
        return self.slots * self.units * self.most

    @property
    def programs(self) -> int:
        """Number of programs."""
        return min(self.processors, self.items)


def shape_of(
    slots: int,
    kv_heads: int,
    packed: int,
    head: int,
    page_size: int,
    longest: int,
    tree: int,
    window: int | None = None,
    soft_cap: float | None = None,
) -> Shape:
    """Returns the shape for `packed` rows per key/value head, `tree` keys, and `longest` prefixes.

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
    tiles = -(-packed // ROWS)
    warpgroups = min(tiles, tuning.warpgroups)
    if head == 128 and window is not None and soft_cap is not None:
        warpgroups = 1  # 168 registers are not enough for both
    tiles += tiles % warpgroups
    shape = Shape(
        slots, kv_heads, packed, tiles, warpgroups, head, tuning.block, 1,
        page_size // tuning.block, tree, longest, window, soft_cap,
        MULTIPROCESSORS,
    )  # fmt: skip
    # Two buffers of queries and one of results; 4 KiB for barriers, alignment and log-sum-exps.
    fixed = warpgroups * ROWS * head * (2 * 2 + 4) + 4096
    stages = min(tuning.stages, (SHARED_BYTES - fixed) // (2 * 2 * tuning.block * head))
    return dataclasses.replace(shape, stages=stages)


def tree_attention(
    q, k_tree, v_tree, k_pages, v_pages, prefix_len, visible_bits, table: Table = None, *,
    window: int | None = None, sinks=None, with_lse: bool = False, soft_cap: float | None = None,
    interpret=None,
):  # fmt: skip
    """Computes `specjax.kernels.reference.tree_attention`.

    Args:
      interpret: `plgpu.InterpretGPUParams` to interpret the kernels on CPU, for tests; None:
        compile them.

    Raises:
      ValueError: no tuning for the head size, or a page size that is not a multiple of a block.
    """
    b, n, t, h = q.shape
    kv_heads, size = k_pages.shape[1:3]
    if table is None:
        table = jnp.arange(b, dtype=jnp.int32)[:, None]
    group = n // kv_heads
    shape = shape_of(
        b, kv_heads, group * t, h, size, size * table.shape[1], k_tree.shape[2], window, soft_cap
    )
    words = ancestor_words(shape, visible_bits, group)
    slots, work = work_list(shape, prefix_len.astype(jnp.int32), interpret is not None)
    # One array, which the compiler makes in one kernel. Rows begin at multiples of 8.
    rows = [pack_heads(q, kv_heads), k_tree, v_tree]
    rows = [jnp.pad(x, [(0, 0), (0, 0), (0, -x.shape[2] % 8), (0, 0)]) for x in rows]
    rows = jnp.concatenate(rows, axis=2)
    part, lse = _call(
        shape, interpret, rows, words, slots, work, table.astype(jnp.int32), k_pages, v_pages
    )
    out, lse = merge(shape, part, lse, slots, sinks, t, q.dtype, interpret is not None)
    out, lse = jnp.swapaxes(out, 1, 2), jnp.swapaxes(lse, 1, 2)
    return (out, lse) if with_lse else out


def ancestor_words(shape: Shape, visible_bits, group: int) -> Int[Array, "W B M"]:
    """Returns the ancestor words and, last, the depth of every packed row."""
    words = jnp.broadcast_to(visible_bits, (shape.slots, *visible_bits.shape[-2:]))
    depth = tree_depth(words)
    if shape.window is not None:
        words = within_window(words, shape.window)
    more = shape.tree_blocks * shape.words - words.shape[-1]
    words = jnp.pad(words, [(0, 0), (0, 0), (0, max(more, 0))])
    words = jax.lax.bitcast_convert_type(words.astype(jnp.uint32), jnp.int32)
    words = jnp.tile(jnp.concatenate([words, depth[..., None]], axis=-1), (1, group, 1))
    words = jnp.pad(words, [(0, 0), (0, shape.tiles * ROWS - words.shape[1]), (0, 0)])
    return jnp.moveaxis(words, -1, 0)


# --- the list of items ----------------------------------------------------------------------------


def chunks_of(shape: Shape, blocks, xp=jnp):
    """Returns the number of chunks that a slot with `blocks` blocks of keys is cut into.

    In a batch of equal slots every program has `waves` items, as many as leave chunks of `least`
    blocks; if fewer than one, as many as occupy all programs with chunks of two. Small items
    balance slots of different lengths. Their results are written and read once more, which costs
    more the more rows there are.

    Args:
      xp: numpy for static sizes.
    """
    least = 3 if shape.kept < 32 else 7
    lanes = shape.slots * shape.units
    most = 2 if shape.tiles > 1 else max(8 if shape.kept < 32 else 6, lanes // 32)
    waves = xp.minimum(blocks * lanes // (shape.processors * least), most)
    few = xp.minimum(blocks // 2, shape.processors // lanes)
    return xp.clip(xp.where(waves > 0, waves * shape.processors // lanes, few), 1, blocks)


@functools.partial(jax.jit, static_argnums=(0, 2))
def work_list(
    shape: Shape, lengths: Int[Array, " B"], interpret: bool = False
) -> tuple[Int[Array, "5 B"], Int[Array, "4 P+1"]]:
    """Returns what programs need of every slot, and the items that they begin with.

    Items are in the order of slots, units and chunks. The weights of items, their blocks and
    `EPILOGUE`, are cut into equal parts, and a program has the items that begin in its part. One
    small kernel makes both lists, for all layers with the same window.

    Returns:
      length of the prefix, number of blocks, of chunks, first block of the prefix, and first item
      of every slot; slot, unit, chunk and number of the first item of every program and, last, of
      one program more, whose item is that after the last.
    """
    size = max(16, pl.next_power_of_2(shape.slots))

    def program(lengths_ref, slots_ref, work_ref):
        slot = jnp.arange(size)
        exists = slot < shape.slots
        lengths = pltriton.load(lengths_ref.at[slot], mask=exists, other=0)
        number = pl.program_id(0) * LISTED + jnp.arange(LISTED)
        slots, work = _lists(shape, lengths, slot, exists, number)
        for i, row in enumerate(slots):
            pltriton.store(slots_ref.at[i, slot], row, mask=exists & (pl.program_id(0) == 0))
        for i, row in enumerate(work):
            pltriton.store(work_ref.at[i, number], row, mask=number <= shape.programs)

    call = pl.pallas_call(
        program,
        out_shape=[
            jax.ShapeDtypeStruct((5, shape.slots), jnp.int32),
            jax.ShapeDtypeStruct((4, shape.programs + 1), jnp.int32),
        ],
        grid=(pl.cdiv(shape.programs + 1, LISTED),),
        compiler_params=pltriton.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="list_chunks",
    )
    with as_on_a_gpu():
        return call(lengths)


def _lists(shape: Shape, lengths, slot, exists, number):
    """Computes the rows of both lists, the second for the programs of some numbers."""
    lengths = jnp.clip(lengths, 0, shape.longest)  # past the table is the next slot's
    count = (lengths + (shape.block - 1)) // shape.block
    first = jnp.zeros_like(lengths)
    if shape.window is not None:  # positions outside the root's window are in no row's
        first = jnp.maximum(lengths - shape.window + 1, 0) // shape.block
    blocks = shape.tree_blocks + count - first
    chunks = chunks_of(shape, blocks)
    weight = blocks // chunks + EPILOGUE
    items = jnp.where(exists, chunks * shape.units, 0)
    total = items * weight
    before = slot[None] < slot[:, None]  # [b, a]: slot a is before slot b
    first_item = jnp.where(before, items[None], 0).sum(1)
    start = jnp.where(before, total[None], 0).sum(1)
    part = (total.sum() + (shape.programs - 1)) // shape.programs
    begin = number * part
    mine = ((start + total)[None] <= begin[:, None]) & exists[None]
    mine = jnp.minimum(mine.sum(1, dtype=jnp.int32), shape.slots - 1)
    here = mine[:, None] == slot[None]

    def of_mine(x):
        return jnp.where(here, x[None], 0).sum(1)

    item = (begin - of_mine(start) + of_mine(weight) - 1) // of_mine(weight)  # in the slot
    item = jnp.minimum(item, of_mine(items))
    next_slot = item == of_mine(items)
    work = (
        jnp.where(next_slot, mine + 1, mine),
        jnp.where(next_slot, 0, item // of_mine(chunks)),
        jnp.where(next_slot, 0, item % of_mine(chunks)),
        of_mine(first_item) + item,
    )
    return (lengths, blocks, chunks, first, first_item), work


# --- merging --------------------------------------------------------------------------------------


@functools.partial(jax.jit, static_argnums=(0, 5, 6, 7))
def merge(shape: Shape, part, lse, slots, sinks, rows: int, dtype, interpret: bool):
    """Merges the chunks of every slot, and adds sinks.

    Args:
      part, lse: results of items [items, warpgroups, kept rows, H] and their log-sum-exp.
      slots: see `work_list`.

    Returns:
      attention [B T N H] and its log-sum-exp [B T N].
    """
    group = shape.packed // rows
    heads = shape.kv_heads * group
    count, width = pl.next_power_of_2(shape.most), pl.next_power_of_2(shape.head)
    at_once = 1  # rows of one head, in one tile
    while rows % (2 * at_once) == 0 and 2 * at_once * count * width <= MERGED and at_once < ROWS:
        at_once *= 2

    def program(part_ref, lse_ref, slots_ref, *rest):
        sinks_ref, out_ref, out_lse_ref = rest if sinks is not None else (None, *rest)
        slot, head, row = (pl.program_id(axis) for axis in range(3))
        row = row * at_once
        packed = head % group * rows + row
        tile = packed // ROWS
        unit = head // group * (shape.tiles // shape.warpgroups) + tile // shape.warpgroups
        warpgroup, packed = tile % shape.warpgroups, packed % ROWS
        chunks = slots_ref[2, slot]
        item = slots_ref[4, slot] + unit * chunks
        chunk, column = jnp.arange(count), jnp.arange(width)
        here = packed + jnp.arange(at_once)
        exists = chunk < chunks
        item = item + jnp.where(exists, chunk, 0)
        sums = pltriton.load(
            lse_ref.at[item[:, None], warpgroup, here[None]], mask=exists[:, None], other=-jnp.inf
        )  # fmt: skip
        values = pltriton.load(
            part_ref.at[item[:, None, None], warpgroup, here[None, :, None], column[None, None]],
            mask=exists[:, None, None] & (column < shape.head)[None, None],
            other=0.0,
        )
        peak = sums.max(0)
        if sinks is not None:
            peak = jnp.maximum(peak, sinks_ref[head])
        weights = jnp.exp(sums - peak[None])
        total = weights.sum(0)
        if sinks is not None:
            total = total + jnp.exp(sinks_ref[head] - peak)
        out = (values * weights[:, :, None]).sum(0) / total[:, None]
        mine = row + jnp.arange(at_once)
        pltriton.store(
            out_ref.at[slot, mine[:, None], head, column[None]],
            out.astype(dtype),
            mask=jnp.broadcast_to((column < shape.head)[None], out.shape),
        )
        pltriton.store(out_lse_ref.at[slot, mine, head], peak + jnp.log(total))

    inputs = [part, lse, slots] + ([] if sinks is None else [sinks.astype(jnp.float32)])
    call = pl.pallas_call(
        program,
        out_shape=[
            jax.ShapeDtypeStruct((shape.slots, rows, heads, shape.head), dtype),
            jax.ShapeDtypeStruct((shape.slots, rows, heads), jnp.float32),
        ],
        grid=(shape.slots, heads, rows // at_once),
        compiler_params=pltriton.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="merge_chunks",
    )
    with as_on_a_gpu():
        return call(*inputs)


# --- arithmetic of the kernel, which a test runs on plain arrays ----------------------------------


def share(blocks, chunks, chunk):
    """Returns the first block of a chunk, and the block after its last one."""
    return jax.lax.div(chunk * blocks, chunks), jax.lax.div((chunk + 1) * blocks, chunks)


def tree_seen(words, column):
    """Returns the mask of a block of tree keys, from one or two ancestor words per row."""
    word = words[0] if len(words) == 1 else jnp.where(column < 32, *words)
    return (jax.lax.shift_right_logical(word, column & 31) & 1) != 0


def prefix_seen(shape: Shape, at, length, depth):
    """Returns the mask of prefix positions; `depth` is used only with a window."""
    seen = at < length
    if shape.window is not None:
        seen = seen & (at > depth + (length - shape.window))
    return seen


def scaled(shape: Shape, products):
    """Returns scores in units of log 2, of the products of queries and keys."""
    scale = shape.head**-0.5
    if shape.soft_cap is None:
        return products * (scale * LOG2E)
    # tanh(x) = 1 - 2 / (exp(2 x) + 1), as the GPU's own tanh has 11 bits.
    cap = shape.soft_cap
    powers = jnp.exp2(products * (2 * LOG2E * scale / cap))
    return cap * LOG2E - (2 * cap * LOG2E) / (powers + 1)


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


@functools.partial(jax.jit, static_argnums=(0, 1))  # equal layers are traced and lowered once
def _call(shape: Shape, interpret, rows, words, slots, work, table, k, v):
    """Runs the kernel; returns the results of all items [items W M H] and their log-sum-exp."""
    h, groups, stages = shape.head, shape.warpgroups, shape.stages
    part = jax.ShapeDtypeStruct((shape.items, groups, shape.kept, h), jnp.float32)
    lse = jax.ShapeDtypeStruct((shape.items, groups, ROWS), jnp.float32)

    def smem(*dims, dtype=rows.dtype):
        # Columns of a swizzled tile of 16-bit numbers divide a row and a block.
        itemsize = jnp.dtype(dtype).itemsize
        width = 128 if itemsize == 4 or h % 64 == shape.block % 64 == 0 else 64  # bytes
        tiling = plgpu.TilingTransform((8, width // itemsize))
        return plgpu.SMEM(dims, dtype, transforms=(tiling, plgpu.SwizzleTransform(width)))

    scratch = dict(
        q=smem(2, groups * ROWS, h),
        blocks=(smem(stages, shape.block, h), smem(stages, shape.block, h)),
        out=smem(groups, ROWS, h, dtype=jnp.float32),
        lse=plgpu.SMEM((groups, ROWS), jnp.float32),
        q_here=plgpu.Barrier(num_barriers=2),
        q_done=plgpu.Barrier(num_arrivals=groups, num_barriers=2),
        here=(plgpu.Barrier(num_barriers=stages), plgpu.Barrier(num_barriers=stages)),
        done=(plgpu.Barrier(num_arrivals=groups, num_barriers=stages),) * 2,
    )

    def kernel(*refs):
        pl.run_scoped(
            functools.partial(program, shape, interpret is not None, *refs),
            **scratch,
            collective_axes="warpgroup",
        )

    return plgpu.kernel(
        kernel,
        out_type=[part, lse],
        grid=(shape.programs,),
        grid_names=("program",),
        num_threads=groups + 1,
        thread_name="warpgroup",
        # Warpgroup semantics are named because they are the default only since jax 0.11.
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Warpgroup
        ),
        **({} if interpret is None else {"interpret": interpret}),
    )(rows, words, slots, work, table, k, v)


# How warpgroups share memory. Every buffer has a pair of barriers: `here`, which a copy completes,
# and `done`, at which every warpgroup that reads the buffer arrives once it has read it. The
# copying warpgroup waits for `done` before it copies to a buffer again, and a computing one waits
# for `here` before it reads. Both count blocks (for stages) and items (for queries) from the
# program's first, in the same order, so that the n-th wait at a barrier is for its n-th completion
# on both sides; neither gets more than one completion ahead, as the other one's wait comes before.
# The products that read a buffer are complete before `done`: their result was read, which waits for
# them. Results leave through a buffer of each warpgroup's own, which is written again only after
# the copy out of it has read it.


def program(
    shape, interpreted, rows, words, slots, work, table, k_pages, v_pages, part_ref, lse_ref,
    **scratch,
):  # fmt: skip
    """Computes one program's items."""
    warpgroup = jax.lax.axis_index("warpgroup")

    @pl.when(warpgroup == shape.warpgroups)
    def _():
        copy = functools.partial(_copy, shape, rows, (k_pages, v_pages), table, scratch)
        _wait_for_readers(shape, scratch, *_each_item(shape, slots, work, copy))

    @pl.when(warpgroup < shape.warpgroups)
    def _():
        mine = {name: scratch[name].at[warpgroup] for name in ("out", "lse")}
        attend = functools.partial(
            _attend, shape, interpreted, words, warpgroup, scratch | mine, part_ref, lse_ref
        )
        _each_item(shape, slots, work, attend)
        plgpu.wait_smem_to_gmem(0)


@dataclasses.dataclass(frozen=True)
class Item:
    """A chunk of a slot's keys, and the tiles of rows that attend to it.

    Attributes:
      slot: number of the slot.
      head: number of the key/value head.
      row: first packed row of the tiles.
      number: number of the item, of all.
      length: length of the slot's prefix.
      first: first block of the prefix that any row sees.
      begin, end: blocks of the chunk; the tree's blocks come first, the prefix's after them.
    """

    slot: Array
    head: Array
    row: Array
    number: Array
    length: Array
    first: Array
    begin: Array
    end: Array


def _each_item(shape: Shape, slots, work, run):
    """Calls `run` with each item of the program, the item's turn, and the number of blocks before.

    Copying and computing warpgroups both do, so that they number blocks alike. Returns the numbers
    of items and of blocks.
    """
    here = jax.lax.axis_index("program")
    slot, unit, chunk, number = (work[i, here] for i in range(4))
    per_head = shape.tiles // shape.warpgroups

    def one_item(turn, at):
        slot, unit, chunk, step = at
        length, blocks, chunks, first = (slots[i, slot] for i in range(4))
        begin, end = share(blocks, chunks, chunk)
        head = jax.lax.div(unit, per_head)
        row = jax.lax.rem(unit, per_head) * (shape.warpgroups * ROWS)
        run(Item(slot, head, row, number + turn, length, first, begin, end), turn, step)
        chunk = chunk + 1
        unit = jnp.where(chunk == chunks, unit + 1, unit)
        chunk = jnp.where(chunk == chunks, 0, chunk)
        slot = jnp.where(unit == shape.units, slot + 1, slot)
        unit = jnp.where(unit == shape.units, 0, unit)
        return slot, unit, chunk, step + (end - begin)

    count = work[3, here + 1] - number
    *_, steps = jax.lax.fori_loop(0, count, one_item, (slot, unit, chunk, jnp.int32(0)))
    return count, steps


def _copy(shape: Shape, rows, pages, table, scratch, item: Item, turn, step) -> None:
    """Runs the copying warpgroup for one item: queries, and each block once a stage is free."""
    buffer = jax.lax.rem(turn, 2)

    @pl.when(turn >= 2)
    def _():
        plgpu.barrier_wait(scratch["q_done"].at[buffer])

    plgpu.copy_gmem_to_smem(
        rows.at[item.slot, item.head, pl.ds(item.row, shape.warpgroups * ROWS)],
        scratch["q"].at[buffer],
        scratch["q_here"].at[buffer],
    )

    @pl.loop(item.begin, item.end)
    def _(block):
        number = step + (block - item.begin)
        stage = jax.lax.rem(number, shape.stages)
        position = jnp.maximum(item.first + (block - shape.tree_blocks), 0)  # in blocks
        page = table[item.slot, jax.lax.div(position, shape.per_page)]
        start = jax.lax.rem(position, shape.per_page) * shape.block
        for which in range(2):
            to = scratch["blocks"][which].at[stage], scratch["here"][which].at[stage]

            @pl.when(number >= shape.stages)
            def _(which=which):
                plgpu.barrier_wait(scratch["done"][which].at[stage])

            @pl.when(block < shape.tree_blocks)
            def _(which=which, to=to):
                # After the last key come values, and after the last value zeros.
                here = pl.ds(shape.tree_rows[which] + block * shape.block, shape.block)
                plgpu.copy_gmem_to_smem(rows.at[item.slot, item.head, here], *to)

            @pl.when(block >= shape.tree_blocks)
            def _(which=which, to=to):
                here = pl.ds(start, shape.block)
                plgpu.copy_gmem_to_smem(pages[which].at[page, item.head, here], *to)


def _wait_for_readers(shape: Shape, scratch, items, steps) -> None:
    """Waits until what was copied last to each buffer has been read: no barrier is left behind."""
    for buffer in range(2):

        @pl.when(items > buffer)
        def _(buffer=buffer):
            plgpu.barrier_wait(scratch["q_done"].at[buffer])

    for stage in range(shape.stages):

        @pl.when(steps > stage)
        def _(stage=stage):
            for which in range(2):
                plgpu.barrier_wait(scratch["done"][which].at[stage])


def _attend(
    shape, interpreted, words, warpgroup, scratch, part_ref, lse_ref, item: Item, turn, step
) -> None:
    """Runs a computing warpgroup for one item: its tile attends to the chunk's blocks."""
    layout, per_row = plgpu.Layout.WGMMA, plgpu.Layout.WGMMA.reduce(1)
    buffer = jax.lax.rem(turn, 2)
    q = scratch["q"].at[buffer, pl.ds(warpgroup * ROWS, ROWS)]
    here = pl.ds(item.row + warpgroup * ROWS, ROWS)

    def spread(x, dims):
        return jax.lax.broadcast_in_dim(x, dims, [0])

    def full(value, dims, layout):
        return plgpu.layout_cast(jnp.full(dims, value, jnp.float32), layout)

    def columns():
        return plgpu.broadcasted_iota(jnp.int32, (ROWS, shape.block), 1, layout=layout)

    def of_row(index):
        ref = words.at[index, item.slot, here]
        x = plgpu.load(ref, *_NO_INDEX, layout=per_row, optimized=False)
        return spread(x, (ROWS, shape.block))

    def add(block, running, seen):
        stage = jax.lax.rem(step + (block - item.begin), shape.stages)
        for which in range(2):
            plgpu.barrier_wait(scratch["here"][which].at[stage])
        keys, values = (blocks.at[stage] for blocks in scratch["blocks"])

        def product(ref):
            plgpu.wgmma(ref, q, keys.T)
            return ref[...]

        scores = scaled(shape, pl.run_scoped(product, plgpu.ACC((ROWS, shape.block), jnp.float32)))
        plgpu.barrier_arrive(scratch["done"][0].at[stage])

        def weigh(acc, weights):
            weights = weights.astype(jnp.bfloat16)
            if interpreted:  # the interpreter's products take no operand from registers
                read = values[...]
                plgpu.commit_smem()  # this read, unlike a product's, is not one of the copies' kind
                return acc + jnp.dot(weights, read, preferred_element_type=jnp.float32)
            return pl.run_state(lambda ref: plgpu.wgmma(ref, weights, values))(plgpu.ACC.init(acc))

        running = absorb(running, scores, seen, spread, weigh)
        plgpu.barrier_arrive(scratch["done"][1].at[stage])
        return running

    def tree_block(block, running):
        mine = [of_row(block * shape.words + i) for i in range(shape.words)]
        return add(block, running, tree_seen(mine, columns()))

    depth = None if shape.window is None else of_row(words.shape[0] - 1)

    def prefix_block(block, running):
        at = columns() + (item.first + (block - shape.tree_blocks)) * shape.block
        return add(block, running, prefix_seen(shape, at, item.length, depth))

    running = (
        full(NEG_INF, (ROWS,), per_row),
        full(0, (ROWS,), per_row),
        full(0, (ROWS, shape.head), layout),
    )
    plgpu.barrier_wait(scratch["q_here"].at[buffer])
    middle = jnp.clip(shape.tree_blocks, item.begin, item.end)
    running = jax.lax.fori_loop(item.begin, middle, tree_block, running)
    peak, total, acc = jax.lax.fori_loop(middle, item.end, prefix_block, running)
    plgpu.barrier_arrive(scratch["q_done"].at[buffer])

    out, lse = scratch["out"], scratch["lse"]
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the results of the item before have left
    out[...] = acc / spread(total, acc.shape)
    lse[...] = peak * (1 / LOG2E) + jnp.log(total)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(out.at[pl.ds(0, shape.kept)], part_ref.at[item.number, warpgroup])
    plgpu.copy_smem_to_gmem(lse, lse_ref.at[item.number, warpgroup])


# --- the backend ----------------------------------------------------------------------------------


def _refuses(operation: str, device: Device | None, cfg: ModelConfig) -> str | None:
    if device is not None and device.platform not in NVIDIA:
        return f"it is compiled for GPUs, and the device is {device.platform!r}"
    if device is not None and not any(name in device.kind for name in HOPPER):
        others = f"({', '.join(HOPPER)}), and the device is {device.kind!r}"
        return Unsuited(f"it is written for Hopper {others}")
    sizes, dtype = head_sizes(cfg), cfg.run.compute_dtype
    if not TUNING.keys() >= set(sizes) or dtype != "bfloat16":
        return Unsuited(
            f"it supports bfloat16 heads of {' or '.join(map(str, TUNING))}, got {dtype} heads of "
            f"{', '.join(map(str, sizes))}"
        )
    return None


BACKEND = Backend(
    operations={"tree_attention": tree_attention},
    takes={"tree_attention": ("window", "soft_cap", "sinks", "with_lse")},
    refuses=_refuses,
    rest="triton",
    line="Pallas Mosaic GPU tree attention",
    page_multiple=max(tuning.block for tuning in TUNING.values()),  # no block crosses pages
)
