"""Every operation in plain XLA; kernels are tested against it.

Everything is head-major (`B K S H`): batched products with the head axis beside the batch run 6 to
12 times faster on CPU. The queries of one key/value head are packed into rows, so that grouped
heads repeat no keys.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt32

from specjax.indexing import divide, take, take_slice
from specjax.interfaces import Table

NEG_INF = -1e30
PANEL_WIDTH = 16  # columns of a panel, see `product`
BLOCK = 128  # cache slots per step of the loop over a prefix


def unpack_bits(words: UInt32[Array, "*B T W"], rows: int) -> jnp.ndarray:
    """Unpacks ancestor words to booleans [.. T rows]: [t, j] is set iff row t may see row j."""
    words = jnp.asarray(words)
    bits = (words[..., None] >> np.arange(32, dtype=np.uint32)) & 1
    return bits.reshape(*words.shape[:-1], -1)[..., :rows].astype(bool)


def pack_bits(visible: Bool[Array, "*B T R"]) -> UInt32[Array, "*B T W"]:
    """Packs booleans to ancestor words: bit j % 32 of word j // 32 is column j.

    Words of numpy's booleans are numpy's.
    """
    xp = np if isinstance(visible, np.ndarray) else jnp
    room = [(0, 0)] * (visible.ndim - 1) + [(0, -visible.shape[-1] % 32)]
    bits = xp.pad(visible, room).reshape(*visible.shape[:-1], -1, 32).astype(xp.uint32)
    return (bits << xp.arange(32, dtype=xp.uint32)).sum(-1, dtype=xp.uint32)


def tree_depth(words: UInt32[Array, "*B T W"]) -> Int[Array, "*B T"]:
    """Returns the depth of each row: the number of its ancestors, itself excluded."""
    return jax.lax.population_count(words).astype(jnp.int32).sum(-1) - 1


def within_window(words: UInt32[Array, "*B T W"], window: int) -> UInt32[Array, "*B T W"]:
    """Clears from ancestor words the ancestors that are `window` or more positions above the row.

    Ancestors are numbered along their path, so an ancestor's distance is the number of set bits
    after it.
    """
    bits = unpack_bits(words, 32 * words.shape[-1])
    nearer = jnp.cumsum(bits[..., ::-1], axis=-1)[..., ::-1]  # itself included
    return pack_bits(bits & (nearer <= window))


def contiguous(pages: Float[Array, "P K S H"], table: Table) -> Float[Array, "B K X*S H"]:
    """Gathers the pages of one layer, so that every sequence's positions are contiguous."""
    if table is None:
        return pages
    b, stretches = table.shape
    _, kv_heads, size, width = pages.shape
    gathered = jnp.moveaxis(take(pages, table), 1, 2)
    return gathered.reshape(b, kv_heads, stretches * size, width)


def pack_heads(q: Float[Array, "B N T H"], num_kv_heads: int) -> Float[Array, "B K M H"]:
    """Packs queries that share a key/value head into M = N/K * T rows, row = group * T + t."""
    b, n, t, h = q.shape
    return q.reshape(b, num_kv_heads, n // num_kv_heads * t, h)


def sink_of_rows(sinks: Float[Array, " N"], kv_heads: int, rows: int) -> Float[Array, "K M 1"]:
    """Repeats each head's sink for its rows, in the order of `pack_heads`."""
    per_head = sinks.astype(jnp.float32).reshape(kv_heads, -1)
    return jnp.repeat(per_head, rows, axis=1)[..., None]


def with_sink(
    out: Float[Array, "*B M H"], lse: Float[Array, "*B M"], sink: Float[Array, "*B M"]
) -> tuple[Array, Array]:
    """Adds a sink, a logit without a value, to finished attention and its log-sum-exp."""
    total = jnp.logaddexp(lse, sink)
    return out * jnp.exp(lse - total)[..., None], total


def capped(scores: Array, soft_cap: float | None) -> Array:
    """Returns scores within +- `soft_cap`, by a tanh (Gemma 2, arXiv 2408.00118); None: as are."""
    return scores if soft_cap is None else soft_cap * jnp.tanh(scores / soft_cap)


class Running(NamedTuple):
    """An online softmax, computed block by block (Milakov and Gimelshein 2018, arXiv 1805.02867).

    Attributes:
      peak: highest score so far [.. M 1].
      total: sum of exp(score - peak) [.. M 1].
      out: values weighted by exp(score - peak) [.. M H].
    """

    peak: Array
    total: Array
    out: Array

    def add(self, scores: Float[Array, "*B M S"], weigh: Callable[[Array], Array]) -> Running:
        """Adds S more keys, masked ones at NEG_INF; `weigh` sums their values by weights [M S]."""
        higher = jnp.maximum(self.peak, scores.max(-1, keepdims=True))
        shrink, weights = jnp.exp(self.peak - higher), jnp.exp(scores - higher)
        total = self.total * shrink + weights.sum(-1, keepdims=True)
        return Running(higher, total, self.out * shrink + weigh(weights))

    def add_sink(self, sink: Array) -> Running:
        """Adds one more logit, which has no value."""
        higher = jnp.maximum(self.peak, sink)
        shrink = jnp.exp(self.peak - higher)
        return Running(higher, self.total * shrink + jnp.exp(sink - higher), self.out * shrink)

    @property
    def lse(self) -> Array:
        return self.peak + jnp.log(self.total)


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
    soft_cap: float | None = None,
) -> Float[Array, "B N T H"] | tuple[Float[Array, "B N T H"], Float[Array, "B N T"]]:
    """Computes attention of T tree rows over the cached prefix and over their own ancestors.

    The prefix part is masked by length only, the tree part by the ancestor bitmask (self
    included), which is one for all slots or one per slot; one softmax spans both, in float32.
    Plain decoding is the case T = 1. See `specjax.memory` for pages and tables.

    The cache is read block by block up to the end of the longest prefix. A block after the end of a
    slot's own prefix adds exactly zero, so a slot's result does not depend, to the last bit, on the
    lengths of other slots.

    Args:
      window: number of positions that a row sees, its own included; None: all.
      sinks: one logit per head that is part of the softmax and has no value.
      with_lse: also return the log of each softmax's sum [B N T], float32, sinks included.
      soft_cap: bound of the scaled scores, which become soft_cap * tanh(score / soft_cap); sinks
        are not scores. None: no bound.
    """
    b, n, t, h = q.shape
    kv_heads, size = k_pages.shape[1:3]
    depth = None if window is None else jnp.tile(tree_depth(visible_bits), n // kv_heads)
    if window is not None:
        visible_bits = within_window(jnp.asarray(visible_bits), window)
    rows = pack_heads(q, kv_heads).astype(jnp.float32) * h**-0.5
    running = _attend_tree(rows, k_tree, v_tree, visible_bits, n // kv_heads, soft_cap)
    block = min(BLOCK, size)
    per_page = -(-size // block)

    def add_block(i, running):
        stretch, inside = divide(i, per_page)
        inside = inside * block
        offset = jnp.minimum(inside, size - block)  # the last one may overlap the one before
        k, v = (_read_block(p, table, stretch, offset, block) for p in (k_pages, v_pages))
        at = offset + jnp.arange(block)
        counts = (at >= inside) & (stretch * size + at < prefix_len[:, None])
        counts = counts[:, None, None]
        if window is not None:
            last = prefix_len[:, None] + jnp.broadcast_to(depth, (b, depth.shape[-1])) - window
            counts = counts & (stretch * size + at > last[:, None, :, None])
        scores = capped(jnp.einsum("bkmh,bksh->bkms", rows, k), soft_cap)
        scores = jnp.where(counts, scores, NEG_INF)
        return running.add(scores, lambda weights: jnp.einsum("bkms,bksh->bkmh", weights, v))

    whole, rest = divide(prefix_len.max(), size)
    blocks = whole * per_page + divide(rest + block - 1, block)[0]
    running = jax.lax.fori_loop(0, blocks, add_block, running)
    if sinks is not None:
        running = running.add_sink(sink_of_rows(sinks, kv_heads, t))
    attended = (running.out / running.total).reshape(b, n, t, h).astype(q.dtype)
    return (attended, running.lse.reshape(b, n, t)) if with_lse else attended


def _attend_tree(rows, k_tree, v_tree, visible_bits, group: int, soft_cap) -> Running:
    """Returns the running softmax of packed rows [B K M H] over the tree's own keys."""
    visible = unpack_bits(visible_bits, k_tree.shape[2])
    visible = jnp.concatenate([visible] * group, axis=-2)
    visible = visible[:, None] if visible.ndim == 3 else visible
    scores = jnp.einsum("bkmh,bkth->bkmt", rows, k_tree.astype(jnp.float32))
    scores = jnp.where(visible, capped(scores, soft_cap), NEG_INF)
    peak = scores.max(-1, keepdims=True)
    weights = jnp.exp(scores - peak)
    out = jnp.einsum("bkmt,bkth->bkmh", weights, v_tree.astype(jnp.float32))
    return Running(peak, weights.sum(-1, keepdims=True), out)


def _read_block(pages, table: Table, stretch, offset, block: int) -> Float[Array, "B K block H"]:
    """Reads a block from `offset` on of every sequence's page number `stretch`, in float32."""
    _, kv_heads, size, h = pages.shape
    if table is None:
        read = take_slice(pages, (0, 0, offset, 0), (pages.shape[0], kv_heads, block, h))
        return read.astype(jnp.float32)
    page = take_slice(table, (0, stretch), (table.shape[0], 1))[:, 0]
    if block == size:
        read = take(pages, page)
    else:
        piece = (1, kv_heads, block, h)
        read = jax.vmap(lambda p: take_slice(pages, (p, 0, offset, 0), piece)[0])(page)
    return read.astype(jnp.float32)


def tree_attention_by_position(
    q: Float[Array, "B N T H"],
    k_tree: Float[Array, "B K T H"],
    v_tree: Float[Array, "B K T H"],
    k_pages: Float[Array, "P K S H"],
    v_pages: Float[Array, "P K S H"],
    prefix_len: Int[Array, " B"],
    path_rows: Int[Array, "*B T E"],
    depth: Int[Array, "*B T"],
    table: Table = None,
    *,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Float[Array, " N"] | None = None,
) -> Float[Array, "B N T H"]:
    """Computes `tree_attention` with bits that depend neither on the tree nor on a row's place.

    Each row attends alone, to keys in the places that plain decoding gives them: ancestors follow
    the prefix in the order of their positions. So a row's arithmetic is that of plain decoding by
    this same function, and results are equal bit by bit, at T times the reads.

    Args:
      path_rows: tree row of row t's ancestor (itself included) at depth 0, 1, .., E - 1; any value
        beyond its own depth. The cache has E slots or more past every prefix.
      depth: depth of each row.
      window: number of positions that a row sees, its own included; None: all.
      soft_cap, sinks: see `tree_attention`.
    """
    b, n, t, h = q.shape
    kv_heads = k_pages.shape[1]
    k_cache, v_cache = contiguous(k_pages, table), contiguous(v_pages, table)
    path_rows = jnp.broadcast_to(path_rows, (b, *path_rows.shape[-2:]))
    depth = jnp.broadcast_to(depth, (b, t))
    insert = jax.vmap(lambda cache, new, at: jax.lax.dynamic_update_slice(cache, new, (0, at, 0)))

    def one_row(row):
        ancestors = path_rows[:, row][:, None, :, None]
        k = insert(k_cache, jnp.take_along_axis(k_tree, ancestors, 2), prefix_len)
        v = insert(v_cache, jnp.take_along_axis(v_tree, ancestors, 2), prefix_len)
        here = (prefix_len + depth[:, row])[:, None]
        known = jnp.arange(k.shape[2])[None] <= here
        if window is not None:
            known = known & (jnp.arange(k.shape[2])[None] > here - window)
        # Between the barriers is the same computation whatever the number of rows.
        asked = q[:, :, row].reshape(b, kv_heads, n // kv_heads, h)
        asked, k, v, known = _apart_on_gpus(asked, k, v, known)
        rows = asked.astype(jnp.float32) * h**-0.5
        scores = capped(jnp.einsum("bkmh,bksh->bkms", rows, k.astype(jnp.float32)), soft_cap)
        scores = jnp.where(known[:, None, None], scores, NEG_INF)
        peak = scores.max(-1, keepdims=True)
        sink = None if sinks is None else sink_of_rows(sinks, kv_heads, 1)
        peak = peak if sink is None else jnp.maximum(peak, sink)
        weights = jnp.exp(scores - peak)
        total = weights.sum(-1, keepdims=True)
        total = total if sink is None else total + jnp.exp(sink - peak)
        out = jnp.einsum("bkms,bksh->bkmh", weights, v.astype(jnp.float32))
        [out] = _apart_on_gpus(out / total)
        return out.reshape(b, n, h)

    return jnp.moveaxis(jax.lax.map(one_row, jnp.arange(t)), 0, 2).astype(q.dtype)


def _apart_on_gpus(*arrays: Array) -> tuple[Array, ...]:
    """Keeps GPU programs from fusing what computes arrays with what reads them."""
    return jax.lax.platform_dependent(
        *arrays, cuda=lambda *x: jax.lax.optimization_barrier(x), default=lambda *x: x
    )


def causal_attention(
    q: Float[Array, "B N S H"],
    k: Float[Array, "B K S H"],
    v: Float[Array, "B K S H"],
    segment_ids: Int[Array, "B S"],
    *,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Float[Array, " N"] | None = None,
) -> Float[Array, "B N S H"]:
    """Computes causal attention within segments, for prefill and training; segment 0 is padding.

    Args:
      window: number of positions that a row sees, its own included; None: all up to its own.
      soft_cap, sinks: see `tree_attention`.
    """
    b, n, s, h = q.shape
    rows = pack_heads(q, k.shape[1]).astype(jnp.float32) * h**-0.5
    mask = causal_segment_mask(segment_ids, window)
    mask = jnp.tile(mask, (1, n // k.shape[1], 1))[:, None]
    found = _masked_attention(soft_cap, rows, k.astype(jnp.float32), v.astype(jnp.float32), mask)
    out, lse = (x.reshape(b, n, s, -1) for x in found)
    if sinks is not None:
        out, _ = with_sink(out, lse[..., 0], sinks[:, None].astype(jnp.float32))
    return out.astype(q.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _masked_attention(soft_cap, q, k, v, mask):
    return _masked_attention_fwd(soft_cap, q, k, v, mask)[0]


def _masked_attention_fwd(soft_cap, q, k, v, mask):
    scores = capped(jnp.einsum("bkmh,bksh->bkms", q, k), soft_cap)
    scores = jnp.where(mask, scores, NEG_INF)
    peak = scores.max(-1, keepdims=True)
    weights = jnp.exp(scores - peak)
    total = weights.sum(-1, keepdims=True)
    out = jnp.einsum("bkms,bksh->bkmh", weights, v) / total
    lse = peak + jnp.log(total)
    return (out, lse), (q, k, v, mask, out, lse)


def _masked_attention_bwd(soft_cap, residuals, gradients):
    """Recomputes the weights from their log-sum-exp (FlashAttention, Dao 2022, algorithm 4).

    Written by hand because XLA's derivative of the softmax takes twice the time on CPU.
    """
    q, k, v, mask, out, lse = residuals
    d_out, d_lse = gradients
    scores = capped(jnp.einsum("bkmh,bksh->bkms", q, k), soft_cap)
    weights = jnp.where(mask, jnp.exp(scores - lse), 0.0)
    d_weights = jnp.einsum("bkmh,bksh->bkms", d_out, v)
    d_scores = weights * (d_weights - (out * d_out).sum(-1, keepdims=True) + d_lse)
    if soft_cap is not None:  # the derivative of the tanh, by its own value
        d_scores = d_scores * (1 - (scores / soft_cap) ** 2)
    d_q = jnp.einsum("bkms,bksh->bkmh", d_scores, k)
    d_k = jnp.einsum("bkms,bkmh->bksh", d_scores, q)
    d_v = jnp.einsum("bkms,bkmh->bksh", weights, d_out)
    return d_q, d_k, d_v, None


_masked_attention.defvjp(_masked_attention_fwd, _masked_attention_bwd)


def causal_attention_with_own(
    q: Float[Array, "B N S H"],
    k: Float[Array, "B K S H"],
    v: Float[Array, "B K S H"],
    own: list[tuple[Array, Array]],
    segment_ids: Int[Array, "B S"],
    *,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Float[Array, " N"] | None = None,
) -> Float[Array, "B N S H"]:
    """Computes causal attention over base rows and over the later rows of the same position.

    A recursive draft step has this form in training: `own` holds the keys and values of the later
    steps so far, of which a query sees only those at its own position.

    Args:
      own: keys and values of each later step, [B K S H].
      window: number of positions that a row sees, its own included; None: all. A later step is one
        position further on than the step before, as it is in decoding, so that the query is
        `len(own)` positions behind the base row at its place.
      soft_cap, sinks: see `tree_attention`.
    """
    own, base_window = own_in_window(own, window)
    b, n, s, h = q.shape
    kv_heads, group = k.shape[1], n // k.shape[1]
    rows = pack_heads(q, kv_heads).astype(jnp.float32) * h**-0.5
    mask = jnp.tile(causal_segment_mask(segment_ids, base_window), (1, group, 1))[:, None]
    scores = capped(jnp.einsum("bkmh,bksh->bkms", rows, k.astype(jnp.float32)), soft_cap)
    scores = jnp.where(mask, scores, NEG_INF)
    grouped = rows.reshape(b, kv_heads, group, s, h)
    keys = jnp.stack([key for key, _ in own], axis=-2).astype(jnp.float32)
    values = jnp.stack([value for _, value in own], axis=-2).astype(jnp.float32)
    own_scores = capped(jnp.einsum("bkgsh,bksoh->bkgso", grouped, keys), soft_cap)
    own_scores = own_scores.reshape(b, kv_heads, group * s, len(own))
    peak = jnp.maximum(scores.max(-1), own_scores.max(-1))[..., None]
    sink = None if sinks is None else sink_of_rows(sinks, kv_heads, s)
    peak = jax.lax.stop_gradient(peak if sink is None else jnp.maximum(peak, sink))
    weights, own_weights = jnp.exp(scores - peak), jnp.exp(own_scores - peak)
    total = weights.sum(-1, keepdims=True) + own_weights.sum(-1, keepdims=True)
    total = total if sink is None else total + jnp.exp(sink - peak)
    out = jnp.einsum("bkms,bksh->bkmh", weights, v.astype(jnp.float32))
    own_weights = own_weights.reshape(b, kv_heads, group, s, len(own))
    own_out = jnp.einsum("bkgso,bksoh->bkgsh", own_weights, values)
    out = (out + own_out.reshape(out.shape)) / total
    return out.reshape(b, n, s, h).astype(q.dtype)


def own_in_window(own: list, window: int | None) -> tuple[list, int | None]:
    """Returns the own rows within the window of the last step, and the window over base rows.

    The window over base rows counts the position itself; None: all positions up to it.
    """
    if window is None:
        return own, None
    return own[-window:], max(window - len(own), 0)


def causal_segment_mask(segment_ids: Int[Array, "B S"], window: int | None = None) -> jnp.ndarray:
    """Returns the causal mask [B S S] within segments.

    Query t sees key u iff u <= t, both belong to one segment, and u is less than `window` positions
    before t.
    """
    s = segment_ids.shape[1]
    causal = jnp.arange(s)[:, None] >= jnp.arange(s)[None]
    if window is not None:
        causal = causal & (jnp.arange(s)[:, None] - window < jnp.arange(s)[None])
    return causal & (segment_ids[:, :, None] == segment_ids[:, None, :])


def experts(
    x: Float[Array, "M I"], stack: Float[Array, "E I O"], sizes: Int[Array, " E"]
) -> Float[Array, "M O"]:
    """Computes `specjax.kernels.dispatch.experts`: every row times every matrix, one by one."""
    ends, index = jnp.cumsum(sizes), jnp.arange(len(x))[:, None]

    def one(out, step):
        matrix, begin, end = step
        return jnp.where((begin <= index) & (index < end), x @ matrix, out), None

    start = jnp.zeros((len(x), stack.shape[-1]), x.dtype)
    return jax.lax.scan(one, start, (stack, ends - sizes, ends))[0]


def product(x: Float[Array, "... K"], panels: Float[Array, "P K W"]) -> Float[Array, "... N"]:
    """Computes `specjax.kernels.dispatch.product`."""
    out = jnp.einsum("...k,pkw->...pw", x, panels, preferred_element_type=jnp.float32)
    return out.reshape(*x.shape[:-1], -1)
