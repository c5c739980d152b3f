"""Tree attention for TPUs, in Pallas: a paged prefix without a mask, a tree with an ancestor mask.

One program per slot, one after the other. Its queries, the tree rows of all heads that share a
key/value head, lie side by side as the rows of one matrix. They attend to the tree's own keys
first, under the ancestor bits, and then to the prefix, a block of positions at a time, with the
running maximum and sum of Milakov and Gimelshein 2018 (arXiv 1805.02867). Blocks come by
asynchronous copies into two buffers: while one is worked on the next is on its way, and behind a
slot's last block the first of the next slot that has any. Block tables and lengths are scalars in
SMEM; of a prefix only what its queries see is read from HBM.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int, UInt32

from specjax.cache import Table
from specjax.kernels.reference import (
    NEG_INF,
    add_sink,
    pack_heads,
    sink_of_rows,
    tree_depth,
    within_window,
)

LANES, SUBLANES = 128, 16  # of a register of bfloat16; float32 needs 8
# Positions of a prefix that are copied at once: a copy should take longer than what surrounds it,
# and two buffers of keys and of values must fit beside the queries.
DEFAULT_POSITIONS = 512


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


@functools.partial(
    jax.jit, static_argnames=("window", "with_lse", "positions", "interpret"), inline=True
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
    positions: int = DEFAULT_POSITIONS,
    interpret: bool = False,
):
    """`specjax.kernels.reference.tree_attention` as one kernel; float32 accumulation.

    Args:
      positions: of a block of the prefix. interpret: run on CPU, for tests.

    Raises:
      ValueError: a page cannot be cut into pieces.
    """
    b, n, t, h = q.shape
    kv_heads, size = k_pages.shape[1:3]
    if table is None:
        table = jnp.arange(b, dtype=jnp.int32)[:, None]
    blocks = Blocks.of(size, size * table.shape[1], positions)
    rows = _pad(pack_heads(q, kv_heads), SUBLANES)
    words = jnp.broadcast_to(visible_bits, (b, *visible_bits.shape[-2:]))
    depth = tree_depth(words)
    if window is not None:
        words = within_window(words, window)
    words = jax.lax.bitcast_convert_type(jnp.asarray(words, jnp.uint32), jnp.int32)
    words = jnp.concatenate([words, depth[..., None]], axis=-1)
    words = _pad(jnp.tile(words, (1, n // kv_heads, 1)), SUBLANES)
    inputs = [rows, _pad(k_tree, SUBLANES), _pad(v_tree, SUBLANES), words]
    if sinks is not None:
        per_row = _pad(sink_of_rows(sinks, kv_heads, t), SUBLANES)
        inputs.append(jnp.broadcast_to(per_row, (*rows.shape[1:3], LANES)))
    found = _call(
        inputs, (k_pages, v_pages), prefix_len.astype(jnp.int32), table.astype(jnp.int32),
        blocks, window, sinks is not None, with_lse, interpret,
    )  # fmt: skip
    used = n // kv_heads * t
    out = found[0][:, :, :used].reshape(b, n, t, h)
    return (out, found[1][:, :, :used, 0].reshape(b, n, t)) if with_lse else out


def _pad(x: Array, multiple: int) -> Array:
    """Zeros behind the second to last axis up to a multiple."""
    missing = -x.shape[-2] % multiple
    return x if not missing else jnp.pad(x, [(0, 0)] * (x.ndim - 2) + [(0, missing), (0, 0)])


def _schedule(prefix_len: Int[Array, " B"], blocks: Blocks, window: int | None) -> Array:
    """What the programs of all slots must know of each other: int32 [4, B + 1].

    Rows: a slot's first block, how many it has, the buffer of its first one, and the next slot that
    has any (B: none). Column 0 of the last row is the first slot that has any.
    """
    batch = prefix_len.shape[0]
    first = jnp.zeros_like(prefix_len)
    if window is not None:  # what the root does not see, no row sees
        first = jnp.maximum(prefix_len - window + 1, 0) // blocks.positions
    count = jnp.maximum(-(-prefix_len // blocks.positions) - first, 0)
    before = jnp.cumsum(count) - count
    slots = jnp.where(count > 0, jnp.arange(batch), batch)
    later = jax.lax.cummin(slots, reverse=True)
    nothing = jnp.zeros(1, jnp.int32)
    columns = [(first, nothing), (count, nothing), (before % 2, nothing)]
    rows = [jnp.concatenate(c) for c in columns]
    rows.append(jnp.concatenate([later, jnp.full(1, batch)]))
    return jnp.stack(rows).astype(jnp.int32)


def _call(inputs, pages, prefix_len, table, blocks, window, has_sinks, with_lse, interpret):
    """The kernel on prepared inputs: [output [B K M H], and log-sum-exp [B K M LANES]]."""
    rows = inputs[0]
    b, kv_heads, m, h = rows.shape
    scalars = (prefix_len, table, _schedule(prefix_len, blocks, window))

    def per_slot(x):
        return pl.BlockSpec((1, *x.shape[1:]), lambda i, *_: (i,) + (0,) * (x.ndim - 1))

    in_specs = [per_slot(x) for x in inputs[:4]]
    if has_sinks:
        in_specs.append(pl.BlockSpec(inputs[4].shape, lambda i, *_: (0, 0, 0)))
    out_shape = [jax.ShapeDtypeStruct(rows.shape, rows.dtype)]
    if with_lse:
        out_shape.append(jax.ShapeDtypeStruct((b, kv_heads, m, LANES), jnp.float32))
    buffer = pltpu.VMEM((2, kv_heads, blocks.positions, h), pages[0].dtype)
    kernel = functools.partial(
        _kernel, blocks=blocks, window=window, has_sinks=has_sinks, with_lse=with_lse
    )
    return pl.pallas_call(
        kernel,
        out_shape=out_shape,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(b,),
            in_specs=[*in_specs, *[pl.BlockSpec(memory_space=pl.ANY)] * 2],
            out_specs=[per_slot(x) for x in out_shape],
            scratch_shapes=[
                buffer,
                buffer,
                pltpu.SemaphoreType.DMA((2, 2)),
                pltpu.VMEM((kv_heads, m, LANES), jnp.float32),
                pltpu.VMEM((kv_heads, m, LANES), jnp.float32),
                pltpu.VMEM((kv_heads, m, h), jnp.float32),
            ],
        ),
        # In order: a slot finds its first block where the one before has sent it.
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",)),
        interpret=pltpu.InterpretParams() if interpret else False,
        name="tree_attention",
    )(*scalars, *inputs, *pages)


def _kernel(
    lens, table, plan, q, k_tree, v_tree, words, *refs, blocks, window, has_sinks, with_lse
):
    """One slot. Refs: [sinks], pages of keys and values, outputs, then scratch.

    Numbers are divided by `jax.lax`, whose operands are never negative here: `//` asks for signs.
    """
    refs = list(refs)
    sinks = refs.pop(0) if has_sinks else None
    k_pages, v_pages, out = refs[:3]
    lse = refs[3] if with_lse else None
    k_buffer, v_buffer, arrived, peak, total, acc = refs[3 + with_lse :]
    slot, slots = pl.program_id(0), pl.num_programs(0)
    kv_heads = q.shape[1]
    first, count, parity = plan[0, slot], plan[1, slot], plan[2, slot]

    def copies(of_slot, block, buffer):
        """(condition, copy) of every piece of a block that holds something of the prefix."""
        length = lens[of_slot]
        for i in range(blocks.pieces):
            piece = block * blocks.pieces + i
            here = piece * blocks.piece < length
            page = table[of_slot, jnp.where(here, jax.lax.div(piece, blocks.per_page), 0)]
            start = jax.lax.rem(piece, blocks.per_page) * blocks.piece
            start = pl.multiple_of(start, blocks.piece)
            place = pl.ds(i * blocks.piece, blocks.piece)
            for which, (pages, into) in enumerate(((k_pages, k_buffer), (v_pages, v_buffer))):
                yield (
                    here,
                    pltpu.make_async_copy(
                        pages.at[page, :, pl.ds(start, blocks.piece)],
                        into.at[buffer, :, place],
                        arrived.at[buffer, which],
                    ),
                )

    def each(of_slot, block, buffer, act):
        for here, copy in copies(of_slot, block, buffer):
            pl.when(here)(functools.partial(act, copy))

    def send(of_slot, block, buffer):
        each(of_slot, block, buffer, lambda copy: copy.start())

    @pl.when((slot == plan[3, 0]) & (count > 0))
    def _():
        send(slot, first, parity)

    def attend(head, scores, values):
        """Takes in keys: their scores [M S] and values [S H]."""
        before = peak[head][:, :1]
        higher = jnp.maximum(before, scores.max(-1, keepdims=True))
        shrink, weights = jnp.exp(before - higher), jnp.exp(scores - higher)
        sums = total[head][:, :1] * shrink + weights.sum(-1, keepdims=True)
        peak[head] = jnp.broadcast_to(higher, peak.shape[1:])
        total[head] = jnp.broadcast_to(sums, total.shape[1:])
        acc[head] = acc[head] * shrink + _dot(weights.astype(values.dtype), values)

    peak[...] = jnp.full(peak.shape, NEG_INF, jnp.float32)
    total[...] = jnp.zeros(total.shape, jnp.float32)
    acc[...] = jnp.zeros(acc.shape, jnp.float32)
    seen = _bits(words[0], k_tree.shape[2])
    for head in range(kv_heads):
        scores = _scores(q[0, head], k_tree[0, head])
        attend(head, jnp.where(seen, scores, NEG_INF), v_tree[0, head])

    def one_block(i, _):
        block, buffer = first + i, (parity + i) & 1
        follower = plan[3, slot + 1]

        @pl.when(i + 1 < count)
        def _():
            send(slot, block + 1, 1 - buffer)

        @pl.when((i + 1 == count) & (follower < slots))
        def _():
            send(follower, plan[0, jnp.minimum(follower, slots - 1)], 1 - buffer)

        each(slot, block, buffer, lambda copy: copy.wait())
        at = block * blocks.positions + jax.lax.broadcasted_iota(
            jnp.int32, (1, blocks.positions), 1
        )
        known = at < lens[slot]
        if window is not None:
            depth = words[0][:, words.shape[2] - 1 :]
            known = known & (at > lens[slot] + depth - window)
        row = block * blocks.positions + jax.lax.broadcasted_iota(
            jnp.int32, (blocks.positions, 1), 0
        )
        for head in range(kv_heads):
            scores = jnp.where(known, _scores(q[0, head], k_buffer[buffer, head]), NEG_INF)
            # What a buffer held before may be anything, and nothing times NaN is NaN.
            values = jnp.where(row < lens[slot], v_buffer[buffer, head], 0)
            attend(head, scores, values)
        return 0

    jax.lax.fori_loop(0, count, one_block, 0)
    for head in range(kv_heads):
        high, sums, sizes = peak[head][:, :1], total[head][:, :1], acc[head]
        if has_sinks:
            high, sums, sizes = add_sink(high, sums, sizes, sinks[head][:, :1])
        out[0, head] = (sizes / sums).astype(out.dtype)
        if with_lse:
            lse[0, head] = jnp.broadcast_to(high + jnp.log(sums), lse.shape[2:])


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
