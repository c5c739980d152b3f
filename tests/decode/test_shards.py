"""Operations over a vocabulary that is split over devices give what the whole one gives."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transform_cases import (
    ROWS,
    SLOTS,
    VOCAB,
    random_logits,
    random_slot,
    random_tree,
    rows_of,
    scores_of,
)

from specjax.decode import sampling, shards
from specjax.decode.draft import top_candidates
from specjax.decode.noise import DRAFT, draw_ahead, noise_at, one_by_one, round_noise, selected
from specjax.parallel.sharding import MeshConfig, make_mesh

pytestmark = pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 devices")

WAYS = (8, pytest.param(2, marks=pytest.mark.slow))
SHAPE = (2, 3, 64)


@functools.cache
def mesh(tp: int):
    return make_mesh(MeshConfig(data=8 // tp, tp=tp))


def split(x, tp: int):
    """x [.. V] as the language-model head leaves logits: a part on each device."""
    return jax.device_put(x, jax.NamedSharding(mesh(tp), jax.P(*(None,) * (x.ndim - 1), "tp")))


@st.composite
def rows(draw):
    """Scores with ties, within shards and across them; some rows have NaN or next to no tokens."""
    generator = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    scores = generator.integers(0, draw(st.integers(1, 40)), SHAPE).astype(np.float32)
    scores[generator.random(SHAPE) < draw(st.sampled_from([0.0, 0.3, 0.97]))] = -np.inf
    return scores, generator


# --- picks ----------------------------------------------------------------------------------------


@functools.cache
def picks(tp: int | None):
    def function(x):
        found = {count: top_candidates(x, count) for count in (1, 3, 12, 40)}
        return shards.argmax(x), found

    return jax.jit(function)


@pytest.mark.parametrize("tp", WAYS)
@given(rows())
def test_the_best_tokens_are_those_of_the_whole_row_ties_to_the_lowest_id(tp, drawn):
    scores, generator = drawn
    with jax.set_mesh(mesh(tp)):
        chosen, best = jax.device_get(picks(tp)(split(scores, tp)))
    np.testing.assert_array_equal(chosen, np.argmax(scores, axis=-1))
    order = np.argsort(-scores, axis=-1, kind="stable")
    for count, (ids, values) in best.items():
        expected = np.take_along_axis(scores, order[..., :count], axis=-1)
        np.testing.assert_array_equal(values, expected)
        possible = np.isfinite(expected)
        np.testing.assert_array_equal(ids[possible], order[..., :count][possible])


def test_the_best_tokens_are_found_without_putting_a_row_together():
    vocab = 1096

    def best(x):
        return shards.argmax(x), top_candidates(x, 12)

    with jax.set_mesh(mesh(8)):
        scores = split(np.zeros((2, 3, vocab), np.float32), 8)
        text = jax.jit(best).lower(scores).compile().as_text()
    assert f",{vocab // 8}]" in text
    assert f",{vocab}]" not in text, "a whole row is gathered"


@pytest.mark.parametrize("batch", [1, 4, 5, 8, 64])
def test_an_argmax_does_not_depend_on_the_rows_beside_it(batch):
    """XLA's maximum of many numbers is another program than that of few, and passes over NaN."""
    row, nan, inf = np.random.default_rng(0).normal(size=1000).astype(np.float32), np.nan, np.inf
    cases = {"one": {7: nan}, "two": {500: nan, 7: nan}, "inf": {3: inf, 9: nan}, "none": {}}
    rows = {name: row.copy() for name in (*cases, "least", "all", "tie")}
    for name, values in cases.items():
        for at, value in values.items():
            rows[name][at] = value
    rows["least"][:], rows["all"][:], rows["tie"][[20, 30]] = -inf, nan, 9.0
    for wanted in rows.values():
        x = np.broadcast_to(wanted, (batch, 1000))
        found = jax.jit(lambda x: shards.argmax(x * 1.5 + 0.25))(x)
        np.testing.assert_array_equal(found, np.argmax(wanted))


def reductions_for_tpus(function, *arrays) -> tuple[list[str], str]:
    """Results, by name, of the reductions of pairs with a float in a program as it is lowered for
    TPUs; and the program's text with the lines that make these left out."""
    text = jax.jit(function).trace(*arrays).lower(lowering_platforms=("tpu",)).as_text()
    made = re.compile(r"(%\d+):2 = stablehlo\.reduce\(.*xf32>")
    rest = "\n".join(line for line in text.splitlines() if not made.search(line))
    return made.findall(text), rest


def test_on_tpus_no_maximum_is_left_unread_for_the_compiler_to_round():
    """The TPU compiler keeps in bfloat16 what a reduction of pairs returns and nothing reads."""
    x = np.zeros(SHAPE, np.float32)
    of_jax, rest = reductions_for_tpus(lambda x: jnp.argmax(x, axis=-1), x)
    assert len(of_jax) == 1 and f"{of_jax[0]}#0" not in rest, "so this test can fail"
    whole, _ = reductions_for_tpus(shards.argmax, x)
    assert not whole
    with jax.set_mesh(mesh(8)):
        names, rest = reductions_for_tpus(shards.argmax, split(x, 8))
    assert len(names) == 1 and all(f"{names[0]}#{i}" in rest for i in range(2))


# --- noise ----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("tp", WAYS)
def test_a_shard_generates_its_own_slice_of_the_noise_and_no_more(tp):
    keys = np.random.default_rng(1).integers(0, 2**32, (2, 2), dtype=np.uint32)
    vocab = 1096

    def noise(keys):
        root, depth = jnp.array([4, 9]), np.arange(3)
        private = round_noise(keys, DRAFT, root, np.arange(2), vocab)
        here = draw_ahead(keys, root, 3, vocab, False)
        of_rows = noise_at(here, keys, root, jnp.array([[0, 2], [1, 1]]))
        positions = root[:, None] + 1 + depth
        chain, tree = (one_by_one(keys, positions, vocab, chain) for chain in (True, False))
        of_tree = shards.pin(selected(tree, jnp.array([[[0], [2]], [[1], [1]]])))
        return here, of_rows, private, noise_at(chain, keys, root, depth), of_tree

    whole = jax.jit(noise)(keys)
    with jax.set_mesh(mesh(tp)):
        compiled = jax.jit(noise).lower(keys).compile()
        parts = compiled(keys)
    jax.tree.map(np.testing.assert_array_equal, whole, parts)
    assert f",{vocab // tp}]" in compiled.as_text()
    assert f",{vocab}]" not in compiled.as_text(), "a whole row is generated or gathered"


# --- scores ---------------------------------------------------------------------------------------


@functools.cache
def thresholds(tp: int | None):
    def function(scores, weights, need, top_k, top_p):
        exact = sampling.largest_threshold(scores, weights, need)
        return (
            exact,
            sampling.top_k_threshold(scores, top_k),
            sampling.top_p_threshold(scores, top_p),
        )

    return jax.jit(function)


@pytest.mark.parametrize("tp", WAYS)
@given(rows())
def test_filters_have_the_threshold_of_the_whole_row_to_the_last_bit(tp, drawn):
    scores, generator = drawn
    scores = scores * np.float32(10.0) ** generator.integers(-30, 30)
    scores = scores * generator.choice(np.float32([-1, 1]), SHAPE)
    weights = generator.integers(0, 9, SHAPE).astype(np.float32)  # sums are exact
    need = generator.integers(1, 300, SHAPE[:2]).astype(np.float32)
    top_k = generator.choice([-1, 0, 1, 3, 63, 64, 65, 999], SHAPE[0]).astype(np.int32)
    top_p = generator.choice([1.0, *generator.random(4)], SHAPE[0]).astype(np.float32)
    whole = jax.device_get(thresholds(None)(scores, weights, need, top_k, top_p))
    with jax.set_mesh(mesh(tp)):
        parts = thresholds(tp)(split(scores, tp), split(weights, tp), need, top_k, top_p)
    jax.tree.map(np.testing.assert_array_equal, whole, jax.device_get(parts))


@pytest.mark.parametrize("tp", WAYS)
@pytest.mark.parametrize("seed", range(6))
def test_all_transforms_at_every_node_of_a_tree_keep_and_score_the_same_tokens(tp, seed):
    """The same bits: no score here has its mass end within rounding of top-p."""
    generator = np.random.default_rng(seed)
    slots = [random_slot(generator) for _ in range(SLOTS)]
    tree = rows_of([random_tree(generator) for _ in range(SLOTS)], depth=4)
    logits = random_logits(generator, (SLOTS, ROWS, VOCAB))
    whole = scores_of(logits, slots, rows=tree)
    with jax.set_mesh(mesh(tp)):
        parts = scores_of(split(logits, tp), slots, rows=tree)
    np.testing.assert_array_equal(whole, parts)
