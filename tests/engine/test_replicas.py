"""Independent engines on devices of their own, fed from one queue."""

import collections
import dataclasses
import functools

import jax
import numpy as np
import pytest
from shared import CFG, weights
from tiny import prompts_of

from specjax import LLM, EngineConfig, SamplingParams, SpecConfig
from specjax.control import ControlConfig
from specjax.engine.agreement import Agreement
from specjax.engine.request import make_jobs
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
    placed = [jax.tree.leaves(engine.runner.params)[0].devices() for engine in llm.engine.engines]
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


def test_a_prompt_is_read_once_while_many_wait(monkeypatch):
    """A slot becomes free for one of its samples at a time; the others must find it read."""
    llm, read = replicated(), []
    for engine in llm.engine.engines:

        def prefill(piece, runner=engine.runner, run=engine.runner.prefill):
            begins = (piece.prompts < runner.prompts - 1) & (piece.start == 0)  # no spare rows
            read.append(int(begins.sum()))
            return run(piece)

        monkeypatch.setattr(engine.runner, "prefill", prefill)
    many = prompts_of(8, CFG.vocab_size, seed=5)
    llm.generate(many, dataclasses.replace(PARAMS, max_tokens=6))
    slots = sum(engine.batch for engine in llm.engine.engines)
    last = -(-slots // PARAMS.n)  # prompts that have fewer samples behind them: dealt out singly
    assert sum(read) <= len(many) - last + last * PARAMS.n, read


def test_a_watcher_hears_of_every_replica_and_of_its_samples():
    llm, seen, chunks = replicated(), collections.defaultdict(list), []

    class Watcher:
        def chunk(self, strategy, bucket, rounds):
            chunks.append(strategy)

        def news(self, sequence, news):
            seen[sequence] += news.tokens

    engine = llm.engine
    jobs = [job for p in PROMPTS for job in make_jobs(p, PARAMS, ())]
    samples, watcher = {}, Watcher()
    for one in engine.engines:
        one.watcher = watcher
    try:
        added = [engine.add(job) for job in jobs]
        while engine.has_work:
            samples |= {event.sequence: event.sample.token_ids for event in engine.step()}
    finally:
        for one in engine.engines:
            one.watcher = None
    assert [seen[s] for s in added] == [samples[s] for s in added]
    assert set(chunks) == {"1_1_2"}
    streamed = collections.defaultdict(list)
    for piece in llm.stream(PROMPTS[0], PARAMS):
        streamed[piece.sample] += piece.token_ids
    assert [streamed[i] for i in range(PARAMS.n)] == [samples[s] for s in added[: PARAMS.n]]


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
    again = {engine.add(s.job, s.progress()): s for s in engine.suspend()}
    while engine.has_work:
        samples += [(again.get(e.sequence, e.sequence), e.sample) for e in engine.step()]
    expected = plain().engine.generate([sequence.job for sequence, _ in samples])[0]
    assert [s.token_ids for _, s in samples] == [s.token_ids for s in expected]
    assert set(dict(samples)) == set(others)


def test_an_interrupted_call_leaves_nothing_behind_on_any_replica():
    engine = replicated().engine
    jobs = make_jobs(PROMPTS[0], PARAMS, ())

    def interrupt(finished, totals):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        engine.generate(jobs, interrupt)
    assert not engine.has_work and not any(e.outstanding for e in engine.engines)
    samples, _ = engine.generate(jobs)
    assert len(samples) == 3


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


@pytest.mark.slow  # replicas share work above, controllers choose in test_control
def test_each_replica_has_a_controller_of_its_own_and_tokens_do_not_care():
    control = ControlConfig(controller="bandit", strategies=("off", "1_1_2"))
    how = {"control": control, "engine": EngineConfig(prefill_chunk=16, stretch=1)}
    llm = LLM((CFG, *weights()), SpecConfig("1_1_2"), 1, 64, replicas=2, **how)
    first, second = (engine.controller for engine in llm.engine.engines)
    unused = first.state()
    assert first is not second and unused == second.state()
    assert tokens(llm.generate(PROMPTS, PARAMS)) == tokens(plain().generate(PROMPTS, PARAMS))
    assert unused not in (first.state(), second.state()), "both have seen rounds of their own"


def test_what_each_replica_has_of_its_own_cannot_be_set_on_all_of_them():
    engine = replicated().engine
    with pytest.raises(AttributeError, match="for one in engine.engines: one.controller"):
        engine.controller = engine.engines[0].controller
    with pytest.raises(AttributeError, match="each engine has one of its own"):
        engine.watcher = None


def test_too_many_replicas_and_a_mesh_beside_them_are_refused():
    with pytest.raises(ValueError, match="need 64, got 8"):
        LLM((CFG, *weights()), SpecConfig("2_1_3"), max_len=64, replicas=64)
    with pytest.raises(ValueError, match="give one of the two"):
        mesh = jax.sharding.Mesh(
            np.array(jax.devices()[:1]).reshape(1, 1, 1), ("data", "fsdp", "tp")
        )
        LLM((CFG, *weights()), SpecConfig("2_1_3"), max_len=64, replicas=2, mesh=mesh)


def test_a_step_returns_with_every_chunk_and_tells_who_has_nothing_to_do():
    engine = replicated().engine
    looks, chunks = [], 0
    engine.on_poll = lambda: looks.append(engine.drained)
    try:
        for job in make_jobs(PROMPTS[0], dataclasses.replace(PARAMS, n=1), ()):
            engine.add(job)
        assert engine.drained == []
        while engine.has_work:
            engine.step()
            chunks += 1
    finally:
        engine.on_poll = None
    assert len(looks) >= chunks > 1
    assert [1] in looks and looks[-1] == [0, 1] and [0] not in looks


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


def test_hosts_hear_what_a_chunk_took_when_the_next_is_there_and_wait_for_nothing(
    shared, monkeypatch
):
    (engine, _), measured, told, ahead = shared, [], [], []
    measure = engine._in_flight.wait_for

    def noted(chunk):
        result, seconds = measure(chunk)
        measured.append(seconds)
        ahead.append(len(engine._in_flight))
        return result, seconds

    monkeypatch.setattr(engine._in_flight, "wait_for", noted)
    monkeypatch.setattr(
        engine.controller, "observe", lambda seen: told.append((seen.seconds, len(measured)))
    )
    params = dataclasses.replace(PARAMS, max_tokens=50, n=2)
    jobs = make_jobs(PROMPTS[0], params, ())
    samples, _ = engine.generate(jobs)
    expected, _ = plain().engine.generate(jobs)
    assert [s.token_ids for s in samples] == [s.token_ids for s in expected]
    assert 1 in ahead, "the next chunk was enqueued by then"
    assert told[0][1] == 2
    engine.drain()
    np.testing.assert_array_equal([seconds for seconds, _ in told], measured)


def test_the_slowest_hosts_clock_counts_and_one_that_does_not_know_spoils_it(shared):
    engine, other_says = shared
    assert engine.runner.agreement.agree(2.0) == 2.0
    for theirs, agreed in ((5.0, 5.0), (1.0, 2.0), (float("nan"), float("nan"))):
        other_says(lambda row, theirs=theirs: row[-2:].put([0, 1], np.float64([theirs]).view("u4")))
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


def test_replicas_choose_programs_by_what_all_samples_ask_for():
    """In `invariant` mode the bits of a sample must not depend on who else its replica got."""
    engine = replicated().engine
    [narrow], [wide] = (
        make_jobs([1, 2], SamplingParams(seed=0, top_k=k, max_tokens=8), ()) for k in (0, 3)
    )
    for job in [narrow] * 5 + [wide]:
        engine.add(job)
    engine._feed()
    assert [e.outstanding for e in engine.engines] == [2, 2], "the wide one waits"
    assert all(e.unfinished.seen.top_k for e in engine.engines)
    engine.clear()
    engine.add(narrow)
    engine._feed()
    assert not any(e.unfinished.seen.top_k for e in engine.engines)
    engine.clear()
