"""Attention equals a dense softmax over exactly the keys that a query may see."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.config import SpecConfig
from specjax.decode.tree import ancestors, pack_bits
from specjax.engine.runner import Runner
from specjax.engine.settings import EngineConfig
from specjax.kernels import dispatch
from specjax.models.families.dense import dense_config

HEAD = 4


def softmax_over(q, keys, values):
    """One query [H] over the keys [M H] that it sees, in float64."""
    scores = keys.astype(np.float64) @ q.astype(np.float64) / np.sqrt(len(q))
    weights = np.exp(scores - scores.max())
    return weights @ values.astype(np.float64) / weights.sum()


def random_parents(rng, rows):
    return np.array([0] + [rng.integers(0, r) for r in range(1, rows)])


@pytest.mark.parametrize(
    ("rows", "heads", "kv_heads"),
    [
        (1, 4, 2),
        (7, 2, 2),
        (33, 4, 1),
        (70, 6, 3),
    ],
)
def test_tree_attention_is_a_softmax_over_the_prefix_and_the_ancestors(rows, heads, kv_heads):
    rng = np.random.default_rng(rows)
    batch, slots = 3, 11
    visible = ancestors(random_parents(rng, rows))
    q = rng.normal(size=(batch, heads, rows, HEAD)).astype(np.float32)
    k_tree, v_tree = rng.normal(size=(2, batch, kv_heads, rows, HEAD)).astype(np.float32)
    k_cache, v_cache = 9 * rng.normal(size=(2, batch, kv_heads, slots, HEAD)).astype(np.float32)
    prefix = np.array([0, 5, slots])

    attend = jax.jit(dispatch.tree_attention)
    out = attend(q, k_tree, v_tree, k_cache, v_cache, prefix, pack_bits(visible))
    expected = np.empty(q.shape)
    for b, n, t in np.ndindex(batch, heads, rows):
        kv = n // (heads // kv_heads)
        keys = np.concatenate([k_cache[b, kv, : prefix[b]], k_tree[b, kv][visible[t]]])
        values = np.concatenate([v_cache[b, kv, : prefix[b]], v_tree[b, kv][visible[t]]])
        expected[b, n, t] = softmax_over(q[b, n, t], keys, values)
    np.testing.assert_allclose(out, expected, atol=2e-5)


@pytest.mark.parametrize("window", [None, 1, 3, 9])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_a_window_counts_positions_and_a_sink_takes_its_share_of_the_softmax(window, with_sinks):
    """A row lies as many positions behind the prefix as it is deep; the prefix has three blocks."""
    rng = np.random.default_rng(0)
    batch, heads, kv_heads, rows, slots = 3, 4, 2, 9, 300
    visible = ancestors(random_parents(rng, rows))
    depth = visible.sum(-1) - 1
    q = rng.normal(size=(batch, heads, rows, HEAD)).astype(np.float32)
    k, v = rng.normal(size=(2, batch, kv_heads, rows, HEAD)).astype(np.float32)
    k_cache, v_cache = rng.normal(size=(2, batch, kv_heads, slots, HEAD)).astype(np.float32)
    prefix, sinks = np.array([0, 5, slots]), rng.normal(size=heads).astype(np.float32)
    attend = jax.jit(functools.partial(dispatch.tree_attention, window=window, with_lse=True))
    out, lse = attend(
        q, k, v, k_cache, v_cache, prefix, pack_bits(visible), sinks=sinks if with_sinks else None
    )
    for b, n, t in np.ndindex(batch, heads, rows):
        at = prefix[b] + depth[t]
        near = slice(0 if window is None else max(at - window + 1, 0), prefix[b])
        above = visible[t] & (True if window is None else depth > depth[t] - window)
        kv = n // (heads // kv_heads)
        keys = np.concatenate([k_cache[b, kv, near], k[b, kv][above]]).astype(np.float64)
        values = np.concatenate([v_cache[b, kv, near], v[b, kv][above]])
        scores = keys @ q[b, n, t].astype(np.float64) / np.sqrt(HEAD)
        total = np.exp(scores).sum() + (np.exp(sinks[n]) if with_sinks else 0)
        np.testing.assert_allclose(lse[b, n, t], np.log(total), atol=1e-5)
        np.testing.assert_allclose(out[b, n, t], np.exp(scores) @ values / total, atol=1e-5)


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
def test_attention_by_position_equals_decoding_the_path_one_row_at_a_time_bit_by_bit(dtype):
    """Each row of a tree against a program of one shape in which its ancestors are cached."""
    rng = np.random.default_rng(8)
    batch, heads, rows, slots = 2, 4, 7, 24
    parents = [random_parents(rng, rows) for _ in range(batch)]
    depth = np.array([[ancestors(p)[t].sum() - 1 for t in range(rows)] for p in parents])
    path_rows = np.zeros((batch, rows, rows), np.int32)
    for b, t in np.ndindex(batch, rows):
        path = np.flatnonzero(ancestors(parents[b])[t])
        path_rows[b, t, : len(path)] = sorted(path, key=lambda row: depth[b, row])
    q = rng.normal(size=(batch, heads, rows, HEAD)).astype(dtype)
    k, v = rng.normal(size=(2, batch, 2, rows, HEAD)).astype(dtype)
    k_cache, v_cache = rng.normal(size=(2, batch, 2, slots, HEAD)).astype(dtype)
    prefix = np.array([1, 4])
    attend = jax.jit(dispatch.tree_attention_by_position)
    out = attend(q, k, v, k_cache, v_cache, prefix, path_rows, depth)
    bits = np.stack([pack_bits(ancestors(p)) for p in parents])
    usual = jax.jit(dispatch.tree_attention)(q, k, v, k_cache, v_cache, prefix, bits)
    exact = dtype == np.float32
    np.testing.assert_allclose(np.float32(out), np.float32(usual), atol=2e-6 if exact else 2e-2)
    root = np.zeros_like(depth)
    for t in range(rows):
        cached_k, cached_v = np.array(k_cache), np.array(v_cache)
        for b in range(batch):
            above = path_rows[b, t, : depth[b, t]]
            at = slice(prefix[b], prefix[b] + depth[b, t])
            cached_k[b, :, at], cached_v[b, :, at] = k[b][:, above], v[b][:, above]
        alone = [np.repeat(x[:, :, t : t + 1], rows, axis=2) for x in (q, k, v)]
        plain = attend(*alone, cached_k, cached_v, prefix + depth[:, t], 0 * path_rows, root)
        np.testing.assert_array_equal(plain[:, :, 0], out[:, :, t])


def paged_case(rng, size, stretches, rows, room):
    """(q, k, v, bits, parents), pages with their table and what they hold in a row, and prefixes.

    Sequences share their first page, pages lie in no order, and what no prefix covers is far from
    all that is covered. `room`: positions that the longest prefix leaves free.
    """
    batch, heads, kv_heads = 4, 4, 2
    prefix = rng.integers(0, size * stretches - room + 1, batch)
    prefix[:2] = size * stretches - room, 0
    table = rng.permutation(batch * stretches).reshape(batch, stretches) + 1
    table[:3, 0] = table[0, 0]
    pages = rng.normal(size=(2, 1 + batch * stretches, kv_heads, size, HEAD)).astype(np.float32)
    covered = np.zeros((len(pages[0]), size), bool)
    for row, length in zip(table, prefix, strict=True):
        for at in range(length):
            covered[row[at // size], at % size] = True
    pages = np.where(covered[:, None, :, None], pages, 1e4)
    in_a_row = np.moveaxis(pages[:, table], 2, 3).reshape(2, batch, kv_heads, -1, HEAD)
    q = rng.normal(size=(batch, heads, rows, HEAD)).astype(np.float32)
    k, v = rng.normal(size=(2, batch, kv_heads, rows, HEAD)).astype(np.float32)
    return (q, k, v), random_parents(rng, rows), pages, table, in_a_row, prefix


@pytest.mark.parametrize(("size", "stretches"), [(16, 5), (128, 3), (200, 3), (300, 1)])
def test_attention_over_pages_is_attention_over_the_positions_in_a_row(size, stretches):
    """Pages below, as large as and above the blocks in which they are read, multiples or not."""
    rng = np.random.default_rng(size)
    attend = jax.jit(dispatch.tree_attention)
    for _ in range(3):
        new, parents, pages, table, in_a_row, prefix = paged_case(rng, size, stretches, 5, 0)
        bits = pack_bits(ancestors(parents))
        out = attend(*new, *pages, prefix, bits, table)
        expected = attend(*new, *in_a_row, prefix, bits)
        np.testing.assert_allclose(out, expected, atol=2e-6)
        wrong = attend(*new, *pages, prefix, bits, np.roll(table, 1, axis=0))
        assert np.abs(wrong - expected).max() > 0.1


@pytest.mark.parametrize("max_len", [40, 64])
@pytest.mark.parametrize("strategy", ["4_1_5", "16_1_17", "30_1_31"])
@pytest.mark.parametrize("page_size", [16, 32, 0, None])
def test_every_table_has_room_for_a_path_behind_the_longest_prefix(max_len, strategy, page_size):
    """Or attention by position would put the path over the end of the prefix."""
    cfg = dense_config(32, 16, 24, 1, 2, 1, 8, mtp_num_layers=1)
    spec = SpecConfig(strategy, invariant=True)
    runner = Runner(cfg, spec, batch=2, max_len=max_len, config=EngineConfig(page_size=page_size))
    longest = max_len - 2  # one token below the limit, and the root is not in the cache
    assert longest + runner.steps + 1 <= runner.table_width * runner.page_size


def packed(rng, batch, length):
    """Segment ids of a few samples per row, padded with 0."""
    ids = np.zeros((batch, length), np.int32)
    for row in ids:
        cuts = np.sort(rng.choice(np.arange(1, length), 3, replace=False))
        for i, (a, b) in enumerate(zip([0, *cuts[:-1]], cuts, strict=True)):
            row[a:b] = i + 1
    return ids


def seen(segments):
    """[B S S]: earlier or same position of the same segment."""
    length = segments.shape[1]
    return np.tri(length, dtype=bool) & (segments[:, :, None] == segments[:, None])


def naive_attention(q, k, v, mask):
    """Repeats the shared heads and takes the obvious softmax."""
    group = q.shape[1] // k.shape[1]
    k, v = jnp.repeat(k, group, axis=1), jnp.repeat(v, group, axis=1)
    scores = jnp.einsum("bnth,bnsh->bnts", q, k) / jnp.sqrt(q.shape[-1])
    weights = jax.nn.softmax(jnp.where(mask[:, None], scores, -jnp.inf), axis=-1)
    return jnp.einsum("bnts,bnsh->bnth", weights, v)


@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (6, 2)])
def test_causal_attention_and_its_gradient_equal_the_naive_ones_on_packed_rows(heads, kv_heads):
    rng = np.random.default_rng(heads)
    batch, length = 2, 13
    segments = packed(rng, batch, length)
    mask = seen(segments)
    q = rng.normal(size=(batch, heads, length, HEAD)).astype(np.float32)
    k, v = rng.normal(size=(2, batch, kv_heads, length, HEAD)).astype(np.float32)
    out_weights = rng.normal(size=q.shape).astype(np.float32)

    def value_and_grads(attend):
        def loss(q, k, v):
            out = attend(q, k, v)
            return (out * out_weights).sum(), out

        grads, out = jax.jit(jax.grad(loss, argnums=(0, 1, 2), has_aux=True))(q, k, v)
        return out, *grads

    ours = value_and_grads(lambda q, k, v: dispatch.causal_attention(q, k, v, segments))
    naive = value_and_grads(lambda q, k, v: naive_attention(q, k, v, mask))
    for mine, other in zip(ours, naive, strict=True):
        np.testing.assert_allclose(mine, other, atol=2e-5)
