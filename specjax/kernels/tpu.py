"""Tree attention for TPUs, in Pallas: a paged prefix without a mask, a tree with an ancestor mask.

A program computes one slot, or one tile of a slot with more rows than fit (a piece of a prompt).
Its queries, the rows of all heads that share a key/value head, are the rows of one matrix. They
attend to the tree's own keys first, under the ancestor bits, and then to the prefix, block by
block. Blocks are copied asynchronously into two buffers: while one is computed the next is copied,
which after a program's last block is the first one of the next program that has any. So the
programs of a core run in order, and each core has programs of its own.

A block is as many bytes as a copy needs to run at the memory's speed. It is computed in parts, as
many positions as registers and VMEM hold scores of: full parts without a mask, and what is left of
the prefix as one part with a mask. Page tables and lengths are scalars in SMEM, from which a
program knows what to copy; only the part of a prefix that its queries see is read from HBM.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from specjax.config import ModelConfig
from specjax.interfaces import Backend, Device, Table
from specjax.kernels import context_parallel, experts_tpu, flash, library
from specjax.kernels.backend import head_sizes
from specjax.kernels.reference import NEG_INF, Running
from specjax.kernels.tiles import by_rows, dot

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
      part_positions: largest number of positions whose scores are computed at once. A part takes
        hundreds of cycles whatever its size, by which long ones are better; but also a part that
        the prefix does not fill is computed whole.
      part_bytes: bytes of the scores of all heads that are computed at once.
      cores: number of cores of a chip that share the programs. Where the chip has fewer, or XLA
        uses fewer, one core runs the programs of all, with the same results.
    """

    block_bytes: int
    tile_rows: int
    vmem_bytes: int
    part_positions: int = 2048
    part_bytes: int = 4 * MIB
    cores: int = 1


# Copying a block takes 2.6 us at v5e's 819 GB/s and v6e's 1640 GB/s, 1.5 us at v5p's 2765 GB/s.
# VMEM is 128 MiB on v5e and v6e, 64 MiB on a core of v5p; the compiler reserves some of it.
TUNING = {
    "v5e": Tuning(2 * MIB, 256, 64 * MIB),
    "v5p": Tuning(4 * MIB, 256, 40 * MIB, cores=2),
    "v6e": Tuning(4 * MIB, 256, 64 * MIB),
}


@dataclasses.dataclass(frozen=True)
class Blocks:
    """How a prefix is cut.

    Attributes:
      piece: positions of one copy, all in one page.
      per_page: pieces per page.
      per_part: pieces that are computed at once.
      parts: parts per block.
    """

    piece: int
    per_page: int
    per_part: int
    parts: int

    @property
    def part(self) -> int:
        """The number of positions of a part."""
        return self.piece * self.per_part

    @property
    def positions(self) -> int:
        """The number of positions of a block."""
        return self.part * self.parts

    @classmethod
    def of(cls, page_size: int, longest: int, part: int, block: int) -> Blocks:
        """Returns blocks of about `block` positions in parts of about `part`.

        Args:
          page_size: positions of a page.
          longest: the largest number of positions that a program reads; no block is longer, but
            for what its last part is.

        Raises:
          ValueError: a page cannot be cut into pieces that registers hold.
        """
        wanted = max(min(part, block, longest), SUBLANES)
        fits = (n for n in range(SUBLANES, page_size + 1, SUBLANES) if page_size % n == 0)
        piece = max((n for n in fits if n <= wanted), default=None)
        if piece is None:
            raise ValueError(
                f"pages must have a multiple of {SUBLANES} positions on a TPU, got {page_size}; "
                "set page_size to 64 or 128"
            )
        part = wanted // piece * piece
        parts = max(min(block // part, -(-longest // part)), 1)
        return cls(piece, page_size // piece, part // piece, parts)


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What decides how the work is cut.

    Attributes:
      group: query heads per key/value head.
      keys: tree keys.
      itemsize: bytes of a number.
      page_size: positions of a page.
      longest: positions of the longest prefix.
      window: see `tree_attention`.
    """

    group: int
    keys: int
    kv_heads: int
    head: int
    itemsize: int
    page_size: int
    longest: int
    window: int | None = None

    def blocks(self, tuning: Tuning, tile: int) -> Blocks:
        """Returns how a prefix is cut for programs of `tile` tree rows."""
        each = 2 * self.kv_heads * self.head * self.itemsize
        longest = self.longest if self.window is None else min(self.longest, self.window)
        part = tuning.part_bytes // (4 * self.kv_heads * self._rows(tile))
        part = min(part, tuning.part_positions, _up(longest, SUBLANES))
        # A window begins anywhere in a part.
        longest = longest if self.window is None else longest + part
        return Blocks.of(self.page_size, longest, part, tuning.block_bytes // each)

    def _rows(self, tile: int) -> int:
        return _up(tile * self.group, SUBLANES)

    def vmem_bytes(self, tile: int, blocks: Blocks) -> int:
        """Returns the bytes of VMEM that one program of `tile` tree rows holds.

        Inputs and outputs are held twice, because the next program's are copied while this one
        runs. A number per row takes all lanes of a register.
        """
        rows, keys = self._rows(tile), _up(self.keys, SUBLANES)
        lanes, width = 4 * LANES, max(self.head, LANES)
        inputs = self.kv_heads * (2 * rows + 2 * keys) * width * self.itemsize  # q, out, k, v
        per_row = self.kv_heads * rows * lanes + _up(tile, SUBLANES) * lanes  # log-sum-exp, words
        scratch = self.kv_heads * rows * (2 * lanes + 4 * width)
        buffers = 2 * 2 * self.kv_heads * blocks.positions * width * self.itemsize
        # Scores, weights, their mask, and a copy.
        scores = 4 * 4 * self.kv_heads * rows * max(blocks.part, keys)
        return 2 * (inputs + per_row) + scratch + buffers + scores

    def cut(self, tuning: Tuning, rows: int) -> tuple[int, Blocks]:
        """Returns the number of tree rows of one program, and how a prefix is cut for it.

        Both are such that what a program holds fits into VMEM. The rows are all `rows`, or a
        multiple of the rows of a register.

        Raises:
          ValueError: not even the rows of one register fit.
        """
        most = max(tuning.tile_rows // self.group, 1)
        tile = rows if rows <= most else max(most // SUBLANES, 1) * SUBLANES
        while True:
            tile = min(tile, rows)
            blocks = self.blocks(tuning, tile)
            needed = self.vmem_bytes(tile, blocks)
            if needed <= tuning.vmem_bytes:
                return tile, blocks
            if tile <= SUBLANES:
                raise ValueError(
                    f"tree attention with {self.kv_heads} key/value heads of {self.head}, "
                    f"{self.keys} tree keys and blocks of {blocks.positions} positions needs "
                    f"{needed} bytes of VMEM for {tile} rows, and may use {tuning.vmem_bytes}; "
                    "split the heads over more devices (tp)"
                )
            tile = _up(-(-tile // 2), SUBLANES)


def _up(number: int, multiple: int) -> int:
    """Rounds up to a multiple."""
    return -(-number // multiple) * multiple


@functools.partial(
    jax.jit, static_argnames=("window", "with_lse", "tuning", "interpret"), inline=True
)
def tree_attention(
    q, k_tree, v_tree, k_pages, v_pages, prefix_len, visible_bits, table: Table = None, *,
    window: int | None = None, sinks=None, with_lse: bool = False, tuning: Tuning,
    interpret: bool | pltpu.InterpretParams = False,
):  # fmt: skip
    """Computes `specjax.kernels.reference.tree_attention` by one kernel; float32 accumulation.

    The kernel takes its arguments as they are: XLA computes nothing beside it, in no layer.

    Args:
      tuning: how the work is cut, see `TUNING`.
      interpret: for tests on CPU: True, or settings of Pallas' simulator of copies and semaphores,
        which deadlocks on several devices at once.

    Raises:
      ValueError: a page cannot be cut into pieces, or a program's buffers do not fit into VMEM.
    """
    b, n, t, h = q.shape
    kv_heads, size = k_pages.shape[1:3]
    group = n // kv_heads
    if table is None:
        table = jnp.arange(b, dtype=jnp.int32)[:, None]
    sizes = Sizes(
        group, k_tree.shape[2], kv_heads, h, k_pages.dtype.itemsize, size, size * table.shape[1],
        window,
    )  # fmt: skip
    tile, blocks = sizes.cut(tuning, t)
    tiles = -(-t // tile)
    # One tile: the rows of a group are one matrix already. Else each head's tiles are cut out.
    rows = q.reshape(b, kv_heads, *((group, t) if tiles > 1 else (1, group * t)), h)
    words = jax.lax.bitcast_convert_type(jnp.asarray(visible_bits, jnp.uint32), jnp.int32)
    words = words.reshape(-1, *words.shape[-2:])
    scalars = [prefix_len.astype(jnp.int32), table.astype(jnp.int32)]
    if sinks is not None:
        scalars.append(sinks.astype(jnp.float32))
    kernel = Kernel(blocks, group, tile, tiles, window, sinks is not None, with_lse)
    inputs, pages = (rows, words, k_tree, v_tree), (k_pages, v_pages)
    found = _call(kernel, scalars, inputs, pages, tuning, interpret)
    out = found[0].reshape(b, n, t, h)
    return (out, found[1][..., 0].reshape(b, n, t)) if with_lse else out


def _call(kernel: Kernel, scalars, inputs, pages, tuning: Tuning, interpret) -> list[Array]:
    """Runs the kernel; returns the output, shaped as the rows, and maybe the log-sum-exp."""
    rows, words, *tree = inputs
    b, kv_heads, matrices, _, h = rows.shape
    programs = b * kernel.tiles
    # Every core has as many programs; one of them alone has nothing to share.
    cores = tuning.cores if programs % tuning.cores == 0 else 1
    count = matrices * (kernel.tile if matrices > 1 else kernel.group * kernel.tile)

    def slot_and_tile(core, step):
        program = core * (programs // cores) + step
        return jax.lax.div(program, kernel.tiles), jax.lax.rem(program, kernel.tiles)

    def of_tile(x):
        def index(core, step, *_):
            slot, tile = slot_and_tile(core, step)
            return slot, 0, 0, tile, 0

        height = x.shape[3] if kernel.tiles == 1 else kernel.tile
        return pl.BlockSpec((1, *x.shape[1:3], height, x.shape[4]), index)

    def of_words(core, step, *_):
        slot, tile = slot_and_tile(core, step)
        return (slot if words.shape[0] > 1 else 0), tile, 0

    def of_slot(x):
        return pl.BlockSpec((1, *x.shape[1:]), lambda *at: (slot_and_tile(*at[:2])[0], 0, 0, 0))

    in_specs = [of_tile(rows), pl.BlockSpec((1, kernel.tile, words.shape[2]), of_words)]
    in_specs += [of_slot(x) for x in tree]
    out_shape = [jax.ShapeDtypeStruct(rows.shape, rows.dtype)]
    if kernel.with_lse:
        out_shape.append(jax.ShapeDtypeStruct((*rows.shape[:4], LANES), jnp.float32))
    buffer = pltpu.VMEM((2, kv_heads, kernel.blocks.positions, h), pages[0].dtype)
    return pl.pallas_call(
        kernel,
        out_shape=out_shape,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(cores, programs // cores),
            in_specs=[*in_specs, *[pl.BlockSpec(memory_space=pl.ANY)] * 2],
            out_specs=[of_tile(x) for x in out_shape],
            scratch_shapes=[
                buffer,
                buffer,
                pltpu.SemaphoreType.DMA((2, 2)),
                pltpu.SMEM((1,), jnp.int32),
                pltpu.VMEM((kv_heads, count, LANES), jnp.float32),
                pltpu.VMEM((kv_heads, count, LANES), jnp.float32),
                pltpu.VMEM((kv_heads, count, h), jnp.float32),
            ],
        ),
        # A core's programs in order, because each starts the copy of the next one's first block.
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"),
            vmem_limit_bytes=tuning.vmem_bytes,
            disable_bounds_checks=True,  # they take longer than all else that starts a copy
        ),
        interpret=interpret,
        name="tree_attention",
    )(*scalars, *inputs, *pages)


# --- the body -------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Kernel:
    """The kernel's body; `pallas_call` calls it with refs.

    Integers are divided by `jax.lax`, because they are never negative and `//` also handles signs.

    Attributes:
      group: query heads per key/value head.
      tile: tree rows of a program.
      tiles: programs of a slot.
    """

    blocks: Blocks
    group: int
    tile: int
    tiles: int
    window: int | None
    has_sinks: bool
    with_lse: bool

    def __call__(self, lens, table, *refs):
        """Runs one program.

        `refs` are [sinks], queries, words, keys and values of the tree, pages of keys and of
        values, outputs, then scratch.
        """
        refs = list(refs)
        sinks = refs.pop(0) if self.has_sinks else None
        q, words, k_tree, v_tree, *pages = refs[:6]
        out, lse = refs[6], refs[7] if self.with_lse else None
        k_buffer, v_buffer, arrived, turn, peak, total, acc = refs[7 + self.with_lse :]
        copies = Copies(self.blocks, table, pages, (k_buffer, v_buffer), arrived)
        softmax = Softmax(peak, total, acc)
        kv_heads, step, steps = q.shape[1], pl.program_id(1), pl.num_programs(1)
        end = (pl.program_id(0) + 1) * steps  # of the programs of this core
        me = end - steps + step
        slot = jax.lax.div(me, self.tiles)
        start, length = self._prefix(lens, me)

        def send(first, buffer):
            """Starts copying this program's block that begins at position `first`."""
            copies.start(slot, first, length, buffer)

        def send_first(after, buffer):
            """Starts copying the first block of the next program that has any."""
            program, count = self._next(lens, after, end)

            @pl.when(count > 0)
            def _():
                start, length = self._prefix(lens, program)
                copies.start(jax.lax.div(program, self.tiles), start, length, buffer)

        @pl.when(step == 0)
        def _():
            turn[0] = 0
            send_first(me, 0)

        softmax.clear()
        seen, depth = self._tree_mask(words[0], k_tree.shape[2])
        queries = [q[0, head].reshape(-1, q.shape[-1]) for head in range(kv_heads)]
        scores = [_scores(q, k_tree[0, head]) for head, q in enumerate(queries)]
        scores = [jnp.where(seen, x, NEG_INF) for x in scores]
        softmax.add(scores, [v_tree[0, head] for head in range(kv_heads)])

        def add_part(buffer, part, first, partly: bool):
            """Adds one part of a block; `first` is its first position.

            Args:
              partly: whether the prefix ends in it, so that the rest of the buffer is not known.
            """
            place = pl.ds(pl.multiple_of(part * self.blocks.part, SUBLANES), self.blocks.part)
            known = self._known(first, length, depth, partly)
            scores = [_scores(q, k_buffer[buffer, i, place]) for i, q in enumerate(queries)]
            if known is not None:
                scores = [jnp.where(known, x, NEG_INF) for x in scores]
            values = [v_buffer[buffer, i, place] for i in range(kv_heads)]
            if partly:  # the buffer's old content may hold NaN, and zero times NaN is NaN
                row = first + jax.lax.broadcasted_iota(jnp.int32, (self.blocks.part, 1), 0)
                values = [jnp.where(row < length, v, 0) for v in values]
            softmax.add(scores, values)

        def one_block(block, buffer):
            first = start + block * self.blocks.positions
            following = first + self.blocks.positions
            is_last = following >= length
            pl.when(is_last)(lambda: send_first(me + 1, 1 - buffer))
            pl.when(jnp.logical_not(is_last))(lambda: send(following, 1 - buffer))
            copies.wait(slot, first, length, buffer)
            here = jnp.minimum(length - first, self.blocks.positions)
            full = jax.lax.div(here, self.blocks.part)

            @pl.loop(0, full)
            def _(part):
                add_part(buffer, part, first + part * self.blocks.part, partly=False)

            @pl.when(full * self.blocks.part < here)
            def _():
                add_part(buffer, full, first + full * self.blocks.part, partly=True)

            return 1 - buffer

        blocks = jax.lax.div(length - start + self.blocks.positions - 1, self.blocks.positions)
        turn[0] = jax.lax.fori_loop(0, blocks, one_block, turn[0])
        for head in range(kv_heads):
            done = softmax.of(head)
            if self.has_sinks:
                done = done.add_sink(self._sink(sinks, head, done.peak.shape))
            out[0, head] = (done.out / done.total).astype(out.dtype).reshape(out.shape[2:])
            if self.with_lse:
                lse[0, head] = jnp.broadcast_to(done.lse, acc.shape[1:2] + lse.shape[-1:]).reshape(
                    lse.shape[2:]
                )

    def _prefix(self, lens, program):
        """Returns the first position that a program reads, and the length of its slot's prefix.

        The program has no block where they are equal: of an empty prefix, which a negative length
        is too, or of a window whose first position would begin the part behind the prefix.
        """
        length = jnp.maximum(lens[jax.lax.div(program, self.tiles)], 0)
        return self._start(length), length

    def _start(self, length):
        """Returns the first position that a program reads; it begins a part."""
        if self.window is None:
            return 0 * length
        first = jnp.maximum(length - self.window + 1, 0)  # seen by the root
        return jax.lax.div(first, self.blocks.part) * self.blocks.part

    def _next(self, lens, program, end):
        """Returns the first program from `program` on that has a block, and its positions.

        The number of positions is 0 where no program before `end` has a block.
        """

        def positions(program):
            start, length = self._prefix(lens, jnp.minimum(program, end - 1))
            return jnp.where(program < end, length - start, 0)

        return jax.lax.while_loop(
            lambda found: (found[1] == 0) & (found[0] < end),
            lambda found: (found[0] + 1, positions(found[0] + 1)),
            (program, positions(program)),
        )

    def _tree_mask(self, words, keys: int) -> tuple[Array, Array | None]:
        """Returns which tree keys each row sees [M keys], and the rows' depths [M 1].

        Args:
          words: ancestor words [tile W].
        """
        column = jax.lax.broadcasted_iota(jnp.int32, (words.shape[0], keys), 1)
        bit, word = column & 31, column >> 5
        found, depth = jnp.zeros(column.shape, jnp.int32), None
        for w in range(words.shape[1]):
            found = jnp.where(word == w, words[:, w : w + 1], found)
        found = jax.lax.shift_right_logical(found, bit)
        seen = found & 1
        if self.window is not None:
            # Ancestors are numbered along their path: an ancestor's distance is the number of
            # set bits from its own on, less one.
            nearer, depth = jax.lax.population_count(found), -1
            for w in range(words.shape[1]):
                count = jax.lax.population_count(words[:, w : w + 1])
                nearer = nearer + jnp.where(word < w, count, 0)
                depth = depth + count
            seen = jnp.where(nearer <= self.window, seen, 0)
            depth = jnp.concatenate([depth] * self.group)
        return jnp.concatenate([seen] * self.group) != 0, depth

    def _known(self, first, length, depth, partly: bool) -> Array | None:
        """Returns the mask of a part's keys, [1 S] or with a window [M S]; None: all are seen."""
        if not partly and self.window is None:
            return None
        at = first + jax.lax.broadcasted_iota(jnp.int32, (1, self.blocks.part), 1)
        known = at < length
        return known if self.window is None else known & (at > length + depth - self.window)

    def _sink(self, sinks, head: int, shape: tuple[int, int]) -> Array:
        """Returns the sink of each row [M 1] of a key/value head."""
        row = jax.lax.broadcasted_iota(jnp.int32, shape, 0)
        column = jnp.full(shape, sinks[head * self.group], jnp.float32)
        for i in range(1, self.group):
            column = jnp.where(row >= i * self.tile, sinks[head * self.group + i], column)
        return column


@dataclasses.dataclass(frozen=True)
class Copies:
    """Asynchronous copies of blocks of a prefix from pages into two buffers."""

    blocks: Blocks
    table: jax.Ref
    pages: tuple[jax.Ref, jax.Ref]
    buffers: tuple[jax.Ref, jax.Ref]
    arrived: jax.Ref

    def start(self, slot, first, length, buffer) -> None:
        """Starts copying a block, whose first position is `first`, up to the slot's length."""

        @pl.loop(0, self._pieces(first, length))
        def _(i):
            for copy in self._copies(slot, first, i, buffer):
                copy.start()

    def wait(self, slot, first, length, buffer) -> None:
        """Waits until a block has arrived."""
        pieces, full = self._pieces(first, length), self.blocks.per_part * self.blocks.parts

        @pl.when(pieces == full)
        def _():  # a semaphore counts bytes: one wait does for all pieces
            for which, into in enumerate(self.buffers):
                whole = into.at[buffer]
                pltpu.make_async_copy(whole, whole, self.arrived.at[buffer, which]).wait()

        @pl.when(pieces < full)
        def _():
            @pl.loop(0, pieces)
            def _(i):
                for copy in self._copies(slot, first, i, buffer):
                    copy.wait()

    def _pieces(self, first, length):
        """Returns the number of pieces of a block that have positions."""
        pieces = jax.lax.div(length - first + self.blocks.piece - 1, self.blocks.piece)
        return jnp.minimum(pieces, self.blocks.per_part * self.blocks.parts)

    def _copies(self, slot, first, i, buffer):
        """Yields the copies of piece `i` of a block, of keys and of values."""
        piece = jax.lax.div(first, self.blocks.piece) + i
        page = self.table[slot, jax.lax.div(piece, self.blocks.per_page)]
        inside = jax.lax.rem(piece, self.blocks.per_page) * self.blocks.piece
        inside = pl.ds(pl.multiple_of(inside, self.blocks.piece), self.blocks.piece)
        place = pl.multiple_of(i * self.blocks.piece, self.blocks.piece)
        place = pl.ds(place, self.blocks.piece)
        for which, (pages, into) in enumerate(zip(self.pages, self.buffers, strict=True)):
            yield pltpu.make_async_copy(
                pages.at[page, :, inside],
                into.at[buffer, :, place],
                self.arrived.at[buffer, which],
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

    def add(self, scores: list[Float[Array, "M S"]], values: list[Float[Array, "S H"]]) -> None:
        """Adds S more keys of all heads, head beside head: one's products hide another's waits."""
        for_all = enumerate(zip(scores, values, strict=True))
        new = [self.of(head).add(x, functools.partial(_weigh, v)) for head, (x, v) in for_all]
        for head, found in enumerate(new):
            self.peak[head] = jnp.broadcast_to(found.peak, self.peak.shape[1:])
            self.total[head] = jnp.broadcast_to(found.total, self.total.shape[1:])
            self.acc[head] = found.out


def _weigh(values, weights):
    weights = weights.astype(values.dtype)
    if values.shape[0] == 1:  # Mosaic has no product with one row
        return weights.astype(jnp.float32) * values.astype(jnp.float32)
    return dot(weights, values)


def _scores(q, keys):
    if keys.shape[0] == 1:  # plain decoding's own key; Mosaic has no product with one column
        found = (q.astype(jnp.float32) * keys.astype(jnp.float32)).sum(-1, keepdims=True)
    else:
        found = by_rows(q, keys)
    return found * q.shape[-1] ** -0.5


# --- backends -------------------------------------------------------------------------------------


def _refuses(operation: str, device: Device | None, cfg: ModelConfig) -> str | None:
    if device is not None and device.platform != "tpu":
        return f"it is compiled for TPUs, and the device is {device.platform!r}"
    splash = operation == "causal_attention"  # which fills lanes up
    if odd := [size for size in head_sizes(cfg) if size % LANES and not splash]:
        return f"head_dim must be a multiple of {LANES}, got {odd[0]}"
    return None


CONTEXT_ATTENTION = functools.partial(context_parallel.attention, local=flash.local(flash.Tiles()))


def kernels(tuning: Tuning, chips: str, *kinds: str) -> Backend:
    """Makes the backend of a generation of TPUs, or one with a tuning of your own.

    Args:
      chips: name of the generation, for the line that is logged at start.
      kinds: device kinds, as jax names them, for which `auto` chooses it.
    """
    return Backend(
        operations={
            "tree_attention": functools.partial(tree_attention, tuning=tuning),
            "causal_attention": library.splash_attention,
            "context_attention": CONTEXT_ATTENTION,
            "experts": experts_tpu.experts,
        },
        takes={name: ("window", "sinks") for name in ("causal_attention", "context_attention")}
        | {"tree_attention": library.TAKES["tree_attention"]},
        refuses=_refuses,
        line=f"Pallas tree attention for {chips}, splash attention in training",
        kinds=kinds,
    )


V5E = kernels(TUNING["v5e"], "v5e", "TPU v5 lite", "TPU v5e")
V5P = kernels(TUNING["v5p"], "v5p", "TPU v5", "TPU v5p")
V6E = kernels(TUNING["v6e"], "v6e", "TPU v6 lite", "TPU v6e")
