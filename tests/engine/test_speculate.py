"""`speculate` is exact over models of one's own, and `SourceSpeculator` is such a model."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decode.reference import autoregressive_joint, random_table
from flax import nnx
from scipy import stats
from tiny import apt, sharpened, tiny_config, tiny_model

from specjax.decode.plain_arrays import DraftProposal, VerifyResult
from specjax.drafts.model import ModelSource
from specjax.drafts.mtp import MTPSource
from specjax.drafts.ngram import NgramSource
from specjax.engine.speculate import SourceSpeculator, speculate
from specjax.models.transformer import graphdef, init_params, to_decode_layout

ALPHA = 1e-6
VOCAB, MAX_LEN, STEPS = 8, 48, 3
CFG, PARAMS, HEAD = tiny_model(tiny_config(VOCAB))
SMALL = tiny_config(VOCAB, mtp=0)
TARGET = CFG.replace(mtp_num_layers=0)


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


@functools.cache
def source_of(name):
    if name == "mtp":
        return MTPSource(CFG), apt(HEAD, CFG)
    if name == "ngram":
        return NgramSource(VOCAB), {}
    if name == "target":
        return ModelSource(TARGET, VOCAB), to_decode_layout(PARAMS, TARGET)
    return ModelSource(SMALL, VOCAB), to_decode_layout(
        sharpened(init_params(SMALL, 3), 10.0, 0.7), SMALL
    )


def speculator(name, **settings):
    return SourceSpeculator(CFG, PARAMS, *source_of(name), STEPS, max_len=MAX_LEN, **settings)


def full_logits(context, params=PARAMS, cfg=CFG):
    tokens = np.zeros((1, MAX_LEN), np.int32)
    tokens[0, : len(context)] = context
    return np.asarray(_forward(cfg, params, tokens))[0, len(context) - 1]


@functools.partial(jax.jit, static_argnums=0)
def _forward(cfg, params, tokens):
    model = nnx.merge(graphdef(cfg), params)
    positions = jnp.broadcast_to(jnp.arange(MAX_LEN), tokens.shape)
    return model.logits(model.hidden(tokens, positions, jnp.ones_like(tokens)).x)


def softmax(logits):
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


@pytest.mark.parametrize("name", ["mtp", "target", "ngram"])
def test_greedy_speculation_is_the_targets_argmax_with_every_source(name):
    context, both = [1, 5, 2], speculator(name, temperature=0.0)
    out = speculate(both, both, context, STEPS, seed=0, max_tokens=30, acceptance="greedy")
    want = list(context)
    for _ in range(30):
        want.append(int(np.argmax(full_logits(want))))
    assert list(out.tokens) == want[len(context) :]
    if name == "target":
        assert all(d.all_accepted for d in out.decisions[:-1])


@pytest.mark.parametrize("name", ["mtp", "target"])
def test_verify_gives_the_targets_distribution_after_any_history(name):
    """After prefill, commits of own and of foreign tokens, and a jump to another context."""
    rng = np.random.default_rng(0)
    both, context = speculator(name, temperature=0.7), [3, 1]
    for turn in range(6):
        if turn == 4:
            context = rng.integers(0, VOCAB, 9).tolist()
        drafted = both.propose(context, STEPS).tokens.tolist() if turn % 2 else [1, 2]
        p = both.verify(context, drafted).probs
        assert len(p) == len(drafted) + 1
        for i, row in enumerate(p):
            want = softmax(full_logits(context + drafted[:i]) / 0.7)
            np.testing.assert_allclose(row, want, atol=1e-4)
        emitted = drafted[: turn % 3] + [turn % VOCAB]
        both.commit(context, emitted)
        context = context + emitted
