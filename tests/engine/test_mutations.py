"""Rules that look right and are biased must fail the chi-square of `test_chi_square`.

Each is put into the public `LLM` path in place of the exact rule, on a target and draft on which
its bias is large; `test_chi_square` shows that exact rules pass. The mutations are those which
published engines shipped, or which a plausible description of an algorithm leads to.
"""

import jax
import jax.numpy as jnp
import joint
import numpy as np
import pytest
from joint import ALPHA, SAMPLES, TOKENS, Counted, exact_joint, fit_of
from tiers import slow_but

from specjax import SamplingParams
from specjax.decode import accept, draft, sampling
from specjax.decode.accept import Acceptance
from specjax.decode.noise import DRAFT


def without_draft_noise(monkeypatch):
    """Candidates are the draft's best, and are tested as if they had been drawn from q."""
    exact = draft.round_noise
    monkeypatch.setattr(draft, "round_noise", lambda *args: 0.0 * exact(*args))


def longest_path_wins(monkeypatch):
    """Paths are tested one by one, and the one of which most was accepted is taken."""

    def mutated(tree, tokens, p, q, coins, residual_noise, greedy):
        shape, expanded = tree.shape, list(tree.expanded_rows)
        slot = jnp.arange(tokens.shape[0])
        reached = [jnp.ones_like(greedy)]
        for row in range(1, tree.rows):
            up, token = int(shape.parent[row]), tokens[:, row]
            heads = coins[:, row - 1] * q[slot, expanded.index(up), token] < p[slot, up, token]
            reached.append(reached[up] & heads)
        best = jnp.argmax(jnp.stack(reached, 1) * (shape.depth + 1), axis=1)
        q_all = jnp.zeros_like(p).at[:, np.array(expanded)].set(q)
        left = _residual(p[slot, best], q_all[slot, best])
        path = jnp.asarray(shape.path_rows)[best]
        return _walked(tokens, path, jnp.asarray(shape.depth)[best] + 1, left, residual_noise)

    monkeypatch.setattr(accept, "accept_recursive", mutated)


def draw_three_keep_best_two(monkeypatch):
    """One child more is drawn, and of all the ones that q likes best are tested as drawn."""
    exact = draft.candidates

    def mutated(plan, state, context, logits, paths, nodes, count):
        found = exact(plan, state, context, logits, paths, nodes, count + 1)
        mass = jnp.take_along_axis(found.q, jnp.maximum(found.tokens, 0), axis=-1)
        kept = jnp.sort(jax.lax.top_k(mass, count)[1], axis=-1)
        return found._replace(tokens=jnp.take_along_axis(found.tokens, kept, axis=-1))

    monkeypatch.setattr(draft, "candidates", mutated)


def global_re_rank(monkeypatch):
    """Of the tree that was drawn only the half with the likeliest paths is tested."""
    exact = accept.accept_recursive

    def mutated(tree, tokens, p, q, *args):
        expanded, slot = list(tree.expanded_rows), jnp.arange(tokens.shape[0])
        score = [jnp.ones(tokens.shape[:1])]
        for row in range(1, tree.rows):
            up = int(tree.shape.parent[row])
            score.append(score[up] * q[slot, expanded.index(up), tokens[:, row]])
        kept = jax.lax.top_k(jnp.stack(score, 1), tree.rows // 2 + 1)[1]
        is_kept = (jnp.arange(tree.rows) == kept[..., None]).any(1)
        return exact(tree, jnp.where(is_kept, tokens, -1), p, q, *args)

    monkeypatch.setattr(accept, "accept_recursive", mutated)


def accept_coin_used_again_for_the_final_draw(monkeypatch):
    """The number that rejected a draft draws the correction too, by inverse CDF."""

    def mutated(tree, tokens, p, q, coins, residual_noise, greedy):
        drafted, slot = tokens[:, 1:], jnp.arange(tokens.shape[0])
        at = lambda table: jnp.take_along_axis(table, drafted[..., None], -1)[..., 0]  # noqa: E731
        won = coins * at(q) < at(p[:, :-1])
        accepted = jnp.cumprod(won, axis=1).sum(1)
        q_all = jnp.concatenate([q, jnp.zeros_like(q[:, :1])], axis=1)
        left = _residual(p[slot, accepted], q_all[slot, accepted])
        edges = jnp.cumsum(left, -1) / left.sum(-1, keepdims=True)
        coin = coins[slot, jnp.minimum(accepted, coins.shape[1] - 1)]
        again = jax.nn.one_hot((coin[:, None] >= edges).sum(-1), left.shape[1])
        rejected = (accepted < coins.shape[1])[:, None]
        path = jnp.broadcast_to(jnp.arange(tree.rows), tokens.shape)
        left = jnp.where(rejected, again, left)
        return _walked(tokens, path, accepted + 1, left, residual_noise)

    monkeypatch.setattr(accept, "accept_recursive", mutated)


def correction_from_the_full_target(monkeypatch):
    exact = accept.accept_block

    def mutated(tokens, p, q, coins, residual_noise):
        out = exact(tokens, p, q, coins, residual_noise)
        left = p[jnp.arange(p.shape[0]), out.count - 1]
        return _walked(tokens, out.path, out.count, left, residual_noise)

    monkeypatch.setattr(accept, "accept_block", mutated)


def the_drafts_noise_used_again_for_the_residual(monkeypatch):
    monkeypatch.setattr(accept, "RESIDUAL", DRAFT)


def penalties_of_the_round_instead_of_the_branch(monkeypatch):
    """Every row of a tree is penalised for the tokens up to the root, and for no others."""
    exact = sampling.transform

    def mutated(logits, options, features, context, rows, *columns):
        rows = rows._replace(path=jnp.full_like(rows.path, -1))
        return exact(logits, options, features, context, rows, *columns)

    monkeypatch.setattr(sampling, "transform", mutated)


def coins_keyed_by_position_alone(monkeypatch):
    exact = accept.round_coins

    def mutated(keys, root, nodes):
        nodes = jnp.asarray(nodes)
        columns = [exact(keys, root + node, np.zeros(1, np.int32)) for node in nodes]
        return jnp.concatenate(columns, axis=1)

    monkeypatch.setattr(accept, "round_coins", mutated)


def _residual(p, q):
    left = jnp.maximum(p - q, 0.0)
    return jnp.where(left.sum(-1, keepdims=True) > 0, left, p)


def _walked(tokens, path, count, left, noise) -> Acceptance:
    """Drafts along `path`, then a draw from `left`."""
    final = jnp.argmax(jnp.log(left) + noise, axis=-1)
    below = jnp.take_along_axis(tokens, jnp.roll(path, -1, axis=1), axis=1)
    is_last = jnp.arange(path.shape[1]) == count[:, None] - 1
    out = jnp.where(is_last, final[:, None], below)
    return Acceptance(out.astype(jnp.int32), path.astype(jnp.int32), count.astype(jnp.int32))


# Rule, acceptance mode and strategy, arguments of `joint.pair`, sampling options. Of a few dozen
# pairs these are among the ones with the largest bias.
CHAIN, PAIR, LONGER = "1_1_2", "2", "2x1"
CASES = {
    "top-k candidates with min(1, p/q)": (without_draft_noise, "recursive", PAIR, (1, 1.0), {}),
    "longest path wins": (longest_path_wins, "recursive", LONGER, (0, 4.0), {}),
    "draw three, keep the best two": (
        draw_three_keep_best_two, "recursive", PAIR, (0, 4.0), {},
    ),
    "global re-rank": (global_re_rank, "recursive", "2x2", (1, 1.0), {}),
    "accept coin used again": (
        accept_coin_used_again_for_the_final_draw, "recursive", CHAIN, (3, 4.0), {},
    ),
    "correction from the full target": (
        correction_from_the_full_target, "block", CHAIN, (0, 4.0), {},
    ),
    "draft noise used again": (
        the_drafts_noise_used_again_for_the_residual, "block", CHAIN, (1, 1.0), {},
    ),
    "penalties per round": (
        penalties_of_the_round_instead_of_the_branch,
        "coupled", CHAIN, (3, 4.0), dict(frequency_penalty=1.5),
    ),
    "coins by position": (coins_keyed_by_position_alone, "block", "2_1_3", (0, 4.0), {}),
}  # fmt: skip


def fit(llm, pair, options):
    """Chi-square of an engine's samples on its pair."""
    sampling = SamplingParams(seed=0, max_tokens=TOKENS, ignore_eos=True, **options)
    counts = Counted(llm, [sampling], SAMPLES).counts[0]
    return fit_of(counts, exact_joint(joint.next_logits(*pair), sampling))


# One of each acceptance mode.
FAST = ["accept coin used again"]


@pytest.mark.parametrize("name", slow_but(CASES, *FAST))
def test_a_biased_rule_fails_the_chi_square(name, monkeypatch):
    mutate, acceptance, strategy, pair, options = CASES[name]
    mutate(monkeypatch)
    found = fit(joint.spec_llm(joint.pair(*pair), acceptance, strategy), pair, options)
    assert found.p_value < ALPHA, found
