"""The tokens that leave `LLM` have the target's joint distribution, and biased rules are caught.

A policy with four tokens, the joint of the first three, rounds that end anywhere within them: 64
cells against probabilities from full forward passes. The draft head is far from the target on
purpose, so that every branch of the rule is taken. Samples are independent because every one has
a sample index and a seed of its own.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from scipy import stats
from tiny import tiny_config, tiny_model

from specjax import LLM, SamplingParams, SpecConfig
from specjax.decode import accept, draft, rng
from specjax.models.transformer import graphdef

VOCAB, TOKENS, BATCH = 4, 3, 4096
PROMPT = [1, 3]
ALPHA = 1e-6
SMALLEST_CELL = 5


@pytest.fixture(scope="module")
def model():
    cfg = tiny_config(vocab=VOCAB, layers=1, tied=True)
    cfg, params, head = tiny_model(cfg, seed=0, factor=15.0, embed_std=0.2)
    head["blocks"][0]["norm"] = 4.0 * head["blocks"][0]["norm"]  # a draft that is sure of itself
    return cfg, params, head


@pytest.fixture(scope="module")
def joint(model):
    """Probability of every three tokens after the prompt, by full forward passes: [4 4 4]."""
    cfg, params, _ = model
    sequences = np.array(
        [[*PROMPT, *rest] for rest in itertools.product(range(VOCAB), repeat=TOKENS)]
    )

    @jax.jit
    def logits(params):
        module = nnx.merge(graphdef(cfg), params)
        positions = jnp.broadcast_to(jnp.arange(sequences.shape[1]), sequences.shape)
        return module.logits(module.hidden(sequences, positions, jnp.ones_like(positions)))

    scores = np.asarray(logits(params), np.float64)
    logprobs = scores - np.log(np.exp(scores).sum(-1, keepdims=True))
    steps = np.arange(len(PROMPT) - 1, sequences.shape[1] - 1)
    each = np.take_along_axis(logprobs[:, steps], sequences[:, steps + 1, None], -1)[..., 0]
    probabilities = np.exp(each.sum(1))
    assert abs(probabilities.sum() - 1) < 1e-6
    return probabilities / probabilities.sum()


def count_cells(llm: LLM, batches: int) -> tuple[np.ndarray, int]:
    """How often each triple was generated, and in how many rounds at most."""
    counts, rounds = np.zeros(VOCAB**TOKENS, int), 0
    for seed in range(batches):
        params = SamplingParams(max_tokens=TOKENS, seed=seed, n=BATCH, ignore_eos=True)
        samples = llm.generate([PROMPT], params)[0].samples
        tokens = np.array([s.token_ids for s in samples])
        cells = np.ravel_multi_index(tuple(tokens.T), (VOCAB,) * TOKENS)
        counts += np.bincount(cells, minlength=VOCAB**TOKENS)
        rounds = max(rounds, max(s.stats.rounds for s in samples))
    return counts, rounds


def p_value(counts: np.ndarray, probabilities: np.ndarray) -> float:
    """Chi-square goodness of fit; cells that expect fewer than five are taken together."""
    expected = probabilities * counts.sum()
    order = np.argsort(expected)
    expected, counts = expected[order], counts[order]
    small = int((expected < SMALLEST_CELL).sum())
    while small and expected[:small].sum() < SMALLEST_CELL:
        small += 1
    if small:
        expected = np.r_[expected[:small].sum(), expected[small:]]
        counts = np.r_[counts[:small].sum(), counts[small:]]
    assert len(expected) >= 20, "too few cells are left to see anything"
    return stats.chisquare(counts, expected).pvalue


def spec_llm(model, acceptance, strategy="2_1_3"):
    spec = SpecConfig(strategy=strategy, acceptance=acceptance)
    return LLM(model, spec, max_batch=BATCH, max_len=8)


def check(llm, joint, batches):
    counts, rounds = count_cells(llm, batches)
    assert rounds >= 2
    by_length = llm.totals.histogram[1 : TOKENS + 1]
    assert (by_length > 0).all(), "rounds of every length must occur"
    assert p_value(counts, joint) > ALPHA


@pytest.fixture(scope="module")
def block_llm(model):
    return spec_llm(model, "block")


def test_block_chains_emit_three_tokens_with_the_targets_joint_distribution(block_llm, joint):
    check(block_llm, joint, batches=10)


def test_coupled_trees_emit_three_tokens_with_the_targets_joint_distribution(model, joint):
    check(spec_llm(model, "coupled", "2x1"), joint, batches=10)


@pytest.mark.parametrize("broken", [np.nan, np.inf, 0.0])
def test_a_broken_head_does_not_bias_block_acceptance(model, block_llm, joint, broken):
    _, params, head = model
    block_llm.update_weights(params, jax.tree.map(lambda x: np.full_like(x, broken), head))
    try:
        counts, rounds = count_cells(block_llm, batches=3)
    finally:
        block_llm.update_weights(params, head)
    assert rounds >= 2
    assert p_value(counts, joint) > ALPHA


@pytest.mark.slow
@pytest.mark.parametrize(
    ("acceptance", "strategy"),
    [("block", "2_1_3"), ("block", "3_1_4"), ("coupled", "2_1_3"), ("coupled", "2x2")],
)
def test_200_000_samples_have_the_targets_joint_distribution(model, joint, acceptance, strategy):
    check(spec_llm(model, acceptance, strategy), joint, batches=200_000 // BATCH + 1)


# --- rules that are known to be biased must fail --------------------------------------------------


def correction_from_the_full_target(monkeypatch):
    exact = accept.accept_block

    def mutated(tree, tokens, p, q, coins, residual_noise):
        out = exact(tree, tokens, p, q, coins, residual_noise)
        last = out.count[:, None] - 1
        p_last = jnp.take_along_axis(p, last[..., None], axis=1)[:, 0]
        drawn = jnp.argmax(jnp.log(p_last) + residual_noise, axis=-1).astype(jnp.int32)
        is_last = jnp.arange(out.tokens.shape[1]) == last
        return out._replace(tokens=jnp.where(is_last, drawn[:, None], out.tokens))

    monkeypatch.setattr(accept, "accept_block", mutated)


def top_candidates_accepted_with_p_over_q(monkeypatch):
    def mutated(mode, logits, state, noise, root, step, count):
        return draft.top_candidates(logits, count)

    monkeypatch.setattr(draft, "_candidates", mutated)


def coins_keyed_by_position_alone(monkeypatch):
    def mutated(keys, root, count):
        def one(key, position):
            data = jax.random.wrap_key_data(key, impl="threefry2x32")
            for value in (rng.ACCEPT, position):
                data = jax.random.fold_in(data, value)
            return jax.random.uniform(data, minval=1e-30)

        positions = root[:, None] + 1 + jnp.arange(count)
        return jax.vmap(jax.vmap(one, (None, 0)))(keys, positions)

    monkeypatch.setattr(rng, "round_coins", mutated)


def the_drafts_noise_used_again_for_the_residual(monkeypatch):
    monkeypatch.setattr(rng, "RESIDUAL", rng.DRAFT)


MUTATIONS = [
    correction_from_the_full_target,
    top_candidates_accepted_with_p_over_q,
    coins_keyed_by_position_alone,
    the_drafts_noise_used_again_for_the_residual,
]


@pytest.mark.parametrize("mutate", MUTATIONS, ids=lambda f: f.__name__)
def test_a_biased_rule_fails_the_same_check(model, joint, mutate, monkeypatch):
    mutate(monkeypatch)
    counts, _ = count_cells(spec_llm(model, "block"), batches=5)
    assert p_value(counts, joint) < ALPHA
