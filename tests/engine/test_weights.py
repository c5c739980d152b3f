"""New weights while samples run."""

import dataclasses

import jax
import numpy as np
import pytest
from engines import LONG, ONE, engine_of, jobs_of, tokens_of, warm
from shared import CFG, weights

from specjax import LLM, SpecConfig
from specjax.engine.settings import EngineConfig


def test_new_weights_reach_running_sequences_and_every_token_knows_its_version():
    """The tokens after the swap are those of the new policy after the tokens so far."""
    engine = warm()
    old, new = weights(), weights(seed=5)
    [job] = jobs_of([7, 8, 9], LONG)
    sequence, version = engine.add(job), engine.version
    engine.step()
    built = engine.runner.compilations
    engine.set_params(*new)
    before = sequence.output()
    samples = []
    while engine.has_work:
        samples += [event.sample for event in engine.step()]
    assert engine.runner.compilations == built
    engine.set_params(*old)
    [sample], count = samples, len(before.token_ids)
    assert sample.weight_versions == ((0, version), (count, version + 1)) and 0 < count < 80
    whole = tokens_of([job])[0]
    assert sample.token_ids[:count] == whole[:count] == before.token_ids
    fresh = engine_of(None, batch=1)
    fresh.set_params(new[0])
    fresh.add(job, before)
    [event] = [e for _ in range(99) if fresh.has_work for e in fresh.step()]
    assert event.sample.token_ids == sample.token_ids != whole


def test_caches_of_old_weights_may_be_kept_and_are_counted():
    engine = warm()
    old, new = weights(), weights(seed=5)
    job = jobs_of([7, 8, 9], LONG)[0]
    outputs = []
    for running in ("keep", "recompute"):
        engine.set_params(*old)
        sequence = engine.add(job)
        engine.step()
        engine.set_params(*new, running=running)
        known = 3 + len(sequence.tokens)
        assert engine.scheduler.positions == (known if running == "keep" else 0)
        outputs += [e.sample.token_ids for _ in range(99) if engine.has_work for e in engine.step()]
    engine.set_params(*old)
    assert outputs[0] != outputs[1], "what the old weights made of the prompt does matter"
    with pytest.raises(ValueError, match="'recompute' or 'keep', got 'drop'"):
        engine.set_params(*new, running="drop")


def test_weights_that_do_not_arrive_as_they_were_sent_stop_everything(monkeypatch, caplog):
    engine = engine_of()
    before = dict(engine.runner.weights.checksums)
    assert set(before) == {"policy", "draft"}
    params, head = weights(seed=5)
    engine.set_params(params, head)
    assert not set(before.items()) & set(engine.runner.weights.checksums.items())
    engine.set_params(*weights())
    assert engine.runner.weights.checksums == before
    layout = engine.runner.weights.convert

    def lossy(params):
        arrived = layout(params)
        return dict(arrived, embed=arrived["embed"].at[3, 3].add(1e-3))

    live, version = engine.runner.weights.policy, engine.version
    monkeypatch.setattr(engine.runner.weights, "convert", lossy)
    with pytest.raises(RuntimeError, match="policy's weights have checksum .* do not trust"):
        engine.set_params(*weights())
    assert engine.runner.weights.policy is live and engine.version == version, "the old ones go on"
    monkeypatch.undo()
    engine.set_params(params, jax.tree.map(lambda x: x * np.nan, head))
    assert "draft's weights are not finite" in caplog.text


def test_weights_that_went_to_nan_leave_nothing_behind():
    """Pages that they wrote are masked for others, and zero times NaN is NaN."""
    engine = engine_of("1_1_2", batch=2, page_size=16)
    params, head = weights()
    jobs = jobs_of([3, 4, 5], dataclasses.replace(ONE, n=2))
    engine.set_params(jax.tree.map(lambda x: x * np.nan, params), head)
    broken, _ = engine.generate(jobs)
    engine.set_params(params, head)
    samples, _ = engine.generate(jobs)
    assert [s.token_ids for s in samples] == tokens_of(jobs) != [s.token_ids for s in broken]


def test_a_head_alone_steps_nobody_back_and_is_no_new_version():
    engine, [job] = warm(), jobs_of([7, 8, 9], LONG)
    engine.add(job)
    engine.step()
    running, version = dict(engine.scheduler.running), engine.version
    built, sums = engine.runner.compilations, dict(engine.runner.weights.checksums)
    engine.set_head(weights(seed=5)[1])
    assert dict(engine.scheduler.running) == running != {} and engine.version == version
    assert engine.runner.weights.checksums["policy"] == sums["policy"]
    assert engine.runner.weights.checksums["draft"] != sums["draft"]
    [sample] = [e.sample for _ in range(99) if engine.has_work for e in engine.step()]
    assert [sample.token_ids] == tokens_of([job]) and sample.weight_versions == ((0, version),)
    assert engine.runner.compilations == built
    engine.set_head(weights()[1])
    with pytest.raises(ValueError, match="drafts nothing"):
        engine_of(None).set_head(weights()[1])


def test_a_head_that_went_to_nan_is_forgotten_with_the_next():
    engine, jobs = warm(), jobs_of([3, 4, 5], dataclasses.replace(ONE, n=2))
    head = weights()[1]
    before, _ = engine.generate(jobs)
    engine.set_head(jax.tree.map(lambda x: x * np.nan, head))
    for job in jobs:
        engine.add(job)
    for _ in range(3):
        engine.step()
    engine.set_head(head)
    during = [e.sample for _ in range(99) if engine.has_work for e in engine.step()]
    assert sorted(sample.token_ids for sample in during) == sorted(tokens_of(jobs))
    assert all(sample.stats.accepted > 3 for sample in during), "the new head drafts at once"
    after, _ = engine.generate(jobs)
    assert [s.stats for s in after] == [s.stats for s in before], "it drafts as if nothing had been"


@pytest.mark.slow
def test_what_was_generated_stays_when_weights_change_in_invariant_mode():
    """A preempted sample is generated anew there; under other weights it would be another one."""
    spec, often = SpecConfig("1_1_2", invariant=True), EngineConfig(chunk_tokens=8, stretch=1)
    engine = LLM((CFG, *weights()), spec, max_batch=1, max_len=96, engine=often).engine
    [job] = jobs_of([7, 8, 9], LONG)
    sequence = engine.add(job)
    while not sequence.tokens:
        engine.step()
    engine.set_params(*weights(seed=5))
    before = list(sequence.tokens)
    assert before
    engine.step()  # it runs under the new weights, and must make room
    engine.drain()
    engine.preempt(sequence)
    [ended] = [event for _ in range(99) if engine.has_work for event in engine.step()]
    assert ended.sample.token_ids[: len(before)] == before
    whole, _ = engine.generate([job])
    assert ended.sample.token_ids != whole[0].token_ids


def test_what_was_released_comes_again_and_nothing_runs_without_weights():
    engine = warm()
    engine.set_params(*weights())
    job = jobs_of([7, 8, 9], LONG)[0]
    engine.add(job)
    with pytest.raises(RuntimeError, match="1 samples are not finished"):
        engine.release()
    [wanted] = [e for _ in range(99) if engine.has_work for e in engine.step()]
    engine.release(weights=False)
    assert engine.runner.weights.policy is not None and engine.runner.state is None
    assert tokens_of([job]) == [wanted.sample.token_ids]
    engine.release()
    engine.add(job)
    with pytest.raises(RuntimeError, match="call set_params"):
        engine.step()
    engine.set_params(*weights())
    [again] = [e for _ in range(99) if engine.has_work for e in engine.step()]
    assert again.sample.token_ids == wanted.sample.token_ids


def test_samples_that_wait_read_their_prompts_again_with_new_weights():
    """They have had no row of the batch yet, and so no token of the old weights."""
    engine = warm()
    old, new = weights(), weights(seed=5)
    jobs = jobs_of([7, 8, 9], dataclasses.replace(ONE, n=engine.batch + 2))
    added = [engine.add(job) for job in jobs]
    engine.step(), engine.drain()
    assert len(engine.scheduler.running) > engine.batch
    engine.set_params(*new, running="keep")
    run = added[: engine.batch]
    assert engine.scheduler.positions == sum(3 + len(s.tokens) for s in run)
    ended = {e.sequence: e.sample for _ in range(99) if engine.has_work for e in engine.step()}
    late = [ended[sequence].token_ids for sequence in added[engine.batch :]]
    assert late == [s.token_ids for s in engine.generate(jobs[engine.batch :])[0]]
    engine.set_params(*old)
    assert late != tokens_of(jobs[engine.batch :])
