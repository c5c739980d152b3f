"""What a chunk tells the host travels in one array, and nothing of it changes on the way."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from specjax.engine.runner import Packed

DTYPES = (np.int32, np.uint32, np.float32, np.bool_)
SHAPES = hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3)
ARRAYS = st.sampled_from(DTYPES).flatmap(lambda dtype: hnp.arrays(dtype, SHAPES))


def same_bits(wanted, got):
    assert wanted.dtype == got.dtype and wanted.shape == got.shape
    assert np.asarray(wanted).tobytes() == np.asarray(got).tobytes()


@settings(max_examples=30, deadline=None)
@given(st.lists(ARRAYS, min_size=1, max_size=4))
def test_a_tree_comes_out_as_it_went_in_to_the_bit(arrays):
    """NaN with any payload, -0.0, empty arrays and scalars as well."""
    tree = {"first": arrays[0], "others": (None, arrays[1:])}
    opened = Packed.of(jax.tree.map(jnp.asarray, tree)).open()
    assert jax.tree.structure(opened) == jax.tree.structure(tree)
    jax.tree.map(same_bits, tree, opened)
