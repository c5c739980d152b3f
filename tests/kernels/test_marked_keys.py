"""Rows that are not finite reach the rows that see them, and no others, by every kernel."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from test_tpu import random_case
from tiny import tiny_config, tiny_model

from bench.programs import change_dense
from specjax.decode.tree import chain_bits
from specjax.interfaces import Room, Where
from specjax.kernels import dispatch, reference
from specjax.memory import empty, with_marked_keys
from specjax.models.transformer import graphdef, to_decode_layout

BATCH, ROWS, PREFIX = 3, 7, [40, 17, 0]
KERNELS = [
    "reference",
    "cpu",
    "library:xla",
    "tests.kernels.interpreted:TPU",
    "tests.kernels.interpreted:TRITON",
    "by position",
]


def test_a_row_that_is_not_finite_has_a_key_of_nan_and_a_value_of_0():
    k, v = np.ones((2, 1, 2, 5, 4), np.float32)
    k[0, 0, 1, 3], v[0, 1, 2, 0], v[0, 0, 4, 1] = np.nan, np.inf, -np.nan
    keys, values = with_marked_keys(k, v)
    broken = np.zeros((1, 2, 5), bool)
    broken[0, 0, 1] = broken[0, 1, 2] = broken[0, 0, 4] = True
    np.testing.assert_array_equal(np.isnan(keys), np.broadcast_to(broken[..., None], k.shape))
    np.testing.assert_array_equal(values, np.broadcast_to(~broken[..., None], v.shape))


@pytest.mark.parametrize("kernel", KERNELS)
def test_what_a_row_does_not_see_changes_no_bit_of_it(kernel, request):
    if kernel == "cpu":
        request.getfixturevalue("cpu_kernels")
    q, k, v, k_pages, v_pages, prefix, bits, table = random_case(
        7, BATCH, 2, 2, ROWS, 16, 4, "float32", prefix=np.array(PREFIX)
    )
    # What lies behind a prefix: rows of broken samples, as they are left there.
    k_pages, v_pages = with_marked_keys(k_pages, v_pages)
    if kernel == "by position":  # it has the rows where they will be committed: a page further on
        path, depth = paths(bits)
        attend = jax.jit(reference.tree_attention_by_position)
        table = np.pad(table, ((0, 0), (0, 1)))
        rest = (jnp.asarray(prefix), path, depth, jnp.asarray(table))
    else:
        attend = jax.jit(functools.partial(dispatch.tree_attention, kernel=kernel))
        rest = tuple(map(jnp.asarray, (prefix, bits, table)))
    sound = np.asarray(attend(q, k, v, k_pages, v_pages, *rest))
    assert np.isfinite(sound).all()
    # A drafted row of every slot, and position 3 of the first slot's prefix.
    broken = np.array(v)
    broken[:, :, 4] = np.nan
    marked = with_marked_keys(k, jnp.asarray(broken))
    found = np.asarray(attend(q, *marked, k_pages, v_pages, *rest))
    sees = reference.unpack_bits(bits, ROWS)[:, :, 4]
    assert sees.any() and not sees.all()
    for b in range(BATCH):
        for row in range(ROWS):
            if sees[b, row]:
                assert np.isnan(found[b, :, row]).all()
            else:
                np.testing.assert_array_equal(found[b, :, row], sound[b, :, row])
    spoilt = k_pages.at[table[0, 0], :, 3].set(jnp.nan), v_pages.at[table[0, 0], :, 3].set(0)
    found = np.asarray(attend(q, k, v, *spoilt, *rest))
    assert np.isnan(found[0]).all()
    np.testing.assert_array_equal(found[1:], sound[1:])


def paths(bits):
    """(path_rows, depth) of each row, for `tree_attention_by_position`."""
    seen = np.asarray(reference.unpack_bits(bits, ROWS))
    path = np.zeros((BATCH, ROWS, ROWS), np.int32)
    for b in range(BATCH):
        for row in range(ROWS):
            above = np.flatnonzero(seen[b, row])
            path[b, row, : len(above)] = above
            path[b, row, len(above) :] = row
    return jnp.asarray(path), jnp.asarray(seen.sum(-1) - 1)


def test_layers_by_the_kernel_mark_their_keys(cpu_kernels):
    cfg = change_dense(tiny_config(), intermediate_size=32, head_dim=16)
    cfg = cfg.running(scan_layers=False, attention="cpu", products="panels")
    assert dispatch.runs_layers(cfg)
    _, params, _ = tiny_model(cfg)
    embed = np.array(params["embed"])
    embed[9], embed[11] = np.nan, np.inf
    params = to_decode_layout({**params, "embed": jnp.asarray(embed)}, cfg)

    def rows(tokens):
        model = nnx.merge(graphdef(cfg, cfg.run.decode_layout), params)
        memory = empty(cfg, Room(slots=1, pages=1, page_size=16))
        at, prefix = jnp.arange(len(tokens))[None], jnp.zeros(1, jnp.int32)
        where = Where("tree", at, prefix=prefix, visible=chain_bits(len(tokens)))
        return model.decode(jnp.asarray([tokens]), where, memory)

    x, scratch, *_ = rows([1, 2, 9, 3, 11])
    k, v = (np.asarray(part)[0] for part in scratch[0].pages)
    assert np.isnan(k[:, [2, 4]]).all() and (v[:, [2, 4]] == 0).all()
    assert np.isfinite(np.delete(k, [2, 4], 1)).all() and np.isfinite(v).all()
    assert np.isnan(x[0, 2:]).all()
    np.testing.assert_array_equal(x[0, :2], rows([1, 2, 3, 3, 3])[0][0, :2])
