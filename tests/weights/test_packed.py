"""Packed weights: what each format keeps, and that products are those of the weights it keeps."""

import dataclasses
import functools
from unittest import mock

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specjax.kernels import experts_gpu, experts_tpu, reference
from specjax.kernels.backend import Declined
from specjax.parallel.copies import checksum
from specjax.weights import matrix, packed

INPUTS, OUTPUTS = 192, 140  # no whole squares of 128
BITS = {"int8": 8, "fp8": 8, "fp8_block": 8.25, "mxfp4": 4.25, "int4": 4.5}  # of a weight
# Inputs and outputs that share a scale.
SHARES = {
    "int8": (INPUTS, 1), "fp8": (INPUTS, 1), "fp8_block": (128, 128), "mxfp4": (32, 1),
    "int4": (32, 1),
}  # fmt: skip
MOST = {"int8": 127, "fp8": 448, "fp8_block": 448, "mxfp4": 6, "int4": 7}
FLOATS = {
    "fp8": ml_dtypes.float8_e4m3fn, "fp8_block": ml_dtypes.float8_e4m3fn,
    "mxfp4": ml_dtypes.float4_e2m1fn,
}  # fmt: skip
every = pytest.mark.parametrize("name", BITS)
four_bits = pytest.mark.parametrize("name", ["mxfp4", "int4"])


def weights(shape=(INPUTS, OUTPUTS)):
    """Random weights; the first outputs hold half-way points, and zeros."""
    array = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    place = np.arange(shape[-2])
    array[..., 0] = place % 32 / 4  # up to 7.75, where the largest of MXFP4 is 6
    array[..., 1] = (place % 29 - 14) / 2
    array[..., 2] = np.where(place, place % 128 - 63.5, 127)
    array[..., 3] = np.where(place % 128, place % 128, -448)
    array[..., 4] = 0
    return array


def rounded(array, name):
    """The weights that a format keeps, by its specification."""
    (inputs, outputs), most, out = SHARES[name], np.float32(MOST[name]), np.zeros_like(array)
    for row in range(0, len(array), inputs):
        for column in range(0, array.shape[1], outputs):
            place = np.s_[row : row + inputs, column : column + outputs]
            scale = np.abs(array[place]).max() / most or np.float32(1)
            if name == "mxfp4":
                scale = np.exp2(np.floor(np.log2(scale * most)) - 2)
            if name == "int4":
                scale = scale.astype(ml_dtypes.bfloat16).astype(np.float32)
            x = array[place] / scale  # ties are to even in all formats
            x = np.clip(x, -most, most).astype(FLOATS[name]) if name in FLOATS else np.rint(x)
            out[place] = np.clip(x.astype(np.float32), -most, most) * scale
    return out


pack = jax.jit(matrix.packed, static_argnums=(1, 2, 3))


@functools.cache
def made(name, table=False, shape=(INPUTS, OUTPUTS)):
    array = weights(shape)
    return pack(array.T if table else array, name, table, len(shape) > 2)


# --- what is kept --------------------------------------------------------------------------------


@every
def test_weights_are_rounded_to_the_nearest_that_the_format_has(name):
    # In a program XLA divides by a constant by its reciprocal: scales differ in their last bit.
    np.testing.assert_allclose(matrix.unpack(made(name)), rounded(weights(), name), rtol=3e-7)


@every
def test_a_table_keeps_the_weights_of_its_transpose_and_its_rows_are_looked_up(name):
    table, kept = made(name, table=True), np.asarray(matrix.unpack(made(name)))
    np.testing.assert_array_equal(matrix.unpack(table), kept.T)
    ids = jnp.array([[0, 139], [3, 3]])
    np.testing.assert_array_equal(matrix.rows(table, ids), kept.T[ids])


@every
def test_weights_have_the_bits_that_the_format_says(name):
    shape = jax.ShapeDtypeStruct((4096, 4096), "bfloat16")
    weight = jax.eval_shape(lambda array: matrix.packed(array, name), shape)
    bits = 8 * sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(weight))
    assert BITS[name] <= bits / shape.size < BITS[name] + 0.01


@four_bits
def test_what_has_four_bits_is_packed_again_without_a_change(name):
    jax.tree.map(np.testing.assert_array_equal, pack(made(name).unpack(), name), made(name))


@every
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_weight_that_is_not_finite_stays_so_and_spoils_only_what_shares_its_scale(name, bad):
    array = weights()
    array[5, 3] = bad
    kept = np.asarray(matrix.unpack(pack(array, name)))
    assert not np.isfinite(kept[5, 3])
    assert not checksum({"w": pack(array, name)}, "float32").finite
    assert checksum({"w": made(name)}, "float32").finite
    np.testing.assert_array_equal(kept[:, 128:], matrix.unpack(made(name))[:, 128:])


@every
def test_weights_too_small_for_a_scale_of_float32_become_zero(name):
    array = np.zeros((128, 3), np.float32)
    array[::2, 1], array[::2, 2] = 2e-38, 2e-30
    kept = matrix.unpack(pack(array, name))
    np.testing.assert_allclose(kept, array, rtol=0.2, atol=2e-38)


@four_bits
def test_inputs_that_cannot_be_halved_are_refused_on_one_line(name):
    with pytest.raises(ValueError, match=r"32 inputs, got 96 inputs of \[96, 8\]; give .*'xla'$"):
        matrix.packed(jnp.ones((96, 8)), name)


# --- products ------------------------------------------------------------------------------------


@jax.jit
def products(x, y, weight, table):
    """By a matrix [I O] and its transpose, each of which is packed as a matrix and as a table."""
    turned, table_turned = map(matrix.transposed, (weight, table))
    pairs = (x, weight), (x, table_turned), (y, turned), (y, table)
    return [matrix.dot(*pair, jnp.float32) for pair in pairs]


def assert_near(result, right, exact):
    assert result.dtype == jnp.float32
    bound = (1e-5 if exact else 1e-2) * np.nanmax(np.abs(right))
    np.testing.assert_allclose(result, right, rtol=0, atol=bound)


DTYPES = st.sampled_from(["float32", "bfloat16"])
SHAPES = st.sampled_from([(64, 8), (INPUTS, OUTPUTS)])


@every
@settings(max_examples=5)
@given(SHAPES, st.sampled_from([(3,), (2, 5)]), DTYPES, st.integers(0, 99))
def test_products_are_those_of_the_weights_that_are_kept(name, shape, rows, dtype, seed):
    rng = np.random.default_rng(seed)
    weight, table = (made(name, table, shape) for table in (False, True))
    x, y = (jnp.asarray(rng.normal(size=(*rows, n)), dtype) for n in shape)
    kept = np.asarray(matrix.unpack(weight))
    right = np.asarray(x, np.float32) @ kept, np.asarray(y, np.float32) @ kept.T
    with mock.patch.object(packed, "PART", 100):  # rows of a table, of which the last overlap
        results = products(x, y, weight, table)
    for number, result in enumerate(results):
        assert_near(result, right[number // 2], dtype == "float32")


FORMS = {
    "xla": lambda *given: matrix.experts(*given).astype(jnp.float32),
    "tpu": lambda *given: experts_tpu.multiply_packed(*given, jnp.float32, True),
    "gpu": lambda *given: experts_gpu.multiply_packed(*given, jnp.float32, True),
}


@pytest.mark.parametrize("form", FORMS)
@every
def test_sorted_rows_are_multiplied_by_the_weights_that_their_matrices_keep(name, form):
    """Whatever the sizes of groups, and how many are empty; rows of no group become zero.

    Kernels multiply rows of bfloat16 by values that all dtypes have, where an output has one scale.
    """
    stack, product = made(name, shape=(5, INPUTS, OUTPUTS)), jax.jit(FORMS[form])
    if name in ("fp8", "fp8_block"):
        stack = dataclasses.replace(stack, values=stack.values.at[2, 9, 7].set(jnp.nan))
    kept, exact = matrix.unpack(stack), form != "xla" and not stack.group

    @settings(max_examples=6)
    @given(st.lists(st.integers(0, 8), min_size=5, max_size=5), DTYPES)
    def check(sizes, dtype):
        x = np.random.default_rng(sum(sizes)).normal(size=(40, INPUTS))
        x[sum(sizes) :] = np.nan
        x, sizes = jnp.asarray(x, dtype), jnp.array(sizes)
        right = np.asarray(reference.experts(jnp.nan_to_num(x.astype(jnp.float32)), kept, sizes))
        assert_near(product(x, stack, sizes), right, exact or dtype == "float32")

    check()


def test_the_kernel_for_tpus_declines_inputs_that_its_memory_cannot_hold():
    shape = jax.ShapeDtypeStruct((1, 29568, 128), "bfloat16")
    weight = jax.eval_shape(lambda array: matrix.packed(array, "fp8_block"), shape)
    with pytest.raises(Declined, match="got .* blocks of 22708224"):
        FORMS["tpu"](jnp.zeros((8, 29568)), weight, None)
