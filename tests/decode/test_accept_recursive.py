"""The jitted recursive rule equals the plain one, and leaves the target's distribution."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from reference import Injected, children_of, draw_tree, path_tokens, recursive_accept
from scipy import stats

from specjax.config import Strategy
from specjax.decode.accept import accept_recursive, child_rows
from specjax.decode.tree import build_tree

CASES = 10_000
ALPHA = 1e-6
UNEVEN = ((0,), (1,), (2,), (0, 0), (0, 1), (2, 0), (0, 1, 0))


def tree_of(spec):
    return build_tree(Strategy.parse(spec))


@functools.cache
def rule_of(spec):
    """The jitted rule: a function of its own for every tree and not for every call."""
    return jax.jit(functools.partial(accept_recursive, tree_of(spec)))


def never(batch):
    return np.zeros(batch, bool)


def random_distributions(generator, *shape):
    """Some smooth, some peaked, some with zero masses and ties, some one-hot."""
    *lead, vocab = shape
    kind = generator.integers(0, 4, lead)[..., None]
    smooth = generator.dirichlet(np.ones(vocab), lead)
    peaked = generator.dirichlet(np.full(vocab, 0.1), lead)
    one_hot = np.eye(vocab)[generator.integers(0, vocab, lead)]
    counts = generator.integers(0, 3, shape) + one_hot
    tied = counts / counts.sum(-1, keepdims=True)
    return np.select([kind == 0, kind == 1, kind == 2], [smooth, peaked, tied], one_hot)


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
        ("3_1_4", 5),
        ("default", 6),
        ("4x1", 3),
        (UNEVEN, 5),
        pytest.param("2x2", 5, marks=pytest.mark.slow),
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


@pytest.mark.parametrize("spec", ["3_1_4", "2x2", "default", UNEVEN], ids=str)
def test_child_rows_lists_the_children_of_every_row_in_draw_order(spec):
    tree = tree_of(spec)
    nodes = [(), *tree.strategy.paths]
    for row, path in enumerate(nodes):
        expected = [nodes.index((*path, i)) for i in range(5) if (*path, i) in nodes]
        assert [child for child in child_rows(tree)[row].tolist() if child] == expected


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


def test_a_second_sibling_is_tested_against_the_residual_and_what_is_left_of_q():
    """After losing token 0: p = (0, .8, .2), q = (0, .5, .5): token 2 is worth .4, token 1 more."""
    p, q = (0.2, 0.6, 0.2), (0.6, 0.2, 0.2)
    assert one_node(p, q, [0, 1], coins=[0.34, 0.999])[0][0] == 1
    p, q = (0.2, 0.5, 0.3), (0.6, 0.2, 0.2)  # residual (0, .75, .25), rest of q (0, .5, .5)
    assert one_node(p, q, [0, 2], coins=[0.34, 0.49])[1] == [0, 2]
    assert one_node(p, q, [0, 2], coins=[0.34, 0.51])[1] == [0]
    # Token 2 gone as well: (.75 - .5, .25 - .5)+ leaves token 1, whatever the noise says.
    assert one_node(p, q, [0, 2], coins=[0.34, 0.51], noise=[9, 0, 9])[0] == [1]


@pytest.mark.parametrize("coin", [1e-30, 0.5])
def test_a_draft_id_of_minus_one_is_passed_over_and_never_looked_up(coin):
    """The last token has all of p and q: looked up by index -1 it would be accepted for certain."""
    p = q = (0.0, 0.0, 0.0, 1.0)
    assert one_node(p, q, [-1, -1], coins=[coin, coin]) == ([3], [0])


def test_a_missing_draft_changes_neither_p_nor_q_for_its_siblings():
    p, q = (0.2, 0.5, 0.3), (0.6, 0.2, 0.2)
    for coin in (0.32, 0.34):
        whole = one_node(p, q, [0, 2], coins=[coin, 0.45])
        missing = one_node(p, q, [-1, 0, 2], coins=[0.5, coin, 0.45])
        assert missing[0] == whole[0]
    assert one_node(p, q, [-1, -1], coins=[0.5, 0.5], noise=[5, 0, 0])[0] == [0]  # all of p is left


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


def test_equal_p_and_q_accept_the_first_child_for_every_coin_below_one():
    p = (0.1, 0.2, 0.7)
    assert one_node(p, p, [1, 2], coins=[np.nextafter(np.float32(1), np.float32(0)), 0.5])[1] == [
        0,
        1,
    ]


def test_an_empty_residual_keeps_the_target():
    """p below q everywhere, as rounding can make it: there is still a token to draw."""
    p, q = (0.3, 0.3, 0.3999), (0.3, 0.3, 0.4)
    assert one_node(p, q, [2], coins=[0.99999], noise=[0, 9, 0]) == ([1], [0])


@pytest.mark.parametrize("coin", [1e-30, 1 - 1e-7])
def test_greedy_slots_accept_the_argmax_whatever_q_and_the_coins_are(coin):
    p = (0.0, 0.0, 1.0, 0.0)
    for q in (p, (1.0, 0, 0, 0), (0.25,) * 4):
        assert one_node(p, q, [0, 3, 2], coins=[coin] * 3, greedy=True)[1] == [0, 3]
        assert one_node(p, q, [0, 3, -1], coins=[coin] * 3, greedy=True) == ([2], [0])


def test_greedy_chains_of_a_batch_emit_the_matching_prefix_and_the_targets_next_token():
    drafts, targets = [[1, 2, 3], [4, 5, 6], [1, 2, 3]], [[1, 2, 7, 6], [4, 8, 6, 9], [1, 2, 3, 4]]
    batch = 3
    tokens = np.concatenate([np.zeros((batch, 1)), drafts], axis=1).astype(np.int32)
    p = np.eye(10, dtype=np.float32)[np.array(targets)]
    q = np.eye(10, dtype=np.float32)[np.array(drafts)]
    args = tokens, p, q, np.full((batch, 3), 0.5), np.zeros((batch, 10))
    for greedy in (True, False):  # one-hot p and q leave the coins nothing to decide
        out = rule_of("3_1_4")(*args, np.full(batch, greedy))
        emitted = [out.tokens[i, : int(out.count[i])].tolist() for i in range(batch)]
        assert emitted == [[1, 2, 7], [4, 8], [1, 2, 3, 4]]


def test_greedy_and_sampled_slots_do_not_touch_each_other():
    generator = np.random.default_rng(9)
    tree, batch, vocab = tree_of("default"), 64, 6
    p, q, tokens = random_case(generator, tree, batch, vocab)
    greedy = generator.random(batch) < 0.5
    p = np.where(greedy[:, None, None], np.eye(vocab, dtype=np.float32)[p.argmax(-1)], p)
    coins = generator.random((batch, tree.rows - 1)).astype(np.float32)
    noise = generator.gumbel(size=(batch, vocab)).astype(np.float32)
    args = tokens, p, q[:, tree.expanded_rows], coins, noise
    rule = rule_of("default")
    mixed, hot, cold = (rule(*args, flags) for flags in (greedy, never(batch), ~never(batch)))
    for i in range(batch):
        alone = cold if greedy[i] else hot
        n = int(mixed.count[i])
        assert n == alone.count[i]
        assert (mixed.tokens[i, :n] == alone.tokens[i, :n]).all()
        if greedy[i]:
            assert mixed.tokens[i, :n].tolist() == p[i, mixed.path[i, :n]].argmax(-1).tolist()


# --- distributions --------------------------------------------------------------------------------


def sampled_trees(spec, p_logits, q_logits, trials, seed=0):
    """First tokens [trials] and counts when siblings are drawn by Gumbel-top-k; one p, one q."""
    tree, vocab = tree_of(spec), len(p_logits)

    @jax.jit
    def run(key, p_logits, q_logits):
        """Distributions come in as arguments: XLA would compute with constants as it compiles."""
        p = jnp.broadcast_to(jax.nn.softmax(p_logits), (trials, tree.rows, vocab))
        q = jnp.broadcast_to(jax.nn.softmax(q_logits), (trials, len(tree.expanded_rows), vocab))
        draft, accept, residual = jax.random.split(key, 3)
        tokens = jnp.zeros((trials, tree.rows), jnp.int32)
        noise = jax.random.gumbel(draft, (trials, len(tree.expanded_rows), vocab), mode="high")
        for i, row in enumerate(tree.expanded_rows):
            children = children_of(tree.shape.parent, row)
            ids = jax.lax.top_k(q_logits + noise[:, i], len(children))[1]
            tokens = tokens.at[:, np.array(children)].set(ids)
        coins = jax.random.uniform(accept, (trials, tree.rows - 1), minval=1e-30)
        final = jax.random.gumbel(residual, (trials, vocab), mode="high")
        return accept_recursive(tree, tokens, p, q, coins, final, jnp.zeros(trials, bool))

    return run(jax.random.key(seed), np.float32(p_logits), np.float32(q_logits))


OPPOSED = 1.5 * np.random.default_rng(4).normal(size=16).astype(np.float32)


@functools.cache
def opposed_trees(spec, trials):
    return sampled_trees(spec, OPPOSED, -OPPOSED, trials)


@pytest.mark.parametrize(("spec", "trials"), [("1_1_2", 50_000), ("3", 50_000), ("2x2", 20_000)])
def test_first_tokens_follow_the_target_when_the_draft_is_opposed_to_it(spec, trials):
    out = opposed_trees(spec, trials)
    expected = np.asarray(jax.nn.softmax(OPPOSED), np.float64)
    counts = np.bincount(out.tokens[:, 0], minlength=16)
    assert stats.chisquare(counts, expected / expected.sum() * trials).pvalue > ALPHA


def test_siblings_raise_the_acceptance_rate():
    alone, three = ((opposed_trees(spec, 50_000).count == 2).mean() for spec in ("1_1_2", "3"))
    assert alone > 0.05 and three > alone + 0.05


def test_acceptance_is_the_overlap_and_the_residual_holds_what_the_draft_gives_too_rarely():
    p, q, trials = np.array([0.7, 0.2, 0.1]), np.array([0.3, 0.4, 0.3]), 50_000
    out = sampled_trees("1_1_2", jnp.log(p), jnp.log(q), trials)
    accepted, first = np.asarray(out.count) == 2, np.asarray(out.tokens)[:, 0]
    assert abs(accepted.mean() - 0.6) < 5 * np.sqrt(0.24 / trials)
    assert (first[~accepted] == 0).all()
    assert stats.chisquare(np.bincount(first, minlength=3), p * trials).pvalue > ALPHA


def test_draws_of_the_plain_reference_are_those_of_a_gumbel_top_k():
    """Draw order matters to the rule: both give (q_a)(q_b / (1 - q_a)) for the pair (a, b)."""
    q = np.array([0.5, 0.3, 0.2])
    noise = np.random.default_rng(0).gumbel(size=(100_000, 3))
    pairs = np.argsort(-(np.log(q) + noise), axis=1)[:, :2]
    for a, b in [(0, 1), (1, 0), (2, 1)]:
        expected = q[a] * q[b] / (1 - q[a])
        share = ((pairs[:, 0] == a) & (pairs[:, 1] == b)).mean()
        assert abs(share - expected) < 0.01
        picks = iter([a, b])

        def pick(weights, picks=picks):
            chosen = next(picks)
            assert weights[chosen] == pytest.approx(q[chosen]) and weights.sum() <= 1 + 1e-9
            return chosen

        tokens = draw_tree([0, 0, 0], lambda context: q, (), pick)
        assert [path_tokens([0, 0, 0], tokens, row) for row in (1, 2)] == [(a,), (b,)]
