"""`speculate` is exact over models of one's own."""

import numpy as np
import pytest
from decode.reference import autoregressive_joint, random_table
from scipy import stats

from specjax.decode.plain_arrays import DraftProposal, VerifyResult
from specjax.engine.speculate import speculate

ALPHA = 1e-6


def one_hot(index, vocab=10):
    return np.eye(vocab)[index]


class Table:
    """A model that is a table, as a stranger would write one; it keeps its own randomness."""

    def __init__(self, distribution, vocab, seed=0, stops_short=False):
        self.distribution, self.vocab, self.stops_short = distribution, vocab, stops_short
        self.random = np.random.default_rng(seed)
        self.committed = []

    def propose(self, context, n):
        n = sum(context) % (n + 1) if self.stops_short else n
        tokens, rows = [], np.zeros((n, self.vocab))
        for i in range(n):
            rows[i] = self.distribution((*context, *tokens))
            tokens.append(int(self.random.choice(self.vocab, p=rows[i])))
        return DraftProposal(np.array(tokens), rows)

    def verify(self, context, tokens):
        rows = [self.distribution((*context, *tokens[:i])) for i in range(len(tokens) + 1)]
        return VerifyResult(np.array(rows))

    def commit(self, context, tokens):
        self.committed.append((context, tokens))


def models(vocab=3, sharpness=1.0, seed=2, **settings):
    generator = np.random.default_rng(seed)
    p, q = (random_table(generator, vocab, sharpness) for _ in range(2))
    return Table(q, vocab, **settings), Table(p, vocab)


@pytest.mark.parametrize(
    ("acceptance", "stops_short"),
    [
        ("block", True),
        pytest.param("block", False, marks=pytest.mark.slow),
        pytest.param("recursive", True, marks=pytest.mark.slow),
    ],
)
def test_speculate_emits_tokens_with_the_targets_joint_distribution(acceptance, stops_short):
    draft, target = models(stops_short=stops_short)
    trials, length = 1500, 3
    joint = autoregressive_joint(lambda c: target.distribution((0, *c)), length, 3)
    counts = dict.fromkeys(joint, 0)
    rounds = set()
    for seed in range(trials):
        found = speculate(draft, target, [0], 2, seed, length, acceptance)
        counts[found.tokens] += 1
        rounds.add(len(found.decisions))
    assert rounds == ({2, 3} if stops_short else {1, 2, 3})  # the first proposal may be empty
    cells = [cell for cell in joint if joint[cell] * trials >= 5]
    observed = np.array([counts[c] for c in cells] + [trials - sum(counts[c] for c in cells)])
    expected = np.array([joint[c] for c in cells] + [1 - sum(joint[c] for c in cells)]) * trials
    keep = expected >= 5
    assert observed[~keep].sum() < 30
    ratio = observed[keep].sum() / expected[keep].sum()
    assert stats.chisquare(observed[keep], expected[keep] * ratio).pvalue > ALPHA


@pytest.mark.parametrize("cut", ["max_tokens", "stop_ids"])
def test_speculate_ends_within_a_round_and_commits_what_was_emitted(cut):
    draft, target = Table(lambda c: one_hot(len(c) % 10), 10), None
    target = Table(draft.distribution, 10)
    settings = {"max_tokens": 6} if cut == "max_tokens" else {"max_tokens": 99, "stop_ids": {6}}
    found = speculate(draft, target, [0], 3, 0, **settings)
    assert found.tokens == (1, 2, 3, 4, 5, 6)
    assert len(found.decisions) == 2 and found.accept_length == 4
    assert draft.committed == target.committed
    assert draft.committed == [((0,), (1, 2, 3, 4)), ((0, 1, 2, 3, 4), (5, 6))]
