"""Pages that one prompt leaves serve the next one, and nothing of a sample changes."""

import numpy as np
import pytest
from shared import CFG, weights
from test_invariant import make_llm
from test_records import model as recording

from specjax import LLM, EngineConfig, SamplingParams, SpecConfig

PAGE = 16
CACHED = EngineConfig(page_size=PAGE, prefill_chunk=32, enable_prefix_caching=True)
ANSWER = SamplingParams(seed=0, max_tokens=4, ignore_eos=True)


def llm_of(model=None, spec="3_1_4", engine=CACHED, **more) -> LLM:
    spec = SpecConfig(spec, draft="checkpoint") if spec else None
    return LLM(model or (CFG, *weights()), spec, 2, 64, engine=engine, **more)


def conversation(llm, turns=8, params=ANSWER) -> list:
    """Each prompt is the one before, its answer, and two tokens more."""
    known, samples = [1, 2, 3], []
    for turn in range(turns):
        [sample] = llm.generate([known], params)[0].samples
        samples.append((known, sample))
        known = [*known, *sample.token_ids, turn, turn + 1]
    return samples


@pytest.mark.parametrize("spec", ["3_1_4", None])
def test_a_conversation_computes_its_tokens_once_but_for_the_last_page(spec):
    llm, cold = llm_of(spec=spec), llm_of(spec=spec, engine=EngineConfig(page_size=PAGE))
    turns = conversation(llm, 10)
    again = conversation(cold, 10)
    assert [s.token_ids for _, s in turns] == [s.token_ids for _, s in again]
    assert not any(sample.cached_tokens for _, sample in again)
    steps = 3 if spec else 0
    for (before, answer), (prompt, sample) in zip(turns, turns[1:], strict=False):
        whole = len(before) + len(answer.token_ids) - steps - 2
        assert sample.cached_tokens >= whole // PAGE * PAGE, len(prompt)
    assert sample.cached_tokens >= 2 * PAGE
    scheduler = llm.engine.engines[0].scheduler
    assert scheduler.hits == sum(sample.cached_tokens for _, sample in turns)


def test_new_weights_and_an_engine_that_slept_find_no_page():
    llm = llm_of()
    other, head = weights(seed=4)
    for change in (
        lambda: llm.update_weights(other, head),
        lambda: llm.engine.release(weights=False),
    ):
        conversation(llm, 4)
        change()
        [(_, sample)] = conversation(llm, 1, ANSWER)
        whole = conversation(llm_of((CFG, other, head)), 8)
        assert [s.token_ids for _, s in conversation(llm)] == [s.token_ids for _, s in whole]
        assert sample.cached_tokens == 0


def test_a_head_that_comes_while_nothing_runs_leaves_no_page_of_dropped_caches():
    llm, cold = llm_of(), llm_of(engine=EngineConfig(page_size=PAGE))
    conversation(llm, 4)
    llm.update_head(weights(seed=5)[1])
    again = zip(conversation(llm), conversation(cold), strict=True)
    assert all(sample.token_ids == right.token_ids for (_, sample), (_, right) in again)


def test_samples_have_the_same_bits_in_invariant_mode():
    """There only whole pieces of prompts are reused: two here."""
    small = {"page_size": 16, "prefill_chunk": 16}
    cached, cold = (
        make_llm("float32", "2x2", invariant=True, config=small | {"enable_prefix_caching": on})
        for on in (True, False)
    )
    prompts = [[5, *range(40)], [5, *range(35), 7, 9], [5, *range(40)]]
    params = SamplingParams(seed=1, max_tokens=12, ignore_eos=True)
    for prompt in prompts:
        [one], [other] = (llm.generate([prompt], params)[0].samples for llm in (cached, cold))
        assert (one.token_ids, one.logprobs) == (other.token_ids, other.logprobs)
    assert one.cached_tokens == 32


def test_records_of_a_prompt_are_whole_where_it_was_not_read():
    model = recording()
    llm, cold = (llm_of(model, "2x2", engine) for engine in (CACHED, EngineConfig(page_size=PAGE)))
    turns = zip(conversation(llm), conversation(cold), strict=True)
    for (_, sample), (_, right) in turns:
        np.testing.assert_array_equal(sample.records, right.records)
    assert sample.cached_tokens >= 2 * PAGE


def test_conversations_stay_on_the_replicas_that_have_read_them():
    llm = llm_of(replicas=2)
    prompts, hits = [[1, 2, 3], [3, 2, 1]], [0, 0]
    for turn in range(8):
        order = [0, 1] if turn % 2 else [1, 0]
        outputs = llm.generate([prompts[i] for i in order], ANSWER)
        for i, output in zip(order, outputs, strict=True):
            [sample] = output.samples
            prompts[i] = [*prompts[i], *sample.token_ids, turn, turn + 1]
            hits[i] += sample.cached_tokens
    one = sum(sample.cached_tokens for _, sample in conversation(llm_of()))
    assert hits == [one, one]
