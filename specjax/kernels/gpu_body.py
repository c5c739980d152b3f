"""The body of the GPU kernel: one program, its copies from pages, and its running softmax.

What does no copying and no product (shares, masks, softmax) is in functions that a test runs with
plain arrays as well.
"""

from __future__ import annotations

import dataclasses
import inspect
import math

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from specjax.kernels.reference import NEG_INF

ROWS = 64  # of a WGMMA tile
KEYS = 64  # of a tree, at most
WORDS = KEYS // 32
LOG2E = math.log2(math.e)
# `plgpu.load` of jax 0.10 requires an index beside the reference; later versions refuse one.
_IDX = inspect.signature(plgpu.load).parameters.get("idx")
_NO_INDEX = ((),) if _IDX is not None and _IDX.default is _IDX.empty else ()


@dataclasses.dataclass(frozen=True)
class Shape:
    """What is static about a call.

    Attributes:
      tiles: of 64 rows per key/value head. warpgroups: that compute, a tile each.
      head: size. block, stages: see `Tuning`. per_page: blocks of a page.
      splits: programs that share a prefix. window: see `reference.tree_attention`.
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
        """Per key/value head."""
        return self.tiles // self.warpgroups


# --- arithmetic that the kernel and its emulation in tests share ----------------------------------


def share(shape: Shape, length, split):
    """(first block, how many) of a prefix that a split attends to."""
    count = jax.lax.div(length + (shape.block - 1), shape.block)
    first = 0
    if shape.window is not None:  # what the root does not see, no row sees
        first = jax.lax.div(jnp.maximum(length - shape.window + 1, 0), shape.block)
    each = jax.lax.div(count - first + (shape.splits - 1), shape.splits)
    begin = first + split * each
    return begin, jnp.maximum(jnp.minimum(each, count - begin), 0)


def tree_seen(low, high, column, split):
    """Which tree keys rows see, from their two words; nobody's but the first split's."""
    word = jnp.where(column < 32, low, high)
    bit = jax.lax.shift_right_logical(word, column & 31)
    return (bit & jnp.where(split == 0, 1, 0)) != 0


def prefix_seen(shape: Shape, at, length, depth):
    """Which positions rows see; `depth` is not looked at without a window."""
    seen = at < length
    if shape.window is not None:
        seen = seen & (at > depth + (length - shape.window))
    return seen


def absorb(running, scores, seen, spread, weigh):
    """A running softmax (peak in units of log 2, sum, weighted values) with more keys.

    Args:
      spread: a number per row to all of a row's. weigh: adds the values by their weights.
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
    """One split of one slot, for one or two tiles of a key/value head."""
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
    """The warpgroup that copies: the tree, then the blocks, each as a stage becomes free."""
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
    """A warpgroup that computes: its tile against the tree and the split's blocks."""
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
