"""Continuous batching: what is enqueued when, and what becomes of samples that do not just end."""

import collections
import dataclasses
import gc
import weakref
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from engines import LONG, ONE, VOCAB, engine_of, jobs_of, plain, random_jobs, tokens_of, warm
from shared import compilations_of
from tiny import tiny_config

from specjax import RunConfig, SpecConfig
from specjax.engine.engine import Engine
from specjax.engine.runner import Runner
from specjax.engine.settings import (
    EngineConfig,
)
from specjax.models.families.dense import dense_config


@pytest.fixture
def chunks(monkeypatch):
    """What an engine enqueues and reads, in order: (kind, detail)."""

    def watch(engine):
        seen, runner = [], engine.runner
        chunk, prefill, read = runner.chunk, runner.prefill, engine._postprocess

        def enqueue(strategy, features, row_map, until):
            rows = row_map.active[: len(row_map.slots) - runner.extra_slots]
            seen.append(("chunk", (strategy, len(rows), int(rows.sum()))))
            return chunk(strategy, features, row_map, until)

        def reads(piece):
            seen.append(("prefill", piece.tokens.shape))
            return prefill(piece)

        def postprocess(done):
            seen.append(("read", done.strategy))
            return read(done)

        monkeypatch.setattr(runner, "chunk", enqueue)
        monkeypatch.setattr(runner, "prefill", reads)
        monkeypatch.setattr(engine, "_postprocess", postprocess)
        return seen

    return watch


@pytest.mark.slow
def test_the_batch_shrinks_with_what_runs_and_slots_are_refilled(chunks):
    engine = warm()
    seen = chunks(engine)
    lengths = [4] * 3 + [90] * 3 + [4] * 3
    jobs = [
        job
        for i, count in enumerate(lengths)
        for job in jobs_of([i + 1, 2], dataclasses.replace(ONE, max_tokens=count), i)
    ]
    samples, _ = engine.generate(jobs)
    assert [s.token_ids for s in samples] == tokens_of(jobs)
    batches = [detail[1:] for kind, detail in seen if kind == "chunk"]
    assert batches[0] == (4, 4), "as many as there are slots"
    assert (4, 3) in batches, "a tail of three runs as a batch of four"
    assert all(bucket == 1 << (running - 1).bit_length() for bucket, running in batches)


def test_the_next_chunk_is_enqueued_before_the_last_one_is_read(chunks):
    engine = warm()
    seen = chunks(engine)
    engine.generate(jobs_of([3, 4], ONE))
    kinds = [kind for kind, _ in seen if kind != "prefill"]
    assert kinds[:4] == ["chunk", "chunk", "read", "chunk"]
    in_flight = np.cumsum([1 if kind == "chunk" else -1 for kind in kinds])
    assert in_flight.max() == 2


def test_rows_are_taken_over_within_a_chunk():
    engine, ran = engine_of(None, batch=1, stretch=8), []
    engine.watcher = SimpleNamespace(news=lambda *_: None, chunk=lambda *args: ran.append(args[2]))
    jobs = [job for i in range(6) for job in jobs_of([i + 1, 2], ONE, i)]
    samples, _ = engine.generate(jobs)
    assert [s.token_ids for s in samples] == tokens_of(jobs)
    assert max(ran) >= 4 * ONE.max_tokens and sum(ran) == 6 * ONE.max_tokens


def test_an_8b_model_with_one_row_of_16k_tokens_keeps_no_slots_of_full_length():
    cfg = dense_config(
        num_layers=36, num_heads=32, num_kv_heads=8, head_dim=128, hidden_size=4096,
        intermediate_size=12288, vocab_size=1024, max_position=40_960, mtp_num_layers=1,
        run=RunConfig(param_dtype="bfloat16", compute_dtype="bfloat16"),
    )  # fmt: skip
    runner = Runner(cfg, SpecConfig("4_1_5"), batch=1, max_len=16_600)
    assert runner.pages * runner.page_bytes < 5.5e9
    assert 10 * 16_600 / 128 * runner.page_bytes > 24.5e9, "ten slots of full length"


def test_a_prompt_is_read_once_for_all_its_samples(chunks):
    engine = warm()
    seen = chunks(engine)
    jobs = jobs_of(list(range(20, 60)), dataclasses.replace(ONE, n=7, max_tokens=6))
    samples, _ = engine.generate(jobs)
    assert [s.token_ids for s in samples] == tokens_of(jobs)
    pieces = [shape for kind, shape in seen if kind == "prefill"]
    assert [rows for rows, _ in pieces] == [1] * 3, "39 positions in pieces of 16"


def test_a_long_prompt_is_read_in_pieces_between_the_chunks_of_those_that_run(chunks):
    engine = warm()
    engine.add(jobs_of([5, 6], dataclasses.replace(ONE, max_tokens=60))[0])
    engine.step()
    seen = chunks(engine)
    [job] = jobs_of(list(range(1, 61)), dataclasses.replace(ONE, max_tokens=4))
    sequence, found = engine.add(job), {}
    while engine.has_work:
        found |= {event.sequence: event.sample for event in engine.step()}
    kinds = [kind for kind, _ in seen if kind != "read"]
    assert kinds.count("prefill") == 4
    assert "prefill prefill" not in " ".join(kinds), "no sample waits for more than one piece"
    assert found[sequence].token_ids == tokens_of([job])[0]


def test_what_was_warmed_up_compiles_nothing_whatever_comes():
    """Prompts that come together are read together, in pieces of a few sizes."""
    engine = engine_of(batch=2, page_size=16, prefill_chunk=64)
    engine.warm_up()
    rng = np.random.default_rng(3)
    built = engine.runner.compilations

    def work():
        for count in (1, 3, 20):
            jobs = [j for j in random_jobs(rng, count) if j.params.temperature > 0]
            engine.generate(jobs)

    assert compilations_of(work) == 0 and engine.runner.compilations == built


def test_a_deleted_engine_gives_back_its_memory_without_a_garbage_collection():
    engine = Engine(tiny_config(), None, batch=1, max_len=16)
    runner = weakref.ref(engine.runner)
    gc.disable()
    try:
        del engine
        assert runner() is None
    finally:
        gc.enable()


@pytest.mark.slow
def test_pages_and_host_memory_are_flat_over_2000_requests():
    """Each of two samples, in calls of 50, some of them aborted."""
    engine = warm()
    rng = np.random.default_rng(4)
    params = dataclasses.replace(ONE, max_tokens=3, n=2)

    def requests(count):
        for i in range(count):
            for job in jobs_of(rng.integers(0, VOCAB, 3).tolist(), params, i):
                sequence = engine.add(job)
            if i % 10 == 0:
                engine.abort(sequence)
        while engine.has_work:
            engine.step()

    def held():
        gc.collect()
        return len(gc.get_objects()), sum(x.nbytes for x in jax.live_arrays())

    requests(50)
    objects, device = held()
    for _ in range(40):
        requests(50)
    after, device_after = held()
    assert engine.scheduler.pool.used == 0 and device_after == device
    assert after - objects < 200, "objects left behind by 4,000 samples"
    assert not engine.outstanding and not engine._in_flight


def test_one_page_per_sequence_is_the_contiguous_special_case():
    engine = engine_of(None, batch=2, page_size=0)
    assert engine.runner.page_size == engine.max_len
    prompts = [list(range(1, n)) for n in (3, 30, 7)]
    jobs = [j for i, p in enumerate(prompts) for j in jobs_of(p, dataclasses.replace(ONE, n=2), i)]
    samples, _ = engine.generate(jobs)
    assert [s.token_ids for s in samples] == tokens_of(jobs)
    assert engine.scheduler.pool.used == 0


def test_pieces_of_prompts_need_not_fit_the_pages():
    """Pieces of 48 positions, the last of them 16 or 32 wide, in pages of 32."""
    engine = engine_of(None, batch=1, page_size=32, prefill_chunk=48)
    few = dataclasses.replace(ONE, max_tokens=6)
    jobs = [jobs_of(list(range(1, 1 + n % 60)) + [5] * (n // 60 * 60), few, n)[0] for n in TO_READ]
    samples, _ = engine.generate(jobs)
    assert [s.token_ids for s in samples] == tokens_of(jobs)


TO_READ = (47, 49, 58, 66, 80, 90)


def order_of_ends(engine) -> list[int]:
    """Which of three prompts ends first, in an engine that runs one sample at a time and has seen
    that the samples of the second are long."""
    jobs = [jobs_of([i], dataclasses.replace(ONE, max_tokens=n), i)[0] for i, n in LENGTHS]
    engine.generate(jobs)
    for job in jobs:
        engine.add(job)
    ended = []
    while engine.has_work:
        ended += [event.sequence.job.request for event in engine.step()]
    return ended


LENGTHS = [(1, 3), (2, 20), (3, 6)]


def test_prompts_whose_samples_were_long_start_first_if_asked_for():
    first, longest = (engine_of(None, batch=1, order=o) for o in ("fifo", "longest_first"))
    longest.runner.executables.by_key = first.runner.executables.by_key
    assert order_of_ends(first) == [1, 2, 3]
    assert order_of_ends(longest) == [2, 3, 1]


# --- abort, interruption ------------------------------------------------------------------------


def test_a_request_that_can_never_fit_is_refused_with_what_to_do():
    probe = engine_of(page_size=16)
    engine = engine_of(page_size=16, cache_bytes=4 * probe.runner.page_bytes)
    with pytest.raises(ValueError, match="may take 7 cache pages.*there are 3; raise cache_bytes"):
        engine.generate(jobs_of([1], dataclasses.replace(ONE, max_tokens=90)))
    with pytest.raises(ValueError, match="less than two pages"):
        engine_of(page_size=16, cache_bytes=10)
    assert engine.runner.pages == 4, "the budget holds, spare page and all"
    with pytest.raises(ValueError, match="page_size must be positive"):
        EngineConfig(page_size=-5)
    assert not engine.has_work


def test_an_aborted_request_leaves_what_it_has_and_frees_its_pages():
    engine = warm()
    first, second = (jobs_of([i, 2], ONE, i)[0] for i in (1, 2))
    added = [engine.add(first), engine.add(second)]
    for _ in range(3):
        engine.step()
    used = engine.scheduler.pool.used
    cut = engine.abort(added[0])
    assert cut.finish_reason == "abort" and engine.scheduler.pool.used < used
    assert engine.abort(added[0]) is None
    events = []
    while engine.has_work:
        events += engine.step()
    assert [e.sequence for e in events] == added[1:]
    whole = tokens_of([first, second])
    assert 0 < len(cut.token_ids) < len(whole[0])
    assert cut.token_ids == whole[0][: len(cut.token_ids)]
    assert events[0].sample.token_ids == whole[1]


def test_an_interrupted_call_leaves_nothing_behind():
    engine = warm()

    def interrupt(finished, totals):
        raise KeyboardInterrupt

    jobs = jobs_of([1, 2, 3], dataclasses.replace(ONE, n=3))
    with pytest.raises(KeyboardInterrupt):
        engine.generate(jobs, interrupt)
    assert not engine.has_work and engine.scheduler.pool.used == 0
    samples, _ = engine.generate(jobs)
    assert [s.token_ids for s in samples] == tokens_of(jobs)


def test_an_engine_whose_program_failed_starts_anew():
    """Its buffers were donated, and are gone."""
    engine = engine_of(None, batch=1)
    jobs = jobs_of([3, 4], ONE)
    engine.generate(jobs)

    def fail(*args):
        jax.tree.leaves(engine.runner.state)[0].delete()
        raise RuntimeError("the device is lost")

    run, engine.runner.chunk = engine.runner.chunk, fail
    with pytest.raises(RuntimeError, match="is lost"):
        engine.generate(jobs)
    engine.runner.chunk = run
    samples, _ = engine.generate(jobs)
    assert [s.token_ids for s in samples] == tokens_of(jobs)


def test_generate_is_refused_while_added_samples_run():
    engine = warm()
    engine.add(jobs_of([1], ONE)[0])
    engine.step()
    with pytest.raises(RuntimeError, match="warm_up would overwrite the caches"):
        engine.warm_up()
    with pytest.raises(RuntimeError, match="samples that were added are not finished"):
        engine.generate(jobs_of([2], ONE))
    assert len(engine.suspend()) == 1 and not engine.has_work


def test_what_is_suspended_continues_with_the_same_tokens_and_logprobs():
    engine = warm()
    jobs = jobs_of([4, 5, 6], dataclasses.replace(ONE, n=3))
    for job in jobs:
        engine.add(job)
    for _ in range(4):
        engine.step()
    suspended = engine.suspend()
    assert all(0 < len(s.tokens) < 40 for s in suspended)
    added = [engine.add(s.job, s.output()) for s in suspended]
    found = {}
    while engine.has_work:
        found |= {event.sequence: event.sample for event in engine.step()}
    whole, _ = plain().generate([s.job for s in suspended])
    for sequence, expected in zip(added, whole, strict=True):
        assert found[sequence].token_ids == expected.token_ids
        np.testing.assert_allclose(found[sequence].logprobs, expected.logprobs, atol=1e-4)


@pytest.mark.parametrize("modules", [1, 3])
def test_one_slot_has_room_for_a_sample_of_full_length(modules):
    """Heads of several modules write positions before the root anew, in pages of their own."""
    engine = Engine(tiny_config(VOCAB, mtp=modules), SpecConfig("4_1_5"), 1, 64)
    engine.make(jobs_of([1, 2, 3], dataclasses.replace(ONE, max_tokens=None))[0])


def test_news_add_up_to_the_sample(monkeypatch):
    """Whoever watches an engine hears of every token once, as chunks come in."""
    engine, everything, samples = warm(), collections.defaultdict(list), {}
    told = SimpleNamespace(news=lambda s, news: everything[s].append(news), chunk=lambda *_: None)
    monkeypatch.setattr(engine, "watcher", told)
    jobs = [job for i in range(3) for job in jobs_of([1, 2 + i], LONG)]
    jobs.append(jobs_of([5], dataclasses.replace(LONG, speculative=False))[0])
    added = [engine.add(job) for job in jobs]
    while engine.has_work:
        samples |= {event.sequence: event.sample for event in engine.step()}
    for sequence in added:
        heard, sample = everything[sequence], samples[sequence]
        assert [t for news in heard for t in news.tokens] == sample.token_ids
        assert [v for news in heard for v in news.logprobs] == sample.logprobs
        assert len(heard) > 1 and all(sum(n.rounds) == len(n.tokens) for n in heard)
        rounds = np.bincount([c for n in heard for c in n.rounds], minlength=5)
        assert rounds.tolist() == list(sample.stats.histogram)
        assert sum(len(n.rounds) * n.rows for n in heard) == sample.stats.drafted
    assert {news.steps for news in everything[added[-1]]} == {0}
