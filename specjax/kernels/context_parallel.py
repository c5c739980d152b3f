"""Context parallelism: causal attention within segments, of rows that are split over devices.

`Context.attention` chooses one of two implementations. `all_gather`: every device gathers the keys
and values of whole rows; it is simple, and the reference for the other. `ring` (Liu et al. 2023,
arXiv 2310.01889): blocks of keys and values are sent around the devices, and each device adds those
that its queries may see to a running softmax. Blocks that no query may see (later ones, other
segments) are sent on without being computed.

Both have gradients written by hand, as in `reference.py`: the backward pass recomputes weights from
their log-sum-exp. In the ring the gradients of keys and values are sent along with them, and are
back on their own device after one turn of the ring. The log-sum-exp is an output with a gradient of
its own, so that more keys can be added to the softmax later.

What a device does with a block of keys is a `Step`: `in_xla`, which writes the scores of two chunks
to memory, or the kernels of `flash.py`. Blocks travel while a step computes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from specjax.config.model import ATTENTION_RESIDUALS
from specjax.kernels.backend import Declined
from specjax.kernels.reference import NEG_INF, Running, capped, own_in_window
from specjax.parallel.context import AXIS, Context
from specjax.parallel.sharding import spec_for


def attention(
    q, k, v, own, segment_ids, context: Context, *,
    window: int | None = None, soft_cap: float | None = None, step: Step | None = None,
) -> Float[Array, "B N S H"]:  # fmt: skip
    """Computes `reference.causal_attention_with_own` of rows in the order of `context`.

    A position's own rows are on its query's device, so they need no communication.

    Args:
      own: keys and values of later steps; empty: causal attention alone.
      step: what a device does with a block of keys; None: in XLA.

    Raises:
      Declined: the step is a kernel, and there is a soft-cap.
    """
    if step is not None and soft_cap is not None:
        raise Declined("it supports no soft-cap")
    step = step or in_xla(soft_cap)
    if not own:
        return _with_lse(q, k, v, segment_ids, context, window, step, q.dtype)[0].astype(q.dtype)
    own, base_window = own_in_window(own, window)
    if base_window == 0:  # no base row is visible, and a softmax over none would be NaN
        found = jnp.zeros(q.shape), jnp.full(q.shape[:-1], NEG_INF)
    else:
        found = _with_lse(q, k, v, segment_ids, context, base_window, step, jnp.float32)
    return add_own(q, *found, own, soft_cap)


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


def _with_lse(q, k, v, segment_ids, context: Context, window: int | None, step: Step, dtype):
    """Returns attention [B N S H], of a dtype if the step has that, and its log-sum-exp [B N S]."""
    # The queries of a key/value head stay together: where heads are split into more parts than
    # there are key/value heads, these are repeated as often as that takes.
    tp, n, kv_heads = context.mesh.shape.get("tp", 1), q.shape[1], k.shape[1]
    if n % tp == 0 and kv_heads % tp:
        repeats = next(r for r in range(2, n + 1) if kv_heads * r % tp == 0 == n % (kv_heads * r))
        k, v = jnp.repeat(k, repeats, axis=1), jnp.repeat(v, repeats, axis=1)
    scaled = step.queries(q.astype(jnp.float32) * q.shape[-1] ** -0.5, q.dtype)
    dtype = jnp.float32 if scaled.dtype == jnp.float32 else dtype
    return _attend(_Split(context, window, step, dtype), scaled, k, v, segment_ids)


# --- one row over many devices ----------------------------------------------------------------


class _Split(NamedTuple):
    """What is static in attention over many devices.

    Attributes:
      dtype: dtype of the result; its log-sum-exp is float32.
    """

    context: Context
    window: int | None
    step: Step
    dtype: jnp.dtype


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(split: _Split, q, k, v, segment_ids):
    return _attend_fwd(split, q, k, v, segment_ids)[0]


def _attend_fwd(split: _Split, q, k, v, segment_ids):
    context = split.context
    program = {"ring": _ring, "all_gather": _gathered}[context.attention]
    heads = _specs(context, q, k, v, segment_ids)
    # The segments are made to depend on the queries. Otherwise a scan over layers would compute
    # what depends on segments alone, the masks of all pairs of tokens, beforehand and keep it.
    q, segment_ids = jax.lax.optimization_barrier((q, segment_ids))
    program = functools.partial(program, split)
    run = _over(context, program, heads, (heads[0], jax.P(*heads[0][:3])))
    found = run(q, k, v, segment_ids)
    out, lse = (checkpoint_name(x, ATTENTION_RESIDUALS) for x in found)
    return (out, lse), (q, k, v, segment_ids, out, lse)


def _attend_bwd(split: _Split, residuals, gradients):
    q, k, v, segment_ids, out, lse = residuals
    d_out, d_lse = gradients
    context = split.context
    # The term of a softmax's gradient that all keys share. The log-sum-exp depends on every score.
    delta = (out.astype(jnp.float32) * d_out.astype(jnp.float32)).sum(-1) - d_lse
    program = {"ring": _ring_bwd, "all_gather": _gathered_bwd}[context.attention]
    heads = _specs(context, q, k, v, segment_ids)
    per_query = jax.P(*heads[0][:3])
    program = functools.partial(program, split)
    run = _over(context, program, (*heads, per_query, heads[0], per_query), heads[:3])
    return *run(q, k, v, segment_ids, lse, d_out, delta), None


_attend.defvjp(_attend_fwd, _attend_bwd)


def _specs(context: Context, q, k, v, segment_ids) -> tuple:
    axes = ("batch", "heads", "sequence", None)
    specs = [spec_for(context.mesh, axes, x.shape) for x in (q, k, v)]
    return *specs, spec_for(context.mesh, ("batch", "sequence"), segment_ids.shape)


def _over(context: Context, program, in_specs, out_specs):
    return jax.shard_map(
        program,
        mesh=context.mesh,
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


def _pieces(context: Context, segments, device) -> list[Piece]:
    """Returns the chunks of rows that a device holds."""
    size = segments.shape[1] // context.chunks
    return [
        Piece(here, chunk * size + jnp.arange(size))
        for here, chunk in zip(
            jnp.split(segments, context.chunks, axis=1), context.chunks_of(device), strict=True
        )
    ]


def _together(pieces: list[Piece]) -> Piece:
    """Joins the chunks of a device; their positions are then no longer consecutive."""
    segments = jnp.concatenate([piece.segments for piece in pieces], axis=1)
    return Piece(segments, jnp.concatenate([piece.places for piece in pieces]))


# --- what a device does with a block of keys ------------------------------------------------------


class Step(NamedTuple):
    """How queries of a device attend to a block of keys and values of the same or another device.

    The state, whatever it is, holds what the queries attended to in earlier steps.

    Attributes:
      queries: (float32 queries, dtype of the model) -> queries in the dtype that the step takes.
      rows: (array per query [B N s ..], number K of key/value heads) -> the array as the rest
        takes it.
      empty: rows -> the state before any step.
      add: (state, rows, k, v, `Piece` of the queries, of the keys, window) -> state.
      done: state -> float32 attention [B N s H] and its log-sum-exp [B N s].
      gradients: ((d_q, d_k, d_v), rows, k, v, pieces, window, lse, d_out, delta) -> the gradients
        with those of these keys added; d_q, lse, d_out and delta are rows. d_out has the dtype of
        the result, all others are float32.
      whole: whether a step takes all chunks of a device at once, and skips what no query sees.
    """

    queries: Callable
    rows: Callable
    empty: Callable
    add: Callable
    done: Callable
    gradients: Callable
    whole: bool


def _group(x, kv_heads: int):
    """Reshapes [B N s ..] to [B K G s ..]."""
    return x.reshape(x.shape[0], kv_heads, x.shape[1] // kv_heads, *x.shape[2:])


def _scores(q, k, soft_cap):
    return capped(jnp.einsum("bkgsh,bkuh->bkgsu", q, k.astype(jnp.float32)), soft_cap)


def _empty(rows) -> Running:
    """Returns the running softmax of queries [B K G s H] before any key is added."""
    one = (*rows.shape[:-1], 1)
    return Running(jnp.full(one, NEG_INF), jnp.zeros(one), jnp.zeros(rows.shape))


def _add(soft_cap, running: Running, q, k, v, queries: Piece, keys: Piece, window) -> Running:
    """Adds one block of keys to the running softmax of queries."""
    v, mask = v.astype(jnp.float32), queries.sees(keys, window)
    return running.add(
        jnp.where(mask, _scores(q, k, soft_cap), NEG_INF),
        lambda weights: jnp.einsum("bkgsu,bkuh->bkgsh", weights, v),
    )


def _add_gradients(
    soft_cap, state, q, k, v, queries: Piece, keys: Piece, window, lse, d_out, delta
):
    """Adds the gradients of one block of queries and one of keys to (d_q, d_k, d_v)."""
    (d_q, d_k, d_v), mask = state, queries.sees(keys, window)
    scores = _scores(q, k, soft_cap)
    weights = jnp.where(mask, jnp.exp(scores - lse[..., None]), 0.0)
    d_weights = jnp.einsum("bkgsh,bkuh->bkgsu", d_out, v.astype(jnp.float32))
    d_scores = weights * (d_weights - delta[..., None])
    if soft_cap is not None:
        d_scores = d_scores * (1 - (scores / soft_cap) ** 2)
    d_q += jnp.einsum("bkgsu,bkuh->bkgsh", d_scores, k.astype(jnp.float32))
    d_k += jnp.einsum("bkgsu,bkgsh->bkuh", d_scores, q)
    return d_q, d_k, d_v + jnp.einsum("bkgsu,bkgsh->bkuh", weights, d_out)


def _done(running: Running):
    b, kv_heads, group, s, h = running.out.shape
    out = (running.out / running.total).reshape(b, kv_heads * group, s, h)
    return out, running.lse.reshape(b, kv_heads * group, s)


@functools.cache  # equal layers have one `Step`
def in_xla(soft_cap: float | None) -> Step:
    """Returns the step that writes the scores of two chunks to memory."""
    add, gradients = (functools.partial(f, soft_cap) for f in (_add, _add_gradients))
    return Step(lambda q, dtype: q, _group, _empty, add, _done, gradients, whole=False)


# --- the ring -------------------------------------------------------------------------------------


def _pass_on(context: Context, tree):
    """Sends a tree to the next device of the ring."""
    around = [(i, (i + 1) % context.ways) for i in range(context.ways)]
    return jax.tree.map(lambda x: jax.lax.ppermute(x, AXIS, around), tree)


def _parts(split: _Split, segments, device) -> list[Piece]:
    """Returns the tokens of a device, as a step takes them: all together, or each chunk alone."""
    pieces = _pieces(split.context, segments, device)
    return [_together(pieces)] if split.step.whole else pieces


def _cut(parts: list, x, axis: int) -> list:
    return jnp.split(x, len(parts), axis=axis)


def _where_seen(split: _Split, queries: Piece, keys: Piece, add, state):
    """Runs add(state), unless the step does not skip what no query sees and there is nothing."""
    if split.step.whole:
        return add(state)
    seen = queries.sees_any(keys, split.window)
    return jax.lax.cond(seen, add, lambda state: state, state)


def _hops(split: _Split, hop, carry):
    """Runs all hops but the last, which passes nothing on.

    Hops of a kernel are unrolled: in a loop the TPU compiler sends blocks before or after the
    kernel runs, and not meanwhile.
    """
    hops = jnp.arange(split.context.ways - 1)
    return jax.lax.scan(hop, carry, hops, unroll=split.step.whole)[0]


def _ring(split: _Split, q, k, v, segments):
    context, step, window = split.context, split.step, split.window
    here = jax.lax.axis_index(AXIS)
    own = _parts(split, segments, here)
    rows = step.rows(q, k.shape[1])
    queries = _cut(own, rows, -2)
    empty = [step.empty(x) for x in queries]

    def attend(hop, travelling, running):
        k, v, segments = travelling
        pieces = _parts(split, segments, (here - hop) % context.ways)
        blocks = list(zip(pieces, _cut(pieces, k, 2), _cut(pieces, v, 2), strict=True))
        out = []
        for piece, rows, state in zip(own, queries, running, strict=True):
            for keys, k, v in blocks:

                def add(state, piece=piece, rows=rows, keys=keys, k=k, v=v):
                    return step.add(state, rows, k, v, piece, keys, window)

                state = _where_seen(split, piece, keys, add, state)
            out.append(state)
        return out

    def hop(carry, index):
        travelling, running = carry
        following = _pass_on(context, travelling)  # overlaps with the computation below
        return (following, attend(index, travelling, running)), None

    travelling, running = _hops(split, hop, ((k, v, segments), empty))
    running = attend(context.ways - 1, travelling, running)
    if len(running) > 1:
        running = [jax.tree.map(lambda *parts: jnp.concatenate(parts, axis=3), *running)]
    out, lse = step.done(running[0])
    return out.astype(split.dtype), lse


def _ring_bwd(split: _Split, q, k, v, segments, lse, d_out, delta):
    context, step, window = split.context, split.step, split.window
    here, kv_heads = jax.lax.axis_index(AXIS), k.shape[1]
    own = _parts(split, segments, here)
    rows, lse, d_out, delta = (step.rows(x, kv_heads) for x in (q, lse, d_out, delta))
    per_query = [
        _cut(own, x, axis) for x, axis in ((rows, -2), (lse, -1), (d_out, -2), (delta, -1))
    ]

    def attend(hop, travelling, gradients, d_queries):
        k, v, segments = travelling
        pieces = _parts(split, segments, (here - hop) % context.ways)
        d_keys, d_values = (_cut(pieces, x, 2) for x in gradients)
        blocks = list(zip(pieces, _cut(pieces, k, 2), _cut(pieces, v, 2), strict=True))
        d_queries = list(d_queries)
        for i, (piece, *given) in enumerate(zip(own, *per_query, strict=True)):
            for j, (keys, k_block, v_block) in enumerate(blocks):

                def add(state, piece=piece, given=given, keys=keys, k=k_block, v=v_block):
                    rows, *more = given
                    return step.gradients(state, rows, k, v, piece, keys, window, *more)

                state = d_queries[i], d_keys[j], d_values[j]
                d_queries[i], d_keys[j], d_values[j] = _where_seen(split, piece, keys, add, state)
        return tuple(jnp.concatenate(x, axis=2) for x in (d_keys, d_values)), d_queries

    def hop(carry, index):
        # The next keys, and the gradients of these, travel while the kernel computes.
        travelling, gradients, d_queries = carry
        following, gradients = _pass_on(context, (travelling, gradients))
        return (following, *attend(index, travelling, gradients, d_queries)), None

    zeros = jnp.zeros(k.shape), jnp.zeros(v.shape)
    carry = (k, v, segments), zeros, [jnp.zeros(x.shape) for x in per_query[0]]
    travelling, gradients, d_queries = _hops(split, hop, carry)
    gradients = _pass_on(context, gradients)
    gradients, d_queries = attend(context.ways - 1, travelling, gradients, d_queries)
    d_k, d_v = _pass_on(context, gradients)
    d_q = jnp.concatenate(d_queries, axis=-2).reshape(q.shape)
    return d_q.astype(q.dtype), d_k.astype(k.dtype), d_v.astype(v.dtype)


# --- whole rows on every device -------------------------------------------------------------------


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


def _gathered(split: _Split, q, k, v, segments):
    step = split.step
    rows = step.rows(q, k.shape[1])
    queries, keys, k, v = _whole_rows(split, segments, k, v)
    state = step.add(step.empty(rows), rows, k, v, queries, keys, split.window)
    out, lse = step.done(state)
    return out.astype(split.dtype), lse


def _gathered_bwd(split: _Split, q, k, v, segments, lse, d_out, delta):
    step, dtypes = split.step, (k.dtype, v.dtype)
    rows, *given = (step.rows(x, k.shape[1]) for x in (q, lse, d_out, delta))
    queries, keys, k, v = _whole_rows(split, segments, k, v)
    empty = jnp.zeros(rows.shape), jnp.zeros(k.shape), jnp.zeros(v.shape)
    d_q, *more = step.gradients(empty, rows, k, v, queries, keys, split.window, *given)
    d_k, d_v = (
        jax.lax.psum_scatter(x, AXIS, scatter_dimension=2, tiled=True).astype(dtype)
        for x, dtype in zip(more, dtypes, strict=True)
    )
    return d_q.reshape(q.shape).astype(q.dtype), d_k, d_v
