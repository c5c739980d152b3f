"""Context parallelism: causal attention within segments, of rows that are split over devices.

Every device gathers the keys and values of whole rows (Llama 3, arXiv 2407.21783), which are small
beside its queries' share of the work where query heads share key/value heads. Gradients are written
by hand, as in `reference.py`: the backward pass recomputes weights from their log-sum-exp. The
log-sum-exp is an output with a gradient of its own, so that more keys can be added to the softmax
later.

What a device then does is a `Local`: `in_xla`, which adds chunk after chunk of the keys to a
running softmax, those that no query sees left out, and writes the scores of two chunks to memory;
or the kernels of `flash.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from specjax.config.model import ATTENTION_RESIDUALS
from specjax.kernels.reference import NEG_INF, Running, capped, own_in_window, with_sink
from specjax.parallel.context import AXIS, Context
from specjax.parallel.sharding import spec_for


def attention(
    q, k, v, own, segment_ids, context: Context, *,
    window: int | None = None, soft_cap: float | None = None, sinks: Array | None = None,
    local: Local | None = None,
) -> Float[Array, "B N S H"]:  # fmt: skip
    """Computes `reference.causal_attention_with_own` of rows in the order of `context`.

    A position's own rows are on its query's device, so they need no communication.

    Args:
      own: keys and values of later steps; empty: causal attention alone.
      sinks: see `reference.tree_attention`.
      local: what a device does, which has no soft-cap; None: `in_xla`.
    """
    local = local or in_xla(soft_cap)
    if not own and sinks is None:
        return _with_lse(q, k, v, segment_ids, context, window, local, q.dtype)[0].astype(q.dtype)
    own, base_window = own_in_window(own, window)
    if base_window == 0:  # no base row is visible, and a softmax over none would be NaN
        found = jnp.zeros(q.shape), jnp.full(q.shape[:-1], NEG_INF)
    else:
        found = _with_lse(q, k, v, segment_ids, context, base_window, local, jnp.float32)
    if sinks is not None:
        found = with_sink(*found, sinks[:, None].astype(jnp.float32))
    return add_own(q, *found, own, soft_cap) if own else found[0].astype(q.dtype)


def add_own(
    q: Float[Array, "B N S H"],
    base: Float[Array, "B N S H"],
    lse: Float[Array, "B N S"],
    own: list[tuple[Array, Array]],
    soft_cap: float | None = None,
) -> Float[Array, "B N S H"]:
    """Adds a position's own rows of later steps to the softmax over base rows.

    Args:
      base, lse: attention to base rows and its log-sum-exp, float32.
      own: keys and values of each later step, [B K S H].
      soft_cap: see `specjax.kernels.reference.capped`.
    """
    b, n, s, h = q.shape
    kv_heads = own[0][0].shape[1]
    base, lse = (x.reshape(b, kv_heads, n // kv_heads, s, *x.shape[3:]) for x in (base, lse))
    grouped = q.reshape(base.shape).astype(jnp.float32) * h**-0.5
    keys = jnp.stack([key for key, _ in own], axis=-2).astype(jnp.float32)
    values = jnp.stack([value for _, value in own], axis=-2).astype(jnp.float32)
    scores = capped(jnp.einsum("bkgsh,bksoh->bkgso", grouped, keys), soft_cap)
    peak = jax.lax.stop_gradient(jnp.maximum(lse, scores.max(-1)))
    base_weight, weights = jnp.exp(lse - peak), jnp.exp(scores - peak[..., None])
    total = base_weight + weights.sum(-1)
    out = base * base_weight[..., None] + jnp.einsum("bkgso,bksoh->bkgsh", weights, values)
    return (out / total[..., None]).reshape(b, n, s, h).astype(q.dtype)


def _with_lse(q, k, v, segment_ids, context: Context, window: int | None, local: Local, dtype):
    """Returns attention [B N S H], of a dtype if `local` has that, and its log-sum-exp [B N S]."""
    # The queries of a key/value head stay together: where heads are split into more parts than
    # there are key/value heads, these are repeated as often as that takes.
    tp, n, kv_heads = context.mesh.shape.get("tp", 1), q.shape[1], k.shape[1]
    if n % tp == 0 and kv_heads % tp:
        repeats = next(r for r in range(2, n + 1) if kv_heads * r % tp == 0 == n % (kv_heads * r))
        k, v = jnp.repeat(k, repeats, axis=1), jnp.repeat(v, repeats, axis=1)
    kept = jnp.float32 if local.in_float32 else q.dtype
    scaled = (q.astype(jnp.float32) * q.shape[-1] ** -0.5).astype(kept)
    dtype = jnp.float32 if kept == jnp.float32 else dtype
    return _attend(_Split(context, window, local, dtype), scaled, k, v, segment_ids)


# --- one row over many devices ----------------------------------------------------------------


class _Split(NamedTuple):
    """What is static in attention over many devices.

    Attributes:
      dtype: dtype of the result; its log-sum-exp is float32.
    """

    context: Context
    window: int | None
    local: Local
    dtype: jnp.dtype


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(split: _Split, q, k, v, segment_ids):
    return _attend_fwd(split, q, k, v, segment_ids)[0]


def _attend_fwd(split: _Split, q, k, v, segment_ids):
    heads = _specs(split.context, q, k, v, segment_ids)
    # The segments are made to depend on the queries. Otherwise a scan over layers would compute
    # what depends on segments alone, the masks of all pairs of tokens, beforehand and keep it.
    q, segment_ids = jax.lax.optimization_barrier((q, segment_ids))
    run = _over(split, _forward, heads, (heads[0], jax.P(*heads[0][:3])))
    found = run(q, k, v, segment_ids)
    out, lse = (checkpoint_name(x, ATTENTION_RESIDUALS) for x in found)
    return (out, lse), (q, k, v, segment_ids, out, lse)


def _attend_bwd(split: _Split, residuals, gradients):
    q, k, v, segment_ids, out, lse = residuals
    d_out, d_lse = gradients
    # The term of a softmax's gradient that all keys share. The log-sum-exp depends on every score.
    delta = (out.astype(jnp.float32) * d_out.astype(jnp.float32)).sum(-1) - d_lse
    heads = _specs(split.context, q, k, v, segment_ids)
    per_query = jax.P(*heads[0][:3])
    run = _over(split, _backward, (*heads, per_query, heads[0], per_query), heads[:3])
    return *run(q, k, v, segment_ids, lse, d_out, delta), None


_attend.defvjp(_attend_fwd, _attend_bwd)


def _specs(context: Context, q, k, v, segment_ids) -> tuple:
    axes = ("batch", "heads", "sequence", None)
    specs = [spec_for(context.mesh, axes, x.shape) for x in (q, k, v)]
    return *specs, spec_for(context.mesh, ("batch", "sequence"), segment_ids.shape)


def _over(split: _Split, program, in_specs, out_specs):
    return jax.shard_map(
        functools.partial(program, split),
        mesh=split.context.mesh,
        in_specs=tuple(in_specs),
        out_specs=tuple(out_specs),
        check_vma=False,  # nothing is differentiated through it
    )


# --- pieces of rows -----------------------------------------------------------------------------


class Piece(NamedTuple):
    """Segments and positions of a block of queries or of keys."""

    segments: Int[Array, "B s"]
    places: Int[Array, " s"]  # positions in the row, consecutive

    def sees(self, keys: Piece, window: int | None) -> Array:
        """Returns the mask [B 1 1 s u]: causal, within segments and the window."""
        causal = self.places[:, None] >= keys.places[None]
        if window is not None:
            causal = causal & (self.places[:, None] - window < keys.places[None])
        return (causal & (self.segments[:, :, None] == keys.segments[:, None]))[:, None, None]

    def sees_any(self, keys: Piece, window: int | None) -> Array:
        """Returns whether any entry of `sees` may be True, without computing the whole mask."""
        lowest = keys.segments.min(1) <= self.segments.max(1)
        highest = keys.segments.max(1) >= self.segments.min(1)
        near = self.places[-1] >= keys.places[0]
        if window is not None:
            near = near & (self.places[0] - keys.places[-1] < window)
        return near & (lowest & highest).any()


# --- what a device does ---------------------------------------------------------------------------


class Local(NamedTuple):
    """How queries of a device, which are scaled, attend to keys and values of whole rows.

    Attributes:
      attend: (q, k, v, `Piece` of the queries, of the keys, window) -> float32 attention [B N s H]
        and its log-sum-exp [B N s].
      gradients: (q, k, v, pieces, window, lse, d_out, delta) -> float32 gradients of q, k and v.
        `delta` [B N s] is the term of each query's scores that all its keys share: the sum of the
        result times `d_out`, less the gradient of `lse`.
      in_float32: whether it takes float32 queries; else they have the dtype of the model.
    """

    attend: Callable
    gradients: Callable
    in_float32: bool


def _forward(split: _Split, q, k, v, segments):
    queries, keys, k, v = _whole_rows(split, segments, k, v)
    out, lse = split.local.attend(q, k, v, queries, keys, split.window)
    return out.astype(split.dtype), lse


def _backward(split: _Split, q, k, v, segments, lse, d_out, delta):
    dtypes = q.dtype, k.dtype, v.dtype
    queries, keys, k, v = _whole_rows(split, segments, k, v)
    d_q, *d_keys = split.local.gradients(q, k, v, queries, keys, split.window, lse, d_out, delta)
    scatter = functools.partial(jax.lax.psum_scatter, scatter_dimension=2, tiled=True)
    gradients = d_q, *(scatter(x, AXIS) for x in d_keys)
    return tuple(x.astype(dtype) for x, dtype in zip(gradients, dtypes, strict=True))


def _whole_rows(split: _Split, segments, *arrays):
    """Returns the tokens of this device, those of whole rows, and arrays [B K s H] of whole rows.

    They are in the order of the devices.
    """
    segments_of_all = jax.lax.all_gather(segments, AXIS, axis=1, tiled=True)
    places = jnp.asarray(split.context.places(segments_of_all.shape[1]))
    size = segments.shape[1]
    own = jax.lax.dynamic_slice_in_dim(places, jax.lax.axis_index(AXIS) * size, size)
    whole = (jax.lax.all_gather(x, AXIS, axis=2, tiled=True) for x in arrays)
    return Piece(segments, own), Piece(segments_of_all, places), *whole


# --- in XLA ---------------------------------------------------------------------------------------


@functools.cache  # equal layers have one `Local`
def in_xla(soft_cap: float | None) -> Local:
    """Returns what attends in XLA, in float32, chunk by chunk."""
    attend = functools.partial(_attend_in_xla, soft_cap)
    return Local(attend, functools.partial(_gradients_in_xla, soft_cap), in_float32=True)


def _chunks(piece: Piece, size: int) -> list[Piece]:
    """Cuts tokens into chunks of a size, whose positions are consecutive."""
    count = len(piece.places) // size
    segments = jnp.split(piece.segments, count, axis=1)
    return list(map(Piece, segments, jnp.split(piece.places, count)))


def _blocks(keys: Piece, k, v, size: int) -> tuple[Piece, Array, Array]:
    """Returns the chunks of keys along a new first axis."""
    pieces = jax.tree.map(lambda *x: jnp.stack(x), *_chunks(keys, size))
    k, v = (jnp.stack(jnp.split(x, x.shape[2] // size, axis=2)) for x in (k, v))
    return pieces, k, v


def _grouped(x, kv_heads: int, size: int) -> list[Array]:
    """Reshapes [B N s ..] to [B K G s ..], and cuts it into chunks."""
    x = x.reshape(x.shape[0], kv_heads, x.shape[1] // kv_heads, *x.shape[2:])
    return jnp.split(x, x.shape[3] // size, axis=3)


def _joined(chunks: Sequence[Array]) -> Array:
    """Does the opposite of `_grouped`."""
    x = jnp.concatenate(chunks, axis=3)
    return x.reshape(x.shape[0], -1, *x.shape[3:])


def _scores(q, k, soft_cap):
    return capped(jnp.einsum("bkgsh,bkuh->bkgsu", q, k.astype(jnp.float32)), soft_cap)


def _attend_in_xla(soft_cap, q, k, v, queries: Piece, keys: Piece, window):
    size = q.shape[2] // Context.chunks
    blocks = _blocks(keys, k, v, size)

    def attend(piece: Piece, q):
        def add(running, block):
            keys, k, v = block

            def add_seen(running):
                scores = jnp.where(piece.sees(keys, window), _scores(q, k, soft_cap), NEG_INF)
                values = v.astype(jnp.float32)
                return running.add(
                    scores, lambda weights: jnp.einsum("bkgsu,bkuh->bkgsh", weights, values)
                )

            seen = piece.sees_any(keys, window)
            return jax.lax.cond(seen, add_seen, lambda running: running, running), None

        one = (*q.shape[:-1], 1)
        start = Running(jnp.full(one, NEG_INF), jnp.zeros(one), jnp.zeros(q.shape))
        running = jax.lax.scan(add, start, blocks)[0]
        return running.out / running.total, running.lse[..., 0]

    found = map(attend, _chunks(queries, size), _grouped(q, k.shape[1], size))
    out, lse = zip(*found, strict=True)
    return _joined(out), _joined(lse)


def _gradients_in_xla(soft_cap, q, k, v, queries: Piece, keys: Piece, window, lse, d_out, delta):
    size = q.shape[2] // Context.chunks
    blocks = _blocks(keys, k, v, size)

    def gradients(piece: Piece, q, lse, d_out, delta):
        def add(d_q, block):
            keys, k, v = block

            def add_seen(d_q, *_):
                scores = _scores(q, k, soft_cap)
                mask = piece.sees(keys, window)
                weights = jnp.where(mask, jnp.exp(scores - lse[..., None]), 0.0)
                d_weights = jnp.einsum("bkgsh,bkuh->bkgsu", d_out, v.astype(jnp.float32))
                d_scores = weights * (d_weights - delta[..., None])
                if soft_cap is not None:
                    d_scores = d_scores * (1 - (scores / soft_cap) ** 2)
                d_q += jnp.einsum("bkgsu,bkuh->bkgsh", d_scores, k.astype(jnp.float32))
                d_k = jnp.einsum("bkgsu,bkgsh->bkuh", d_scores, q)
                return d_q, d_k, jnp.einsum("bkgsu,bkgsh->bkuh", weights, d_out)

            state = d_q, jnp.zeros(k.shape), jnp.zeros(v.shape)
            seen = piece.sees_any(keys, window)
            d_q, *d_keys = jax.lax.cond(seen, add_seen, lambda *state: state, *state)
            return d_q, d_keys

        return jax.lax.scan(add, jnp.zeros(q.shape), blocks)

    given = [_grouped(x, k.shape[1], size) for x in (q, lse, d_out, delta)]
    found = map(gradients, _chunks(queries, size), *given)
    d_q, d_blocks = zip(*found, strict=True)
    d_k, d_v = (jnp.concatenate([*sum(x)], axis=2) for x in zip(*d_blocks, strict=True))
    return _joined(d_q), d_k, d_v
