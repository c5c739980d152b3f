"""Independent engines on devices of their own, fed from one queue."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from shared import CFG, weights
from tiny import prompts_of

from specjax import LLM, EngineConfig, SamplingParams, SpecConfig
from specjax.engine.request import make_jobs
from specjax.parallel.agreement import Agreement
from specjax.parallel.distributed import DistributedError

pytestmark = pytest.mark.skipif(jax.device_count() < 4, reason="needs 4 devices")

PARAMS = SamplingParams(seed=0, max_tokens=20, ignore_eos=True, n=3)
PROMPTS = prompts_of(6, CFG.vocab_size, seed=4)


@functools.cache
def replicated() -> LLM:
    how = {"replicas": 2, "tp": 2, "engine": EngineConfig(stretch=1)}
    return LLM((CFG, *weights()), SpecConfig("1_1_2"), max_batch=2, max_len=64, **how)


@functools.cache
def plain() -> LLM:
    return LLM((CFG, weights()[0], None), None, max_batch=4, max_len=64)


def tokens(outputs):
    return [[s.token_ids for s in o.samples] for o in outputs]


def test_replicas_share_the_work_and_emit_the_tokens_of_one_engine():
    llm = replicated()
    placed = [
        jax.tree.leaves(engine.runner.weights.policy)[0].devices() for engine in llm.engine.engines
    ]
    assert [len(devices) for devices in placed] == [2, 2] and not placed[0] & placed[1]
    shares = []
    for engine in llm.engine.engines:
        finish = engine._finish
        shares.append([])

        def count(sequence, sample, finish=finish, share=shares[-1]):
            share.append(len(sample.token_ids))
            finish(sequence, sample)

        engine._finish = count
    try:
        outputs = llm.generate(PROMPTS, PARAMS)
    finally:
        for engine in llm.engine.engines:
            del engine._finish
    assert tokens(outputs) == tokens(plain().generate(PROMPTS, PARAMS))
    assert sum(map(sum, shares)) == llm.totals.tokens == 6 * 3 * 20
    assert min(map(sum, shares)) > 0.2 * llm.totals.tokens


def test_samples_may_be_added_aborted_suspended_and_continued_anywhere():
    engine = replicated().engine
    params = dataclasses.replace(PARAMS, max_tokens=50)
    jobs = [j for i, p in enumerate(PROMPTS[:3]) for j in make_jobs(p, params, (), request=i)]
    added = [engine.add(job) for job in jobs]
    samples = [(e.sequence, e.sample) for e in engine.step()]
    *others, last = added
    assert last.tokens == []
    cut = engine.abort(last)
    assert cut.finish_reason == "abort" and cut.token_ids == [] and engine.abort(last) is None
    again = {engine.add(s.job, s.output()): s for s in engine.suspend()}
    while engine.has_work:
        samples += [(again.get(e.sequence, e.sequence), e.sample) for e in engine.step()]
    expected = plain().engine.generate([sequence.job for sequence, _ in samples])[0]
    assert [s.token_ids for _, s in samples] == [s.token_ids for s in expected]
    assert set(dict(samples)) == set(others)


def test_new_weights_reach_every_replica():
    llm = replicated()
    old, new = weights(), weights(seed=5)
    llm.update_weights(*new)
    try:
        got = tokens(llm.generate(PROMPTS, PARAMS))
    finally:
        llm.update_weights(*old)
    plain().update_weights(new[0])
    try:
        assert got == tokens(plain().generate(PROMPTS, PARAMS))
    finally:
        plain().update_weights(old[0])
    assert {engine.version for engine in llm.engine.engines} == {llm.engine.version}


def test_too_many_replicas_and_a_mesh_beside_them_are_refused():
    with pytest.raises(ValueError, match="needs 64 devices, got 8"):
        LLM((CFG, *weights()), SpecConfig("2_1_3"), max_len=64, replicas=64)
    with pytest.raises(ValueError, match="leave out mesh"):
        mesh = jax.sharding.Mesh(
            np.array(jax.devices()[:1]).reshape(1, 1, 1), ("data", "fsdp", "tp")
        )
        LLM((CFG, *weights()), SpecConfig("2_1_3"), max_len=64, replicas=2, mesh=mesh)


# --- hosts of one replica (real ones: tests/train/test_processes.py) ------------------------------


@pytest.fixture
def shared(monkeypatch):
    """The first replica as if each of its two devices were another host's, and what those say.

    Returns:
      (its engine, function that sets what the other host makes of the rows that are exchanged)
    """
    engine = replicated().engine.engines[0]
    devices = list(engine.runner.mesh.devices.flat)
    agreement = Agreement(engine.runner.mesh, devices.index, me=0)
    monkeypatch.setattr(agreement, "one_by_one", False)  # as on accelerators
    monkeypatch.setattr(engine.runner, "agreement", agreement)

    def other_says(change):
        def exchange(rows, gather=agreement._gather):
            rows = np.array(gather(rows))
            change(rows[1])
            return jax.device_put(rows)

        monkeypatch.setattr(agreement, "_gather", exchange)

    yield engine, other_says
    engine.clear()


def test_the_slowest_hosts_clock_counts_and_one_that_does_not_know_spoils_it(shared):
    engine, other_says = shared
    assert engine.runner.agreement.agree(2.0) == 2.0
    for theirs, agreed in ((5.0, 5.0), (1.0, 2.0), (float("nan"), float("nan"))):
        other_says(
            lambda row, theirs=theirs: row[-4:-2].put([0, 1], np.float64([theirs]).view("u4"))
        )
        np.testing.assert_equal(engine.runner.agreement.agree(2.0), agreed)


def test_hosts_that_would_run_different_programs_end_before_they_wait_for_each_other(
    shared, monkeypatch
):
    (engine, other_says), said, waited = shared, [], []
    in_flight, wait = engine._in_flight, engine._in_flight.wait_for
    monkeypatch.setattr(
        in_flight, "wait_for", lambda chunk: waited.append(chunk.announced) or wait(chunk)
    )

    def strays(row):
        said.append(row)
        row[0] ^= len(said) == 4  # a prompt was read, two samples placed, and a chunk enqueued

    other_says(strays)
    params = dataclasses.replace(PARAMS, max_tokens=50)
    with pytest.raises(DistributedError, match=r"process 0 runs \('chunk'.* where \[1\] run some"):
        engine.generate(make_jobs(PROMPTS[0], params, ()))
    assert waited == [3] and not engine.has_work
