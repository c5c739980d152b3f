"""Acceptance is exact: by enumeration for the rule, by equality with it for the jitted program."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from reference import (
    Injected,
    autoregressive_joint,
    block_accept,
    coupled_accept,
    random_table,
    speculative_joint,
    total_variation,
)
from scipy import stats

from specjax.config import Strategy
from specjax.decode.accept import accept, accept_block, accept_coupled
from specjax.decode.noise import (
    DRAFT,
    RESIDUAL,
    empty_ring,
    refill,
    request_keys,
    round_noise,
    target_noise,
)
from specjax.decode.sampling import perturb, probabilities, sanitise, tempered
from specjax.decode.state import Plan
from specjax.decode.tree import build_tree, grown_shape

CASES = 10_000
ALPHA = 1e-6


def chain(steps):
    return build_tree(Strategy.parse(f"{steps}_1_{steps + 1}"))


def accept_logits(mode, tree, tokens, logits, temperature, draft_logits, keys, root):
    """The rule on untransformed logits, with the randomness of a real round."""
    ring = None
    if mode == "coupled":
        ring = empty_ring(len(tokens), tree.steps + 1, logits.shape[-1])
        ring = refill(ring, keys, root, jnp.ones(len(tokens), bool), tree.steps + 1)
    options = SimpleNamespace(temperature=temperature)
    state = SimpleNamespace(keys=keys, options=options, length=root + 1, noise=ring)
    q = probabilities(tempered(draft_logits, temperature), temperature)
    draft = SimpleNamespace(tokens=tokens, shape=tree.shape, q=q)
    plan = Plan(None, tree, mode=mode)
    return accept(plan, state, draft, tempered(logits, temperature))


# --- the rule is exact ----------------------------------------------------------------------------


def block_round(p, q, steps, accept_rule=block_accept):
    """One round on tables: drafts sampled from q, then the rule; all randomness from the tape."""

    def one_round(tape, context):
        drafted = []
        for _ in range(steps):
            drafted.append(tape.pick(q((*context, *drafted))))
        contexts = [(*context, *drafted[:i]) for i in range(steps + 1)]
        p_rows = np.array([p(c) for c in contexts])
        q_rows = np.array([q(c) for c in contexts[:-1]])
        return accept_rule(p_rows, q_rows, drafted, tape.flip, tape.pick)[0]

    return one_round


@pytest.mark.parametrize(
    ("vocab", "steps", "sharpness", "seed"), [(4, 2, 1.0, 0), (4, 2, 3.0, 1), (4, 3, 1.5, 2)]
)
def test_block_verification_gives_the_autoregressive_joint_exactly(vocab, steps, sharpness, seed):
    generator = np.random.default_rng(seed)
    p = random_table(generator, vocab, sharpness)
    q = random_table(generator, vocab, sharpness)
    emitted = speculative_joint(block_round(p, q, steps), length=3)
    assert total_variation(emitted, autoregressive_joint(p, 3, vocab)) < 1e-12


def test_enumeration_sees_the_bias_of_a_correction_from_the_full_target():
    def from_full_target(p, q, drafted, flip, pick):
        emitted, thresholds = block_accept(p, q, drafted, flip, lambda weights: 0)
        kept = len(emitted) - 1
        return [*emitted[:kept], pick(p[kept])], thresholds

    generator = np.random.default_rng(0)
    p, q = random_table(generator, 4, 1.0), random_table(generator, 4, 1.0)
    emitted = speculative_joint(block_round(p, q, 2, from_full_target), length=3)
    assert total_variation(emitted, autoregressive_joint(p, 3, 4)) > 0.02


# --- the jitted rules equal the plain ones --------------------------------------------------------


def random_distributions(generator, *shape):
    """Some smooth, some peaked, some with zero masses and ties, some one-hot."""
    *lead, vocab = shape
    kind = generator.integers(0, 4, lead)[..., None]
    smooth = generator.dirichlet(np.ones(vocab), lead)
    peaked = generator.dirichlet(np.full(vocab, 0.1), lead)
    counts = (
        generator.integers(0, 3, shape)
        + np.eye(vocab, dtype=int)[generator.integers(0, vocab, lead)]
    )
    one_hot = np.eye(vocab)[generator.integers(0, vocab, lead)]
    mixed = np.where(kind == 0, smooth, np.where(kind == 1, peaked, one_hot))
    mixed = np.where(kind == 2, counts / counts.sum(-1, keepdims=True), mixed)
    return mixed.astype(np.float32)


def draw(generator, probabilities):
    cumulative = probabilities.astype(np.float64).cumsum(-1)
    u = generator.random(probabilities.shape[:-1])[..., None] * cumulative[..., -1:]
    return (u >= cumulative).sum(-1).astype(np.int32)


def test_accept_block_equals_the_plain_rule_on_random_cases_with_ties_zeros_and_equal_p_q():
    generator = np.random.default_rng(0)
    steps, vocab = 3, 5
    p = random_distributions(generator, CASES, steps + 1, vocab)
    q = random_distributions(generator, CASES, steps, vocab)
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


@pytest.mark.parametrize("strategy", ["3_1_4", "default", "4x2x1", "2x2x2x2"])
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


@pytest.mark.parametrize("mode", ["coupled", "recursive", "greedy"])
def test_the_first_of_these_trees_gives_the_same_under_every_rule_for_trees(mode):
    tree = build_tree(Strategy.from_paths([(0,), (1,), (0, 0), (1, 0), (1, 0, 0)]))
    tokens = jnp.array([[0, 1, 3, 2, 4, 5]])  # the rows of a static tree are ordered by depth
    best = one_hot_logits([[3, 18, 4, 18, 5, 18]], 20)
    drafted = one_hot_logits([[3, 2, 4, 5]], 20)
    args = (tokens, best, jnp.zeros(1), drafted, jnp.zeros((1, 2), jnp.uint32), jnp.array([5]))
    out = jitted(mode, tree, *args)
    assert int(out.count[0]) == 4 and out.tokens[0].tolist() == [3, 4, 5, 18]


def many_keys(count):
    words = np.stack([np.full(5, 7, np.uint32)] * count)
    words[:, 4] = np.arange(count)
    return jax.jit(request_keys)(words)


def test_acceptance_is_the_overlap_and_the_residual_holds_what_the_draft_gives_too_rarely():
    p, q, trials = np.array([0.7, 0.2, 0.1]), np.array([0.3, 0.4, 0.3]), 100_000
    keys = many_keys(trials)

    @jax.jit
    def run(keys, root, temperature, p, q):
        """Distributions come in as arguments: XLA would compute with constants as it compiles."""
        logits, draft_logits = (
            jnp.broadcast_to(jnp.log(x), (trials, rows, 3)) for x, rows in ((p, 2), (q, 1))
        )
        noise = round_noise(keys, DRAFT, root, [0], 3)[:, 0]
        drafted = jnp.argmax(draft_logits[:, 0] + noise, -1)
        tokens = jnp.stack([jnp.zeros_like(drafted), drafted], axis=1)
        args = ("block", chain(1), tokens, logits, temperature, draft_logits, keys, root)
        return drafted, accept_logits(*args)

    root, temperature = np.full(trials, 3), np.ones(trials, np.float32)
    drafted, out = run(keys, root, temperature, np.float32(p), np.float32(q))
    accepted = np.asarray(out.count) == 2
    first = np.asarray(out.tokens)[:, 0]
    assert abs(accepted.mean() - 0.6) < 5 * np.sqrt(0.24 / trials)
    assert (first[accepted] == np.asarray(drafted)[accepted]).all()
    assert (first[~accepted] == 0).all()
    assert stats.chisquare(np.bincount(first, minlength=3), p * trials).pvalue > ALPHA


def opposite_first_tokens(draft_domain, trials, vocab=16):
    """First emitted tokens when the draft's logits are the target's with the sign changed."""
    logits = 1.5 * np.random.default_rng(4).normal(size=vocab).astype(np.float32)
    root, keys = np.full(trials, 8), many_keys(trials)
    temperature = np.ones(trials, np.float32)

    @jax.jit  # a program of its own: XLA would draw the same noise once and fuse it everywhere
    def draw(keys, root, logits):
        noise = round_noise(keys, draft_domain, root, [0], vocab)[:, 0]
        return jnp.argmax(-logits + noise, -1)

    @jax.jit
    def run(keys, root, temperature, logits, drafted):
        target = jnp.broadcast_to(logits, (trials, 2, vocab))
        tokens = jnp.stack([jnp.zeros_like(drafted), drafted], axis=1)
        args = ("block", chain(1), tokens, target, temperature, -target[:, :1], keys, root)
        return accept_logits(*args).tokens[:, 0]

    drafted = draw(keys, root, logits)
    counts = np.bincount(run(keys, root, temperature, logits, drafted), minlength=vocab)
    expected = np.asarray(jax.nn.softmax(logits), np.float64)
    return stats.chisquare(counts, expected / expected.sum() * trials).pvalue


TRIALS = [30_000, pytest.param(200_000, marks=pytest.mark.slow)]


@pytest.mark.parametrize("trials", TRIALS)
def test_a_draft_opposed_to_the_target_leaves_the_targets_distribution(trials):
    assert opposite_first_tokens(DRAFT, trials) > ALPHA


@pytest.mark.parametrize("trials", TRIALS)
def test_the_drafts_noise_used_again_for_the_residual_is_seen_as_biased(trials):
    assert opposite_first_tokens(RESIDUAL, trials) < ALPHA


SLOWLY = [pytest.param(size, marks=pytest.mark.slow) for size in (100, 151936)]


@pytest.mark.parametrize("vocab", [8193, *SLOWLY])
@pytest.mark.parametrize("mode", ["coupled", "block", "recursive"])
def test_no_token_without_mass_or_beyond_the_vocabulary_is_ever_emitted(mode, vocab):
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


@pytest.mark.parametrize("coin", [1e-30, 0.5])
def test_a_draft_id_of_minus_one_is_never_accepted_nor_looked_up(coin):
    """The last token has all of p and q: looked up by index -1 it would be accepted for certain."""
    tokens = np.array([[0, -1, -1]], np.int32)
    last = np.eye(4, dtype=np.float32)[-1]
    p, q = np.tile(last, (1, 3, 1)), np.tile(last, (1, 2, 1))
    noise = np.zeros((1, 4), np.float32)
    out = jax.jit(accept_block)(tokens, p, q, np.full((1, 2), coin, np.float32), noise)
    assert int(out.count[0]) == 1 and int(out.tokens[0, 0]) == 3
    out = jax.jit(lambda *x: accept_coupled(x[0], chain(2).shape, x[1]))(
        tokens, np.full((1, 3), 3, np.int32)
    )
    assert int(out.count[0]) == 1 and int(out.tokens[0, 0]) == 3


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
