"""Tree attention for NVIDIA GPUs from Ampere on, in Pallas Triton: pages are read where they lie.

Flash-decoding (Dao et al. 2023): a slot's prefix is cut into chunks of a fixed number of
positions, and a second kernel merges the results of a slot's chunks by their log-sum-exp. The work
is a list of chunks, slot after slot, as many as each slot's own length takes. A program finds the
slot and the chunk of an entry by the prefix sums of these numbers; P programs take every P-th entry
each. So neither work nor bytes go to positions that no slot has. Which chunks a slot has, and the
bits of its result, depend neither on the other slots nor on the table's width.

The tree rows of all heads that share a key/value head are packed into tiles. A tile attends to the
blocks of a chunk, whose page is looked up in the table, and with a slot's first chunk also to the
tree's own keys under the ancestor words, as far as any of its rows sees one. Positions behind a
prefix are not loaded. Calls with many rows, such as pieces of prompts, have one chunk per slot and
no second kernel, because the results of chunks would be more than the keys that they save.

float32 is multiplied as float32, not as TF32.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.triton as plgpu
import jax.numpy as jnp

from specjax.config import ModelConfig
from specjax.interfaces import Backend, Device, Table
from specjax.kernels.backend import head_sizes
from specjax.kernels.reference import NEG_INF, capped, tree_depth, within_window
from specjax.kernels.tiles import dot
from specjax.kernels.triton_lowering import LOG2E, as_on_a_gpu, no_ampere

LEAST = 16  # rows, columns and terms of the smallest product that tensor cores have
TREE_BLOCK = 32  # tree keys that are loaded at once: those of one ancestor word
LARGEST_HEAD = 256
DTYPES = ("float32", "bfloat16", "float16")


@dataclasses.dataclass(frozen=True)
class Tuning:
    """How the work is divided.

    Attributes:
      tile_rows: largest number of packed rows of a program.
      block_bytes: bytes of a block of keys; as many of values are loaded beside them, and a tile of
        queries is no larger.
      stages: blocks in flight. With the queries they must fit into 99 KiB of shared memory, which
        every GPU from Ampere on has.
      least_chunk: positions of a chunk of a call with few rows.
      chunk_per_row: positions of a chunk for each packed row, where that is more. The results of a
        chunk are float32, written and read: with 8, half of its keys and values in bfloat16.
      unsplit_rows: packed rows per key/value head from which on a prefix is not split.
      programs: programs that share the list of chunks, all heads and tiles together: several for
        each of 144 multiprocessors, so that none waits for the last ones.
    """

    tile_rows: int = 64
    block_bytes: int = 16 * 1024
    stages: int = 3
    least_chunk: int = 256
    chunk_per_row: int = 8
    unsplit_rows: int = 512
    programs: int = 1024

    def chunk(self, rows: int) -> int | None:
        """Returns the positions of a chunk for packed rows of a head; None: no prefix is split."""
        if rows >= self.unsplit_rows:
            return None
        return max(self.least_chunk, self.chunk_per_row * pl.next_power_of_2(rows))


TUNING = Tuning()


@dataclasses.dataclass(frozen=True)
class Shape:
    """The static sizes of a call.

    Attributes:
      batch, kv_heads: slots, and key/value heads.
      rows: packed rows of a key/value head.
      tree: rows of the tree that have queries.
      keys: tree keys.
      head: size of a head.
      page: positions of a page.
      pages: pages of a slot's table.
      tile: packed rows of a program.
      block: positions that are loaded at once.
      per_chunk: blocks of a chunk.
      chunks: largest number of chunks of a slot; 1: there is nothing to merge.
      programs: programs per tile that share the list of chunks.
      window: see `reference.tree_attention`.
      soft_cap: see `reference.tree_attention`.
    """

    batch: int
    kv_heads: int
    rows: int
    tree: int
    keys: int
    head: int
    page: int
    pages: int
    tile: int
    block: int
    per_chunk: int
    chunks: int
    programs: int
    window: int | None
    soft_cap: float | None

    @property
    def group(self) -> int:
        """Query heads per key/value head."""
        return self.rows // self.tree

    @property
    def tiles(self) -> int:
        """Tiles of a key/value head."""
        return -(-self.rows // self.tile)

    @property
    def width(self) -> int:
        """The columns that a head takes in a program."""
        return pl.next_power_of_2(max(self.head, LEAST))

    @property
    def per_page(self) -> int:
        """Blocks of a page."""
        return -(-self.page // self.block)

    @classmethod
    def of(
        cls, q, k_tree, k_pages, pages: int, tuning: Tuning, window: int | None, soft_cap
    ) -> Shape:
        """Returns the sizes of a call of `tree_attention` whose table has `pages` columns."""
        b, n, t, head = q.shape
        kv_heads, page = k_pages.shape[1:3]
        rows, itemsize = n // kv_heads * t, k_pages.dtype.itemsize
        most = max(tuning.block_bytes // (pl.next_power_of_2(max(head, LEAST)) * itemsize), LEAST)
        tile = min(pl.next_power_of_2(max(rows, LEAST)), tuning.tile_rows, most)
        # A block lies in one page. Where pages have an odd size, a page's last block is not full.
        block = max(min(most, page & -page, 128), LEAST)
        per_page = -(-page // block)
        blocks = pages * per_page
        per_chunk = blocks
        if (chunk := tuning.chunk(rows)) is not None:
            per_chunk = min(max(chunk // block, 1), blocks)
        chunks = -(-blocks // per_chunk)
        tiles = -(-rows // tile)
        programs = min(b * chunks, -(-tuning.programs // (kv_heads * tiles)))
        return cls(
            b, kv_heads, rows, t, k_tree.shape[2], head, page, pages, tile, block, per_chunk,
            chunks, programs, window, soft_cap,
        )  # fmt: skip


@functools.partial(  # equal layers are traced and lowered once
    jax.jit, static_argnames=("window", "with_lse", "soft_cap", "tuning", "interpret")
)
def tree_attention(
    q, k_tree, v_tree, k_pages, v_pages, prefix_len, visible_bits, table: Table = None, *,
    window: int | None = None, sinks=None, with_lse: bool = False, soft_cap: float | None = None,
    tuning: Tuning = TUNING, interpret: bool = False,
):  # fmt: skip
    """Computes `specjax.kernels.reference.tree_attention`; sums are float32.

    Args:
      tuning: how the work is divided.
      interpret: whether to interpret the kernels on CPU, for tests.
    """
    b, n, t, h = q.shape
    if table is None:
        table = jnp.arange(b, dtype=jnp.int32)[:, None]
    shape = Shape.of(q, k_tree, k_pages, table.shape[1], tuning, window, soft_cap)
    words = jnp.asarray(visible_bits)
    words = words.reshape(-1, *words.shape[-2:])
    depth = None
    if window is not None:
        depth, words = tree_depth(words), within_window(words, window)
    words = jax.lax.bitcast_convert_type(words.astype(jnp.uint32), jnp.int32)
    lens, sinks = (
        prefix_len.astype(jnp.int32),
        [] if sinks is None else [jnp.asarray(sinks, jnp.float32)],
    )
    arrays = [q, k_tree, v_tree, k_pages, v_pages]
    arrays = [lens, table.astype(jnp.int32), words, depth, *arrays]
    if shape.chunks == 1:
        out, lse = _attend(shape, q.dtype, arrays, sinks, tuning, interpret)
    else:
        out, lse = _attend(shape, jnp.float32, arrays, [], tuning, interpret)
        out, lse = _merge(shape, q.dtype, lens, out, lse, sinks, interpret)
    out = out.reshape(q.shape)
    return (out, lse.reshape(b, n, t)) if with_lse else out


# --- which work there is --------------------------------------------------------------------------


def _div(number, by: int):
    return jax.lax.div(number, jnp.int32(by))


def blocks_of(shape: Shape, length):
    """Returns the first block of a prefix that any row sees, and the one after the last."""
    # No further than the table: a GPU would find the next slot's pages there.
    length = jnp.clip(length, 0, shape.pages * shape.page)
    whole, rest = _div(length, shape.page), jax.lax.rem(length, jnp.int32(shape.page))
    end = whole * shape.per_page + _div(rest + shape.block - 1, shape.block)
    if shape.window is None:
        return jnp.zeros_like(end), end
    first = jnp.maximum(length - (shape.window - 1), 0)  # seen by the root
    whole, rest = _div(first, shape.page), jax.lax.rem(first, jnp.int32(shape.page))
    return jnp.minimum(whole * shape.per_page + _div(rest, shape.block), end), end


def chunks_of(shape: Shape, length):
    """Returns a slot's first chunk and the number of its chunks: one or more, for the tree's."""
    begin, end = blocks_of(shape, length)
    first = _div(begin, shape.per_chunk)
    return first, jnp.maximum(_div(end + (shape.per_chunk - 1), shape.per_chunk) - first, 1)


# --- attention to a chunk -------------------------------------------------------------------------


def _attend(shape: Shape, dtype, arrays, sinks: list, tuning: Tuning, interpret: bool):
    """Attends to each chunk: (out [B K Z M H], lse [B K Z M]) of Z chunks; others are not set.

    Args:
      sinks: sinks [N] that take part in every chunk; empty: none.
    """
    lens, table, words, depth, *arrays = arrays
    count = shape.batch * shape.kv_heads * shape.chunks * shape.rows
    flat = [x.reshape(-1, shape.head) for x in arrays]
    depth = [] if depth is None else [depth.reshape(-1)]
    words_of = words.shape[0], words.shape[2]
    big = shape.tile * shape.width > 64 * 128
    # A product of float32 takes shared memory of its own.
    stages = 1 if shape.width * arrays[-1].dtype.itemsize > 512 else tuning.stages
    call = pl.pallas_call(
        functools.partial(_attend_kernel, shape, words_of, len(depth)),
        out_shape=[
            jax.ShapeDtypeStruct((count, shape.head), dtype),
            jax.ShapeDtypeStruct((count,), jnp.float32),
        ],
        grid=(shape.programs, shape.kv_heads * shape.tiles),
        compiler_params=plgpu.CompilerParams(num_warps=8 if big else 4, num_stages=stages),
        interpret=interpret,
        name="tree_attention",
    )
    with as_on_a_gpu():
        return call(lens, table.reshape(-1), words.reshape(-1), *depth, *flat, *sinks)


def _attend_kernel(shape: Shape, words_of: tuple[int, int], depths_of: int, *refs):
    """Runs a program: one tile, and its entries of the list of chunks.

    Args:
      words_of: slots that have ancestor words of their own, and words of a row.
      depths_of: 1 if there are depths of rows, else 0.
    """
    lens, table, words, *refs = refs
    depth, refs = refs[:depths_of], refs[depths_of:]
    q, k_tree, v_tree, k_pages, v_pages, *sinks, out, lse = refs
    slots = jax.lax.broadcasted_iota(jnp.int32, (pl.next_power_of_2(max(shape.batch, LEAST)),), 0)
    lengths = plgpu.load(lens.at[slots], mask=slots < shape.batch, other=0)
    counts = jnp.where(slots < shape.batch, chunks_of(shape, lengths)[1], 0)
    ends = jnp.cumsum(counts)
    total = counts.sum()
    me, of_head = pl.program_id(0), pl.program_id(1)  # outside of the loops, for interpretation
    head, tile = _div(of_head, shape.tiles), jax.lax.rem(of_head, jnp.int32(shape.tiles))
    row = tile * shape.tile + jax.lax.broadcasted_iota(jnp.int32, (shape.tile,), 0)
    of_tree = jax.lax.rem(row, jnp.int32(shape.tree))
    column = jax.lax.broadcasted_iota(jnp.int32, (1, shape.width), 1)
    scale = shape.head**-0.5

    def rows_at(ref, first, index, there):
        """Loads rows of heads [.. width]; zero where not `there`, and in columns past a head."""
        mask = there[:, None]
        if shape.width != shape.head:
            mask = mask & (column < shape.head)
        dims = (index.shape[0], shape.width)
        where = jnp.broadcast_to((first + index)[:, None], dims), jnp.broadcast_to(column, dims)
        return plgpu.load(ref.at[where], mask=jnp.broadcast_to(mask, dims), other=0)

    def entry(index, _):
        index = me + index * shape.programs
        slot = (ends <= index).astype(jnp.int32).sum()
        mine = slots == slot
        length = jnp.where(mine, lengths, 0).sum()
        chunk = index - jnp.where(mine, ends - counts, 0).sum()
        begin, end = blocks_of(shape, length)
        first = _div(begin, shape.per_chunk) + chunk
        here = (slot * shape.kv_heads + head) * shape.rows
        queries = rows_at(q, here, row, row < shape.rows)

        def add(running, keys, values, seen):
            peak, sum_, acc = running
            scores = capped(dot(queries, keys.T) * scale, shape.soft_cap) * LOG2E
            scores = jnp.where(seen, scores, NEG_INF)
            higher = jnp.maximum(peak, scores.max(axis=1))
            shrink = jnp.exp2(peak - higher)
            weights = jnp.exp2(scores - higher[:, None])
            acc = acc * shrink[:, None] + dot(weights.astype(values.dtype), values)
            return higher, sum_ * shrink + weights.sum(axis=1), acc

        word_row = jnp.where(words_of[0] > 1, slot, 0) * shape.tree + of_tree

        def word_at(index):
            where = word_row * words_of[1] + index
            return plgpu.load(words.at[where], mask=row < shape.rows, other=0)

        def last_seen(index, found):
            sees = (word_at(index) != 0).astype(jnp.int32).max()
            return jnp.maximum(found, sees * (index + 1))

        def add_tree(index, running):
            bit = jax.lax.broadcasted_iota(jnp.int32, (TREE_BLOCK,), 0)
            key = index * TREE_BLOCK + bit
            seen = jax.lax.shift_right_logical(
                jnp.broadcast_to(word_at(index)[:, None], (shape.tile, TREE_BLOCK)),
                jnp.broadcast_to(bit[None], (shape.tile, TREE_BLOCK)),
            )
            at = (slot * shape.kv_heads + head) * shape.keys
            keys, values = (rows_at(x, at, key, key < shape.keys) for x in (k_tree, v_tree))
            return add(running, keys, values, (seen & 1) != 0)

        if depth:
            depths = plgpu.load(depth[0].at[word_row], mask=row < shape.rows, other=0)

        def add_block(index, running):
            stretch = _div(index, shape.per_page)
            inside = jax.lax.rem(index, jnp.int32(shape.per_page)) * shape.block
            inside = inside + jax.lax.broadcasted_iota(jnp.int32, (shape.block,), 0)
            at = stretch * shape.page + inside
            there = at < length
            if shape.page % shape.block:
                there = there & (inside < shape.page)
            page = table[slot * shape.pages + stretch]
            first = (page * shape.kv_heads + head) * shape.page
            keys, values = (rows_at(x, first, inside, there) for x in (k_pages, v_pages))
            seen = there[None]
            if shape.window is not None:
                seen = seen & (at[None] > (depths + (length - shape.window))[:, None])
            return add(running, keys, values, jnp.broadcast_to(seen, (shape.tile, shape.block)))

        peak, sum_ = jnp.full(row.shape, NEG_INF, jnp.float32), jnp.zeros(row.shape, jnp.float32)
        if sinks:
            of_row = head * shape.group + _div(row, shape.tree)
            peak = plgpu.load(sinks[0].at[of_row], mask=row < shape.rows, other=0) * LOG2E
            sum_ = sum_ + 1
        running = peak, sum_, jnp.zeros((shape.tile, shape.width), jnp.float32)
        is_first = (chunk == 0).astype(jnp.int32)
        seen_words = jax.lax.fori_loop(0, is_first * words_of[1], last_seen, jnp.int32(0))
        running = jax.lax.fori_loop(0, seen_words, add_tree, running)
        running = jax.lax.fori_loop(
            jnp.maximum(first * shape.per_chunk, begin),
            jnp.minimum((first + 1) * shape.per_chunk, end),
            add_block,
            running,
        )
        peak, sum_, acc = running
        at = ((slot * shape.kv_heads + head) * shape.chunks + chunk) * shape.rows + row
        dims = (shape.tile, shape.width)
        there = jnp.broadcast_to((row < shape.rows)[:, None] & (column < shape.head), dims)
        where = jnp.broadcast_to(at[:, None], dims), jnp.broadcast_to(column, dims)
        found = (acc / sum_[:, None]).astype(out.dtype)
        plgpu.store(out.at[where], found, mask=there)
        plgpu.store(lse.at[at], peak / LOG2E + jnp.log(sum_), mask=row < shape.rows)

    entries = _div(total - me + (shape.programs - 1), shape.programs)
    jax.lax.fori_loop(0, entries, entry, None)


# --- the merge of chunks --------------------------------------------------------------------------

MERGED = 16  # chunks whose results are loaded at once


def _merge(shape: Shape, dtype, lens, out, lse, sinks: list, interpret: bool):
    """Merges the results of each slot's chunks and sinks [N]: (out [B K M H], lse [B K M])."""
    count = shape.batch * shape.kv_heads * shape.rows
    call = pl.pallas_call(
        functools.partial(_merge_kernel, shape),
        out_shape=[
            jax.ShapeDtypeStruct((count, shape.head), dtype),
            jax.ShapeDtypeStruct((count,), jnp.float32),
        ],
        grid=(count,),
        compiler_params=plgpu.CompilerParams(num_warps=1, num_stages=1),
        interpret=interpret,
        name="merge_chunks",
    )
    with as_on_a_gpu():
        return call(lens, out, lse, *sinks)


def _merge_kernel(shape: Shape, lens, parts, parts_lse, *refs):
    """Runs a program: one row of one slot."""
    *sinks, out, lse = refs
    program = pl.program_id(0)
    row, head = jax.lax.rem(program, jnp.int32(shape.rows)), _div(program, shape.rows)
    slot = _div(head, shape.kv_heads)
    count = chunks_of(shape, lens[slot])[1]
    column = jax.lax.broadcasted_iota(jnp.int32, (1, shape.width), 1)
    dims = (MERGED, shape.width)

    def add(index, running):
        peak, sum_, acc = running
        chunk = index * MERGED + jax.lax.broadcasted_iota(jnp.int32, (MERGED,), 0)
        at = (head * shape.chunks + chunk) * shape.rows + row
        there = chunk < count
        theirs = plgpu.load(parts_lse.at[at], mask=there, other=NEG_INF)
        higher = jnp.maximum(peak, theirs.max())
        weights = jnp.where(there, jnp.exp(theirs - higher), 0)
        shrink = jnp.exp(peak - higher)
        found = plgpu.load(
            parts.at[jnp.broadcast_to(at[:, None], dims), jnp.broadcast_to(column, dims)],
            mask=jnp.broadcast_to(there[:, None] & (column < shape.head), dims),
            other=0,
        )
        acc = acc * shrink + (found * weights[:, None]).sum(axis=0)
        return higher, sum_ * shrink + weights.sum(), acc

    running = jnp.float32(NEG_INF), jnp.float32(0), jnp.zeros((shape.width,), jnp.float32)
    if sinks:
        of_row = jax.lax.rem(head, jnp.int32(shape.kv_heads)) * shape.group
        of_row = of_row + _div(row, shape.tree)
        running = sinks[0][of_row], jnp.float32(1), running[2]
    peak, sum_, acc = jax.lax.fori_loop(0, _div(count + (MERGED - 1), MERGED), add, running)
    where = jnp.full((shape.width,), program), column[0]
    plgpu.store(out.at[where], (acc / sum_).astype(out.dtype), mask=column[0] < shape.head)
    lse[program] = peak + jnp.log(sum_)


# --- backends -------------------------------------------------------------------------------------


def _refuses(operation: str, device: Device | None, cfg: ModelConfig) -> str | None:
    return no_ampere(device) or refuses_model(cfg)


def refuses_model(cfg: ModelConfig) -> str | None:
    """Returns why kernels in Triton do not take the heads or the dtype of a model, or None."""
    sizes, dtype = head_sizes(cfg), cfg.run.compute_dtype
    if dtype not in DTYPES or any(size > LARGEST_HEAD for size in sizes):
        return (
            f"it supports {', '.join(DTYPES)} heads of up to {LARGEST_HEAD}, got {dtype} heads of "
            f"{', '.join(map(str, sizes))}"
        )
    return None


BACKEND = Backend(
    operations={"tree_attention": tree_attention},
    takes={"tree_attention": ("window", "soft_cap", "sinks", "with_lse")},
    refuses=_refuses,
    rest="gpu:flash",
    line="Pallas Triton tree attention",
    page_multiple=64,  # larger blocks, of which none crosses pages
)
