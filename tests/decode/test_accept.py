"""The jitted rules equal the plain ones, whose exactness test_exact.py shows by enumeration."""

import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from reference import (
    Injected,
    block_accept,
    children_of,
    coupled_accept,
    random_distributions,
    recursive_accept,
)
from scipy import stats

from specjax.config import Strategy
from specjax.decode.accept import accept, accept_block, accept_coupled, accept_recursive
from specjax.decode.noise import DRAFT, draw_ahead, round_noise, target_noise
from specjax.decode.sampling import perturb, probabilities, sanitise, tempered
from specjax.decode.state import Plan
from specjax.decode.tree import build_tree, grown_shape

CASES = 10_000
ALPHA = 1e-6


UNEVEN = ((0,), (1,), (2,), (0, 0), (0, 1), (2, 0), (0, 1, 0))


def chain(steps):
    return build_tree(Strategy.parse(f"{steps}_1_{steps + 1}"))


def accept_logits(mode, tree, tokens, logits, temperature, draft_logits, keys, root):
    """The rule on untransformed logits, with the randomness of a real round."""
    noise = None
    if mode == "coupled":
        noise = draw_ahead(keys, root, tree.steps + 1, logits.shape[-1], tree.is_chain)
    options = SimpleNamespace(temperature=temperature)
    state = SimpleNamespace(keys=keys, options=options, length=root + 1, noise=noise)
    q = probabilities(tempered(draft_logits, temperature), temperature)
    draft = SimpleNamespace(tokens=tokens, shape=tree.shape, q=q)
    plan = Plan(None, tree, mode=mode)
    return accept(plan, state, draft, tempered(logits, temperature))


# --- the jitted rules equal the plain ones --------------------------------------------------------


def draw(generator, probabilities):
    cumulative = probabilities.astype(np.float64).cumsum(-1)
    u = generator.random(probabilities.shape[:-1])[..., None] * cumulative[..., -1:]
    return (u >= cumulative).sum(-1).astype(np.int32)


def test_accept_block_equals_the_plain_rule_on_random_cases_with_ties_zeros_and_equal_p_q():
    generator = np.random.default_rng(0)
    steps, vocab = 3, 5
    p = random_distributions(generator, CASES, steps + 1, vocab).astype(np.float32)
    q = random_distributions(generator, CASES, steps, vocab).astype(np.float32)
    same = generator.random((CASES, steps)) < 0.3
    q = np.where(same[..., None], p[:, :-1], q)
    drafted = draw(generator, q)
    drafted[generator.random(drafted.shape) < 0.02] = -1  # no candidate
    coins = generator.random((CASES, steps)).astype(np.float32)
    noise = generator.gumbel(size=(CASES, vocab)).astype(np.float32)
    tokens = np.concatenate([np.zeros((CASES, 1), np.int32), drafted], axis=1)
    out = jax.jit(accept_block)(tokens, p, q, coins, noise)
    emitted, count = np.asarray(out.tokens), np.asarray(out.count)
    assert (np.asarray(out.path) == np.arange(steps + 1)).all()

    close_calls, lengths = 0, np.zeros(steps + 2, int)
    for i in range(CASES):
        injected = Injected(coins[i], noise[i])
        rows = p[i].astype(np.float64), q[i].astype(np.float64), drafted[i].tolist()
        expected, _ = block_accept(*rows, injected.flip, injected.pick)
        lengths[len(expected)] += 1
        if emitted[i, : count[i]].tolist() != expected:
            # float32 against float64 may decide a coin or a draw that hangs by a hair.
            assert min(injected.margins) < 1e-5, f"case {i}"
            close_calls += 1
    assert close_calls < CASES / 1000
    assert (lengths[1:] > CASES / 20).all()  # every length occurs often


@pytest.mark.parametrize("strategy", ["3_1_4", "4x2x1"])
def test_accept_coupled_equals_the_plain_walk_on_random_trees(strategy):
    generator = np.random.default_rng(1)
    tree = build_tree(Strategy.parse(strategy))
    vocab, cases = 6, CASES // 4
    tokens = np.full((cases, tree.rows), -1, np.int32)
    for row in range(tree.rows):
        siblings = np.flatnonzero(tree.shape.parent == row)
        siblings = siblings[siblings != 0]
        shuffled = generator.permuted(np.tile(np.arange(vocab), (cases, 1)), axis=1)
        tokens[:, siblings] = shuffled[:, : len(siblings)]
    tokens[:, 1:][generator.random((cases, tree.rows - 1)) < 0.05] = -1
    chosen = generator.integers(0, vocab, tokens.shape).astype(np.int32)
    follow = generator.random(cases) < 0.5  # half of the cases go deep
    chosen[follow] = np.maximum(tokens[follow][:, np.r_[1 : tree.rows, 0]], 0)
    out = jax.jit(lambda *x: accept_coupled(x[0], tree.shape, x[1]))(tokens, chosen)
    emitted, path, count = map(np.asarray, out)
    for i in range(cases):
        expected, rows = coupled_accept(tree.shape.parent, tokens[i], chosen[i].tolist())
        assert emitted[i, : count[i]].tolist() == expected
        assert path[i, : count[i]].tolist() == rows
    assert set(count) == set(range(1, tree.steps + 2))


# --- cases that engines got wrong -----------------------------------------------------------------


def one_hot_logits(choices, vocab):
    return 20.0 * jax.nn.one_hot(jnp.asarray(choices), vocab)


jitted = jax.jit(accept_logits, static_argnums=(0, 1))


def greedy_round(mode, drafts, targets, vocab=10):
    """Tokens emitted per sequence when draft and target have these argmaxes."""
    drafts, targets = np.asarray(drafts), np.asarray(targets)
    batch, steps = drafts.shape
    tokens = np.concatenate([np.zeros((batch, 1), np.int32), drafts], axis=1).astype(np.int32)
    keys = jnp.arange(2 * batch, dtype=jnp.uint32).reshape(batch, 2)
    root = jnp.full((batch,), 5)
    out = jitted(
        mode,
        chain(steps),
        jnp.asarray(tokens),
        one_hot_logits(targets, vocab),
        jnp.zeros(batch),
        one_hot_logits(drafts, vocab),
        keys,
        root,
    )
    return [row[:n].tolist() for row, n in zip(np.asarray(out.tokens), out.count, strict=True)]


@pytest.mark.parametrize("mode", ["coupled", "block", "recursive", "greedy"])
def test_greedy_chains_emit_the_matching_prefix_and_the_targets_own_next_token(mode):
    drafts, targets = [[1, 2, 3], [1, 2, 3]], [[1, 5, 3, 4], [1, 2, 3, 4]]
    assert greedy_round(mode, drafts, targets) == [[1, 5], [1, 2, 3, 4]]
    drafts, targets = [[1, 2, 3], [4, 5, 6]], [[1, 2, 7, 6], [4, 8, 6, 9]]
    assert greedy_round(mode, drafts, targets) == [[1, 2, 7], [4, 8]]


def test_greedy_trees_follow_the_branch_that_the_target_takes():
    """SGLang's two trees, with a first child and a next sibling for each row, as parents.

    The best token is 3, 4, 5 down one branch of the first tree, 11, 12 down one of the second, and
    18 wherever nothing is said.
    """
    tokens = np.array([[0, 1, 2, 3, 4, 5], [7, 8, 9, 10, 11, 12]], np.int32)
    parent = np.array([[0, 0, 1, 0, 3, 4], [0, 0, 1, 2, 0, 4]])
    depth = np.array([[0, 1, 2, 1, 2, 3], [0, 1, 2, 3, 1, 2]])
    best = np.full(tokens.shape, 18, np.int32)
    best[0, [0, 3, 4]] = 3, 4, 5
    best[1, [0, 4]] = 11, 12
    out = jax.jit(lambda *x: accept_coupled(x[0], grown_shape(*x[1:3], steps=3), x[3]))(
        tokens, parent, depth, best
    )
    assert out.count.tolist() == [4, 3]
    assert out.tokens[0].tolist() == [3, 4, 5, 18] and out.path[0].tolist() == [0, 3, 4, 5]
    assert out.tokens[1, :3].tolist() == [11, 12, 18] and out.path[1, :3].tolist() == [0, 4, 5]


@pytest.mark.parametrize("mode", ["coupled", "block", "recursive"])
def test_no_token_without_mass_or_beyond_the_vocabulary_is_ever_emitted(mode, vocab=8193):
    """The upper half of the vocabulary and every third token have no mass under the target."""
    generator = np.random.default_rng(vocab)
    batch, steps = 4, 2
    tree = chain(steps)
    allowed = (np.arange(vocab) < vocab // 2) & (np.arange(vocab) % 3 > 0)
    logits = generator.normal(size=(batch, steps + 1, vocab)).astype(np.float32)
    logits = np.where(allowed, logits, -np.inf)
    draft_logits = generator.normal(size=(batch, steps, vocab)).astype(np.float32)
    temperature = np.array([0.0, 0.7, 1.0, 5.0], np.float32)

    @jax.jit
    def run(root, logits, draft_logits):
        keys = jnp.arange(2 * batch, dtype=jnp.uint32).reshape(batch, 2)
        private = round_noise(keys, DRAFT, root, np.arange(steps), vocab)
        scores = perturb(tempered(draft_logits, temperature), temperature, private)
        drafts = jnp.argmax(scores, -1).astype(jnp.int32)
        tokens = jnp.concatenate([jnp.zeros((batch, 1), jnp.int32), drafts], axis=1)
        return accept_logits(mode, tree, tokens, logits, temperature, draft_logits, keys, root)

    for root in range(3):
        out = run(np.full((batch,), root), logits, draft_logits)
        for row, count in zip(np.asarray(out.tokens), out.count, strict=True):
            assert ((row[:count] >= 0) & (row[:count] < vocab)).all()
            assert allowed[row[:count]].all()


@pytest.mark.parametrize("mode", ["coupled", "block", "recursive"])
def test_greedy_and_sampled_rows_of_one_batch_do_not_touch_each_other(mode):
    generator = np.random.default_rng(9)
    batch, steps, vocab = 6, 3, 8
    tree = chain(steps)
    logits = 2 * generator.normal(size=(batch, steps + 1, vocab)).astype(np.float32)
    draft_logits = logits[:, :-1] + generator.normal(size=(batch, steps, vocab))
    draft_logits = draft_logits.astype(np.float32)
    temperature = np.array([0, 1, 0, 0.7, 0, 1], np.float32)
    tokens = np.concatenate([np.zeros((batch, 1)), draft_logits.argmax(-1)], 1).astype(np.int32)

    @jax.jit
    def run(temperature):
        keys = jnp.arange(2 * batch, dtype=jnp.uint32).reshape(batch, 2)
        root = jnp.arange(batch)
        return accept_logits(mode, tree, tokens, logits, temperature, draft_logits, keys, root)

    def rows(out, which):
        return [out.tokens[i, : out.count[i]].tolist() for i in which]

    mixed, greedy, sampled = run(temperature), run(0 * temperature), run(temperature + 1e-6)
    hot = np.flatnonzero(temperature)
    cold = np.flatnonzero(temperature == 0)
    assert rows(mixed, cold) == rows(greedy, cold)
    assert rows(mixed, hot) == rows(sampled, hot)
    for i in cold:
        path = [logits[i, d].argmax() for d in range(int(mixed.count[i]))]
        assert mixed.tokens[i, : mixed.count[i]].tolist() == path


@pytest.mark.parametrize("broken", [np.nan, np.inf])
def test_tokens_drawn_from_a_broken_drafts_logits_follow_the_q_that_block_divides_by(broken):
    """A whole row of NaN must be drawn uniformly if q says so; 1e30 would swallow the noise."""
    vocab, trials = 4, 20_000
    logits = sanitise(jnp.full((vocab,), broken))
    noise = target_noise(jnp.zeros((1, 2), jnp.uint32), jnp.arange(trials)[None], vocab)[0]
    drawn = np.bincount(np.argmax(logits + noise, -1), minlength=vocab)
    q = np.asarray(jax.nn.softmax(logits), np.float64)
    np.testing.assert_allclose(q, 1 / vocab)
    assert stats.chisquare(drawn, q * trials).pvalue > ALPHA


# --- recursive ------------------------------------------------------------------------------------


def tree_of(spec):
    return build_tree(Strategy.parse(spec))


@functools.cache
def rule_of(spec):
    """The jitted rule: a function of its own for every tree and not for every call."""
    return jax.jit(functools.partial(accept_recursive, tree_of(spec)))


def never(batch):
    return np.zeros(batch, bool)


def random_case(generator, tree, cases, vocab):
    """Rows p and q and trees drawn from q, as the rule will meet them and worse."""
    parent = tree.shape.parent
    p = random_distributions(generator, cases, tree.rows, vocab)
    q = random_distributions(generator, cases, tree.rows, vocab)
    q = np.where(generator.random((cases, tree.rows, 1)) < 0.3, p, q)
    # Half of the drafts get a p that likes them, so that walks go deep.
    likeable = generator.random(cases) < 0.5
    tokens = np.full((cases, tree.rows), -1, np.int32)
    for i in range(cases):
        for row in tree.expanded_rows:
            # Gumbel-top-k: a draw without replacement, as long as the support lasts.
            with np.errstate(divide="ignore"):
                scores = np.log(q[i, row]) + generator.gumbel(size=vocab)
            children = children_of(parent, row)
            ids = np.argsort(-scores)[: len(children)]
            drawn = np.where(scores[ids] > -np.inf, ids, -1)
            tokens[i, children] = np.pad(drawn, (0, len(children) - len(ids)), constant_values=-1)
            if likeable[i]:
                p[i, row] = (p[i, row] + q[i, row]) / 2
    tokens[:, 1:][generator.random((cases, tree.rows - 1)) < 0.03] = -1
    foreign = generator.random(tokens.shape) < 0.02  # not drawn from q at all
    tokens = np.where(foreign, generator.integers(0, vocab, tokens.shape), tokens)
    return p.astype(np.float32), q.astype(np.float32), tokens.astype(np.int32)


@pytest.mark.parametrize(
    ("spec", "vocab"),
    [
        ("default", 6),
        ("4x1", 3),
        (UNEVEN, 5),
    ],
    ids=str,
)
def test_accept_recursive_equals_the_plain_rule_on_random_cases(spec, vocab):
    """Ties, zero masses, p = q, more children than tokens, missing drafts, drafts not from q."""
    generator = np.random.default_rng(3)
    tree, cases = tree_of(spec), CASES // 5
    p, q, tokens = random_case(generator, tree, cases, vocab)
    coins = generator.random((cases, tree.rows - 1)).astype(np.float32)
    noise = generator.gumbel(size=(cases, vocab)).astype(np.float32)
    out = rule_of(spec)(tokens, p, q[:, tree.expanded_rows], coins, noise, never(cases))
    emitted, path, count = map(np.asarray, out)

    close_calls, lengths, parent = 0, np.zeros(tree.steps + 2, int), tree.shape.parent
    for i in range(cases):
        injected = Injected(coins[i], noise[i])
        rows = p[i].astype(np.float64), q[i].astype(np.float64)
        args = parent, tokens[i].tolist(), *rows, injected.flip, injected.pick
        expected, rows = recursive_accept(*args)
        lengths[len(expected)] += 1
        if emitted[i, : count[i]].tolist() != expected or path[i, : count[i]].tolist() != rows:
            # float32 against float64 may decide a coin or a draw that hangs by a hair.
            assert min(injected.margins) < 1e-5, f"case {i}"
            close_calls += 1
    assert close_calls < max(cases / 1000, 3)
    assert (lengths[1:] > cases / 50).all()  # every length occurs often


def test_a_dynamic_tree_is_refused_with_the_reason():
    with pytest.raises(ValueError, match="shape is fixed before sampling"):
        accept_recursive(tree_of("3_2_6"), *[None] * 6)


# --- one node at a time ---------------------------------------------------------------------------


def one_node(p, q, drafted, coins, noise=None, greedy=False):
    """Emitted tokens when siblings are tried below the root; accepted ones end at a flat row."""
    spec, vocab = f"{len(drafted)}", len(p)
    rows = np.full((1, tree_of(spec).rows, vocab), 1 / vocab, np.float32)
    rows[0, 0] = p
    out = rule_of(spec)(
        np.array([[0, *drafted]], np.int32),
        rows,
        np.array([[q]], np.float32),
        np.array([coins], np.float32),
        np.zeros((1, vocab), np.float32) if noise is None else np.array([noise], np.float32),
        np.array([greedy]),
    )
    return out.tokens[0, : int(out.count[0])].tolist(), out.path[0, : int(out.count[0])].tolist()


def test_a_draft_that_q_gives_no_mass_is_never_accepted_and_nothing_is_divided_by_zero():
    p, q = (0.5, 0.5, 0.0), (0.0, 1.0, 0.0)
    with jax.debug_nans(True):
        assert one_node(p, q, [0], coins=[1e-30], noise=[5, 0, 0]) == ([0], [0])
        # q is used up by its only token: the second cannot have been drawn.
        assert one_node(p, q, [1, 0], coins=[0.6, 1e-30], noise=[0, 5, 5]) == ([0], [0])


def test_a_draft_that_p_gives_no_mass_is_rejected_by_the_smallest_coin():
    """Coin times q is zero in float32, as p is: equality must not accept."""
    p, q = (1.0, 0.0), (1.0, 1e-20)
    assert one_node(p, q, [1], coins=[1e-30], noise=[0, 9]) == ([0], [0])
