"""A sample whose logits are no distribution ends with an error, and no other is affected."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiers import slow_but
from tiny import apt, tiny_config, tiny_model

from bench.programs import change_dense
from specjax import LLM, SamplingParams, SpecConfig
from specjax.engine.request import InvalidLogitsError
from specjax.models.transformer import Transformer

VOCAB, MAX_LEN, BATCH, TOKENS = 64, 48, 3, 24
CFG = tiny_config(VOCAB)
WIDE = change_dense(CFG, intermediate_size=32, head_dim=16)  # the kernels for CPUs take it
MASKED = 60  # tokens from here on never come: their logits are -inf, as in padded vocabularies
UNHEARD = 9  # nor does this one, and its embedding is NaN
# What becomes of a row whose best token is the one named.
KINDS = {47: "NaN", 24: "+inf", 33: "nothing"}
MODES = {
    "plain": None,
    "n-gram": SpecConfig("4_1_5", draft="ngram"),
    "coupled tree": SpecConfig("2_3_6", telemetry=True),
    "greedy": SpecConfig("4_1_5", acceptance="greedy"),
    "block": SpecConfig("3_1_4", acceptance="block"),
    "recursive": SpecConfig("4x2x1", acceptance="recursive"),
    "plain, wide": None,
    "coupled tree, wide": SpecConfig("3_4_12"),
}
FAST = ("coupled tree",)


SOUND = [[1, 2, 3], [4, 5, 6], [7, 8], [10], [12, 13, 14, 15], [16, 17]]
PROMPTS = [*SOUND, [UNHEARD], [3, UNHEARD, 4]]


def spoilt(logits):
    """Some rows of raw logits broken, by their best token; all of them masked in part."""
    token = jnp.arange(VOCAB)
    logits = jnp.where((token >= MASKED) | (token == UNHEARD), -jnp.inf, logits)
    finite = jnp.where(jnp.isnan(logits), -1e30, logits)
    best = jnp.argmax(finite, axis=-1)[..., None]
    nan, inf, nothing = KINDS
    logits = jnp.where((best == nan) & (token == 2), jnp.nan, logits)
    logits = jnp.where((best == inf) & (token == 3), jnp.inf, logits)
    return jnp.where(best == nothing, -jnp.inf, logits)


@pytest.fixture(scope="module", autouse=True)
def spoilt_model():
    patch = pytest.MonkeyPatch()
    sound = Transformer.logits
    patch.setattr(Transformer, "logits", lambda self, *given: spoilt(sound(self, *given)))
    yield
    patch.undo()


@functools.cache
def weights(cfg=CFG):
    _, params, head = tiny_model(cfg, 5)
    embed = np.array(params["embed"])
    embed[UNHEARD] = np.nan
    return {**params, "embed": jax.device_put(embed)}, apt(head, cfg)


@functools.cache
def llm(mode: str) -> LLM:
    cfg = WIDE if "wide" in mode else CFG
    return LLM((cfg, *weights(cfg)), MODES[mode], max_batch=BATCH, max_len=MAX_LEN)


@functools.cache
def generated(mode: str):
    temperature = 0.0 if mode == "greedy" else 1.0
    best = 2 if mode == "coupled tree" else 0
    params = SamplingParams(temperature=temperature, max_tokens=TOKENS, seed=3, n=2, logprobs=best)
    return [s for out in llm(mode).generate(PROMPTS, params) for s in out.samples]


def prompt_of(index: int) -> list[int]:
    return PROMPTS[index // 2]


def test_samples_end_in_the_middle_and_others_go_on():
    ends = [(s.finish_reason, len(s.token_ids)) for s in generated("plain")]
    assert {reason for reason, _ in ends} == {"error", "length"}
    assert any(0 < count < TOKENS for reason, count in ends if reason == "error")


@pytest.mark.parametrize("mode", slow_but(MODES, *FAST))
def test_a_sample_ends_where_its_logits_are_no_distribution(mode):
    samples = generated(mode)
    assert all(np.isfinite(s.logprobs).all() for s in samples)
    for index, sample in enumerate(samples):
        whole = len(sample.token_ids) == TOKENS
        assert sample.finish_reason == ("length" if whole else "error")
        assert (sample.error is None) == whole
        assert not set(sample.token_ids) & {UNHEARD, *range(MASKED, VOCAB)}
        if UNHEARD in prompt_of(index):
            assert sample.token_ids == [] and "first token" in sample.error
    # Plain decoding ends at once where a sample ended, and not a token sooner.
    ended = [(i, s) for i, s in enumerate(samples) if s.error and s.token_ids][:4]
    assert ended or mode == "greedy"
    for index, sample in ended:
        prompts = [prompt_of(index) + sample.token_ids[:cut] for cut in (None, -1)]
        params = SamplingParams(max_tokens=1, temperature=0.0)
        plain = llm("plain, wide" if "wide" in mode else "plain")
        last, before = (out.samples[0] for out in plain.generate(prompts, params))
        assert last.finish_reason == "error" and before.finish_reason == "length"


EQUAL = {mode: "plain" for mode in ("coupled tree", "n-gram")}
EQUAL |= {"coupled tree, wide": "plain, wide"}


@pytest.mark.parametrize("mode", slow_but(EQUAL, *FAST))
def test_the_samples_are_those_of_plain_decoding(mode):
    """The token whose embedding is NaN is drafted, too, and no other row of the tree sees it."""
    for plain, drafted in zip(generated(EQUAL[mode]), generated(mode), strict=True):
        assert (drafted.token_ids, drafted.finish_reason) == (plain.token_ids, plain.finish_reason)


@pytest.mark.parametrize("mode", slow_but(MODES, *FAST))
def test_pages_of_a_broken_sample_spoil_no_other(mode):
    """The sound prompts again, behind a crowd of broken ones, in whatever pages these had."""
    temperature = 0.0 if mode == "greedy" else 1.0
    params = SamplingParams(temperature=temperature, max_tokens=TOKENS, seed=3, n=2)
    crowd = [[UNHEARD, i, i + 1] for i in range(2 * BATCH)]
    again = llm(mode).generate([*crowd, *PROMPTS[:6]], params)
    found = [s for out in again[len(crowd) :] for s in out.samples]
    assert all(s.token_ids == [] for out in again[: len(crowd)] for s in out.samples)
    expected = generated(mode)[:12]
    assert [s.token_ids for s in found] == [s.token_ids for s in expected]
    assert [s.finish_reason for s in found] == [s.finish_reason for s in expected]


def test_the_log_names_the_prompts_and_a_comparison_refuses(caplog):
    params = SamplingParams(max_tokens=1, temperature=0.0)
    sound, broken = llm("n-gram").generate([[1, 2, 3], [UNHEARD, 5]], params)
    assert sound.samples[0].error is None and len(sound.samples[0].token_ids) == 1
    assert "prompt 1, sample 0" in caplog.text and "NaN" in broken.samples[0].error
    with pytest.raises(InvalidLogitsError, match="prompt 1"):
        llm("n-gram").compare_with_plain([[1, 2, 3], [UNHEARD, 5]], params)


def test_what_is_reported_holds_no_nan(tmp_path):
    samples, collected = generated("coupled tree"), llm("coupled tree").telemetry
    assert any(s.error for s in samples)
    collected.write_jsonl(tmp_path / "run.jsonl")  # refuses NaN
    assert collected.summary().rejections > 0
    tops = [value for s in samples for entry in s.top_logprobs for value in entry.values()]
    assert np.isfinite(tops).all()
