"""Drafts from a part of the vocabulary: as from all of it, with -inf for every other token."""

import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from transform_cases import SLOTS, TRANSFORMS, VOCAB, options_of, random_slot, sequences

from specjax.config import Strategy
from specjax.decode.draft import candidates
from specjax.decode.noise import draw_ahead, noise_at, target_noise
from specjax.decode.sampling import context_of, count_tokens
from specjax.decode.state import Plan
from specjax.decode.tree import build_tree
from specjax.interfaces import Proposal

ROWS, DEPTH, COUNT, WIDTH = 3, 2, 4, 32
NODES = np.array([2, 5, 6])
KINDS = ("shared", "per row")


@functools.partial(jax.jit, static_argnames=("mode", "dynamic"))
def found(proposal, tokens, length, keys, options, paths, mode, dynamic=False):
    """The candidates below rows with these paths."""
    tree = build_tree(Strategy.parse("3_4_9" if dynamic else "4x2x1"))
    cfg = SimpleNamespace(vocab_size=VOCAB)
    plan = Plan(cfg, tree, mode=mode, features=TRANSFORMS, telemetry=True)
    noise = draw_ahead(keys, length - 1, 4, VOCAB, False)
    state = SimpleNamespace(length=length, keys=keys, options=options, noise=noise)
    counts = count_tokens(tokens, length, options.prompt_len, VOCAB)
    context = context_of(tokens, length, TRANSFORMS, counts)
    return candidates(plan, state, context, proposal, paths, NODES, COUNT)


def case(seed, kind, size):
    """Options of every kind, histories, paths, and scores of some tokens, in columns and dense."""
    generator = np.random.default_rng(seed)
    slots = [random_slot(generator) for _ in range(SLOTS)]
    tokens, length = sequences(slots, WIDTH)
    paths = generator.integers(0, 6, (SLOTS, ROWS, DEPTH)).astype(np.int32)
    scores = generator.normal(0, 3, (SLOTS, ROWS, size)).astype(np.float32)
    shape = () if kind == "shared" else (SLOTS, ROWS)
    ids = np.argsort(generator.random((*shape, VOCAB)), axis=-1)[..., :size].astype(np.int32)
    if kind == "shared":
        ids.sort()
    dense = np.full((SLOTS, ROWS, VOCAB), -np.inf, np.float32)
    np.put_along_axis(dense, np.broadcast_to(ids, scores.shape), scores, axis=-1)
    keys = generator.integers(0, 1 << 32, (SLOTS, 2), dtype=np.uint32)
    shared = tokens, length, keys, options_of(slots, VOCAB), paths
    return Proposal(scores, ids), Proposal(dense), shared


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("mode", "dynamic"), [("coupled", False), ("coupled", True)])
def test_the_noise_of_a_position_picks_the_tokens_that_it_picks_among_all(
    mode, dynamic, kind, seed
):
    some, dense, shared = case(seed, kind, 12)
    ours, all_of_them = (found(p, *shared, mode, dynamic) for p in (some, dense))
    np.testing.assert_array_equal(ours.tokens, all_of_them.tokens)
    drafted = np.asarray(ours.tokens) >= 0
    assert drafted[..., 0].mean() > 0.5
    np.testing.assert_allclose(
        np.asarray(ours.logprobs)[drafted], np.asarray(all_of_them.logprobs)[drafted], atol=1e-5
    )
    if dynamic:
        np.testing.assert_allclose(ours.gain, all_of_them.gain, atol=1e-5)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", KINDS)
def test_q_is_a_distribution_over_the_vocabulary_and_what_was_drawn_from(kind, seed):
    some, dense, shared = case(seed, kind, 12)
    ours, all_of_them = (found(p, *shared, "recursive") for p in (some, dense))
    np.testing.assert_allclose(ours.q, all_of_them.q, atol=1e-6)
    np.testing.assert_array_equal(ours.tokens, all_of_them.tokens)
    assert ((np.asarray(ours.q) > 0).any(-1) == (np.asarray(ours.tokens)[..., 0] >= 0)).all()
    assert (np.asarray(ours.tokens)[..., 0] >= 0).mean() > 0.5


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", ["coupled", "recursive"])
def test_ids_that_mean_nothing_propose_nothing_and_no_token_is_proposed_twice(mode, kind, seed):
    some, _, shared = case(seed, kind, 12)
    generator = np.random.default_rng(seed)
    ids = generator.integers(-3, VOCAB + 3, some.ids.shape).astype(np.int32)
    ids[..., 3:6] = ids[..., :3]
    scores = some.scores.copy()
    scores[..., 7] = np.nan
    ours = found(Proposal(scores, ids), *shared, mode)
    for row in np.asarray(ours.tokens).reshape(-1, COUNT):
        drafted = [t for t in row if t >= 0]
        assert len(set(drafted)) == len(drafted) and all(t < VOCAB for t in drafted)
    if mode == "recursive":
        mass = np.asarray(ours.q).sum(-1)
        assert np.all((np.abs(mass - 1) < 1e-5) | (mass == 0))


def test_the_noise_of_a_token_is_one_number_however_it_is_asked_for():
    keys, root = jnp.arange(4, dtype=jnp.uint32).reshape(2, 2), jnp.array([3, 6])
    depth = np.array([0, 1, 3])
    at = functools.partial(noise_at, draw_ahead(keys, root, 4, 9, False), keys, root, depth)
    whole = np.asarray(at())
    np.testing.assert_array_equal(whole, target_noise(keys, root[:, None] + 1 + depth, 9))
    shared = np.array([1, 4, 8])
    np.testing.assert_array_equal(at(shared), whole[..., shared])
    each = np.random.default_rng(0).integers(0, 9, (2, 3, 5))
    np.testing.assert_array_equal(at(jnp.asarray(each)), np.take_along_axis(whole, each, -1))
