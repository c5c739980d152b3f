"""Standalone models and n-grams through `LLM`: they change the speed and not a token."""

import functools

import pytest
from tiny import prompts_of, tiny_config, tiny_model

from specjax import LLM, SamplingParams, SpecConfig
from specjax.checkpoint import huggingface as hf

VOCAB, STEPS = 48, 2
CFG, PARAMS, HEAD = tiny_model(tiny_config(VOCAB), seed=3)


def llm(spec, batch=4):
    return LLM((CFG, PARAMS, None), spec, max_batch=batch, max_len=64)


@functools.cache
def plain(temperature, penalty=0.0):
    return tokens_of(plain_llm().generate(prompts_of(6, VOCAB), sampling(temperature, penalty)))


@functools.cache
def plain_llm():
    return warmed(llm(None))


def warmed(built):
    """One program for all that is asked for here: the first request asks for it."""
    built.generate(prompts_of(6, VOCAB), sampling(0.9, penalty=2.0))
    return built


def sampling(temperature, penalty=0.0):
    most = 12 * (STEPS + 1)
    return SamplingParams(temperature=temperature, frequency_penalty=penalty, max_tokens=most, n=2)


def tokens_of(outputs):
    return [sample.token_ids for out in outputs for sample in out.samples]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("draft") / "model"
    hf.save_checkpoint(path, CFG, PARAMS, HEAD)
    return path


@pytest.fixture(scope="module")
def by_itself(directory):
    """By strategy: the target drafts for itself."""
    return functools.cache(
        lambda strategy: warmed(llm(SpecConfig(strategy=strategy, draft_model=directory)))
    )


CHAIN = f"{STEPS}_1_{STEPS + 1}"


@pytest.mark.slow  # test_chi_square_sources drafts with a model
@pytest.mark.parametrize("strategy", [CHAIN, pytest.param("2x2", marks=pytest.mark.slow)])
def test_a_draft_model_that_is_the_target_is_always_accepted(by_itself, strategy):
    """Greedy and sampled, for both draw with the same noise; so its cache is right everywhere."""
    both = by_itself(strategy)
    for temperature in (0.0, 0.9):
        outputs = both.generate(prompts_of(6, VOCAB), sampling(temperature))
        assert tokens_of(outputs) == plain(temperature)
        assert both.totals.accept_length == STEPS + 1


def test_drafts_are_penalised_along_their_branch_as_the_target_is(by_itself):
    """Or a draft would propose again what the drafts above it have used up."""
    both = by_itself(CHAIN)
    outputs = both.generate(prompts_of(6, VOCAB), sampling(0.0, penalty=2.0))
    assert tokens_of(outputs) == plain(0.0, 2.0) != plain(0.0)
    assert both.totals.accept_length == STEPS + 1


def test_ngrams_speed_up_repetitive_text_and_change_no_token():
    looked_up = llm(SpecConfig(strategy="2_2_5", source="ngram"))
    for temperature in (0.0, 0.9):
        outputs = looked_up.generate(prompts_of(6, VOCAB), sampling(temperature))
        assert tokens_of(outputs) == plain(temperature)
        if temperature == 0:  # greedy text of a tiny model soon repeats itself
            assert looked_up.totals.accept_length > 1.5


def test_siblings_raise_the_accept_length():
    """Three greedy samples of a prompt on two slots: the last finds its text in the others."""
    request = SamplingParams(temperature=0.0, max_tokens=16, n=3)
    lengths = []
    for siblings in (False, True):
        spec = SpecConfig(strategy="3_1_4", source="ngram", ngram_siblings=siblings)
        looked_up = llm(spec, batch=2)
        looked_up.generate(prompts_of(2, VOCAB, shortest=6), request)
        lengths.append(looked_up.totals.accept_length)
    assert lengths[1] > lengths[0] + 0.2


def test_a_draft_model_of_another_vocabulary_is_refused(directory):
    target = tiny_model(tiny_config(VOCAB + 16, mtp=1))
    with pytest.raises(ValueError, match="draft model has a vocabulary of 48, the target of 64"):
        LLM(target, SpecConfig(draft_model=directory), max_len=64)
