"""The unrolled cipher gives the numbers of jax's own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specjax.decode.noise import key_of, threefry2x32

WORDS = st.integers(0, 2**32 - 1)


def test_known_answers_of_the_paper():
    """Random123's kat_vectors, threefry 2x32 with 20 rounds."""
    for key, counter, wanted in [
        ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
        ((0xFFFFFFFF,) * 2, (0xFFFFFFFF,) * 2, (0x1CB996FC, 0xBB002BE7)),
        ((0x13198A2E, 0x03707344), (0x243F6A88, 0x85A308D3), (0xC4923A9C, 0x483DF7A0)),
    ]:
        got = threefry2x32(jnp.array(key, jnp.uint32), *map(jnp.uint32, counter))
        assert tuple(map(int, got)) == wanted


@settings(max_examples=10)
@given(WORDS, WORDS, WORDS, st.sampled_from([(), (1,), (7,), (3, 40), (2, 3, 5)]))
def test_numbers_are_those_of_jax(a, b, data, shape):
    words = jnp.array([a, b], jnp.uint32)
    mine, theirs = key_of(words), jax.random.wrap_key_data(words, impl="threefry2x32")
    for draw in (
        lambda key: jax.random.bits(key, shape),
        lambda key: jax.random.uniform(key, shape),
        lambda key: jax.random.gumbel(key, shape, mode="high"),
        lambda key: jax.random.key_data(jax.random.fold_in(key, data)),
        lambda key: jax.random.key_data(jax.random.split(key, 3)),
    ):
        np.testing.assert_array_equal(draw(mine), draw(theirs))


def test_it_is_one_operation_without_a_loop():
    text = jax.jit(lambda key: jax.random.bits(key_of(key), (300,))).lower(
        jnp.zeros(2, jnp.uint32)
    ).compile().as_text()  # fmt: skip
    assert "while" not in text


def test_numbers_of_other_widths_are_refused():
    with pytest.raises(ValueError, match="32 bits"):
        jax.random.bits(key_of(jnp.zeros(2, jnp.uint32)), (2,), jnp.uint8)
