"""Continuous batching: what is enqueued when, and what becomes of samples that do not just end."""

import dataclasses
import gc
import tracemalloc
import weakref
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from engines import ONE, VOCAB, engine_of, jobs_of, plain, random_jobs, tokens_of, warm
from shared import compilations_of, weights
from tiny import tiny_config

from specjax import RunConfig, SpecConfig
from specjax.decode.chunk import NEVER
from specjax.engine import runner as module
from specjax.engine.chunks import choose_program, until
from specjax.engine.engine import Engine
from specjax.engine.inputs import piece_of, row_map_of
from specjax.engine.pages import NULL_PAGE, pages_for
from specjax.engine.replicas import Replicas
from specjax.engine.runner import Runner
from specjax.engine.sequence import Progress
from specjax.engine.settings import (
    EngineConfig,
    bucket_base,
    end_of_pieces,
    piece_widths,
    powers,
)
from specjax.engine.unfinished import Unfinished
from specjax.models.families.dense import dense_config


@pytest.fixture
def chunks(monkeypatch):
    """What an engine enqueues and reads, in order: (kind, detail)."""

    def watch(engine):
        seen, runner = [], engine.runner
        chunk, prefill, read = runner.chunk, runner.prefill, engine._postprocess

        def enqueue(strategy, features, row_map, until, run):
            rows = row_map.active[: len(row_map.slots) - runner.extra_slots]
            seen.append(("chunk", (strategy, len(rows), int(rows.sum()))))
            return chunk(strategy, features, row_map, until, run)

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


def test_the_batch_shrinks_with_what_runs_and_slots_are_refilled(chunks):
    engine = warm()
    seen = chunks(engine)
    lengths = [4] * 6 + [80] * 3 + [4] * 6
    jobs = [
        job
        for i, count in enumerate(lengths)
        for job in jobs_of([i + 1, 2], dataclasses.replace(ONE, max_tokens=count), i)
    ]
    samples, _ = engine.generate(jobs)
    assert [s.token_ids for s in samples] == tokens_of(jobs)
    batches = [detail[1:] for kind, detail in seen if kind == "chunk"]
    assert batches[0] == (8, 8), "as many as there are slots"
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


def test_after_a_chunk_that_ended_early_the_next_one_waits_for_what_it_brought(chunks):
    """It would be enqueued for those that ran before, too few of whom still run, and do nothing."""
    engine = warm()
    seen = chunks(engine)
    lengths = [3, 3, 3, 3, 40, 40, 40, 40]
    jobs = [
        jobs_of([i + 1, 2], dataclasses.replace(ONE, max_tokens=count), i)[0]
        for i, count in enumerate(lengths)
    ]
    engine.generate(jobs)
    kinds = [kind for kind, _ in seen if kind != "prefill"]
    assert kinds[:6] == ["chunk", "chunk", "read", "read", "chunk", "read"]
    seen.clear()
    engine.generate(jobs[-1:])
    kinds = [kind for kind, _ in seen if kind not in ("prefill", "place")]
    assert kinds[:3] == ["chunk", "chunk", "read"], "later work is enqueued ahead again"


def test_a_chunk_that_is_enqueued_ahead_gives_the_rows_of_those_that_end_to_others():
    """With one slot the chunk behind a sample's last one would otherwise run no sample."""
    engine, ran = engine_of(None, batch=1), []
    told = SimpleNamespace(news=lambda *_: None, chunk=lambda *args: ran.append(args[-1]))
    engine.watcher = told
    jobs = [job for i in range(6) for job in jobs_of([i + 1, 2], ONE, i)]
    ends = [
        dataclasses.replace(job, stop_ids=(tokens[11],))  # where the host does not expect it
        for job, tokens in zip(jobs, tokens_of(jobs), strict=True)
    ]
    samples, _ = engine.generate(ends)
    assert [s.token_ids for s in samples] == tokens_of(ends)
    assert all(ran[:-1]), "but for the last sample, which none follows"


def test_rows_are_taken_over_within_a_chunk():
    engine, ran = engine_of(None, batch=1, stretch=8), []
    engine.watcher = SimpleNamespace(news=lambda *_: None, chunk=lambda *args: ran.append(args[-1]))
    jobs = [job for i in range(6) for job in jobs_of([i + 1, 2], ONE, i)]
    samples, _ = engine.generate(jobs)
    assert [s.token_ids for s in samples] == tokens_of(jobs)
    assert max(ran) >= 4 * ONE.max_tokens and sum(ran) == 6 * ONE.max_tokens


def test_what_a_chunk_tells_of_one_that_takes_over_is_what_it_tells_of_one_alone():
    """Whatever is told by round or by token, with counts of its own for penalties."""
    asks = dataclasses.replace(
        ONE, logprobs=2, transformed_logprobs=True, frequency_penalty=0.5, max_tokens=24
    )
    jobs = [job for i in range(5) for job in jobs_of([i + 1, 2, 3], asks, i)]
    engine = engine_of(batch=1, stretch=8)
    together, _ = engine.generate(jobs)
    for job, sample in zip(jobs, together, strict=True):
        [alone], _ = engine.generate([job])
        assert sample.token_ids == alone.token_ids
        assert sample.stats == alone.stats
        for name in ("logprobs", "transformed_logprobs"):
            np.testing.assert_allclose(getattr(sample, name), getattr(alone, name), atol=1e-5)
        for name in ("top_logprobs", "top_transformed_logprobs"):
            for mine, theirs in zip(getattr(sample, name), getattr(alone, name), strict=True):
                assert mine == pytest.approx(theirs, abs=1e-5)


def test_the_host_looks_sooner_where_it_finds_stop_strings():
    engine, rounds = engine_of(None, batch=1, stretch=8), []
    run = engine.runner.chunk
    engine.runner.chunk = lambda *args: rounds.append(int(args[3].rounds)) or run(*args)
    with_stop = dataclasses.replace(ONE, stop=("nowhere",))
    for params, most in ((ONE, 8 * 32), (with_stop, 32)):
        rounds.clear()
        first, *others = (jobs_of([i + 1, 2], ONE, i)[0] for i in range(4))
        others = [
            dataclasses.replace(job, params=params, decode=lambda ids, *_: "") for job in others
        ]
        engine.generate([first, *others])
        assert max(rounds[1:]) == most, "the first has the row, the others wait"


def test_longer_chunks_preempt_nobody_whom_shorter_ones_would_not():
    found = []
    for stretch in (1, 8):
        pages = engine_of(None, batch=4, page_size=16).runner.page_bytes * 22
        engine = engine_of(None, batch=4, page_size=16, stretch=stretch, cache_bytes=pages)
        lengths = [20, 20, 80, 80, 80, 20]
        jobs = [
            jobs_of([i + 1, 2], dataclasses.replace(ONE, max_tokens=n), i)[0]
            for i, n in enumerate(lengths)
        ]
        samples, _ = engine.generate(jobs)
        assert [s.token_ids for s in samples] == tokens_of(jobs)
        found.append(engine.preemptions)
    assert found[1] <= found[0]


@pytest.mark.parametrize(
    ("alive", "waiting", "waits", "leave_at", "ended"),
    [
        (8, 8, True, 0, 4),  # half of those that wait, for each of two chunks
        (64, 8, True, 0, 10),  # a sixth of the rows
        (1, 0, True, 0, NEVER),
        (8, 0, True, 7, NEVER),  # who waits has no place yet: at the first end
        (8, 8, False, 4, NEVER),  # none waits: until a smaller batch is enough
        (5, 0, False, 4, NEVER),
    ],
)
def test_a_chunk_ends_when_others_are_to_come_or_a_smaller_batch_is_enough(
    alive, waiting, waits, leave_at, ended
):
    assert until(9, alive, waiting, waits, 4) == (9, leave_at, ended)


def test_gpus_have_half_as_many_batch_sizes_and_lengths_of_prompts():
    assert powers(64, bucket_base("cpu")) == [1, 2, 4, 8, 16, 32, 64]
    assert powers(64, bucket_base("gpu")) == [1, 4, 16, 64]
    assert powers(100, bucket_base("cuda")) == [1, 4, 16, 64, 100]
    how = EngineConfig(prefill_chunk=512)
    assert piece_widths(how, 4096, None) == [16, 32, 64, 128, 256, 512]
    assert piece_widths(how, 4096, None, "gpu") == [32, 128, 512]
    assert piece_widths(how, 4096, [60], "gpu") == [64, 512]
    assert piece_widths(how, 40, None, "gpu") == [32, 48]


@pytest.mark.parametrize("platform, size", [("gpu", 128), ("gpu", 64), ("cpu", 128), ("cpu", 16)])
def test_tables_hold_the_padding_of_every_piece(platform, size):
    """Of GPUs, a prompt of 650 tokens is read as 512 and then 512 positions, not 256."""
    for max_len in (*range(32, 1100), *range(1100, 5000, 37)):
        widths = piece_widths(EngineConfig(), max_len, None, platform)
        stride, wanted = widths[-1], 0
        for to_read in {max_len - 1, max_len - 2, max(max_len - stride, 1), max_len // 2}:
            read = (to_read - 1) // stride * stride
            wanted = max(wanted, read + next(w for w in widths if w >= to_read - read))
        table = max(pages_for(max_len, size) + 1, pages_for(end_of_pieces(max_len, widths), size))
        assert wanted <= table * size
        if (platform, size) == ("cpu", 128):
            assert table == pages_for(max_len, size) + 1, "programs for CPU changed"


def test_a_piece_that_goes_on_past_its_table_is_refused():
    runner = SimpleNamespace(tail=0, table_width=7, page_size=128, prompts=3)
    prompt = SimpleNamespace(tokens=[1] * 650, read=512, row=0, pages=[1, 2, 3, 4, 5, 6])
    with pytest.raises(ValueError, match="a piece of 512 positions that begins at 512"):
        piece_of([prompt], 1, 512, runner)
    runner.table_width = 8
    assert piece_of([prompt], 1, 512, runner).table.tolist() == [[1, 2, 3, 4, 5, 6, 0, 0]]


@pytest.mark.slow
def test_a_batch_between_two_sizes_runs_in_the_larger_one_until_the_smaller_is_enough(chunks):
    engine = engine_of(batch=16, page_size=16, prefill_chunk=16)
    engine.buckets[:] = powers(16, 4)
    engine.warm_up()
    seen = chunks(engine)
    lengths = [4, 4, 12, 24, 36, *[60] * 3]
    jobs = [
        job
        for i, count in enumerate(lengths)
        for job in jobs_of([i + 1, 2], dataclasses.replace(ONE, max_tokens=count), i)
    ]
    samples, _ = engine.generate(jobs)
    assert [s.token_ids for s in samples] == tokens_of(jobs)
    batches = [detail[1:] for kind, detail in seen if kind == "chunk"]
    assert {bucket for bucket, _ in batches} >= {16, 4}
    assert all(bucket == next(b for b in (1, 4, 16) if b >= running) for bucket, running in batches)


@pytest.mark.slow
def test_samples_that_wait_have_a_bounded_share_of_the_pages(monkeypatch):
    whole = engine_of(batch=2, page_size=16, prefill_chunk=16).runner
    assert whole.pages == 2 + 6 * (2 + 9), "positions up to the share are there for all slots"
    monkeypatch.setattr(module, "WAITING_TOKENS", 16)
    engine = engine_of(batch=2, page_size=16, prefill_chunk=16, chunk_tokens=8)
    assert engine.runner.pages == 2 + 6 * 2 + 9
    lengths = [80, 76, 80, 78, 3, 80, 70, 1, 80, 80, 20, 76]
    jobs = [
        job
        for i, count in enumerate(lengths)
        for job in jobs_of(
            [i + 1] * (1 + 7 * (i % 3 == 2)), dataclasses.replace(ONE, max_tokens=count), i
        )
    ]
    samples, _ = engine.generate(jobs)
    assert engine.preemptions, "pages ran out"
    assert [s.token_ids for s in samples] == tokens_of(jobs)
    assert engine.scheduler.pool.used == 0


def test_an_8b_model_with_one_row_of_16k_tokens_keeps_no_slots_of_full_length():
    cfg = dense_config(
        num_layers=36, num_heads=32, num_kv_heads=8, head_dim=128, hidden_size=4096,
        intermediate_size=12288, vocab_size=1024, max_position=40_960, mtp_num_layers=1,
        run=RunConfig(param_dtype="bfloat16", compute_dtype="bfloat16"),
    )  # fmt: skip
    runner = Runner(cfg, SpecConfig("4_1_5"), batch=1, max_len=16_600)
    assert runner.pages * runner.page_bytes < 5.5e9
    assert 10 * 16_600 / 128 * runner.page_bytes > 24.5e9, "ten slots of full length"


def test_a_row_map_has_rows_then_those_that_wait_and_pages_only_of_those_that_run():
    runner = engine_of(None, batch=4).runner
    table = 1 + np.arange(runner.slots * runner.table_width).reshape(runner.slots, -1)
    slot_of = [SimpleNamespace(slot=slot) for slot in range(runner.slots)]
    found = row_map_of([slot_of[2]], 4, [slot_of[5], slot_of[1]], [3], table, runner)
    spare = runner.slots - 1
    wanted = [2, 3, spare, spare, 5, 1] + [spare] * (runner.extra_slots - 2)
    assert found.slots.tolist() == wanted
    assert np.flatnonzero(found.active).tolist() == [0, 4, 5]
    np.testing.assert_array_equal(found.table[found.active], table[[2, 5, 1]])
    assert (found.table[~found.active] == NULL_PAGE).all()


def test_slots_are_refilled_though_those_that_run_hold_most_pages(chunks):
    """They have them already: what each may still need is little, and nothing past its end."""
    engine = engine_of(None, batch=16, page_size=64)
    seen = chunks(engine)
    jobs = [
        jobs_of([i + 1, 2], dataclasses.replace(ONE, max_tokens=66 + 3 * (i % 8)), i)[0]
        for i in range(48)
    ]
    engine.generate(jobs)
    running = [detail[2] for kind, detail in seen if kind == "chunk"]
    assert min(running[: len(running) // 2]) == 16, running


def test_a_prompt_is_read_once_for_all_its_samples(chunks):
    engine = warm()
    seen = chunks(engine)
    jobs = jobs_of(list(range(20, 60)), dataclasses.replace(ONE, n=7, max_tokens=6))
    samples, _ = engine.generate(jobs)
    assert [s.token_ids for s in samples] == tokens_of(jobs)
    pieces = [shape for kind, shape in seen if kind == "prefill"]
    assert [rows for rows, _ in pieces] == [1] * 3, "39 positions in pieces of 16"


def test_samples_that_run_share_the_full_pages_of_their_prompt():
    engine = warm()
    for job in jobs_of(list(range(40)), dataclasses.replace(ONE, n=3)):
        engine.add(job)
    while len(engine.scheduler.running) < 3:
        engine.step()
    a, b, c = (s.pages for s in engine.scheduler.running.values())
    shared = 39 // engine.runner.page_size  # the last token is read as the root
    assert shared == 2 and a[:shared] == b[:shared] == c[:shared]
    assert not set(a[shared:]) & set(b[shared:]) and not set(b[shared:]) & set(c[shared:])
    assert engine.scheduler.pool.used == shared + sum(len(s[shared:]) for s in (a, b, c))
    engine.clear()


def test_prompts_are_padded_to_the_next_of_a_few_widths(chunks):
    engine = engine_of(None, batch=1, prefill_chunk=64)
    seen, sizes = chunks(engine), engine.piece_widths
    for length in (5, 20, 60):
        engine.generate(jobs_of(list(range(1, 1 + length)), dataclasses.replace(ONE, max_tokens=2)))
        [width] = [shape[1] for kind, shape in seen if kind == "prefill"]
        assert width - engine.runner.tail == min(w for w in sizes if w >= length - 1)
        seen.clear()
    assert len(sizes) >= 3


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


def test_a_short_sample_ends_before_the_long_one_that_ran_when_it_came():
    """What a chunk in flight emits for others says nothing of who was not in it."""
    engine = warm()
    long = engine.add(jobs_of([5, 6], dataclasses.replace(ONE, max_tokens=90))[0])
    engine.step()
    short = engine.add(jobs_of([7, 8], dataclasses.replace(ONE, max_tokens=2), 1)[0])
    ended = []
    while engine.has_work:
        ended += [event.sequence for event in engine.step()]
    assert ended == [short, long]


def test_a_sample_that_has_ended_already_is_refused():
    progress = Progress([1] * 4, [-1.0] * 4, [(0, 1)])
    [job] = jobs_of([5, 6], dataclasses.replace(ONE, max_tokens=4))
    with pytest.raises(ValueError, match="4 tokens already, and there is room for 4"):
        warm().add(job, progress)


def test_what_was_warmed_up_compiles_nothing_whatever_comes():
    engine = warm()
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


def test_generate_keeps_no_sequence_that_has_ended():
    engine, alive = plain(), []
    seen: list[weakref.ref] = []
    finish = engine._finish

    def note(sequence, sample):
        finish(sequence, sample)
        seen.append(weakref.ref(sequence))

    engine._finish = note
    try:
        engine.generate(
            jobs_of([1, 2], dataclasses.replace(ONE, n=6)),
            lambda *_: alive.append(sum(one() is not None for one in seen)),
        )
    finally:
        del engine._finish
    assert len(seen) == 6 and alive[-1] < 6


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

    def traced():
        gc.collect()  # else what waits for the collector counts, 400 KB at times
        return tracemalloc.get_traced_memory()[0]

    requests(50)
    objects, device = held()
    for _ in range(10):
        requests(50)
    tracemalloc.start()  # which makes all the rest slower
    for _ in range(10):
        requests(50)
    before = traced()
    for _ in range(20):
        requests(50)
    grown = traced() - before
    tracemalloc.stop()
    after, device_after = held()
    assert engine.scheduler.pool.used == 0 and device_after == device
    assert after - objects < 200, "objects left behind by 4,000 samples"
    assert grown < 100_000, "bytes left behind by 2,000 samples"
    assert not engine.outstanding and not engine.unfinished.asked and not engine._in_flight


def test_one_page_per_sequence_is_the_contiguous_special_case():
    engine = engine_of("1_1_2", batch=2, page_size=0)
    assert engine.runner.page_size == engine.max_len
    prompts = [list(range(1, n)) for n in (3, 30, 7)]
    jobs = [j for i, p in enumerate(prompts) for j in jobs_of(p, dataclasses.replace(ONE, n=2), i)]
    samples, _ = engine.generate(jobs)
    assert [s.token_ids for s in samples] == tokens_of(jobs)
    assert engine.scheduler.pool.used == 0


def test_pieces_of_prompts_need_not_fit_the_pages():
    """Pieces of 48 positions, the last of them 16 or 32 wide, in pages of 32."""
    engine = engine_of("1_1_2", batch=1, page_size=32, prefill_chunk=48)
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
    (job,) = jobs_of([9, 9], dataclasses.replace(ONE, max_tokens=60), 4)
    sequence, expected = longest.add(job), longest.lengths.expected
    while len(sequence.tokens) <= expected(job.prompt_hash):
        longest.step()
    so_far = len(sequence.tokens)
    longest.abort(sequence)
    assert expected(job.prompt_hash) == so_far, "it would have been longer"
    pair, fed = [engine_of(None, batch=1, order="longest_first") for _ in range(2)], []
    for engine in pair:
        engine.runner.executables.by_key = first.runner.executables.by_key

        def queue(sequence, queue=engine.queue):
            fed.append(sequence.job.request)
            return queue(sequence)

        engine.queue = queue
    order_of_ends(Replicas(pair))
    assert fed == [1, 2, 3, 2, 3, 1], "one queue, whose order is the engines'"


def test_replicas_of_which_all_slots_run_know_that_others_wait():
    """As in one engine: a chunk ends when some of its slots are free for them."""
    engine, seen = engine_of(None, batch=2), []
    replicas, enqueue = Replicas([engine]), engine.runner.chunk

    def chunk(strategy, features, row_map, until, run):
        seen.append(int(until.leave_at))
        return enqueue(strategy, features, row_map, until, run)

    engine.runner.chunk = chunk
    for job in jobs_of([1, 2], dataclasses.replace(ONE, n=3)):
        replicas.add(job)
    while replicas.has_work:
        replicas.step()
    assert seen[0] == 1 and seen[-1] == 0


# --- abort, interruption ------------------------------------------------------------------------


def test_a_request_that_can_never_fit_is_refused_with_what_to_do():
    probe = engine_of(page_size=16)
    engine = engine_of(page_size=16, cache_bytes=4 * probe.runner.page_bytes)
    with pytest.raises(ValueError, match="may take 7 cache pages.*there are 3; raise cache_bytes"):
        engine.generate(jobs_of([1], dataclasses.replace(ONE, max_tokens=90)))
    with pytest.raises(ValueError, match="less than two pages"):
        engine_of(page_size=16, cache_bytes=10)
    assert engine.runner.pages == 4, "the budget holds, spare page and all"
    with pytest.raises(ValueError, match="page_size must be positive, or 0"):
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


def test_an_engine_may_be_told_to_use_fewer_slots_and_then_all_again(chunks):
    engine = warm()
    compiled, seen = engine.runner.compilations, chunks(engine)
    jobs = jobs_of([1, 2, 3], dataclasses.replace(ONE, n=8))
    engine.clear(slots=3)
    samples, _ = engine.generate(jobs)
    assert [s.token_ids for s in samples] == tokens_of(jobs)
    assert max(detail[1:] for kind, detail in seen if kind == "chunk") == (4, 3)
    engine.clear()
    engine.generate(jobs)
    assert max(detail[1:] for kind, detail in seen if kind == "chunk") == (8, 8)
    assert engine.runner.compilations == compiled
    for slots in (0, 9):
        with pytest.raises(ValueError, match="between 1 and 8"):
            engine.clear(slots)


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


def test_what_ended_in_a_swap_of_weights_cannot_be_aborted_any_more():
    engine = Replicas([engine_of(None, batch=1)])
    sequence = engine.add(jobs_of([3, 4], dataclasses.replace(ONE, max_tokens=2))[0])
    engine._feed()
    engine.engines[0].step(wait=False)
    engine.set_params(weights()[0])
    assert engine.abort(sequence) is None
    [event] = engine.step()
    assert event.sequence is sequence and len(event.sample.token_ids) == 2


def test_in_invariant_mode_one_program_runs_until_nobody_is_left():
    """Else the bits of a sample would depend on when its neighbours end."""
    unfinished = Unfinished(warm().runner, warm().limits)
    runner = SimpleNamespace(plan=SimpleNamespace(invariant=True), batch=8)

    def program(*params):
        found = [unfinished.make(jobs_of([1, 2], p)[0]) for p in params]
        for sequence in found:
            unfinished.add(sequence)
        return found, choose_program(runner, [8], unfinished, "off", found)

    [plain, other], both = program(ONE, dataclasses.replace(ONE, top_k=3))
    assert both[0].covers(other.features) and both[1] == 8
    unfinished.remove(other)
    assert choose_program(runner, [8], unfinished, "off", [plain]) == both
    unfinished.remove(plain)
    assert program(ONE)[1] == (plain.features.widened(), 8) != both


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
    added = [engine.add(s.job, s.progress()) for s in suspended]
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
    engine.check(jobs_of([1, 2, 3], dataclasses.replace(ONE, max_tokens=None))[0])


def test_engine_settings_are_checked():
    with pytest.raises(ValueError, match="order must be 'fifo' or 'longest_first', got 'lifo'"):
        EngineConfig(order="lifo")
    with pytest.raises(ValueError, match="chunk_tokens must be at least 1, got 0"):
        EngineConfig(chunk_tokens=0)
