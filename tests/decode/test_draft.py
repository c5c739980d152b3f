"""What is drafted: trees of any kind against plain Python, below a source of known logits."""

import dataclasses
import functools
import itertools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.config import Strategy
from specjax.decode.draft import draft_tree
from specjax.decode.noise import draw_ahead, target_noise
from specjax.decode.options import Features, neutral
from specjax.decode.sampling import context_of, count_tokens
from specjax.decode.state import Plan
from specjax.decode.tree import ancestors, build_tree, common_strategy, take_parents, tree_part
from specjax.interfaces import Proposal

VOCAB, BATCH = 11, 3


class TableSource:
    """Logits as a function of the path alone."""

    def __init__(self, seed=0, sharpness=1.5, missing=()):
        generator = np.random.default_rng(seed)
        self.start = sharpness * generator.normal(size=(BATCH, VOCAB)).astype(np.float32)
        self.follow = sharpness * generator.normal(size=(6, VOCAB, VOCAB)).astype(np.float32)
        self.missing = np.isin(np.arange(VOCAB), list(missing))  # never proposed

    def logits_after(self, slot: int, path) -> np.ndarray:
        logits = self.start[slot]
        for depth, token in enumerate(path):
            logits = np.float32(0.5) * logits + self.follow[depth, token]
        return np.where(self.missing, -np.inf, logits).astype(np.float32)

    def _after(self, paths) -> jax.Array:
        logits = jnp.broadcast_to(self.start[:, None], (*paths.shape[:2], VOCAB))
        for depth in range(paths.shape[2]):
            logits = 0.5 * logits + jnp.asarray(self.follow[depth])[paths[..., depth]]
        return jnp.where(self.missing, -jnp.inf, logits)

    def begin(self, model, params, state, steps, total):
        paths = jnp.zeros((BATCH, 1, 0), jnp.int32)
        return Proposal(self._after(paths)), paths

    def step(self, model, params, paths, level):
        paths = jnp.concatenate(
            [take_parents(paths, level.parents), level.tokens[..., None]], axis=-1
        )
        return Proposal(self._after(paths)), paths


def state_of(temperature, **options):
    tokens = np.random.default_rng(1).integers(0, VOCAB, (BATCH, 12)).astype(np.int32)
    length = np.array([4, 9, 6])
    keys = np.asarray(jax.random.key_data(jax.random.split(jax.random.key(3), BATCH)), np.uint32)
    row = neutral(BATCH, VOCAB, 2, np)
    row = row._replace(
        temperature=np.asarray(temperature, np.float32), prompt_len=length, **options
    )
    return SimpleNamespace(tokens=tokens, length=length, keys=keys, options=row)


def program_of(plan):
    def program(tokens, length, keys, options, part=None):
        noise = draw_ahead(keys, length - 1, 8, VOCAB, False)
        arrays = SimpleNamespace(
            tokens=tokens, length=length, keys=keys, options=options, noise=noise
        )
        counts = None
        if plan.features.penalties:
            counts = count_tokens(tokens, length, options.prompt_len, VOCAB)
        context = context_of(tokens, length, plan.features, counts)
        return draft_tree(None, None, plan, arrays, context, part)

    return program


def draft_of(plan, state):
    return jax.jit(program_of(plan))(state.tokens, state.length, state.keys, state.options)


def drafted(strategy, source, temperature=(0.0, 0.7, 1.0), **settings):
    plan = Plan(None, build_tree(Strategy.parse(strategy)), source, **settings)
    state = state_of(temperature)
    return draft_of(plan, state), state


def perturbed(state, slot, logits, depth):
    """log q + noise, and log q where the slot is greedy; in float32 like the program."""
    temperature = float(state.options.temperature[slot])
    logits = logits - logits.max()
    if temperature == 0:
        return logits
    position = int(state.length[slot]) + depth
    return logits / np.float32(temperature) + noise_of(tuple(state.keys[slot].tolist()), position)


@functools.cache
def noise_of(key, position):
    keys = np.array([key], np.uint32)
    return np.asarray(target_noise(keys, np.array([[position]]), VOCAB))[0, 0]


def nodes_of(draft, slot):
    """{path: row} of the rows that hold a draft, read off parents and tokens."""
    parent = np.broadcast_to(draft.shape.parent, draft.tokens.shape)[slot]
    tokens = np.asarray(draft.tokens[slot])
    paths = {0: ()}
    for row in range(1, len(tokens)):
        paths[row] = (*paths[int(parent[row])], int(tokens[row]))
    return {path: row for row, path in paths.items() if -1 not in path}


def best_first(scores, count):
    return [int(t) for t in np.argsort(-scores, kind="stable")[:count] if np.isfinite(scores[t])]


FEW = range(2, VOCAB)  # tokens that are missing where there are too few


@pytest.mark.parametrize(
    ("strategy", "missing"),
    [
        ("4_1_5", ()),
        ("default", ()),
        ("3x2x1", FEW),
    ],
)
def test_static_trees_hold_the_best_perturbed_candidates_of_every_branch(strategy, missing):
    source = TableSource(missing=missing)
    draft, state = drafted(strategy, source)
    tree = build_tree(Strategy.parse(strategy))
    for slot in range(BATCH):
        expected = {()}
        for path in tree.strategy.paths:  # child ranks, not tokens
            tokens, alive = (), True
            for depth, rank in enumerate(path):
                scores = perturbed(state, slot, source.logits_after(slot, tokens), depth)
                best = best_first(scores, rank + 1)
                alive = alive and len(best) > rank
                tokens = (*tokens, best[rank]) if alive else tokens
            if alive:
                expected.add(tokens)
        assert set(nodes_of(draft, slot)) == expected


def log_softmax(x):
    x = x - x.max()
    return x - np.log(np.exp(x).sum())


def grown(source, state, slot, steps, topk, rows, tau, width=None):
    """EAGLE-2 in plain Python: {path: score} of the rows that are kept."""
    tau = tau if state.options.temperature[slot] > 0 else 1.0
    everything, frontier = {}, [((), 0.0)]
    for depth in range(steps):
        level = {}
        for path, score in frontier:
            scores = perturbed(state, slot, source.logits_after(slot, path), depth)
            gains = log_softmax(scores / np.float32(tau))
            count = topk
            if width is not None:
                count = min(topk, width(state, slot, source.logits_after(slot, path)))
            for token in best_first(scores, count):
                level[(*path, token)] = score + min(float(gains[token]), 0.0)
        everything |= level
        frontier = sorted(level.items(), key=lambda item: -item[1])[:topk]
    best = sorted(everything.items(), key=lambda item: -item[1])[: rows - 1]
    return dict(best)


@pytest.mark.parametrize(
    ("strategy", "tau"),
    [
        ("3_2_6", 0.6),
        ("2_4_21", 0.3),
    ],
)
def test_dynamic_trees_keep_the_best_paths_of_the_best_frontier(strategy, tau):
    source = TableSource()
    draft, state = drafted(strategy, source, tau=tau)
    steps, topk, rows = Strategy.parse(strategy).dynamic
    for slot in range(BATCH):
        nodes = nodes_of(draft, slot)
        assert set(nodes) - {()} == set(grown(source, state, slot, steps, topk, rows, tau))
        check_shape(draft, slot, nodes)


def check_shape(draft, slot, nodes):
    """Depths ascend, parents stand before children, paths and bits say the same."""
    shape = jax.tree.map(lambda x: np.asarray(x)[slot], draft.shape)
    assert (np.diff(shape.depth) >= 0).all()
    assert (shape.parent[1:] < np.arange(1, len(shape.parent))).all()
    np.testing.assert_array_equal(shape.visible, ancestors(shape.parent))
    for path, row in nodes.items():
        assert shape.depth[row] == len(path)
        assert np.asarray(draft.paths)[slot, row, : len(path)].tolist() == list(path)


def perplexity_width(state, slot, logits):
    temperature = float(state.options.temperature[slot]) or 1.0
    p = np.exp(log_softmax(logits / np.float32(temperature)).astype(np.float64))
    return int(np.round(np.exp(-(p[p > 0] * np.log(p[p > 0])).sum())))


def test_adaptive_width_gives_sure_nodes_fewer_children_and_unsure_ones_more():
    source = TableSource(seed=2, sharpness=6.0)
    kept = []
    for adaptive in (False, True):
        draft, state = drafted("3_4_12", source, adaptive_width=adaptive, tau=1.0)
        kept.append([nodes_of(draft, slot) for slot in range(BATCH)])
        width = perplexity_width if adaptive else None
        for slot in range(BATCH):
            expected = grown(source, state, slot, 3, 4, 12, 1.0, width)
            assert set(kept[-1][slot]) - {()} == set(expected)
    assert kept[0] != kept[1]


def test_a_slot_that_opts_out_gets_no_draft_and_the_others_keep_theirs():
    plan = Plan(None, build_tree(Strategy.parse("3x2x1")), TableSource())
    temperature = (0.0, 0.7, 1.0)
    all_in = draft_of(plan, state_of(temperature))
    draft = draft_of(plan, state_of(temperature, speculate=np.array([True, False, True])))
    np.testing.assert_array_equal(draft.tokens[::2], all_in.tokens[::2])
    assert (draft.tokens[1, 1:] == -1).all() and draft.tokens[1, 0] == all_in.tokens[1, 0]


@pytest.mark.parametrize(
    ("strategies", "common", "missing", "settings"),
    [
        (("off", "2_1_3", "3x2x1", "1x1x1x1"), "3x2x1+1x1x1x1", (), {}),
        (("off", "2_1_3", "3_2_6", "2_4_12"), "3_4_12", FEW, {}),
        (("2_1_3", "2_2_4", "3_4_9"), "3_4_9", (), {"adaptive_width": True, "tau": 1.0}),
    ],
)
def test_one_program_drafts_for_each_strategy_what_its_own_program_drafts(
    strategies, common, missing, settings
):
    parsed = [*map(Strategy.parse, strategies)]
    shared = common_strategy([s for s in parsed if not s.is_off])
    if "+" in common:
        held = {p for name in common.split("+") for p in Strategy.parse(name).paths}
        assert set(shared.paths) == held
    else:
        assert shared == Strategy.parse(common)
    source = TableSource(missing=missing)
    plan, state = Plan(None, build_tree(shared), source, **settings), state_of((0.0, 0.7, 1.0))
    program = jax.jit(program_of(plan))
    drafts = []
    for strategy in parsed:
        part = tree_part(plan.tree, strategy)
        draft = program(state.tokens, state.length, state.keys, state.options, part)
        drafts.append([set(nodes_of(draft, slot)) for slot in range(BATCH)])
        if strategy.is_off:
            assert drafts[-1] == [{()}] * BATCH
            continue
        own = draft_of(Plan(None, build_tree(strategy), source, **settings), state)
        assert drafts[-1] == [set(nodes_of(own, slot)) for slot in range(BATCH)], strategy
    assert all(a != b for a, b in itertools.pairwise(drafts))


@pytest.mark.parametrize("mode", ["block", "recursive"])
def test_rules_that_divide_by_q_get_the_distribution_that_was_drawn_from(mode):
    source = TableSource()
    draft, state = drafted("3_1_4", source, mode=mode)
    for slot in range(BATCH):
        path = np.asarray(draft.tokens[slot, 1:]).tolist()
        for depth in range(3):
            logits = source.logits_after(slot, path[:depth])
            temperature = float(state.options.temperature[slot])
            if temperature:
                q = np.asarray(jax.nn.softmax(logits / temperature))
            else:
                q = np.eye(VOCAB)[logits.argmax()]
            np.testing.assert_allclose(draft.q[slot, depth], q, atol=1e-6)


def test_drafts_are_aligned_with_the_options_along_each_branch_unless_switched_off():
    """A frequency penalty so large that no token can be best twice on one path."""
    source = TableSource(seed=4)
    source.follow[:] = 5 * np.eye(VOCAB)  # left alone, it repeats itself
    plan = Plan(
        None, build_tree(Strategy.parse("4_1_5")), source, features=Features(penalties=True)
    )
    state = state_of((0.0, 0.0, 0.0), frequency=np.full(BATCH, 100.0, np.float32))
    for aligned, distinct in ((True, 4), (False, 1)):
        draft = draft_of(dataclasses.replace(plan, aligned=aligned), state)
        assert all(len(set(path)) == distinct for path in draft.tokens[:, 1:].tolist())
