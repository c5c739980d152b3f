"""What `SpecConfig` says about trees reaches the program: rows change, tokens do not."""

import pytest
from tiny import apt, prompts_of, tiny_config, tiny_model

from specjax import LLM, SamplingParams, SpecConfig

VOCAB, TOKENS = 32, 24


@pytest.fixture(scope="module")
def model():
    cfg, params, head = tiny_model(tiny_config(VOCAB), seed=3)
    head = apt(head, cfg)
    head["blocks"][0]["norm"] = 2.0 * head["blocks"][0]["norm"]  # sure of itself here and there
    return cfg, params, head


def decoded(model, strategy="2_3_8", **settings):
    """Tokens, totals, and the engine that made them; two sampled slots, as many requests."""
    llm = LLM(model, SpecConfig(strategy, **settings), max_batch=2, max_len=40)
    params = [SamplingParams(max_tokens=TOKENS, seed=s, ignore_eos=True) for s in range(2)]
    outs = llm.generate(prompts_of(2, VOCAB, longest=8), params)
    return [out.samples[0] for out in outs], llm


@pytest.fixture(scope="module")
def usual(model):
    return decoded(model)


@pytest.mark.slow  # test_identity has such trees
def test_adaptive_width_changes_what_is_drafted_and_no_token(model, usual):
    samples, llm = decoded(model, adaptive_width=True)
    assert [s.token_ids for s in samples] == [s.token_ids for s in usual[0]]
    assert llm.totals.histogram.tolist() != usual[1].totals.histogram.tolist()


@pytest.mark.slow
def test_rows_beyond_spec_verify_tokens_are_not_verified(model, usual):
    samples, _ = decoded(model, spec_verify_tokens=6)
    assert [s.token_ids for s in samples] == [s.token_ids for s in usual[0]]
    assert all(s.stats.drafted == 5 * s.stats.rounds for s in samples)
