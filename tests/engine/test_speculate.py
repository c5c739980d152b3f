"""`speculate` is exact over models of one's own, and `SourceSpeculator` is such a model."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bigrams import Bigrams
from decode.reference import autoregressive_joint, random_table
from flax import nnx
from scipy import stats
from tiny import apt, sharpened, tiny_config, tiny_model

from specjax.decode.plain_arrays import DraftProposal, VerifyResult
from specjax.decode.state import RUNNING
from specjax.drafts.model import ModelSource
from specjax.drafts.mtp import MTPSource
from specjax.drafts.ngram import NgramSource
from specjax.engine import speculate as module
from specjax.engine.speculate import SourceSpeculator, speculate
from specjax.interfaces import Proposal
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


def test_every_round_of_a_sequence_has_coins_and_noise_of_its_own(monkeypatch):
    draft, target = models()
    seen = []
    exact = module.speculative_accept

    def watched(proposal, verified, seed, position, acceptance):
        seen.append((seed, position))
        return exact(proposal, verified, seed, position, acceptance)

    monkeypatch.setattr(module, "speculative_accept", watched)
    found = speculate(draft, target, [0, 1], 2, 7, 12)
    starts = np.cumsum([1] + [d.total_tokens for d in found.decisions[:-1]])
    assert seen == [(7, int(start)) for start in starts]


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


class Stateless:
    """A model without `commit`, whose target has no distribution after the last draft."""

    def __init__(self, table):
        self.propose = table.propose
        self.whole = table

    def verify(self, context, tokens):
        rows = self.whole.verify(context, tokens).probs
        return VerifyResult(rows[:-1] if tokens else rows)


def test_speculate_takes_models_without_commit_and_targets_without_a_bonus_row():
    both = Stateless(Table(lambda c: one_hot(len(c) % 10), 10))
    found = speculate(both, both, [0], 3, 0, max_tokens=8)
    assert found.tokens == (1, 2, 3, 4, 5, 6, 7, 8)
    assert [d.total_tokens for d in found.decisions] == [3, 3, 3] and found.accept_length == 3
    assert all(d.next_token is None for d in found.decisions)


def test_speculate_takes_a_draft_that_has_nothing_to_propose():
    target = Table(lambda c: one_hot(len(c) % 10), 10)
    target.propose = lambda context, n: DraftProposal.deterministic([], vocab=10)
    found = speculate(target, target, [0], 3, 0, max_tokens=3)
    assert found.tokens == (1, 2, 3) and found.accept_length == 1


def test_an_empty_context_is_refused():
    with pytest.raises(ValueError, match="at least one token"):
        speculate(*models(), [], 2, 0, 4)


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


@pytest.mark.parametrize("name", ["mtp", "model", "ngram"])
def test_caches_that_followed_the_context_draft_as_fresh_ones_do(name):
    rng = np.random.default_rng(1)
    follower, context = speculator(name), [1, 5, 2, 1]
    for emitted in (2, 4, 1, 3):
        tokens = rng.integers(0, 3, emitted).tolist()
        follower.propose(context, STEPS)
        follower.commit(context, tokens)
        context = context + tokens
        fresh = speculator(name).propose(context, STEPS)
        np.testing.assert_allclose(
            follower.propose(context, STEPS).probs[0], fresh.probs[0], atol=1e-5
        )


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


def test_a_draft_beside_a_foreign_target_follows_the_context():
    """`verify` is never called: commits make up for it, and q stays the draft model's own."""
    source, params = source_of("model")
    draft, context = speculator("model"), [4, 4, 1]
    stacked = sharpened(init_params(SMALL, 3), 10.0, 0.7)
    for emitted in ([2], [0, 1, 5, 7], [3, 3]):
        proposal = draft.propose(context, STEPS)
        for i, q in enumerate(proposal.probs):
            before = context + proposal.tokens[:i].tolist()
            np.testing.assert_allclose(q, softmax(full_logits(before, stacked, SMALL)), atol=1e-4)
        draft.commit(context, emitted)
        context = context + emitted


def test_drafts_are_drawn_from_their_q_anew_each_time():
    draft, draws = speculator("mtp"), 600
    proposals = [draft.propose([1, 2, 3], 1) for _ in range(draws)]
    q = proposals[0].probs[0].astype(np.float64)
    seen = np.bincount([p.tokens[0] for p in proposals], minlength=VOCAB)
    large = q * draws >= 5
    statistic = (((seen - q * draws) ** 2) / (q * draws))[large].sum()
    assert large.sum() >= 2 and statistic < 40  # chi-square, 7 degrees of freedom: p < 1e-6
    again = speculator("mtp")
    assert [again.propose([1, 2, 3], 1).tokens[0] for _ in range(9)] == [
        p.tokens[0] for p in proposals[:9]
    ]


def test_an_ngram_source_proposes_as_many_as_it_finds():
    both = speculator("ngram")
    assert len(both.propose([1, 2, 3, 4], STEPS).tokens) == 0
    assert both.propose([1, 2, 3, 1, 2], STEPS).tokens.tolist() == [3, 1, 2]
    assert both.propose([1, 2, 3, 1, 2], 2).tokens.tolist() == [3, 1]
    assert len(both.verify([1, 2, 3, 4], []).probs) == 1


@dataclasses.dataclass(frozen=True)
class Reading(Bigrams):
    """Reads all that a draft may: the keys in `begin`, everything else that the protocol names."""

    def begin(self, model, params, state, steps, total):
        low = (state.keys[:, 0] % self.vocab).astype(jnp.int32)[:, None, None]
        greedy = (state.options.temperature == 0) & (state.finish == RUNNING)
        several = state.length > state.options.prompt_len
        ids = jnp.where(greedy[:, None, None], low, self.vocab - 1 - several[:, None, None])
        assert state.table is None
        return Proposal(jnp.zeros(ids.shape, jnp.float32), ids), None


def test_a_draft_reads_what_its_protocol_promises():
    made = [
        SourceSpeculator(CFG, PARAMS, Reading(VOCAB), {}, 1, t, max_len=MAX_LEN) for t in (0, 1)
    ]
    drawn = [int(made[0].propose([1, 2], 1).tokens[0]) for _ in range(20)]
    assert len(set(drawn)) > 2  # every proposal has keys of its own
    assert made[1].propose([1, 2], 1).tokens.tolist() == [VOCAB - 1]
    made[1].commit([1, 2], [3])
    assert made[1].propose([1, 2, 3], 1).tokens.tolist() == [VOCAB - 2]


def test_a_draft_of_ended_samples_has_what_it_keeps_before_the_first():
    source = Bigrams(VOCAB)
    both = SourceSpeculator(CFG, PARAMS, source, {}, STEPS, max_len=MAX_LEN)
    assert len(both.propose([1, 2], STEPS).tokens) == 0
    assert len(speculate(both, both, [1, 5, 2], STEPS, seed=0, max_tokens=6).tokens) == 6


def test_longer_contexts_compile_nothing_while_they_fit_the_padded_length():
    both, context = speculator("model", temperature=0.9), [1, 2, 3]
    speculate(both, both, context, STEPS, seed=0, max_tokens=4)
    built = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, *_, **__: built.append(name) if "backend_compile" in name else None
    )
    jax.jit(lambda x: x + len(built))(1.0)  # the listener hears compilations
    heard = len(built)
    speculate(both, both, context, STEPS, seed=1, max_tokens=20)
    speculate(both, both, [5] * 14, STEPS, seed=1, max_tokens=8)
    assert heard and len(built) == heard


def test_what_cannot_be_served_is_refused_in_words():
    both = speculator("ngram")
    with pytest.raises(ValueError, match="context of 1 to 44 tokens, got 0"):
        both.propose([], 1)
    with pytest.raises(ValueError, match="context of 1 to 44 tokens, got 45"):
        both.propose([1] * 45, 1)
    with pytest.raises(ValueError, match="expected token ids below 8, got 8"):
        both.verify([8], [])
    with pytest.raises(ValueError, match="at most 3 tokens to verify, got 4"):
        both.verify([1], [1, 2, 3, 4])
    with pytest.raises(ValueError, match="steps must be at least 1, got 0"):
        SourceSpeculator(CFG, PARAMS, *source_of("ngram"), steps=0)
