"""Telemetry through `LLM`: what is recorded agrees with the tokens, and it changes none."""

import dataclasses
import functools
import math

import numpy as np
import oracle
import pytest
from tiers import slow_but
from tiny import apt, prompts_of, tiny_config, tiny_model

from specjax import LLM, SamplingParams, SpecConfig

VOCAB = 24
PROMPTS = prompts_of(5, VOCAB, seed=3, shortest=2)
# One of each: greedy under penalties, filters, masks, everything plain, and one without drafts.
PARAMS = (
    SamplingParams(temperature=0.0, max_tokens=37, repetition_penalty=1.8, ignore_eos=True),
    SamplingParams(max_tokens=39, top_k=6, n=2, seed=1),
    SamplingParams(
        max_tokens=35, allowed_token_ids=tuple(range(0, VOCAB, 2)), stop_token_ids=(4,), seed=2
    ),
    SamplingParams(temperature=0.8, max_tokens=38, n=2, seed=4),
    SamplingParams(max_tokens=9, speculative=False, seed=5),
)
UNDRAFTED = 4
# (acceptance mode, strategy, aligned); the first drafts without knowing of any transform.
CHAIN, BLOCK = ("coupled", "2_1_3", False), ("block", "2_1_3", True)
DYNAMIC = ("coupled", "2_3_5", True)


@functools.cache
def model():
    cfg, params, head = tiny_model(tiny_config(VOCAB))
    return cfg, params, apt(head, cfg)


def build(**spec) -> LLM:
    return LLM(model(), SpecConfig(**spec), max_batch=3, max_len=64)


@functools.cache
def ran(mode: str, strategy: str, aligned: bool):
    """(llm, samples by (request, sample)) after a run with telemetry."""
    llm = build(strategy=strategy, acceptance=mode, telemetry=True, aligned=aligned)
    params = [dataclasses.replace(p, transformed_logprobs=True) for p in PARAMS]
    outputs = llm.generate(PROMPTS, params)
    samples = {(r, s): x for r, out in enumerate(outputs) for s, x in enumerate(out.samples)}
    return llm, samples


def rounds_with_drafts(samples) -> int:
    return sum(x.stats.rounds for (request, _), x in samples.items() if request != UNDRAFTED)


def offset(record) -> int:
    """The number of generated tokens before the rejected one."""
    return record.position - record.prompt_len


@pytest.mark.parametrize("run", slow_but([CHAIN, BLOCK, DYNAMIC], CHAIN))
def test_records_agree_with_the_tokens_that_came_out(run):
    llm, samples = ran(*run)
    assert len(llm.telemetry.records) > 20
    for record in llm.telemetry.records:
        assert record.request != UNDRAFTED
        sample = samples[record.request, record.sample]
        assert record.prompt_len == len(PROMPTS[record.request])
        assert record.emitted == (offset(record) < len(sample.token_ids))
        assert record.draft_token != record.target_token
        assert -math.inf < record.draft_logprob <= 1e-6
        assert 1 <= record.depth <= llm.engine.runner.steps
        if record.emitted:
            assert sample.token_ids[offset(record)] == record.target_token
            logprob = sample.transformed_logprobs[offset(record)]
            assert record.target_logprob == pytest.approx(logprob, abs=1e-4)


def test_records_hold_the_numbers_of_a_full_forward_pass():
    (cfg, params, _), (llm, samples) = model(), ran(*CHAIN)
    for record in [r for r in llm.telemetry.records if r.emitted]:
        prompt, sampling = PROMPTS[record.request], PARAMS[record.request]
        output = samples[record.request, record.sample].token_ids[: offset(record)]
        logits = oracle.logits_at(cfg, params, [*prompt, *output])
        scores = oracle.reference.transform(logits, sampling, prompt, output, [])
        logp, scaled = (
            oracle.log_softmax(scores),
            np.exp(oracle.log_softmax(logits / (sampling.temperature or 1))),
        )
        found = record.target_logprob, record.draft_token_target_logprob, record.entropy
        wanted = logp[record.target_token], logp[record.draft_token], -scaled @ np.log(scaled)
        np.testing.assert_allclose(found, wanted, atol=1e-3)
        kept = scaled[np.isfinite(scores)].sum()
        assert record.top_p_mass == pytest.approx(kept, abs=1e-3)
        assert record.outside_filter <= (scores[record.draft_token] == -np.inf)


@pytest.mark.parametrize("run", slow_but([CHAIN, BLOCK], CHAIN))
def test_there_are_as_many_rejections_as_the_histograms_imply(run):
    llm, samples = ran(*run)
    summary, steps = llm.telemetry.summary(), llm.engine.runner.steps
    for key, sample in samples.items():
        if key[0] == UNDRAFTED:
            continue
        mine = [r for r in llm.telemetry.records if (r.request, r.sample) == key]
        short = sum(sample.stats.histogram[: steps + 1])  # emitted less than a whole path
        # The last round may be short because the sample ended, not because of a rejection.
        assert short - 1 <= sum(r.emitted for r in mine) <= short
        assert len({r.position for r in mine}) == len(mine)  # one round, one position
    assert samples[UNDRAFTED, 0].stats.rounds > 0
    assert summary.rounds == rounds_with_drafts(samples)
    # Every path of these trees is `steps` long: a walk ends in a rejection or at that depth.
    assert summary.attempts[1] == summary.rounds and len(summary.attempts) == steps
    assert summary.rejections + summary.accepts[steps] == summary.rounds


def test_requests_are_labelled_with_their_own_transforms_and_causes():
    llm, _ = ran(*CHAIN)
    found = {request: set() for request in range(4)}
    transforms = {}
    for record in llm.telemetry.records:
        found[record.request].add(record.cause)
        transforms[record.request] = set(record.transforms)
    assert "penalty" in found[0] and found[0] <= {"penalty", "disagreement"}
    assert "filter" in found[1] and found[1] <= {"filter", "disagreement"}
    assert "mask" in found[2] and found[2] <= {"mask", "disagreement"}
    assert found[3] == {"disagreement"}
    assert transforms == {
        0: {"penalties"},
        1: {"temperature", "top_k"},
        2: {"temperature", "allowed"},
        3: {"temperature"},
    }
    summary = llm.telemetry.summary()
    assert all(n > 0 for n in summary.causes.values())
    assert sum(summary.causes.values()) == summary.rejections


@pytest.mark.slow
def test_telemetry_changes_no_token_and_is_absent_unless_asked_for():
    _, recorded = ran(*BLOCK)  # whose tokens any change to what is drafted would change
    silent = build(strategy=BLOCK[1], acceptance="block")
    assert silent.telemetry is None
    outputs = silent.generate(PROMPTS, PARAMS)
    for (request, index), sample in recorded.items():
        assert outputs[request].samples[index].token_ids == sample.token_ids
