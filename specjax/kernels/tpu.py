"""Tree attention for TPUs, in Pallas: a paged prefix without a mask, a tree with an ancestor mask.

Programs run one after the other, one per slot; a slot with more rows than fit (a piece of a prompt)
is cut into tiles, with a program each. A program's queries, the tree rows of all heads that share a
key/value head, are the rows of one matrix. They attend to the tree's own keys first, under the
ancestor bits, and then to the prefix, block by block. Blocks are copied asynchronously into two
buffers: while one is computed the next is copied, which after a program's last block is the first
one of the next program that has any. Page tables and lengths are scalars in SMEM; only the part of
a prefix that its queries see is read from HBM.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int, UInt32

from specjax.config import ModelConfig
from specjax.interfaces import Device, Table
from specjax.kernels import library
from specjax.kernels.backend import Kernels, head_sizes
from specjax.kernels.reference import (
    NEG_INF,
    Running,
    pack_heads,
    sink_of_rows,
    tree_depth,
    within_window,
)

Interpret = bool | pltpu.InterpretParams
LANES = 128  # lanes of a register
SUBLANES = 16  # sublanes of a register of bfloat16; float32 needs 8
MIB = 2**20


@dataclasses.dataclass(frozen=True)
class Tuning:
    """How the work is cut for a generation of TPUs.

    Attributes:
      block_bytes: bytes of keys and values that are copied at once: enough that the copy takes
        longer than the overhead of a loop step, about a microsecond.
      tile_rows: largest number of query rows of one key/value head in a program.
      vmem_bytes: bytes of the chip's VMEM that the kernel may use.
      most_positions: largest number of positions in a block, whose pieces are unrolled.
    """

    block_bytes: int
    tile_rows: int
    vmem_bytes: int
    most_positions: int = 1024

    def positions(self, kv_heads: int, head: int, itemsize: int) -> int:
        """Returns the number of positions of a prefix that are copied at once."""
        each = 2 * kv_heads * head * itemsize
        return max(min(self.block_bytes // each, self.most_positions), SUBLANES)


# Copying a block takes 2.6 us at v5e's 819 GB/s and v6e's 1640 GB/s, 1.5 us at v5p's 2765 GB/s.
# VMEM is 128 MiB on v5e and v6e, 64 MiB on a core of v5p; the compiler reserves some of it.
TUNING = {
    "v5e": Tuning(2 * MIB, 256, 64 * MIB),
    "v5p": Tuning(4 * MIB, 256, 40 * MIB),
    "v6e": Tuning(4 * MIB, 256, 64 * MIB),
}
# Small, so that in tests few rows and positions are many tiles and blocks.
INTERPRETED = Tuning(2 * MIB, 32, 64 * MIB, most_positions=32)


@dataclasses.dataclass(frozen=True)
class Blocks:
    """How a prefix is cut.

    Attributes:
      piece: positions of one copy, all in one page.
      pieces: pieces per block.
      per_page: pieces per page.
    """

    piece: int
    pieces: int
    per_page: int

    @property
    def positions(self) -> int:
        return self.piece * self.pieces

    @classmethod
    def of(cls, page_size: int, longest: int, positions: int) -> Blocks:
        """Returns blocks of about `positions` positions, at most as many as the longest prefix has.

        Raises:
          ValueError: a page cannot be cut into pieces that registers hold.
        """
        wanted = min(positions, longest)
        fits = (n for n in range(SUBLANES, page_size + 1, SUBLANES) if page_size % n == 0)
        piece = max((n for n in fits if n <= max(wanted, SUBLANES)), default=None)
        if piece is None:
            raise ValueError(
                f"pages must have a multiple of {SUBLANES} positions on a TPU, got {page_size}; "
                "set page_size to 64 or 128"
            )
        return cls(piece, max(wanted // piece, 1), page_size // piece)


def vmem_bytes(
    rows: int, keys: int, kv_heads: int, head: int, itemsize: int, positions: int
) -> int:
    """Returns the bytes of VMEM that one program holds.

    Inputs and outputs are held twice, because the next program's are copied while this one runs. A
    number per row takes all lanes of a register.

    Args:
      rows: query rows per key/value head.
      keys: tree keys.
      positions: positions of a block.
    """
    lanes, width = 4 * LANES, max(head, LANES)
    inputs = kv_heads * (2 * rows + 2 * keys) * width * itemsize  # queries, output, tree
    per_row = kv_heads * rows * (2 * lanes) + rows * lanes  # log-sum-exp, sinks, words
    scratch = kv_heads * rows * (2 * lanes + 4 * width)
    buffers = 2 * 2 * kv_heads * positions * width * itemsize
    scores = 4 * 4 * rows * max(positions, keys)  # scores, weights, their mask, and a copy
    return 2 * (inputs + per_row) + scratch + buffers + scores


def tile_size(
    tuning: Tuning, rows: int, group: int, keys: int, kv_heads: int, head: int, itemsize: int
) -> int:
    """Returns the number of tree rows of one program, so that its buffers fit into VMEM.

    Raises:
      ValueError: not even the rows of one register fit.
    """
    positions = tuning.positions(kv_heads, head, itemsize)
    tile = min(rows, max(tuning.tile_rows // group, 1))
    while True:
        packed = -(-tile * group // SUBLANES) * SUBLANES
        needed = vmem_bytes(packed, keys, kv_heads, head, itemsize, positions)
        if needed <= tuning.vmem_bytes:
            return tile
        if tile == 1:
            raise ValueError(
                f"tree attention with {kv_heads} key/value heads of {head}, {keys} tree keys and "
                f"blocks of {positions} positions needs {needed} bytes of VMEM for one row, and "
                f"may use {tuning.vmem_bytes}; split the heads over more devices (tp)"
            )
        tile = -(-tile // 2)


@functools.partial(
    jax.jit, static_argnames=("window", "with_lse", "tuning", "interpret"), inline=True
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
    tuning: Tuning,
    interpret: Interpret = False,
):
    """Computes `specjax.kernels.reference.tree_attention` by one kernel; float32 accumulation.

    Args:
      tuning: how the work is cut, see `TUNING`.
      interpret: for tests on CPU: True, or settings of Pallas' simulator of copies and semaphores,
        which deadlocks on several devices at once.

    Raises:
      ValueError: a page cannot be cut into pieces, or a program's buffers do not fit into VMEM.
    """
    b, n, t, h = q.shape
    kv_heads, size = k_pages.shape[1:3]
    itemsize = k_pages.dtype.itemsize
    if table is None:
        table = jnp.arange(b, dtype=jnp.int32)[:, None]
    blocks = Blocks.of(size, size * table.shape[1], tuning.positions(kv_heads, h, itemsize))
    words = jnp.broadcast_to(visible_bits, (b, *visible_bits.shape[-2:]))
    depth = tree_depth(words)
    if window is not None:
        words = within_window(words, window)
    words = jax.lax.bitcast_convert_type(jnp.asarray(words, jnp.uint32), jnp.int32)
    words = jnp.concatenate([words, depth[..., None]], axis=-1)
    keys = -(-k_tree.shape[2] // SUBLANES) * SUBLANES
    tile = tile_size(tuning, t, n // kv_heads, keys, kv_heads, h, itemsize)
    tiles = -(-t // tile)
    rows = _pad(pack_heads(_tiled(q, tile), kv_heads), SUBLANES)
    words = _pad(jnp.tile(_tiled(words[:, None], tile)[:, 0], (1, n // kv_heads, 1)), SUBLANES)
    inputs = [rows, words, _pad(k_tree, SUBLANES), _pad(v_tree, SUBLANES)]
    if sinks is not None:
        per_row = _pad(sink_of_rows(sinks, kv_heads, tile), SUBLANES)
        inputs.append(jnp.broadcast_to(per_row, (*rows.shape[1:3], LANES)))
    lens = jnp.repeat(prefix_len.astype(jnp.int32), tiles)
    scalars = (lens, table.astype(jnp.int32), _schedule(lens, blocks, window))
    kernel = Kernel(blocks, tiles, window, sinks is not None, with_lse)
    found = _call(kernel, scalars, inputs, (k_pages, v_pages), tuning.vmem_bytes, interpret)
    used = n // kv_heads * tile
    out = _untiled(found[0][:, :, :used].reshape(b * tiles, n, tile, h), b, t)
    if not with_lse:
        return out
    lse = found[1][:, :, :used, :1].reshape(b * tiles, n, tile, 1)
    return out, _untiled(lse, b, t)[..., 0]


def _pad(x: Array, multiple: int) -> Array:
    """Pads the second to last axis with zeros to a multiple."""
    missing = -x.shape[-2] % multiple
    return x if not missing else jnp.pad(x, [(0, 0)] * (x.ndim - 2) + [(0, missing), (0, 0)])


def _tiled(x: Float[Array, "B N T H"], tile: int) -> Float[Array, "I N tile H"]:
    """Cuts tree rows into tiles, each as a slot of its own; the last one is padded with zeros."""
    x = _pad(x, tile)
    b, n, t, h = x.shape
    return jnp.moveaxis(x.reshape(b, n, t // tile, tile, h), 2, 1).reshape(-1, n, tile, h)


def _untiled(x: Float[Array, "I N tile H"], b: int, t: int) -> Float[Array, "B N T H"]:
    _, n, tile, h = x.shape
    return jnp.moveaxis(x.reshape(b, -1, n, tile, h), 1, 2).reshape(b, n, -1, h)[:, :, :t]


def _schedule(lens: Int[Array, " I"], blocks: Blocks, window: int | None) -> Array:
    """Returns the schedule of all programs, int32 [4, I + 1].

    The rows are: a program's first block, its number of blocks, the buffer of its first block, and
    the next program that has a block (I: none). Column 0 of the last row is the first such program.
    """
    count_all = lens.shape[0]
    first = jnp.zeros_like(lens)
    if window is not None:  # positions outside the root's window are in no row's
        first = jnp.maximum(lens - window + 1, 0) // blocks.positions
    count = jnp.maximum(-(-lens // blocks.positions) - first, 0)
    before = jnp.cumsum(count) - count
    programs = jnp.where(count > 0, jnp.arange(count_all), count_all)
    later = jax.lax.cummin(programs, reverse=True)
    nothing = jnp.zeros(1, jnp.int32)
    columns = [(first, nothing), (count, nothing), (before % 2, nothing)]
    rows = [jnp.concatenate(c) for c in columns]
    rows.append(jnp.concatenate([later, jnp.full(1, count_all)]))
    return jnp.stack(rows).astype(jnp.int32)


def _call(kernel: Kernel, scalars, inputs, pages, vmem: int, interpret: Interpret) -> list[Array]:
    """Runs the kernel; returns the output [I K M H] and maybe the log-sum-exp [I K M LANES]."""
    rows, tiles = inputs[0], kernel.tiles
    programs, kv_heads, m, h = rows.shape

    def per_program(x):
        return pl.BlockSpec((1, *x.shape[1:]), lambda i, *_: (i,) + (0,) * (x.ndim - 1))

    def per_slot(x):
        return pl.BlockSpec(
            (1, *x.shape[1:]), lambda i, *_: (jax.lax.div(i, tiles),) + (0,) * (x.ndim - 1)
        )

    in_specs = [per_program(x) for x in inputs[:2]] + [per_slot(x) for x in inputs[2:4]]
    in_specs += [pl.BlockSpec(x.shape, lambda i, *_: (0, 0, 0)) for x in inputs[4:]]
    out_shape = [jax.ShapeDtypeStruct(rows.shape, rows.dtype)]
    if kernel.with_lse:
        out_shape.append(jax.ShapeDtypeStruct((programs, kv_heads, m, LANES), jnp.float32))
    buffer = pltpu.VMEM((2, kv_heads, kernel.blocks.positions, h), pages[0].dtype)
    return pl.pallas_call(
        kernel,
        out_shape=out_shape,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(programs,),
            in_specs=[*in_specs, *[pl.BlockSpec(memory_space=pl.ANY)] * 2],
            out_specs=[per_program(x) for x in out_shape],
            scratch_shapes=[
                buffer,
                buffer,
                pltpu.SemaphoreType.DMA((2, 2)),
                pltpu.VMEM((kv_heads, m, LANES), jnp.float32),
                pltpu.VMEM((kv_heads, m, LANES), jnp.float32),
                pltpu.VMEM((kv_heads, m, h), jnp.float32),
            ],
        ),
        # In order, because each program starts the copy of the next one's first block.
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",), vmem_limit_bytes=vmem
        ),
        interpret=interpret,
        name="tree_attention",
    )(*scalars, *inputs, *pages)


# --- the body -------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Kernel:
    """The kernel's body; `pallas_call` calls it with refs.

    Integers are divided by `jax.lax`, because they are never negative and `//` also handles signs.
    """

    blocks: Blocks
    tiles: int
    window: int | None
    has_sinks: bool
    with_lse: bool

    def __call__(self, lens, table, plan, q, words, k_tree, v_tree, *refs):
        """Runs one program.

        `refs` are [sinks], pages of keys and of values, outputs, then scratch.
        """
        refs = list(refs)
        sinks = refs.pop(0) if self.has_sinks else None
        pages, out = refs[:2], refs[2]
        lse = refs[3] if self.with_lse else None
        k_buffer, v_buffer, arrived, peak, total, acc = refs[3 + self.with_lse :]
        copies = Copies(self.blocks, self.tiles, lens, table, pages, (k_buffer, v_buffer), arrived)
        softmax = Softmax(peak, total, acc)
        me, programs, kv_heads = pl.program_id(0), pl.num_programs(0), q.shape[1]
        first, count, parity = plan[0, me], plan[1, me], plan[2, me]

        @pl.when((me == plan[3, 0]) & (count > 0))
        def _():
            copies.start(me, first, parity)

        softmax.clear()
        seen = _bits(words[0], k_tree.shape[2])
        for head in range(kv_heads):
            scores = jnp.where(seen, _scores(q[0, head], k_tree[0, head]), NEG_INF)
            softmax.add(head, scores, v_tree[0, head])

        def one_block(i, _):
            block, buffer = first + i, (parity + i) & 1
            self._send_next(copies, plan, (me, programs), block, i + 1 == count, 1 - buffer)
            copies.wait(me, block, buffer)
            known = self._known(block, lens[me], words)
            row = self._positions(block, (self.blocks.positions, 1), 0)
            for head in range(kv_heads):
                scores = jnp.where(known, _scores(q[0, head], k_buffer[buffer, head]), NEG_INF)
                # The buffer's old content may hold NaN, and zero times NaN is NaN.
                values = jnp.where(row < lens[me], v_buffer[buffer, head], 0)
                softmax.add(head, scores, values)
            return 0

        jax.lax.fori_loop(0, count, one_block, 0)
        for head in range(kv_heads):
            done = softmax.of(head)
            if self.has_sinks:
                done = done.add_sink(sinks[head][:, :1])
            out[0, head] = (done.out / done.total).astype(out.dtype)
            if self.with_lse:
                lse[0, head] = jnp.broadcast_to(done.lse, lse.shape[2:])

    def _send_next(self, copies: Copies, plan, program, block, is_last, buffer) -> None:
        """Starts copying the next block: this program's, or after its last one the next one's."""
        me, programs = program
        follower = plan[3, me + 1]

        @pl.when(jnp.logical_not(is_last))
        def _():
            copies.start(me, block + 1, buffer)

        @pl.when(is_last & (follower < programs))
        def _():
            copies.start(follower, plan[0, jnp.minimum(follower, programs - 1)], buffer)

    def _positions(self, block, shape: tuple[int, int], axis: int) -> Array:
        """Returns the absolute positions of a block's keys, along one axis."""
        return block * self.blocks.positions + jax.lax.broadcasted_iota(jnp.int32, shape, axis)

    def _known(self, block, length, words) -> Array:
        """Returns the mask of a block's keys: [1 S], or [M S] with a window."""
        at = self._positions(block, (1, self.blocks.positions), 1)
        known = at < length
        if self.window is not None:
            depth = words[0][:, words.shape[2] - 1 :]
            known = known & (at > length + depth - self.window)
        return known


@dataclasses.dataclass(frozen=True)
class Copies:
    """Asynchronous copies of blocks of a prefix from pages into two buffers."""

    blocks: Blocks
    tiles: int
    lens: jax.Ref
    table: jax.Ref
    pages: tuple[jax.Ref, jax.Ref]
    buffers: tuple[jax.Ref, jax.Ref]
    arrived: jax.Ref

    def start(self, program, block, buffer) -> None:
        for here, copy in self._pieces(program, block, buffer):
            pl.when(here)(copy.start)

    def wait(self, program, block, buffer) -> None:
        for here, copy in self._pieces(program, block, buffer):
            pl.when(here)(copy.wait)

    def _pieces(self, program, block, buffer):
        """Yields (condition, copy) for each piece of a block; the condition: it has positions."""
        length, slot = self.lens[program], jax.lax.div(program, self.tiles)
        for i in range(self.blocks.pieces):
            piece = block * self.blocks.pieces + i
            here = piece * self.blocks.piece < length
            page = self.table[slot, jnp.where(here, jax.lax.div(piece, self.blocks.per_page), 0)]
            start = jax.lax.rem(piece, self.blocks.per_page) * self.blocks.piece
            start = pl.multiple_of(start, self.blocks.piece)
            place = pl.ds(i * self.blocks.piece, self.blocks.piece)
            for which, (pages, into) in enumerate(zip(self.pages, self.buffers, strict=True)):
                yield (
                    here,
                    pltpu.make_async_copy(
                        pages.at[page, :, pl.ds(start, self.blocks.piece)],
                        into.at[buffer, :, place],
                        self.arrived.at[buffer, which],
                    ),
                )


@dataclasses.dataclass(frozen=True)
class Softmax:
    """Every head's `Running` in scratch; a number per row is repeated over a register's lanes."""

    peak: jax.Ref
    total: jax.Ref
    acc: jax.Ref

    def clear(self) -> None:
        self.peak[...] = jnp.full(self.peak.shape, NEG_INF, jnp.float32)
        self.total[...] = jnp.zeros(self.total.shape, jnp.float32)
        self.acc[...] = jnp.zeros(self.acc.shape, jnp.float32)

    def of(self, head: int) -> Running:
        return Running(self.peak[head][:, :1], self.total[head][:, :1], self.acc[head])

    def add(self, head: int, scores: Float[Array, "M S"], values: Float[Array, "S H"]) -> None:
        new = self.of(head).add(scores, lambda w: _dot(w.astype(values.dtype), values))
        self.peak[head] = jnp.broadcast_to(new.peak, self.peak.shape[1:])
        self.total[head] = jnp.broadcast_to(new.total, self.total.shape[1:])
        self.acc[head] = new.out


def _dot(a, b, contract=((1,), (0,))):
    """Multiplies in float32; float32 inputs are not rounded to bfloat16 first."""
    exact = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jax.lax.dot_general(
        a, b, (contract, ((), ())), precision=exact, preferred_element_type=jnp.float32
    )


def _scores(q, keys):
    return _dot(q, keys, ((1,), (1,))) * q.shape[-1] ** -0.5


def _bits(words, keys: int):
    """Unpacks ancestor words [M W + 1], whose last column is the depth, to booleans [M keys]."""
    column = jax.lax.broadcasted_iota(jnp.int32, (words.shape[0], keys), 1)
    word = jnp.zeros(column.shape, jnp.int32)
    for w in range(words.shape[1] - 1):
        word = jnp.where(column >> 5 == w, words[:, w : w + 1], word)
    return (jax.lax.shift_right_logical(word, column & 31) & 1) != 0


# --- backends -------------------------------------------------------------------------------------


def _refuses(operation: str, device: Device | None, cfg: ModelConfig) -> str | None:
    if device is not None and device.platform != "tpu":
        return f"it is compiled for TPUs, and the device is {device.platform!r}"
    if odd := [size for size in head_sizes(cfg) if size % LANES]:
        return f"head_dim must be a multiple of {LANES}, got {odd[0]}"
    return None


def _of(generation: str, *kinds: str) -> Kernels:
    attend = functools.partial(tree_attention, tuning=TUNING[generation])
    return Kernels(
        operations={"tree_attention": attend, "causal_attention": library.splash_attention},
        refuses=_refuses,
        line=f"Pallas tree attention for {generation}, splash attention in training",
        kinds=kinds,
    )


def _refuses_to_interpret(operation: str, device: Device | None, cfg: ModelConfig) -> str | None:
    if device is not None and device.platform != "cpu":
        return "it interprets the TPU kernel, for tests on CPU"
    return None


V5E = _of("v5e", "TPU v5 lite", "TPU v5e")
V5P = _of("v5p", "TPU v5", "TPU v5p")
V6E = _of("v6e", "TPU v6 lite", "TPU v6e")
INTERPRET = Kernels(
    operations={
        "tree_attention": functools.partial(tree_attention, tuning=INTERPRETED, interpret=True),
        "causal_attention": functools.partial(library.splash_attention, interpret=True),
    },
    refuses=_refuses_to_interpret,
    line="the TPU kernel in interpret mode: slow, for tests",
    warns=True,
)
