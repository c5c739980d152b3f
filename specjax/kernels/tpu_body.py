"""The body of the TPU kernel: one program, its copies from pages, and its running softmax."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from specjax.kernels.reference import NEG_INF, Running

SUBLANES = 16  # of a register of bfloat16; float32 needs 8


@dataclasses.dataclass(frozen=True)
class Blocks:
    """How a prefix is cut.

    Attributes:
      piece: positions of one copy, which lie in one page. pieces: of a block. per_page: pieces of
        a page.
    """

    piece: int
    pieces: int
    per_page: int

    @property
    def positions(self) -> int:
        return self.piece * self.pieces

    @classmethod
    def of(cls, page_size: int, longest: int, positions: int) -> Blocks:
        """Blocks of about so many positions, and no more than the longest prefix has.

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


@dataclasses.dataclass(frozen=True)
class Kernel:
    """The kernel's body; called with refs by `pallas_call`.

    Numbers are divided by `jax.lax`, whose operands are never negative here: `//` asks for signs.
    """

    blocks: Blocks
    tiles: int
    window: int | None
    has_sinks: bool
    with_lse: bool

    def __call__(self, lens, table, plan, q, words, k_tree, v_tree, *refs):
        """One program. Further refs: [sinks], pages of keys and values, outputs, then scratch."""
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
                # What a buffer held before may be anything, and nothing times NaN is NaN.
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
        """Starts the next block: this program's, or behind its last one the first of another."""
        me, programs = program
        follower = plan[3, me + 1]

        @pl.when(jnp.logical_not(is_last))
        def _():
            copies.start(me, block + 1, buffer)

        @pl.when(is_last & (follower < programs))
        def _():
            copies.start(follower, plan[0, jnp.minimum(follower, programs - 1)], buffer)

    def _positions(self, block, shape: tuple[int, int], axis: int) -> Array:
        """Absolute positions of a block's keys, along one axis."""
        return block * self.blocks.positions + jax.lax.broadcasted_iota(jnp.int32, shape, axis)

    def _known(self, block, length, words) -> Array:
        """Which keys of a block the rows see: [1 S], or [M S] with a window."""
        at = self._positions(block, (1, self.blocks.positions), 1)
        known = at < length
        if self.window is not None:
            depth = words[0][:, words.shape[2] - 1 :]
            known = known & (at > length + depth - self.window)
        return known


@dataclasses.dataclass(frozen=True)
class Copies:
    """Blocks of a prefix on their way from pages into one of two buffers."""

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
        """(condition, copy) of every piece of a block that holds something of the prefix."""
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
    """Every head's `Running` in scratch; what is one number of a row fills a register's lanes."""

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
    """A product in float32; float32 inputs are not rounded to bfloat16 on the way."""
    exact = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jax.lax.dot_general(
        a, b, (contract, ((), ())), precision=exact, preferred_element_type=jnp.float32
    )


def _scores(q, keys):
    return _dot(q, keys, ((1,), (1,))) * q.shape[-1] ** -0.5


def _bits(words, keys: int):
    """Booleans [M keys] of ancestor words [M W + 1]; the last column is no word."""
    column = jax.lax.broadcasted_iota(jnp.int32, (words.shape[0], keys), 1)
    word = jnp.zeros(column.shape, jnp.int32)
    for w in range(words.shape[1] - 1):
        word = jnp.where(column >> 5 == w, words[:, w : w + 1], word)
    return (jax.lax.shift_right_logical(word, column & 31) & 1) != 0
