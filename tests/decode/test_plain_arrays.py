"""The pure function for people with models of their own: exact, importable alone, checked input."""

import re
import subprocess
import sys

import numpy as np
import pytest
from reference import Injected, block_accept, leviathan_accept

from specjax.decode.noise import (
    RESIDUAL,
    request_keys,
    request_words,
    round_coins,
    round_noise,
)
from specjax.decode.plain_arrays import (
    RULES,
    AcceptDecision,
    DraftProposal,
    VerifyResult,
    speculative_accept,
)


def proposal(tokens, q):
    return DraftProposal(np.array(tokens, np.int32), np.array(q))


def decide(tokens, q, p, seed=0, position=4, acceptance="block"):
    verified = VerifyResult(np.array(p))
    return speculative_accept(proposal(tokens, q), verified, seed, position, acceptance)


def one_hot(ids, vocab=10):
    return np.eye(vocab)[np.array(ids, int)]


# --- it stands alone ------------------------------------------------------------------------------


def test_importing_it_imports_no_model_no_engine_and_no_flax():
    code = (
        "import sys\n"
        "import specjax.decode.plain_arrays\n"
        "wrong = [m for m in sys.modules if m.split('.')[0] in ('flax', 'transformers', 'torch') "
        "or m.startswith(('specjax.models', 'specjax.engine', 'specjax.drafts.'))]\n"
        "print(wrong); sys.exit(bool(wrong))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def random_rows(rows, vocab, seed):
    return np.random.default_rng(seed).dirichlet(np.ones(vocab), rows)


# --- decisions ------------------------------------------------------------------------------------


@pytest.mark.parametrize("acceptance", RULES)
@pytest.mark.parametrize(
    ("drafts", "targets", "emitted"),
    [
        ([1, 2, 3], [1, 5, 3, 4], (1, 5)),
        ([1, 2, 3], [1, 2, 7, 6], (1, 2, 7)),
        ([4, 5, 6], [4, 8, 6, 9], (4, 8)),
        ([1], [2, 3], (2,)),
        ([1, 2, 3], [1, 2, 3, 4], (1, 2, 3, 4)),
        ([], [3], (3,)),
    ],
)
def test_certain_targets_emit_the_matching_prefix_and_their_own_next_token(
    acceptance, drafts, targets, emitted
):
    deterministic = DraftProposal.deterministic(drafts, vocab=10)
    found = speculative_accept(deterministic, VerifyResult(one_hot(targets)), 0, 4, acceptance)
    assert found.tokens == emitted and found.total_tokens == len(emitted)
    assert found.all_accepted == (len(emitted) == len(drafts) + 1)


@pytest.mark.parametrize("bonus", [True, False])
@pytest.mark.parametrize(
    ("acceptance", "rule"), [("block", block_accept), ("recursive", leviathan_accept)]
)
def test_decisions_are_those_of_the_enumerated_rules_with_and_without_the_bonus_row(
    acceptance, rule, bonus
):
    """With the coins and the noise of the seed and position; test_exact.py enumerates the rules."""
    counts, seeds = set(), range(60)
    keys = request_keys(np.stack([request_words(seed, (), 0) for seed in seeds]))
    root = np.full(len(seeds), 4)
    coins = np.asarray(round_coins(keys, root, np.arange(1, 4)))
    noise = np.asarray(round_noise(keys, RESIDUAL, root, np.zeros(1, int), 4))[:, 0]
    for seed in seeds:
        q, p = random_rows(3, 4, seed), random_rows(3 + bonus, 4, 1000 + seed)
        generator = np.random.default_rng(seed)
        tokens = [int(generator.choice(4, p=row)) for row in q]
        given = Injected(coins[seed], noise[seed])
        wanted = rule(p, q, tokens, given.flip, given.pick)
        wanted = wanted[0] if rule is block_accept else wanted
        if min(given.margins) < 1e-4:
            continue
        found = decide(tokens, q, p, seed, acceptance=acceptance)
        assert found.tokens == tuple(wanted)
        assert (found.next_token is None) == (found.all_accepted and not bonus)
        counts.add(found.total_tokens)
    assert counts == ({1, 2, 3, 4} if bonus else {1, 2, 3})


@pytest.mark.parametrize("acceptance", RULES)
def test_a_draft_of_minus_one_is_never_accepted_and_leaves_the_target_alone(acceptance):
    """Its row of q must not be taken out of p: looked up at -1 it would be accepted for certain."""
    last = one_hot([3, 3], vocab=4)
    found = decide([-1], last[:1], last, acceptance=acceptance)
    assert found == AcceptDecision((), 3, False)
    if acceptance != "greedy":
        half = np.array([[0.5, 0.5, 0, 0]])
        drawn = {
            decide([-1], [[1.0, 0, 0, 0]], half.repeat(2, 0), s, acceptance=acceptance).next_token
            for s in range(40)
        }
        assert drawn == {0, 1}


def test_a_decision_depends_on_the_seed_and_the_position_and_on_nothing_else():
    tokens, q, p = [0, 1, 2, 3], random_rows(4, 8, 2), random_rows(5, 8, 3)
    found = [decide(tokens, q, p, seed, position) for seed in range(8) for position in range(8)]
    again = [decide(tokens, q, p, seed, position) for seed in range(8) for position in range(8)]
    assert found == again
    assert len(set(found[:8])) > 2 and len(set(found[::8])) > 2


# --- input that cannot be meant -------------------------------------------------------------------

ROW = [0.5, 0.25, 0.25]


@pytest.mark.parametrize(
    ("tokens", "probs", "message"),
    [
        ([0, 1], [ROW], "got (1, 3) for 2 tokens"),
        ([0], ROW, "got (3,)"),
        ([], [], "got (0,)"),
        ([[0]], [ROW], "call once per sequence"),
        ([0.0], [ROW], "integer ids [n], got float64"),
        ([3], [ROW], "must be in [0, 3), or -1 for no draft, got [3]"),
        ([-2], [ROW], "must be in [0, 3), or -1 for no draft, got [-2]"),
        ([0], [[2.0, 1.0, 0.5]], "sum to 1 within 0.001, got sum 3.5"),
        ([0], [[1.5, -0.5, 0.0]], "least -0.5"),
        ([0], [[np.nan, 0.5, 0.5]], "got sum nan"),
        ([0, 1], [ROW, [1.0, 0.0, 0.0]], "token at place 1 has no probability"),
    ],
)
def test_a_proposal_that_cannot_be_meant_is_refused(tokens, probs, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        DraftProposal(np.array(tokens), np.array(probs))


def test_rows_are_made_to_sum_to_one_and_input_arrays_are_left_alone():
    rows = np.array([[0.5, 0.25, 0.2501], [0.5, 0.25, 0.25]], np.float32)
    before = rows.copy()
    drafted = DraftProposal(np.array([0, -1]), rows)
    np.testing.assert_allclose(drafted.probs.sum(-1), [1, 0], rtol=1e-6)
    assert (rows == before).all()
