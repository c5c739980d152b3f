"""Every rule with finite randomness is exact, and every biased one is seen to be: by enumeration.

Target and draft are random tables over three or four tokens, a distribution for every context. All
outcomes of all rounds are enumerated with their probabilities in float64, and the joint of the
first tokens compared with that of autoregressive sampling.
"""

import biased
import numpy as np
import pytest
from biased import draw_chain, rows_along, rows_of_tree
from reference import (
    autoregressive_joint,
    block_accept,
    draw_tree,
    leviathan_accept,
    random_table,
    recursive_accept,
    speculative_joint,
    total_variation,
)

from specjax.config import Strategy
from specjax.decode.tree import build_tree

ROUNDING = 1e-12


def parents(spec):
    return build_tree(Strategy.parse(spec)).shape.parent.tolist()


def tables(vocab, sharpness=1.5, seed=0):
    generator = np.random.default_rng(seed)
    return random_table(generator, vocab, sharpness), random_table(generator, vocab, sharpness)


def bias(one_round, p, vocab, length=3):
    """Total variation between what rounds emit and autoregressive sampling."""
    emitted = speculative_joint(one_round, length)
    return total_variation(emitted, autoregressive_joint(p, length, vocab))


# --- exact rules ----------------------------------------------------------------------------------


def tree_round(p, q, parent):
    def one_round(tape, context):
        tokens = draw_tree(parent, q, context, tape.pick)
        rows = [rows_of_tree(table, context, parent, tokens) for table in (p, q)]
        return recursive_accept(parent, tokens, *rows, tape.flip, tape.pick)[0]

    return one_round


def chain_round(p, q, rule, lengths=(2,), bonus=True):
    """Rounds on chains; how many tokens are drafted may depend on what was drafted so far.

    Args:
      bonus: whether the rule is given the target's distribution after the last draft.
    """

    def one_round(tape, context):
        steps = lengths[sum(context) % len(lengths)]
        drafted = draw_chain(q, context, steps, tape.pick)
        rows = rows_along(p, context, drafted), rows_along(q, context, drafted)[:-1]
        rows = rows if bonus or not steps else (rows[0][:-1], rows[1])
        emitted = rule(*rows, drafted, tape.flip, tape.pick)
        return emitted[0] if rule is block_accept else emitted

    return one_round


TREES = {
    "chain": ("2_1_3", 4),
    "two by two": ("2x2", 3),
    "three, one each": ("3x1", 3),
    "three of four": ("3", 4),
    "uneven": ([(0,), (1,), (0, 0), (0, 1)], 3),
    "more children than tokens": ("4x1", 3),
}


@pytest.mark.parametrize("sharpness", [1.0, pytest.param(3.0, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", TREES)
def test_recursive_rejection_gives_the_autoregressive_joint_exactly(name, sharpness):
    spec, vocab = TREES[name]
    p, q = tables(vocab, sharpness)
    assert bias(tree_round(p, q, parents(spec)), p, vocab) < ROUNDING


@pytest.mark.parametrize("rule", [block_accept, leviathan_accept])
@pytest.mark.parametrize("lengths", [(2,), (3,), (0, 1, 2)])
def test_chain_rules_give_the_autoregressive_joint_exactly(rule, lengths):
    vocab = 4 if max(lengths) == 2 else 3
    p, q = tables(vocab)
    assert bias(chain_round(p, q, rule, lengths), p, vocab) < ROUNDING


@pytest.mark.parametrize("rule", [block_accept, leviathan_accept])
@pytest.mark.parametrize("lengths", [(1,), (2,), (0, 1, 2)])
def test_chain_rules_without_a_bonus_token_give_the_autoregressive_joint_exactly(rule, lengths):
    """And would not if, without a row for it, a token were emitted after all drafts."""
    p, q = tables(4 if max(lengths) == 2 else 3)
    vocab = 4 if max(lengths) == 2 else 3
    assert bias(chain_round(p, q, rule, lengths, bonus=False), p, vocab) < ROUNDING

    def last_row_again(p_rows, q_rows, drafted, flip, pick):
        p_rows = p_rows if len(p_rows) > len(drafted) else [*p_rows, p_rows[-1]]
        emitted = rule(p_rows, q_rows, drafted, flip, pick)
        return emitted[0] if rule is block_accept else emitted

    assert bias(chain_round(p, q, last_row_again, lengths, bonus=False), p, vocab) > 0.02


@pytest.mark.parametrize("rule", [block_accept, leviathan_accept])
def test_a_greedy_draft_is_exact_when_its_q_is_one_hot(rule):
    p, logits = tables(4)

    def q(context):
        return np.eye(4)[np.argmax(logits(context))]

    assert bias(chain_round(p, q, rule), p, 4) < ROUNDING


@pytest.mark.parametrize("absent", [1, 2])
@pytest.mark.parametrize("rule", ["block", "recursive"])
def test_a_missing_draft_is_exact_when_its_absence_was_not_decided_by_a_draw(rule, absent):
    """Written -1; block verification needs its row of q to be empty, recursive ignores the row."""
    p, q = tables(4)

    def one_round(tape, context):
        drafted = draw_chain(q, context, 2, tape.pick)
        p_rows, q_rows = rows_along(p, context, drafted), rows_along(q, context, drafted)[:-1]
        drafted[absent - 1] = -1
        if rule == "block":
            q_rows[absent - 1] = 0.0
            return block_accept(p_rows, q_rows, drafted, tape.flip, tape.pick)[0]
        rows = [0, 0, 1], [-1, *drafted], p_rows, [*q_rows, q_rows[0]]
        return recursive_accept(*rows, tape.flip, tape.pick)[0]

    assert bias(one_round, p, 4) < ROUNDING


# --- biased rules ---------------------------------------------------------------------------------

# Rule, seed and sharpness of the tables, and the total variation it must exceed there.
# `tests/engine/test_mutations.py` puts more of them into an engine.
BIASED = {
    "greedy draft with softmax q": (biased.greedy_draft_with_softmax_q, 1, 1.0, 0.5),
    "top-k candidates with p/q": (
        lambda p, q: biased.top_k_candidates_with_p_over_q(p, q, parents("2x1")), 0, 1.0, 0.5,
    ),
    "longest of sampled paths wins": (biased.longest_path_wins, 3, 3.0, 0.2),
    "longest of top-k paths wins": (
        lambda p, q: biased.longest_path_wins(p, q, sampled=False), 1, 1.5, 0.7,
    ),
    "draft noise used again": (biased.draft_noise_used_again_for_the_residual, 0, 1.5, 0.05),
}  # fmt: skip


@pytest.mark.parametrize("name", BIASED)
def test_enumeration_sees_the_bias(name):
    rule, seed, sharpness, bound = BIASED[name]
    p, q = tables(3, sharpness, seed)
    assert bias(rule(p, q), p, 3) > bound
    assert bias(chain_round(p, q, block_accept), p, 3) < ROUNDING
