"""Log-probabilities of prompts are those of a full forward, however prompts are put together."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tiers import slow_but
from tiny import tiny_config, tiny_model

from specjax import LLM, EngineConfig
from specjax.engine.prompt_scores import SHORTEST, PromptScorer
from specjax.engine.request import InvalidLogitsError
from specjax.models.transformer import graphdef

VOCAB, MAX_LEN = 64, 150
CFG = tiny_config(VOCAB, eos_token_ids=(7,))
LENGTHS = (1, 2, 40, SHORTEST, SHORTEST + 1, 9, 128, MAX_LEN, 3, 5, 6)


@pytest.fixture(scope="module")
def weights():
    _, params, _ = tiny_model(CFG, 3)
    return params


@pytest.fixture(scope="module")
def prompts():
    rng = np.random.default_rng(0)
    return [rng.integers(0, VOCAB, size=length).tolist() for length in LENGTHS]


@pytest.fixture(scope="module")
def expected(weights, prompts):
    """Of each prompt, log-probabilities [S V] of what follows each position."""
    model = nnx.merge(graphdef(CFG), weights)
    forward = jax.jit(lambda tokens: model.logits(model.prefill(tokens, _lengths(tokens)).x))
    return [np.asarray(jax.nn.log_softmax(forward(jnp.asarray([p]))[0])) for p in prompts]


def _lengths(tokens):
    return jnp.full(tokens.shape[:1], tokens.shape[1])


def scorer_of(weights, **options):
    engine = EngineConfig(prefill_chunk=48, page_size=32)  # pieces that cross pages
    llm = LLM((CFG, weights, None), None, max_batch=2, max_len=MAX_LEN, engine=engine, **options)
    return PromptScorer(llm.engine, llm.max_len)


@pytest.mark.parametrize("options", slow_but([{}, {"tp": 2}, {"scan_layers": True}], {"tp": 2}))
def test_scores_are_those_of_a_full_forward(weights, prompts, expected, options):
    scorer = scorer_of(weights, **options)
    found = scorer.read(scorer.start(prompts), top=3)
    for prompt, right, scores in zip(prompts, expected, found, strict=True):
        assert scores.logprobs[0] is scores.ranks[0] is scores.top[0] is None
        assert len(scores.logprobs) == len(scores.ranks) == len(scores.top) == len(prompt)
        rows = np.arange(len(prompt) - 1)
        values = right[rows, prompt[1:]]
        np.testing.assert_allclose(np.array(scores.logprobs[1:], float), values, atol=2e-5)
        for i, (rank, top) in enumerate(zip(scores.ranks[1:], scores.top[1:], strict=True)):
            token = prompt[i + 1]
            assert (right[i] > values[i] + 1e-5).sum() < rank <= (right[i] > values[i] - 1e-5).sum()
            assert top[token] == scores.logprobs[i + 1]
            best = list(top.values())[:3]
            np.testing.assert_allclose(best, np.sort(right[i])[::-1][:3], atol=2e-5)
            assert len(top) == 3 + (token not in list(top)[:3])


@pytest.mark.slow
def test_replicas_share_prompts_and_give_the_same_scores(weights, prompts):
    engine = EngineConfig(prefill_chunk=48, page_size=32)
    llm = LLM((CFG, weights, None), None, 2, MAX_LEN, engine=engine, replicas=2)
    scorer = PromptScorer(llm.engine, llm.max_len)
    ran = []
    for at, runner in enumerate(scorer._runners):
        runner.run = lambda *args, at=at, run=runner.run: ran.append(at) or run(*args)
    alone = PromptScorer(llm.engine.engines[0], llm.max_len)
    right = alone.read(alone.start(prompts), top=3)
    ran.clear()
    assert scorer.read(scorer.start(prompts), top=3) == right
    assert min(ran.count(0), ran.count(1)) >= 2, "both have work"


@pytest.mark.slow
def test_a_length_is_compiled_once_and_ahead(weights, prompts):
    scorer = scorer_of(weights)
    scorer.warm_up()
    [runner] = scorer._runners
    built = runner.compilations
    assert built == len(scorer.spans)
    scorer.start(prompts), scorer.start(prompts[:1]), scorer.start(prompts * 3)
    assert runner.compilations == built


NOT_FINITE = {
    "NaN everywhere": lambda weights: jax.tree.map(lambda x: x * float("nan"), weights),
    "one +inf in lm_head": lambda weights: with_lm_head(weights, float("inf")),
    "one NaN in lm_head": lambda weights: with_lm_head(weights, float("nan")),
}


def with_lm_head(weights, value):
    return {**weights, "lm_head": weights["lm_head"].at[3, 5].set(value)}


@pytest.mark.parametrize("what", NOT_FINITE)
def test_logits_that_are_no_distribution_give_no_score(weights, prompts, what):
    scorer = scorer_of(NOT_FINITE[what](weights))
    with pytest.raises(InvalidLogitsError, match=r"token \d+ of prompt 1 hold NaN or \+inf"):
        scorer.read(scorer.start([prompts[0], prompts[2]]), top=1)
    # Of one token there is nothing to say: what lies beyond a prompt does not count.
    assert scorer.read(scorer.start(prompts[:1]), top=1)[0].logprobs == [None]


def test_what_lies_beyond_the_end_of_a_prompt_does_not_count(weights, prompts):
    bad = 63
    embed = weights["embed"].at[bad].set(float("nan"))
    scorer = scorer_of({**weights, "embed": embed})
    fine = [5, 9, 33, bad]  # the last is read, and nothing that follows it is asked for
    found = scorer.read(scorer.start([fine]), top=1)[0].logprobs
    assert np.isfinite(found[1:]).all()
    with pytest.raises(InvalidLogitsError, match="token 3 of prompt 1"):
        scorer.read(scorer.start([fine, [5, 9, bad, 33]]), top=1)
