"""What a model keeps of each sequence: pages of keys and values, and slots of recurrent state.

There is a pool of pages of `page_size` positions, and a sequence's *table* lists its pages in the
order of its positions. Without a table (None) sequence b has page b to itself: a contiguous cache.
Page 0 of a pool with tables belongs to no sequence: rows for positions without a page are dropped.

Slots have a fixed size and stand in the order of the batch. Samples of one prompt share its full
pages, which are not written any more; each gets a copy of the prompt's last page (`copy_pages`) and
of the slot that the prompt left (`take_slots`, `put_slots`).

A forward pass reads the memory and returns what its rows would add as scratch; `commit` writes the
accepted rows to consecutive positions of the pages and advances slots over them, by
`Mixer.advance`. Rows past the accepted ones may be written as well: they lie at or after the next
root, and later commits write over them before any prefix reaches so far.

The memory of a model has an entry per layer. Where layers are scanned it has one per layer of the
repeating pattern. Repetition i of it is `pages[i]`, the first axis, and `slots[:, i]`, the second
axis: sequences are the first axis of slots.

Dimensions: B sequences, T rows of a forward pass, A rows of an accepted path, R rows in general,
L layers, K key and value heads, H head size, P pages of a pool, D width.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from specjax.config import ModelConfig
from specjax.config.stacks import Stack, stacks
from specjax.indexing import expanded, put, put_slice, take, take_along, take_slice
from specjax.interfaces import Cost, Memory, Room, Scratch, Table
from specjax.kernels import dispatch


class KVCache(NamedTuple):
    """Keys and values, head-major, in pages of `page_size` positions each.

    Attributes:
      k: keys, `[P K page_size H]` of one layer, `[L P K page_size H]` of layers that are scanned.
      v: values, in arrays of the same shape.
    """

    k: Array
    v: Array

    AXES = dict.fromkeys("kv", ("heads", None, None))  # by which a mesh splits them


# --- of a whole model -----------------------------------------------------------------------------


def empty(cfg: ModelConfig, room: Room) -> Memory:
    """Makes the memory of a model, as it is before the first token of every sequence."""

    def stacked(stack: Stack) -> Memory:
        one, repeats = stack.layer.mixer.empty(cfg.run, room), len(stack.numbers)
        return Memory(
            jax.tree.map(lambda a: jnp.broadcast_to(a, (repeats, *a.shape)), one.pages),
            jax.tree.map(lambda a: jnp.repeat(a[:, None], repeats, axis=1), one.slots),
        )

    layers = (layer.mixer.empty(cfg.run, room) for layer in cfg.layers)
    if cfg.run.scan_layers:
        layers = map(stacked, stacks(cfg.layers))
    return Memory(*zip(*layers, strict=True))


def empty_slots(cfg: ModelConfig, count: int) -> tuple:
    """Makes the slots of `count` sequences before their first token."""
    return empty(cfg, Room(slots=count, pages=0, page_size=1)).slots


def cost(cfg: ModelConfig, page_size: int) -> Cost:
    """Computes the bytes of a page and of a slot of a model's memory."""
    one = jax.eval_shape(lambda: empty(cfg, Room(slots=1, pages=1, page_size=page_size)))
    return Cost(*map(bytes_of, one))


def keeps_state(cfg: ModelConfig) -> bool:
    """Returns whether any layer of a model keeps recurrent state."""
    return cost(cfg, 1).slot > 0


def bytes_of(tree: Any) -> int:
    """Adds up the bytes of all arrays of a tree, or of their shapes."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


class Commit(NamedTuple):
    """The places that accepted rows are written to.

    Attributes:
      start: position of the first row of each sequence.
      table: the pages of each sequence.
      after: numbers >= 0 that make the write wait, see `commit_rows`.
    """

    start: Int[Array, " B"]
    table: Table = None
    after: Int[Array, " B"] | None = None


@jax.named_scope("commit")
def commit(
    cfg: ModelConfig,
    memory: Memory,
    scratch: tuple[Scratch, ...],
    path: Int[Array, "B A"] | None,
    count: Int[Array, " B"],
    to: Commit,
) -> Memory:
    """Writes an accepted path to a model's memory.

    All A rows of the path are written to pages, in one operation for all layers; slots are advanced
    over the first `count` rows.

    Args:
      scratch: rows of the forward pass, by layer.
      path: numbers of the rows that are written, in order; None: all rows of the scratch.
      count: number of accepted rows; 0 where a sequence does not run.
      to: where the rows are written.
    """
    rows, inputs = (tuple(part) for part in zip(*scratch, strict=True))
    mixers = [layer.mixer for layer in cfg.layers]
    if cfg.run.scan_layers:
        mixers = [stack.layer.mixer for stack in stacks(cfg.layers)]
    if path is not None:
        rows = take_rows(rows, path)
        inputs = jax.tree.map(lambda x: _along(x, path, 2 if cfg.run.scan_layers else 1), inputs)
    pages = memory.pages
    if jax.tree.leaves(pages):
        pages = commit_rows(pages, rows, to.start, to.after, to.table, kernel=cfg.run.attention)

    def advance(mixer, slots, inputs):
        if not jax.tree.leaves(slots):
            return slots
        if not cfg.run.scan_layers:
            return mixer.advance(slots, inputs, count)
        return jax.vmap(mixer.advance, in_axes=(1, 0, None), out_axes=1)(slots, inputs, count)

    return Memory(pages, tuple(map(advance, mixers, memory.slots, inputs)))


def _along(x: Array, path: Int[Array, "B A"], axis: int) -> Array:
    """Picks the rows of a path along an axis: [.. B T ..] -> [.. B A ..]."""
    lead, rest = (None,) * (axis - 1), (None,) * (x.ndim - axis - 1)
    return take_along(x, path[(*lead, ..., *rest)], axis=axis)


def append_rows(
    buffers: tuple[Array, Array], held: int, rows: tuple[Array, Array]
) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
    """Writes rows [B K R H] into preallocated buffers behind the first `held` rows.

    Returns:
      the buffers, and their filled part [B K held + R H].
    """
    filled = [
        jax.lax.dynamic_update_slice_in_dim(buffer, new.astype(buffer.dtype), held, axis=2)
        for buffer, new in zip(buffers, rows, strict=True)
    ]
    end = held + rows[0].shape[2]
    return tuple(filled), tuple(buffer[:, :, :end] for buffer in filled)


def take_slots(slots: Any, index: Int[Array, " some"]) -> Any:
    """Takes the slots of some sequences, by their index."""
    return jax.tree.map(lambda x: take(x, index), slots)


def put_slots(slots: Any, index: Int[Array, " some"], new: Any) -> Any:
    """Writes back slots that `take_slots` took."""
    return jax.tree.map(lambda x, y: put(x, index, y.astype(x.dtype)), slots, new)


def choose_slots(first: Bool[Array, " some"], slots: Any, others: Any) -> Any:
    """Chooses `slots` where `first` is set, and `others` elsewhere."""
    return jax.tree.map(lambda x, y: jnp.where(expanded(first, x), x, y), slots, others)


# --- pages ----------------------------------------------------------------------------------------


def take_rows(rows: Any, index: Int[Array, "B R"]) -> Any:
    """Picks tree rows `index` of each sequence, in that order: [.. B K T H] -> [.. B K R H]."""

    def pick(x):
        picks = index[:, None, :, None]
        return take_along(x, picks[None] if x.ndim == 5 else picks, axis=-2)

    return jax.tree.map(pick, rows)


def with_marked_keys(
    k: Float[Array, "*B K T H"], v: Float[Array, "*B K T H"]
) -> tuple[Float[Array, "*B K T H"], Float[Array, "*B K T H"]]:
    """Sets the key of a row that is not finite to NaN, and its value to 0.

    Attention leaves out the scores of rows that may not be seen, but multiplies their values by
    zero, and zero times NaN is NaN. So a row without finite numbers, drafted or left in a page by
    an earlier sequence, does not change rows that do not see it, and rows that do get NaN.
    """
    finite = (jnp.isfinite(k) & jnp.isfinite(v)).all(-1, keepdims=True)
    return jnp.where(finite, k, jnp.nan), jnp.where(finite, v, 0)


def take_path(x: Array, path: Int[Array, "B A"]) -> Array:
    """Picks tree rows `path` of states, logits or the like: [B T ..] -> [B A ..]."""
    return _along(x, path, 1)


def after_of(x: Float[Array, "B T D"]) -> Int[Array, " B"]:
    """Computes numbers >= 0 that depend on x, for `after` of `commit_rows`."""
    return (x[:, 0] > 0).sum(axis=-1)


@jax.named_scope("commit")
def commit_rows(
    cache: KVCache,
    rows: KVCache,
    start: Int[Array, " B"],
    after: Int[Array, " B"] | None = None,
    table: Table = None,
    kernel: str = "reference",
) -> KVCache:
    """Writes R consecutive rows of each sequence from position `start[b]` on.

    Tables must have R positions from every start on, or rows are dropped: the engine's tables are
    that much longer than the longest sequence.

    Args:
      cache: the pages.
      rows: the rows [.. B K R H], in a tree of the same structure.
      start: position of the first row of each sequence.
      after: any numbers >= 0 that depend on everything that reads the cache, so that XLA writes
        after those reads; their values are not used. Without them XLA may order the write of a
        layer's rows before its attention, and then copies every array twice per round.
      table: the pages of each sequence.
      kernel: name of the backend that writes, see `specjax.kernels.dispatch.commit`.
    """
    if after is not None:
        start = start + jnp.minimum(after, 0)
    arrays, structure = jax.tree.flatten(cache)
    new, written = jax.tree.leaves(rows), list(arrays)
    for alike in dict.fromkeys(x.shape[-4:] for x in arrays):  # an operation takes one shape
        which = [i for i, x in enumerate(arrays) if x.shape[-4:] == alike]
        of_them = [arrays[i] for i in which], [new[i] for i in which]
        out = dispatch.commit(*of_them, start, table, kernel=kernel)
        for i, array in zip(which, out, strict=True):
            written[i] = array
    return jax.tree.unflatten(structure, written)


def copy_pages(
    cache: KVCache, source: Int[Array, " copies"], target: Int[Array, " copies"]
) -> KVCache:
    """Copies page source[i] to page target[i], one after the other."""

    def copy(m, arrays):
        out = []
        for array in arrays:
            axis = array.ndim - 4
            lead, rest = (0,) * axis, (0,) * 3
            sizes = (*array.shape[:axis], 1, *array.shape[axis + 1 :])
            page = take_slice(array, (*lead, source[m], *rest), sizes)
            out.append(put_slice(array, page, (*lead, target[m], *rest)))
        return out

    flat, structure = jax.tree.flatten(cache)
    return jax.tree.unflatten(structure, jax.lax.fori_loop(0, source.shape[0], copy, flat))
