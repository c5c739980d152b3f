"""Programs that are ready run in the place of those that are still being compiled."""

import functools
import logging
import random
from concurrent.futures import Future

import numpy as np
import pytest
from engines import ARMS, MAX_LEN, AtRandom, plain, random_jobs
from hypothesis import given, settings
from hypothesis import strategies as st
from shared import CFG, weights

from specjax import LLM, SamplingParams, SpecConfig
from specjax.control import ControlConfig
from specjax.decode.options import Features
from specjax.engine.compare import first_difference
from specjax.engine.engine import Engine
from specjax.engine.request import make_jobs
from specjax.engine.settings import EngineConfig
from specjax.parallel.sharding import MeshConfig, make_mesh

ARM = "3_1_4"
BOTH = (Features(), Features.all())


class Held:
    """In place of threads that compile: a program is ready, or fails, when a test says so."""

    def __init__(self):
        self.waiting = []

    def submit(self, build):
        self.waiting.append((Future(), build))
        return self.waiting[-1][0]

    def ask(self, future=None):
        pass

    cancel = ask

    def run(self, future):
        self.finish([held for held, _ in self.waiting].index(future))

    def finish(self, index):
        future, build = self.waiting.pop(index)
        try:
            future.set_result(build())
        except RuntimeError as error:
            future.set_exception(error)


class Watch:
    """Notes the chunks of an engine."""

    def __init__(self):
        self.seen = []

    def chunk(self, *facts):
        self.seen.append(facts)

    def news(self, sample, news):
        pass


def make_engine(arms, mesh=None, invariant=False, **config) -> Engine:
    how = EngineConfig(page_size=16, chunk_tokens=8, stretch=2, prefill_chunk=64, **config)
    control = None if len(arms) == 1 else ControlConfig(controller="bandit", strategies=arms)
    spec = SpecConfig(arms[-1], invariant=invariant)
    engine = Engine(CFG, spec, 4, MAX_LEN, config=how, control=control, mesh=mesh)
    engine.set_params(*weights())
    return engine


@functools.cache
def programs(arms, mesh=None, invariant=False) -> dict:
    """All programs of such engines, compiled once."""
    engine = make_engine(arms, mesh, invariant)
    engine.warm_up(BOTH)
    return engine.runner.executables.by_key


def held(arms, mesh=None, invariant=False, fails=lambda key: False, **config) -> Engine:
    """An engine that has its first programs; `background.finish` gives it the others."""
    engine, known = make_engine(arms, mesh, invariant, **config), programs(arms, mesh, invariant)
    store = engine.runner.executables

    def build(key, lower, donate):
        if fails(key):
            raise RuntimeError("out of memory")
        return known[key]

    store.build, store.background = build, Held()
    engine.warm_up(BOTH, background=True)
    assert store.pending
    if len(arms) > 1:  # choose from the beginning, without costs
        engine.to_measure, engine.warm_rows = None, engine.batch
        engine.controller = AtRandom(arms=arms)
    return engine


def stream(engine: Engine, rng: random.Random, count: int, share: float):
    """Random requests that arrive while random programs become ready; yields samples, in bulk.

    Returns:
      the samples by job, and the numbers of rounds that ran in their own programs and in others.
    """
    engine.watcher = watch = Watch()
    waiting = engine.runner.executables.background.waiting
    jobs, added, samples = random_jobs(np.random.default_rng(rng.randrange(1 << 30)), count), 0, {}
    while added < len(jobs) or engine.has_work:
        for job in jobs[added : added + rng.randrange(3)]:
            engine.add(job)
            added += 1
        if waiting and rng.random() < share:
            engine.runner.executables.background.finish(rng.randrange(len(waiting)))
        samples |= {id(event.sequence.job): event.sample for event in engine.step()}
    assert len(samples) == len(jobs)
    rounds = [sum(n for *_, n, stood in watch.seen if stood == s) for s in (False, True)]
    return [(job, samples[id(job)]) for job in jobs], rounds


def check(engine: Engine, samples) -> None:
    """Tokens are those of plain decoding, but where rounding decides between two that tie."""
    expected, _ = plain().generate([job for job, _ in samples])
    for (job, sample), one in zip(samples, expected, strict=True):
        assert sample.finish_reason == one.finish_reason
        if sample.token_ids != one.token_ids:
            assert first_difference(engine.runner, job, one.token_ids, sample.token_ids).explained


@settings(max_examples=8)
@given(st.integers(0, 2**32), st.sampled_from([0.05, 0.3]), st.sampled_from([0, 0.4]))
def test_tokens_are_equal_whichever_programs_are_ready(seed, share, some_fail):
    rng = random.Random(seed)

    def fails(key):
        return key not in first and random.Random(f"{seed} {key}").random() < some_fail

    first = set(held(ARMS).runner.executables.by_key)
    engine = held(ARMS, fails=fails)
    samples, (_, others) = stream(engine, rng, 12, share)
    check(engine, samples)
    assert others


def test_with_invariant_the_one_program_is_waited_for_and_bits_are_equal():
    engine = held((ARM,), invariant=True)
    samples, (_, others) = stream(engine, random.Random(0), 8, 0.3)
    assert not others
    ready = make_engine((ARM,), invariant=True)
    ready.runner.executables.by_key = dict(programs((ARM,), None, True))
    again, _ = ready.generate([job for job, _ in samples])
    for (_, sample), one in zip(samples, again, strict=True):
        assert (sample.token_ids, sample.logprobs) == (one.token_ids, one.logprobs)


@pytest.mark.parametrize(
    ("asked", "config", "stands"),
    [
        ({}, {}, True),
        ({"logprobs": 1}, {}, False),
        ({"transformed_logprobs": True}, {}, False),
        ({}, {"stand_in": False}, False),
    ],
)
def test_one_strategy_waits_for_its_programs_where_last_bits_are_asked_for(asked, config, stands):
    engine = held((ARM,), **config)
    engine.watcher = Watch()
    engine.generate(make_jobs([1, 2, 3], SamplingParams(max_tokens=8, seed=0, **asked), ()))
    assert {stood for *_, stood in engine.watcher.seen} == {stands}


def test_prompts_are_read_by_what_is_ready_and_later_by_their_own_programs():
    engine = held(ARMS)
    store, reads = engine.runner.executables, []
    prefill = engine.runner.prefill
    engine.runner.prefill = lambda piece: reads.append(piece.tokens.shape) or prefill(piece)
    prompt = list(range(1, 21))
    [job] = make_jobs(prompt, SamplingParams(max_tokens=4, seed=0), ())
    [sample], _ = engine.generate([job])
    assert [width - engine.runner.tail for _, width in reads] == [64]
    while store.background.waiting:
        store.background.finish(0)
    reads.clear()
    [again], _ = engine.generate([job])
    assert [width - engine.runner.tail for _, width in reads] == [32]
    assert again.token_ids == sample.token_ids


def test_an_error_of_a_background_program_names_it_and_loses_nothing(caplog):
    first = set(held(ARMS).runner.executables.by_key)
    engine = held(ARMS, fails=lambda key: key not in first and key[0] == "chunk")
    with caplog.at_level(logging.WARNING):
        samples, (own, _) = stream(engine, random.Random(0), 6, 1.0)
    check(engine, samples)
    assert "strategy 3_1_4 for a batch of 1 could not be compiled" in caplog.text
    assert "out of memory" in caplog.text
    assert engine.compiling or engine.runner.executables.failed


@pytest.mark.slow
def test_tokens_are_equal_on_eight_devices():
    mesh = make_mesh(MeshConfig(data=4, tp=2))
    engine = held(("off", ARM), mesh=mesh)
    samples, (_, others) = stream(engine, random.Random(1), 8, 0.3)
    check(engine, samples)
    assert others


def test_an_llm_generates_while_threads_compile():
    llm = LLM((CFG, *weights()), SpecConfig(ARM), max_batch=4, max_len=MAX_LEN)
    start_up = llm.warm_up(background=True)
    assert 0 < start_up.programs < 5 and llm.engine.compiling
    params = SamplingParams(max_tokens=8, seed=0, n=3)
    [out] = llm.generate([[1, 2, 3]], params)
    alone = LLM((CFG, *weights()), None, max_batch=4, max_len=MAX_LEN)
    [expected] = alone.generate([[1, 2, 3]], params)
    assert [s.token_ids for s in out.samples] == [s.token_ids for s in expected.samples]
    built = llm.engine.runner.compilations
    llm.warm_up()  # waits for all of them, and compiles none again
    assert not llm.engine.compiling and llm.engine.runner.compilations > built


def test_a_sample_that_waits_for_a_program_which_fails_runs_in_another():
    first = set(held((ARM,)).runner.executables.by_key)
    engine = held((ARM,), fails=lambda key: key not in first)
    jobs = make_jobs([1, 2, 3], SamplingParams(max_tokens=8, seed=0, logprobs=1), ())
    samples, _ = engine.generate(jobs)
    check(engine, list(zip(jobs, samples, strict=True)))
