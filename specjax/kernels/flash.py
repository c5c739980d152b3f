"""Attention of a device's queries to the keys of whole rows, in Pallas for TPUs.

jax's splash attention cannot do this. Its masks are static, while a device's position in the row is
known only when the program runs, and its public functions either return the log-sum-exp or have
gradients. Here the positions and segments of tokens are inputs, and the backward pass takes the
log-sum-exp (FlashAttention-2, Dao 2023, arXiv 2307.08691).

Queries and keys are cut into tiles. Scalars in SMEM say of every pair of tiles whether no query
sees a key (the pair is skipped, and its keys are not copied from HBM), every query sees every key
(no mask is computed), or neither. Pairs are skipped because the keys are later, belong to other
segments, or lie outside of the window.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from specjax.kernels.context_parallel import Local
from specjax.kernels.reference import NEG_INF
from specjax.kernels.tiles import by_rows, dot

LANES = 128  # lanes of a register
HIDDEN, PARTIAL, WHOLE = 0, 1, 2  # no query of a tile sees a key, some may, all see all
QUERY_PADDING, KEY_PADDING = -1, -2  # segments that no other tokens have
VMEM_BYTES = 32 * 2**20  # scores of 640 x 640 in float32 are 1.6 MB, and four or five are held


@dataclasses.dataclass(frozen=True)
class Tiles:
    """How rows are cut.

    Attributes:
      unit: number that tile sizes are multiples of; the lanes of a register on a TPU.
      largest: largest size of a tile.
      interpret: whether the kernels are interpreted on CPU, for tests.
    """

    unit: int = LANES
    largest: int = 640
    interpret: bool = False

    def size(self, length: int) -> int:
        """Returns the tile size for rows of a length, which are padded to a multiple of it.

        Padding is computed like tokens, and a tile costs about what half a unit of rows does.
        """

        def cost(size):
            tiles = -(-length // size)
            return tiles * (size + self.unit / 2), -size

        return min(range(self.unit, self.largest + 1, self.unit), key=cost)


@dataclasses.dataclass(frozen=True)
class Tokens:
    """Tokens of a block of queries or keys, padded and cut into tiles.

    Attributes:
      segments: segment of each token.
      places: position of each token in its row.
      size: tokens of a tile.
    """

    segments: Int[Array, "B s"]
    places: Int[Array, " s"]
    size: int

    @classmethod
    def of(cls, segments, places, size: int, padding: int) -> Tokens:
        """Returns tokens that are padded to whole tiles with tokens of the segment `padding`."""
        missing = -segments.shape[1] % size
        segments = jnp.pad(segments, ((0, 0), (0, missing)), constant_values=padding)
        return cls(segments, jnp.pad(places, (0, missing)), size)

    @property
    def length(self) -> int:
        return self.places.shape[0]

    @property
    def count(self) -> int:
        """Number of tiles."""
        return self.length // self.size

    @property
    def ids(self) -> Int[Array, "B 2 s"]:
        """Segments and positions, as the kernels read them."""
        places = jnp.broadcast_to(self.places, self.segments.shape)
        return jnp.stack([self.segments, places], axis=1).astype(jnp.int32)

    def pad(self, x: Array, axis: int) -> Array:
        """Pads an array with one entry per token, along an axis."""
        widths = [(0, 0)] * x.ndim
        widths[axis] = 0, self.length - x.shape[axis]
        return jnp.pad(x, widths)

    def of_tiles(self, reduce: Callable) -> tuple[Int[Array, "B tiles"], Int[Array, " tiles"]]:
        """Returns `reduce` of the segments and of the positions of each tile."""
        segments = self.segments.reshape(-1, self.count, self.size)
        return reduce(segments, -1), reduce(self.places.reshape(self.count, self.size), -1)


def kinds_of_pairs(queries: Tokens, keys: Tokens, window: int | None) -> Int[Array, "B i j"]:
    """Returns `HIDDEN`, `PARTIAL` or `WHOLE` of every pair of tiles."""
    q_low, q_first = (x[..., :, None] for x in queries.of_tiles(jnp.min))
    q_high, q_last = (x[..., :, None] for x in queries.of_tiles(jnp.max))
    k_low, k_first = (x[..., None, :] for x in keys.of_tiles(jnp.min))
    k_high, k_last = (x[..., None, :] for x in keys.of_tiles(jnp.max))
    some = (q_last >= k_first) & (k_low <= q_high) & (q_low <= k_high)
    all_ = (q_first >= k_last) & (q_low == q_high) & (k_low == k_high) & (q_low == k_low)
    if window is not None:
        some = some & (q_first - k_last < window)
        all_ = all_ & (q_last - k_first < window)
    return jnp.where(all_, WHOLE, jnp.where(some, PARTIAL, HIDDEN)).astype(jnp.int32)


def _fetched(kinds: Int[Array, "B i j"]) -> Int[Array, "B i j"]:
    """Returns which tile j is in VMEM at each step of a loop over j: a hidden one is not copied."""
    steps = jnp.arange(kinds.shape[-1], dtype=jnp.int32)
    last = jax.lax.cummax(jnp.where(kinds != HIDDEN, steps, -1), axis=2)
    first = jnp.argmax(kinds != HIDDEN, axis=-1, keepdims=True).astype(jnp.int32)
    return jnp.where(last < 0, first, last)


def local(tiles: Tiles) -> Local:
    """Returns what attends by these kernels, in the dtype of the model."""
    attend_by = functools.partial(attend, tiles=tiles)
    return Local(attend_by, functools.partial(gradients, tiles=tiles), in_float32=False)


# --- the kernels ----------------------------------------------------------------------------------


def _mask(queries, keys, window: int | None):
    """Returns which query sees which key, from segments and positions that broadcast."""
    (q_segments, q_places), (k_segments, k_places) = queries, keys
    mask = (q_segments == k_segments) & (q_places >= k_places)
    return mask if window is None else mask & (q_places - k_places < window)


def _across(ref):
    """Returns the two rows [2 s] of a block as two rows [1 s]."""
    return ref[0, :1], ref[0, 1:]


def _down(ref):
    """Returns the two rows [2 s] of a block as two columns [s 1]."""
    return jnp.expand_dims(ref[0, 0], -1), jnp.expand_dims(ref[0, 1], -1)


def _step(at, grid) -> Array:
    """Returns the number of a pair of tiles in `kinds_of_pairs`, from the grid's indices."""
    return (at[0] * grid[2] + at[2]) * grid[-1] + at[-1]


def _by_kind(kind, step):
    """Calls step(masked) as the kind of a pair of tiles wants it."""
    pl.when(kind == PARTIAL)(functools.partial(step, True))
    pl.when(kind == WHOLE)(functools.partial(step, False))


def _forward_kernel(kinds, _, q, k, v, q_ids, k_ids, out, lse, peak, total, acc, *, window, grid):
    at = [pl.program_id(axis) for axis in range(4)]

    @pl.when(at[3] == 0)
    def _():
        peak[...] = jnp.full_like(peak, NEG_INF)
        total[...] = jnp.ones_like(total)  # which the first key that is seen replaces
        acc[...] = jnp.zeros_like(acc)

    def step(masked: bool):
        scores = by_rows(q[0, 0], k[0, 0])
        if masked:
            scores = jnp.where(_mask(_down(q_ids), _across(k_ids), window), scores, NEG_INF)
        before = peak[:, :1]
        now = jnp.maximum(before, scores.max(axis=-1, keepdims=True))
        weights, shrunk = jnp.exp(scores - now), jnp.exp(before - now)
        total[...] = total[...] * shrunk + weights.sum(axis=-1, keepdims=True)
        acc[...] = acc[...] * shrunk + dot(weights.astype(v.dtype), v[0, 0])
        peak[...] = jnp.broadcast_to(now, peak.shape)

    _by_kind(kinds[_step(at, grid)], step)

    @pl.when(at[3] == grid[3] - 1)
    def _():
        out[0, 0] = acc[...] / total[:, :1]
        lse[0, 0] = (peak[...] + jnp.log(total[...])).T[:1]


def _queries_kernel(kinds, _, q, k, v, q_ids, k_ids, d_out, stats, d_q, acc, *, window, grid):
    at = [pl.program_id(axis) for axis in range(4)]

    @pl.when(at[3] == 0)
    def _():
        acc[...] = jnp.zeros_like(acc)

    def step(masked: bool):
        scores = by_rows(q[0, 0], k[0, 0])
        if masked:
            scores = jnp.where(_mask(_down(q_ids), _across(k_ids), window), scores, NEG_INF)
        lse, delta = _down(stats.at[0])
        d_weights = by_rows(d_out[0, 0], v[0, 0])
        d_scores = jnp.exp(scores - lse) * (d_weights - delta)
        acc[...] += dot(d_scores.astype(k.dtype), k[0, 0])

    _by_kind(kinds[_step(at, grid)], step)

    @pl.when(at[3] == grid[3] - 1)
    def _():
        d_q[0, 0] = acc[...]


def _keys_kernel(kinds, _, q, k, v, q_ids, k_ids, d_out, stats, d_k, d_v, *, window, grid):
    at = [pl.program_id(axis) for axis in range(5)]

    @pl.when((at[3] == 0) & (at[4] == 0))
    def _():
        d_k[...] = jnp.zeros_like(d_k)
        d_v[...] = jnp.zeros_like(d_v)

    def step(masked: bool):
        scores = by_rows(k[0, 0], q[0, 0])  # a row per key
        if masked:
            scores = jnp.where(_mask(_across(q_ids), _down(k_ids), window), scores, NEG_INF)
        lse, delta = _across(stats.at[0])
        weights = jnp.exp(scores - lse)
        d_v[0, 0] += dot(weights.astype(q.dtype), d_out[0, 0])
        d_scores = weights * (by_rows(v[0, 0], d_out[0, 0]) - delta)
        d_k[0, 0] += dot(d_scores.astype(q.dtype), q[0, 0])

    _by_kind(kinds[_step(at, grid)], step)


@dataclasses.dataclass(frozen=True)
class _Cut:
    """How the work of one call is cut.

    The grid is (sequence, query head, tile of queries, tile of keys), or `by_keys` (sequence, key
    head, tile of keys, query head of the group, tile of queries): what is summed comes last.
    """

    q: Tokens
    k: Tokens
    heads: int
    kv_heads: int
    width: int
    window: int | None
    tiles: Tiles
    by_keys: bool = False

    @property
    def batch(self) -> int:
        return self.q.segments.shape[0]

    @property
    def grid(self) -> tuple[int, ...]:
        if self.by_keys:
            group = self.heads // self.kv_heads
            return self.batch, self.kv_heads, self.k.count, group, self.q.count
        return self.batch, self.heads, self.q.count, self.k.count

    def _tiles_at(self, *at):
        """Returns what a step reads: sequence, query head, key head, tile of queries, of keys."""
        *at, kinds, fetched = at
        del kinds
        group = self.heads // self.kv_heads
        inner = fetched[_step(at, self.grid)]
        if self.by_keys:
            b, kv_head, j, member, _ = at
            return b, kv_head * group + member, kv_head, inner, j
        b, head, i, _ = at
        return b, head, jax.lax.div(head, group), i, inner

    def part(self, name: str) -> tuple[pl.BlockSpec, tuple[int, ...]]:
        """Returns the block of an array that a step reads or writes, and the array's shape."""
        q, k, width = self.q, self.k, self.width
        block, shape, where = {
            "queries": ((1, 1, q.size, width), (self.heads, q.length, width), (1, 3, None)),
            "keys": ((1, 1, k.size, width), (self.kv_heads, k.length, width), (2, 4, None)),
            "query": ((1, 1, 1, q.size), (self.heads, 1, q.length), (1, None, 3)),
            "query pair": ((1, 1, 2, q.size), (self.heads, 2, q.length), (1, None, 3)),
            "query ids": ((1, 2, q.size), (2, q.length), (None, 3)),
            "key ids": ((1, 2, k.size), (2, k.length), (None, 4)),
        }[name]

        def index(*at):
            found = self._tiles_at(*at)
            return found[0], *(0 if which is None else found[which] for which in where)

        return pl.BlockSpec(block, index), (self.batch, *shape)

    def call(
        self, kernel, given: Sequence[tuple[str, Array]], results, scratch=(), products=2
    ) -> list[Array]:
        """Runs a kernel.

        Args:
          given: names of `part`, and arrays.
          results: names of `part` for each float32 result.
          scratch: shapes of float32 buffers.
          products: matrix products per pair of tiles.
        """
        kinds = kinds_of_pairs(self.q, self.k, self.window)
        kinds = kinds.swapaxes(1, 2) if self.by_keys else kinds
        grid = self.grid
        pairs = self.batch * self.heads * self.q.length * self.k.length // 2  # about half are seen
        arrays, out = [x for _, x in given], [self.part(name) for name in results]
        cost = pl.CostEstimate(
            flops=2 * products * pairs * self.width,
            transcendentals=pairs,
            bytes_accessed=sum(x.nbytes for x in arrays) + sum(4 * math.prod(s) for _, s in out),
        )
        return pl.pallas_call(
            functools.partial(kernel, window=self.window, grid=grid),
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=2,
                grid=grid,
                in_specs=[self.part(name)[0] for name, _ in given],
                out_specs=[block for block, _ in out],
                scratch_shapes=[pltpu.VMEM(shape, jnp.float32) for shape in scratch],
            ),
            out_shape=[jax.ShapeDtypeStruct(shape, jnp.float32) for _, shape in out],
            compiler_params=pltpu.CompilerParams(
                dimension_semantics=("parallel",) * 3 + ("arbitrary",) * (len(grid) - 3),
                vmem_limit_bytes=VMEM_BYTES,
            ),
            cost_estimate=cost,
            interpret=self.tiles.interpret,
            name="flash" + kernel.__name__.removesuffix("_kernel"),
        )(kinds.reshape(-1), _fetched(kinds).reshape(-1), *arrays)


def _cut(q, k, q_tokens, k_tokens, window, tiles: Tiles) -> _Cut:
    queries = Tokens.of(*q_tokens, tiles.size(q.shape[2]), QUERY_PADDING)
    keys = Tokens.of(*k_tokens, tiles.size(k.shape[2]), KEY_PADDING)
    return _Cut(queries, keys, q.shape[1], k.shape[1], q.shape[3], window, tiles)


def _given(cut: _Cut, q, k, v) -> list[tuple[str, Array]]:
    """Returns the arrays that all kernels read."""
    q, k, v = cut.q.pad(q, 2), cut.k.pad(k, 2), cut.k.pad(v, 2)
    ids = ("query ids", cut.q.ids), ("key ids", cut.k.ids)
    return [("queries", q), ("keys", k), ("keys", v), *ids]


# --- their calls ----------------------------------------------------------------------------------


def attend(
    q: Float[Array, "B N s H"],
    k: Float[Array, "B K u H"],
    v: Float[Array, "B K u H"],
    q_tokens: tuple[Int[Array, "B s"], Int[Array, " s"]],
    k_tokens: tuple[Int[Array, "B u"], Int[Array, " u"]],
    window: int | None,
    tiles: Tiles,
) -> tuple[Float[Array, "B N s H"], Float[Array, "B N s"]]:
    """Computes `Local.attend`; a query that sees no key has a finite result.

    Args:
      q_tokens, k_tokens: segments, and positions in the row.
      window: number of positions that a query sees, its own included; None: all up to its own.
    """
    cut, length = _cut(q, k, q_tokens, k_tokens, window, tiles), q.shape[2]
    scratch = [(cut.q.size, LANES), (cut.q.size, LANES), (cut.q.size, cut.width)]
    out, lse = cut.call(_forward_kernel, _given(cut, q, k, v), ["queries", "query"], scratch)
    return out[:, :, :length], lse[:, :, 0, :length]


def gradients(
    q: Float[Array, "B N s H"],
    k: Float[Array, "B K u H"],
    v: Float[Array, "B K u H"],
    q_tokens: tuple[Int[Array, "B s"], Int[Array, " s"]],
    k_tokens: tuple[Int[Array, "B u"], Int[Array, " u"]],
    window: int | None,
    lse: Float[Array, "B N s"],
    d_out: Float[Array, "B N s H"],
    delta: Float[Array, "B N s"],
    tiles: Tiles,
) -> tuple[Float[Array, "B N s H"], Float[Array, "B K u H"], Float[Array, "B K u H"]]:
    """Computes `Local.gradients`."""
    cut = _cut(q, k, q_tokens, k_tokens, window, tiles)
    # Padded queries see nothing; with a log-sum-exp of 0 their weights are 0.
    stats = cut.q.pad(jnp.stack([lse, delta], axis=2), 3)
    d_out = cut.q.pad(d_out.astype(q.dtype), 2)
    given = [*_given(cut, q, k, v), ("queries", d_out), ("query pair", stats)]
    scratch = [(cut.q.size, cut.width)]
    (d_q,) = cut.call(_queries_kernel, given, ["queries"], scratch, products=3)
    cut = dataclasses.replace(cut, by_keys=True)
    d_k, d_v = cut.call(_keys_kernel, given, ["keys", "keys"], products=4)
    length = k.shape[2]
    return d_q[:, :, : q.shape[2]], d_k[:, :, :length], d_v[:, :, :length]
