"""The gated delta rule (Yang et al. 2024, arXiv 2412.06464): a recurrence over a matrix.

Each value head has a state S [dk dv]. A row with key k, value v, query q, decay g <= 0 and strength
beta changes it, and reads it:

    S <- exp(g) S;    d = beta (v - S^T k);    S <- S + k d^T;    out = S^T q

There are three forms, with the same results but for rounding:

    in_order   one row after the other, as above; the reference, and the form of invariant mode
    at_once    rows of a tree behind one state: dense products with the mask of their ancestors
    chunked    long rows: `at_once` for blocks of rows, and a scan over the blocks' states

Let D_ti = exp(sum of g of the rows after i on the path to t) where row i is t or an ancestor of it,
and 0 elsewhere. The changes d of all rows solve a system, (I + A) d = beta (v - e S^T k), in which
A_ti = beta_t (k_t . k_i) D_ti below the diagonal, and e_t is the decay since the state. The state
behind row t is e_t S + sum of D_ti k_i d_i^T. So k, d and g of the rows are all that a tree needs
to keep, and no row has a state of its own.

Everything is float32, at the highest precision of products. Exponents are sums over the rows
between, not differences of cumulative sums, and are masked before the exponential: that of a row
which is no ancestor may be infinite.

Dimensions: B sequences, T rows, K key heads, R value heads per key head, dk and dv sizes of a key
and a value. Leading dimensions `..` of blocks are any.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Shaped

from specjax.indexing import expanded, take_along

CHUNK = 64  # rows of a block; transformers and the authors' kernels have the same number
GROUP = 8  # blocks that are prepared together
ROW_BLOCK = 8  # rows that have a state at once in `in_order`

_einsum = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)
_matmul = functools.partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)


class Inputs(NamedTuple):
    """What the rule takes of each row, float32; queries and keys are normed, queries scaled."""

    q: Float[Array, ".. T K dk"]
    k: Float[Array, ".. T K dk"]
    v: Float[Array, ".. T K R dv"]
    g: Float[Array, ".. T K R"]
    beta: Float[Array, ".. T K R"]


class Prepared(NamedTuple):
    """What `at_once` computes of rows before it knows the state."""

    u: Float[Array, ".. K R T dv"]  # d = u - w S
    w: Float[Array, ".. K R T dk"]
    q: Float[Array, ".. K R T dk"]  # out = q S + weights d
    weights: Float[Array, ".. K R T T"]
    k: Float[Array, ".. K R T dk"]  # state behind the last row: decay S + k^T d
    decay: Float[Array, ".. K R"]


def step(state, k, v, g, beta):
    """Applies one row to a state [.. dk dv]; returns the new state and the change d [.. dv]."""
    decayed = jnp.exp(g)[..., None, None] * state
    d = beta[..., None] * (v - (decayed * k[..., None]).sum(-2))
    return decayed + k[..., None] * d[..., None, :], d


def in_order(
    x: Inputs,
    state: Float[Array, "B K R dk dv"],
    path_rows: Int[Array, "*B T A"],
    depth: Int[Array, "*B T"],
) -> tuple[Float[Array, "B T K R dv"], Float[Array, "B T K R dv"]]:
    """Computes rows of a tree by `step` along the path to each of them, some rows at a time.

    Returns:
      the outputs and changes d of the rows.
    """
    b, t = x.q.shape[:2]
    size = min(ROW_BLOCK, t)
    paths = jnp.broadcast_to(path_rows, (b, t, path_rows.shape[-1]))
    depth = jnp.broadcast_to(depth, (b, t))

    def along(a, rows):
        return take_along(a, expanded(rows, a), axis=1)

    def of_block(block):
        q, paths, depth = block

        def one(carry, inputs):
            level, rows = inputs
            k, v, g, beta = (along(a, rows) for a in x[1:])
            after = step(carry[0], k[:, :, :, None], v, g, beta)
            on_path = level <= depth
            chosen = (
                jnp.where(expanded(on_path, new), new, old)
                for new, old in zip(after, carry, strict=True)
            )
            return tuple(chosen), None

        start = jnp.broadcast_to(state[:, None], (b, size, *state.shape[1:]))
        levels = jnp.arange(paths.shape[-1]), jnp.moveaxis(paths, -1, 0)
        carry = start, jnp.zeros((b, size, *x.v.shape[2:]), jnp.float32)
        (state_of_row, d), _ = jax.lax.scan(one, carry, levels)
        return (state_of_row * q[:, :, :, None, :, None]).sum(-2), d

    results = jax.lax.map(of_block, tuple(_blocks(a, size) for a in (x.q, paths, depth)))
    return tuple(jnp.moveaxis(a, 0, 1).reshape(b, -1, *a.shape[3:])[:, :t] for a in results)


def _blocks(a: Shaped[Array, "B T ..."], size: int) -> Shaped[Array, "blocks B size ..."]:
    """Divides rows into blocks, of which the last is filled up with zeros."""
    b, t = a.shape[:2]
    count = -(-t // size)
    a = jnp.pad(a, ((0, 0), (0, count * size - t), *((0, 0),) * (a.ndim - 2)))
    return jnp.moveaxis(a.reshape(b, count, size, *a.shape[2:]), 1, 0)


def advanced_in_order(
    state: Float[Array, "B K R dk dv"], k, d, g, count: Int[Array, " B"]
) -> Float[Array, "B K R dk dv"]:
    """Returns the state after the first `count` of A rows, one after the other."""

    def one(state, row):
        index, k, d, g = row
        after = jnp.exp(g)[..., None, None] * state + k[:, :, None, :, None] * d[..., None, :]
        return jnp.where((index < count)[:, None, None, None, None], after, state), None

    rows = (jnp.moveaxis(a, 1, 0) for a in (k, d, g))
    return jax.lax.scan(one, state, (jnp.arange(k.shape[1]), *rows))[0]


def advanced(
    state: Float[Array, "B K R dk dv"],
    k: Float[Array, "B A K dk"],
    d: Float[Array, "B A K R dv"],
    g: Float[Array, "B A K R"],
    count: Int[Array, " B"],
) -> Float[Array, "B K R dk dv"]:
    """Returns the state after the first `count` of A rows, by one product."""
    inside = jnp.arange(k.shape[1]) < count[:, None]

    def masked(a):
        return jnp.where(expanded(inside, a), a, 0)

    g = masked(g)
    from_row = jnp.flip(jnp.cumsum(jnp.flip(g, 1), 1), 1)  # of a row and all later ones
    d = jnp.moveaxis(masked(d) * jnp.exp(from_row - g)[..., None], 1, -2)
    k = jnp.moveaxis(masked(k), 1, -1)[:, :, None]
    # Batched over all heads: else the result has another layout, and TPU programs copy the state.
    added = _matmul(jnp.broadcast_to(k, (*d.shape[:3], *k.shape[-2:])), d)
    return jnp.exp(from_row[:, 0])[..., None, None] * state + added


def _block(x: Inputs, sees: Bool[Array, ".. T T"], from_state: Bool[Array, ".. T"]) -> Prepared:
    """Prepares rows.

    Args:
      sees: whether row t is row i or a descendant of it; ancestors stand before their descendants.
      from_state: whether a row sees the state.
    """
    rows = sees.shape[-1]
    own = sees.astype(jnp.float32)
    below = own - np.eye(rows, dtype=np.float32)
    between = _einsum("...tj,...jkr,...ji->...krti", own, x.g, below)
    since = _einsum("...tj,...jkr->...krt", own, x.g)
    mask = sees[..., None, None, :, :]
    decay = jnp.exp(jnp.where(mask, between, -jnp.inf))
    since = jnp.exp(jnp.where(from_state[..., None, None, :], since, -jnp.inf))

    def pairs(a, b):
        return _einsum("...tkc,...ikc->...kti", a, b)[..., None, :, :] * decay

    beta = jnp.moveaxis(x.beta, -3, -1)
    inverse = _inverse(pairs(x.k, x.k) * beta[..., None])
    k = jnp.moveaxis(x.k, -3, -2)[..., None, :, :]
    q = jnp.moveaxis(x.q, -3, -2)[..., None, :, :]
    return Prepared(
        u=_matmul(inverse, beta[..., None] * jnp.moveaxis(x.v, -4, -2)),
        w=_matmul(inverse, (beta * since)[..., None] * k),
        q=q * since[..., None],
        weights=pairs(x.q, x.k),
        k=k * decay[..., -1, :, None],
        decay=since[..., -1],
    )


@jax.custom_vjp
def _inverse(a: Float[Array, ".. T T"]) -> Float[Array, ".. T T"]:
    """Inverts I + the part of `a` below the diagonal, by blocks whose size doubles.

    With X the inverse of the diagonal blocks and C the blocks left of every second one, the inverse
    of blocks twice as large is X - X C X.
    """
    index = np.arange(a.shape[-1])
    inverse, size = jnp.broadcast_to(jnp.eye(len(index), dtype=a.dtype), a.shape), 1
    while size < len(index):
        number = index // size
        left = (number[:, None] % 2 == 1) & (number[:, None] == number + 1)
        inverse = inverse - _matmul(_matmul(inverse, jnp.where(left, a, 0)), inverse)
        size *= 2
    return inverse


def _inverse_fwd(a):
    inverse = _inverse(a)
    return inverse, inverse


def _inverse_bwd(inverse, gradient):
    transposed = inverse.swapaxes(-1, -2)
    return (-jnp.tril(_matmul(_matmul(transposed, gradient), transposed), -1),)


_inverse.defvjp(_inverse_fwd, _inverse_bwd)


def _behind(rows: Prepared, state: Float[Array, ".. K R dk dv"]):
    """Returns outputs and changes [.. K R T dv] of rows behind a state."""
    both = jnp.concatenate([rows.w, rows.q], axis=-2)  # one product reads the state once
    removed, out = jnp.split(_matmul(both, state), 2, axis=-2)
    d = rows.u - removed
    return out + _matmul(rows.weights, d), d


def at_once(
    x: Inputs, state: Float[Array, "B K R dk dv"], sees: Bool[Array, "*B T T"]
) -> tuple[Float[Array, "B T K R dv"], Float[Array, "B T K R dv"]]:
    """Computes rows of a tree behind a state; returns their outputs and changes d.

    Rows that are not finite give NaN to the rows that see them, and to no others.
    """
    if sees.shape[-1] == 1:  # plain decoding
        q, k, v, g, beta = (a[:, 0] for a in x)
        state, d = step(state, k[:, :, None], v, g, beta)
        return (state * q[:, :, None, :, None]).sum(-2)[:, None], d[:, None]
    bad, x = _finite(x)
    sees = jnp.broadcast_to(sees, (*bad.shape, bad.shape[-1]))
    results = _behind(_block(x, sees, jnp.ones_like(bad)), state)
    reached = (sees & bad[:, None]).any(-1)
    return tuple(_with_nan(jnp.moveaxis(a, -2, 1), reached) for a in results)


def chunked(
    x: Inputs,
    state: Float[Array, "B K R dk dv"] | None = None,
    segments: Int[Array, "B T"] | None = None,
) -> tuple[Float[Array, "B T K R dv"], Float[Array, "B T K R dv"]]:
    """Computes consecutive rows in blocks of `CHUNK`.

    The memory grows with T, not with its square. Derivatives keep the inputs, and a state for every
    `GROUP` blocks.

    Args:
      state: state before the first row. None: zeros, in training: rows that are not finite may
        then spoil any others.
      segments: numbers of sequences that are packed one after the other, each of which begins with
        a state of zeros. None: all rows are one sequence.

    Returns:
      the outputs and changes d of the rows.
    """
    b, t = x.g.shape[:2]
    training = state is None
    if training:
        state = jnp.zeros((b, *x.v.shape[2:4], x.k.shape[-1], x.v.shape[-1]), jnp.float32)
    else:
        bad, x = _finite(x)
    if segments is None:
        segments = jnp.ones((b, t), jnp.int32)
    size = min(CHUNK, t)
    count = -(-t // size)
    groups = -(-count // GROUP)
    causal = np.tril(np.ones((size, size), bool))

    def of_group(carry, group):
        state, before = carry  # and the segment of the row before
        x, ids = jax.tree.map(lambda a: _blocks(a, size), group)
        last = jnp.concatenate([before[None], ids[:-1, :, -1]])
        sees = causal & (ids[..., :, None] == ids[..., None, :])
        state, results = jax.lax.scan(of_block, state, _block(x, sees, ids == last[..., None]))
        return (state, ids[-1, :, -1]), results

    def of_block(state, rows):
        out, d = _behind(rows, state)
        added = _matmul(rows.k.swapaxes(-1, -2), d)
        return rows.decay[..., None, None] * state + added, (out, d)

    inputs = jax.tree.map(lambda a: _blocks(a, size * -(-count // groups)), (x, segments))
    run = jax.checkpoint(of_group) if training else of_group
    _, results = jax.lax.scan(run, (state, segments[:, 0]), inputs)

    def rows(a):
        """Returns rows [B T K R dv] of groups of blocks [groups blocks B K R size dv]."""
        a = jnp.moveaxis(a, (2, -2), (0, 3))
        return a.reshape(b, -1, *a.shape[4:])[:, :t]

    out, d = map(rows, results)
    if training:
        return out, d
    reached = jnp.cumsum(bad, axis=1) > 0
    return _with_nan(out, reached), _with_nan(d, reached)


def _finite(x: Inputs) -> tuple[Bool[Array, "B T"], Inputs]:
    """Returns which rows are not finite, and the inputs with zeros in their place."""
    flat = (jnp.isfinite(a).reshape(*a.shape[:2], -1).all(-1) for a in x)
    bad = ~functools.reduce(jnp.logical_and, flat)

    def cleared(a):
        return jnp.where(expanded(bad, a), 0, a)

    return bad, jax.tree.map(cleared, x)


def _with_nan(a: Array, reached: Bool[Array, "B T"]) -> Array:
    return jnp.where(expanded(reached, a), jnp.nan, a)
