"""Random numbers depend on the request, the sample and the position, and on nothing else."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specjax.decode import noise

VOCAB = 16
PROMPT = [3, 1, 4]


def keys_of(*requests):
    return noise.request_keys(np.stack([noise.request_words(*r) for r in requests]))


def noise_of(request, position, vocab=VOCAB):
    return np.asarray(noise.target_noise(keys_of(request), jnp.array([[position]]), vocab))[0, 0]


@given(
    st.integers(-(2**63), 2**63 - 1),
    st.lists(st.integers(0, 2**31 - 1), min_size=1),
    st.integers(0, 2**32 - 1),
)
def test_request_words_are_five_words_of_seed_prompt_and_sample(seed, prompt, sample):
    words = noise.request_words(seed, prompt, sample)
    assert words.dtype == np.uint32 and words.shape == (5,)
    assert int(words[0]) | int(words[1]) << 32 == seed % 2**64
    assert words[4] == sample
    same = noise.request_words(seed, np.array(prompt, np.int64), sample)
    np.testing.assert_array_equal(words, same)
    longer = noise.request_words(seed, [*prompt, 0], sample)
    assert (words[2:4] != longer[2:4]).any()


@pytest.mark.parametrize(
    "other",
    [
        ((1, PROMPT, 0), 7),
        ((1 << 32, PROMPT, 0), 7),
        ((0, [3, 1, 5], 0), 7),
        ((0, [3, 1], 0), 7),
        ((0, PROMPT, 1), 7),
        ((0, PROMPT, 0), 8),
    ],
    ids=["seed", "high seed", "prompt", "shorter prompt", "sample", "position"],
)
def test_noise_changes_with_every_part_of_its_key(other):
    mine, theirs = noise_of((0, PROMPT, 0), 7), noise_of(*other)
    assert not np.isclose(mine, theirs).any()
    np.testing.assert_array_equal(mine, noise_of((0, PROMPT, 0), 7))


def test_noise_is_the_gumbel_of_mode_high_in_float32():
    key = jax.random.wrap_key_data(keys_of((0, PROMPT, 0))[0], impl="threefry2x32")
    key = jax.random.fold_in(jax.random.fold_in(key, noise.TARGET), 7)
    high, low = (
        np.asarray(jax.random.gumbel(key, (4096,), jnp.float32, mode=mode))
        for mode in ("high", "low")
    )
    mine = noise_of((0, PROMPT, 0), 7, 4096)
    assert mine.dtype == np.float32
    np.testing.assert_array_equal(mine, high)
    assert (mine != low).any()


def test_noise_does_not_depend_on_the_default_generator():
    before = noise_of((0, PROMPT, 0), 7)
    coins = np.asarray(noise.round_coins(keys_of((0, PROMPT, 0)), jnp.array([4]), np.arange(3)))
    name = jax.config.jax_default_prng_impl
    jax.config.update("jax_default_prng_impl", "rbg")
    try:
        np.testing.assert_array_equal(noise_of((0, PROMPT, 0), 7), before)
        again = noise.round_coins(keys_of((0, PROMPT, 0)), jnp.array([4]), np.arange(3))
        np.testing.assert_array_equal(again, coins)
    finally:
        jax.config.update("jax_default_prng_impl", name)


def test_noise_is_pinned_so_that_a_seed_means_the_same_tokens_in_every_release():
    words = [0xFFFFFFFF, 0xFFFFFFFF, 1850757883, 130850894, 2]
    np.testing.assert_array_equal(noise.request_words(-1, PROMPT, 2), words)
    expected = [0.68471152, 3.26757312, 0.78304046, 0.80646408]
    np.testing.assert_allclose(noise_of((0, PROMPT, 0), 7, 4), expected, rtol=1e-6)


def test_coins_fold_the_root_and_the_node_so_that_none_is_met_twice():
    keys = keys_of((0, PROMPT, 0), (0, PROMPT, 1))
    coins = np.stack(
        [
            np.asarray(noise.round_coins(keys, jnp.array([root, root]), np.arange(4)))
            for root in range(5)
        ]
    )
    assert coins.shape == (5, 2, 4)
    assert len(np.unique(coins)) == coins.size
    assert (coins > 0).all() and (coins < 1).all()
    # Root 4 alone, or in other company: the same.
    np.testing.assert_array_equal(
        noise.round_coins(keys[:1], jnp.array([4]), np.arange(2))[0], coins[4, 0, :2]
    )


def test_private_noise_differs_by_domain_root_and_node():
    keys = keys_of((0, PROMPT, 0))
    drawn = [
        np.asarray(noise.round_noise(keys, domain, jnp.array([root]), np.array([node]), VOCAB))[0]
        for domain in (noise.DRAFT, noise.RESIDUAL)
        for root in (3, 4)
        for node in (0, 1)
    ]
    drawn += [np.asarray(noise.target_noise(keys, jnp.array([[p]]), VOCAB))[0] for p in (3, 4, 5)]
    assert all(d.dtype == np.float32 for d in drawn)
    assert len(np.unique(np.stack(drawn))) == len(drawn) * VOCAB


@settings(max_examples=2)
@given(st.integers(0, 2**31), st.integers(1, 5), st.integers(1, 9), st.booleans())
def test_every_platform_draws_and_picks_the_same_noise(seed, count, rows, static):
    """At depths that the program knows and at others, of all tokens and of some."""
    rng = np.random.default_rng(seed)
    keys = jnp.asarray(rng.integers(0, 2**32, (3, 2), dtype=np.uint32))
    root = jnp.asarray(rng.integers(0, 99, 3))
    depth = rng.integers(0, count, rows if static else (3, rows))
    if rows <= count and static:
        depth = np.arange(rows)  # a chain
    positions = root[:, None] + 1 + jnp.arange(count)
    ahead = noise.draw_ahead(keys, root, count, VOCAB, static)
    np.testing.assert_array_equal(noise.one_by_one(keys, positions, VOCAB, static), ahead)
    np.testing.assert_array_equal(noise.at_once(keys, positions, VOCAB), ahead)
    whole = noise.target_noise(keys, jnp.broadcast_to(root[:, None] + 1 + depth, (3, rows)), VOCAB)
    for ids in (None, np.sort(rng.integers(0, VOCAB, 4)), rng.integers(0, VOCAB, (3, rows, 4))):
        found = noise.noise_at(ahead, keys, root, depth, ids)
        some = np.arange(VOCAB) if ids is None else ids
        wanted = np.take_along_axis(whole, np.broadcast_to(some, (3, rows, some.shape[-1])), -1)
        np.testing.assert_array_equal(found, wanted)
    at = jnp.broadcast_to(depth, (3, rows))[..., None]
    np.testing.assert_array_equal(noise.selected(ahead, at), whole)


# --- the generator --------------------------------------------------------------------------------

WORDS = st.integers(0, 2**32 - 1)


def test_known_answers_of_the_paper():
    """Random123's kat_vectors, threefry 2x32 with 20 rounds."""
    for key, counter, wanted in [
        ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
        ((0xFFFFFFFF,) * 2, (0xFFFFFFFF,) * 2, (0x1CB996FC, 0xBB002BE7)),
        ((0x13198A2E, 0x03707344), (0x243F6A88, 0x85A308D3), (0xC4923A9C, 0x483DF7A0)),
    ]:
        got = noise.threefry2x32(jnp.array(key, jnp.uint32), *map(jnp.uint32, counter))
        assert tuple(map(int, got)) == wanted


@settings(max_examples=6)
@given(st.tuples(*[WORDS] * 5), st.integers(0, 2**20), st.integers(0, 99))
def test_numbers_are_those_of_jax(words, position, node):
    def folded(key, *data):
        for value in data:
            key = jax.random.fold_in(key, value)
        return key

    first = jax.random.wrap_key_data(np.array(words[:2], np.uint32), impl="threefry2x32")
    key, keys = folded(first, *words[2:]), noise.request_keys(np.array([words], np.uint32))
    np.testing.assert_array_equal(keys[0], jax.random.key_data(key))
    root, tiny = jnp.array([position]), jnp.finfo(jnp.float32).tiny
    coin = jax.random.uniform(folded(key, noise.ACCEPT, position, node), minval=tiny)
    assert noise.round_coins(keys, root, np.array([node]))[0, 0] == coin
    drawn = jax.random.gumbel(folded(key, noise.DRAFT, position, node), (40,), mode="high")
    mine = noise.round_noise(keys, noise.DRAFT, root, np.array([node]), 40)
    np.testing.assert_array_equal(mine[0, 0], drawn)
