"""A draft that is fed with samples that have ended, by its path `bigrams:Bigrams`."""

import numpy as np
import pytest
from shared import BATCH, CFG, MAX_LEN, PROMPTS, shared_llm, weights

from specjax import LLM, SamplingParams, SpecConfig

PARAMS = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)


def engine(strategy="2_1_3", **settings):
    spec = SpecConfig(strategy, source="bigrams:Bigrams", **settings)
    return LLM((CFG.replace(mtp_num_layers=0), weights()[0], None), spec, BATCH, MAX_LEN)


def tokens(llm, params=PARAMS):
    return [out.samples[0].token_ids for out in llm.generate(PROMPTS, params)]


def test_what_has_ended_is_drafted_from_and_no_token_changes():
    llm, expected = engine(), tokens(shared_llm("plain"))
    assert tokens(llm) == expected
    first, built = llm.totals.accept_length, llm.engine.runner.compilations
    llm.engine.runner.set_params(weights()[0], {})  # what was fed is no weight
    assert tokens(llm) == expected
    assert llm.totals.accept_length > max(1.2, first)
    assert llm.engine.runner.compilations == built
    sampled = SamplingParams(max_tokens=24, ignore_eos=True, seed=4)
    assert tokens(llm, sampled) == tokens(shared_llm("plain"), sampled)
    store = llm.engine.runner.store
    followed = {pair for ids in expected for pair in zip(ids, ids[1:], strict=False)}
    assert any(store[token] == following for token, following in followed)
    np.testing.assert_array_equal(llm.engine.runner.history, store)


@pytest.mark.parametrize(("acceptance", "strategy"), [("block", "2_1_3"), ("recursive", "2x1")])
def test_rules_that_divide_by_q_feed_nothing(acceptance, strategy):
    runner = engine(strategy, acceptance=acceptance).engine.runner
    assert runner.store is not None and not runner.takes_samples
