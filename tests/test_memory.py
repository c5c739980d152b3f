"""What is written to pages is what would be written to a row of positions, and nothing else is."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hlo import received

from specjax.interfaces import Memory, Room, Where
from specjax.kernels.reference import contiguous
from specjax.memory import (
    KVCache,
    commit_rows,
    copy_pages,
    cost,
    empty,
    take_rows,
)
from specjax.models.families.dense import dense_config
from specjax.models.transformer import graphdef, init_params
from specjax.parallel.sharding import MESH_AXES

CFG = dense_config(32, 16, 24, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=4)
BATCH, STRETCHES = 3, 3


def random_cache(rng, pages, size, stacked) -> KVCache:
    """Keys and values that are all different."""
    shape = (pages, 2, size, 4)

    def arrays():
        if stacked:
            return jnp.asarray(rng.normal(size=(2, *shape)), jnp.float32)
        return tuple(jnp.asarray(rng.normal(size=shape), jnp.float32) for _ in range(2))

    return KVCache(arrays(), arrays())


def in_a_row(cache: KVCache, table, spare: int) -> KVCache:
    """The positions of every sequence one after the other, and `spare` more."""
    if isinstance(cache.k, tuple):
        return jax.tree.map(lambda x: _in_a_row(x, table, spare), cache)
    return jax.tree.map(lambda x: jax.vmap(lambda y: _in_a_row(y, table, spare))(x), cache)


def _in_a_row(pages, table, spare):
    return jnp.pad(contiguous(pages, table), [(0, 0)] * 2 + [(0, spare), (0, 0)])


def page_of(x, page) -> np.ndarray:
    """One page, or several, of an array in either layout."""
    return np.take(np.asarray(x), page, axis=x.ndim - 4)


def own_table(rng, last=()):
    """Pages of each sequence in no order, then `last`."""
    pages = rng.permutation(BATCH * STRETCHES).reshape(BATCH, STRETCHES) + 1
    return np.concatenate([pages, np.tile(last, (BATCH, 1)).astype(int)], axis=1)


commit = functools.partial(jax.jit, static_argnames="kernel")(commit_rows)


def check_commit(before, rows, start, table, spare):
    """What the pages of `table` hold is what a cache of one page per sequence does."""
    after = np.arange(BATCH)
    got = commit(before, rows, start, after=after, table=table)
    own = table[:, :STRETCHES]
    want = commit(in_a_row(before, own, spare), rows, start, after=after)
    room = STRETCHES * jax.tree.leaves(before)[0].shape[-2]
    jax.tree.map(
        lambda a, b: np.testing.assert_array_equal(a, b[..., :room, :]), in_a_row(got, own, 0), want
    )
    return got


STRETCHED = [(8, 5), (8, 12), (8, 1), (8, 11), (8, 8), (6, 9)]


@pytest.mark.parametrize(
    ("size", "count", "stacked"),
    [*((*case, True) for case in STRETCHED), *((*case, False) for case in STRETCHED[:2])],
)
def test_rows_are_written_to_pages_as_to_positions_in_a_row(size, count, stacked):
    """From every offset: within a page, up to its end, across one boundary or two."""
    rng = np.random.default_rng(size)
    before = random_cache(rng, 1 + BATCH * STRETCHES, size, stacked)
    rows = random_cache(rng, BATCH, count, stacked)
    starts = np.arange(0, STRETCHES * size - count + 1)
    for first in starts:
        table = own_table(rng)
        start = np.array([first, *rng.choice(starts, BATCH - 1)])
        got = check_commit(before, rows, start, table, 0)
        for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(got), strict=True):
            np.testing.assert_array_equal(page_of(new, 0), page_of(old, 0))


@pytest.mark.parametrize("count", [7, 8])
def test_rows_of_positions_without_a_page_are_dropped(count):
    """Past the end of the table, whose last entry is 0, and where entries before it are 0."""
    rng, size = np.random.default_rng(count), 8
    before = random_cache(rng, 1 + BATCH * STRETCHES, size, False)
    rows = random_cache(rng, BATCH, count, False)
    table = own_table(rng, last=[0])
    end = STRETCHES * size
    for first in range(end - size, end + 3 * size):
        starts = np.array([first, end - 1, end + size])
        check_commit(before, rows, starts, table, 5 * size)
    table[0] = 0
    got = commit(before, rows, np.array([0, 8, 16]), table=table)
    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(got), strict=True):
        changed = (np.asarray(old) != np.asarray(new)).any((1, 2, 3))
        assert np.flatnonzero(changed).tolist() == sorted([table[1, 1], table[2, 2]])


@pytest.mark.parametrize("stacked", [True, False])
def test_pages_are_copied_one_after_the_other(stacked):
    rng = np.random.default_rng(1)
    before = random_cache(rng, 6, 4, stacked)
    source, target = np.array([3, 1, 0, 2, 3]), np.array([2, 4, 0, 5, 2])
    got = jax.jit(copy_pages)(before, source, target)
    expected = [0, 1, 3, 3, 1, 3]  # 5 gets 2 as it is by then
    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(got), strict=True):
        np.testing.assert_array_equal(new, page_of(old, expected))


@pytest.mark.parametrize("stacked", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_cost_is_what_a_page_of_all_layers_takes(stacked, dtype):
    cfg = CFG.running(compute_dtype=dtype, scan_layers=stacked)
    pages = empty(cfg, Room(slots=1, pages=5, page_size=8)).pages
    assert sum(x.nbytes for x in jax.tree.leaves(pages)) == 5 * cost(cfg, 8).page


@pytest.mark.parametrize("stacked", [True, False])
def test_rows_are_taken_in_the_order_of_a_path(stacked):
    rows = random_cache(np.random.default_rng(3), 2, 5, stacked)
    path = np.array([[0, 2, 4], [1, 1, 3]])
    taken = take_rows(rows, jnp.asarray(path))
    for x, y in zip(jax.tree.leaves(rows), jax.tree.leaves(taken), strict=True):
        for b in range(2):
            np.testing.assert_array_equal(page_of(y, b), page_of(x, b)[..., path[b], :])


def test_a_scan_over_layers_reads_pages_where_they_lie():
    """Given stacked pages it would copy a layer out of the stack, to read a few of its pages."""
    rng, cfg = np.random.default_rng(3), CFG.running(scan_layers=True)
    cache = random_cache(rng, 1 + BATCH * STRETCHES, 4, stacked=True)
    table = own_table(rng)
    params, tokens = init_params(cfg, 0), jnp.asarray(rng.integers(32, size=(BATCH, 2)))
    prefix = jnp.asarray([5, 12, 0])
    bits = jnp.asarray([[1], [3]], jnp.uint32)  # a chain

    def states(cache, table):
        model = nnx.merge(graphdef(cfg), params)
        positions = prefix[:, None] + jnp.arange(2)
        where = Where("tree", positions, prefix=prefix, visible=bits, table=table)
        return model.decode(tokens, where, Memory((cache,), (None,)))

    [scan] = [e for e in jax.make_jaxpr(states)(cache, table).eqns if e.primitive.name == "scan"]
    pairs = zip(scan.invars, scan.params["jaxpr"].in_avals, strict=True)
    taken = [x.aval.shape for x, layer in pairs if x.aval.shape != layer.shape]
    assert taken and all(dims[0] == cfg.num_layers for dims in taken), "what each layer takes"
    assert all(dims[1:] != cache.k.shape[1:] for dims in taken)
    found, expected = states(cache, table), states(in_a_row(cache, table, 0), None)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(jax.device_count() < 4, reason="needs 4 devices")
def test_a_scatter_leaves_pages_with_the_devices_of_their_heads():
    """Rows travel to whoever lacks them, pages nowhere."""
    devices = np.array(jax.devices()[:4]).reshape(2, 1, 1, 1, 2)
    mesh = jax.sharding.Mesh(devices, MESH_AXES)
    rng, size = np.random.default_rng(3), 16
    pages, heads = 1 + BATCH * STRETCHES, (None, "tp", None, None)
    before, rows = (random_cache(rng, n, t, False) for n, t in ((pages, size), (2, 5)))
    table, start = own_table(rng)[:2], np.array([3, size - 2])
    want = commit(before, rows, start, table=table)

    def put(tree, *axes):
        where = jax.NamedSharding(mesh, jax.P(*axes))
        return jax.tree.map(lambda x: jax.device_put(x, where), tree)

    inputs = put(before, *heads), put(rows, "data", "tp"), put(start, "data")
    lowered = commit.lower(*inputs, table=put(table, "data"))
    compiled = lowered.compile()
    moved = [c.received for c in received(compiled.as_text())]
    assert moved and max(moved) < before.k[0].nbytes / 4, "rows travel, and pages do not"
    got = compiled(*inputs, table=put(table, "data"))
    for old, new in zip(jax.tree.leaves(want), jax.tree.leaves(got), strict=True):
        assert new.sharding.spec[1] == "tp"
        np.testing.assert_array_equal(old, new)
