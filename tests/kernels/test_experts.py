"""Products of sorted rows with matrices of a stack, and their derivatives, in every form."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specjax.kernels import dispatch, experts_gpu, experts_tpu, reference
from specjax.weights.matrix import Choices


def case(sizes, spare=0, width=(24, 40), seed=0):
    """Rows, of which the last `spare` are in no group and hold NaN, a stack, and sizes."""
    rng = np.random.default_rng(seed)
    rows, (into, out) = sum(sizes), width
    x = np.r_[rng.normal(size=(rows, into)), np.full((spare, into), np.nan)]
    stack = rng.normal(size=(len(sizes), into, out))
    stack[np.array(sizes) == 0] = np.nan  # a matrix that no row needs
    return *(jnp.asarray(a, jnp.float32) for a in (x, stack)), jnp.asarray(sizes, jnp.int32)


def equal(sizes, spare, seed):
    x, stack, sizes = case(sizes, spare, seed=seed)
    out = jax.jit(dispatch.experts)(x, stack, sizes)
    wanted = reference.experts(x, stack, sizes)
    np.testing.assert_allclose(out, wanted, rtol=1e-5, atol=1e-5)


@settings(max_examples=25)
@given(st.lists(st.integers(0, 20), min_size=7, max_size=7).filter(any), st.integers(0, 99))
def test_sorted_rows_are_multiplied_by_their_matrices(sizes, seed):
    equal([*sizes, 140 - sum(sizes)], 3, seed)  # one shape, so that one program is compiled


def test_gradients_are_those_of_the_reference():
    x, stack, sizes = case((9, 1, 20, 3, 40))
    weights = jnp.asarray(np.random.default_rng(1).normal(size=(73, 40)), jnp.float32)

    def gradients(experts):
        loss = lambda x, stack: jnp.sum(experts(x, stack, sizes) * weights)  # noqa: E731
        return jax.jit(jax.grad(loss, (0, 1)))(x, stack)

    for ours, theirs in zip(gradients(dispatch.experts), gradients(reference.experts), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("form, few", [(experts_gpu, None), (experts_tpu, 512), (experts_tpu, 0)])
def test_kernels_equal_the_reference_with_their_gradients(form, few, monkeypatch):
    x, stack, sizes = case((0, 9, 1, 0, 23, 0), spare=4, width=(128, 256))
    clean = jnp.nan_to_num(x), jnp.nan_to_num(stack)
    if few is not None:
        monkeypatch.setattr(experts_tpu, "FEW", few)
    if few == 0:
        stack = clean[1]  # here XLA multiplies by every matrix
    weights = jnp.asarray(np.random.default_rng(1).normal(size=(37, 256)), jnp.float32)

    def results(experts, *arrays):
        out, back = jax.vjp(lambda x, stack: experts(x, stack, sizes), *arrays)
        return out, *back(weights)

    ours = jax.jit(functools.partial(results, functools.partial(form.experts, interpret=True)))
    wanted = results(reference.experts, *clean)
    for one, other in zip(ours(x, stack), wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kernel", ["gpu", "triton", "gpu:flash"])
def test_every_backend_of_gpus_multiplies_by_the_triton_kernel(kernel):
    product = jax.jit(functools.partial(dispatch.experts, kernel=kernel))
    traced = product.trace(*case((5, 0, 3)))
    assert 'name = "experts"' in traced.lower(lowering_platforms=("cuda",)).as_text()


def test_matrices_that_a_tpu_would_copy_are_left_to_the_reference():
    x, stack, sizes = case((5, 0, 3), spare=2)  # 24 and 40 wide
    out = dispatch.experts(x, stack, sizes, kernel="tpu:v5e")
    np.testing.assert_allclose(out, reference.experts(x, stack, sizes), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_bits_of_a_row_depend_on_no_other_row(dtype):
    """Whatever the others hold, however many choose the same matrix, and wherever it stands."""
    rng = np.random.default_rng(2)
    stack = jnp.asarray(rng.normal(size=(8, 64, 48)), dtype)
    rows = jnp.asarray(rng.normal(size=(16, 64)), dtype)

    @jax.jit
    def mixed(rows, ids):
        chosen = Choices.of(ids, 8)
        return chosen.restore(dispatch.experts(chosen.sort(rows), stack, chosen.sizes))

    one = mixed(rows, jnp.asarray(rng.permuted(np.tile(np.arange(8), (16, 1)), axis=1)[:, :2]))
    ids = np.array(rng.integers(0, 8, (16, 2)))
    for place in (0, 5, 15):
        others, ids = jnp.asarray(rng.normal(size=(16, 64)), dtype), ids.copy()
        others = others.at[place].set(rows[3])
        for chosen in ((1, 6), (2, 2)):
            ids[place] = chosen
            ids[(place + 1) % 16] = chosen[0]
            out = mixed(others, jnp.asarray(ids))[place]
            alone = mixed(jnp.full_like(others, jnp.nan).at[place].set(rows[3]), jnp.asarray(ids))
            np.testing.assert_array_equal(out, alone[place])
    assert one.shape == (16, 2, 48)
