"""Causal attention within packed segments for GPUs, in Pallas' Triton backend: for training.

No mask is an array, and no scores are written to memory (FlashAttention-2, Dao 2023, arXiv
2307.08691). Queries and keys are cut into tiles. A short list of numbers says of every tile of
queries which tiles of keys it sees, and which of these it sees completely: only the others compute
a mask, and tiles of other segments, later ones, and those outside of the window are not read.

The backward pass is two kernels, so that each number is written once and no sum depends on the
order in which programs run: one per tile of queries, and one per tile of keys, which adds up all
query heads that share the keys.

jax's own kernel, `jax.experimental.pallas.ops.gpu.attention.mha`, reads the tiles of all segments,
and has no grouped heads, windows or log-sum-exp with a gradient.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int

from specjax.config import ModelConfig
from specjax.config.model import ATTENTION_RESIDUALS
from specjax.interfaces import Backend, Device
from specjax.kernels import experts_gpu
from specjax.kernels.backend import head_sizes
from specjax.kernels.context_parallel import add_own
from specjax.kernels.flash import HIDDEN, WHOLE, Tokens, kinds_of_pairs
from specjax.kernels.library import padded
from specjax.kernels.reference import NEG_INF, own_in_window, with_sink
from specjax.kernels.tiles import by_rows, dot
from specjax.kernels.triton import refuses_model
from specjax.kernels.triton_lowering import LOG2E, as_on_a_gpu, no_ampere

# Devices of which a program gets less than the 164 KiB of shared memory that tiles are made for.
SMALL, SMALL_HEAD = re.compile(r"\b(A10G?|A16|A2|A40|L4|L40S?|RTX|GeForce)\b", re.IGNORECASE), 64
_PADDING = jnp.iinfo(jnp.int32).max  # in place of segment 0: ids ascend along a row


class Tile(NamedTuple):
    """How one kernel is cut.

    Attributes:
      queries, keys: tokens of a tile of queries and of keys; powers of 2, at least 16.
      warps: warps of a program.
      stages: tiles that are copied ahead.
    """

    queries: int
    keys: int
    warps: int
    stages: int


class Tiles(NamedTuple):
    """How the three kernels are cut: attention, gradient of queries, gradient of keys and values.

    Sums over a row's keys are held in registers, so that wide heads have small tiles.
    """

    forward: Tile
    queries: Tile
    keys: Tile

    @property
    def largest(self) -> int:
        return max(max(tile.queries, tile.keys) for tile in self)


# By bytes of a number and head size, rounded up to a power of 2. By the compiler for an H100 no
# register of 2-byte tiles is spilled. Of float32 the gradient of queries with heads of 128 spills
# 576 bytes; copying ahead would spill more. None is timed yet.
_NARROW = Tiles(Tile(128, 64, 4, 3), Tile(64, 64, 4, 3), Tile(64, 64, 4, 3))
_EXACT = Tiles(Tile(32, 32, 4, 1), Tile(32, 32, 4, 1), Tile(32, 32, 4, 1))
TILES = {
    (2, 32): _NARROW,
    (2, 64): _NARROW,
    (2, 128): Tiles(Tile(128, 64, 8, 3), Tile(64, 64, 4, 2), Tile(64, 64, 8, 2)),
    (2, 256): Tiles(Tile(64, 64, 8, 2), Tile(64, 32, 8, 2), Tile(32, 32, 8, 2)),
    (4, 32): _EXACT,
    (4, 64): _EXACT,
    (4, 128): Tiles(*[Tile(32, 32, 8, 1)] * 3),
    (4, 256): Tiles(Tile(16, 32, 4, 1), Tile(16, 32, 4, 1), Tile(16, 16, 4, 1)),
}


def causal_attention(
    q, k, v, own, segment_ids, *,
    window: int | None = None, soft_cap: float | None = None, sinks: Array | None = None,
    tiles: Tiles | None = None, interpret: bool = False,
) -> Float[Array, "B N S H"]:  # fmt: skip
    """Computes `reference.causal_attention_with_own`; without own rows, causal attention.

    Tiles are skipped where segment ids ascend along a row, with 0 for padding at its end; in any
    other order the result is the same.

    Args:
      own: keys and values of later steps at the query's own position; may be empty.
      soft_cap, sinks: see `reference.tree_attention`.
      tiles: how the kernels are cut; None: by head size and dtype.
      interpret: whether to interpret the kernels on CPU, for tests.
    """
    s, h = q.shape[2:]
    own, base_window = own_in_window(own, window)
    tiles = tiles or TILES[q.dtype.itemsize, _rounded(h)]
    if base_window == 0:  # no base row is visible, and a softmax over none would be NaN
        base, lse = jnp.zeros(q.shape), jnp.full(q.shape[:-1], NEG_INF)
        base, lse = (base, lse) if sinks is None else with_sink(base, lse, sinks[:, None])
        return add_own(q, base, lse, own, soft_cap)
    rows, keys, values, _, segments = padded(tiles.largest, q, k, v, [], segment_ids)
    segments = jnp.where(segments == 0, _PADDING, segments.astype(jnp.int32))
    dtype = q.dtype if not own and sinks is None else jnp.float32
    call = _Call(tiles, base_window, soft_cap, jnp.dtype(dtype), interpret)
    out, lse = _attend(call, rows, keys, values, segments)
    out, lse = out[:, :, :s], lse[:, :, :s]
    if sinks is not None:
        out, lse = with_sink(out, lse, sinks[:, None].astype(jnp.float32))
    return add_own(q, out, lse, own, soft_cap) if own else out.astype(q.dtype)


def _rounded(head: int) -> int:
    """Returns the columns of a tile, a power of 2; those after the head's are masked."""
    return max(pl.next_power_of_2(head), 32)


# --- the gradient ---------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Call:
    """What is static in a call; the dtype is that of the result."""

    tiles: Tiles
    window: int | None
    soft_cap: float | None
    dtype: jnp.dtype
    interpret: bool


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(call: _Call, q, k, v, segments):
    return _attend_fwd(call, q, k, v, segments)[0]


def _attend_fwd(call: _Call, q, k, v, segments):
    found = _forward(call, q, k, v, segments)
    out, lse = (checkpoint_name(x, ATTENTION_RESIDUALS) for x in found)
    return (out, lse), (q, k, v, segments, out, lse)


def _attend_bwd(call: _Call, residuals, cotangents):
    q, k, v, segments, out, lse = residuals
    d_out, d_lse = cotangents
    delta = (out.astype(jnp.float32) * d_out.astype(jnp.float32)).sum(-1) - d_lse
    d_q, d_k, d_v = _backward(call, q, k, v, segments, d_out.astype(q.dtype), lse, delta)
    return d_q, d_k, d_v, None


_attend.defvjp(_attend_fwd, _attend_bwd)


@functools.partial(jax.jit, static_argnums=0)  # equal layers are traced and lowered once
def _forward(call: _Call, q, k, v, segments):
    cut = _Cut.of(call, call.tiles.forward, q, k, segments)
    given = [("range", cut.ranges), ("rows", q), ("keys", k), ("keys", v)]
    given += [("row ids", segments), ("ids", segments)]
    results = [("rows", q.shape, call.dtype), ("row", q.shape[:3], jnp.float32)]
    return cut.run(_forward_kernel, given, results)


@functools.partial(jax.jit, static_argnums=0)
def _backward(call: _Call, q, k, v, segments, d_out, lse, delta):
    cut = _Cut.of(call, call.tiles.queries, q, k, segments)
    given = [("range", cut.ranges), ("rows", q), ("keys", k), ("keys", v), ("row ids", segments)]
    given += [("ids", segments), ("rows", d_out), ("row", lse), ("row", delta)]
    [d_q] = cut.run(_queries_kernel, given, [("rows", q.shape, q.dtype)])
    cut = _Cut.of(call, call.tiles.keys, q, k, segments, by_keys=True)
    given = [("range", cut.ranges), ("group", q), ("rows", k), ("rows", v), ("ids", segments)]
    given += [("row ids", segments), ("group", d_out), ("group row", lse), ("group row", delta)]
    results = [("rows", x.shape, x.dtype) for x in (k, v)]
    d_k, d_v = cut.run(_keys_kernel, given, results)
    return d_q, d_k, d_v


# --- which tiles see which ------------------------------------------------------------------------


def ranges_of(kinds: Int[Array, "B i j"]) -> Int[Array, "B i 4"]:
    """Returns four numbers of each tile i, which see tiles j: a, b, c, d with a <= b <= c <= d.

    Tiles [a, d) have all that is seen; [b, c) are seen completely.
    """
    count = kinds.shape[-1]
    at = jnp.arange(count, dtype=jnp.int32)
    seen, whole = kinds != HIDDEN, kinds == WHOLE
    first = jnp.where(seen, at, count).min(-1)
    end = jnp.where(seen, at + 1, 0).max(-1)
    first = jnp.minimum(first, end)  # where nothing is seen
    last = jnp.where(whole, at + 1, 0).max(-1)
    last = jnp.maximum(last, first)
    run = jnp.where(~whole & (at < last[..., None]), at + 1, 0).max(-1)
    return jnp.stack([first, jnp.maximum(run, first), last, end], axis=-1)


@dataclasses.dataclass(frozen=True)
class _Cut:
    """How the work of one kernel is cut: a program per head, tile and sequence.

    Attributes:
      by_keys: whether a program has a tile of keys and goes over queries, or the reverse.
    """

    call: _Call
    tile: Tile
    heads: int
    kv_heads: int
    width: int
    segments: Int[Array, "B S"]
    by_keys: bool

    @classmethod
    def of(cls, call: _Call, tile: Tile, q, k, segments, by_keys: bool = False) -> _Cut:
        return cls(call, tile, q.shape[1], k.shape[1], q.shape[3], segments, by_keys)

    @property
    def size(self) -> int:
        """Tokens of a program's own tile."""
        return self.tile.keys if self.by_keys else self.tile.queries

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads

    @property
    def ranges(self) -> Int[Array, "B tiles 4"]:
        places = jnp.arange(self.segments.shape[1], dtype=jnp.int32)
        sizes = self.tile.queries, self.tile.keys
        kinds = kinds_of_pairs(
            *(Tokens(self.segments, places, size) for size in sizes), self.call.window
        )
        return ranges_of(kinds.swapaxes(1, 2) if self.by_keys else kinds)

    def spec(self, name: str) -> pl.BlockSpec:
        """Returns the part of an array that a program reads or writes."""
        length, columns, group = self.segments.shape[1], _rounded(self.width), self.group
        shape, index = {
            "range": ((None, None, 4), lambda head, i, b: (b, i, 0)),
            "rows": ((None, None, self.size, columns), lambda head, i, b: (b, head, i, 0)),
            "keys": ((None, None, length, columns), lambda head, i, b: (b, head // group, 0, 0)),
            "group": ((None, group, length, columns), lambda head, i, b: (b, head, 0, 0)),
            "row": ((None, None, self.size), lambda head, i, b: (b, head, i)),
            "group row": ((None, group, length), lambda head, i, b: (b, head, 0)),
            "row ids": ((None, self.size), lambda head, i, b: (b, i)),
            "ids": ((None, length), lambda head, i, b: (b, 0)),
        }[name]
        return pl.BlockSpec(shape, index)

    def run(self, kernel, given, results) -> list[Array]:
        """Runs a kernel.

        Args:
          given: names of `spec`, and arrays.
          results: names of `spec`, shapes and dtypes.
        """
        batch, length = self.segments.shape
        heads = self.kv_heads if self.by_keys else self.heads
        on = _Arithmetic(self.tile, self.width, self.group, self.call.window, self.call.soft_cap)
        call = pl.pallas_call(
            functools.partial(kernel, on),
            grid=(heads, length // self.size, batch),  # heads that share keys run side by side
            in_specs=[self.spec(name) for name, _ in given],
            out_specs=[self.spec(name) for name, _, _ in results],
            out_shape=[jax.ShapeDtypeStruct(shape, dtype) for _, shape, dtype in results],
            compiler_params=plgpu.CompilerParams(
                num_warps=self.tile.warps, num_stages=self.tile.stages
            ),
            interpret=self.call.interpret,
            name="flash_gpu" + kernel.__name__.removesuffix("_kernel"),
        )
        with contextlib.nullcontext() if self.call.interpret else as_on_a_gpu():
            return call(*(x for _, x in given))


# --- the kernels ----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Arithmetic:
    """What the kernels compute of one pair of tiles, from static numbers alone."""

    tile: Tile
    width: int
    group: int
    window: int | None
    soft_cap: float | None

    def load(self, ref):
        """Loads rows of a head's size; columns after it are 0."""
        if self.width == ref.shape[-1]:
            return plgpu.load(ref)
        inside = (jnp.arange(ref.shape[-1]) < self.width)[None]
        return plgpu.load(ref, mask=inside, other=0.0)

    def store(self, ref, x) -> None:
        x = x.astype(ref.dtype)
        if self.width == ref.shape[-1]:
            plgpu.store(ref, x)
        else:
            plgpu.store(ref, x, mask=(jnp.arange(ref.shape[-1]) < self.width)[None])

    def scores(self, left, right, seen=None):
        """Computes scores in units of log 2, and the slope of the soft cap; NEG_INF if unseen."""
        scores, slope = by_rows(left, right) * self.width**-0.5, None
        if self.soft_cap is not None:
            share = jnp.tanh(scores / self.soft_cap)
            scores, slope = self.soft_cap * share, 1 - share * share
        scores = scores * LOG2E
        return (scores if seen is None else jnp.where(seen, scores, NEG_INF)), slope

    def seen(self, q_places, q_ids, k_places, k_ids):
        """Returns which query sees which key, from positions and segments that broadcast."""
        seen = (q_ids == k_ids) & (q_places >= k_places)
        return seen if self.window is None else seen & (q_places - k_places < self.window)


def _over_range(bounds, step, carry):
    """Runs `step(masked, tile, carry)` over the tiles of a range, see `ranges_of`."""
    masked, whole = (functools.partial(step, masked) for masked in (True, False))
    for start, one in ((0, masked), (1, whole), (2, masked)):
        carry = jax.lax.fori_loop(bounds[start], bounds[start + 1], one, carry)
    return carry


def _forward_kernel(on: _Arithmetic, bounds, q, k, v, q_ids, k_ids, out, lse):
    size, tile = on.tile.keys, pl.program_id(1)
    rows, ids = on.load(q), q_ids[...]
    places = tile * on.tile.queries + jnp.arange(on.tile.queries)

    def step(masked: bool, j, carry):
        peak, total, acc = carry
        here = pl.ds(j * size, size)
        keys, values, seen = on.load(k.at[here]), on.load(v.at[here]), None
        if masked:
            others = j * size + jnp.arange(size)
            seen = on.seen(places[:, None], ids[:, None], others[None], k_ids[here][None])
        scores, _ = on.scores(rows, keys, seen)
        higher = jnp.maximum(peak, scores.max(axis=1))
        shrink, weights = jnp.exp2(peak - higher), jnp.exp2(scores - higher[:, None])
        total = total * shrink + weights.sum(axis=1)
        acc = acc * shrink[:, None] + dot(weights.astype(values.dtype), values)
        return higher, total, acc

    start = (
        jnp.full((on.tile.queries,), NEG_INF, jnp.float32),
        jnp.zeros((on.tile.queries,), jnp.float32),
        jnp.zeros(q.shape, jnp.float32),
    )
    peak, total, acc = _over_range(bounds, step, start)
    on.store(out, acc / total[:, None])
    lse[...] = (peak + jnp.log2(total)) / LOG2E


def _queries_kernel(on: _Arithmetic, bounds, q, k, v, q_ids, k_ids, d_out, lse, delta, d_q):
    size, tile = on.tile.keys, pl.program_id(1)
    rows, d_rows, ids = on.load(q), on.load(d_out), q_ids[...]
    peak, shift = lse[...] * LOG2E, delta[...]
    places = tile * on.tile.queries + jnp.arange(on.tile.queries)

    def step(masked: bool, j, acc):
        here = pl.ds(j * size, size)
        keys, values, seen = on.load(k.at[here]), on.load(v.at[here]), None
        if masked:
            others = j * size + jnp.arange(size)
            seen = on.seen(places[:, None], ids[:, None], others[None], k_ids[here][None])
        scores, slope = on.scores(rows, keys, seen)
        weights = jnp.exp2(scores - peak[:, None])
        d_scores = weights * (by_rows(d_rows, values) - shift[:, None])
        d_scores = d_scores if slope is None else d_scores * slope
        return acc + dot(d_scores.astype(keys.dtype), keys)

    acc = _over_range(bounds, step, jnp.zeros(q.shape, jnp.float32))
    on.store(d_q, acc * on.width**-0.5)


def _keys_kernel(on: _Arithmetic, bounds, q, k, v, q_ids, k_ids, d_out, lse, delta, d_k, d_v):
    size, tile = on.tile.queries, pl.program_id(1)
    keys, values, ids = on.load(k), on.load(v), k_ids[...]
    places = tile * on.tile.keys + jnp.arange(on.tile.keys)

    def step(head, masked: bool, i, carry):
        acc_k, acc_v = carry
        here = pl.ds(i * size, size)
        rows, d_rows, seen = on.load(q.at[head, here]), on.load(d_out.at[head, here]), None
        if masked:
            others = i * size + jnp.arange(size)
            seen = on.seen(others[None], q_ids[here][None], places[:, None], ids[:, None])
        scores, slope = on.scores(keys, rows, seen)  # a row per key
        weights = jnp.exp2(scores - (lse[head, here] * LOG2E)[None])
        acc_v += dot(weights.astype(d_rows.dtype), d_rows)
        d_scores = weights * (by_rows(values, d_rows) - delta[head, here][None])
        d_scores = d_scores if slope is None else d_scores * slope
        return acc_k + dot(d_scores.astype(rows.dtype), rows), acc_v

    def one_head(head, carry):
        return _over_range(bounds, functools.partial(step, head), carry)

    nothing = jnp.zeros(k.shape, jnp.float32)
    acc_k, acc_v = jax.lax.fori_loop(0, on.group, one_head, (nothing, nothing))
    on.store(d_k, acc_k * on.width**-0.5)
    on.store(d_v, acc_v)


# --- the backend ----------------------------------------------------------------------------------


def _refuses(operation: str, device: Device | None, cfg: ModelConfig) -> str | None:
    """Returns why these kernels cannot be used, or None, see `Backend.refuses`."""
    if reason := no_ampere(device):
        return reason
    largest = max(head_sizes(cfg), default=0)
    if device is not None and SMALL.search(device.kind) and largest > SMALL_HEAD:
        return (
            f"its tiles of heads of {largest} do not fit into the shared memory of "
            f"{device.kind!r}, which holds heads of up to {SMALL_HEAD}"
        )
    return refuses_model(cfg)


BACKEND = Backend(
    # Training has this backend, and in decoding it is the rest of the others.
    operations={"causal_attention": causal_attention, "experts": experts_gpu.experts},
    takes={"causal_attention": ("window", "soft_cap", "sinks")},
    refuses=_refuses,
    rest="library:cudnn",
    line="Pallas Triton flash attention of packed rows",
)
