"""The forms of the gated delta rule compute its equations, and their sums stay finite."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specjax.decode.tree import ancestors
from specjax.kernels import delta_rule
from specjax.kernels.delta_rule import Inputs

K, R, DK, DV = 2, 2, 4, 6
in_order, at_once, chunked, advanced, advanced_in_order = map(
    jax.jit,
    (
        delta_rule.in_order, delta_rule.at_once, delta_rule.chunked,
        delta_rule.advanced, delta_rule.advanced_in_order,
    ),
)  # fmt: skip


def random_case(rows, seed=0, batch=2):
    """Returns inputs of rows [B T ..], with keys of length 1, and a state."""
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return rng.normal(size=(batch, *shape)).astype(np.float32)

    k, beta, g = normal(rows, K, DK), normal(rows, K, R), -0.3 * np.abs(normal(rows, K, R))
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    x = Inputs(normal(rows, K, DK), k, normal(rows, K, R, DV), g, 1 / (1 + np.exp(-beta)))
    return x, normal(K, R, DK, DV)


def of_equations(x, state, parents):
    """Outputs, changes and states of one sequence in float64; roots are their own parents."""
    out, changes, behind = [], [], []
    for parent, q, k, v, g, beta in zip(parents, *map(np.float64, x), strict=True):
        before = state if parent == len(behind) else behind[parent]
        decayed = np.exp(g)[..., None, None] * before
        changes.append(beta[..., None] * (v - np.einsum("krcv,kc->krv", decayed, k)))
        behind.append(decayed + np.einsum("kc,krv->krcv", k, changes[-1]))
        out.append(np.einsum("krcv,kc->krv", behind[-1], q))
    return out, changes, np.stack(behind)


def checked(results, x, state, parents):
    """Compares outputs and changes with those of the equations; returns the states behind rows."""
    each = np.broadcast_to(parents, x.g.shape[:2])
    sequences = zip(*x, state, each, strict=True)
    *wanted, behind = map(
        np.stack, zip(*(of_equations(one, s, p) for *one, s, p in sequences), strict=True)
    )
    for result in results:
        for got, expected in zip(result, wanted, strict=True):
            close(got, expected)
    return behind


def close(got, expected):
    np.testing.assert_allclose(got, expected, atol=2e-5, rtol=0)


def chain(rows):
    return np.maximum(np.arange(rows) - 1, 0)


def where(parents):
    """Returns paths, depths and the mask of a tree, or of one tree per sequence."""
    if parents.ndim > 1:
        return tuple(map(np.stack, zip(*map(where, parents), strict=True)))
    sees = ancestors(parents)
    depth = sees.sum(-1) - 1
    paths = np.zeros_like(sees, int)
    for row, seen in enumerate(sees):
        paths[row, : depth[row] + 1] = np.flatnonzero(seen)
    return paths, depth, sees


@pytest.mark.parametrize("rows", [1, 2, 63, 64, 65, 130])
def test_all_forms_compute_the_equations_along_a_chain(rows):
    x, state = random_case(rows)
    *places, sees = where(chain(rows))
    results = in_order(x, state, *places), at_once(x, state, sees), chunked(x, state)
    behind = checked(results, x, state, chain(rows))
    for rule in (advanced, advanced_in_order):
        after = rule(state, x.k, results[0][1], x.g, np.array([rows, rows // 2]))
        close(after, [behind[0, -1], behind[1, rows // 2 - 1] if rows > 1 else state[1]])


ROWS = 9
TREES = st.tuples(*(st.integers(0, max(row - 1, 0)) for row in range(ROWS)))
DECAYS = st.lists(st.sampled_from([0.0, -0.2, -100.0]), min_size=ROWS, max_size=ROWS)


@given(trees=st.tuples(TREES, TREES), decays=DECAYS, last=st.integers(0, ROWS - 1))
@settings(max_examples=25, deadline=None)
def test_rows_of_static_and_grown_trees_and_states_behind_their_paths_are_those_of_the_equations(
    trees, decays, last
):
    x, state = random_case(ROWS)
    x = x._replace(g=np.broadcast_to(np.float32(decays)[:, None, None], x.g.shape))
    for parents in map(np.array, (trees, trees[0])):
        paths, depth, sees = where(parents)
        results = in_order(x, state, paths, depth), at_once(x, state, sees)
        behind = checked(results, x, state, parents)[:, last]
        path = np.broadcast_to(paths, (2, ROWS, ROWS))[:, last]
        count = np.broadcast_to(depth, (2, ROWS))[:, last] + 1
        unused = np.arange(ROWS) >= count[:, None]
        for (_, d), rule in zip(results, (advanced_in_order, advanced), strict=True):
            rows = [np.asarray(a)[np.arange(2)[:, None], path] for a in (x.k, d, x.g)]
            close(rule(state, *rows, count), behind)
            for a in rows:  # rows past the path may hold anything
                a[unused] = np.nan
            close(rule(state, *rows, count), behind)
            np.testing.assert_array_equal(rule(state, *rows, 0 * count), state)


def test_each_packed_segment_begins_with_a_state_of_zeros():
    starts = ([0, 1, 62, 63, 65], [0, 64, 127, 128, 129])  # on boundaries of blocks, and beside
    x, state = random_case(135)
    begins = np.stack([np.isin(np.arange(135), numbers) for numbers in starts])
    result = chunked(x, segments=begins.cumsum(axis=1))
    checked([result], x, 0 * state, np.where(begins, np.arange(135), chain(135)))


@pytest.mark.parametrize("part", Inputs._fields)
def test_a_row_that_is_not_finite_reaches_the_rows_that_see_it_and_no_others(part):
    rows, bad = 70, 66
    x, state = random_case(rows)
    broken = x._replace(**{part: getattr(x, part).copy()})
    getattr(broken, part)[0, bad] = np.nan
    # Behind row 65 two branches take turns.
    tree = np.where(chain(rows) < bad, chain(rows), np.arange(rows) - 2)
    for form, parents in ((in_order, tree), (at_once, tree), (chunked, chain(rows))):
        *places, sees = where(parents)
        more = {in_order: places, at_once: [sees], chunked: []}[form]
        reached = np.stack([sees[:, bad], np.zeros(rows, bool)])
        for got, sound in zip(form(broken, state, *more), form(x, state, *more), strict=True):
            np.testing.assert_array_equal(got[~reached], sound[~reached])
            if part != "q" or form is not in_order:  # queries change no state
                assert np.isnan(got[reached]).all()


def test_gradients_of_long_rows_are_those_of_the_rule_row_by_row():
    x, state = random_case(70, batch=1)
    weights, (*places, _) = np.random.default_rng(1).normal(size=x.v.shape), where(chain(70))

    def gradients(form, *more):
        return jax.jit(jax.grad(lambda x: (form(x, *more)[0] * weights).sum()))(x)

    wanted = gradients(delta_rule.in_order, jnp.zeros_like(state), *places)
    for one, other in zip(gradients(delta_rule.chunked), wanted, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-4 * np.abs(other).max())


def test_the_memory_of_gradients_grows_with_the_number_of_rows_and_not_its_square():
    def size(rows):
        x = jax.tree.map(jnp.asarray, random_case(rows, batch=1)[0])
        program = jax.jit(jax.grad(lambda x: delta_rule.chunked(x)[0].sum()))
        return program.lower(x).compile().memory_analysis().temp_size_in_bytes

    short = size(512)
    assert 0 < short < size(1024) < 2.2 * short
